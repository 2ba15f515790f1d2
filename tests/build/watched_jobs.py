"""Small jobs that behave like exporters; a child process imports them by name."""

import ctypes
import errno
import logging
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

from whisperport.errors import LoweringError, MissingPackageError, UsageError
from whisperport.program.bundle import writing_bundle


def floods(number, progress):
    """Print like a graph dump: from Python, and from C++ code that does not use `sys.stdout`."""
    progress("flooding")
    print("graph():\n" * 1000)
    for stream in (1, 2):
        os.write(stream, b"  %x : Tensor = aten::mul(%a, %b)\n" * 1000)
    logging.getLogger("torch.onnx").error("a message of another library")
    logging.getLogger("whisperport.anything").warning("a warning of whisperport")
    return 2 * number


def fails_with_400_lines(progress):
    progress("lowering")
    dump = "\n".join(f"%{line} : Tensor = aten::triu(%x)" for line in range(400))
    try:
        raise RuntimeError(f"aten::triu is not supported\n{dump}")
    except RuntimeError as error:
        why = str(error).split("\n")[0]
        raise LoweringError("the decoder cannot be lowered", why=why) from error


def leaves_a_partial_folder_and_hangs(out, progress):
    """Hang in C code that ignores interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with writing_bundle(Path(out)) as writer:
        (writer.folder / "half.bin").write_bytes(b"half")
        progress("lowering 6 programs")
        ctypes.PyDLL(None).sleep(600)


def is_killed_while_it_writes(*outs, progress):
    """Be killed while writing to several outputs, such as a bundle and its work folder."""
    progress("writing")
    with ExitStack() as stack:
        for out in outs:
            stack.enter_context(writing_bundle(out))
        os.kill(os.getpid(), signal.SIGKILL)


def hangs_in_python(out, progress):
    """Clean up when interrupted, as every writer of the package does."""
    progress("lowering 6 programs")
    try:
        time.sleep(600)
    finally:
        Path(out).with_name("tidied").touch()


def is_killed(progress):
    progress("eating memory")
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(progress):
    progress("dividing by zero in C++")
    os.kill(os.getpid(), signal.SIGSEGV)


def reads_a_file_that_is_shortened(progress):
    progress("reading weights")
    os.kill(os.getpid(), signal.SIGBUS)


def has_a_defect(progress):
    progress("working")
    return {}["nothing"]


def finds_the_disk_full(progress):
    progress("writing")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def returns_what_cannot_be_sent(progress):
    return lambda: None


def is_rejected(progress):
    raise UsageError("no target is called `toaster`", hint="known: onnxruntime")


def lacks_a_package(progress):
    raise MissingPackageError("cannot lower", hint="pip install it")


def is_interrupted(progress):
    raise KeyboardInterrupt


def waits(out, progress):
    progress("waiting")
    Path(out).write_text(str(os.getpid()))
    try:
        time.sleep(600)
    finally:
        Path(out).unlink()
