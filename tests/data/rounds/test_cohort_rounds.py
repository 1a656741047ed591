import json
import re

import chex
import jax
import numpy as np
import pytest
from cohort_problem import keep_fields, problem
from hypothesis import given
from hypothesis import strategies as st

from fedpax.data.rounds.cohort_rounds import cohort_rounds
from fedpax.data.rounds.device_order import idle_fraction
from fedpax.populations.client_arrays import ContiguousClients
from fedpax.populations.client_sampler import MOST_ARRIVALS, ClientSampler


@st.composite
def settings(draw):
    sizes = draw(st.lists(st.integers(0, 11), min_size=1, max_size=9).filter(any))
    num_devices = draw(st.integers(1, len(sizes)))
    cohort_size = num_devices * draw(st.integers(1, len(sizes) // num_devices))
    return {
        "sizes": sizes,
        "cohort_size": cohort_size,
        "num_devices": num_devices,
        "batch_size": draw(st.integers(1, 4)),
        "local_epochs": draw(st.integers(1, 3)),
        "max_steps": draw(st.none() | st.integers(1, 6)),
        "chunk_size": draw(st.integers(1, 3)),
    }


@given(settings(), st.integers(0, 100))
def test_each_client_iterates_over_its_examples(case, seed):
    sizes, cohort_size = case.pop("sizes"), case.pop("cohort_size")
    examples, population = problem(sizes, seed)
    sampler = ClientSampler(len(sizes), cohort_size, seed)
    rounds = cohort_rounds(examples, population, sampler, seed=seed, **case)
    batch_size, local_epochs = case["batch_size"], case["local_epochs"]
    for r in range(3):
        cohort = next(rounds)
        assert sorted(cohort.client_ids) == sorted(sampler.sample(r))
        for i, client in enumerate(cohort.client_ids):
            own = population[client]
            epoch_steps = -(-len(own) // batch_size)
            steps = min(local_epochs * epoch_steps, rounds.max_steps)
            assert cohort.num_steps[i] == steps
            assert cohort.num_examples[i] == min(len(own), steps * batch_size)
            mask, label = cohort.batches["mask"][i], cohort.batches["label"][i]
            assert not mask[steps:].any()
            assert mask[:steps].any(axis=1).all()
            np.testing.assert_array_equal(cohort.batches["image"][i][..., 0], label)
            for start in range(0, steps, epoch_steps or 1):
                end = start + epoch_steps
                seen = label[start:end][mask[start:end]]
                assert len(set(seen)) == len(seen)
                assert set(seen) <= set(own)
                if end <= steps:
                    assert set(seen) == set(own)


def test_every_epoch_and_round_has_another_order():
    examples, population = problem([40, 40])
    rounds = cohort_rounds(examples, population, ClientSampler(2, 2), batch_size=40, local_epochs=2)
    orders = {
        tuple(order)
        for _ in range(3)
        for order in next(rounds).batches["label"].reshape(4, 40).tolist()
    }
    assert len(orders) == 12


def test_a_restored_stream_continues_bitwise():
    examples, population = problem([3, 9, 1, 5, 7])
    make = lambda sampler_seed=2: cohort_rounds(
        examples, population, ClientSampler(5, 3, seed=sampler_seed), batch_size=2, seed=4
    )
    stream, other = make(), make()
    for _ in range(2):
        next(stream)
    other.set_state(json.loads(json.dumps(stream.get_state())))
    for _ in range(2):
        chex.assert_trees_all_equal(next(stream), next(other))
    with pytest.raises(ValueError, match="sampler_seed is 3 and was 2"):
        make(sampler_seed=3).set_state(stream.get_state())


def by_client(cohort):
    """Return the rows of a cohort in the order of client ids, absent clients last."""
    order = np.argsort(np.where(cohort.client_ids < 0, np.iinfo(np.int32).max, cohort.client_ids))
    return jax.tree.map(lambda x: x[order], cohort)


@given(st.integers(0, 10**6), st.integers(1, 3), st.none() | st.integers(1, 5))
def test_a_round_has_the_same_clients_and_batches_on_any_number_of_devices(
    seed, local_epochs, max_steps
):
    """Padding and absent clients included; a state moves between numbers of devices."""
    rng = np.random.default_rng(seed)
    examples, population = problem(rng.integers(0, 12, 20), seed)
    available = lambda r: np.arange(20) % 5 != r % 5  # 16 of 20
    sampler = ClientSampler(20, 8, seed, available=available if seed % 2 else few_available)
    streams = [
        cohort_rounds(
            examples,
            population,
            sampler,
            batch_size=3,
            seed=seed,
            local_epochs=local_epochs,
            max_steps=max_steps,
            num_devices=num_devices,
            chunk_size=chunk_size,
        )
        for num_devices, chunk_size in [(1, 1), (2, 1), (8, 1), (1, 3), (2, 4)]
    ]
    orders = set()
    for _ in range(2):
        cohorts = [next(stream) for stream in streams]
        for cohort in cohorts[1:]:
            chex.assert_trees_all_equal(by_client(cohort), by_client(cohorts[0]))
        orders |= {tuple(cohort.client_ids) for cohort in cohorts}
    assert len(orders) > 2  # so the order of clients does depend on the devices
    state = json.loads(json.dumps(streams[0].get_state()))
    following = by_client(next(streams[0]))
    for stream in streams[1:]:
        next(stream)
        stream.set_state(state)
        chex.assert_trees_all_equal(by_client(next(stream)), following)


def few_available(round_number):
    """Five of twenty clients are available: fewer than the cohort of eight."""
    return np.arange(20) % 4 == round_number % 4


class Lazy:
    """A population whose clients are generated when indexed."""

    def __init__(self, clients):
        self.clients = clients

    def __len__(self):
        return len(self.clients)

    def __getitem__(self, client):
        return self.clients[client]


def all_rounds(r):
    return np.ones(3, bool)


def even_rounds(r):
    return np.array([True, True, r % 2 == 0])


LONG = [np.arange(2000), np.arange(2000, 4000), np.arange(4000, 6000)]
OTHER = [np.arange(2000), np.r_[2000:3000, 3001, 3000, 3002:4000], np.arange(4000, 6000)]


@pytest.mark.parametrize("kind", [list, tuple, np.array, Lazy], ids=lambda kind: kind.__name__)
def test_a_state_can_only_be_restored_into_the_same_population(kind):
    """With new objects each time, as in another process."""
    examples, _ = problem([6000])
    made = lambda clients: cohort_rounds(
        examples, kind([c.copy() for c in clients]), ClientSampler(3, 2), batch_size=500
    )
    state = json.loads(json.dumps(made(LONG).get_state()))
    made(LONG).set_state(state)
    with pytest.raises(ValueError, match=r"population is .* and was"):
        made(OTHER).set_state(state)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"weights": [1.0, 2.0, 3.0]}, "sampler_weights"),
        ({"available": even_rounds}, "available"),
        ({"preprocess": keep_fields}, "preprocess"),
        ({"scale": 2.0}, "source"),
        ({"examples": 7000}, "num_examples"),
    ],
)
def test_a_state_identifies_weights_functions_and_arrays(changes, setting):
    def made(examples=6000, scale=1.0, weights=(1.0, 2.0, 2.0), available=all_rounds, **more):
        arrays, _ = problem([examples])
        arrays["image"] = scale * arrays["image"]
        sampler = ClientSampler(3, 2, weights=weights, available=available)
        return cohort_rounds(arrays, LONG, sampler, batch_size=500, **more)

    state = made().get_state()
    made().set_state(state)
    with pytest.raises(ValueError, match=rf"{setting} is .* and was"):
        made(**changes).set_state(state)


