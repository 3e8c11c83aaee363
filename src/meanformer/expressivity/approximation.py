r"""Two-layer perceptrons to an accuracy: splines, Fourier ridges, random features.

Perceptrons with any activation that is continuous and no polynomial are dense in the
continuous functions of a compact set. The constructions here say how many neurons an
error takes.
"""

import itertools
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from meanformer.attention import Perceptron
from meanformer.errors import (
    InvalidInput,
    NotPeriodic,
    as_doubles,
    as_integer,
    as_key,
    as_number,
    check,
    warn,
)
from meanformer.measures import UniformBox
from meanformer.typing import ArrayLike, Key

Function = Callable[[Float[Array, "m d"]], Array]

# Points on which errors are measured, and frequencies that may be listed by a degree.
HELD_OUT, MOST_FREQUENCIES = 4000, 20000
# A jump of the periodic extension that is larger than this share is told.
JUMP = 1e-6
# An activation with no larger distance to polynomials of this degree is one.
DEGREE, POLYNOMIAL = 9, 1e-9
# Singular values below this share of the largest do not count for a rank.
RANK = 1e-12


class Fit(eqx.Module):
    """A perceptron that approximates a function, and how well.

    Attributes:
        perceptron: the perceptron, which ignores the context.
        largest_error: the largest error seen on points it was not fitted to.
        mean_error: the root mean square of errors there.
        rank: the rank of the least squares that it comes from, if it does.
    """

    perceptron: Perceptron
    largest_error: float
    mean_error: float
    rank: int | None = None

    @property
    def neurons(self) -> int:
        """How many neurons it has."""
        return len(self.perceptron.bias_in)


def spline(function: Function, knots: ArrayLike) -> Fit:
    r"""Return the interpolating spline of a function of one variable, as a perceptron.

    $$f(s_0) + \sum_{j<n}(m_j - m_{j-1})(x - s_j)_+, \qquad
      m_j = \frac{f(s_{j+1}) - f(s_j)}{s_{j+1} - s_j}, \quad m_{-1} = 0,$$
    constant to the left of the knots and linear to the right. Between knots at a
    distance $h$ the error is at most $h^2\max|f''|/8$.

    Args:
        function: takes points (m, 1), returns values (m,) or (m, e).
        knots: the increasing places $s_0 < \dots < s_n$.
    """
    places = as_doubles("knots", knots)
    is_right = places.ndim == 1 and len(places) > 1 and (np.diff(places) > 0).all()
    check(bool(is_right), f"knots is {places}; they must increase, and be two or more.")
    found = spline_through(places, values_at(function, places[:, None]))
    shares = np.linspace(0, 1, 17)[1:-1]
    between = places[:-1, None] + shares * np.diff(places)[:, None]
    return measured(found, function, between.reshape(-1, 1))


def spline_through(places: np.ndarray, values: np.ndarray) -> Perceptron:
    """Return the spline with given values, a row for each of the increasing places."""
    slopes = np.diff(values, axis=0) / np.diff(places)[:, None]
    changes = np.diff(slopes, axis=0, prepend=0 * slopes[:1])
    ones = np.ones((len(slopes), 1))
    return relu_layer(ones, -places[:-1], changes.T, values[0])


def relu_layer(weights_in, bias_in, weights_out, bias_out=None) -> Perceptron:
    """Return a perceptron of rectified neurons."""
    given = [jnp.asarray(a) for a in (weights_in, bias_in, weights_out)]
    bias = None if bias_out is None else jnp.asarray(bias_out)
    return Perceptron(*given, bias, activation=jax.nn.relu)


class FourierSeries(eqx.Module):
    r"""A real trigonometric polynomial, $\sum_r a_r\cos(\langle k_r, x\rangle + p_r)$.

    Attributes:
        frequencies: the vectors $k_r$, zero among them, of each pair $\pm k$ one.
        amplitudes: the numbers $a_r > 0$.
        phases: the numbers $p_r$.
        box: the box that it is meant for.
    """

    frequencies: Float[np.ndarray, "r d"]
    amplitudes: Float[np.ndarray, " r"]
    phases: Float[np.ndarray, " r"]
    box: UniformBox

    @property
    def weight(self) -> float:
        r"""The sum $\sum|c_k|$ of the sizes of its Fourier coefficients."""
        return float(self.amplitudes.sum())

    def __call__(self, x: Float[Array, "m d"]) -> Float[Array, " m"]:
        """Return its value at each point."""
        waves = jnp.cos(x @ self.frequencies.T + self.phases[None])
        return waves @ self.amplitudes

    def perceptron(self, accuracy: float) -> Perceptron:
        r"""Return it with each wave replaced by a spline.

        Knots at a distance $h$ make an error of at most $\sum_r a_r\,h^2/8$.

        Args:
            accuracy: the largest error in the box.
        """
        accuracy = as_number("accuracy", accuracy, "a positive number", above=0)
        low, high = (np.asarray(end) for end in (self.box.low, self.box.high))
        middle, half = (low + high) / 2, (high - low) / 2
        step = math.sqrt(8 * accuracy / self.weight)
        total, layers = 0.0, []
        for wave, size, phase in zip(
            self.frequencies, self.amplitudes, self.phases, strict=True
        ):
            centre, reach = wave @ middle, np.abs(wave) @ half
            if reach == 0:
                total += size * math.cos(phase + centre)
                continue
            count = max(1, math.ceil(2 * reach / step))
            places = np.linspace(centre - reach, centre + reach, count + 1)
            part = spline_through(places, size * np.cos(places + phase)[:, None])
            rows = np.asarray(part.weights_in) * wave
            layers.append((rows, part.bias_in, part.weights_out))
            total += size * math.cos(places[0] + phase)
        rows, biases, outputs = zip(*layers, strict=True)
        ends = np.concatenate(rows), np.concatenate(biases), np.hstack(outputs)
        return relu_layer(*ends, np.atleast_1d(total))


