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


class PrivateReleases:
    """The private sums of one program that a participant has helped to open, over all runs.

    Args:
        path: the file that counts them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def spend(self, name: str, rounds: int, most: int) -> None:
        """Count a sum, unless it is counted already.

        Args:
            name: the name of the sum.
            rounds: the number of rounds that are allowed.
            most: the most sums, those of `rounds` rounds.

        Raises:
            PrivacySpentError: there have been `most` sums.
        """
        try:
            opened = list(filter(None, read_file(self.path, _BYTES).decode().splitlines()))
        except FileNotFoundError:
            opened = []
        if name in opened:
            return
        if len(opened) >= most:
            raise PrivacySpentError(
                f"This participant has been part of {len(opened)} private sums of the program, "
                f"expected at most {most}, those of {rounds} rounds: its epsilon is stated for "
                "them, and further ones add to it. To allow more, its owner sets --node-config "
                f"'{ROUNDS_FIELD}=...' to a larger number of rounds, over all runs."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(self.path, flags, 0o600), "wb") as file:
            # A kill can leave half of a line: the next one starts with a line of its own.
            file.write(f"\n{name}\n".encode())
            file.flush()
            os.fsync(file.fileno())
