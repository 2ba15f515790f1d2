"""The built-in programs in the form that each target gets."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from whisperport.programs.program import Program


@pytest.fixture(scope="session")
def rewritten(tiny_checkpoint: Any) -> Callable[[Sequence[str]], list[Program]]:
    """Return `rewritten(names)`: the tiny model's programs after these rewrites."""
    from whisperport.model.whisper import build_model
    from whisperport.programs.variants import whisper_programs
    from whisperport.programs.whisper import Parts
    from whisperport.rewrites import run_rewrites

    @cache
    def traced() -> tuple[Program, ...]:
        names = ("encoder", "cross_kv", "prefill_4", "step", "align")
        return tuple(whisper_programs(Parts(build_model(tiny_checkpoint), [(0, 0)]), names))

    @cache
    def after(names: tuple[str, ...]) -> list[Program]:
        return [run_rewrites(program, names)[0] for program in traced()]

    return after