@pytest.mark.parametrize("nothing", [[], np.array([])], ids=["list", "float64"])
@pytest.mark.parametrize("kind", [list, Lazy], ids=lambda kind: kind.__name__)
def test_a_client_without_examples_has_no_steps(kind, nothing):
    examples, _ = problem([3])
    cohort = next(
        cohort_rounds(examples, kind([[0, 1], nothing, [2]]), ClientSampler(3, 3), batch_size=2)
    )
    row = np.flatnonzero(cohort.client_ids == 1)[0]
    assert (cohort.num_steps[row], cohort.num_examples[row]) == (0, 0)
    assert not cohort.batches["mask"][row].any()
    assert sorted(cohort.batches["label"][cohort.batches["mask"]]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ([99], "client 1 has index 99, but the source has examples 0 to 19"),
        ([3, -1], "client 1 has index -1"),
        ([0.5], r"client 1 is float64\[1\], expected the indices"),
        ([True, False], r"client 1 is bool\[2\], expected the indices"),
        ([[1, 2]], r"client 1 is int64\[1, 2\], expected the indices"),
    ],
)
def test_indices_out_of_range_raise_and_name_the_client(own, words):
    examples, _ = problem([20])
    with pytest.raises(ValueError, match=words):
        cohort_rounds(examples, [[0], own], ClientSampler(2, 2), batch_size=2)
    lazy = cohort_rounds(examples, Lazy([[0], own]), ClientSampler(2, 2), batch_size=2)
    with pytest.raises(ValueError, match=words):
        next(lazy)


