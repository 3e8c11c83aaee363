r"""The tangent kernel: how outputs move together when heads are moved."""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention.averaged_heads import Heads
from meanformer.errors import Unsupported, check, check_choice
from meanformer.flows import Adaptive
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import tilt
from meanformer.numerics.arrays import matmul
from meanformer.training.data import Dataset
from meanformer.training.gradients import check_fits, check_heads, outputs
from meanformer.training.layer import Parameters
from meanformer.training.transformer import MeanFieldTransformer

# Beyond so many outputs the kernel is not formed: products with it are enough.
MOST_OUTPUTS = 4000
BLOCKS = ("all", "scores", "values")


def tangent_kernel(
    model: MeanFieldTransformer,
    data: Dataset,
    other: Dataset | None = None,
    *,
    block: str = "all",
) -> Float[Array, "o p"]:
    r"""Return the tangent kernel of a network on a data set, or between two.

    $$K_\nu = \int_0^1\!\!\int D_\theta T_\nu[\mu](x)\,D_\theta T_\nu[\mu'](x')^\top
      \,\mathrm d\nu_s\,\mathrm ds,$$
    so that along the gradient flow outputs obey $\dot T = -K(T - y)/N$, and
    $|\nabla R|^2 = r^\top K r/N^2 \ge 2\,(\lambda_{\min}/N)\,R$ for the squared error
    with residuals $r$. Outputs are all coordinates of all queries, in order.

    Args:
        model: the transformer.
        data: contexts and queries.
        other: those of the columns; the same by default. With
            $K' = K(\text{other}, \text{data})$, regression with the kernel predicts
            $T - K'K^{-1}(T - y)$.
        block: `"all"` particles; `"scores"`, queries and keys alone; or `"values"`, all
            but them.

    Returns:
        The kernel. Cost: a reverse pass of one context for each output; memory for the
        derivatives of all outputs in all particles.
    """
    _check(model, data)
    check_choice("block", block, BLOCKS)
    rows = _jacobian(model, data, block)
    if other is None:
        return matmul(rows, rows.T)
    _check(model, other)
    return matmul(rows, _jacobian(model, other, block).T)


@eqx.filter_jit
def _jacobian(model, data: Dataset, block: str) -> Float[Array, "o p"]:
    """Return the derivatives of outputs in particles, scaled to their metric."""

    def of_one(index):
        one = data.some(index[None])

        def values(parameters: Parameters):
            return outputs(model.with_parameters(parameters), one).ravel()

        def row(derivative):
            changes = _part(model.in_units(derivative, 1 / 2), block)
            return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(changes)])

        return jax.vmap(row)(jax.jacrev(values)(model.parameters))

    rows = jax.lax.map(of_one, jnp.arange(len(data)))
    return rows.reshape(-1, rows.shape[-1])


def _part(changes: Parameters, block: str) -> Parameters:
    """Return changes with those outside of a block left out."""
    heads = changes.heads
    if block == "scores":
        return Parameters(heads._replace(value=None, value_bias=None), None)
    if block == "values":
        heads = heads._replace(query=None, key=None)
        return Parameters(heads, changes.neurons)
    return changes


class Spectrum(NamedTuple):
    """The smallest and the largest eigenvalue of a tangent kernel."""

    smallest: float
    largest: float


def spectrum(model: MeanFieldTransformer, data: Dataset) -> Spectrum:
    """Return the extreme eigenvalues of the tangent kernel.

    They are those of the dense kernel for up to 4000 outputs, and found by Lanczos with
    one forward and one reverse pass for each product beyond.
    """
    _check(model, data)
    count = math.prod(data.queries.shape)
    if count <= MOST_OUTPUTS:
        values = np.linalg.eigvalsh(np.asarray(tangent_kernel(model, data)))
        return Spectrum(float(values[0]), float(values[-1]))
    from scipy.sparse.linalg import LinearOperator, eigsh

    product = kernel_product(model, data)
    dtype = data.tokens.dtype

    def multiply(vector: np.ndarray) -> np.ndarray:
        return np.asarray(product(jnp.asarray(vector.ravel(), dtype)))

    def largest_of(multiply) -> float:
        operator = LinearOperator((count, count), matvec=multiply, dtype=dtype)
        found = eigsh(operator, k=1, which="LA", return_eigenvectors=False)
        return float(found[0])

    largest = largest_of(multiply)
    # The small end is found where it is the large one.
    gap = largest_of(lambda vector: largest * vector.ravel() - multiply(vector))
    return Spectrum(largest - gap, largest)


