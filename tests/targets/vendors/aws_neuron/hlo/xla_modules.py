"""Small HLO modules as XLA writes them for functions of jax, with and without aliases of their caches."""

from collections.abc import Callable
from functools import cache
from typing import Any

from .hlo_of_torch import jax, jnp, lax

AUDIO, TOKENS, WIDTH = 1500, 8, 16


def _attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return jax.nn.softmax(q @ k.T + mask, axis=-1) @ v


def _cached_step(x: Any, position: Any, cache: Any, key: Any, query: Any, bias: Any) -> Any:
    """One token with a cache (8, 16), of which a row is written over."""
    start = (position, jnp.zeros((), jnp.int32))
    cache = lax.dynamic_update_slice(cache, x @ key, start)
    seen = lax.iota(jnp.int32, TOKENS) <= position
    mask = jnp.where(seen, jnp.float32(0), jnp.float32(-64))
    return _attend(x @ query + bias, cache, cache, mask), cache


def _projected_step(x: Any, xa: Any, unused: Any, query: Any, key: Any, value: Any) -> Any:
    """One token whose keys and values are projected from xa (1, 1500, 16)."""
    attended = _attend(x @ query, xa[0] @ key, xa[0] @ value, jnp.float32(0))
    return attended @ query.T, lax.iota(jnp.int64, 4)


def _operators(mel: Any, kernel: Any, steps: Any) -> Any:
    """A convolution, a loop, a choice, an index of the maximum, and a gather."""
    x = lax.conv_general_dilated(mel, kernel, (2,), [(1, 1)])
    x = lax.fori_loop(0, steps, lambda _, doubled: doubled * 2, x)
    x = lax.cond(steps > 2, jnp.negative, jnp.exp, x)
    best = jnp.argmax(x, axis=-1)
    return lax.sort(x, dimension=-1), jnp.take(kernel, best.reshape(-1), axis=0, mode="clip")


def _spec(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


_SQUARE, _SCALAR = _spec(WIDTH, WIDTH), _spec(dtype=jnp.int32)
_TOKEN, _XA = _spec(1, WIDTH), _spec(1, AUDIO, WIDTH)
_STEP = (_TOKEN, _SCALAR, _spec(TOKENS, WIDTH), _SQUARE, _SQUARE, _spec(WIDTH))
# Name -> function, inputs, and those of them whose memory an output takes.
_MODULES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]] = {
    "cached_step": (_cached_step, _STEP, (2,)),
    "copied_cache": (_cached_step, _STEP, ()),
    "projected_step": (_projected_step, (_TOKEN, _XA, _XA, _SQUARE, _SQUARE, _SQUARE), ()),
    "operators": (_operators, (_spec(1, 4, 12), _spec(6, 4, 3), _SCALAR), ()),
}


@cache
def xla_module(name: str) -> bytes:
    """Return a module's HloModuleProto. XLA names its parameters as the function does, with a number."""
    function, inputs, donated = _MODULES[name]
    jitted = jax.jit(function, donate_argnums=donated, keep_unused=True)
    with jax.enable_x64(name == "projected_step"):  # its int64 stays one
        module: bytes = jitted.lower(*inputs).compiler_ir("hlo").as_serialized_hlo_module_proto()
    return module
