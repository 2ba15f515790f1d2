"""The trial run: load and run the programs of an unknown bundle once in a limited child process.

There is no trial run if this user exported the bundle on this machine, if the
user trusts it (`--trust`), or if an earlier trial run of the same bundle passed.

A trial run finds programs that do not end, need too much memory or crash a runtime in their first run. It
is no sandbox: see docs/explanation/untrusted-input.md.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from whisperport.errors import (
    BundleError,
    LoweringError,
    MissingPackageError,
    OutOfMemoryError,
    TokenizerError,
    WhisperportError,
)
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.origin import is_recorded, record
from whisperport.program.runner import Runner
from whisperport.runtime.engine.loading import load_runners
from whisperport.system.child import Limits, StoppedError, first_line, run_limited, threads_within
from whisperport.system.progress import begin_stage, reporting
from whisperport.targets import RunOptions, get_target
from whisperport.targets.target_options import with_target

BASE_BYTES = 2**30  # Python with torch and ExecuTorch needs 0.45 GB, with ONNX Runtime 0.15 GB
MEMORY_FACTOR = 4  # bytes per byte of the bundle; the embedded bundle needs 2 on onnxruntime
BASE_S = 20.0
BYTES_PER_S = 10e6  # of a slow board: whisper-large-v3 in float16 (3.3 GB) gets about 6 minutes
PACKAGES = ("whisperport", "numpy", "torch", "tokenizers")  # and the targets' runtimes

_passed: set[str] = set()  # trial runs of this process, for systems where nothing can be recorded


def ensure_tried(bundle: Bundle, options: RunOptions) -> None:
    """Run every program of a bundle once in a limited child process, unless its files passed that before.

    Raises:
        BundleError: a program exceeded a limit, crashed, or cannot be loaded or run.
        MissingPackageError: a target's runtime is not installed.
        UsageError: an option has a value that a target rejects.
    """
    key = _key(bundle, options.options)
    if bundle.hashed and (key in _passed or is_recorded("tried", key)):
        return
    try_bundle(bundle, options, limits_of(bundle))
    if bundle.hashed:
        _passed.add(key)
        record("tried", key)


def limits_of(bundle: Bundle) -> Limits:
    """Return the limits of a trial run: memory and time, which grow with the size of the bundle."""
    size = sum(entry.bytes for entry in bundle.manifest.files.values())
    return Limits(BASE_BYTES + MEMORY_FACTOR * size, BASE_S + size / BYTES_PER_S)


def try_bundle(bundle: Bundle, options: RunOptions, limits: Limits) -> None:
    """Run every program once within `limits`, in a child process.

    Raises:
        BundleError, MissingPackageError, UsageError: see `ensure_tried`.
    """
    arguments = {
        "folder": os.fspath(bundle.folder.absolute()),
        "checksum": bundle.manifest.checksum(),
        "threads": options.threads,
        "options": dict(options.options),
    }
    unlimited = (
        f"this was a trial run with at most {limits}; if you trust the source of the bundle, "
        "`--trust` loads it without a trial run"
    )
    try:
        with reporting(lambda _: None):  # the caller's stages are not those of this check
            run_limited("whisperport.runtime.engine.trial:run_once", arguments, limits)
    except StoppedError as error:
        raise BundleError(
            f"the bundle {bundle.folder} failed its trial run", why=str(error), hint=unlimited
        ) from error
    except MissingPackageError:
        raise
    except (BundleError, LoweringError, TokenizerError, OutOfMemoryError) as error:
        raise BundleError(error.what, why=error.why, hint=unlimited) from error


def run_once(*, folder: str, checksum: str, threads: int | None, options: dict[str, str]) -> None:
    """Load the bundle as `load_engine` does, and run each program on zeros. Runs in the child process."""
    from whisperport.speech.text import Tokenizer

    bundle = Bundle.open(folder, check_hashes=False)
    if bundle.manifest.checksum() != checksum:
        raise BundleError(f"the bundle {folder} was replaced while it was being opened")
    bundle = _without_devices(bundle, options)
    names = sorted({entry.target for entry in bundle.manifest.programs})
    run = RunOptions(threads=threads_within(threads), options=_options_of(names, options))
    for name in names:  # import the runtimes first: their time is not the bundle's
        get_target(name).load(bundle.folder, [], run)
    begin_stage("loading the tokenizer")
    Tokenizer.from_json(bundle.tokenizer_json(), bundle.manifest.generation)
    begin_stage("loading the programs")
    for name, runner in load_runners(bundle, run).items():
        begin_stage(f"running `{name}`")
        _run_on_zeros(runner)


def _run_on_zeros(runner: Runner) -> None:
    """Run a program once on arrays of zeros."""
    inputs = {tensor.name: np.zeros(tensor.shape, tensor.dtype) for tensor in runner.spec.inputs}
    try:
        runner.run(inputs)
    except WhisperportError:
        raise
    except Exception as error:  # a runtime may raise any type
        raise BundleError(
            f"the program `{runner.spec.name}` of the bundle cannot be run", why=first_line(error)
        ) from error


def _without_devices(bundle: Bundle, options: Mapping[str, str]) -> Bundle:
    """Return the bundle without the programs that need a device: only one process at a time may use it."""
    kept = []
    for entry in bundle.manifest.programs:
        emulation = get_target(entry.target).emulation_options
        if not emulation or emulation.items() <= options.items():
            kept.append(entry)
    return replace(bundle, manifest=replace(bundle.manifest, programs=tuple(kept)))


def _options_of(targets: list[str], options: dict[str, str]) -> dict[str, str]:
    """Return the user's options with the targets' trial options, which make them run without a device."""
    replaced = [with_target(get_target(name).spec.runs.trial_options, name) for name in targets]
    return options | {name: value for each in replaced for name, value in each.items()}


def _key(bundle: Bundle, options: Mapping[str, str]) -> str:
    """Return the SHA-256 of everything that a trial run depends on: bundle, options, machine, versions."""
    import platform

    software = [get_target(entry.target).spec.software for entry in bundle.manifest.programs]
    runtimes = {of.emulation_runtime or of.runtime for of in software}
    facts: dict[str, Any] = {name: _version(name) for name in (*PACKAGES, *sorted(runtimes))}
    facts |= {"bundle": bundle.manifest.checksum(), "options": dict(options)}
    facts["machine"] = [platform.machine(), platform.node()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode("ascii")).hexdigest()


def _version(package: str) -> str:
    """Return the installed version of a package, or an empty string."""
    from importlib.metadata import PackageNotFoundError, version  # its import takes 10 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
