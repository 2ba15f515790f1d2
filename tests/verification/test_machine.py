import getpass
import json
import socket

from whisperport.verification import machine, versions


def test_the_machine_is_described_and_its_owner_is_not() -> None:
    found = machine()

    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["memory_mib"] > 100
    assert found["python"].startswith("CPython 3.")
    assert json.loads(json.dumps(found)) == found
    words = " ".join(str(value) for value in found.values()).split()
    assert not any(word.startswith("/") for word in words)
    assert not {socket.gethostname(), getpass.getuser()} & set(words)


def test_versions_say_what_is_not_installed() -> None:
    found = versions(["numpy", "no-such-distribution"])

    assert found["numpy"][0].isdigit()
    assert found["no-such-distribution"] == "not installed"
