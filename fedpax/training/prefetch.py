"""Prepares the next round's batches on a thread while the devices work on this round's."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import jax

from fedpax.training.experiment import BatchStream


class Prefetch(AbstractContextManager["Prefetch"]):
    """Draws rounds of batches one ahead, each with the stream's state just after it.

    The stream itself runs ahead of the training; what a checkpoint needs is where the stream
    stood after the round that it saves, so this is drawn together with the batches. A context
    manager: its end stops the thread.

    Args:
        stream: where the batches come from; only the thread touches it from here on.
        sharding: where they go, a prefix of their structure.
        count: how many rounds are to be drawn at most.

    Example:
        >>> import numpy as np
        >>> class Counting:
        ...     count = 0
        ...     def __next__(self):
        ...         self.count += 1
        ...         return np.full(2, self.count)
        ...     def get_state(self):
        ...         return {"count": self.count}
        ...     def set_state(self, state):
        ...         self.count = state["count"]
        >>> device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> with Prefetch(Counting(), device, count=2) as batches:
        ...     for _ in range(2):
        ...         values, state = batches.next()
        ...         print(values, state)
        [1 1] {'count': 1}
        [2 2] {'count': 2}
    """

    def __init__(self, stream: BatchStream, sharding: Any, count: int) -> None:
        self._stream = stream
        self._sharding = sharding
        self._left = count
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._future: Future[tuple[Any, Any]] | None = None
        self._submit()

    def peek(self) -> Any:
        """Waits for the next round's batches and leaves them to be drawn.

        Returns:
            The batches on the devices.
        """
        return self._result()[0]

    def next(self) -> tuple[Any, Any]:
        """Waits for the next round's batches and starts to prepare those after it.

        Returns:
            The batches on the devices, and the stream's state after them.

        Raises:
            ValueError: if the stream ends before ``count`` rounds.
            IndexError: if more than ``count`` rounds are asked for.
        """
        drawn = self._result()
        self._submit()
        return drawn

    def _result(self) -> tuple[Any, Any]:
        if self._future is None:
            raise IndexError("All rounds of batches have been drawn: make Prefetch with more.")
        try:
            return self._future.result()
        except StopIteration as error:
            raise ValueError(
                f"The stream of batches ended with {self._left + 1} rounds still to come: it must "
                "be endless (repeat the data), or training.rounds smaller."
            ) from error

    def _submit(self) -> None:
        self._future = self._thread.submit(self._draw) if self._left > 0 else None
        self._left -= 1

    def _draw(self) -> tuple[Any, Any]:
        batches = next(self._stream)
        return place(batches, self._sharding), self._stream.get_state()

    def __exit__(self, *error: object) -> None:
        """Stops the thread, after the batches that it is preparing."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def place(tree: Any, sharding: Any) -> Any:
    """Puts arrays of the host onto the mesh.

    Args:
        tree: a pytree of NumPy arrays, whole in every process.
        sharding: a ``NamedSharding``, or a tree of them that is a prefix of ``tree``.

    Returns:
        The same tree of ``jax.Array``.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    # device_put would compare the whole arrays across processes first.
    return jax.tree.map(
        lambda where, below: jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, where, x.__getitem__), below
        ),
        sharding,
        tree,
    )
