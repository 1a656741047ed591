"""Where the files of a run are: its folder, its bucket, and its complete checkpoints."""

import errno
import functools
import importlib.util
import logging
import os
import re
import stat
import sys
from pathlib import Path, PurePath
from typing import Any, cast

from etils import epath

from fedpax.errors import ConfigurationError
from fedpax.files import find_links, replace_file

CONFIGURATION, METRICS, GOODPUT = "config.json", "metrics.jsonl", "goodput.json"
METRICS_SUMS = ".metrics_sums.json"
TRACKER = "tracker.json"
CHECKPOINTS, SCALARS = "checkpoints", "tensorboard"
CHECKSUMS = "checksums.json"
"""The file of a checkpoint that is written last."""

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")  # one slash: Path("gs://bucket") is gs:/bucket
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors of a path that leads to no file; the last one is a link to itself."""
FOLDERS = (CHECKPOINTS, SCALARS, "exports", "kept", "profile", "replies", "syncer", "wandb")
"""The folders of a run, into which it writes."""


def is_remote(folder: str | PurePath) -> bool:
    """Return whether a folder is named by a URL."""
    return URL.match(str(folder)) is not None


def resolve_job_log_dir(job_log_dir: str | Path) -> Path:
    """Return a run's folder as an absolute path, with `~` expanded."""
    if scheme := URL.match(str(job_log_dir)):
        remedy = (
            "Give a local folder, and the bucket for what must outlive this machine: "
            f"--job_log_dir=runs/NAME --training.checkpoint_dir={job_log_dir}"
            if scheme[1] == "gs"
            else "Mount the bucket (for example with s3fs) and give the mounted folder."
        )
        raise ConfigurationError(
            f"--job_log_dir={job_log_dir} is a URL, expected a folder of a file system. {remedy}"
        )
    try:
        folder = Path(job_log_dir).expanduser().absolute()
        str(folder).encode("utf-8")  # Orbax opens only such paths
        return folder
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"--job_log_dir={job_log_dir} has characters that are unknown in this environment, "
            f"whose encoding is {sys.getfilesystemencoding()}. Set the environment variable "
            "PYTHONUTF8=1 or LC_ALL=C.UTF-8, or give a folder in ASCII."
        ) from error
    except RuntimeError as error:
        raise ConfigurationError(
            f"--job_log_dir={job_log_dir} names a home folder that is unknown ({error}), expected "
            "an existing user. Set the folder's full path."
        ) from error


def resolve_folder(folder: str | Path) -> Path:
    """Return a folder as an absolute path, or in a bucket; Orbax writes to `gs://` alone."""
    if not is_remote(folder):
        return resolve_job_log_dir(folder)
    url = str(folder).rstrip("/")
    if url.startswith("gs://") and not _BUCKET.fullmatch(bucket := url.split("/")[2]):
        raise ConfigurationError(
            f"{url} names the bucket {bucket!r}, expected a name of 3 to 63 characters, which are "
            "lower-case letters, digits, '-', '_' and '.'. Correct the name: gs://BUCKET/FOLDER."
        )
    if not re.fullmatch(rf"gs://{_BUCKET.pattern}/[^/].*", url):
        raise ConfigurationError(
            f"{url} is not a folder of a bucket that a run can use, expected gs://BUCKET/FOLDER "
            "(Google Cloud Storage). Mount a bucket of another store, such as s3://, and give the "
            "mounted folder."
        )
    if importlib.util.find_spec("gcsfs") is None:
        raise ConfigurationError(
            f"{url} needs the package gcsfs, which is not installed. Run `pip install "
            "'fedpax[gcs]'`."
        )
    _check_access(url.split("/")[2])
    return cast(Path, epath.Path(url))


def list_files(folder: Path) -> dict[str, tuple[int, str]]:
    """List the files of a folder in a bucket, and those below it, with one request."""
    prefix = str(folder).partition("://")[2].rstrip("/") + "/"
    entries = _file_system().find(str(folder), detail=True)
    return {
        name.removeprefix(prefix): (int(entry["size"]), str(entry["crc32c"]))
        for name, entry in entries.items()
        if not name.endswith("/")  # marks a folder
    }


