"""Data sets that a layer of heads can fit, and some that it cannot."""

import jax.random as jr
import numpy as np

from meanformer import training

QUERY = (1.0, 0.5)


def dependent_contexts() -> list[np.ndarray]:
    """Three contexts whose means under every tilt are related: $m_3 = m_1 + m_2$."""
    a, b, c, e = np.array([[1, 0], [-0.5, 0.8], [0.3, -1], [-0.2, 0.4]])
    return [np.stack(rows) for rows in ([a, b], [c, e], [a + c, a + e, b + c, b + e])]


def independent_contexts() -> list[np.ndarray]:
    """The same with one token moved, which ends the relation."""
    first, second, third = dependent_contexts()
    return [first, second, third + np.array([[0, 0], [0, 0], [0, 0], [0.5, 0]])]


def offset_by(model, contexts, queries, offsets) -> training.Dataset:
    """A data set whose targets are where a network ends, moved by offsets."""
    data = training.Dataset(contexts, queries)
    ends = np.asarray(training.outputs(model, data))[:, 0]
    return data.with_targets(ends + np.asarray(offsets))


def null_offsets(size: float = 0.1) -> np.ndarray:
    """Offsets along the direction in which no head can move the dependent contexts."""
    return size * np.outer(np.array([-1, -1, 1]) / np.sqrt(3), (1, 0))


def network(layers: int, heads: int, seed: int, **options):
    """Heads with normal entries, drawn by a seed."""
    return training.MeanFieldTransformer.draw(
        layers, heads, 2, key=jr.key(seed), **options
    )
