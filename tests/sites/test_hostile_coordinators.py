"""Tasks with fields of other types and ranges than a coordinator sends, over loopback."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.errors import ArgumentError, FedpaxError
from fedpax.sites.site_experiment import ClientRange
from fedpax.sites.take_part import Site, take_part
from fedpax.training.progress import Progress
from fedpax.transport.calls import RefusedError, connect, serve
from fedpax.transport.message import Message
from sites.federation import write_hospitals
from sites.small_experiment import small
from sites.test_equals_training import experiment

ROUNDS = 3
COMMON = {"status": "task", "token": "t", "round": 1, "rounds": ROUNDS, "first_client": 0}
COMMON |= {"stage": 0, "last_stage": 0, "counted": None}
PART = {"num_clients": 2, "clients": [0, 1], "slots": [0, 1]}
TASKS: dict[str, dict[str, Any]] = {
    "evaluate": {**COMMON, "save": True, "secure_sums": False},
    "round": {**COMMON, **PART, "weights": "examples"},
    "secure_sum": {**COMMON, "session": "r t 0", "request": None},
}
COLUMN = {"name": "age", "kind": "number", "missing": "mean", "values": None, "bounds": None}
SCALING = {"center": [50.0], "half": [1.0], "low": None, "high": None, "factor": 1.0}
QUESTION = {**COMMON, **PART, "task": "question", "round": 0}
ASKED_VALUES = {**COMMON, "task": "values", "round": 0, "columns": ["sex"]}
QUESTION["settings"] = {"columns": [{**COLUMN, "reason": "number"}], "scaling": SCALING}

OPTIONAL = {  # fields of each task
    "evaluate": {"secure_sums"},
    "round": set(),
    "question": {"counted"},
    "values": {"counted"},
    "secure_sum": {"counted", "request"},
}
VALUES = ["../../evil", "", "a\x1b[2J", "x" * 500, -3, 1e15, 10**15, 2**70, 0.5, True, None]
VALUES += [[], ["a"], [2**70], {}, {"a": 1}]
FREE = {"status", "rounds", "first_client"}  # a site reads none of them, but as its clients' place
FITTING: dict[str, list[Any]] = {  # values of these that a coordinator can send
    "token": ["../../evil"],
    "counted": ["../../evil", None],
    "columns": [[], ["a"]],
    "session": ["../../evil"],
    "save": [True],
    "secure_sums": [True],
    "request": [None, {}, {"a": 1}],  # wrong ones are faults in the reply
}


class Liar:
    """A coordinator that sends the tasks that a test sets."""

    def __init__(self, params: Any) -> None:
        self.task: dict[str, Any] = {}
        self.inputs: Any = {}
        self.arrays = {f"shared {i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(params))}
        self.replies: list[Any] = []

    def __call__(self, peer: str, message: Message) -> Message:
        """Answer a call of a site."""
        joined = {"status": "ok", "run": "r", "down": "float32", "rounds": ROUNDS}
        joined["heartbeat_seconds"] = 60.0
        if message.header["kind"] == "reply":
            self.replies.append(message.header["fields"])
        if message.header["kind"] != "work":
            return Message(joined)
        if self.inputs is not None and not message.header["inputs"]:
            return Message({"status": "inputs", "inputs": self.inputs})
        has_model = self.task.get("task") in ("evaluate", "round")
        return Message(self.task, self.arrays if has_model else {})


@contextlib.contextmanager
def joined(liar: Liar, config: Any, folder: Path) -> Iterator[Site]:
    """Join a liar over loopback."""
    folder.mkdir()
    with (
        serve(liar, "127.0.0.1:0") as server,
        connect(f"127.0.0.1:{server.port}") as connection,
        Progress("site", rounds_done=0, rounds=1, enabled=False) as progress,
    ):
        site = Site(
            config,
            folder,
            connection,
            progress,
            name="site",
            exp="",
            stop=lambda: False,
            give_up_after=5.0,
        )
        with contextlib.closing(site):
            assert site._join()
            if liar.inputs is not None:
                site._step()
            yield site


def try_all(site: Site, liar: Liar, task: dict[str, Any]) -> None:
    """Send a task with each value in place of each field, and without the field."""
    liar.task = task
    site._step()
    assert len(liar.replies) == 1 and "fault" not in liar.replies[0]
    for name in task.keys() - FREE:
        for value in [*VALUES, "left out"]:
            liar.task = {**task, name: value}
            if value == "left out":
                del liar.task[name]
            fits = any(type(x) is type(value) and x == value for x in FITTING.get(name, []))
            fits |= value == "left out" and name in OPTIONAL[task["task"]]
            site._worker._asked = set()
            try:
                site._step()
            except RefusedError:
                assert not fits, (name, value)
            except FedpaxError as error:
                assert name == "settings", (name, value, error)
            else:
                assert fits, (name, value)
    # A site begins no secure sum of one session twice.
    liar.task = task | ({"session": "r t 1"} if "session" in task else {})
    site._step()
    assert "fault" not in liar.replies[-1]


@pytest.mark.parametrize("kind", TASKS)
def test_each_field_of_a_task_is_checked(tmp_path: Path, kind: str) -> None:
    config = small(rounds=ROUNDS, clients=2)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("a file of the user")
    liar = Liar(config.at_site(ClientRange(0, 2, 2)).init(jax.random.key(0)))
    folder = tmp_path / "site"
    with joined(liar, config, folder) as site:
        try_all(site, liar, {**TASKS[kind], "task": kind})
        if kind == "evaluate":
            for number in (4, str(tmp_path / "theirs"), "../../theirs"):
                liar.task = {**TASKS[kind], "task": kind, "round": number}
                with pytest.raises(
                    RefusedError, match=r"'round' is .*, expected an integer from 0"
                ):
                    site._step()
        liar.arrays = {f"shared {7 * i}": x for i, x in enumerate(liar.arrays.values())}
        liar.task = {**TASKS[kind], "task": kind}
        if kind != "secure_sum":
            with pytest.raises(RefusedError, match="not numbered from 0"):
                site._step()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site", "theirs"]
    assert (tmp_path / "theirs" / "thesis.txt").read_text() == "a file of the user"
    saved = [path.name for path in folder.glob("checkpoints/*")]
    assert saved == (["1"] if kind == "evaluate" else [])


@pytest.mark.parametrize("asked", [QUESTION, ASKED_VALUES], ids=lambda task: task["task"])
def test_each_field_of_a_question_is_checked(tmp_path: Path, asked: dict[str, Any]) -> None:
    write_hospitals(tmp_path / "data", {"a": (40, 25)})
    liar = Liar(())
    liar.inputs = None
    with joined(liar, experiment(f"{tmp_path}/data/a/*.csv"), tmp_path / "site") as site:
        try_all(site, liar, asked)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "site"]


def test_a_coordinator_names_a_folder_of_the_user(tmp_path: Path) -> None:
    config = small(rounds=ROUNDS, clients=2)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("a file of the user")
    liar = Liar(config.at_site(ClientRange(0, 2, 2)).init(jax.random.key(0)))
    liar.task = {**TASKS["evaluate"], "task": "evaluate", "round": str(theirs)}
    with (
        serve(liar, "127.0.0.1:0") as server,
        pytest.raises(RefusedError, match="expected an integer from 0 to 3"),
    ):
        take_part(config, tmp_path / "site", f"127.0.0.1:{server.port}")
    assert (theirs / "thesis.txt").read_text() == "a file of the user"
    assert not list(tmp_path.glob("*.orbax*")) and not (tmp_path / "site" / "checkpoints").exists()


@pytest.mark.parametrize("number", ["/tmp", "../1", -1, 1.0, True, None])
def test_the_round_of_a_checkpoint_is_a_number(tmp_path: Path, number: Any) -> None:
    with (
        Checkpoints(tmp_path, keep=1) as checkpoints,
        pytest.raises(ArgumentError, match="round_number="),
    ):
        checkpoints.save(number, {"w": np.zeros(2)}, {}, {})
