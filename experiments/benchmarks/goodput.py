"""Simulate the goodput of millions of chips that fail, for three ways to train through it.

    python -m fedpax.experiments.benchmarks.goodput --out=goodput.png

prints a table, beside the rows that Douillard et al. (arXiv:2604.21428) publish for one failure per
chip-year, and draws goodput over the number of chips. The assumptions are the defaults of
`fedpax.simulation.Cluster`. The published rows were simulated with constants that are not known
here. Three of the constants below were chosen such that the rows for 1.2 million chips agree: the
restart (27%), and the resharding pause together with slice size times repair time (58%, 88%). The
other rows follow.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, option
from fedpax.simulation.chip_failures import (
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSettings:
    """The options beside the assumptions."""

    chips: list[int] = option(
        "1200000,2400000", "chips of the table's clusters, separated by commas", harness.integers
    )
    days: float = option(28.0, "simulated days")
    seed: int = option(0, "random seed of the failures")


ASSUMPTIONS = [f for f in dataclasses.fields(Cluster) if f.name != "num_chips"]
Settings: Any = dataclasses.make_dataclass(
    "Settings",
    [
        (f.name, Any, option(f.default, "assumption", float if f.type is float else int))
        for f in ASSUMPTIONS
    ],
    bases=(TableSettings,),
    frozen=True,
    kw_only=True,
)


def simulate(cluster: Cluster, days: float, seed: int) -> list[Row]:
    """Simulate all methods on the same failures.

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
    rows = [
        Row(
            chips=cluster.num_chips,
            method=method,
            goodput=result.goodput,
            uptime=result.uptime,
            published=published.get((cluster.num_chips, method)),
        )
        for method, result in results.items()
    ]
    for row in rows:
        row.points = None if row.published is None else 100 * (row.goodput - row.published)
    return rows


def simulate_all(settings: Any, sizes: Sequence[int]) -> Iterator[Row]:
    """Simulate clusters of several numbers of chips."""
    assumptions = {f.name: getattr(settings, f.name) for f in ASSUMPTIONS}
    for chips in dict.fromkeys(sizes):
        yield from simulate(Cluster(chips, **assumptions), settings.days, settings.seed)


def draw(settings: Any, rows: Sequence[Row]) -> Figure:
    """Draw goodput over the number of chips: simulated as lines, published as crosses."""
    drawn = {row.chips for row in rows}
    rows = [*rows, *simulate_all(settings, [chips for chips in DRAWN if chips not in drawn])]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained", dpi=110)
    axes = figure.subplots()
    for number, method in enumerate(dict.fromkeys(row.method for row in rows)):
        own = sorted((row for row in rows if row.method == method), key=lambda row: row.chips)
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


def measure(settings: Any) -> Iterator[Row]:
    """Simulate the clusters of the table."""
    assumptions = (f"{f.name}={getattr(settings, f.name)}" for f in ASSUMPTIONS)
    print("assumptions: " + ", ".join(assumptions))
    yield from simulate_all(settings, settings.chips)


main = Benchmark(
    __doc__,
    Settings,
    measure,
    {
        "chips": "{chips:,}",
        "method": "{method:22}",
        "goodput": "{goodput:.1%}",
        "published": "{published:.0%}",
        "difference": "{points:+.1f}",
        "uptime": "{uptime:.3%}",
    },
    draw=draw,
    aliases={"--plot": "--out"},
)


if __name__ == "__main__":
    raise SystemExit(main())
