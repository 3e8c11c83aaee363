"""Certificates of convergence, by the Polyak-Lojasiewicz inequality along a run."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import check
from meanformer.flows import Status
from meanformer.training.data import Dataset
from meanformer.training.distance import cot_distance
from meanformer.training.gradients import outputs, risk
from meanformer.training.kernels import tangent_kernel
from meanformer.training.runs import TrainingRun
from meanformer.training.transformer import MeanFieldTransformer

# Eigenvalues below this share of the largest, or so many roundings, are zero.
ZERO, ROUNDINGS = 1e-10, 64
# Relative differences that rounding and the tolerance of steps may make, of a risk and
# of the first one.
SAME, NOISE = 1e-6, 1e-9
# The most of the first risk that a gradient flow, in steps, may lose in another way.
LOST = 0.1
# A context carries the residual if it has this share of the largest part.
SHARE = 0.01


class Certificate(eqx.Module):
    r"""What the tangent kernel says of a training run; see `certificate`.

    Attributes:
        verdict: `"certified"`, `"observed"` or `"failed"`.
        smallest: the smallest eigenvalue of the tangent kernel at the saved times.
        largest: the largest.
        constants: $|\nabla R|^2/(2R)$, the constant of the inequality that was seen.
        distances: how far the heads are from the start, by `cot_distance`.
        length: the length of the path.
        bound: $\sqrt{2R(0)/\lambda_*}$, which bounds the length of the path where the
            eigenvalues over $N$ stay above $\lambda_*$; infinite if they do not.
        lipschitz: the constant by which $\lambda_{\min}/N$ changes with the distance.
        residual: where it failed, the share of the residual that no head can move.
        culprits: the contexts that carry this share, those with most of it first.
        is_short: whether there are fewer numbers in the heads than outputs, so that the
            smallest eigenvalue is zero whatever the data.
    """

    verdict: str = eqx.field(static=True)
    smallest: Float[Array, " t"]
    largest: Float[Array, " t"]
    constants: Float[Array, " t"]
    distances: Float[Array, " t"]
    length: float
    bound: float
    lipschitz: float
    residual: float
    culprits: tuple[int, ...] = eqx.field(static=True)
    is_short: bool = eqx.field(static=True)

    def __str__(self) -> str:
        words = {
            "certified": "the inequality holds in a ball that the flow cannot leave",
            "observed": "the risk fell from one saved time to the next",
            "failed": "the risk stalls or rises",
        }
        text = (
            f"{self.verdict}: {words[self.verdict]}. Smallest eigenvalue "
            f"{float(self.smallest[0]):.3g} at the start, "
            f"{float(self.smallest[-1]):.3g} at the end; path of length "
            f"{self.length:.3g}, distance {float(self.distances[-1]):.3g}."
        )
        if math.isfinite(self.bound):
            text += f" Along the flow the path is not longer than {self.bound:.3g}."
        if self.is_short:
            text += " There are fewer numbers in the heads than outputs."
        elif self.verdict == "failed" and self.culprits:
            text += (
                f" A share {self.residual:.3g} of the residual lies where no head "
                f"moves anything, in contexts {', '.join(map(str, self.culprits))}."
            )
        return text


def certificate(
    run: TrainingRun,
    data: Dataset,
    *,
    lipschitz: float | None = None,
    tolerance: float = 1e-10,
) -> Certificate:
    r"""Judge a training run by the tangent kernel along it, for the squared error.

    If $\lambda_{\min}(K)/N \ge \lambda_*$ in the ball of radius $\rho$ around the start
    and $R(0) \le \lambda_*\rho^2/2$, the flow stays in the ball,
    $R(t) \le R(0)e^{-2\lambda_*t}$, and its path is no longer than
    $\sqrt{2R(0)/\lambda_*}$. With a Lipschitz constant $\ell$ of $\lambda_{\min}/N$
    such a ball exists if $R(0) \le 2\lambda(0)^3/(27\ell^2)$. A run that does not obey
    these bounds, or the energy identity to a tenth of $R(0)$, as with an optimiser, is
    never certified.

    Args:
        run: what `train` returned.
        data: what it was trained on.
        lipschitz: the constant $\ell$; by default the largest quotient seen between
            saved times, and between the start and a network of zeros, which is an
            estimate and no bound.
        tolerance: a gradient whose squared norm is below this share of the risk stalls.
    """
    check(
        isinstance(run, TrainingRun) and run.start is not None,
        "run must be what train returned; of one that was read from a file, call train "
        "with the same arguments and its store.",
    )
    here, last = float(risk(run.model, data)), float(run.risks[-1])
    risks, squares = np.asarray(run.risks), np.asarray(run.squared_norms)
    noise = NOISE * risks[0]
    check(
        abs(here - last) <= SAME * here + noise,
        f"the squared error of the run on these data is {here:.6g}, its own risk was "
        f"{last:.6g}; a certificate is for the data, the loss squared_error and no "
        "decay.",
    )
    models = [run.at(index) for index in range(len(run))]
    systems = [np.linalg.eigh(np.asarray(tangent_kernel(one, data))) for one in models]
    smallest, largest = np.array([values[[0, -1]] for values, _ in systems]).T
    distances = np.array([float(cot_distance(models[0], one)) for one in models])
    is_positive = smallest > _zero(smallest.dtype) * largest
    rates = np.where(is_positive, smallest, 0) / len(data)
    if lipschitz is None:
        nothing = models[0].with_parameters(
            jax.tree.map(jnp.zeros_like, models[0].parameters)
        )
        there = np.linalg.eigvalsh(np.asarray(tangent_kernel(nothing, data)))[0]
        far = math.sqrt(models[0].product(*[models[0].parameters] * 2))
        steps = np.append(np.abs(np.diff(distances)), far)
        changes = np.append(np.diff(rates), rates[0] - there / len(data))
        slopes = np.abs(changes[steps > 0]) / steps[steps > 0]
        lipschitz = float(slopes.max(initial=0.0))
    constants = squares / np.maximum(2 * risks, np.finfo(risks.dtype).tiny)
    residual, culprits = _stuck(models[-1], data, *systems[-1])
    is_stuck = constants[-1] < tolerance or residual**2 > 1 / 2
    is_stuck &= bool(risks[-1] > noise)
    falls = bool((np.diff(risks) <= SAME * risks[:-1] + noise).all())
    times = np.asarray(run.times - run.times[0])
    envelope = risks[0] * np.exp(-2 * rates.min() * times)
    length, bound = float(run.lengths[-1]), math.inf
    if is_positive.all():
        bound = math.sqrt(2 * risks[0] / rates.min())
    obeys = bool((risks <= (1 + SAME) * envelope + noise).all()) and length <= bound
    is_flow = abs(float(run.energy_defects[-1])) <= LOST * risks[0]
    in_ball = is_positive.all() and risks[0] * lipschitz**2 <= 2 * rates[0] ** 3 / 27
    verdict = "certified" if in_ball and obeys and is_flow else "observed"
    is_well = falls and bool(run.status != Status.diverging)
    if is_stuck or not is_well:
        verdict = "failed"
    numbers = sum(leaf.size for leaf in jax.tree.leaves(models[0].parameters))
    return Certificate(
        verdict,
        *map(jnp.asarray, (smallest, largest, constants, distances)),
        length,
        bound,
        lipschitz,
        residual,
        culprits,
        numbers < data.queries.size,
    )


def _zero(dtype: np.dtype) -> float:
    return max(ZERO, ROUNDINGS * float(np.finfo(dtype).eps))


def _stuck(
    model: MeanFieldTransformer, data: Dataset, values: np.ndarray, vectors: np.ndarray
) -> tuple[float, tuple[int, ...]]:
    """Return the share of the residual that no head moves, and who carries it."""
    residual = np.asarray(outputs(model, data) - data.targets).ravel()
    null = vectors[:, values <= _zero(values.dtype) * values[-1]]
    part = null @ (null.T @ residual)
    size = np.linalg.norm(residual)
    if size == 0 or null.shape[1] == 0:
        return 0.0, ()
    carried = np.linalg.norm(part.reshape(len(data), -1), axis=1)
    order = np.argsort(-carried)
    culprits = order[carried[order] > SHARE * carried.max()]
    return float(np.linalg.norm(part) / size), tuple(map(int, culprits))
