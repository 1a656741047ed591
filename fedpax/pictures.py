"""Write pictures whose labels can come from others."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from fedpax.files import replace_file

if TYPE_CHECKING:  # Matplotlib is slow to import
    from matplotlib.figure import Figure


def save_picture(figure: "Figure", path: str | Path) -> None:
    """Write a figure to a file; a link at its place is replaced, not followed.

    Dollar signs in labels are characters: a name such as `$x` is not a formula.

    Args:
        figure: the figure.
        path: the file, in an existing folder. Its suffix names the format, such as `.png`.
    """
    from matplotlib.text import Text

    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    # Powers of ten beside the axes are formulas.
    numbers = {text for axis in axes for text in axis.findobj(Text) if text is not axis.label}
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text not in numbers:
            text.set_parse_math(False)
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix.removeprefix(".") or "png")
    replace_file(Path(path), content.getvalue(), sync=False)
