"""Token measures: clouds, Gaussians, mixtures, uniform laws, and their distances."""

from meanformer.measures.abstract import AbstractContext as AbstractContext
from meanformer.measures.abstract import AbstractMeasure as AbstractMeasure
from meanformer.measures.cloud import TiltedCloud as TiltedCloud
from meanformer.measures.cloud import TokenCloud as TokenCloud
from meanformer.measures.cloud import tilt as tilt
from meanformer.measures.gaussian import Gaussian as Gaussian
from meanformer.measures.gaussian import entropic_covariance as entropic_covariance
from meanformer.measures.masked import MaskedCloud as MaskedCloud
from meanformer.measures.mixture import Mixture as Mixture
from meanformer.measures.operations import batch as batch
from meanformer.measures.operations import merge as merge
from meanformer.measures.operations import mix as mix
from meanformer.measures.operations import pad as pad
