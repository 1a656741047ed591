"""The work of a batch job that runs the rounds of a program, without the engine that carries it."""

import functools
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedpax.deploy.encoded_values import decode_values, encode_list, encode_values
from fedpax.deploy.runtime import Artifact
from fedpax.errors import ArgumentError
from fedpax.transforms.stage_noise import draw_noise

PARTICIPANT, CLIENT = 0, 1
"""The two numbers of a `Member`, by which states between rounds are kept."""

Member = tuple[int, int, bytes]
"""A participant of a round: its number, its client, and encoded values that it keeps."""


NOTHING = encode_values({})


class Clients(Protocol):
    """The clients of the rounds, and their data; `fedpax.data.cohort_rounds` makes one.

    Attributes:
        shapes: the types of the data of a round, arrays `[participants, ...]`.
    """

    @property
    def shapes(self) -> Any:
        """The types of the data of a round."""
        ...

    def client_ids(self, round_number: int) -> NDArray[np.integer]:
        """Return the client of each participant of a round, from 0; -1 where there is none."""
        ...

    def read_clients(self, round_number: int, client_ids: NDArray[np.integer]) -> Any:
        """Return the data of some clients of a round: arrays `[len(client_ids), ...]`."""
        ...


class EachClient(NamedTuple):
    """Clients that all take part in each round, with data from a function.

    Attributes:
        function: `client -> arrays`, the data of a client, from 0.

    Example:
        >>> clients = EachClient(lambda client: {"x": np.arange(2) + client}, num_clients=10)
        >>> clients.read_clients(0, np.array([3, 7]))["x"].tolist()
        [[3, 4], [7, 8]]
    """

    function: Callable[[int], Any]
    num_clients: int

    @property
    def shapes(self) -> Any:
        """The types of the data of a round."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.num_clients, *np.shape(x)), np.asarray(x).dtype),
            self.function(0),
        )

    def client_ids(self, round_number: int) -> NDArray[np.integer]:
        """Return all clients."""
        return np.arange(self.num_clients)

    def read_clients(self, round_number: int, client_ids: NDArray[np.integer]) -> Any:
        """Return the data of some clients."""
        return jax.tree.map(lambda *rows: np.stack(rows), *map(self.function, client_ids.tolist()))


class BatchWork(NamedTuple):
    """What each process of a job needs, to be pickled.

    `states` has the names of kept values by `PARTICIPANT` and `CLIENT`.
    """

    job: str
    noise_key: bytes
    manifest: Mapping[str, Any]
    files: Mapping[str, bytes]
    open_clients: Callable[[], Clients]
    data: tuple[tuple[str, int], ...]
    states: tuple[tuple[str, ...], tuple[str, ...]]
    first: bytes
    replaced: Mapping[str, str]

    @property
    def num_stages(self) -> int:
        """Number of stages of a round."""
        return len(self.manifest["stages"])

    def sample(self, round_number: int) -> Iterator[Member]:
        """Yield the participants of a round."""
        _, clients = _opened(self)
        for i, client in enumerate(clients.client_ids(round_number).tolist()):
            yield i, client, NOTHING

    def join(
        self, key: int, members: Iterable[Member], states: Iterable[bytes]
    ) -> Iterator[tuple[str, Any]]:
        """Give members the states under their key, or pass on the states that nobody takes."""
        state, taken = list(states), False
        for i, client, kept in members:
            taken = True
            if state and key >= 0:
                kept = encode_values({**decode_values(kept), **decode_values(state[0])})
            yield "members", (i, client, kept)
        if state and not taken:
            yield "states", (key, state[0])

    def run_clients(
        self, stage: int, round_number: int, members: Sequence[Member], request: bytes
    ) -> Iterator[tuple[str, Any]]:
        """Run a stage for some participants."""
        artifact, clients = _opened(self)
        ids = np.array([client for _, client, _ in members])
        leaves = jax.tree.leaves(clients.read_clients(round_number, ids))
        shared, rows = _request(request)
        run, merge = artifact.client(stage), artifact.merge(stage)
        messages = self.manifest["stages"][stage]
        names = {value["name"] for value in messages["own"]}
        data = [(name, leaves[place]) for name, place in self.data if name in names]
        is_last = stage == self.num_stages - 1
        first = decode_values(self.first)
        merged: Any = None
        for row, (i, client, kept) in enumerate(members):
            own = {**first, **{name: leaf[row] for name, leaf in data}, **decode_values(kept)}
            values = own | draw_noise(messages["noise"])
            terms, shown, new = run(i, shared, [x[i] for x in rows], values)
            merged = terms if merged is None else merge(merged, terms)
            if shown:
                yield "shown", (i, encode_list(shown))
            if not is_last:
                yield "members", (i, client, encode_values({**decode_values(kept), **new}))
                continue
            for owner, key in ((PARTICIPANT, i), (CLIENT, client)):
                states = {name: new.get(name, own[name]) for name in self.states[owner]}
                if states and key >= 0:
                    yield f"states {owner}", (key, encode_values(states))
        yield "terms", encode_list(merged or ())

    def merge(self, stage: int, terms: Iterable[bytes]) -> bytes:
        """Merge terms of a stage."""
        artifact, _ = _opened(self)
        groups = [tuple(decode_values(content).values()) for content in terms]
        if not groups:
            groups = [artifact.empty(stage)]
        merged: Sequence[Any] = functools.reduce(artifact.merge(stage), groups)
        return encode_list(merged)

    def start(self, arguments: bytes) -> Iterator[tuple[str, bytes]]:
        """Run the server's part before the first stage of a round; see `serve`."""
        artifact, _ = _opened(self)
        random = _random_stream(self.noise_key + arguments)
        noise = draw_noise(self.manifest["noise"], random)
        return self._advance(0, artifact.begin({**decode_values(arguments), **noise}), ())

    def serve(
        self, stage: int, values: bytes, terms: bytes, shown: Iterable[tuple[int, bytes]]
    ) -> Iterator[tuple[str, bytes]]:
        """Run the server's part after a stage."""
        known = {int(number): x for number, x in decode_values(values).items()}
        part = self._parts[stage]
        numbers = self.manifest["server"][part]["shown"]
        if numbers:
            ordered = [decode_values(content).values() for _, content in sorted(shown)]
            columns = zip(*ordered, strict=True)
            known |= {v: np.stack(rows) for v, rows in zip(numbers, columns, strict=True)}
        yield from self._advance(part + 1, known, tuple(decode_values(terms).values()))

    def next_arguments(self, arguments: bytes, results: bytes) -> bytes:
        """Return the arguments of the next round."""
        new = {
            self.replaced[name]: x
            for name, x in decode_values(results).items()
            if name in self.replaced
        }
        old = decode_values(arguments)
        return encode_values({name: new.get(name, x) for name, x in old.items()})

    def metrics(self, results: bytes) -> bytes:
        """Return the results that the next round does not need."""
        values = decode_values(results)
        return encode_values({n: x for n, x in values.items() if n not in self.replaced})

    @property
    def _parts(self) -> list[int]:
        """The part of the server before each stage."""
        wires = self.manifest["server"]
        return [part for part, wire in enumerate(wires) if wire["stage"] is not None]

    def _advance(
        self, part: int, values: Mapping[int, Any], terms: Sequence[Any]
    ) -> Iterator[tuple[str, bytes]]:
        """Run parts of the server up to the next request, or to the end."""
        artifact, _ = _opened(self)
        wires = self.manifest["server"]
        while True:
            values, request = artifact.advance(part, values, terms)
            part, terms = part + 1, ()
            if request is not None:
                reads = ("inputs", "shared", "rows")
                later = {v for wire in wires[part:] for read in reads for v in wire[read]}
                kept = {str(v): x for v, x in values.items() if v in later}
                yield "values", encode_values(kept)
                named = {f"shared {i}": x for i, x in enumerate(request.shared)}
                named |= {f"rows {i}": x for i, x in enumerate(request.rows)}
                yield "request", encode_values(named)
                return
            if part == len(wires):
                yield "results", encode_values(artifact.results(values))
                return


