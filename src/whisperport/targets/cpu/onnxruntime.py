"""The target `onnxruntime`: ONNX Runtime on the CPU or another installed execution provider."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast, final

from whisperport.errors import UsageError, needs
from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.execution_providers import CPU, POLICIES, Provider
from whisperport.program.placement import Placement
from whisperport.program.program_kind import ALIGN, COARSE_PROJECTION, PREFILL, STEP
from whisperport.program.runner import Runner
from whisperport.program.spec import (
    Lowering,
    LoweringCost,
    ProgramSpec,
    Runs,
    Software,
    Support,
    TargetSpec,
)
from whisperport.system.option import MAX_THREADS
from whisperport.system.progress import begin_stage
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.onnx.any_tokens import Lowered, same_but_for_tokens
from whisperport.targets.onnx.lower_file import lower_file_to_onnx
from whisperport.targets.onnx.rounded_audio import Rounding, Session, multiplies_exactly
from whisperport.targets.onnx.runner import ON_CPU, OnnxRunner, cpu_session
from whisperport.targets.onnx.weights import LARGEST, JoinedWeights, OnnxWeights, OwnWeights
from whisperport.targets.quantizing import Sensitive, replace_by_quantized, static_calibration
from whisperport.targets.target_options import Option, check_ranges

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program
    from whisperport.targets.compiler import CalibrationNeed

FOLDER = "onnxruntime"
W8, W8A8 = "w8", "w8a8"
MOST_STARTS = 4  # tokens of a prompt without text
ENCODER = "encoder"  # the program that is not loaded if its features are computed elsewhere
OPSETS = range(13, 21)  # those that `trace/onnx_opset.py` writes; the last is the default


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerOptions:
    """Options for lowering.

    Raises:
        UsageError: the opset is out of its range.
    """

    opset: Annotated[
        int, Option("Version of the ONNX operator set (opset)", low=OPSETS[0], high=OPSETS[-1])
    ] = OPSETS[-1]
    sensitive: Sensitive = "w8"

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions:
    """Options for running."""

    provider: Annotated[
        str,
        Option(
            "Name of the ONNX Runtime execution provider that runs the programs; or a policy, such as "
            "prefer_npu, by which ONNX Runtime chooses a provider and its device"
        ),
    ] = CPU
    device: Annotated[
        str | None,
        Option(
            "Device of the execution provider: cpu, gpu, npu, or a name that `whisperport doctor` shows; "
            "the default is the provider's first"
        ),
    ] = None
    library: Annotated[
        Path | None,
        Option(
            "Library that has the execution provider, such as one of Windows ML; the default is the one of "
            "an installed package"
        ),
    ] = None
    provider_options: Annotated[
        str | None,
        Option(
            "Options of the execution provider, as NAME=VALUE, with a semicolon between two options; the "
            "default is none"
        ),
    ] = None
    provider_programs: Annotated[
        str | None,
        Option(
            "Programs that run on the execution provider, with a comma between two names; the others run "
            "on the CPU; the default is all programs"
        ),
    ] = None
    decoder_threads: Annotated[
        int | None,
        Option(
            "Number of CPU threads of all programs but the encoder. With 1, decoding needs less CPU time; "
            "the default is --threads",
            low=1,
            high=MAX_THREADS,
        ),
    ] = None
    spin: Annotated[
        bool,
        Option(
            "Keep the CPU threads of all programs but the encoder busy while they wait for each other. "
            "Small models decode faster on an idle machine, and much slower on a loaded one"
        ),
    ] = False

    def threads_of(self, program: str, threads: int | None) -> int | None:
        """Return the CPU threads of a program; `threads` is the number for all, None the runtime's."""
        return threads if program == ENCODER else self.decoder_threads or threads

    def on_provider(self, program: str) -> bool:
        """Return whether a program runs on the execution provider."""
        return self.provider_programs is None or program in self._programs

    @property
    def _programs(self) -> list[str]:
        return [name.strip() for name in (self.provider_programs or "").split(",")]

    def chosen(self) -> Provider:
        """Return the execution provider with its device and options.

        Raises:
            UsageError: its options cannot be read, or are for a provider that ONNX Runtime chooses.
        """
        pairs = self.pairs()
        if self.provider in POLICIES and (pairs or self.device):
            raise UsageError(
                f"with `onnxruntime.provider={self.provider}`, ONNX Runtime chooses the device itself",
                why="a device, or options of an execution provider, are given as well",
                hint="name the provider; `whisperport doctor` lists those that are here",
            )
        library = os.fspath(self.library or "")
        return Provider(
            name=self.provider, device=self.device or "", library=library, options=pairs
        )

    def pairs(self) -> dict[str, str]:
        """Return the options of the execution provider, name -> value.

        Raises:
            UsageError: a part has no name, or no `=`; or a name is given twice.
        """
        pairs: dict[str, str] = {}
        for part in filter(None, map(str.strip, (self.provider_options or "").split(";"))):
            name, equals, value = part.partition("=")
            if not equals or not name or name in pairs:
                raise UsageError(
                    f"the option `onnxruntime.provider-options` cannot contain `{part[:80]}`",
                    why="it is given twice" if name in pairs else "it is not NAME=VALUE",
                    hint="write NAME=VALUE;NAME=VALUE, in quotes",
                )
            pairs[name] = value
        return pairs

    def check_programs(self, known: Sequence[str]) -> None:
        """Check the names of `provider_programs`. `encoder` is known also if it is not loaded.

        Args:
            known: names of the programs that are loaded on this target.

        Raises:
            UsageError: there is no such program.
        """
        unknown = [name for name in self._programs if name not in (*known, ENCODER)]
        if self.provider_programs is not None and unknown:
            raise UsageError(
                f"the option `onnxruntime.provider-programs` names `{unknown[0][:80]}`",
                why="the bundle has no such program on the target `onnxruntime`",
                hint=f"its programs are {', '.join(known)}",
            )


