"""Training infinitely deep and wide transformers: gradient flows of measures.

The way of a first day: put contexts, queries and targets into a `Dataset`; ask
`injectivity_report` what one layer can fit; draw heads, `MeanFieldTransformer.draw`;
look at `spectrum` for the largest stable step; `train`; ask `certificate` why it did or
did not converge. `gradient` has the adjoints, `FirstVariation` tells what a new head
would change, `cot_distance` compares networks, `resample` makes them smaller.
"""

from meanformer.attention.averaged_heads import Heads as Heads
from meanformer.observables.injectivity.dependence import Dependence as Dependence
from meanformer.observables.injectivity.dependence import dependence as dependence
from meanformer.observables.injectivity.relations import Relation as Relation
from meanformer.training.certificates import Certificate as Certificate
from meanformer.training.certificates import certificate as certificate
from meanformer.training.data import Dataset as Dataset
from meanformer.training.data import End as End
from meanformer.training.data import squared_error as squared_error
from meanformer.training.descent import GradientDescent as GradientDescent
from meanformer.training.distance import balanced as balanced
from meanformer.training.distance import cot_distance as cot_distance
from meanformer.training.distance import cot_geodesic as cot_geodesic
from meanformer.training.distance import cot_plans as cot_plans
from meanformer.training.distance import function_distance as function_distance
from meanformer.training.gradients import Automatic as Automatic
from meanformer.training.gradients import Checkpointed as Checkpointed
from meanformer.training.gradients import Fields as Fields
from meanformer.training.gradients import FirstVariation as FirstVariation
from meanformer.training.gradients import Gradient as Gradient
from meanformer.training.gradients import Reversible as Reversible
from meanformer.training.gradients import Stored as Stored
from meanformer.training.gradients import gradient as gradient
from meanformer.training.gradients import outputs as outputs
from meanformer.training.gradients import risk as risk
from meanformer.training.injectivity import InjectivityReport as InjectivityReport
from meanformer.training.injectivity import injectivity_report as injectivity_report
from meanformer.training.injectivity import value_kernel as value_kernel
from meanformer.training.kernels import head_kernel as head_kernel
from meanformer.training.kernels import head_kernel_error as head_kernel_error
from meanformer.training.kernels import kernel_product as kernel_product
from meanformer.training.kernels import spectrum as spectrum
from meanformer.training.kernels import tangent_kernel as tangent_kernel
from meanformer.training.layer import Neurons as Neurons
from meanformer.training.layer import Parameters as Parameters
from meanformer.training.limits import refined as refined
from meanformer.training.limits import resample as resample
from meanformer.training.limits import resampling_gaps as resampling_gaps
from meanformer.training.runs import TrainingRun as TrainingRun
from meanformer.training.tasks import LinearRegression as LinearRegression
from meanformer.training.tasks import effective_matrix as effective_matrix
from meanformer.training.tasks import linear_regression as linear_regression
from meanformer.training.tasks import next_token as next_token
from meanformer.training.tasks import prediction_error as prediction_error
from meanformer.training.tasks import regression_layers as regression_layers
from meanformer.training.tasks import teacher_student as teacher_student
from meanformer.training.trainer import train as train
from meanformer.training.transformer import MeanFieldTransformer as MeanFieldTransformer
