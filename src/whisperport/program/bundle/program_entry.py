"""The description of one program in a manifest."""

from dataclasses import dataclass, field
from typing import Annotated

from whisperport.program.bundle.program_facts import ProgramFacts, read_facts
from whisperport.program.evidence import Evidence
from whisperport.program.json_records import Member
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec
from whisperport.program.strict_json import Field, safe_path


def _files(files: Field) -> tuple[str, ...]:
    paths = tuple(map(safe_path, files.elements()))
    if not paths:
        files.reject("is empty; expected at least one file")
    return paths


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEntry:
    """One lowered program of a bundle."""

    spec: ProgramSpec
    placement: Placement
    # Name of the method in a file with several methods; else the program's name.
    method: Annotated[str, Field.non_empty_text]
    # Paths relative to the bundle; the target loads the first one.
    files: Annotated[tuple[str, ...], _files]
    # What the tools that made the files told about them.
    facts: Annotated[ProgramFacts, read_facts, Member("delegation")] = field(
        default_factory=ProgramFacts
    )
    evidence: tuple[Evidence, ...] = ()  # oldest first; `Manifest.evidence` selects the valid part

    @property
    def target(self) -> str:
        """Name of the target that the program was lowered for."""
        return self.placement.target

    @property
    def precision(self) -> str:
        """Name of the precision that the target computes the program in, such as `fp32` or `w8a8`."""
        return self.placement.precision
