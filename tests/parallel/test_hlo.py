import re

import jax
import jax.numpy as jnp

from fedpax.parallel import hlo


def test_reads_results_of_several_shapes():
    def f(x):
        return {"a": x + 1, "b": (x.sum(), x.astype(jnp.bfloat16))}

    module = hlo.read(jax.jit(f).lower(jnp.ones((3, 5))).compile().as_text())
    root = module.computations[module.entry].root
    assert root.opcode == "tuple"
    assert re.findall(r"\w+\[[\d,]*\]", root.shape) == ["f32[3,5]", "f32[]", "bf16[3,5]"]
    assert len(root.operands) == 3
    assert module.partitions == 1
