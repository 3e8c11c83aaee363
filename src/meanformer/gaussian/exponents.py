"""How eigenvalues grow and decay over decades of depth, read off their logarithms."""

import dataclasses
import itertools
from typing import NamedTuple

import equinox as eqx
import numpy as np
from scipy.optimize import linear_sum_assignment

# Exponents within so much of zero belong to a limit, below the other to a decay.
LEVEL, DECAY = 0.02, -0.5
# Larger ones belong to a limit too if they fall by this factor in every decade, faster
# than those of the logarithm do.
SMALL, FALLING = 0.1, 0.7
# What grows like a power keeps its exponent from decade to decade.
KEPT = 0.9
# So much larger, at a rate that changes by less than the other while the trace grows
# ten times: exponential growth.
GROWN, STEADY = 1e4, 1.5
# Eigenvalues whose exponents differ by less stay comparable.
COMPARABLE = 0.1
# Logarithm of the ratio of columns that are told apart by their size alone.
SEPARATE = 25.0
# What an eigenvector that stays counts, in changes of the logarithm of its eigenvalue.
OVERLAP = 5.0
# Logarithm of the ratio of eigenvalues of which the smaller is lost in a factor.
ROUNDED = 55.0
REACHED, BLEW_UP, ESCAPED, UNFINISHED = "reached", "blew up", "escaped", "unfinished"
UNRESOLVED = "unresolved"
# By the status of the solve; others are unfinished.
ENDINGS = {"blow_up_suspected": BLEW_UP}
ENDINGS |= {name: name for name in (REACHED, ESCAPED, UNRESOLVED)}


@dataclasses.dataclass(frozen=True)
class LongRun:
    r"""A covariance followed over many decades of depth.

    An eigenvalue that tends to zero does so exponentially, and is soon lost in
    rounding, or like a power of depth, here $1/t$ as a rule, so that no threshold tells
    it from a positive limit. The exponent $p = \mathrm{d}\log\lambda/\mathrm{d}\log t$
    does: it tends to $-1$, not to $0$. Eigenvalues are matched from depth to depth by
    their eigenvectors, since they may cross.

    Attributes:
        depths: the depths of the integrator's steps, or those saved.
        log_eigenvalues: the logarithms of the eigenvalues there, largest first; minus
            infinity for those that are zero.
        eigenvectors: the eigenvectors there, as columns.
        ending: `"reached"`, `"blew up"`, `"escaped"` (beyond all numbers),
            `"unresolved"` (the slope cancels down to rounding) or `"unfinished"` (the
            steps were used up).
        exponents: those of the last eigenvalues over the last decade of depth.
        previous_exponents: those over the decade before, to see if they have settled.
        limit_factor: a factor of the limit of the covariance, of as many columns as its
            rank, where it is known in closed form; else `None`.
    """

    depths: np.ndarray
    log_eigenvalues: np.ndarray
    eigenvectors: np.ndarray
    ending: str
    exponents: np.ndarray
    previous_exponents: np.ndarray
    limit_factor: np.ndarray | None = None

    def __repr__(self) -> str:
        """Show the shapes of arrays, which are long, and all else as it is."""
        return eqx.tree_pformat(self)

    @property
    def eigenvalues(self) -> np.ndarray:
        """The last eigenvalues, largest first."""
        return np.exp(self.log_eigenvalues[-1])

    @property
    def vectors(self) -> np.ndarray:
        """The last eigenvectors, as columns."""
        return self.eigenvectors[-1]

    @property
    def covariances(self) -> np.ndarray:
        """The covariances at all depths."""
        values, vectors = np.exp(self.log_eigenvalues), self.eigenvectors
        return (vectors * values[:, None, :]) @ vectors.swapaxes(1, 2)

    @property
    def log_traces(self) -> np.ndarray:
        """The logarithms of the traces."""
        return np.logaddexp.reduce(self.log_eigenvalues, axis=1)

    @property
    def is_settled(self) -> bool:
        """Whether every exponent is that of a limit or a decay, and stays so."""
        now, before = self.exponents, self.previous_exponents
        level = (np.abs(now) <= LEVEL) & (np.abs(before) <= LEVEL)
        levels_off = np.abs(now) <= np.minimum(SMALL, FALLING * np.abs(before))
        decays = (now <= DECAY) & (before <= DECAY)
        has_ended = self.ending in (REACHED, UNRESOLVED)
        stay = [p > p.max() - COMPARABLE for p in (now, before)]
        is_steady = np.array_equal(*stay)
        return bool(has_ended and is_steady and (level | levels_off | decays).all())

    @property
    def grows(self) -> bool:
        """Whether the trace grows like a power of depth, or faster."""
        now, before = self.exponents.max(), self.previous_exponents.max()
        return bool(now > max(LEVEL, KEPT * before))

    @property
    def rank(self) -> int:
        """How many eigenvalues do not tend to zero."""
        if self.limit_factor is not None:
            return self.limit_factor.shape[1]
        return int(np.sum(self.exponents > DECAY))

    @property
    def normalised_rank(self) -> int:
        """How many stay comparable to the largest: the rank of the limit of S/tr S."""
        if self.limit_factor is not None and self.rank > 0:
            return self.rank
        return int(np.sum(self.exponents > self.exponents.max() - COMPARABLE))

    @property
    def limit(self) -> np.ndarray:
        """The limit where it is known in closed form; else the last covariance.

        The latter without the eigenvalues that tend to zero. `limit_error` tells how
        far from the limit it is.
        """
        if self.limit_factor is not None:
            return self.limit_factor @ self.limit_factor.T
        values = np.where(self.exponents > DECAY, self.eigenvalues, 0)
        return (self.vectors * values) @ self.vectors.T

    @property
    def limit_error(self) -> float:
        """About how far `limit` is from the limit; zero where this is known.

        Else how far the covariance went in the last decade of depth: nine times what is
        left, if it tends to its limit like one over depth.
        """
        if self.limit_factor is not None:
            return 0.0
        earlier = _decades_before(self.depths)[1]
        return float(np.linalg.norm(self.covariances[-1] - self.covariances[earlier]))

    @property
    def growth_rates(self) -> tuple[float, float]:
        r"""The rate of $\log\operatorname{tr}S$ at a tenth of the last trace, and last.

        They agree for exponential growth; towards a blow-up the second is ten times the
        first. NaN where too few depths are known.
        """
        logs, rates = self.log_traces, np.array([])
        if len(logs) > 1:
            rates = np.diff(logs) / np.diff(self.depths)
        earlier = int(np.searchsorted(logs[1:], logs[-1] - np.log(10)))
        if earlier > len(rates) - 3:
            return np.nan, np.nan
        return float(rates[earlier]), float(rates[-1])

    @property
    def grows_exponentially(self) -> bool:
        """Whether the trace has grown far, at last at a rate that did not change."""
        earlier, last = self.growth_rates
        is_steady = earlier > 0 and earlier / STEADY < last < earlier * STEADY
        grown = self.log_traces[-1] - self.log_traces[0]
        return bool(grown > np.log(GROWN) and is_steady)


