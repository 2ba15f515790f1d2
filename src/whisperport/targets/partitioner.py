"""The interface of a vendor's partitioner: which operators of a file the vendor's own list accepts.

A partitioner marks the operators that the vendor's compiler would receive. It compiles nothing: sizes,
memory and accuracy are not examined. It is the evidence *accepted by the vendor's partitioner*.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Declined:
    """One operator that a partitioner declined.

    Attributes:
        operator: name of the operator in the file, such as "CUMSUM".
        tensor: name of its first output in the file.
        reason: why it was declined.
    """

    operator: str
    tensor: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The answer of a partitioner for one file.

    Attributes:
        total: number of operators in the file.
        partitions: number of parts that the accepted operators form.
        declined: the operators that were not accepted, in the order of the file.
        runtime: package of the partitioner -> its version.
        rejection: why it does not accept the program as a whole; empty: it does.
        scope: what it did with the operators that it accepted, and what not; words for messages.
    """

    total: int
    partitions: int
    declined: tuple[Declined, ...]
    runtime: Mapping[str, str]
    rejection: str = ""
    scope: str = "it compiles nothing"

    @property
    def accepted(self) -> int:
        """Number of operators that were accepted."""
        return 0 if self.rejection else self.total - len(self.declined)

    def __bool__(self) -> bool:
        """Return True if there are operators, and all of them were accepted."""
        return self.total > 0 and not self.declined and not self.rejection

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "operators": self.total,
            "accepted": self.accepted,
            "partitions": self.partitions,
            "declined": [asdict(operator) for operator in self.declined],
            "rejection": self.rejection or None,
            "scope": self.scope,
            "runtime": dict(self.runtime),
        }


class Partitioner(ABC):
    """A vendor's partitioner, as far as it can be asked on this machine."""

    title: str  # name in messages, with the device that it is asked for
    suffix: ClassVar[str] = ""
    """Of the files of a bundle that an export asks it about; empty: of none, as their run says more."""

    @abstractmethod
    def recognizes(self, head: bytes) -> bool:
        """Return whether it reads a file of this format; `head` is its first bytes."""

    @abstractmethod
    def unavailable(self) -> str:
        """Return why the partitioner cannot be asked on this machine, with what to do; "" if it can."""

    @abstractmethod
    def partition(self, path: Path) -> Partition:
        """Ask the partitioner about a file, in a child process with limits on memory and time.

        Args:
            path: a file of its format; it may come from anywhere.

        Raises:
            ProgramError: the file is damaged, or the partitioner crashed on it or exceeded a limit.
            LoweringError: the partitioner cannot be asked here, or its answer is not understood.
        """
