import dataclasses
import random
from pathlib import Path

import pytest

from fedpax.hlo import parsing
from fedpax.hlo.transfer_schedule import (
    Completion,
    Loop,
    Start,
    Work,
    schedule,
    total_flops,
    transfers,
)

RECORDED = Path(__file__).parent / "compiled"
CONTRACTED = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
STEP = 2.0 * 8 * 8 * 8  # FLOPs of the body of a loop: one matmul of 8 x 8 x 8


@dataclasses.dataclass
class Text:
    """The text of a program, written line by line."""

    loops: list[str] = dataclasses.field(default_factory=list)
    entry: list[str] = dataclasses.field(default_factory=list)

    def loop(self, trip_count: int, lines: str = "") -> None:
        """Add a loop with one matmul, and other lines in its body."""
        n = len(self.loops)
        self.loops.append(
            f"""
%condition.{n} (s: f32[8,8]) -> pred[] {{
  ROOT %true.{n} = pred[] constant(true)
}}
%body.{n} (s: f32[8,8]) -> f32[8,8] {{
  %s.{n} = f32[8,8]{{1,0}} parameter(0)
{lines}
  ROOT %dot.{n} = f32[8,8]{{1,0}} dot(%s.{n}, %s.{n}), {CONTRACTED}
}}"""
        )
        self.entry.append(
            f"  %while.{n} = f32[8,8]{{1,0}} while(%x), condition=%condition.{n}, body=%body.{n}, "
            f'backend_config={{"known_trip_count":{{"n":"{trip_count}"}}}}'
        )

    def schedule(self) -> tuple:
        lines = "\n".join(self.entry)
        return schedule(
            parsing.parse(
                "HloModule m, is_scheduled=true, num_partitions=4\n"
                + "\n".join(self.loops)
                + "\nENTRY %main (x: f32[8,8]) -> f32[8,8] {\n"
                "  %x = f32[8,8]{1,0} parameter(0)\n"
                f"{lines}\n  ROOT %out = f32[8,8]{{1,0}} copy(%x)\n}}\n"
            )
        )


def transfer(opcode: str, name: str, megascale: bool = True) -> str:
    """Write the line of a send, a receive, or a completion."""
    if opcode.endswith("-done"):
        return f"  %{opcode}.{name} = token[] {opcode}(%{opcode.removesuffix('-done')}.{name})"
    target = ',_xla_megascale_target="{1,2}x{0:3}"' if megascale else ""
    return (
        f"  %{opcode}.{name} = (f32[8,8]{{1,0}}, u32[], token[]) {opcode}(%x, %x), "
        f'frontend_attributes={{_xla_host_transfer_rendezvous="{name}_0"{target}}}'
    )


def test_the_work_between_start_and_completion_is_that_of_the_loops_between() -> None:
    trips = [random.randint(1, 50) for _ in range(3)]
    text = Text()
    text.loop(trips[0])
    text.entry += [transfer("send", "a"), transfer("recv", "a"), transfer("send", "b")]
    text.entry += [transfer("recv", "b")]
    text.loop(trips[1])
    text.entry += [transfer("recv-done", "b"), transfer("send-done", "a")]
    text.loop(trips[2])
    text.entry += [transfer("recv-done", "a"), transfer("send-done", "b")]
    assert text.schedule() == (
        Work(trips[0] * STEP),
        Start("send.a"),
        Start("send.b"),
        Work(trips[1] * STEP),
        Completion("send.b"),  # the first of its two completions, as for a
        Completion("send.a"),
        Work(trips[2] * STEP),
    )


def test_a_transfer_starts_with_the_last_of_its_send_and_receive() -> None:
    text = Text()
    text.entry.append(transfer("send", "a"))
    text.loop(7)
    text.entry += [transfer("recv", "a"), transfer("send-done", "a"), transfer("recv-done", "a")]
    assert text.schedule() == (Work(7 * STEP), Start("send.a"), Completion("send.a"))


def test_transfers_in_a_loop_and_across_its_iterations() -> None:
    trips = random.randint(2, 50)
    text = Text()
    inside = [transfer("send", "a"), transfer("recv", "a"), transfer("recv-done", "a")]
    text.loop(trips, "\n".join([*inside, transfer("send", "b"), transfer("recv", "b")]))
    (loop,) = text.schedule()
    assert loop == Loop(
        trips,
        # b completes in a later iteration, so it counts as completed at the end.
        (
            Start("send.a"),
            Completion("send.a"),
            Start("send.b"),
            Work(STEP),
            Completion("send.b"),
        ),
    )
    assert transfers((Work(1.0), loop)) == ["send.a", "send.b"]
    assert total_flops((Work(1.0), loop)) == 1 + trips * STEP


def test_sends_within_a_slice_are_no_transfers() -> None:
    text = Text()
    text.entry += [transfer("send", "a", megascale=False), transfer("send-done", "a")]
    text.loop(3)
    assert text.schedule() == (Work(3 * STEP),)


@pytest.mark.parametrize("islands", [2, 4])
def test_a_mean_at_the_end_of_a_compiled_round_overlaps_with_nothing(islands: int) -> None:
    text = (RECORDED / f"tpu_two_slices_{islands}x{8 // islands}_round.hlo").read_text()
    (work, *ends) = schedule(parsing.parse(text))
    products = 5 * 1024 * 5 * 2 * 256 * 512 * islands / 8  # 5 steps of 1,024 rows
    assert work == Work(products)
    assert [type(end) for end in ends] == [Start, Start, Completion, Completion]
    assert {end.send for end in ends} == {"send", "send.1"}
