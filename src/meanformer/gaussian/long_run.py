"""What a covariance does in the long run, read off the growth of its eigenvalues."""

import dataclasses
from typing import Any, NamedTuple, cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from jaxtyping import Array, Float, Int

from meanformer.attention import AbstractInContextMap
from meanformer.errors import check
from meanformer.flows import GaussianTrajectory, Status
from meanformer.gaussian.velocity import affine_velocity, centred, check_gaussian
from meanformer.measures import Gaussian
from meanformer.numerics.matrices import matmul

# Exponents within so much of zero belong to a limit, below the other to a decay.
LEVEL, DECAY = 0.02, -0.5
# Eigenvalues whose exponents differ by less stay comparable.
COMPARABLE = 0.1
# Eigenvalues below this share of the largest are lost in the tolerance: gone.
GONE = 1e-10
# Share of the depth; where less is left to a blow-up, it is reached.
RESOLVED = 1e-9
# Roundings of the covariance in its velocity.
ROUNDINGS = 16
# Logarithm of the largest trace.
LARGEST = 175.0
REACHED, BLEW_UP, ESCAPED, UNFINISHED = "reached", "blew up", "escaped", "unfinished"
ENDINGS = (REACHED, BLEW_UP, ESCAPED, UNFINISHED)


@dataclasses.dataclass(frozen=True)
class LongRun:
    r"""A covariance followed over many decades of depth.

    An eigenvalue that tends to zero does so exponentially, and is soon lost in
    rounding, or like a power of depth, here $1/t$ as a rule, so that no threshold tells
    it from a positive limit. The exponent $p = \mathrm{d}\log\lambda/\mathrm{d}\log t$
    does: it tends to $-1$, not to $0$.

    Attributes:
        depths: the depths of the integrator's steps, or those saved.
        covariances: the covariances there.
        ending: `"reached"`, `"blew up"`, `"escaped"` (beyond all numbers) or
            `"unfinished"` (the steps were used up).
        eigenvalues: those of the last covariance, largest first; zero if lost.
        exponents: their exponents over the last decade of depth.
        previous_exponents: those over the decade before, to see if they have settled.
    """

    depths: np.ndarray
    covariances: np.ndarray
    ending: str
    eigenvalues: np.ndarray
    exponents: np.ndarray
    previous_exponents: np.ndarray

    @property
    def is_settled(self) -> bool:
        """Whether every exponent is that of a limit or a decay, in both decades."""
        both = np.stack([self.exponents, self.previous_exponents])
        settled = (np.abs(both) <= LEVEL) | (both <= DECAY)
        return bool(self.ending == REACHED and settled.all())

    @property
    def grows(self) -> bool:
        """Whether the largest eigenvalue still grows like a power of depth."""
        return bool(min(self.exponents[0], self.previous_exponents[0]) > LEVEL)

    @property
    def rank(self) -> int:
        """How many eigenvalues do not tend to zero."""
        return int(np.sum(self.exponents > DECAY))

    @property
    def normalised_rank(self) -> int:
        """How many stay comparable to the largest: the rank of the limit of S/tr S."""
        return int(np.sum(self.exponents > self.exponents[0] - COMPARABLE))

    @property
    def limit(self) -> np.ndarray:
        """The last covariance without the eigenvalues that tend to zero."""
        values, vectors = np.linalg.eigh(self.covariances[-1])
        kept = np.arange(len(values)) >= len(values) - self.rank
        return (vectors * np.where(kept, values, 0)) @ vectors.T


def limit_of(
    gamma: AbstractInContextMap,
    mu: Gaussian,
    *,
    depth: float = 1e6,
    rtol: float = 1e-9,
    max_steps: int = 8192,
) -> LongRun:
    r"""Follow a covariance over many decades of depth.

    The covariance is integrated with implicit steps, in the clock
    $\mathrm{d}s = (|L| + 1/T)\,\mathrm{d}t$: neither a limit that is reached
    exponentially, nor one that is reached like $1/t$, nor a blow-up takes many steps. A
    covariance that turns for ever does. Eigenvalues far below the tolerance are lost;
    `solve` keeps them, with the map that carries points, but follows every turn of it.

    Args:
        gamma: the velocity, the same at all depths.
        mu: the Gaussian at depth zero; only its covariance counts.
        depth: how far, in units of the time in which it moves at first.
        rtol: tolerance of the integration, relative to the covariance; a limit that is
            reached like $1/t$ has a velocity with $t$ times the rounding of the
            covariance, and no smaller tolerance is asked for.
        max_steps: most steps.
    """
    check_gaussian(mu)
    check(depth >= 1e3, f"depth is {depth}; it must be at least 1000.")
    check(bool(jnp.any(mu.covariance() != 0)), "the covariance is zero, and stays so.")
    unit = first_time(gamma, mu)
    # In the widest type there is: the tolerance is far below single precision.
    rounding = ROUNDINGS * float(jnp.finfo(float).eps) * depth
    numbers = (unit, depth * unit, max(rtol, rounding))
    arrays, rest = eqx.partition(
        (gamma, mu.covariance(), *numbers), eqx.is_inexact_array_like
    )
    wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(float)), arrays)
    walk = _follow(*eqx.combine(wide, rest), max_steps)
    depths, spreads, ending = map(np.asarray, walk)
    taken = np.isfinite(depths) & np.isfinite(spreads).all(axis=(1, 2))
    values = np.linalg.eigvalsh(spreads[taken])[:, ::-1]
    kept = np.where(values > GONE * values[:, :1], values, 0)
    return _judged(depths[taken], spreads[taken], kept, ENDINGS[int(ending)])


