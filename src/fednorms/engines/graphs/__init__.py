"""The fast engine for a GPU: local steps as CUDA graphs, several clients side by side on streams."""

from fednorms.engines.graphs.engine import Graphs

__all__ = ["Graphs"]
