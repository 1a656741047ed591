"""DiLoCo's loss over local steps, islands, bits and seeds, at equal tokens on the embedded text.

    python -m fedpax.experiments.benchmarks.diloco_laws --out=runs/laws --plot=diloco_laws.png

Every run trains the model of `diloco_text` on the same number of tokens with the same global batch,
by default the batch of `diloco_text`: with more islands, each has a smaller batch. The first table
compares data parallelism, DiLoCo and Streaming DiLoCo in 4 bits over several seeds of model and
data. The others change one setting of DiLoCo at a time, with the first seed.

`--learning_rates=0.008,0.016,0.024` tunes all methods alike: each trains with every rate and the
first seed, and with its best one in all other runs. `--weight_decays=0.01,0.1` tries each rate with
each weight decay, and `--outer_momenta=0.0,0.7` with each momentum of the outer optimizer, which
data parallelism does not have. DiLoCo is tuned for each number of local steps, because fewer of
them need a smaller momentum.

`--common_start=0.25` trains all islands together by data parallelism for a quarter of the tokens,
at a constant learning rate, and begins DiLoCo from this model. The other three quarters have a
warmup and a decay of their own.

Each run has a folder below `--out`. An interrupted benchmark continues where it stopped, and
a finished run is not repeated. The losses come from the last evaluation.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
from matplotlib.figure import Figure

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.diloco_runs import (
    BITS,
    Result,
    Setting,
    common_start,
    measure,
)
from fedpax.experiments.benchmarks.harness import Benchmark, Row, option
from fedpax.experiments.diloco_text import diloco_text
from fedpax.parallel import simulate_devices
from fedpax.reports.table import format_bytes, markdown_table

TUNED = ["method", "local_steps", "learning_rate", "weight_decay", "outer_momentum"]
"""The columns of the table of settings that were tried."""

TABLES = ("methods", "local_steps", "islands", "bits")
DILOCO = diloco_text()


def settings(
    num_seeds: int,
    rows: int | None = None,
    local_steps: int | None = None,
    bits: str = "4 bits",
) -> dict[str, list[Setting]]:
    """Return the runs of each table by the table's name."""
    diloco = DILOCO
    islands = diloco.islands
    if local_steps is None:
        local_steps = diloco.data.local_steps
    if rows is None:
        rows = islands * diloco.data.batch_size
    base = Setting("DiLoCo", local_steps, islands, bits, rows)
    seeds = range(num_seeds)
    return {
        "methods": [
            Setting(method, local_steps, islands, sent, rows, seed)
            for method, sent in (
                ("data parallelism", "float32"),
                ("DiLoCo", bits),
                ("Streaming DiLoCo", "4 bits"),
            )
            for seed in seeds
        ],
        "local_steps": [base._replace(local_steps=steps) for steps in (1, 6, 18, 54, 162)],
        "islands": [base._replace(islands=count) for count in (1, 2, islands, 8)],
        "bits": [base._replace(bits=sent) for sent in BITS],
    }


def _tuned_with(setting: Setting) -> tuple[str, int]:
    """Return what the runs that share their tuned settings have in common."""
    return setting.method, setting.local_steps


def best_results(results: Sequence[Result]) -> dict[tuple[str, int], Result]:
    """Return the result with the lowest loss for each method and number of local steps."""
    by_loss = sorted(results, key=lambda result: result.loss, reverse=True)
    return {_tuned_with(result.setting): result for result in by_loss}