def kernel_product(model: MeanFieldTransformer, data: Dataset):
    """Return a function that multiplies a vector of outputs by the tangent kernel."""
    _check(model, data)

    @jax.jit
    def product(vector: Float[Array, " o"]) -> Float[Array, " o"]:
        def values(parameters: Parameters):
            return outputs(model.with_parameters(parameters), data).ravel()

        _, pull = jax.vjp(values, model.parameters)
        (found,) = pull(vector)
        return jax.jvp(values, (model.parameters,), (model.in_units(found),))[1]

    return product


def head_kernel(
    heads: Heads,
    data: Dataset,
    *,
    beta: float | Float[Array, ""] = 1.0,
    block: str = "all",
) -> Float[Array, "o o"]:
    r"""Return the tangent kernel of one layer of softmax heads, in closed form.

    $$K = \int\langle m, m'\rangle I + \beta^2\langle x, x'\rangle\,
        VCK^\top KC'V^\top + \beta^2\langle Qx, Qx'\rangle\,VCC'V^\top\,\mathrm d\nu
        \;(+\,I \text{ with a value bias}),$$
    with mean $m$ and covariance $C$ of the tilted context: the parts of $V$, $Q$, $K$.

    Args:
        heads: heads side by side, with an axis in front.
        data: contexts, with one query each.
        beta: the inverse temperature.
        block: as for `tangent_kernel`.
    """
    return _head_kernels(heads, data, beta, block).mean(axis=0)


def head_kernel_error(
    heads: Heads,
    data: Dataset,
    *,
    beta: float | Float[Array, ""] = 1.0,
    block: str = "all",
) -> Float[Array, "o o"]:
    """Return the standard errors of `head_kernel`, for heads drawn from a law.

    The kernel of M independent heads estimates that of their law; its entries are off
    by about so much. The arguments are those of `head_kernel`, with two heads at least.
    """
    check(len(heads.query) > 1, "heads has one head; a spread needs two at least.")
    kernels = _head_kernels(heads, data, beta, block)
    return kernels.std(axis=0, ddof=1) / math.sqrt(len(kernels))


def _head_kernels(heads: Heads, data: Dataset, beta, block: str):
    """Return the kernel of each head, after checks."""
    check_choice("block", block, BLOCKS)
    check_heads(heads, data.dimension)
    check(
        data.queries.shape[1] == 1,
        f"data has {data.queries.shape[1]} queries for each context; one is needed.",
    )
    return _kernels(heads, data, jnp.asarray(beta, data.tokens.dtype), block)


@eqx.filter_jit
def _kernels(heads: Heads, data: Dataset, beta, block: str):
    count, _, size = data.queries.shape
    x = data.queries[:, 0]

    def seen_by(head: Heads, tokens, weights, query):
        ascent = beta * matmul(head.key.T, matmul(head.query, query))
        tilted = tilt(TokenCloud(tokens, weights), matmul(tokens, ascent))[1]
        return tilted.mean(), tilted.covariance()

    def of_head(head: Heads):
        means, spreads = jax.vmap(seen_by, in_axes=(None, 0, 0, 0))(
            head, data.tokens, data.weights, x
        )
        eye = jnp.eye(size, dtype=x.dtype)
        total = jnp.zeros((count, size, count, size), x.dtype)
        if block != "scores":
            shared = matmul(means, means.T)
            shared = shared if head.value_bias is None else shared + 1
            total += shared[:, None, :, None] * eye[None, :, None, :]
        if block != "values":
            moved = matmul(head.value[None], spreads)
            by_key = matmul(moved, head.key.T[None])
            inner = jnp.einsum("aik,bjk->aibj", by_key, by_key)
            total += beta**2 * matmul(x, x.T)[:, None, :, None] * inner
            asked = matmul(x, head.query.T)
            inner = jnp.einsum("aik,bjk->aibj", moved, moved)
            total += beta**2 * matmul(asked, asked.T)[:, None, :, None] * inner
        return total.reshape(count * size, count * size)

    return jax.lax.map(of_head, heads)


def _check(model: MeanFieldTransformer, data: Dataset) -> None:
    check_fits(model, data)
    check(data.queries.shape[1] > 0, "data has no queries; give its tokens as queries.")
    if isinstance(model.method, Adaptive):
        raise Unsupported(
            "the tangent kernel is that of a network: give the transformer a method of "
            "fixed steps, such as flows.RK4()."
        )
