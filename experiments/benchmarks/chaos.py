"""Train with real processes that are killed, stopped and cut off at random moments.

    python -m fedpax.experiments.benchmarks.chaos --picture=chaos.png

`fedpax syncer` and its islands, `fedpax join`, run on CPU, once undisturbed and once with failures
drawn from a seed: `kill -9` and a new start, SIGSTOP and SIGCONT, networks that a proxy cuts and
throttles. Data come at a fixed rate, so an absent island leaves no CPU time to the others. Useful
time is the inner steps in merges per second, relative to the undisturbed run. Restarted data
parallelism is computed: each failure but a throttled network stops all islands until the failed one
has restarted, and loses the steps since the last checkpoint.
"""

import dataclasses
import itertools
import json
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

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

    Training continues `restart_seconds` after the failure has ended. Another failure meanwhile
    begins the restart again.
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
    length = {(f.island, f.time): f.seconds for f in chaotic.failures}
    bars = {
        kind: [(f.island, f.time, f.seconds) for f in chaotic.failures if f.kind == kind]
        for kind in get_args(Kind)
    }
    bars["until its first round or merge"] = [
        (process, killed + length[process, killed], seconds)
        for process, killed, seconds in chaotic.restarts
    ]
    for name, drawn in bars.items():
        if drawn:
            processes, begins, widths = zip(*drawn, strict=True)
            above.barh(processes, widths, left=begins, label=name)
    islands = range(len(chaotic.statuses) - 1)
    above.set_yticks([SYNCER, *islands], ["syncer", *(f"island {island}" for island in islands)])
    above.legend(fontsize="small", ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    for name, outcome in (("undisturbed", quiet), ("with failures", chaotic)):
        times, counts = zip(*outcome.merges, strict=True)
        below.plot(times, list(itertools.accumulate(counts)), label=name)
    below.set(xlabel="seconds", ylabel="inner steps in merges")
    below.legend()
    return figure


class Chaos(Benchmark):
    seed: int = option(0, "of the failures")
    rounds: int = option(150, "rounds of the run")
    round_seconds: float = option(1.0, "seconds of a round")
    mean_seconds: float = option(4.0, "between failures, mean")
    islands: int = option(4, "number of islands")
    fields: str = option("", "further fields of the experiment, such as --decoupled.momentum=0.9")
    limit_seconds: float = option(1800.0, "for each run")
    folder: str | None = option(None, "a new folder for runs and logs; default: temporary")

    columns = (
        "failures {count} | seconds {seconds:.0f} | useful time of the islands {useful:.1%} "
        "| of restarted data parallelism {data_parallel:.1%} "
        "| restart of an island, s {restart_seconds:.1f} | updates applied twice {repeated} "
        "| lost of islands never killed {lost_updates} | held-out loss {loss:.4f} "
        "| undisturbed {quiet_loss:.4f} | late updates {late:.1%} | undisturbed {quiet_late:.1%} "
        "| kinds {failures}"
    )

    def measure(self) -> Iterator[Row]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the processes too
        fields = [
            "--exp=fedpax.experiments.benchmarks.chaos:paced_text",
            f"--training.rounds={self.rounds}",
            f"--seconds_per_round={self.round_seconds}",
            *self.fields.split(),
        ]
        islands, limit = self.islands, self.limit_seconds
        # Until the end of the run, whenever that is.
        failures = draw_failures(self.seed, islands, limit, self.mean_seconds)
        outcomes, losses = [], []
        with timing.new_folder() as temporary:
            folder = Path(self.folder or temporary)
            for name, schedule in (("quiet", []), ("chaotic", failures)):
                with Sites(folder / name, islands, fields, local_steps=LOCAL_STEPS) as sites:
                    outcomes.append(play(sites, schedule, limit))
                    losses.append(heldout_loss(sites))
        yield self.compare((outcomes[0], outcomes[1]), (losses[0], losses[1]))

    def compare(self, outcomes: tuple[Outcome, Outcome], losses: tuple[float, float]) -> Row:
        """Compare a run with failures with an undisturbed one, which is the first of each pair."""
        quiet, chaotic = outcomes
        restarts = [r.seconds for r in chaotic.restarts if r.process != SYNCER]
        restart = statistics.median(restarts) if restarts else 0.0
        return Row(
            failures=dict(Counter(failure.kind for failure in chaotic.failures)),
            count=len(chaotic.failures),
            seconds=chaotic.seconds,
            useful=chaotic.steps_per_second / quiet.steps_per_second,
            data_parallel=restarted_data_parallelism(
                chaotic.failures, chaotic.seconds, restart, CHECKPOINT_ROUNDS * self.round_seconds
            ),
            restart_seconds=restart,
            repeated=chaotic.repeated,
            lost_updates=sum(chaotic.lost_updates.values()),
            loss=losses[1],
            quiet_loss=losses[0],
            late=chaotic.late,
            quiet_late=quiet.late,
            _outcomes=outcomes,
        )

    def draw(self, rows: list[Row]) -> Figure:
        return draw_outcomes(*rows[0]._outcomes)


main = command(Chaos)
