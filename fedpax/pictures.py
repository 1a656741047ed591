"""Parts that all pictures share: axes, texts, legends and files."""

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from fedpax.console import escape_controls
from fedpax.files import replace_file


class Picture(Figure):
    """A figure that a notebook shows, also without pyplot."""

    def _repr_png_(self) -> bytes:
        """Return the picture for IPython."""
        return _encoded(self, "png")


# Okabe and Ito's palette, which readers with color vision deficiency can distinguish.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":", "-.")
_MARGIN = 0.15  # inches between a legend and the border of the picture


def line_style(number: int) -> dict[str, Any]:
    """Return the color and the line style of a run; 28 runs look different."""
    return {
        "color": COLORS[number % len(COLORS)],
        "linestyle": LINE_STYLES[number // len(COLORS) % len(LINE_STYLES)],
    }


def style_panel(axes: Axes) -> None:
    """Draw a light grid, and no line at the top and on the right."""
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25, which="both", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def note_no_values(axes: Axes, metric: str) -> None:
    """Write into a panel without a point that the metric has no finite value."""
    text = f"no finite {short_text(metric)}"
    axes.text(0.5, 0.4, text, transform=axes.transAxes, ha="center", color="dimgray")


def count_ticks(axis: Axis) -> None:
    """Put the ticks of a linear axis on whole numbers, few enough that their labels fit."""
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axis.set_major_formatter(EngFormatter())


def log_ticks(axis: Axis, ratio: float, unit: str = "") -> None:
    """Label powers of ten of a logarithmic axis, and their threefolds if there are few."""
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if ratio < 100 else (1.0,), numticks=7))
    axis.set_major_formatter(EngFormatter(unit=unit))
    axis.set_minor_formatter(NullFormatter())


def byte_axis(axes: Axes, positions: Sequence[float]) -> None:
    """Scale a horizontal axis of bytes: logarithmic from a factor of ten on, otherwise linear."""
    shown = [x for x in positions if x > 0 and math.isfinite(x)]
    if shown and max(shown) >= 10 * min(shown):
        axes.set_xscale("log")
        log_ticks(axes.xaxis, max(shown) / min(shown), "B")
    else:
        count_ticks(axes.xaxis)
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))


def plain_text(text: str, width: int = 60) -> str:
    """Return a text for a picture: without control characters, in lines of a largest width."""
    lines = textwrap.wrap(escape_controls(text), width, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def short_text(text: str, length: int = 24) -> str:
    """Return a text for a title: its middle is left out if it is long."""
    if len(text) > length:
        text = f"{text[: length // 2]}…{text[-((length - 1) // 2) :]}"
    return plain_text(text, length * 4)


def add_legend(
    figure: Figure, handles: Sequence[Artist], names: Sequence[str], **style: Any
) -> None:
    """Add a legend below the panels of a figure, which gets higher by as much."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    width, height = figure.get_size_inches()
    widths = (60, 40, 20)  # in characters, of a line of the names
    for columns, limit in [(n, 60) for n in range(min(len(names), 6), 1, -1)] + [
        (1, limit) for limit in widths
    ]:
        legend = figure.legend(
            handles,
            [plain_text(name, limit) for name in names],
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            **style,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        box = legend.get_window_extent(renderer)
        if box.width <= (width - 2 * _MARGIN) * figure.dpi:
            break
        if (columns, limit) != (1, widths[-1]):
            legend.remove()
    figure.set_size_inches(width, height + box.height / figure.dpi)


def save_picture(figure: Figure, path: str | Path) -> None:
    """Write a figure to a file; a link at its place is replaced, not followed."""
    # Dollar signs in labels are characters: a name such as `$x` is not a formula.
    encoded = _encoded(figure, Path(path).suffix.removeprefix(".") or "png")
    replace_file(Path(path), encoded, sync=False)


def _encoded(figure: Figure, suffix: str) -> bytes:
    """Return the content of a picture's file."""
    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    # Powers of ten beside the axes are formulas.
    numbers = {text for axis in axes for text in axis.findobj(Text) if text is not axis.label}
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text not in numbers:
            text.set_parse_math(False)
    content = io.BytesIO()
    with warnings.catch_warnings():  # a script that the font lacks has boxes for its letters
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(content, format=suffix)
    return content.getvalue()
