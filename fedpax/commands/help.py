"""The help of one command: its part of `fedpax --help`."""

import re

from fedpax.commands.command_table import COMMANDS
from fedpax.commands.flag_table import describe_flags


def help_of(command: str) -> str:
    """Return the usage of a command and the description of its flags.

    Example:
        >>> print(help_of("doctor"))
          fedpax doctor
              Show versions, devices, caches and extras, and what is broken.
        <BLANKLINE>
        `fedpax --help` shows all commands.
        <BLANKLINE>
    """
    entry = COMMANDS[command]
    names = {*entry.flags, *re.findall(r"--([\w.=]+)", entry.usage)}
    if "FIELD=VALUE" in names:
        names.add("seed")
    parts = (entry.usage, describe_flags(names), "`fedpax --help` shows all commands.\n")
    return "\n".join(part.removesuffix("\n") + "\n" for part in parts if part)
