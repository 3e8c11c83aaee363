"""In-context maps: attention variants, masks, perceptrons, norms, compositions."""

from meanformer.attention.abstract import AbstractAttention as AbstractAttention
from meanformer.attention.abstract import AbstractInContextMap as AbstractInContextMap
from meanformer.attention.abstract import GradientForm as GradientForm
from meanformer.attention.abstract import standard_beta as standard_beta
from meanformer.attention.adversarial import adversarial_cloud as adversarial_cloud
from meanformer.attention.adversarial import maximise_lipschitz as maximise_lipschitz
from meanformer.attention.bounds import LipschitzBounds as LipschitzBounds
from meanformer.attention.bounds import lipschitz_bounds as lipschitz_bounds
from meanformer.attention.bounds import speed_bound as speed_bound
from meanformer.attention.bounds import stability_constant as stability_constant
from meanformer.attention.composition import Composition as Composition
from meanformer.attention.composition import MultiHead as MultiHead
from meanformer.attention.composition import Residual as Residual
from meanformer.attention.composition import Sum as Sum
from meanformer.attention.composition import compose as compose
from meanformer.attention.exponential import (
    AbstractExponential as AbstractExponential,
)
from meanformer.attention.kernels import Hardmax as Hardmax
from meanformer.attention.kernels import Linear as Linear
from meanformer.attention.kernels import Sigmoid as Sigmoid
from meanformer.attention.kernels import Unnormalised as Unnormalised
from meanformer.attention.kinds import identity_attention as identity_attention
from meanformer.attention.lipschitz import LipschitzReport as LipschitzReport
from meanformer.attention.lipschitz import layer_lipschitz as layer_lipschitz
from meanformer.attention.lipschitz import lipschitz_report as lipschitz_report
from meanformer.attention.lipschitz import local_lipschitz as local_lipschitz
from meanformer.attention.masked import Masked as Masked
from meanformer.attention.masked import in_order as in_order
from meanformer.attention.masks import AbstractMask as AbstractMask
from meanformer.attention.masks import Blocks as Blocks
from meanformer.attention.masks import Causal as Causal
from meanformer.attention.masks import Prefix as Prefix
from meanformer.attention.masks import StrictCausal as StrictCausal
from meanformer.attention.masks import Window as Window
from meanformer.attention.matrices import attention_matrix as attention_matrix
from meanformer.attention.nearest_other import NearestOther as NearestOther
from meanformer.attention.pointwise import LayerNorm as LayerNorm
from meanformer.attention.pointwise import Perceptron as Perceptron
from meanformer.attention.pointwise import PointMap as PointMap
from meanformer.attention.pointwise import RMSNorm as RMSNorm
from meanformer.attention.pointwise import UnitNorm as UnitNorm
from meanformer.attention.push_forward import push_forward as push_forward
from meanformer.attention.sinkhorn import Sinkhorn as Sinkhorn
from meanformer.attention.softmax import L2 as L2
from meanformer.attention.softmax import Softmax as Softmax
