"""Runs on disk: streamed trajectories, configurations, resuming and extending."""

from meanformer.storage.run import RunStore as RunStore
from meanformer.storage.run import open_run as open_run
from meanformer.storage.simulation import changed_versions as changed_versions
from meanformer.storage.simulation import extend as extend
from meanformer.storage.simulation import resume as resume
from meanformer.storage.simulation import simulate as simulate
