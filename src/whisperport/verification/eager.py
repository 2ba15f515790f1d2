"""Run a checkpoint in eager torch: to make the reference of a bundle, and as an engine.

The engine's programs are not traced: a checkpoint decodes without any lowered file.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.program.generation import Generation
from whisperport.program.low_rank import LowRank
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec, TensorSpec, UncachedForm
from whisperport.runtime import Engine, start_tokens
from whisperport.runtime.engine.adapters import all_layers
from whisperport.speech.audio import HOP_LENGTH, SAMPLE_RATE, log_mel
from whisperport.speech.audio.pcm import to_int16
from whisperport.speech.text import language_code
from whisperport.system.progress import Counted, begin_stage
from whisperport.verification.adapter_check import drawn_matrices
from whisperport.verification.clips import Clip
from whisperport.verification.loss import TORCH_PRECISIONS, loss_of
from whisperport.verification.reference import Reference, ReferenceClip, reference_mel

if TYPE_CHECKING:  # boards have no torch
    from torch import Tensor

    from whisperport.model.network.whisper import Whisper
    from whisperport.model.trace.program import Untraced

KEPT = 2  # clips whose features and logits are stored: they make up most of a reference's size
KEPT_LOGITS = 6  # rows of logits stored for each of these clips; a row is V float32 values, 0.2 MB

CrossKV = tuple[tuple["Tensor", "Tensor"], ...]  # the type that `Whisper.cross_kv` returns
Draft = Callable[[list[int]], "Tensor"]
"""From all tokens so far, with the prompt, to approximate logits (V,); see `greedy_tokens`."""


def run_eager(
    model: "Whisper",
    generation: Generation,
    clips: Sequence[Clip],
    *,
    max_tokens: int = 32,
    uncached: UncachedForm | None = None,
    precisions: Iterable[str] = (),
    lengths: Sequence[int] = (),
    low_rank: LowRank | None = None,
) -> Reference:
    """Greedy decoding of every clip; every token is the choice of the model without a cache.

    Samples are rounded to 16 bits first, so that a board that reads the stored clips gets equal samples.

    Args:
        uncached: the form of the decoder without KV cache, if it is exported.
        precisions: precisions that programs can have. What torch loses in them is measured on the clips
            whose features are stored, for their limits.
        lengths: encoder positions of shorter windows, whose features are stored too.
        low_rank: the adapters that the programs take; the first clip is run with a drawn one, too.

    Raises:
        UsageError: the checkpoint does not know a clip's language.
    """
    prompts = [_prompt(generation, clip) for clip in clips]
    max_tokens = min(max_tokens, model.dims.n_text_ctx - max(map(len, prompts), default=0))
    reference_clips: list[ReferenceClip] = []
    for index, (clip, prompt) in enumerate(zip(clips, prompts, strict=True)):
        begin_stage(Counted(f"running the model in torch on {clip.name}", index, len(clips)))
        keep = index < KEPT
        reference_clips.append(
            _run_clip(model, generation, clip, prompt, max_tokens, keep=keep, uncached=uncached)
        )
    reference_clips = [_with_lengths(model, clip, lengths) for clip in reference_clips]
    for precision in sorted({TORCH_PRECISIONS[p] for p in precisions if p in TORCH_PRECISIONS}):
        begin_stage(f"running the model in torch in {precision}")
        reference_clips = [_with_loss(model, clip, precision) for clip in reference_clips]
    adapted = None
    if low_rank:
        begin_stage(f"running the model in torch on {clips[0].name} with an adapter")
        with _with_drawn_adapter(model, low_rank):
            clip = replace(clips[0], name=f"{clips[0].name} with an adapter")
            adapted = _run_clip(
                model, generation, clip, prompts[0], max_tokens, keep=True, uncached=None
            )
    return Reference(tuple(reference_clips), max_tokens, adapted)


def _with_drawn_adapter(model: "Whisper", low_rank: LowRank) -> AbstractContextManager[None]:
    """Let the model compute with the adapter that its programs are checked with."""
    import torch

    from whisperport.model.network.low_rank import with_adapter

    drawn = drawn_matrices(model.dims, low_rank).layers
    matrices = {
        layer: (torch.from_numpy(a), torch.from_numpy(b))
        for layer in all_layers(model.dims, low_rank)
        for a, b in [drawn[layer.name]]
    }
    return with_adapter(model, matrices)


def _with_lengths(model: "Whisper", clip: ReferenceClip, lengths: Sequence[int]) -> ReferenceClip:
    """Return the clip with the features of its beginning; unchanged if its features are not stored."""
    import torch

    from whisperport.model.network.whisper import shortened

    if not clip.features.size:
        return clip
    mel = torch.from_numpy(reference_mel(model.dims, clip))[None]
    short = {n: shortened(model, n).encode(mel[..., : 2 * n])[0].numpy() for n in lengths}
    return replace(clip, short_features=short)


def _with_loss(model: "Whisper", clip: ReferenceClip, precision: str) -> ReferenceClip:
    """Return the clip with what torch loses in a precision; unchanged if its features are not stored."""
    import torch

    from whisperport.model.network.lower_precision import lower_precision

    if not clip.features.size:
        return clip
    dims = model.dims
    mel = torch.from_numpy(log_mel(clip.audio, dims.n_mels, n_frames=dims.n_frames))[None]
    with lower_precision(model, precision) as dtype:
        features = model.encode(mel.to(dtype))[0].float().numpy()
        cross_kv = model.cross_kv(torch.from_numpy(clip.features)[None].to(dtype))
        fed = _kept(list(clip.prompt), list(clip.tokens[:-1]))
        logits = model.logits(fed, cross_kv, first=len(clip.prompt) - 1).float().numpy()
    losses = {
        (precision, "features"): loss_of(features, clip.features, clip.frames),
        (precision, "logits"): loss_of(logits, clip.logits),
    }
    return replace(clip, losses={**clip.losses, **losses})


def _prompt(generation: Generation, clip: Clip) -> list[int]:
    language = language_code(clip.language, generation.languages)
    return start_tokens(generation, language, "transcribe")


def _run_clip(
    model: "Whisper",
    generation: Generation,
    clip: Clip,
    prompt: list[int],
    max_tokens: int,
    *,
    keep: bool,
    uncached: UncachedForm | None,
) -> ReferenceClip:
    import torch

    from whisperport.model.network.whisper import CachedDecoder

    dims = model.dims
    samples = to_int16(clip.samples)[: round(dims.window_s * SAMPLE_RATE)]
    mel = log_mel(samples.astype(np.float32) / 32768, dims.n_mels, n_frames=dims.n_frames)
    features = model.encode(torch.from_numpy(mel)[None])
    cross_kv = model.cross_kv(features)

    draft = CachedDecoder(model.decoder, cross_kv)
    tokens, margins = greedy_tokens(model, generation, prompt, cross_kv, max_tokens, draft)
    none = np.empty((0, dims.n_vocab), np.float32)
    uncached_logits = none
    if keep and uncached:
        unpadded = model.cross_kv(features, padded=False)
        uncached_logits = _logits(model, unpadded, prompt, tokens, uncached.sequence_length)
    return ReferenceClip(
        name=clip.name,
        text=clip.text,
        samples=samples,
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        margins=np.array(margins, np.float32),
        features=features[0].numpy() if keep else np.empty((0, dims.n_audio_state), np.float32),
        logits=_logits(model, cross_kv, prompt, tokens[:-1]) if keep else none,
        uncached_logits=uncached_logits,
        scores=_scores(model, generation, cross_kv, prompt, tokens[:-1], len(samples))
        if keep
        else np.empty((0, 0, 0), np.float32),
    )


def greedy_tokens(
    model: "Whisper",
    generation: Generation,
    prompt: list[int],
    cross_kv: CrossKV,
    max_tokens: int,
    draft: Draft,
) -> tuple[list[int], list[float]]:
    """The tokens that the model chooses without a cache, with the end of text if it is reached.

    The second result is each token's margin: its logit minus that of the next one that is not suppressed.

    `draft` only saves time. It guesses all following tokens. One pass without a cache over the prompt and
    the guesses then gives the model's own choice at each position. Choices are accepted up to and including
    the first that differs from its guess, because up to there every choice follows correct tokens only. The
    tokens after it are guessed again.
    """
    import torch

    tokens: list[int] = []
    margins: list[float] = []
    while _goes_on(generation, tokens, max_tokens):
        guessed = list(tokens)
        while _goes_on(generation, guessed, max_tokens):
            guess, _ = _choice(generation, draft(prompt + guessed), at_start=not guessed)
            guessed.append(guess)
        fed, n_right = torch.tensor(prompt + guessed[:-1]), len(tokens)
        rows = model.logits(fed, cross_kv, first=len(prompt) - 1 + n_right)
        for row, guess in zip(rows, guessed[n_right:], strict=True):
            token, margin = _choice(generation, row, at_start=not tokens)
            tokens.append(token)
            margins.append(margin)
            if tokens[-1] != guess:
                break
    return tokens, margins


def _goes_on(generation: Generation, tokens: list[int], max_tokens: int) -> bool:
    return len(tokens) < max_tokens and tokens[-1:] != [generation.end_of_text]


def _choice(generation: Generation, logits: "Tensor", *, at_start: bool) -> tuple[int, float]:
    """The most likely token that is not suppressed, and its logit minus the next one's."""
    allowed = logits.numpy().copy()
    allowed[list(generation.suppressed)] = -np.inf
    if at_start:
        allowed[list(generation.suppressed_at_start)] = -np.inf
    second, first = np.partition(allowed, -2)[-2:]
    return int(allowed.argmax()), float(first - second)


