"""The runs of `diloco_laws`: what a run varies, its experiment, and its training."""

from pathlib import Path
from typing import Any, NamedTuple

from fedpax.console import print_error
from fedpax.experiments.benchmarks.workloads import changed
from fedpax.experiments.diloco_text import data_parallel_text, diloco_text
from fedpax.experiments.streaming_diloco_text import streaming_diloco_text
from fedpax.experiments.text import TextExperiment
from fedpax.parallel.mesh import MeshConfig
from fedpax.reports.comparison import RunSummary, summarize_run
from fedpax.training.trainer import train

BITS: dict[str, int | None] = {"float32": None, "4 bits": 16, "2 bits": 4, "1 bit": 2}
"""Formats of an outer gradient, as `outer.num_levels` of `diloco_text`."""

OTHER_SEED = 1000
"""Added to the seed of the data after a common start."""

DILOCO = diloco_text()


class Setting(NamedTuple):
    """A run."""

    method: str
    local_steps: int
    islands: int
    bits: str
    rows: int
    seed: int = 0
    learning_rate: float = DILOCO.optimizer.learning_rate
    outer_momentum: float = DILOCO.outer.momentum
    weight_decay: float = DILOCO.optimizer.weight_decay
    common_start: float = 0.0

    @property
    def has_outer_optimizer(self) -> bool:
        """Tell whether the method has an outer optimizer."""
        return self.method != "data parallelism"

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return "-".join(str(value).replace(" ", "_") for value in self)

    def _base(self) -> Any:
        momentum, levels = self.outer_momentum, BITS[self.bits]
        if self.method == "data parallelism":
            return data_parallel_text()
        if self.method == "DiLoCo":
            return changed(DILOCO, outer={"momentum": momentum, "num_levels": levels})
        streamed = streaming_diloco_text()
        most = self.local_steps // streamed.streaming.fragments - 1
        delay = max(min(streamed.streaming.delay, most), 0)
        return changed(streamed, streaming={"momentum": momentum, "delay": delay})

    def experiment(self, num_tokens: int) -> TextExperiment:
        """Make the experiment, without the common start."""
        base, rows = self._base(), self.rows
        if rows < 1 or rows % self.islands:
            raise ValueError(
                f"{self.islands} islands do not divide the global batch of {rows} rows. Choose a "
                f"multiple of {self.islands}."
            )
        rounds = num_tokens // (self.local_steps * rows * base.data.seq_len)
        if not rounds:
            raise ValueError(
                f"{num_tokens:,} tokens fill no round of {self.local_steps} steps of {rows} rows "
                f"of {base.data.seq_len} tokens. Pass more --tokens."
            )
        # All devices of the demo: an island has several where there are few islands.
        on_axis = min(self.islands, base.islands)
        made: TextExperiment = changed(
            base,
            islands=self.islands,
            mesh=MeshConfig(islands=on_axis, fsdp=base.islands // on_axis),
            data={
                "local_steps": self.local_steps,
                "batch_size": rows // self.islands,
                "seed": self.seed,
            },
            optimizer={"learning_rate": self.learning_rate, "weight_decay": self.weight_decay},
            training={
                "rounds": rounds,
                "evaluate_every": 0,
                "checkpoint_every": 0,
                "seed": self.seed,
            },
        )
        return made


class Result(NamedTuple):
    """A finished run."""

    setting: Setting
    loss: float
    bytes_sent: float


def measure(setting: Setting, num_tokens: int, out: Path) -> Result:
    """Train a run, or read it if it is finished."""
    out = out / f"{num_tokens}"
    experiment, sent = setting.experiment(num_tokens), 0.0
    if setting.common_start:
        start = common_start(setting, num_tokens)
        folder = out / f"start-{_start_of(setting).folder}"  # one for all methods
        sent = _train(start, folder).bytes_across_placement
        rest = experiment.training.rounds - start.training.rounds
        # Not the rows of the common start again.
        seed = experiment.data.seed + OTHER_SEED
        training = {"rounds": rest, "begin_from": str(folder)}
        experiment = changed(experiment, training=training, data={"seed": seed})
    run = _train(experiment, out / setting.folder)
    return Result(setting, run.loss, sent + run.bytes_across_placement)


def common_start(setting: Setting, num_tokens: int) -> TextExperiment:
    """Make the experiment that trains all islands together before a run."""
    whole = _start_of(setting).experiment(num_tokens)
    rounds = round(setting.common_start * whole.training.rounds)
    if not 0 < rounds < whole.training.rounds:
        raise ValueError(
            f"a common start of {setting.common_start} takes {rounds} of {whole.training.rounds} "
            "rounds, expected some of them and not all. Pass a fraction between 0 and 1, or more "
            "--tokens."
        )
    schedule = {"schedule": "constant"}
    start: TextExperiment = changed(whole, training={"rounds": rounds}, optimizer=schedule)
    return start


def _start_of(setting: Setting) -> Setting:
    """Return the setting of a run's common start, equal for all methods."""
    momentum = Setting._field_defaults["outer_momentum"]
    return setting._replace(method="data parallelism", bits="float32", outer_momentum=momentum)


def _train(experiment: TextExperiment, folder: Path) -> RunSummary:
    stopped = train(experiment, folder).signal
    if stopped is not None:
        print_error(f"{stopped.name}: saved. Run the same command again to continue.")
        raise SystemExit(128 + stopped)
    return summarize_run(folder.name, folder)
