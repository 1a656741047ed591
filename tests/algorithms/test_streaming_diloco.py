"""Streaming DiLoCo: the paper's algorithm, its equality with DiLoCo, and what is sent when."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpy_methods as reference
import optax
import pytest
from fragment_problem import (
    BATCH,
    ISLANDS,
    SHAPES,
    assigned,
    batch_of,
    flatten,
    loss_fn,
    numpy_gradient,
    own_fragments,
    random_params,
    random_rounds,
    step_by_step,
    unflatten,
)
from method_problem import assert_close
from numpy_methods import each

import fedpax
from fedpax import Cohort
from fedpax.aggregators import (
    PrivacyAccountant,
    codecs,
    compressed_mean,
    private_mean,
    private_secure_mean,
    quantized_mean,
)
from fedpax.algorithms import diloco
from fedpax.algorithms.parts import streaming_diloco_blocks
from fedpax.algorithms.parts.fragments import layer_fragments
from fedpax.algorithms.streaming_diloco import streaming_diloco
from fedpax.deploy.local_stages import run_local

INNER = optax.sgd(0.05, momentum=0.8)
ADAMW = optax.adamw(0.05, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1)
OUTER = optax.sgd(0.6, momentum=0.7, nesterov=True)


def algorithm(fragments, delay, mixing, **settings):
    given = {"inner_optimizer": INNER, "outer_optimizer": OUTER} | settings
    return streaming_diloco(
        loss_fn, islands=ISLANDS, fragments=fragments, delay=delay, mixing=mixing, **given
    )


def run(method, rounds, **fields):
    """Return the states and metrics of each round."""
    state, step, history = method.init(unflatten(random_params())), jax.jit(method.round), []
    for batches in rounds:
        state, metrics = step(state, Cohort(batches, **fields))
        history.append((state, metrics))
    return history


@pytest.mark.parametrize(
    ("fragments", "num_fragments", "steps", "delay", "mixing"),
    [
        (layer_fragments(3), 3, 6, 1, 0.5),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (layer_fragments(3, "sequential"), 3, 9, 2, 0.0),
                (own_fragments, 2, 4, 0, 0.25),
                (layer_fragments(1), 1, 5, 4, 0.5),
                (layer_fragments(1), 1, 3, 0, 0.0),
                (layer_fragments(5), 5, 10, 1, 0.75),
                (layer_fragments(4), 4, 2, 0, 0.5),
                (own_fragments, 2, 8, 3, 0.9),
            )
        ],
    ],
)
def test_equals_a_numpy_loop(fragments, num_fragments, steps, delay, mixing):
    """Islands' models and the outer model, over three rounds. The outer model is the anchor."""
    rounds = random_rounds(3, steps)
    expected = step_by_step(
        random_params(),
        rounds,
        reference.adam(0.05, 0.8, 0.9, 1e-6, decay=0.1),
        reference.momentum(0.6, 0.7, nesterov=True),
        assigned(num_fragments, fragments),
        num_fragments,
        delay,
        mixing,
    )
    result = run(algorithm(fragments, delay, mixing, inner_optimizer=ADAMW), rounds)
    for (state, metrics), (x, y, report) in zip(result, expected, strict=True):
        assert_close(flatten(state.params), x)
        for i in range(ISLANDS):
            assert_close(flatten(jax.tree.map(lambda z, i=i: z[i], state.local_params)), y[i])
        assert_close(metrics, report)


