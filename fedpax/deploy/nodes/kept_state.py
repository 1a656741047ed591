"""The state that a participant keeps on the disk of its node between rounds."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedpax.deploy.encoded_values import decode_values, encode_values
from fedpax.deploy.nodes.round_server import ServerPosition
from fedpax.errors import ArgumentError, ConfigurationError, FedpaxError
from fedpax.files import explain_damage, parse_json, read_file, replace_file

STATE_BYTES = 1 << 36
"""The largest state that is read."""

_DIGEST = 32


class KeptStateError(FedpaxError):
    """Kept state that a node cannot read; the message names the remedy."""


class KeptState:
    """States of one participant in one run of one program, by the round that made them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> dict[str, Any] | None:
        """Return the values of a round, or None if there are none."""
        path = self._path(key)
        if not path.exists():
            return None
        expectation = (
            "expected the state that this participant kept. Restore the file from a copy, or start "
            "a new run."
        )
        with explain_damage(path, expectation, KeptStateError):
            content = read_file(path, STATE_BYTES)
            digest, encoded = content[:_DIGEST], content[_DIGEST:]
            if hashlib.sha256(encoded).digest() != digest:
                raise ArgumentError("it does not match its sha256")
            return decode_values(encoded)

    def write(self, key: str, values: Mapping[str, Any]) -> None:
        """Write the values of a round, completely or not at all."""
        path, encoded = self._path(key), encode_values(values)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, hashlib.sha256(encoded).digest() + encoded)

    def keep_only(self, keys: Iterable[str]) -> None:
        """Remove all states except the states of some rounds."""
        kept = {self._path(key).name for key in keys}
        for path in self.folder.glob("*.state"):
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        if not key or not set(key) <= set("0123456789.-"):
            raise KeptStateError(f"{key!r} names no round, expected digits, such as '3.0'.")
        return self.folder / f"{key}.state"


_HEADER = "position"


def write_position(path: Path, run: str, program: str, position: ServerPosition) -> None:
    """Write a position, completely or not at all."""
    said = {
        "run": run,
        "program": program,
        "round": position.round,
        "counted": {str(k): key for k, key in position.counted.items()},
    }
    header = np.frombuffer(json.dumps(said).encode(), np.uint8)
    replace_file(path, encode_values({_HEADER: header, **position.state}))


def read_position(path: Path, program: str) -> tuple[str, ServerPosition] | None:
    """Return the run and its position, or None if there is no file."""
    if not path.exists():
        return None
    expectation = (
        "expected the position of a run. Restore it from a copy, or start a new run with another "
        "folder: --run-config 'out=\"/new/folder\"'."
    )
    with explain_damage(path, expectation):
        values = decode_values(read_file(path, STATE_BYTES))
        header = parse_json(values.pop(_HEADER).tobytes())
        counted = {int(k): str(key) for k, key in header["counted"].items()}
        run, saved, number = str(header["run"]), str(header["program"]), int(header["round"])
    if saved != program:
        raise ConfigurationError(
            f"{path} is of program {saved[:12]}, and this app has {program[:12]}, expected the "
            "same. Run the app that wrote it, or start a new run with another folder: --run-config "
            "'out=\"/new/folder\"'."
        )
    return run, ServerPosition(number, values, counted)
