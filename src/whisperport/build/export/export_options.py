"""Options of `export`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from whisperport.program.window import WindowOptions
from whisperport.system.option import Option
from whisperport.targets import RunOptions
from whisperport.verification.clips import Clip


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `export`.

    Args:
        window: length of the window and its padding. Default: the longest window known to compile for the
            encoder's target, or else the checkpoint's window.
        windows: lengths of window in seconds that the runtime may choose, beside the checkpoint's own.
            Default: none.
        precision: precision of all programs on the given target, such as "fp16". Default: "", the target's
            default precision.
        precisions: program -> precision, for single programs; overrides `precision`. Default: none.
        options: lowering options of targets, "TARGET.NAME" -> value. Default: none.
        batch: number of texts that the program `step_B` decodes together: 2, 4, 8 or 16; 1: do not export
            this program. Default: None, the default of the target of `step`.
        clips: audio clips that the bundle is verified with. Default: None, the clips of the package.
        preflight: raise an error before the export starts if memory or disk space is too small, or if the
            checkpoint is too large for the target. Default: True.
        run: how the bundle's programs are run for verification; `run.threads` also sets torch's threads.
    """

    adapter: Annotated[
        Path | None,
        Option(
            "Folder of a LoRA adapter of PEFT, which is merged with the checkpoint. Without this option, "
            "the checkpoint may be such a folder, and its base is the one that it names",
            metavar="DIR",
            exists=True,
            default="none",
        ),
    ] = None
    adapters_as_inputs: Annotated[
        str,
        Option(
            "Make the low-rank matrices of an adapter inputs of the programs, for adapters up to this "
            "rank: transcribe --adapter and serve --adapter then use any of them without another export. "
            "With names of layers, such as 16:q_proj,v_proj, only adapters of these",
            metavar="RANK[:LAYER,LAYER]",
            default="none",
            flag="--adapters-as-inputs",
        ),
    ] = ""
    window: WindowOptions = field(default_factory=WindowOptions)
    windows: Annotated[
        tuple[float, ...],
        Option(
            "Lengths of window that the runtime chooses from, such as 5,10,30: encoder and cross_kv get a "
            "program for each. Rejected for targets whose programs take every length, such as "
            "onnxruntime",
            metavar="SECONDS,SECONDS",
            default="the checkpoint's length only",
            flag="--windows",
        ),
    ] = ()
    placement: Annotated[
        Mapping[str, str],
        Option(
            "Run one program on another target, for example encoder=xnnpack; may be repeated. "
            "vocab_projection=TARGET makes the computation of the logits a program of its own. "
            "coarse_projection=onnxruntime computes the logits in 8 bits first, and in float32 only those "
            "of the tokens that can win: a step is faster, and the text is the same",
            metavar="PROGRAM=TARGET",
            default="the target of --target",
            flag="--placement",
        ),
    ] = field(default_factory=dict)
    precision: str = ""
    precisions: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    calibration: Annotated[
        Path | None,
        Option(
            "Folder of audio files that resemble what the device will record, or an .npy file of log-mel "
            "spectrograms (clips, mel bins, frames of one window), for targets that quantize to w8a8 or "
            "w8a16 during the export",
            metavar="PATH",
            exists=True,
            default="the few audio files that come with whisperport",
        ),
    ] = None
    batch: int | None = None
    uncached_decoder: Annotated[
        bool,
        Option(
            "Also export uncached_decoder, a decoder without KV cache. An error if the target cannot run "
            "it"
        ),
    ] = False
    clips: Sequence[Clip] | None = None
    allow_unverified: Annotated[
        bool,
        Option("Write the bundle even if its verification failed. It stays marked as unverified"),
    ] = False
    verify_with: Annotated[
        Path | None,
        Option(
            "Verify the bundle with the audio files in this folder: the first window of each. A file "
            "NAME.txt beside NAME.wav is its transcript, from which the word error rate is counted; "
            "without one, the words are those of the checkpoint in float32",
            metavar="DIR",
            exists=True,
            default="six clips that come with whisperport",
        ),
    ] = None
    language: Annotated[
        str | None,
        Option(
            "Language spoken in the audio files of `verify_with`, as a code or a name",
            metavar="LANG",
            default="en, or a language of the checkpoint if it knows no English",
        ),
    ] = None
    preflight: bool = True
    run: RunOptions = field(default_factory=RunOptions)
