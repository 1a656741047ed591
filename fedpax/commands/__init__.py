"""The commands of `fedpax`, one per module; `fedpax.main` dispatches to them.

A command is a row of `command_table`, flags of `flag_table`, and the function that executes it.
"""

from typing import TYPE_CHECKING

from fedpax.commands.command_table import COMMANDS, Command
from fedpax.lazy_names import lazy_names

if TYPE_CHECKING:
    from fedpax.commands.parts.devices import fit_mesh as fit_mesh
    from fedpax.commands.parts.options import configure as configure

_NAMES = {
    "fedpax.commands.parts.devices": "fit_mesh",
    "fedpax.commands.parts.options": "configure",
}
__all__ = ["COMMANDS", "Command", "configure", "fit_mesh"]
_, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