def growth_along(trajectory: GaussianTrajectory) -> LongRun:
    """Read off a solved flow how its eigenvalues grow and decay.

    Here no eigenvalue is lost, since the flow has factors of its covariances. The
    last three decades of its depths should be saved densely.

    Args:
        trajectory: what `solve` returned, best with `LongDepth()`.
    """
    depths = np.asarray(trajectory.depths)
    check(
        len(depths) > 2 and bool(depths[-1] > depths[0] >= 0),
        "growth is read off depths from 0 on, of which at least three are saved.",
    )
    ending = UNFINISHED
    if bool(trajectory.status == Status.blow_up_suspected):
        ending = BLEW_UP
    elif bool(trajectory.status == Status.reached):
        ending = REACHED
    values = np.asarray(trajectory.statistics["eigenvalues"])
    return _judged(depths, np.asarray(trajectory.covariances), values, ending)


def first_time(gamma: AbstractInContextMap, mu: Gaussian) -> float:
    """Return the time in which the covariance moves at first; one if it rests."""
    size = float(jnp.linalg.norm(affine_velocity(gamma, mu)[0]))
    return 1 / size if size > 0 else 1.0


class _Walk(NamedTuple):
    r"""What is integrated, in numbers of ordinary size.

    Attributes:
        shape: the covariance over its trace.
        log_trace: the logarithm of the trace.
        log_depth: $\log(1 + t/t_0)$ for the depth $t$ and a unit $t_0$.
    """

    shape: Float[Array, "d d"]
    log_trace: Float[Array, ""]
    log_depth: Float[Array, ""]

    def covariance(self) -> Float[Array, "d d"]:
        """Return the covariance, symmetric."""
        return jnp.exp(self.log_trace) * (self.shape + self.shape.T) / 2


@eqx.filter_jit
def _follow(
    gamma: AbstractInContextMap,
    covariance: Float[Array, "d d"],
    unit: Float[Array, ""],
    end: Float[Array, ""],
    rtol: Float[Array, ""],
    max_steps: int,
) -> tuple[Float[Array, " s"], Float[Array, "s d d"], Int[Array, ""]]:
    """Return depths and covariances at every step, infinite after the last; and why."""

    def slope_at(walk: _Walk) -> Float[Array, "d d"]:
        return affine_velocity(gamma, centred(walk.covariance()))[0]

    def field(s, walk: _Walk, args) -> _Walk:
        slope = slope_at(walk)
        rate = jnp.linalg.norm(slope) + 1 / end
        moved = matmul(slope / rate, (walk.shape + walk.shape.T) / 2)
        growth = 2 * jnp.trace(moved)
        turned = moved + moved.T - growth * walk.shape
        return _Walk(turned, growth, jnp.exp(-walk.log_depth) / (unit * rate))

    def depth_of(walk: _Walk) -> Float[Array, ""]:
        return unit * jnp.expm1(walk.log_depth)

    def arrived(s, walk: _Walk, args, **kwargs):
        return depth_of(walk) >= end

    def blows_up(s, walk: _Walk, args, **kwargs):
        return jnp.linalg.norm(slope_at(walk)) * depth_of(walk) * RESOLVED > 1

    def escaped(s, walk: _Walk, args, **kwargs):
        return walk.log_trace > LARGEST

    trace, one = jnp.trace(covariance), jnp.ones_like(end)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Kvaerno5(root_finder=optimistix.Newton(rtol / 10, rtol / 10)),
        0 * one,
        jnp.inf * one,
        1e-3 * one,
        _Walk(covariance / trace, jnp.log(trace), 0 * one),
        saveat=diffrax.SaveAt(t0=True, steps=True),
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=rtol),
        event=diffrax.Event([arrived, blows_up, escaped]),
        max_steps=max_steps,
        throw=False,
    )
    walk, fired = cast(Any, solution.ys), jnp.stack(cast(Any, solution.event_mask))
    ending = jnp.where(fired.any(), jnp.argmax(fired), len(fired))
    return jax.vmap(depth_of)(walk), jax.vmap(_Walk.covariance)(walk), ending


def _judged(
    depths: np.ndarray, spreads: np.ndarray, values: np.ndarray, ending: str
) -> LongRun:
    """Read the exponents off the eigenvalues, largest first; zero are those lost."""
    tiny, lost = np.finfo(values.dtype).tiny, values <= 0
    logs = np.where(lost, np.nan, np.log(np.maximum(values, tiny)))
    places = np.log(np.maximum(depths, tiny))

    def exponents(before: float) -> np.ndarray:
        ends = places[-1] - np.log(10) * np.array([before + 1, before])
        low, high = (
            np.array([np.interp(end, places, column) for column in logs.T])
            for end in ends
        )
        slopes = (high - low) / np.log(10)
        return np.where(np.isfinite(slopes) & ~lost[-1], slopes, -np.inf)

    return LongRun(
        depths,
        spreads,
        ending,
        np.where(lost[-1], 0, values[-1]),
        exponents(0),
        exponents(1),
    )
