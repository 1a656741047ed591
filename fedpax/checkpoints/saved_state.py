"""The saved state of a run: compared with an experiment's state, and read in parts."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.algorithm import Params
from fedpax.checkpoints.orbax_files import ocp, open_to_read
from fedpax.checkpoints.participant_states import saved_placed_struct
from fedpax.checkpoints.restored_stores import complete_rows
from fedpax.checkpoints.row_changes import CLIENTS, lineage, stores_of
from fedpax.checkpoints.saved_rounds import damaged_checkpoint, find_damage, find_own_damage
from fedpax.errors import ArgumentError
from fedpax.run_files.configuration import flatten, read_configuration_json
from fedpax.run_files.evaluations import Evaluations
from fedpax.run_files.metrics_log import last_rounds, read_log
from fedpax.run_files.paths import CHECKPOINTS, complete_rounds, resolve_folder


def load_params(
    job_log_dir: str | Path,
    round_number: int | None = None,
    like: Params | None = None,
    *,
    best: bool = False,
) -> Params:
    """Load the server's model of a run, to use it after the training.

    Args:
        job_log_dir: the run's folder, or one in a bucket (`gs://`).
        round_number: the checkpoint's round. Default None: the newest checkpoint.
        like: the parameters' abstract values, each a `jax.ShapeDtypeStruct` with its sharding; a
            device then reads only its shard. Default None: return NumPy arrays.
        best: load the best model of the run, by its `training.keep_best`, in place of the newest.

    Returns:
        The parameters: JAX arrays in the structure of `like`, or nested dicts (and lists) of NumPy
        arrays.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        DamagedCheckpointError: its files are damaged.
        ValueError: `like` has other leaves, or another shape, than the saved parameters; or `best`
            is set, and the run keeps no best model or `round_number` is set too.
    """
    if best and round_number is not None:
        raise ArgumentError(
            f"load_params() got round_number={round_number} and best=True, expected one of them. "
            "Leave one out."
        )
    if best:
        round_number = best_round(job_log_dir)
    folder, round_number = _find(job_log_dir, round_number, find_own_damage)  # it has the model
    # Other processes of a job need not read it.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    every = ocp.options.MultiprocessingOptions()
    options = ocp.CheckpointManagerOptions(
        create=False, multiprocessing_options=alone if like is None else every
    )
    with open_to_read(folder, options) as manager:
        metadata = manager.item_metadata(round_number)
        in_state = "params" in metadata["state"]
        saved = metadata["state"]["params"] if in_state else metadata["params"]
        item = jax.tree.map(lambda leaf: 0, saved)
        if like is None:
            arguments = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), item)
        else:
            flat = _restore_args(saved, like, round_number)
            arguments = ocp.tree.from_flat_dict(flat, target=item)
        if in_state:
            params = _restore_field(manager, round_number, "params", item, arguments)
        else:
            restore = ocp.args.PyTreeRestore(item=item, restore_args=arguments)
            composite = ocp.args.Composite(params=restore)
            params = manager.restore(round_number, args=composite)["params"]
    if like is None:
        return params
    return ocp.tree.from_flat_dict(ocp.tree.to_flat_dict(params), target=like)


def load_field(job_log_dir: str | Path, field: str, round_number: int | None = None) -> Any:
    """Load a field of the state of a run, such as what its clients keep.

    Args:
        job_log_dir: the run's folder, or one in a bucket (`gs://`).
        field: the field of the state, such as `personal_params` of Ditto.
        round_number: the checkpoint's round. Default None: the newest checkpoint.

    Returns:
        Nested dicts (and lists) of NumPy arrays. A `ClientStore` is the dict of its `rows`, row k
        for client k.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        DamagedCheckpointError: its files are damaged.
        KeyError: the saved state has no such field.
    """
    folder, round_number = _find(job_log_dir, round_number)
    with open_to_read(folder, ocp.CheckpointManagerOptions(create=False)) as manager:
        saved = manager.item_metadata(round_number)["state"]
        if field not in saved:
            raise KeyError(
                f"The state of round {round_number} in {folder} has no field {field!r}, expected "
                f"one of {', '.join(saved)}."
            )
        value = _read_field(manager, round_number, field)
        ancestors = lineage(folder, round_number)
        parent = ancestors[-1][1]
        paths = [] if parent is None else [tuple(p) for p in parent.stores if p[0] == field]
        if paths:
            whole = _read_field(manager, ancestors[0][0], field)
        for path in paths:
            rows = _at(whole, path[1:])["rows"]
            store = {"rows": complete_rows(folder, ancestors, path, rows)}
            if len(path) == 1:
                return store
            above = _at(value, path[1:-1])
            above[int(path[-1]) if isinstance(above, list) else path[-1]] = store
        return value


def _at(tree: Any, path: Iterable[str]) -> Any:
    """Return the node of nested dicts and lists at a path."""
    for name in path:
        tree = tree[int(name) if isinstance(tree, list | tuple) else name]
    return tree


def load_state(job_log_dir: str | Path, round_number: int, like: Any) -> Any:
    """Load the state of a run's algorithm as NumPy arrays; `like` is its abstract value."""
    fields = {}
    for name, struct in like._asdict().items():
        wanted = ocp.tree.to_flat_dict(struct)
        saved = ocp.tree.to_flat_dict(load_field(job_log_dir, name, round_number)) if wanted else {}
        check_same_leaves(wanted, saved, round_number)
        fields[name] = ocp.tree.from_flat_dict(saved, target=struct)
    return type(like)(**fields)


