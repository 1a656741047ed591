"""Client stores of a run's state, and of its checkpoints, which can have a part of their rows."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int64

from fedpax.checkpoints.checkpoint_files import Parent
from fedpax.checkpoints.orbax_files import ocp, open_array, open_to_read, restore_item
from fedpax.clients.row_blocks import RowBlocks, on_devices_of, row_blocks, write_rows
from fedpax.clients.store import ClientStore

SMALL_STORES = 1 << 24
"""Bytes of client stores that every checkpoint holds in full."""

RANGE_BYTES = 1 << 27
"""The bytes of rows that are read at once, if a chunk of them is not larger."""

CLIENTS = "clients"

StorePath = tuple[str, ...]

Lineage = Sequence[tuple[int, Parent | None]]


def is_store(node: Any) -> bool:
    """Return whether a node of a state is a client store."""
    return isinstance(node, ClientStore)


def stores_of(state: Any) -> dict[StorePath, ClientStore[Any]]:
    """Return the client stores of a state by their paths."""
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_store)
    return {_names(path): node for path, node in nodes if is_store(node)}


def _names(path: Any) -> StorePath:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


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


def layouts_of(state: Any) -> dict[StorePath, RowBlocks] | None:
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


class RestoredStores(NamedTuple):
    """The leaves of client stores, and the checkpoints that have their rows."""

    leaves: dict[StorePath, list[jax.Array]]  # by the path of the store
    # for each store, the position of the checkpoint that has each row
    newest: dict[StorePath, Int64[np.ndarray, " rows"]]


def restore_stores(folder: Path, ancestors: Lineage, like: Any) -> RestoredStores:
    """Restore the client stores of a state onto its shardings."""
    stores = stores_of(like)
    if not stores:
        return RestoredStores({}, {})
    step = ancestors[0][0]
    layouts = _blocks_of_large(stores)
    leaves = _restore_all_rows(
        folder, step, {path: store for path, store in stores.items() if path not in layouts}
    )
    for path, blocks in layouts.items():
        leaves[path] = _read_in_ranges(folder / str(step) / "state", path, stores[path], blocks)
    newest = rows_of_one_checkpoint(like)
    for parent, stores_rows in _changed_rows(folder, ancestors):
        for path, (row_ids, rows) in stores_rows.items():
            names = ocp.tree.to_flat_dict({"": stores[path].rows})
            values = [rows[name] for name in names]
            # The padding of another number of devices has no place here.
            ids = np.where(row_ids < len(newest[path]), row_ids, -1)
            layout = row_blocks(leaves[path])
            if layout is None:  # such as pinned memory of the host
                leaves[path] = _write_on_host(leaves[path], ids, values)
            else:
                leaves[path] = write_rows(leaves[path], layout, ids, values)
            newest[path][ids[ids >= 0]] = parent.position
    for path, store in stores.items():
        shardings = [leaf.sharding for leaf in jax.tree.leaves(store)]
        leaves[path] = jax.device_put(leaves[path], shardings)  # equal ones, written as in `like`
    return RestoredStores(leaves, newest)


def _blocks_of_large(stores: Mapping[StorePath, Any]) -> dict[StorePath, RowBlocks]:
    """Return the layout of each store that is restored in ranges of rows."""
    layouts = {}
    for path, store in stores.items():
        leaves = jax.tree.leaves(store)
        is_extended = any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in leaves)
        size = 0 if is_extended else sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        if size > SMALL_STORES and (layout := row_blocks(leaves)) is not None:
            layouts[path] = layout
    return layouts


def _read_in_ranges(
    folder: Path, path: StorePath, store: Any, blocks: RowBlocks
) -> list[jax.Array]:
    """Restore a store in ranges of rows: whole, the host would have it beside the devices' rows."""
    restored = []
    named = ocp.tree.to_flat_dict({"rows": store.rows}).items()
    for (name, leaf), spec in zip(named, blocks.specs, strict=True):
        saved = open_array(folder, (*path, *name))
        sharding = NamedSharding(blocks.mesh, spec)
        count = _rows_at_once(saved, blocks)
        rows = jax.jit(
            functools.partial(jnp.zeros, leaf.shape, leaf.dtype), out_shardings=sharding
        )()
        shape = (blocks.num_blocks * count, *leaf.shape[1:])
        for start in range(0, blocks.block_rows, count):
            first = min(start, blocks.block_rows - count)  # the last range repeats rows
            read = functools.partial(_read_rows, saved, blocks, first, count, leaf.dtype)
            new = jax.make_array_from_callback(shape, sharding, read)
            rows = jax.block_until_ready(_write_range(blocks, spec)(rows, new, first))
        restored.append(rows)
    return restored


