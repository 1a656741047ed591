"""A syncer and islands as processes that are killed, stopped and cut off at given moments."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.unreliable_network import UnreliableNetwork
from fedpax.islands.syncer.logs import read_merges
from fedpax.run_files.metrics import read_metrics, select

SYNCER = -1  # in place of an island's number
Kind = Literal["kill", "stop", "cut", "throttle", "kill syncer"]
"""A process gets SIGKILL and is started again; an island gets SIGSTOP and SIGCONT; the network
between an island and the syncer is cut, or throttled."""


class Failure(NamedTuple):
    time: float
    kind: Kind
    island: int
    seconds: float


def draw_failures(
    seed: int, islands: int, total_seconds: float, mean_seconds: float
) -> list[Failure]:
    """Draw the failures of a run."""
    rng, failures = random.Random(seed), list[Failure]()
    now = rng.expovariate(1 / mean_seconds)
    while now < total_seconds:
        kind = rng.choice(get_args(Kind))
        island = SYNCER if kind == "kill syncer" else rng.randrange(islands)
        failures.append(Failure(now, kind, island, rng.uniform(0.5, 3.0)))
        now += rng.expovariate(1 / mean_seconds)
    return failures


class Restart(NamedTuple):
    process: int
    time: float
    seconds: float


class Outcome(NamedTuple):
    seconds: float  # from the moment at which all islands train until the syncer exits
    merges: list[tuple[float, float]]  # of each merge in that time, its second and inner steps
    repeated: int  # updates that were part of more than one merge
    # For each island that was never killed: its updates that are in no merge, and were not dropped
    # for being stale, though later ones are in one; and its inner steps in no merge of a fragment.
    lost_updates: dict[int, int]
    last_steps: dict[int, int]
    restarts: list[Restart]  # of processes that have trained or merged since
    statuses: list[int]
    failures: list[Failure]
    late: float  # fraction of the updates in merges that had missed an earlier merge

    @property
    def steps_per_second(self) -> float:
        return sum(steps for _, steps in self.merges) / self.seconds


class Sites(contextlib.AbstractContextManager["Sites"]):
    """The processes of a syncer and its islands, with a proxy before each island."""

    def __init__(
        self,
        folder: Path,
        islands: int,
        fields: Sequence[str],
        *,
        local_steps: int,
        working_directory: Path | None = None,
    ) -> None:
        self.folder, self.local_steps = folder, local_steps
        self._fields, self._cwd = [*fields, f"--islands={islands}"], working_directory
        self._port = timing.free_port()
        self.networks = [UnreliableNetwork(self._port) for _ in range(islands)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._logs = contextlib.ExitStack()
        folder.mkdir(parents=True)

    def __exit__(self, *exception: object) -> None:
        for island in self._processes:
            self.kill(island)
        for network in self.networks:
            network.close()
        self._logs.close()

    @property
    def processes(self) -> list[int]:
        return [SYNCER, *range(len(self.networks))]

    def start(self, island: int, *more: str) -> None:
        """Start an island, or the syncer, with further arguments."""
        if island == SYNCER:
            # A killed island may start slowly; the syncer exits when all islands know the end.
            command = ["syncer", f"--listen=127.0.0.1:{self._port}", "--goodbye_seconds=120"]
        else:
            port = self.networks[island].port
            command = ["join", f"--syncer=127.0.0.1:{port}", f"--shard={island}"]
        run = self.run_folder(island)
        log = self._logs.enter_context((self.folder / f"{run.name}.log").open("ab"))
        arguments = [*command, f"--job_log_dir={run}", *self._fields, *more]
        self._processes[island] = subprocess.Popen(
            [sys.executable, "-m", "fedpax", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self._cwd,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""},
        )

    def run_folder(self, island: int) -> Path:
        """Return the `--job_log_dir` of an island or of the syncer."""
        return self.folder / ("syncer" if island == SYNCER else f"island-{island}")

    def signal(self, island: int, number: signal.Signals) -> None:
        if self.status(island) is None:
            self._processes[island].send_signal(number)

    def kill(self, island: int) -> None:
        self._processes[island].kill()
        self._processes[island].wait()

    def stop(self, island: int) -> None:
        """Ask a process to end with SIGTERM, and wait for it."""
        self._processes[island].terminate()
        self._processes[island].wait()

    def status(self, island: int) -> int | None:
        return self._processes[island].poll()

    def rounds(self, island: int) -> int:
        return len(select(read_metrics(self.run_folder(island)), "training"))

    def progress(self, process: int) -> int:
        """Return the rounds of an island, or the merges of the syncer."""
        return len(self.merges()) if process == SYNCER else self.rounds(process)

    def steps(self, island: int) -> int:
        """Return the number of inner steps that an island has trained and kept."""
        return self.rounds(island) * self.local_steps

    def dropped(self, island: int) -> int:
        """Return how many updates of an island the syncer has counted and not applied."""
        islands = json.loads((self.run_folder(SYNCER) / "islands.json").read_text(encoding="utf-8"))
        name = self.run_folder(island).name
        return sum(island["dropped"] for island in islands if island["name"] == name)

    def merges(self) -> list[dict[str, Any]]:
        return read_merges(self.run_folder(SYNCER))


def play(sites: Sites, failures: Sequence[Failure], limit_seconds: float) -> Outcome:
    """Run a syncer and its islands to the end, with failures.

    A failure after the end does not happen, nor one of a process that is down, or has not trained
    or merged since its restart.
    """
    islands = sites.processes[1:]
    deadline = time.monotonic() + limit_seconds
    for process in sites.processes:
        sites.start(process)
    _wait(sites, deadline, lambda: all(sites.rounds(island) >= 2 for island in islands))
    begin, date = time.monotonic(), time.time()
    waiting = list(failures)
    agenda: list[tuple[float, Failure]] = []
    happened: list[Failure] = []
    starting: dict[int, tuple[float, float, int]] = {}  # killed, started, least progress
    restarts: list[Restart] = []
    busy: set[int] = set()
    while sites.status(SYNCER) is None or SYNCER in busy:
        _check(sites, deadline, except_for=busy)
        now = time.monotonic() - begin
        for end, failure in [entry for entry in agenda if entry[0] <= now]:
            agenda.remove((end, failure))
            busy.discard(failure.island)
            _set(sites, failure, begins=False)
            if failure.kind in ("kill", "kill syncer"):
                starting[failure.island] = failure.time, now, sites.progress(failure.island)
        while waiting and waiting[0].time <= now:
            failure = waiting.pop(0)
            down = failure.island in busy or failure.island in starting
            if not down and sites.status(failure.island) is None:
                _set(sites, failure, begins=True)
                busy.add(failure.island)
                happened.append(failure)
                agenda.append((now + failure.seconds, failure))
        for process, (killed, started, least) in list(starting.items()):
            progress = sites.progress(process)  # it forgets what it has not saved first
            starting[process] = killed, started, min(progress, least)
            if progress > least:
                restarts.append(Restart(process, killed, now - started))
                del starting[process]
        time.sleep(0.2)
    seconds = time.monotonic() - begin
    for _, failure in agenda:
        _set(sites, failure, begins=False)
    _wait(sites, deadline, lambda: all(sites.status(island) is not None for island in islands))
    return _summarize(sites, date, seconds, happened, restarts)


def _wait(sites: Sites, deadline: float, until: Callable[[], bool]) -> None:
    while not until():
        _check(sites, deadline)
        time.sleep(0.3)


def _check(sites: Sites, deadline: float, except_for: Collection[int] = ()) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"the run did not end in time: see the logs in {sites.folder}")
    for process in sites.processes:
        if process not in except_for and (status := sites.status(process)) not in (None, 0):
            name = sites.run_folder(process).name
            raise RuntimeError(f"{name} ended with status {status}: see the logs in {sites.folder}")


def _set(sites: Sites, failure: Failure, begins: bool) -> None:
    process = failure.island
    match failure.kind:
        case "kill" | "kill syncer":
            (sites.kill if begins else sites.start)(process)
        case "stop":
            sites.signal(process, signal.SIGSTOP if begins else signal.SIGCONT)
        case _ if not begins:
            sites.networks[process].restore()
        case "cut":
            sites.networks[process].cut()
        case "throttle":
            network = sites.networks[process]
            network.bytes_per_second, network.delay = 2e5, 0.02


def _summarize(
    sites: Sites, date: float, seconds: float, failures: list[Failure], restarts: list[Restart]
) -> Outcome:
    merges = sites.merges()
    fragments = 1 + max(merge["fragment"] for merge in merges)
    updates = [(merge["fragment"], update) for merge in merges for update in merge["updates"]]
    sent = Counter((q, *(u[k] for k in ("island", "incarnation", "sequence"))) for q, u in updates)
    killed = {failure.island for failure in failures if failure.kind == "kill"}
    lost, last = {}, {}
    for island in {*sites.processes[1:]} - killed:
        own = [(q, u) for q, u in updates if u["island"] == sites.run_folder(island).name]
        newest = min(max(u["sequence"] for q, u in own if q == p) for p in range(fragments))
        missing = newest - sum(u["sequence"] <= newest for _, u in own)
        lost[island] = max(missing - sites.dropped(island), 0)
        merged = min(sum(u["steps"] for q, u in own if q == p) for p in range(fragments))
        last[island] = sites.steps(island) - merged
    # A step is part of one update of each fragment.
    steps = [sum(update["steps"] for update in merge["updates"]) / fragments for merge in merges]
    times = [merge["time"] - date for merge in merges]
    return Outcome(
        seconds,
        [(at, n) for at, n in zip(times, steps, strict=True) if at >= 0],
        sum(count - 1 for count in sent.values()),
        lost,
        last,
        restarts,
        [sites.status(process) or 0 for process in sites.processes],
        failures,
        sum(merge["late"] for merge in merges) / max(len(updates), 1),
    )
