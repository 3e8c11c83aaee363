"""Where tokens live: Euclidean space and the sphere."""

from meanformer.geometry.spaces import AbstractSpace as AbstractSpace
from meanformer.geometry.spaces import Euclidean as Euclidean
from meanformer.geometry.spaces import Sphere as Sphere
