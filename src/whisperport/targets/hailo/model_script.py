"""The model script (`.alls`): how Hailo's compiler is to quantize a program, and what it may spend on it.

The vendor's own scripts for Whisper, command by command. Layers are named by wildcards, which hold for
any graph. Its lists of single layers count convolutions as the compiler numbers those of the vendor's
graph: they are data here, and used only if asked for.

Source: hailocs/hailo-whisper@ebe7a85, conversion/optimization/{tiny,base}/{hailo8,hailo8l,hailo10h}/.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.errors import UsageError
from whisperport.targets.options import Option, check_ranges

SixteenBit = Literal["adds", "published-layers", "nothing"]
LEARNING_RATE = "0.00001"  # as the vendor writes it
TINY, BASE = 384, 512  # widths


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """The options of compiling; those of the model script have the vendor's defaults.

    Raises:
        UsageError: a number out of range.
    """

    optimization_level: Annotated[
        int, Option("How much the compiler does against the loss of precision", low=0, high=4)
    ] = 2
    compression_level: Annotated[
        int, Option("How many weights are stored in 4 bits; 0: none", low=0, high=5)
    ] = 0
    finetune: Annotated[
        bool, Option("Fine-tune the quantized weights; needs a GPU, or takes hours")
    ] = True
    epochs: Annotated[
        int | None,
        Option("Fine-tuning epochs; without it, those of the published recipe", low=1, high=10_000),
    ] = None
    sixteen_bit: Annotated[
        SixteenBit,
        Option("What is computed in 16 bits; the list of layers fits Hailo's own graphs only"),
    ] = "adds"
    emulate: Annotated[
        bool,
        Option("Run the quantized program on the CPU by Hailo's emulator, and compare its outputs"),
    ] = True
    compiler_optimization_level: Annotated[
        Literal[0, 1, 2, "max"] | None,
        Option("Compile effort for a faster placement; without it, the compiler's own"),
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """Numbers of one published script."""

    calibration: int  # samples that ranges are measured on
    calibration_batch: int
    finetune: int  # samples of one epoch
    epochs: int
    finetune_batch: int | None  # None: the compiler's own
    layers: tuple[int, ...]  # convolutions in 16 bits, as numbered in the vendor's graph
    wide_outputs: bool = False  # outputs in 16 bits


_TINY_CONVS = (4, 6, 8, 10, 12, 14, 16, 18, 5, 9, 13, 17)
_RECIPES = {
    ("encoder", TINY): _Recipe(
        calibration=1024,
        calibration_batch=8,
        finetune=3340,
        epochs=6,
        finetune_batch=8,
        layers=_TINY_CONVS,
    ),
    ("encoder", BASE): _Recipe(
        calibration=512,
        calibration_batch=8,
        finetune=2048,
        epochs=4,
        finetune_batch=4,
        layers=(*_TINY_CONVS, 20, 21, 22, 24, 25, 26),
    ),
    ("uncached_decoder", TINY): _Recipe(
        calibration=128,
        calibration_batch=4,
        finetune=1024,
        epochs=4,
        finetune_batch=None,
        layers=(*range(12, 33, 2), 25, 31),
        wide_outputs=True,
    ),
    ("uncached_decoder", BASE): _Recipe(
        calibration=256,
        calibration_batch=4,
        finetune=1024,
        epochs=4,
        finetune_batch=None,
        layers=tuple(range(12, 49, 2)),
    ),
}


def model_script(
    chip: str,
    width: int,
    options: ScriptOptions | None = None,
    *,
    program: str = "encoder",
    samples: int | None = None,
) -> str:
    """The script for one program of a model of this width, as the text of an `.alls` file.

    Args:
        chip: `hailo8`, `hailo8l` or `hailo10h`.
        program: `encoder` or `uncached_decoder`.
        samples: calibration samples that there are; None: as many as are needed.

    Raises:
        UsageError: the published list of layers is asked for, and none was published for this width.
    """
    options = options or ScriptOptions()
    recipe = _recipe(program, width)
    write = _encoder if program == "encoder" else _decoder
    return "\n".join(write(chip, width, recipe, options, samples)) + "\n"


def samples_needed(
    width: int, options: ScriptOptions | None = None, *, program: str = "encoder"
) -> int:
    """Calibration samples that the script reads: the compiler stops where there are fewer."""
    recipe = _recipe(program, width)
    finetunes = (options or ScriptOptions()).finetune
    return max(recipe.calibration, recipe.finetune if finetunes else 0)


def _recipe(program: str, width: int) -> _Recipe:
    """That of the published width, and for any other that of the nearest one below, or tiny's."""
    return _RECIPES[program, BASE if width >= BASE else TINY]


