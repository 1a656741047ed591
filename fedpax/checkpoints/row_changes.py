"""The rows of client stores that changed since an earlier checkpoint."""

import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64, UInt64

from fedpax.clients.row_blocks import (
    RowBlocks,
    padded_count,
    row_blocks,
    row_fingerprints,
    take_rows,
)
from fedpax.clients.store import ClientStore
from fedpax.errors import ArgumentError
from fedpax.files import read_json
from fedpax.run_files.paths import CHECKSUMS

PARENT = "parent.json"
"""The file of a checkpoint that has only the rows that changed since another checkpoint."""


class Parent(NamedTuple):
    """The checkpoint that a checkpoint's rows of client stores complete."""

    round: int
    position: int  # number of checkpoints since the one that has all rows, with this one
    stores: list[list[str]]  # the path of each client store in the state
    # `identity_of` the parent, set when the checkpoint is written: another checkpoint of the same
    # round has other rows
    identity: int = 0

    @classmethod
    def read(cls, checkpoint: Path) -> Self | None:
        """Read the parent of a checkpoint; None if the checkpoint has all rows itself."""
        try:
            parent = cls(**read_json(checkpoint / PARENT))
        except FileNotFoundError:
            return None
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{PARENT} is not a record of a checkpoint: {error}") from error
        if not isinstance(parent.round, int) or not 0 <= parent.round < int(checkpoint.name):
            raise ArgumentError(f"{PARENT} names the round {parent.round}, expected an earlier one")
        return parent


def identity_of(checkpoint: Path) -> int:
    """Return the CRC-32 of a checkpoint's checksums, which differs between checkpoints."""
    return zlib.crc32((checkpoint / CHECKSUMS).read_bytes())


def lineage(folder: Path, step: int) -> list[tuple[int, Parent | None]]:
    """Return the checkpoints that have the rows of a checkpoint: all rows first, itself last."""
    checkpoints = []
    next_step: int | None = step
    while next_step is not None:
        parent = Parent.read(folder / str(next_step))
        checkpoints.append((next_step, parent))
        next_step = None if parent is None else parent.round
    return checkpoints[::-1]


def read_parents(folder: Path, steps: Iterable[int]) -> dict[int, int]:
    """Return the parent's round of each checkpoint that has one, or raise an OSError."""
    parents = {}
    for step in steps:
        try:
            parent = Parent.read(folder / str(step))
        except (IsADirectoryError, ValueError):  # told when the checkpoint is read
            continue
        if parent is not None:
            parents[step] = parent.round
    return parents


SMALL_STORES = 1 << 24
"""Bytes of client stores that every checkpoint holds in full."""

LARGEST_PART = 1 / 8
"""The largest part of a store's rows that a checkpoint holds without the others."""

StorePath = tuple[str, ...]


def is_store(node: Any) -> bool:
    """Return whether a node of a state is a client store."""
    return isinstance(node, ClientStore)


def stores_of(state: Any) -> dict[StorePath, ClientStore[Any]]:
    """Return the client stores of a state by their paths."""
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_store)
    return {_names(path): node for path, node in nodes if is_store(node)}


def _names(path: Any) -> StorePath:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


CLIENTS = "clients"


def record_of_stores(state: Any) -> dict[str, Any] | None:
    """Return what a saved state tells of its client stores: the numbers of clients, by path."""
    clients = {".".join(path): store.num_clients for path, store in stores_of(state).items()}
    return {CLIENTS: clients} if clients else None


def without_stores(state: Any, leaf: Any = None) -> Any:
    """Replace the client stores of a state by empty dicts, or each of their leaves by `leaf`."""

    def replace(node: Any) -> Any:
        if not is_store(node):
            return node
        return {} if leaf is None else jax.tree.map(lambda _: leaf, node)

    return jax.tree.map(replace, state, is_leaf=is_store)


