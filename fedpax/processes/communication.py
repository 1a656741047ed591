"""Communication in a job: small values of all processes, a control channel, arrays of process 0."""

import contextlib
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Num

from fedpax.errors import ConfigurationError, FedpaxError
from fedpax.processes.job_processes import JobProcessesError, find_job_processes
from fedpax.processes.json_line_socket import greetings, listen_on, parse_line, printable, read_line

NUM_LENGTH_BYTES = 8
NUM_FIRST_BYTES = 4096


def gather_json(value: Any) -> list[Any]:
    """Return the JSON values of all processes, in the order of the processes. A collective."""
    # Larger values than 4 KiB take a second collective.
    text = json.dumps(value).encode()
    length = len(text).to_bytes(NUM_LENGTH_BYTES, "little")
    firsts = _gather(length + text[:NUM_FIRST_BYTES], NUM_LENGTH_BYTES + NUM_FIRST_BYTES)
    lengths = [int.from_bytes(row[:NUM_LENGTH_BYTES], "little") for row in firsts]
    rests = [b""] * len(firsts)
    if (longest := max(lengths)) > NUM_FIRST_BYTES:
        # A power of two, so that values of similar sizes share a compiled program.
        rests = _gather(text[NUM_FIRST_BYTES:], 1 << (longest - NUM_FIRST_BYTES - 1).bit_length())
    rows = [first[NUM_LENGTH_BYTES:] + rest for first, rest in zip(firsts, rests, strict=True)]
    return [json.loads(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def all_agree(value: bool) -> bool:
    """Return whether a value is true in all processes. A collective."""
    return all(gather_json(value)) if jax.process_count() > 1 else value


def raise_everywhere(error: ConfigurationError | None, folder: Path) -> None:
    """Raise an error of process 0 in all processes, of which it alone has used a folder."""
    if jax.process_count() > 1:
        failed = multihost_utils.broadcast_one_to_all(np.int32(error is not None))
        if failed and error is None:
            error = ConfigurationError(
                f"Process 0 cannot use {folder}; its message names the reason and the remedy."
            )
    if error is not None:
        raise error


def _gather(content: bytes, size: int) -> list[bytes]:
    padded = np.zeros(size, np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    return [row.tobytes() for row in multihost_utils.process_allgather(padded).reshape(-1, size)]


class Broadcast:
    """Brings an array in the memory of process 0's host to the devices of all processes."""

    # `read`, inside a compiled program, takes one all-reduce, or an all-gather in a job of one
    # process. Neither method waits for the devices.

    def __init__(self, mesh: Mesh, like: Any) -> None:
        devices = mesh.devices.ravel()
        self._sources = np.array([i for i, d in enumerate(devices) if d.process_index == 0])
        self._like = like
        self._chunk = max(-(-like.size // len(self._sources)), 1)
        self._shape = (len(devices), self._chunk)
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._replicated = NamedSharding(mesh, PartitionSpec())

    def lay_out(self, array: np.ndarray | None) -> jax.Array:
        """Divide the array among the devices of process 0: `[devices, chunk]`, 0 elsewhere."""
        chunks = {} if array is None else self._divide(array)

        def row(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            (device,) = range(*index[0].indices(self._shape[0]))
            chunk = chunks.get(device)
            return np.zeros((1, self._chunk), self._like.dtype) if chunk is None else chunk

        return jax.make_array_from_callback(self._shape, self._sharding, row)

    def _divide(self, array: np.ndarray) -> dict[int, np.ndarray]:
        """Return the row of each device of process 0, `[1, chunk]`."""
        flat = np.asarray(array, self._like.dtype).ravel()
        missing = len(self._sources) * self._chunk - flat.size
        padded = np.pad(flat, (0, missing)) if missing else flat
        rows = padded.reshape(-1, 1, self._chunk)
        return dict(zip(self._sources.tolist(), rows, strict=True))

    def read(self, rows: jax.Array) -> Num[jax.Array, "..."]:
        """Gather the array on every device; may be traced."""
        chunks = jax.lax.with_sharding_constraint(rows[self._sources], self._replicated)
        return chunks.ravel()[: self._like.size].reshape(self._like.shape)


# ---- the control channel of a job: small values from process 0 to the other processes

SECONDS_TO_CONNECT = 60.0
SECONDS_TO_GREET = 5.0
SECONDS_BETWEEN_BEATS = 5.0
LONGEST_VALUE = 2**26
SECONDS_TO_FAIL = 5.0
"""Seconds in which a process can fail for the reason for which another one has failed."""
SECONDS_TO_RELAY = 2.0
"""Seconds for which process 0, which all others need, survives the end of another process."""
LONGEST_REASON = 2000


class ControlChannel(AbstractContextManager["ControlChannel"]):
    """A connection of process 0 with each other process, beside the devices."""

    # If a process ends without closing its channel, or is silent, every other process calls
    # `on_end`, in a thread; after an error, five seconds later, unless it has closed its own. All
    # processes must make the channel at the same point. `jax.distributed` aborts processes 50 to
    # 100 seconds after one is silent: the channel waits for 40.

    def __init__(self, on_end: Callable[[str], None], silence: float = 40.0) -> None:
        self._on_end, self._silence = on_end, silence
        self._sending = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._values: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._first_end: dict[str, str] = {}
        self.is_first = jax.process_index() == 0
        if jax.process_count() == 1:
            return
        with contextlib.ExitStack() as server:
            offer = {}
            if self.is_first:
                listener = server.enter_context(listen_on(0, jax.process_count()))
                offer = {
                    "hosts": _own_names(),
                    "port": listener.getsockname()[1],
                    "token": secrets.token_hex(16),
                }
            offer = gather_json(offer)[0]
            peers = _accept_all(listener, offer) if self.is_first else [_connect(offer)]
        for number, _, connection in peers:
            connection.settimeout(silence)
            self._connections[number] = connection
        for peer in peers:
            threading.Thread(target=self._read, args=peer, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def broadcast(self, value: Any) -> Any:
        """Return the value of process 0, a tree of JSON types, in all processes."""
        # Process 0 does not wait for the other processes.
        if self.is_first:
            self._send({"value": value})
            return value
        return self._values.get()

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        """Close the connections. After an error, the other processes end too."""
        self._closed.set()
        self._send({"failed": None if failure is None else _reason(failure)})
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):  # the thread that reads notices it
                    connection.sendall(line)

    def _beat(self) -> None:
        while not self._closed.wait(min(self._silence / 4, SECONDS_BETWEEN_BEATS)):
            self._send({"beat": True})

    def _read(self, number: int, host: str, connection: socket.socket) -> None:
        """Receive values until the other process closes its channel, ends or is silent."""
        with connection:
            end = self._receive(f"process {number} on {host}", connection)
            if end is None or self._closed.is_set():
                return
            end = self._first_end.setdefault("end", end)  # others follow from it
            if self.is_first:
                self._send({"lost": end})
                if self._closed.wait(SECONDS_TO_RELAY):
                    return
            self._on_end(end)

    def _receive(self, sender: str, connection: socket.socket) -> str | None:
        """Receive values; return which process has ended and how, or None if this one is done."""
        try:
            with connection.makefile("rb") as lines:
                while line := lines.readline(LONGEST_VALUE):
                    if (message := parse_line(line)) is None:
                        return f"{sender} has sent no JSON object within {LONGEST_VALUE} bytes"
                    if "value" in message:
                        self._values.put(message["value"])
                    elif "lost" in message:
                        return str(message["lost"])
                    elif message.get("failed"):
                        self._closed.wait(SECONDS_TO_FAIL)
                        return f"{sender} has failed: {message['failed']}"
                    elif "failed" in message:
                        return None
        except TimeoutError:
            return f"{sender} has sent nothing for {self._silence:g} s"
        except OSError:
            pass
        return f"{sender} has ended"


def _reason(error: BaseException) -> str:
    """Return an error's message as one line; of an error in the user's code, its kind too."""
    text = " ".join(str(error).split()).rstrip(".")
    kind = "" if isinstance(error, FedpaxError) else f"{type(error).__name__}: "
    return f"{kind}{text}"[:LONGEST_REASON]


def _own_names() -> list[str]:
    """Return the names by which other hosts may reach this one, likely ones first."""
    processes = find_job_processes()
    host_name = socket.gethostname()
    names = [host_name, socket.getfqdn()]
    with contextlib.suppress(OSError):
        names.append(socket.gethostbyname(host_name))
    return list(dict.fromkeys([*([processes.host] if processes else []), *names]))


def _accept_all(
    listener: socket.socket, offer: dict[str, Any]
) -> list[tuple[int, str, socket.socket]]:
    """Return number, host and connection of each other process. Strangers are ignored."""
    expected = set(range(1, jax.process_count()))
    connected: dict[int, tuple[int, str, socket.socket]] = {}
    deadline = time.monotonic() + SECONDS_TO_CONNECT
    with contextlib.closing(greetings(listener, deadline, SECONDS_TO_GREET)) as connections:
        for connection, greeting in connections:
            number, host = greeting.get("process"), printable(greeting.get("host"))
            with contextlib.suppress(OSError):
                if greeting.get("token") == offer["token"] and number in expected:
                    connection.settimeout(SECONDS_TO_GREET)
                    connection.sendall(b'{"welcome": true}\n')
                    connected[number] = number, host, connection
                    if connected.keys() == expected:
                        return list(connected.values())
                    continue
            connection.close()
    raise JobProcessesError(
        f"processes {sorted(expected - connected.keys())} did not connect to process 0 on port "
        f"{offer['port']} within {SECONDS_TO_CONNECT:g} s, expected all of them. Let the "
        "hosts of the job connect to each other on any port."
    )


def _connect(offer: dict[str, Any]) -> tuple[int, str, socket.socket]:
    greeting = {
        "token": offer["token"],
        "process": jax.process_index(),
        "host": socket.gethostname(),
    }
    reasons: dict[str, str] = {}
    deadline = time.monotonic() + SECONDS_TO_CONNECT
    while time.monotonic() < deadline:
        for host in offer["hosts"]:
            with contextlib.ExitStack() as after_failure:
                try:
                    connection = after_failure.enter_context(
                        socket.create_connection((host, offer["port"]), SECONDS_TO_GREET)
                    )
                    connection.sendall(json.dumps(greeting).encode() + b"\n")
                    if read_line(connection, SECONDS_TO_GREET).get("welcome"):
                        after_failure.pop_all()
                        return 0, host, connection
                    reasons[host] = "another program answers"
                except OSError as error:
                    reasons[host] = str(error)
        time.sleep(0.2)
    tried = "; ".join(f"{host}: {reason}" for host, reason in reasons.items())
    raise JobProcessesError(
        f"process {jax.process_index()} cannot connect to process 0 on port {offer['port']} "
        f"({tried}), expected one of these names to reach its host. Let the hosts of the job "
        "connect to each other on any port, and resolve each other's names."
    )
