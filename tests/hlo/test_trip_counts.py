import re

import jax
import jax.numpy as jnp
import pytest

from fedpax.hlo import parsing, trip_counts


def loop_runs(f, *, counted: bool) -> list[int | None]:
    """Return the executions of each loop's body, with or without the compiler's own count."""
    text = jax.jit(f).lower(jnp.ones((4, 4))).compile().as_text()
    if not counted:
        text, removed = re.subn(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
        assert removed, "the compiler has written no count to remove"
    module = parsing.parse(text)
    runs = trip_counts.executions(module)
    bodies = [
        instruction.reference("body")
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "while"
    ]
    assert all(runs[body].in_loop for body in bodies)
    return sorted(runs[body].times for body in bodies)


def step(x):
    return jnp.sin(x @ x)


def counting(start: int, test, change: int):
    """A while loop over a counter."""

    def loop(x):
        state = (jnp.int32(start), x)
        return jax.lax.while_loop(
            lambda s: test(s[0]), lambda s: (s[0] + change, step(s[1])), state
        )

    return loop


LOOPS = {
    "scan": (lambda x: jax.lax.scan(lambda c, b: (step(c * b), b), x, jnp.arange(5.0)), [5]),
    "reverse": (
        lambda x: jax.lax.scan(lambda c, b: (step(c * b), b), x, jnp.arange(9.0), reverse=True),
        [9],
    ),
    "fori_loop": (lambda x: jax.lax.fori_loop(3, 17, lambda i, x: step(x), x), [14]),
    "nested": (
        lambda x: jax.lax.fori_loop(
            0, 6, lambda i, x: jax.lax.fori_loop(2, 9, lambda i, x: step(x), step(x)), x
        ),
        [6, 42],
    ),
    "up to": (counting(1, lambda i: i <= 20, 3), [7]),
    "below": (counting(1, lambda i: i < 20, 3), [7]),
    "down to": (counting(20, lambda i: i >= 0, -3), [7]),
    "above": (counting(20, lambda i: i > 0, -4), [5]),
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_trip_count_of_a_loop_is_found_with_and_without_the_compilers_count(name: str):
    loop, expected = LOOPS[name]
    assert loop_runs(loop, counted=True) == expected
    assert loop_runs(loop, counted=False) == expected


@pytest.mark.parametrize(
    "loop",
    [
        lambda x: jax.lax.fori_loop(0, x.astype(int)[0, 0], lambda i, x: step(x), x),
        lambda x: jax.lax.while_loop(lambda x: x.sum() < 100, step, x),
        lambda x: jax.lax.while_loop(
            lambda s: (s[0] < 5) & (s[1].sum() < 3), lambda s: (s[0] + 1, step(s[1])), (0, x)
        ),
    ],
    ids=["length from data", "until a value", "counter or value"],
)
def test_a_trip_count_that_depends_on_data_is_none(loop):
    assert loop_runs(loop, counted=True) == [None]


def test_a_trip_count_that_changes_is_none():
    def triangle(x):
        return jax.lax.fori_loop(
            0, 6, lambda i, x: jax.lax.fori_loop(i, 9, lambda j, x: step(x), x), x
        )

    text = jax.jit(triangle).lower(jnp.ones((4, 4))).compile().as_text()
    module = parsing.parse(text)
    assert {runs.times for runs in trip_counts.executions(module).values() if runs.in_loop} >= {
        6,
        None,
    }


def test_the_executions_of_branches_are_unknown() -> None:
    """Which branch of a conditional runs is known only at run time."""

    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: step(step(x)), lambda x: step(x) + 1, x)

    module = parsing.parse(jax.jit(either).lower(jnp.ones((4, 4))).compile().as_text())
    runs = trip_counts.executions(module)
    (conditional,) = (
        instruction
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "conditional"
    )
    branches = list(trip_counts.callees(conditional))
    assert len(branches) == 2 and {runs[branch].times for branch in branches} == {None}
