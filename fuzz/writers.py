"""The commands whose writes `fuzz.faults` disturbs, and what they read.

All run in forks of a process that has imported all modules, so a run takes about one second. Slow parts
that write no file of whisperport are done once: tracing, and lowering to ONNX, whose files the export then
copies into its bundle. All other parts are those of the command. The model has a few kilobytes of random
weights.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

from fuzz import seeds
from fuzz.worker import fork_jobs
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.bundle.writing import rewrite_manifest
from whisperport.system.progress import begin_stage

OLD = "old"
WEIGHTS = bytes(range(256)) * 3000  # what the server of `fetch` gives
DIMS = replace(seeds.DIMS, n_audio_ctx=50, n_text_ctx=128)  # 1 s, the shortest window of an export
HEAVY = ("torch", "torch.export", "onnx", "onnxruntime", "onnxscript", "safetensors.torch", "av")


@dataclass(frozen=True)
class Writer:
    """A command that writes.

    Attributes:
        name: what the table calls it.
        arguments: of `whisperport`, with paths relative to the folder of the run.
        outputs: what it writes, each completely or not at all.
        prepare: makes the inputs in a folder.
        has_old: whether outputs of an earlier run are there, which it replaces.
        slow: whether a run takes more than about two seconds.
        keeps: pattern of what a failed run leaves on purpose, for the next run.
        old_arguments: further arguments of the run whose outputs are replaced.
        is_new_only: whether an output that exists is an error.
    """

    name: str
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    prepare: Callable[[Path], None]
    has_old: bool = True
    slow: bool = False
    keeps: str = "-"
    old_arguments: tuple[str, ...] = ()
    is_new_only: bool = False


def all_writers(folder: Path) -> list[Writer]:
    """Return the commands; their inputs are made in a folder when they are first needed."""
    made = partial(_copied, folder / "seeds")
    audio, bundle, checkpoint = made("audio"), made("bundle-onnxruntime"), _micro(folder / "seeds")
    run = ("--bundle", "in/bundle", "--trust", "--threads", "1")
    texts = tuple(f"out/tone.{suffix}" for suffix in ("srt", "json"))
    talk = _both(bundle, audio)
    export = ("export", "in/checkpoint", "--threads", "1")
    block = made("pt2")
    return [
        *(
            Writer(
                f"transcribe {path.rpartition('.')[2]}",
                ("transcribe", "in/tone.wav", *run, "-o", path, "--overwrite"),
                (path,),
                talk,
            )
            for path in texts
        ),
        Writer(
            "transcribe, new folder",
            ("transcribe", "in/tone.wav", *run, "-f", "vtt", "-o", "new/texts"),
            ("new/texts/tone.vtt",),
            talk,
            has_old=False,
        ),
        Writer(
            "check, page",
            ("check", "in/block.pt2", "--target", "xnnpack", "--html", "out/page.html"),
            ("out/page.html",),
            block,
        ),
        Writer(
            "lower",
            (
                "lower",
                "in/block.pt2",
                "--target",
                "onnxruntime",
                "-o",
                "out/p.onnx",
                "--threads",
                "1",
            ),
            ("out/p.onnx",),
            block,
            slow=True,
        ),
        Writer(
            "fix",
            ("fix", "in/block.pt2", "-t", "hailo8", "-o", "out/f.pt2", "--overwrite"),
            ("out/f.pt2",),
            block,
            slow=True,
        ),
        Writer(
            "archive",
            (
                *("archive", "in/talks", *run[:2], "--workers", "1", "--threads", "1"),
                *("-o", "out/archive", "--subtitles", "srt", "--no-word-timestamps"),
            ),
            ("out/archive",),
            _both(bundle, _talks(audio)),
            has_old=False,
            slow=True,
        ),
        Writer(
            "fetch",
            ("fetch", "tiny.en"),
            ("home/.cache/whisper/tiny.en.pt",),
            _nothing,
            has_old=False,
            keeps=r".*/tiny\.en\.pt\.part",
        ),
        Writer(
            "export",
            (*export, "--target", "onnxruntime", "-o", "out/bundle", "--html", "out/page.html"),
            ("out/bundle", "out/page.html"),
            checkpoint,
        ),
        Writer(
            "transcribe, cache",
            ("transcribe", "in/tone.wav", "--model", "in/checkpoint", "--threads", "1"),
            ("home/.cache/whisperport",),
            _both(checkpoint, audio),
            has_old=False,
            keeps=r"home/\.cache/whisperport/(export\.log|bundles/[^/]+\.(new|replaced)(/.*)?)",
        ),
        Writer(
            "import",
            (
                *("import", "in/encoder.hef", "--checkpoint", "in/checkpoint", "-o", "out/bundle"),
                *("--threads", "1"),
            ),
            ("out/bundle",),
            _both(checkpoint, _hef),
        ),
        Writer(
            "compile",
            (
                *("compile", "out/bundle", "--force", "--option", "hailo8l.finetune=off"),
                *("--threads", "1", "--trust"),
            ),
            ("out/bundle",),
            _both(_lowered(folder), _sdk),
            has_old=False,
            slow=True,
            keeps=r"out/bundle\.compile(/.*)?",
        ),
        Writer(
            "convert, faster-whisper",
            (
                *("convert", "in/checkpoint", "--for", "faster-whisper", "-o", "out/ct2"),
                "--allow-unverified",
            ),
            ("out/ct2",),
            checkpoint,
            old_arguments=("--precision", "w8"),
        ),
        Writer(
            "convert, transformers.js",
            (
                *("convert", "in/checkpoint", "--for", "transformers.js", "-o", "out/js"),
                "--allow-unverified",
            ),
            ("out/js",),
            checkpoint,
            slow=True,
            old_arguments=("--precision", "w8"),
        ),
        Writer(
            "verify, record",
            ("verify", "out/bundle", "--record", "--threads", "1"),
            ("out/bundle",),
            _exported(folder),
            has_old=False,
        ),
        Writer(
            "diagnose, inputs",
            ("diagnose", "in/bundle", "--write-inputs", "out/inputs"),
            ("out/inputs",),
            bundle,
            has_old=False,
            is_new_only=True,
        ),
        Writer(
            "demo",
            ("demo", "--out", "out/demo", "--threads", "1"),
            ("out/demo/onnxruntime",),
            checkpoint,
            slow=True,
        ),
        Writer(
            "export, auto",
            (*export, "--target", "auto", "--precision", "fp32"),
            ("home/.cache/whisperport",),
            checkpoint,
            has_old=False,
            slow=True,
        ),
    ]


# What the commands read.


def _nothing(work: Path) -> None:
    """Make no input."""


def _both(*prepares: Callable[[Path], None]) -> Callable[[Path], None]:
    def prepare(work: Path) -> None:
        for one in prepares:
            one(work)

    return prepare


def _copied(folder: Path, group: str) -> Callable[[Path], None]:
    """Return a function that copies a group of seeds to the inputs."""

    def prepare(work: Path) -> None:
        shutil.copytree(seeds.folder_of(group, folder), work / "in", dirs_exist_ok=True)

    return prepare


def _talks(audio: Callable[[Path], None]) -> Callable[[Path], None]:
    def prepare(work: Path) -> None:
        audio(work)
        (work / "in/talks").mkdir()
        for name in ("tone.wav", "tone.flac"):
            (work / "in" / name).rename(work / "in/talks" / name)

    return prepare


def _micro(folder: Path) -> Callable[[Path], None]:
    """Return a function that copies the checkpoint to the inputs."""

    def prepare(work: Path) -> None:
        made = folder / "checkpoint-1s"
        if not made.is_dir():
            made.mkdir(parents=True)
            seeds._checkpoint(made, DIMS)
        shutil.copytree(made, work / "in/checkpoint", dirs_exist_ok=True)

    return prepare


def _checkpoint(folder: Path) -> Any:
    from whisperport.model.checkpoint import load_checkpoint

    _micro(folder / "seeds")(folder / "loaded")
    return load_checkpoint(folder / "loaded/in/checkpoint")


def _made(folder: Path, target: str) -> Bundle:
    """Return a bundle of the checkpoint, which is exported at the first call."""
    from whisperport.build.export.export import export
    from whisperport.build.export.export_options import ExportOptions
    from whisperport.targets import RunOptions

    out = folder / "made" / target
    if not out.is_dir():
        options = ExportOptions(run=RunOptions(threads=1), allow_unverified=True)
        export(_checkpoint(folder), target, out, options)
    return Bundle.open(out)


def _exported(folder: Path) -> Callable[[Path], None]:
    def prepare(work: Path) -> None:
        shutil.copytree(_made(folder, "onnxruntime").folder, work / "out/bundle")
        bundle = Bundle.open(work / "out/bundle")
        entries = tuple(replace(e, evidence=()) for e in bundle.manifest.programs)
        rewrite_manifest(bundle, replace(bundle.manifest, programs=entries))

    return prepare


def _lowered(folder: Path) -> Callable[[Path], None]:
    def prepare(work: Path) -> None:
        shutil.copytree(_made(folder, "hailo8l").folder, work / "out/bundle")

    return prepare


def _encoder() -> bytes:
    from tests.targets.vendors.hailo.hef_file import encoder_hef

    return encoder_hef(3, 2 * DIMS.n_audio_ctx, DIMS.n_mels, DIMS.n_audio_state)


def _hef(work: Path) -> None:
    (work / "in").mkdir(exist_ok=True)
    (work / "in/encoder.hef").write_bytes(_encoder())


def _sdk(work: Path) -> None:
    """Install the dummy of a vendor's compiler beside the folder of the run."""
    from tests.targets.vendors.hailo.fake_sdk import InstalledSdk

    sdk = InstalledSdk(work.parent / "sdk", {"encoder": _encoder()})
    os.environ["WHISPERPORT_TOOLCHAIN_HAILO"] = str(sdk.interpreter)


