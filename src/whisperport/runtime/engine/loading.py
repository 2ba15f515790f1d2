"""Load the programs of a bundle with their targets' runtimes, without a trial run."""

from collections.abc import Sequence
from typing import NoReturn

from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.program_kind import ENCODER
from whisperport.program.runner import Array, Runner
from whisperport.targets import RunOptions, get_target


def load_runners(bundle: Bundle, options: RunOptions, *, encoder: bool = True) -> dict[str, Runner]:
    """Load every program of a bundle with its target's runtime, without a trial run.

    Args:
        bundle: an open bundle.
        options: threads, trust and the targets' options. Without short windows, their programs are not
            loaded.
        encoder: False does not load the encoder; its runner then raises UsageError.

    Returns:
        Runners by program name.

    Raises:
        MissingPackageError: a target's runtime is not installed.
        BundleError: a program cannot be read.
    """
    programs = bundle.manifest.programs
    if options.short_windows is False:
        programs = tuple(entry for entry in programs if not entry.spec.kind.positions)
    runners: dict[str, Runner] = {}
    if not encoder:
        runners |= {
            e.spec.name: _NotLoaded(e.spec) for e in programs if e.spec.kind.name == ENCODER
        }
        programs = tuple(entry for entry in programs if entry.spec.name not in runners)
    for name in dict.fromkeys(entry.target for entry in programs):
        entries = [entry for entry in programs if entry.target == name]
        runners |= get_target(name).load(bundle.folder, entries, options)
    return runners


class _NotLoaded(Runner):
    """A runner that cannot run. The bundle was loaded without this program."""

    def _run(self, inputs: Sequence[Array]) -> NoReturn:
        raise UsageError(
            f"the program `{self.spec.name}` is not loaded",
            why="the bundle was loaded to transcribe features that are computed elsewhere",
            hint="load it with `Transcriber(bundle, encoder=True)` to transcribe audio",
        )
