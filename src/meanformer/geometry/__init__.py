"""Where tokens live: Euclidean space and the sphere; cells of a hull, polytopes."""

from meanformer.geometry.cells import Cells as Cells
from meanformer.geometry.polytopes import Polytope as Polytope
from meanformer.geometry.spaces import AbstractSpace as AbstractSpace
from meanformer.geometry.spaces import Euclidean as Euclidean
from meanformer.geometry.spaces import Sphere as Sphere
