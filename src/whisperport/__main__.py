"""The command `whisperport`, also `python -m whisperport`. Ctrl-C is handled before other imports."""

import os

from whisperport.system import interrupts

# NumPy's matrix multiplications are small here, and waiting threads of its OpenBLAS use the CPU: on a
# machine with other load, the spectrogram of 77 s of audio needed 1.0 to 1.6 s of CPU time, and 0.1 to
# 0.2 s with one thread. NumPy reads the variable when it is imported. The user's own value is kept.
BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def main() -> None:
    """Run the command line. `whisperport.apps.cli.main.main` lists the exit statuses."""
    try:
        interrupts.install()
        os.environ.setdefault(BLAS_THREADS, "1")
        from whisperport.apps.cli.main import main as run

        run()
    except KeyboardInterrupt:  # during the imports above, or a second Ctrl-C
        interrupts.leave()
    finally:
        interrupts.restore()


if __name__ == "__main__":
    main()