def with_stores(state: Any, like: Any, leaves: Mapping[StorePath, Any]) -> Any:
    """Put the leaves of client stores into a state without them."""
    rest = iter(jax.tree.leaves(state))

    def node_of(path: Any, node: Any) -> Any:
        if is_store(node):
            return jax.tree.unflatten(jax.tree.structure(node), leaves[_names(path)])
        return next(rest)

    return jax.tree_util.tree_map_with_path(node_of, like, is_leaf=is_store)


def rows_of_one_checkpoint(state: Any) -> dict[StorePath, Int64[np.ndarray, " rows"]]:
    """Return for each row of the client stores the position 0 of the checkpoint that has it."""
    return {
        path: np.zeros(jax.tree.leaves(store)[0].shape[0], np.int64)
        for path, store in stores_of(state).items()
    }


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

    Checkpoints are numbered from 0, which has all rows. The parent of checkpoint n is n without its
    lowest bit that is 1, and n has the rows that changed since its parent. So a row is read from
    one of at most 1 + log2(n) checkpoints, and a change is written at most that often. A checkpoint
    of more than `LARGEST_PART` of a store has all rows, and is number 0 of new ones.
    """

    def __init__(self) -> None:
        self._stores: dict[StorePath, _StoreRows] = {}
        self._rounds: dict[int, int] = {}  # of the newest checkpoint and its ancestors, by position

    @property
    def needed_rounds(self) -> Collection[int]:
        """The rounds of the checkpoints that the next one can complete."""
        return self._rounds.values()

    def forget(self) -> None:
        """Let the next checkpoint have all rows."""
        self._stores, self._rounds = {}, {}

    def start(
        self,
        state: Any,
        rounds: Mapping[int, int],
        newest: Mapping[StorePath, Int64[np.ndarray, " rows"]],
    ) -> None:
        """Continue after a checkpoint: by position its ancestors' rounds, and each row's place."""
        self.forget()
        if blocks := _blocks(state):
            self._rounds = dict(rounds)
            self._stores = {
                path: _StoreRows(_fingerprints(store, blocks[path]), newest[path])
                for path, store in stores_of(state).items()
            }

    def advance(self, round_number: int, state: Any) -> ChangedRows | None:
        """Return the rows that the checkpoint of a round writes; None: all rows."""
        stores, blocks = stores_of(state), _blocks(state)
        if blocks is None:
            self.forget()
            return None
        prints = {path: _fingerprints(store, blocks[path]) for path, store in stores.items()}
        if self._stores.keys() == prints.keys():
            position = max(self._rounds) + 1
            parent = position & (position - 1)
            newest = {
                path: np.where(prints[path] == before.fingerprints, before.newest, position)
                for path, before in self._stores.items()
            }
            row_ids = {path: np.flatnonzero(rows > parent) for path, rows in newest.items()}
            if all(_is_part(ids, blocks[path]) for path, ids in row_ids.items()):
                record = Parent(self._rounds[parent], position, [list(path) for path in stores])
                ancestors = {i: r for i, r in self._rounds.items() if i <= parent}
                self._rounds = {**ancestors, position: round_number}
                self._stores = {p: _StoreRows(prints[p], newest[p]) for p in stores}
                taken = {
                    str(number): _take(store, blocks[path], row_ids[path])
                    for number, (path, store) in enumerate(stores.items())
                }
                return ChangedRows(record, taken)
        self._rounds = {0: round_number}
        self._stores = {
            path: _StoreRows(prints[path], newest)
            for path, newest in rows_of_one_checkpoint(state).items()
        }
        return None


def _blocks(state: Any) -> dict[StorePath, RowBlocks] | None:
    """Return the layout of each store; None if checkpoints should hold all of their rows."""
    stores = stores_of(state)
    leaves = jax.tree.leaves(stores)
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in leaves):
        return None  # random keys, whose bits have no fingerprint
    if sum(leaf.nbytes for leaf in leaves) < max(1, SMALL_STORES):
        return None
    blocks = {path: row_blocks(jax.tree.leaves(store)) for path, store in stores.items()}
    known = {path: layout for path, layout in blocks.items() if layout is not None}
    return known if len(known) == len(stores) else None


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
