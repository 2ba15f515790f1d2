"""What the apps of ExecuTorch have in common: two methods in one .pte file, and what is wrong with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whisperport.build.layouts.checkpoint_rules import Setting
from whisperport.build.layouts.huggingface_rules import settings
from whisperport.build.layouts.reading import Files, Reader, pte_methods

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint
    from whisperport.model.inspection.graph import Value
    from whisperport.model.inspection.read_pte import Method


INPUTS = 3  # of `decode`: the token, its position, and what `encode` returned


@dataclass(frozen=True, slots=True)
class TwoMethods:
    """The methods of an app in a folder with a .pte file, or in such a file.

    Attributes:
        encode: name of the method that encodes audio.
        decode: name of the method that decodes one token, and returns the logits last.
    """

    encode: str
    decode: str

    def file(self, files: Files) -> str:
        """Return the file with both methods; empty: there is none, or it is the only file."""
        names = sorted(path.name for path in files.path.glob("*.pte"))
        needed = {self.encode, self.decode}
        return next((n for n in names if needed <= files.read(n, pte_methods).keys()), "")

    def methods(self, files: Files) -> "Mapping[str, Method]":
        return files.read(self.file(files), pte_methods)

    def n_logits(self, files: Files) -> int:
        """Return the logits of one token; 0: the file states none."""
        outputs = self.methods(files)[self.decode].graph.outputs
        sizes = [
            size for size in (outputs[0].shape or () if outputs else ()) if isinstance(size, int)
        ]
        return sizes[-1] if sizes else 0

    def projecting(self, files: Files, index: int) -> Iterator[tuple[str, str]]:
        """Yield the file if its decoder projects the audio, which is this one of its inputs."""
        graph = self.methods(files)[self.decode].graph
        audio = graph.inputs[index].shape or () if len(graph.inputs) > abs(index) else ()
        if len(audio) != 3:
            return
        count = sum(
            node.op == "linear"
            and bool(node.tensors)
            and audio[1] in (node.output.shape or ())[-2:-1]
            for node in graph.nodes
        )
        if count:
            yield (
                self.file(files),
                f"{count} linear layers of {self.decode} read all {audio[1]} positions",
            )

    def settings(self, files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
        """Yield what the files state, beside what the checkpoint has."""
        n_logits = self.n_logits(files)
        yield Setting(self.file(files), "number of logits", n_logits, checkpoint.dims.n_vocab)
        yield from settings(files, checkpoint)

    def reader(self) -> Reader:
        """Return what recognizes and reads such files."""
        return Reader(
            self._recognize,
            self._precisions,
            sizes=lambda files: {"vocab_size": self.n_logits(files)},
        )

    def _recognize(self, files: Files) -> bool:
        """Return whether the methods are there, with the tokenizer, or with what the app gives `decode`.

        Other exporters give methods of the same name two inputs, for other apps.
        """
        if files.path.is_file() and files.path.suffix != ".pte":
            return False
        methods = self.methods(files) if files.path.is_file() or self.file(files) else {}
        if not {self.encode, self.decode} <= methods.keys():
            return False
        complete = files.path.is_dir() and files.has("tokenizer.json")
        return complete or len(methods[self.decode].inputs) == INPUTS

    def _precisions(self, files: Files) -> list[str]:
        nodes = [node for method in self.methods(files).values() for node in method.graph.nodes]
        types = {value.dtype for node in nodes for value in node.tensors if value.constant}
        return ["w8" if "int8" in types else "fp32"]


def other_signature(
    method: "Method",
    inputs: Sequence[tuple[str, int]],
    rank: int,
    *,
    floats: Sequence[str] = ("float32",),
) -> str:
    """Return how a method differs from the types and the numbers of axes that are right; empty: it fits.

    Args:
        method: of the file.
        inputs: type and number of axes of each input.
        rank: number of axes of the only output, a float32.
        floats: types that the app takes in place of float32.
    """
    stated = [(v.dtype, len(v.shape or ())) if v else ("no tensor", 0) for v in method.inputs]
    taken = [("float32" if dtype in floats else dtype, n) for dtype, n in stated]
    if taken != [*inputs]:
        right = ", ".join(f"{dtype} of {n} axes" for dtype, n in inputs)
        return (
            f"its inputs are {', '.join(f'{d} of {n} axes' for d, n in stated)[:200]}; not {right}"
        )
    outputs = method.graph.outputs
    if len(outputs) != 1 or len(outputs[0].shape or ()) != rank or outputs[0].dtype not in floats:
        returned = ", ".join(map(shape_of, outputs))[:200]
        return f"it returns {returned}; not one float32 tensor of {rank} axes"
    return ""


def shape_of(value: "Value") -> str:
    return f"[{', '.join(map(str, value.shape or ()))}]"
