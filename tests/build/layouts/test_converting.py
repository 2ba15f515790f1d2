"""`convert`: files are at their place only after the app returned what the checkpoint emits."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

from fuzz import seeds
from whisperport.apps.cli.checks_table import print_in_app
from whisperport.apps.cli.verify import verify
from whisperport.build.layouts import convert as converting
from whisperport.build.layouts import (
    exact,
    faster_whisper,
    layout_of,
    sherpa_onnx,
    whisper_cpp,
)
from whisperport.build.layouts.checks import checks_of, doubt
from whisperport.build.layouts.client import run_client, run_script
from whisperport.build.layouts.convert import ConvertOptions, convert
from whisperport.build.layouts.environments import (
    COMPLETE,
    command_of,
    folder_of,
    install,
    variable,
)
from whisperport.build.layouts.exact import check_graphs
from whisperport.build.layouts.layout import App, apps
from whisperport.build.layouts.record import read_record, record_path
from whisperport.build.layouts.reference import Emitted, KnownLogits, reference_of
from whisperport.build.layouts.verifying import verify_layout
from whisperport.errors import (
    BundleError,
    LoweringError,
    MissingPackageError,
    UsageError,
    VerificationError,
    WhisperportError,
)
from whisperport.verification.clips import Clip, shipped_audio, shipped_clips

pytest.importorskip("torch")
from whisperport.model.checkpoint import load_checkpoint

N_CLIPS = 2
CLIENT = """
import json
from pathlib import Path

def versions():
    return {"client": "1.0"}

def load(job):
    answers = iter(json.loads(Path(__file__).with_name("answers.json").read_text()))
    if not Path(job["model"]).exists():
        raise SystemExit("no model")
    return lambda samples: next(answers)
"""

NAN = CLIENT.replace("next(answers)", '{"text": "", "segments": [[0, float("nan"), ""]]}')


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    return load_checkpoint("default")


@pytest.fixture(scope="module", autouse=True)
def decoded_once(checkpoint: Any) -> Iterator[None]:
    """The checkpoint is decoded once per profile and clips: these tests differ in what apps return."""
    results: dict[str, Any] = {}

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        def result(of: Any, *arguments: Any) -> Any:
            if of.weights is not checkpoint.weights:
                return function(of, *arguments)
            key = repr((function.__name__, of.generation, hash(of.tokenizer_json), arguments))
            if key not in results:
                results[key] = function(of, *arguments)
            return results[key]

        return result

    with pytest.MonkeyPatch.context() as patch:
        for name in ("reference_of", "with_heads", "known_logits"):
            patch.setattr(converting, name, once(getattr(converting, name)))
        yield


def expected(checkpoint: Any, app: str) -> list[Emitted]:
    profile = layout_of(app).apps[app].profile_of(checkpoint)
    return reference_of(checkpoint, profile, shipped_clips(N_CLIPS))


def timed(checkpoint: Any) -> list[dict[str, Any]]:
    """What whisper.cpp returns for two clips."""
    return [
        {"text": e.text, "segments": [[s.start_s, s.end_s, s.text] for s in e.segments]}
        for e in expected(checkpoint, "whisper.cpp")
    ]


@pytest.fixture(scope="module")
def two_clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two clips, which are decoded in half a second."""
    folder = tmp_path_factory.mktemp("clips")
    for file in shipped_audio()[:N_CLIPS]:
        shutil.copy(file.path, folder)
        (folder / file.path.name).with_suffix(".txt").write_text(file.text)
    return folder


@pytest.fixture(scope="module")
def with_clips(two_clips: Path) -> ConvertOptions:
    return ConvertOptions(verify_with=two_clips)


@pytest.fixture(scope="module")
def answers(checkpoint: Any) -> list[dict[str, Any]]:
    return answers_of(checkpoint)


