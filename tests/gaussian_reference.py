"""The reference problem of Gaussian tokens: its matrices, its values, its equations.

The values were computed once, by another program, at tolerance 1e-12. The equations are
written out in NumPy, from the table of closures, for all matrices.
"""

import numpy as np
import scipy.integrate

import meanformer as mf

QUERY = np.array([[0.6, -0.2], [0.3, 0.5]])
KEY = np.array([[0.4, 0.1], [-0.3, 0.7]])
VALUE = np.array([[0.5, 0.2], [-0.1, 0.8]])
SCORE = np.array([[0.15, -0.23], [0.27, 0.33]])
MEAN = np.array([0.3, -0.4])
COVARIANCE = np.array([[1.0, 0.3], [0.3, 0.6]])

KINDS = {
    "softmax": mf.Softmax,
    "l2": mf.L2,
    "sinkhorn": mf.Sinkhorn,
    "linear": mf.Linear,
}
PRECISE = {"rtol": 1e-12, "atol": 1e-14}


def gaussian(mean=MEAN, covariance=COVARIANCE, dtype=np.float64):
    """The Gaussian of the reference problem."""
    return mf.Gaussian(np.asarray(mean, dtype), np.asarray(covariance, dtype))


def attention(kind, beta=1.0, matrices=(QUERY, KEY, VALUE), dtype=np.float64):
    """The attention of the reference problem."""
    return KINDS[kind](*(np.asarray(x, dtype) for x in matrices), beta=beta)


def numbers(mu):
    """Mean and covariance as the five numbers of the tables."""
    mean, spread = np.asarray(mu.mean()), np.asarray(mu.covariance())
    return np.array([*mean, spread[0, 0], spread[0, 1], spread[1, 1]])


def affine(x):
    """The activation of a perceptron without one."""
    return x


def perceptron(matrix, shift):
    """The affine map as a perceptron."""
    size = len(matrix)
    return mf.Perceptron(np.eye(size), np.zeros(size), matrix, shift, activation=affine)


def root_of(matrix):
    """The symmetric square root."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def conditional_covariance(form, spread):
    """The conditional covariance of the entropic plan of a Gaussian onto itself."""
    root, identity = root_of(spread), np.eye(len(spread))
    inner = root @ form @ spread @ form.T @ root
    middle = 2 * np.linalg.inv(identity + root_of(identity + 4 * inner))
    return root @ middle @ root


def slope_and_constant(kind, matrices, beta, mean, spread):
    """The table of closures: L and c of the velocity c + L x."""
    query, key, value = matrices
    score = key.T @ query
    if kind == "softmax":
        return beta * value @ spread @ score, value @ mean
    if kind == "l2":
        system = np.eye(len(mean)) + 2 * beta * spread @ key.T @ key
        narrow = np.linalg.inv(system)
        return 2 * beta * value @ narrow @ spread @ score, value @ narrow @ mean
    if kind == "linear":
        second = spread + np.outer(mean, mean)
        return beta * value @ second @ score, np.zeros(len(mean))
    form = 2 * beta * score
    slope = value @ conditional_covariance(form, spread) @ form
    return slope, value @ mean - slope @ mean


def integrated(closure, mean, spread, depths, points=None):
    """Mean, covariance and points along depth, by SciPy, from the plain equations.

    Args:
        closure: takes depth, mean and covariance, returns L and c.
        mean: the first mean.
        spread: the first covariance.
        depths: the first depth, and those to return the state at.
        points: points carried along, one per row.
    """
    size = len(mean)
    points = np.zeros((0, size)) if points is None else points
    first = np.concatenate([mean, spread.ravel(), points.ravel()])

    def parts(state):
        cuts = [size, size + size**2]
        mean, spread, points = np.split(state, cuts)
        return mean, spread.reshape(size, size), points.reshape(-1, size)

    def field(depth, state):
        mean, spread, points = parts(state)
        slope, constant = closure(depth, mean, spread)
        moved = slope @ spread
        change = slope @ mean + constant, moved + moved.T, points @ slope.T + constant
        return np.concatenate([part.ravel() for part in change])

    ends = depths[0], depths[-1]
    options = {"method": "DOP853", "rtol": 1e-12, "atol": 1e-13}
    found = scipy.integrate.solve_ivp(field, ends, first, t_eval=depths, **options)
    assert found.success
    return [parts(state) for state in found.y.T]
