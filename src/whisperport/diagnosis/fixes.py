"""Write the short numpy program that undoes the causes of a file."""

from whisperport.diagnosis.expected import ExpectedTensor
from whisperport.diagnosis.explanation import Explanation
from whisperport.diagnosis.raw_files import RawOutput


def fix_program(best: Explanation, raw: RawOutput, tensor: ExpectedTensor) -> str:
    """Return a numpy program that reads a file and writes the corrected float32 values.

    Args:
        best: the explanation of the file.
        raw: the file.
        tensor: the output that it was expected to hold.
    """
    path = raw.source if raw.source != "array" else "output.bin"
    start, stop, size, lines = 0, 0, 0, []
    for line in best.code:
        if line.startswith("path = cut("):
            start, stop = (int(n) for n in line.split("(")[1].rstrip(")").split(", ")[1:])
        elif line.startswith("size = "):
            size = int(line.split()[2])
        else:
            lines.append(line)
    body = []
    for line in lines:
        if line.startswith("x = load(path, "):
            dtype = line.split('"')[1]
            cut = f"[{start}:{stop}]" if stop else ""
            rest = line.split(")", 1)[1]
            body.append(f'x = np.frombuffer(data{cut}, "{dtype}"){rest}')
            if size:
                body.append(
                    f"x = np.pad(x.astype(np.float32), (0, {size} - x.size), constant_values=np.nan)"
                )
        else:
            body.append(line)
    load = f"data = open({path!r}, 'rb').read()"
    if raw.dtype is not None and raw.source != "array":
        load = f"data = np.load({path!r}).tobytes()"
    shape = best.hypothesis.reference.name, tensor.array.shape
    end = f"x = np.ascontiguousarray(x, np.float32).reshape({shape[1]})"
    return "\n".join(["import numpy as np", load, *body, end, "x.tofile('corrected.bin')"])
