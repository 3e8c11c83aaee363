"""Tasks that are solved in context, and the least errors that can be reached."""

from collections.abc import Callable, Sequence
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from meanformer.attention import Linear
from meanformer.attention.abstract import AbstractAttention
from meanformer.errors import (
    as_finite_array,
    as_integer,
    as_key,
    as_number,
    check,
    check_shape,
    is_concrete,
)
from meanformer.measures import TokenCloud
from meanformer.numerics.arrays import matmul
from meanformer.training.data import Dataset, End
from meanformer.training.gradients import outputs
from meanformer.training.transformer import MeanFieldTransformer
from meanformer.typing import ArrayLike, Key


class LinearRegression(eqx.Module):
    r"""Linear regression in context: what one step of gradient descent can reach.

    With $w\sim\mathcal N(0, I)$, $x\sim\mathcal N(0, \Sigma)$ and labels
    $y_i = \langle w, x_i\rangle + \sigma\varepsilon_i$, the step from zero predicts
    $\bigl\langle x, P\,\tfrac1n\sum_i y_ix_i\bigr\rangle$. Its risk is
    $$\mathbb E\bigl(\hat y - \langle w, x\rangle\bigr)^2 = \operatorname{tr}
      \Sigma\bigl(PCP^\top - P\Sigma - \Sigma P^\top + I\bigr), \qquad
      C = \Sigma\bigl((1 + \tfrac1n)\Sigma
        + \tfrac{\operatorname{tr}\Sigma + \sigma^2}{n} I\bigr).$$

    Args:
        examples: the number $n$ of examples in a context.
        covariance: the matrix $\Sigma$.
        noise: the standard deviation $\sigma$ of labels.
    """

    examples: int = eqx.field(static=True)
    covariance: Float[Array, "d d"]
    noise: float

    def __check_init__(self):
        as_integer("examples", self.examples, least=1)

    @property
    def preconditioner(self) -> Float[Array, "d d"]:
        r"""The best matrix, $P = C^{-1}\Sigma$."""
        return jnp.linalg.inv(self._spread)

    @property
    def optimal_step(self) -> Float[Array, ""]:
        r"""The best multiple of the identity, $n/(n+d+1+\sigma^2)$ for $\Sigma = I$."""
        covariance = self.covariance
        square = jnp.sum(covariance**2)
        return square / jnp.sum(matmul(covariance, self._spread) * covariance)

    @property
    def optimal_risk(self) -> Float[Array, ""]:
        r"""The least risk, $d(d+1+\sigma^2)/(n+d+1+\sigma^2)$ for $\Sigma = I$."""
        return self.risk(self.preconditioner)

    def risk(self, matrix: ArrayLike) -> Float[Array, ""]:
        """Return the risk of a step with this matrix; zeros predict zero.

        Args:
            matrix: the matrix $P$.
        """
        covariance = self.covariance
        matrix = as_finite_array("matrix", matrix, covariance.shape, covariance.dtype)
        moved = matmul(covariance, matrix)
        square = matmul(matmul(moved, covariance), self._spread)
        return (
            jnp.sum(square * matrix)
            - 2 * jnp.sum(moved * covariance)
            + jnp.trace(covariance)
        )

    @property
    def _spread(self) -> Float[Array, "d d"]:
        count, covariance = self.examples, self.covariance
        level = (jnp.trace(covariance) + self.noise**2) / count
        return (1 + 1 / count) * covariance + level * jnp.eye(
            len(covariance), dtype=covariance.dtype
        )


def linear_regression(
    count: int,
    examples: int,
    dimension: int,
    *,
    key: Key,
    noise: float = 0.0,
    covariance: ArrayLike | None = None,
) -> tuple[Dataset, LinearRegression]:
    r"""Draw contexts of examples $(x_i, y_i)$ and queries $(x, 0)$, each with its $w$.

    Args:
        count: how many contexts.
        examples: how many examples in each.
        dimension: the dimension of the $x_i$; tokens have one more.
        key: a random key.
        noise: the standard deviation of labels.
        covariance: that of the $x_i$; the identity by default.

    Returns:
        The contexts with targets $\langle w, x\rangle$, for `prediction_error`; and
        what is known of the task.
    """
    for name, given in (("count", count), ("examples", examples)):
        as_integer(name, given, least=1)
    noise = as_number("noise", noise, "a number, zero or more", least=0)
    as_integer("dimension", dimension, least=1)
    given = jnp.eye(dimension) if covariance is None else covariance
    covariance = as_finite_array("covariance", given, (dimension, dimension))
    root = jnp.linalg.cholesky(covariance)
    check(
        not is_concrete(root) or bool(jnp.isfinite(root).all()),
        "covariance is not positive definite; it must be, and symmetric.",
    )
    shape = (count, examples + 1, dimension)
    drawn = _regressions(as_key(key), root, noise, shape)
    return Dataset(*drawn), LinearRegression(examples, covariance, noise)


@partial(jax.jit, static_argnums=3)
def _regressions(key, root, noise, shape):
    """Return tokens, queries and targets."""
    key_w, key_x, key_noise = jr.split(key, 3)
    slopes = jr.normal(key_w, (shape[0], shape[2], 1), root.dtype)
    points = matmul(jr.normal(key_x, shape, root.dtype), root.T)
    values = matmul(points, slopes)
    noises = jr.normal(key_noise, values[:, 1:].shape, root.dtype)
    labels = values.at[:, :-1].add(noise * noises).at[:, -1].set(0)
    both = jnp.concatenate([points, labels], axis=2)
    return both[:, :-1], both[:, -1], values[:, -1, 0]


