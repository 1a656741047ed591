"""The saved state of a run, read in parts."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from fedpax.algorithm import Params
from fedpax.checkpoints.checkpoint_files import (
    damaged_checkpoint,
    find_damage,
    find_own_damage,
    lineage,
)
from fedpax.checkpoints.orbax_files import ocp, open_to_read, restore_item
from fedpax.checkpoints.participant_states import check_same_leaves, has_saved_shape
from fedpax.checkpoints.saved_stores import complete_rows
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
        like: a tree of `jax.ShapeDtypeStruct` with shardings; a device then reads only its shard.
            Default None: return NumPy arrays.
        best: load the best model of the run, by its `training.keep_best`, in place of the newest.

    Returns:
        JAX arrays in the structure of `like`, or nested dicts (and lists) of NumPy arrays.

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
    with open_to_read(folder, alone=like is None) as manager:
        metadata = manager.item_metadata(round_number)
        in_state = "params" in metadata["state"]
        saved = metadata["state"]["params"] if in_state else metadata["params"]
        item = jax.tree.map(lambda leaf: 0, saved)
        arguments = None
        if like is not None:
            flat = _restore_args(saved, like, round_number)
            arguments = ocp.tree.from_flat_dict(flat, target=item)
        restore = _restore_field if in_state else restore_item
        params = restore(manager, round_number, "params", item, arguments)
    if like is None:
        return params
    return ocp.tree.from_flat_dict(ocp.tree.to_flat_dict(params), target=like)


def load_field(job_log_dir: str | Path, field: str, round_number: int | None = None) -> Any:
    """Load a field of the state of a run, such as what its clients keep.

    Args:
        job_log_dir: the run's folder, or one in a bucket (`gs://`).
        field: the field, such as `personal_params` of Ditto.
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
    with open_to_read(folder) as manager:
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
    rounds, lines = complete_rounds(folder / CHECKPOINTS), read_log(folder, last_rounds).lines
    saved = Evaluations([line for line in lines if line["round"] in rounds], keep_best, 0)
    if not saved.best_round:
        raise FileNotFoundError(
            f"{folder} has no complete checkpoint of an evaluation with {keep_best}, expected at "
            "least one. Train there first."
        )
    return saved.best_round


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
    item = jax.tree.map(lambda leaf: 0, manager.item_metadata(round_number)["state"][field])
    return _restore_field(manager, round_number, field, item) if jax.tree.leaves(item) else item


def _restore_field(
    manager: "ocp.CheckpointManager", step: int, field: str, item: Any, arguments: Any = None
) -> Any:
    of_field = None if arguments is None else {field: arguments}
    return restore_item(manager, step, "state", {field: item}, of_field, partial=True)[field]


def _restore_args(
    saved: Params, like: Params, step: int
) -> "dict[tuple[str, ...], ocp.ArrayRestoreArgs]":
    """Say for each saved parameter on which sharding and as which dtype to restore it."""
    stored, wanted = ocp.tree.to_flat_dict(saved), ocp.tree.to_flat_dict(like)
    check_same_leaves(wanted, stored, step)
    for path, leaf in wanted.items():
        has_saved_shape(leaf, tuple(stored[path].shape), path)  # raises where shapes differ
    restore_args = ocp.ArrayRestoreArgs
    return {p: restore_args(sharding=x.sharding, dtype=x.dtype) for p, x in wanted.items()}
