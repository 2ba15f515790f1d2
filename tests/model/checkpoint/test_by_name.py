"""Checkpoints that are given by name, and the names that are known."""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import whisper
from huggingface_hub import constants
from tests.extent import core_or_all

from whisperport import fetch
from whisperport.errors import CheckpointError
from whisperport.model.checkpoint import by_name, download, load_checkpoint
from whisperport.model.checkpoint.names import from_huggingface, to_huggingface
from whisperport.model.checkpoint.openai_releases import ALIASES, RELEASES, Release
from whisperport.model.checkpoint.tensor_check import expected_shapes
from whisperport.system.locking import lock_path
from whisperport.system.progress import reporting

from ...micro import whisper_dims


class Server(ThreadingHTTPServer):
    """Serves `data` at every path. `fault` is one of the names in `Handler`, or empty."""

    daemon_threads = True

    def __init__(self, data):
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.fault, self.at, self.asked = data, "", 0, []
        self.pause_s = 0.0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """A client that closed the connection is no error here."""

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        with contextlib.suppress(ConnectionError):
            self.answer()

    def answer(self):
        server, fault, at = self.server, self.server.fault, self.server.at
        have = self.headers.get("Range", "")
        server.asked.append((self.path, have))
        start = int(have[6:-1]) if have and fault != "no ranges" else 0
        data = server.data
        if fault == "other bytes":
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        elif fault == "a page":
            data = b"<html>log in</html>"
        elif fault.isdigit():
            self.send_response(int(fault))
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        elif fault == "loop" or (fault == "redirect" and self.path != "/moved"):
            self.send_response(302)
            self.send_header("Location", f"{server.url}/{'loop' if fault == 'loop' else 'moved'}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if start >= len(data):
            self.send_error(416)
            return
        total = len(data) + {"too long": 1 + at, "too short": -1 - at}.get(fault, 0)
        total += 10**9 if fault == "huge" else 0
        self.send_response(206 if start else 200)
        if start:
            wrong = 1 if fault == "other range" else 0
            self.send_header("Content-Range", f"bytes {start + wrong}-{total - 1}/{total}")
        if fault != "no length":
            self.send_header("Content-Length", str(max(total - start, 0)))
        self.end_headers()
        body = data[start : max(start, at)] if fault == "cut" else data[start:]
        for i in range(0, len(body), 65536):
            self.wfile.write(body[i : i + 65536])
            self.wfile.flush()
            time.sleep(server.pause_s)


# Weights by name: where they are looked for, and what a download accepts.

DATA = random.Random(0).randbytes(1_000_000)
SHA = hashlib.sha256(DATA).hexdigest()
FAKE = Release("tiny.en", SHA, 2_000_000, "")


@pytest.fixture
def server(monkeypatch, tmp_path):
    """OpenAI's server, with a file of our own as tiny.en; caches are empty, and there is no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(RELEASES, "tiny.en", FAKE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(by_name.hub, "fetch", no_hub)
    monkeypatch.setattr(download, "PAUSE_S", 0.001)
    monkeypatch.setattr(download, "TIMEOUT_S", (1, 1))
    with Server(DATA) as one:
        monkeypatch.setattr(by_name, "SERVER", one.url)
        yield one


def no_hub(*_):
    raise CheckpointError("no", why="there is no hub")


def stored(tmp_path):
    return tmp_path / "cache" / "whisper" / "tiny.en.pt"


def fails(path):
    with pytest.raises(CheckpointError) as caught:
        fetch("tiny.en")
    assert caught.value.why
    assert caught.value.hint
    assert not path.exists()
    assert not lock_path(path).exists()
    return caught.value


def test_the_urls_are_openai_whispers():
    for name, url in whisper._MODELS.items():
        release = RELEASES[ALIASES.get(name, name)]
        assert f"{by_name.SERVER}/{release.sha256}/{release.name}.pt" == url


def test_a_file_is_downloaded_once_and_its_size_is_told_before(server, tmp_path):
    told = []

    with reporting(told.append):
        path = fetch("tiny.en")

    assert path == stored(tmp_path)
    assert path.read_bytes() == DATA
    assert "1.0 MB" in told[0]
    assert str(path) in told[0]
    assert fetch("tiny.en") == path
    assert len(server.asked) == 1
    assert [one.name for one in path.parent.iterdir()] == ["tiny.en.pt"]


@pytest.mark.parametrize("fault", ["redirect", "no ranges", "no length", "other range"])
def test_a_server_with_other_habits_is_understood(fault, server, tmp_path):
    server.fault = fault
    stored(tmp_path).parent.mkdir(parents=True)
    Path(f"{stored(tmp_path)}.part").write_bytes(DATA[:1000])

    assert fetch("tiny.en").read_bytes() == DATA


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("404", "404"),
        ("429", "429"),
        ("503", "503"),
        ("loop", "redirects"),
        ("huge", "expected at most"),
        ("a page", "SHA-256"),
    ],
)
def test_a_server_that_does_not_give_the_file_is_reported(fault, reason, server, tmp_path):
    server.fault = fault

    assert reason in fails(stored(tmp_path)).why


def test_faults_never_give_a_file_and_the_next_download_succeeds(server, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    chance = random.Random(7)
    path = stored(tmp_path)
    kinds = ["cut", "other bytes", "too long", "too short", "a page", "404", "503"]
    for i in range(core_or_all(21, 280)):  # 5 of 7 kinds send wrong or too few bytes: 15, 200
        server.fault, server.at = kinds[i % len(kinds)], chance.randrange(len(DATA) - 1)
        fails(path)
        server.fault = ""
        assert fetch("tiny.en").read_bytes() == DATA, i
        path.unlink()
        assert list(path.parent.iterdir()) == []


def test_a_cut_download_continues_where_it_ended(server, tmp_path):
    server.fault, server.at = "cut", 300_000
    fails(stored(tmp_path))
    server.fault = ""

    fetch("tiny.en")

    assert server.asked[-1][1] == "bytes=300000-"


@pytest.mark.parametrize("partial", [b"x" * 1000, b"x" * len(DATA), b"x" * 3_000_000])
def test_a_partial_file_of_other_bytes_is_replaced(partial, server, tmp_path):
    stored(tmp_path).parent.mkdir(parents=True)
    Path(f"{stored(tmp_path)}.part").write_bytes(partial)

    assert fetch("tiny.en").read_bytes() == DATA


def test_a_stalled_server_and_a_full_disk_are_errors(server, tmp_path, monkeypatch):
    server.pause_s = 0.0
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as context:
        context.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 10))
        assert "free disk space" in fails(stored(tmp_path)).what
    monkeypatch.setattr(download, "TIMEOUT_S", (0.1, 0.1))
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    server.pause_s = 0.5

    assert "timed out" in fails(stored(tmp_path)).why.lower()


@pytest.mark.parametrize("use", [fetch, load_checkpoint])
def test_an_unfit_file_in_the_cache_is_rejected_and_kept(use, server, tmp_path):
    stored(tmp_path).parent.mkdir(parents=True)
    stored(tmp_path).write_bytes(b"unfit")

    with pytest.raises(CheckpointError) as caught:
        use("tiny.en")

    assert str(stored(tmp_path)) in caught.value.what
    assert "SHA-256" in caught.value.why
    assert [one.read_bytes() for one in stored(tmp_path).parent.iterdir()] == [b"unfit"]
    assert server.asked == []


def test_openais_file_in_the_cache_is_loaded(server, tmp_path, tiny_openai_pt, monkeypatch):
    digest = hashlib.sha256(tiny_openai_pt.read_bytes()).hexdigest()
    monkeypatch.setitem(RELEASES, "large-v3", Release("large-v3", digest, 1, ""))
    stored(tmp_path).parent.mkdir(parents=True)
    shutil.copy(tiny_openai_pt, stored(tmp_path).with_name("large-v3.pt"))
    monkeypatch.setattr("whisperport.model.checkpoint.openai.alignment_heads", lambda *_, **__: ())

    assert load_checkpoint("large").source.sha256["large-v3.pt"] == digest
    assert server.asked == []


def test_the_lock_file_of_a_download_that_was_killed_at_its_end_is_removed(
    server, tmp_path, monkeypatch
):
    monkeypatch.setitem(
        RELEASES, "tiny.en", Release("tiny.en", hashlib.sha256(b"x").hexdigest(), 1, "")
    )
    stored(tmp_path).parent.mkdir(parents=True)
    stored(tmp_path).write_bytes(b"x")
    lock_path(stored(tmp_path)).touch()

    fetch("tiny.en")

    assert list(stored(tmp_path).parent.iterdir()) == [stored(tmp_path)]


def test_offline_one_error_names_the_places_and_how_to_bring_the_file(
    server, tmp_path, monkeypatch
):
    monkeypatch.setattr(by_name, "SERVER", "http://127.0.0.1:1")

    error = fails(stored(tmp_path))

    for place in ("file or folder", str(stored(tmp_path)), "hub's cache", "127.0.0.1:1", "no hub"):
        assert place in error.why
    assert "Connection refused" in error.why
    assert "Max retries" not in error.why
    assert "object at" not in error.why
    assert SHA in error.hint
    assert str(stored(tmp_path)) in error.hint


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_is_used(variable, server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, server.url)
    monkeypatch.setattr(by_name, "SERVER", "http://weights.invalid/models")

    fetch("tiny.en")

    assert server.asked[0][0].startswith("http://weights.invalid/models/")


ELSEWHERE = f"""
import sys
from whisperport import fetch
from whisperport.model.checkpoint import by_name
from whisperport.model.checkpoint.openai_releases import RELEASES, Release
by_name.SERVER = sys.argv[1]
RELEASES["tiny.en"] = Release("tiny.en", "{SHA}", 2_000_000, "")
print(fetch("tiny.en"))
"""


def elsewhere(server):
    return subprocess.Popen([sys.executable, "-c", ELSEWHERE, server.url], stdout=subprocess.PIPE)


def test_another_process_waits_and_a_killed_one_is_continued(server, tmp_path):
    server.pause_s = 0.2
    partial = Path(f"{stored(tmp_path)}.part")
    first = elsewhere(server)
    end = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < end:
        time.sleep(0.01)
    told = []

    first.send_signal(signal.SIGSTOP)
    second = elsewhere(server)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not stored(tmp_path).exists()
    with reporting(told.append):
        fetch("tiny.en")
    second.communicate(timeout=60)

    assert second.returncode == 0
    assert stored(tmp_path).read_bytes() == DATA
    assert len(server.asked) == 2
    assert server.asked[1][1].startswith("bytes=")


# Hugging Face's tensor names against openai-whisper's.

DIMS = replace(whisper_dims(64, 2, heads=2), n_audio_ctx=100)


def test_the_expected_tensors_are_openai_whispers_own(random_openai_whisper):
    state = random_openai_whisper().state_dict()

    expected = expected_shapes(DIMS)

    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected


def test_the_table_covers_every_tensor_of_transformers_both_ways(random_hf_whisper):
    theirs = set(random_hf_whisper().state_dict()) - {"proj_out.weight"}

    ours = {from_huggingface(name) for name in theirs}

    assert ours == set(expected_shapes(DIMS))
    assert {to_huggingface(name) for name in ours} == theirs


@pytest.mark.parametrize(
    "name",
    [
        "proj_out.weight",
        "model.encoder.layers.0.fc3.weight",
        "model.encoder.layers.01.fc1.weight",
        "model.encoder.layers.0.fc1",
        "model.decoder.layers.99999.fc1.weight",
        "transformer.h.0.attn.weight",
        "",
    ],
)
def test_a_foreign_name_has_no_translation(name):
    assert from_huggingface(name) is None


def test_translated_weights_give_transformers_the_outputs_of_openai_whisper(
    random_hf_whisper, random_openai_whisper
):
    openai, huggingface = random_openai_whisper(seed=3), random_hf_whisper(seed=4)
    state = {to_huggingface(name): tensor for name, tensor in openai.state_dict().items()}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    huggingface.load_state_dict(state, strict=True)
    mel = torch.randn(1, 80, 200, generator=torch.Generator().manual_seed(5))
    tokens = torch.tensor([[50258, 50259, 50359, 50363, 440]])

    with torch.no_grad():
        expected = openai(mel, tokens)
        found = huggingface(input_features=mel, decoder_input_ids=tokens).logits

    # Both sum in float32 in other orders, and are held to 1e-4 everywhere; swapped tensors differ by
    # more than 1.
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
