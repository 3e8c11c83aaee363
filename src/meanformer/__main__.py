"""`python -m meanformer`: the command line."""

from meanformer.cli import main

if __name__ == "__main__":
    main()
