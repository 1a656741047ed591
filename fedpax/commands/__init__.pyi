"""The public names of commands, for type checkers and `fedpax.lazy_names`."""

from fedpax.commands.command_table import COMMANDS as COMMANDS
from fedpax.commands.command_table import Command as Command
from fedpax.commands.parts.devices import fit_mesh as fit_mesh
from fedpax.commands.parts.options import configure as configure
