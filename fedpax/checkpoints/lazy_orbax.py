"""Orbax's package, which is imported when its first name is used: after a run's first round."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
else:

    class _Orbax:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("orbax.checkpoint"), name)

    ocp = _Orbax()

__all__ = ["ocp"]
