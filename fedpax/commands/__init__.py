"""The commands of `fedpax`, one per module; `fedpax.main` dispatches to them.

A module has a function that executes its command, and, if the command has flags, `define_flags`.
"""

from typing import TYPE_CHECKING

from fedpax.lazy_names import lazy_names

if TYPE_CHECKING:
    from fedpax.commands.parts.options import configure as configure
    from fedpax.commands.parts.scaled_mesh import fit_mesh as fit_mesh

COMMANDS = {
    "list": "fedpax.commands.list_experiments:list_experiments",
    "train": "fedpax.commands.train:train",
    "compare": "fedpax.commands.compare:compare",
    "plan": "fedpax.commands.plan:plan",
    "syncer": "fedpax.commands.syncer:syncer",
    "sites": "fedpax.commands.sites:sites",
    "join": "fedpax.commands.join:join",
    "show": "fedpax.commands.show:show",
    "evaluate": "fedpax.commands.evaluate:evaluate",
    "generate": "fedpax.commands.generate:generate",
    "export": "fedpax.commands.export:export",
    "inspect": "fedpax.commands.inspect:inspect",
    "partition": "fedpax.commands.partition:partition",
    "data": "fedpax.commands.data:data",
    "prepare": "fedpax.commands.prepare:prepare",
    "certificates": "fedpax.commands.certificates:certificates",
    "doctor": "fedpax.commands.doctor:doctor",
    "completion": "fedpax.commands.completion:completion",
}
"""The function that executes each command: its module, which is imported when it runs, and name."""

_MODULES = {
    "configure": "fedpax.commands.parts.options",
    "fit_mesh": "fedpax.commands.parts.scaled_mesh",
}
__all__ = ["COMMANDS", *_MODULES]
# The commands load their own modules.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
