"""A toy: tokens on the circle move towards each other, and one can watch."""

from dataclasses import dataclass

import jax.numpy as jnp

import meanformer as mf
from meanformer.experiments import (
    Claim,
    Experiment,
    Movie,
    Movies,
    Outcome,
    movie_setting,
    setting,
    theory,
)


@dataclass(frozen=True)
class Parameters:
    layers: int = setting(3, help="how many layers", at_least=1)
    movie: Movies = movie_setting()


CLOSER = Claim("closer", "The tokens come closer.", "observation")


def run(parameters, *, progress):
    angles = jnp.array([0.0, 1.0])
    cloud = mf.TokenCloud(jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1))
    flow = mf.Flow(mf.identity_attention("softmax", 2), space=mf.Sphere())
    path = mf.run_layers(flow, cloud, parameters.layers)
    cosine = float(path.points[-1, 0] @ path.points[-1, 1])
    return Outcome(
        [CLOSER.above(cosine, float(jnp.cos(1.0)), source=theory())],
        movies=[Movie(path, "Two tokens $x_i$ < each other.", frames=4, size=(1, 1))],
    )


experiment = Experiment(
    name="toy-moves",
    title="Two tokens move",
    room="flows",
    claims=(CLOSER,),
    parameters=Parameters,
    run=run,
    seconds=1,
)
