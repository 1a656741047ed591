"""The private sums that a participant has been part of: as many as epsilon is stated for."""

import os
from pathlib import Path

from fedpax.errors import FedpaxError
from fedpax.files import read_file

ROUNDS_FIELD = "private-rounds"
"""The setting of a node that allows another number of rounds."""
_BYTES = 1 << 26


class PrivacySpentError(FedpaxError):
    """A private sum beyond those for which epsilon is stated; the message names the remedy."""


def count_release(path: Path, name: str, *, rounds: int, sums: int) -> None:
    """Count a private sum that a participant helps to open, unless it is counted already."""
    try:
        opened = list(filter(None, read_file(path, _BYTES).decode().splitlines()))
    except FileNotFoundError:
        opened = []
    if name in opened:
        return
    if len(opened) >= rounds * sums:
        raise PrivacySpentError(
            f"This participant has been part of {len(opened)} private sums of the program, "
            f"expected at most {rounds * sums}, those of {rounds} rounds: its epsilon is stated "
            "for them, and further ones add to it. To allow more, its owner sets --node-config "
            f"'{ROUNDS_FIELD}=...' to a larger number of rounds, over all runs."
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        # A kill can leave half of a line: the next one starts with a line of its own.
        file.write(f"\n{name}\n".encode())
        file.flush()
        os.fsync(file.fileno())
