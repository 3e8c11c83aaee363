"""Runs on disk: streamed trajectories, configurations, resuming and extending."""

from .run import RunStore as RunStore
from .run import open_run as open_run
from .simulation import changed_versions as changed_versions
from .simulation import extend as extend
from .simulation import resume as resume
from .simulation import simulate as simulate
