"""A run of one's own, described in a file: measure, attention, flow, solve."""

from .build import Run as Run
from .build import build as build
from .build import build_flow as build_flow
from .build import read_config as read_config
from .solving import depth_grid as depth_grid
