"""Simulate the goodput of millions of chips that fail, for three ways to train through it.

    python -m fedpax.experiments.benchmarks.goodput --out=goodput.png

prints a table, beside the rows that Douillard et al. (arXiv:2604.21428) publish for one failure per
chip-year, and draws goodput over the number of chips. The assumptions are the defaults of
`fedpax.simulation.Cluster`. The published rows were simulated with constants that are not known
here. Three of the constants below were chosen such that the rows for 1.2 million chips agree: the
restart (27%), and the resharding pause together with slice size times repair time (58%, 88%). The
other rows follow.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from fedpax.experiments.benchmarks.arguments import integers
from fedpax.experiments.benchmarks.timing import write
from fedpax.simulation.goodput import (
    Cluster,
    decoupled_goodput,
    draw_failures,
    restart_goodput,
)

RESTART, ELASTIC = "data parallel, restart", "data parallel, elastic"
LEARNERS = (2, 4, 8, 16)
PUBLISHED = {
    (1_200_000, RESTART): 0.27,
    (2_400_000, RESTART): 0.18,
    (1_200_000, ELASTIC): 0.58,
    (2_400_000, ELASTIC): 0.40,
    (1_200_000, "2 learners"): 0.70,
    (1_200_000, "8 learners"): 0.88,
    (2_400_000, "8 learners"): 0.80,
    (1_200_000, "16 learners"): 0.93,
    (2_400_000, "16 learners"): 0.86,
}
"""Goodput by number of chips and method, at a failure per chip and year."""

DRAWN = (75_000, 150_000, 300_000, 600_000, 1_200_000, 2_400_000)


class Row(NamedTuple):
    """One simulated method on one cluster.

    Attributes:
        chips: number of chips.
        method: data parallelism, or the number of learners.
        goodput: chip time that trained over all chip time.
        uptime: share of the time in which some learner trained.
        published: the published goodput, or None.
    """

    chips: int
    method: str
    goodput: float
    uptime: float
    published: float | None


def simulate(cluster: Cluster, days: float, seed: int) -> list[Row]:
    """Simulate all methods on the same failures.

    Args:
        cluster: the cluster and the assumptions.
        days: simulated days.
        seed: the random seed.

    Returns:
        A row per method.

    Example:
        >>> rows = simulate(Cluster(1_200_000), days=1.0, seed=0)
        >>> [row.method for row in rows if row.goodput < 0.5]
        ['data parallel, restart']
    """
    failures = draw_failures(cluster, days * 86_400.0, seed)
    results = {
        RESTART: restart_goodput(cluster, failures),
        ELASTIC: decoupled_goodput(cluster, failures, 1),
    }
    for learners in LEARNERS:
        results[f"{learners} learners"] = decoupled_goodput(cluster, failures, learners)
    # Only the published rate has published rows.
    published = PUBLISHED if cluster.years_to_failure == 1 else {}
    return [
        Row(cluster.num_chips, method, *result, published.get((cluster.num_chips, method)))
        for method, result in results.items()
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Draw goodput over the number of chips: simulated as lines, published as crosses.

    Args:
        rows: rows of clusters of several sizes.

    Returns:
        A figure.
    """
    figure = Figure(figsize=(6.4, 4.0), layout="constrained", dpi=110)
    axes = figure.subplots()
    for number, method in enumerate(dict.fromkeys(row.method for row in rows)):
        own = sorted(row for row in rows if row.method == method)
        chips, goodput = [row.chips for row in own], [100 * row.goodput for row in own]
        axes.plot(chips, goodput, marker="o", markersize=3, color=f"C{number}", label=method)
        known = [(row.chips, 100 * row.published) for row in own if row.published is not None]
        if known:
            axes.plot(*zip(*known, strict=True), "x", color=f"C{number}", markersize=8)
    axes.set(xscale="log", ylim=(0, 100), xlabel="chips", ylabel="goodput, %")
    axes.set_xticks(DRAWN, [f"{chips / 1e6:g}M" for chips in DRAWN])
    axes.minorticks_off()
    axes.plot([], [], "kx", label="published")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate as the arguments say, print a table, and draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--chips", type=integers, default="1200000,2400000", help="chips of the table's clusters"
    )
    parser.add_argument("--days", type=float, default=28.0, help="simulated days")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the failures")
    parser.add_argument("--out", type=Path, help="file of the picture; without it none is drawn")
    parser.add_argument("--json", help="JSON file for the rows; without it they are only printed")
    assumptions = [f for f in dataclasses.fields(Cluster) if f.name != "num_chips"]
    for field in assumptions:
        kind = float if field.type is float else int
        parser.add_argument(f"--{field.name}", type=kind, default=field.default, help="assumption")
    options = parser.parse_args(argv)
    given = {field.name: getattr(options, field.name) for field in assumptions}
    print("assumptions: " + ", ".join(f"{name}={value}" for name, value in given.items()))
    print("    chips  method                  goodput  published  difference    uptime")
    start, rows = time.perf_counter(), []
    for chips in dict.fromkeys([*options.chips, *(DRAWN if options.out else ())]):
        own = simulate(Cluster(chips, **given), options.days, options.seed)
        rows += own
        for row in own if chips in options.chips else ():
            published = row.published
            print(
                f"{row.chips:9,}  {row.method:22}  {row.goodput:7.1%}  "
                + (" " * 11 if published is None else f"{published:9.0%}  ")
                + (" " * 10 if published is None else f"{100 * (row.goodput - published):+10.1f}")
                + f"  {row.uptime:8.3%}",
                flush=True,
            )
    chip_years = sum(set(options.chips)) * options.days / 365.25
    print(f"{chip_years:,.0f} chip-years in the table, {time.perf_counter() - start:.1f} s")
    if options.out:
        draw(rows).savefig(options.out)
        print(options.out)
    if options.json:
        write(options.json, rows, **vars(options) | {"out": str(options.out)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