def fourier_series(
    function: Function,
    degree: int,
    box: UniformBox,
    *,
    frequencies: ArrayLike | None = None,
) -> FourierSeries:
    r"""Return the Fourier series of a function on a box, up to a degree.

    The function is continued periodically; where it jumps at the border of the box, a
    warning tells how much, and an error of about a twelfth of the jump stays there at
    every degree.

    Args:
        function: takes points (m, d), returns values (m,).
        degree: the largest entry of a frequency, in periods of the box.
        box: the box; its sides are the periods.
        frequencies: some vectors of integers in place of all up to the degree, for
            more than three dimensions; then the series is fitted by least squares.
    """
    degree = as_integer("degree", degree, least=1)
    low, high = (np.asarray(end, np.float64) for end in (box.low, box.high))
    size = len(low)
    _warn_of_jumps(function, low, high)
    if frequencies is not None:
        listed = as_doubles("frequencies", frequencies)
        check(
            listed.ndim == 2 and listed.shape[1] == size,
            f"frequencies has shape {listed.shape}; it must be (r, {size}).",
        )
        coefficients = _fitted_coefficients(function, listed, low, high)
    else:
        count = (2 * degree + 1) ** size
        check(
            count <= MOST_FREQUENCIES,
            f"degree {degree} in dimension {size} has {count} frequencies, more than "
            f"{MOST_FREQUENCIES}; list some: frequencies=[[1, 0, …], …].",
        )
        listed, coefficients = _transformed(function, degree, low, high)
    waves = 2 * np.pi * listed / (high - low)
    turned = coefficients * np.exp(-1j * waves @ low)
    kept = np.abs(turned) > np.finfo(float).eps * np.abs(turned).max()
    kept[0] |= not kept.any()
    return FourierSeries(waves[kept], np.abs(turned)[kept], np.angle(turned)[kept], box)


def ridge_fourier(
    function: Function, degree: int, box: UniformBox, *, accuracy: float = 1e-3
) -> Fit:
    r"""Return the Fourier series of a function on a box as a perceptron.

    The error is at most that of the series and the accuracy of its waves together.

    Args:
        function: takes points (m, d), returns values (m,).
        degree: as for `fourier_series`.
        box: the box.
        accuracy: of all waves together.
    """
    found = fourier_series(function, degree, box).perceptron(accuracy)
    return measured(found, function, held_out(box))


def random_features(
    function: Function,
    count: int,
    box: UniformBox,
    *,
    key: Key,
    activation: Callable[[Array], Array] = jax.nn.relu,
    scale: float = 1.0,
    ridge: float = 1e-12,
    samples: int | None = None,
    refinements: int = 0,
) -> Fit:
    r"""Fit random neurons to a function on a box, by least squares of their outputs.

    Directions are uniform on a sphere, and kinks are uniform over what the box shows in
    that direction.

    Args:
        function: takes points (m, d), returns values (m,) or (m, e).
        count: how many neurons.
        box: the box.
        key: random key of the neurons and the points.
        activation: continuous and no polynomial.
        scale: the length of directions.
        ridge: the penalty of outputs, as a share of the largest squared singular value.
        samples: how many points; eight for each neuron by default.
        refinements: so many steps of BFGS move all weights after the least squares.
    """
    count = as_integer("count", count, least=1)
    _check_activation(activation)
    samples = 8 * count if samples is None else as_integer("samples", samples, least=1)
    keys = jr.split(as_key(key), 3)
    points = np.asarray(box.sample(samples, key=keys[0]))
    targets = values_at(function, points)
    rows = np.asarray(jr.normal(keys[1], (count, points.shape[1])))
    rows = scale * rows / np.linalg.norm(rows, axis=1, keepdims=True)
    low, high = (np.asarray(end) for end in (box.low, box.high))
    middle, reach = rows @ ((low + high) / 2), np.abs(rows) @ ((high - low) / 2)
    shares = np.asarray(jr.uniform(keys[2], (count,), minval=-1, maxval=1))
    biases = -(middle + shares * reach)
    hidden = np.asarray(activation(jnp.asarray(points @ rows.T + biases)))
    design = np.column_stack([hidden, np.ones(samples)])
    left, values, right = np.linalg.svd(design, full_matrices=False)
    damped = values / (values**2 + ridge * values[0] ** 2)
    outputs = right.T @ (damped[:, None] * (left.T @ targets))
    parts = [jnp.asarray(a) for a in (rows, biases, outputs[:-1].T, outputs[-1])]
    found = Perceptron(*parts, activation=activation)
    if refinements:
        found = _refined(found, points, targets, refinements)
    rank = int((values > RANK * values[0]).sum())
    return measured(found, function, held_out(box), rank)


