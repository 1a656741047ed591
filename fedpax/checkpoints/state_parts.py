"""The parts of a run's state in a checkpoint: all rows of its client stores, or some of them."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedpax.algorithm import State
from fedpax.checkpoints.orbax_files import ocp, on_one_device
from fedpax.checkpoints.restored_stores import restore_stores
from fedpax.checkpoints.row_changes import (
    PARENT,
    Parent,
    RowChanges,
    identity_of,
    lineage,
    read_parents,
    record_of_stores,
    with_stores,
    without_stores,
)
from fedpax.run_files.paths import complete_rounds, write_atomically

CHUNK_BYTES = 1 << 26
"""The most bytes of an array that are compressed at once."""

FILE_BYTES = 1 << 27
"""The bytes of compressed arrays that are in memory before they are written to a file."""


class StateParts:
    """The parts of a run's state in its checkpoints.

    `params` is the model, where the state computes it; `rows` the rows of client stores that
    changed since the parent. Without `rows`, `state` has the client stores.
    """

    def __init__(self, folder: Path, parents: dict[int, int]) -> None:
        self._folder, self._parents = folder, parents
        self._rows = RowChanges()
        self._parent: Parent | None = None
        self._parents.update(read_parents(folder, complete_rounds(folder)))

    def forget(self) -> None:
        """Let the next checkpoint have all rows: the newest one is not known to be complete."""
        self._rows.forget()

    def to_save(self, round_number: int, state: State) -> "dict[str, ocp.args.CheckpointArgs]":
        """Return what the checkpoint of a round saves."""
        items: dict[str, ocp.args.CheckpointArgs] = {}
        if "params" not in getattr(state, "_fields", ("params",)):
            # A model that the state computes from its fields, such as the islands' mean.
            items["params"] = _in_chunks(on_one_device(state.params))
        if not self._has_needed_rounds():
            self._rows.forget()
        record = record_of_stores(state)
        self._parent = None
        self._parents.pop(round_number, None)
        if (changed := self._rows.advance(round_number, state)) is not None:
            self._parent = changed.parent
            self._parents[round_number] = changed.parent.round
            items["rows"] = _in_chunks(changed.stores)
            state = without_stores(state)
        items["state"] = _in_chunks(on_one_device(state), record)
        return items

    def _has_needed_rounds(self) -> bool:
        """Return whether the checkpoints are there that the next one can complete."""
        needed = {*self._rows.needed_rounds}
        if not needed:
            return True
        has_them = needed <= {*complete_rounds(self._folder)}
        if jax.process_count() > 1:
            has_them = bool(multihost_utils.broadcast_one_to_all(np.int32(has_them)))
        return has_them

    def write_parent(self, draft: Path) -> None:
        """Name the parent of a checkpoint whose other files are written."""
        if self._parent is not None:
            identity = identity_of(self._folder / str(self._parent.round))
            record = self._parent._replace(identity=identity)._asdict()
            write_atomically(draft / PARENT, json.dumps(record) + "\n")

    def restore(self, manager: "ocp.CheckpointManager", step: int, like: State) -> Any:
        """Restore the state of a checkpoint; the next one then writes what has changed."""
        ancestors = lineage(self._folder, step)
        item = (
            without_stores(like, ocp.PLACEHOLDER) if len(ancestors) == 1 else without_stores(like)
        )
        arguments = ocp.checkpoint_utils.construct_restore_args(item)
        restore = ocp.args.PyTreeRestore(item=item, restore_args=arguments)
        state = manager.restore(step, args=ocp.args.Composite(state=restore)).state
        leaves, newest = restore_stores(self._folder, ancestors, like)
        state = with_stores(without_stores(state), like, leaves)
        rounds = {0 if parent is None else parent.position: number for number, parent in ancestors}
        self._rows.start(state, rounds, newest)
        return state


def _in_chunks(tree: Any, record: Any = None) -> "ocp.args.CheckpointArgs":
    """Save arrays in chunks: saved whole, they are in memory two more times meanwhile."""
    in_chunks = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    return ocp.args.PyTreeSave(
        tree,
        save_args=jax.tree.map(lambda leaf: in_chunks, tree),
        ocdbt_target_data_file_size=FILE_BYTES,
        custom_metadata=record,
    )
