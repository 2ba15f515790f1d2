"""The terms that this project does not use, and what to write instead.

    python tests/terms.py [PATH ...]

lists each place where one of them occurs: in a Markdown page, in a string, docstring or comment of the
package, or in the help of a verb. Names in code are not read. `test_terms.py` runs the same check.
"""

import ast
import io
import re
import sys
import tokenize
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Term:
    """A word or phrase that readers misunderstand.

    Attributes:
        pattern: regular expression for lower and upper case, with single spaces between words.
        instead: what to write.
        bad: text that the pattern finds.
        good: texts that no pattern finds, although they are similar.
        in_code: also look inside of code spans and code blocks, for names of options.
    """

    pattern: str
    instead: str
    bad: str
    good: tuple[str, ...] = ()
    in_code: bool = False


TERMS = (
    Term(r"mend(s|ed|ing)?", "fix; suggested rewrite", "the program is mended"),
    Term(
        r"proofs?|prove[nsd]?|proving",
        "verify, numerically checked",
        "this proves that the rewrite is right",
        ("improved by 3 %",),
    ),
    Term(
        r"refus(e|es|ed|ing|als?)",
        "reject, not supported, does not accept",
        "what the compiler refused",
    ),
    Term(
        r"(targets?|compilers?|partitioners?|accelerators?|chips?|NPUs?|delegates?|XNNPACK"
        r"|converters?)( that)?( cannot| can| does not| do not)? takes?"
        r"(?! (\d|about|up to|less|longer|more than|most|seconds|minutes|hours|half|part|turns|place|care))"
        r"|(operators?|nodes?|products?|axes|ranks?) (is|are|was|were) (not )?taken(?! away)"
        r"|(is|are|was|were) (not )?taken by (the|a|an|any|XNNPACK)"
        r"|takes? (no operator|an operator|operators|it not)",
        "supports, delegates, reads",
        "the compiler takes no gather",
        ("the compiler takes 3 minutes", "the lookup takes 2 ms"),
    ),
    Term(
        r"stay(s|ed)? (outside|off)|(left|leaves?) (alone|outside)"
        r"|(nodes?|operators?) outside(?! (of )?(any|a|the|all) delegates?)"
        r"|(nodes?|operators?) (is|are|that is|that are) left",
        "not delegated, undelegated; not changed",
        "two nodes stay outside",
        ("what was left out", "the default is left unchanged", "a node outside any delegate"),
    ),
    Term(r"strangers?(['’]s?)?", "third-party", "a stranger's program"),
    Term(r"ours|theirs", "built-in, of this project; third-party", "the naive one, and ours"),
    Term(
        r"times of (the )?words|words['’]? times|word times",
        "word timestamps",
        "the words' times",
        ("the word timestamps", "three times the words"),
    ),
    Term(
        r"sounds?(?! (card|device|server|driver))",
        "audio; speech where only speech is meant",
        "the sound of a window",
        ("no sound card was found",),
    ),
    Term(r"said", "spoken, emitted, decoded, reported", "what was said"),
    Term(r"heard|hears?|hearing", "decoded, transcribed; audio context", "what the decoder hears"),
    Term(
        r"(?<!while )recordings?(?! (the|a|an|its|evidence)\b)",
        "audio file, clip",
        "a recording of three hours",
        ("it recorded evidence", "after recording the evidence"),
    ),
    Term(
        r"(?<!dot )(?<!dot-)(?<!scalar )(?<!inner )(?<!outer )(?<!Kronecker )(matrix )?products?"
        r"(?! (name|page|brief))",
        "matrix multiplication, matmul; matmul share",
        "the product of the logits",
        ("the dot product of two vectors", "a scalar product", "scaled dot-product attention"),
    ),
    Term(r"by the clock|times? of (a|the) clock", "wall-clock time", "3 s by the clock"),
    Term(
        r"(quiet|busy|busier|quieter) (machines?|ones?|moments?|cores?|board|processor)"
        r"|(machine|processor|cores?) (is|are|was|were) (quiet|busy)",
        "idle, loaded",
        "on a busy machine",
        ("a quiet voice", "on the idle machine"),
    ),
    Term(
        r"stand-?ins?|(stand|stands|stood|standing) in for",
        "emulation on the CPU, emulated; placeholder",
        "a stand-in for the chip",
    ),
    Term(r"full form", "decoder without KV cache, uncached decoder", "the full form"),
    Term(
        r"drawn paths?|paths? (is|are|was|were) drawn|drawn tokens?",
        "sampled, samples",
        "the best of five drawn paths",
        ("seeds are drawn from the audio", "the graph that is drawn below"),
    ),
    Term(
        r"prompt rows|rows of (a|the) (prompt|decoder['’]s input)",
        "tokens; sequence length",
        "64 rows of a prompt",
        ("four rows of the cache", "rows of the embedding"),
    ),
    Term(r"(words|board|shell|proof) layer", "core, runtime, cli, verification", "the board layer"),
    Term(r"for ever", "permanently, without limit", "it waits for ever"),
    Term(
        r"all the same(?= *([.,;:!?)|]|$))",
        "anyway, nevertheless",
        "it is written all the same.",
        ("all the same shape", "they have all the same rank"),
    ),
    Term(r"without a word", "silently", "it is dropped without a word"),
    Term(r"so to (say|speak)", "nothing", "a file, so to say"),
    Term(r"at once", "concurrently, together, immediately", "two chunks at once"),
    Term(
        r"(?<! ms )(?<!\d s )(?<!… )(?<!samples )(?<!positions )(?<!frames )apart(?! from)",
        "separately, without; distinguish",
        "each is measured apart",
        ("apart from the weights", "timestamps are 20 ms apart"),
    ),
    Term(
        r"(kept|written|read|decoded|sent|is|are|was|were|again,|bundle|process) whole"
        r"(?= *([.,;:)]|$| (or|and|by|in|into|before|at)\b))",
        "complete, completely, in one piece",
        "it is written whole or not at all",
        ("the whole file is read", "3 is a whole number", "it was wholly new"),
    ),
    Term(
        r"checked against contract",
        "checked against vendor documentation (not run)",
        "checked against contract",
    ),
    Term(r"thought about", "compile effort", "how long it is thought about"),
    Term(r"as ever|as it were", "nothing", "the host picks tokens, as ever"),
    Term(
        r"(held|holds?|holding) (it |them |a bundle )?against",
        "compared with, checked with",
        "the reference that a bundle is held against",
        ("pressed against the wall",),
    ),
    Term(r"at hand", "available", "no chip was at hand", ("on the other hand",)),
    Term(r"warmer temperatures?", "higher temperature", "decoded at warmer temperatures"),
    Term(r"by heart|in the end of|goes round", "plain words", "the table, by heart"),
    Term(
        r"--words|--place|--full|decode_full",
        "--word-timestamps; --placement; --uncached-decoder",
        "`--words --format srt`",
        ("`--max-words-per-line 3`", "`--placement step=xnnpack`"),
        in_code=True,
    ),
    Term(
        r"`(Say|Heard|Around)`",
        "`Progress`, `ProgressCallback`, `RunnerWrapper`",
        "a `Say`",
        in_code=True,
    ),
    Term(
        r"image_encoder|for_images",
        "nchw, channels-first 4-D",
        "`image_encoder`",
        in_code=True,
    ),
)

