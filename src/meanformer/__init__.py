"""The numerical laboratory for transformers seen as maps between measures.

    measure  --tilt-->  in-context map  --depth-->  flow of measures

The names below are the front door. Rooms with heavier dependencies (`observables`,
`plotting`, `storage`, `experiments`) are loaded on first use.
"""

import importlib
from typing import Any

from meanformer.attention import L2 as L2
from meanformer.attention import AbstractAttention as AbstractAttention
from meanformer.attention import AbstractInContextMap as AbstractInContextMap
from meanformer.attention import AbstractMask as AbstractMask
from meanformer.attention import Blocks as Blocks
from meanformer.attention import Causal as Causal
from meanformer.attention import Composition as Composition
from meanformer.attention import Hardmax as Hardmax
from meanformer.attention import LayerNorm as LayerNorm
from meanformer.attention import Linear as Linear
from meanformer.attention import Masked as Masked
from meanformer.attention import MultiHead as MultiHead
from meanformer.attention import Perceptron as Perceptron
from meanformer.attention import PointMap as PointMap
from meanformer.attention import Prefix as Prefix
from meanformer.attention import Residual as Residual
from meanformer.attention import RMSNorm as RMSNorm
from meanformer.attention import Sigmoid as Sigmoid
from meanformer.attention import Sinkhorn as Sinkhorn
from meanformer.attention import Softmax as Softmax
from meanformer.attention import StrictCausal as StrictCausal
from meanformer.attention import Sum as Sum
from meanformer.attention import UnitNorm as UnitNorm
from meanformer.attention import Unnormalised as Unnormalised
from meanformer.attention import Window as Window
from meanformer.attention import adversarial_cloud as adversarial_cloud
from meanformer.attention import attention_matrix as attention_matrix
from meanformer.attention import compose as compose
from meanformer.attention import identity_attention as identity_attention
from meanformer.attention import in_order as in_order
from meanformer.attention import lipschitz_bounds as lipschitz_bounds
from meanformer.attention import lipschitz_report as lipschitz_report
from meanformer.attention import local_lipschitz as local_lipschitz
from meanformer.attention import maximise_lipschitz as maximise_lipschitz
from meanformer.attention import push_forward as push_forward
from meanformer.attention import stability_constant as stability_constant
from meanformer.attention import standard_beta as standard_beta
from meanformer.errors import InvalidInput as InvalidInput
from meanformer.errors import Overflow as Overflow
from meanformer.errors import PrecisionWarning as PrecisionWarning
from meanformer.errors import StoppedEarly as StoppedEarly
from meanformer.errors import Unsupported as Unsupported
from meanformer.flows import Adaptive as Adaptive
from meanformer.flows import EscapeRadius as EscapeRadius
from meanformer.flows import FixedStep as FixedStep
from meanformer.flows import Flow as Flow
from meanformer.flows import Schedule as Schedule
from meanformer.flows import Splitting as Splitting
from meanformer.flows import Status as Status
from meanformer.flows import SteadyState as SteadyState
from meanformer.flows import StepBudget as StepBudget
from meanformer.flows import Stiff as Stiff
from meanformer.flows import StopWhen as StopWhen
from meanformer.flows import Trajectory as Trajectory
from meanformer.flows import growth_factor as growth_factor
from meanformer.flows import lipschitz_profile as lipschitz_profile
from meanformer.flows import observed_growth as observed_growth
from meanformer.flows import radius_bound as radius_bound
from meanformer.flows import run_layers as run_layers
from meanformer.flows import solve as solve
from meanformer.flows import stability_bound as stability_bound
from meanformer.geometry import Euclidean as Euclidean
from meanformer.geometry import Sphere as Sphere
from meanformer.measures import AbstractMeasure as AbstractMeasure
from meanformer.measures import Gaussian as Gaussian
from meanformer.measures import Mixture as Mixture
from meanformer.measures import TokenCloud as TokenCloud
from meanformer.measures import UniformBox as UniformBox
from meanformer.measures import UniformSphere as UniformSphere
from meanformer.measures import batch as batch
from meanformer.measures import conditional_wasserstein as conditional_wasserstein
from meanformer.measures import merge as merge
from meanformer.measures import mix as mix
from meanformer.measures import pad as pad
from meanformer.measures import quadrature as quadrature
from meanformer.measures import sinkhorn_divergence as sinkhorn_divergence
from meanformer.measures import transport_map as transport_map
from meanformer.measures import transport_plan as transport_plan
from meanformer.measures import wasserstein as wasserstein
from meanformer.numerics.pair_sums import Auto as Auto
from meanformer.numerics.pair_sums import Blocked as Blocked

_ROOMS = ("experiments", "observables", "plotting", "storage")


def __getattr__(name: str) -> Any:
    if name == "open_run":
        from meanformer.storage import open_run

        return open_run
    if name in _ROOMS:
        return importlib.import_module(f"meanformer.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("meanformer")
    raise AttributeError(f"module 'meanformer' has no attribute {name!r}")
