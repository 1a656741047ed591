"""A run's folder: used by one process at a time, and bound to one experiment."""

import contextlib
import difflib
import os
import socket
import sys
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedpax.checkpoints.checkpoint_dir import is_owned
from fedpax.errors import ConfigurationError
from fedpax.files import open_unlinked
from fedpax.run_files.configuration import (
    class_name,
    differences,
    flatten,
    from_json,
    moved_out_of_main,
    read_configuration_json,
    to_json,
)
from fedpax.run_files.known_classes import own_classes
from fedpax.run_files.metrics import read_metrics, select
from fedpax.run_files.paths import (
    CHECKPOINTS,
    CONFIGURATION,
    SCALARS,
    check_links,
    is_remote,
    latest_round,
    resolve_checkpoint_dir,
)
from fedpax.training.check_saved_state import describe_state_misfit
from fedpax.training.experiment import Experiment

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"

WITHOUT_EFFECT = frozenset(
    {"training.profile_at", "training.hang_after", "training.on_hang", "training.keep_best"}
)
"""Fields that may always change, because they have no effect on what is trained."""


class JobDirLock(AbstractContextManager["JobDirLock"]):
    """A lock on a run's folder, so that only one job trains in it; a context manager.

    The operating system releases the lock when the process ends, however it ends, so a killed
    process leaves no lock behind. Of a job with several processes, process 0 holds the lock.

    On exit the lock's file is deleted, and so is the folder if it was created here and is empty.

    Args:
        folder: the run's folder; created if it is missing.

    Raises:
        ConfigurationError: another process holds the lock, or the folder cannot be created.

    Example:
        >>> import tempfile
        >>> with JobDirLock(Path(tempfile.mkdtemp())):
        ...     pass  # train
    """

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        self._path = folder / LOCK
        self._created = [path for path in (folder, *folder.parents) if not path.exists()]
        refusal: ConfigurationError | None = None
        if jax.process_index() == 0:
            try:
                self._lock(folder)
            except ConfigurationError as error:
                refusal = error
        if jax.process_count() > 1:
            refused = multihost_utils.broadcast_one_to_all(np.int32(refusal is not None))
            if refused and refusal is None:
                refusal = ConfigurationError(
                    f"Process 0 cannot use {folder}; its message names the reason and the remedy."
                )
        if refusal is not None:
            raise refusal

    def _lock(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_links(folder)
            # Another name of the file is harmless until the file is changed, below.
            self._file = open_unlinked(self._path, os.O_RDWR | os.O_CREAT, other_names=True)
        except OSError as error:
            self._remove_created()
            raise ConfigurationError(
                f"--job_log_dir={folder} cannot hold a run ({error.strerror}), expected a folder "
                "in which files can be created. Set another --job_log_dir."
            ) from error
        if sys.platform == "win32":
            return  # no locks of this kind
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._file, 1000).decode(errors="replace").strip()
            os.close(self._file)
            self._file = None
            raise ConfigurationError(
                f"--job_log_dir={folder} is in use by another process"
                f"{f' ({holder})' if holder else ''}, expected a folder that no process trains in. "
                "Wait until it ends, stop it, or set another --job_log_dir."
            ) from error
        except OSError:
            return  # a file system without locks
        shared = os.fstat(self._file).st_nlink > 1
        if shared or not self._is_current():
            # The former holder deleted the file between the two calls above; or the file has
            # another name, which could be that of a file of the user.
            if shared:
                self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._lock(folder)
            return
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {started}\n"
        with contextlib.suppress(OSError):  # a full disk; the text only helps the other process
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, holder.encode(), 0)

    def _is_current(self) -> bool:
        """Return whether the locked file is still the one in the folder."""
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def __exit__(self, *error: object) -> None:
        """Delete the file and release the lock: in this order no other process locks it."""
        if self._file is None:
            return
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        os.close(self._file)
        self._file = None
        self._remove_created()

    def _remove_created(self) -> None:
        with contextlib.suppress(OSError):  # not empty
            for path in self._created:
                path.rmdir()


def is_in_use(folder: Path) -> bool:
    """Return whether a process trains in a folder.

    Args:
        folder: a run's folder, or its `checkpoint_dir`. It may be missing, and is not changed.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with JobDirLock(folder):
        ...     is_in_use(folder)
        True
        >>> is_in_use(folder)
        False
    """
    if is_owned(folder):
        return True
    if sys.platform == "win32" or is_remote(folder):
        return False  # no locks of this kind
    try:
        file = open_unlinked(folder / LOCK, os.O_RDONLY, other_names=True)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(file)
    except BlockingIOError:
        return True
    except OSError:
        pass  # no file, or a file system without locks
    return False


