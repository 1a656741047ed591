"""Participants in processes of their own: each has its values alone, and runs exported stages."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from fedpax.deploy.artifacts import pack_stages
from fedpax.deploy.encoded_values import decode_values, encode_values
from fedpax.deploy.packets import Packet, receive, send
from fedpax.deploy.runtime import Artifact
from fedpax.errors import FedpaxError
from fedpax.transforms.discrete_gaussian import draw_noise
from fedpax.transforms.stages import Request, Stages


class ParticipantProcessError(FedpaxError):
    """A process of participants has ended; its error is on stderr."""


class ParticipantProcesses(AbstractContextManager["ParticipantProcesses"]):
    """Processes that participants are dealt to; a context manager."""

    def __init__(
        self, stages: Stages, own: Mapping[int, Mapping[str, Any]], processes: int
    ) -> None:
        manifest, files = pack_stages(stages, portable=False)
        program = encode_values(
            {name: np.frombuffer(x, np.uint8) for name, x in files.items()}
            | {"": np.frombuffer(json.dumps(manifest).encode(), np.uint8)}
        )
        self.participants = list(own)
        self._num_terms = [len(stage.terms) for stage in stages]
        self._dealt = [self.participants[k::processes] for k in range(processes)]
        with contextlib.ExitStack() as stack:
            self._connections = [stack.enter_context(_start()) for _ in self._dealt]
            self._stack = stack.pop_all()
        for connection, dealt in zip(self._connections, self._dealt, strict=True):
            values = [encode_values(own[i]) for i in dealt]
            send(connection, Packet({"participants": dealt}, [program, *values]))

    def answers(self, request: Request) -> dict[int, tuple[Sequence[Any], Sequence[Any]]]:
        """Return the terms and the shown values of each participant."""
        shared = _encoded(request.shared)
        for connection, dealt in zip(self._connections, self._dealt, strict=True):
            rows = [
                encode_values({str(k): x[i] for k, x in enumerate(request.rows)}) for i in dealt
            ]
            send(connection, Packet({"stage": request.stage}, [shared, *rows]))
        split = self._num_terms[request.stage]
        replies = {i: list(decode_values(content).values()) for i, content in self._replies()}
        return {i: (values[:split], values[split:]) for i, values in replies.items()}

    def kept(self) -> dict[int, dict[str, Any]]:
        """Return what each participant keeps."""
        for connection in self._connections:
            send(connection, Packet({"stage": None}))
        return {i: decode_values(content) for i, content in self._replies()}

    def _replies(self) -> Iterator[tuple[int, bytes]]:
        replies: dict[int, bytes] = {}
        for connection, dealt in zip(self._connections, self._dealt, strict=True):
            try:
                replies |= zip(dealt, receive(connection).arrays, strict=True)
            except ConnectionError as error:
                raise ParticipantProcessError(
                    f"The process of the participants {dealt} has ended, expected their answers. "
                    "Its error is on stderr."
                ) from error
        return iter((i, replies[i]) for i in self.participants)

    def __exit__(self, *error: Any) -> None:
        """End the processes."""
        self._stack.close()


def _encoded(values: Sequence[Any]) -> bytes:
    return encode_values({str(k): x for k, x in enumerate(values)})


@contextlib.contextmanager
def _start() -> Iterator[socket.socket]:
    """Start a process, which ends when its connection is closed."""
    here, there = socket.socketpair()
    # It imports from the same places as this process.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    try:
        yield here
    finally:
        here.close()
        process.wait()


def serve(connection: socket.socket) -> None:
    """Answer the requests of a server for some participants until it closes the connection."""
    begin = receive(connection)
    program, *values = begin.arrays
    files = {name: x.tobytes() for name, x in decode_values(program).items()}
    artifact = Artifact(json.loads(files.pop("")), files)
    participants = begin.values["participants"]
    own = {i: decode_values(x) for i, x in zip(participants, values, strict=True)}
    kept: dict[int, dict[str, Any]] = {i: {} for i in participants}
    while True:
        try:
            request = receive(connection)
        except ConnectionError:  # the server has ended
            return
        stage = request.values["stage"]
        if stage is None:
            send(connection, Packet({}, [encode_values(kept[i]) for i in participants]))
            continue
        shared = list(decode_values(request.arrays[0]).values())
        answers = []
        for i, content in zip(participants, request.arrays[1:], strict=True):
            rows = list(decode_values(content).values())
            noise = draw_noise(artifact.manifest["stages"][stage]["noise"])
            given = own[i] | kept[i] | noise
            terms, shown, new = artifact.client(stage)(i, shared, rows, given)
            kept[i] |= new
            answers.append(_encoded([*terms, *shown]))
        send(connection, Packet({}, answers))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as opened:
        serve(opened)
