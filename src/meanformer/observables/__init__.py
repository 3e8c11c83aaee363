"""What to look at: energies, gradient structure, convergence, distances."""

from meanformer.observables.clusters.counting import ClusterProfile as ClusterProfile
from meanformer.observables.clusters.counting import Clusters as Clusters
from meanformer.observables.clusters.counting import cluster_profile as cluster_profile
from meanformer.observables.clusters.counting import count_clusters as count_clusters
from meanformer.observables.convergence import TokenConvergence as TokenConvergence
from meanformer.observables.convergence import token_convergence as token_convergence
from meanformer.observables.critical.extremes import Extremum as Extremum
from meanformer.observables.critical.extremes import (
    energy_maximiser as energy_maximiser,
)
from meanformer.observables.critical.extremes import (
    energy_minimiser as energy_minimiser,
)
from meanformer.observables.critical.find import CriticalPoints as CriticalPoints
from meanformer.observables.critical.find import (
    find_critical_points as find_critical_points,
)
from meanformer.observables.critical.flows import perceptron_flow as perceptron_flow
from meanformer.observables.critical.localisation import (
    Localisation as Localisation,
)
from meanformer.observables.critical.localisation import localisation as localisation
from meanformer.observables.critical.newton import CriticalPoint as CriticalPoint
from meanformer.observables.critical.newton import (
    newton_critical_point as newton_critical_point,
)
from meanformer.observables.distances import DistanceStatistics as DistanceStatistics
from meanformer.observables.distances import distance_statistics as distance_statistics
from meanformer.observables.energy.energies import EnergyProfile as EnergyProfile
from meanformer.observables.energy.energies import dissipation as dissipation
from meanformer.observables.energy.energies import energy as energy
from meanformer.observables.energy.energies import energy_profile as energy_profile
from meanformer.observables.energy.matrix_energy import CircleDensity as CircleDensity
from meanformer.observables.energy.matrix_energy import (
    matrix_energy_flow as matrix_energy_flow,
)
from meanformer.observables.energy.matrix_energy import (
    optimal_circle_density as optimal_circle_density,
)
from meanformer.observables.energy.potentials import (
    IntegratedActivation as IntegratedActivation,
)
from meanformer.observables.energy.sphere import StationaryReport as StationaryReport
from meanformer.observables.energy.sphere import energy_gradient as energy_gradient
from meanformer.observables.energy.sphere import energy_hessian as energy_hessian
from meanformer.observables.energy.sphere import first_variation as first_variation
from meanformer.observables.energy.sphere import perturbed as perturbed
from meanformer.observables.energy.sphere import stationary_report as stationary_report
from meanformer.observables.energy.structure import (
    GradientStructure as GradientStructure,
)
from meanformer.observables.energy.structure import is_gradient_flow as is_gradient_flow
from meanformer.observables.equiangular.equiangular import Equiangular as Equiangular
from meanformer.observables.equiangular.equiangular import LongTimeLaw as LongTimeLaw
from meanformer.observables.equiangular.phase_curve import PhaseCurve as PhaseCurve
from meanformer.observables.equiangular.phase_curve import (
    critical_beta as critical_beta,
)
from meanformer.observables.equiangular.phase_curve import phase_curve as phase_curve
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
from meanformer.observables.low_temperature.bound import BoundFit as BoundFit
from meanformer.observables.low_temperature.bound import (
    fit_low_temperature_bound as fit_low_temperature_bound,
)
from meanformer.observables.low_temperature.comparison import (
    LowTemperature as LowTemperature,
)
from meanformer.observables.low_temperature.comparison import (
    low_temperature_comparison as low_temperature_comparison,
)
from meanformer.observables.low_temperature.comparison import (
    low_temperature_flow as low_temperature_flow,
)
from meanformer.observables.low_temperature.leader_shift import (
    low_temperature_shift as low_temperature_shift,
)
from meanformer.observables.metastability.clocks import Clocks as Clocks
from meanformer.observables.metastability.clocks import clocks as clocks
from meanformer.observables.metastability.plateaus import Plateau as Plateau
from meanformer.observables.metastability.plateaus import Plateaus as Plateaus
from meanformer.observables.metastability.plateaus import plateaus as plateaus
from meanformer.observables.metastability.prediction import (
    PredictedStaircase as PredictedStaircase,
)
from meanformer.observables.metastability.prediction import (
    predicted_staircase as predicted_staircase,
)
from meanformer.observables.metastability.saddles import Saddle as Saddle
from meanformer.observables.metastability.saddles import Saddles as Saddles
from meanformer.observables.metastability.saddles import saddles as saddles
from meanformer.observables.metastability.separation import Separation as Separation
from meanformer.observables.metastability.separation import separation as separation
from meanformer.observables.metastability.staircase import Staircase as Staircase
from meanformer.observables.metastability.staircase import (
    greedy_staircase as greedy_staircase,
)
from meanformer.observables.metastability.two_groups import TwoGroups as TwoGroups
from meanformer.observables.modes.counting import Modes as Modes
from meanformer.observables.modes.counting import count_modes as count_modes
from meanformer.observables.modes.kac_rice import (
    expected_circle_modes as expected_circle_modes,
)
from meanformer.observables.modes.kac_rice import expected_modes as expected_modes
from meanformer.observables.modes.kac_rice import mode_constant as mode_constant
from meanformer.observables.modes.kac_rice import mode_rate as mode_rate
from meanformer.observables.modes.kac_rice import mode_window as mode_window
from meanformer.observables.modes.kernels import convex_angle as convex_angle
from meanformer.observables.modes.poisson import (
    poisson_mode_density as poisson_mode_density,
)
from meanformer.observables.modes.sampling import ModeSample as ModeSample
from meanformer.observables.modes.sampling import sample_modes as sample_modes
from meanformer.observables.modes.sampling import (
    sample_poisson_modes as sample_poisson_modes,
)
from meanformer.observables.modes.shot_noise import (
    poisson_mode_integral as poisson_mode_integral,
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
from meanformer.observables.phases.diagram import PhaseDiagram as PhaseDiagram
from meanformer.observables.phases.diagram import phase_diagram as phase_diagram
