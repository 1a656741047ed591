"""The position of a run: the values that a checkpoint holds beside the algorithm's state."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from fedpax.checkpoints.stream_state import StreamState


class RunPosition(NamedTuple):
    """The position of a run: the values that a checkpoint holds beside the algorithm's state.

    Attributes:
        round: number of completed rounds.
        stream: the position of the stream of cohorts after that round.
        configuration: the experiment as JSON.
        participants: the placement's size. Default None: not recorded.
        numbers: the participants' numbers in an elastic job. Default None: there is no such job.
    """

    round: int
    stream: StreamState
    configuration: Mapping[str, Any]
    participants: int | None = None
    numbers: Sequence[int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the position as a JSON object. A stream position of bytes becomes base64 text.

        Example:
            >>> RunPosition(3, b"position", {}).to_json()["stream"]
            {'base64': 'cG9zaXRpb24='}
        """
        stream: Any = self.stream
        if isinstance(stream, bytes):
            stream = {"base64": base64.b64encode(stream).decode()}
        numbers = None if self.numbers is None else list(self.numbers)
        return self._replace(stream=stream, numbers=numbers)._asdict()

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        """Make the position from the JSON object that `to_json` returned.

        Raises:
            KeyError, TypeError, ValueError: the object has another form.

        Example:
            >>> RunPosition.from_json(RunPosition(3, b"position", {}).to_json()).stream
            b'position'
        """
        stream = saved["stream"]
        if isinstance(stream, dict) and set(stream) == {"base64"}:
            stream = base64.b64decode(stream["base64"])
        return cls(**{**saved, "stream": stream})
