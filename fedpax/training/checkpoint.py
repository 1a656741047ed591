"""Checkpoints of a run: state, position in the data, round and configuration in one step."""

import base64
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.training.algorithm import Params, State

FOLDER = "checkpoints"


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints in a run's folder; a context manager.

    Saving is asynchronous: the arrays are copied to the host, the rest goes on beside the
    training. A checkpoint is written under a temporary name and renamed when it is whole, so a
    kill at any moment leaves the last whole one; what a kill left unfinished is removed here.

    Args:
        job_log_dir: the run's folder.
        keep: how many of the newest checkpoints are kept.
    """

    def __init__(self, job_log_dir: str | Path, *, keep: int) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(
            Path(job_log_dir).absolute() / FOLDER,
            options=options,
            item_names=("state", "progress"),
        )

    def latest_round(self) -> int | None:
        """Returns the round of the newest whole checkpoint, ``None`` if there is none."""
        return self._manager.latest_step()

    def save(
        self,
        round_number: int,
        state: State,
        batches: dict[str, Any] | bytes,
        configuration: Mapping[str, Any],
    ) -> None:
        """Saves one step; returns when the arrays may be donated.

        Args:
            round_number: how many rounds are done.
            state: the algorithm's state.
            batches: the state of the stream of batches after that round.
            configuration: the experiment as JSON.
        """
        progress = {
            "round": round_number,
            "batches": _text_from_bytes(batches),
            "configuration": configuration,
        }
        self._manager.save(
            round_number,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                progress=ocp.args.JsonSave(progress),
            ),
            force=True,
        )

    def restore_batches(self) -> Any:
        """Returns the state of the stream of batches of the newest checkpoint.

        Raises:
            FileNotFoundError: if there is no checkpoint.
            OSError: if its files are damaged.
        """
        progress = ocp.args.Composite(progress=ocp.args.JsonRestore())
        with self._reading():
            return _bytes_from_text(self._manager.restore(None, args=progress).progress["batches"])

    def restore_state(self, like: State, participants: int | None = None) -> State:
        """Restores the state of the newest checkpoint.

        Where it was saved with another number of participants, what each of them keeps is dealt
        out again: participant i goes on from what participant i mod n had, of n that there were.

        Args:
            like: the state's abstract values, each a ``jax.ShapeDtypeStruct`` with its sharding,
                which can be another mesh's than the one it was saved from.
            participants: how many there are now; None if they are as many as were saved.

        Returns:
            The state on these shardings.

        Raises:
            FileNotFoundError: if there is no checkpoint.
            OSError: if its files are damaged.
            ValueError: if the saved state is of another model or method.
        """
        wanted = ocp.tree.to_flat_dict(like)
        with self._reading():
            saved = self._saved_shapes()
        if wanted.keys() != saved.keys():
            names = sorted(".".join(path) for path in wanted.keys() ^ saved.keys())
            raise ValueError(
                f"The checkpoint is of another state: {', '.join(names[:5])} "
                f"{'and others ' if len(names) > 5 else ''}stand in one of the two alone. Give the "
                "model and the method with which it was saved, or another --job_log_dir."
            )
        stored = {
            path: _of_participants(leaf, saved[path], participants, path)
            for path, leaf in wanted.items()
        }
        restore = ocp.args.Composite(
            state=ocp.args.StandardRestore(ocp.tree.from_flat_dict(stored, target=like))
        )
        with self._reading():
            restored = self._manager.restore(None, args=restore).state
        return jax.tree.map(_deal_out, restored, like)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Says of whatever fails in reading that the newest checkpoint's files are damaged."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # no fault of the files
        except Exception as error:
            step = self._manager.latest_step()
            if step is None:
                raise
            folder = Path(self._manager.directory) / str(step)
            raise OSError(
                f"The checkpoint of round {step} cannot be read, so its files are damaged: delete "
                f"{folder} to go on from the one before it. ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]})"
            ) from error

    def _saved_shapes(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        step = self._manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"{self._manager.directory} has no checkpoint.")
        handlers = {
            "state": ocp.StandardCheckpointHandler(),
            "progress": ocp.JsonCheckpointHandler(),
        }
        options = ocp.CheckpointManagerOptions(create=False)
        with ocp.CheckpointManager(
            self._manager.directory, options=options, item_handlers=handlers
        ) as manager:
            saved = manager.item_metadata(step)["state"]
            return {path: tuple(leaf.shape) for path, leaf in ocp.tree.to_flat_dict(saved).items()}

    def wait(self) -> None:
        """Waits until everything that was saved is on the disk."""
        self._manager.wait_until_finished()

    def __exit__(self, *error: object) -> None:
        """Waits for what is being written, and closes."""
        self._manager.close()


def _of_participants(
    leaf: jax.ShapeDtypeStruct,
    saved: tuple[int, ...],
    participants: int | None,
    path: tuple[str, ...],
) -> jax.ShapeDtypeStruct:
    """The abstract value of what was saved, of as many participants as there were then."""
    # Random keys are saved as numbers, with an axis more.
    if leaf.shape == saved or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    placed = len(saved) > 0 and leaf.shape[:1] == (participants,) and leaf.shape[1:] == saved[1:]
    if not placed:
        raise ValueError(
            f"The checkpoint's {'.'.join(path)} has shape {saved}, but the experiment's "
            f"{leaf.shape}. Give the model with which it was saved, or another --job_log_dir."
        )
    sharding: Any = leaf.sharding
    spec = PartitionSpec(None, *sharding.spec[1:])
    return jax.ShapeDtypeStruct(saved, leaf.dtype, sharding=NamedSharding(sharding.mesh, spec))


def _deal_out(restored: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Gives each participant what one of those that were saved had."""
    if restored.shape == like.shape:
        return restored
    turns = jnp.arange(like.shape[0]) % restored.shape[0]
    return jax.jit(lambda x: jnp.take(x, turns, axis=0), out_shardings=like.sharding)(restored)


