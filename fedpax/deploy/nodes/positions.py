"""The position of a run on nodes as a file, from which another server continues it."""

import json
from pathlib import Path

import numpy as np

from fedpax.deploy.encoded_values import decode_values, encode_values
from fedpax.deploy.nodes.kept_state import STATE_BYTES
from fedpax.deploy.nodes.round_server import ServerPosition
from fedpax.errors import ConfigurationError
from fedpax.files import explain_damage, parse_json, read_file, replace_file

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
