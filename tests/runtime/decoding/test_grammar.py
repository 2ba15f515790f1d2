"""Grammars: what GBNF says, which tokens may follow, and what the decoding makes of it."""

import itertools
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whisperport
from whisperport.errors import UsageError
from whisperport.program.generation import Generation
from whisperport.runtime import DecodeOptions, Decoder
from whisperport.runtime.decoding.decode import decoding
from whisperport.runtime.decoding.gbnf import checked_rules, read_grammar
from whisperport.runtime.decoding.grammar import Grammar, Spellings, compiled_grammar
from whisperport.runtime.decoding.rules import Rules
from whisperport.runtime.decoding.search import IMPOSSIBLE, Candidate, Sentences
from whisperport.runtime.engine.scores import Scores
from whisperport.speech.text import Match
from whisperport.transcription import Transcriber
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle

CLIPS = {clip.path.name[:2]: clip for clip in shipped_audio()}
BYTES = Spellings({i: bytes([i]) for i in range(256)})
COMMANDS = r"""
# What the shipped clips say, and what they do not.
root   ::= switch | timer | level
switch ::= "Turn " ("on" | "off") " the " ("heater" | "fan") (" in the " room)? end
timer  ::= "Set a timer for " number " " ("minutes" | "hours") end
level  ::= "Set the temperature to " number " degrees" end
room   ::= "kitchen" | "office"
number ::= digit | ("twenty" | "seventy") ("-" digit)?
digit  ::= "one" | "six" | "eight"
end    ::= ", please"? "."
"""
PATTERN = re.compile(
    r"(Turn (on|off) the (heater|fan)( in the (kitchen|office))?"
    r"|(Set a timer for|Set the temperature to) ((twenty|seventy)(-(one|six|eight))?|one|six|eight) "
    r"(minutes|hours|degrees))(, please)?\."
)


def may_end(text: str, sentence: str) -> bool:
    """Whether a sentence is one of a grammar."""
    return Grammar(checked_rules(text), BYTES).after(list(sentence.encode())).may_end


expressions = st.recursive(
    st.sampled_from([('"a"', "a"), ('"ab"', "ab"), ("[ab]", "[ab]"), ("[^a]", "[^a]"), ('""', "")]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: (f"{p[0][0]} {p[1][0]}", f"{p[0][1]}{p[1][1]}")),
        st.tuples(inner, inner).map(
            lambda p: (f"({p[0][0]} | {p[1][0]})", f"(?:{p[0][1]}|{p[1][1]})")
        ),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{,2}", "{1,3}"])).map(
            lambda p: (f"({p[0][0]}){p[1]}", f"(?:{p[0][1]}){p[1].replace('{,', '{0,')}")
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=30)
@given(expressions)
def test_a_grammar_has_the_sentences_of_the_same_regular_expression(pair: tuple[str, str]) -> None:
    text, pattern = pair
    try:
        grammar = Grammar(checked_rules(f"root ::= part\npart ::= {text}"), BYTES)
    except UsageError:  # it has no sentence but the empty one
        assert not any(re.fullmatch(pattern, letters) for letters in ("a", "aa", "b", "bb", "ab"))
        return

    for length in range(4):
        for letters in itertools.product("ab", repeat=length):
            sentence = "".join(letters)
            expected = re.fullmatch(pattern, sentence) is not None
            assert grammar.after(list(sentence.encode())).may_end == expected, sentence


@pytest.mark.parametrize(
    ("text", "sentence", "expected"),
    [
        ('root ::= n " " n\nn ::= "one" | "one hundred"', "one hundred one", True),
        ('root ::= w "x"\nw ::= [a-z]+', "abx", True),
        ('root ::= "(" root ")" | "a"+', "((aa))", True),
        ('root ::= "(" root ")" | "a"+', "((aa)", False),
        ('root ::= "a" root | "b"', "aaab", True),
        ('root ::=\n  "a" # first\n  | "b"\n\nother-rule ::= "c"', "b", True),
        (r'root ::= "\u00e9" [à-ü] [^a] [a-] [\]x]{2,3} .', "éé北-]x😀", True),
        (r'root ::= "say \"hi\"\x21\n"', 'say "hi"!\n', True),
        ('root ::= "a"{2,3}', "aaaa", False),
        ('root ::= "Turn"', " Turn", True),  # as Whisper begins a text
        ('root ::= " turn"', "turn", False),
        ('root ::= " turn"', "  turn", False),
    ],
)
def test_sentences_of_a_grammar(text: str, sentence: str, expected: bool) -> None:
    assert may_end(text, sentence) == expected


