"""`island.json`, by which an island's folder keeps its identity and its run."""

import json
import secrets
import threading
from pathlib import Path
from typing import NamedTuple

from fedpax.errors import ConfigurationError
from fedpax.files import describe_no_permission, read_json
from fedpax.run_files.paths import write_atomically

FILE = "island.json"
_writing = threading.Lock()  # two writers of a file would share its draft


class Member(NamedTuple):
    """The content of `island.json`: the folder's identity, its run, and whether it is finished."""

    folder: str
    run: str | None = None
    finished: bool = False


def read_member(folder: Path) -> Member:
    """Read `island.json` of an island's folder; a new identity if there is no file."""
    path = folder / FILE
    if not path.exists():
        return Member(secrets.token_hex(8))
    try:
        return Member(**read_json(path))
    except PermissionError as error:
        raise ConfigurationError(describe_no_permission(path)) from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({type(error).__name__}: {error}), expected the file that "
            "`fedpax join` writes. Restore it from a copy, or delete it and start the same command "
            "again: the syncer then takes the folder for a new one."
        ) from error


def write_member(folder: Path, member: Member) -> None:
    """Write `island.json`. Several threads may do so."""
    with _writing:
        write_atomically(folder / FILE, json.dumps(member._asdict()) + "\n")