def check_configuration(
    folder: Path,
    experiment: Experiment,
    exp: str = "",
    *,
    allow_config_change: Collection[str] = (),
    flag: str = "--job_log_dir",
) -> None:
    """Check that a folder is empty, or holds the same experiment with an allowed configuration.

    Args:
        folder: the run's folder.
        experiment: the experiment to train there.
        exp: its name on the command line.
        allow_config_change: paths of fields that may differ from the configuration in the folder.
            A path allows all fields below it: `"mesh"` allows `"mesh.clients"`. A larger
            `training.rounds` is always allowed once all rounds of the former one are done, and so
            is any change of the fields in `WITHOUT_EFFECT`.
        flag: the flag that sets the folder, for error messages.

    Raises:
        ConfigurationError: the folder holds another experiment, a field differs that is not
            allowed to, `allow_config_change` names no field, or a file has the name of one of the
            run's folders.
    """
    check_field_names(experiment, allow_config_change)
    _check_entries(folder)
    found = read_configuration_json(folder)
    if found is None:
        return
    name, saved = found
    saved = moved_out_of_main(saved, type(experiment).__module__)
    same_class = saved["class"] == class_name(experiment)
    changes = {}
    if same_class:
        own = own_classes(experiment)
        changes = _changes(folder, from_json(saved, folder / CONFIGURATION, own), experiment)
    # A module can be written in several ways (mine, ./mine.py), but the class is the same.
    functions = {text.rpartition(":")[2] for text in (name, exp) if text}
    if not same_class and name == exp:
        raise ConfigurationError(
            f"{flag}={folder} holds a {saved['class']}, expected a {class_name(experiment)}"
            f"{f', as --exp={exp} makes now' if exp else ''}. If the class was renamed, write its "
            f"new name into config.json there; otherwise set another {flag}."
        )
    if not same_class or (changes and len(functions) > 1):
        raise ConfigurationError(
            f"{flag}={folder} holds another experiment"
            f"{f', --exp={name}' if name else ''}, expected "
            f"{f'--exp={exp}' if exp else class_name(experiment)} or an empty folder. Set another "
            f"{flag}."
        )
    refused = {
        path: change
        for path, change in changes.items()
        if not any(_is_at_or_below(path, allowed) for allowed in allow_config_change)
    }
    if refused:
        allowed_paths = ",".join([*allow_config_change, *refused])
        listing = "\n".join(f"  {path}: {change}" for path, change in refused.items())
        saved_in = resolve_checkpoint_dir(folder, experiment.training.checkpoint_dir)
        misfit = describe_state_misfit(saved_in, experiment)
        remedy = (
            f"Set the former values to resume the run, another {flag} to start a new one, "
            f"or --allow_config_change={allowed_paths} to resume it with the new values."
            if misfit is None
            else "The run cannot resume with the new values, because its state would have another "
            f"structure. {misfit}"
        )
        raise ConfigurationError(
            f"{flag}={folder} holds this experiment with another configuration. Fields that "
            f"would change:\n{listing}\n{remedy}"
        )


def _check_entries(folder: Path) -> None:
    """Raise if a file has the name of one of the run's folders, or a folder that of a file."""
    for name in (CHECKPOINTS, SCALARS):
        if (folder / name).exists() and not (folder / name).is_dir():
            raise ConfigurationError(
                f"{folder / name} is a file, expected a folder, which the run makes itself. Move "
                "the file away, or set another --job_log_dir."
            )


def _changes(folder: Path, old: Experiment, new: Experiment) -> dict[str, str]:
    """Return the fields that differ, but for `WITHOUT_EFFECT` and more rounds of a finished run."""
    changes = differences(old, new)
    # A checkpoint may have been deleted since then, because it was damaged.
    logged = (line["round"] for line in select(read_metrics(folder), "training"))
    finished = max(latest_round(folder) or 0, *logged, 0) >= old.training.rounds
    for path in WITHOUT_EFFECT:
        changes.pop(path, None)
    if finished and new.training.rounds > old.training.rounds:
        changes.pop("training.rounds", None)
    return changes


def check_field_names(experiment: Experiment, names: Collection[str]) -> None:
    """Check that each name is the path of a field, or of a group of fields.

    Args:
        experiment: the experiment.
        names: paths such as `"training.rounds"` or `"mesh"`.

    Raises:
        ConfigurationError: a name is none of these.
    """
    paths = [path for path, _ in flatten(to_json(experiment))]
    groups = {path[:i] for path in paths for i, letter in enumerate(path) if letter == "."}
    for name in names:
        if name not in groups and name not in paths:
            near = difflib.get_close_matches(name, [*groups, *paths], n=3)
            raise ConfigurationError(
                f"--allow_config_change={name} names no field of the experiment, expected a path "
                f"such as {' or '.join(near) if near else 'training.rounds'}. Run the command with "
                "--help to see all fields."
            )


def _is_at_or_below(path: str, group: str) -> bool:
    return path == group or path.startswith(f"{group}.")
