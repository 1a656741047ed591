"""A run's folders are used by one process or run at a time: a lock, and in a bucket an owner."""

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from fedpax.checkpoints.checkpoint import LostCheckpointDirError
from fedpax.console import print_error
from fedpax.errors import ConfigurationError
from fedpax.files import UnusableFileError, lock_file, open_unlinked, read_file, read_json
from fedpax.processes.communication import raise_everywhere
from fedpax.run_files.line_files import LineCopy, read_chunks, replace_by
from fedpax.run_files.paths import (
    CONFIGURATION,
    GOODPUT,
    METRICS,
    METRICS_SUMS,
    TRACKER,
    check_links,
    is_remote,
    write_atomically,
)

LOCK = ".lock"
OWNER = "owner.json"
LAST_OWNER = ".owner"
COPIED = ".metrics_copied.json"
SECONDS_BETWEEN_BEATS = 10.0
SECONDS_OF_SILENCE = 45.0
SECONDS_BETWEEN_LOOKS = 2.0


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
            self._file = open_unlinked(self._path, os.O_RDWR | os.O_CREAT, other_names=True)
        except OSError as error:
            self._remove_created()
            raise ConfigurationError(
                f"--job_log_dir={folder} cannot hold a run ({error.strerror}), expected a folder "
                "in which files can be created. Set another --job_log_dir."
            ) from error
        if (is_held := lock_file(self._file)) is None:
            return
        if not is_held:
            holder = os.read(self._file, 1000).decode(errors="replace").strip()
            os.close(self._file)
            self._file = None
            raise ConfigurationError(
                f"--job_log_dir={folder} is in use by another process"
                f"{f' ({holder})' if holder else ''}, expected a folder that no process trains in. "
                "Wait until it ends, stop it, or set another --job_log_dir."
            )
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


class CheckpointDir(AbstractContextManager["CheckpointDir"]):
    """The folder of the checkpoints of a run that trains in another folder."""

    # A bucket has no locks: `owner.json` names the run that may write, and is rewritten while this
    # run lives. The time of one request between its check and a completed checkpoint is not
    # guarded. A former owner in the same run's folder is dead, as that has a lock.

    def __init__(self, folder: Path, job_log_dir: Path) -> None:
        self._folder, self._job_log_dir = folder, job_log_dir
        self._id = secrets.token_hex(8)
        self._metrics = LineCopy(job_log_dir / METRICS, folder / METRICS, job_log_dir / COPIED)
        self._beats = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="checkpoint_dir", daemon=True)

    def __enter__(self) -> "CheckpointDir":
        """Take the folder, and copy the files of an earlier machine from it."""
        self._job_log_dir.mkdir(parents=True, exist_ok=True)
        refusal: ConfigurationError | None = None
        if jax.process_index() == 0:
            try:
                self._take()
            except ConfigurationError as error:
                refusal = error
            except Exception as error:
                refusal = ConfigurationError(
                    f"--training.checkpoint_dir={self._folder} cannot be used "
                    f"({type(error).__name__}: {error}), expected a folder in which files can be "
                    "created, replaced and deleted. Check the permissions of this machine's "
                    "account, or set another folder."
                )
        raise_everywhere(refusal, self._folder)
        if jax.process_index() == 0:
            self._thread.start()
        return self

    def _take(self) -> None:
        if not is_remote(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            check_links(self._folder, "--training.checkpoint_dir")
        last = self._job_log_dir / LAST_OWNER
        owner = read_owner(self._folder)
        was_here = owner is not None and last.exists() and owner["id"] == read_file(last).decode()
        if owner is not None and not owner["free"] and not was_here:
            self._wait_for_silence(owner)
        self._write()
        write_atomically(last, self._id)
        if not was_here:
            for name in (METRICS, METRICS_SUMS, GOODPUT, TRACKER):
                if (self._folder / name).exists():
                    replace_by(self._job_log_dir / name, read_chunks(self._folder / name))

    def _wait_for_silence(self, owner: dict[str, Any]) -> None:
        print_error(
            f"--training.checkpoint_dir={self._folder} was used last by {owner['holder']}, and not "
            f"released. Waiting {SECONDS_OF_SILENCE:g} s to see whether it still trains."
        )
        deadline = time.monotonic() + SECONDS_OF_SILENCE
        while time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            now = read_owner(self._folder)
            if now is None or now["free"]:
                return
            if now != owner:
                raise ConfigurationError(
                    f"--training.checkpoint_dir={self._folder} is in use by another run "
                    f"({now['holder']}), expected a folder that no run trains in. Wait until it "
                    "ends, stop it, or set another --training.checkpoint_dir."
                )

    def _write(self, *, free: bool = False) -> None:
        self._beats += 1
        record = {
            "id": self._id,
            "holder": f"process {os.getpid()} on {socket.gethostname()} in {self._job_log_dir}",
            "free": free,
            "beats": self._beats,
            "time": time.time(),
        }
        write_atomically(self._folder / OWNER, json.dumps(record) + "\n")

    def check(self) -> None:
        """Check that this run is still the owner."""
        owner = read_owner(self._folder)
        if owner is None or owner["id"] != self._id:
            holder = "no run" if owner is None else owner["holder"]
            raise LostCheckpointDirError(
                f"{self._folder} belongs to {holder} now, expected this run: its machine was "
                f"silent for more than {SECONDS_OF_SILENCE:g} s, or the file {OWNER} was changed."
            )

    def before_complete(self) -> None:
        """Check that this run is the owner, and copy its files: a checkpoint follows."""
        self.check()
        self._metrics.update()
        self._copy(CONFIGURATION, METRICS_SUMS, GOODPUT, TRACKER)

    def _copy(self, *names: str) -> None:
        for name in names:
            if (self._job_log_dir / name).exists():
                text = read_file(self._job_log_dir / name).decode()
                write_atomically(self._folder / name, text)

    def _beat(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN_BEATS):
            with contextlib.suppress(Exception):  # the next save raises if this is not passing
                self.check()
                self._write()
                self._copy(GOODPUT)

    def __exit__(self, *error: object) -> None:
        """Copy the files a last time, and release the folder."""
        if jax.process_index() != 0:
            return
        self._done.set()
        self._thread.join()
        with contextlib.suppress(Exception):  # it is complete as of the last checkpoint
            self.before_complete()
            self._write(free=True)


def read_owner(folder: Path) -> dict[str, Any] | None:
    """Read who may write checkpoints to a folder; None without a whole record."""
    try:
        record: dict[str, Any] = read_json(folder / OWNER)
        types = {"id": str, "holder": str, "free": bool, "time": int | float}
        is_whole = all(isinstance(record[name], type_) for name, type_ in types.items())
        return record if is_whole else None
    except (FileNotFoundError, NotADirectoryError, UnusableFileError):
        return None
    except (ValueError, TypeError, KeyError):
        return None


def is_owned(folder: Path) -> bool:
    """Return whether the owner of a folder of checkpoints has been heard of lately."""
    owner = read_owner(folder)
    return (
        owner is not None and not owner["free"] and time.time() - owner["time"] < SECONDS_OF_SILENCE
    )


def is_in_use(folder: Path) -> bool:
    """Return whether a process trains in a folder."""
    if is_owned(folder):
        return True
    if is_remote(folder):
        return False  # no locks of this kind
    try:
        file = open_unlinked(folder / LOCK, os.O_RDONLY, other_names=True)
    except OSError:  # no file
        return False
    try:
        return lock_file(file, shared=True) is False
    finally:
        os.close(file)
