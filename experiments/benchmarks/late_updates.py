"""Measure how late updates and failures change the loss of sites, on a virtual clock.

    python -m fedpax.experiments.benchmarks.late_updates --outer=0.9:0.4,0.6:0.7

The syncer and the islands of `fedpax syncer` and `fedpax join` train in one process without
sockets, on the text of the benchmark `chaos`. A virtual clock determines the order of phases,
exchanges and failures, so the losses depend on the seed, and not on the load of the machine. An
island's exchange ends some time after its phase, and islands differ in speed from phase to phase.
With failures, processes are killed and return, stop, and lose their network, as in `chaos`.
"""

import contextlib
import dataclasses
import functools
import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.chaos import CHECKPOINT_ROUNDS, paced_text
from fedpax.experiments.benchmarks.chaos_sites import SYNCER, Failure, draw_failures
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.experiments.benchmarks.workloads import changed
from fedpax.islands.island.island import Island
from fedpax.islands.island.link import Link
from fedpax.islands.island.local_model import LocalModel
from fedpax.islands.method_parts import parts_of, tokens_per_step
from fedpax.islands.syncer.merge_report import MergeReport
from fedpax.islands.syncer.outer_model import OuterModel
from fedpax.islands.syncer.syncer import Syncer
from fedpax.sites.site_process import Identity
from fedpax.transport.calls import DisconnectedError
from fedpax.transport.message import Message

ROUND_SECONDS, TICK_SECONDS, HEARTBEAT_SECONDS, RESTART_SECONDS = 1.0, 0.05, 1.0, 6.0
IDENTITY = Identity("", {}, {})


class Setting(NamedTuple):
    """The outer optimizer."""

    momentum: float
    learning_rate: float


def _setting(text: str) -> Setting:
    momentum, learning_rate = map(harness.number, text.split(":"))
    return Setting(momentum, learning_rate)


class Data:
    """The experiment with its data: the same for all settings."""

    def __init__(self, rounds: int) -> None:
        self.experiment = changed(paced_text(), seconds_per_round=0.0, training={"rounds": rounds})
        run = self.experiment.build()
        seed = self.experiment.training.seed
        self.params = jax.device_get(jax.jit(run.init)(jax.random.key(seed)))
        self.model, self._cohorts, self._batches = LocalModel(run), run.cohorts, list[Any]()

    def batches(self, number: int, shard: int) -> Any:
        """Return an island's batches of a round."""
        while len(self._batches) <= number:
            self._batches.append(next(self._cohorts).batches)
        return jax.tree.map(lambda x: x[shard], self._batches[number])


@dataclasses.dataclass(eq=False)
class _Process:
    """A process of an island, with its last checkpoint: state, ledger and phase."""

    link: Link
    island: Island
    saved: tuple[Any, Any, int] | None
    phase: int


