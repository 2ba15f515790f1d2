"""What the evidence in a bundle says, for people and as JSON."""

from pathlib import Path
from typing import Any

from whisperport.bundle import Manifest


def verified_words(manifest: Manifest) -> str:
    """Whether the bundle is verified, and how: "verified; emulated on the CPU: TARGET"."""
    if manifest.failed:
        return "NOT VERIFIED"
    words = ["verified" if manifest.verified else "not verified completely"]
    if emulated := emulated_targets(manifest):
        words.append(f"emulated on the CPU: {', '.join(emulated)}")
    if left := never_run(manifest):
        words.append(f"not run: {', '.join(left)}")
    return "; ".join(words)


def emulated_targets(manifest: Manifest) -> tuple[str, ...]:
    """The targets of programs that were verified by emulation on the CPU only."""
    found = dict.fromkeys(
        entry.target
        for entry in manifest.programs
        if manifest.is_verified(entry.spec.name)
        and manifest.status(entry.spec.name) not in ("run here", "simulated here")
    )
    return tuple(found)


def never_run(manifest: Manifest) -> tuple[str, ...]:
    """The programs whose file, as their target loads it, was never run and compared."""
    names = [entry.spec.name for entry in manifest.programs]
    return tuple(name for name in names if not manifest.is_verified(name))


def how_to_record(bundle: Path, manifest: Manifest) -> str:
    """What to do about programs that were never run; empty where there are none."""
    left = never_run(manifest)
    if not left:
        return ""
    return (
        f"the compiled files of {', '.join(left)} were not run: copy the bundle to the device, and run "
        f"`whisperport verify {bundle} --record` there"
    )


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON, with what is computed from its evidence: `verified`, and each `status`."""
    data = manifest.to_json()
    for program in data["programs"]:
        program["status"] = manifest.status(program["spec"]["name"])
    return {**data, "verified": manifest.verified}