# (file, text around the term) -> why the term is right there. An unused exception fails the tests.
EXCEPTIONS: dict[tuple[str, str], str] = {}

_WORD = r"(?<![\w`.-])(?:{})(?![\w`-])"
_OPTION = r"(?<![\w-])(?:{})(?![\w-])"


def _form(*terms: Term) -> re.Pattern[str]:
    """The form of any of these terms, which are all in code, or none."""
    form = _OPTION if terms[0].in_code else _WORD
    return re.compile(form.format("|".join(f"(?:{term.pattern})" for term in terms)), re.I)


_FORMS = [(_form(term), term) for term in TERMS]
_ANY_IN_CODE = _form(*(term for term in TERMS if term.in_code))
_ANY_IN_PROSE = _form(*(term for term in TERMS if not term.in_code))
_CODE = re.compile(r"`[^`\n]*`|\]\([^)\s]*\)|https?://\S+")
_FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Use:
    """One use of a term: the line where it begins, and the lines around it."""

    line: int
    text: str
    term: Term


def files() -> list[Path]:
    """The project's pages, and the modules of the package."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    return sorted({*pages, *ROOT.glob("src/whisperport/**/*.py")})


def helps() -> dict[str, str]:
    """Name of each verb -> its help, as the command line prints it; the command itself is `""`."""
    import click

    from whisperport.apps.cli.main import cli

    # click keeps the first `-h, --help` option of a command, so these contexts must have its settings.
    root = click.Context(cli, info_name="whisperport", **cli.context_settings)
    found = {"": cli.get_help(root)}
    for name, verb in cli.commands.items():
        found[name] = verb.get_help(click.Context(verb, parent=root, info_name=name))
    return found


def uses_in_file(path: Path) -> list[Use]:
    """Uses of all terms in a page, or in the strings and comments of a module."""
    text = path.read_text("utf-8")
    blocks = _python_text(text) if path.suffix == ".py" else [(1, text)]
    return [use for line, block in blocks for use in uses(block, line)]


def uses(text: str, first_line: int = 1) -> Iterator[Use]:
    """Uses of all terms in one text."""
    lines = [0]  # offset in `joined` of each line
    for line in text.splitlines():
        lines.append(lines[-1] + len(line.strip()) + 1)
    joined = " ".join(line.strip() for line in text.splitlines())
    prose = " ".join(line.strip() for line in _without_code(text).splitlines())
    if not (_ANY_IN_CODE.search(joined) or _ANY_IN_PROSE.search(prose)):
        return
    for form, term in _FORMS:
        for match in form.finditer(joined if term.in_code else prose):
            index = bisect_right(lines, match.start()) - 1
            around = joined[lines[index] : lines[bisect_left(lines, match.end())] - 1]
            yield Use(first_line + index, around, term)


def excuse(path: Path, use: Use) -> tuple[str, str] | None:
    """The exception that allows this use, if there is one."""
    name = path.relative_to(ROOT).as_posix()
    return next((key for key in EXCEPTIONS if key[0] == name and key[1] in use.text), None)


def _without_code(text: str) -> str:
    """`text` with dots in place of code and addresses, so that offsets stay the same."""
    for form in (_FENCE, _CODE):
        text = form.sub(lambda match: re.sub(r"\S", "·", match[0]), text)
    return text


def _python_text(source: str) -> Iterator[tuple[int, str]]:
    """First line and text of every string and every run of comment lines of a module."""
    texts: dict[int, tuple[int, str]] = {}  # id of a node -> its line and text
    inside = set()  # ids of constants that are part of an f-string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(value) for value in node.values}
            values = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
            texts[id(node)] = node.lineno, "".join(values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts[id(node)] = node.lineno, node.value
    yield from (text for key, text in texts.items() if key not in inside)
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comments and token.start[0] != comments[-1][0] + 1:
                yield comments[0][0], "\n".join(text for _, text in comments)
                comments = []
            comments.append((token.start[0], token.string.lstrip("# ")))
    if comments:
        yield comments[0][0], "\n".join(text for _, text in comments)


def main() -> int:
    asked = [Path(name).resolve() for name in sys.argv[1:]]
    found = [
        (path.relative_to(ROOT).as_posix(), use)
        for path in files()
        if not asked or any(path.is_relative_to(given) for given in asked)
        for use in uses_in_file(path)
        if excuse(path, use) is None
    ]
    if not asked:
        found += [
            (f"--help of {name}", use) for name, text in helps().items() for use in uses(text)
        ]
    for where, use in found:
        print(f"{where}:{use.line}: {use.term.instead}\n    {use.text[:150]}")
    print(f"{len(found)} found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
