"""All layouts: the files of other apps. To add one, add its folder to `MODULES`."""

import difflib
from importlib import import_module

from whisperport.build.layouts.graph_pair import PAIRS, RULES, layout_of_pair
from whisperport.build.layouts.layout import App, Layout
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.rules import LayoutRule
from whisperport.errors import UsageError

__all__ = ["App", "Layout", "LayoutRule", "all_layouts", "all_rules", "layout_of", "recognized"]

MODULES = (
    "faster_whisper",
    "onnxruntime_genai",
    "openvino_genai",
    "sherpa_onnx.qnn",  # before the next: their graphs have the same names
    "sherpa_onnx.rknn",
    "qualcomm_ai_hub",
    "sherpa_onnx",
    "transformers_js",
    "whisper_cpp",
    # Last: they are recognized by what their file has, which takes seconds to read.
    "react_native_executorch",
    "executorch_runner",
)


def all_layouts() -> tuple[Layout, ...]:
    """Return every layout."""
    return tuple(import_module(f"{__name__}.{module}").LAYOUT for module in MODULES)


def all_rules() -> dict[str, tuple[LayoutRule, tuple[str, ...]]]:
    """Return code -> each rule of any layout, and the apps that it is about, sorted by code."""
    rules: dict[str, tuple[LayoutRule, tuple[str, ...]]] = {}
    for layout in all_layouts():
        for rule in layout.rules:
            _, apps = rules.get(rule.code, (rule, ()))
            rules[rule.code] = rule, (*apps, *layout.apps)
    rules |= {rule.code: (rule, (PAIRS,)) for rule in RULES if rule.code not in rules}
    return dict(sorted(rules.items()))


def recognized(files: Files) -> Layout | None:
    """Return the layout that files have; None: it is not known.

    Raises:
        ProgramError: a graph is damaged.
        MissingPackageError: the reader of a format is not installed.
    """
    known = (layout for layout in all_layouts() if layout.reader.recognize(files))
    return next(known, None) or layout_of_pair(files)


def app_with_chip(app: str, chip: str) -> str:
    """Return the app that has a chip: another one if its name begins with this app's and a hyphen.

    So "sherpa-onnx" is sherpa-onnx-qnn for a phone.
    """
    on_npus = (
        name
        for layout in all_layouts()
        for name, entry in layout.apps.items()
        if name.startswith(f"{app}-") and entry.compile and chip in entry.devices
    )
    return next(on_npus, app) if chip else app


def layout_of(app: str) -> Layout:
    """Return the layout that an app loads.

    Raises:
        UsageError: no layout is of this app.
    """
    by_app = {name: layout for layout in all_layouts() for name in layout.apps}
    if layout := by_app.get(app):
        return layout
    similar = difflib.get_close_matches(app, by_app, n=1, cutoff=0.5)
    raise UsageError(
        f"there is no app `{app[:40]}`",
        why=f"the app with a similar name is {similar[0]}" if similar else "",
        hint=f"choose one of {', '.join(by_app)}; `whisperport apps` describes them",
    )
