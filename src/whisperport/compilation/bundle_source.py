"""The programs of a bundle, to compile them; the compiled files are written into the bundle."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from whisperport.bundle import Bundle, check_writable
from whisperport.bundle.origin import is_trusted, record_own
from whisperport.calibration import (
    BundleSession,
    CalibrationOptions,
    CalibrationRequest,
    CalibrationSet,
    calibration_sets,
)
from whisperport.compilation.artifacts import Artifact, put_artifacts
from whisperport.compilation.bundle_checks import bundle_checks, tokens_of
from whisperport.compilation.options import CompileOptions
from whisperport.compilation.source import (
    Compiled,
    CompiledProgram,
    Emulation,
    Examples,
    Source,
    run_in_order,
)
from whisperport.errors import LoweringError
from whisperport.program.checks import Check
from whisperport.program.program_kind import ENCODER
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec
from whisperport.system.progress import Progress
from whisperport.targets import get_target
from whisperport.targets.compiler import Layout, same_layout
from whisperport.verification.bundle_check import reference_mel
from whisperport.verification.rejection import rejection

CLIPS = (
    2  # clips that programs other than the encoder are emulated on; each clip gives several inputs
)


class BundleSource(Source):
    """The programs of a bundle. Samples come from audio; its reference's clips are compared."""

    def __init__(self, bundle: Bundle, options: CompileOptions) -> None:
        self.bundle, self.session = bundle, BundleSession(bundle, options.run)
        self._options = CalibrationOptions(source=options.calibration, force=options.force)
        self.path = self.out = bundle.folder
        self.entries, self.dims = bundle.manifest.programs, bundle.manifest.dims

    def check(self, *, samples: bool) -> None:
        for name in dict.fromkeys(entry.target for entry in self.entries):
            target = get_target(name)
            reason = target.too_large(self.dims) if target.compiler else ""
            if reason and not self._options.force:
                raise LoweringError(
                    f"the model is too large for `{name}`",
                    why=reason,
                    hint="`--force` compiles it anyway",
                )
        check_writable(self.out)

    def quantize(self, work: Path, progress: Progress) -> None:
        """Do nothing: `export` quantized the programs."""

    def file(self, name: str) -> Path:
        return self.bundle.path(name)

    def calibrated(
        self, requests: Sequence[CalibrationRequest], progress: Progress
    ) -> Mapping[str, CalibrationSet]:
        layout = self._encoder_layout()
        return calibration_sets(self.session, requests, layout, self._options, progress)

    def _encoder_layout(self) -> Layout:
        """Return the layout of the encoder's compiler; the user's own spectrograms have this layout."""
        entry = self.bundle.manifest.program(ENCODER)
        compiler = get_target(entry.target).compiler
        if compiler is None:
            return same_layout
        need = compiler.calibration(entry.spec, self.dims, compiler.options())
        return need.layout if need is not None else same_layout

    def examples(self, spec: ProgramSpec, clips: int) -> Examples:
        chosen = self.session.reference.clips
        if spec.kind.name != ENCODER:  # the encoder's outputs are decoded, and every clip counts
            chosen = chosen[:CLIPS]
        chosen = chosen[: clips or None]
        mels = [reference_mel(self.dims, clip) for clip in chosen]
        inputs = list(self.session.inputs(spec, mels))
        names = tuple(clip.name for clip in chosen)
        return Examples(names=names, inputs=inputs, tokens=tokens_of(spec, inputs))

    def run(self, spec: ProgramSpec, inputs: Sequence[Array]) -> list[Array]:
        return run_in_order(self.session.runners[spec.name], inputs)

    def compared(
        self, emulation: Emulation, outputs: Sequence[Array | None], progress: Progress
    ) -> tuple[Check, ...]:
        return bundle_checks(self.session, emulation, outputs, progress)

    def rejection(self, failures: Sequence[Check]) -> tuple[str, str]:
        compiled = [entry for entry in self.entries if get_target(entry.target).compiler]
        hint = "choose another precision, or another target for these programs, and export again"
        return rejection(failures, self.session.reference, compiled), hint

    def release(self, emulations: Sequence[Emulation]) -> None:
        if not any(one.spec.kind.name == ENCODER for one in emulations):
            self.session.release()  # no features are decoded: leave the memory to the compilers

    def write(self, artifacts: Mapping[str, Artifact]) -> Compiled:
        made = put_artifacts(self.bundle, artifacts)
        if is_trusted(self.bundle):  # the programs that are not compiled are copies of its own
            record_own(made.manifest)
        programs = tuple(
            CompiledProgram.of(made.folder, made.manifest.program(name), artifact)
            for name, artifact in artifacts.items()
        )
        return Compiled(folder=made.folder, programs=programs, bundle=made)
