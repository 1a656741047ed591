"""The stages of a program on one machine, as the reference for other engines or out of core."""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedpax.deploy.artifacts import pack_stages
from fedpax.deploy.batch_work import Clients, check_clients
from fedpax.deploy.encoded_values import decode_list, decode_values, encode_list, encode_values
from fedpax.deploy.packets import Packet, receive, send
from fedpax.deploy.runtime import Artifact
from fedpax.errors import ArgumentError, FedpaxError
from fedpax.transforms.out_of_core import out_of_core
from fedpax.transforms.stage_noise import draw_noise
from fedpax.transforms.stages import Request, Stages, drive


def run_local(
    stages: Stages,
    *args: Any,
    participants: Sequence[int] | None = None,
    processes: int | None = None,
) -> Any:
    """Run the stages of a program on this machine, each participant by itself.

    Args:
        stages: the stages, as `fedpax.stages` makes them.
        *args: the arguments of the program, all of them arrays.
        participants: the participants that answer. The others keep their states. Default None: all.
        processes: number of processes that run the exported stages. Default None: this process runs
            them.

    Returns:
        The result of the program.

    Raises:
        ArgumentError: there is no participant of a number in `participants`, or `processes` is
            below 1.
        ParticipantProcessError: a process has ended.

    Example:
        >>> import fedpax, jax.numpy as jnp
        >>> @fedpax.program(clients=3)
        ... def average(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: w * x, x))
        >>> args = 2.0, jnp.array([1.0, 4.0, 7.0])
        >>> stages = fedpax.stages(average, *args)
        >>> run_local(stages, *args).item(), run_local(stages, *args, participants=[0, 1]).item()
        (8.0, 5.0)
    """
    size = stages.placement.size
    answer = list(range(size) if participants is None else participants)
    for i in answer:
        if not 0 <= i < size:
            raise ArgumentError(
                f"run_local(): participants has {i}, expected numbers from 0 to {size - 1}, of the "
                f"{size} {stages.placement.name}."
            )
    if processes is not None and processes < 1:
        raise ArgumentError(f"run_local(): processes={processes}, expected at least 1, or None.")
    states, known = stages.own(*args), stages.known(*args)
    own = {i: known | {name: rows[i] for name, rows in states.items()} for i in answer}
    if processes is None:
        result, kept = _run(stages, args, _Participants(stages, own))
    else:
        with ParticipantProcesses(stages, own, min(processes, len(own))) as elsewhere:
            result, kept = _run(stages, args, elsewhere)
    for name, rows in states.items():
        changed = [i for i in own if name in kept[i]]
        if changed:
            new_rows = jnp.stack([kept[i][name] for i in changed])
            states[name] = rows.at[jnp.array(changed)].set(new_rows)
    return stages.with_kept(result, args, states)


class _Participants:
    def __init__(self, stages: Stages, own: Mapping[int, Mapping[str, Any]]) -> None:
        self._stages, self._own = stages, own
        self._kept: dict[int, dict[str, Any]] = {i: {} for i in own}

    def answers(self, request: Request) -> dict[int, tuple[Sequence[Any], Sequence[Any]]]:
        """Return the terms and the shown values of each participant."""
        client = self._stages.client(request.stage)
        answers: dict[int, tuple[Sequence[Any], Sequence[Any]]] = {}
        for i, own in self._own.items():
            rows = [x[i] for x in request.rows]
            noise = self._stages.draw_noise(request.stage)
            terms, shown, new = client(i, request.shared, rows, {**own, **self._kept[i], **noise})
            self._kept[i] |= new
            answers[i] = terms, shown
        return answers

    def kept(self) -> dict[int, dict[str, Any]]:
        """Return what each participant keeps."""
        return self._kept


def _run(
    stages: Stages, args: Sequence[Any], participants: "_Participants | ParticipantProcesses"
) -> tuple[Any, dict[int, dict[str, Any]]]:
    """Return the result, and what each participant keeps."""

    def answer(request: Request) -> tuple[Sequence[Any], list[jax.Array], list[int]]:
        answers = participants.answers(request)
        if not answers:
            return (), [], []
        terms, shown = zip(*answers.values(), strict=True)
        merged = functools.reduce(stages.merge(request.stage), terms)
        return merged, [jnp.stack(rows) for rows in zip(*shown, strict=True)], list(answers)

    return drive(stages.run(*args), answer), participants.kept()


# ---- participants in their own processes: each has its values alone, and runs exported stages


class ParticipantProcessError(FedpaxError):
    """A process of participants has ended; its error is on stderr."""


