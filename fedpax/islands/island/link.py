"""The link of an island to its syncer: sends updates and receives fragments beside the steps."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpax.islands.fragment_format import FragmentFormat, describe_other_arrays
from fedpax.sites.site_process import find_other_format
from fedpax.transport.calls import DisconnectedError, RefusedError, WaitingError
from fedpax.transport.message import Message

Call = Callable[[Message, float], Message]
"""Sends a message and returns the answer, within a number of seconds."""

MAX_OUTBOX = 4
"""Updates that an island holds until they are in the syncer's saved model."""

FIRST_POLL, LONGEST_POLL = 0.01, 0.25
LONGEST_BACKOFF = 2.0
CALL_TIMEOUT, TRANSFER_TIMEOUT = 10.0, 600.0


class ReceivedFragment(NamedTuple):
    """Outer parameters that have arrived."""

    number: int
    version: int  # its number of merges
    # Its parameters by name; None in a process that does not have them.
    arrays: Mapping[str, np.ndarray] | None


class SyncerStatus(NamedTuple):
    """An island's knowledge of its syncer at one point of its training."""

    merges: int = 0  # as far as known
    finished: bool = False  # whether the syncer has done all merges
    connected: bool = False
    # Whether the updates so far have been acknowledged, and there is room for another.
    can_send: bool = False
    # Since the former poll.
    fragments: Sequence[ReceivedFragment] = ()
    # Reason and target merge of each update that the syncer has dropped since then.
    dropped: Sequence[tuple[str, int | None]] = ()
    stop: bool = False  # whether a signal asks the island to save and stop
    silent_seconds: float = 0.0  # seconds since the last answer of the syncer, or since the start
    # The island's shard; None before it has one, or after another island has taken it.
    shard: int | None = None
    epoch: str | None = None  # the epoch of the syncer in which the island last joined
    # Whether the syncer has restored an older state: the island discards its unsent progress first.
    discard: bool = False


class JoinReply(NamedTuple):
    """The answer of the syncer to an island that joins."""

    run: str
    # The island's shard of the data; None if the run is finished and no shard is free.
    shard: int | None
    # Process and sequence number of the newest update of each fragment that the syncer has from
    # this island.
    received: Mapping[int, tuple[str, int]]
    rounds: int
    finished: bool  # whether the syncer has done all merges


class _Outgoing:
    """An update until it is in the syncer's saved model."""

    def __init__(self, header: dict[str, Any], arrays: Mapping[str, Any]) -> None:
        self.header, self.arrays, self.acknowledged = header, arrays, False


