"""Write checkpoints to folders and to object stores, such as a bucket, by Orbax."""

import functools
import glob
import logging
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from fedpax.errors import ConfigurationError
from fedpax.extras import LazyModule
from fedpax.files import replace_file
from fedpax.run_files.paths import complete_rounds, is_remote

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
else:
    ocp = LazyModule("orbax.checkpoint")

__all__ = ["ocp"]

MOUNTS = Path("/proc/self/mounts")

OBJECT_STORES = frozenset(
    {"gcsfuse", "s3fs", "goofys", "geesefs", "rclone", "blobfuse", "blobfuse2"}
)
"""Names of programs that mount an object store, as Linux lists them after `fuse.`."""

COMMITTED = "commit_success.txt"
"""The file that completes a checkpoint in an object store."""

CHUNK_BYTES = 1 << 24
"""Bytes of a file that are in memory at once."""

SMALL = 2**20
"""Bytes of an array that one device writes alone."""

DRAFT = "orbax-checkpoint-tmp"
"""A part of the path of every checkpoint that is not complete."""

LOGGERS = ("absl", "asyncio")


def forget_place(checkpoint: Path) -> None:
    """Remove the path of this machine from the files by which Orbax says that it is done."""
    if not is_object_store(checkpoint):  # there the file itself completes the checkpoint
        for path in checkpoint.rglob(COMMITTED):
            replace_file(path, b"Checkpoint commit was successful", sync=False)


def is_object_store(folder: Path) -> bool:
    """Return whether a folder is in an object store, which renames no folder with its files."""
    if is_remote(folder):
        return True
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False
    folder = folder.resolve()
    types = {}
    for line in lines:
        _, place, file_system, *_ = line.split(" ")
        # The list writes a space as \\040; a later mount on the same place hides the earlier one.
        types[Path(place.replace("\\040", " "))] = file_system
    mounted = next((types[place] for place in (folder, *folder.parents) if place in types), "")
    return mounted.removeprefix("fuse.") in OBJECT_STORES


def remove_folder(folder: Any) -> None:
    """Remove a folder with its files."""
    if is_remote(folder):
        folder.rmtree()
    else:
        shutil.rmtree(folder)


def delete_folder(folder: Any, *, last: str) -> None:
    """Delete a folder that counts as complete; after a kill, a part does not count."""
    if is_object_store(folder):
        (folder / last).unlink(missing_ok=True)
        remove_folder(folder)
        return
    leftover = folder.with_name(f".{folder.name}.deleted.draft")
    if leftover.exists():
        shutil.rmtree(leftover)
    folder.rename(leftover)
    shutil.rmtree(leftover)


def rename_folder(source: Path, target: Path, *, last: str) -> None:
    """Rename a folder; in object stores, move its files one by one."""
    one_store = not is_object_store(source) and not is_object_store(target)
    if one_store and source.stat().st_dev == target.parent.stat().st_dev:
        source.rename(target)
        return
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda file: (file == Path(last), file)):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        if is_remote(target):
            with (source / file).open("rb") as old, (target / file).open("wb") as new:
                shutil.copyfileobj(old, new, CHUNK_BYTES)
        else:
            shutil.move(source / file, target / file)
    shutil.rmtree(source)


_LocalPath: Any = type(epath.Path("/"))


class _LiteralPath(_LocalPath):
    """A path of a file system whose `glob` takes the path itself as it is written."""

    def glob(self, pattern: str) -> Iterator["_LiteralPath"]:
        """Yield the files and folders that match a pattern below this folder."""
        for name in glob.glob(pattern, root_dir=os.fspath(self)):
            yield self / name


def literal_path(folder: Path) -> Path:
    """Return a path where Orbax, which lists files by patterns, finds the files of `runs[1]`."""
    if not isinstance(folder, Path) or glob.escape(str(folder)) == str(folder):
        return folder
    return cast(Path, _LiteralPath(folder))


@functools.cache
def _manager_class() -> "type[ocp.CheckpointManager]":
    class Manager(ocp.CheckpointManager):
        def reached_preemption(self, step: int) -> bool:
            # Orbax asks JAX about an older round than the training: at a SIGTERM, JAX would agree
            # to stop after a round that has passed, and the run would never stop.
            return False

    return Manager


def open_checkpoints(folder: Path, **settings: Any) -> "ocp.CheckpointManager":
    """Open the folder of a run's checkpoints."""
    # Orbax then reads the time of each checkpoint, from a file that has no checksum.
    try:
        return _manager_class()(literal_path(folder), **settings)
    except ValueError as error:
        names = ocp.path.step.standard_name_format()
        for step in complete_rounds(folder):
            try:
                _ = names.find_step(folder, step).commit_timestamp
            except ValueError as reason:
                raise ConfigurationError(
                    f"{folder / str(step) / '_CHECKPOINT_METADATA'} is damaged ({reason}), "
                    "expected the file as it was saved. Restore it from a copy, or delete this "
                    "file alone: it holds the time of the checkpoint, which can be read without it."
                ) from error
        raise