@pytest.mark.parametrize(
    ("pattern", "steps", "delay", "mixing"),
    [("strided", 9, 1, 0.5), pytest.param("sequential", 6, 0, 0.0, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "aggregator",
    [
        private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
        pytest.param(quantized_mean(4), marks=pytest.mark.slow),
    ],
    ids=["noise", "residuals"],
)
def test_a_loop_over_fragments_equals_unrolled_blocks(
    monkeypatch, pattern, steps, delay, mixing, aggregator
):
    """With padded steps, an absent island, and noise and states of each fragment."""

    def trained():  # a new method, because `jax.jit` keeps what it traced of the former
        method = algorithm(layer_fragments(3, pattern), delay, mixing, aggregator=aggregator)
        return run(method, rounds, **fields)

    fields = {
        "num_steps": np.array([steps, steps - 2, 0], np.int32),
        "num_examples": np.array([1.0, 3.0, 5.0], np.float32),
    }
    rounds = random_rounds(2, steps)
    expected = trained()
    monkeypatch.setattr(streaming_diloco_blocks, "SHORTEST_LOOP", 2)
    assert_close(trained(), expected)


def test_stages_have_no_loop_over_fragments(monkeypatch):
    """The server waits for the islands in each block, which it cannot do in a loop."""
    monkeypatch.setattr(streaming_diloco_blocks, "SHORTEST_LOOP", 2)
    method, (batches,) = algorithm(layer_fragments(3), 1, 0.5), random_rounds(1, 6)
    args = method.init(unflatten(random_params())), Cohort(batches)
    expected = jax.jit(method.round)(*args)  # with the loop
    stages = fedpax.stages(method.round, *args)
    assert_close(run_local(stages, *args), expected)


@pytest.mark.parametrize("shortest_loop", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_epsilon_counts_each_fragment_of_a_round(monkeypatch, shortest_loop):
    """Each fragment of an island's update is clipped to the norm by itself, and then released."""
    monkeypatch.setattr(streaming_diloco_blocks, "SHORTEST_LOOP", shortest_loop)
    method = streaming_diloco(
        lambda w, batch: (jnp.mean(batch) * jnp.sum(w["layers"]) * w["norm"], {}),
        islands=2,
        inner_optimizer=optax.sgd(0.1),
        fragments=layer_fragments(3),
        delay=1,
        aggregator=private_secure_mean(max_norm=1.0, noise_multiplier=2.0, seed=0),
    )
    rng = np.random.default_rng(0)
    state = method.init({"layers": jnp.asarray(rng.normal(size=2)), "norm": jnp.ones(())})
    step, cohort = jax.jit(method.round), Cohort(jnp.asarray(rng.normal(size=(2, 6, 1))))
    for rounds in (1, 2):
        state, metrics = step(state, cohort)
        expected = PrivacyAccountant(2.0, 1e-6, discrete=True).epsilon(3 * rounds)
        assert metrics["epsilon"] == pytest.approx(expected, rel=1e-5)


def test_the_program_of_a_round_does_not_grow_with_its_fragments():
    """Fragments that are alike share the body of a loop: the local steps are in it once."""

    def matmuls(layers):
        params = {"layers": jnp.ones((layers, 3, 3))}
        method = streaming_diloco(
            lambda w, batch: (jnp.mean(jnp.tanh(batch @ w["layers"][0]) ** 2), {}),
            islands=2,
            inner_optimizer=optax.sgd(0.1),
            fragments=lambda path, leaf: list(range(layers)),
        )
        state = jax.eval_shape(method.init, params)
        cohort = Cohort(jnp.ones((2, 2 * layers, 1, 3)))
        return str(jax.make_jaxpr(method.round)(state, cohort)).count("dot_general")

    assert matmuls(6) == matmuls(24) == matmuls(2) // 2


def test_one_fragment_without_delay_is_diloco_bitwise():
    plain = diloco(loss_fn, islands=ISLANDS, inner_optimizer=INNER, outer_optimizer=OUTER)
    rounds = random_rounds(3, 4)
    for (state, metrics), (wanted, expected) in zip(
        run(algorithm(1, 0, 0.0), rounds), run(plain, rounds), strict=True
    ):
        for got, want in (
            (state.params, wanted.params),
            (state.outer_optimizer_state[0], wanted.outer_optimizer_state),
            (state.inner_optimizer_state, wanted.inner_optimizer_state),
            (metrics, expected),
        ):
            jax.tree.map(np.testing.assert_array_equal, got, want)


def test_fragments_that_synchronize_at_every_step_are_diloco():
    """With H = 1 all fragments are synchronized together."""
    plain = diloco(loss_fn, islands=ISLANDS, inner_optimizer=INNER, outer_optimizer=OUTER)
    rounds = random_rounds(4, 1)
    result = run(algorithm(5, 0, 0.0), rounds)
    for (state, metrics), (wanted, expected) in zip(result, run(plain, rounds), strict=True):
        assert_close((state.params, metrics), (wanted.params, expected))


def test_padding_and_weights():
    """Padded steps change nothing, islands weigh by their examples, absent ones not at all."""
    steps, rounds = 4, random_rounds(1, 4)
    num_steps = np.array([4, 3, 0], np.int32)
    examples = np.array([1.0, 3.0, 5.0], np.float32)
    inner = optax.sgd(0.1)
    method = algorithm(own_fragments, 1, 0.5, inner_optimizer=inner)
    [(state, metrics)] = run(method, rounds, num_steps=num_steps, num_examples=examples)

    def masked(gradient_step):  # a plain loop with the same schedule, for two fragments
        x = {name: np.float64(leaf) for name, leaf in random_params().items()}
        y, losses = [x] * ISLANDS, [[] for _ in range(ISLANDS)]
        fragment_of = assigned(2, own_fragments)
        outer = [reference.momentum(0.6, 0.7, nesterov=True)] * 2
        states = [o.init(x) for o in outer]
        for step in range(steps):
            for i in range(ISLANDS):
                if step < num_steps[i]:
                    gradient, report = numpy_gradient(y[i], batch_of(rounds[0], i, step))
                    y[i] = gradient_step(y[i], gradient)
                    losses[i].append(report["loss"])
            if step in (0, 2):
                p = step // 2
                sent = reference.weighted_mean([each(np.subtract, x, z) for z in y], [1, 3, 0])
            else:
                moved, states[p] = outer[p].step(x, sent, states[p])
                inside = {k: fragment_of[k] == p for k in SHAPES}
                x = each(np.where, inside, moved, x)
                y = [each(lambda a, z, x: np.where(a, (z + x) / 2, z), inside, z, x) for z in y]
        return x, np.average([np.mean(losses[0]), np.mean(losses[1])], weights=[1, 3])

    x, loss = masked(lambda y, g: each(lambda a, b: a - 0.1 * b, y, g))
    assert_close(flatten(state.params), x)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)


def own_fragments_of_equal_shape(path, leaf):
    return [0, 1, 0, 1] if path == "layers/kernel" else 0


def test_fragments_have_noise_of_their_own():
    noisy = private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0)
    method = algorithm(own_fragments_of_equal_shape, 0, 0.0, aggregator=noisy, outer_optimizer=None)
    idle = [jax.tree.map(jnp.zeros_like, batches) for batches in random_rounds(1, 2)]
    [(state, _)] = run(method, idle)
    kernel = state.params["layers"]["kernel"] - unflatten(random_params())["layers"]["kernel"]
    assert np.all(kernel[::2] != 0) and not np.any(np.isclose(kernel[::2], kernel[1::2]))


@pytest.mark.parametrize("aggregator", [None, quantized_mean(4), compressed_mean(codecs.e3m0())])
def test_a_bfloat16_model_keeps_its_dtypes(aggregator):
    method = algorithm(own_fragments, 1, np.float32(0.5), aggregator=aggregator)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), unflatten(random_params()))
    state = jax.eval_shape(method.init, params)
    after, _ = jax.eval_shape(method.round, state, Cohort(random_rounds(1, 4)[0]))
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_an_aggregator_keeps_a_residual_for_each_fragment():
    """With outer SGD of rate 1, quantization loses nothing: model and residuals telescope."""
    exact = algorithm(3, 0, 0.0, inner_optimizer=optax.sgd(0.1), outer_optimizer=optax.sgd(1.0))
    coarse = algorithm(
        3,
        0,
        0.0,
        inner_optimizer=optax.sgd(0.1),
        outer_optimizer=optax.sgd(1.0),
        aggregator=quantized_mean(4),
    )
    rounds = random_rounds(1, 3)
    [(wanted, _)], [(state, _)] = run(exact, rounds), run(coarse, rounds)
    # Fragment 0, layers 0 and 2, goes first, before quantization changes any gradient.
    residual = state.aggregator_state[0].residual["layers"]
    for name in ("kernel", "scale"):
        unsent = np.mean(residual[name], axis=0)
        assert np.abs(unsent).max() > 1e-3
        result, exact = (it.params["layers"][name][::2] for it in (state, wanted))
        np.testing.assert_allclose(result - unsent, exact, rtol=1e-5, atol=1e-6)
    shapes = [jax.tree.map(jnp.shape, s.residual) for s in state.aggregator_state]
    assert shapes[1]["layers"] == {"kernel": (ISLANDS, 2, 2), "scale": (ISLANDS, 2)}
    assert shapes[1]["embedding"] is None and shapes[2]["embedding"] == (ISLANDS, 3)