def answers_of(checkpoint: Any) -> list[dict[str, Any]]:
    """What faster-whisper returns for two clips: what the checkpoint emits."""
    results = expected(checkpoint, "faster-whisper")
    return [
        {
            "tokens": list(emitted.tokens),
            "text": emitted.text,
            "segments": [[s.start_s, s.end_s, s.text] for s in emitted.segments],
            "words": [[w.start_s, w.end_s, w.text] for w in emitted.words],
        }
        for emitted in results
    ]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Installs a client in place of faster-whisper's and of whisper.cpp's, which answers as it is told."""
    folder = tmp_path / "client"
    folder.mkdir()
    (folder / "client.py").write_text(CLIENT)

    def install(answers: Sequence[dict[str, Any]], script: str = CLIENT) -> None:
        (folder / "client.py").write_text(script)
        (folder / "answers.json").write_text(json.dumps(answers))
        for module in (faster_whisper, whisper_cpp):
            (app,) = module.LAYOUT.apps.values()
            changed: App = replace(app, script=folder / "client.py")
            monkeypatch.setattr(module, "LAYOUT", replace(module.LAYOUT, apps=apps(changed)))
            monkeypatch.setenv(variable(app), sys.executable)

    return install


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_is_written_and_verified_and_verified_again(
    checkpoint: Any, answers: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    # given an app that returns what the checkpoint emits
    client(answers)
    # when the checkpoint is written for it
    converted = convert(checkpoint, "faster-whisper", tmp_path / "out", with_clips)
    # then the folder is verified, and names the client's version
    assert converted
    assert converted.record.verification is not None
    assert converted.record.verification.versions == {"client": "1.0"}
    levels = [check.level for check in converted.record.verification.checks]
    assert levels == ["tokens", "tokens", "words"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("model.bin", "config.json", "vocabulary.json", "tokenizer.json"),
        *("preprocessor_config.json", "whisperport.json"),
    }
    # and it can be verified again, until the app returns something else
    assert verify_layout(tmp_path / "out").is_verified
    client([{**answers[0], "tokens": [1]}, *answers[1:]])
    again = verify_layout(tmp_path / "out").verification
    assert again is not None
    assert [check.passed for check in again.checks] == [False, True, True]


def test_nothing_is_written_if_the_app_returns_another_token(
    checkpoint: Any, answers: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    # given an app that returns another last token for one clip, and an older folder
    client(answers)
    convert(checkpoint, "faster-whisper", tmp_path / "out", with_clips)
    wrong = [*answers[:-1], {**answers[-1], "tokens": [*answers[-1]["tokens"][:-1], 50400]}]
    client(wrong)
    # when the checkpoint is written again
    with unchanged(tmp_path / "out"), pytest.raises(VerificationError) as caught:
        convert(checkpoint, "faster-whisper", tmp_path / "out", with_clips)
    # then the error names the clip and the token, and the older folder is there
    assert "02-espeak-british.flac: token 11 of 11 differs" in caught.value.why
    # and with `allow_unverified` the folder is marked
    options = replace(with_clips, allow_unverified=True)
    assert not convert(checkpoint, "faster-whisper", tmp_path / "out", options)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("def load(job):\n    raise SystemExit('no such layer')\n", "no such layer"),
        ("import os\nos._exit(3)\n", "status 3"),
        ("import os\nos._exit(0)\n", "ended without a result"),
        (CLIENT.replace("next(answers)", "{}"), "no 'text'"),
        (CLIENT.replace("next(answers)", '{"text": "", "segments": [[1]]}'), "unpack"),
        (CLIENT.replace("next(answers)", '{"text": "", "tokens": [10**400]}'), "64 bits"),
        (CLIENT.replace("next(answers)", '{"text": "\\ud800"}'), "surrogate"),
        (NAN, "NaN"),
        (
            CLIENT.replace("if not Path", "Path(job['model'], 'a').touch()\n    if not Path"),
            "a was added",
        ),
    ],
)
def test_a_client_that_fails_leaves_nothing(
    checkpoint: Any,
    answers: Any,
    client: Any,
    with_clips: Any,
    tmp_path: Path,
    script: str,
    why: str,
) -> None:
    client(answers, script)
    with pytest.raises(VerificationError) as caught:
        convert(checkpoint, "faster-whisper", tmp_path / "out", with_clips)
    assert why in f"{caught.value.why} {caught.value.what}"
    assert [path.name for path in tmp_path.iterdir()] == ["client"]


def test_an_app_that_is_killed_tells_nothing_of_its_files(client: Any, tmp_path: Path) -> None:
    # given a client that the system kills, as it does when memory runs out
    client([], "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    app = layout_of("faster-whisper").apps["faster-whisper"]
    clip = Clip("a", "", np.zeros(1600, np.float32))
    # when it runs
    with pytest.raises(WhisperportError, match="was killed") as caught:
        run_client(app, tmp_path, [clip], precision="fp32", language="en")
    # then that is no result of a verification, from which `judge` would conclude that the files are wrong
    assert not isinstance(caught.value, VerificationError)
    assert "memory" in caught.value.hint


def test_a_client_cannot_hold_up_the_command(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = layout_of("faster-whisper").apps["faster-whisper"]
    clip = Clip("a", "", np.zeros(1600, np.float32))
    # given a client that starts a process, which has its standard output and does not end
    waiting = "import subprocess\nsubprocess.Popen(['sleep', '60'])\n"
    client([{"text": "hello"}], waiting + CLIENT)
    app = layout_of("faster-whisper").apps["faster-whisper"]
    # then its result is read
    monkeypatch.setattr("whisperport.build.layouts.client.TIMEOUT_S", 5)
    run = run_client(app, tmp_path, [clip], precision="fp32", language="en")
    assert run.results[0].text == "hello"
    # given a client that does not end
    client([], "import time\ntime.sleep(100)\n")
    app = layout_of("faster-whisper").apps["faster-whisper"]
    monkeypatch.setattr("whisperport.build.layouts.client.TIMEOUT_S", 0.5)
    with pytest.raises(VerificationError, match="did not end"):
        run_client(app, tmp_path, [clip], precision="fp32", language="en")


def test_a_script_in_an_app_writes_nothing_beside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a folder that is being written, and a file of the user beside it
    app = layout_of("openvino-genai").apps["openvino-genai"]
    monkeypatch.setenv(variable(app), sys.executable)
    (tmp_path / "script.py").write_text("print('text'); open('made', 'w')")
    (tmp_path / "draft").mkdir()
    (tmp_path / "printed.log").write_text("the user's")
    # when a script runs in the app's environment
    run_script(app, tmp_path / "script.py", tmp_path / "draft")
    # then what it prints and makes is not beside the folder
    assert (tmp_path / "printed.log").read_text() == "the user's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "printed.log", "script.py"]


def test_what_an_app_leaves_in_the_folder_of_temporary_files_is_deleted(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given an app that leaves a temporary file, and fails
    client([])
    app = layout_of("faster-whisper").apps["faster-whisper"]
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    script = tmp_path / "script.py"
    script.write_text("import tempfile\ntempfile.mkstemp()\nraise SystemExit('no room')")
    # when it has run, then its file is gone
    with pytest.raises(VerificationError, match="failed with these files"):
        run_script(app, script, tmp_path)
    assert list((tmp_path / "temporary").iterdir()) == []
    # and if the disk of these files is full, then they are not blamed
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: full)
    with pytest.raises(WhisperportError, match=r"temporary files, in .*, is full") as caught:
        run_script(app, script, tmp_path)
    assert "faster-whisper: no room" in caught.value.why


def test_the_script_that_makes_tokenizers_ends_with_the_process_that_asks(tmp_path: Path) -> None:
    script = layout_of("openvino-genai").apps["openvino-genai"].script.with_name("tokenizer.py")
    command = [sys.executable, script, tmp_path]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_a_client_that_cannot_be_started_is_named(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a variable that names the folder of an environment in place of its interpreter
    (app,) = layout_of("faster-whisper").apps.values()
    monkeypatch.setenv(variable(app), str(tmp_path))
    clip = Clip("a", "", np.zeros(1600, np.float32))
    with pytest.raises(MissingPackageError, match="cannot be started") as caught:
        run_client(app, tmp_path, [clip], precision="fp32", language="en")
    assert variable(app) in caught.value.hint


def test_text_and_timestamps_are_compared_where_an_app_returns_no_ids(
    checkpoint: Any, answers: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    # given an app of one file that returns text and timestamps
    answers = timed(checkpoint)
    client(answers)
    out = tmp_path / "model.bin"
    # then the file is verified, and its record lies beside it
    assert convert(checkpoint, "whisper.cpp", out, with_clips)
    assert (tmp_path / "model.whisperport.json").is_file()
    assert verify_layout(out).is_verified
    # and a timestamp that is 60 ms late is a failure
    start, end, text = answers[0]["segments"][0]
    client([{**answers[0], "segments": [[start, end + 0.06, text]]}, *answers[1:]])
    with pytest.raises(VerificationError) as caught, unchanged(tmp_path):
        convert(checkpoint, "whisper.cpp", out, with_clips)
    assert "a timestamp differs by 0.06 s" in caught.value.why


def test_words_of_a_checkpoint_that_understands_nothing_are_no_evidence() -> None:
    # given a checkpoint that emits far more words than are spoken, and an app that returns others
    clip = Clip("a.wav", "turn the light on", np.zeros(16000, np.float32))
    emitted = Emitted((1,), "never " * 40, ())
    app = layout_of("openvino-genai").apps["openvino-genai"]
    # when they are compared by words
    (check,) = checks_of(app, "w8", [clip], [emitted], [replace(emitted, text="")], exact=False)
    # then fewer errors than the checkpoint's do not pass
    assert not check.passed
    assert "the checkpoint itself has WER" in check.reason
    assert "--verify-with" in check.reason


def test_a_difference_in_nonsense_is_shown_with_its_cause() -> None:
    # given a checkpoint that repeats a word, and an app whose rules end the text earlier
    clip = Clip("a.wav", "turn the light on", np.zeros(16000, np.float32))
    emitted, returned = (Emitted((), "never " * n + end, ()) for n, end in ((90, ""), (80, "ever")))
    app = layout_of("whisper.cpp").apps["whisper.cpp"]
    # when their texts are compared
    (check,) = checks_of(app, "fp16", [clip], [emitted], [returned], exact=True)
    # then the place where they differ is shown, and why these clips show nothing
    assert not check.passed
    assert "never ever', the checkpoint emits '...r never never" in check.reason
    assert "has WER 2250% itself: give clips that it understands" in check.reason
    assert len(check.reason) < 400


def test_fewer_bits_are_judged_by_words(
    checkpoint: Any, answers: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    # given an app that returns other tokens and the same words
    client([{**answer, "tokens": [1]} for answer in answers])
    options = replace(with_clips, precision="w8")
    converted = convert(checkpoint, "faster-whisper", tmp_path / "out", options)
    assert converted.record.verification is not None
    levels = [check.level for check in converted.record.verification.checks]
    assert levels == ["words", "words"]
    # when it loses two words of one clip
    client([{**answers[0], "text": "The code is nine"}, *answers[1:]])
    with pytest.raises(VerificationError) as caught:
        convert(checkpoint, "faster-whisper", tmp_path / "out", options)
    assert "above the checkpoint's in 17 words" in caught.value.why


def shifted(answers: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """The answers with every word later."""
    return [
        {**answer, "words": [[a + seconds, b + seconds, text] for a, b, text in answer["words"]]}
        for answer in answers
    ]


def test_word_timestamps_are_compared(
    checkpoint: Any, answers: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    # given an app whose words are 40 ms late
    client(shifted(answers, 0.04))
    # then they are within the limit
    converted = convert(checkpoint, "faster-whisper", tmp_path / "out", with_clips)
    assert converted.record.verification is not None
    check = converted.record.verification.checks[-1]
    assert check.value == pytest.approx(
        {"words": 17, "part_of_words": 1, "median_s": 0.04, "largest_s": 0.04}
    )
    # and words that are 60 ms late, have no times, or are other ones are not
    otherwise = [{**answer, "words": [[0, 1, "other"]]} for answer in answers]
    for wrong, why in (
        (shifted(answers, 0.06), "17 of 17 words do not"),
        ([{**answer, "words": []} for answer in answers], "returned no word"),
        (otherwise, "returned no word"),
    ):
        client(wrong)
        verification = verify_layout(tmp_path / "out").verification
        assert verification is not None
        assert [check.passed for check in verification.checks] == [True, True, False]
        assert why in verification.checks[-1].reason


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("config.json", "it can no longer be read"),
        ("model.bin", "tensor decoder/embeddings/weight has changed"),
    ],
)
def test_a_changed_file_is_named(
    checkpoint: Any,
    answers: Any,
    client: Any,
    with_clips: Any,
    tmp_path: Path,
    name: str,
    part: str,
) -> None:
    client(answers)
    out = tmp_path / "out"
    convert(checkpoint, "faster-whisper", out, with_clips)
    data = bytearray((out / name).read_bytes())
    data[len(data) // 2] ^= 1
    (out / name).write_bytes(data)
    with pytest.raises(BundleError) as caught:
        verify_layout(out)
    assert caught.value.why.startswith(f"{name} has changed: {part}")
    (out / name).unlink()
    with pytest.raises(BundleError, match="not what whisperport wrote") as caught:
        verify_layout(out)
    assert caught.value.why == f"{name} is missing"


def test_files_of_the_user_are_not_replaced(
    checkpoint: Any, answers: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    # given a folder of whisperport with a file of the user, and a folder that is not whisperport's
    client(answers)
    convert(checkpoint, "faster-whisper", tmp_path / "out", with_clips)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.bin").write_text("mine")
    # and a bundle
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text(
        '{"format": "whisperport bundle", "files": {}}'
    )
    # then none is replaced
    for name in ("out", "other", "bundle"):
        with unchanged(tmp_path / name), pytest.raises((BundleError, UsageError)):
            convert(checkpoint, "faster-whisper", tmp_path / name, with_clips)


def test_an_app_that_is_missing_is_named_before_the_work(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given no app
    (app,) = layout_of("faster-whisper").apps.values()
    monkeypatch.delenv(variable(app), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # then the error says how to install it, and a path that cannot be read was not looked at
    with pytest.raises(MissingPackageError) as caught:
        convert("no-such-checkpoint", "faster-whisper", tmp_path / "out")
    assert "whisperport apps --install faster-whisper" in caught.value.hint
    # and the files can be written without it; then there is nothing to verify
    options = ConvertOptions(allow_unverified=True)
    assert not convert(checkpoint, "faster-whisper", tmp_path / "out", options)
    with pytest.raises(BundleError, match="cannot be verified"):
        verify_layout(tmp_path / "out")


def test_what_an_app_does_not_load_is_refused(
    checkpoint: Any, answers: Any, client: Any, micro_checkpoint: Any, tmp_path: Path
) -> None:
    client(answers)
    with pytest.raises(UsageError, match="there is no app `faster-whisperer`") as caught:
        convert(checkpoint, "faster-whisperer", tmp_path / "out")
    assert caught.value.why == "the app with a similar name is faster-whisper"
    with pytest.raises(UsageError, match="no precision `int4`"):
        convert(checkpoint, "faster-whisper", tmp_path / "out", ConvertOptions(precision="int4"))
    with pytest.raises(UsageError, match=r"does not end with \.bin"):
        convert(checkpoint, "whisper.cpp", tmp_path / "out")
    with pytest.raises(LoweringError, match=r"whisper\.cpp cannot run this checkpoint"):
        convert(micro_checkpoint, "whisper.cpp", tmp_path / "out.bin")


def test_a_client_does_not_see_folders_beside_its_script(client: Any, tmp_path: Path) -> None:
    # given a folder beside the script of all clients that is called as a package of the app
    client([{"text": "hello"}], "import faster_whisper\n" + CLIENT)
    app = layout_of("faster-whisper").apps["faster-whisper"]
    clip = Clip("a", "", np.zeros(1600, np.float32))
    # then the package is not that folder, but missing
    with pytest.raises(VerificationError, match="failed with these files") as caught:
        run_client(app, tmp_path, [clip], precision="fp32", language="en")
    assert "No module named 'faster_whisper'" in caught.value.why


def test_a_file_is_replaced_only_if_convert_wrote_it(
    checkpoint: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    # given a file of whisperport, which may be written again
    client(timed(checkpoint))
    out = tmp_path / "model.bin"
    convert(checkpoint, "whisper.cpp", out, with_clips)
    convert(checkpoint, "whisper.cpp", out, with_clips)
    # when it is the user's own, or its record is
    (tmp_path / "mine.bin").write_bytes(b"mine")
    (tmp_path / "notes.whisperport.json").write_text("mine")
    # then nothing is replaced
    for name in ("mine", "notes"):
        with pytest.raises(UsageError, match="cannot write") as caught, unchanged(tmp_path):
            convert(checkpoint, "whisper.cpp", tmp_path / f"{name}.bin", with_clips)
        assert "`convert` did not write it" in caught.value.why
    # and without the file, its record is no obstacle; beside another file of this name it is
    out.unlink()
    convert(checkpoint, "whisper.cpp", out, with_clips)
    out.write_bytes(b"mine")
    with pytest.raises(UsageError, match="cannot write"), unchanged(tmp_path):
        convert(checkpoint, "whisper.cpp", out, with_clips)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("write error")]
)
def test_a_full_disk_is_said_to_be_full_and_the_old_folder_stays(
    checkpoint: Any,
    answers: Any,
    client: Any,
    with_clips: Any,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given a folder, and a disk that is full; libraries that write files say only that they failed
    client(answers)
    convert(checkpoint, "faster-whisper", tmp_path / "out", with_clips)
    layout = layout_of("faster-whisper")

    def write(_checkpoint: Any, _precision: str, folder: Path) -> None:
        (folder / "model.bin").write_bytes(bytes(3_000_000))
        full = shutil.disk_usage(folder)._replace(free=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: full)
        raise error

    monkeypatch.setattr(faster_whisper, "LAYOUT", replace(layout, write=write))
    # then the error says so, and the folder is as it was
    with unchanged(tmp_path / "out"), pytest.raises(BundleError, match="disk is full") as caught:
        convert(checkpoint, "faster-whisper", tmp_path / "out", with_clips)
    assert "3 MB were written" in caught.value.why
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


@pytest.mark.parametrize(
    ("app", "name", "full"),
    [("faster-whisper", "out", "disk is full"), ("whisper.cpp", "out.bin", "cannot write")],
)
def test_a_disk_that_only_the_record_fills_is_told_of_the_output(
    checkpoint: Any,
    answers: Any,
    client: Any,
    with_clips: Any,
    app: str,
    name: str,
    full: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given a disk with room for the files, and none for the record
    client(answers if app == "faster-whisper" else timed(checkpoint))
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("whisperport.system.atomic._replace", Mock(side_effect=error))
    # then the error names what the user asked for, and no hidden file
    with pytest.raises(WhisperportError, match=full) as caught:
        convert(checkpoint, app, tmp_path / name, with_clips)
    assert f"{tmp_path / name}" in caught.value.what
    assert "No space left" in caught.value.why
    assert "free some space" in caught.value.hint
    assert "partial" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["client"]


def test_a_file_that_appears_during_the_work_is_kept(
    checkpoint: Any, answers: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    # given an app that runs while the user writes the output
    out = tmp_path / "model.bin"
    client(
        timed(checkpoint), CLIENT.replace("answers =", f"Path({str(out)!r}).touch()\n    answers =")
    )
    # then the user's file is there, and no other
    with pytest.raises(UsageError, match="cannot write"):
        convert(checkpoint, "whisper.cpp", out, with_clips)
    assert out.read_bytes() == b""
    assert {path.name for path in tmp_path.iterdir()} == {"client", "model.bin"}


def test_a_name_that_no_record_can_hold_is_refused(
    checkpoint: Any, client: Any, two_clips: Path, tmp_path: Path
) -> None:
    # given names that are not UTF-8: of the output, and of a clip
    client([])
    name = os.fsdecode(b"\xff")
    shutil.copytree(two_clips, tmp_path / "clips")
    next((tmp_path / "clips").glob("*.wav")).rename(tmp_path / "clips" / f"{name}.wav")
    with pytest.raises(UsageError, match="cannot be used"):
        convert(checkpoint, "whisper.cpp", tmp_path / f"{name}.bin")
    options = ConvertOptions(verify_with=tmp_path / "clips")
    with pytest.raises(UsageError, match="cannot be used"):
        convert(checkpoint, "faster-whisper", tmp_path / "out", options)
    with pytest.raises(UsageError, match="does not end with") as caught:
        convert(checkpoint, "whisper.cpp", "")
    assert caught.value.hint == "--out model.bin"


def test_an_installation_that_was_killed_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given an environment with an interpreter, whose packages are not all there yet
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (app,) = layout_of("faster-whisper").apps.values()
    monkeypatch.delenv(variable(app), raising=False)
    python = folder_of(app) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    # then it is not used, until it is complete
    assert command_of(app) is None
    (folder_of(app) / COMPLETE).touch()
    assert command_of(app) == [str(python)]


def test_heads_that_do_not_follow_the_audio_are_not_written(
    checkpoint: Any, answers: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    # given a fine-tune that lists the heads of another model
    client(answers)
    generation = replace(checkpoint.generation, alignment_heads=((0, 0), (1, 1)))
    # when it is written
    copied = replace(checkpoint, generation=generation)
    converted = convert(copied, "faster-whisper", tmp_path / "out", with_clips)
    # then the files have the model's own, and a warning says how far off the others were
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["alignment_heads"] == [[1, 0], [2, 0]]
    (warning,) = converted.warnings
    assert "mean error of 0.45 s, and now of 0.06 s" in warning


def test_an_app_in_torch_gets_the_projects_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given the version of torch that the project installs
    lock = Path(__file__).parents[3].joinpath("environments/lock.txt").read_text(encoding="utf-8")
    torch = re.findall(r"^torch==[^ ]+", lock, re.MULTILINE)
    # when optimum is installed
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    app = layout_of("optimum").apps["optimum"]
    install(app)
    # then pip is given that version beside the app, in one command that resolves both
    environment, packages = commands
    assert environment[1:3] == ["-m", "venv"]
    assert packages[0] == str(folder_of(app) / "bin" / "python")
    assert packages[-len(app.packages) :] == list(app.packages)
    assert torch == [app.packages[0]]


def test_a_command_shows_what_an_unverified_file_lost(
    checkpoint: Any,
    answers: Any,
    client: Any,
    two_clips: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # given a folder that was written although the app returned another token
    client([{**answers[0], "tokens": [1]}, *answers[1:]])
    options = ConvertOptions(verify_with=two_clips, allow_unverified=True)
    converted = convert(checkpoint, "faster-whisper", tmp_path / "out", options)
    # when it is printed
    print_in_app({converted.path: converted.record})
    # then the clip and the reason are there
    shown = capsys.readouterr().out
    assert "FAIL: 01-espeak.wav: token 1 of 14 differs" in shown
    assert "NOT VERIFIED with client 1.0" in shown


def spoiled(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, rows: slice = slice(None)
) -> None:
    """Let a layout write the weights of a checkpoint of which one differs, in some rows or in all."""
    write = module.LAYOUT.write

    def write_spoiled(checkpoint: Any, precision: str, out: Path) -> None:
        spoiled_weight = checkpoint.weights[name].clone()
        spoiled_weight[rows] *= -1
        weights = {**checkpoint.weights, name: spoiled_weight}
        write(replace(checkpoint, weights=weights), precision, out)

    monkeypatch.setattr(module, "LAYOUT", replace(module.LAYOUT, write=write_spoiled))


@pytest.mark.parametrize("precision", ["fp32", "w8"])
def test_weights_that_are_not_the_checkpoints_are_named_before_the_app_runs(
    checkpoint: Any,
    answers: Any,
    client: Any,
    two_clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
) -> None:
    # given an app that returns what the checkpoint emits, whatever the files are
    client(answers)
    name = "decoder.blocks.1.mlp.0.weight"
    spoiled(monkeypatch, faster_whisper, name, slice(-1, None))
    monkeypatch.setattr(exact, "ROWS", 5)
    # when the last row of one tensor is written wrongly, which is compared in pieces
    options = ConvertOptions(verify_with=two_clips, precision=precision)
    with pytest.raises(VerificationError, match="are not those of the checkpoint") as caught:
        convert(checkpoint, "faster-whisper", tmp_path / "out", options)
    # then the error names it
    assert f"1 tensors differ, such as {name}" in caught.value.why


def test_graphs_that_do_not_compute_the_checkpoints_tokens_are_not_written(
    checkpoint: Any,
    two_clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given an app that is not installed
    app = sherpa_onnx.LAYOUT.apps["sherpa-onnx"]
    monkeypatch.delenv(variable(app), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ConvertOptions(verify_with=two_clips, allow_unverified=True)
    # when its files are written, then their graphs have been run here
    right = convert(checkpoint, "sherpa-onnx", tmp_path / "right", options).record
    assert [check.passed for check in right.without_app] == [True]
    assert right.logits is not None
    assert right.logits.n_prompt < len(right.logits.tokens)
    # and a graph with a wrong weight fails, also where 8 bits may change some tokens
    spoiled(monkeypatch, sherpa_onnx, "decoder.blocks.1.mlp.0.weight")
    options = replace(options, precision="w8")
    wrong = convert(checkpoint, "sherpa-onnx", tmp_path / "wrong", options).record
    assert [check.passed for check in wrong.without_app] == [False]
    assert not right.is_verified


def test_graphs_that_compute_zeros_are_not_the_checkpoints() -> None:
    # given graphs of 8 bits in which every logit is zero, and so the highest
    (clip,) = shipped_clips(1)
    known = KnownLogits(clip.name, "mel", 80, (3, 1, 2), 1, (1, 2, 4), (9.0, 8.0, 7.0))
    layout = replace(layout_of("openvino-genai"), logits=lambda *_: np.zeros((3, 5), np.float32))
    # then they are not taken for those of the checkpoint
    assert not check_graphs(layout, Path("out"), "w8", known, [clip], 30.0, exact=False).passed


def test_an_app_that_decodes_differently_is_told_from_wrong_files(
    checkpoint: Any, answers: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    client([{**answers[0], "tokens": [1]}, *answers[1:]])
    with pytest.raises(VerificationError, match="does not return what") as caught:
        convert(checkpoint, "faster-whisper", tmp_path / "out", with_clips)
    assert "decodes differently: written weights are the checkpoint's" in caught.value.why


def test_without_the_runtime_of_graphs_the_record_says_that_they_were_not_run(
    checkpoint: Any, two_clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given no ONNX Runtime, and no app
    app = sherpa_onnx.LAYOUT.apps["sherpa-onnx"]
    monkeypatch.delenv(variable(app), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    # when the files are written
    options = ConvertOptions(verify_with=two_clips, allow_unverified=True)
    record = convert(checkpoint, "sherpa-onnx", tmp_path / "out", options).record
    # then the record says why nothing was compared
    assert record.without_app == ()
    assert "onnxruntime is not installed" in record.not_compared


def test_a_new_verification_is_recorded_only_if_asked(
    checkpoint: Any, answers: Any, client: Any, two_clips: Path, tmp_path: Path
) -> None:
    # given files that are not verified, because the app returned another token
    client([{**answers[0], "tokens": [1]}, *answers[1:]])
    out = tmp_path / "out"
    options = ConvertOptions(verify_with=two_clips, allow_unverified=True)
    convert(checkpoint, "faster-whisper", out, options)
    # when the app returns what it must
    client(answers)
    with unchanged(out):
        assert verify_layout(out).is_verified
    assert not read_record(record_path(out)).is_verified
    # then `--record` keeps it
    result = CliRunner().invoke(verify, [str(out), "--record"])
    assert result.exit_code == 0, result.output
    assert read_record(record_path(out)).is_verified
    # and an option that is of bundles only is refused
    for arguments in (["--clip", "a"], ["--threads", "2"], ["--html", str(tmp_path / "page.html")]):
        result = CliRunner().invoke(verify, [str(out), *arguments])
        assert result.exit_code == 2
        assert "only --record and --json" in result.output


EDITS = {
    "chip": "sm8650",
    "made_of": ["0" * 64],
    "app": "optimum",
    "precision": "w8",
    "exact": False,
    "language": "de",
    "window_s": 29.0,
    "source": {"kind": "openai", "name": "another"},
    "files": {"config.json": "0" * 64},
    "parts": {},
    "clips": [],
    "without_app": [],
    "not_compared": "never",
    "verification": None,
    "members": {},
}


def test_what_is_edited_in_a_record_is_named(
    checkpoint: Any, answers: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    # given files with their record
    client(answers)
    out = tmp_path / "out"
    convert(checkpoint, "faster-whisper", out, with_clips)
    written = (out / "whisperport.json").read_bytes()
    record = json.loads(written)
    assert {"format", "version", *EDITS, "logits"} == record.keys()  # no graph: `logits` is null
    date = {**record["verification"], "date": "2020-01-01"}
    moved = {name: record[name] for name in reversed(record)}
    # when a member, one of its own members, their order or a space changes
    edits = [(name, {**record, name: value}) for name, value in EDITS.items()]
    edits += [("verification", {**record, "verification": date}), ("the order of its", moved)]
    texts = [(name, json.dumps(edited, ensure_ascii=False, indent=1)) for name, edited in edits]
    for name, text in (*texts, ("a space", f"{written.decode()}\n")):
        (out / "whisperport.json").write_text(text, encoding="utf-8")
        # then verify names it, before anything else
        with pytest.raises(BundleError, match="is not what whisperport wrote") as caught:
            verify_layout(out)
        assert name in caught.value.why
    # and the record as it was written is believed
    (out / "whisperport.json").write_bytes(written)
    assert verify_layout(out).is_verified


def test_a_checkpoint_whose_own_words_are_wrong_is_told_from_one_that_transcribes(
    checkpoint: Any, client: Any, with_clips: Any, tmp_path: Path
) -> None:
    # given a tokenizer in which each token of text has the id of the next one
    tokenizer = json.loads(checkpoint.tokenizer_json)
    vocabulary = tokenizer["model"]["vocab"]
    end = checkpoint.generation.end_of_text
    rotated = {token: (i + 1) % end if i < end else i for token, i in vocabulary.items()}
    tokenizer["model"]["vocab"] = rotated
    other = replace(checkpoint, tokenizer_json=json.dumps(tokenizer).encode())
    # when it is written and verified in an app, which has the same tokenizer
    client(answers_of(other))
    out = tmp_path / "out"
    converted = convert(other, "faster-whisper", out, with_clips)
    # then the app returns what the checkpoint emits, but a warning says that it is not the text
    assert converted
    assert "the checkpoint itself has WER" in converted.warnings[-1]
    result = CliRunner().invoke(verify, [str(out)])
    assert result.exit_code == 0
    assert "Its tokenizer may have the ids of another one" in " ".join(result.output.split())
    # and none is there with its own tokenizer, or where the transcripts are not known
    client(answers_of(checkpoint))
    assert convert(checkpoint, "faster-whisper", out, with_clips).warnings == ()
    assert doubt("en", [("words of random weights", "")]) == ""


def test_a_record_of_something_else_is_an_error(tmp_path: Path) -> None:
    # given a pipe, which could block, and a record whose window has no length
    os.mkfifo(tmp_path / "pipe.json")
    folder = seeds.folder_of("layout", tmp_path)
    record = json.loads((folder / "whisperport.json").read_text())
    for name, value in (("nan", "nan"), ("inf", "inf"), ("none", 0), ("big", 1e308)):
        (tmp_path / f"{name}.json").write_text(json.dumps({**record, "window_s": value}))
    # then each is an error of its own
    for name, why in (
        ("pipe", "cannot be read"),
        *((n, "window_s") for n in ("nan", "inf", "none")),
    ):
        with pytest.raises(BundleError, match=why):
            read_record(tmp_path / f"{name}.json")
    # and the record as it was written is none
    assert read_record(record_path(folder)).difference(folder) == ""
