import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.data import load
from fedpax.data.populations.client_sampler import ClientSampler
from fedpax.data.populations.partition import partition_by_field
from fedpax.data.populations.scheduling import wasted_steps
from fedpax.data.rounds.cohort_rounds import cohort_rounds


def problem(sizes, seed=0):
    """Examples that say which they are, and clients that hold so many of them."""
    total = sum(sizes)
    order = np.random.default_rng(seed).permutation(total)
    examples = {
        "image": np.broadcast_to(np.arange(total)[:, None], (total, 2)).astype(np.float32),
        "label": np.arange(total),
    }
    return examples, np.split(order, np.cumsum(sizes)[:-1])


@st.composite
def settings(draw):
    sizes = draw(st.lists(st.integers(0, 11), min_size=1, max_size=9).filter(any))
    devices = draw(st.integers(1, len(sizes)))
    cohort = devices * draw(st.integers(1, len(sizes) // devices))
    return {
        "sizes": sizes,
        "cohort": cohort,
        "devices": devices,
        "batch": draw(st.integers(1, 4)),
        "epochs": draw(st.integers(1, 3)),
        "max_steps": draw(st.none() | st.integers(1, 6)),
        "chunk_size": draw(st.integers(1, 3)),
    }


@given(settings(), st.integers(0, 100))
def test_each_client_goes_through_its_examples(case, seed):
    sizes, cohort = case.pop("sizes"), case.pop("cohort")
    examples, population = problem(sizes, seed)
    cohorts = ClientSampler(len(sizes), cohort, seed)
    rounds = cohort_rounds(examples, population, cohorts, seed=seed, **case)
    batch, epochs = case["batch"], case["epochs"]
    for r in range(3):
        round_ = next(rounds)
        assert sorted(round_.clients) == sorted(cohorts.draw(r))
        for i, client in enumerate(round_.clients):
            own = population[client]
            each = -(-len(own) // batch)
            steps = min(epochs * each, rounds.max_steps)
            assert round_.steps[i] == steps
            assert round_.weights[i] == min(len(own), steps * batch)
            mask, label = round_.batches["mask"][i], round_.batches["label"][i]
            assert not mask[steps:].any()
            assert mask[:steps].any(axis=1).all()
            np.testing.assert_array_equal(round_.batches["image"][i][..., 0], label)
            for start in range(0, steps, each or 1):
                seen = label[start : start + each][mask[start : start + each]]
                assert len(set(seen)) == len(seen)
                assert set(seen) <= set(own)
                if start + each <= steps:
                    assert set(seen) == set(own)


def test_orders_change_from_epoch_to_epoch_and_round_to_round():
    examples, population = problem([40, 40])
    rounds = cohort_rounds(examples, population, ClientSampler(2, 2), batch=40, epochs=2)
    orders = {
        tuple(order)
        for _ in range(3)
        for order in next(rounds).batches["label"].reshape(4, 40).tolist()
    }
    assert len(orders) == 12


def test_a_stream_goes_on_where_another_stood():
    examples, population = problem([3, 9, 1, 5, 7])
    made = lambda: cohort_rounds(examples, population, ClientSampler(5, 3, seed=2), batch=2, seed=4)
    one, other = made(), made()
    for _ in range(2):
        next(one)
    other.set_state(json.loads(json.dumps(one.get_state())))
    for _ in range(2):
        a, b = next(one), next(other)
        for x, y in zip((*a.batches.values(), *a[1:]), (*b.batches.values(), *b[1:]), strict=True):
            np.testing.assert_array_equal(x, y)
    third = cohort_rounds(examples, population, ClientSampler(5, 3, seed=3), batch=2, seed=4)
    with pytest.raises(ValueError, match="cohorts_seed is 3 and was 2"):
        third.set_state(one.get_state())


class Made:
    """A population without a name, whose clients are made when asked."""

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


def plain(fields):
    return dict(fields)


LONG = [np.arange(2000), np.arange(2000, 4000), np.arange(4000, 6000)]
OTHER = [np.arange(2000), np.r_[2000:3000, 3001, 3000, 3002:4000], np.arange(4000, 6000)]


@pytest.mark.parametrize("kind", [list, tuple, np.array, Made], ids=lambda kind: kind.__name__)
def test_a_state_is_restored_into_the_same_population_alone(kind):
    """Every time in objects of its own, as in another process."""
    examples, _ = problem([6000])
    made = lambda clients: cohort_rounds(
        examples, kind([c.copy() for c in clients]), ClientSampler(3, 2), batch=500
    )
    state = json.loads(json.dumps(made(LONG).get_state()))
    made(LONG).set_state(state)
    with pytest.raises(ValueError, match=r"population is .* and was"):
        made(OTHER).set_state(state)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"weights": [1.0, 2.0, 3.0]}, "cohorts_weights"),
        ({"available": even_rounds}, "available"),
        ({"prepare": plain}, "prepare"),
        ({"scale": 2.0}, "source"),
        ({"examples": 7000}, "examples"),
    ],
)
def test_a_state_is_of_its_weights_functions_and_arrays(changes, setting):
    def made(examples=6000, scale=1.0, weights=(1.0, 2.0, 2.0), available=all_rounds, **more):
        arrays, _ = problem([examples])
        arrays["image"] = scale * arrays["image"]
        cohorts = ClientSampler(3, 2, weights=weights, available=available)
        return cohort_rounds(arrays, LONG, cohorts, batch=500, **more)

    state = made().get_state()
    made().set_state(state)
    with pytest.raises(ValueError, match=rf"{setting} is .* and was"):
        made(**changes).set_state(state)


