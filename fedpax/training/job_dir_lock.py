"""A run's folder is used by one process at a time."""

import contextlib
import os
import socket
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from fedpax.checkpoints.checkpoint_dir import is_owned
from fedpax.errors import ConfigurationError
from fedpax.files import open_unlinked
from fedpax.processes.communication import raise_everywhere
from fedpax.run_files.paths import (
    check_links,
    is_remote,
)

if sys.platform != "win32":
    import fcntl


LOCK = ".lock"


class JobDirLock(AbstractContextManager["JobDirLock"]):
    """A lock on a run's folder, which the operating system releases when the process ends."""

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
        raise_everywhere(refusal, folder)

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
            # another name, which could be the name of a file of the user.
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
    """Return whether a process trains in a folder."""
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
