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
from typing import Any

import jax
from matplotlib.figure import Figure

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.diloco_runs import (
    BITS,
    DILOCO,
    Result,
    Setting,
    common_start,
    measure,
)
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.parallel import simulate_devices
from fedpax.reports.table import format_bytes, markdown_table

TUNED = ["method", "local_steps", "learning_rate", "weight_decay", "outer_momentum"]
"""The columns of the table of settings that were tried."""

COLUMNS = {"methods": ["method", "local_steps", "bits", *TUNED[2:]], "local_steps": TUNED[1:]}
TABLES = ("methods", "local_steps", "islands", "bits")


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
        if not setting.has_outer_optimizer and "outer_momentum" in cells:
            cells["outer_momentum"] = ""
        mean = fmean(losses)
        figures = f"{mean:.4f}{spread}", f"{mean / baseline - 1:+.2%}"
        rows.append([*cells.values(), *figures, format_bytes(runs[0].bytes_sent)])
    head = [*(name.replace("_", " ") for name in changed), "loss", "over DP", "sent"]
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
    seeds: int = option(3, "seeds of the first table")
    learning_rates: list[float] = _tried(DILOCO.optimizer.learning_rate, "peak learning rates")
    weight_decays: list[float] = _tried(DILOCO.optimizer.weight_decay, "weight decays")
    outer_momenta: list[float] = _tried(DILOCO.outer.momentum, "momenta of the outer optimizer")
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
        start = self.common_start
        return {
            name: [
                run._replace(common_start=start * run.has_outer_optimizer) for run in groups[name]
            ]
            for name in dict.fromkeys(["methods", *self.tables])
        }

    def planned(self) -> list[Setting]:
        """Return the runs of all tables."""
        return [setting for group in self.runs().values() for setting in group]

    def tuning(self) -> list[Setting]:
        """Return the runs from which the best rates, decays and momenta follow."""
        untuned = {_tuned_with(setting): setting for setting in reversed(self.planned())}
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
        best = {_tuned_with(setting): setting for setting in tuning}
        if len(tuning) > len(best):
            tried = [measure(setting, self.tokens, self.out) for setting in tuning]
            best = {tuned: result.setting for tuned, result in best_results(tried).items()}
            baseline = min(run.loss for run in tried if not run.setting.has_outer_optimizer)
            print(f"\n{table(tried, TUNED, baseline)}")
        for name, group in self.runs().items():
            results = []
            for setting in group:
                winner = best[_tuned_with(setting)]
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
