"""Choose the programs to run on an execution provider, and its options, from what was measured."""

from collections.abc import Mapping, Sequence

from whisperport.probing.report import Attempt, Choice

# A program is faster if it takes this part less time. Medians of repeated runs on an idle machine differ by
# a few per cent; this is the project's choice.
MIN_GAIN = 0.05


def choose(
    attempts: Sequence[Attempt],
    on_cpu: Mapping[str, Attempt],
    calls: Mapping[str, int],
    max_deviation: float,
) -> Choice:
    """Choose the options with which correct programs save the most time per window.

    All programs on the provider have the same options. A program is chosen if its outputs pass their
    comparison, do not differ between runs, and it is faster than on the CPU.

    Args:
        attempts: on the provider, at least one.
        on_cpu: program -> its attempt on the CPU.
        calls: program -> number of calls per window. A program that one window does not need counts once.
        max_deviation: largest permitted deviation between runs.
    """
    choices = []
    for options in option_sets(attempts):
        of_set = [attempt for attempt in attempts if attempt.options == options]
        because, saved = {}, {}
        for attempt in of_set:
            cpu_ms = on_cpu[attempt.program].ms
            if fault := attempt.fault(max_deviation):
                because[attempt.program] = fault
            elif attempt.provider == on_cpu[attempt.program].provider:
                because[attempt.program] = "this is the CPU provider itself"
            elif not attempt.ms <= (1 - MIN_GAIN) * cpu_ms:
                because[attempt.program] = (
                    f"it is not faster: {attempt.ms:.3g} ms, and {cpu_ms:.3g} ms on the CPU"
                )
            else:
                number = max(1, calls.get(attempt.program, 0))
                saved[attempt.program] = number * (cpu_ms - attempt.ms)
        choices.append(
            Choice(
                options=options,
                programs=tuple(saved),
                saved_ms=sum(saved.values()),
                because=because,
            )
        )
    return max(choices, key=lambda choice: choice.saved_ms)


def option_sets(attempts: Sequence[Attempt]) -> list[Mapping[str, str]]:
    """Return the sets of options of the attempts, each once, in their order."""
    found: list[Mapping[str, str]] = []
    for attempt in attempts:
        if attempt.options not in found:
            found.append(attempt.options)
    return found
