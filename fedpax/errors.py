"""The errors that fedpax raises: each is a `FedpaxError`, and the built-in error of its kind."""

import difflib
from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ConfigurationError",
    "DamagedStateError",
    "FedpaxError",
    "MissingPackageError",
    "UsageError",
]


class FedpaxError(Exception):
    """Base of the errors that fedpax raises itself.

    The message has the argument, its value, what is expected and the remedy; the command line
    prints it without a traceback.

    Attributes:
        exit_status: the command line's exit status after this error.
        in_flags: the message with flags for arguments, for the command line, if not None.

    Example:
        >>> from fedpax.parallel.mesh import make_mesh
        >>> try:
        ...     make_mesh(fsdp=0)
        ... except FedpaxError as error:
        ...     print(isinstance(error, ValueError), error.exit_status)
        True 2
    """

    exit_status = 2
    in_flags: str | None = None


class ArgumentError(FedpaxError, ValueError):
    """An argument, a setting or data with a value that cannot be used."""


class ArgumentTypeError(FedpaxError, TypeError):
    """An argument, a setting or data of a type that cannot be used."""


class MissingFieldError(FedpaxError, KeyError):
    """Data without the field that an argument or a setting names."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError has quotes around it


class MissingPackageError(FedpaxError, ImportError):
    """A package that an optional feature needs is not installed."""


class ConfigurationError(FedpaxError):
    """A configuration that cannot be written, read or resumed; the message names the remedy."""


class DamagedStateError(FedpaxError, OSError):
    """A saved state that is damaged, missing or old; the message names the remedy."""


class UsageError(FedpaxError):
    """A command line that cannot be executed; the message names the remedy."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a sentence with the names similar to an unknown one, or an empty string."""
    close = difflib.get_close_matches(name, list(names), n=3)
    return f" Did you mean {' or '.join(close)}?" if close else ""
