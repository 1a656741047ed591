"""Client stores of a checkpoint that has only some of their rows, read with its ancestors."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int64

from fedpax.checkpoints.orbax_files import ocp, open_to_read
from fedpax.checkpoints.row_changes import Parent, StorePath, rows_of_one_checkpoint, stores_of
from fedpax.clients.row_blocks import row_blocks, write_rows

Lineage = Sequence[tuple[int, Parent | None]]


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
    leaves = _restore_all_rows(folder, ancestors[0][0], stores)
    newest = rows_of_one_checkpoint(like)
    for parent, stores_rows in _changed_rows(folder, ancestors):
        for path, changed in stores_rows.items():
            names = ocp.tree.to_flat_dict({"": stores[path].rows})
            values = [changed.rows[name] for name in names]
            blocks = row_blocks(leaves[path])
            if blocks is None:  # such as pinned memory of the host
                leaves[path] = _write_on_host(leaves[path], changed.ids, values)
            else:
                leaves[path] = write_rows(leaves[path], blocks, changed.ids, values)
            newest[path][changed.ids[changed.ids >= 0]] = parent.position
    for path, store in stores.items():
        shardings = [leaf.sharding for leaf in jax.tree.leaves(store)]
        leaves[path] = jax.device_put(leaves[path], shardings)  # equal ones, written as in `like`
    return RestoredStores(leaves, newest)


def _restore_all_rows(
    folder: Path, step: int, stores: Mapping[StorePath, Any]
) -> dict[StorePath, list[jax.Array]]:
    options = ocp.CheckpointManagerOptions(create=False)
    with open_to_read(folder, options) as manager:
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
        restore = ocp.args.PyTreeRestore(
            item=ocp.tree.from_flat_dict(leaves, target=fields),
            restore_args=ocp.tree.from_flat_dict(arguments, target=fields),
        )
        found = manager.restore(step, args=ocp.args.Composite(state=restore))["state"]
        flat = ocp.tree.to_flat_dict(found)
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


class Changed(NamedTuple):
    """The rows of a store in a checkpoint that does not have all of them."""

    ids: Int64[np.ndarray, " changed"]  # -1 is padding
    rows: dict[tuple[str, ...], np.ndarray]  # `[changed, ...]`, by the path in a client's state


def _changed_rows(
    folder: Path, ancestors: Lineage
) -> Iterator[tuple[Parent, dict[StorePath, Changed]]]:
    """Read the rows of all checkpoints after the first as NumPy arrays, in this process alone."""
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=alone)
    with open_to_read(folder, options) as manager:
        for step, parent in ancestors:
            if parent is None:
                continue
            item = jax.tree.map(lambda leaf: 0, manager.item_metadata(step)["rows"])
            arguments = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), item)
            restore = ocp.args.PyTreeRestore(item=item, restore_args=arguments)
            found = manager.restore(step, args=ocp.args.Composite(rows=restore))["rows"]
            changed = [found[str(number)] for number in range(len(parent.stores))]
            yield (
                parent,
                {
                    tuple(path): Changed(c["ids"], ocp.tree.to_flat_dict({"": c["rows"]}))
                    for path, c in zip(parent.stores, changed, strict=True)
                },
            )


def complete_rows(folder: Path, ancestors: Lineage, path: StorePath, rows: Any) -> Any:
    """Write the newer rows of a store over the rows of its oldest checkpoint, NumPy arrays."""
    flat = {name: np.array(leaf) for name, leaf in ocp.tree.to_flat_dict({"": rows}).items()}
    for _, stores in _changed_rows(folder, ancestors):
        ids, new = stores[path]
        for name, leaf in flat.items():
            leaf[ids[ids >= 0]] = new[name][ids >= 0]
    return ocp.tree.from_flat_dict(flat, target={"": rows})[""]
