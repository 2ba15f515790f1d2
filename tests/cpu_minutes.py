"""Run a shell command, and print the CPU minutes (user and system) of all its processes at the end.

    python tests/cpu_minutes.py NAME COMMAND

The exit status is that of the command.
"""

import resource
import signal
import subprocess
import sys


def main(name: str, command: str) -> int:
    process = subprocess.Popen(command, shell=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command gets it too, and ends as it likes
    status = process.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{name}: {(used.ru_utime + used.ru_stime) / 60:.1f} CPU minutes", flush=True)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