def test_absent_clients_have_id_minus_1_and_only_padding():
    examples, population = problem([4] * 6)
    sampler = ClientSampler(6, 4, available=lambda r: np.arange(6) < 1 + r)
    rounds = cohort_rounds(examples, population, sampler, batch_size=2)
    for r in range(5):
        cohort = next(rounds)
        present = min(4, r + 1)
        assert (cohort.client_ids >= 0).sum() == present
        for array in (cohort.num_steps, cohort.num_examples):
            assert ((array > 0) == (cohort.client_ids >= 0)).all()
        assert not cohort.batches["mask"][cohort.client_ids < 0].any()


@pytest.mark.parametrize("kind", ["arrays", "source"])
def test_poisson_rounds_have_the_sampled_clients_and_empty_slots(kind):
    """Empty rounds among them."""
    examples, population = problem([4, 1, 0, 7, 2])
    source = examples
    if kind == "source":
        source = [{name: x[k] for name, x in examples.items()} for k in range(14)]
    make = lambda probability=0.25: cohort_rounds(
        source, population, ClientSampler(5, 5, 3, sampling_probability=probability), batch_size=2
    )
    rounds, sampler = make(), ClientSampler(5, 5, 3, sampling_probability=0.25)
    counts = []
    for r in range(12):
        state = json.loads(json.dumps(rounds.get_state()))
        cohort = next(rounds)
        present = cohort.client_ids >= 0
        counts.append(present.sum())
        assert sorted(cohort.client_ids[present]) == sorted(sampler.sample(r))
        assert not cohort.num_steps[~present].any()
        assert not cohort.num_examples[~present].any()
        seen = np.sort(cohort.batches["label"][cohort.batches["mask"]])
        own = [population[k] for k in cohort.client_ids[present]]
        np.testing.assert_array_equal(seen, np.sort(np.concatenate([np.zeros(0, int), *own])))
        resumed = make()
        resumed.set_state(state)
        chex.assert_trees_all_equal(next(resumed), cohort)
    assert min(counts) == 0
    assert max(counts) > 1
    with pytest.raises(ValueError, match=r"sampling_probability is '0\.5' and was '0\.25'"):
        make(0.5).set_state(state)
    assert rounds.items_per_round == round(0.25 * 14)


def test_a_population_can_be_generated_when_indexed():
    class Huge:
        def __len__(self):
            return 10**9

        def __getitem__(self, client):
            return np.array([client % 7, client % 5])

    examples, _ = problem([7])
    rounds = cohort_rounds(examples, Huge(), ClientSampler(10**9, 5), batch_size=2, max_steps=1)
    cohort = next(rounds)
    expected = np.stack([cohort.client_ids % 7, cohort.client_ids % 5], axis=1)
    np.testing.assert_array_equal(np.sort(cohort.batches["label"][:, 0]), np.sort(expected))


def test_a_round_has_the_shapes_that_the_stream_announces():
    examples, population = problem([3, 0, 5, 2])
    rounds = cohort_rounds(examples, population, ClientSampler(4, 3), batch_size=2)
    chex.assert_trees_all_equal_shapes_and_dtypes(rounds.shapes, next(rounds))


