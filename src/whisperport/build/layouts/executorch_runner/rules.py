"""What ExecuTorch's runner of speech models demands of a .pte file and its tokenizer.

Source: pytorch/executorch@cff6f4dd, extension/asr/runner/seq2seq_runner.cpp,
extension/llm/runner/llm_runner_helper.cpp.
"""

from collections.abc import Iterator

from whisperport.build.layouts.checkpoint_rules import checkpoint_rules
from whisperport.build.layouts.executorch_runner.folder import DECODE, ENCODE, END, SETTINGS
from whisperport.build.layouts.pte_rules import TwoMethods, other_signature, shape_of
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.rules import layout_rule

METHODS = TwoMethods(ENCODE, DECODE)
FLOATS = ("float32", "bfloat16")  # the app converts its features to what `encoder` reads


@layout_rule(
    "WP786",
    "A method of ExecuTorch's runner has other inputs than the app gives, or another output",
)
def signatures(files: Files) -> Iterator[tuple[str, str]]:
    """The app calls `encoder(features)` and `text_decoder(token, what encoder returned, position)`.

    What to do: `whisperport convert CHECKPOINT --for executorch-runner`.
    """
    file, methods = METHODS.file(files), METHODS.methods(files)
    if reason := other_signature(methods[ENCODE], [("float32", 3)], 3, floats=FLOATS):
        yield file, f"{ENCODE}: {reason}"
    elif reason := other_signature(
        methods[DECODE], [("int64", 2), ("float32", 3), ("int64", 1)], 3, floats=FLOATS
    ):
        yield file, f"{DECODE}: {reason}"
    else:
        (packed,), inputs = methods[ENCODE].graph.outputs, methods[DECODE].graph.inputs
        if [value.shape for value in inputs] != [(1, 1), packed.shape, (1,)]:
            right = f"[1, 1], {shape_of(packed)}, [1]"
            yield file, f"{DECODE} reads {', '.join(map(shape_of, inputs))}; the app gives {right}"


@layout_rule("WP787", "Neither the file nor the tokenizer says which token ends a text")
def end(files: Files) -> Iterator[tuple[str, str]]:
    """The app asks a method `get_eos_ids`, and else `tokenizer_config.json`. Without both, each text is as
    long as the app permits.

    What to do: `whisperport convert CHECKPOINT --for executorch-runner`.
    """
    stated = files.json(SETTINGS) if files.has(SETTINGS) else {}
    if END not in METHODS.methods(files) and "eos_token" not in stated:
        yield METHODS.file(files), f"there is no method {END}, and no eos_token in {SETTINGS}"


@layout_rule(
    "WP784",
    "Each token projects the audio to keys and values of the cross-attention",
    is_warning=True,
)
def projections(files: Files) -> Iterator[tuple[str, str]]:
    """The decoder projects all positions of the audio for every token: the largest part of its work.

    What to do: `whisperport convert CHECKPOINT --for APP`.
    """
    yield from METHODS.projecting(files, -2)


RULES = (signatures, end, projections, *checkpoint_rules(METHODS.settings))
READER = METHODS.reader()