@final
class OnnxRuntime(Target):
    """Writes one ONNX file per program and one file of weights for all programs; runs them."""

    lower_options: ClassVar[type[Any]] = LowerOptions
    options = LowerOptions()
    run_options: ClassVar[type[Any]] = ProviderOptions
    spec = TargetSpec(
        name="onnxruntime",
        summary="ONNX Runtime on any CPU, or on another installed execution provider",
        supports=Support(
            dtypes=frozenset({"float32", "float16", "int64", "int32", "bool"}),
            formats=frozenset({"torch", "onnx"}),
            domains=frozenset({"com.microsoft"}),
            static=False,
        ),
        lowering=Lowering(
            lowered_suffix=".onnx",
            sums_exponentials=True,
            lowered_max_rank=4,  # the file may be used by other compilers; most support no higher rank
            cost=LoweringCost(
                base_bytes=0.8e9, bundle_factor=1.85, program_factor=2.5, base_s=15, s_per_gb=128
            ),
        ),
        runs=Runs(
            precisions=("fp32", W8, W8A8),
            timed_precisions=("fp32", W8),
            any_audio=True,
            further_programs=frozenset({COARSE_PROJECTION}),  # it has an operator of ONNX Runtime
            trial_options={"provider": CPU},
        ),
        software=Software(runtime="onnxruntime", extra="export"),
        sources={
            "formats": "ONNX Runtime reads ONNX; torch programs are converted to ONNX first",
            "domains": "onnxruntime docs/ContribOperators.md",
            "static": "ONNX Runtime supports dynamic shapes",
            "dtypes": "onnx/onnx docs/Operators.md, opset 20: types of Add, MatMul, Gather, Where",
            "precisions": "w8: onnxruntime docs/ContribOperators.md, MatMulNBits with 8 bits, which rounds "
            "its other input to 8 bits in blocks of 128; microsoft/onnxruntime#24491: since release 1.22; "
            "w8a8: onnxruntime.quantization.quantize_static",
            "max_rank": "no limit found in ONNX Runtime's CPU kernels; 8 is the limit of other compilers",
        },
    )

    def lower(self, programs: Sequence["Program"], folder: Path) -> list[ProgramEntry]:
        with needs(
            "cannot lower for `onnxruntime`: the ONNX exporter is not installed", extra="export"
        ):
            from whisperport.model.trace.onnx import SharedWeights, write_onnx
        (folder / FOLDER).mkdir()
        shared = SharedWeights(folder / FOLDER / "weights.bin")
        opset, entries = self.options.opset, []
        for program in programs:
            begin_stage(f"writing {program.name} as ONNX opset {opset}")
            path = folder / FOLDER / f"{program.name}.onnx"
            precision = self.precision_of(program.name)
            to_quantize = precision == W8A8
            weights = SharedWeights(path.with_suffix(".bin")) if to_quantize else shared
            # The bounds of `coarse_projection` are not rounded; its weights have 8 bits in any precision.
            in_8_bits = precision == W8 and program.name != COARSE_PROJECTION
            nodes = write_onnx(
                program, path, weights, opset=opset, in_8_bits=in_8_bits, to_quantize=to_quantize
            )
            entries.append(
                ProgramEntry(
                    spec=program.spec,
                    placement=Placement(self.spec.name, precision),
                    method=program.name,
                    files=(f"{FOLDER}/{path.name}", f"{FOLDER}/{weights.path.name}"),
                    facts=ProgramFacts(
                        delegated=nodes, undelegated=(), subgraphs=1, target_facts={"opset": opset}
                    ),
                )
            )
        return entries

    def lower_file(
        self, program: "Program", path: Path, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Write one program to an ONNX file that contains its weights."""
        return lower_file_to_onnx(self, program, path, self.options.opset, simplify=simplify)

    def calibration(self, spec: ProgramSpec, precision: str) -> "CalibrationNeed | None":
        return static_calibration(spec) if precision == W8A8 else None

    def quantize(
        self, entry: ProgramEntry, folder: Path, arrays: Mapping[str, Path]
    ) -> ProgramEntry:
        from whisperport.targets.onnx.static_quantization import quantize_statically

        begin_stage(f"quantizing {entry.spec.name} to {entry.precision}")
        notes: list[str] = []

        def run(source: Path, out: Path) -> None:
            examine = self.options.sensitive == "w8"
            notes.extend(map(str, quantize_statically(source, out, arrays, examine=examine)))

        replace_by_quantized(
            folder / entry.files[0],
            run,
            failure="ONNX Runtime could not quantize",
            missing="onnx is not installed",
            target=self.spec.name,
            extra=self.spec.software.extra,
        )
        return replace(entry, facts=replace(entry.facts, notes=tuple(notes)))

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        chosen = cast(ProviderOptions, options.of(self))
        if entries:  # a target is also loaded without programs, to import its runtime
            chosen.check_programs([entry.spec.name for entry in entries])
        provider = chosen.chosen()
        graphs = [OnnxGraph.of(folder, entry) for entry in entries]
        providers = [
            provider if chosen.on_provider(entry.spec.name) else ON_CPU for entry in entries
        ]
        # Other providers copy weights to their own memory, so sharing does not help them.
        on_cpu = [graph for graph, p in zip(graphs, providers, strict=True) if p.name == CPU]
        rounding = _rounding(entries, partial(cpu_session, chosen.threads_of(STEP, options.cores)))
        own = {
            graph: OwnWeights(
                graph,
                entry.spec,
                later=entry.spec.kind.is_batch or entry.spec.kind.name == ALIGN,
                rounding=rounding if _reads_audio_in_8_bits(entry) else None,
                any_audio=options.short_windows is True,
            )
            for entry, graph in zip(entries, graphs, strict=True)
            if graph in on_cpu and (entry.precision in (W8, W8A8) or entry.spec.kind.is_batch)
        }
        own = {graph: weights for graph, weights in own.items() if weights.packed_bytes <= LARGEST}
        own |= _joined(
            [(entry.spec, g) for entry, g in zip(entries, graphs, strict=True) if g in own],
            rounding,
        )
        shared = OnnxWeights(
            [graph for graph in on_cpu if graph not in own],
            any_audio=options.short_windows is True,
        )
        return {
            entry.spec.name: OnnxRunner(
                entry.spec,
                graph,
                chosen.threads_of(entry.spec.name, options.cores),
                provider,
                own.get(graph, shared) if provider.name == CPU else None,
                spin=chosen.spin and entry.spec.name != ENCODER,
                later=entry.spec.kind.name == ALIGN or entry.spec.kind.tokens > MOST_STARTS,
            )
            for entry, graph, provider in zip(entries, graphs, providers, strict=True)
        }


def _joined(programs: Sequence[Lowered], rounding: Rounding | None) -> dict[OnnxGraph, OwnWeights]:
    """Return the weights of the programs that one session can run, the same for all of them."""
    same = same_but_for_tokens(programs)
    weights = [
        JoinedWeights(graph, spec, later=False, rounding=rounding) for spec, graph in same[:1]
    ]
    return {graph: weights[0] for _, graph in same}


def _reads_audio_in_8_bits(entry: ProgramEntry) -> bool:
    return entry.precision == W8 and entry.spec.kind.name in (STEP, PREFILL)


def _rounding(entries: Sequence[ProgramEntry], session: Session) -> Rounding | None:
    """Return what rounds keys and values of the audio, if programs read them so and this CPU is exact."""
    if any(map(_reads_audio_in_8_bits, entries)) and multiplies_exactly(session):
        return Rounding(session)
    return None


TARGETS = (OnnxRuntime(),)
