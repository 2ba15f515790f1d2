"""The description of one program in a manifest, with what the tools that lowered and compiled it told."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Self

from whisperport.program.evidence import Evidence
from whisperport.program.json_records import Member
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec
from whisperport.program.strict_json import Field, safe_path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """Facts about one program. In a manifest, facts that are absent or empty are omitted.

    Attributes:
        delegated: number of nodes that the target runs; None: not known.
        undelegated: operators that run elsewhere, one entry per call; None: not known.
        subgraphs: number of parts that the target runs; None: not known.
        compiler: version of the vendor's compiler.
        compiled_for: the chip, as the compiled file or its compiler names it.
        imported: name of the file that a vendor published.
        calibration_samples: number of samples that the compiler quantized with.
        snr_db: layer -> signal-to-noise ratio in dB, as the compiler measured it.
        plan: engine of the chip -> number of parts that the compiler gave to it.
        notes: sentences that the user should read.
        target_facts: JSON facts that only the target reads.
    """

    delegated: int | None = None
    undelegated: tuple[str, ...] | None = None
    subgraphs: int | None = None
    compiler: str = ""
    compiled_for: str = ""
    imported: str = ""
    calibration_samples: int = 0
    snr_db: Mapping[str, float] = field(default_factory=dict)
    plan: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    target_facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Create facts from those of a tool by their names; all other names become `target_facts`."""
        known = {name: facts[name] for name in _NAMES if name in facts}
        for name in ("undelegated", "notes"):
            if known.get(name) is not None:
                known[name] = tuple(known[name])
        return cls(**known, target_facts={n: fact for n, fact in facts.items() if n not in _NAMES})

    def compiled(self, facts: Mapping[str, Any]) -> Self:
        """Return these facts with those of a compiler. They replace what an earlier compilation told."""
        kept = {name: getattr(self, name) for name in ("delegated", "undelegated", "subgraphs")}
        return type(self).of({**kept, **self.target_facts, **facts})

    def to_json(self) -> dict[str, Any]:
        """Convert the facts to a JSON object."""
        facts = {name: getattr(self, name) for name in _NAMES}
        lists = {n: list(fact) if isinstance(fact, tuple) else fact for n, fact in facts.items()}
        counts = ("delegated", "undelegated", "subgraphs")  # 0 and an empty list are facts, too
        shown = {n: f for n, f in lists.items() if (f is not None if n in counts else f)}
        return {**shown, **self.target_facts}


_NAMES = tuple(f.name for f in fields(ProgramFacts) if f.name != "target_facts")


def read_facts(facts: Field) -> ProgramFacts:
    """Read facts from their JSON object.

    Raises:
        BundleError: a fact has another type than `ProgramFacts` states; the message names it.
    """
    for name, member in facts.mapping().items():
        if name in ("delegated", "subgraphs", "calibration_samples"):
            member.integer()
        elif name in ("compiler", "compiled_for", "imported"):
            member.text()
        elif name in ("undelegated", "notes"):
            [element.text() for element in member.elements()]
        elif name == "snr_db":
            [value.number() for value in member.mapping().values()]
        elif name == "plan":
            [value.integer() for value in member.mapping().values()]
    return ProgramFacts.of(facts.json_object())


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
