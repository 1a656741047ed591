"""`fedpax list`: the experiments and the groups of experiments that come with fedpax."""

from collections.abc import Sequence

from fedpax.errors import UsageError
from fedpax.experiments.catalog import expand_groups, group_or_none
from fedpax.experiments.listing import EXPERIMENTS, GROUPS


def list_experiments(arguments: Sequence[str]) -> int:
    """Print the name and the summary of every experiment and group."""
    if arguments:
        if len(arguments) > 1 or group_or_none(arguments[0]) is None:
            raise UsageError(
                f"`fedpax list` got {' '.join(arguments)!r}, expected no arguments, or one group: "
                f"{', '.join(GROUPS)}. Leave it out to list all experiments."
            )
        print("\n".join(expand_groups(arguments)))
        return 0
    names = {**EXPERIMENTS, **GROUPS}
    width = max(map(len, names), default=0)
    for name, entry in sorted(EXPERIMENTS.items()):
        print(f"{name.ljust(width)}  {entry.summary}")
    for name, entry in sorted(GROUPS.items()):
        print(f"{name.ljust(width)}  A group (`fedpax list {name}`). {entry.summary}")
    return 0
