"""Costs until a target."""

import dataclasses
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
from fedpax.experiments.pretrain import pretrain_text
from fedpax.experiments.text_experiment import short_rows
from fedpax.models.transformer import TransformerConfig
from fedpax.parallel.mesh import MeshConfig
from fedpax.reports.target import (
    MetricTrajectory,
    Target,
    cost_to_target,
    draw_trajectories,
    format_target_table,
    parse_target,
    trajectory_of,
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
    trajectories = []
    for has_steps in (False, True):
        run = make_run(has_steps)
        with jax.set_mesh(run.mesh):
            trajectories.append(trajectory_of(run, lines, "accuracy"))
    full, partial = trajectories
    assert full.values == partial.values == [0.1, 0.3] and full.rounds == [1, 3]
    # Three clients receive 5 numbers, and send 5 and their loss.
    assert full.num_bytes[0] == 3 * 4 * (5 + 5 + 1) and full.num_bytes[1] == 3 * full.num_bytes[0]
    assert full.flops[1] == pytest.approx(3 * full.flops[0]) and full.flops[0] > 3 * 4 * 4 * 2 * 5
    # Of 12 steps, 1 + 2 + 3 are valid in the first round, 2 + 3 + 4 and 3 + 4 + 4 in the next.
    assert partial.flops[0] / full.flops[0] == pytest.approx(6 / 12)
    assert partial.flops[1] / full.flops[0] == pytest.approx((6 + 9 + 11) / 12)


def test_absent_clients_receive_and_send_nothing() -> None:
    ids = np.array([[0, -1, 2], [-1, -1, -1], [1, 2, 0]])
    examples = np.array([[3, 5, 2], [1, 1, 1], [4, 0, 1]])

    def cohort(number: int) -> Cohort:
        batches = np.ones((3, 4, 2, 5), np.float32)
        return Cohort(batches, num_examples=examples[number], client_ids=ids[number])

    run = make_run(False)._replace(cohorts=FunctionRounds(cohort))
    lines = [{"round": number, "accuracy": 0.1} for number in (1, 2, 3)]
    with jax.set_mesh(run.mesh):
        found = trajectory_of(run, lines, "accuracy")
        full = trajectory_of(make_run(False), lines, "accuracy")
    assert found.num_bytes == [number * 4 * (5 + 5 + 1 + 1) for number in (2, 2, 4)]  # and weights
    assert found.flops == pytest.approx([full.flops[0] * number / 3 for number in (2, 2, 4)])


def test_a_single_island_sends_nothing() -> None:
    text = short_rows(local_steps=1, batch_size=2, seq_len=16)
    model = TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16, vocab_size=256)
    run = dataclasses.replace(pretrain_text(), data=text, model=model).build()
    with jax.set_mesh(run.mesh):
        trajectory = trajectory_of(run, [{"round": 2, "loss": 1.0}], "loss")
    assert trajectory.num_bytes == [0.0] and trajectory.flops[0] > 0


def test_rounds_of_several_lengths_have_the_flops_of_their_steps() -> None:
    lines, run = [{"round": 3, "accuracy": 0.1}], make_run(True)

    def cohort(number: int) -> Cohort:  # as with `pad_to="round"`
        steps = np.minimum(np.arange(3) + 1 + number, 4)
        return Cohort(np.ones((3, (4, 6, 5)[number], 2, 5), np.float32), num_steps=steps)

    with jax.set_mesh(run.mesh):
        expected = trajectory_of(run, lines, "accuracy").flops
        of_lengths = run._replace(cohorts=FunctionRounds(cohort))
        assert trajectory_of(of_lengths, lines, "accuracy").flops == pytest.approx(expected)


def test_a_target_is_reached_from_below_or_for_a_loss_from_above() -> None:
    trajectory = MetricTrajectory(
        [0.9, math.nan, 0.4, 0.6], [2, 4, 6, 8], [1, 2, 3, 4], [10, 20, 30, 40]
    )
    assert cost_to_target(trajectory, Target("loss", 0.5)) == (6, 3, 30, 0.4)
    assert cost_to_target(trajectory, Target("accuracy", 0.5)) == (2, 1, 10, 0.9)
    missed = cost_to_target(trajectory, Target("accuracy", 0.95))
    assert missed.rounds is None and math.isnan(missed.flops) and missed.best == 0.9


def test_the_table_begins_with_the_fastest_run(tmp_path) -> None:
    target = Target("accuracy", 0.8)
    trajectories = {
        name: MetricTrajectory(values, [1, 2], [1e6, 2e6], [1e9, 2e9])
        for name, values in {"never": [0.1, 0.7], "slow": [0.1, 0.9], "fast": [0.8, 0.8]}.items()
    }
    text = write_target_comparison(trajectories, target, tmp_path)
    rows = [line.split("|")[1].strip() for line in text.splitlines()[2:]]
    assert rows == ["fast", "slow", "never"] and "not reached" in text
    costs = {
        name: [cost_to_target(trajectory, target)] for name, trajectory in trajectories.items()
    }
    assert text == format_target_table(costs, target)
    content = json.loads((tmp_path / "target.json").read_text())
    never = {"name": "never", "experiment": "never", "best": 0.7}
    assert content["runs"][0] == never | {"rounds": None, "num_bytes": None, "flops": None}
    assert (tmp_path / "target.png").stat().st_size > 5_000


def test_an_experiment_with_several_seeds_is_one_row_of_means(tmp_path) -> None:
    random = np.random.default_rng(0)
    target, rounds = Target("loss", 0.5), np.arange(1, 9)
    trajectories, titles = {}, {}
    for title, reach in {"a": (3, 5, 8), "b": (2, 4, 9), "c": (9, 9, 9)}.items():
        for seed, first in enumerate(reach):
            values = np.where(rounds < first, 0.9, 0.4) + random.uniform(0, 0.1, 8)
            trajectories[f"{title}_seed_{seed}"] = MetricTrajectory(
                *(x.tolist() for x in (values, rounds, rounds, 10 * rounds))
            )
            titles[f"{title}_seed_{seed}"] = title
    table = write_target_comparison(trajectories, target, tmp_path, titles)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    best = {
        title: [min(trajectories[f"{title}_seed_{k}"].values) for k in range(3)] for title in "abc"
    }
    means = {t: f"{np.mean(x):.4f} ± {np.std(x, ddof=1):.4f}" for t, x in best.items()}
    assert rows == [  # an experiment that always reaches the target comes first
        ["a", f"5.3 ± {np.std((3, 5, 8), ddof=1):.1f}", "5.3 B", "53.3", means["a"]],
        ["b", "3.0 ± 1.4 (2 of 3)", "3.0 B", "30", means["b"]],
        ["c", "not reached", "-", "-", means["c"]],
    ]
    names = [run["name"] for run in json.loads((tmp_path / "target.json").read_text())["runs"]]
    assert names == list(trajectories)
    figure = draw_trajectories(trajectories, target, titles)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    colors = [line.get_color() for line in figure.axes[0].lines[1:]]
    assert len(colors) == 9 and len(set(colors)) == 3


@pytest.mark.parametrize("text", ["accuracy", "=0.5", "accuracy=high", "accuracy=nan"])
def test_other_texts_are_no_targets(text: str) -> None:
    with pytest.raises(ValueError, match=r"Set for example --target=accuracy=0\.85"):
        parse_target(text)
