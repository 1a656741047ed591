"""What a site's clients keep between rounds, on the site's disk."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpax.errors import ArgumentError, DamagedStateError
from fedpax.sites.framed_messages import read_message, write_message
from fedpax.transport.message import Message, MessageError

FOLDER = "kept"

Values = Mapping[str, np.ndarray]


class KeptValues:
    """The states of a site's clients, such as SCAFFOLD's controls, by the client's name.

    A name is a hash of it on the disk. The states of clients that are absent stay there: a client
    whose file returns has its state.

    New states count once the coordinator says that it has counted the round in which they were
    made. Until then the former states are beside them: a site that missed a deadline, or that was
    killed, takes these.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._known: dict[str, Values] = {}

    def read(self, client: str) -> Values:
        """Return the states of a client; empty before its first round that counts."""
        if client not in self._known:
            path = self._path(client)
            self._known[client] = self._load(path).arrays if path.exists() else {}
        return self._known[client]

    def propose(self, token: str, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Write new states of clients, made in the round of a token; they replace older proposals.

        They are on the disk when this returns, so that a reply is never ahead of them.
        """
        self._folder.mkdir(exist_ok=True)
        for path in self._folder.glob("*.new"):
            path.unlink()
        for client, values in states.items():
            arrays = {name: np.asarray(x) for name, x in values.items()}
            new = self._path(client).with_suffix(".new")
            write_message(new, Message({"token": token}, arrays))

    def settle(self, counted: str | None, current: str) -> None:
        """Take over the proposals of the counted round.

        Other proposals are removed, except the proposals of the current round.
        """
        for path in sorted(self._folder.glob("*.new")):
            token = self._load(path).header["token"]
            if token == current:
                continue
            if token == counted:
                path.replace(path.with_suffix(".state"))
                self._known.clear()
            else:
                path.unlink()

    def _path(self, client: str) -> Path:
        return self._folder / f"{hash_name(client)}.state"

    def _load(self, path: Path) -> Message:
        try:
            return read_message(path)
        except MessageError as error:
            raise DamagedStateError(
                f"{path} is damaged: {error} Or delete it: the client then begins from its initial "
                "state."
            ) from error


def hash_name(client: str) -> str:
    """Return the name of a client's file: client names can be paths, or hold any character."""
    return hashlib.sha256(client.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def check_names(names: Sequence[str], count: int) -> None:
    """Raise unless each client of a site has a name of its own."""
    repeated = sorted(name for name, times in Counter(names).items() if times > 1)
    if repeated or len(names) != count:
        what = f"{repeated[0]!r} names several clients" if repeated else f"{len(names)} names"
        raise ArgumentError(
            f"{what} of this site, expected a name for each of its {count} clients: states are "
            "kept by name. Give files, or the values of --data.client, different names."
        )