@functools.cache
def _check_access(bucket: str) -> None:
    """Raise if the files of a bucket cannot be listed."""
    try:
        _file_system().call("GET", "b/{}/o", bucket, maxResults=1, json_out=True)
    except Exception as error:
        trouble = "missing" if isinstance(error, FileNotFoundError) else "not accessible"
        raise ConfigurationError(
            f"The bucket gs://{bucket} is {trouble} ({type(error).__name__}: {error}), expected "
            "one whose files this machine can list, read and write. Check the bucket's name, the "
            "network and the credentials (`gcloud auth application-default login`, or the service "
            "account of the machine)."
        ) from error


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return record.exc_info is None


def _file_system() -> Any:
    """Return the file system that `etils.epath` uses, without a cache of listings."""
    # TensorStore and other processes write to the bucket too.
    import fsspec

    # It logs the traceback of what it raises. A filter is added once.
    logging.getLogger("gcsfs").addFilter(_has_no_traceback)
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return fsspec.filesystem("gcs", finalize_on_close=True)


def check_links(folder: Path, flag: str = "--job_log_dir") -> None:
    """Check that no folder of a run is a link, or has one directly in it."""
    for path in find_links(folder, FOLDERS):
        raise ConfigurationError(
            f"{path} is a link to {os.readlink(path)}, expected a file or folder of the run "
            "itself: the run would write and delete where the link leads. Remove the link, or set "
            f"another {flag}; --training.checkpoint_dir saves checkpoints elsewhere."
        )


def folder_of_checkpoints(job_log_dir: Path, checkpoint_dir: str | None) -> Path:
    """Return the folder whose `checkpoints/` holds a run's checkpoints, to read them."""
    if (
        checkpoint_dir is None
        or is_remote(job_log_dir)
        or complete_rounds(job_log_dir / CHECKPOINTS)
    ):
        return job_log_dir
    return resolve_folder(checkpoint_dir)


def resolve_checkpoint_dir(job_log_dir: Path, checkpoint_dir: str | None) -> Path:
    """Return the folder in which a run saves `checkpoints/`."""
    if checkpoint_dir is None:
        return job_log_dir
    folder = resolve_folder(checkpoint_dir)
    if folder != job_log_dir and complete_rounds(job_log_dir / CHECKPOINTS):
        raise ConfigurationError(
            f"{job_log_dir / CHECKPOINTS} has checkpoints, expected none: with --training."
            f"checkpoint_dir={folder} they are there. Move {job_log_dir / CHECKPOINTS} to "
            f"{folder / CHECKPOINTS}, or set another --job_log_dir."
        )
    return folder


def refuse_checkpoint_dir(checkpoint_dir: str | None, command: str) -> None:
    """Refuse a folder of checkpoints in a command that has none."""
    if checkpoint_dir is not None:
        raise ConfigurationError(
            f"--training.checkpoint_dir={checkpoint_dir}: `fedpax {command}` keeps checkpoints in "
            "--job_log_dir alone, expected none. Leave it out."
        )


def has_checksums(folder: Path) -> bool:
    """Return whether a folder has its checksums, which are written last."""
    if is_remote(folder):
        return (folder / CHECKSUMS).is_file()
    try:  # Path.is_file returns False without permission in Python 3.14
        return stat.S_ISREG((folder / CHECKSUMS).stat().st_mode)
    except OSError as error:
        if error.errno in NO_FILE:
            return False
        raise


def complete_rounds(folder: Path) -> list[int]:
    """Return the rounds of the complete checkpoints in a folder, in increasing order."""
    if not folder.is_dir():
        return []
    steps = [path for path in folder.iterdir() if path.name.isdecimal()]
    return sorted(int(path.name) for path in steps if has_checksums(path))


def rounds_without_checksums(folder: Path) -> list[int]:
    """Return the rounds of the checkpoints in a folder that are unfinished or incomplete."""
    if not folder.is_dir():
        return []
    steps = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    return sorted(int(path.name) for path in steps if not has_checksums(path))


def latest_round(job_log_dir: str | Path) -> int | None:
    """Return the round of the newest complete checkpoint of a run, or None."""
    rounds = complete_rounds(resolve_folder(job_log_dir) / CHECKPOINTS)
    return rounds[-1] if rounds else None


def write_atomically(path: Path, text: str) -> None:
    """Write a file such that a kill leaves the old or the new content."""
    if is_remote(path):  # a bucket has no part of a file
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())
