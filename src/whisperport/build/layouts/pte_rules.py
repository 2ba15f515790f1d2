"""What the apps of ExecuTorch have in common: two methods in one .pte file, and what is wrong with them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whisperport.build.layouts.checkpoint_rules import Setting
from whisperport.build.layouts.huggingface_rules import settings
from whisperport.build.layouts.reading import Files, Reader, pte_methods
from whisperport.build.layouts.rules import LayoutRule, layout_rule

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint
    from whisperport.model.inspection.graph import Shape
    from whisperport.model.inspection.read_pte import Method


Form = tuple[str, int]  # type and number of axes
TOKEN, POSITION, AUDIO = ("int64", 2), ("int64", 1), ("float32", 3)  # what `decode` reads


@dataclass(frozen=True, slots=True)
class TwoMethods:
    """The methods of an app in a folder with a .pte file, or in such a file.

    Attributes:
        encode: name of the method that encodes audio.
        decode: name of the method that decodes one token, and returns the logits last.
        encoded: type and number of axes of what `encode` reads.
        inputs: what `decode` reads, in the order in which the app gives it.
        floats: types that the app takes in place of float32.
    """

    encode: str
    decode: str
    encoded: "Form"
    inputs: "tuple[Form, Form, Form]"
    floats: tuple[str, ...] = ("float32",)

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

    def wrong_signatures(self, files: Files) -> Iterator[tuple[str, str]]:
        """Yield the file if a method has other inputs than the app gives, or another output."""
        file, methods = self.file(files), self.methods(files)
        encode, decode = methods[self.encode], methods[self.decode]
        if reason := self._other(encode, (self.encoded,)):
            yield file, f"{self.encode}: {reason}"
        elif reason := self._other(decode, self.inputs):
            yield file, f"{self.decode}: {reason}"
        else:
            sizes = {TOKEN: (1, 1), POSITION: (1,), AUDIO: encode.graph.outputs[0].shape}
            expected = [sizes[form] for form in self.inputs]
            stated = [value.shape for value in decode.graph.inputs]
            if stated != expected:
                yield (
                    file,
                    f"{self.decode} reads {_shown(stated)}; the app gives {_shown(expected)}",
                )

    def projecting(self, files: Files) -> Iterator[tuple[str, str]]:
        """Yield the file if its decoder projects the audio for each token."""
        inputs, index = self.methods(files)[self.decode].graph.inputs, self.inputs.index(AUDIO)
        audio = inputs[index].shape or () if len(inputs) == len(self.inputs) else ()
        if len(audio) != AUDIO[1]:
            return
        count = sum(
            node.op == "linear"
            and bool(node.tensors)
            and audio[1] in (node.output.shape or ())[-2:-1]
            for node in self.methods(files)[self.decode].graph.nodes
        )
        if count:
            yield (
                self.file(files),
                f"{count} linear layers of {self.decode} read all {audio[1]} positions",
            )

    def projections(self) -> LayoutRule:
        """Return the rule about decoders that project the audio for each token."""

        @layout_rule(
            "WP784",
            "Each token projects the audio to keys and values of the cross-attention",
            is_warning=True,
        )
        def projections(files: Files) -> Iterator[tuple[str, str]]:
            """The decoder projects all of the audio for every token: the largest part of its work.

            What to do: `whisperport convert CHECKPOINT --for APP`.
            """
            yield from self.projecting(files)

        return projections

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
        return complete or len(methods[self.decode].inputs) == len(self.inputs)

    def _precisions(self, files: Files) -> list[str]:
        nodes = [node for method in self.methods(files).values() for node in method.graph.nodes]
        types = {value.dtype for node in nodes for value in node.tensors if value.constant}
        return ["w8" if "int8" in types else "fp32"]

    def _other(self, method: "Method", inputs: Sequence[Form]) -> str:
        """Return how a method differs from the forms of its inputs, and of one output; empty: it fits."""
        forms = [(v.dtype, len(v.shape or ())) if v else ("no tensor", 0) for v in method.inputs]
        accepted = [("float32" if dtype in self.floats else dtype, n) for dtype, n in forms]
        if accepted != [*inputs]:
            return f"its inputs are {_named(forms)[:200]}; not {_named(inputs)}"
        outputs = method.graph.outputs
        fits = len(outputs) == 1 and outputs[0].dtype in self.floats
        if not fits or len(outputs[0].shape or ()) != AUDIO[1]:
            returned = _shown([value.shape for value in outputs])[:200]
            return f"it returns {returned}; not one float32 tensor of {AUDIO[1]} axes"
        return ""


def _named(forms: Sequence[Form]) -> str:
    return ", ".join(f"{dtype} of {n} axes" for dtype, n in forms)


def _shown(shapes: "Iterable[Shape | None]") -> str:
    return ", ".join(f"[{', '.join(map(str, shape or ()))}]" for shape in shapes)
