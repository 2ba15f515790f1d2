"""Write the model script (`.alls`): commands for Hailo's compiler about quantization and compile effort.

The commands are those of the vendor's own scripts for Whisper. Layers are selected by wildcards, which
work for any graph. The vendor's scripts also list single convolutions by their numbers in the vendor's
graphs; these lists are used only with `sixteen-bit=published-layers`.

Source: hailocs/hailo-whisper@ebe7a85, conversion/optimization/{tiny,base}/{hailo8,hailo8l,hailo10h}/.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.errors import UsageError
from whisperport.targets.target_options import Option, check_ranges, clips_option

SixteenBit = Literal["adds", "published-layers", "nothing"]
LEARNING_RATE = "0.00001"  # written as in the vendor's scripts
TINY, BASE = 384, 512  # widths d of whisper-tiny and whisper-base


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """Options for compiling. Those of the model script default to the values in Hailo's scripts.

    Raises:
        UsageError: a number is out of its range.
    """

    optimization_level: Annotated[
        int,
        Option(
            "Effort of the compiler to keep accuracy in quantization; higher takes longer",
            low=0,
            high=4,
        ),
    ] = 2
    compression_level: Annotated[
        int,
        Option(
            "Level of 4-bit weight compression; higher stores more weights in 4 bits, 0 none",
            low=0,
            high=5,
        ),
    ] = 0
    finetune: Annotated[
        bool,
        Option("Fine-tune the quantized weights on the calibration set; takes hours without a GPU"),
    ] = True
    epochs: Annotated[
        int | None,
        Option(
            "Number of fine-tuning epochs; the default is the number in Hailo's published script, 4 to 6",
            low=1,
            high=10_000,
        ),
    ] = None
    sixteen_bit: Annotated[
        SixteenBit,
        Option(
            "Layers computed in 16 bits: element-wise additions, and of an encoder the linear layers and "
            "convolutions that 8 bits ruin, as the calibration set shows (adds); none (nothing); or also "
            "the layers named in Hailo's published scripts (published-layers), which the compiler does not "
            "find in files of `whisperport export`"
        ),
    ] = "adds"
    emulate: Annotated[
        int,
        clips_option("Hailo's emulator on the CPU"),
    ] = 6  # all clips of a default reference
    compiler_optimization_level: Annotated[
        Literal[0, 1, 2, "max"] | None,
        Option(
            "Effort to find a faster allocation on the chip; higher takes longer; the default is the "
            "compiler's own"
        ),
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """The numbers in one published script."""

    calibration: int  # number of calibration samples
    calibration_batch: int
    finetune: int  # number of samples in one fine-tuning epoch
    epochs: int
    finetune_batch: int | None  # None: the compiler's default
    layers: tuple[int, ...]  # numbers of the convolutions in 16 bits, in the vendor's graph
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
    """Write the model script of one program, as the text of an `.alls` file.

    Args:
        chip: `hailo8`, `hailo8l` or `hailo10h`.
        width: width d of the model.
        program: `encoder` or `uncached_decoder`.
        samples: number of available calibration samples; None: as many as are needed.

    Raises:
        UsageError: `sixteen_bit` is `published-layers`, and no list was published for this width.
    """
    options = options or ScriptOptions()
    recipe = _recipe(program, width)
    write = _encoder if program == "encoder" else _decoder
    return "\n".join(write(chip, width, recipe, options, samples)) + "\n"


def samples_needed(
    width: int, options: ScriptOptions | None = None, *, program: str = "encoder"
) -> int:
    """Return the number of calibration samples that the script needs; with fewer, the compiler fails."""
    recipe = _recipe(program, width)
    finetunes = (options or ScriptOptions()).finetune
    return max(recipe.calibration, recipe.finetune if finetunes else 0)


def _recipe(program: str, width: int) -> _Recipe:
    """Return the recipe for a model width: that of base from its width on, else that of tiny."""
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
    # As in the vendor's scripts, only tiny on Hailo-10H has a lower utilization.
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
            f"no list of 16-bit layers is published for a model of width {width}",
            why=f"the published lists are for models of width {TINY} and {BASE}",
            hint=f"use `--option {chip}.sixteen-bit=adds`, the default",
        )
    for layer in recipe.layers:
        yield f"quantization_param(conv{layer}, precision_mode=a16_w16)"


def _performance(options: ScriptOptions) -> str:
    level = options.compiler_optimization_level
    effort = "" if level is None else f"compiler_optimization_level={level}, "
    return f"performance_param({effort}optimize_for_batch=1)"


def _at_most(requested: int | None, available: int | None) -> int | None:
    return requested if requested is None or available is None else min(requested, available)
