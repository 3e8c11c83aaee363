"""A training step, its gradient included, against PyTorch; memory of both."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import alternate, python
from benchmarks.result import Result
from meanformer import training

# Contexts, tokens, heads, layers, dimension.
SIZES = {
    (16, 16, 8, 8, 16): None,
    (8, 64, 8, 8, 16): 1.0,
    (8, 128, 8, 8, 32): 1.0,
    (4, 256, 4, 16, 64): 1.0,
    (2, 512, 4, 4, 64): 1.0,
}
TINY = (3, 4, 64, 1, 2)
ENGINES = {
    "Checkpointed": training.Checkpointed(),
    "Reversible": training.Reversible(),
    "Automatic": training.Automatic(),
    "Automatic, rematerialised": training.Automatic(True),
}
FORMS = ("fused", "dense", "heads as rows")
# What it takes to start is not counted; compiling is.
SCRIPT = """
import sys
import numpy as np
from benchmarks.measure import peak
from benchmarks.training_step import arrays_of, ours, theirs

who, *size = sys.argv[1:]
arrays = arrays_of(tuple(map(int, size)), np.float32)
if who == "meanformer":
    import jax
    jax.block_until_ready(jax.numpy.ones((8, 8)) @ jax.numpy.ones((8, 8)))
else:
    import torch
    torch.ones(8, 8, requires_grad=True).square().sum().backward()
before = peak()
step = ours(arrays) if who == "meanformer" else theirs(arrays, who)
step()
sys.stdout.write(str(peak() - before))
"""


def results() -> Iterator[Result]:
    for size, target in SIZES.items():
        count, tokens, heads, layers, dimension = size
        name = f"step, N={count}, n={tokens}, M={heads}, L={layers}, d={dimension}"
        seconds = alternate(contestants(size), calls=4)
        best = min(FORMS, key=lambda form: seconds[form])
        mine = seconds["meanformer"]
        yield Result(name, f"torch, {best}", mine, seconds[best], "s", target)
        if target is not None:
            yield Result(
                f"memory of a {name}",
                f"torch, {best}",
                extra("meanformer", size),
                extra(best, size),
                "MiB",
            )
        yield from against_engines(name, size, np.float32)
    with jax.enable_x64(True):
        yield from against_engines("tiny step, float64", TINY, np.float64)


def against_engines(name: str, size: tuple, precision: type) -> Iterator[Result]:
    """Compare the default engine with the others."""
    arrays = arrays_of(size, precision)
    steps = {label: ours(arrays, engine) for label, engine in ENGINES.items()}
    seconds = alternate({"Stored": ours(arrays), **steps}, rounds=8, calls=4)
    for label in ENGINES:
        yield Result(name, f"{label}()", seconds["Stored"], seconds[label], "s")


def extra(who: str, size: tuple) -> float:
    """Return by how many MiB one step raises the peak of a fresh process (Linux)."""
    return float(python(SCRIPT, who, *map(str, size)))


def arrays_of(size: tuple, precision: type) -> list[np.ndarray]:
    """Draw query, key and value matrices, contexts, queries and targets."""
    count, tokens, heads, layers, dimension = size
    random = np.random.default_rng(0)
    shapes = [(layers, heads, dimension, dimension)] * 3
    shapes += [(count, tokens, dimension), (count, dimension), (count, dimension)]
    drawn = [random.standard_normal(shape) for shape in shapes]
    drawn[:3] = [matrices / np.sqrt(dimension) for matrices in drawn[:3]]
    return [array.astype(precision) for array in drawn]


def contestants(size: tuple) -> dict:
    """Return a step of ours and of PyTorch in all forms; their gradients agree."""
    arrays = arrays_of(size, np.float32)
    steps = {"meanformer": ours(arrays)}
    expected = steps["meanformer"]()
    for form in FORMS:
        steps[form] = theirs(arrays, form)
        for one, other in zip(steps[form](), expected, strict=True):
            scale = float(np.abs(other).max())
            np.testing.assert_allclose(one, other, atol=1e-4 * scale)
    return steps


def ours(arrays: list[np.ndarray], engine: training.Stored | None = None):
    """Return a compiled step: the gradient in the query, key and value matrices."""
    query, key, value, contexts, queries, targets = arrays
    beta = jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    model = training.MeanFieldTransformer(query, key, value, beta=beta)
    data = training.Dataset(contexts, queries, targets)

    @jax.jit
    def step(parameters, data):
        moved = model.with_parameters(parameters)
        heads = training.gradient(moved, data, engine=engine).parameters.heads
        return heads.query, heads.key, heads.value

    return lambda: jax.block_until_ready(step(model.parameters, data))


def theirs(arrays: list[np.ndarray], form: str):
    """Return the same step by autograd, all heads of a layer at once."""
    import torch

    *matrices, contexts, queries, targets = map(torch.from_numpy, arrays)
    matrices = [one.clone().requires_grad_() for one in matrices]
    layers, heads, _, size = matrices[0].shape
    count = contexts.shape[1]

    def step():
        for one in matrices:
            one.grad = None
        points = torch.cat([contexts, queries[:, None]], 1)
        for query, key, value in zip(*matrices, strict=True):
            moved = FORM_OF[form](points, points[:, :count], query, key, value)
            points = points + moved / (layers * heads)
        loss = ((points[:, count] - targets) ** 2).sum(1).mean() / 2
        loss.backward()
        # In mean-field units, like ours.
        return [layers * heads * torch.as_tensor(one.grad) for one in matrices]

    return step


def split_heads(points, matrices):
    """Apply a matrix of each head to all points, by one product."""
    heads, rows, size = matrices.shape
    return (points @ matrices.reshape(heads * rows, size).T).unflatten(2, (heads, rows))


def read_out(means, value):
    """Sum the values of the means of all heads, by one product."""
    return means.flatten(2) @ value.mT.flatten(0, 1)


def fused(points, tokens, query, key, value):
    """Attend by `scaled_dot_product_attention`."""
    import torch

    queries = split_heads(points, query).transpose(1, 2)
    keys = split_heads(tokens, key).transpose(1, 2)
    shared = tokens[:, None].expand(-1, len(query), -1, -1)
    attend = torch.nn.functional.scaled_dot_product_attention
    means = attend(queries, keys, shared, scale=query.shape[-1] ** -0.5)
    return read_out(means.transpose(1, 2), value)


def dense(points, tokens, query, key, value):
    """Attend by the softmax of all scores, a batch of heads."""
    queries = split_heads(query.shape[-1] ** -0.5 * points, query).transpose(1, 2)
    keys = split_heads(tokens, key).transpose(1, 2)
    means = (queries @ keys.mT).softmax(-1) @ tokens[:, None]
    return read_out(means.transpose(1, 2), value)


def as_rows(points, tokens, query, key, value):
    """Attend with the heads as rows of one matrix, since they share the tokens."""
    scores = query.shape[-1] ** -0.5 * key.mT @ query
    rows = split_heads(points, scores).flatten(1, 2)
    means = (rows @ tokens.mT).softmax(-1) @ tokens
    return read_out(means.unflatten(1, (points.shape[1], len(query))), value)


FORM_OF = dict(zip(FORMS, (fused, dense, as_rows), strict=True))
