"""Import `orbax.checkpoint` at the first use of a name of it: a run's first round needs none."""

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
