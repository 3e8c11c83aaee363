r"""Elements of the algebra as transformers: explicit weights, with a certificate.

A token carries $(x, g, p, s)$: what it is, what a head has seen, the product and the
sum so far. One attention layer and one perceptron work off one factor.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float

from meanformer.attention import (
    AbstractInContextMap,
    MultiHead,
    Perceptron,
    Residual,
    Softmax,
    compose,
    push_forward,
)
from meanformer.errors import (
    PrecisionWarning,
    as_integer,
    as_key,
    as_number,
    warn,
)
from meanformer.expressivity.algebra import AlgebraElement, Blocks
from meanformer.expressivity.approximation import relu_layer, spline_through
from meanformer.flows import Flow, Schedule, Trajectory, run_layers
from meanformer.measures import AbstractContext, TokenCloud, UniformBall
from meanformer.typing import Key

# The most pieces, per root of the number of factors, for errors to stay in range.
COARSEST = math.sqrt(2.5)
# Roundings that a layer may add, for warnings.
ROUNDINGS = 16


class Certificate(NamedTuple):
    r"""What a compiled transformer promises, and what it costs.

    Attributes:
        bound: the largest error of each component, for tokens and queries in the ball.
        radius: the radius of the ball.
        width: the dimension of its tokens.
        heads: how many heads each attention has.
        attentions: how many attention layers, and as many perceptrons.
        pieces: how many pieces its splines of squares have.
        parameters: how many numbers its matrices and biases hold.
    """

    bound: tuple[float, ...]
    radius: float
    width: int
    heads: int
    attentions: int
    pieces: int
    parameters: int

    def __str__(self) -> str:
        return (
            f"error at most {max(self.bound):.3g} in the ball of radius "
            f"{self.radius:g}: {self.attentions} attentions of {self.heads} heads and "
            f"{self.attentions} perceptrons, width {self.width}, {self.pieces} pieces "
            f"a square, {self.parameters:,} parameters"
        )


class CompiledTransformer(AbstractInContextMap):
    """A transformer that computes an element of the algebra, layer by layer.

    Attributes:
        embedding: the affine map that queries and tokens enter by.
        layers: attentions and perceptrons in turn, each added to the tokens.
        readout: the affine map to the result.
        certificate: what it promises and costs.
        element: what it computes, with factors of size at most one.
    """

    embedding: Perceptron
    layers: tuple[AbstractInContextMap, ...]
    readout: Perceptron
    certificate: Certificate = eqx.field(static=True)
    element: AlgebraElement

    @property
    def input_dimension(self) -> int:
        """Dimension of tokens and queries."""
        return self.embedding.input_dimension

    @property
    def output_dimension(self) -> int:
        """How many components it has."""
        return self.readout.output_dimension

    @property
    def flow(self) -> Flow:
        """The layers as a flow, for `run_layers(flow, cloud, len(layers), step=1)`."""
        return Flow(Schedule(self.layers, np.arange(len(self.layers), dtype=float)))

    def run(self, mu: TokenCloud, x: Float[Array, "m d"]) -> Trajectory:
        """Return tokens and queries before and after each layer, queries as probes."""
        cloud = push_forward(self.embedding, mu)
        probes = self.embedding.apply(x)
        return run_layers(self.flow, cloud, len(self.layers), step=1.0, probes=probes)

    def __call__(
        self,
        mu: AbstractContext,
        x: Float[Array, "m d"],
        *,
        positions: Float[Array, " m"] | None = None,
    ) -> Float[Array, "m e"]:
        """Return its value at each query."""
        steps = [Residual(layer) for layer in reversed(self.layers)]
        return compose(self.readout, *steps, self.embedding)(mu, x)

    def is_certified(
        self, mu: AbstractContext, x: Float[Array, "m d"]
    ) -> Bool[Array, " m"]:
        """Return whether the certificate holds for each query: all sizes in range."""
        values = jnp.abs(self.element.factor_values(mu, x))
        return (values <= 1 + 1e-9).all(axis=(0, 2))


class Verification(NamedTuple):
    """Errors of a compiled transformer on random contexts.

    Attributes:
        counts: numbers of tokens.
        errors: the largest error for each of them, over contexts and queries.
        holds: whether all stay below the certificate.
    """

    counts: tuple[int, ...]
    errors: Float[np.ndarray, " c"]
    holds: bool


def compile_transformer(
    element: AlgebraElement,
    accuracy: float = 1e-3,
    *,
    radius: float = 1.0,
    pieces: int | None = None,
) -> CompiledTransformer:
    r"""Return a transformer that computes an element of the algebra to an accuracy.

    Heads are softmax heads without biases at $\beta = 1$; they see the element's tilted
    means exactly. A perceptron multiplies by
    $pG = \tfrac14\bigl(S(p + G) - S(p - G)\bigr)$ with a spline $S$ of the square of
    $n$ pieces, so that the error is at most
    $$\frac{M^2}{n^2}\sum_k|a_{k,i}|(N_k - 1), \qquad M = 1 + \frac{\max_kN_k}{n^2},$$
    for every context in the ball, of any number of tokens. In dimension $d$ with $d'$
    components it has width $d + 3d'$ and $d'$ heads.

    Args:
        element: what is to be computed.
        accuracy: the largest error allowed.
        radius: that of the ball, centred at zero, of all tokens and queries.
        pieces: the number $n$ in place of an accuracy.
    """
    accuracy = as_number("accuracy", accuracy, "a positive number", above=0)
    allowed = "a finite radius: without one factors have no bound"
    radius = as_number("radius", radius, allowed, above=0, below=math.inf)
    element = _bounded(element.simplified(), radius)
    longest = max(element.lengths)
    lengths = np.array(element.lengths)
    sizes = (lengths - 1) @ np.abs(np.asarray(element.coefficients))
    coarsest = math.ceil(COARSEST * math.sqrt(longest))
    if pieces is None:
        pieces = coarsest
        while _bound(sizes, longest, pieces).max() > accuracy:
            factor = math.sqrt(_bound(sizes, longest, pieces).max() / accuracy)
            pieces = max(pieces + 1, int(0.999 * factor * pieces))
    else:
        pieces = as_integer("pieces", pieces, least=coarsest)
    bound = _bound(sizes, longest, pieces)
    dtype = element.coefficients.dtype
    rounding = ROUNDINGS * len(element.factors.shift) * float(jnp.finfo(dtype).eps)
    if 0 < bound.max() < rounding:
        warn(
            f"the certificate, {bound.max():.2g}, is below the rounding of {dtype}, "
            f"about {rounding:.2g}.",
            PrecisionWarning,
        )
    layers = _layers(element, pieces, 1 + longest / pieces**2)
    size, width = element.input_dimension, element.output_dimension
    arrays = jax.tree.leaves(eqx.filter(layers, eqx.is_array))
    heads = [layer.heads for layer in layers[::2]]
    # Temperatures are no parameters: all are one.
    count = sum(leaf.size for leaf in arrays) - sum(map(len, heads))
    certificate = Certificate(
        tuple(bound.tolist()),
        radius,
        layers[0].input_dimension,
        max(map(len, heads)),
        len(heads),
        pieces,
        count,
    )
    return CompiledTransformer(
        _affine(size, width, dtype),
        layers,
        _readout(size, width, dtype),
        certificate,
        element,
    )


def verify(
    network: CompiledTransformer,
    *,
    key: Key,
    counts: tuple[int, ...] = (5, 50, 500, 2000),
    contexts: int = 4,
    queries: int = 32,
) -> Verification:
    """Compare a compiled transformer with its element on random clouds in the ball.

    Args:
        network: the transformer.
        key: random key of tokens, weights and queries.
        counts: numbers of tokens.
        contexts: how many clouds of each.
        queries: how many queries for each.
    """
    ball = UniformBall(network.input_dimension, network.certificate.radius)
    most = max(counts)

    @eqx.filter_jit
    def error(network, key, count):
        keys = jr.split(key, 3)
        # Absent tokens fill up, so that one program serves all counts.
        masses = jnp.where(
            jnp.arange(most) < count, jr.exponential(keys[1], (most,)), 0
        )
        cloud = TokenCloud(ball.sample(most, key=keys[0]), masses, normalize=True)
        x = ball.sample(queries, key=keys[2])
        return jnp.abs(network(cloud, x) - network.element(cloud, x)).max(axis=0)

    errors = np.array(
        [
            np.max([error(network, one, jnp.asarray(count)) for one in row], axis=0)
            for count, row in zip(
                counts, jr.split(as_key(key), (len(counts), contexts)), strict=True
            )
        ]
    )
    slack = ROUNDINGS * len(network.layers) * np.finfo(errors.dtype).eps
    holds = bool((errors <= np.array(network.certificate.bound) + slack).all())
    return Verification(counts, errors.max(axis=1), holds)


def _bound(sizes: np.ndarray, longest: int, pieces: int) -> np.ndarray:
    largest = 1 + longest / pieces**2
    return (largest / pieces) ** 2 * sizes


def _bounded(element: AlgebraElement, radius: float) -> AlgebraElement:
    """Return the same element with factors of size at most one in the ball."""
    sizes = jnp.maximum(element.factors.bounds(radius), 1)
    starts = np.array(element.starts[:-1])
    scales = jnp.asarray(np.multiply.reduceat(np.asarray(sizes), starts))
    return AlgebraElement(
        element.coefficients * scales,
        element.factors.scaled(1 / sizes),
        element.lengths,
    )


def _layers(element: AlgebraElement, pieces: int, largest: float) -> tuple:
    """Return an attention and a perceptron for each factor of each term."""
    layers, square = [], _square(pieces, largest)
    for k in range(len(element)):
        factors, length = element.term(k), element.lengths[k]
        for j in range(length):
            part = jax.tree.map(lambda leaf, j=j: leaf[j], factors)
            coefficient = element.coefficients[k] if j == length - 1 else None
            layers += [
                _attention(part),
                _perceptron(part, None if j == 0 else square, coefficient),
            ]
    return tuple(layers)


def _square(pieces: int, largest: float) -> Perceptron:
    """Return the spline of the square over four, on twice the range of a factor."""
    places = np.linspace(-2 * largest, 2 * largest, pieces + 1)
    return spline_through(places, places[:, None] ** 2 / 4)


def _attention(part: Blocks) -> MultiHead:
    """Return the heads that add what each component of a factor sees to $g$."""
    width, size = part.shift.shape
    eye = jnp.eye(size + 3 * width, dtype=part.shift.dtype)
    places, seen = eye[:size], eye[size : size + width]

    def head(i: int) -> Softmax:
        # The channel g_1 is one when it is read: it carries the shift.
        query = part.score[i] @ places + jnp.outer(part.shift[i], seen[0])
        return Softmax(query, places, jnp.outer(seen[i], part.value[i] @ places))

    return MultiHead([head(i) for i in range(width)])


def _perceptron(
    part: Blocks, square: Perceptron | None, coefficient: Float[Array, " e"] | None
) -> Perceptron:
    r"""Return the perceptron that multiplies $p$ by a factor and erases $g$.

    Args:
        part: the factor, one for each component.
        square: the spline of the square over four; `None` for a first factor.
        coefficient: that of the term, if this is its last factor.
    """
    width, size = part.shift.shape
    eye = np.eye(size + 3 * width)
    seen, product, total = (eye[size + start * width :][:width] for start in range(3))
    factor = seen + np.asarray(part.direct) @ eye[:size]
    shift = np.asarray(part.constant) - 1
    if coefficient is None:
        target, scale, left = product, np.ones(width), np.zeros(width)
    else:
        target, scale, left = total, np.asarray(coefficient), np.ones(width)
    target = scale[:, None] * target
    rows, biases, columns = [], [], []

    def add(direction, bias, output) -> None:
        rows.append(direction)
        biases.append(bias)
        columns.append(output)

    for i in range(width):
        # Rectified neurons of both signs add up to a linear function.
        for sign in (1, -1):
            add(sign * seen[i], -sign, -sign * seen[i])
            add(sign * product[i], 0, -sign * product[i])
            if square is None:
                add(sign * factor[i], sign * shift[i], sign * target[i])
        if square is None:
            continue
        knots, bends = np.asarray(square.bias_in), np.asarray(square.weights_out)[0]
        for sign in (1, -1):
            for knot, bend in zip(knots, bends, strict=True):
                direction = product[i] + sign * factor[i]
                add(direction, sign * shift[i] + knot, sign * bend * target[i])
    dtype = part.shift.dtype
    arrays = np.array(rows), np.array(biases), np.array(columns).T
    return relu_layer(*(a.astype(dtype) for a in (*arrays, left @ product)))


def _affine(size: int, width: int, dtype) -> Perceptron:
    r"""Return the embedding $x \mapsto (x, 1, 1, 0)$."""
    ones, zeros = np.ones(2 * width, dtype), np.zeros(width, dtype)
    matrix = np.eye(size + 3 * width, size, dtype=dtype)
    return Perceptron.affine(
        matrix, np.concatenate([np.zeros(size, dtype), ones, zeros])
    )


def _readout(size: int, width: int, dtype) -> Perceptron:
    """Return the map to the last channels."""
    return Perceptron.affine(np.eye(size + 3 * width, dtype=dtype)[-width:])
