"""Experiments whose process sends itself a signal at a given point of a round over sites.

The variable `KILL_POINT` has `POINT:COUNT`: at the COUNTth passage of the point the process kills
itself. With `KILL_SIGNAL=SIGSTOP` it stops, and with `KILL_SIGNAL=FULL` it can write small files
alone from then on. `COUNTED` names a file that gets a line with the
sites of each round that the coordinator has saved; its first round waits for `FIRST_SITES`, 4.
"""

import dataclasses
import functools
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.experiments.fedavg_table import FedAvgTable
from fedpax.sites import (
    agreement,
    coordinator_rounds,
    site_evaluation,
    site_files,
    site_worker,
    stage_calls,
    take_part,
)
from fedpax.sites.task_exchange import TaskExchange
from fedpax.transport import calls
from fedpax.transport.message import Message
from sites.small_experiment import SmallExperiment, small
from sites.test_equals_training import experiment as table_experiment

ROUNDS = 16
FEATURES = 300_000  # a reply is of several chunks, and waits on the coordinator's disk

# Of each point: the owner, the function, and whether it is passed before or after it.
SITE: dict[str, tuple[Any, str, str]] = {
    "join": (take_part.Site, "_join", "after"),
    "ready": (site_worker.SiteWorker, "set_inputs", "after"),
    "keep": (site_files.KeptValues, "propose", "before"),
    "kept": (site_files.KeptValues, "propose", "after"),
    "train": (site_worker.SiteWorker, "_run_clients", "before"),
    "trained": (site_worker.SiteWorker, "_run_stage", "after"),
    "take over": (site_files.KeptValues, "settle", "before"),
    "taking over": (site_files.KeptValues, "_load", "after"),
    "taken over": (site_files.KeptValues, "settle", "after"),
    "evaluate": (site_worker.SiteWorker, "_evaluate", "before"),
    "save": (take_part.Site, "_save", "before"),
    "checkpoint at the end": (Checkpoints, "save", "after"),
}
COORDINATOR: dict[str, tuple[Any, str, str]] = {
    "agree": (TaskExchange, "begin_agreement", "after"),
    "question": (agreement.Agreement, "_ask", "after"),
    "agreed": (coordinator_rounds, "write_federation", "before"),
    "reply": (TaskExchange, "_keep", "after"),
    "merge": (stage_calls.StageCalls, "merge", "before"),
    "merged": (coordinator_rounds.Coordinator, "_save", "before"),
    "federation": (coordinator_rounds, "write_federation", "after"),
    "checkpoint": (Checkpoints, "save", "after"),
    "saved": (coordinator_rounds.Coordinator, "_save", "after"),
    "evaluate": (site_evaluation.SiteEvaluation, "evaluate", "before"),
    "evaluated": (site_evaluation.SiteEvaluation, "evaluate", "after"),
    "end": (coordinator_rounds.Coordinator, "say_goodbye", "before"),
}
SENDING = ("send", "sent")  # of a site: in the middle of a reply, and before its answer is read

_passages = itertools.count(1)


def die() -> None:
    """Send the signal to this process, or fill its disk."""
    name = os.environ.get("KILL_SIGNAL", "SIGKILL")
    if name == "FULL":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    else:
        os.kill(os.getpid(), getattr(signal, name))


def wrap(owner: Any, name: str, when: str, count: int) -> None:
    """Let a function pass a point."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def passing(*args: Any, **kwargs: Any) -> Any:
        if when == "before" and next(_passages) == count:
            die()
        result = function(*args, **kwargs)
        if when == "after" and next(_passages) == count:
            die()
        return result

    setattr(owner, name, passing)


def wrap_sending(point: str, count: int) -> None:
    """Let replies pass a point: after the first chunk, or when the answer has arrived."""
    encode, call = calls.encode, calls.Connection.call

    def chunks(message: Message, limit: int) -> Iterator[bytes]:
        is_reply = message.header.get("kind") == "reply" and len(message.arrays) > 0
        dies = is_reply and next(_passages) == count
        for number, chunk in enumerate(encode(message, limit)):
            yield chunk
            if dies and number == 1:
                time.sleep(0.1)
                die()

    def answered(self: calls.Connection, message: Message, timeout: float) -> Message:
        answer = call(self, message, timeout)
        if message.header["kind"] == "reply" and next(_passages) == count:
            die()
        return answer

    if point == "send":
        calls.encode = chunks
    else:
        calls.Connection.call = answered


def record_counted(path: Path) -> None:
    """Write the sites of each round that is saved."""
    ask, save = stage_calls.StageCalls.ask, coordinator_rounds.Coordinator._save
    tokens: list[str] = []

    def asked(self: Any, divided: Any, request: Any, token: str, *more: Any) -> Any:
        tokens.append(token)
        return ask(self, divided, request, token, *more)

    def saved(self: Any, number: int) -> None:
        save(self, number)
        names = [site.name for site in self.exchange.sites if site.counted == tokens[-1]]
        with path.open("a") as file:
            file.write(json.dumps([number, names]) + "\n")

    run = coordinator_rounds.Coordinator.run

    def run_with_all(self: Any) -> None:
        self.first_round_needs = int(
            os.environ.get("FIRST_SITES", "4")
        )  # later rounds need --min_sites
        run(self)

    stage_calls.StageCalls.ask, coordinator_rounds.Coordinator._save = asked, saved
    coordinator_rounds.Coordinator.run = run_with_all


def install() -> None:
    """Install the point that the variables name."""
    if counted := os.environ.get("COUNTED"):
        record_counted(Path(counted))
    if not (chosen := os.environ.get("KILL_POINT")):
        return
    point, _, count = chosen.partition(":")
    if point in SENDING:
        wrap_sending(point, int(count))
    else:
        points = COORDINATOR if "syncer" in sys.argv else SITE
        wrap(*points[point], int(count))


install()


def scaffold() -> SmallExperiment:
    """Make a regression of a model of more than one chunk, with states that clients keep."""
    return small("scaffold", rounds=ROUNDS, features=FEATURES)


def private() -> SmallExperiment:
    """Make a regression whose coordinator adds noise."""
    return small("private", rounds=ROUNDS, features=FEATURES)


def table() -> FedAvgTable:
    """Make a regression on tables."""
    whole = table_experiment(rounds=ROUNDS)
    training = dataclasses.replace(whole.training, evaluate_every=2)
    return dataclasses.replace(whole, training=training)
