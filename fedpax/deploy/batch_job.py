"""A batch job before and after its pipeline: what its workers need, and what they have found."""

import secrets
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.deploy.artifacts import pack_stages
from fedpax.deploy.batch_work import CLIENT, PARTICIPANT, BatchWork, Clients
from fedpax.deploy.encoded_values import decode_values, encode_values
from fedpax.errors import ArgumentError
from fedpax.transforms.stages import Stages

BLOCK_BYTES, MOST_IN_BLOCK = 1 << 25, 64


def fitting_block_size(clients: Clients) -> int:
    """Return the number of clients whose data are read at once."""
    leaves = jax.tree.leaves(clients.shapes)
    size = sum(int(np.prod(x.shape[1:], dtype=int) * x.dtype.itemsize) for x in leaves)
    return max(1, min(MOST_IN_BLOCK, BLOCK_BYTES // max(size, 1)))


def check_program(engine: str, divided: Stages, count: int, rounds: int) -> None:
    """Raise if the server reads data, or nothing is carried from round to round."""
    arguments = {each.argument for each in divided.owned}
    names = divided.argument_names
    read = {names.index(name) for name in divided.wiring().arguments if name in names}
    for i in sorted(read - arguments):
        if i >= count:
            raise ArgumentError(
                f"{engine}(): the server reads {names[i]}, but data are read where a participant "
                "runs. Return from a federated_map() what the server needs of it."
            )
    if rounds > 1 and not divided.replaced:
        raise ArgumentError(
            f"{engine}(): rounds={rounds}, but no result of the program takes the place of an "
            "argument. Return the new first argument first, of the same types: "
            "(state, data) -> (state, metrics)."
        )


def make_work(
    divided: Stages, leaves: Sequence[Any], clients: Callable[[], Clients]
) -> tuple[BatchWork, bytes, dict[int, bytes]]:
    """Make what the workers of a job need."""
    manifest, files = pack_stages(divided, platforms=("cpu", "cuda", "tpu"), portable=False)
    names = divided.argument_names
    by_kind: dict[int, dict[str, np.ndarray]] = {PARTICIPANT: {}, CLIENT: {}}
    for each in divided.owned:
        if each.argument < len(leaves):
            owner = CLIENT if each.in_store else PARTICIPANT
            by_kind[owner][each.name] = np.asarray(leaves[each.argument])
    first = {name: x[0] for states in by_kind.values() for name, x in states.items()}
    rows: dict[int, bytes] = {}
    for owner, states in by_kind.items():
        differ = [np.any((x != x[:1]).reshape(len(x), -1), axis=1) for x in states.values()]
        if differ and len(other := np.flatnonzero(np.any(differ, axis=0))):
            others = {name: x[other] for name, x in states.items()}
            rows[owner] = encode_values({"": other, **others})
    work = BatchWork(
        job=f"fedpax-{uuid.uuid4().hex}",
        noise_key=secrets.token_bytes(32),
        manifest=manifest,
        files=files,
        open_clients=clients,
        data=tuple(
            (each.name, each.argument - len(leaves))
            for each in divided.owned
            if each.argument >= len(leaves)
        ),
        states=(tuple(by_kind[PARTICIPANT]), tuple(by_kind[CLIENT])),
        first=encode_values(first),
        replaced={
            divided.result_names[result]: names[argument]
            for result, argument in divided.replaced.items()
        },
    )
    read = [name for name in manifest["arguments"] if name in names]  # without noise
    arguments = {name: leaves[names.index(name)] for name in read}
    return work, encode_values(arguments), rows


def read_results(
    divided: Stages, leaves: Sequence[Any], results: Sequence[bytes], states: Iterable[bytes]
) -> list[Any]:
    """Return the result of each round; the last result has the states after its round."""
    positions = {name: i for i, name in enumerate(divided.result_names)}
    leaves_of: list[dict[int, Any]] = [
        {positions[name]: jnp.asarray(x) for name, x in decode_values(content).items()}
        for content in results
    ]
    kept = {each.name: each for each in divided.owned if each.result is not None}
    rows = {name: np.array(leaves[each.argument]) for name, each in kept.items()}
    for content in states:
        values = decode_values(content)
        keys = values.pop("")
        for name in rows.keys() & values.keys():
            rows[name][keys] = values[name]
    last = {kept[name].result: jnp.asarray(x) for name, x in rows.items()}
    leaves_of[-1].update({i: x for i, x in last.items() if i is not None})
    return [divided.result(leaves) for leaves in leaves_of]
