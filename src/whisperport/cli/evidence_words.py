"""What a bundle's evidence says, in words."""

from whisperport.bundle import Manifest


def verified_words(manifest: Manifest) -> str:
    """Whether the bundle is verified, and by what: "verified; emulated on the CPU: TARGET"."""
    if manifest.failed:
        return "NOT VERIFIED"
    words = ["verified" if manifest.verified else "not verified"]
    if emulated := emulated_targets(manifest):
        words.append(f"emulated on the CPU: {', '.join(emulated)}")
    if compiled := not_run(manifest):
        words.append(f"not run as compiled: {', '.join(compiled)}")
    return "; ".join(words)


def emulated_targets(manifest: Manifest) -> tuple[str, ...]:
    """The targets of programs whose loaded file was emulated on the CPU, and neither run nor simulated."""
    found = dict.fromkeys(
        entry.target
        for entry in manifest.programs
        if manifest.is_verified(entry.spec.name)
        and manifest.status(entry.spec.name) not in ("run here", "simulated here")
    )
    return tuple(found)


def not_run(manifest: Manifest) -> tuple[str, ...]:
    """The programs whose loaded file was never run and compared with the reference."""
    names = [entry.spec.name for entry in manifest.programs]
    return tuple(name for name in names if not manifest.is_verified(name))
