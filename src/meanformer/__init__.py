"""The numerical laboratory for transformers seen as maps between measures.

    measure  --tilt-->  in-context map  --depth-->  flow of measures

The names of this front door are those that `__init__.pyi` imports. Each is loaded on
first use, so that the command line can say its help at once.
"""

import importlib
import re
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text()
_HOMES = {
    name: home for home, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.M)
}

# Names that were here, by their room; they still work, with a warning.
_MOVED = {
    "attention": "AbstractAttention AbstractMask Blocks Composition NearestOther Prefix"
    " StrictCausal UnitNorm Window adversarial_cloud lipschitz_report"
    " maximise_lipschitz stability_constant",
    "errors": "LostDepths PrecisionWarning QuadratureWarning SlowSums StoppedEarly",
    "flows": "BooleanAttention CustomScheme DensityTrajectory EscapeRadius"
    " GaussianTrajectory HardmaxRun Merge MixNorm NGPT PeriNorm PostNorm PreNorm"
    " Spectral Splitting SqrtScaling SteadyState StepBudget Switching append_tokens"
    " growth_factor lipschitz_profile normalised_flow observed_growth radius_bound"
    " run_hardmax stability_bound",
    "geometry": "Cells",
    "measures": "UniformBall batch circle_moments conditional_wasserstein mix resample"
    " sinkhorn_divergence transport_map transport_plan",
    "storage": "RunStore",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = value = _found(_HOMES[name], name)
        return value
    if name == "__version__":
        from importlib.metadata import version

        return version("meanformer")
    for room, names in _MOVED.items():
        if name in names.split():
            return _moved(f"meanformer.{room}", name)
    raise AttributeError(_unknown(name))


def _found(home: str, name: str) -> Any:
    if home == __name__:
        return importlib.import_module(f"{home}.{name}")
    return getattr(importlib.import_module(home), name)


def _moved(home: str, name: str) -> Any:
    from meanformer.errors import warn

    warn(f"meanformer.{name} is now {home}.{name}; use that name.", DeprecationWarning)
    return _found(home, name)


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
    return list(_HOMES)
