"""Rounds on this machine whose participants' data are read chunk by chunk (`out_of_core`)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedpax.deploy.batch_work import Clients, check_clients
from fedpax.errors import ArgumentError
from fedpax.transforms.out_of_core import out_of_core


def run_out_of_core(
    program: Callable[..., Any],
    *args: Any,
    clients: Callable[[], Clients],
    chunk_size: int,
    rounds: int = 1,
    first_round: int = 0,
) -> list[Any]:
    """Run rounds of a program, with the data of one chunk of participants read at a time.

    It is `fedpax.out_of_core(program, chunk_size)` in a loop, with data from the same clients as
    `fedpax.deploy.beam.run_beam`: at most two chunks of them are in memory.

    Args:
        program: a function decorated with `fedpax.program`, such as the `round` of an algorithm.
            Its last argument is the data of the participants.
        *args: its other arguments: arrays.
        clients: opens the clients: a function without arguments.
        chunk_size: number of participants whose data are in memory at a time.
        rounds: number of rounds. The first result of a round is the first argument of the next, as
            in `round(state, cohort) -> (state, metrics)`.
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
        ... def step_towards_mean(w, x):
        ...     gap = fedpax.federated_map(lambda x: x - w, x)
        ...     return w + 0.5 * fedpax.federated_mean(gap), fedpax.federated_max(jnp.abs(gap))
        >>> def open_clients():
        ...     return EachClient(lambda client: np.float32(client), num_clients=100)
        >>> results = run_out_of_core(
        ...     step_towards_mean, jnp.float32(0), clients=open_clients, chunk_size=10, rounds=2
        ... )
        >>> [float(gap) for _, gap in results], float(results[-1][0])
        ([99.0, 74.25], 37.125)
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
    leaves = [_Rows(read, place, shape, chunk_size) for place, shape in enumerate(shapes)]
    return jax.tree.unflatten(tree, leaves)


class _Rows:
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
        # The server reads a leaf of all participants, such as their numbers: the other leaves of a
        # chunk are read too, and dropped.
        size, total = self._chunk_size, self.shape[0]
        return np.concatenate([self[i : min(i + size, total)] for i in range(0, total, size)])