def _rows_at_once(saved: Any, blocks: RowBlocks) -> int:
    """Return how many rows of each block are read at once: whole chunks, which are compressed."""
    chunk = saved.chunk_layout.read_chunk.shape[0]
    row_bytes = saved.dtype.numpy_dtype.itemsize * math.prod(saved.shape[1:])
    most = RANGE_BYTES // max(1, row_bytes * blocks.num_blocks)
    return min(blocks.block_rows, max(chunk, most // chunk * chunk))


def _read_rows(
    saved: Any, blocks: RowBlocks, first: int, count: int, dtype: Any, index: tuple[slice, ...]
) -> np.ndarray:
    """Read rows of the block that `index` selects; rows that were not saved are 0."""
    begin = (index[0].start or 0) // count * blocks.block_rows + first
    end = min(begin + count, saved.shape[0])
    part = saved[(slice(min(begin, end), end), *index[1:])].read().result()
    missing = count - len(part)
    padded = np.pad(part, [(0, missing), *[(0, 0)] * (part.ndim - 1)]) if missing else part
    return padded.astype(dtype, copy=False)


@functools.lru_cache(maxsize=32)
def _write_range(blocks: RowBlocks, spec: P) -> Any:
    def on_device(rows: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(rows, new, first, 0)

    return jax.jit(on_devices_of(blocks, on_device, (spec, spec, P()), spec), donate_argnums=0)


def _restore_all_rows(
    folder: Path, step: int, stores: Mapping[StorePath, Any]
) -> dict[StorePath, list[jax.Array]]:
    if not stores:
        return {}
    with open_to_read(folder) as manager:
        saved = manager.item_metadata(step)["state"]
        fields = {name: saved[name] for name in saved}
        # Only the stores are read.
        arguments: Any = dict.fromkeys(ocp.tree.to_flat_dict(fields), ocp.RestoreArgs())
        leaves: dict[Any, Any] = dict.fromkeys(arguments, ocp.PLACEHOLDER)
        names = {
            path: [(*path, *name) for name in ocp.tree.to_flat_dict({"rows": store.rows})]
            for path, store in stores.items()
        }
        for path, store in stores.items():
            for name, leaf in zip(names[path], jax.tree.leaves(store), strict=True):
                # Rows of another number of devices: the last ones are padding, added or left out.
                leaves[name] = leaf
                arguments[name] = ocp.ArrayRestoreArgs(
                    sharding=leaf.sharding, dtype=leaf.dtype, global_shape=leaf.shape, strict=False
                )
        trees = (ocp.tree.from_flat_dict(flat, target=fields) for flat in (leaves, arguments))
        flat = ocp.tree.to_flat_dict(restore_item(manager, step, "state", *trees))
        return {path: [flat[name] for name in names[path]] for path in stores}


def _write_on_host(
    leaves: list[jax.Array], ids: np.ndarray, values: list[np.ndarray]
) -> list[jax.Array]:
    written = []
    for leaf, rows in zip(leaves, values, strict=True):
        array = np.array(leaf)
        array[ids[ids >= 0]] = rows[ids >= 0]
        written.append(jax.device_put(array, leaf.sharding))
    return written


# The ids of rows, -1 for padding, and the rows by path.
Changed = tuple[Int64[np.ndarray, " changed"], dict[tuple[str, ...], np.ndarray]]


def _changed_rows(
    folder: Path, ancestors: Lineage
) -> Iterator[tuple[Parent, dict[StorePath, Changed]]]:
    """Read the rows of all checkpoints after the first as NumPy arrays, in this process alone."""
    with open_to_read(folder, alone=True) as manager:
        for step, parent in ancestors:
            if parent is None:
                continue
            item = jax.tree.map(lambda leaf: 0, manager.item_metadata(step)["rows"])
            changed = restore_item(manager, step, "rows", item)
            rows = {}
            for number, path in enumerate(parent.stores):
                store = changed[str(number)]
                rows[tuple(path)] = store["ids"], ocp.tree.to_flat_dict({"": store["rows"]})
            yield parent, rows


def complete_rows(folder: Path, ancestors: Lineage, path: StorePath, rows: Any) -> Any:
    """Write the newer rows of a store over the rows of its oldest checkpoint, NumPy arrays."""
    flat = ocp.tree.to_flat_dict({"": rows})
    flat = {name: np.require(leaf, requirements="W") for name, leaf in flat.items()}
    for _, stores in _changed_rows(folder, ancestors):
        ids, new = stores[path]
        for name, leaf in flat.items():
            is_here = (ids >= 0) & (ids < len(leaf))
            leaf[ids[is_here]] = new[name][is_here]
    return ocp.tree.from_flat_dict(flat, target={"": rows})[""]
