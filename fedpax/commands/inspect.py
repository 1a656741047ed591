"""`fedpax inspect`: what exported stages compute, receive, send and keep."""

from collections.abc import Sequence

from fedpax.console import print_line
from fedpax.deploy.artifacts import inspect_round
from fedpax.deploy.runtime import ArtifactError
from fedpax.errors import UsageError


def inspect(arguments: Sequence[str]) -> int:
    """Print a report on a folder of exported stages."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError(
            f"`fedpax inspect` got {' '.join(arguments) or 'no folder'!r}, expected one folder of "
            "`fedpax export --stages`. Give for example: fedpax inspect round."
        )
    try:
        print_line(inspect_round(arguments[0]))
    except ArtifactError as error:
        raise UsageError(str(error)) from error
    return 0
