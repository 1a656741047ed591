"""The primitive of a program. Its rules are in `fedpax.transforms.program`, above the passes."""

from fedpax.primitives._jax import Primitive

federated_program_p = Primitive("federated_program")
"""The primitive of a call of `fedpax.program`'s result."""
federated_program_p.multiple_results = True
