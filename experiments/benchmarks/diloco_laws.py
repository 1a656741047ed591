"""DiLoCo's loss over local steps, islands, bits and seeds, at equal tokens on the embedded text.

    python -m fedpax.experiments.benchmarks.diloco_laws --out=runs/laws --plot=diloco_laws.png

Every run trains the model of `diloco_text` on the same number of tokens with the same global batch,
by default that of `diloco_text`: with more islands, each has a smaller batch. The first table
compares data parallelism, DiLoCo and Streaming DiLoCo in 4 bits over several seeds of model and
data. The others change one setting of DiLoCo at a time, with the first seed.

`--learning_rates=0.008,0.016,0.024` tunes all methods alike: each trains with every rate and the
first seed, and with its best one in all other runs. `--outer_momenta=0.5,0.7` tries each rate with
each of these momenta of the outer optimizer, which data parallelism does not have.

`--common_start=0.25` trains all islands together by data parallelism for a quarter of the tokens,
at a constant learning rate, and begins DiLoCo from this model. The other three quarters have a
warmup and a decay of their own.

Each run has a folder below `--out`. An interrupted benchmark continues where it stopped, and
a finished run is not repeated. The losses are those of the last evaluation.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import jax
from matplotlib.figure import Figure

from fedpax.experiments.diloco_text import data_parallel_text, diloco_text
from fedpax.experiments.streaming_diloco_text import streaming_diloco_text
from fedpax.experiments.text import TextExperiment
from fedpax.parallel import simulate_devices
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.compare import RunSummary, summarize_run
from fedpax.training.console import print_error
from fedpax.training.table import format_bytes, markdown_table
from fedpax.training.trainer import train

BITS: dict[str, int | None] = {"float32": None, "4 bits": 16, "2 bits": 4, "1 bit": 2}
"""Formats of an outer gradient, as `outer.num_levels` of `diloco_text`."""

OTHER_SEED = 1000
"""Added to the seed of the data after a common start."""

TUNED = ["method", "learning_rate", "outer_momentum"]
"""The columns of the table of settings that were tried."""


class Setting(NamedTuple):
    """A run.

    Attributes:
        method: "data parallelism", "DiLoCo" or "Streaming DiLoCo".
        local_steps: inner steps between two averages of a parameter, H.
        islands: number of islands.
        bits: a key of `BITS`.
        rows: global batch: rows of a step over all islands.
        seed: seed of the initial parameters and of the order of the data.
        learning_rate: peak learning rate of the inner optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer; without effect in data
            parallelism.
        common_start: fraction of the tokens that data parallelism trains before.
    """

    method: str
    local_steps: int
    islands: int
    bits: str
    rows: int
    seed: int = 0
    learning_rate: float = diloco_text().optimizer.learning_rate
    outer_momentum: float = diloco_text().outer.momentum
    common_start: float = 0.0

    @property
    def has_outer_optimizer(self) -> bool:
        """Tell whether the method has an outer optimizer."""
        return self.method != "data parallelism"

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return "-".join(str(value).replace(" ", "_") for value in self)

    def experiment(self, num_tokens: int) -> TextExperiment:
        """Make the experiment, without the common start.

        Args:
            num_tokens: tokens of the run; it trains the whole rounds that they fill.

        Raises:
            ValueError: the tokens fill no round, the islands do not divide the global batch, or a
                number is out of range.
        """
        base: TextExperiment
        if self.method == "data parallelism":
            base = data_parallel_text()
        elif self.method == "Streaming DiLoCo":
            streamed = streaming_diloco_text()
            streaming = dataclasses.replace(streamed.streaming, momentum=self.outer_momentum)
            base = dataclasses.replace(streamed, streaming=streaming)
        else:
            diloco = diloco_text()
            outer = dataclasses.replace(
                diloco.outer, momentum=self.outer_momentum, num_levels=BITS[self.bits]
            )
            base = dataclasses.replace(diloco, outer=outer)
        rows = self.rows
        if rows < 1 or rows % self.islands:
            raise ValueError(
                f"{self.islands} islands do not divide the global batch of {rows} rows. Choose a "
                f"multiple of {self.islands}."
            )
        # All devices of the demo: an island has several where there are few islands.
        on_axis = min(self.islands, base.islands)
        rounds = num_tokens // (self.local_steps * rows * base.data.seq_len)
        if not rounds:
            raise ValueError(
                f"{num_tokens:,} tokens fill no round of {self.local_steps} steps of {rows} rows "
                f"of {base.data.seq_len} tokens. Pass more --tokens."
            )
        return dataclasses.replace(
            base,
            islands=self.islands,
            mesh=MeshConfig(islands=on_axis, fsdp=base.islands // on_axis),
            data=dataclasses.replace(
                base.data,
                local_steps=self.local_steps,
                batch_size=rows // self.islands,
                seed=self.seed,
            ),
            optimizer=dataclasses.replace(base.optimizer, learning_rate=self.learning_rate),
            training=dataclasses.replace(
                base.training,
                rounds=rounds,
                evaluate_every=0,
                checkpoint_every=0,
                seed=self.seed,
            ),
        )


class Result(NamedTuple):
    """A finished run.

    Attributes:
        setting: its setting.
        loss: held-out loss at the end, in nats per byte.
        bytes_sent: bytes that islands exchanged in the run.
    """

    setting: Setting
    loss: float
    bytes_sent: float


def settings(num_seeds: int, rows: int | None = None) -> dict[str, list[Setting]]:
    """Return the runs of each table by the table's name.

    Args:
        num_seeds: number of seeds of the first table.
        rows: global batch. Default None: that of `diloco_text`.
    """
    streaming, diloco = streaming_diloco_text(), diloco_text()
    local_steps, islands = diloco.data.local_steps, diloco.islands
    if rows is None:
        rows = islands * diloco.data.batch_size
    base = Setting("DiLoCo", local_steps, islands, "4 bits", rows)
    seeds = range(num_seeds)
    return {
        "methods": [
            Setting(method, steps, islands, bits, rows, seed)
            for method, steps, bits in (
                ("data parallelism", local_steps, "float32"),
                ("DiLoCo", local_steps, "4 bits"),
                ("Streaming DiLoCo", streaming.data.local_steps, "4 bits"),
            )
            for seed in seeds
        ],
        "local_steps": [base._replace(local_steps=steps) for steps in (1, 6, local_steps, 54, 162)],
        "islands": [base._replace(islands=count) for count in (1, 2, islands, 8)],
        "bits": [base._replace(bits=bits) for bits in BITS],
    }


def measure(setting: Setting, num_tokens: int, out: Path) -> Result:
    """Train a run, or read it if it is finished.

    Args:
        setting: the run.
        num_tokens: tokens of the run.
        out: the folder of all runs.

    Raises:
        SystemExit: SIGTERM or Ctrl-C stopped the run, which is saved; the status is 128 + signal.
    """
    out = out / f"{num_tokens}"
    experiment, sent = setting.experiment(num_tokens), 0.0
    if setting.common_start:
        start = common_start(setting, num_tokens)
        # One for all methods.
        folder = out / f"start-{_start_of(setting).folder}"
        sent = _train(start, folder).bytes_across_placement
        experiment = dataclasses.replace(
            experiment,
            training=dataclasses.replace(
                experiment.training,
                rounds=experiment.training.rounds - start.training.rounds,
                begin_from=str(folder),
            ),
            # Not the rows of the common start again.
            data=dataclasses.replace(experiment.data, seed=experiment.data.seed + OTHER_SEED),
        )
    run = _train(experiment, out / setting.folder)
    return Result(setting, run.loss, sent + run.bytes_across_placement)


def common_start(setting: Setting, num_tokens: int) -> TextExperiment:
    """Make the experiment that trains all islands together before a run.

    Args:
        setting: the run.
        num_tokens: tokens of the run and its common start.

    Raises:
        ValueError: the common start takes no round of the run, or all of them.
    """
    whole = _start_of(setting).experiment(num_tokens)
    rounds = round(setting.common_start * whole.training.rounds)
    if not 0 < rounds < whole.training.rounds:
        raise ValueError(
            f"a common start of {setting.common_start} takes {rounds} of {whole.training.rounds} "
            "rounds, expected some of them and not all. Pass a fraction between 0 and 1, or more "
            "--tokens."
        )
    return dataclasses.replace(
        whole,
        training=dataclasses.replace(whole.training, rounds=rounds),
        optimizer=dataclasses.replace(whole.optimizer, schedule="constant"),
    )


def _start_of(setting: Setting) -> Setting:
    """Return the setting of a run's common start, equal for all methods."""
    return Setting(
        "data parallelism",
        setting.local_steps,
        setting.islands,
        "float32",
        setting.rows,
        setting.seed,
        setting.learning_rate,
        common_start=setting.common_start,
    )


