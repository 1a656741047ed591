"""What a site's clients keep between rounds, on the site's disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpax.sites.rounds.framed_messages import read_message, write_message
from fedpax.sites.syncer.syncer_store import DamagedStateError
from fedpax.sites.transport.message import Message, MessageError

FOLDER = "kept"

Values = Mapping[str, np.ndarray]


class KeptValues:
    """The states of a site's clients, such as SCAFFOLD's controls, by the client's number.

    New states count once the coordinator says that it has counted the round in which they were
    made. Until then the former states are beside them: a site that missed a deadline, or that was
    killed, takes these.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._known: dict[int, Values] = {}

    def read(self, client: int) -> Values:
        """Return the states of a client; empty before its first round that counts."""
        if client not in self._known:
            path = self._path(client)
            self._known[client] = self._load(path).arrays if path.exists() else {}
        return self._known[client]

    def propose(self, token: str, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Write new states of clients, made in the round of a token; they replace older proposals.

        They are on the disk when this returns, so that a reply is never ahead of them.
        """
        self._folder.mkdir(exist_ok=True)
        for path in self._folder.glob("*.new"):
            path.unlink()
        for client, values in states.items():
            arrays = {name: np.asarray(x) for name, x in values.items()}
            write_message(self._new(client), Message({"token": token}, arrays))

    def settle(self, counted: str | None, current: str) -> Sequence[int]:
        """Take over the proposals of the counted round, and return their clients.

        Other proposals are removed, except those of the current round.
        """
        taken = []
        for path in sorted(self._folder.glob("*.new")):
            client, token = int(path.stem), self._load(path).header["token"]
            if token == current:
                continue
            if token == counted:
                path.replace(self._path(client))
                self._known.pop(client, None)
                taken.append(client)
            else:
                path.unlink()
        return taken

    def _path(self, client: int) -> Path:
        return self._folder / f"{client}.state"

    def _new(self, client: int) -> Path:
        return self._folder / f"{client}.new"

    def _load(self, path: Path) -> Message:
        try:
            return read_message(path)
        except MessageError as error:
            raise DamagedStateError(
                f"{path} is damaged: {error} Or delete it: the client then begins from its initial "
                "state."
            ) from error