def teacher_student(
    model: MeanFieldTransformer,
    contexts: Sequence[TokenCloud | ArrayLike] | ArrayLike,
    queries: ArrayLike,
) -> Dataset:
    """Return contexts and queries with what a teacher makes of them as targets.

    The teacher has no risk. A head of zeros asks for the mean of the context.

    Args:
        model: the teacher.
        contexts: as for `Dataset`; likewise `queries`.
        queries: at least one for each context.
    """
    data = Dataset(contexts, queries)
    return data.with_targets(outputs(model, data))


def next_token(
    count: int, examples: int, dimension: int, *, key: Key
) -> tuple[Dataset, float]:
    r"""Draw sequences $x_{t+1} = Wx_t$ to be continued, each with a $W$ of its own.

    The first token is normal and $W$ a uniformly random orthogonal matrix. A context
    holds the pairs $(x_t, x_{t+1})$ for $t < n$, and the query is $(x_n, 0)$.

    The best prediction of $Wx_n$ is least squares of least norm: $W$ on the part of
    $x_n$ in the span of the $x_t$; the rest is as likely to go one way as the other.
    Each token more leaves of it $\tfrac{d-n-1}{d-n}$ on average, so that the least risk
    $\mathbb E|\hat y - Wx_n|^2$ is $d - n$, and zero from $n = d$ on. Zero has the
    risk $d$.

    Args:
        count: how many contexts.
        examples: how many pairs $n$ in each.
        dimension: the dimension $d$ of the $x_t$; tokens have twice as many.
        key: a random key.

    Returns:
        The contexts with targets $x_{n+1}$, for `prediction_error`; and the least risk.
    """
    given = {"count": count, "examples": examples, "dimension": dimension}
    for name, number in given.items():
        as_integer(name, number, least=1)

    def of_one(key):
        key_turn, key_start = jr.split(key)
        turn = jr.orthogonal(key_turn, dimension)

        def step(x, _):
            return matmul(turn, x), x

        start = jr.normal(key_start, (dimension,))
        return jax.lax.scan(step, start, length=examples + 2)[1]

    paths = jax.vmap(of_one)(jr.split(as_key(key), count))
    pairs = jnp.concatenate([paths[:, :-1], paths[:, 1:]], axis=2)
    queries = pairs[:, -1].at[:, dimension:].set(0)
    data = Dataset(pairs[:, :-1], queries, paths[:, -1])
    return data, float(max(dimension - examples, 0))


def prediction_error(end: End, target: Float[Array, "..."]) -> Float[Array, ""]:
    r"""Return the squared error of a prediction, $|\hat y - y|^2$; it is not halved.

    Layers leave in the place of a label the label less the prediction. A query comes
    without a label, so that minus its last coordinates are the prediction.
    """
    return jnp.sum((end.queries[0, -target.size :] + target.ravel()) ** 2)


def regression_layers(
    matrix: ArrayLike,
    *,
    steps: int = 1,
    labels: int = 1,
    kind: Callable[..., AbstractAttention] = Linear,
    beta: float = 1.0,
) -> MeanFieldTransformer:
    r"""Return layers of one head that make steps of regression.

    Each subtracts from every label, and from the zero of the query, what is predicted
    from the labels that are left, $y_i \leftarrow y_i - \hat y(x_i)$. Linear attention
    predicts $\hat y(x) = \beta\langle x, P\,\tfrac1n\sum_j y_jx_j\rangle$: these are
    steps of gradient descent with the preconditioner $\beta P$. Softmax attention with
    the identity predicts $\sum_j y_je^{\beta\langle x, x_j\rangle}
    / \sum_je^{\beta\langle x, x_j\rangle}$: this is kernel smoothing.

    Args:
        matrix: the matrix $P$.
        steps: how many layers.
        labels: how many coordinates a label has.
        kind: the attention.
        beta: the inverse temperature.
    """
    matrix = as_finite_array("matrix", matrix, (None, None))
    size, count = len(matrix), as_integer("steps", steps, least=1)
    check_shape("matrix", matrix, (size, size))
    both = size + as_integer("labels", labels, least=1)
    points = jnp.eye(size, both, dtype=matrix.dtype)
    # The network divides the step of each layer by their number.
    entries = jnp.where(jnp.arange(both) < size, 0, -count)
    value = jnp.diag(entries.astype(matrix.dtype))
    query, key, value = (
        jnp.tile(one, (count, 1, 1, 1))
        for one in (points, matmul(matrix, points), value)
    )
    return MeanFieldTransformer(query, key, value, kind=kind, beta=beta)


def effective_matrix(model: MeanFieldTransformer) -> Float[Array, "d d"]:
    r"""Return the $P$ of one layer of linear attention, whatever its heads.

    What it predicts is $\bigl\langle x, P\,\tfrac1n\sum_iy_ix_i\bigr\rangle$ and a part
    that is even in the labels, which is none of this step and can only add to the risk.

    Args:
        model: the layer, for tokens with a label of one coordinate.
    """
    check(model.layers == 1, f"model has {model.layers} layers; one can be a step.")
    check(
        model.layer.kind is Linear,
        f"model has heads of the kind {model.layer.kind}; they must be Linear.",
    )
    heads, beta = model.parameters.heads, model.layer.beta
    scores = matmul(heads.key[0].mT, heads.query[0])
    outputs = heads.value[0, :, -1]
    of_points = outputs[:, -1, None, None] * scores[:, :-1, :-1].mT
    of_labels = scores[:, -1, :-1, None] * outputs[:, None, :-1]
    return -beta * (of_points + of_labels).mean(axis=0)