class Link:
    """The exchange of one island with its syncer."""

    # After a restart of the syncer, the link sends each update again that the saved model does not
    # have; none is applied twice. If another island has taken this island's shard, the link keeps
    # the updates, and joins when a shard is free. `on_end` is called in a thread of the exchange
    # when an answer says that all merges are done, before the syncer is told that the island knows
    # it. `failure` ends the exchange: the island must stop.

    def __init__(
        self,
        call: Call,
        identity: Mapping[str, Any],
        formats: list[FragmentFormat],
        versions: list[int],
        on_end: Callable[[], None] | None = None,
        epoch: str | None = None,
    ) -> None:
        self._on_end = on_end
        self._epoch, self._discard = epoch, False
        self._call, self._identity, self._formats = call, identity, formats
        self._versions = list(versions)
        self._lock = threading.Lock()
        self._outbox: dict[int, _Outgoing] = {}
        self._inbox: list[ReceivedFragment] = []
        self._dropped: list[tuple[str, int | None]] = []
        self._joined, self._closed = False, threading.Event()
        self._wake, self._arrived = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._steps, self._seconds_per_update = 0, 0.0
        self.merges, self.finished, self.connected = 0, False, False
        self.heartbeat_seconds = 1.0
        self.shard: int | None = None
        self._last_answer = time.monotonic()
        self.failure: Exception | None = None
        self.sent_bytes = self.received_bytes = 0

    # Calls of the training thread: none of them waits for the network.

    def poll(self) -> SyncerStatus:
        """Return the fragments since the last call, and the state of the exchange."""
        if self.failure is not None:
            raise self.failure
        with self._lock:
            arrived, self._inbox = self._inbox, []
            dropped, self._dropped = self._dropped, []
            discard, self._discard = self._discard, False
            self._arrived.clear()
            acknowledged = all(update.acknowledged for update in self._outbox.values())
            return SyncerStatus(
                merges=self.merges,
                finished=self.finished,
                connected=self.connected,
                can_send=acknowledged and len(self._outbox) < MAX_OUTBOX,
                fragments=arrived,
                dropped=dropped,
                silent_seconds=time.monotonic() - self._last_answer,
                shard=self.shard,
                epoch=self._epoch,
                discard=discard,
            )

    def prepare(self, arrays: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Start to copy the arrays of an update to the host, and return them."""
        for array in arrays.values():
            array.copy_to_host_async()
        return arrays

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Queue an update, whose arrays may still be computed, for sending."""
        # The link reads the fields `sequence`, `fragment` and `target`, the merge that the update
        # is for, or None.
        with self._lock:
            if not self._discard:  # else it has progress that the island is about to discard
                self._outbox[header["sequence"]] = _Outgoing(dict(header), arrays)
        self._wake.set()

    def report(self, steps: int, seconds_per_update: float) -> None:
        """Set the numbers that the heartbeats report."""
        self._steps, self._seconds_per_update = steps, seconds_per_update

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for a fragment, or for the end of the exchange."""
        self._arrived.wait(seconds)

    def drain(self, seconds: float) -> None:
        """Wait at most `seconds` until the syncer has received the queued updates."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.connected and any(self._unacknowledged()):
            time.sleep(0.01)

    def start(self) -> None:
        """Start the threads of the exchange."""
        for name, loop in (("exchange", self._exchange_loop), ("heartbeat", self._heartbeat_loop)):
            thread = threading.Thread(target=loop, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self, seconds: float = 5.0) -> None:
        """Stop the threads, and tell the syncer that the island leaves, if it answers."""
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(seconds)
        if self.connected and self.failure is None:
            with contextlib.suppress(DisconnectedError, RefusedError):
                self._request("leave", timeout=2.0)

    def join(self) -> JoinReply:
        """Join the syncer, or join it again."""
        known: dict[str, Any] = {"epoch": self._epoch, "versions": self._versions}
        header = self._request("join", **self._identity, **known).header
        if header["status"] == "wait":
            self.shard = None
            raise WaitingError(header["reason"])
        if difference := find_other_format(header.get("wire_format")):
            raise RefusedError(f"the syncer {difference}")
        with self._lock:
            for update in self._outbox.values():
                update.acknowledged = False
            self._epoch = header.get("epoch")
            if header.get("discard"):
                self._outbox, self._inbox, self._dropped = {}, [], []
                self._versions, self._discard = [-1] * len(self._versions), True
                self._arrived.set()
        self.heartbeat_seconds, self._joined = header["heartbeat_seconds"], True
        self.shard = header["shard"]
        received = {int(p): (process, n) for p, (process, n) in header["received"].items()}
        return JoinReply(header["run"], self.shard, received, header["rounds"], header["finished"])

    def exchange(self) -> bool:
        """Send the queued updates and receive the new fragments; return whether there were any."""
        if not self._joined:
            self.join()
        busy = False
        for update in self._unacknowledged():
            arrays = {name: np.asarray(x) for name, x in update.arrays.items()}
            update.arrays = arrays  # frees the device's memory
            answer = self._request("push", arrays, TRANSFER_TIMEOUT, **update.header)
            if answer.header["status"] == "join":
                return True
            self.sent_bytes += sum(x.nbytes for x in arrays.values())
            self._acknowledge(update, answer.header["status"])
            busy = True
        while not self._closed.is_set():
            answer = self._request("pull", {}, TRANSFER_TIMEOUT, versions=self._versions)
            if "fragment" not in answer.header:
                break
            self._accept(answer)
            busy = True
            if not answer.header["more"]:
                break
        return busy

    def _request(
        self,
        kind: str,
        arrays: Mapping[str, np.ndarray] | None = None,
        timeout: float = CALL_TIMEOUT,
        **fields: Any,
    ) -> Message:
        header = {
            "kind": kind,
            "island": self._identity["island"],
            "incarnation": self._identity["incarnation"],
            "steps": self._steps,
            "heard_end": self.finished,
            **fields,
        }
        try:
            answer = self._call(Message(header, arrays or {}), timeout)
        except DisconnectedError:
            self.connected = False
            raise
        self.connected, self._last_answer = True, time.monotonic()
        if answer.header["status"] == "join":
            self._joined = False
            return answer
        saved = {int(p): sequence for p, sequence in answer.header["saved"].items()}
        with self._lock:
            if answer.header["finished"] and not self.finished and self._on_end is not None:
                self._on_end()
            self.merges, self.finished = answer.header["merges"], answer.header["finished"]
            for sequence, update in list(self._outbox.items()):
                if sequence <= saved.get(update.header["fragment"], 0):
                    del self._outbox[sequence]
        return answer

    def _unacknowledged(self) -> Iterator[_Outgoing]:
        with self._lock:
            waiting = [self._outbox[n] for n in sorted(self._outbox)]
        yield from (update for update in waiting if not update.acknowledged)

    def _acknowledge(self, update: _Outgoing, status: str) -> None:
        with self._lock:
            update.acknowledged = True
            if status not in ("accepted", "late", "repeated"):
                header = update.header
                self._outbox.pop(header["sequence"], None)
                self._dropped.append((status, header["target"]))
                self._arrived.set()

    def _accept(self, answer: Message) -> None:
        p, version = answer.header["fragment"], answer.header["version"]
        if difference := describe_other_arrays(answer.arrays, self._formats[p].shapes):
            raise RefusedError(
                f"the syncer sent other parameters in fragment {p}: {difference}. Use the same "
                "model and the same version of fedpax on both sides."
            )
        self._versions[p] = version
        self.received_bytes += sum(x.nbytes for x in answer.arrays.values())
        with self._lock:
            # An older version is obsolete.
            self._inbox = [fragment for fragment in self._inbox if fragment.number != p]
            self._inbox.append(ReceivedFragment(p, version, answer.arrays))
            self._arrived.set()

    def _exchange_loop(self) -> None:
        pause, backoff = FIRST_POLL, 0.1
        while not self._closed.is_set():
            try:
                busy = self.exchange()
                pause = FIRST_POLL if busy else min(2 * pause, LONGEST_POLL)
                backoff = 0.1
            except DisconnectedError:
                # At random, so that the islands of a syncer that returns do not call all at once.
                pause = backoff * random.uniform(0.5, 1.0)
                backoff = min(2 * backoff, LONGEST_BACKOFF)
                self._closed.wait(pause)
                continue
            except Exception as error:
                self._fail(error)
                return
            self._wake.wait(pause)
            self._wake.clear()

    def _heartbeat_loop(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            if self._joined:
                try:
                    self._request(
                        "heartbeat", timeout=5.0, seconds_per_update=self._seconds_per_update
                    )
                except DisconnectedError:
                    pass
                except Exception as error:
                    self._fail(error)
                    return
            self._closed.wait(max(self.heartbeat_seconds - (time.monotonic() - began), 0.05))

    def _fail(self, error: Exception) -> None:
        if not self._closed.is_set():
            self.failure = error
            self._arrived.set()
