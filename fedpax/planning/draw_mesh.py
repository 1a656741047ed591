"""A picture of a mesh: the position of each chip along each mesh axis."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedpax.pictures import plain_text, save_picture
from fedpax.planning.compiled_plan import CompiledPlan

# A page shows at most this many slices and panels; further slices and layers look the same.
_MAX_SLICES = 4
_MAX_PANELS = 8


def draw_mesh(plan: CompiledPlan, mesh: jax.sharding.Mesh, path: str | Path) -> None:
    """Draw the chips of the slices, once per mesh axis, colored by their position along it."""
    # Three dimensions are drawn as layers. Chips of one color have the same position along the
    # axis; its collectives join chips of all colors.
    grids = _grids(plan, mesh)
    rows, columns = len(plan.axes), len(grids)
    height, width = next(iter(grids.values())).shape
    panel_width = min(3.2, max(1.3, 10 / columns))
    panel_height = min(3.2, max(0.5, panel_width * height / width))
    figure_width = max(6.0, columns * panel_width + 1.6)
    figure = Figure(
        figsize=(figure_width, rows * (panel_height + 0.7) + 0.6),
        dpi=150,
        layout="constrained",
    )
    panels = figure.subplots(rows, columns, squeeze=False)
    for row, axis in enumerate(plan.axes):
        routes = " + ".join(map(str, axis.routes))
        heading = f"{axis.name}: {axis.size}" + (f", {routes}" if routes else "")
        panels[row][0].set_title(
            plain_text(heading, int(11 * figure_width)),
            loc="left",
            fontsize=9,
        )
        for column, (title, positions) in enumerate(grids.items()):
            panel: Axes = panels[row][column]
            coordinates = np.unravel_index(np.maximum(positions, 0), mesh.devices.shape)
            along = coordinates[mesh.axis_names.index(axis.name)]
            shown = np.ma.masked_where(positions < 0, along)
            highest = max(axis.size - 1, 1)
            image = panel.pcolormesh(
                shown, cmap="viridis", vmin=0, vmax=highest, edgecolors="white", linewidth=1
            )
            panel.invert_yaxis()
            panel.set_aspect("equal")
            panel.set_xticks([])
            panel.set_yticks([])
            panel.set_xlabel(title, fontsize=8)
            panel.spines[:].set_visible(False)
            if min(panel_width / width, panel_height / height) < 0.2:
                continue  # inches: numbers would overlap
            for (i, j), value in np.ndenumerate(along):
                if positions[i, j] >= 0:
                    panel.text(
                        j + 0.5,
                        i + 0.5,
                        str(value),
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="white" if value < 0.6 * highest else "black",
                    )
        if axis.size == 1:
            continue  # a scale has no second color to name
        bar = figure.colorbar(image, ax=list(panels[row]), shrink=0.8, aspect=12)
        bar.locator = MaxNLocator(nbins=5, integer=True)
        bar.update_ticks()
    devices = f"{plan.num_devices:,} device{'s' * (plan.num_devices != 1)}{_shown_part(plan)}"
    figure.suptitle(
        plain_text(
            f"{plan.workload.experiment} on {plan.topology.name}: {devices}", int(8 * figure_width)
        ),
        fontsize=11,
        fontweight="bold",
        x=0.01,
        ha="left",
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_picture(figure, path)


def _shown(plan: CompiledPlan) -> tuple[int, int]:
    """Return the number of slices to draw, and of layers of each."""
    slices = min(plan.topology.slices, _MAX_SLICES)
    layers = plan.topology.shape[2] if len(plan.topology.shape) > 2 else 1
    return slices, min(layers, _MAX_PANELS // slices)


def _shown_part(plan: CompiledPlan) -> str:
    slices, layers = _shown(plan)
    parts = []
    if slices < plan.topology.slices:
        parts.append(f"{slices} of {plan.topology.slices} slices")
    if len(plan.topology.shape) > 2 and layers < plan.topology.shape[2]:
        parts.append(f"{layers} of {plan.topology.shape[2]} layers")
    return f" ({', '.join(parts)} shown)" if parts else ""


def _grids(plan: CompiledPlan, mesh: jax.sharding.Mesh) -> dict[str, np.ndarray]:
    """Return a grid of chips per slice or layer, of their positions in the mesh; -1 if empty."""
    shape = plan.topology.shape
    per_chip = plan.topology.chip.devices_per_chip if plan.topology.chip else 1
    if not shape:
        rows = next(n for n in range(int(mesh.size**0.5), 0, -1) if mesh.size % n == 0)
        return {"": np.arange(mesh.size).reshape(rows, -1)}
    width, height, depth = (*shape, 1)[:3]
    slices, layers = _shown(plan)
    grids: dict[str, np.ndarray] = {}
    for position, device in enumerate(mesh.devices.flat):
        number = getattr(device, "slice_index", None) or 0
        x, y, z = (*device.coords, 0, 0)[:3]
        if number >= slices or z >= layers:
            continue
        title = f"slice {number}" if plan.topology.slices > 1 else ""
        if depth > 1:
            title += (", " if title else "") + f"z = {z}"
        grid = grids.setdefault(title, np.full((height, width * per_chip), -1))
        grid[y, x * per_chip + getattr(device, "core_on_chip", 0) % per_chip] = position
    return dict(sorted(grids.items()))
