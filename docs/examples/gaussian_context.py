"""Attention with a Gaussian context, against the closed form."""

import jax.numpy as jnp

import meanformer as mf

context = mf.Gaussian(
    mean=jnp.array([0.3, -0.4]), covariance=jnp.diag(jnp.array([1.0, 0.5]))
)
attention = mf.identity_attention("softmax", dimension=2, beta=0.5)
queries = jnp.array([[1.0, 0.0], [0.0, 2.0]])
values = attention(context, queries)
expected = context.mean() + 0.5 * queries @ context.covariance()
