"""Private sums in stages: the noise is the participants' alone, and of the stated size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deploy import nodes

import fedpax
from fedpax.aggregators import (
    adaptive_clip,
    add_local_noise,
    add_noise,
    chain,
    clip_by_norm,
    mean,
    privacy_spent,
    private_mean,
    private_secure_mean,
    secure_mean,
)
from fedpax.deploy import Artifact, pack_stages, run_local
from fedpax.transforms.stage_noise import draw_noise
from fedpax.transforms.stages import Stages

N, SIZE, LEAST = 5, 20_000, 3
NOISE = 0.5


def make(aggregator, clients=N):
    @fedpax.program(clients=clients)
    def average(state, updates, weights):
        mean, state, metrics = aggregator.aggregate(state, updates, weights)
        return state, mean, metrics

    return average


def private(**settings):
    settings = {"max_norm": 1.0, "noise_multiplier": NOISE, "seed": 0} | settings
    return private_secure_mean(**settings)


def arguments(aggregator, *, scale=0.0, weights=(1, 1, 1, 1, 1)):
    updates = {"w": scale * nodes.normal(N, SIZE // 2, 2)}
    return aggregator.init(None), updates, np.float32(weights)


def test_the_total_noise_is_the_stated_one_also_without_some_participants():
    aggregator = private(min_participants=LEAST)
    args = arguments(aggregator)
    stages = fedpax.stages(make(aggregator), *args)
    assert stages.least_masked == LEAST
    for participants in (None, [0, 2, 3, 4], [1, 2, 4]):
        _, mean, metrics = run_local(stages, *args, participants=participants)
        count = len(participants or range(N))
        result = np.float64(mean["w"]).ravel() * count  # of the sum
        stated = NOISE * np.sqrt(count / LEAST)
        assert metrics["noise_stddev"] * count == pytest.approx(stated, rel=0.1)  # rounding adds
        assert result.std() == pytest.approx(
            float(metrics["noise_stddev"]) * count, rel=5 / np.sqrt(2 * SIZE)
        )
        assert result.std() > NOISE * (1 - 5 / np.sqrt(2 * SIZE))
    _, mean, metrics = run_local(stages, *args, participants=[1, 4])
    assert not np.any(mean["w"]) and metrics["noise_stddev"] == 0


def test_a_participant_of_weight_0_adds_its_share_too():
    """Otherwise the sum of a quorum would have less noise than stated."""
    aggregator = private(min_participants=LEAST)
    args = arguments(aggregator, scale=1e-4, weights=(1, 1, 0, 1, 0))
    stages = fedpax.stages(make(aggregator), *args)
    _, mean, metrics = run_local(stages, *args)
    assert metrics["num_present"] == 3
    result = np.float64(mean["w"]).std() * 3
    assert result == pytest.approx(float(metrics["noise_stddev"]) * 3, rel=5 / np.sqrt(2 * SIZE))
    assert result > 1.2 * NOISE  # of five shares


CENTRAL = {
    "private_mean": (private_mean(max_norm=1.0, noise_multiplier=NOISE, seed=0), NOISE / N),
    "add_noise": (chain(add_noise(NOISE, seed=0), clip_by_norm(1.0), mean()), NOISE),
    "local": (chain(clip_by_norm(1.0), add_local_noise(NOISE, seed=0), mean()), NOISE / N**0.5),
}


def together(aggregators):
    """Make a program of several aggregators, and its arguments."""

    @fedpax.program(clients=N)
    def average(states, updates, weights):
        return {k: a.aggregate(states[k], updates, weights) for k, a in aggregators.items()}

    _, updates, weights = arguments(mean())
    return average, ({k: a.init(None) for k, a in aggregators.items()}, updates, weights)


def test_no_seed_gives_noise_that_is_drawn_in_stages():
    average, args = together({name: aggregator for name, (aggregator, _) in CENTRAL.items()})
    stages = fedpax.stages(average, *args)
    results = [run_local(stages, *args, processes=p) for p in (None, None, 2)]
    results.append(jax.jit(average)(*args))  # a simulation, by its seed
    within = 5 / np.sqrt(2 * SIZE)
    for name, (_, stddev) in CENTRAL.items():
        runs = [np.asarray(result[name][0]["w"]) for result in results]
        for i, first in enumerate(runs):
            assert np.std(first) == pytest.approx(stddev, rel=within)
            for second in runs[:i]:
                assert np.std(first - second) == pytest.approx(2**0.5 * stddev, rel=within)


def test_the_noisy_count_of_a_clipping_norm_is_the_servers_own():
    clipped = chain(adaptive_clip(initial_norm=1.0, count_stddev=1.0), mean())
    quantile = private_mean(
        max_norm=1.0, noise_multiplier=NOISE, seed=0, quantile=0.5, count_stddev=1.0
    )
    average, args = together({"clipped": clipped, "quantile": quantile})
    stages = fedpax.stages(average, *args)
    runs = [run_local(stages, *args) for _ in range(3)]
    simulated = jax.jit(average)(*args)
    for name, (_, state, _) in simulated.items():
        norms = {float(run[name][1].max_norm) for run in runs}
        assert len(norms) == 3 and float(state.max_norm) not in norms


def test_exported_stages_name_the_noise_of_the_server():
    aggregator, stddev = CENTRAL["private_mean"]
    args = arguments(aggregator)
    artifact = Artifact(*pack_stages(fedpax.stages(make(aggregator), *args)))
    named = {"state.round": args[0].round, "state.max_norm": args[0].max_norm}
    with pytest.raises(ValueError, match=r"no 'server noise 0'.*draw_noise\(manifest\['noise'\]"):
        next(artifact.run(named))
    server = artifact.run(named | draw_noise(artifact.manifest["noise"]))
    next(server)
    with pytest.raises(StopIteration) as end:
        server.send((artifact.empty(0), (), []))
    assert np.std(end.value.value["result[1]['w']"]) == pytest.approx(stddev, rel=0.05)


def shares(stages, args, rounds):
    """The integers that each participant sends, `[rounds, participants, size]`."""
    own = stages.own(*args)
    collected = []
    for _ in range(rounds):
        terms = []
        for i in range(N):
            values = {name: rows[i] for name, rows in own.items()} | stages.draw_noise(0)
            sent, _, _ = stages.client(0)(i, (), (), values)
            terms.append(np.asarray(sent[0], np.float64).ravel())
        collected.append(terms)
    return np.array(collected)


def test_shares_of_participants_and_rounds_are_independent():
    aggregator = private(min_participants=LEAST)
    args = arguments(aggregator)
    stages = fedpax.stages(make(aggregator), *args)
    result = shares(stages, args, 3).reshape(3 * N, -1)
    (noise,) = stages[0].noise
    variance = result.var(axis=1) / noise.stddev**2  # chi-square of SIZE degrees of freedom
    assert np.all(np.abs(variance - 1) < 5 * np.sqrt(2 / SIZE))
    correlation = np.corrcoef(result) - np.eye(3 * N)
    assert np.abs(correlation).max() < 5 / np.sqrt(SIZE)


def test_the_noise_is_not_computed_from_what_the_server_knows(monkeypatch):
    """Neither the seed nor the round changes it, and no part of the program draws random bits."""
    aggregator = private(min_participants=LEAST)
    args = arguments(aggregator, scale=1e-4)
    stages = fedpax.stages(make(aggregator), *args)
    for part in stages.wiring().parts:
        text = str(jax.make_jaxpr(part.run)(*part.types))
        assert not any(word in text for word in ("random", "threefry", "key<", "erf_inv"))
    own = {name: rows[0] for name, rows in stages.own(*args).items()}
    client = jax.make_jaxpr(lambda values: stages.client(0)(0, (), (), values))
    text = str(client(own | stages.draw_noise(0)))
    assert not any(word in text for word in ("random", "threefry", "key<", "erf_inv"))
    # Without the drawn noise, two runs of different seeds send the same integers.
    monkeypatch.setattr(Stages, "draw_noise", no_noise)
    other = fedpax.stages(make(private(min_participants=LEAST, seed=9)), *args)
    np.testing.assert_array_equal(shares(stages, args, 1), shares(other, args, 1))


def no_noise(stages, stage):
    return {v.name: np.zeros(v.shape, np.int32) for v in stages[stage].noise}


def test_without_noise_the_integers_are_those_of_the_secure_mean(monkeypatch):
    """Bit by bit: R / C = 2^20 is 1 / s of 21 bits."""
    monkeypatch.setattr(Stages, "draw_noise", no_noise)
    secret, masked = private(), secure_mean(max_value=(2**20 - 1) / 2**20, bits=21)
    args = arguments(secret, scale=1e-3, weights=(1, 1, 0, 1, 1))
    first, second = fedpax.stages(make(secret), *args), fedpax.stages(make(masked), *args)
    result, expected = shares(first, args, 1), shares(second, args, 1)
    np.testing.assert_array_equal(result, expected)
    assert np.abs(result).max() > 1000
    # The masks of the simulation cancel: one program and the stages have the same sum.
    _, mean, _ = run_local(second, *args)
    _, simulated, _ = jax.jit(make(masked))(*args)
    np.testing.assert_array_equal(mean["w"], simulated["w"])


@pytest.fixture(scope="module")
def accounted():
    """An aggregator, its arguments, a simulation, and the stages."""
    aggregator = private(noise_multiplier=4.0, delta=1e-5)
    args = arguments(aggregator)
    return aggregator, args, jax.jit(make(aggregator)), fedpax.stages(make(aggregator), *args)


def test_a_simulation_is_reproducible_and_deployed_rounds_differ(accounted):
    _, args, step, stages = accounted
    np.testing.assert_array_equal(step(*args)[1]["w"], step(*args)[1]["w"])
    assert_independent(stages, args, [None, None])


@pytest.mark.slow
def test_processes_that_start_again_draw_other_noise():
    aggregator = private()
    args = arguments(aggregator)
    assert_independent(fedpax.stages(make(aggregator), *args), args, [None, 2, 2])


def assert_independent(stages, args, processes):
    runs = [np.ravel(run_local(stages, *args, processes=k)[1]["w"]) for k in processes]
    correlation = np.corrcoef(runs) - np.eye(len(runs))
    assert np.abs(correlation).max() < 5 / np.sqrt(SIZE)


def test_epsilon_is_the_same_in_a_simulation_and_in_stages(accounted):
    pytest.importorskip("dp_accounting")
    aggregator, args, step, stages = accounted
    simulated = staged = args[0]
    for r in range(1, 4):
        simulated, _, metrics = step(simulated, *args[1:])
        staged, _, reported = run_local(stages, staged, *args[1:])
        assert metrics["epsilon"] == reported["epsilon"]
        stated = aggregator.accountant.epsilon(r)
        assert reported["epsilon"] == pytest.approx(stated, rel=1e-5)
        bound = privacy_spent(noise_multiplier=4.0, num_rounds=r, delta=1e-5, discrete=True)
        assert stated == pytest.approx(bound, rel=1e-2)


def test_gradients_and_batches_of_a_private_round_have_noise_of_their_own():
    aggregator = private()
    average = make(aggregator)
    state, updates, weights = arguments(aggregator, scale=1e-4)

    def both(state, updates, weights):
        return jax.vmap(lambda u: average(state, u, weights)[1]["w"])(updates)

    pair = {"w": np.stack([updates["w"]] * 2)}  # two runs of one round
    stages = fedpax.stages(both, state, pair, weights)
    (noise,) = stages[0].noise
    assert noise.shape == (2, SIZE // 2, 2)

    def loss(updates, state, weights):
        return jnp.sum(average(state, updates, weights)[1]["w"] ** 2)

    with_gradient = jax.value_and_grad(loss)
    stages = fedpax.stages(with_gradient, updates, state, weights)
    (first, gradient), (second, _) = (run_local(stages, updates, state, weights) for _ in range(2))
    assert first != second and not np.any(gradient["w"])  # rounding has no derivative


def test_a_participant_without_noise_is_told():
    aggregator = private()
    args = arguments(aggregator)
    stages = fedpax.stages(make(aggregator), *args)
    own = {name: rows[0] for name, rows in stages.own(*args).items()}
    with pytest.raises(ValueError, match=r"own has no 'noise 0'.*draw_noise\(\)"):
        stages.client(0)(0, (), (), own)
    artifact = Artifact(*pack_stages(stages, portable=False))
    with pytest.raises(ValueError, match=r"'noise 0'.*noise that is drawn for this call"):
        artifact.client(0)(0, (), (), own)
    assert "draws    noise 0: int32[10000, 2], 80,000 B, standard deviation" in stages.explain()
