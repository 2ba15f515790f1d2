"""Graph-to-graph rewrites, one per file, each with a diagram; a target names the rewrites that it needs."""

from whisperport.model.rewrites import (
    attention_by_softmax as _attention_by_softmax,
)
from whisperport.model.rewrites import (
    conv1d_by_conv2d as _conv1d_by_conv2d,
)
from whisperport.model.rewrites import (
    drop_no_ops as _drop_no_ops,
)
from whisperport.model.rewrites import (
    fold_axes as _fold_axes,
)
from whisperport.model.rewrites import (
    fold_constants as _fold_constants,
)
from whisperport.model.rewrites import (
    join_on_host as _join_on_host,
)
from whisperport.model.rewrites import (
    layer_norm_by_linear as _layer_norm_by_linear,
)
from whisperport.model.rewrites import (
    lookup_on_host as _lookup_on_host,
)
from whisperport.model.rewrites import (
    matmul_by_bmm as _matmul_by_bmm,
)
from whisperport.model.rewrites import (
    matmul_by_linear as _matmul_by_linear,
)
from whisperport.model.rewrites import (
    merge_permutes as _merge_permutes,
)
from whisperport.model.rewrites import (
    split_vocab_projection as _split_vocab_projection,
)
from whisperport.model.rewrites.host import HOST_REWRITES, run_host_rewrite
from whisperport.model.rewrites.rewrite import (
    REWRITES,
    Outcome,
    Rewrite,
    find_rewrite,
    run_rewrites,
)

__all__ = [
    "HOST_REWRITES",
    "REWRITES",
    "Outcome",
    "Rewrite",
    "find_rewrite",
    "run_host_rewrite",
    "run_rewrites",
]

# Imported to be registered.
assert _attention_by_softmax
assert _conv1d_by_conv2d
assert _drop_no_ops
assert _fold_axes
assert _fold_constants
assert _join_on_host
assert _layer_norm_by_linear
assert _lookup_on_host
assert _matmul_by_bmm
assert _matmul_by_linear
assert _merge_permutes
assert _split_vocab_projection
