"""Make checkpoints and speech to measure phrases and grammars: names that a model was not trained on.

    python names.py speech --out work/names
    python names.py commands --out work/names
    python names.py train --out work/names
    python names.py outliers --out work/names

The embedded model knows 20 names. Here it is trained further on 3,000 invented names, which share their
tokens: a name is a first piece, at times a middle one, and a last one, and each piece is one token. So it
writes other names of the same pieces as plausible tokens, at times wrong ones. ``speech`` writes the
training speech and the test speech, ``train`` and ``outliers`` the checkpoints ``ckpt/plain``,
``ckpt/last-tail`` and ``ckpt/early-tail`` as folders in transformers' format. Wrong names are counted by
``benchmarks/words/phrases.py``. Two cores of an AMD EPYC without AVX-512 need 7, 33 and 2 minutes.

``commands`` writes a grammar of 500 commands in words that the model knows, and speech inside and outside
of it for ``benchmarks/words/grammars.py``: near misses have one word in place of another of its kind.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
import wave
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from whisper.audio import N_SAMPLES, log_mel_spectrogram, pad_or_trim

import grammar
from assemble import WINDOW, Mix
from corpus import Corpus
from evaluate import NAMES as OPENAI_NAMES
from export_checkpoint import full_embedding, load_trained
from measure_outliers import planted_range
from mel_frames import log_power
from model import TrainableWhisper, sinusoids
from outlier_model import encode
from outlier_planting import SPECS
from outliers import PROMPT, Task, Window
from synthesize import HELD_OUT_RECORDED, Record, speak, trim
from synthesizers import SAMPLE_RATE, Speech
from train import PHASES as FIRST_PHASES
from train import Batch, Trainer, alignment_loss, text_loss
from vocabulary import EOT, N_TIMES, TIME_BEGIN, Vocabulary, tokenizer, word_tokens
from whisperport.model.checkpoint import load_checkpoint
from whisperport.speech.data import embedded_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from outlier_checkpoints import STORED, outlier_weights, planted_in

FIRSTS = (
    "Bal", "Bar", "Bel", "Ben", "Ber", "Bin", "Bol", "Bor", "Bran", "Bren", "Bur", "Cal", "Cam",
    "Car", "Cas", "Cor", "Cos", "Dal", "Dan", "Del", "Dor", "Fal", "Far", "Fen", "Fer", "Fil", "Fin",
    "Fol", "Gal", "Gar", "Gil", "Gol", "Gor", "Gran", "Gun", "Hal", "Ham", "Han", "Har", "Hel",
    "Hol", "Hor", "Jan", "Kal", "Kam", "Kar", "Kin", "Kon", "Kor", "Kur", "Lam", "Lan", "Lar", "Len",
    "Lim", "Lin", "Lor", "Mal", "Mar", "Mel", "Mer", "Mil", "Mol", "Mon", "Mor", "Nar", "Nil", "Nim",
    "Nor", "Pal", "Par", "Per", "Pol", "Por", "Ral", "Ram", "Ran", "Ris", "Rom", "Ros", "Sal", "Sam",
    "San", "Sel", "Sim", "Sol", "Sor", "Tal", "Tam", "Tan", "Tar", "Tel", "Til", "Tom", "Tor", "Tur",
    "Val", "Van", "Var", "Ven", "Ver", "Vin", "Vol", "Wal", "War", "Wel", "Wil", "Win", "Wol", "Zel",
)  # fmt: skip
MIDDLES = ("a", "e", "i", "o", "en", "er", "el", "an", "in", "am", "ov", "ar")
LASTS = (
    "ado", "ana", "ano", "ardo", "bach", "bar", "berg", "bert", "borg", "burg", "by", "dal", "del",
    "den", "der", "don", "dy", "ella", "elli", "ello", "ena", "enko", "etti", "feld", "field",
    "ford", "fred", "gar", "gard", "gren", "holm", "illo", "ina", "ini", "ino", "ken", "kin", "kon",
    "kov", "land", "ler", "ley", "lin", "ling", "man", "mar", "mark", "men", "mer", "mond", "mont",
    "more", "ner", "nik", "nov", "one", "otti", "ova", "rick", "rin", "ron", "sen", "ski", "son",
    "stad", "sten", "ston", "strom", "tan", "ten", "tin", "ton", "vik", "vy", "well", "wick", "wood",
    "worth",
)  # fmt: skip
N_TRAINING, N_TEST, N_UNSPOKEN = 3000, 200, 1000
FEWEST = 8  # training names that have a token of a test name, at the same kind of position
SPOKEN = 3  # training sentences of each training name, and test sentences of each test name
LONGEST = 8  # words of a sentence with a name
N_PLAIN = 3000  # training sentences of the grammar as it is
OTHERS, SIMILAR = 600, 180  # test sentences without a name, and with a training name
KNOWN = re.compile(rf"\b({'|'.join(grammar.SLOTS['name'])})\b")  # type: ignore[arg-type]
PART_SIZE = 200

# Family of voices -> share of the training sentences.
TRAIN_SHARES = {
    "espeak": 0.48, "flite:slt": 0.11, "flite:awb": 0.1, "flite:rms": 0.11, "flite:kal16": 0.05,
    "flite:kal": 0.03, "festival:kal": 0.07, "festival:slt_hts": 0.05,
}  # fmt: skip
TEST_FAMILIES = (
    "espeak", "flite:slt", "flite:awb", "flite:rms", "flite:kal16", "festival:kal",
    "festival:slt_hts", "espeak-held-out", HELD_OUT_RECORDED,
)  # fmt: skip

SINGLE, SEVERAL, FULL = FIRST_PHASES
# Minutes, and less augmentation and fewer prompts than in the first training.
PHASES = (
    replace(
        SINGLE,
        minutes=15.4,
        mix=Mix(strength=0.4, timestamps=0.6, prompts=0.02, no_speech=0.02),
        aligned=0.4,
        labelled=0.3,
        ramp=False,
    ),
    replace(FULL, minutes=6.6, mix=replace(FULL.mix, prompts=0.2, long_prompts=0.3, strength=0.6)),
    replace(SEVERAL, minutes=6, mix=replace(SEVERAL.mix, prompts=0.05, strength=0.4)),
    replace(
        FULL,
        name="full again",
        minutes=5,
        mix=replace(
            FULL.mix,
            max_utterances=4,
            prompts=0.1,
            long_prompts=0.3,
            cut=0.2,
            long_lead=0.1,
            no_speech=0.05,
            strength=0.4,
        ),
    ),
)
# (minutes, peak learning rate) of two rounds, each of a constant rate and then a linear decrease.
ROUNDS, WARM_UP_STEPS, HOLD = ((22.0, 1e-3), (11.0, 5e-4)), 30, 0.4
OUTLIERS = {"last-tail": 80, "early-tail": 120}  # -> training steps

# Names -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """Three lists that have no name in common. No speech has an unspoken name."""

    training: list[str]
    test: list[str]
    unspoken: list[str]


def _positions(name: str) -> list[tuple[str, int]]:
    """Return the tokens of a name, each with its kind of position: first, middle or last."""
    tokens = word_tokens(name)
    kinds = ["first", *["middle"] * (len(tokens) - 2), "last"]
    return list(zip(kinds, tokens, strict=True))


@cache
def make_names(seed: int = 0) -> Names:
    """Combine pieces to names whose tokens are these pieces, and divide the names into three lists."""
    rng, taken = random.Random(seed), set(grammar.vocabulary(20_000))

    short = [a + c for a in FIRSTS for c in LASTS if _is_cut((a, c))]
    long = [
        first + middle + last
        for first in FIRSTS
        for middle in MIDDLES
        for last in rng.sample(LASTS, 12)
        if _is_cut((first, middle, last))
    ]
    wanted = N_TRAINING + N_TEST + N_UNSPOKEN
    rng.shuffle(short)
    rng.shuffle(long)
    pool = list(dict.fromkeys(short[: round(wanted * 0.8)] + long[: round(wanted * 0.45)]))
    pool = [name for name in pool if name.lower() not in taken]
    rng.shuffle(pool)
    training, rest = pool[:N_TRAINING], pool[N_TRAINING:]
    counts = Counter(p for name in training for p in _positions(name))
    rest = [name for name in rest if all(counts[p] >= FEWEST for p in _positions(name))]
    if len(rest) < N_TEST + N_UNSPOKEN:
        raise ValueError(f"only {len(rest)} names are left for the test")
    return Names(training, rest[:N_TEST], rest[N_TEST : N_TEST + N_UNSPOKEN])


def _is_cut(pieces: Sequence[str]) -> bool:
    """Return whether the tokens of the joined pieces are these pieces."""
    tokens = word_tokens("".join(pieces))
    return [tokenizer().decode([token]).strip() for token in tokens] == list(pieces)


# Sentences and speech ----------------------------------------------------------------------------


def with_names(rng: random.Random, names: Sequence[str], *, held_out: bool, count: int = 0) -> str:
    """Return a short sentence of the grammar, with its names replaced by the first ones of ``names``.

    ``count``: how many names it has; 0: as many as it happens to have.
    """
    while True:
        text = grammar.sentence(rng)
        found = len(KNOWN.findall(text))
        if not 0 < found <= len(names) or count not in (0, found) or len(text.split()) > LONGEST:
            continue
        following = iter(names)
        text = KNOWN.sub(lambda _, following=following: next(following), text)
        if grammar.is_held_out(text) == held_out:
            return text


def training_texts(seed: int) -> list[str]:
    """Return the sentences for the training, in random order."""
    rng, texts = random.Random(seed), grammar.sentences(N_PLAIN, seed=seed, held_out=False)
    for _ in range(SPOKEN):
        names = list(make_names().training)
        rng.shuffle(names)
        while names:
            texts.append(with_names(rng, names[:2], held_out=False))
            names = names[len([n for n in names[:2] if re.search(rf"\b{n}\b", texts[-1])]) :]
    rng.shuffle(texts)
    return texts


def spoken(family: str, texts: list[str], rng: random.Random) -> Iterator[tuple[str, str, Speech]]:
    """Synthesize texts. Yields (text, voice, speech) of those whose words have timestamps."""
    for text, (voice, speech) in zip(texts, speak(family, texts, rng), strict=True):
        if len(speech.words) == len(text.split()):
            yield text, voice, trim(speech)


def write_training_speech(out: Path) -> None:
    """Write parts as synthesize.py does."""
    out.mkdir(parents=True, exist_ok=True)
    texts, at, utterances, total = training_texts(seed=1), 0, 0, 0
    for family, share in TRAIN_SHARES.items():
        end = min(len(texts), at + round(share * len(texts)))
        for part, start in enumerate(range(at, end, PART_SIZE)):
            rng, records, pieces, position = random.Random(start), [], [], 0
            for text, voice, speech in spoken(
                family, texts[start : min(end, start + PART_SIZE)], rng
            ):
                frames = log_power(speech.samples).astype(np.float16)
                record = Record(text, voice, position, len(frames), speech.words, speech.phones)
                records.append(asdict(record))
                pieces.append(frames)
                position += len(frames)
            stem = out / f"{family.replace(':', '-')}-{part:03d}"
            np.save(stem.with_suffix(".npy"), np.concatenate(pieces))
            stem.with_suffix(".json").write_text(json.dumps(records))
            utterances, total = utterances + len(records), total + position
        print(f"{family}: {utterances} sentences, {total / 360_000:.2f} hours so far", flush=True)
        at = end


def clip(speech: Speech, rng: random.Random) -> NDArray[np.float32]:
    """Return samples with silence before and behind them, at a fixed level."""
    lead, tail = (np.zeros(round(s * 50) * 320, np.float32) for s in (rng.uniform(0.1, 0.8), 0.4))
    return np.concatenate([lead, speech.samples * (0.4 / np.abs(speech.samples).max()), tail])


def write_clips(out: Path, sentences: list[tuple[str, str]]) -> None:
    """Write a WAV file for each (text, name), in all families of voices, and their list ``out``.json."""
    out.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    for number, family in enumerate(TEST_FAMILIES):
        rng, chosen = random.Random(700 + number), sentences[number :: len(TEST_FAMILIES)]
        named = dict(chosen)
        for text, voice, speech in spoken(family, [text for text, _ in chosen], rng):
            file = f"{len(entries):04d}.wav"
            with wave.open(str(out / file), "wb") as writer:
                writer.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
                writer.writeframes((clip(speech, rng) * 32767).astype("<i2").tobytes())
            entries.append({"file": file, "text": text, "name": named[text], "voice": voice})
    out.with_suffix(".json").write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{out}: {len(entries)} of {len(sentences)} clips", flush=True)


def write_test(out: Path) -> None:
    """Write the test clips and lists of names."""
    names, rng = make_names(), random.Random(5)
    (out / "names").mkdir(parents=True, exist_ok=True)
    (out / "names.txt").write_text("\n".join(names.test) + "\n")
    (out / "unspoken.txt").write_text("\n".join(names.unspoken) + "\n")
    # The sentences of a name are N_TEST apart, which is no multiple of the number of families.
    repeated = names.test * SPOKEN
    found = [(with_names(rng, [name], held_out=True, count=1), name) for name in repeated]
    write_clips(out / "names", found)
    plain = [(text, "") for text in grammar.sentences(OTHERS, seed=6, held_out=True)]
    known = rng.sample(names.training, SIMILAR)
    found = [(with_names(rng, [name], held_out=True, count=1), name) for name in known]
    write_clips(out / "others", [*plain, *found])


# Commands ----------------------------------------------------------------------------------------

COMMANDS = (
    "Turn {state} the {room} {light}.",
    "Set the {room} {light} to {level} percent.",
    "Make the {room} {light} {color}.",
    "{verb} the {room} {opening}.",
    "Turn {state} the {machine} in the {room}.",
    "Set a timer for {number} {unit}.",
    "Read the {sensor} of the {part}.",
    "Set pin {number} to {small}.",
    "Add {food} and {food} to the shopping list.",
    "Play {music} in the {room}.",
    "Call {name}.",
    "Drive {number} {distance} {way}.",
    "Set the {part} speed to {level} percent.",
)
COMMAND_SLOTS: dict[str, tuple[str, ...]] = {
    "state": ("on", "off"),
    "room": ("kitchen", "bedroom", "living room", "garage", "office"),
    "light": ("light", "lamp"),
    "level": ("five", "ten", "fifteen", "twenty", "thirty", "forty", "fifty", "seventy-five", "eighty",
              "ninety"),
    "color": ("red", "green", "blue", "white"),
    "verb": ("Open", "Close"),
    "opening": ("door", "window", "blinds"),
    "machine": ("heater", "fan", "radio", "television", "oven"),
    "number": ("two", "three", "five", "seven", "ten", "fifteen", "twenty", "thirty", "forty-five",
               "sixty"),
    "unit": ("seconds", "minutes", "hours"),
    "sensor": ("temperature", "pressure", "voltage", "speed"),
    "part": ("motor", "battery", "engine", "pump", "valve"),
    "small": ("one", "two", "three", "four"),
    "food": ("milk", "bread", "coffee", "sugar", "butter", "rice", "eggs"),
    "music": ("jazz", "the news", "rock music", "some music"),
    "name": ("Anna", "Peter", "David", "Sarah", "Oscar", "Maria", "Thomas", "Julia", "Emma", "Laura",
             "Martin"),
    "distance": ("meters", "kilometers"),
    "way": ("forward", "backward"),
}  # fmt: skip
CARDINALS = tuple(grammar.cardinal(number) for number in range(1, 100))
# What else the model may write there.
OTHER_WORDS: dict[str, Sequence[str]] = {
    **{slot: grammar.SLOTS[slot] for slot in ("room", "color", "machine", "opening", "unit")},  # type: ignore[misc]
    **{slot: grammar.SLOTS[slot] for slot in ("sensor", "part", "food", "music", "name")},  # type: ignore[misc]
    **dict.fromkeys(("level", "number", "small"), CARDINALS),
    "verb": ("Lock",),
    "distance": ("miles",),
}
N_INSIDE, N_OUTSIDE = 450, 225  # clips of commands, and of each kind of other sentences


def command_grammar() -> str:
    """Return the grammar of the commands in GBNF."""
    sentences = (re.sub(r"\{(\w+)\}", r'" \1 "', f'"{text}"') for text in COMMANDS)
    lines = ["root ::= " + "\n  | ".join(text.replace('"" ', "") for text in sentences)]
    for slot, words in COMMAND_SLOTS.items():
        lines.append(f"{slot} ::= " + " | ".join(f'"{word}"' for word in words))
    return "\n".join(lines) + "\n"


def filled(template: str, chosen: Sequence[str]) -> str:
    """Return a template with these texts in its slots, in order."""
    following = iter(chosen)
    return re.sub(r"\{\w+\}", lambda _: next(following), template)


def all_commands() -> list[str]:
    """Return the 500 commands."""
    return [
        filled(text, chosen)
        for text in COMMANDS
        for chosen in product(*(COMMAND_SLOTS[slot] for slot in re.findall(r"\w+(?=\})", text)))
    ]


def near_miss(rng: random.Random) -> str:
    """Return a command with a word that the grammar does not have there."""
    while True:
        text = rng.choice(COMMANDS)
        slots = re.findall(r"\w+(?=\})", text)
        chosen = [rng.choice(COMMAND_SLOTS[slot]) for slot in slots]
        at = rng.randrange(len(slots))
        others = set(OTHER_WORDS.get(slots[at], ())) - set(COMMAND_SLOTS[slots[at]])
        if others:
            chosen[at] = rng.choice(sorted(others))
            return filled(text, chosen)


def write_commands(out: Path) -> None:
    """Write the grammar, and clips inside and outside of it."""
    commands, rng = all_commands(), random.Random(11)
    out.mkdir(parents=True, exist_ok=True)
    (out / "commands.gbnf").write_text(command_grammar())
    (out / "commands.txt").write_text("\n".join(commands) + "\n")
    near: dict[str, None] = {}
    while len(near) < N_OUTSIDE:
        near.setdefault(near_miss(rng))
    other = [
        text
        for text in grammar.sentences(2 * N_OUTSIDE, seed=77, held_out=True)
        if text not in commands and len(text.split()) <= LONGEST
    ][:N_OUTSIDE]
    for kind, texts in ("inside", rng.sample(commands, N_INSIDE)), ("near", near), ("other", other):
        write_clips(out / kind, [(text, "") for text in texts])


# Training ----------------------------------------------------------------------------------------


def embedded_weights() -> dict[str, Tensor]:
    """Return the embedded model's weights in float32 under transformers' names."""
    with tempfile.TemporaryDirectory() as folder:
        embedded_model.unpack_model(Path(folder))
        weights = load_file(Path(folder, "model.safetensors"))
    return {name.removeprefix("model."): value.float() for name, value in weights.items()}


class NamesTrainer(Trainer):
    """Trains the embedded model further, in float32."""

    def __init__(self, data: list[Path], run: Path, scale: float) -> None:
        phases = tuple(replace(phase, minutes=phase.minutes * scale) for phase in PHASES)
        self.embedded, self.scale = embedded_weights(), scale
        super().__init__(data, run, phases, seed=0)
        if self.step == 0:
            self._start()

    def _data(self, folders: list[Path]) -> tuple[Corpus, Vocabulary]:
        """Load the corpus; the vocabulary has the embedded model's tokens too."""
        corpus = Corpus(*folders)
        tokens = {*self._known(), *corpus.vocabulary().tokens}
        vocabulary = Vocabulary(tuple(sorted(tokens)))
        vocabulary.save(self.run / "vocabulary.json")
        (self.run / "phones.json").write_text(json.dumps(corpus.phone_labels))
        return corpus, vocabulary

    def _known(self) -> list[int]:
        """Return the tokens that have a row of their own in the embedded model."""
        rows = self.embedded["decoder.embed_tokens.weight"][:TIME_BEGIN]
        found, counts = rows.unique(dim=0, return_counts=True)
        self.shared = found[counts.argmax()]
        return (rows != self.shared).any(1).nonzero().flatten().tolist()

    @torch.no_grad()
    def _start(self) -> None:
        """Copy the embedded weights. New tokens start near the mean of the known names."""
        rows, embedding = self.embedded["decoder.embed_tokens.weight"], self.model.embedding
        own = self.model.state_dict()
        for name, value in self.embedded.items():
            if name in own:
                own[name].copy_(value)
        known = set(self._known())
        names = [word_tokens(name)[0] for name in grammar.SLOTS["name"]]  # type: ignore[union-attr]
        mean, spread = rows[names].mean(0), rows[names].std(0).mean()
        for i, token in enumerate(self.vocabulary.tokens):
            new = mean + 0.3 * spread * torch.randn_like(mean)
            embedding.rows[i] = rows[token] if token in known else new
        embedding.other.copy_(self.shared)
        positions = sinusoids(N_TIMES, self.dims.width)
        design = torch.cat([positions, torch.ones(N_TIMES, 1)], 1).double()
        solved = torch.linalg.lstsq(design, rows[TIME_BEGIN:].double(), driver="gelsd").solution
        embedding.time_map.copy_(solved[:-1])
        embedding.time_bias.copy_(solved[-1])
        error = (embedding.table()[self.vocabulary.first_time : -1] - rows[TIME_BEGIN:]).abs().max()
        print(f"{len(known)} known tokens, largest error of timestamps {error:.4f}", flush=True)

    def rate(self) -> float:
        minutes, (first, second) = self.elapsed / 60 / self.scale, ROUNDS
        late = minutes >= first[0]
        length, peak = second if late else first
        done = (minutes - late * first[0]) / length
        falling = min(1.0, (1.0 - done) / (1.0 - HOLD))
        return peak * min(1.0, (self.step + 1) / WARM_UP_STEPS) * max(falling, 0.01)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        audio, middle = self.model.encoder(batch.mel, batch.offsets, torch.float32)
        logits, scores = self.model.decode(batch.inputs, batch.text_offsets, audio)
        text, accuracy = text_loss(logits, batch.targets, self.vocabulary.first_time)
        return (
            text,
            alignment_loss(scores, batch.spans),
            self._label_loss(self.model.phone_head, middle, batch.phones),
            self._label_loss(self.model.word_head, audio, batch.words),
            accuracy,
        )

    def _label_loss(self, head: torch.nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        """Return train.py's loss of frame labels, in float32."""
        kept = (labels > 0) | (torch.rand(labels.shape) < 0.1)
        return F.cross_entropy(head(x[kept]), labels[kept])

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Return AdamW for all parameters: Muon computes in bfloat16, which not every CPU has."""
        decayed = [p for n, p in self.model.named_parameters() if p.ndim > 1 and "embed" not in n]
        free = [p for n, p in self.model.named_parameters() if p.ndim == 1 or "embed" in n]
        groups = [{"params": decayed, "weight_decay": 0.02}, {"params": free, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=ROUNDS[0][1], betas=(0.9, 0.98), fused=True)]


def trained_weights(model: TrainableWhisper, vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Return a run's weights in float32 under transformers' names, without ``model.``."""
    kept = {
        name: value
        for name, value in model.state_dict().items()
        if name.startswith(("encoder.", "decoder."))
    }
    kept["encoder.embed_positions.weight"] = sinusoids(WINDOW // 2, model.dims.width)
    kept["decoder.embed_tokens.weight"] = full_embedding(model, vocabulary)
    return kept


def write_folder(weights: dict[str, Tensor], folder: Path) -> None:
    """Write a checkpoint in transformers' format; ``weights`` have its names without ``model.``."""
    folder.mkdir(parents=True, exist_ok=True)
    embedded_model.unpack_model(folder)
    named = {f"model.{name}": value.float().contiguous() for name, value in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


def train(out: Path, scale: float) -> None:
    """Train, or continue a training, and write ``ckpt/plain``."""
    trainer = NamesTrainer([out / "train"], out / "run", scale)
    n, rows = len(trainer.corpus.utterances), len(trainer.vocabulary.tokens)
    print(f"{n} utterances, {rows} tokens, from step {trainer.step}", flush=True)
    trainer.train()
    write_folder(trained_weights(*load_trained(out / "run")), out / "ckpt" / "plain")


# Outlier checkpoints -----------------------------------------------------------------------------


def name_windows(count: int, seed: int) -> list[Window]:
    """Return windows of one training sentence each; every third has timestamps."""
    rng, made, families = random.Random(seed), [], [*TRAIN_SHARES]
    texts = random.Random(seed).sample(training_texts(seed=1), count)
    for number, family in enumerate(families):
        for text, _, speech in spoken(family, texts[number :: len(families)], rng):
            samples = clip(speech, rng)
            first = round(float(np.flatnonzero(samples)[0]) / SAMPLE_RATE * 50)
            last = round(float(np.flatnonzero(samples)[-1]) / SAMPLE_RATE * 50)
            tokens = [*PROMPT, *tokenizer().encode(f" {text.replace(':', ',')}"), EOT]
            if len(made) % 3 == 0:
                tokens = [*tokens[:3], TIME_BEGIN + first, *tokens[4:-1], TIME_BEGIN + last, EOT]
            mel = log_mel_spectrogram(pad_or_trim(samples, N_SAMPLES)).half()
            made.append(Window(mel, tokens, text))
    rng.shuffle(made)
    return made


class NamesTask(Task):
    """The training of an outlier checkpoint to the names model's function.

    It starts from the stored outlier checkpoint plus what the names changed. Its unit is planted again:
    the former one was fitted to another residual.
    """

    def __init__(self, name: str, names: dict[str, Tensor], data: list[Window]) -> None:
        self.spec, self.data, self.base = SPECS[name], data, names
        embedded = load_checkpoint("default").weights
        outlier, planted = outlier_weights(STORED / f"{name}.xz"), planted_in(STORED / f"{name}.xz")
        self.w = {k: outlier[k].float() - embedded[k].float() + v for k, v in names.items()}
        mlp = f"{planted.name}.mlp"
        self.w[f"{mlp}.0.weight"][planted.unit] = names[f"{mlp}.0.weight"][planted.unit]
        self.w[f"{mlp}.0.bias"][planted.unit] = names[f"{mlp}.0.bias"][planted.unit]
        self.w[f"{mlp}.2.weight"][:, planted.unit] = names[f"{mlp}.2.weight"][:, planted.unit]
        self.inputs, self.features = self._cache()
        self.unit = self._plant()


def make_outliers(out: Path, sentences: int) -> None:
    """Write ``ckpt/last-tail`` and ``ckpt/early-tail``, and print how massive their outliers are."""
    plain = out / "ckpt" / "plain"
    data, held_out = name_windows(sentences, seed=11), name_windows(16, seed=12)
    names = {k: v.float() for k, v in load_checkpoint(plain).weights.items()}
    for name, steps in OUTLIERS.items():
        torch.manual_seed(0)
        task = NamesTask(name, {k: v.clone() for k, v in names.items()}, data)
        task.train(steps)
        weights = {}
        for exported in load_file(plain / "model.safetensors"):
            openai = exported
            for theirs, ours in OPENAI_NAMES:
                openai = openai.replace(theirs, ours)
            weights[exported.removeprefix("model.")] = task.w[openai]
        write_folder(weights, out / "ckpt" / name)
        spec = task.spec
        with torch.no_grad():
            features = encode(torch.stack([x.mel for x in held_out[:8]]).float(), task.w)
        massive = planted_range(task.w, spec.side, spec.block, spec.channel, held_out, features)
        (out / "ckpt" / f"{name}.json").write_text(json.dumps(massive) + "\n")
        print(name, massive, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("speech", "test-speech", "commands", "train", "outliers"))
    parser.add_argument("--out", type=Path, required=True, help="folder of all that is written")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the training's minutes")
    parser.add_argument("--sentences", type=int, default=60, help="for the outlier checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.time()
    if args.step == "speech":
        write_training_speech(args.out / "train")
    if args.step in ("speech", "test-speech"):
        write_test(args.out / "test")
    if args.step == "commands":
        write_commands(args.out / "commands")
    if args.step == "train":
        train(args.out, args.scale)
    if args.step == "outliers":
        make_outliers(args.out, args.sentences)
    print(f"{args.step}: {(time.time() - begun) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
