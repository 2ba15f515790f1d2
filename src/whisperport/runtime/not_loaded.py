"""The place of a program that is not loaded, because its outputs come from elsewhere."""

from collections.abc import Sequence
from typing import NoReturn

from whisperport.errors import UsageError
from whisperport.runner import Array, Runner
from whisperport.spec import ProgramSpec


class NotLoaded(Runner):
    """A runner that cannot run. The bundle was loaded without this program."""

    def __init__(self, spec: ProgramSpec) -> None:
        super().__init__(spec)

    def _run(self, inputs: Sequence[Array]) -> NoReturn:
        raise UsageError(
            f"the program `{self.spec.name}` is not loaded",
            why="the bundle was loaded to transcribe features that are computed elsewhere",
            hint="load it with `Transcriber(bundle, encoder=True)` to transcribe audio",
        )
