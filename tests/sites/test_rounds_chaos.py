"""A coordinator and four sites as commands, with kills in every phase of their rounds."""

import contextlib
import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from site_processes import Processes

from fedpax.aggregators import PrivacyAccountant
from fedpax.checkpoints import load_params
from fedpax.run_files.metrics import read_metrics, select
from sites.federation import write_hospitals
from sites.kill_points import COORDINATOR, FEATURES, ROUNDS, SENDING, SITE
from sites.small_experiment import small
from sites.small_experiment import train_together as train_small
from sites.test_equals_training import experiment, train_together

pytestmark = pytest.mark.slow
pytest.importorskip("grpc")

HERE = Path(__file__).parent
SIZES = {"a": (40, 25), "b": (33,), "c": (21, 50), "d": (30,)}
FLAGS = ("--goodbye_seconds=30", "--silent_after=5")
STOPPED_SECONDS = 12.0  # more than `silent_after`

Kills = Mapping[str, Sequence[str]]
"""For each process, `POINT:COUNT` of its first start, its second start and so on."""


FIRST, LAST = ("agree", "question"), ("save", "checkpoint at the end", "end")


def draw_kills(seed: int, without: Sequence[str] = ()) -> dict[str, list[str]]:
    """Draw a kill at each point: kills of sites at random sites, at random passages."""
    generator = random.Random(seed)

    def drawn(points: Sequence[str]) -> list[str]:
        chosen = [point for point in points if point not in without]
        generator.shuffle(chosen)
        chosen.sort(key=lambda point: (point in LAST) - (point in FIRST))
        once = (*FIRST, *LAST)
        return [f"{point}:{1 if point in once else generator.choice([1, 2])}" for point in chosen]

    kills: dict[str, list[str]] = {"fed": drawn(list(COORDINATOR)), **{name: [] for name in SIZES}}
    for place, point in enumerate(drawn([*SITE, *SENDING])):
        kills[sorted(SIZES)[place % len(SIZES)]].append(point)
    return kills


class Consortium:
    """A coordinator and its sites; processes that were killed are started again.

    Args:
        folder: an empty folder.
        exp: the experiment, a function of `kill_points`.
        flags: flags of the coordinator.
        site_flags: flags of each site.
    """

    def __init__(
        self, folder: Path, exp: str, flags: Sequence[str], site_flags: Mapping[str, Sequence[str]]
    ) -> None:
        self.processes = Processes(folder, f"kill_points:{exp}")
        self.folder, self._flags, self._site_flags = folder, flags, site_flags
        self.running: dict[str, subprocess.Popen] = {}
        self.deaths: dict[str, list[str]] = {name: [] for name in ("fed", *site_flags)}
        self.statuses: dict[str, int] = {}
        self.stopped: dict[str, float] = {}

    def start(self, name: str, point: str = "", **variables: str) -> None:
        """Start a process, which dies at a point."""
        command, flags = ("join", self._site_flags[name]) if name != "fed" else ("syncer", ())
        if name == "fed":
            flags = (*FLAGS, *self._flags)
        variables |= {"KILL_POINT": point} if point else {}
        if name == "fed":
            variables["COUNTED"] = str(self.folder / "counted.jsonl")
        self.running[name] = self.processes.start(command, name, *flags, cwd=HERE, **variables)

    def run(self, kills: Kills, first: str = "SIGKILL", seconds: float = 1200.0) -> None:
        """Run all processes until each has ended by itself.

        Args:
            kills: where processes die, or what `first` says.
            first: what happens at the point: "SIGKILL", "SIGSTOP" for `STOPPED_SECONDS`, or "FULL".
            seconds: the most that it may take.
        """
        left = {name: list(kills.get(name, ())) for name in self.deaths}
        planned: dict[str, str] = {}
        deadline = time.monotonic() + seconds
        for name in self.deaths:
            planned[name] = left[name].pop(0) if left[name] else ""
            self.start(name, planned[name], KILL_SIGNAL=first)
        while self.running:
            assert time.monotonic() < deadline, self.processes.logs()
            for name, process in list(self.running.items()):
                if first == "SIGSTOP" and planned[name]:
                    self._continue_later(name, process, planned)
                if (status := process.poll()) is None:
                    continue
                is_full = first == "FULL" and bool(planned[name]) and status > 0
                if status != -signal.SIGKILL and not is_full:
                    self.statuses[name] = status
                    del self.running[name]
                    assert status == 0, (name, planned[name], self.processes.logs())
                    continue
                self.deaths[name].append(planned[name])
                planned[name] = left[name].pop(0) if left[name] else ""
                self.start(name, planned[name], KILL_SIGNAL=first)
            time.sleep(0.05)

    def _continue_later(
        self, name: str, process: subprocess.Popen, planned: dict[str, str]
    ) -> None:
        """Let a stopped process continue after its time."""
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "T":
                return
            since = self.stopped.setdefault(name, time.monotonic())
            if time.monotonic() - since > STOPPED_SECONDS:
                process.send_signal(signal.SIGCONT)
                self.deaths[name].append(planned[name])
                planned[name] = ""

    @property
    def counted(self) -> list[list[str]]:
        """The sites of each round."""
        lines = (self.folder / "counted.jsonl").read_text().splitlines()
        rounds = dict(json.loads(line) for line in lines)
        assert sorted(rounds) == list(range(1, ROUNDS + 1))
        return [rounds[number] for number in sorted(rounds)]

    def params(self, name: str) -> list[np.ndarray]:
        """The parameters of the model in a folder."""
        return [np.asarray(x) for x in jax.tree.leaves(load_params(self.folder / name))]


