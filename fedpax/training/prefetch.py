"""Prefetching: prepare the next round's cohort on a thread while the devices train."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import jax

from fedpax.checkpoints.run_position import StreamState
from fedpax.clients.cohort import Cohort, CohortStream, PackedStream
from fedpax.console import count_of
from fedpax.errors import ArgumentError
from fedpax.parallel.axes import ShardingTree, check_divisible
from fedpax.primitives.casts import checked_tree

Tree = TypeVar("Tree")


class Prefetch(AbstractContextManager["Prefetch"]):
    """A thread that draws cohorts one round ahead, each with the stream's position after it."""

    def __init__(self, stream: CohortStream, sharding: ShardingTree, num_rounds: int) -> None:
        self._stream = stream
        self._sharding = sharding
        self._rounds_left = num_rounds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cohorts")
        self._future: Future[tuple[Cohort, StreamState]] | None = None
        self._submit()

    def peek(self) -> Cohort:
        """Wait for the next round's cohort without drawing it."""
        return self._unpack(self._result()[0])

    def next(self) -> tuple[Cohort, StreamState]:
        """Wait for the next round's cohort; return it with the stream's position after it."""
        packed, state = self._result()
        self._submit()
        return self._unpack(packed), state

    def _unpack(self, packed: Cohort) -> Cohort:
        # Not on the thread: the processes of a job must start their programs in one order.
        return self._stream.unpack(packed) if isinstance(self._stream, PackedStream) else packed

    def _result(self) -> tuple[Cohort, StreamState]:
        if self._future is None:
            raise IndexError(
                "Prefetch has drawn all its rounds, expected no further call. Make it with a "
                "larger num_rounds."
            )
        try:
            return self._future.result()
        except StopIteration as error:
            raise ArgumentError(
                f"Run.cohorts ended {count_of(self._rounds_left + 1, 'round')} before "
                "training.rounds, expected an endless stream. Repeat the data, or lower "
                "training.rounds."
            ) from error

    def _submit(self) -> None:
        self._future = self._thread.submit(self._draw) if self._rounds_left > 0 else None
        self._rounds_left -= 1

    def _draw(self) -> tuple[Cohort, StreamState]:
        # A Cohort has checked its arrays itself; an algorithm of one's own can take other trees.
        stream = self._stream
        drawn = stream.next_packed() if isinstance(stream, PackedStream) else next(stream)
        cohort = checked_tree(drawn, "cohort")
        return put_on_mesh(cohort, self._sharding), self._stream.get_state()

    def __exit__(self, *error: object) -> None:
        """Stop the thread, after the cohort that it is preparing."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def put_on_mesh(tree: Tree, sharding: ShardingTree) -> Tree:
    """Copy arrays from the host to the mesh."""
    check_divisible("cohort", tree, sharding)
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    # jax.device_put would first compare the whole arrays across processes.
    return jax.tree.map(
        lambda target, subtree: jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, target, x.__getitem__), subtree
        ),
        sharding,
        tree,
    )