@pytest.mark.parametrize("nothing", [[], np.array([])], ids=["list", "float64"])
@pytest.mark.parametrize("kind", [list, Made], ids=lambda kind: kind.__name__)
def test_a_client_without_examples_takes_no_step(kind, nothing):
    examples, _ = problem([3])
    round_ = next(
        cohort_rounds(examples, kind([[0, 1], nothing, [2]]), ClientSampler(3, 3), batch=2)
    )
    place = np.flatnonzero(round_.clients == 1)[0]
    assert (round_.steps[place], round_.weights[place]) == (0, 0)
    assert not round_.batches["mask"][place].any()
    assert sorted(round_.batches["label"][round_.batches["mask"]]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ([99], "client 1 names example 99, but the source has examples 0 to 19"),
        ([3, -1], "client 1 names example -1"),
        ([0.5], r"client 1 is float64\[1\], expected integers"),
        ([True, False], r"client 1 is bool\[2\], expected integers"),
        ([[1, 2]], r"client 1 is int64\[1, 2\], expected integers"),
    ],
)
def test_indices_that_are_none_of_the_source_are_told_with_the_client(own, words):
    examples, _ = problem([20])
    with pytest.raises(ValueError, match=words):
        cohort_rounds(examples, [[0], own], ClientSampler(2, 2), batch=2)
    lazy = cohort_rounds(examples, Made([[0], own]), ClientSampler(2, 2), batch=2)
    with pytest.raises(ValueError, match=words):
        next(lazy)


def test_a_source_is_read_for_the_cohort_alone():
    class Counting:
        def __init__(self):
            self.read = []

        def __len__(self):
            return 100

        def __getitem__(self, index):
            self.read.append(int(index))
            return {
                "image": np.full((2, 2, 1), index, np.uint8),
                "label": index,
                "note": b"x" * index,
            }

    source = Counting()
    population = [np.arange(10 * k, 10 * k + 10) for k in range(10)]
    cohorts = ClientSampler(10, 2, seed=1)
    rounds = cohort_rounds(source, population, cohorts, batch=5, epochs=3)
    source.read.clear()
    round_ = next(rounds)
    wanted = np.concatenate([population[k] for k in cohorts.draw(0)])
    assert sorted(source.read) == sorted(wanted)  # each once, in three epochs
    np.testing.assert_array_equal(
        np.rint(round_.batches["image"][..., 0, 0, 0] * 255), round_.batches["label"]
    )


