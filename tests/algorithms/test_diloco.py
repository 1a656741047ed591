"""DiLoCo: default settings, state of islands, and equality with other methods."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy_methods as reference
import optax
import pytest
from method_problem import PARTICIPANTS, STEPS, TOLERANCE, assert_close, loss_fn, random_rounds
from method_table import fresh_state, mesh_of, place_batches, problem, trainer, use

from fedpax import Cohort
from fedpax.aggregators import quantized_mean
from fedpax.algorithms import data_parallel, diloco

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("algorithms")


def test_the_default_outer_optimizer_with_the_scaling_laws_inner_optimizer():
    """Nesterov with 0.7 and 0.9; clipping, and a cosine schedule over all rounds."""
    rounds, clip, peak = 3, 3.0, 0.02
    schedule = optax.cosine_decay_schedule(peak, rounds * STEPS, alpha=0.05)
    inner = optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b1=0.9, b2=0.99, eps=1e-6, weight_decay=0.1),
    )

    def rate(step: int) -> float:
        return peak * (0.05 + 0.95 * (1 + np.cos(np.pi * step / (rounds * STEPS))) / 2)

    params, batches, _ = problem(rounds)
    x = {name: np.float64(p) for name, p in params.items()}
    plain = reference.adam(rate, 0.9, 0.99, 1e-6, decay=0.1, clip=clip)
    expected = reference.diloco(x, batches, plain, eta=0.7, beta=0.9)

    norms = [
        np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        for i in range(PARTICIPANTS)
        for gradient, _ in [
            reference.gradient_and_metrics(x, reference.participant(batches[0], i)[0])
        ]
    ]
    assert min(norms) < clip < max(norms)  # some are clipped, some are not

    algorithm = diloco(loss_fn, islands=PARTICIPANTS, inner_optimizer=inner)
    state, step = algorithm.init(jax.tree.map(jnp.asarray, params)), jax.jit(algorithm.round)
    for given, wanted in zip(batches, expected, strict=True):
        state, metrics = step(state, Cohort(given))
        assert_close((state.params, metrics), wanted)


def test_an_islands_optimizer_state_stays_on_its_island():
    params, rounds, weights = problem(2)
    (first, _), (second, _) = trainer("DiLoCo", "4x2 automatic").run(params, rounds, weights)
    for n, state in enumerate((first, second), start=1):
        adam = state.inner_optimizer_state[0]
        np.testing.assert_array_equal(adam.count, [n * STEPS] * PARTICIPANTS)
        kernel = adam.mu["kernel"]
        apart = np.abs(kernel[:, None] - kernel[None]).max(axis=(2, 3))
        assert np.all(apart[~np.eye(PARTICIPANTS, dtype=bool)] > 1e-4)


def test_one_inner_step_of_sgd_equals_data_parallelism():
    rate = 0.3
    once = diloco(
        loss_fn,
        islands=4,
        inner_optimizer=optax.sgd(rate),
        outer_optimizer=optax.sgd(1.0),
    )
    always = data_parallel(loss_fn, islands=4, optimizer=optax.sgd(rate))
    params, _, _ = problem(1)
    params = jax.tree.map(jnp.asarray, params)
    state, other = once.init(params), always.init(params)
    step, other_step = jax.jit(once.round), jax.jit(always.round)
    for batches in random_rounds(3, participants=4, steps=1):
        state, metrics = step(state, Cohort(batches))
        other, other_metrics = other_step(other, Cohort(batches))
        assert_close((state.params, metrics), (other.params, other_metrics))


@pytest.mark.parametrize(
    ("num_levels", "mesh"), [(16, "none"), (2, "4x2 automatic"), (2, "4x2 explicit")]
)
def test_the_residual_holds_what_quantization_left_out(num_levels: int, mesh: str) -> None:
    """With outer SGD of rate 1, model minus change of the residual is the mean of the islands."""
    algorithm = diloco(
        loss_fn,
        islands=PARTICIPANTS,
        inner_optimizer=optax.sgd(0.1),
        outer_optimizer=optax.sgd(1.0),
        aggregator=quantized_mean(num_levels),
    )
    params, rounds, _ = problem(3)
    where = mesh_of(mesh, "islands")
    with use(where):
        state = fresh_state(algorithm, "islands", params, where)
        step = jax.jit(algorithm.round)
        for batches in rounds:
            old = jax.device_get(state)
            state, metrics = step(state, place_batches(Cohort(batches), where, "islands"))
            new = jax.device_get(state)
            [(ends, reports)] = reference.fedavg(
                old.params, [batches], [[1] * PARTICIPANTS], reference.sgd(0.1)
            )
            assert_close(metrics, reports)
            before, after = old.aggregator_state.residual, new.aggregator_state.residual
            for name, end in ends.items():
                unsent = after[name].mean(0) - before[name].mean(0)
                np.testing.assert_allclose(new.params[name] - unsent, end, **TOLERANCE)
                assert np.abs(after[name]).max() > 1e-5
