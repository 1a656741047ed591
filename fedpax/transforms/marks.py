"""Names in a jaxpr that tell passes and reports whose value an equation computes."""

from fedpax.primitives._jax import Jaxpr, JaxprEqn
from fedpax.primitives.jaxpr_analysis import inner_jaxprs

READ_CLIENTS, WRITE_CLIENTS = "fedpax_read_clients", "fedpax_write_clients"
"""The names of the jitted functions that read and write rows of a store, on one device."""

SENT = "fedpax_sent"
"""The name in the jaxpr of a sent value, followed by the bytes that it replaces."""

KEPT = "fedpax_kept"
"""The name in the jaxpr of a placed value that participants keep between rounds."""

MASKED = "fedpax_masked"
"""The name in the jaxpr of a term that only its sum may show, followed by the fewest of its terms
that a sum may have."""

SERVER = "fedpax_server"
"""The name in the jaxpr of a value that the server computes for a participant, on its device."""


def is_mark(eqn: JaxprEqn, mark: str) -> bool:
    """Return whether an equation marks its operand."""
    return bool(eqn.primitive.name == "name" and eqn.params["name"] == mark)


def least_masked(jaxpr: Jaxpr) -> int | None:
    """Return the fewest participants that the masked sums of a jaxpr may have; None without any."""
    least = [
        int(eqn.params["name"].removeprefix(MASKED))
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "name" and str(eqn.params["name"]).startswith(MASKED)
    ]
    inner = [least_masked(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn)]
    return max((k for k in (*least, *inner) if k is not None), default=None)


def has_mark(jaxpr: Jaxpr, mark: str) -> bool:
    """Return whether a jaxpr has a marked value, at any depth."""
    return any(
        is_mark(eqn, mark) or any(has_mark(inner, mark) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )
