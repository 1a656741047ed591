r"""Bandwidth between two sites for a compute utilization: the table of Streaming DiLoCo's paper.

    python -m fedpax.experiments.benchmarks.bandwidth --plot=bandwidth.png

The published figures are from table 4 of arXiv:2501.18512. The model is the module
`fedpax.planning.overlap`, with H = 100 steps, fragments of 3 layers (strided), and one
step of overlap. Two sites exchange 16 bits of a parameter, 4 bits in the last row.

The paper does not state how many of a model's parameters are exchanged. One constant is fitted:
0.83 of them. `--params=1` counts all.

`--plans` takes the bytes of a method from a compiled program, in place of this formula:

    fedpax plan --exp=diloco_c4_1b --islands=2 \
        --topology=v5e:4x4 --slices=2 --json=diloco.json
    python -m fedpax.experiments.benchmarks.bandwidth --plans DiLoCo=diloco.json
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.planning.overlap import (
    SiteExchange,
    SiteWorkload,
    compute_utilization,
    required_bandwidth,
)

GRID = tuple(np.logspace(-1, 3, 50) * 1e9)
"""The bandwidths of the paper's table: 50 from 0.1 to 1,000 Gbit/s, a factor of 1.207 apart."""

UTILIZATIONS = (0.95, 0.99)

MODELS = {
    "1B": SiteWorkload(num_params=1e9, num_layers=24, step_seconds=0.1),
    "10B": SiteWorkload(num_params=10e9, num_layers=48, step_seconds=0.8),
    "100B": SiteWorkload(num_params=100e9, num_layers=108, step_seconds=4.9),
}

# Gbit/s for 95% and 99%, by method and model.
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "data parallel": {"1B": (222, 569), "10B": (268, 472), "100B": (391, 472)},
    "DiLoCo": {"1B": (23.3, 86.8), "10B": (33.9, 104.8), "100B": (49.4, 184)},
    "streaming": {"1B": (16, 28.1), "10B": (13.3, 19.3), "100B": (11, 19.3)},
    "+ overlap": {"1B": (9.1, 11), "10B": (6.2, 7.5), "100B": (5.2, 5.2)},
    "+ 4 bits": {"1B": (2.0, 3.0), "10B": (1.4, 1.7), "100B": (1.1, 1.4)},
}


def exchange(method: str, num_layers: int) -> SiteExchange:
    """Return what a method of the table exchanges."""
    fields: dict[str, dict[str, Any]] = {"data parallel": {}, "DiLoCo": {"period": 100}}
    fields["streaming"] = fields["DiLoCo"] | {"fragments": num_layers // 3}
    fields["+ overlap"] = fields["streaming"] | {"overlap_steps": 1}
    fields["+ 4 bits"] = fields["+ overlap"] | {"bits": 4}
    return SiteExchange(**fields[method])


def bits_per_parameter(method: str, plan: Mapping[str, Any]) -> float:
    """Return the bits that leave a slice for each parameter of the model in one exchange.

    Data parallelism exchanges gradients in each local step. All other methods exchange every
    parameter once in a round, whatever the number of its local steps.
    """
    overlap = plan["between_slices"]["overlap"]
    if plan["topology"]["slices"] != 2 or overlap is None:
        raise ValueError(
            f"{method}: the plan of {plan['experiment']} has no transfers between two slices. Make "
            "it with --slices=2 and --json."
        )
    computation = plan["computation"]
    exchanges = computation["local_steps"] if method == "data parallel" else 1
    return 8 * overlap["bytes_out_of_slice_per_round"] / computation["num_parameters"] / exchanges


def _read_plan(text: str) -> tuple[str, float]:
    """Parse METHOD=FILE; return the method and the bits of a parameter in an exchange."""
    method, _, file = text.partition("=")
    try:
        harness.check_names("methods", [method], PUBLISHED)
        return method, bits_per_parameter(method, json.loads(Path(file).read_bytes()))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def cells(params: float = 0.83, bits: Mapping[str, float] | None = None) -> Iterator[Row]:
    """Compute the table, with the bits of a parameter of some methods."""
    ratio, compiled = np.log(GRID[1] / GRID[0]), bits or {}
    for method, (name, model) in itertools.product(PUBLISHED, MODELS.items()):
        sent = exchange(method, model.num_layers)
        if method in compiled:
            sent = dataclasses.replace(sent, bits=compiled[method])
        else:
            model = dataclasses.replace(model, num_params=params * model.num_params)
        for utilization, paper in zip(UTILIZATIONS, PUBLISHED[method][name], strict=True):
            computed = required_bandwidth(model, sent, utilization, GRID) / 1e9
            yield Row(
                method=method,
                model=name,
                utilization=utilization,
                case=f"{name}, {utilization:.0%}",
                computed=computed,
                published=paper,
                steps=round(float(np.log(computed / paper) / ratio)),
            )


class Bandwidth(Benchmark):
    params: float = option(0.83, "part of the parameters that is exchanged")
    plans: list[tuple[str, float]] = option(
        (),
        "JSON reports of `fedpax plan` for two slices, such as DiLoCo=diloco.json",
        _read_plan,
        nargs="+",
        metavar="METHOD=FILE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.params > 0:
            raise ValueError(f"--params is {self.params}, expected a number above 0")

    def measure(self) -> Iterator[Row]:
        for method, bits in self.plans:
            print(f"{method}: {bits:.2f} bits of each parameter in an exchange, as compiled")
        yield from cells(self.params, dict(self.plans))

    def summary(self, rows: list[Row]) -> str:
        """Format computed and published bandwidths, and how far they are from each other."""
        cell, head = "{computed:.1f} ({published:g})", "Gbit/s, computed (published)"
        distances = [abs(row.steps) for row in rows]
        return (
            f"{harness.pivot(rows, 'method', 'case', cell, head)}\nOf {len(rows)} bandwidths, "
            f"{distances.count(0)} equal the published ones on the grid, and the largest distance "
            f"is {max(distances)} of its steps."
        )

    def draw(self, rows: list[Row]) -> Figure:
        """Draw the compute utilization of each method over the bandwidth, by model."""
        label, bandwidths = "Gbit/s between two sites", np.logspace(-1, 3, 400) * 1e9
        titles = [f"{k} parameters, {m.step_seconds:g} s a step" for k, m in MODELS.items()]
        axes = harness.panels(
            *({"title": title, "xscale": "log", "xlabel": label} for title in titles),
            size=(11, 3.6),
            sharey=True,
        )
        for panel, model in zip(axes, MODELS.values(), strict=True):
            model = dataclasses.replace(model, num_params=self.params * model.num_params)
            for method in PUBLISHED:
                sent = exchange(method, model.num_layers)
                values = [compute_utilization(model, sent, b) for b in bandwidths]
                panel.plot(bandwidths / 1e9, values, label=method)
        axes[0].set_ylabel("compute utilization")
        return harness.figure_of(axes)


main = command(Bandwidth)