class Spectrum(NamedTuple):
    """Logarithms of the eigenvalues of a covariance, largest first; eigenvectors."""

    logs: np.ndarray
    vectors: np.ndarray


def spectrum_of(factor: np.ndarray, log_scales: np.ndarray | None = None) -> Spectrum:
    r"""Return the spectrum of $FDF^\top$ to relative accuracy, however graded $D$ is.

    With the columns in the order of their size, $F = QR$, and the diagonal blocks of
    $RD^{1/2}$ that belong to columns of like size have its singular values, up to the
    ratio of these sizes. The scales are the logarithms of the diagonal of $D$.
    """
    sizes = np.linalg.norm(factor, axis=0)
    with np.errstate(divide="ignore"):
        logs = 2 * np.log(sizes)
    logs = logs if log_scales is None else logs + log_scales
    order = np.argsort(-logs, kind="stable")
    logs = logs[order]
    basis, upper = np.linalg.qr(factor[:, order] / np.where(sizes > 0, sizes, 1)[order],
                                mode="complete")  # fmt: skip
    values = np.full(len(factor), -np.inf)
    starts = [0, *(1 + np.flatnonzero(np.diff(logs) < -SEPARATE)), len(logs)]
    for start, stop in itertools.pairwise(starts):
        if np.isneginf(logs[start]):
            break
        block = upper[start:stop, start:stop]
        scales = np.exp((logs[start:stop] - logs[start]) / 2)
        turn, singular, _ = np.linalg.svd(block * scales[None, :])
        with np.errstate(divide="ignore"):
            values[start:stop] = logs[start] + 2 * np.log(singular)
        basis[:, start:stop] = basis[:, start:stop] @ turn
    ranked = np.argsort(-values, kind="stable")
    return Spectrum(values[ranked], basis[:, ranked])


def completed(spectrum: Spectrum, log_det: float) -> Spectrum:
    """Give eigenvalues that are lost in rounding their share of the determinant."""
    is_lost = spectrum.logs < spectrum.logs[0] - ROUNDED
    left = log_det - spectrum.logs[~is_lost].sum()
    logs = np.where(is_lost, left / max(is_lost.sum(), 1), spectrum.logs)
    return spectrum._replace(logs=logs)


def run_of(depths: np.ndarray, ending: str, spectra: list[Spectrum]) -> LongRun:
    """Read the exponents off the eigenvalues, at three depths a decade apart."""
    kept, exponents = np.arange(len(spectra[0].logs)), []
    for later, earlier in itertools.pairwise(_decades_before(depths)):
        now, then = spectra[later], spectra[earlier]
        order = _matched(Spectrum(now.logs[kept], now.vectors[:, kept]), then)
        span = np.log(depths[later] / depths[earlier]) if later > earlier else np.inf
        with np.errstate(invalid="ignore"):
            slopes = (now.logs[kept] - then.logs[order]) / span
        exponents.append(np.where(np.isneginf(now.logs[kept]), -np.inf, slopes))
        kept = order
    return LongRun(
        depths,
        np.stack([spectrum.logs for spectrum in spectra]),
        np.stack([spectrum.vectors for spectrum in spectra]),
        ending,
        exponents[0],
        exponents[1],
    )


def _decades_before(depths: np.ndarray) -> list[int]:
    """Return the number of the last depth, and of those one and two decades before.

    One step may pass over decades: then they are further apart.
    """
    places = [len(depths) - 1]
    for decade in (10, 100):
        early = np.searchsorted(depths, depths[-1] / decade, side="right") - 1
        # Not depth zero, whose logarithm is infinite.
        places.append(max(min(int(early), places[-1] - 1), min(1, places[0])))
    return places


def _matched(later: Spectrum, earlier: Spectrum) -> np.ndarray:
    """Return for each later eigenvalue the number of the earlier one it came from.

    Eigenvalues that cross keep their eigenvectors; a covariance that turns keeps its
    eigenvalues. Which of the two it is shows in the sum of both changes.
    """
    floor = np.log(np.finfo(float).tiny)
    logs = [np.maximum(spectrum.logs, floor) for spectrum in (later, earlier)]
    overlaps = (later.vectors.T @ earlier.vectors) ** 2
    changes = np.abs(np.subtract.outer(*logs))
    return linear_sum_assignment(changes - OVERLAP * overlaps)[1]