def test_a_prepared_data_set_gives_the_rounds_of_its_arrays(digits):
    source = digits("train")
    arrays = {
        "image": np.stack([x["image"] for x in source]),
        "label": np.array([x["label"] for x in source]),
    }
    population = partition_by_field(source, "label", 10)
    from_files, from_memory = (
        cohort_rounds(examples, population, ClientSampler(10, 4), batch=16)
        for examples in (source, arrays)
    )
    for a, b in zip(
        next(from_files).batches.values(), next(from_memory).batches.values(), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_clients_that_are_not_available_leave_empty_places():
    examples, population = problem([4] * 6)
    cohorts = ClientSampler(6, 4, available=lambda r: np.arange(6) < 1 + r)
    rounds = cohort_rounds(examples, population, cohorts, batch=2)
    for r in range(5):
        round_ = next(rounds)
        here = min(4, r + 1)
        assert (round_.clients >= 0).sum() == here
        for array in (round_.steps, round_.weights):
            assert ((array > 0) == (round_.clients >= 0)).all()
        assert not round_.batches["mask"][round_.clients < 0].any()


def test_a_population_may_be_made_when_it_is_asked_for():
    class Lazy:
        def __len__(self):
            return 10**9

        def __getitem__(self, client):
            return np.array([client % 7, client % 5])

    examples, _ = problem([7])
    rounds = cohort_rounds(examples, Lazy(), ClientSampler(10**9, 5), batch=2, max_steps=1)
    round_ = next(rounds)
    wanted = np.stack([round_.clients % 7, round_.clients % 5], axis=1)
    np.testing.assert_array_equal(np.sort(round_.batches["label"][:, 0]), np.sort(wanted))


def test_clients_are_ordered_for_the_devices():
    sizes = np.ceil(np.random.default_rng(0).lognormal(2, 1, size=256)).astype(int)
    examples, population = problem(sizes)
    rounds = cohort_rounds(examples, population, ClientSampler(256, 128), batch=1, devices=8)
    assert wasted_steps(next(rounds).steps, devices=8) < 0.05


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"devices": 2}, "take 2 clients"),
        ({"chunk_size": "auto"}, "give a whole number, here and to the algorithm"),
        ({"chunk_size": 1.5}, "give a whole number"),
        ({"cohorts": ClientSampler(5, 3)}, "make ClientSampler with population=4"),
        ({"population": [np.zeros(0, int)] * 4}, "No client of the population has an example"),
        ({"examples": {"image": np.ones((2, 1)), "label": np.ones(3)}}, "all of one length"),
        ({"examples": []}, "load another split"),
        ({"max_steps": 10**12}, "make one of them smaller"),
    ],
)
def test_bad_input_is_told(changes, remedy):
    examples, population = problem([2, 3, 4, 5])
    arguments = {
        "examples": examples,
        "population": population,
        "cohorts": ClientSampler(4, 3),
        "batch": 2,
    } | changes
    with pytest.raises(ValueError, match=re.escape(remedy)):
        cohort_rounds(**arguments)


def test_images_of_several_shapes_are_refused():
    source = [{"image": np.ones((k, 2, 1)), "label": k} for k in (2, 3)]
    rounds = cohort_rounds(source, [np.array([0, 1])], ClientSampler(1, 1), batch=2)
    with pytest.raises(ValueError, match="resize them when the data set is prepared"):
        next(rounds)


def test_damaged_records_are_told(tmp_path):
    source = load("digits", "test", data_dir=tmp_path)
    for file in source.folder.glob("*test*array_record*"):
        file.write_bytes(file.read_bytes()[:3000] + bytes(3000) + file.read_bytes()[6000:])
    source = load("digits", "test", data_dir=tmp_path)
    rounds = cohort_rounds(source, [np.arange(len(source))], ClientSampler(1, 1), batch=50)
    with pytest.raises(OSError, match="are damaged: delete that folder and load again"):
        next(rounds)