def _train(experiment: TextExperiment, folder: Path) -> RunSummary:
    stopped = train(experiment, folder).signal
    if stopped is not None:
        print_error(f"{stopped.name}: saved. Run the same command again to continue.")
        raise SystemExit(128 + stopped)
    return summarize_run(folder.name, folder)


def best_results(results: Sequence[Result]) -> dict[str, Result]:
    """Return each method's result with the lowest loss, by the method's name."""
    by_loss = sorted(results, key=lambda result: result.loss, reverse=True)
    return {result.setting.method: result for result in by_loss}


def table(results: Sequence[Result], changed: Sequence[str], baseline: float) -> str:
    """Format runs as a Markdown table, and average those that differ by their seeds alone.

    Args:
        results: the runs.
        changed: the fields of `Setting` that are columns.
        baseline: the mean loss of data parallelism.
    """
    groups: dict[Setting, list[Result]] = {}
    for result in results:
        groups.setdefault(result.setting._replace(seed=0), []).append(result)
    rows = []
    for setting, runs in groups.items():
        losses = [run.loss for run in runs]
        spread = f" ± {(max(losses) - min(losses)) / 2:.4f}" if len(losses) > 1 else ""
        cells = {name: str(getattr(setting, name)) for name in changed}
        if not setting.has_outer_optimizer:
            cells.pop("outer_momentum", None)
        rows.append(
            [
                *(cells.get(name, "") for name in changed),
                f"{fmean(losses):.4f}{spread}",
                f"{fmean(losses) / baseline - 1:+.2%}",
                format_bytes(runs[0].bytes_sent),
            ]
        )
    head = [*(name.replace("_", " ") for name in changed), "loss", "over DP", "sent"]
    return markdown_table(head, rows)