def _encoder(
    chip: str, width: int, recipe: _Recipe, options: ScriptOptions, samples: int | None
) -> Iterator[str]:
    yield from _flavor(recipe, options, samples)
    yield "pre_quantization_optimization(ew_add_fusing, policy=disabled)"
    yield (
        "pre_quantization_optimization(matmul_correction, layers={matmul*}, "
        "correction_type=zp_comp_block)"
    )
    yield from _norms(chip)
    yield from _sixteen_bit(chip, width, recipe, options)
    if options.sixteen_bit != "nothing":
        yield "quantization_param(ew_add1, precision_mode=a8_w8)"
    yield (
        "pre_quantization_optimization(matmul_equalization, layers={matmul*}, matmul_bias=enabled)"
    )
    yield _performance(options)
    yield "model_optimization_config(checker_cfg, policy=enabled)"


def _decoder(
    chip: str, width: int, recipe: _Recipe, options: ScriptOptions, samples: int | None
) -> Iterator[str]:
    yield from _flavor(recipe, options, samples)
    yield from _norms(chip)
    yield "model_optimization_config(checker_cfg, policy=enabled)"
    yield from _sixteen_bit(chip, width, recipe, options)
    if recipe.wide_outputs and options.sixteen_bit != "nothing":
        yield "quantization_param({output_layer*}, precision_mode=a16_w16)"
    yield _performance(options)
    # The vendor leaves the 10H more room for tiny, and not for base.
    utilization = 0.7 if chip == "hailo10h" and width < BASE else 0.8
    yield f"resources_param(max_utilization={utilization})"


def _flavor(recipe: _Recipe, options: ScriptOptions, available: int | None) -> Iterator[str]:
    yield (
        f"model_optimization_flavor(optimization_level={options.optimization_level}, "
        f"compression_level={options.compression_level})"
    )
    if options.finetune:
        samples = _at_most(recipe.finetune, available)
        batch = _at_most(recipe.finetune_batch, available)
        batch_size = "" if batch is None else f", batch_size={batch}"
        yield (
            f"post_quantization_optimization(finetune, policy=enabled, dataset_size={samples}, "
            f"epochs={options.epochs or recipe.epochs}, learning_rate={LEARNING_RATE}{batch_size})"
        )
    yield (
        "model_optimization_config(calibration, "
        f"batch_size={_at_most(recipe.calibration_batch, available)}, "
        f"calibset_size={_at_most(recipe.calibration, available)})"
    )


def _norms(chip: str) -> Iterator[str]:
    if chip == "hailo10h":
        yield (
            "pre_quantization_optimization(layer_norm_decomposition, "
            "bit_decomposition_mode=uniform_precision, equalization=disabled)"
        )


def _sixteen_bit(chip: str, width: int, recipe: _Recipe, options: ScriptOptions) -> Iterator[str]:
    if options.sixteen_bit == "nothing":
        return
    yield "quantization_param({ew_add*}, precision_mode=a16_w16)"
    if options.sixteen_bit == "adds":
        return
    if width not in (TINY, BASE):
        raise UsageError(
            f"no list of 16-bit layers was published for a model of width {width}",
            why=f"those of widths {TINY} and {BASE} count the layers of those graphs",
            hint=f"leave `--option {chip}.sixteen-bit` at its default, `adds`",
        )
    for layer in recipe.layers:
        yield f"quantization_param(conv{layer}, precision_mode=a16_w16)"


def _performance(options: ScriptOptions) -> str:
    level = options.compiler_optimization_level
    effort = "" if level is None else f"compiler_optimization_level={level}, "
    return f"performance_param({effort}optimize_for_batch=1)"


def _at_most(wanted: int | None, available: int | None) -> int | None:
    return wanted if wanted is None or available is None else min(wanted, available)
