"""Records of this user's own bundles: what is recorded, where, and which records are ignored."""

import os
from pathlib import Path

import pytest

from whisperport.program.bundle import origin
from whisperport.program.bundle.origin import is_recorded, record

FIRST, SECOND = "a" * 64, "b" * 64

pytestmark = pytest.mark.skipif(os.name != "posix", reason="permissions")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "whisperport" / "bundles"


def test_what_was_recorded_is_known_by_its_kind(state: Path) -> None:
    record("own", FIRST)
    record("own", FIRST)

    assert is_recorded("own", FIRST)
    assert not is_recorded("own", SECOND)
    assert not is_recorded("tried", FIRST)


def test_records_are_for_their_user_only(state: Path) -> None:
    record("own", FIRST)

    assert state.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in state.iterdir()] == [0o600]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_to_is_not_believed(state: Path, mode: int) -> None:
    record("own", FIRST)
    state.chmod(mode)

    record("own", SECOND)

    assert not is_recorded("own", FIRST)
    assert len(list(state.iterdir())) == 1


def test_a_folder_of_another_user_is_not_believed(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record("own", FIRST)

    monkeypatch.setattr(os, "geteuid", lambda: state.stat().st_uid + 1)

    assert not is_recorded("own", FIRST)


def test_links_are_not_believed(state: Path, tmp_path: Path) -> None:
    # given: a folder elsewhere, and a link in place of the folder and of a record
    record("own", FIRST)
    os.rename(state, tmp_path / "elsewhere")
    state.symlink_to(tmp_path / "elsewhere")
    is_link_believed = is_recorded("own", FIRST)
    state.unlink()
    os.rename(tmp_path / "elsewhere", state)
    (state / f"own-{SECOND}").symlink_to(state / f"own-{FIRST}")

    assert not is_link_believed
    assert not is_recorded("own", SECOND)


@pytest.mark.parametrize("home", ["", "not/absolute", "/dev/null/state", "/proc/state"])
def test_where_nothing_can_be_recorded_nothing_is_known(
    home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {"XDG_STATE_HOME": home, "HOME": "/dev/null"})

    record("own", FIRST)

    assert not is_recorded("own", FIRST)
    assert not list(tmp_path.iterdir())


def test_the_oldest_records_are_dropped(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "MAX_RECORDS", 3)
    for number in range(3):
        record("own", f"{number}" * 64)
        os.utime(state / f"own-{f'{number}' * 64}", (1000 + number, 1000 + number))

    record("tried", FIRST)

    assert sorted(file.name[:5] for file in state.iterdir()) == ["own-1", "own-2", "tried"]
