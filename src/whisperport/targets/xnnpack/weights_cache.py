"""Let the methods of a process share the packed copies of their weights.

XNNPACK copies every weight into the layout of its kernels when a method is loaded. prefill_4, prefill_64,
step and align use the same decoder weights, so without sharing a process holds four packed copies of them.
ExecuTorch's XNNPACK backend has an option that keeps one copy for each content of a weight,
`weight_cache_enabled`, but its Python binding cannot set options. This module calls the C++ function

    Error executorch::runtime::set_option(const char* backend, const Span<BackendOption> options)

of include/executorch/runtime/backend/interface.h by its symbol. The structures below follow options.h and
span.h of the version named here; with any other version, weights are not shared and nothing else changes.
"""

import ctypes
import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

VERSION = "1.5.1"  # of executorch, whose headers were read and with which sharing was measured
BACKEND = b"XnnpackBackend"
OPTION = b"weight_cache_enabled"
SYMBOL = "_ZN10executorch7runtime10set_optionEPKcNS0_4SpanINS0_13BackendOptionEEE"

log = logging.getLogger(__name__)


class _BackendOption(ctypes.Structure):
    """A key and a std::variant<bool, int, std::array<char, 256>>: its storage, then its index."""

    _fields_ = (
        ("key", ctypes.c_char * 64),
        ("storage", ctypes.c_ubyte * 256),
        ("index", ctypes.c_uint32),  # 0: a bool. libstdc++ uses one byte of it, libc++ all four
    )


class _Span(ctypes.Structure):
    _fields_ = (("data", ctypes.POINTER(_BackendOption)), ("size", ctypes.c_size_t))


def share_packed_weights() -> bool:
    """Switch sharing on for all methods that this process loads from now on.

    Returns:
        Whether it is on. False with another version of ExecuTorch, or on another system than Linux.
    """
    library = _library()
    if library is None:
        return False
    option = _BackendOption(key=OPTION, index=0)
    option.storage[0] = True
    try:
        set_option = ctypes.CDLL(str(library))[SYMBOL]
    except (OSError, AttributeError) as error:
        log.info("ExecuTorch's weights cache is not available: %s", error)
        return False
    set_option.argtypes, set_option.restype = (ctypes.c_char_p, _Span), ctypes.c_uint32
    code = set_option(BACKEND, _Span(ctypes.pointer(option), 1))
    if code:
        log.info("ExecuTorch did not switch its weights cache on: error %d", code)
    return not code


def _library() -> Path | None:
    """ExecuTorch's shared library; None where its layout in memory is not known."""
    try:
        known = version("executorch") == VERSION and sys.platform == "linux"
    except PackageNotFoundError:
        return None
    package = find_spec("executorch")
    if not known or package is None:
        return None
    folders = [Path(folder) for folder in package.submodule_search_locations or ()]
    found = [folder / "lib" / "libexecutorch.so" for folder in folders]
    return next((path for path in found if path.is_file()), None)
