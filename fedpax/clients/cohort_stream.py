"""The protocol of training data: an endless stream of cohorts that can be saved and restored."""

from typing import Any, Protocol, runtime_checkable

from fedpax.clients.cohort import Cohort


class CohortStream(Protocol):
    """An endless iterator over cohorts whose position can be saved and restored.

    Every round's cohort has the same structure, shapes and dtypes. Its leaves are NumPy arrays that
    later rounds do not overwrite: the training loop still reads a cohort while the next one is
    made. With several processes, every process draws the same whole cohort and keeps the rows of
    its own devices. A stream may instead return leaves of the global shape from which a process can
    index only its own rows (`fedpax.data.LocalRows`).
    """

    def __next__(self) -> Cohort:
        """Return the cohort of the next round."""
        ...

    def get_state(self) -> dict[str, Any] | bytes:
        """Return the position, in values of JSON or bytes; None: another process knows it."""
        ...

    def set_state(self, state: Any) -> None:
        """Move to a position from `get_state`."""
        ...


@runtime_checkable
class IslandStream(CohortStream, Protocol):
    """A stream of cohorts that can read the rows of one island alone.

    Without it, an island of `fedpax join` reads the rows of all islands and keeps its own.
    """

    def keep_island(self, island: int) -> None:
        """Read only the rows of one island from now on; other rows cannot be indexed then."""
        ...


@runtime_checkable
class PackedStream(CohortStream, Protocol):
    """A stream whose cohorts have fewer bytes on their way to the devices.

    `unpack(next_packed())` is `next(stream)`.
    """

    def next_packed(self) -> Cohort:
        """Return the cohort of the next round as it is sent to the devices."""
        ...

    def unpack(self, cohort: Cohort) -> Cohort:
        """Complete a cohort of `next_packed` that is on the devices, with equal shardings."""
        ...


@runtime_checkable
class IdentifiedStream(CohortStream, Protocol):
    """A stream that can tell whether another process has the same data.

    Processes and islands that share a stream divide its rows. With data of their own under one
    name, each of them would leave out most of its data.
    """

    def fingerprint(self) -> dict[str, str]:
        """Return each data set's size and a checksum of a sample; equal on all machines."""
        ...


def fingerprint(stream: CohortStream) -> dict[str, str]:
    """Return the fingerprint of a stream's data; empty if the stream does not tell."""
    return stream.fingerprint() if isinstance(stream, IdentifiedStream) else {}
