"""The position of a run in its rounds and in the data, as checkpoints hold it."""

import base64
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax

from fedpax.clients.cohort import CohortStream
from fedpax.console import print_error
from fedpax.processes.communication import gather_json

StreamState = dict[str, Any] | bytes
"""The position of a stream, as its `get_state` returns it."""


class RunPosition(NamedTuple):
    """The position of a run: what a checkpoint holds beside the algorithm's state."""

    round: int
    stream: StreamState  # the position of the stream of cohorts after that round
    configuration: Mapping[str, Any]
    participants: int | None = None  # the placement's size. Default None: not recorded.
    # the participants' numbers in an elastic job. Default None: the job is not elastic.
    numbers: Sequence[int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the position as a JSON object. A stream position of bytes becomes base64 text."""
        stream: Any = self.stream
        if isinstance(stream, bytes):
            stream = {"base64": base64.b64encode(stream).decode()}
        numbers = None if self.numbers is None else list(self.numbers)
        return self._replace(stream=stream, numbers=numbers)._asdict()

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        """Make the position from the JSON object that `to_json` returned."""
        stream = saved["stream"]
        if isinstance(stream, dict) and set(stream) == {"base64"}:
            stream = base64.b64decode(stream["base64"])
        return cls(**{**saved, "stream": stream})


def gather_stream_state(state: StreamState) -> StreamState:
    """Complete a stream's position by parts that other processes know; bytes have all of it."""
    # None in a state is a value that this process does not know, such as the position in documents
    # that only another process reads. All processes must call this in the same round.
    if jax.process_count() == 1 or isinstance(state, bytes):
        return state
    return functools.reduce(fill_in, gather_json(state), state)


def fill_in(state: Any, other: Any) -> Any:
    """Replace every None in a state by the value of another process."""
    if state is None:
        return other
    if isinstance(state, dict) and isinstance(other, dict):
        return {name: fill_in(value, other.get(name)) for name, value in state.items()}
    if isinstance(state, list) and isinstance(other, list):
        return [fill_in(*values) for values in zip(state, other, strict=True)]
    return state


def restore_stream(
    stream: CohortStream, saved: Any, *, must_fit: bool, beginning: StreamState | None = None
) -> None:
    """Move a stream to a saved position, or to the same round if its settings were changed."""
    # A stream without the round in its state has no position that corresponds to the saved one: it
    # restarts.
    try:
        stream.set_state(saved)
    except ValueError as error:
        if must_fit:
            raise
        fresh = stream.get_state() if beginning is None else beginning
        if isinstance(fresh, dict) and isinstance(saved, dict) and "round" in fresh.keys() & saved:
            stream.set_state({**fresh, "round": saved["round"]})
            print_error(f"The data continue after round {saved['round']}, but differ: {error}")
        else:
            stream.set_state(fresh)
            print_error(f"The data start again from their first round: {error}")