class VirtualSites:
    """A syncer and its islands on a virtual clock."""

    def __init__(
        self,
        data: Data,
        setting: Setting,
        failures: Sequence[Failure],
        seed: int,
        times: "LateUpdates",
    ) -> None:
        self._data, self._times, self._random = data, times, random.Random(seed)
        self._run = changed(data.experiment, decoupled=setting._asdict()).build()
        self._parts = parts_of(self._run)
        self.model = OuterModel(self._parts, data.params)
        self._phases = len(self.model.fragments)
        self.now, self.failures, self.reports = 0.0, 0, list[MergeReport]()
        self.syncer = Syncer(
            self._parts,
            self.model,
            IDENTITY,
            num_merges=data.experiment.training.rounds * self._phases,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            clock=lambda: self.now,
            on_merge=self.reports.append,
        )
        self._numbers = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._processes: dict[int, _Process] = {}
        # process -> until
        self._down, self._cut = defaultdict[int, float](float), defaultdict[int, float](float)
        for shard in range(self._parts.islands):
            self._at(self._random.uniform(0, ROUND_SECONDS), self._start, shard, None)
        for failure in failures:
            self._at(failure.time, self._fail, failure)
        self._at(0.0, self._tick)

    def play(self) -> float:
        """Run to the end; return the held-out loss."""
        with jax.set_mesh(self._run.mesh):
            while not self.syncer.finished:
                self.now, _, act = heapq.heappop(self._agenda)
                act()
            return float(self._run.evaluate(self.model.params())["loss"])

    def _at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        action: Callable[[], None] = functools.partial(act, *arguments)
        heapq.heappush(self._agenda, (time, next(self._numbers), action))

    def _tick(self) -> None:
        if self._down[SYNCER] <= self.now:
            self.syncer.advance()
        if round(self.now / TICK_SECONDS) % round(HEARTBEAT_SECONDS / TICK_SECONDS) == 0:
            for shard, process in self._processes.items():
                if self._down[shard] <= self.now:
                    with contextlib.suppress(DisconnectedError):
                        process.link._request("heartbeat", seconds_per_update=ROUND_SECONDS)
        self._at(self.now + TICK_SECONDS, self._tick)

    def _start(self, shard: int, saved: Any) -> None:
        """Start a process of an island; try again later if the syncer is down."""

        def call(message: Message, timeout: float) -> Message:
            if max(self._down[SYNCER], self._cut[shard]) > self.now:
                raise DisconnectedError("no answer")
            return self.syncer.handle("", message)

        name = f"{shard}-{next(self._numbers)}"
        identity: dict[str, Any] = {"island": f"{shard}", "incarnation": name, "shard": shard}
        identity |= {"folder": f"{shard}", "identity": IDENTITY._asdict(), "run": None}
        versions = [-1] * self._phases
        if saved is not None:
            versions = [fragment["version"] for fragment in saved[1]["fragments"]]
        link = Link(call, identity, self._data.model.formats, versions)
        try:
            member = link.join()
        except DisconnectedError:
            self._at(self.now + 0.5, self._start, shard, saved)
            return
        sizes: dict[str, Any] = {"shard": shard, "process": name}
        sizes["tokens_per_step"] = tokens_per_step(self._run, self._parts, self._phases)
        island = Island(self._parts, self._data.model, link, **sizes)
        if saved is not None:
            island.restore(jax.device_put(saved[0]), saved[1], member.received)
        process = _Process(link, island, saved, 0 if saved is None else saved[2])
        self._processes[shard] = process
        self._exchange(shard, process)
        self._at(self.now, self._train, shard, process)

    def _fail(self, failure: Failure) -> None:
        process, end = failure.island, self.now + failure.seconds
        is_running = process == SYNCER or process in self._processes
        if not is_running or max(self._down[process], self._cut[process]) > self.now:
            return
        self.failures += 1
        match failure.kind:
            case "kill":
                self._down[process] = end + RESTART_SECONDS
                saved = self._processes.pop(process).saved
                self._at(end + RESTART_SECONDS, self._start, process, saved)
            case "kill syncer":
                self._down[SYNCER] = end + RESTART_SECONDS
            case "stop":
                self._down[process] = end
            case "cut" | "throttle":
                self._cut[process] = end

    def _train(self, shard: int, process: _Process) -> None:
        """Take a phase; the exchange ends later, and the next phase begins when this one ends."""
        if self._processes.get(shard) is not process:
            return  # killed
        begin, island = max(self.now, self._down[shard]), process.island
        if begin == self.now:
            island.receive()
            if island.is_ahead or not island.has_model:
                island.send()
                self._exchange(shard, process)
                begin = self.now + TICK_SECONDS
        if begin > self.now:
            self._at(begin, self._train, shard, process)
            return
        number, phase = divmod(process.phase, self._phases)
        island.train(self._data.batches(number, shard), phase * self._parts.steps_per_sync)
        process.phase += 1
        if process.phase % (CHECKPOINT_ROUNDS * self._phases) == 0:
            process.saved = jax.device_get(island.state), island.ledger.to_json(), process.phase
        self._at(self.now + self._times.latency, self._exchange, shard, process)
        seconds = ROUND_SECONDS / self._phases * (1 + self._times.jitter * self._random.random())
        self._at(self.now + seconds, self._train, shard, process)

    def _exchange(self, shard: int, process: _Process) -> None:
        if self._processes.get(shard) is process and self._down[shard] <= self.now:
            with contextlib.suppress(DisconnectedError):
                process.link.exchange()


class LateUpdates(Benchmark):
    outer: list[Setting] = option(
        "0.9:0.4,0.6:0.7",
        "momentum:learning_rate,...",
        harness.several(_setting, "pairs of numbers", "0.9:0.4,0.6:0.7"),
    )
    rounds: int = option(40, "rounds of the run")
    latency: float = option(0.3, "seconds of an exchange")
    jitter: float = option(0.5, "of the time of a phase")
    mean_seconds: float = option(4.5, "between failures, mean")
    seeds: int = option(1, "number of seeds")
    columns = (
        "momentum {momentum:g} | learning rate {learning_rate:g} | failures {failures} "
        "| held-out loss {loss:.4f} | late updates {late:.1%}"
    )

    def measure(self) -> Iterator[Row]:
        """Train with each outer optimizer, without and with failures."""
        data, seeds = Data(self.rounds), range(self.seeds)
        for setting, failing, seed in itertools.product(self.outer, (False, True), seeds):
            seconds, islands = 10.0 * self.rounds * failing, data.experiment.islands
            failures = draw_failures(seed, islands, seconds, self.mean_seconds)
            sites = VirtualSites(data, setting, failures, seed, self)
            loss = sites.play()
            assert np.isfinite(loss)
            yield Row(
                **setting._asdict(),
                failing=failing,
                loss=loss,
                late=sum(r.late for r in sites.reports) / sum(r.updates for r in sites.reports),
                seconds=sites.now,
                failures=sites.failures,
            )


main = command(LateUpdates)
