"""Experiments: theorems and figures as checks that anybody can run again.

One file is one experiment; the page *Extending* of the documentation shows how to
write one.
"""

from .framework.claims import Claim as Claim
from .framework.claims import Finding as Finding
from .framework.claims import InvalidExperiment as InvalidExperiment
from .framework.claims import closed_form as closed_form
from .framework.claims import conjecture as conjecture
from .framework.claims import observation as observation
from .framework.claims import other_method as other_method
from .framework.claims import published as published
from .framework.claims import tabulated as tabulated
from .framework.claims import theorem as theorem
from .framework.claims import theory as theory
from .framework.experiment import Experiment as Experiment
from .framework.experiment import Movie as Movie
from .framework.experiment import Outcome as Outcome
from .framework.experiment import Picture as Picture
from .framework.experiment import Table as Table
from .framework.experiment import experiment as experiment
from .framework.progress import Progress as Progress
from .framework.records import Record as Record
from .framework.records import run as run
from .framework.registry import all_experiments as all_experiments
from .framework.registry import find as find
from .framework.settings import Movies as Movies
from .framework.settings import Parameters as Parameters
from .framework.settings import movie_setting as movie_setting
from .framework.settings import setting as setting
from .helpers.dense import by_scipy as by_scipy
from .helpers.dense import dense_flow as dense_flow
from .helpers.dense import dense_rescaled_flow as dense_rescaled_flow
from .helpers.dense import dense_velocity as dense_velocity
from .helpers.reference import definite_form as definite_form
from .helpers.reference import plain_attention as plain_attention
from .helpers.reference import reference_attention as reference_attention
from .helpers.reference import reference_cloud as reference_cloud
from .helpers.reference import six_tokens as six_tokens
