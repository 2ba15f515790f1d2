"""Find the line of a model's own code in the stack trace that torch stores with each node."""

import re
from dataclasses import dataclass

# torch.export and torch.onnx write frames as Python does, the outermost first, without the last line.
FRAME = re.compile(
    r'^ *File "([^"\n]+)", line (\d{1,9}), in [^\n]*(?:\n(?! *File ")([^\n]*))?', re.M
)
INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/")
OF_TORCH = re.compile(r"^torch/|/torch/(?:nn|export|fx|_[a-z]+)/")
MAX_TRACE = 1 << 16  # characters of a stack trace that are read


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One line of Python."""

    file: str  # as the exporter wrote it; usually an absolute path of the exporter's machine
    line: int  # from 1
    code: str = ""  # the text of the line; empty: not stored

    @property
    def package_path(self) -> str:
        """The file without the folder that its package is installed in: `whisper/model.py`."""
        return INSTALLED.sub("", self.file.replace("\\", "/"))


def innermost_line(stack_trace: str) -> SourceLine | None:
    """Return the innermost line that is not in torch; None if the trace has no frame.

    If every frame is in torch, the result is the innermost one.
    """
    frames = [
        SourceLine(file, int(line), code.strip())
        for file, line, code in FRAME.findall(stack_trace[:MAX_TRACE])
    ]
    own = [frame for frame in frames if not OF_TORCH.search(frame.package_path)]
    return next(reversed(own or frames), None)