def test_a_stream_counts_examples():
    examples, population = problem([4, 4, 4])
    rounds = cohort_rounds(examples, population, ClientSampler(3, 2), batch_size=3, local_epochs=2)
    assert (rounds.items_per_round, rounds.item_unit) == (2 * 2 * 4, "examples")
    assert next(rounds).batches["mask"].sum() == rounds.items_per_round


def test_clients_are_ordered_so_that_devices_are_not_idle():
    sizes = np.ceil(np.random.default_rng(0).lognormal(2, 1, size=256)).astype(int)
    examples, population = problem(sizes)
    rounds = cohort_rounds(
        examples, population, ClientSampler(256, 128), batch_size=1, num_devices=8
    )
    assert idle_fraction(next(rounds).num_steps, num_devices=8) < 0.05


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"local_epochs": 0}, "local_epochs is 0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"num_devices": 2}, "take 2 clients"),
        ({"chunk_size": "auto"}, "give the same integer here and to the algorithm"),
        ({"chunk_size": 1.5}, "chunk_size is 1.5, expected an integer"),
        ({"sampler": ClientSampler(5, 3)}, "make ClientSampler with num_clients=4"),
        ({"population": [np.zeros(0, int)] * 4}, "No client of the population has an example"),
        (
            {"examples": {"image": np.ones((2, 1)), "label": np.ones(3)}},
            "expected one length that is not 0",
        ),
        ({"examples": []}, "load another split"),
        ({"max_steps": 10**12}, "reduce one of these sizes"),
    ],
)
def test_bad_arguments_raise(changes, remedy):
    examples, population = problem([2, 3, 4, 5])
    arguments = {
        "examples": examples,
        "population": population,
        "sampler": ClientSampler(4, 3),
        "batch_size": 2,
    } | changes
    with pytest.raises(ValueError, match=re.escape(remedy)):
        cohort_rounds(**arguments)


@pytest.mark.parametrize("sampling_probability", [None, 0.6])
def test_some_clients_of_a_round_have_the_batches_of_the_round(sampling_probability):
    sizes = [3, 7, 0, 12, 1, 5, 9]
    x = np.random.default_rng(3).normal(size=(sum(sizes), 2)).astype(np.float32)
    parts = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    sampler = ClientSampler(7, 6, seed=2, sampling_probability=sampling_probability)
    rounds = cohort_rounds(
        {"x": x}, parts, sampler, batch_size=2, local_epochs=2, max_steps=5, preprocess=dict
    )
    for number in range(3):
        client_ids, cohort = rounds.client_ids(number), next(rounds)
        np.testing.assert_array_equal(client_ids, cohort.client_ids)
        some = np.random.default_rng(number).permutation(6)[:5]
        content = rounds.read_clients(number, client_ids[some])
        mask = content.batches["mask"]
        assert mask.any() and not mask.all()
        np.testing.assert_array_equal(mask, cohort.batches["mask"][some])
        np.testing.assert_array_equal(content.batches["x"][mask], cohort.batches["x"][some][mask])
        for field in ("num_examples", "num_steps", "client_ids"):
            np.testing.assert_array_equal(getattr(content, field), getattr(cohort, field)[some])


def test_a_state_of_cohorts_that_were_drawn_otherwise_raises():
    """Earlier versions drew other cohorts by weight from large populations."""
    clients = MOST_ARRIVALS + 1
    population = ContiguousClients(np.arange(clients + 1))
    rounds = lambda weights: cohort_rounds(
        {"x": np.zeros(clients)},
        population,
        ClientSampler(clients, 2, 0, weights),
        batch_size=1,
        preprocess=dict,
    )
    weighted = rounds(np.ones(clients))
    state = weighted.get_state()
    assert state["settings"].pop("weighted_draws") == "searches"
    with pytest.raises(ValueError, match="weighted_draws is 'searches' and was None"):
        weighted.set_state(state)
    assert "weighted_draws" not in rounds(None).get_state()["settings"]