def best_round(job_log_dir: str | Path) -> int:
    """Return the round of the best checkpoint of a run, by its `training.keep_best`."""
    folder = resolve_folder(job_log_dir)
    configuration = read_configuration_json(folder)
    fields = dict(flatten(configuration[1])) if configuration else {}
    keep_best = fields.get("training.keep_best")
    if not isinstance(keep_best, str):
        raise ArgumentError(
            f"{folder} keeps no best model (training.keep_best={keep_best}), expected a metric "
            "there. Load the newest model, or train with --training.keep_best=loss."
        )
    saved = among(
        read_log(folder, last_rounds).lines, complete_rounds(folder / CHECKPOINTS), keep_best
    )
    if not saved.best_round:
        raise FileNotFoundError(
            f"{folder} has no complete checkpoint of an evaluation with {keep_best}, expected at "
            "least one. Train there first."
        )
    return saved.best_round


def among(
    lines: Iterable[Mapping[str, Any]], rounds: Collection[int], keep_best: str | None
) -> Evaluations:
    """Return the evaluations of some rounds, such as those that are saved."""
    return Evaluations([line for line in lines if line["round"] in rounds], keep_best, 0)


class SavedLeaves(NamedTuple):
    """The leaves of a checkpoint's state, without their values."""

    shapes: dict[tuple[str, ...], tuple[int, ...]]  # by path
    # the number of clients of each store, by its path; empty if an earlier version saved it
    clients: Mapping[str, int]


def saved_leaves(folder: Path, step: int) -> SavedLeaves:
    """Return the leaves of a checkpoint's state, without reading the arrays."""
    with open_to_read(folder, ocp.CheckpointManagerOptions(create=False)) as manager:
        ancestors = lineage(folder, step)
        metadata = manager.item_metadata(step)["state"]
        saved = ocp.tree.to_flat_dict(metadata)
        stores = {tuple(path) for _, parent in ancestors if parent for path in parent.stores}
        if stores:
            whole = ocp.tree.to_flat_dict(manager.item_metadata(ancestors[0][0])["state"])
            rows = {name: leaf for name, leaf in whole.items() if _store_of(name, stores)}
            saved = {**rows, **saved}
        shapes = {path: tuple(leaf.shape) for path, leaf in saved.items()}
        return SavedLeaves(shapes, (metadata.custom_metadata or {}).get(CLIENTS, {}))


