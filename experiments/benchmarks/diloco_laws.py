"""DiLoCo's loss over local steps, islands, bits and seeds, at equal tokens on the embedded text.

    python -m fedpax.experiments.benchmarks.diloco_laws --out=runs/laws --plot=diloco_laws.png

Every run trains the model of `diloco_text` on the same number of tokens with the same global batch:
with more islands, each has a smaller batch. The first table compares data parallelism, DiLoCo and
Streaming DiLoCo in 4 bits over several seeds. The others change one setting of DiLoCo at a time.

With several `--learning_rates`, `--weight_decays` or `--outer_momenta`, each method trains with
every combination and the first seed, and with its best one in all other runs. DiLoCo is tuned for
each number of local steps, because fewer of them need a smaller momentum. `--common_start=0.25`
trains all islands together for a quarter of the tokens, at a constant learning rate, and begins
DiLoCo from this model. An interrupted benchmark continues where it stopped.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jax
from matplotlib.figure import Figure

from fedpax.console import print_error
from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.experiments.benchmarks.workloads import changed
from fedpax.experiments.diloco_text import data_parallel_text, diloco_text
from fedpax.experiments.streaming_diloco_text import streaming_diloco_text
from fedpax.experiments.text_experiment import TextExperiment
from fedpax.parallel import simulate_devices
from fedpax.parallel.mesh import MeshConfig
from fedpax.reports.comparison import RunSummary, summarize_run
from fedpax.reports.metric_table import format_bytes, markdown_table
from fedpax.training.trainer import train

DILOCO = diloco_text()
BITS: dict[str, int | None] = {"float32": None, "4 bits": 16, "2 bits": 4, "1 bit": 2}
"""Formats of an outer gradient, as `outer.num_levels` of `diloco_text`."""

OTHER_SEED = 1000
"""Added to the seed of the data after a common start."""

TABLES = ("methods", "local_steps", "islands", "bits")
TUNED = ["method", "local_steps", "learning_rate", "weight_decay", "outer_momentum"]
"""The columns of the table of settings that were tried."""

COLUMNS = {"methods": ["method", "local_steps", "bits", *TUNED[2:]], "local_steps": TUNED[1:]}


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
        """Return whether the method has an outer optimizer."""
        return self.method != "data parallelism"

    @property
    def tuned(self) -> tuple[str, int]:
        """Return the settings that runs with the same tuned values share."""
        return self.method, self.local_steps

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
        sizes = {"local_steps": self.local_steps, "batch_size": rows // self.islands}
        made: TextExperiment = changed(
            base,
            islands=self.islands,
            mesh=MeshConfig(islands=on_axis, fsdp=base.islands // on_axis),
            data={**sizes, "seed": self.seed},
            optimizer={"learning_rate": self.learning_rate, "weight_decay": self.weight_decay},
            training={"rounds": rounds, "seed": self.seed}
            | dict.fromkeys(("evaluate_every", "checkpoint_every"), 0),
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


def settings(
    num_seeds: int, rows: int | None = None, local_steps: int | None = None, bits: str = "4 bits"
) -> dict[str, list[Setting]]:
    """Return the runs of each table by the table's name."""
    islands = DILOCO.islands
    rows = islands * DILOCO.data.batch_size if rows is None else rows
    steps = DILOCO.data.local_steps if local_steps is None else local_steps
    base = Setting("DiLoCo", steps, islands, bits, rows)
    sent = {"data parallelism": "float32", "DiLoCo": bits, "Streaming DiLoCo": "4 bits"}
    return {
        "methods": [
            base._replace(method=method, bits=sent[method], seed=seed)
            for method, seed in itertools.product(sent, range(num_seeds))
        ],
        "local_steps": [base._replace(local_steps=steps) for steps in (1, 6, 18, 54, 162)],
        "islands": [base._replace(islands=count) for count in (1, 2, islands, 8)],
        "bits": [base._replace(bits=sent) for sent in BITS],
    }


def best_results(results: Sequence[Result]) -> dict[tuple[str, int], Result]:
    """Return the result with the lowest loss for each method and number of local steps."""
    by_loss = sorted(results, key=lambda result: result.loss, reverse=True)
    return {result.setting.tuned: result for result in by_loss}


def table(results: Sequence[Result], columns: Sequence[str], baseline: float) -> str:
    """Format runs as a Markdown table, and average those that differ by their seeds alone."""
    groups: dict[Setting, list[Result]] = {}
    for result in results:
        groups.setdefault(result.setting._replace(seed=0), []).append(result)
    rows = []
    for setting, runs in groups.items():
        losses = [run.loss for run in runs]
        spread = f" ± {(max(losses) - min(losses)) / 2:.4f}" if len(losses) > 1 else ""
        cells = {name: str(getattr(setting, name)) for name in columns}
        if not setting.has_outer_optimizer and "outer_momentum" in cells:
            cells["outer_momentum"] = ""
        mean = fmean(losses)
        figures = f"{mean:.4f}{spread}", f"{mean / baseline - 1:+.2%}"
        rows.append([*cells.values(), *figures, format_bytes(runs[0].bytes_sent)])
    head = [*(name.replace("_", " ") for name in columns), "loss", "over DP", "sent"]
    return markdown_table(head, rows)


