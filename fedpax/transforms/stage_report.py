"""A report on the messages of stages."""

from collections.abc import Sequence

from fedpax.primitives.placement import Placement
from fedpax.transforms.client_stages import Stage

HEADINGS = {
    "receives": "shared",
    "its row": "rows",
    "has": "own",
    "draws": "noise",
    "sends": "terms",
    "shows": "shown",
    "keeps": "kept",
}
"""The words for what a participant does with a kind of values -> the kind."""


def describe(name: str, placement: Placement, stages: Sequence[Stage]) -> str:
    """Describe each stage: what a participant receives, has, sends and keeps, with bytes."""
    count = len(stages)
    lines = [
        f"{name}: {count} {'stage' if count == 1 else 'stages'} for each of {placement.size} "
        f"{placement.name}"
    ]
    for number, stage in enumerate(stages):
        down = sum(v.nbytes for v in (*stage.shared, *stage.rows))
        up = sum(v.nbytes for v in (*stage.terms, *stage.shown))
        lines.append(f"stage {number}: receives {down:,} B, sends {up:,} B")
        for heading, values in HEADINGS.items():
            lines += [f"  {heading:<8} {v}" for v in getattr(stage, values)]
    return "\n".join(lines)
