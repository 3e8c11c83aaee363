r"""Did training converge, and why: the Polyak-Lojasiewicz inequality along the way."""

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

# Eigenvalues below this share of the largest are zero but for rounding.
ZERO = 1e-10
# Relative differences that rounding, and the tolerance of steps, may make.
SAME, TINY = 1e-6, 1e-28
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
            f"{float(self.smallest[0]):.3g} to {float(self.smallest[-1]):.3g}, "
            f"distance {float(self.distances[-1]):.3g}, bound {self.bound:.3g}."
        )
        if self.is_short:
            text += " There are fewer numbers in the heads than outputs."
        if self.verdict == "failed":
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
    such a ball exists if $R(0) \le 2\lambda(0)^3/(27\ell^2)$.

    Args:
        run: what `train` returned.
        data: what it was trained on.
        lipschitz: the constant $\ell$; by default the largest quotient seen between
            saved times, which is an estimate and no bound.
        tolerance: a gradient whose squared norm is below this share of the risk stalls.
    """
    check(
        isinstance(run, TrainingRun) and run.start is not None,
        "run must be what train returned; of one that was read from a file, call train "
        "with the same arguments and its store.",
    )
    here, last = float(risk(run.model, data)), float(run.risks[-1])
    check(
        abs(here - last) <= SAME * here + TINY,
        f"the squared error of the run on these data is {here:.6g}, its own risk was "
        f"{last:.6g}; a certificate is for the data, the loss squared_error and no "
        "decay.",
    )
    models = [run.at(index) for index in range(len(run))]
    systems = [np.linalg.eigh(np.asarray(tangent_kernel(one, data))) for one in models]
    smallest, largest = np.array([values[[0, -1]] for values, _ in systems]).T
    distances = np.array([float(cot_distance(models[0], one)) for one in models])
    is_positive = smallest > ZERO * largest
    rates = np.where(is_positive, smallest, 0) / len(data)
    if lipschitz is None:
        steps, changes = np.abs(np.diff(distances)), np.abs(np.diff(rates))
        slopes = changes[steps > 0] / steps[steps > 0]
        lipschitz = float(slopes.max(initial=0.0))
    risks, squares = np.asarray(run.risks), np.asarray(run.squared_norms)
    constants = squares / np.maximum(2 * risks, np.finfo(risks.dtype).tiny)
    residual, culprits = _stuck(models[-1], data, *systems[-1])
    is_stuck = constants[-1] < tolerance or residual**2 > 1 / 2
    falls = bool((np.diff(risks) <= SAME * risks[:-1] + TINY).all())
    times = np.asarray(run.times - run.times[0])
    envelope = risks[0] * np.exp(-2 * rates.min() * times)
    obeys = bool((risks <= (1 + SAME) * envelope + TINY).all())
    in_ball = is_positive.all() and risks[0] * lipschitz**2 <= 2 * rates[0] ** 3 / 27
    verdict = "certified" if in_ball and obeys else "observed"
    is_well = falls and bool(run.status != Status.diverging)
    if risks[-1] > 0 and (is_stuck or not is_well):
        verdict = "failed"
    numbers = sum(leaf.size for leaf in jax.tree.leaves(models[0].parameters))
    return Certificate(
        verdict,
        *map(jnp.asarray, (smallest, largest, constants, distances)),
        math.sqrt(2 * risks[0] / rates.min()) if is_positive.all() else math.inf,
        lipschitz,
        residual,
        culprits,
        numbers < data.queries.size,
    )


def _stuck(
    model: MeanFieldTransformer, data: Dataset, values: np.ndarray, vectors: np.ndarray
) -> tuple[float, tuple[int, ...]]:
    """Return the share of the residual that no head moves, and who carries it."""
    residual = np.asarray(outputs(model, data) - data.targets).ravel()
    null = vectors[:, values <= ZERO * values[-1]]
    part = null @ (null.T @ residual)
    size = np.linalg.norm(residual)
    if size == 0 or null.shape[1] == 0:
        return 0.0, ()
    carried = np.linalg.norm(part.reshape(len(data), -1), axis=1)
    order = np.argsort(-carried)
    culprits = order[carried[order] > SHARE * carried.max()]
    return float(np.linalg.norm(part) / size), tuple(map(int, culprits))