def open_to_read(folder: Path, *, alone: bool = False) -> "ocp.CheckpointManager":
    """Open a folder, in which a run can remove other checkpoints while Orbax lists them."""
    processes = ocp.options.MultiprocessingOptions()
    if alone:  # the other processes of a job do not read
        index = jax.process_index()
        processes = ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index})
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=processes)
    handlers = {
        "state": ocp.PyTreeCheckpointHandler(),
        "params": ocp.PyTreeCheckpointHandler(),
        "rows": ocp.PyTreeCheckpointHandler(),
        "progress": ocp.JsonCheckpointHandler(),
    }
    for _ in range(5 if jax.process_count() == 1 else 0):
        try:
            return open_checkpoints(folder, options=options, item_handlers=handlers)
        except FileNotFoundError:
            time.sleep(0.1)
    return open_checkpoints(folder, options=options, item_handlers=handlers)


def restore_item(
    manager: "ocp.CheckpointManager",
    step: int,
    name: str,
    item: Any,
    arguments: Any = None,
    *,
    partial: bool = False,
) -> Any:
    """Restore an item of a checkpoint, or a part of it. By default as NumPy arrays."""
    if arguments is None:
        arguments = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), item)
    restore = ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=partial)
    return manager.restore(step, args=ocp.args.Composite(**{name: restore}))[name]


def open_array(folder: Path, path: Sequence[str]) -> Any:
    """Open an array of a saved tree, to read a part of it."""
    import tensorstore as ts

    # Orbax's layout of PyTrees: https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
    url = str(folder)
    bucket, _, prefix = url.partition("://")[2].partition("/")
    base = (
        {"driver": "gcs", "bucket": bucket, "path": f"{prefix}/"}
        if is_remote(folder)
        else {"driver": "file", "path": f"{url}/"}
    )
    name = ".".join(path)
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
    return ts.open(spec, open=True, read=True).result()


def barrier_of_saves() -> "ocp.multihost.BarrierSyncFn":
    """Return the barrier of Orbax's threads, where a failed save does not wait."""
    wait = ocp.multihost.get_barrier_sync_fn()

    def wait_unless_failed(*, key: str, timeout_ms: int) -> None:
        # Orbax comes here in a `finally`. The other processes wait elsewhere, for this save.
        if sys.exc_info()[1] is None:
            wait(key=key, timeout_ms=timeout_ms)

    return wait_unless_failed


def wait_for_writers() -> None:
    """Wait until Orbax writes no files: after its first error, the rest of a save still runs."""
    for thread in threading.enumerate():
        # The thread of this name completes the checkpoint when the others have written its files.
        if type(thread).__module__.startswith("orbax.") or thread.name == "async_save":
            threading.Thread.join(thread)  # their own method raises the error of the write


def atomicity_of(folder: Path) -> "ocp.options.AtomicityOptions":
    """Return how Orbax completes a checkpoint: in an object store in place, by `COMMITTED`."""
    mode = ocp.options.AtomicityMode
    if not is_object_store(folder):
        return ocp.options.AtomicityOptions(mode.AUTO)
    return ocp.options.AtomicityOptions(mode.COMMIT_FILE, allow_legacy_atomic_rename=True)


def on_one_device(tree: Any) -> Any:
    """Replace small replicated arrays by copies on one device, which Orbax need not slice."""
    if jax.process_count() > 1:  # Orbax then needs the arrays of all processes
        return tree

    def smaller(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf
        is_small = leaf.is_fully_replicated and leaf.nbytes <= SMALL
        return leaf.addressable_data(0) if is_small else leaf

    return jax.tree.map(smaller, tree)


class Retention(NamedTuple):
    """A rule that says which checkpoints are kept when a new one is saved."""

    newest: int  # number of the newest checkpoints that are kept
    every: int = 0  # checkpoints of rounds that are a multiple of it are kept too. Default 0: none.
    # for each of these numbers, the newest checkpoint of a round that is a multiple of it is kept
    # too: a roll back returns to it, or an export reads it
    scheduled: tuple[int, ...] = ()

    def keeps(self, rounds: Sequence[int], best: int, parents: Mapping[int, int]) -> list[bool]:
        """Return for each checkpoint whether it is kept; with one, also the rest of its rows."""
        kept = {*rounds[-self.newest :], best}
        if self.every:
            kept.update(number for number in rounds if number % self.every == 0)
        for period in filter(None, self.scheduled):
            kept.update([number for number in rounds if number % period == 0][-1:])
        for number in sorted(rounds, reverse=True):
            if number in kept and number in parents:
                kept.add(parents[number])
        return [number in kept for number in rounds]


class QuietFailedSaves(AbstractContextManager["QuietFailedSaves"]):
    """A context manager that hides the tracebacks which follow the first error of a save."""

    _lock = threading.Lock()
    _in_effect = 0

    def __enter__(self) -> "QuietFailedSaves":
        """Start to hide them."""
        with self._lock:
            QuietFailedSaves._in_effect += 1
            for name in LOGGERS:
                logging.getLogger(name).addFilter(_is_no_failed_save)
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        """Stop to hide them, unless there was an error."""
        if error_type is not None:
            return
        with self._lock:
            QuietFailedSaves._in_effect -= 1
            if not QuietFailedSaves._in_effect:
                for name in LOGGERS:
                    logging.getLogger(name).removeFilter(_is_no_failed_save)


def _is_no_failed_save(record: logging.LogRecord) -> bool:
    if record.exc_info is None:
        return True
    _, error, frames = record.exc_info
    # The path of the record itself can be absl's, which logs for Orbax.
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(frames)]
    return DRAFT not in str(error) and not any("orbax" in f for f in (record.pathname, *files))