@pytest.fixture
def consortium(tmp_path: Path) -> Iterator[Callable[..., Consortium]]:
    """Make consortia whose processes end with the test."""
    made: list[Consortium] = []

    def make(exp: str, *flags: str) -> Consortium:
        made.append(Consortium(tmp_path / "runs", exp, flags, site_flags(tmp_path, exp)))
        return made[-1]

    (tmp_path / "runs").mkdir()
    yield make
    for each in made:
        each.processes.end()


def site_flags(folder: Path, exp: str) -> dict[str, list[str]]:
    """Return the flags that name the data of each site."""
    if exp == "table":
        write_hospitals(folder / "data", SIZES)
        return {name: [f"--data.files={folder}/data/{name}/*.csv"] for name in SIZES}
    return {
        name: [f"--clients={len(sizes)}", f"--data_seed={seed}"]
        for seed, (name, sizes) in enumerate(SIZES.items())
    }


def reference(folder: Path, exp: str, counted: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Return the parameters of the same rounds in one program."""
    if exp == "table":
        return train_together(experiment(f"{folder}/data/*/*.csv"), ROUNDS)
    sites = {
        name: small(exp, clients=len(sizes), data_seed=seed, features=FEATURES)
        for seed, (name, sizes) in enumerate(SIZES.items())
    }
    params: Any = train_small(sites, ROUNDS, lambda number: list(counted[number])).params
    return jax.tree.leaves(params)


def assert_equal(actual: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for leaf, other in zip(actual, wanted, strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("exp", "flags", "without"),
    [
        ("table", (), ("taking over", "keep", "kept")),
        ("scaffold", (), ("question",)),
        ("table", ("--secure_sums",), ("taking over", "keep", "kept")),
    ],
    ids=["fedavg", "scaffold", "secure sums"],
)
@pytest.mark.parametrize("seed", [0])
def test_kills_in_every_phase(
    consortium: Callable[..., Consortium],
    tmp_path: Path,
    exp: str,
    flags: tuple[str, ...],
    without: tuple[str, ...],
    seed: int,
) -> None:
    kills = draw_kills(seed, without)
    runs = consortium(exp, "--min_sites=4", *flags)
    runs.run(kills)
    assert runs.deaths == kills
    assert runs.counted == [sorted(SIZES)] * ROUNDS
    wanted = reference(tmp_path, exp, runs.counted)
    for name in runs.deaths:
        assert_equal(runs.params(name), wanted)


def test_a_private_run_whose_coordinator_is_killed(
    consortium: Callable[..., Consortium], tmp_path: Path
) -> None:
    """Each kill loses a round: its noise is drawn anew, and epsilon counts the saved rounds."""
    kills = {"fed": ["merged:3", "federation:2", "checkpoint:4"]}
    runs = consortium("private", "--min_sites=4")
    runs.run(kills)
    assert {name: points for name, points in runs.deaths.items() if points} == kills
    model = runs.params("fed")[-1]
    seeded, exact = (reference(tmp_path, n, runs.counted)[-1] for n in ("private", "clipped"))
    # The seed of the configuration does not give the noise.
    attacked = np.std(model - seeded)
    np.testing.assert_allclose(attacked, 2**0.5 * np.std(seeded - exact), rtol=0.1)
    for name in runs.deaths:
        np.testing.assert_array_equal(runs.params(name)[-1], model)
    metrics = select(read_metrics(tmp_path / "runs" / "fed"), "training")
    spent = [PrivacyAccountant(2.0, 1e-6).epsilon(r) for r in range(1, ROUNDS + 1)]
    np.testing.assert_allclose([m["epsilon"] for m in metrics], spent, rtol=1e-5)


def check_counted(runs: Consortium, folder: Path) -> None:
    """Check that the model is made from the sites that answered in each round."""
    assert_equal(runs.params("fed"), reference(folder, "scaffold", runs.counted))
    for name in sorted(SIZES):
        assert_equal(runs.params(name), runs.params("fed"))


@pytest.mark.parametrize("seed", [0])
def test_rounds_without_the_killed_sites(
    consortium: Callable[..., Consortium], tmp_path: Path, seed: int
) -> None:
    kills = draw_kills(seed, ("question",))
    runs = consortium("scaffold", "--min_sites=2")
    runs.run({name: points for name, points in kills.items() if name != "fed"})
    assert any(len(names) < len(SIZES) for names in runs.counted)
    check_counted(runs, tmp_path)


def test_a_site_that_is_stopped_for_longer_than_it_may_be_silent(
    consortium: Callable[..., Consortium], tmp_path: Path
) -> None:
    runs = consortium("scaffold", "--min_sites=2")
    runs.run({"b": ["train:3"], "d": ["trained:2"]}, "SIGSTOP")
    assert runs.deaths["b"] == ["train:3"]
    assert any("b" not in names for names in runs.counted)
    check_counted(runs, tmp_path)


@pytest.mark.parametrize("kills", [{"fed": ["merged:3"]}, {"c": ["keep:3"]}], ids=["fed", "site"])
def test_a_full_disk(
    consortium: Callable[..., Consortium], tmp_path: Path, kills: dict[str, list[str]]
) -> None:
    runs = consortium("scaffold", "--min_sites=4")
    runs.run(kills, "FULL")
    assert {name: points for name, points in runs.deaths.items() if points} == kills
    assert runs.counted == [sorted(SIZES)] * ROUNDS
    check_counted(runs, tmp_path)
    (name,) = kills
    assert "File too large" in runs.processes.log(name)
