"""Where tokens go: predicted from the matrices, followed, and compared."""

import jax
import numpy as np

import meanformer as mf

jax.config.update("jax_enable_x64", True)

value = np.array([[0.65, 0.82], [0.61, 0.63]])
attention = mf.Softmax(np.eye(2), np.eye(2), value)
print(mf.observables.predict_limit(attention))

tokens = np.random.default_rng(0).normal(size=(30, 2))
report = mf.observables.find_limit(attention, mf.TokenCloud(tokens))
print(report.detection)
print(report.agrees, report.detection.offsets)
