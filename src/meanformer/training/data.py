"""Data sets of contexts, queries and targets; losses; the risk."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import as_finite_array, as_float_array, check
from meanformer.measures import AbstractMeasure, TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.measures.comparison import Atoms
from meanformer.measures.operations import batch
from meanformer.typing import ArrayLike


class End(NamedTuple):
    """Where a network has carried one context and its queries.

    Attributes:
        queries: the queries.
        tokens: the tokens.
        weights: their masses.
    """

    queries: Float[Array, "m d"]
    tokens: Float[Array, "n d"]
    weights: Float[Array, " n"]


# A loss takes where a context ends, and its target.
Loss = Callable[[End, Any], Float[Array, ""]]


class Dataset(eqx.Module):
    r"""Contexts $\mu^k$, queries $x^k$ and targets $y^k$.

    Contexts are padded with tokens of weight zero; the rest takes their precision.

    Args:
        contexts: token clouds, or arrays of points, or one array of shape (N, n, d).
        queries: of shape (N, d), or (N, m, d) for several; none if the loss looks at
            the tokens alone.
        targets: what the loss compares with, one for each context: by default points
            of the shape of the queries, or one for each token if there are none.
    """

    tokens: Float[Array, "N n d"]
    weights: Float[Array, "N n"]
    queries: Float[Array, "N m d"]
    targets: Any

    def __init__(
        self,
        contexts: Sequence[TokenCloud | ArrayLike] | ArrayLike,
        queries: ArrayLike | None = None,
        targets: ArrayLike | None = None,
    ):
        self.tokens, self.weights = _stacked(contexts)
        count, _, size = self.tokens.shape
        none = jnp.zeros((count, 0, size), self.tokens.dtype)
        given = as_float_array("queries", none if queries is None else queries)
        told = f"queries has shape {given.shape}; it must be ({count}, {size}), or"
        given = given[:, None] if given.ndim == 2 else given
        check(given.shape[::2] == (count, size), f"{told} ({count}, m, {size}).")
        shape = (count, None, size)
        self.queries = as_finite_array("queries", given, shape, self.tokens.dtype)
        self.targets = self._checked_targets(targets)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def dimension(self) -> int:
        """Dimension of tokens and queries."""
        return self.tokens.shape[2]

    @property
    def points(self) -> Float[Array, "N r d"]:
        """Tokens and queries, one after the other."""
        return jnp.concatenate([self.tokens, self.queries], axis=1)

    @property
    def contexts(self) -> list[TokenCloud]:
        """The contexts as token clouds, without padding."""
        present = np.asarray(self.weights) > 0
        rows = zip(self.tokens, self.weights, present, strict=True)
        return [TokenCloud(points[here], masses[here]) for points, masses, here in rows]

    def end(self, points: Float[Array, "r d"], weights: Float[Array, " n"]) -> End:
        """Return points of one context as tokens and queries.

        Absent tokens have no derivative.
        """
        count = self.tokens.shape[1]
        fixed = jax.lax.stop_gradient(points[:count])
        tokens = jnp.where((weights > 0)[:, None], points[:count], fixed)
        return End(points[count:], tokens, weights)

    def with_targets(self, targets: Any) -> "Dataset":
        """Return the same contexts and queries with other targets."""
        return eqx.tree_at(
            lambda data: data.targets,
            self,
            self._checked_targets(targets),
            is_leaf=lambda leaf: leaf is None,
        )

    def some(self, indices: Any) -> "Dataset":
        """Return some of the triples."""
        chosen = indices if isinstance(indices, slice) else jnp.asarray(indices)
        return jax.tree.map(lambda leaf: leaf[chosen], self)

    def conflict_floor(self) -> float:
        r"""Return the risk that equal contexts with unequal targets leave at least.

        $$\frac1{2N}\sum_k|y^k - \bar y^k|^2,$$
        with $\bar y^k$ the mean target of equal queries in contexts that are equal to
        context $k$, in any order of tokens, split or not. `injectivity_report` finds
        those that are equal up to rounding, and other relations.
        """
        shape = self.queries.shape
        check(np.shape(self.targets) == shape, f"targets must have the shape {shape}.")
        classes: dict[bytes, list] = {}
        for cloud, *pairs in zip(
            self.contexts, self.queries, self.targets, strict=True
        ):
            atoms = Atoms(np.asarray(cloud.points), np.asarray(cloud.weights), 0).joined
            rows = np.column_stack(atoms[:2])
            # Zero has no sign.
            context = (rows[np.lexsort(rows.T)] + 0.0).tobytes()
            for query, target in zip(*map(np.asarray, pairs), strict=True):
                name = context + (query + 0.0).tobytes()
                classes.setdefault(name, []).append(np.float64(target))
        spread = sum(
            len(same) * np.var(same, axis=0).sum() for same in classes.values()
        )
        return float(spread) / (2 * len(self))

    def _checked_targets(self, targets: Any) -> Any:
        if targets is None:
            return None
        is_list = isinstance(targets, list | tuple) and self.queries.shape[1] == 0
        if is_list and len({np.shape(one) for one in targets}) > 1:
            # One for each token, padded as the tokens are.
            targets = _stacked(targets)[0]
        array = jnp.asarray(targets)
        check(
            array.ndim > 0 and len(array) == len(self.tokens),
            f"targets has shape {array.shape}; it needs one for each of the "
            f"{len(self.tokens)} contexts.",
        )
        if jnp.issubdtype(array.dtype, jnp.inexact):
            dtype = self.tokens.dtype
            array = as_finite_array("targets", targets, array.shape, dtype)
        is_single = array.ndim == 2 and self.queries.shape[1] == 1
        return array[:, None] if is_single else array


def _stacked(contexts) -> tuple[Float[Array, "N n d"], Float[Array, "N n"]]:
    """Return tokens and weights of contexts, padded to the same size."""
    is_list = isinstance(contexts, Sequence | np.ndarray | jax.Array)
    check(is_list, f"contexts is a {type(contexts).__name__}; it must be a list.")
    check(len(contexts) > 0, "contexts is empty; at least one is needed.")
    if isinstance(contexts, np.ndarray | jax.Array):
        told = f"contexts has shape {contexts.shape}; "
        check(contexts.ndim == 3, f"{told}it must be (N, n, d), n tokens in each.")
        check(contexts.size > 0, f"{told}tokens are missing.")
        tokens = as_finite_array("contexts", contexts, contexts.shape)
        return tokens, jnp.full(tokens.shape[:2], 1 / tokens.shape[1], tokens.dtype)
    clouds: list[Any] = [
        one if isinstance(one, AbstractMeasure) else TokenCloud(one) for one in contexts
    ]
    told = "contexts have positions, which training does not know; leave them out."
    for one in clouds:
        check_cloud("a context", one)
        check(one.positions is None, told)
    stacked = batch(clouds)
    # What absent tokens have must not overflow.
    present = (stacked.weights > 0)[:, :, None]
    return jnp.where(present, stacked.points, 0), stacked.weights


def squared_error(end: End, target: Float[Array, "..."]) -> Float[Array, ""]:
    r"""Return $\tfrac12|z - y|^2$, summed over queries.

    Without queries every token has a target: $\int\tfrac12|x_i - y_i|^2\mathrm d\mu$.
    """
    if len(end.queries):
        _check_target(target, end.queries)
        return jnp.sum((end.queries - target) ** 2) / 2
    _check_target(target, end.tokens)
    return end.weights @ jnp.sum((end.tokens - target) ** 2, axis=1) / 2


def _check_target(target, points) -> None:
    check(target is not None, "data has no targets; squared_error needs some.")
    check(
        target.shape == points.shape,
        f"a target has shape {target.shape}; squared_error compares it with points of "
        f"shape {points.shape}; other targets need a loss of their own.",
    )
