"""The reference problem of four tokens, and its tabulated values.

Four weighted tokens and three matrices in the plane, without symmetry and without
randomness. The values were computed once, by a dense program in double precision.
"""

import jax.numpy as jnp
import numpy as np

from meanformer.attention import Softmax
from meanformer.measures import TokenCloud

POINTS = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5], [0.5, -1.0]])
WEIGHTS = np.array([0.4, 0.3, 0.2, 0.1])
QUERY = np.array([[0.6, -0.2], [0.3, 0.5]])
KEY = np.array([[0.4, 0.1], [-0.3, 0.7]])
VALUE = np.array([[0.5, 0.2], [-0.1, 0.8]])
SCORE = np.array([[0.15, -0.23], [0.27, 0.33]])
SECOND_HEAD = np.array([[0.0, -0.3], [0.3, 0.0]])
PLACES = np.array([0.25, 0.5, 0.75, 1.0])
TIED_PLACES = np.array([0.25, 0.5, 0.5, 1.0])

RADIUS = 1.118033988749895
SCORE_NORM = 0.4387499135961979
VALUE_NORM = 0.8251970862147358
MEAN = np.array([0.25, 0.3])
VALUE_OF_MEAN = np.array([0.185, 0.215])

SOFTMAX = np.array(
    [
        [0.20779589385374142, 0.26075709257100954],
        [0.11570336513508532, 0.36131071831819583],
        [0.12302651098629927, 0.24562379907049642],
        [0.25759354442221544, 0.08429929984470823],
    ]
)
HARDMAX = np.array([[0.2, 0.8], [-0.4, 0.5], [-0.4, 0.5], [0.05, -0.85]])
L2_VALUES = np.array(
    [
        [0.26122530560942525, 0.26924031873547427],
        [0.08194029608934747, 0.45263422467097336],
        [0.09481223803500141, 0.27030307703291623],
        [0.34969028427597787, -0.017430289258360286],
    ]
)
SINKHORN_THREE_HALF_STEPS = np.array(
    [
        [0.26233499866630977, 0.20235764221178512],
        [0.08644584669011683, 0.4002619706434833],
        [0.09941977762992919, 0.15958225153217542],
        [0.32411543565983036, -0.11894416468484914],
    ]
)
SINKHORN = np.array(
    [
        [0.2641857801929325, 0.1962212334437161],
        [0.08845206479802727, 0.3951577283088587],
        [0.10176143121616284, 0.15192697025661064],
        [0.32437782240186236, -0.12421205921466201],
    ]
)
LINEAR = np.array(
    [
        [0.046425, 0.073875],
        [-0.060025, 0.165725],
        [-0.0764375, 0.0089875],
        [0.0832375, -0.1287875],
    ]
)
UNNORMALISED = np.array(
    [
        [0.23626993371168656, 0.2964883464923927],
        [0.1268181943149821, 0.3960193623605182],
        [0.11338374567789157, 0.22637191076115434],
        [0.2742809945235867, 0.08976038530356323],
    ]
)
SIGMOID = np.array(
    [
        [0.10406855719888806, 0.12586077963861725],
        [0.07760988150649614, 0.1484639728170922],
        [0.07348499297412439, 0.10971731885479881],
        [0.11309021279638468, 0.07557059117020619],
    ]
)
TWO_HEADS = np.array(
    [
        [0.15354716377444147, 0.3753886360150456],
        [0.009763499294411268, 0.45728647657744337],
        [-0.0075569301181458715, 0.2924668961025575],
        [0.20582181819821221, 0.15613595416994294],
    ]
)
ON_THE_SPHERE = np.array(
    [
        [0.0, 0.2566260299005478],
        [0.132005661155077, 0.0],
        [0.12324238377817141, 0.24648476755634283],
        [0.24575183288721092, 0.12287591644360546],
    ]
)
CAUSAL = np.array(
    [
        [0.5, -0.1],
        [0.32970144078140645, 0.4108956776557808],
        [0.1316450725610616, 0.37492891097479764],
        [0.25759354442221544, 0.08429929984470823],
    ]
)
TIED_SECOND_ROW = np.array([0.11978331650165841, 0.43652891772679736])


def reference_cloud(dtype=jnp.float64, positions=None):
    """The four tokens; positions are optional."""
    points, weights = jnp.asarray(POINTS, dtype), jnp.asarray(WEIGHTS, dtype)
    return TokenCloud(points, weights, positions=positions)


def reference_attention(kind=Softmax, dtype=jnp.float64, **options):
    """An attention of this kind with the three matrices."""
    matrices = (jnp.asarray(matrix, dtype) for matrix in (QUERY, KEY, VALUE))
    return kind(*matrices, **options)


def assert_matches(values, expected):
    """Compare to 1e-10, in single precision to 1e-5."""
    tolerance = 1e-10 if values.dtype == np.float64 else 1e-5
    np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance)