def table(results: Sequence[Result], changed: Sequence[str], baseline: float) -> str:
    """Format runs as a Markdown table, and average those that differ by their seeds alone."""
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
    """Draw the loss over local steps, islands and bits."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options."""

    out: Path = option(None, "folder of the runs", Path, required=True)
    tokens: int = option(5_000_000, "tokens of a run")
    rows: int | None = option(None, "global batch; default: diloco_text's", int)
    local_steps: int | None = option(
        None,
        "inner steps between two averages, but in the table of them; default: diloco_text's",
        int,
    )
    bits: str = option(
        "4 bits", "format of DiLoCo's outer gradients, but in the table of formats", choices=BITS
    )
    seeds: int = option(3, "seeds of the first table")
    learning_rates: list[float] = option(
        str(DILOCO.optimizer.learning_rate), "peak learning rates to choose from", harness.numbers
    )
    weight_decays: list[float] = option(
        str(DILOCO.optimizer.weight_decay), "weight decays to choose from", harness.numbers
    )
    outer_momenta: list[float] = option(
        str(DILOCO.outer.momentum), "momenta of the outer optimizer to choose from", harness.numbers
    )
    common_start: float = option(
        0.0, "fraction of the tokens that data parallelism trains before DiLoCo"
    )
    tables: list[str] = option(",".join(TABLES), "tables to make", harness.names)

    def __post_init__(self) -> None:
        harness.check_at_least(1, seeds=self.seeds)
        harness.check_names("tables", self.tables, TABLES)
        for setting in (*self.tuning(), *self.planned()):
            setting.experiment(self.tokens)
            if setting.common_start:
                common_start(setting, self.tokens)

    def runs(self) -> dict[str, list[Setting]]:
        """Return the runs of each table; the table of methods holds the baseline."""
        groups = settings(self.seeds, self.rows, self.local_steps, self.bits)
        return {
            name: [
                setting._replace(common_start=self.common_start * setting.has_outer_optimizer)
                for setting in groups[name]
            ]
            for name in dict.fromkeys(["methods", *self.tables])
        }

    def planned(self) -> list[Setting]:
        """Return the runs of all tables."""
        return [setting for group in self.runs().values() for setting in group]

    def tuning(self) -> list[Setting]:
        """Return the runs from which the best rates, decays and momenta follow."""
        untuned = {_tuned_with(setting): setting for setting in reversed(self.planned())}
        return [
            setting._replace(learning_rate=rate, weight_decay=decay, outer_momentum=momentum)
            for setting in reversed(untuned.values())
            for rate in self.learning_rates
            for decay in self.weight_decays
            for momentum in (
                self.outer_momenta if setting.has_outer_optimizer else [setting.outer_momentum]
            )
        ]


def measure_all(options: Settings) -> Iterator[Row]:
    """Train the runs, and print a table of each kind."""
    simulate_devices(DILOCO.islands)
    jax.config.update("jax_platforms", "cpu")
    tuning = options.tuning()
    best = {_tuned_with(setting): setting for setting in tuning}
    if len(tuning) > len(best):
        tried = [measure(setting, options.tokens, options.out) for setting in tuning]
        best = {tuned: result.setting for tuned, result in best_results(tried).items()}
        baseline = min(run.loss for run in tried if not run.setting.has_outer_optimizer)
        print(f"\n{table(tried, TUNED, baseline)}")

    def tuned(setting: Setting) -> Setting:
        winner = best[_tuned_with(setting)]
        return setting._replace(**{name: getattr(winner, name) for name in TUNED[2:]})

    columns = {"methods": ["method", "local_steps", "bits", *TUNED[2:]], "local_steps": TUNED[1:]}
    for name, group in options.runs().items():
        results = [measure(tuned(setting), options.tokens, options.out) for setting in group]
        if name == "methods":
            baseline = fmean(
                run.loss for run in results if run.setting.method == "data parallelism"
            )
        print(f"\n{table(results, columns.get(name, [name]), baseline)}", flush=True)
        for run in results:
            yield Row(
                table=name,
                **run.setting._asdict(),
                loss=run.loss,
                bytes_sent=run.bytes_sent,
                baseline=baseline,
                _result=run,
            )


def draw_rows(options: Settings, rows: Sequence[Any]) -> Figure:
    """Draw the last three tables."""
    groups: dict[str, list[Result]] = {}
    for row in rows:
        groups.setdefault(row.table, []).append(row._result)
    return draw(groups, rows[0].baseline)


main = Benchmark(__doc__, Settings, measure_all, draw=draw_rows)


if __name__ == "__main__":
    raise SystemExit(main())
