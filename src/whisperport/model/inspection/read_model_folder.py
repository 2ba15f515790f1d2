"""Read the graph of a model folder of Hugging Face's transformers, of any architecture.

The model is built from the folder's config.json, without weights and without memory for them: neither the
graph nor the shapes depend on them. Code that the folder contains does not run, and nothing that the
configuration names is looked up on the hub. Memory and the number of the model's modules are limited.

The tensors are torch's fake ones, which say that they are on the CPU: on torch's device "meta", attention
returns other strides, and the graph has other copies.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.nn.modules.module import register_module_module_registration_hook

from whisperport.errors import CheckpointError, LoweringError, ProgramError, WhisperportError, needs
from whisperport.model.inspection.graph import Graph
from whisperport.model.inspection.quiet import quiet
from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.trace.program import exported_module
from whisperport.program.untrusted import quoted, read_json_object, shorten
from whisperport.system.child import memory_within

CONFIG = "config.json"
TOKENS = 128  # of a text
SAMPLES = 16_000  # of a waveform: 1 s at 16 kHz
FRAMES = 300  # of a spectrogram: 3 s
PIXELS = 224  # sides of an image, if the configuration does not state them
MOST_MODULES = 20_000  # of a model; one layer of BERT has 20
MOST_BYTES = 4 * 2**30  # of memory, beside what the process has; BERT of 12 layers takes 0.3 GB
HINT = "give the model and its inputs from Python: `whisperport.check(module, inputs, target)`"


def is_model_folder(path: Path) -> bool:
    """Return whether a path is a folder with a config.json."""
    return path.is_dir() and (path / CONFIG).is_file()


def read_model_folder(folder: Path) -> Graph:
    """Build the model of a folder, export it as one program, and return its graph.

    Args:
        folder: with a config.json of transformers.

    Returns:
        The graph, with the name of the model's class. A text has 128 tokens, or as many as the model
        takes; a waveform has 1 s; a spectrogram is as long as the model states, or has 300 frames.

    Raises:
        MissingPackageError: transformers is not installed.
        ProgramError: transformers has no model for the folder, the model is too large, or the inputs are
            not known.
        LoweringError: torch cannot export the model.
    """
    with (
        needs(f"cannot build the model of {folder}: no transformers", extra="transformers"),
        quiet(),
    ):
        import transformers
    with quiet(), memory_within(MOST_BYTES):
        name, config, model = _built(folder, transformers)
        with FakeTensorMode(allow_non_fake_inputs=True):
            return read_exported(name, _exported(name, config, model.to_empty(device="cpu")))


def _built(folder: Path, transformers: Any) -> tuple[str, Any, nn.Module]:
    """Return the name of the model's class, its configuration, and the model on the device "meta"."""
    try:
        _check(read_json_object(folder / CONFIG))
        with _offline():
            config = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            name = _architecture(transformers, config)
            with torch.device("meta"), _modules_counted():
                return name, config, getattr(transformers, name)(config).eval()
    except CheckpointError as error:
        raise ProgramError(error.what, why=error.why, hint=error.hint) from error
    except WhisperportError:
        raise
    except Exception as error:  # transformers raises anything for a damaged configuration
        too_large = f"there is not enough memory: the limit is {MOST_BYTES / 1e9:.1f} GB"
        why = too_large if isinstance(error, MemoryError) else str(error).strip().split("\n")[0]
        raise ProgramError(
            f"transformers cannot build the model of {folder}",
            why=shorten(why),
            hint=f"check the file {CONFIG}. {HINT[0].upper()}{HINT[1:]}",
        ) from error


def _check(configuration: Any, key: str = "") -> None:
    """Check the values of a configuration that transformers does not check.

    Raises:
        ProgramError: it names an implementation of attention on the hub, whose code would run here, or has
            more layers than a model may have modules.
    """
    if isinstance(configuration, dict):
        for name, value in configuration.items():
            _check(value, name)
    elif isinstance(configuration, list):
        for value in configuration:
            _check(value, key)
    elif key.endswith("_implementation") and "/" in str(configuration):
        raise ProgramError(
            "the configuration names code to be downloaded, which is not run",
            why=f"its `{shorten(key)}` is {quoted(configuration)}",
            hint=f"remove the line from {CONFIG}",
        )
    elif (
        ("layer" in key or "depth" in key)
        and isinstance(configuration, int)
        and configuration > MOST_MODULES
    ):
        raise _too_large(f"its `{shorten(key)}` is {quoted(configuration)}")


@contextmanager
def _offline() -> Iterator[None]:
    """Let transformers look up nothing on the hub: a configuration may name another model as a part."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _modules_counted() -> Iterator[None]:
    """End the building of a model that has too many modules.

    Raises:
        ProgramError: it has more than `MOST_MODULES`.
    """
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise _too_large(f"it has more than {MOST_MODULES} modules")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def _too_large(why: str) -> ProgramError:
    return ProgramError(
        "the model of the configuration is too large",
        why=why,
        hint=f"check the number of layers in {CONFIG}",
    )


def _exported(name: str, config: Any, model: nn.Module) -> ExportedProgram:
    parameters = inspect.signature(model.forward).parameters
    try:
        inputs: dict[str, Any] = dict(_inputs(name, config, parameters))
    except WhisperportError:
        raise
    except Exception as error:  # a size of the configuration is not what the model's code takes
        raise ProgramError(
            f"cannot make inputs for {name}", why=shorten(str(error).split("\n")[0]), hint=HINT
        ) from error
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    try:
        return exported_module(name, model, (), inputs)
    except LoweringError as error:
        shapes = [f"{key} {tuple(x.shape)}" for key, x in inputs.items() if isinstance(x, Tensor)]
        raise LoweringError(
            f"torch.export could not trace `{name}` with {', '.join(shapes)}",
            why=error.why,
            hint=HINT,
        ) from error


def _architecture(transformers: Any, config: Any) -> str:
    stated = (getattr(config, "architectures", None) or [""])[0]
    stated_class = getattr(transformers, str(stated), None)
    if not isinstance(stated_class, type) or not issubclass(stated_class, nn.Module):
        raise ProgramError(
            "the configuration states no model of transformers",
            why=f"its `architectures` begins with {str(stated)[:80]!r}, and transformers has no such class",
            hint=HINT,
        )
    return str(stated)


def _inputs(name: str, config: Any, parameters: Any) -> dict[str, Tensor]:
    """Return an example of each input that the model's `forward` takes and that is known here."""
    text = config.get_text_config()
    tokens = min(TOKENS, _number(text, TOKENS, "max_position_embeddings", "n_positions", "n_ctx"))
    decoded = min(tokens, _number(config, tokens, "max_target_positions"))
    shapes = {
        "input_ids": (1, tokens),
        "decoder_input_ids": (1, decoded),
        "input_values": _waveform(config),
        "input_features": _spectrogram(config),
        "pixel_values": _image(getattr(config, "vision_config", config)),
    }
    input_shapes = {key: shape for key, shape in shapes.items() if key in parameters}
    if not input_shapes:
        raise ProgramError(
            f"cannot make inputs for {name}",
            why=f"its `forward` takes none of {', '.join(shapes)}",
            hint=HINT,
        )
    return {
        key: torch.zeros(shape, dtype=torch.long if key.endswith("ids") else torch.float32)
        for key, shape in input_shapes.items()
    }


def _waveform(config: Any) -> tuple[int, ...]:
    """Return the shape of `input_values`: samples, or the spectrogram that some models name so."""
    if channels := _number(config, 0, "audio_channels"):
        return (1, channels, SAMPLES)
    bins = _number(config, 0, "num_mel_bins")
    length = _number(config, 0, "max_length")
    return (1, length, bins) if bins and length and hasattr(config, "patch_size") else (1, SAMPLES)


def _spectrogram(config: Any) -> tuple[int, ...]:
    """Return the shape of `input_features`; models like Whisper have the axis of time last."""
    bins = _number(
        config, 80, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"
    )
    positions = _number(config, 0, "max_source_positions")
    is_whisper = positions and hasattr(config, "num_mel_bins")
    return (1, bins, 2 * positions) if is_whisper else (1, FRAMES, bins)


def _image(config: Any) -> tuple[int, ...]:
    size = getattr(config, "image_size", None) or PIXELS
    height, width = (size, size) if isinstance(size, int) else size
    return (1, _number(config, 3, "num_channels"), height, width)


def _number(config: Any, default: int, *names: str) -> int:
    """Return the first of a configuration's values that is a positive integer."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), default)
