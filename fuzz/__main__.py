"""Pass mutated files of every format to the functions and commands that a user would call.

    python -m fuzz [--count 20000] [--seed 0] [--format NAME ...] [--jobs 2]
    python -m fuzz --replay build/fuzz/findings/NAME-NUMBER.tar

An input is accepted, or rejected with a `WhisperportError`. Everything else is a finding: another
exception, a crash, more than 30 s or 2 GiB, a file outside of the input that was opened, a file or process
left behind, control characters on the terminal, or a result that is not finite. Findings are saved in
build/fuzz/findings; the exit status is 1 if there is a finding.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fuzz.campaign import Campaign, replay, save, table
from fuzz.formats import all_formats
from whisperport.program.bundle.manifest import FORMAT_VERSION

BUILD = Path("build/fuzz")
# Kept between campaigns; made again when the bundle's format version changes.
SEEDS = BUILD / f"seeds-{FORMAT_VERSION}"
COUNT = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign or replay one input; return the exit status."""
    formats = all_formats()
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--count", type=int, default=COUNT, help="Number of inputs, all formats together"
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the inputs")
    parser.add_argument(
        "--format", action="append", choices=formats, help="Use only this format; may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=2, help="Number of workers")
    parser.add_argument("--minutes", type=float, default=math.inf, help="Start no input later")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="Read a saved input again")
    parser.add_argument(
        "--save", action="store_true", help="Write the result into fuzz/results.json"
    )
    chosen = parser.parse_args(arguments)
    if chosen.replay:
        outcome = replay(chosen.replay, SEEDS)
        print(f"{outcome.kind}: {outcome.where}\n{outcome.detail}")
        return int(outcome.is_finding)
    campaign = Campaign(
        formats=[entry for name, entry in formats.items() if name in (chosen.format or formats)],
        count=chosen.count,
        seed=chosen.seed,
        jobs=chosen.jobs,
        seeds=SEEDS,
        minutes=chosen.minutes,
        work=BUILD / "work",
        findings=BUILD / "findings",
        progress=lambda text: print(text, flush=True),
    )
    wall_s = campaign.run()
    print(f"\n{table(campaign)}\n\n{wall_s / 60:.1f} minutes")
    for (name, kind, where), numbers in sorted(campaign.found.items()):
        print(f"{name}: {kind}: {where}: {len(numbers)} inputs, such as {numbers[0]}")
    if chosen.save:
        print(
            save(
                campaign, wall_s, shlex.join(["python", "-m", "fuzz", *(arguments or sys.argv[1:])])
            )
        )
    return int(bool(campaign.found))


if __name__ == "__main__":
    sys.exit(main())
