"""What transformers can represent: theorems of density, made constructive.

Perceptrons to an accuracy: `spline`, `ridge_fourier`, `random_features`. In-context
maps made of `block`s by `+` and `*` become transformers with explicit weights and a
certificate, by `compile_transformer`. Contexts are told apart by `separate`.
"""

from meanformer.expressivity.algebra import AlgebraElement as AlgebraElement
from meanformer.expressivity.algebra import block as block
from meanformer.expressivity.algebra import coordinate as coordinate
from meanformer.expressivity.algebra import stack as stack
from meanformer.expressivity.approximation import Fit as Fit
from meanformer.expressivity.approximation import FourierSeries as FourierSeries
from meanformer.expressivity.approximation import fourier_series as fourier_series
from meanformer.expressivity.approximation import random_features as random_features
from meanformer.expressivity.approximation import ridge_fourier as ridge_fourier
from meanformer.expressivity.approximation import spline as spline
from meanformer.expressivity.compilation import Certificate as Certificate
from meanformer.expressivity.compilation import (
    CompiledTransformer as CompiledTransformer,
)
from meanformer.expressivity.compilation import Verification as Verification
from meanformer.expressivity.compilation import (
    compile_transformer as compile_transformer,
)
from meanformer.expressivity.compilation import verify as verify
from meanformer.expressivity.separation import Separation as Separation
from meanformer.expressivity.separation import (
    moments_from_attention as moments_from_attention,
)
from meanformer.expressivity.separation import seen_along as seen_along
from meanformer.expressivity.separation import separate as separate
