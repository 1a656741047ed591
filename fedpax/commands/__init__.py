"""The commands of `fedpax`, one per module; `fedpax.main` dispatches to them.

A command is a row of `command_table`, flags of `flag_table`, and the function that executes it.
"""

from fedpax.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
