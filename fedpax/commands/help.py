"""The help of one command: its part of `fedpax --help`."""

import importlib
import re

from absl import flags

from fedpax.commands import COMMANDS


def help_of(command: str, usage: str) -> str:
    """Return the lines of the usage that concern a command, and its own flags.

    Example:
        >>> from fedpax.main import USAGE
        >>> text = help_of("doctor", USAGE)
        >>> print(text)  # doctest: +ELLIPSIS
          fedpax doctor
              Show versions, ...
        <BLANKLINE>
        `fedpax --help` shows all commands.
        <BLANKLINE>
    """
    commands, _, rest = usage.partition("\n\n  --exp ")
    blocks = re.findall(r"^  fedpax .*\n(?:    .*\n?)*", f"{commands}\n", re.MULTILINE)
    head = "".join(block for block in blocks if re.match(rf"  fedpax {command}\b", block))
    described = re.findall(r"^  --.*\n(?: {12}.*\n)*", f"  --exp {rest}", re.MULTILINE)
    command_flags = _flags_of(command) | set(re.findall(r"--[\w.]+", head))
    if "--FIELD" in command_flags:
        command_flags.add("--seed")
    shown = "".join(
        text for text in described if set(re.findall(r"^  (--[\w.]+)", text)) & command_flags
    )
    more = "`fedpax --help` shows all commands.\n"
    return "\n".join(part for part in (head, shown, more) if part)


def _flags_of(command: str) -> set[str]:
    module = importlib.import_module(COMMANDS[command].place.partition(":")[0])
    options = flags.FlagValues()
    if define := getattr(module, "define_flags", None):
        define(options)
    return {f"--{name}" for name in options}
