import re

import jax
import jax.numpy as jnp

from fedpax.hlo import parsing


def test_parses_results_of_several_shapes():
    def f(x):
        return {"a": x + 1, "b": (x.sum(), x.astype(jnp.bfloat16))}

    module = parsing.parse(jax.jit(f).lower(jnp.ones((3, 5))).compile().as_text())
    root = module.computations[module.entry].root
    assert root.opcode == "tuple"
    assert re.findall(r"\w+\[[\d,]*\]", root.shape) == ["f32[3,5]", "f32[]", "bf16[3,5]"]
    assert len(root.operands) == 3
    assert module.num_devices == 1


def test_parses_an_instruction_over_several_lines():
    """The metadata of a kernel has line breaks, and can begin a line with a brace.

    The last line of a computation can name the core that runs it.
    """
    text = """HloModule m, num_partitions=2

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"

}}, metadata={op_name="x"}, backend_config={"cost_estimate":{"flops":"7"}}
  ROOT %r = f32[8]{0} negate(%k)
}, execution_thread="sparsecore"

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} call(%a), to_apply=%body
}
"""
    module = parsing.parse(text)
    body = module.computations["body"]
    assert list(body.instructions) == ["p", "k", "r"] and body.root.name == "r"
    kernel = body.instructions["k"]
    assert kernel.operands == ["p"]
    assert '\\"block_q\\": 512' in kernel.attributes
    assert '"flops":"7"' in kernel.attributes
    assert module.entry == "main" and module.num_devices == 2
