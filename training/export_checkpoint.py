"""Export a training checkpoint as a folder in transformers' format.

    python export_checkpoint.py --run work/run --out work/model [--package FOLDER]

The factored embedding is expanded, and the weights become float16. The tokenizer is Whisper's
multilingual one, built from the ranks in openai-whisper. `--package` also stores the folder as the package
has it: large files compressed, the tokenizer without OpenAI's tokens.
"""

from __future__ import annotations

import argparse
import base64
import json
import lzma
import shutil
from pathlib import Path

import torch
import whisper
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor

from model import Dims, TrainableWhisper, sinusoids
from vocabulary import (
    EN,
    EOT,
    N_TIMES,
    N_VOCAB,
    NO_SPEECH,
    NO_TIMESTAMPS,
    SOT,
    SOT_PREV,
    TIME_BEGIN,
    TRANSCRIBE,
    Vocabulary,
)
from vocabulary import (
    tokenizer as whisper_tokenizer,
)

TRANSLATE, START_OF_LM = 50358, 50360


def load_trained(run: Path) -> tuple[TrainableWhisper, Vocabulary]:
    """Load the model and the vocabulary of a run's checkpoint."""
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    vocabulary = Vocabulary.load(run / "vocabulary.json")
    n_phones = len(json.loads((run / "phones.json").read_text()))
    heads = tuple((layer, head) for layer, head in state["dims"].pop("alignment_heads"))
    model = TrainableWhisper(Dims(**state["dims"], alignment_heads=heads), vocabulary, n_phones)
    model.load_state_dict(state["model"])
    return model, vocabulary


def full_embedding(model: TrainableWhisper, vocabulary: Vocabulary) -> Tensor:
    """Return the expanded embedding [51865, width]; tokens without their own row have the shared one."""
    table = model.embedding.table().detach()
    full = table[vocabulary.other].repeat(N_VOCAB, 1)
    full[list(vocabulary.tokens)] = table[: vocabulary.first_time]
    full[TIME_BEGIN:] = table[vocabulary.first_time : vocabulary.first_time + N_TIMES]
    return full


def weights(model: TrainableWhisper, vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Return the weights in float16 under transformers' names."""
    kept = {
        f"model.{name}": value
        for name, value in model.state_dict().items()
        if name.startswith(("encoder.", "decoder."))
    }
    kept["model.encoder.embed_positions.weight"] = sinusoids(
        model.dims.audio_positions, model.dims.width
    )
    kept["model.decoder.embed_tokens.weight"] = full_embedding(model, vocabulary)
    return {name: value.half().contiguous() for name, value in kept.items()}


def config(dims: Dims) -> WhisperConfig:
    """Return transformers' configuration of the architecture."""
    return WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        vocab_size=N_VOCAB,
        num_mel_bins=dims.mels,
        d_model=dims.width,
        encoder_layers=dims.encoder_layers,
        decoder_layers=dims.decoder_layers,
        encoder_attention_heads=dims.heads,
        decoder_attention_heads=dims.heads,
        encoder_ffn_dim=4 * dims.width,
        decoder_ffn_dim=4 * dims.width,
        max_source_positions=dims.audio_positions,
        max_target_positions=dims.text_positions,
        decoder_start_token_id=SOT,
        pad_token_id=EOT,
        bos_token_id=EOT,
        eos_token_id=EOT,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dtype="float16",
    )


def generation_config(dims: Dims) -> GenerationConfig:
    """Return the settings of openai/whisper-tiny for English only, with this model's alignment heads."""
    tokens = whisper_tokenizer()
    control = [SOT, TRANSLATE, TRANSCRIBE, START_OF_LM, SOT_PREV, NO_SPEECH]
    return GenerationConfig(
        alignment_heads=[list(pair) for pair in dims.alignment_heads],
        begin_suppress_tokens=[220, EOT],
        bos_token_id=EOT,
        decoder_start_token_id=SOT,
        eos_token_id=EOT,
        is_multilingual=True,
        lang_to_id={"<|en|>": EN},
        max_initial_timestamp_index=50,
        max_length=dims.text_positions,
        no_timestamps_token_id=NO_TIMESTAMPS,
        pad_token_id=EOT,
        prev_sot_token_id=SOT_PREV,
        return_timestamps=False,
        suppress_tokens=[*tokens.non_speech_tokens, *control],
        task_to_id={"transcribe": TRANSCRIBE},
    )


