"""Graphs: a computation described once, fused into few kernels, planned, run, explained and differentiated."""

from .builder import BatchNorm, Graph
from .ir import GraphTensor
from .rewrites import REWRITES

__all__ = ["REWRITES", "BatchNorm", "Graph", "GraphTensor"]
