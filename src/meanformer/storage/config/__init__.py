"""A run of one's own, described in a file: measure, attention, flow, solve."""

from meanformer.storage.config.build import Run as Run
from meanformer.storage.config.build import build as build
from meanformer.storage.config.build import build_flow as build_flow
from meanformer.storage.config.build import read_config as read_config
from meanformer.storage.config.solving import depth_grid as depth_grid
