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
from whisperport.program.bundle.writing import writing_bundle
from whisperport.system.progress import begin_stage


def floods(number):
    """Print like a graph dump: from Python, and from C++ code that does not use `sys.stdout`."""
    begin_stage("flooding")
    print("graph():\n" * 1000)
    for stream in (1, 2):
        os.write(stream, b"  %x : Tensor = aten::mul(%a, %b)\n" * 1000)
    logging.getLogger("torch.onnx").error("a message of another library")
    logging.getLogger("whisperport.anything").warning("a warning of whisperport")
    return 2 * number


def fails_with_400_lines():
    begin_stage("lowering")
    dump = "\n".join(f"%{line} : Tensor = aten::triu(%x)" for line in range(400))
    try:
        raise RuntimeError(f"aten::triu is not supported\n{dump}")
    except RuntimeError as error:
        why = str(error).split("\n")[0]
        raise LoweringError("the decoder cannot be lowered", why=why) from error


def leaves_a_partial_folder_and_hangs(out):
    """Hang in C code that ignores interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with writing_bundle(Path(out)) as writer:
        (writer.folder / "half.bin").write_bytes(b"half")
        begin_stage("lowering 6 programs")
        ctypes.PyDLL(None).sleep(600)


def is_killed_while_it_writes(*outs):
    """Be killed while writing to several outputs, such as a bundle and its work folder."""
    begin_stage("writing")
    with ExitStack() as stack:
        for out in outs:
            stack.enter_context(writing_bundle(out))
        os.kill(os.getpid(), signal.SIGKILL)


def hangs_in_python(out):
    """Clean up when interrupted, as every writer of the package does."""
    begin_stage("lowering 6 programs")
    try:
        time.sleep(600)
    finally:
        Path(out).with_name("tidied").touch()


def is_killed():
    begin_stage("eating memory")
    os.kill(os.getpid(), signal.SIGKILL)


def crashes():
    begin_stage("dividing by zero in C++")
    os.kill(os.getpid(), signal.SIGSEGV)


def reads_a_file_that_is_shortened():
    begin_stage("reading weights")
    os.kill(os.getpid(), signal.SIGBUS)


def has_a_defect():
    begin_stage("working")
    return {}["nothing"]


def finds_the_disk_full():
    begin_stage("writing")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def returns_what_cannot_be_sent():
    return lambda: None


def is_rejected():
    raise UsageError("no target is called `toaster`", hint="known: onnxruntime")


def lacks_a_package():
    raise MissingPackageError("cannot lower", hint="pip install it")


def is_interrupted():
    raise KeyboardInterrupt


def waits(out):
    begin_stage("waiting")
    time.sleep(0.3)  # until the parent has read it: a job without a stage gets no time to tidy up
    Path(out).write_text(str(os.getpid()))
    try:
        time.sleep(600)
    finally:
        Path(out).unlink()
