"""Train with real processes that are killed, stopped and cut off at random moments.

    python -m fedpax.experiments.benchmarks.chaos --picture=chaos.png

A syncer and its islands run as `fedpax syncer` and `fedpax join` on CPU, once undisturbed and once
with failures: `kill -9` and a new start, SIGSTOP and SIGCONT, networks that a proxy cuts and
throttles. A seed sets kinds, moments and durations. Each island's data come at a fixed rate, so an
island that is gone leaves no CPU time to the others. Useful time is the inner steps in merges per
second, relative to the undisturbed run. Restarted data parallelism is computed: each failure except
a throttled network stops all islands until the failed one has restarted, and loses the steps since
the last checkpoint.
"""

import contextlib
import dataclasses
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from matplotlib.figure import Figure

from fedpax.clients.cohort import Cohort, CohortStream, IslandStream
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.chaos_sites import (
    SYNCER,
    Failure,
    Kind,
    Outcome,
    Sites,
    draw_failures,
    play,
)
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.experiments.benchmarks.workloads import changed
from fedpax.experiments.decoupled_diloco_text import DecoupledDiLoCoText, decoupled_diloco_text
from fedpax.experiments.text_experiment import TextConfig
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.experiment import Run
from fedpax.training.training_config import TrainingConfig

LOCAL_STEPS, CHECKPOINT_ROUNDS = 8, 2


class PacedStream:
    """A stream of cohorts of which each comes at least some seconds after the one before."""

    def __init__(self, stream: CohortStream, seconds: float) -> None:
        self._stream, self._seconds, self._next = stream, seconds, 0.0
        self.get_state, self.set_state = stream.get_state, stream.set_state

    def __next__(self) -> Cohort:
        cohort = next(self._stream)
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._seconds
        return cohort

    def keep_island(self, island: int) -> None:
        """Read only the rows of one island."""
        if isinstance(self._stream, IslandStream):
            self._stream.keep_island(island)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PacedText(DecoupledDiLoCoText):
    """Decoupled DiLoCo on text, at a fixed rate."""

    seconds_per_round: float = 1.0  # `fedpax syncer` has a flag --round_seconds

    def build(self) -> Run:
        run = super().build()
        return run._replace(cohorts=PacedStream(run.cohorts, self.seconds_per_round))


def paced_text() -> PacedText:
    """Four islands that train a small transformer, a round of 8 steps each second."""
    base = decoupled_diloco_text()
    sizes = {"num_layers": 2, "embed_dim": 32, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 64}
    return PacedText(
        islands=4,
        mesh=MeshConfig(islands=1),  # of `fedpax evaluate`; each island has one device
        model=changed(base.model, **sizes),
        data=TextConfig(local_steps=LOCAL_STEPS, batch_size=4, seq_len=64, heldout_tokens=1 << 15),
        optimizer=base.optimizer,
        # A grace window of more than a round: islands are at any moment of their rounds.
        decoupled=dataclasses.replace(base.decoupled, fragments=2, quorum=1, grace_seconds=1.5),
        training=TrainingConfig(rounds=150, evaluate_every=0, checkpoint_every=CHECKPOINT_ROUNDS),
    )


def restarted_data_parallelism(
    failures: Sequence[Failure], seconds: float, restart_seconds: float, checkpoint_seconds: float
) -> float:
    """Compute the useful fraction of time if each failure stops all islands.

    Training returns to the last checkpoint, and continues `restart_seconds` after the failure has
    ended. Another failure meanwhile begins the restart again. A throttled network costs nothing.
    """
    kept, running_since = 0.0, 0.0
    for failure in failures:
        if failure.kind == "throttle" or failure.time >= seconds:
            continue
        if failure.time > running_since:
            trained = failure.time - running_since
            kept += trained - trained % checkpoint_seconds
        running_since = max(running_since, failure.time + failure.seconds + restart_seconds)
    return (kept + max(seconds - running_since, 0.0)) / seconds


def mean_data_parallelism(
    mean_seconds: float, islands: int, seconds: float, restart: float, checkpoint: float
) -> float:
    """Compute the mean of `restarted_data_parallelism` over 200 schedules of one failure rate.

    One schedule of some minutes differs by several percent from another one of the same rate.
    """
    kept = []
    for seed in range(200):
        down_until: dict[int, float] = {}
        happened = []
        for failure in draw_failures(seed, islands, seconds, mean_seconds):
            if failure.time >= down_until.get(failure.island, 0.0):  # the rule of `play`
                happened.append(failure)
                end = failure.time + failure.seconds
                down_until[failure.island] = end + restart * failure.kind.startswith("kill")
        kept.append(restarted_data_parallelism(happened, seconds, restart, checkpoint))
    return statistics.mean(kept)


def heldout_loss(sites: Sites) -> float:
    """Return the held-out loss of the outer model, by `fedpax evaluate`."""
    file = sites.folder / "evaluation.json"
    flags = f"--job_log_dir={sites.run_folder(SYNCER)}", f"--json={file}"
    timing.run_python("-m", "fedpax", "evaluate", *flags)
    return float(json.loads(file.read_text(encoding="utf-8"))["metrics"]["loss"])


