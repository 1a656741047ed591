"""Names in a jaxpr that tell passes and reports whose value an equation computes."""

from fedpax.primitives._jax import Jaxpr, JaxprEqn
from fedpax.primitives.jaxpr_analysis import inner_jaxprs

SENT = "fedpax_sent"
"""The name in the jaxpr of a sent value, followed by the bytes that it replaces."""

KEPT = "fedpax_kept"
"""The name in the jaxpr of a placed value that participants keep between rounds."""

SERVER = "fedpax_server"
"""The name in the jaxpr of a value that the server computes for a participant, on its device."""


def is_mark(eqn: JaxprEqn, mark: str) -> bool:
    """Return whether an equation marks its operand."""
    return bool(eqn.primitive.name == "name" and eqn.params["name"] == mark)


def has_mark(jaxpr: Jaxpr, mark: str) -> bool:
    """Return whether a jaxpr has a marked value, at any depth."""
    return any(
        is_mark(eqn, mark) or any(has_mark(inner, mark) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )
