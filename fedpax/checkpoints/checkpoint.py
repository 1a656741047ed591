"""Checkpoints of a run: state, position in the data, round and configuration, saved together."""

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedpax.algorithm import State
from fedpax.checkpoints.changed_rows import StateParts
from fedpax.checkpoints.checkpoint_files import (
    DELETED,
    NOT_DAMAGE,
    damaged_checkpoint,
    find_damage,
    remove_deleted,
    set_aside_unfinished,
    write_checksums,
)
from fedpax.checkpoints.exports import Exports
from fedpax.checkpoints.orbax_files import (
    QuietFailedSaves,
    Retention,
    atomicity_of,
    barrier_of_saves,
    is_object_store,
    ocp,
    open_checkpoints,
    wait_for_writers,
)
from fedpax.checkpoints.participant_states import (
    ParticipantRule,
    check_resizable,
    check_same_leaves,
    kept_participants,
    resize_participants,
    saved_leaves,
    saved_struct,
    shapes_of_same_clients,
)
from fedpax.checkpoints.run_position import RunPosition, gather_stream_state
from fedpax.console import print_error
from fedpax.errors import ArgumentError, FedpaxError
from fedpax.run_files.paths import (
    CHECKPOINTS,
    complete_rounds,
    is_remote,
    resolve_folder,
)

MOST_LOST_SAVES = 3
"""Number of saves to a bucket in a row that may fail; the next one stops the run."""


class CheckpointWriteError(FedpaxError, OSError):
    """A checkpoint cannot be written; the ones before it are kept."""


class LostCheckpointDirError(FedpaxError, OSError):
    """Another run has taken the folder of this run's checkpoints."""


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints in a run's folder, which are written while it trains; a context manager."""

    # They are renamed when they have the checksum of each file: a kill leaves the one before.

    def __init__(
        self,
        job_log_dir: str | Path,
        *,
        keep: int | Retention,
        exports: Exports | None = None,
        before_complete: Callable[[], None] | None = None,
    ) -> None:
        self._folder = resolve_folder(job_log_dir) / CHECKPOINTS
        self._primary = jax.process_index() == 0
        if self._primary:
            set_aside_unfinished(self._folder)
        multihost_utils.sync_global_devices("fedpax: unfinished checkpoints are removed")
        self._exports = exports
        self._saving: int | None = None
        self._verified: int | None = None
        self.is_resized = False  # whether participants had states in another number of them
        self._progress: tuple[int, dict[str, Any]] | None = None
        self._before_complete = before_complete
        self._retention = Retention(keep) if isinstance(keep, int) else keep
        self._best = 0
        self._parts = StateParts(self._folder)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deleted checkpoints")
        self._removal: Future[None] | None = None
        self._lost: CheckpointWriteError | None = None
        self._num_lost = 0
        if self.latest_round() is not None:
            self.open()
        self._quiet = QuietFailedSaves().__enter__()

    def open(self) -> None:
        """Open the folder, and raise if Orbax cannot. A folder with checkpoints is open already."""
        _ = self._manager

    @functools.cached_property
    def _manager(self) -> "ocp.CheckpointManager":
        return self._open()

    def _open(self) -> "ocp.CheckpointManager":
        callback = self._complete if self._primary else None
        return open_checkpoints(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self,
                # A kill in the removal of files must not leave half a checkpoint under its name. An
                # object store cannot rename a folder.
                todelete_subdir=None if is_object_store(self._folder) else DELETED,
                cleanup_tmp_directories=True,
                atomicity_options=atomicity_of(self._folder),
                async_options=ocp.AsyncOptions(
                    barrier_sync_fn=barrier_of_saves(),
                    post_finalization_callback=callback,
                    # A save that makes its folders in the background waits for those of the newest
                    # save of the process, which can be an export's.
                    create_directories_asynchronously=self._exports is None,
                ),
            ),
            item_names=("state", "progress", "params", "rows"),
        )

    def should_preserve(
        self,
        checkpoints: "Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo]",
        *,
        context: "ocp.checkpoint_managers.PreservationContext",
    ) -> list[bool]:
        """Return for each checkpoint whether it is kept; Orbax calls this."""
        rounds = [checkpoint.step for checkpoint in checkpoints]
        return self._retention.keeps(rounds, self._best, self._parts.parents)

    def keep_best(self, round_number: int) -> None:
        """Keep the checkpoint of a round too, and no longer the one that was named before."""
        self._best = round_number

    def latest_round(self) -> int | None:
        """Return the round of the newest complete checkpoint, or None if there is none."""
        rounds = complete_rounds(self._folder)
        return rounds[-1] if rounds else None

    def save(
        self,
        round_number: int,
        state: State,
        stream_state: dict[str, Any] | bytes,
        configuration: Mapping[str, Any],
        num_participants: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Start to save a checkpoint; return when the arrays may be donated."""
        if type(round_number) is not int or round_number < 0:
            # Orbax would take another value as a path, and remove what is there.
            raise ArgumentError(f"round_number={round_number!r}, expected an integer, at least 0.")
        position = RunPosition(
            round_number,
            gather_stream_state(stream_state),
            configuration,
            num_participants,
            numbers,
        )
        self.is_saved()
        if self._exports is not None:
            self._exports.wait_if_due(round_number)
        if self._lost is not None:
            wait_for_writers()  # files of one save must not get among the files of another one
            self._parts.forget()
        self._saving, self._progress = round_number, None
        with self._losing(), self._writing():
            is_complete = False
            if self._lost is not None:
                # Orbax saves no round of which a failed save has left files, and a manager raises
                # the error of a save again and again.
                set_aside_unfinished(self._folder)
                self._manager, self._lost = self._open(), None
                # A save whose error was in the time of the checkpoint alone still completes it.
                is_complete = round_number in complete_rounds(self._folder)
            if not is_complete:
                items = self._parts.to_save(round_number, state)
                items["progress"] = ocp.args.JsonSave(position.to_json())
                self._manager.save(round_number, args=ocp.args.Composite(**items), force=True)
            self._removal = self._thread.submit(self._remove_when_saved)
            if self._exports is not None:
                self._exports.start(round_number)

    def delete_after(self, round_number: int) -> int:
        """Return to a checkpoint, delete the newer ones, and return its round; 0 without one."""
        self._parts.forget()
        rounds = complete_rounds(self._folder)
        before = [number for number in rounds if number <= round_number]
        to = (before or rounds or [0])[-1] if round_number else 0
        to = int(multihost_utils.broadcast_one_to_all(np.int32(to)))
        for number in self._manager.all_steps():
            if number > to:
                self._manager.delete(number)
                self._remove_deleted()  # two checkpoints of one round have the same name there
        return to

    def _remove_deleted(self) -> None:
        if self._primary:
            remove_deleted(self._folder)

    def _remove_when_saved(self) -> None:
        """Remove the checkpoints that Orbax has moved away after the running save."""
        while self._manager.is_saving_in_progress():
            time.sleep(0.1)
        self._remove_deleted()

    def _complete(self) -> None:
        """Write the checksums of the checkpoint that is being saved, before it is renamed."""
        if self._before_complete is not None:
            self._before_complete()
        draft = self._folder / f"{self._saving}"
        if not is_object_store(self._folder):  # there, a checkpoint is written in place
            (draft,) = self._folder.glob(f"{self._saving}.orbax-checkpoint-tmp*")
        self._parts.write_parent(draft)
        write_checksums(draft)

    def restore_position(self) -> RunPosition:
        """Return the position of the run in the newest checkpoint."""
        # Its file is read once.
        step = self._verified_round()
        with self._reading(step):
            if self._progress is None or self._progress[0] != step:
                progress = ocp.args.Composite(progress=ocp.args.JsonRestore())
                self._progress = step, self._manager.restore(step, args=progress).progress
            # A copy, since a stream may change the position that it moves to.
            return RunPosition.from_json(copy.deepcopy(self._progress[1]))

    def restore_state(
        self,
        like: State,
        num_participants: int | None = None,
        rule: ParticipantRule = "average",
        numbers: Sequence[int] | None = None,
    ) -> State:
        """Restore the state of the newest checkpoint."""
        # Server values are restored bit by bit. Placed values of another number of participants are
        # made by `resize_participants`.
        wanted = ocp.tree.to_flat_dict(like)
        step = self._verified_round()
        with self._reading(step):
            saved = saved_leaves(self._folder, step)
        position = self.restore_position()
        check_same_leaves(wanted, saved.shapes, step)
        shapes = shapes_of_same_clients(like, saved)
        stored = {
            path: saved_struct(leaf, shapes[path], path, num_participants, position.participants)
            for path, leaf in wanted.items()
        }
        for path, leaf in wanted.items():
            if stored[path] is not leaf:
                check_resizable(like, stored[path].shape[0], leaf.shape[0])
        tree = jax.tree.structure(like)
        with self._reading(step):
            target = ocp.tree.from_flat_dict(stored, target=like)
            leaves = jax.tree.leaves(self._parts.restore(self._manager, step, target))
        self.is_resized = any(stored[path] is not leaf for path, leaf in wanted.items())
        if self.is_resized:
            self._parts.forget()
        kept = kept_participants(position.numbers, numbers)
        for i, leaf in enumerate(jax.tree.leaves(like)):  # frees each saved array after its use
            leaves[i] = resize_participants(leaves[i], leaf, rule, kept)
        return jax.tree.unflatten(tree, leaves)

    def _verified_round(self) -> int:
        """Return the newest complete checkpoint's round, after its checksums were compared."""
        step = self.latest_round()
        if step is None:
            raise FileNotFoundError(
                f"{self._folder} has no complete checkpoint, expected at least one. Train first."
            )
        if step != self._verified:
            damage, unread = None, None
            if self._primary:
                try:
                    damage = find_damage(self._folder / str(step))
                except OSError as error:  # the other processes wait for the result
                    damage, unread = str(error), error
            damaged = multihost_utils.broadcast_one_to_all(np.int32(damage is not None))
            if unread is not None:
                raise unread
            if damaged:
                raise damaged_checkpoint(self._folder, step, damage or "as process 0 reports")
            self._verified = step
        return step

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise any failure to write a checkpoint as an OSError: TensorStore has others."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, MemoryError, LostCheckpointDirError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and not is_remote(self._folder):
                raise
            remedy = (
                "" if is_remote(self._folder) else " Correct the cause, then run again to resume."
            )
            raise CheckpointWriteError(
                f"The checkpoint of round {self._saving} cannot be written in {self._folder} "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0]}).{remedy}"
            ) from error

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Continue after a failure to write a checkpoint to a bucket, but not forever."""
        try:
            yield
        except CheckpointWriteError as error:
            self._num_lost += 1
            # Several processes could differ in what they have saved.
            alone = is_remote(self._folder) and jax.process_count() == 1
            if not alone or self._num_lost > MOST_LOST_SAVES:
                raise
            self._lost = error
            if self._exports is not None:
                self._exports.skip(self._saving)
            print_error(f"{error} The run continues, and tries again at its next checkpoint.")

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Raise any failure to read a checkpoint as a `DamagedCheckpointError`."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # not caused by the files
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NOT_DAMAGE:
                raise
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise damaged_checkpoint(self._folder, step, reason) from error

    def is_saved(self) -> bool:
        """Wait for the running save; return False if it has failed and can be tried again."""
        if self._lost is None:
            with self._losing():
                self._wait_until_saved()
        return self._lost is None

    def wait(self) -> None:
        """Wait until every save and export has finished."""
        self._wait_until_saved()
        if self._exports is not None:
            self._exports.wait()

    def _wait_until_saved(self) -> None:
        if self._lost is not None:
            raise self._lost
        with self._writing():
            if "_manager" in vars(self):
                self._manager.wait_until_finished()
            if self._removal is not None:
                self._removal.result()
                self._removal = None
        if self._saving is not None:
            self._num_lost = 0

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        """Wait for the running save and close. Its failure must not hide the run's own error."""
        try:
            if self._lost is None and "_manager" in vars(self):
                self._manager.close()
            self._thread.shutdown()
            self._remove_deleted()
        except Exception as failure:
            if error_type is None:
                error_type = type(failure)
                raise
        finally:
            if self._primary and not is_remote(self._folder):
                with suppress(OSError):  # it holds checkpoints
                    self._folder.rmdir()
            self._quiet.__exit__(error_type)
