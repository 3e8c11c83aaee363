"""Optimal transport between measures: distances, plans and maps."""

from meanformer.measures.transport.atoms import Coupling as Coupling
from meanformer.measures.transport.bures import AffineMap as AffineMap
from meanformer.measures.transport.bures import transport_map as transport_map
from meanformer.measures.transport.entropic import entropic_cost as entropic_cost
from meanformer.measures.transport.entropic import (
    sinkhorn_divergence as sinkhorn_divergence,
)
from meanformer.measures.transport.wasserstein import (
    conditional_wasserstein as conditional_wasserstein,
)
from meanformer.measures.transport.wasserstein import (
    pairwise_wasserstein as pairwise_wasserstein,
)
from meanformer.measures.transport.wasserstein import transport_plan as transport_plan
from meanformer.measures.transport.wasserstein import wasserstein as wasserstein