def latest_round(job_log_dir: str | Path) -> int | None:
    """Returns how many rounds the newest whole checkpoint in a folder has, or ``None``.

    Args:
        job_log_dir: a run's folder, which need not be there.

    Example:
        >>> import tempfile
        >>> print(latest_round(tempfile.mkdtemp()))
        None
    """
    folder = Path(job_log_dir).absolute() / FOLDER
    if not folder.exists():
        return None
    steps = ocp.utils.checkpoint_steps(folder)
    return max(steps) if steps else None


def load_params(job_log_dir: str | Path, round_number: int | None = None) -> Params:
    """Loads the server's model of a run as NumPy arrays, to use it after training.

    Args:
        job_log_dir: the run's folder.
        round_number: which checkpoint; the newest if not given.

    Returns:
        The parameters, as nested dicts (and lists) of NumPy arrays.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
    """
    if round_number is None:
        round_number = latest_round(job_log_dir)
    folder = Path(job_log_dir).absolute() / FOLDER
    if round_number is None or not (folder / str(round_number)).exists():
        raise FileNotFoundError(
            f"{folder} has no checkpoint{f' of round {round_number}' if round_number else ''}. "
            "Train there first: fedpax train --exp=... --job_log_dir=..."
        )
    handlers = {"state": ocp.PyTreeCheckpointHandler(), "progress": ocp.JsonCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager(folder, options=options, item_handlers=handlers) as manager:
        saved = manager.item_metadata(round_number)["state"]
        params = jax.tree.map(lambda leaf: 0, saved["params"])
        as_numpy = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), params)
        restore = ocp.args.PyTreeRestore(
            item={"params": params}, restore_args={"params": as_numpy}, partial_restore=True
        )
        restored = manager.restore(round_number, args=ocp.args.Composite(state=restore))
    return restored["state"]["params"]


def _text_from_bytes(state: Any) -> Any:
    return {"base64": base64.b64encode(state).decode()} if isinstance(state, bytes) else state


def _bytes_from_text(state: Any) -> Any:
    if isinstance(state, dict) and set(state) == {"base64"}:
        return base64.b64decode(state["base64"])
    return state
