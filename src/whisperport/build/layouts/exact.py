"""Compare written files with the checkpoint without their app: graphs are run here, weights are read back.

If the app then returns something else, it decodes differently; the files are right.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whisperport.build.layouts.layout import Layout
from whisperport.build.layouts.reference import KnownLogits, spectrogram
from whisperport.program.checks import Check
from whisperport.speech.audio import FRAMES_PER_SECOND
from whisperport.verification.clips import Clip
from whisperport.verification.tolerances import LOWERED

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

LIMIT = LOWERED["float32"].max_relative
# Rounding to 8 bits changes the best token of a trained checkpoint in at most one position of ten; the
# words in the app decide. A graph that is wrong has hardly a position right.
LEAST_SAME = 0.5
HALF_STEP = 1 / 254  # of 8 bits, as part of a row's largest value
ROWS = 4096  # of a matrix, compared at a time
FLOAT16_SCALE = 1 + 254 * 2**-11  # by this factor, a scale that is rounded to float16 widens it


def check_graphs(
    layout: Layout,
    path: Path,
    precision: str,
    known: KnownLogits,
    clips: Sequence[Clip],
    window_s: float,
    *,
    exact: bool,
) -> Check:
    """Run the written graphs with the checkpoint's tokens, and compare the highest logits.

    Args:
        layout: it has `logits`.
        path: of its files.
        precision: of their weights.
        known: what the checkpoint computes.
        clips: one of them is `known.clip`.
        window_s: length of a window in seconds.
        exact: whether the written weights are those of the checkpoint.

    Raises:
        MissingPackageError: the package that runs them is not installed.
    """
    assert layout.logits is not None
    clip = next(clip for clip in clips if clip.name == known.clip)
    window = round(window_s * FRAMES_PER_SECOND)
    mel = spectrogram(clip.samples, known.n_mels, window, known.padding)[:, :window]
    logits = layout.logits(path, precision, mel, known.tokens, known.n_prompt, {})
    best, highest = np.array(known.best), np.array(known.highest)
    largest = float(np.abs(highest).max())
    at_best = np.take_along_axis(logits, best[:, None], axis=1)[:, 0]
    difference = float(np.abs(at_best - highest).max()) / largest
    # Two logits that are closer than the limit may change places. Rounded graphs have no such limit, and
    # in graphs that compute zeros every logit is the highest.
    is_highest = logits.argmax(axis=1) == best
    if exact:
        is_highest = logits.max(axis=1) - at_best <= 2 * LIMIT * largest
    n_same = int(np.count_nonzero(is_highest))
    reason = ""
    if n_same < (len(best) if exact else LEAST_SAME * len(best)):
        reason = (
            f"after {len(best) - n_same} of {len(best)} tokens another one has the highest logit"
        )
    elif exact and not difference <= LIMIT:
        reason = f"a logit differs by {difference:.1g} of the largest"
    return Check(
        level="arrays",
        program="written graphs",
        what=f"logits of {clip.name}",
        value={"n_same": n_same, "positions": len(best), "max_relative": difference},
        rule=f"the same token has the highest logit in eager torch; logits within {LIMIT:g} of it"
        if exact
        else f"after at least {LEAST_SAME:.0%} of the tokens, the same one has the highest logit in eager "
        "torch; the words decide",
        passed=not reason,
        reason=reason,
    )


def check_weights(layout: Layout, path: Path, checkpoint: "Checkpoint", *, exact: bool) -> Check:
    """Read the written weights, and compare each with the checkpoint's.

    Args:
        layout: it has `weights`.
        path: of its files.
        checkpoint: from which they were written.
        exact: whether every weight must be the same to the bit; else, within half a step of 8 bits.
    """
    assert layout.weights is not None
    read = layout.weights(path)
    wrong, largest = [], 0.0
    for name, tensor in checkpoint.weights.items():
        if name not in read or read[name].numel() != tensor.numel():
            wrong.append(name)
            continue
        rows = tensor.reshape(len(tensor) if tensor.dim() > 1 else 1, -1)
        written = read[name].reshape(rows.shape)
        for start in range(0, len(rows), ROWS):
            expected = rows[start : start + ROWS].float()
            error = (written[start : start + ROWS].float() - expected).abs().amax(1)
            limit = FLOAT16_SCALE * HALF_STEP * expected.abs().amax(1)
            largest = max(largest, float(error.max()))
            if not bool((error <= (0 if exact else limit)).all()):
                wrong.append(name)
                break
    return Check(
        level="arrays",
        program="written weights",
        what=f"{len(checkpoint.weights)} tensors",
        value={"tensors": len(checkpoint.weights), "max_abs": largest},
        rule="every weight is the checkpoint's, to the bit"
        if exact
        else "every weight is within half a step of 8 bits of the checkpoint's",
        passed=not wrong,
        reason=f"{len(wrong)} tensors differ, such as {wrong[0]}" if wrong else "",
    )