def measured(
    perceptron: Perceptron, function: Function, points: np.ndarray, rank=None
) -> Fit:
    """Return a perceptron with its errors at some points."""
    found = np.asarray(perceptron.apply(jnp.asarray(points)))
    errors = np.linalg.norm(found - values_at(function, points), axis=1)
    return Fit(
        perceptron, float(errors.max()), float(np.sqrt(np.mean(errors**2))), rank
    )


def held_out(box: UniformBox) -> np.ndarray:
    """Return points of a box that fill it evenly, the same ones every time."""
    from scipy.stats import qmc

    low, high = (np.asarray(end) for end in (box.low, box.high))
    unit = qmc.Halton(len(low), scramble=True, rng=0).random(HELD_OUT)
    return low + unit * (high - low)


def values_at(function: Function, points: np.ndarray) -> np.ndarray:
    """Return the values of a function, of shape (m, e), or raise where it has none."""
    values = np.asarray(function(jnp.asarray(points)), np.float64)
    values = values[:, None] if values.ndim == 1 else values
    check(
        values.ndim == 2 and len(values) == len(points),
        f"function returns an array of shape {values.shape} for {len(points)} points; "
        "it must be one value, or one row, for each.",
    )
    wrong = ~np.isfinite(values).all(axis=1)
    if wrong.any():
        place = points[wrong.argmax()]
        raise InvalidInput(f"function is not finite at {place}.")
    return values


def _transformed(function, degree: int, low, high):
    """Return frequencies, one of each pair, with coefficients of their real waves."""
    size, count = len(low), 4 * degree + 2
    axes = [
        a + (b - a) * np.arange(count) / count for a, b in zip(low, high, strict=True)
    ]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, size)
    values = values_at(function, points)
    check(values.shape[1] == 1, "function returns several values; one is needed.")
    table = np.fft.fftn(values.reshape((count,) * size)) / count**size
    steps = range(-degree, degree + 1)
    listed = np.array(
        [k for k in itertools.product(steps, repeat=size) if k >= (0,) * size]
    )
    coefficients = table[tuple(listed.T % count)]
    return listed, np.where(listed.any(axis=1), 2, 1) * coefficients


def _fitted_coefficients(function, listed, low, high):
    """Return coefficients of waves, by least squares on points of the box."""
    box = UniformBox(low, high)
    points = held_out(box)
    angles = 2 * np.pi * ((points - low) / (high - low)) @ listed.T
    design = np.hstack([np.cos(angles), -np.sin(angles)])
    values = values_at(function, points)[:, 0]
    found = np.linalg.lstsq(design, values, rcond=None)[0].reshape(2, -1)
    return found[0] + 1j * found[1]


def _warn_of_jumps(function, low, high) -> None:
    """Warn where the values at opposite faces of a box differ."""
    points = held_out(UniformBox(low, high))[:500]
    jump, scale = 0.0, np.abs(values_at(function, points)).max()
    for axis in range(len(low)):
        faces = [points.copy(), points.copy()]
        faces[0][:, axis], faces[1][:, axis] = low[axis], high[axis]
        ends = [values_at(function, face) for face in faces]
        jump = max(jump, float(np.abs(ends[0] - ends[1]).max()))
    if jump > JUMP * scale:
        warn(
            f"the function jumps by {jump:.3g} across the border of the box, where the "
            f"series overshoots by about {0.09 * jump:.2g} at every degree.",
            NotPeriodic,
        )


def _check_activation(activation) -> None:
    places = np.linspace(-3, 3, 101)
    values = np.asarray(activation(jnp.asarray(places)))
    fitted = np.polynomial.Chebyshev.fit(places, values, DEGREE)(places)
    size = np.abs(values).max()
    check(
        bool(np.abs(fitted - values).max() > POLYNOMIAL * size),
        "activation is a polynomial; perceptrons with it are polynomials of its "
        "degree, which are not dense. Take another, such as jax.nn.relu.",
    )


def _refined(found: Perceptron, points, targets, count: int) -> Perceptron:
    """Move all weights of a perceptron towards the least squared error."""
    from scipy.optimize import minimize

    x, y = jnp.asarray(points), jnp.asarray(targets)
    start, whole = ravel_pytree(found)

    @jax.jit
    @jax.value_and_grad
    def error(flat):
        return jnp.mean(jnp.sum((whole(flat).apply(x) - y) ** 2, axis=1))

    def both(flat):
        return [np.asarray(a, np.float64) for a in error(jnp.asarray(flat))]

    options = {"maxiter": count}
    best = minimize(both, start, jac=True, method="L-BFGS-B", options=options)
    return whole(jnp.asarray(best.x))
