"""The evidence in a bundle as text and as JSON."""

from pathlib import Path
from typing import Any

from whisperport.build.export.exported import POINTS
from whisperport.program.bundle import Manifest


def verified_words(manifest: Manifest) -> str:
    """Whether the bundle is verified, and how, such as "verified; emulated on the CPU: TARGET"."""
    if manifest.failed:
        return "NOT VERIFIED"
    words = ["verified" if manifest.verified else "verified in part"]
    if emulated := emulated_targets(manifest):
        words.append(f"emulated on the CPU: {', '.join(emulated)}")
    if names := never_run(manifest):
        words.append(f"not run: {', '.join(names)}")
    return "; ".join(words)


def mix_words(manifest: Manifest) -> str:
    """The targets and precisions of a verified mix, and what it costs, such as "litert w8, verified: …"."""
    placements = dict.fromkeys(f"{e.target} {e.precision}" for e in manifest.programs)
    words = [", ".join(placements), "verified"]
    for check in manifest.verification["checks"]:
        value = check["value"]
        if "increase_at_most" in value:
            change, bound = (POINTS * value[name] for name in ("change", "increase_at_most"))
            rate = "WER" if "wer" in value else "CER"
            words[-1] += (
                f": {change:+.2f} points of {rate} over float32, at most {bound:.2f} with 95%"
            )
    return ", ".join(words)


def emulated_targets(manifest: Manifest) -> tuple[str, ...]:
    """Targets whose programs were verified by emulation on the CPU only."""
    targets = dict.fromkeys(
        entry.target
        for entry in manifest.programs
        if manifest.is_verified(entry.spec.name)
        and manifest.status(entry.spec.name) not in ("run here", "simulated here")
    )
    return tuple(targets)


def never_run(manifest: Manifest) -> tuple[str, ...]:
    """Programs whose file, in the form that the target loads, was never run and compared."""
    names = [entry.spec.name for entry in manifest.programs]
    return tuple(name for name in names if not manifest.is_verified(name))


def how_to_record(bundle: Path, manifest: Manifest) -> str:
    """A note on how to verify programs that were never run; empty if there are none."""
    names = never_run(manifest)
    if not names:
        return ""
    return (
        f"the compiled files of {', '.join(names)} were not run: copy the bundle to the device, and run "
        f"`whisperport verify {bundle} --record` there"
    )


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON, with the computed `verified` and the `status` of each program."""
    data = manifest.to_json()
    for program in data["programs"]:
        program["status"] = manifest.status(program["spec"]["name"])
    return {**data, "verified": manifest.verified}
