"""Graph-to-graph rewrites, one per file, each with its picture; a target asks for them by name."""

from whisperport.rewrites import layer_norm_by_linear as _layer_norm_by_linear
from whisperport.rewrites.base import REWRITES, Outcome, Rewrite, run_rewrites

__all__ = ["REWRITES", "Outcome", "Rewrite", "run_rewrites"]

assert _layer_norm_by_linear  # imported to be registered
