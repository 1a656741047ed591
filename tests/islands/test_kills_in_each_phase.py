"""`kill -9` of an island and of the syncer in each phase of their work, as processes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from site_processes import updates_of

from fedpax.checkpoints import load_params
from fedpax.run_files.paths import complete_rounds, latest_round

pytest.importorskip("grpc")
from islands.small_sites import STEPS

from fedpax.experiments.benchmarks.chaos_sites import SYNCER, Sites

pytestmark = pytest.mark.slow

VICTIM, WITNESS = 0, 1
WIDTH = 4096  # a fragment has 256 KiB
PART, WHOLE = 80_000, 16 * WIDTH * 4
FIELDS = (
    "--exp=small_sites:sites_regression",
    "--training.rounds=1000000",
    "--training.checkpoint_every=2",
    f"--width={WIDTH}",
    "--learning_rate=0.001",
)


def until(sites: Sites, condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait for a condition, which is checked often: some phases take milliseconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            logs = sites.folder.glob("*.log")
            raise TimeoutError("\n".join(path.read_text()[-2000:] for path in logs))
        time.sleep(0.0005)


def log(sites: Sites, process: int) -> str:
    return (sites.folder / f"{sites.run_folder(process).name}.log").read_text()


def trained_since(sites: Sites, merge: int) -> set[str]:
    return {update["island"] for result in sites.merges()[merge:] for update in result["updates"]}


def saves(folder: Path) -> Callable[[], bool]:
    """Tell whether a checkpoint is being saved."""
    checkpoints = folder / "checkpoints"
    return lambda: (
        checkpoints.is_dir()
        and sum(1 for _ in checkpoints.iterdir()) > len(complete_rounds(checkpoints))
    )


def starts(sites: Sites, process: int) -> None:
    sites.kill(process)
    sites.start(process)
    time.sleep(1.0)


def joins(sites: Sites, process: int) -> None:
    before = log(sites, process).count(": joined ")
    sites.kill(process)
    sites.start(process)
    until(sites, lambda: log(sites, process).count(": joined ") > before)


def receives_its_first_model(sites: Sites, process: int) -> None:
    network = sites.networks[VICTIM]
    sites.kill(process)
    network.bytes_per_second = 1e5
    before = network.received_bytes
    sites.start(process)
    until(sites, lambda: network.received_bytes > before + PART)


def sends_an_update(sites: Sites, process: int) -> None:
    network = sites.networks[VICTIM]
    network.bytes_per_second = 1e5
    before = network.sent_bytes
    until(sites, lambda: network.sent_bytes > before + PART)


def waits_for_the_answer(sites: Sites, process: int) -> None:
    network = sites.networks[VICTIM]
    network.bytes_per_second = 3e5
    before = network.sent_bytes
    until(sites, lambda: network.sent_bytes > before + WHOLE)


def receives_a_fragment(sites: Sites, process: int) -> None:
    network = sites.networks[VICTIM]
    network.bytes_per_second = 1e5
    before = network.received_bytes
    until(sites, lambda: network.received_bytes > before + PART)


def saves_a_checkpoint(sites: Sites, process: int) -> None:
    until(sites, saves(sites.run_folder(process)))


def merges(sites: Sites, process: int) -> None:
    path = sites.run_folder(SYNCER) / "merges.jsonl"
    before = path.stat().st_size
    until(sites, lambda: path.stat().st_size > before)


def begins_a_journal(sites: Sites, process: int) -> None:
    folder = sites.run_folder(SYNCER) / "syncer"
    before = set(folder.iterdir())
    until(sites, lambda: set(folder.iterdir()) - before)


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    """A syncer and two islands that train."""
    with Sites(
        tmp_path / "sites", 2, FIELDS, local_steps=STEPS, working_directory=Path(__file__).parent
    ) as result:
        for process in (SYNCER, VICTIM, WITNESS):
            result.start(process)
        until(result, lambda: trained_since(result, 0) == {"island-0", "island-1"})
        until(result, lambda: latest_round(result.run_folder(VICTIM)))
        yield result


def kill_in_each_phase(
    sites: Sites, process: int, phases: list[Callable[[Sites, int], None]]
) -> None:
    for reach in phases:
        reach(sites, process)
        sites.kill(process)
        sites.networks[VICTIM].restore()
        at = len(sites.merges())
        if process != SYNCER:
            until(sites, lambda at=at: len(sites.merges()) > at + 4)  # the other island trains on
            at = len(sites.merges())
        sites.start(process)
        until(sites, lambda at=at: trained_since(sites, at + 2) == {"island-0", "island-1"})

    # The run is ended, and ends by itself.
    sites.stop(SYNCER)
    rounds = len(sites.merges()) // 2 + 5
    change = (f"--training.rounds={rounds}", "--allow_config_change=training.rounds")
    sites.start(SYNCER, *change, "--goodbye_seconds=200")
    until(sites, lambda: None not in [sites.status(i) for i in (SYNCER, VICTIM, WITNESS)])
    assert [sites.status(i) for i in (SYNCER, VICTIM, WITNESS)] == [0, 0, 0]

    assert [merge["merge"] for merge in sites.merges()] == list(range(1, 2 * rounds + 1))
    updates = updates_of(sites.run_folder(SYNCER))
    assert len(updates) == len(set(updates))  # nothing is applied twice
    # Of the island that was never killed, each update is in a merge, except for the last ones.
    own = [(p, n) for island, _, p, n in updates if island == "island-1"]
    newest = min(max(n for q, n in own if q == p) for p in (0, 1))
    assert sum(n <= newest for _, n in own) >= newest - sites.dropped(WITNESS)
    assert all(np.isfinite(x).all() for x in load_params(sites.run_folder(SYNCER)).values())


def test_an_island_is_killed_in_each_phase(sites: Sites) -> None:
    phases = [
        starts,
        joins,
        receives_its_first_model,
        sends_an_update,
        waits_for_the_answer,
        receives_a_fragment,
        saves_a_checkpoint,
    ]
    kill_in_each_phase(sites, VICTIM, phases)
    assert log(sites, VICTIM).count("resuming after its round") >= len(phases) - 1


def test_the_syncer_is_killed_in_each_phase(sites: Sites) -> None:
    phases = [
        starts,
        sends_an_update,
        merges,
        begins_a_journal,
        receives_a_fragment,
        saves_a_checkpoint,
        merges,
    ]
    kill_in_each_phase(sites, SYNCER, phases)
    assert log(sites, SYNCER).count("resuming after merge") >= len(phases)
