"""What a server counts, as the text that Prometheus reads."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from threading import Lock

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "whisperport_"
BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Histogram:
    """Counts durations in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        """Return the lines of its buckets, sum and count."""
        total, lines = 0, []
        for limit, count in zip((*BUCKETS_S, math.inf), self._counts, strict=True):
            total += count
            shown = "+Inf" if limit == math.inf else f"{limit:g}"
            lines.append(f'{name}_bucket{{le="{shown}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """Counters, gauges and histograms of a server. Safe for threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counters: dict[str, tuple[str, Counter[str]]] = {}
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._histograms: dict[str, tuple[str, Histogram]] = {}
        self._info: dict[str, str] = {}

    def count(self, name: str, about: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter.

        Args:
            name: without the prefix, ending in `_total`.
            about: help text.
            amount: 0 or more.
            labels: few values each, never anything that a client chooses freely.
        """
        with self._lock:
            _, counter = self._counters.setdefault(name, (about, Counter()))
            counter[_labels(labels)] += amount  # type: ignore[assignment]  # a Counter of floats

    def gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Add a number that is read whenever the metrics are."""
        self._gauges[name] = about, value

    def observe(self, name: str, about: str, seconds: float) -> None:
        """Add a duration to a histogram."""
        with self._lock:
            self._histograms.setdefault(name, (about, Histogram()))[1].add(seconds)

    def describe(self, **labels: str) -> None:
        """Set the labels of `whisperport_info`."""
        self._info = labels

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        with self._lock:
            lines = [
                *_head("info", "gauge", "What is served"),
                f"{PREFIX}info{_labels(self._info)} 1",
            ]
            for name, (about, counter) in self._counters.items():
                lines += _head(name, "counter", about)
                lines += [f"{PREFIX}{name}{key} {value:.10g}" for key, value in counter.items()]
            for name, (about, read) in self._gauges.items():
                lines += [*_head(name, "gauge", about), f"{PREFIX}{name} {read():.10g}"]
            for name, (about, histogram) in self._histograms.items():
                lines += [*_head(name, "histogram", about), *histogram.lines(f"{PREFIX}{name}")]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"]


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
