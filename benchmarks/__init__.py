"""Speed and memory of meanformer, each number next to that of an opponent.

`python -m benchmarks` runs all of them, `--only velocity` some. Ours and the opponent's
calls alternate within one run, so that a busy machine slows both.
"""