def draw(results: dict[str, list[Result]], baseline: float) -> Figure:
    """Draw the loss over local steps, islands and bits."""
    labels = [{"xlabel": name.replace("_", " ")} for name in TABLES[1:]]
    panels = harness.panels(*labels, size=(10, 3.4), sharey=True)
    for axes, name in zip(panels, TABLES[1:], strict=True):
        runs = results.get(name, [])
        places = [getattr(run.setting, name) for run in runs]
        axes.plot(places, [run.loss for run in runs], marker="o", label="DiLoCo")
        axes.axhline(baseline, color="gray", linestyle="--", label="data parallelism")
        if name != "bits":
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [str(place) for place in places])
            axes.minorticks_off()
    panels[0].set_ylabel("held-out loss, nats per byte")
    return harness.figure_of(panels)


def _tried(default: float, name: str) -> list[float]:
    parsed: list[float] = option(str(default), f"{name} to choose from", harness.numbers)
    return parsed


class DiLoCoLaws(Benchmark):
    out: Path = option(None, "folder of the runs", Path, required=True)
    tokens: int = option(5_000_000, "tokens of a run")
    rows: int | None = option(None, "global batch; default: diloco_text's", int)
    local_steps: int | None = option(
        None, "inner steps between two averages, but in their table; default: diloco_text's", int
    )
    bits: str = option(
        "4 bits", "format of DiLoCo's outer gradients, but in their table", choices=BITS
    )
    seeds: int = option(3, "seeds of the first table", least=1)
    learning_rates: list[float] = _tried(DILOCO.optimizer.learning_rate, "peak learning rates")
    weight_decays: list[float] = _tried(DILOCO.optimizer.weight_decay, "weight decays")
    outer_momenta: list[float] = _tried(DILOCO.outer.momentum, "momenta of the outer optimizer")
    common_start: float = option(
        0.0, "fraction of the tokens that data parallelism trains before DiLoCo"
    )
    tables: list[str] = option(
        ",".join(TABLES), "tables to make", harness.names, known=lambda _: TABLES
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting in (*self.tuning(), *itertools.chain(*self.runs().values())):
            setting.experiment(self.tokens)
            if setting.common_start:
                common_start(setting, self.tokens)

    def runs(self) -> dict[str, list[Setting]]:
        """Return the runs of each table; the table of methods holds the baseline."""
        groups = settings(self.seeds, self.rows, self.local_steps, self.bits)
        start = self.common_start
        return {
            name: [
                run._replace(common_start=start * run.has_outer_optimizer) for run in groups[name]
            ]
            for name in dict.fromkeys(["methods", *self.tables])
        }

    def tuning(self) -> list[Setting]:
        """Return the runs from which the best rates, decays and momenta follow."""
        untuned = {
            setting.tuned: setting for setting in [*itertools.chain(*self.runs().values())][::-1]
        }
        tried: list[Setting] = []
        for run in reversed(untuned.values()):
            momenta = self.outer_momenta if run.has_outer_optimizer else [run.outer_momentum]
            for values in itertools.product(self.learning_rates, self.weight_decays, momenta):
                names: Any = dict(zip(TUNED[2:], values, strict=True))
                tried.append(run._replace(**names))
        return tried

    def measure(self) -> Iterator[Row]:
        """Train the runs, and print a table of each kind."""
        simulate_devices(DILOCO.islands)
        jax.config.update("jax_platforms", "cpu")
        tuning = self.tuning()
        best = {setting.tuned: setting for setting in tuning}
        if len(tuning) > len(best):
            tried = [measure(setting, self.tokens, self.out) for setting in tuning]
            best = {tuned: result.setting for tuned, result in best_results(tried).items()}
            baseline = min(run.loss for run in tried if not run.setting.has_outer_optimizer)
            print(f"\n{table(tried, TUNED, baseline)}")
        for name, group in self.runs().items():
            results = []
            for setting in group:
                winner = best[setting.tuned]
                tuned = setting._replace(**{name: getattr(winner, name) for name in TUNED[2:]})
                results.append(measure(tuned, self.tokens, self.out))
            if name == "methods":
                parallel = [run for run in results if run.setting.method == "data parallelism"]
                baseline = fmean(run.loss for run in parallel)
            print(f"\n{table(results, COLUMNS.get(name, [name]), baseline)}", flush=True)
            for run in results:
                figures = {"loss": run.loss, "bytes_sent": run.bytes_sent, "baseline": baseline}
                yield Row(table=name, **run.setting._asdict(), **figures, _result=run)

    def draw(self, rows: list[Row]) -> Figure:
        groups: dict[str, list[Result]] = {}
        for row in rows:
            groups.setdefault(row.table, []).append(row._result)
        return draw(groups, rows[0].baseline)


main = command(DiLoCoLaws)
