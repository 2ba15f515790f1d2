"""What ExecuTorch's runner of speech models demands of a .pte file and its tokenizer.

Source: pytorch/executorch@cff6f4dd, extension/asr/runner/seq2seq_runner.cpp,
extension/llm/runner/llm_runner_helper.cpp.
"""

from collections.abc import Iterator

from whisperport.build.layouts.checkpoint_rules import checkpoint_rules
from whisperport.build.layouts.executorch_runner.folder import DECODE, ENCODE, END, SETTINGS
from whisperport.build.layouts.pte_rules import AUDIO, POSITION, TOKEN, TwoMethods
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.rules import layout_rule

FLOATS = ("float32", "bfloat16")  # the app converts its features to what `encoder` reads
METHODS = TwoMethods(ENCODE, DECODE, ("float32", 3), (TOKEN, AUDIO, POSITION), FLOATS)


@layout_rule(
    "WP786",
    "A method of ExecuTorch's runner has other inputs than the app gives, or another output",
)
def signatures(files: Files) -> Iterator[tuple[str, str]]:
    """The app calls `encoder(features)` and `text_decoder(token, what encoder returned, position)`.

    What to do: `whisperport convert CHECKPOINT --for executorch-runner`.
    """
    yield from METHODS.wrong_signatures(files)


@layout_rule("WP787", "Neither the file nor the tokenizer says which token ends a text")
def end(files: Files) -> Iterator[tuple[str, str]]:
    """The app asks a method `get_eos_ids`, and else `tokenizer_config.json`. Without both, each text is as
    long as the app permits.

    What to do: `whisperport convert CHECKPOINT --for executorch-runner`.
    """
    stated = files.json(SETTINGS) if files.has(SETTINGS) else {}
    if END not in METHODS.methods(files) and "eos_token" not in stated:
        yield METHODS.file(files), f"there is no method {END}, and no eos_token in {SETTINGS}"


RULES = (signatures, end, METHODS.projections(), *checkpoint_rules(METHODS.settings))
READER = METHODS.reader()
