"""Export a checkpoint, and search for what the user leaves open: the targets, or the encoder's precision.

    candidates ─► measure ─► export and verify ─► judge ─► bundle
                                  ▲                 │
                                  └──── rejected ◄──┘

`attempts.py` is this loop. `fastest.py` has the candidates and the judge of the target "auto", and
`precision_search.py` those of the precision "auto". A search that is called again uses what the last call
measured and verified.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.export.bundle_cache import BATCH, keep_fastest
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.exported import Exported
from whisperport.build.search.fastest import export_fastest
from whisperport.build.search.precision_search import export_in_fewest_bits
from whisperport.errors import UsageError
from whisperport.program.program_kind import ENCODER
from whisperport.program.window import WindowOptions

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.checkpoint import Checkpoint

AUTO = "auto"  # the name of no target and of no precision


def export_best(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    target: str,
    out: str | os.PathLike[str] | None,
    options: ExportOptions | None = None,
    *,
    max_increase: float = 0.005,
) -> Exported:
    """Export a checkpoint to the best verified bundle, where a target or a precision is "auto".

    With the target "auto", every installed target that runs here is measured in its precisions, and the
    fastest mix that is verified is written. Measure on an idle machine. The times are kept in the user's
    cache, and used again for a model of the same sizes on the same machine, with the same packages.

    With the precision "auto" of the encoder, its precisions on the target are exported, the least exact
    first, to the folder `OUT.attempts`. The first one whose words are within the limit, and that is smaller
    or faster than float32, is written. After an interruption, the same call continues.

    Args:
        checkpoint: a loaded checkpoint, or anything that `load_checkpoint` accepts.
        target: name of a target, or "auto".
        out: folder of the bundle. A bundle that already exists there is replaced when the new one is
            complete. None, with the target "auto" and a checkpoint that is given by name or path: the
            user's cache. Everything that takes a model by this name, such as `Transcriber`, then uses this
            bundle, on CPUs with the same instruction sets.
        options: see `ExportOptions`; `precisions` may be {"encoder": "auto"}. With the target "auto",
            programs in `options.placement` stay on the target that it names, and with `options.precision`,
            only this precision is measured: with "fp32", the bundle has the text of the checkpoint. A
            program in `options.precisions` is measured in this precision only. Default: None, all defaults.
        max_increase: with the precision "auto", largest allowed bound of the increase in WER over
            float32's, such as 0.005 for half a point.

    Raises:
        UsageError: both are "auto"; `out` is missing; an option does not exist; no target has the precision
            of a program; the target computes the encoder on this machine in float32 only; or the clips have
            too few words to show that an increase is within the limit.
        LoweringError: no target could be exported.
        VerificationError: no candidate is verified.
        CheckpointError, MissingPackageError, BundleError, WhisperportError: see `export`.
    """
    options = options or ExportOptions()
    in_fewest_bits = options.precisions.get(ENCODER) == AUTO
    if in_fewest_bits and target == AUTO:
        raise UsageError("the target and the encoder's precision cannot both be `auto`")
    if out is None:
        return _kept(checkpoint, target, options)
    out = Path(out)
    if target == AUTO:
        return export_fastest(checkpoint, out, options)
    if not in_fewest_bits:
        return export(checkpoint, target, out, options)
    fixed = {program: name for program, name in options.precisions.items() if program != ENCODER}
    options = replace(options, precisions=fixed)
    return export_in_fewest_bits(checkpoint, target, out, options, max_increase)


def _kept(
    checkpoint: "Checkpoint | str | os.PathLike[str]", target: str, options: ExportOptions
) -> Exported:
    """Export the fastest verified mix of a model to the user's cache; see `export_best`.

    Raises:
        UsageError: whoever gives the model's name would get another window, or what is not verified.
    """
    if (
        target != AUTO
        or not isinstance(checkpoint, str | os.PathLike)
        or options.allow_unverified
        or options.window != WindowOptions()
        or options.adapter
        or options.adapters_as_inputs
    ):
        raise UsageError(
            "there is no folder to write the bundle to",
            why="without one, the bundle is kept in the cache, for whatever is given the model's name. It "
            "must be the verified choice of the target `auto`, with the model's own window and no adapter",
            hint="give a folder with `--out`; or `--target auto`, without options for windows and without "
            "`--allow-unverified` and for adapters",
        )
    options = replace(options, batch=options.batch or BATCH)
    return keep_fastest(
        os.fspath(checkpoint), lambda loaded, folder: export_fastest(loaded, folder, options)
    )
