"""Facts about an execution provider of ONNX Runtime, as data, for `whisperport verify --each-program`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionProvider:
    """One execution provider: its options, what to try, and what its vendor documents.

    Attributes:
        name: name of the provider in ONNX Runtime.
        precision: precision that it computes in, which chooses the limits of a comparison.
        min_opset: oldest version of ONNX's operator set that it supports; 0: not known.
        unsupported: operator that it does not support -> what to use instead.
        options: name of a documented option -> what it does.
        defaults: options that every trial has, name -> value.
        trials: further options, name -> value; each element is one trial.
        sources: name of a field -> the document that its value comes from.
    """

    name: str
    precision: str = "fp32"
    min_opset: int = 0
    unsupported: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    trials: tuple[Mapping[str, str], ...] = ({},)
    sources: Mapping[str, str] = field(default_factory=dict)

    def option_sets(self, chosen: Mapping[str, str]) -> tuple[dict[str, str], ...]:
        """Return the options of every trial; a given option replaces that of all trials.

        Args:
            chosen: the user's options, name -> value.
        """
        merged = [{**self.defaults, **trial, **chosen} for trial in self.trials]
        return tuple(trial for index, trial in enumerate(merged) if trial not in merged[:index])

    def objections(self, opset: int, operators: Mapping[str, int]) -> tuple[str, ...]:
        """Return what the vendor's documentation says against a program; empty if nothing.

        Args:
            opset: version of ONNX's operator set of the program.
            operators: operator -> number of nodes.
        """
        objections = []
        if opset < self.min_opset:
            objections.append(
                f"its opset is {opset}, and the documentation asks for {self.min_opset} or newer: export "
                f"with `--option onnxruntime.opset={self.min_opset}`"
            )
        objections += [
            f"it has {count} {operator} nodes, which the documentation excludes: {instead}"
            for operator, count in operators.items()
            if (instead := self.unsupported.get(operator))
        ]
        return tuple(objections)
