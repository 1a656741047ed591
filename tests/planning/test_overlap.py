import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.hlo.transfer_schedule import Completion, Event, Loop, Start, Work
from fedpax.planning.overlap import find_overlap, grouped


@dataclasses.dataclass
class Names:
    count: int = 0

    def next(self) -> str:
        self.count += 1
        return f"send.{self.count}"


@st.composite
def schedules(draw: st.DrawFn) -> tuple[tuple[Event, ...], dict[str, float]]:
    """Draw a schedule, and the bytes of its transfers."""
    names = Names()

    def events(depth: int) -> tuple[Event, ...]:
        collected: list[Event] = []
        in_flight: list[str] = []
        for _ in range(draw(st.integers(1, 5))):
            kind = draw(st.sampled_from(["work", "start", "complete", "loop"]))
            if kind == "work":
                collected.append(Work(draw(st.floats(0.1, 10))))
            elif kind == "start":
                in_flight.append(names.next())
                collected.append(Start(in_flight[-1]))
            elif kind == "complete" and in_flight:
                index = draw(st.integers(0, len(in_flight) - 1))
                collected.append(Completion(in_flight.pop(index)))
            elif kind == "loop" and depth < 2:
                collected.append(Loop(draw(st.integers(1, 4)), events(depth + 1)))
        return (*collected, *map(Completion, in_flight))

    schedule = (Work(1.0), Start("first"), *events(0), Completion("first"))
    sizes = {f"send.{i + 1}": draw(st.floats(0.1, 100)) for i in range(names.count)}
    return schedule, sizes | {"first": 5.0}


def unrolled(events: tuple[Event, ...]) -> list[Event]:
    """Write every iteration of the loops out."""
    collected: list[Event] = []
    for event in events:
        collected += event.times * unrolled(event.events) if isinstance(event, Loop) else [event]
    return collected


def waits(events: list[Event], sizes: dict[str, float], bandwidth: float) -> dict[str, float]:
    """Simulate a schedule of 1 FLOP a second event by event."""
    now = free = 0.0
    arrival, total = {}, dict.fromkeys(sizes, 0.0)
    for event in events:
        if isinstance(event, Work):
            now += event.flops
        elif isinstance(event, Start):
            free = max(now, free) + sizes[event.send] / bandwidth
            arrival[event.send] = free
        elif isinstance(event, Completion) and arrival[event.send] > now:
            total[event.send] += arrival[event.send] - now
            now = arrival[event.send]
    return total


def work_under(events: list[Event], name: str) -> float:
    """Return the FLOPs between the first start of a transfer and its completion."""
    start = events.index(Start(name))
    stop = events.index(Completion(name), start)
    return sum(event.flops for event in events[start:stop] if isinstance(event, Work))


@given(schedules(), st.floats(0.01, 1000), st.integers(1, 5))
def test_the_exposed_time_is_that_of_the_unrolled_schedule(drawn, bandwidth, num_steps) -> None:
    events, sizes = drawn
    flat = unrolled(events)
    seconds = sum(event.flops for event in flat if isinstance(event, Work))
    result = find_overlap(
        events,
        sizes,
        num_steps=num_steps,
        step_seconds=seconds / num_steps,
        bandwidth=bandwidth,
    )
    assert result is not None
    expected = waits(flat, sizes, bandwidth)
    for transfer in result.transfers:
        assert transfer.exposed_seconds == pytest.approx(
            expected[transfer.name], rel=1e-6, abs=1e-9
        )
        count = sum(isinstance(e, Start) and e.send == transfer.name for e in flat)
        assert transfer.executions == count
        assert 0 <= transfer.start <= transfer.end <= num_steps * (1 + 1e-9)
        assert transfer.local_steps == pytest.approx(
            work_under(flat, transfer.name) * num_steps / seconds
        )
    exposed = sum(expected.values())
    assert result.compute_utilization == pytest.approx(seconds / (seconds + exposed))
    assert result.mean_bytes_per_second * (seconds + exposed) == pytest.approx(
        sum(sizes[e.send] for e in flat if isinstance(e, Start))
    )
    for share, needed in result.required_bandwidth.items():
        at = seconds / (seconds + sum(waits(flat, sizes, needed).values()))
        below = seconds / (seconds + sum(waits(flat, sizes, 0.99 * needed).values()))
        assert at >= share - 1e-6 and below < share + 1e-6


def test_fragments_have_a_lower_peak_than_the_model_at_once() -> None:
    def block(p: int) -> list[Event]:
        return [Work(5.0), Start(f"{p}"), Work(5.0), Completion(f"{p}")]

    fragments = find_overlap(
        [event for p in range(4) for event in block(p)],
        {f"{p}": 10.0 for p in range(4)},
        num_steps=40,
        step_seconds=2.0,
        bandwidth=1e3,
    )
    # At the end, one leaf after another.
    ends = [end for p in range(4) for end in (Start(f"{p}"), Completion(f"{p}"))]
    at_once = find_overlap(
        [Work(40.0), *ends],
        {f"{p}": 10.0 for p in range(4)},
        num_steps=40,
        step_seconds=2.0,
        bandwidth=1e3,
    )
    assert fragments is not None and at_once is not None
    assert fragments.peak_bytes_per_second == 10 / 5 / 2
    assert at_once.peak_bytes_per_second == 40 / 2
    assert fragments.exposed_seconds == 0 and at_once.exposed_seconds == pytest.approx(0.04)
    assert fragments.mean_bytes_per_second == 40 / 80
    names = [[fragment.name for fragment in group] for group in grouped(fragments.transfers)]
    assert names == [["0"], ["1"], ["2"], ["3"]] and len(grouped(at_once.transfers)) == 1


def test_without_transfers_or_matmuls_there_is_no_overlap() -> None:
    settings = {"num_steps": 1, "step_seconds": 1.0, "bandwidth": 1.0}
    assert find_overlap([Work(1.0)], {}, **settings) is None
    assert find_overlap([Start("a"), Completion("a")], {"a": 1.0}, **settings) is None


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.nan, math.inf])
def test_a_bandwidth_that_is_no_positive_number_raises(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="expected a finite number of bytes per second above 0"):
        find_overlap([], {}, num_steps=1, step_seconds=1.0, bandwidth=bandwidth)
