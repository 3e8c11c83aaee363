"""What to look at: energies, gradient structure, convergence, distances."""

from meanformer.observables.clusters import ClusterProfile as ClusterProfile
from meanformer.observables.clusters import Clusters as Clusters
from meanformer.observables.clusters import cluster_profile as cluster_profile
from meanformer.observables.clusters import count_clusters as count_clusters
from meanformer.observables.convergence import TokenConvergence as TokenConvergence
from meanformer.observables.convergence import token_convergence as token_convergence
from meanformer.observables.distances import DistanceStatistics as DistanceStatistics
from meanformer.observables.distances import distance_statistics as distance_statistics
from meanformer.observables.energies import EnergyProfile as EnergyProfile
from meanformer.observables.energies import dissipation as dissipation
from meanformer.observables.energies import energy as energy
from meanformer.observables.energies import energy_profile as energy_profile
from meanformer.observables.equiangular import Equiangular as Equiangular
from meanformer.observables.equiangular import LongTimeLaw as LongTimeLaw
from meanformer.observables.influence import (
    asymptotic_covariance as asymptotic_covariance,
)
from meanformer.observables.limits.boolean_phase import BooleanPhase as BooleanPhase
from meanformer.observables.limits.boolean_phase import boolean_phase as boolean_phase
from meanformer.observables.limits.detection import LimitDetection as LimitDetection
from meanformer.observables.limits.finding import LimitReport as LimitReport
from meanformer.observables.limits.finding import detect_limit as detect_limit
from meanformer.observables.limits.finding import find_limit as find_limit
from meanformer.observables.limits.leaders import Following as Following
from meanformer.observables.limits.leaders import attention_rank as attention_rank
from meanformer.observables.limits.leaders import find_leaders as find_leaders
from meanformer.observables.limits.prediction import LimitPrediction as LimitPrediction
from meanformer.observables.limits.prediction import predict_limit as predict_limit
from meanformer.observables.long_context import ContextSimilarity as ContextSimilarity
from meanformer.observables.long_context import context_similarity as context_similarity
from meanformer.observables.long_context import (
    long_context_critical as long_context_critical,
)
from meanformer.observables.long_context import long_context_gamma as long_context_gamma
from meanformer.observables.long_context import long_context_limit as long_context_limit
from meanformer.observables.long_context import long_context_scan as long_context_scan
from meanformer.observables.long_context import (
    long_context_similarity as long_context_similarity,
)
from meanformer.observables.long_context import mean_cosine as mean_cosine
from meanformer.observables.matrix_energy import CircleDensity as CircleDensity
from meanformer.observables.matrix_energy import (
    matrix_energy_flow as matrix_energy_flow,
)
from meanformer.observables.matrix_energy import (
    optimal_circle_density as optimal_circle_density,
)
from meanformer.observables.order import GramHistogram as GramHistogram
from meanformer.observables.order import first_passage as first_passage
from meanformer.observables.order import gram_histogram as gram_histogram
from meanformer.observables.order import inner_products as inner_products
from meanformer.observables.order import order_parameter as order_parameter
from meanformer.observables.order import (
    smallest_inner_product as smallest_inner_product,
)
from meanformer.observables.order import span_dimension as span_dimension
from meanformer.observables.phase_curve import PhaseCurve as PhaseCurve
from meanformer.observables.phase_curve import critical_beta as critical_beta
from meanformer.observables.phase_curve import phase_curve as phase_curve
from meanformer.observables.phases.diagram import PhaseDiagram as PhaseDiagram
from meanformer.observables.phases.diagram import phase_diagram as phase_diagram
from meanformer.observables.sphere import StationaryReport as StationaryReport
from meanformer.observables.sphere import energy_gradient as energy_gradient
from meanformer.observables.sphere import energy_hessian as energy_hessian
from meanformer.observables.sphere import first_variation as first_variation
from meanformer.observables.sphere import perturbed as perturbed
from meanformer.observables.sphere import stationary_report as stationary_report
from meanformer.observables.staircase import Staircase as Staircase
from meanformer.observables.staircase import greedy_staircase as greedy_staircase
from meanformer.observables.structure import GradientStructure as GradientStructure
from meanformer.observables.structure import is_gradient_flow as is_gradient_flow
