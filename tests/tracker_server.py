"""An experiment tracker in memory, which can fail."""

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedpax.checkpoints import load_params
from fedpax.training import tracked_runs, tracker
from fedpax.training.tracked_runs import Description, RunOutcome, TrackedLine


class Server:
    """A tracker in memory: it fails at the calls with these numbers.

    While `answers` is cleared, it does not answer.
    """

    def __init__(self, failures: Sequence[int] = ()) -> None:
        self.entries: list[TrackedLine] = []
        self.runs: list[str] = []
        self.outcomes: list[RunOutcome] = []
        self.checkpoints: list[int] = []
        self.configuration: Any = None
        self._failures, self._calls = set(failures), itertools.count()
        self.answers = threading.Event()
        self.answers.set()

    def open(self, id: str, description: Description) -> "Server":
        self._answer()
        self.id, self.place, self.configuration = id, "memory", description.configuration
        self.runs.append(id)
        return self

    def _answer(self) -> None:
        self.answers.wait(60)
        if next(self._calls) in self._failures:
            raise ConnectionError("no route to host")

    def log(self, entries: Sequence[TrackedLine]) -> None:
        self._answer()
        self.entries += entries

    def log_checkpoint(self, folder: Path, round_number: int) -> None:
        self._answer()
        assert (folder / "config.json").is_file() and load_params(folder)
        self.checkpoints.append(round_number)

    def close(self, outcome: RunOutcome) -> None:
        self.outcomes.append(outcome)

    @property
    def lines(self) -> list[Any]:
        return [entry.line for entry in self.entries if entry.line["kind"] != "system"]


def use(monkeypatch: pytest.MonkeyPatch, server: Server) -> Server:
    monkeypatch.setitem(tracked_runs.SERVICES, "wandb", server.open)
    monkeypatch.setattr(tracker, "check_installed", lambda module, use: None)
    return server
