"""The folder of a run's checkpoints, where it is not the run's folder itself: in a bucket."""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from fedpax.console import print_error
from fedpax.errors import ConfigurationError, FedpaxError
from fedpax.files import UnusableFileError, read_file, read_json
from fedpax.processes.communication import raise_everywhere
from fedpax.run_files.long_line_files import LineCopy, read_chunks, replace_by
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

OWNER = "owner.json"


LAST_OWNER = ".owner"
COPIED = ".metrics_copied.json"


SECONDS_BETWEEN_BEATS = 10.0


SECONDS_OF_SILENCE = 45.0


SECONDS_BETWEEN_LOOKS = 2.0


class LostCheckpointDirError(FedpaxError, OSError):
    """Another run has taken the folder of this run's checkpoints."""


class CheckpointDir(AbstractContextManager["CheckpointDir"]):
    """The folder of the checkpoints of a run that trains in another folder; a context manager.

    It has the form of a run's folder: each checkpoint is preceded by copies of the run's files, so
    that a process with an empty folder, on another machine, resumes from them.

    A bucket has no locks. `owner.json` names the run that may write. Its owner rewrites it every
    `SECONDS_BETWEEN_BEATS`. Another run waits for `SECONDS_OF_SILENCE`, and takes the folder if the
    file stays as it is. A run completes a checkpoint only if it is still the owner; the time of one
    request between is not guarded. A former owner in the same run's folder is dead, as that has a
    lock.
    """

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
    """Read who may write checkpoints to a folder; None if no record is there, or a damaged one."""
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
