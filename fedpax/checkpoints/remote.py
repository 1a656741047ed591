"""Folders in a bucket, named by a URL such as `gs://my-bucket/runs/c4`."""

import functools
import importlib.util
import logging
import re
from pathlib import Path
from typing import Any, cast

from etils import epath

from fedpax.run_files.configuration import ConfigurationError, is_remote, resolve_job_log_dir


def resolve_folder(folder: str | Path) -> Path:
    """Return a folder of a file system as an absolute path, or a folder in a bucket.

    Orbax writes to `gs://` by TensorStore's driver for Google Cloud Storage. It has none for other
    stores: `build_kvstore_tspec` in its `serialization/tensorstore_utils.py`, version 0.12.8,
    takes any other URL for a path.

    Args:
        folder: the folder, which may be missing.

    Returns:
        The path; for a URL `etils.epath.Path`, which has the methods of `pathlib.Path`.

    Raises:
        ConfigurationError: the URL is not `gs://BUCKET/FOLDER`, the extra `gcs` is missing, or the
            bucket cannot be reached.

    Example:
        >>> resolve_folder("/tmp/runs") == Path("/tmp/runs")
        True
    """
    if not is_remote(folder):
        return resolve_job_log_dir(folder)
    url = str(folder).rstrip("/")
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9]/[^/].*", url):
        raise ConfigurationError(
            f"{url} is no folder of a bucket that a run can use, expected gs://BUCKET/FOLDER "
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
    """List the files of a folder in a bucket, and those below it, with one request.

    Args:
        folder: a folder in a bucket.

    Returns:
        By path in the folder, the size in bytes and the CRC-32C that the store has computed, in
        base64.
    """
    prefix = str(folder).partition("://")[2].rstrip("/") + "/"
    found = _file_system().find(str(folder), detail=True)
    return {
        name.removeprefix(prefix): (int(entry["size"]), str(entry["crc32c"]))
        for name, entry in found.items()
        if not name.endswith("/")  # marks a folder
    }


@functools.cache
def _check_access(bucket: str) -> None:
    """Raise if the files of a bucket cannot be listed."""
    try:
        _file_system().call("GET", "b/{}/o", bucket, maxResults=1, json_out=True)
    except Exception as error:
        kind = "missing" if isinstance(error, FileNotFoundError) else "not accessible"
        raise ConfigurationError(
            f"The bucket gs://{bucket} is {kind} ({type(error).__name__}: {error}), expected one "
            "whose files this machine can list, read and write. Check the bucket's name, the "
            "network and the credentials (`gcloud auth application-default login`, or the service "
            "account of the machine)."
        ) from error


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return record.exc_info is None


def _file_system() -> Any:
    """Return the file system that `etils.epath` uses, without a cache of listings.

    TensorStore and other processes write to the bucket too.
    """
    import fsspec

    # It logs the traceback of what it raises. A filter is added once.
    logging.getLogger("gcsfs").addFilter(_has_no_traceback)
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return fsspec.filesystem("gcs", finalize_on_close=True)