class ParticipantProcesses(AbstractContextManager["ParticipantProcesses"]):
    """Processes that participants are dealt to."""

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
        shared = encode_list(request.shared)
        for connection, dealt in zip(self._connections, self._dealt, strict=True):
            rows = [encode_list(x[i] for x in request.rows) for i in dealt]
            send(connection, Packet({"stage": request.stage}, [shared, *rows]))
        split = self._num_terms[request.stage]
        replies = {i: decode_list(content) for i, content in self._replies()}
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
        self._stack.close()


@contextlib.contextmanager
def _start() -> Iterator[socket.socket]:
    """Start a process, which ends when its connection is closed."""
    here, there = socket.socketpair()
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
        shared = decode_list(request.arrays[0])
        answers = []
        for i, content in zip(participants, request.arrays[1:], strict=True):
            rows = decode_list(content)
            noise = draw_noise(artifact.manifest["stages"][stage]["noise"])
            given = own[i] | kept[i] | noise
            terms, shown, new = artifact.client(stage)(i, shared, rows, given)
            kept[i] |= new
            answers.append(encode_list([*terms, *shown]))
        send(connection, Packet({}, answers))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as opened:
        serve(opened)


# ---- rounds on this machine whose participants' data are read chunk by chunk (`out_of_core`)


def run_out_of_core(
    program: Callable[..., Any],
    *args: Any,
    clients: Callable[[], Clients],
    chunk_size: int,
    rounds: int = 1,
    first_round: int = 0,
) -> list[Any]:
    """Run rounds of a program, with the data of one chunk of participants read at a time.

    It is `fedpax.out_of_core` in a loop.

    Args:
        program: a function decorated with `fedpax.program`, such as the `round` of an algorithm.
            Its last argument is the data of the participants.
        *args: its other arguments: arrays.
        clients: opens the clients: a function without arguments.
        chunk_size: number of participants of a chunk.
        rounds: number of rounds. The first result of a round is the first argument of the next.
        first_round: number of the first round.

    Returns:
        For each round the result of the program. Of all but the last round, the values that the
        next round replaces are types (`jax.ShapeDtypeStruct`).

    Raises:
        ValueError: the program has no maps, or has maps of several placements.

    Example:
        >>> import fedpax, jax.numpy as jnp
        >>> from fedpax.deploy import EachClient
        >>> @fedpax.program(clients=100)
        ... def average(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: w + x, x)), ()
        >>> clients = EachClient(lambda client: np.float32(client), num_clients=100)
        >>> results = run_out_of_core(
        ...     average, jnp.float32(0), clients=lambda: clients, chunk_size=10, rounds=2
        ... )
        >>> float(results[-1][0])
        99.0
    """
    if rounds < 1:
        raise ArgumentError(f"run_out_of_core(): rounds={rounds}, expected at least 1.")
    opened = clients()
    check_clients(opened)
    run, last, results = out_of_core(program, chunk_size), first_round + rounds - 1, []
    for number in range(first_round, last + 1):
        result = run(*args, _data(opened, number, chunk_size))
        if number < last:
            state, *others = result
            args = (state, *args[1:])
            result = (jax.tree.map(_type, state), *others)
        results.append(result)
    return results


def _type(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _data(clients: Clients, number: int, chunk_size: int) -> Any:
    """Return the data of a round, whose leaves are read when they are sliced."""
    ids = clients.client_ids(number)

    @functools.lru_cache(maxsize=1)  # the leaves of a chunk are sliced one after another
    def read(start: int, stop: int) -> list[NDArray[Any]]:
        return jax.tree.leaves(clients.read_clients(number, ids[start:stop]))

    shapes, tree = jax.tree.flatten(clients.shapes)
    leaves = [_RoundLeaf(read, place, shape, chunk_size) for place, shape in enumerate(shapes)]
    return jax.tree.unflatten(tree, leaves)


class _RoundLeaf:
    """One leaf of the data of a round."""

    def __init__(
        self,
        read: Callable[[int, int], list[NDArray[Any]]],
        place: int,
        like: jax.ShapeDtypeStruct,
        chunk_size: int,
    ) -> None:
        self._read, self._place, self._chunk_size = read, place, chunk_size
        self.shape, self.dtype = like.shape, like.dtype

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        if rows is not Ellipsis:
            start, stop, _ = rows.indices(self.shape[0])
            return np.asarray(self._read(start, stop)[self._place])
        # For a leaf of all participants, the other leaves are read too.
        size, total = self._chunk_size, self.shape[0]
        return np.concatenate([self[i : min(i + size, total)] for i in range(0, total, size)])
