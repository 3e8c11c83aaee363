"""Token measures: clouds, Gaussians, mixtures, uniform laws, and their distances."""

from meanformer.measures.abstract import AbstractContext as AbstractContext
from meanformer.measures.abstract import AbstractMeasure as AbstractMeasure
from meanformer.measures.box import TruncatedNormalBox as TruncatedNormalBox
from meanformer.measures.box import UniformBox as UniformBox
from meanformer.measures.cloud import TiltedCloud as TiltedCloud
from meanformer.measures.cloud import TokenCloud as TokenCloud
from meanformer.measures.cloud import tilt as tilt
from meanformer.measures.fourier_density import FourierDensity as FourierDensity
from meanformer.measures.fourier_density import RingOfTilts as RingOfTilts
from meanformer.measures.fourier_density import circle_moments as circle_moments
from meanformer.measures.gaussian import Gaussian as Gaussian
from meanformer.measures.gaussian import entropic_factor as entropic_factor
from meanformer.measures.masked import MaskedCloud as MaskedCloud
from meanformer.measures.mixture import Mixture as Mixture
from meanformer.measures.operations import batch as batch
from meanformer.measures.operations import merge as merge
from meanformer.measures.operations import mix as mix
from meanformer.measures.operations import pad as pad
from meanformer.measures.operations import resample as resample
from meanformer.measures.quadrature import quadrature as quadrature
from meanformer.measures.sphere_and_ball import UniformBall as UniformBall
from meanformer.measures.sphere_and_ball import UniformSphere as UniformSphere
from meanformer.measures.transport import AffineMap as AffineMap
from meanformer.measures.transport import Coupling as Coupling
from meanformer.measures.transport import (
    conditional_wasserstein as conditional_wasserstein,
)
from meanformer.measures.transport import entropic_cost as entropic_cost
from meanformer.measures.transport import pairwise_wasserstein as pairwise_wasserstein
from meanformer.measures.transport import sinkhorn_divergence as sinkhorn_divergence
from meanformer.measures.transport import transport_map as transport_map
from meanformer.measures.transport import transport_plan as transport_plan
from meanformer.measures.transport import wasserstein as wasserstein
