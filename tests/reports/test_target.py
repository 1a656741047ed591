"""Costs until a target."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax import Cohort
from fedpax.algorithms import fedavg
from fedpax.data import FunctionRounds
from fedpax.parallel.mesh import MeshConfig
from fedpax.reports.target import (
    Course,
    Target,
    cost_to_target,
    course_of,
    format_target_table,
    parse_target,
    write_target_comparison,
)
from fedpax.training.experiment import Run


def make_run(has_steps: bool) -> Run:
    """Make a run of FedAvg, in which client i takes i + 1 of 4 steps if `has_steps`."""

    def loss_fn(w: Any, batch: Any) -> Any:
        return jnp.mean((batch @ w) ** 2), None

    def cohort(number: int) -> Cohort:
        steps = np.minimum(np.arange(3) + 1 + number, 4) if has_steps else None
        return Cohort(np.ones((3, 4, 2, 5), np.float32), num_steps=steps)

    return Run(
        algorithm=fedavg(loss_fn, cohort_size=3, client_optimizer=optax.sgd(0.1), chunk_size=1),
        init=lambda key: jnp.zeros(5),
        cohorts=FunctionRounds(cohort),
        evaluate=lambda params: {"loss": 0.0},
        mesh=MeshConfig().make(jax.devices()[:1]),
        items_per_round=24,
        placement="clients",
    )


def test_flops_are_those_of_valid_steps_and_bytes_those_of_models() -> None:
    lines = [{"round": number, "accuracy": number / 10} for number in (1, 3)]
    courses = []
    for has_steps in (False, True):
        run = make_run(has_steps)
        with jax.set_mesh(run.mesh):
            courses.append(course_of(run, lines, "accuracy"))
    full, partial = courses
    assert full.values == partial.values == [0.1, 0.3] and full.rounds == [1, 3]
    # Three clients receive 5 numbers, and send 5 and their loss.
    assert full.num_bytes[0] == 3 * 4 * (5 + 5 + 1) and full.num_bytes[1] == 3 * full.num_bytes[0]
    assert full.flops[1] == pytest.approx(3 * full.flops[0]) and full.flops[0] > 3 * 4 * 4 * 2 * 5
    # Of 12 steps, 1 + 2 + 3 are valid in the first round, 2 + 3 + 4 and 3 + 4 + 4 in the next.
    assert partial.flops[0] / full.flops[0] == pytest.approx(6 / 12)
    assert partial.flops[1] / full.flops[0] == pytest.approx((6 + 9 + 11) / 12)


def test_a_target_is_reached_from_below_or_for_a_loss_from_above() -> None:
    course = Course([0.9, math.nan, 0.4, 0.6], [2, 4, 6, 8], [1, 2, 3, 4], [10, 20, 30, 40])
    assert cost_to_target(course, Target("loss", 0.5)) == (6, 3, 30, 0.4)
    assert cost_to_target(course, Target("accuracy", 0.5)) == (2, 1, 10, 0.9)
    missed = cost_to_target(course, Target("accuracy", 0.95))
    assert missed.rounds is None and math.isnan(missed.flops) and missed.best == 0.9


def test_the_table_begins_with_the_fastest_run(tmp_path) -> None:
    target = Target("accuracy", 0.8)
    courses = {
        name: Course(values, [1, 2], [1e6, 2e6], [1e9, 2e9])
        for name, values in {"never": [0.1, 0.7], "slow": [0.1, 0.9], "fast": [0.8, 0.8]}.items()
    }
    text = write_target_comparison(courses, target, tmp_path)
    rows = [line.split("|")[1].strip() for line in text.splitlines()[2:]]
    assert rows == ["fast", "slow", "never"] and "not reached" in text
    costs = {name: cost_to_target(course, target) for name, course in courses.items()}
    assert text == format_target_table(costs, target)
    content = json.loads((tmp_path / "target.json").read_text())
    assert content["runs"][0] | {"best": 0} == {
        "name": "never", "rounds": None, "num_bytes": None, "flops": None, "best": 0,
    }  # fmt: skip
    assert (tmp_path / "target.png").stat().st_size > 5_000


@pytest.mark.parametrize("text", ["accuracy", "=0.5", "accuracy=high", "accuracy=nan"])
def test_other_texts_are_no_targets(text: str) -> None:
    with pytest.raises(ValueError, match=r"Set for example --target=accuracy=0\.85"):
        parse_target(text)
