"""Write a model in the formats of all contenders; what exists is not written again."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .contenders import Contender

HERE = Path(__file__).parent
SHARED = ("huggingface", "openai.pt")  # what every conversion begins with


def prepare(
    model: str, folder: Path, contenders: Sequence[Contender], python: Path, tokens: int
) -> dict[str, str]:
    """Return the reason for each contender that has no model: its name -> the last line of the failure.

    Args:
        model: "embedded", or a name of sizes; see `models.py`.
        folder: where the model is written in all formats.
        contenders: whose formats are needed.
        python: the interpreter of the peers' environment.
        tokens: number of tokens that contenders will be forced to decode.
    """
    reasons: dict[str, str] = {}
    targets = {one.target for one in contenders if one.is_ours}
    for target in sorted(targets):
        if not (folder / target).exists() or not all((folder / name).exists() for name in SHARED):
            print(f"writing {model} for {target}", file=sys.stderr)
            command = [
                sys.executable,
                "-m",
                f"{__package__}.models",
                model,
                folder,
                "--target",
                target,
            ]
            failure = failure_of(command)
            reasons |= {
                c.name: failure for c in contenders if c.is_ours and c.target == target and failure
            }
    for format in sorted({one.format for one in contenders if one.format}):
        if not (folder / format).exists():
            print(f"converting {model}: {format}", file=sys.stderr)
            command = [python, HERE / "convert.py", format, folder]
            command += [] if model == "embedded" else ["--forced-tokens", str(tokens)]
            failure = failure_of(command)
            reasons |= {c.name: failure for c in contenders if c.format == format and failure}
    return reasons


def failure_of(command: Sequence[str | Path]) -> str:
    """Run a command; return the last line that it wrote if it failed, or nothing."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return ""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"the conversion ended with status {done.returncode}"
