"""What gradient descent and least squares predict from the examples of a context."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.numerics.arrays import matmul
from meanformer.training import Dataset
from meanformer.typing import ArrayLike


@partial(jax.jit, static_argnames="steps")
def gradient_descent(
    data: Dataset, matrix: ArrayLike, *, steps: int = 1
) -> Float[Array, " N"]:
    r"""Return what gradient descent on each context predicts for its query.

    $$w \leftarrow w - P\,\tfrac1n\sum_i(\langle w, x_i\rangle - y_i)\,x_i$$

    Args:
        data: contexts of examples with a label of one coordinate.
        matrix: the matrix $P$.
        steps: how many steps from zero.
    """

    def of_one(tokens, weights, queries):
        points, labels = tokens[:, :-1], tokens[:, -1]

        def step(slope, _):
            errors = weights * (matmul(points, slope) - labels)
            return slope - matmul(matrix, matmul(errors, points)), None

        zero = jnp.zeros_like(queries[0, :-1])
        return queries[0, :-1] @ jax.lax.scan(step, zero, length=steps)[0]

    return jax.vmap(of_one)(data.tokens, data.weights, data.queries)


@jax.jit
def ridge(data: Dataset, penalty: float | Array = 0.0) -> Float[Array, " N"]:
    r"""Return what ridge regression on each context predicts for its query.

    It minimises $\sum_i(\langle w, x_i\rangle - y_i)^2 + \lambda|w|^2$, and without a
    penalty has the least norm among all that minimise. With $\lambda = \sigma^2$ no
    prediction has a smaller risk.

    Args:
        data: contexts of examples with a label of one coordinate, all of weight $1/n$.
        penalty: the number $\lambda$.
    """
    size = data.dimension - 1

    def of_one(tokens, queries):
        shrink = penalty**0.5 * jnp.eye(size, dtype=tokens.dtype)
        points = jnp.concatenate([tokens[:, :-1], shrink])
        labels = jnp.pad(tokens[:, -1], (0, size))
        return queries[0, :-1] @ jnp.linalg.lstsq(points, labels)[0]

    return jax.vmap(of_one)(data.tokens, data.queries)