def test_the_tokens_that_may_follow_are_those_that_begin_a_rest_of_a_sentence() -> None:
    spellings = [
        b"a",
        b"b",
        b"ab",
        b"ba",
        b"aab",
        b"\xc3",
        b"\xa9",
        b"\xc3\xa9",
        b"b\xc3",
        b" a",
        b"x",
    ]
    tokens = dict(enumerate(spellings))
    sentences = ["aab", "abé", "b", "aé"]
    grammar = Grammar(checked_rules('root ::= "a" ("ab" | "bé" | "é") | "b"'), Spellings(tokens))
    texts = [each.encode() for sentence in sentences for each in (sentence, f" {sentence}")]
    waiting: list[tuple[int, ...]] = [()]

    while waiting:
        before = waiting.pop()
        so_far = b"".join(tokens[i] for i in before)
        follows = [i for i, own in tokens.items() if any(t.startswith(so_far + own) for t in texts)]
        following = grammar.after(before)
        assert following.tokens.tolist() == follows
        assert following.may_end == (so_far in texts)
        waiting += [(*before, i) for i in follows]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no rule `root`"),
        ('roo ::= "a"', "no rule `root`"),
        ('root ::= ""', "no sentence"),
        ('root ::= "a"\nroot ::= "b"', "line 2"),
        ('root ::= "a"\n  x', "line 2"),
        ('root ::= root "a" | "b"', "`root` of the grammar begins with itself"),
        ('root ::= a\na ::= "x"* b\nb ::= a | "y"', "begins with itself"),
        ('root ::= "a" root', "`root` of the grammar has no end"),
        ('root ::= "a" | b\nb ::= "x" b', "`b` of the grammar has no end"),
        ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "100 parentheses"),
        ('root ::= ("a"', "parenthesis"),
        ('root ::= "a")', "parenthesis"),
        ('root ::= "a', "no GBNF"),
        ("root ::= 'a'", "no GBNF"),
        ("Turn on the light.", "outside of a rule"),
        ("root ::= [z-a]", "empty"),
        (r'root ::= "\q"', "no character"),
        (r'root ::= "\ud800"', "no character"),
        ('root ::= * "a"', "repeats nothing"),
        ('root ::= "a"' + "*" * 5000, "repeats a repetition"),
        ('root ::= "a"{3,1}', "{3,1}"),
        ('root ::= "a"{}', "{}"),
        ('root ::= "a"{1000}{1000}', "repeats a repetition"),
        ("x" * 600_000, "600,000"),
    ],
)
def test_a_bad_grammar_is_named(text: str, part: str) -> None:
    with pytest.raises(UsageError) as raised:
        Grammar(checked_rules(text), BYTES)

    assert part in raised.value.what


@pytest.mark.parametrize(
    ("limit", "text", "part"),
    [
        ("MAX_NODES", 'root ::= (""{1000}){1000}', "1,000 parts"),
        ("MAX_PLACES", 'root ::= "a" root "a" | "a" root "b" | [a-z] root root | ""', "ambiguous"),
    ],
)
def test_a_grammar_that_would_need_too_much_memory_or_time_is_named(
    limit: str, text: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("whisperport.runtime.decoding.grammar"), limit, 1000)

    with pytest.raises(UsageError, match=part):
        may_end(text, "a" * 40)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"x\n" * 10**6, b"root ::= \n(" * 10**6])
