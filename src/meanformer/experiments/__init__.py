"""Experiments: theorems and figures as checks that anybody can run again.

One file is one experiment; the page *Extending* of the documentation shows how to
write one.
"""

from meanformer.experiments.framework.claims import Claim as Claim
from meanformer.experiments.framework.claims import Finding as Finding
from meanformer.experiments.framework.claims import (
    InvalidExperiment as InvalidExperiment,
)
from meanformer.experiments.framework.claims import closed_form as closed_form
from meanformer.experiments.framework.claims import conjecture as conjecture
from meanformer.experiments.framework.claims import observation as observation
from meanformer.experiments.framework.claims import other_method as other_method
from meanformer.experiments.framework.claims import published as published
from meanformer.experiments.framework.claims import tabulated as tabulated
from meanformer.experiments.framework.claims import theorem as theorem
from meanformer.experiments.framework.claims import theory as theory
from meanformer.experiments.framework.experiment import Experiment as Experiment
from meanformer.experiments.framework.experiment import Movie as Movie
from meanformer.experiments.framework.experiment import Outcome as Outcome
from meanformer.experiments.framework.experiment import Picture as Picture
from meanformer.experiments.framework.experiment import Table as Table
from meanformer.experiments.framework.experiment import experiment as experiment
from meanformer.experiments.framework.progress import Progress as Progress
from meanformer.experiments.framework.records import Record as Record
from meanformer.experiments.framework.records import run as run
from meanformer.experiments.framework.registry import all_experiments as all_experiments
from meanformer.experiments.framework.registry import find as find
from meanformer.experiments.framework.settings import Movies as Movies
from meanformer.experiments.framework.settings import Parameters as Parameters
from meanformer.experiments.framework.settings import movie_setting as movie_setting
from meanformer.experiments.framework.settings import setting as setting
from meanformer.experiments.helpers.dense import by_scipy as by_scipy
from meanformer.experiments.helpers.dense import dense_flow as dense_flow
from meanformer.experiments.helpers.dense import (
    dense_rescaled_flow as dense_rescaled_flow,
)
from meanformer.experiments.helpers.dense import (
    dense_velocity as dense_velocity,
)
from meanformer.experiments.helpers.reference import definite_form as definite_form
from meanformer.experiments.helpers.reference import (
    plain_attention as plain_attention,
)
from meanformer.experiments.helpers.reference import (
    reference_attention as reference_attention,
)
from meanformer.experiments.helpers.reference import (
    reference_cloud as reference_cloud,
)
from meanformer.experiments.helpers.reference import six_tokens as six_tokens
