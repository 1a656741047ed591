"""Read from scheduled text when transfers between slices start and complete."""

from typing import NamedTuple

from fedpax.hlo import parsing


class Transfer(NamedTuple):
    """One transfer between slices, by its place in the schedule.

    Attributes:
        rendezvous: its name in the text, such as "psum.28_0".
        started: number of loops of the computation that stand before its last send or receive.
        completed: number of loops that stand before its first completion.
    """

    rendezvous: str
    started: int
    completed: int


def transfers(text: str) -> tuple[list[Transfer], int]:
    """List the transfers of a scheduled program, and count its loops of local steps.

    Both are read from the entry computation. A loop of local steps is a `while` with a loop inside
    (over layers). Transfers inside loops raise.
    """
    assert "is_scheduled=true" in text.partition("\n")[0]
    module = parsing.parse(text)
    loops, started, completed, names = 0, {}, {}, {}
    for computation in module.computations.values():
        opcodes = {i.opcode for i in computation.instructions.values()}
        assert computation.name == module.entry or not opcodes & {"send", "recv"}
    for instruction in module.computations[module.entry].instructions.values():
        if instruction.opcode == "while":
            body = module.computations[instruction.reference("body")]
            loops += any(i.opcode == "while" for i in body.instructions.values())
        elif instruction.opcode in ("send", "recv"):
            name = instruction.attributes.split('_xla_host_transfer_rendezvous="')[1].split('"')[0]
            names[instruction.name] = name
            started[name] = loops
        elif instruction.opcode in ("send-done", "recv-done"):
            completed.setdefault(names[instruction.operands[0]], loops)
    return [Transfer(name, started[name], completed[name]) for name in started], loops


def check_overlap(text: str, num_fragments: int, stages: int = 1) -> None:
    """Check that each transfer of a fragment crosses exactly one loop of local steps.

    A round has a loop for each fragment before its first transfer starts, and one under each of its
    transfers. Only the metrics are sent after the last loop.
    """
    result, loops = transfers(text)
    assert loops == (1 + stages) * num_fragments, f"{loops} loops of local steps"
    overlapped = {n for n in range(loops) if n % (1 + stages)}
    under = [t for t in result if t.started < loops]
    assert {t.started for t in under} == overlapped, result
    assert all(t.completed == t.started + 1 for t in under), result
    assert len(result) == len(under) + 1, result  # the metrics