def draw_outcomes(quiet: Outcome, chaotic: Outcome) -> Figure:
    """Draw the failures, and the inner steps in merges over time with and without them."""
    figure = Figure(figsize=(9, 6), layout="constrained", dpi=120)
    above, below = figure.subplots(2, sharex=True, height_ratios=[1, 1.6])
    bars: list[tuple[str, int, float, float, float]] = [
        (f.kind, f.island, f.time, f.seconds, 1.0) for f in chaotic.failures
    ]
    seconds = {(f.island, f.time): f.seconds for f in chaotic.failures}
    for process, killed, until in chaotic.restarts:
        begin = killed + seconds[process, killed]
        bars.append(("until its first round or merge", process, begin, until, 0.3))
    colors: dict[str, str] = dict(zip(get_args(Kind), ("C3", "C1", "C0", "C9", "C4"), strict=True))
    named: set[str] = set()
    for name, process, begin, length, alpha in bars:
        style: Any = {"color": colors.get(name, "C3"), "alpha": alpha}
        label = None if name in named else name
        above.barh(process, length, left=begin, label=label, **style)
        named.add(name)
    islands = range(len(chaotic.statuses) - 1)
    above.set_yticks([SYNCER, *islands], ["syncer", *(f"island {island}" for island in islands)])
    if named:
        above.legend(fontsize="small", ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    for name, outcome in (("undisturbed", quiet), ("with failures", chaotic)):
        times, counts = zip(*outcome.merges, strict=True)
        below.plot(times, list(itertools.accumulate(counts)), label=name)
    below.set(xlabel="seconds", ylabel="inner steps in merges")
    below.legend()
    return figure


def compare(
    benchmark: "Chaos", outcomes: tuple[Outcome, Outcome], losses: tuple[float, float]
) -> Row:
    """Compare a run with failures with an undisturbed one, which is the first of each pair."""
    quiet, chaotic = outcomes
    restarts = [r.seconds for r in chaotic.restarts if r.process != SYNCER]
    restart = statistics.median(restarts) if restarts else 0.0
    rates = chaotic.seconds, restart, CHECKPOINT_ROUNDS * benchmark.round_seconds
    return Row(
        failures=dict(Counter(failure.kind for failure in chaotic.failures)),
        count=len(chaotic.failures),
        seconds=chaotic.seconds,
        useful=chaotic.steps_per_second / quiet.steps_per_second,
        data_parallel=restarted_data_parallelism(chaotic.failures, *rates),
        mean_data_parallel=mean_data_parallelism(
            benchmark.mean_seconds, len(chaotic.statuses) - 1, *rates
        ),
        restart_seconds=restart,
        repeated=chaotic.repeated,
        lost_updates=sum(chaotic.lost_updates.values()),
        loss=losses[1],
        quiet_loss=losses[0],
        _outcomes=outcomes,
    )


class Chaos(Benchmark):
    seed: int = option(0, "of the failures")
    rounds: int = option(150, "rounds of the run")
    round_seconds: float = option(1.0, "seconds of a round")
    mean_seconds: float = option(4.0, "between failures, mean")
    islands: int = option(4, "number of islands")
    limit_seconds: float = option(1800.0, "for each run")
    folder: str | None = option(None, "a new folder for runs and logs; default: temporary")

    columns = (
        "failures {count} | seconds {seconds:.0f} | useful time of the islands {useful:.1%} "
        "| of restarted data parallelism {data_parallel:.1%} "
        "| on average at this rate {mean_data_parallel:.1%} "
        "| restart of an island, s {restart_seconds:.1f} | updates applied twice {repeated} "
        "| lost of islands never killed {lost_updates} | held-out loss {loss:.4f} "
        "| undisturbed {quiet_loss:.4f} | kinds {failures}"
    )

    def measure(self) -> Iterator[Row]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the processes too
        fields = [
            "--exp=fedpax.experiments.benchmarks.chaos:paced_text",
            f"--training.rounds={self.rounds}",
            f"--seconds_per_round={self.round_seconds}",
        ]
        islands, limit = self.islands, self.limit_seconds
        # Until the end of the run, whenever that is.
        failures = draw_failures(self.seed, islands, limit, self.mean_seconds)
        outcomes, losses = [], []
        with contextlib.ExitStack() as stack:
            folder = Path(self.folder or stack.enter_context(tempfile.TemporaryDirectory()))
            for name, schedule in (("quiet", []), ("chaotic", failures)):
                with Sites(folder / name, islands, fields, local_steps=LOCAL_STEPS) as sites:
                    outcomes.append(play(sites, schedule, limit))
                    losses.append(heldout_loss(sites))
        yield compare(self, (outcomes[0], outcomes[1]), (losses[0], losses[1]))

    def draw(self, rows: list[Row]) -> Figure:
        return draw_outcomes(*vars(rows[0])["_outcomes"])


main = command(Chaos)