# The process in whose forks they run.


def prepare_process() -> None:
    """Import all modules, and do once what is slow and writes nothing."""
    import torch

    torch.set_num_threads(1)
    for name in HEAVY:
        import_module(name)
    import whisperport

    for module in walk_packages(whisperport.__path__, "whisperport."):
        with suppress(ImportError):  # it runs in the environment of an app or of a vendor's SDK
            if not module.name.endswith(("__main__", "client")):
                import_module(module.name)
    fork_jobs()
    _serve_weights()


def trace_once(folder: Path) -> None:
    """Trace and lower the checkpoint once, for all exports of this process."""
    from whisperport.model.trace import variants as programs
    from whisperport.targets.cpu.onnxruntime import OnnxRuntime

    seeds.folder_of("bundle-onnxruntime", folder / "seeds")  # of other sizes
    real, traced = programs.whisper_programs, {}

    def whisper_programs(parts: Any, names: Any, variants: Any) -> Any:
        asked = (names, *sorted(variants.items()))
        if asked not in traced:
            kept = replace(parts, model=deepcopy(parts.model))  # an export unloads its model
            traced[asked] = tuple(real(kept, names, variants))
        return iter(traced[asked])

    programs.whisper_programs = whisper_programs  # type: ignore[assignment]
    bundle = _made(folder, "onnxruntime")
    really_lower = OnnxRuntime.lower

    def lower(self: Any, asked: Sequence[Any], out: Path) -> list[ProgramEntry]:
        entries = {entry.spec.name: entry for entry in bundle.manifest.programs}
        if {program.name for program in asked} - entries.keys():
            return really_lower(self, asked, out)
        for name in bundle.manifest.files:
            if "/" in name:
                begin_stage(f"copying {name}")
                (out / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(bundle.path(name), out / name)
        return [entries[program.name] for program in asked]

    OnnxRuntime.lower = lower  # type: ignore[method-assign, assignment]
    checkpoint = _checkpoint(folder)
    demo_verb = import_module("whisperport.apps.cli.demo")
    setattr(demo_verb, "choose_checkpoint", lambda: (checkpoint, "micro"))  # noqa: B010


def _serve_weights() -> None:
    """Let `fetch` download from a server of this process."""
    from whisperport.model.checkpoint import by_name
    from whisperport.model.checkpoint.openai_releases import RELEASES

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            start = int(self.headers.get("Range", "bytes=0-")[6:-1])
            self.send_response(206 if start else 200)
            if start:
                whole = len(WEIGHTS)
                self.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
            self.send_header("Content-Length", str(len(WEIGHTS) - start))
            self.end_headers()
            self.wfile.write(WEIGHTS[start:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    by_name.SERVER = f"http://127.0.0.1:{server.server_port}"
    release = RELEASES["tiny.en"]
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    RELEASES["tiny.en"] = replace(release, sha256=digest)


# What is at the outputs before a run, and whether a file of a new one is complete.


def make_old(path: Path) -> None:
    """Change what a run wrote, so that it is valid, and is not what the next run writes."""
    if (path / "manifest.json").is_file():
        bundle = Bundle.open(path)
        rewrite_manifest(bundle, replace(bundle.manifest, name=OLD))
    elif path.suffix == ".html":
        path.write_text(path.read_text() + "<!-- old -->\n")
    elif path.is_file():
        path.write_bytes(b"old")


def is_complete(path: Path) -> bool:
    """Return whether something that differs from run to run is complete."""
    from whisperport.errors import BundleError

    if path.is_dir():
        if not (path / "manifest.json").is_file():
            files = [file for file in path.rglob("*") if file.is_file()]
            return all(is_complete(file) for file in files if not file.name.endswith("-lock"))
        try:
            return Bundle.open(path).manifest.name != OLD
        except BundleError:
            return False
    data = path.read_bytes()
    match path.suffix:
        case ".html":
            return data.rstrip().endswith(b"</html>")
        case ".json":
            try:
                json.loads(data)
            except ValueError:
                return False
        case ".parquet":
            return data[:4] == data[-4:] == b"PAR1"
    return bool(data)
