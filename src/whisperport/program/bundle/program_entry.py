"""The description of one program in a manifest."""

from dataclasses import dataclass, field, fields
from typing import Any

from whisperport.program.bundle.evidence_json import evidence_to_json, read_evidence
from whisperport.program.bundle.program_facts import ProgramFacts, read_facts
from whisperport.program.bundle.strict_json import Field, safe_path
from whisperport.program.evidence import Evidence
from whisperport.program.masks import MASKED, check_mask
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec, TensorSpec

DTYPES = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
DTYPES |= {"bfloat16", "float16", "float32", "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEntry:
    """One lowered program of a bundle."""

    spec: ProgramSpec
    placement: Placement
    method: str  # name of the method in a file with several methods; else the program's name
    files: tuple[str, ...]  # paths relative to the bundle; the target loads the first one
    # What the tools that made the files told about them; `delegation` in JSON.
    facts: ProgramFacts = field(default_factory=ProgramFacts)
    evidence: tuple[Evidence, ...] = ()  # oldest first; `Manifest.evidence` selects the valid part

    @property
    def target(self) -> str:
        """Name of the target that the program was lowered for."""
        return self.placement.target

    @property
    def precision(self) -> str:
        """Name of the precision that the target computes the program in, such as `fp32` or `w8a8`."""
        return self.placement.precision

    def to_json(self) -> dict[str, Any]:
        """Convert the entry to a JSON object of the manifest."""
        return {
            "spec": self.spec.to_json(),
            "placement": _placement_to_json(self.placement),
            "method": self.method,
            "files": list(self.files),
            "delegation": self.facts.to_json(),
            "evidence": [evidence_to_json(record) for record in self.evidence],
        }


def read_program(entry: Field) -> ProgramEntry:
    """Read an entry from its JSON object.

    Raises:
        BundleError: a field is missing or has a value that `ProgramEntry.to_json` does not write; the
            message names the field.
    """
    names = [f.name for f in fields(ProgramEntry) if f.name != "facts"]
    m = entry.members([*names, "delegation"])
    files = tuple(safe_path(path) for path in m["files"].elements())
    if not files:
        m["files"].reject("is empty; expected at least one file")
    return ProgramEntry(
        spec=_spec(m["spec"]),
        placement=_placement(m["placement"]),
        method=m["method"].non_empty_text(),
        files=files,
        facts=read_facts(m["delegation"]),
        evidence=tuple(read_evidence(element) for element in m["evidence"].elements()),
    )


def _placement_to_json(placement: Placement) -> dict[str, Any]:
    """Convert a placement to JSON. The usual mask is omitted, as in bundles of earlier versions."""
    data = {
        "target": placement.target,
        "precision": placement.precision,
        "options": dict(placement.options),
    }
    return data if placement.mask == MASKED else {**data, "mask": placement.mask}


def _placement(placement: Field) -> Placement:
    names = [f.name for f in fields(Placement)]
    m = placement.members([n for n in names if n != "mask" or n in placement.mapping()])
    options = {name: value.text() for name, value in m["options"].mapping().items()}
    target, precision = m["target"].non_empty_text(), m["precision"].non_empty_text()
    return Placement(target, precision, options, _mask(m["mask"]) if "mask" in m else MASKED)


def _mask(mask: Field) -> float:
    try:
        return check_mask(mask.number())
    except ValueError as error:
        mask.reject(str(error))


def _spec(spec: Field) -> ProgramSpec:
    m = spec.members(["name", "inputs", "outputs"])
    return ProgramSpec(
        m["name"].non_empty_text(),
        tuple(_tensor(tensor) for tensor in m["inputs"].elements()),
        tuple(_tensor(tensor) for tensor in m["outputs"].elements()),
    )


def _tensor(tensor: Field) -> TensorSpec:
    m = tensor.members(["name", "shape", "dtype"])
    shape = tuple(n.integer(at_least=1) for n in m["shape"].elements())
    return TensorSpec(m["name"].non_empty_text(), shape, m["dtype"].one_of(sorted(DTYPES)))
