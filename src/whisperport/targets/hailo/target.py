"""The Hailo targets: write ONNX and a model script for the compiler; run or emulate programs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, final

from whisperport.bundle import ProgramEntry, regular_file
from whisperport.dims import Dims
from whisperport.errors import UsageError
from whisperport.progress import Progress
from whisperport.runner import Runner
from whisperport.spec import ProgramSpec, Rejection, UncachedForm
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.hailo import options as hailo_options
from whisperport.targets.hailo.chips import Chip
from whisperport.targets.hailo.compiler import HailoCompiler
from whisperport.targets.hailo.importer import HailoImporter
from whisperport.targets.hailo.model_script import model_script
from whisperport.targets.hailo.size import too_large
from whisperport.targets.onnx_lowering import lower_file_to_onnx, lower_to_onnx
from whisperport.targets.program_files import compiled_file, emulated_onnx

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program

DEFAULT_SEQUENCE_LENGTH = (
    32  # of `uncached_decoder`, where none is published for a checkpoint's width
)
SUFFIX = ".hef"


@final
class Hailo(Target):
    """The target for one chip. Lowered ONNX files can be emulated on the CPU before they are compiled."""

    lower_options: ClassVar[type[Any]] = hailo_options.LowerOptions
    run_options: ClassVar[type[Any]] = hailo_options.RunOptions

    def __init__(self, chip: Chip, options: hailo_options.LowerOptions | None = None) -> None:
        self.chip, self.spec = chip, chip.spec
        self.compiler = HailoCompiler(chip)
        self.importer = HailoImporter(chip)
        self.options = options or hailo_options.LowerOptions()

    def configured(self, options: Any) -> Self:
        return type(self)(self.chip, options)

    def uncached_form(self, dims: Dims) -> UncachedForm:
        """Return the form of Hailo's published decoder.

        Its graph starts after the lookup of token embeddings and ends before the pieces of the logits are
        joined; its causal mask is -inf. Source: hailocs/hailo-whisper@ebe7a85.

        Raises:
            UsageError: the option `sequence-length` is above the number of the decoder's positions.
        """
        published = min(
            self.chip.sequence_length.get(dims.n_text_state, DEFAULT_SEQUENCE_LENGTH),
            dims.n_text_ctx,
        )
        sequence_length = self.options.sequence_length or published
        if sequence_length > dims.n_text_ctx:
            raise UsageError(
                f"the option `{self.spec.name}.sequence-length` cannot be `{sequence_length}`",
                hint=f"expected at most {dims.n_text_ctx}, the number of the decoder's positions",
            )
        return UncachedForm(sequence_length, self.options.positions)

    def too_large(self, dims: Dims) -> str:
        return too_large(dims)

    def check(self, program: "Program") -> list[Rejection]:
        from whisperport.targets.graph_check import rejections

        return rejections(program, self.spec)

    def lower(
        self, programs: Sequence["Program"], folder: Path, progress: Progress
    ) -> list[ProgramEntry]:
        """Write each program to an ONNX file that contains its weights, with its model script beside it."""
        return [
            self._with_script(entry, folder)
            for program in programs
            for entry in lower_to_onnx(self, [program], folder, self._opset(program.spec), progress)
        ]

    def lower_file(
        self, program: "Program", path: Path, progress: Progress, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Write one program to an ONNX file that contains its weights, with its model script beside it."""
        entry, facts = lower_file_to_onnx(
            self, program, path, self._opset(program.spec), progress, simplify=simplify
        )
        script = path.with_suffix(".alls")
        script.write_text(_script(self.chip, program.spec), encoding="utf-8")
        return replace(entry, files=(*entry.files, script.name)), facts

    def _opset(self, spec: ProgramSpec) -> int:
        return self.options.decoder_opset if _is_decoder(spec) else self.options.encoder_opset

    def _with_script(self, entry: ProgramEntry, folder: Path) -> ProgramEntry:
        script = f"{self.spec.name}/{entry.spec.name}.alls"
        (folder / script).write_text(_script(self.chip, entry.spec), encoding="utf-8")
        return replace(entry, files=(*entry.files, script))

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        chosen = cast(hailo_options.RunOptions, options.of(self))
        if chosen.emulation:
            return emulated_onnx(self.spec, folder, entries, options.threads)
        from whisperport.targets.hailo.runtime import load_hefs

        hefs = {
            e.spec.name: regular_file(folder, compiled_file(self.spec, e, SUFFIX)) for e in entries
        }
        specs = [entry.spec for entry in entries]
        return load_hefs(self.chip, specs, hefs, service=chosen.service)


def _is_decoder(spec: ProgramSpec) -> bool:
    """Whether a program is a decoder: it has features and embeddings as inputs, an encoder only mel."""
    return len(spec.inputs) > 1


def _script(chip: Chip, spec: ProgramSpec) -> str:
    """Write the model script with default options; the width d is that of the features, (1, T, d)."""
    if not _is_decoder(spec):
        return model_script(chip.name, spec.outputs[0].shape[-1])
    features = next((tensor for tensor in spec.inputs if len(tensor.shape) == 3), spec.inputs[0])
    return model_script(chip.name, features.shape[-1], program="uncached_decoder")
