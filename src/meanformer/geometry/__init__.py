"""Where tokens live: Euclidean space and the sphere; cells of a hull, polytopes."""

from .cells import Cells as Cells
from .polytopes import Polytope as Polytope
from .spaces import AbstractSpace as AbstractSpace
from .spaces import Euclidean as Euclidean
from .spaces import Sphere as Sphere
