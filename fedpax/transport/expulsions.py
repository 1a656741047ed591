"""The sites that are expelled from a run, in `expelled.json` of its folder."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fedpax.errors import ArgumentError, ConfigurationError
from fedpax.files import open_unlinked, read_json, replace_file

if sys.platform != "win32":
    import fcntl

FILE = "expelled.json"
_LOCK = ".expelled.lock"
MAX_TEXT = 200


class Expulsion(NamedTuple):
    """Why and when a site was expelled."""

    reason: str
    by: str  # "command", or "rule" after messages that no site should send
    time: float  # seconds since 1970


def read_expulsions(folder: Path) -> dict[str, Expulsion]:
    """Return the expelled sites of a run by name; empty without the file."""
    path = folder / FILE
    try:
        sites = {name: Expulsion(**fields) for name, fields in read_json(path).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        # Not a reason to let expelled sites return.
        raise ConfigurationError(
            f"{path} is damaged, expected reason, by and time for each expelled site. Restore the "
            "file, or remove it and expel the sites again by `fedpax sites expel`."
        ) from None
    return sites


def expel(folder: Path, site: str, reason: str, by: str = "command") -> None:
    """Expel a site from a run; a running coordinator notices it within a second."""
    check_site(site)
    check_site(reason, "reason")
    with _locked(folder):
        sites = read_expulsions(folder)
        if site not in sites:
            _write(folder, sites | {site: Expulsion(reason, by, time.time())})


def admit(folder: Path, site: str) -> bool:
    """Let an expelled site return; return False if it is not expelled."""
    with _locked(folder):
        sites = read_expulsions(folder)
        if known := sites.pop(site, None):
            _write(folder, sites)
    return known is not None


def check_site(name: str, argument: str = "site") -> None:
    """Check a name or a reason, which reach the user's terminal."""
    if not 0 < len(name) <= MAX_TEXT or not name.isprintable():
        raise ArgumentError(
            f"{argument}={name[:MAX_TEXT]!r} is not a text of 1 to {MAX_TEXT} printable characters."
            " Use the name that `fedpax sites list` shows."
        )


def _write(folder: Path, sites: Mapping[str, Expulsion]) -> None:
    content = {name: expulsion._asdict() for name, expulsion in sites.items()}
    replace_file(folder / FILE, (json.dumps(content, indent=2) + "\n").encode())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change the file: a command, or the coordinator by its rule."""
    file = open_unlinked(folder / _LOCK, os.O_WRONLY | os.O_CREAT)
    try:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
