"""Measure the cost of a vendor's compiler, program by program: CPU seconds and peak memory.

    whisperport compile BUNDLE --option TARGET.emulate=0
    python -m benchmarks.chips.compile_cost BUNDLE.compile/TARGET [--python PYTHON] [--program NAME ...]

Takes the work folder that `whisperport compile` left, and runs the stages of each program again, in a copy
of the folder and in a process of its own. Prints a Markdown table. Peak memory is the largest resident
size of the process or of one of its children, on Linux; CPU seconds are user and system time of all.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SCRIPTS = ("compile.py", "stages.py")


def main() -> None:
    """Compile one program after another, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("work", type=Path, help="work folder of a target")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the SDK")
    parser.add_argument("--program", action="append", help="a program; default: all")
    chosen = parser.parse_args()
    job = json.loads((chosen.work / "job.json").read_text(encoding="utf-8"))
    print("| Program | CPU s | Peak memory | Size |\n|---|---|---|---|")
    for program in job["programs"]:
        if chosen.program and program["name"] not in chosen.program:
            continue
        seconds, peak, size = _measured(chosen.work, job, program, chosen.python)
        row = f"| {program['name']} | {seconds:.0f} | {peak / 1e9:.2f} GB | {size / 1e6:.1f} MB |"
        print(row, flush=True)


def _measured(
    work: Path, job: dict[str, Any], program: dict[str, Any], python: str
) -> tuple[float, int, int]:
    """Compile one program; return CPU seconds, peak memory and the size of its compiled file in bytes."""
    name = program["name"]
    with TemporaryDirectory(dir=work.parent) as parent:
        folder = Path(parent)
        (folder / name).mkdir()
        for script in SCRIPTS:
            shutil.copy(work / script, folder)
        written = {file for stage in program["stages"] for file in stage["writes"]}
        read = {file for stage in program["stages"] for file in stage["reads"]} - written
        for file in read:
            os.link(work / name / file, folder / name / file)
        (folder / "job.json").write_text(json.dumps({**job, "programs": [program]}))
        child = os.posix_spawn(python, [python, str(folder / "compile.py")], dict(os.environ))
        _, status, used = os.wait4(child, 0)
        if status:
            raise SystemExit(f"{name}: the compiler failed; run `python {work / 'compile.py'}`")
        size = (folder / name / program["settings"]["artifact"]).stat().st_size
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, size


if __name__ == "__main__":
    main()
