"""How far low temperature moves clusters away from their leaders, to first order."""

import numpy as np
from jaxtyping import Float, Int

from meanformer.attention import Softmax
from meanformer.errors import check
from meanformer.flows import HardmaxPath, hardmax_flow
from meanformer.measures import TokenCloud
from meanformer.numerics.special.quadrature import gauss_panels
from meanformer.observables.low_temperature.comparison import checked_grid
from meanformer.typing import ArrayLike

# The integrand varies on the scales 1/s_k, so pieces double in length with u, from far
# inside of the smallest scale on.
SMALLEST_PIECE, NODES_PER_PIECE = 1e-2, 16


def low_temperature_shift(
    attention: Softmax, cloud: TokenCloud, depths: ArrayLike, betas: ArrayLike
) -> Float[np.ndarray, "b t n d"]:
    r"""Predict how softmax moves each cluster off the leader it has under hardmax.

    Let all tokens of a cluster follow the leader $v$ from the start,
    $y_k = v - z_k(0)$, and $V = \lambda I$. Near $v$ all of them look in the direction
    $Av$, so all move towards one mean; their differences shrink like $e^{-\lambda t}$
    exactly, and all are moved by one vector,
    $$\delta(t) = -\int_{e^{-\lambda t}}^1 \sum_k p_k(u)\,y_k\,\mathrm{d}u, \qquad
      p_k(u) \propto w_k e^{-\beta u\langle Av, y_k\rangle} .$$
    Its component along $Av$ is explicit, since the log-Laplace transform of the cluster
    at $\beta Av$ does not change:
    $$\langle Av, \delta(\infty)\rangle = \frac1\beta\log\sum_k
      \frac{w_k}{W}\,e^{-\beta\langle Av, y_k\rangle}
      \approx -\frac1\beta\log\frac{W}{w_v}, \qquad W = \sum_k w_k .$$
    So the shift is exponentially small while $\beta e^{-\lambda t}$ is large, and of
    order $1/\beta$ beyond. Derived here to first order in $1/\beta$, with an error of
    order $1/\beta^2$ (observed), up to terms that are exponentially small in $\beta$
    times the margin by which leaders win; those end the metastable phase.

    Args:
        attention: softmax attention whose value is a positive multiple of the identity;
            its own temperature does not matter.
        cloud: tokens that follow one leader each; from a cloud in which some follow
            followers start later, at `hardmax_flow(...).at(depth)`. Tokens of weight
            zero that follow no single leader have the shift zero.
        depths: increasing depths.
        betas: inverse temperatures, positive.

    Returns:
        The shift of each token. Cost: $O(n d\log\beta)$ for each pair of depth and
        temperature.
    """
    places, temperatures = checked_grid(depths, betas)
    path = hardmax_flow(attention, cloud, 0.0)
    leaders = _leaders(path)
    points = np.asarray(cloud.points, np.float64)
    lags = points[leaders] - points
    gains = np.einsum("nd,nd->n", points[leaders] @ path.rule.score.T, lags)
    weights = np.asarray(cloud.weights, np.float64)
    ends = np.exp(-path.phases[0].value[0, 0] * places)
    shift = np.zeros((len(temperatures), len(places), *points.shape))
    for leader in np.unique(leaders[leaders >= 0]):
        group = (leaders == leader) & (weights > 0)
        moved = [
            [-_integral(weights[group], b * gains[group], lags[group], e) for e in ends]
            for b in temperatures
        ]
        shift[:, :, leaders == leader] = np.array(moved)[:, :, None]
    return shift


def _leaders(path: HardmaxPath) -> Int[np.ndarray, " n"]:
    settled = path.settled()
    follows = settled.is_settled & ~settled.is_tied[-1] & (settled.leader_of >= 0)
    present = np.asarray(path.start.weights) > 0
    check(
        bool(follows[present].all()),
        f"{int((~follows & present).sum())} of {int(present.sum())} tokens do not "
        "follow a single leader at the start; run hardmax_flow and start at a depth "
        "where all of them do.",
    )
    return np.where(follows, settled.leader_of, -1)


def _integral(weights, slopes, lags: Float[np.ndarray, "k d"], end: float):
    r"""Integrate $\sum_k p_k(u)y_k$, $p_k \propto w_ke^{-us_k}$, from the end to 1."""
    from scipy.special import softmax

    first = SMALLEST_PIECE / max(float(slopes.max()), 1.0)
    count = int(np.ceil(-np.log2(first)))
    cuts = np.unique(np.clip(np.append(0.0, 2.0 ** -np.arange(count + 1.0)), end, 1))
    places, masses = gauss_panels(cuts, NODES_PER_PIECE)
    logs = np.log(weights)[None] - places[:, None] * slopes[None]
    return masses @ (softmax(logs, axis=1) @ lags)
