"""The numerical laboratory for transformers seen as maps between measures.

    measure  --tilt-->  in-context map  --depth-->  flow of measures

Every name below is the front door to its room, and is loaded on first use, so that the
command line can say its help at once. `__init__.pyi` tells type checkers the same.
"""

import importlib
from typing import Any

_HOMES = {
    "attention": (
        "AbstractAttention",
        "AbstractInContextMap",
        "AbstractMask",
        "Blocks",
        "Causal",
        "Composition",
        "Hardmax",
        "L2",
        "LayerNorm",
        "Linear",
        "Masked",
        "MultiHead",
        "NearestOther",
        "Perceptron",
        "PointMap",
        "Prefix",
        "RMSNorm",
        "Residual",
        "Sigmoid",
        "Sinkhorn",
        "Softmax",
        "StrictCausal",
        "Sum",
        "UnitNorm",
        "Unnormalised",
        "Window",
        "adversarial_cloud",
        "attention_matrix",
        "compose",
        "identity_attention",
        "in_order",
        "lipschitz_bounds",
        "lipschitz_report",
        "local_lipschitz",
        "maximise_lipschitz",
        "push_forward",
        "stability_constant",
        "standard_beta",
    ),
    "errors": (
        "InvalidInput",
        "LostDepths",
        "Overflow",
        "PrecisionWarning",
        "QuadratureWarning",
        "SlowSums",
        "StoppedEarly",
        "Unsupported",
    ),
    "flows": (
        "Adaptive",
        "BooleanAttention",
        "CustomScheme",
        "DensityTrajectory",
        "EscapeRadius",
        "FixedStep",
        "Flow",
        "GaussianTrajectory",
        "HardmaxRun",
        "LongDepth",
        "Merge",
        "MixNorm",
        "NGPT",
        "PeriNorm",
        "PostNorm",
        "PreNorm",
        "Rescaled",
        "Schedule",
        "Spectral",
        "Splitting",
        "SqrtScaling",
        "Status",
        "SteadyState",
        "StepBudget",
        "Stiff",
        "StopWhen",
        "Switching",
        "Trajectory",
        "append_tokens",
        "growth_factor",
        "lipschitz_profile",
        "normalised_flow",
        "observed_growth",
        "radius_bound",
        "run_hardmax",
        "run_layers",
        "solve",
        "solve_many",
        "stability_bound",
    ),
    "geometry": (
        "Cells",
        "Euclidean",
        "Sphere",
    ),
    "measures": (
        "AbstractMeasure",
        "FourierDensity",
        "Gaussian",
        "Mixture",
        "TokenCloud",
        "UniformBall",
        "UniformBox",
        "UniformSphere",
        "batch",
        "circle_moments",
        "conditional_wasserstein",
        "merge",
        "mix",
        "pad",
        "quadrature",
        "resample",
        "sinkhorn_divergence",
        "transport_map",
        "transport_plan",
        "wasserstein",
    ),
    "numerics.fourier.sums": (
        "Auto",
        "Fourier",
    ),
    "numerics.pair_sums.sums": ("Blocked",),
    "numerics.sharded.sums": ("Sharded",),
    "storage": (
        "RunStore",
        "open_run",
    ),
}
_ROOMS = (
    "attention",
    "errors",
    "experiments",
    "flows",
    "gaussian",
    "geometry",
    "mean_field",
    "measures",
    "observables",
    "plotting",
    "storage",
)
_ROOM_OF = {name: room for room, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        room = importlib.import_module(f"meanformer.{_ROOM_OF[name]}")
        globals()[name] = value = getattr(room, name)
        return value
    if name in _ROOMS:
        return importlib.import_module(f"meanformer.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("meanformer")
    raise AttributeError(_unknown(name))


def _unknown(name: str) -> str:
    """One sentence saying that a name is not known, and which one is near."""
    sentence = f"module 'meanformer' has no attribute {name!r}"
    if name.startswith("_"):
        # Tools ask every module for such names; the answer must stay cheap.
        return sentence
    from meanformer.errors import hint

    close = hint(name, __dir__())
    return f"{sentence}{close}; dir(meanformer) lists what it has."


def __dir__() -> list[str]:
    return [*_ROOM_OF, *_ROOMS]
