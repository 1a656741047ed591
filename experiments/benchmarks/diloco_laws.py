"""DiLoCo's loss over local steps, islands, bits and seeds, at equal tokens on the embedded text.

    python -m fedpax.experiments.benchmarks.diloco_laws --out=runs/laws --plot=diloco_laws.png

Every run trains the model of `diloco_text` on the same number of tokens with the same global batch,
by default that of `diloco_text`: with more islands, each has a smaller batch. The first table
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
a finished run is not repeated. The losses are those of the last evaluation.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import jax
from matplotlib.figure import Figure

from fedpax.experiments.benchmarks.arguments import numbers
from fedpax.experiments.benchmarks.diloco_runs import (
    BITS,
    Result,
    Setting,
    common_start,
    measure,
)
from fedpax.experiments.diloco_text import diloco_text
from fedpax.parallel import simulate_devices
from fedpax.reports.table import format_bytes, markdown_table

TUNED = ["method", "local_steps", "learning_rate", "weight_decay", "outer_momentum"]
"""The columns of the table of settings that were tried."""


def settings(
    num_seeds: int,
    rows: int | None = None,
    local_steps: int | None = None,
    bits: str = "4 bits",
) -> dict[str, list[Setting]]:
    """Return the runs of each table by the table's name.

    Args:
        num_seeds: number of seeds of the first table.
        rows: global batch. Default None: that of `diloco_text`.
        local_steps: inner steps between two averages, but in the table that changes them. Default
            None: those of `diloco_text`.
        bits: a key of `BITS`, the format of DiLoCo's outer gradients but in the table of formats.
    """
    diloco = diloco_text()
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
    parser.add_argument(
        "--local_steps",
        type=int,
        help="inner steps between two averages, but in the table of them; default that of "
        "diloco_text",
    )
    parser.add_argument(
        "--bits",
        choices=BITS,
        default="4 bits",
        help="format of DiLoCo's outer gradients, but in the table of formats; default 4 bits",
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the first table")
    parser.add_argument(
        "--learning_rates",
        type=numbers,
        default=str(diloco_text().optimizer.learning_rate),
        help="peak learning rates to choose from; default that of diloco_text",
    )
    parser.add_argument(
        "--weight_decays",
        type=numbers,
        default=str(diloco_text().optimizer.weight_decay),
        help="weight decays to choose from; default that of diloco_text",
    )
    parser.add_argument(
        "--outer_momenta",
        type=numbers,
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
    simulate_devices(diloco_text().islands)
    jax.config.update("jax_platforms", "cpu")

    todo = {
        name: [
            setting._replace(common_start=options.common_start)
            if setting.has_outer_optimizer
            else setting
            for setting in group
        ]
        for name, group in settings(
            options.seeds, options.rows, options.local_steps, options.bits
        ).items()
    }
    momenta = options.outer_momenta
    planned = [setting for name in chosen for setting in todo[name]]
    untuned = {_tuned_with(setting): setting for setting in reversed(planned)}
    tuning = [
        setting._replace(learning_rate=rate, weight_decay=decay, outer_momentum=momentum)
        for setting in reversed(untuned.values())
        for rate in options.learning_rates
        for decay in options.weight_decays
        for momentum in (momenta if setting.has_outer_optimizer else [setting.outer_momentum])
    ]
    try:
        for setting in (*tuning, *planned):
            setting.experiment(options.tokens)
            if setting.common_start:
                common_start(setting, options.tokens)
    except ValueError as error:
        parser.error(str(error))
    out = Path(options.out)
    best = {_tuned_with(setting): setting for setting in tuning}
    if len(tuning) > len(best):
        tried = [measure(setting, options.tokens, out) for setting in tuning]
        lowest = best_results(tried)
        best = {tuned: result.setting for tuned, result in lowest.items()}
        baseline = min(run.loss for run in tried if not run.setting.has_outer_optimizer)
        print(f"\n{table(tried, TUNED, baseline)}")

    def tuned(setting: Setting) -> Setting:
        found = best[_tuned_with(setting)]
        return setting._replace(**{name: getattr(found, name) for name in TUNED[2:]})

    results: dict[str, list[Result]] = {}
    columns = {
        "methods": ["method", "local_steps", "bits", *TUNED[2:]],
        "local_steps": TUNED[1:],
    }
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
