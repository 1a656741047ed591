"""Simulate the goodput of millions of chips that fail, for three ways to train through it.

    python -m fedpax.experiments.benchmarks.goodput --out=goodput.png

prints a table, beside the rows that Douillard et al. (arXiv:2604.21428) publish for one failure per
chip-year, and draws goodput over the number of chips. The assumptions are the defaults of
`fedpax.simulation.Cluster`. Three of them were chosen such that the published rows for 1.2 million
chips agree, since their constants are not known here: the restart (27%), and the resharding pause
together with slice size times repair time (58%, 88%). The other rows follow.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
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
ASSUMPTIONS = {f.name: f for f in dataclasses.fields(Cluster) if f.name != "num_chips"}


def simulate(cluster: Cluster, days: float, seed: int) -> list[Row]:
    """Simulate all methods on the same failures."""
    failures = draw_failures(cluster, days * 86_400.0, seed)
    results = {
        RESTART: restart_goodput(cluster, failures),
        ELASTIC: decoupled_goodput(cluster, failures, 1),
        **{f"{n} learners": decoupled_goodput(cluster, failures, n) for n in LEARNERS},
    }
    # Only the published rate has published rows.
    known = PUBLISHED if cluster.years_to_failure == 1 else {}
    chips, rows = cluster.num_chips, []
    for method, result in results.items():
        paper = known.get((chips, method))
        points = paper and 100 * (result.goodput - paper)
        kept: Any = {"goodput": result.goodput, "uptime": result.uptime}
        rows.append(Row(chips=chips, method=method, published=paper, points=points, **kept))
    return rows


class Table(Benchmark):
    chips: list[int] = option("1200000,2400000", "chips of the table's clusters", harness.integers)
    days: float = option(28.0, "simulated days")
    seed: int = option(0, "random seed of the failures")
    columns = (
        "chips {chips:,} | method {method:22} | goodput {goodput:.1%} | published {published:.0%} "
        "| difference {points:+.1f} | uptime {uptime:.3%}"
    )

    def measure(self) -> Iterator[Row]:
        assumptions = (f"{name}={getattr(self, name)}" for name in ASSUMPTIONS)
        print("assumptions: " + ", ".join(assumptions))
        yield from self.simulate_all(self.chips)

    def simulate_all(self, sizes: Sequence[int]) -> Iterator[Row]:
        """Simulate clusters of several numbers of chips."""
        assumptions = {name: getattr(self, name) for name in ASSUMPTIONS}
        for chips in dict.fromkeys(sizes):
            yield from simulate(Cluster(chips, **assumptions), self.days, self.seed)

    def draw(self, rows: list[Row]) -> Figure:
        """Draw goodput over the number of chips: simulated as lines, published as crosses."""
        rows = [*rows, *self.simulate_all(sorted({*DRAWN} - {row.chips for row in rows}))]
        labels = {"xlabel": "chips", "ylabel": "goodput, %", "xscale": "log", "ylim": (0, 100)}
        (axes,) = harness.panels(labels, size=(6.4, 4.0))
        for number, method in enumerate(dict.fromkeys(row.method for row in rows)):
            measured = sorted(
                (row for row in rows if row.method == method), key=lambda row: row.chips
            )
            style: dict[str, Any] = {"color": f"C{number}", "marker": "o", "markersize": 3}
            goodput = [100 * row.goodput for row in measured]
            axes.plot([row.chips for row in measured], goodput, label=method, **style)
            known = [
                (row.chips, 100 * row.published) for row in measured if row.published is not None
            ]
            if known:
                axes.plot(*zip(*known, strict=True), "x", color=f"C{number}", markersize=8)
        axes.set_xticks(DRAWN, [f"{chips / 1e6:g}M" for chips in DRAWN])
        axes.minorticks_off()
        axes.plot([], [], "kx", label="published")
        return harness.figure_of([axes])


def _assumption(field: dataclasses.Field[Any]) -> Any:
    return option(field.default, "assumption", float if field.type is float else int)


options = {name: _assumption(field) for name, field in ASSUMPTIONS.items()}
Goodput: Any = type(
    "Goodput",
    (Table,),
    {"__module__": __name__, "__annotations__": dict.fromkeys(options, Any), **options},
)
main = command(Goodput)