def test_steps_are_divided_between_two_transfers():
    """An all-to-all and an all-gather on a mesh; the values are those without a mesh."""
    islands, steps = 4, 8
    method = streaming_diloco(
        lambda w, batch: (jnp.mean((batch @ w) ** 2), {}),
        islands=islands,
        inner_optimizer=optax.sgd(0.1),
        fragments=1,
        delay=3,
        mixing=0.5,
        aggregator=compressed_mean(codecs.uniform(16, block_size=16)),
    )
    rng = np.random.default_rng(0)
    cohort = Cohort(np.float32(rng.normal(size=(islands, steps, BATCH, 64))))
    state = method.init(jnp.asarray(rng.normal(size=64), jnp.float32))

    def scans(round):
        return set(re.findall(r"\blength=(\d+)", str(jax.make_jaxpr(round)(state, cohort))))

    expected = jax.jit(method.round)(state, cohort)
    assert {"5", "3"} <= scans(method.round)
    with jax.set_mesh(jax.make_mesh((4,), ("islands",), devices=jax.devices()[:4])):
        assert {"5", "1", "2"} <= scans(method.round)
        got = jax.jit(method.round)(state, cohort)
    assert_close(got, expected)


def test_the_islands_of_the_literal_recursion_drift_apart():
    """Why the anchor is the outer model: own anchors are never brought together."""
    rng = np.random.default_rng(0)
    steps, islands = 4, 8
    spread = {}
    for anchored_by in ("outer model", "own model"):
        x, y = 0.0, np.zeros(islands)
        anchor, spreads = np.zeros(islands), []
        for clock in range(1, 4001):
            y = y + rng.normal(size=islands)
            if clock % steps == 0:  # sent
                base = np.full(islands, x) if anchored_by == "outer model" else anchor
                delta, anchor = np.mean(base - y), y.copy()
            elif clock % steps == 1 and clock > steps:  # used one step later
                y = base - delta
                x = np.mean(y)
                spreads.append(np.std(y))
        spread[anchored_by] = spreads[-1]
    assert spread["outer model"] == 0 and spread["own model"] > 10


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"delay": 1.0}, TypeError, "expected an int: a number of inner steps"),
        ({"delay": -1}, ValueError, "Pass delay=0 for no overlap"),
        ({"mixing": 1.0}, ValueError, "Pass 0.0 or 0.5"),
        ({"mixing": float("nan")}, ValueError, "Pass 0.0 or 0.5"),
        ({"fragments": 0}, ValueError, "Pass fragments=1"),
        ({"islands": 0}, ValueError, "expected at least one participant"),
    ],
)
def test_invalid_settings_raise(settings, error, words):
    valid = {"islands": 2, "inner_optimizer": INNER, "fragments": 2, "delay": 1, "mixing": 0.5}
    with pytest.raises(error, match=words):
        streaming_diloco(loss_fn, **valid | settings)


@pytest.mark.parametrize(
    ("fragments", "delay", "steps", "words"),
    [
        (3, 0, 4, "Make the number of steps .* a multiple of 3"),
        (3, 2, 6, "expected below 2, .* Reduce delay, or use fewer fragments"),
        (2, 1, 1, "expected below 1"),
    ],
)
def test_rounds_that_do_not_fit_raise(fragments, delay, steps, words):
    method = algorithm(fragments, delay, 0.0)
    state = method.init(unflatten(random_params()))
    with pytest.raises(ValueError, match=words):
        method.round(state, Cohort(random_rounds(1, steps)[0]))