def draw(results: dict[str, list[Result]], baseline: float) -> Figure:
    """Draw the loss over local steps, islands and bits.

    Args:
        results: the runs of each table.
        baseline: the mean loss of data parallelism, a dashed line.
    """
    figure = Figure(figsize=(10, 3.4), layout="constrained", dpi=110)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, name in zip(panels, ("local_steps", "islands", "bits"), strict=True):
        runs = results.get(name, [])
        places = [getattr(run.setting, name) for run in runs]
        axes.plot(places, [run.loss for run in runs], marker="o", label="DiLoCo")
        axes.axhline(baseline, color="gray", linestyle="--", label="data parallelism")
        if name != "bits":
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [str(place) for place in places])
            axes.minorticks_off()
        axes.set_xlabel(name.replace("_", " "))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss, nats per byte")
    panels[0].legend(frameon=False, fontsize="small")
    return figure


def main() -> None:
    """Train the runs, and print a table of each kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = list(settings(1))
    parser.add_argument("--out", required=True, help="folder of the runs")
    parser.add_argument("--tokens", type=int, default=5_000_000, help="tokens of a run")
    parser.add_argument("--rows", type=int, help="global batch; default that of diloco_text")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the first table")
    parser.add_argument(
        "--learning_rates",
        default=str(diloco_text().optimizer.learning_rate),
        help="peak learning rates to choose from; default that of diloco_text",
    )
    parser.add_argument(
        "--outer_momenta",
        default=str(diloco_text().outer.momentum),
        help="momenta of the outer optimizer to choose from; default that of diloco_text",
    )
    parser.add_argument(
        "--common_start",
        type=float,
        default=0.0,
        help="fraction of the tokens that data parallelism trains before DiLoCo; default 0",
    )
    parser.add_argument("--tables", default=",".join(tables), help=", ".join(tables))
    parser.add_argument("--plot", help="PNG of the last three tables")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}, expected at least 1")
    chosen = options.tables.split(",")
    if unknown := set(chosen) - set(tables):
        parser.error(f"unknown tables {sorted(unknown)}; choose from {', '.join(tables)}")
    if "methods" not in chosen:
        chosen = ["methods", *chosen]  # holds the baseline
    simulate_devices(diloco_text().mesh.islands)
    jax.config.update("jax_platforms", "cpu")

    todo = {
        name: [
            setting._replace(common_start=options.common_start)
            if setting.has_outer_optimizer
            else setting
            for setting in group
        ]
        for name, group in settings(options.seeds, options.rows).items()
    }
    rates = [float(rate) for rate in options.learning_rates.split(",")]
    momenta = [float(momentum) for momentum in options.outer_momenta.split(",")]
    tuning = [
        setting._replace(learning_rate=rate, outer_momentum=momentum)
        for setting in todo["methods"]
        if setting.seed == 0
        for rate in rates
        for momentum in (momenta if setting.has_outer_optimizer else [setting.outer_momentum])
    ]
    try:
        for setting in (*tuning, *(setting for name in chosen for setting in todo[name])):
            setting.experiment(options.tokens)
            if setting.common_start:
                common_start(setting, options.tokens)
    except ValueError as error:
        parser.error(str(error))
    out = Path(options.out)
    best = {setting.method: setting for setting in tuning}
    if len(tuning) > len(best):
        tried = [measure(setting, options.tokens, out) for setting in tuning]
        lowest = best_results(tried)
        best = {method: result.setting for method, result in lowest.items()}
        print(f"\n{table(tried, TUNED, lowest['data parallelism'].loss)}")

    def tuned(setting: Setting) -> Setting:
        found = best[setting.method]
        return setting._replace(
            learning_rate=found.learning_rate, outer_momentum=found.outer_momentum
        )

    results: dict[str, list[Result]] = {}
    columns = {"methods": ["method", "local_steps", "bits", *TUNED[1:]]}
    baseline = float("nan")
    for name in chosen:
        results[name] = [measure(tuned(setting), options.tokens, out) for setting in todo[name]]
        if name == "methods":
            baseline = fmean(
                run.loss for run in results[name] if run.setting.method == "data parallelism"
            )
        print(f"\n{table(results[name], columns.get(name, [name]), baseline)}", flush=True)
    if options.plot:
        draw(results, baseline).savefig(options.plot)


if __name__ == "__main__":
    main()
