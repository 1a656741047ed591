"""What an answer of a participant must be to be counted."""

import numpy as np

from fedpax.deploy.encoded_values import decode_values
from fedpax.deploy.nodes.node_roster import NodeReply
from fedpax.deploy.packets import one_line
from fedpax.deploy.round_program import RoundProgram


def problem_of(reply: NodeReply, program: RoundProgram, stage: int) -> str:
    """Say why an answer cannot be counted, or return an empty string."""
    if reply.packet is None:
        return one_line(reply.error)
    values = reply.packet.values
    if "refusal" in values:
        return one_line(values["refusal"])
    if values.get("program") != program.program:
        return f"answers with program {one_line(values.get('program'))[:12]}"
    try:
        groups = [decode_values(content).values() for content in reply.packet.arrays]
    except ValueError as error:
        return one_line(error)
    types = [[(list(x.shape), str(x.dtype)) for x in group] for group in groups]
    described = program.artifact.manifest["stages"][stage]
    expected = [[(v["shape"], v["dtype"]) for v in described[k]] for k in ("terms", "shown")]
    if types != expected:
        return f"answers with arrays of other types than the {len(expected[0])} terms of the stage"
    for i, (value, term) in enumerate(zip(described["terms"], groups[0], strict=True)):
        finite = np.isfinite(term)
        # The maximum of nothing is -inf.
        if not np.all(finite) and np.any(~finite & (term != program.artifact.empty(stage)[i])):
            return (
                f"answers with NaN or infinity in {value['name']}, which would be the "
                "result of the round. Set a smaller learning rate, or look at its data"
            )
    return ""
