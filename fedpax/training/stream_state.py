"""The position of a stream, collected from processes that each know a part of it."""

import functools
from typing import Any

import jax

from fedpax.parallel.gather import gather_json

StreamState = dict[str, Any] | bytes
"""The position of a stream, as its `get_state` returns it."""


def gather_stream_state(state: StreamState) -> StreamState:
    """Complete a stream's position from the parts that other processes know.

    None in a state is a value that this process does not know, such as the position in documents
    that only another process reads. All processes must call this in the same round.

    Args:
        state: this process's state.

    Returns:
        The state with all values that any process knows. A state of bytes is returned as it is:
        every process has all of it.
    """
    if jax.process_count() == 1 or isinstance(state, bytes):
        return state
    return functools.reduce(merge, gather_json(state), state)


def merge(state: Any, other: Any) -> Any:
    """Replace every None in a state by the value of another process.

    Args:
        state: a tree of dicts, lists and JSON values.
        other: a tree of the same structure, with values in the place of None.

    Example:
        >>> merge({"shards": [[3, 0], None], "round": 2}, {"shards": [None, [5, 1]], "round": 2})
        {'shards': [[3, 0], [5, 1]], 'round': 2}
    """
    if state is None:
        return other
    if isinstance(state, dict) and isinstance(other, dict):
        return {name: merge(value, other.get(name)) for name, value in state.items()}
    if isinstance(state, list) and isinstance(other, list):
        return [merge(*values) for values in zip(state, other, strict=True)]
    return state
