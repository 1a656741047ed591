"""Tests of the optimizer configuration: optimizers, schedules and clipping."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.settings.optimizer_settings import (
    OptimizerConfig,
    muon_dimension_numbers,
    stable_decay,
    warm_restarts,
)

NAMES = typing.get_args(typing.get_type_hints(OptimizerConfig)["name"])
MODEL = transformer(
    TransformerConfig(vocab_size=16, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=24)
)

SHAPES = (("up", (2, 8, 12)), ("table", (6, 8)), ("scale", (8,)))
LOGICAL = {"up": ("layers", "embed", "mlp"), "table": ("vocab", "embed"), "scale": ("norm",)}


@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_decreases_a_quadratic_loss(name: str) -> None:
    random = np.random.default_rng(0)
    goal, start = (
        {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in SHAPES}
        for _ in range(2)
    )
    rate = {"sgd": 0.3, "lars": 20.0, "lamb": 0.1}.get(name, 0.03)
    config = OptimizerConfig(name=name, learning_rate=rate, weight_decay=0.0, warmup_steps=2)
    optimizer = config.make(60, LOGICAL)

    def loss(params: Any) -> jax.Array:
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(goal), strict=True)
        return sum(jnp.sum((p - g) ** 2) for p, g in pairs)

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), loss(params)

    (_, _), losses = jax.jit(
        lambda: jax.lax.scan(step, (start, optimizer.init(start)), length=60)
    )()
    assert np.isfinite(losses).all() and losses[-1] < 0.8 * losses[0]


def numpy_rate(config: OptimizerConfig, num_steps: int, step: int) -> float:
    """Return the learning rate of a step by the formulas, in float64."""
    peak, final = config.learning_rate, config.final_lr_ratio * config.learning_rate
    if step < config.warmup_steps:
        return peak * step / config.warmup_steps
    t, n = step - config.warmup_steps, num_steps - config.warmup_steps
    cooldown = min(round(config.decay_fraction * num_steps), n)
    length = config.restart_steps
    if config.schedule == "warm_restarts":
        while t >= length:
            t, length = t - length, length * config.restart_factor
    fraction = {
        "constant": 1.0,
        "linear": 1 - t / n,
        "cosine": (1 + np.cos(np.pi * t / n)) / 2,
        "wsd": 1.0 if t < n - cooldown else 1 - np.sqrt((t - n + cooldown) / cooldown),
        "warm_restarts": (1 + np.cos(np.pi * t / length)) / 2,
    }[config.schedule]
    return peak if config.schedule == "constant" else final + (peak - final) * fraction


SCHEDULES = typing.get_args(typing.get_type_hints(OptimizerConfig)["schedule"])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"warmup_steps": 0, "decay_fraction": 0.25, "restart_steps": 7, "restart_factor": 1},
        {"warmup_steps": 40, "decay_fraction": 1.0, "restart_steps": 1, "restart_factor": 3},
    ],
)
def test_schedules_equal_their_formulas_at_every_step(fields: Any) -> None:
    base = {"learning_rate": 0.3, "warmup_steps": 13, "final_lr_ratio": 0.1, "restart_steps": 10}
    configs = [OptimizerConfig(**base | fields, schedule=schedule) for schedule in SCHEDULES]
    steps, rates = np.arange(150), [config.learning_rate_schedule(150) for config in configs]
    result = jax.jit(lambda steps: [jax.vmap(rate)(steps) for rate in rates])(steps)
    for config, values in zip(configs, result, strict=True):
        expected = [numpy_rate(config, 150, int(step)) for step in steps]
        np.testing.assert_allclose(values, expected, rtol=2e-5, atol=1e-7, err_msg=config.schedule)


def test_the_stable_phase_does_not_depend_on_the_length_of_the_run() -> None:
    config = OptimizerConfig(schedule="wsd", warmup_steps=10, decay_fraction=0.2)
    steps = np.arange(100)
    short, long = (jax.vmap(config.learning_rate_schedule(n))(steps) for n in (100, 400))
    assert (short[:81] == long[:81]).all()
    assert short[99] < 0.2 * long[99] == 0.2 * np.float32(config.learning_rate)


def test_a_decay_of_no_steps_ends_the_run_at_the_peak() -> None:
    rate = OptimizerConfig(schedule="wsd", decay_fraction=0.0).learning_rate_schedule(100)
    assert rate(99) == np.float32(3e-3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"decay_fraction": 1.5}, r"optimizer\.decay_fraction=1\.5: expected a number from 0 to 1"),
        ({"restart_steps": 0}, r"Set --optimizer\.restart_steps"),
        ({"restart_factor": 0}, r"Set --optimizer\.restart_factor"),
    ],
)
def test_settings_of_schedules_out_of_range_raise(fields: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(**fields)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules_warm_up_and_end_at_the_final_ratio(schedule: Any) -> None:
    config = OptimizerConfig(
        learning_rate=0.5, schedule=schedule, warmup_steps=10, final_lr_ratio=0.2
    )
    rate = config.learning_rate_schedule(110)
    assert rate(0) == 0 and np.isclose(rate(5), 0.25) and np.isclose(rate(10), 0.5)
    assert np.isclose(rate(110), 0.5 if schedule == "constant" else 0.1)
    middle = {"cosine": 0.3, "linear": 0.3, "constant": 0.5}[schedule]
    assert np.isclose(rate(60), middle)
    assert np.isclose(
        dataclasses.replace(config, warmup_steps=0).learning_rate_schedule(100)(0), 0.5
    )


def test_a_warmup_that_takes_all_steps_is_told_with_its_highest_rate() -> None:
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=20)
    assert not config.describe_warmup(21)
    for steps in (16, 20):
        (line,) = config.describe_warmup(steps)
        rate = config.learning_rate_schedule(steps)(steps - 1)
        assert f"warmup_steps=20, but the schedule has {steps} steps" in line
        assert f"rises to {rate:.3g} and never reaches --optimizer.learning_rate=0.5" in line
        assert line.endswith(f"--optimizer.warmup_steps={steps // 10}")


def test_the_gradient_is_clipped_by_its_global_norm() -> None:
    optimizer = OptimizerConfig(
        name="sgd", learning_rate=1.0, warmup_steps=0, b1=0.0, weight_decay=0.0, grad_clip_norm=0.5
    ).make(10)
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    gradient = {"a": jnp.full(3, 3.0), "b": jnp.full(4, -4.0)}
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    assert np.isclose(optax.tree.norm(updates), 0.5)


def test_muon_orthogonalizes_matrices_alone() -> None:
    dimensions = muon_dimension_numbers(MODEL.logical_axes)
    attention, mlp = dimensions["layers"]["attention"], dimensions["layers"]["feed_forward"]
    assert (attention["query"].reduction_axis, attention["query"].output_axis) == ((1,), (2, 3))
    assert (attention["output"].reduction_axis, attention["output"].output_axis) == ((1, 2), (3,))
    assert (mlp["gate"].reduction_axis, mlp["down"].reduction_axis) == ((1,), (1,))
    assert dimensions["embedding"] is None and dimensions["final_norm"]["scale"] is None
    experts = muon_dimension_numbers({"up": ("layers", "experts", "embed", "mlp")})["up"]
    assert (experts.reduction_axis, experts.output_axis) == ((2,), (3,))
    config = OptimizerConfig(name="muon", learning_rate=1.0, warmup_steps=0, weight_decay=0.0)
    optimizer = config.make(10, LOGICAL)
    random = np.random.default_rng(1)
    params = {name: jnp.asarray(random.normal(size=s), jnp.float32) for name, s in SHAPES}
    updates, _ = jax.jit(lambda g: optimizer.update(g, optimizer.init(params), params))(params)
    values = np.linalg.svd(np.asarray(updates["up"])[1], compute_uv=False)
    assert values.max() / values.min() < 2  # Newton-Schulz iterations bring them to about 1


def test_muon_without_logical_axes_raises() -> None:
    with pytest.raises(ValueError, match=r"Pass logical_axes=model\.logical_axes"):
        OptimizerConfig(name="muon").make(10)


def test_schedules_of_one_decay_and_of_cycles() -> None:
    rate = stable_decay(1.0, 0.1, stable_steps=6, decay_steps=4)
    assert [round(float(rate(t)), 3) for t in (0, 6, 7, 9, 10)] == [1.0, 1.0, 0.55, 0.221, 0.1]
    rate = warm_restarts(1.0, 0.0, num_steps=28, first_cycle=4)  # cycles of 4, 8, 16
    rates = [round(float(rate(t)), 3) for t in (0, 2, 4, 8, 12, 20)]
    assert rates == [1.0, 0.5, 1.0, 0.5, 1.0, 0.5]
