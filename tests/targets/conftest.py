"""Our programs as each target gets them."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from whisperport.programs.program import Program


@pytest.fixture(scope="session")
def rewritten(tiny_checkpoint: Any) -> Callable[[Sequence[str]], list[Program]]:
    """`rewritten(names)`: the tiny model's programs after these rewrites."""
    from whisperport.model.whisper import build_model
    from whisperport.programs.whisper import whisper_programs
    from whisperport.rewrites import run_rewrites

    @cache
    def traced() -> tuple[Program, ...]:
        return tuple(whisper_programs(build_model(tiny_checkpoint), [(0, 0)], prefill_rows=(4,)))

    @cache
    def after(names: tuple[str, ...]) -> list[Program]:
        return [run_rewrites(program, names)[0] for program in traced()]

    return after
