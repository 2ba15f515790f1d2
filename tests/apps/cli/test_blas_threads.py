"""NumPy's threads do not use the CPU while they wait."""

import os
import subprocess
import sys

import pytest

SEEN = """
import sys
import whisperport.__main__ as command
assert "numpy" not in sys.modules, "NumPy would not read the variable any more"
sys.argv = ["whisperport", "--version"]
try:
    command.main()
finally:
    import os
    print(os.environ[command.BLAS_THREADS])
"""


@pytest.mark.parametrize(("given", "seen"), [(None, "1"), ("3", "3")])
def test_the_command_uses_one_thread_of_numpy_unless_the_user_says_otherwise(given, seen):
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    environment |= {} if given is None else {"OPENBLAS_NUM_THREADS": given}

    done = subprocess.run(
        [sys.executable, "-c", SEEN], env=environment, capture_output=True, text=True
    )

    assert done.stdout.splitlines()[-1] == seen, done.stderr