def stack_states(states: Sequence[tuple[int, bytes]]) -> bytes:
    """Encode the states of several members as arrays `[members, ...]`, for a file."""
    rows = [decode_values(content) for _, content in states]
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return encode_values({"": np.array([key for key, _ in states], np.int64), **stacked})


def split_states(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the states of a file."""
    values = decode_values(content)
    for row, key in enumerate(values.pop("").tolist()):
        yield key, encode_values({name: x[row] for name, x in values.items()})


def _random_stream(key: bytes) -> Callable[[int], bytes]:
    """Return a function `number -> bytes` of the stream of a key, by SHAKE256."""
    digest, calls = hashlib.sha3_512(key).digest(), itertools.count()
    return lambda n: hashlib.shake_256(digest + next(calls).to_bytes(8, "big")).digest(n)


@functools.lru_cache(maxsize=4)
def _request(content: bytes) -> tuple[list[Any], list[Any]]:
    """Decode a request, once for the batches of a process, onto the device."""
    values = decode_values(content)
    shared = [jnp.asarray(x) for name, x in values.items() if name.startswith("shared")]
    rows = [x for name, x in values.items() if name.startswith("rows")]
    return shared, rows


_OPEN: dict[str, tuple[Artifact, Clients]] = {}
_LOCK = threading.Lock()


def _opened(work: BatchWork) -> tuple[Artifact, Clients]:
    """Return the functions and the clients of a job, opened once in a process."""
    with _LOCK:
        if work.job not in _OPEN:
            while len(_OPEN) > 1:  # the work of earlier jobs
                _OPEN.pop(next(iter(_OPEN)))
            clients = work.open_clients()
            check_clients(clients)
            _OPEN[work.job] = Artifact(work.manifest, work.files), clients
        return _OPEN[work.job]


def check_clients(clients: Any) -> None:
    """Check that an object can be the clients of a job."""
    lacking = [n for n in ("shapes", "client_ids", "read_clients") if not hasattr(clients, n)]
    if lacking:
        raise ArgumentError(
            f"clients() returned a {type(clients).__name__} without {', '.join(lacking)}, expected "
            "clients whose data can be read one by one. Return fedpax.data.cohort_rounds(...), or "
            "fedpax.deploy.EachClient(function, num_clients)."
        )
