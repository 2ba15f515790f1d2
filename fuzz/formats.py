"""All formats: how their inputs are made, and the functions that read them."""

import io
import json
import os
import shutil
import wave
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from fuzz.case import Format
from fuzz.mutators import archives, folders, json_values, markup, pickles, raw, wire

CLIP = "clip.wav"  # 0.4 s of noise beside each bundle; it fits into a short window of its model
BUNDLE = "bundle"
TEXTS = ("config.json", "generation_config.json", "tokenizer.json")


def all_formats() -> dict[str, Format]:
    """Return all formats by name, in the order of the table."""
    return {entry.name: entry for entry in FORMATS}


# Bundles.


def _bundle(
    group: str,
    change: Callable[[Path, Random, str], None],
    random: Random,
    seeds: Path,
    folder: Path,
    outside: str,
) -> None:
    shutil.copytree(seeds / group / BUNDLE, folder / BUNDLE)
    _write_clip(folder / CLIP)
    change(folder / BUNDLE, random, outside)


def _write_clip(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(Random(0).randbytes(12_800))


def _listed(bundle: Path) -> list[str]:
    return list(json.loads((bundle / "manifest.json").read_text())["files"])


def _with_checksum(data: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with a correct checksum, so that the reader continues after checking it."""
    from whisperport.program.bundle.manifest import _checksum

    data = {name: value for name, value in data.items() if name != "checksum"}
    try:
        return {**data, "checksum": _checksum(data)}
    except (TypeError, ValueError, RecursionError):
        return data


def _rehashed(bundle: Path, names: list[str]) -> None:
    """Update hash and size of the files `names` in the manifest."""
    from whisperport.program.bundle.folder import file_sha256

    data = json.loads((bundle / "manifest.json").read_text())
    for name in names:
        file = bundle / name
        data["files"][name] = {"sha256": file_sha256(file), "bytes": file.stat().st_size}
    (bundle / "manifest.json").write_text(json.dumps(_with_checksum(data), ensure_ascii=False))


def _change_manifest(bundle: Path, random: Random, outside: str) -> None:
    path = bundle / "manifest.json"
    data = path.read_bytes()
    if random.random() < 0.1:
        path.write_bytes(raw.mutated(data, random))
        return
    path.write_bytes(json_values.mutated(data, random, outside, _with_checksum))


def _change_any_file(bundle: Path, random: Random, outside: str) -> None:
    names = _listed(bundle)
    if random.random() < 0.4:
        folders.mutate(bundle, [*names, "manifest.json"], random, outside)
        return
    name = random.choice(names)
    file = bundle / name
    others = [(bundle / other).read_bytes() for other in random.sample(names, 2)]
    file.write_bytes(raw.mutated(file.read_bytes(), random, others))
    if random.random() < 0.85:
        _rehashed(bundle, [name])


def _change_onnx(bundle: Path, random: Random, outside: str) -> None:
    from fuzz.mutators import onnx_graphs

    name = random.choice([name for name in _listed(bundle) if name.endswith(".onnx")])
    file = bundle / name
    file.write_bytes(_hostile_onnx(onnx_graphs, file.read_bytes(), random, outside))
    _rehashed(bundle, [name])


def _change_pte(bundle: Path, random: Random, outside: str) -> None:
    name = random.choice([name for name in _listed(bundle) if name.endswith(".pte")])
    file = bundle / name
    file.write_bytes(raw.mutated(file.read_bytes(), random))
    _rehashed(bundle, [name])


def _transcribe(folder: Path) -> None:
    from fuzz.command_line import whisperport

    bundle = str(folder / BUNDLE)
    form = _one_of(("json", "txt", "srt", "tsv"), folder / BUNDLE / "manifest.json")
    arguments = (
        "--threads",
        "1",
        "--output-format",
        form,
        "--language",
        "en",
        "--max-tokens",
        "12",
    )
    whisperport("transcribe", str(folder / CLIP), "--bundle", bundle, *arguments)


# Tables.


def _make_tables(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    shutil.copytree(seeds / "bundle-onnxruntime" / BUNDLE, folder / BUNDLE)
    bundle = folder / BUNDLE
    name = random.choice(sorted(path.name for path in bundle.glob("*.np[yz]")))
    stored = [path.read_bytes() for path in sorted((seeds / "tables").iterdir())]
    data = (bundle / name).read_bytes()
    (bundle / name).write_bytes(_hostile_table(data, stored, random, outside))
    _rehashed(bundle, [name])
    given = random.choice(stored[:2] if random.random() < 0.8 else stored)
    (folder / "inputs.npz").write_bytes(_hostile_table(given, stored, random, outside))
    (folder / "table.npy").write_bytes(_hostile_table(stored[-1], stored, random, outside))


def _hostile_table(data: bytes, others: list[bytes], random: Random, outside: str) -> bytes:
    if random.random() < 0.15:
        return _pickled_table(random, outside)
    if data.startswith(b"PK") and random.random() < 0.7:
        return archives.mutated(data, random, outside, {".npy": _changed_array})
    return (
        raw.mutated(data, random, others) if random.random() < 0.5 else _changed_array(data, random)
    )


def _changed_array(data: bytes, random: Random) -> bytes:
    """Change shape or dtype in the header of an `.npy`."""
    shapes = (b"(-1, 16)", b"(1099511627776, 16)", b"(0,)", b"()", b"(2147483648,)", b"(10, 16, 1)")
    dtypes = (b"'|O'", b"'<f8'", b"'<c16'", b"'<i8'", b"'|V9'", b"'>f4'", b"'<M8[s]'", b"'|S99'")
    start, end = data.find(b"{"), data.find(b"}") + 1
    if not 0 <= start < end:
        return raw.mutated(data, random)
    order = random.choice((b"False", b"True", b"7"))
    header = b"{'descr': %s, 'fortran_order': %s, 'shape': %s, }" % (
        random.choice((*dtypes, b"'<f4'", b"'<f4'", b"[('a', '<f4')]")),
        order,
        random.choice(shapes),
    )
    return data[:start] + header.ljust(end - start) + data[end:]


def _pickled_table(random: Random, outside: str) -> bytes:
    import numpy as np

    file = io.BytesIO()
    array = np.empty(1, object)
    array[0] = pickles.hostile_call(random, outside)
    (np.save if random.random() < 0.5 else np.savez)(file, array, allow_pickle=True)
    return file.getvalue()


def _read_tables(folder: Path) -> None:
    """Call every reader, also after an error of another reader."""
    from whisperport.errors import WhisperportError
    from whisperport.model.inspection.inputs import read_inputs
    from whisperport.program.bundle import Bundle
    from whisperport.targets.vendors.hailo.importer import _table

    error: WhisperportError | None = None
    bundle = Bundle.open(folder / BUNDLE)
    for read in (
        *(bundle.embedding, bundle.positions, bundle.silence, bundle.reference),
        partial(read_inputs, folder / "inputs.npz"),
        partial(_table, folder / "table.npy"),
    ):
        try:
            read()
        except WhisperportError as raised:
            error = raised
    if error is not None:
        raise error


# Checkpoints.


def _copy_checkpoint(seeds: Path, folder: Path) -> Path:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    for path in (seeds / "checkpoint").iterdir():
        if path.is_file():
            shutil.copyfile(path, checkpoint / path.name)
    return checkpoint


def _make_config(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    checkpoint = _copy_checkpoint(seeds, folder)
    if random.random() < 0.15:
        names = [path.name for path in sorted(checkpoint.iterdir())]
        folders.mutate(checkpoint, names, random, outside, without=folders.LINKS)
        return
    path = checkpoint / random.choice(TEXTS[:2])
    if random.random() < 0.1:
        path = checkpoint / "model.safetensors.index.json"
        (checkpoint / "model.safetensors").rename(checkpoint / "part-1.safetensors")
        path.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
    path.write_bytes(json_values.mutated(path.read_bytes(), random, outside))


def _make_tokenizer(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    checkpoint = _copy_checkpoint(seeds, folder)
    if random.random() < 0.3:
        (checkpoint / "tokenizer.json").unlink()
        for part in sorted((seeds / "checkpoint" / "parts").iterdir()):
            shutil.copyfile(part, checkpoint / part.name)
        path = checkpoint / random.choice(
            ("vocab.json", "added_tokens.json", "tokenizer_config.json")
        )
        if random.random() < 0.2:
            path = checkpoint / "merges.txt"
            path.write_text("#version: 0.2\na b\nab c\n")
    else:
        path = checkpoint / "tokenizer.json"
    data = path.read_bytes()
    if path.suffix == ".txt" or random.random() < 0.15:
        path.write_bytes(raw.mutated(data, random))
    else:
        path.write_bytes(json_values.mutated(data, random, outside))


def _make_safetensors(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    _change_safetensors(_copy_checkpoint(seeds, folder) / "model.safetensors", random, outside)


def _change_safetensors(path: Path, random: Random, outside: str) -> None:
    data = path.read_bytes()
    if random.random() < 0.4:
        path.write_bytes(raw.mutated(data, random))
        return
    length = int.from_bytes(data[:8], "little")
    header = json_values.mutated(data[8 : 8 + length], random, outside)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def _load_folder(folder: Path) -> None:
    """Load the checkpoint, and use its tokenizer as a transcription does."""
    from whisperport.model.checkpoint import load_checkpoint
    from whisperport.speech.text import Tokenizer

    checkpoint = load_checkpoint(folder / "checkpoint")
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json, checkpoint.generation)
    ids = tokenizer.encode("so they say \ud800 <|en|>")
    known = [i for i in range(60) if i in tokenizer._tokens or i in tokenizer._added]
    tokenizer.split_to_word_tokens([*ids, *known])
    tokenizer.decode([*ids, *known], timestamps=True)


def _make_pt(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    """Make a `.pt` file as openai-whisper saves it, or a folder with a `pytorch_model.bin`."""
    in_folder = random.random() < 0.5
    if in_folder:
        path = _copy_checkpoint(seeds, folder) / "pytorch_model.bin"
        (path.parent / "model.safetensors").unlink()
    else:
        path = folder / "model.pt"
    data = (seeds / "pt" / path.name).read_bytes()
    kind = random.random()
    if kind < 0.3:
        path.write_bytes(raw.mutated(data, random))
    elif kind < 0.7:
        path.write_bytes(archives.mutated(data, random, outside))
    elif kind < 0.8:
        path.write_bytes(pickles.pickled(pickles.hostile_call(random, outside), random))
    elif kind < 0.82:
        found = archives.members(data)
        name = next(name for name in found if name.endswith(".pkl"))
        path.write_bytes(archives.written([*(found | {name: pickles.hours_to_hash()}).items()]))
    else:
        path.write_bytes(_hostile_state(path, seeds, random, outside))


def _hostile_state(path: Path, seeds: Path, random: Random, outside: str) -> bytes:
    """Return a file with one hostile entry; all others are valid."""
    import torch

    data = torch.load(seeds / "pt" / path.name, weights_only=True)
    state = data if path.suffix == ".bin" else data["model_state_dict"]
    entry: Any = pickles.hostile_tensor(random)
    if random.random() < 0.4:
        entry = random.choice(
            (pickles.hostile_call(random, outside), json_values.hostile(random, outside))
        )
    if path.suffix == ".pt" and random.random() < 0.3:
        data["dims"][random.choice(list(data["dims"]))] = entry
    elif random.random() < 0.1:
        state[random.choice((7, None, (1, 2), "\x1b[31m"))] = entry
    else:
        state[random.choice(list(state))] = entry
    return pickles.saved(data, random)


def _load_pt(folder: Path) -> None:
    from whisperport.model.checkpoint import load_checkpoint

    path = folder / "model.pt"
    load_checkpoint(path if path.exists() else folder / "checkpoint")


def _make_ctranslate2(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    checkpoint = folder / "checkpoint"
    shutil.copytree(seeds / "ctranslate2" / random.choice(("float", "int8")), checkpoint)
    if random.random() < 0.2:
        path = checkpoint / "config.json"
        path.write_bytes(json_values.mutated(path.read_bytes(), random, outside))
    else:
        path = checkpoint / "model.bin"
        path.write_bytes(raw.mutated(path.read_bytes(), random))


def _make_adapter(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    adapter = Path(shutil.copytree(seeds / "adapter", folder / "adapter"))
    names = [path.name for path in sorted(adapter.iterdir())]
    if random.random() < 0.1:
        folders.mutate(adapter, names, random, outside, without=folders.LINKS)
    elif random.random() < 0.4:
        path = adapter / "adapter_config.json"
        path.write_bytes(json_values.mutated(path.read_bytes(), random, outside))
    else:
        _change_safetensors(adapter / "adapter_model.safetensors", random, outside)


def _read_adapter(folder: Path) -> None:
    """Read an adapter as a board does, and merge it."""
    from fuzz.seeds import DIMS, micro_checkpoint
    from whisperport.errors import CheckpointError
    from whisperport.model.checkpoint.adapter import merged
    from whisperport.program.adapter_settings import read_adapter
    from whisperport.program.low_rank import LowRank
    from whisperport.runtime.engine.adapters import read_matrices

    try:
        read_matrices(folder / "adapter", "micro", DIMS, LowRank(4))
    except CheckpointError:  # the other reader may take it
        merged(read_adapter(folder / "adapter"), micro_checkpoint(), name="merged")


def _make_ggml(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    """Mutate the tensors, or any part; the tensors follow 0.6 MB of vocabulary."""
    data = (seeds / "ggml" / "ggml.bin").read_bytes()
    tensors = data.index(b"encoder.conv1.weight") - 24
    if random.random() < 0.6:
        data = data[:tensors] + raw.mutated(data[tensors:], random)
    else:
        data = raw.mutated(data, random)
    (folder / "ggml.bin").write_bytes(data)


def _load_ggml(folder: Path) -> None:
    from whisperport.model.checkpoint import load_checkpoint

    load_checkpoint(folder / "ggml.bin")


# Programs in files.


def _one_file(
    name: str,
    change: Callable[[bytes, Random, str], bytes],
    random: Random,
    seeds: Path,
    folder: Path,
    outside: str,
) -> None:
    """Make a changed copy of a seed file; sometimes a pipe or a device in its place.

    Links are not used here, since the user chooses the path.
    """
    data = (seeds / name).read_bytes()
    path = folder / f"program{Path(name).suffix}"
    path.write_bytes(data)
    if random.random() < 0.01:
        folders.mutate(folder, [path.name], random, outside, without=folders.LINKS)
    else:
        path.write_bytes(change(data, random, outside))


def _hostile_onnx(graphs: Any, data: bytes, random: Random, outside: str) -> bytes:
    kind = random.random()
    if kind < 0.3:
        return raw.mutated(data, random)
    return (
        wire.mutated(data, random, outside) if kind < 0.6 else graphs.mutated(data, random, outside)
    )


def _make_onnx(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    from fuzz.mutators import onnx_graphs

    shutil.copyfile(seeds / "onnx" / "weights.bin", folder / "weights.bin")
    name = random.choice(("onnx/inside.onnx", "onnx/outside.onnx"))
    _one_file(name, partial(_hostile_onnx, onnx_graphs), random, seeds, folder, outside)


def _make_pt2(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    def change(data: bytes, random: Random, outside: str) -> bytes:
        if random.random() < 0.2:
            return raw.mutated(data, random)

        def graph(content: bytes, random: Random) -> bytes:
            return json_values.mutated(content, random, outside)

        def inputs(_: bytes, random: Random) -> bytes:
            call = pickles.hostile_call(random, outside)
            return (
                pickles.saved(call, random)
                if random.random() < 0.5
                else pickles.pickled(call, random)
            )

        return archives.mutated(data, random, outside, {".json": graph, ".pt": inputs})

    _one_file("pt2/block.pt2", change, random, seeds, folder, outside)


_make_tflite = partial(
    _one_file, "tflite/sum.tflite", lambda data, random, _: raw.mutated(data, random)
)
_make_pte = partial(_one_file, "pte/block.pte", lambda data, random, _: raw.mutated(data, random))


def _make_xml(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    xml, weights = ((seeds / "openvino" / f"block.{kind}").read_bytes() for kind in ("xml", "bin"))
    if random.random() < 0.2:
        weights = raw.mutated(weights, random)
    else:
        xml = markup.mutated(xml, random)
    (folder / "program.xml").write_bytes(xml)
    (folder / "program.bin").write_bytes(weights)


def _program(folder: Path) -> str:
    found = [path for path in sorted(folder.iterdir(), reverse=True) if path.stem == "program"]
    return str(found[0] if found else folder / "program.gone")


def _check(folder: Path) -> None:
    from fuzz.command_line import whisperport

    program = _program(folder)
    target = _one_of(("xnnpack", "hailo8", "onnxruntime", "openvino"), Path(program))
    whisperport("check", program, "--target", target, "--all")


def _one_of(choices: tuple[str, ...], file: Path) -> str:
    """Choose by the contents of the file, so that the same input always gets the same choice."""
    return choices[(file.lstat().st_size if os.path.lexists(file) else 0) % len(choices)]


def _inspect(folder: Path) -> None:
    from fuzz.command_line import whisperport

    whisperport("inspect", _program(folder), "--repeat", "1", "--threads", "1")


def _read_pt2(folder: Path) -> None:
    """Load the program with torch, as `fix` and `lower` do first."""
    from whisperport.model.trace.pt2 import read_pt2

    read_pt2(_program(folder))


def _read_pte(folder: Path) -> None:
    """Read the program as `inspect` does first, before any part of it runs."""
    from whisperport.model.inspection.quiet import quiet
    from whisperport.model.inspection.read_pte import read_pte

    path = Path(_program(folder))
    if path.is_file() and not path.is_symlink():
        with quiet():
            read_pte(path.read_bytes(), path.name)


# The rest.


def _make_hef(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    from tests.targets.vendors.hailo.hef_file import hef_bytes

    description = (seeds / "hef" / "description").read_bytes()
    version = random.randrange(4)
    if random.random() < 0.7:
        description = wire.mutated(description, random, outside)
    data = hef_bytes(1, {}, {}, version=version, description=description)
    path = folder / "program.hef"
    path.write_bytes(raw.mutated(data, random) if random.random() < 0.4 else data)
    if random.random() < 0.01:
        folders.mutate(folder, [path.name], random, outside, without=folders.LINKS)


def _read_hef(folder: Path) -> None:
    """Read the file as `whisperport import` does first."""
    from whisperport.targets.vendors.hailo.hef import read_hef

    read_hef(_program(folder))


def _make_audio(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    paths = sorted((seeds / "audio").iterdir())
    path = random.choice(paths)
    others = [random.choice(paths).read_bytes()]
    data = path.read_bytes()
    if path.name.startswith("list."):
        data = data.replace(b"tone.wav", random.choice(_addresses(outside)).encode())
    if not path.name.startswith("list.") or random.random() < 0.3:
        data = raw.mutated(data, random, others)
    suffix = random.choice((path.suffix, path.suffix, path.suffix, ".wav", ".txt"))
    (folder / f"program{suffix}").write_bytes(data)


def _addresses(outside: str) -> tuple[str, ...]:
    """Return addresses that a playlist could contain."""
    file = f"{outside}/tone.wav"
    return (file, f"file://{file}", "../outside/tone.wav", "http://192.0.2.1/x.wav", f"subfile:{file}",
            f"concat:{file}", "pipe:0", "tcp://127.0.0.1:9", f"cache:{file}")  # fmt: skip


def _load_audio(folder: Path) -> None:
    import numpy as np

    from whisperport.speech.audio import load_audio

    samples = load_audio(_program(folder))
    if not np.isfinite(samples).all() or np.abs(samples).max() > 1:
        raise ArithmeticError("samples beyond 1, or no numbers")


# Records of files of another app.


def _make_record(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    layout = folder / "layout"
    shutil.copytree(seeds / "layout", layout)
    path = layout / "whisperport.json"
    if random.random() < 0.1:
        names = [
            file.relative_to(layout).as_posix() for file in layout.rglob("*") if file.is_file()
        ]
        folders.mutate(layout, sorted(names), random, outside, without=folders.LINKS)
    elif random.random() < 0.1:
        path.write_bytes(raw.mutated(path.read_bytes(), random))
    else:
        path.write_bytes(json_values.mutated(path.read_bytes(), random, outside))


def _verify_layout(folder: Path) -> None:
    """Do what `verify` does before the app runs, print the record, and look whether it may be replaced."""
    from fuzz.command_line import check_printed
    from whisperport.build.layouts import layout_of
    from whisperport.build.layouts.record import read_record, record_path
    from whisperport.build.layouts.verifying import _clip_again
    from whisperport.errors import BundleError
    from whisperport.program.bundle.ownership import check_replaceable

    layout = folder / "layout"
    record = read_record(record_path(layout))
    if why := record.difference(layout):
        raise BundleError(why)
    for clip in record.clips:
        if not clip.path:  # any file of the user may be one
            _clip_again(clip, record)
    json.dumps(record.to_json())
    check_replaceable(layout)
    check_printed("".join(layout_of(record.app).apps))


# Files of another app.


def _make_layout(
    random: Random, seeds: Path, folder: Path, outside: str, group: str = "layouts"
) -> None:
    """Copy the files of an app, and change one or two of them."""
    from fuzz.mutators import onnx_graphs

    source = random.choice(sorted((seeds / group).iterdir()))
    path = folder / source.name
    if source.is_file():
        data = source.read_bytes()
        tensors = data.index(b"encoder.conv1.weight") - 24
        parts = (raw.mutated(data[:tensors], random), data[tensors:])
        if random.random() < 0.7:
            parts = (data[:tensors], raw.mutated(data[tensors:], random))
        path.write_bytes(b"".join(parts))
        return
    shutil.copytree(source, path)
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    if random.random() < 0.2:
        folders.mutate(path, names, random, outside)
        return
    for name in random.sample(names, random.choice((1, 1, 2))):
        file = path / name
        data = file.read_bytes()
        match file.suffix if random.random() < 0.85 else "":
            case ".json":
                data = json_values.mutated(data, random, outside)
            case ".xml" if data:
                data = markup.mutated(data, random)
            case ".onnx":
                data = _hostile_onnx(onnx_graphs, data, random, outside)
            case ".rknn":  # the description is at the end, after its length
                place = 64 + int.from_bytes(data[16:24], "little")
                text = json_values.mutated(data[place + 8 :], random, outside)
                data = data[:place] + len(text).to_bytes(8, "little") + text
            case _:
                data = raw.mutated(data, random)
        file.write_bytes(data)


def _judge(folder: Path) -> None:
    """Judge the files with all rules, print the result, look for weights, and repair a copy."""
    from fuzz.command_line import whisperport
    from fuzz.seeds import micro_checkpoint
    from whisperport.build.judge.identity import identify
    from whisperport.build.judge.judge import judge, stored_arrays
    from whisperport.build.layouts.reading import Files

    (path,) = folder.iterdir()
    whisperport("judge", str(path))
    judgement = judge(path)
    arrays = stored_arrays(judgement.layout, Files(path), judgement.precision)
    identity = identify(micro_checkpoint(), arrays)
    json.dumps((judgement.to_json(), identity.to_json()), allow_nan=False)
    with TemporaryDirectory() as fixed:
        whisperport("fix", str(path), "--out", str(Path(fixed, path.name)))


# Outputs of a device.

DEVICE_OUTPUTS = {"features": (1, 40, 16), "keys": (2, 8, 40)}


def _device_output(quantization: Any) -> Any:
    """Return the expected outputs that every file is compared with.

    Args:
        quantization: name -> how the device stores an output.
    """
    import numpy as np

    from whisperport.verification.diagnosis.causes import CauseCode
    from whisperport.verification.diagnosis.expected import Alternative, Expected, ExpectedTensor

    random = np.random.default_rng(0)
    arrays = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in DEVICE_OUTPUTS.items()
    }
    other = {name: array[..., ::-1].copy() for name, array in arrays.items()}
    tensors = tuple(
        ExpectedTensor(name, array, 1, quantization.get(name)) for name, array in arrays.items()
    )
    alternatives = (Alternative(CauseCode.OTHER_CLIP, "The file holds another clip.", other),)
    return Expected("encoder", "clip", tensors, make_alternatives=lambda: alternatives)


def _make_device_outputs(random: Random, seeds: Path, folder: Path, outside: str) -> None:
    """Make one file per output, raw in some dtype or `.npy`, and how a device stores them; then damage."""
    import numpy as np

    outputs = folder / "outputs"
    outputs.mkdir()
    dtypes = ("<f4", "<f4", "<f4", "<f2", ">f4", "<f8", "i1", "u1", "<i2")
    stated = {name: {"dtype": "int8", "scale": 0.05, "zero_point": 3} for name in DEVICE_OUTPUTS}
    text = json.dumps(stated).encode()
    if random.random() < 0.5:
        text = json_values.mutated(text, random, outside)
    (folder / "quantization.json").write_bytes(text)
    for tensor in _device_output({}).tensors:
        dtype = random.choice(dtypes)
        array = (tensor.array * (20 if dtype[-2] in "iu" else 1)).astype(dtype)
        if random.random() < 0.3:
            file = io.BytesIO()
            np.save(file, array)
            data = _hostile_table(file.getvalue(), [array.tobytes()], random, outside)
        else:
            data = raw.mutated(array.tobytes(), random, [tensor.array.tobytes()])
        suffix = random.choice((".bin", ".bin", ".npy", ".raw"))
        (outputs / f"{tensor.name}{suffix}").write_bytes(data)
    if random.random() < 0.1:
        names = sorted(path.name for path in outputs.iterdir())
        folders.mutate(outputs, names, random, outside, without=folders.LINKS)


def _diagnose(folder: Path) -> None:
    """Diagnose the files, and check every text that would be printed."""
    from fuzz.command_line import check_printed
    from whisperport.verification.diagnosis.diagnosing import diagnose
    from whisperport.verification.diagnosis.raw_files import read_quantization

    is_stated = _one_of(("stated", "not stated"), folder / "quantization.json") == "stated"
    stated = read_quantization(folder / "quantization.json") if is_stated else {}
    found = diagnose(_device_output(stated), folder / "outputs")
    for output in found.outputs:
        texts = [text for finding in output.findings for text in (finding.sentence, finding.advice)]
        check_printed("".join((*texts, *output.excluded, output.before.reason)))
        compile(output.fix, "fix", "exec")


ONNX, PTE = "bundle-onnxruntime", "bundle-xnnpack"
TRIAL, INSPECTION = "whisperport.runtime.engine.trial", "whisperport.model.inspection.lowered"


def _bundle_format(name: str, group: str, change: Any, share: int) -> Format:
    make = partial(_bundle, group, change)
    runtime = "executorch.runtime" if group == PTE else "onnxruntime"
    return Format(name, "transcribe", (group,), make, _transcribe, share, (TRIAL, runtime))


def _run_format(suffix: str, group: str, make: Any, share: int, runtime: str) -> Format:
    imports = (INSPECTION, runtime)
    return Format(f"{suffix}, run", "inspect", (group,), make, _inspect, share, imports)


# The shares follow the CPU time of an input: 0.2 s where a program runs or a bundle is transcribed.
FORMATS = (
    _bundle_format("manifest", ONNX, _change_manifest, 2500),
    _bundle_format("bundle", ONNX, _change_any_file, 800),
    _bundle_format("bundle of .onnx", ONNX, _change_onnx, 500),
    _bundle_format("bundle of .pte", PTE, _change_pte, 500),
    Format("tables (.npy, .npz)", "Bundle", (ONNX, "tables"), _make_tables, _read_tables, 1500),
    Format("config.json", "load_checkpoint", ("checkpoint",), _make_config, _load_folder, 2000),
    Format("tokenizer", "load_checkpoint", ("checkpoint",), _make_tokenizer, _load_folder, 2000),
    Format(
        "safetensors", "load_checkpoint", ("checkpoint",), _make_safetensors, _load_folder, 2000
    ),
    Format(".pt, .bin", "load_checkpoint", ("checkpoint", "pt"), _make_pt, _load_pt, 1200),
    Format(
        "CTranslate2", "load_checkpoint", ("ctranslate2",), _make_ctranslate2, _load_folder, 1000
    ),
    Format("adapter", "Transcriber", ("adapter",), _make_adapter, _read_adapter, 1000),
    Format("ggml", "load_checkpoint", ("ggml",), _make_ggml, _load_ggml, 1000),
    Format(".onnx", "check", ("onnx",), _make_onnx, _check, 1500),
    _run_format(".onnx", "onnx", _make_onnx, 500, "onnxruntime"),
    Format(".pt2", "check", ("pt2",), _make_pt2, _check, 1000),
    Format(".pt2, loaded", "fix", ("pt2",), _make_pt2, _read_pt2, 500),
    Format(".tflite", "check", ("tflite",), _make_tflite, _check, 1250),
    _run_format(".tflite", "tflite", _make_tflite, 500, "ai_edge_litert.interpreter"),
    Format(".pte", "read_pte", ("pte",), _make_pte, _read_pte, 750),
    _run_format(".pte", "pte", _make_pte, 500, "executorch.runtime"),
    Format(".xml", "check", ("openvino",), _make_xml, _check, 1000),
    _run_format(".xml", "openvino", _make_xml, 500, "openvino"),
    Format("HEF", "read_hef", ("hef",), _make_hef, _read_hef, 1000),
    Format("whisperport.json", "verify", ("layout",), _make_record, _verify_layout, 1000),
    Format("files of an app", "judge", ("ggml", "layouts"), _make_layout, _judge, 1000),
    Format(
        "files of an app, .pte",
        "judge",
        ("layouts-pte",),
        partial(_make_layout, group="layouts-pte"),
        _judge,
        250,
    ),
    # Half a second each: fifty times the others.
    Format("device outputs", "diagnose", (), _make_device_outputs, _diagnose, 200),
    Format("audio", "load_audio", ("audio",), _make_audio, _load_audio, 1000),
)
