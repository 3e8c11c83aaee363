"""How far tokens have clustered, over depth and temperature, for random starts."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import as_integer, as_key
from meanformer.flows.dynamics.recorder import AbstractProgress, bar_for
from meanformer.observables.phases.batches import Followed, follow_starts
from meanformer.observables.phases.options import Draw, Options
from meanformer.typing import ArrayLike, Key


class PhaseDiagram(eqx.Module):
    r"""A number between one cluster and none, over temperature and depth.

    Attributes:
        betas: inverse temperatures.
        depths: depths.
        mean: mean of the quantity over the starts, one row per temperature.
        standard_error: standard error of that mean; zero for a single start.
        median: median over the starts.
        quantity: `"pairs"`, `"clusters"` or `"rank"`.
        kind: `"softmax"`, `"unnormalised"`, or `"drawn"` for maps of one's own.
        dimension: dimension of the tokens.
        count: number of tokens.
        starts: number of starts.
        level: inner product above which a pair counts as clustered.
        tolerance: error per step of the solver.
        steps: accepted steps, mean over the starts, for each temperature.
        rejected: rejected steps, likewise.
    """

    betas: Float[np.ndarray, " m"]
    depths: Float[np.ndarray, " t"]
    mean: Float[np.ndarray, "m t"]
    standard_error: Float[np.ndarray, "m t"]
    median: Float[np.ndarray, "m t"]
    quantity: str = eqx.field(static=True)
    kind: str = eqx.field(static=True)
    dimension: int = eqx.field(static=True)
    count: int = eqx.field(static=True)
    starts: int = eqx.field(static=True)
    level: float = eqx.field(static=True)
    tolerance: float = eqx.field(static=True)
    steps: Float[np.ndarray, " m"]
    rejected: Float[np.ndarray, " m"]

    def passage(self, value: float = 0.5) -> Float[np.ndarray, " m"]:
        """Depths at which the mean first reaches a value, for each temperature.

        Linear between the depths of the diagram; not a number where it is not reached.
        """
        reached = self.mean >= value
        first = np.argmax(reached, axis=1)
        row = np.arange(len(self.betas))
        before = np.maximum(first - 1, 0)
        low = self.mean[row, before]
        rise = self.mean[row, first] - low
        share = np.divide(value - low, rise, out=np.ones_like(low), where=rise > 0)
        depth = self.depths[before] + share * (self.depths[first] - self.depths[before])
        return np.where(reached.any(axis=1), depth, np.nan)


def phase_diagram(
    *,
    betas: ArrayLike,
    depths: ArrayLike,
    dimension: int | None = None,
    count: int = 32,
    starts: int | Float[Array, "b n d"] | Float[np.ndarray, "b n d"] = 2048,
    kind: str = "softmax",
    quantity: str = "pairs",
    level: float = 0.999,
    threshold: float | None = None,
    cap: int | None = None,
    draw: Draw | None = None,
    redraw: float | None = None,
    tolerance: float = 3e-4,
    dtype: Any = None,
    batch_size: int = 64,
    workers: int | None = None,
    progress: bool | AbstractProgress = False,
    key: Key,
) -> PhaseDiagram:
    r"""Follow random tokens on the sphere, and tell how clustered they are.

    Starts are uniform on the sphere, and the same for all temperatures. Tokens of equal
    weight move by identity attention, or by maps that are drawn at random. At every
    depth one number is read from each start:

    - `"pairs"`: the fraction of pairs $i < j$ with $\langle x_i, x_j\rangle$ above
      `level`;
    - `"clusters"`: the number of groups linked by steps of at most `threshold`, an
      angle, $\tfrac12\beta^{-1/2}$ by default;
    - `"rank"`: the number of eigenvalues of the Gram matrix above `threshold`,
      $10^{-3}$ by default, at most `cap`.

    Attention sees inner products only. So if there are more dimensions than tokens, the
    Gram matrix itself is integrated, and the dimension costs nothing. Batches of starts
    share an adaptive step (Tsitouras' method of order 5); between steps the gap
    $1 - \langle x_i, x_j\rangle$ is interpolated in its logarithm. A batch ends as soon
    as all its pairs are clustered: the smallest inner product, once it is not negative,
    never decreases, since for the pair $(i, j)$ that attains it
    $\dot G_{ij} = \sum_k A_{ik}(G_{kj} - G_{ik}G_{ij}) + \sum_k A_{jk}(G_{ki} -
    G_{jk}G_{ij}) \ge 0$ term by term. With 512 starts or more, starts that have become
    one cluster leave their batch, and tokens that have met (a gap below a tenth of the
    tolerance, and closing) go on as one token of their common weight.

    At the default tolerance the mean over 64 starts errs by at most some $0.005$ on the
    steepest front, by $3\cdot 10^{-5}$ on average (measured, $n = 32$).

    In single precision inner products carry errors of $10^{-7}$: enough for the level
    0.999, and a warning is given for levels within $10^{-4}$ of one.

    Args:
        betas: inverse temperatures, not negative.
        depths: increasing depths, from zero or later.
        dimension: dimension $d \ge 2$ of the tokens; that of given starts by default.
        count: number of tokens.
        starts: number of random starts; or the starts, unit vectors.
        kind: `"softmax"` or `"unnormalised"`.
        quantity: what is read.
        level: inner product above which a pair counts.
        threshold: angle that links tokens, or smallest eigenvalue that counts.
        cap: largest rank that is told apart.
        draw: function of a key and $\beta$ that returns a map of $\mathbb{R}^d$, in
            place of identity attention; each start has its own, the same for all
            temperatures if the function draws before it looks at $\beta$.
        redraw: depth after which maps are drawn anew; `None` keeps them.
        tolerance: root mean square error of the tokens of a start, for each step.
        dtype: `"float32"` or `"float64"`; by default that of JAX.
        batch_size: starts that share a step.
        workers: threads; by default one for each core.
        progress: show a progress bar on standard error; or an object to report to.
        key: random key, for the starts and for the maps.

    Returns:
        The diagram. Cost: some hundred evaluations of $O(n^2\min(n, d))$ for each
        start and temperature; memory for one temperature, and the starts.
    """
    options = Options(
        betas, depths, kind, quantity, level, threshold, cap, tolerance, dtype
    )
    key_starts, key_maps = jr.split(as_key(key))
    maps = options.random_maps(draw, redraw, key_maps)
    states, dimension = options.starting_states(
        dimension, count, starts, key_starts, is_drawn=maps is not None
    )
    batch_size = as_integer("batch_size", batch_size, least=1)
    workers = _cores() if workers is None else as_integer("workers", workers, least=1)
    shares = _shares(len(states), len(options.betas), workers, batch_size)
    jobs = [(beta, share) for beta in options.betas for share in shares]

    def followed(job) -> Followed:
        beta, share = job
        return follow_starts(options, maps, beta, states[share], share, batch_size)

    rows, parts, bar = [], [], bar_for(progress)
    with bar:
        for done, part in enumerate(_in_threads(followed, jobs, workers)):
            parts.append(part)
            bar.update(done + 1, len(jobs))
            if len(parts) == len(shares):
                rows.append(_summary(parts))
                parts = []
    mean, error, median, steps, rejected = map(np.stack, zip(*rows, strict=True))
    return PhaseDiagram(
        betas=options.betas,
        depths=options.depths,
        mean=mean,
        standard_error=error,
        median=median,
        quantity=quantity,
        kind=kind if maps is None else "drawn",
        dimension=dimension,
        count=states.shape[1],
        starts=len(states),
        level=options.level,
        tolerance=options.tolerance,
        steps=steps,
        rejected=rejected,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _shares(number: int, rows: int, workers: int, batch_size: int) -> list[np.ndarray]:
    """Split the starts where there are too few temperatures for all workers."""
    if rows >= 4 * workers or workers == 1:
        return [np.arange(number)]
    most = -(-number // batch_size)
    return np.array_split(np.arange(number), min(most, workers))


def _in_threads(function, jobs: list, workers: int) -> Iterator[Followed]:
    """Map over jobs in order, on several threads: compiled code runs side by side."""
    if workers == 1 or len(jobs) == 1:
        yield from map(function, jobs)
        return
    # The first job compiles; the others would wait for it, or compile once more.
    yield function(jobs[0])
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(function, jobs[1:])
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _summary(parts: list[Followed]) -> tuple[np.ndarray | np.floating, ...]:
    """Return mean, standard error and median of what was read, and the steps."""
    values, steps, rejected = map(np.concatenate, zip(*parts, strict=True))
    number = len(values)
    spread = values.std(axis=0, ddof=1) if number > 1 else np.zeros(values.shape[1])
    return (
        values.mean(axis=0),
        spread / np.sqrt(number),
        np.median(values, axis=0),
        steps.mean(),
        rejected.mean(),
    )