def _logits(
    model: "Whisper",
    cross_kv: CrossKV,
    prompt: list[int],
    tokens: list[int],
    rows: int | None = None,
) -> NDArray[np.float32]:
    """Logits (K, V) after the prompt and after each of the first tokens; K is at most `KEPT_LOGITS`.

    Args:
        rows: maximum number of tokens, with the prompt, that the decoder is given; None: no maximum.
    """
    fed = _kept(prompt, tokens)[:rows]
    return model.logits(fed, cross_kv, first=len(prompt) - 1).numpy()


def _kept(prompt: list[int], tokens: list[int]) -> "Tensor":
    """Return the prompt and the first tokens, after which outputs are stored: (S,) int64."""
    import torch

    return torch.tensor((prompt + tokens)[: len(prompt) + KEPT_LOGITS - 1])


def _scores(
    model: "Whisper",
    generation: Generation,
    cross_kv: CrossKV,
    prompt: list[int],
    tokens: list[int],
    n_samples: int,
) -> NDArray[np.float32]:
    """Scores (A, S, P) of the alignment heads, by layer, at the positions of the audio; at least one."""
    heads = sorted(generation.alignment_heads)
    if not heads:
        return np.empty((0, 0, 0), np.float32)
    positions = max(1, math.ceil(n_samples / (2 * HOP_LENGTH)))
    scores = model.cross_scores(_kept(prompt, tokens), cross_kv, heads)
    return np.ascontiguousarray(scores[:, :, :positions].numpy())