def _printable_bytes() -> dict[int, str]:
    """Return GPT-2's table: byte -> printable character."""
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


def _merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the last merge that makes ``token``: the two parts after all merges of lower rank."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        candidates = [
            (ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)
        ]
        rank, i = min(candidates)
        if rank >= ranks[token]:
            raise ValueError(f"no merges make {token!r}")
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def special_tokens() -> list[str]:
    """Return the texts of all tokens from id 50257 on, in the order of their ids."""
    encoding = whisper_tokenizer().encoding
    return [encoding.decode([token]) for token in range(EOT, N_VOCAB)]


def build_tokenizer() -> Tokenizer:
    """Build the multilingual byte-level BPE tokenizer with all 51865 tokens."""
    lines = (
        (Path(whisper.__file__).parent / "assets" / "multilingual.tiktoken")
        .read_text()
        .splitlines()
    )
    ranks = {base64.b64decode(text): int(rank) for text, rank in (line.split() for line in lines)}
    names = _printable_bytes()

    def name(token: bytes) -> str:
        return "".join(names[b] for b in token)

    longer = [token for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    pairs = [_merge_of(token, ranks) for token in longer]
    merges = [(name(left), name(right)) for left, right in pairs]
    vocabulary = {name(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    every = special_tokens()
    time = TIME_BEGIN - EOT
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in every[:time]]
    )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=False) for text in every[time:]]
    )
    start = [
        ("<|startoftranscript|>", SOT),
        ("<|notimestamps|>", NO_TIMESTAMPS),
        ("<|endoftext|>", EOT),
    ]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftranscript|> <|notimestamps|> $A <|endoftext|>", special_tokens=start
    )
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    build_tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    end = "<|endoftext|>"
    settings = {
        "tokenizer_class": "WhisperTokenizer",
        "additional_special_tokens": special_tokens()[1 : TIME_BEGIN - EOT],
        "add_prefix_space": False,
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "unk_token": end,
        "model_max_length": 1024,
        "errors": "replace",
        "return_attention_mask": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--package", type=Path, help="folder of the model in the package")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model, vocabulary = load_trained(args.run)
    save_file(weights(model, vocabulary), args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "model.safetensors").chmod(0o644)
    config(model.dims).save_pretrained(args.out)
    generation_config(model.dims).save_pretrained(args.out)
    WhisperFeatureExtractor().save_pretrained(args.out)
    write_tokenizer(args.out)
    if args.package is not None:
        store(args.out, args.package)


# Half of the bytes are the low bytes of a float16: lp and pb tell the compressor so, which saves 4 %.
FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}
    | {"dict_size": 2**25, "lc": 2, "lp": 1, "pb": 1}
]


def store(model: Path, out: Path) -> None:
    """Copy the small files of a model, and compress the large ones."""
    for file in sorted(model.iterdir()):
        if file.name == "tokenizer.json":
            compress(without_tokens(file.read_bytes()), out / f"{file.name}.xz")
        elif file.suffix == ".safetensors":
            compress(file.read_bytes(), out / f"{file.name}.xz")
        else:
            shutil.copyfile(file, out / file.name)


def without_tokens(tokenizer: bytes) -> bytes:
    """Remove the tokens and merges. `data/embedded_model.py` adds them from the package's ranks."""
    document = json.loads(tokenizer)
    document["model"] |= {"vocab": {}, "merges": []}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def compress(data: bytes, file: Path) -> None:
    """Compress with a SHA-256, by which a damaged file is recognized."""
    file.write_bytes(lzma.compress(data, lzma.FORMAT_XZ, lzma.CHECK_SHA256, filters=FILTERS))


if __name__ == "__main__":
    main()