def test_a_bad_file_is_named(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "commands.gbnf"
    file.write_bytes(data)

    with pytest.raises(UsageError, match=re.escape(str(file))):
        read_grammar(file)


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(default_bundle())


@pytest.mark.parametrize("options", [{}, {"beam_size": 3}, {"without_timestamps": True}])
def test_a_sentence_of_the_grammar_is_written_and_other_speech_is_no_match(
    transcriber: Transcriber, options: Any
) -> None:
    inside = transcriber.transcribe(CLIPS["05"].path, grammar=COMMANDS, **options)
    outside = transcriber.transcribe(CLIPS["09"].path, grammar=COMMANDS, **options)
    plain = transcriber.transcribe(CLIPS["05"].path, **options)

    assert inside.text == plain.text == CLIPS["05"].text
    assert inside.segments[0].match == Match(True, 0.0)
    assert inside.segments[0].logprobs == pytest.approx(plain.segments[0].logprobs, abs=1e-4)
    (segment,) = outside.segments
    assert (outside.text, segment.text, segment.tokens) == ("", "", ())
    assert segment.match is not None
    assert not segment.match.matched
    assert 3 < segment.match.score < 500
    assert plain.segments[0].match is None


def test_each_part_of_the_audio_has_its_own_verdict_and_the_times_of_what_was_said(
    transcriber: Transcriber,
) -> None:
    clip = CLIPS["18"]  # three commands, of which the last is in the grammar
    plain = transcriber.transcribe(clip.path, word_timestamps=True)
    transcript = transcriber.transcribe(clip.path, grammar=COMMANDS, word_timestamps=True)

    assert transcript.text == "Set the temperature to six degrees, please."
    assert [segment.match and segment.match.matched for segment in transcript.segments] == [
        *[False, False],
        True,
    ]
    for segment, other in zip(transcript.segments, plain.segments, strict=True):
        assert (segment.start, segment.end) == pytest.approx((other.start, other.end), abs=0.1)
        assert bool(segment.words) == (segment.match is not None and segment.match.matched)


def test_without_a_threshold_all_speech_becomes_a_sentence_of_the_grammar(
    transcriber: Transcriber,
) -> None:
    transcript = transcriber.transcribe(
        CLIPS["18"].path, grammar=COMMANDS, grammar_threshold=None, max_tokens=40
    )

    texts = [segment.text.strip() for segment in transcript.segments if segment.text]
    assert texts
    assert all(PATTERN.fullmatch(text) for text in texts)


@pytest.mark.parametrize(
    "grammar", [COMMANDS, 'root ::= "Turn on the heater" " in the office"{20} "."']
)
@pytest.mark.parametrize("beams", [None, 2])
def test_a_sentence_that_the_limit_of_tokens_cuts_off_is_no_match(
    transcriber: Transcriber, grammar: str, beams: int | None
) -> None:
    n_tokens = 4 if grammar == COMMANDS else 16  # that of the speech is complete

    transcript = transcriber.transcribe(
        CLIPS["05"].path, grammar=grammar, max_tokens=n_tokens, beam_size=beams
    )

    assert transcript.text == ""
    assert {segment.match for segment in transcript.segments} == {Match(False, IMPOSSIBLE)}


def test_between_sentences_no_language_begins_a_text_outside_of_the_grammar(
    transcriber: Transcriber,
) -> None:
    engine = transcriber.engine
    generation = engine.generation
    begin, (language, *_) = generation.timestamp_begin, generation.languages.values()
    grammar = compiled_grammar(transcriber.tokenizer, COMMANDS, frozenset())
    row = np.zeros(engine.dims.n_vocab, np.float32)
    row[language] = 20

    for grammar_of, expected in ((None, language), (grammar, generation.end_of_text)):
        scores = Scores(row.copy())
        Rules(generation, timestamps=True, suppressed=()).apply(
            scores, [begin, 708, begin + 1500], grammar_of
        )
        assert scores.logits.argmax() == expected


def test_sentences_are_chosen_by_exact_logits(transcriber: Transcriber) -> None:
    grammar = compiled_grammar(transcriber.tokenizer, COMMANDS, frozenset())
    decoder = Decoder(transcriber.engine)
    features = np.zeros((transcriber.engine.dims.n_audio_ctx, transcriber.engine.dims.n_text_state))
    options = DecodeOptions(language="en", grammar=grammar)
    steps = decoding(decoder, features.astype(np.float32), options)

    scored = decoder.step_all(next(steps))
    for _ in range(6):
        requested = steps.send(list(scored))
        assert all(step.exact for step in requested if step.scored)
        scored = decoder.step_all(requested)


def written(
    generation: Generation, grammar: Grammar, tokens: np.ndarray, rng: np.random.Generator
) -> tuple[Candidate, bool]:
    """What a model of random logits writes with a grammar, and whether it has timestamps."""
    timestamps, limit, width = rng.random() < 0.7, rng.integers(2, 30), rng.integers(1, 4)
    search = Sentences(generation, width, rng.choice([0, 3, 500]), timestamps=timestamps)
    rules = Rules(generation, timestamps=timestamps, suppressed=())
    candidates, scores = [Candidate()], [Scores(np.empty(0, np.float32))]
    while True:
        for i, candidate in enumerate(candidates):
            if not candidate.waits:
                row = np.full(generation.timestamp_begin + 1501, -30, np.float32)
                row[tokens] = rng.normal(0, 4, tokens.size)
                scores[i] = Scores(row)
                rules.apply(scores[i], candidate.tokens, None if candidate.is_free else grammar)
        candidates, sources, is_finished = search.advance(candidates, scores)
        scores = [scores[i] for i in sources]
        if is_finished or max(len(candidate.tokens) for candidate in candidates) >= limit:
            (best,) = search.finish(candidates)
            return best, timestamps


def test_whatever_the_model_writes_each_segment_is_a_sentence_or_refused(
    transcriber: Transcriber,
) -> None:
    tokenizer = transcriber.tokenizer
    generation = tokenizer.generation
    begin, end, refused = generation.timestamp_begin, generation.end_of_text, set[bool]()
    sentences = {"Go.", "Go on.", "Go on and on."}
    grammar = compiled_grammar(tokenizer, 'root ::= "Go" (" on" (" and on")?)? "."', frozenset())
    assert grammar is not None
    words = [token for text in (" Go on and.", "Go no") for token in tokenizer.encode(text)]
    tokens = np.unique([*words, end, *range(begin, begin + 40, 8), generation.languages["en"]])

    for seed in range(100):
        best, timestamps = written(generation, grammar, tokens, np.random.default_rng(seed))
        start = 0
        verdicts = {verdict.end: verdict for verdict in best.verdicts}
        for stop in range(1, len(best.tokens) + 1):
            part = best.tokens[start:stop]
            text = tokenizer.decode(part)
            if stop < len(best.tokens) and not (timestamps and part[-1] >= begin and text):
                continue
            start = stop
            assert not text or stop in verdicts, (seed, best)
            if text and verdicts[stop].matched:
                assert text.strip() in sentences, (seed, best)
            refused |= {not verdicts[stop].matched} if text else set()
    assert refused == {False, True}


def test_a_text_that_no_token_spells_is_named(transcriber: Transcriber) -> None:
    grammar = 'root ::= "Play AC/DC."'

    with pytest.raises(UsageError, match="AC/DC"):
        transcriber.transcribe(CLIPS["05"].path, grammar=grammar)
    transcript = transcriber.transcribe(CLIPS["05"].path, grammar=grammar, suppress_tokens=())
    assert transcript.segments[0].match is not None


def test_options_that_a_grammar_excludes_are_named() -> None:
    with pytest.raises(UsageError, match="temperature"):
        whisperport.TranscribeOptions(grammar=COMMANDS, temperatures=(0.0, 0.5))
    for grammar in (5, "on the light", None):
        with pytest.raises(UsageError, match="grammar"):
            whisperport.TranscribeOptions(grammar=grammar)  # type: ignore[arg-type]
