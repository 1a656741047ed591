"""The exchange of an island of one or several processes with its syncer."""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedpax.islands.island.link import JoinReply, Link, ReceivedFragment, SyncerStatus
from fedpax.preemption import PreemptionGuard
from fedpax.processes.control_channel import ControlChannel
from fedpax.transport.calls import DisconnectedError, RefusedError

SECONDS_BETWEEN_JOINS = 0.2


class SharedLink:
    """The link to the syncer, as all processes of an island see it."""

    # Process 0 has the link. The other processes receive its status over the control channel, so
    # that all processes dispatch the same programs in the same order. The channel does not use the
    # devices: an island polls while its devices compute. All processes must call `join` and `poll`
    # at the same points of their programs.

    def __init__(
        self, link: Link | None, channel: ControlChannel, preemption: PreemptionGuard
    ) -> None:
        self._link, self._channel, self._preemption = link, channel, preemption
        self._count = itertools.count()

    @property
    def transferred_bytes(self) -> int:
        """Bytes that this process has sent to the syncer and received from it."""
        return 0 if self._link is None else self._link.sent_bytes + self._link.received_bytes

    def join(
        self, on_wait: Callable[[DisconnectedError], None], seconds: float
    ) -> JoinReply | None:
        """Join the syncer; None if none answers within `seconds`, or a signal asks to stop."""
        # Process 0 calls `on_wait` after each attempt without an answer.
        while not self._preemption.should_stop(next(self._count)):
            try:
                fields = self._share(lambda link: link.join()._asdict())
            except DisconnectedError as error:
                on_wait(error)
                fields = self._channel.broadcast(None)
                time.sleep(min(SECONDS_BETWEEN_JOINS, seconds))
            if fields is not None:
                return _read_reply(fields)
            if self.poll().silent_seconds >= seconds:
                break
        return None

    def start(self) -> None:
        """Start to exchange, in threads of process 0."""
        if self._link is not None:
            self._link.start()

    def poll(self) -> SyncerStatus:
        """Return the status of process 0's link, in all processes."""
        stop = self._preemption.should_stop(next(self._count))
        fragments: list[ReceivedFragment] = []

        def poll(link: Link) -> dict[str, Any]:
            status = link.poll()
            fragments.extend(status.fragments)
            return status._replace(fragments=[f._replace(arrays=None) for f in fragments])._asdict()

        status = SyncerStatus(**self._share(poll))
        if self._link is None:
            fragments = [ReceivedFragment(*fragment) for fragment in status.fragments]
        return status._replace(fragments=fragments, stop=stop)

    def _share(self, ask: Callable[[Link], dict[str, Any]]) -> Any:
        """Return process 0's answer of the link in all processes, and raise its refusal in all."""
        if self._link is None:
            answer = self._channel.broadcast(None)
            if answer is not None and "refusal" in answer:
                raise RefusedError(answer["refusal"])
            return answer
        try:
            return self._channel.broadcast(ask(self._link))
        except RefusedError as error:
            self._channel.broadcast({"refusal": str(error)})
            raise

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for a fragment in process 0; other processes wait in `poll`."""
        if self._link is not None:
            self._link.wait(seconds)

    def prepare(self, arrays: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Start to copy the arrays of an update to process 0's host; none in other processes."""
        return {} if self._link is None else self._link.prepare(arrays)

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Queue an update for sending, in process 0."""
        if self._link is not None:
            self._link.send(header, arrays)

    def report(self, steps: int, seconds_per_update: float) -> None:
        """Set the numbers that the heartbeats of process 0 report."""
        if self._link is not None:
            self._link.report(steps, seconds_per_update)

    def drain(self, seconds: float) -> None:
        """Wait at most `seconds` until the syncer has received the queued updates."""
        if self._link is not None:
            self._link.drain(seconds)

    def close(self) -> None:
        """Stop to exchange, and tell the syncer that the island leaves."""
        if self._link is not None:
            self._link.close()


def _read_reply(fields: Mapping[str, Any]) -> JoinReply:
    """Read a reply from JSON, which has texts as keys and lists instead of tuples."""
    received = {int(p): (process, n) for p, (process, n) in fields["received"].items()}
    return JoinReply(**{**fields, "received": received})