def eager_engine(model: "Whisper", generation: Generation) -> Engine:
    """Return an engine over the model in eager torch, with the programs of every bundle.

    Args:
        model: the model of a checkpoint.
        generation: its decoding settings. Without alignment heads, those of the last layer stand for them:
            the engine decodes, but its word timestamps mean nothing.
    """
    import torch

    from whisperport.model.trace.variants import untraced_programs
    from whisperport.model.trace.whisper import Parts

    dims = model.dims
    heads = generation.alignment_heads or ((dims.n_text_layer - 1, 0),)
    # The encoder costs more than all other programs: it is not run for the shape of its output.
    features = {"encoder": [torch.zeros(1, dims.n_audio_ctx, dims.n_audio_state)]}
    programs = untraced_programs(Parts(model, heads))
    runners = {p.name: EagerRunner(p, features.get(p.name)) for p in programs}
    embedding = model.decoder.token_embedding.weight.detach().numpy()
    positions = model.decoder.positional_embedding.detach().numpy()
    return Engine(dims, generation, runners, embedding, positions)


class EagerRunner(Runner):
    """Runs a program that is not traced, in eager torch.

    Args:
        program: what is run.
        results: tensors of the shapes of its outputs; None: it is run for them.
    """

    def __init__(self, program: "Untraced", results: "Sequence[Tensor] | None" = None) -> None:
        self._module = program.module.eval()
        self._groups = [len(x) if isinstance(x, list) else 0 for x in program.inputs]
        names = inspect.signature(program.module.forward).parameters
        inputs = [
            _spec(name, tensor)
            for parameter, argument in zip(names, program.inputs, strict=False)
            for name, tensor in _named(parameter, argument)
        ]
        results = results or self._call(program.inputs)
        specs = tuple(_spec(*output) for output in zip(program.outputs, results, strict=True))
        super().__init__(ProgramSpec(program.name, tuple(inputs), specs))

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        import torch

        tensors = iter([torch.from_numpy(array) for array in inputs])
        arguments = [
            [next(tensors) for _ in range(count)] if count else next(tensors)
            for count in self._groups
        ]
        return [tensor.numpy() for tensor in self._call(arguments)]

    def _call(self, arguments: Sequence[Any]) -> "list[Tensor]":
        import torch

        with torch.no_grad():
            return list(_flat(self._module(*arguments)))


def _named(parameter: str, argument: Any) -> "Iterator[tuple[str, Tensor]]":
    """Yield the tensors of an argument by name; the members of a list as `self_k_0`, `self_k_1`."""
    if isinstance(argument, list):
        yield from ((f"{parameter}_{i}", tensor) for i, tensor in enumerate(argument))
    else:
        yield parameter, argument


def _flat(outputs: Any) -> "Iterator[Tensor]":
    if isinstance(outputs, list | tuple):
        for output in outputs:
            yield from _flat(output)
    else:
        yield outputs


def _spec(name: str, tensor: "Tensor") -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
