"""`fedpax list`: the experiments that come with fedpax."""

from collections.abc import Sequence

from fedpax.commands import UsageError
from fedpax.experiments.catalog import entries


def list_experiments(arguments: Sequence[str]) -> int:
    """Print the name and the first line of the docstring of every experiment.

    Args:
        arguments: none are allowed.

    Returns:
        The exit status.
    """
    if arguments:
        raise UsageError(
            f"`fedpax list` got {arguments[0]!r}, expected no arguments. Leave it out."
        )
    found = entries()
    width = max(map(len, found), default=0)
    for name, entry in sorted(found.items()):
        print(f"{name.ljust(width)}  {entry.summary}")
    return 0
