"""Make the HLO modules of this folder again.

    python tests/targets/vendors/aws_neuron/hlo/modules/make.py

They were made with jax 0.10.2, which is installed with the extra `dev`. Another version may number the
instructions in another way.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
from jax import lax

FOLDER = Path(__file__).parent
AUDIO, TOKENS, WIDTH = 1500, 8, 16


def spec(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return jax.nn.softmax(q @ k.T + mask, axis=-1) @ v


def cached_step(x: Any, position: Any, cache: Any, key: Any, query: Any, bias: Any) -> Any:
    """One token with a cache (8, 16), of which a row is written over."""
    start = (position, jnp.zeros((), jnp.int32))
    cache = lax.dynamic_update_slice(cache, x @ key, start)
    seen = lax.iota(jnp.int32, TOKENS) <= position
    mask = jnp.where(seen, jnp.float32(0), jnp.float32(-64))
    return attend(x @ query + bias, cache, cache, mask), cache


def projected_step(x: Any, xa: Any, unused: Any, query: Any, key: Any, value: Any) -> Any:
    """One token whose keys and values are projected from xa (1, 1500, 16)."""
    attended = attend(x @ query, xa[0] @ key, xa[0] @ value, jnp.float32(0))
    return attended @ query.T, lax.iota(jnp.int64, 4)


def operators(mel: Any, kernel: Any, steps: Any) -> Any:
    """A convolution, a loop, a choice, an index of the maximum, and a gather."""
    x = lax.conv_general_dilated(mel, kernel, (2,), [(1, 1)])
    x = lax.fori_loop(0, steps, lambda _, one: one * 2, x)
    x = lax.cond(steps > 2, jnp.negative, jnp.exp, x)
    best = jnp.argmax(x, axis=-1)
    return lax.sort(x, dimension=-1), jnp.take(kernel, best.reshape(-1), axis=0, mode="clip")


def write(name: str, function: Callable[..., Any], *specs: Any, donated: tuple[int, ...]) -> None:
    jitted = jax.jit(function, donate_argnums=donated, keep_unused=True)
    module = jitted.lower(*specs).compiler_ir("hlo").as_serialized_hlo_module_proto()
    (FOLDER / f"{name}.hlo.pb").write_bytes(module)


def main() -> None:
    square, scalar = spec(WIDTH, WIDTH), spec(dtype=jnp.int32)
    token, cache = spec(1, WIDTH), spec(TOKENS, WIDTH)
    jax.config.update("jax_enable_x64", True)  # an int64 stays one
    step = (token, scalar, cache, square, square, spec(WIDTH))
    write("cached_step", cached_step, *step, donated=(2,))
    write("copied_cache", cached_step, *step, donated=())
    audio = spec(1, AUDIO, WIDTH)
    write("projected_step", projected_step, token, audio, audio, square, square, square, donated=())
    jax.config.update("jax_enable_x64", False)
    write("operators", operators, spec(1, 4, 12), spec(6, 4, 3), scalar, donated=())


if __name__ == "__main__":
    main()
