"""`fedpax list`: the experiments that come with fedpax."""

import inspect
from collections.abc import Sequence

from fedpax.commands.options import UsageError
from fedpax.experiments.catalog import experiments


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
    found = experiments()
    width = max(map(len, found), default=0)
    for name, function in sorted(found.items()):
        print(f"{name.ljust(width)}  {(inspect.getdoc(function) or '').partition(chr(10))[0]}")
    return 0
