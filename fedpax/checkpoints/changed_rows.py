"""The parts of a state in a checkpoint: all rows of its client stores, or the changed ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Int64, UInt64

from fedpax.algorithm import State, has_params_field
from fedpax.checkpoints.checkpoint_files import PARENT, Parent, identity_of, lineage, read_parents
from fedpax.checkpoints.orbax_files import ocp, on_one_device, restore_item
from fedpax.checkpoints.saved_stores import (
    StorePath,
    layouts_of,
    record_of_stores,
    restore_stores,
    rows_of_one_checkpoint,
    stores_of,
    with_stores,
    without_stores,
)
from fedpax.clients.row_blocks import (
    RowBlocks,
    padded_count,
    row_fingerprints,
    take_rows,
)
from fedpax.clients.store import ClientStore
from fedpax.run_files.paths import complete_rounds, write_atomically

CHUNK_BYTES = 1 << 26
"""The most bytes of an array that are compressed at once."""

FILE_BYTES = 1 << 27
"""The bytes of compressed arrays that are in memory before they are written to a file."""

LARGEST_PART = 1 / 8
"""The largest part of a store's rows that a checkpoint holds without the others."""


class ChangedRows(NamedTuple):
    """The rows of a checkpoint that does not hold all of them."""

    parent: Parent
    stores: dict[str, Any]  # `ids` and `rows` of each store, by its place in `parent.stores`


class _StoreRows(NamedTuple):
    """The fingerprints of a store's rows, and the checkpoints that have them."""

    fingerprints: UInt64[np.ndarray, " rows"]  # of the newest checkpoint
    # the position of the checkpoint that has the newest value of each row
    newest: Int64[np.ndarray, " rows"]


class RowChanges:
    """The rows that the next checkpoint of a run writes: those whose fingerprints changed.

    Checkpoint 0 has all rows. The parent of checkpoint n is n without its lowest 1 bit, and n has
    the rows that changed since. So a row is read from one of at most 1 + log2(n) checkpoints. A
    checkpoint of more than `LARGEST_PART` of a store is number 0 again.
    """

    def __init__(self) -> None:
        self._stores: dict[StorePath, _StoreRows] = {}
        # Of the checkpoints that the next one can complete: the newest and its ancestors.
        self.rounds: dict[int, int] = {}  # by position

    def forget(self) -> None:
        """Let the next checkpoint have all rows."""
        self._stores, self.rounds = {}, {}

    def start(
        self,
        state: Any,
        rounds: Mapping[int, int],
        newest: Mapping[StorePath, Int64[np.ndarray, " rows"]],
    ) -> None:
        """Continue after a checkpoint: by position its ancestors' rounds, and each row's place."""
        self.forget()
        if blocks := layouts_of(state):
            self.rounds = dict(rounds)
            self._stores = {
                path: _StoreRows(_fingerprints(store, blocks[path]), newest[path])
                for path, store in stores_of(state).items()
            }

    def advance(self, round_number: int, state: Any) -> ChangedRows | None:
        """Return the rows that the checkpoint of a round writes; None: all rows."""
        stores, blocks = stores_of(state), layouts_of(state)
        if blocks is None:
            self.forget()
            return None
        prints = {path: _fingerprints(store, blocks[path]) for path, store in stores.items()}
        if self._stores.keys() == prints.keys():
            position = max(self.rounds) + 1
            parent = position & (position - 1)
            newest = {
                path: np.where(prints[path] == before.fingerprints, before.newest, position)
                for path, before in self._stores.items()
            }
            row_ids = {path: np.flatnonzero(rows > parent) for path, rows in newest.items()}
            if all(_is_part(ids, blocks[path]) for path, ids in row_ids.items()):
                record = Parent(self.rounds[parent], position, [list(path) for path in stores])
                ancestors = {i: r for i, r in self.rounds.items() if i <= parent}
                self.rounds = {**ancestors, position: round_number}
                self._stores = {p: _StoreRows(prints[p], newest[p]) for p in stores}
                taken = {
                    str(number): _take(store, blocks[path], row_ids[path])
                    for number, (path, store) in enumerate(stores.items())
                }
                return ChangedRows(record, taken)
        self.rounds = {0: round_number}
        self._stores = {
            path: _StoreRows(prints[path], newest)
            for path, newest in rows_of_one_checkpoint(state).items()
        }
        return None


def _fingerprints(store: ClientStore[Any], blocks: RowBlocks) -> UInt64[np.ndarray, " rows"]:
    return row_fingerprints(jax.tree.leaves(store), blocks)


def _is_part(row_ids: Int64[np.ndarray, " rows"], blocks: RowBlocks) -> bool:
    """Return whether the rows, as they are written, are a small part of a store."""
    most = int(np.bincount(row_ids // blocks.block_rows, minlength=1).max())
    return padded_count(most, blocks.block_rows) <= LARGEST_PART * blocks.block_rows


def _take(
    store: ClientStore[Any], blocks: RowBlocks, row_ids: Int64[np.ndarray, " rows"]
) -> dict[str, Any]:
    leaves, tree = jax.tree.flatten(store.rows)
    ids, rows = take_rows(leaves, blocks, row_ids)
    return {"ids": ids, "rows": jax.tree.unflatten(tree, rows)}


class StateParts:
    """The parts of a run's state in its checkpoints.

    `rows` has the stores' rows that changed since the parent. Without it, `state` has them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._rows = folder, RowChanges()
        self._parent: Parent | None = None
        # by round, the round of the checkpoint with the rest of a checkpoint's rows
        self.parents = read_parents(folder, complete_rounds(folder))

    def forget(self) -> None:
        """Let the next checkpoint have all rows: the newest one may be incomplete."""
        self._rows.forget()

    def to_save(self, round_number: int, state: State) -> "dict[str, ocp.args.CheckpointArgs]":
        """Return what the checkpoint of a round saves."""
        items: dict[str, ocp.args.CheckpointArgs] = {}
        if not has_params_field(state):
            # A model that the state computes from its fields, such as the islands' mean.
            items["params"] = _in_chunks(on_one_device(state.params))
        if not self._has_needed_rounds():
            self._rows.forget()
        record = record_of_stores(state)
        self._parent = None
        self.parents.pop(round_number, None)
        if (changed := self._rows.advance(round_number, state)) is not None:
            self._parent = changed.parent
            self.parents[round_number] = changed.parent.round
            items["rows"] = _in_chunks(changed.stores)
            state = without_stores(state)
        items["state"] = _in_chunks(on_one_device(state), record)
        return items

    def _has_needed_rounds(self) -> bool:
        """Return whether the checkpoints are there that the next one can complete."""
        needed = {*self._rows.rounds.values()}
        if not needed:
            return True
        has_them = needed <= {*complete_rounds(self._folder)}
        return bool(multihost_utils.broadcast_one_to_all(np.int32(has_them)))

    def write_parent(self, draft: Path) -> None:
        """Name the parent of a checkpoint whose other files are written."""
        if self._parent is not None:
            identity = identity_of(self._folder / str(self._parent.round))
            record = self._parent._replace(identity=identity)._asdict()
            write_atomically(draft / PARENT, json.dumps(record) + "\n")

    def restore(self, manager: "ocp.CheckpointManager", step: int, like: State) -> Any:
        """Restore the state of a checkpoint; the next one then writes what has changed."""
        ancestors = lineage(self._folder, step)
        item = without_stores(like, ocp.PLACEHOLDER if len(ancestors) == 1 else None)
        arguments = ocp.checkpoint_utils.construct_restore_args(item)
        state = restore_item(manager, step, "state", item, arguments)
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
