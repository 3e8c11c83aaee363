"""What is no map, or no affine one, is refused with useful words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from gaussian_reference import COVARIANCE
from meanformer import gaussian
from meanformer.errors import InvalidInput, Unsupported
from meanformer.gaussian import affine_velocity, centred

IDENTITY, START = np.eye(2), centred(COVARIANCE)

STEPS = {
    "sign": jnp.sign,
    "floor": jnp.floor,
    "stop_gradient": lambda x: jax.lax.stop_gradient(x),
}
QUESTIONS = {
    "classify": lambda gamma: gaussian.classify(gamma, START),
    "limit_of": lambda gamma: gaussian.limit_of(gamma, START),
    "affine_velocity": lambda gamma: affine_velocity(gamma, START),
    "closure_residual": lambda gamma: gaussian.closure_residual(gamma, START),
    "stationary_points": lambda gamma: gaussian.stationary_points(
        gamma, 2, 1, key=jax.random.key(0)
    ),
    "is_stationary": lambda gamma: gaussian.is_stationary(gamma, START),
    "blowup_time": lambda gamma: gaussian.blowup_time(gamma, START),
}
WRONG = {
    "flow": (
        mf.Flow(mf.Softmax(IDENTITY, IDENTITY, IDENTITY)),
        r"a Flow; give its velocity, flow\.velocity\.gamma",
    ),
    "function": (lambda x: x, "a function; give the map at one depth"),
    "number": (3, "a int; it must be an attention"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_perceptron_that_jumps_is_not_affine_though_its_derivative_is_zero(name):
    gamma = mf.Perceptron(IDENTITY, np.zeros(2), IDENTITY, activation=STEPS[name])
    with pytest.raises(Unsupported, match="its value jumps"):
        affine_velocity(gamma, START)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_map_is_refused_with_what_to_give(question, wrong, untyped):
    gamma, message = WRONG[wrong]
    with pytest.raises(InvalidInput, match=message):
        QUESTIONS[question](gamma)
