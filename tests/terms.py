"""The words that this project does not use, why, and what to write instead.

    python tests/terms.py [PATH ...]

lists where one of them occurs in the documentation, or in a string, a docstring or a comment of the
package. Names in code are not read here. `tests/test_terms.py` runs the same check.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Term:
    """A word or phrase that readers misunderstand, and the field's own."""

    pattern: str
    instead: str


TERMS = (
    Term(r"mend(s|ed|ing)?", "fix, fixed; suggested rewrite"),
    Term(r"proofs?|prove[nsd]?|proving", "verify, verified, numerically checked"),
    Term(r"refus(e|es|ed|ing|als?)", "reject, not supported, does not accept"),
    Term(r"(is|are|was|were) not taken|not taken by", "not supported, not delegated"),
    Term(r"takes? (no operator|an operator|operators|rank|it not)", "supports"),
    Term(r"stays? (outside|off the)|left (alone|out)|stays off", "not delegated; not changed"),
    Term(r"strangers?|strangers?['’]s?", "third-party"),
    Term(r"ours|theirs", "built-in; third-party"),
    Term(r"times of words|words['’]? times", "word timestamps"),
    Term(r"sounds?", "audio; speech where only speech is meant"),
    Term(r"said", "spoken, emitted, decoded, reported"),
    Term(r"heard|hears?|hearing", "decoded, transcribed; audio context"),
    Term(r"recordings?", "audio file, clip"),
    Term(r"(matrix )?products?", "matrix multiplication, matmul, matmul share"),
    Term(r"by the clock", "wall-clock time"),
    Term(r"(quiet|busy) (machine|one|moment)", "idle machine, loaded machine"),
    Term(r"stand-?ins?|stands? in for", "emulation on the CPU, emulated; placeholder"),
    Term(r"decode_full|full form|--full", "decoder without KV cache, uncached decoder"),
    Term(r"drawn|drawn paths", "sampled, samples"),
    Term(r"for ever", "permanently, without limit"),
    Term(r"all the same", "anyway, nevertheless"),
    Term(r"without a word", "silently"),
    Term(r"so to say", "nothing"),
    Term(r"at once", "concurrently, together, immediately"),
    Term(r"apart", "separate, separately"),
    Term(r"image_encoder|for_images", "nchw, channels-first 4-D"),
    Term(r"checked against contract", "checked against vendor documentation (not run)"),
    Term(r"thought about", "compile effort"),
    Term(r"by heart|in the end of|goes round", "plain words"),
)

# (path, text of the line): the word is right there, and why.
EXCEPTIONS: dict[tuple[str, str], str] = {}

_FORMS = [(re.compile(rf"(?<![\w`.-])({term.pattern})(?![\w`-])", re.I), term) for term in TERMS]
_CODE = re.compile(r"`[^`\n]*`|\]\([^)\s]*\)|https?://\S+")


def documents() -> list[Path]:
    """The documentation and the package's modules, without generated files of other projects."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    return sorted({*pages, *ROOT.glob("src/whisperport/**/*.py")})


def found(path: Path) -> Iterator[tuple[int, str, Term]]:
    """Line number, line and term of every use in a file."""
    relative = path.relative_to(ROOT).as_posix()
    for number, line in prose(path):
        if (relative, line.strip()) in EXCEPTIONS:
            continue
        for form, term in _FORMS:
            if form.search(_CODE.sub(" ", line)):
                yield number, line.strip(), term


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that people read: of a page without its code blocks, of code its strings and comments."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                for i, line in enumerate(token.string.splitlines()):
                    yield token.start[0] + i, line
        return
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, line


def main() -> int:
    asked = [Path(name).resolve() for name in sys.argv[1:]]
    count = 0
    for path in documents():
        if asked and not any(path.is_relative_to(given) for given in asked):
            continue
        for number, line, term in found(path):
            count += 1
            print(f"{path.relative_to(ROOT)}:{number}: {term.instead}\n    {line[:110]}")
    print(f"{count} found")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