def _store_of(path: tuple[str, ...], stores: Collection[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return the path of the store that has a leaf, or None."""
    return next((store for store in stores if path[: len(store)] == store), None)


def saved_struct(
    leaf: jax.ShapeDtypeStruct,
    saved: tuple[int, ...],
    path: tuple[str, ...],
    num_participants: int | None = None,
    num_saved: int | None = None,
) -> jax.ShapeDtypeStruct:
    """Return a leaf with the saved number of participants; itself if the shapes are equal."""
    if has_saved_shape(leaf, saved, path, num_participants, num_saved):
        return leaf
    return saved_placed_struct(leaf, saved[0])


def has_saved_shape(
    leaf: jax.ShapeDtypeStruct,
    saved: tuple[int, ...],
    path: tuple[str, ...],
    num_participants: int | None = None,
    num_saved: int | None = None,
) -> bool:
    """Return whether a leaf has its saved shape, and not another number of participants."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        saved = saved[: leaf.ndim]  # random keys are saved as numbers, with one more axis
    if leaf.shape == saved:
        return True
    is_placed = (
        path[0] != "params"
        and leaf.shape[:1] == (num_participants,)
        and saved != ()
        and num_saved in (None, saved[0])
        and leaf.shape[1:] == saved[1:]
    )
    if not is_placed:
        raise ArgumentError(
            f"The checkpoint's {'.'.join(path)} has shape {list(saved)}, expected "
            f"{list(leaf.shape)} as in the experiment. Use the model that was saved, or another "
            "--job_log_dir."
        )
    return False


def check_same_leaves(
    wanted: Mapping[tuple[str, ...], Any], saved: Mapping[tuple[str, ...], Any], step: int
) -> None:
    """Check that a checkpoint has the leaves that an experiment has."""
    if wanted.keys() != saved.keys():
        names = sorted(".".join(path) for path in wanted.keys() ^ saved.keys())
        raise ArgumentError(
            f"The checkpoint of round {step} and the experiment have different states: "
            f"{', '.join(names[:5])} {'and others ' if len(names) > 5 else ''}in only one of "
            "them, expected the same leaves. Use the model and the method that were saved, or "
            "another --job_log_dir; `fedpax export` and --model.weights start a new run from this "
            "model."
        )


def shapes_of_same_clients(like: Any, saved: SavedLeaves) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the saved shapes, with the experiment's numbers of rows for stores of equal clients.

    A row belongs to one client, or is padding, whose number depends on the devices.
    """
    shapes = dict(saved.shapes)
    for path, store in stores_of(like).items():
        for name, leaf in ocp.tree.to_flat_dict({"rows": store.rows}).items():
            rows, *rest = shapes[*path, *name]
            # Without a record, only equal numbers of rows can be of equal clients.
            unit, before = "rows", rows
            now = leaf.shape[0]
            if (known := saved.clients.get(".".join(path))) is not None:
                unit, before, now = "clients", known, store.num_clients
            if before != now:
                raise ArgumentError(
                    f"The checkpoint's {'.'.join(path)} has {before} {unit}, expected {now} for "
                    f"the experiment's {store.num_clients} clients: a row is the state of one "
                    "client. Set the number of clients that was saved, or start a new run from the "
                    "saved model (`fedpax export`, --model.weights), in which all clients begin "
                    "with a new state."
                )
            shapes[*path, *name] = (leaf.shape[0], *rest)
    return shapes


def _find(
    job_log_dir: str | Path,
    round_number: int | None,
    find_damage: Callable[[Path], str | None] = find_damage,
) -> tuple[Path, int]:
    """Return the folder of a run's checkpoints and the round to read, whose files are intact."""
    folder = resolve_folder(job_log_dir) / CHECKPOINTS
    rounds = complete_rounds(folder)
    if not rounds:
        raise FileNotFoundError(
            f"{folder} has no complete checkpoint, expected one. Train there first: fedpax train "
            "--exp=... --job_log_dir=..."
        )
    if round_number is not None and round_number not in rounds:
        raise FileNotFoundError(
            f"{folder} has complete checkpoints of the rounds {', '.join(map(str, rounds))}, and "
            f"none of round {round_number}. Choose one of these, or leave the round out for the "
            "newest."
        )
    if round_number is None:
        round_number = rounds[-1]
    if damage := find_damage(folder / str(round_number)):
        raise damaged_checkpoint(folder, round_number, damage)
    return folder, round_number


def _read_field(manager: "ocp.CheckpointManager", round_number: int, field: str) -> Any:
    """Read a field of the state as NumPy arrays."""
    item = jax.tree.map(lambda leaf: 0, manager.item_metadata(round_number)["state"][field])
    arguments = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), item)
    if not jax.tree.leaves(item):
        return item
    return _restore_field(manager, round_number, field, item, arguments)


def _restore_field(
    manager: "ocp.CheckpointManager", round_number: int, field: str, item: Any, arguments: Any
) -> Any:
    restore = ocp.args.PyTreeRestore(
        item={field: item}, restore_args={field: arguments}, partial_restore=True
    )
    composite = ocp.args.Composite(state=restore)
    return manager.restore(round_number, args=composite)["state"][field]


def _restore_args(
    saved: Params, like: Params, step: int
) -> "dict[tuple[str, ...], ocp.ArrayRestoreArgs]":
    """Say for each saved parameter on which sharding and as which dtype to restore it."""
    stored, wanted = ocp.tree.to_flat_dict(saved), ocp.tree.to_flat_dict(like)
    check_same_leaves(wanted, stored, step)
    for path, leaf in wanted.items():
        saved_struct(leaf, tuple(stored[path].shape), path)  # raises where shapes differ
    # Shapes need no restore argument: they are equal.
    restore_args = ocp.ArrayRestoreArgs
    return {p: restore_args(sharding=x.sharding, dtype=x.dtype) for p, x in wanted.items()}
