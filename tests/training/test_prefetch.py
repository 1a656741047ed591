import threading
from typing import Any

import chex
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_regression import RandomRounds

from fedpax import Cohort
from fedpax.parallel.mesh import make_mesh
from fedpax.training.prefetch import Prefetch, put_on_mesh


@pytest.fixture
def sharding() -> NamedSharding:
    return NamedSharding(make_mesh(clients=4, fsdp=2), PartitionSpec("clients"))


def rounds() -> RandomRounds:
    return RandomRounds((8, 2, 4), features=3, seed=5)


def test_cohorts_come_in_order_on_their_sharding(sharding: NamedSharding) -> None:
    expected = rounds()
    with Prefetch(rounds(), sharding, num_rounds=4) as prefetch:
        for _ in range(4):
            cohort, _ = prefetch.next()
            assert cohort["x"].sharding == sharding
            chex.assert_trees_all_equal(jax.device_get(cohort), next(expected))


def test_the_position_is_after_the_returned_round_not_after_the_prefetched_one(
    sharding: NamedSharding,
) -> None:
    stream = rounds()
    with Prefetch(stream, sharding, num_rounds=5) as prefetch:
        for _ in range(2):
            _, state = prefetch.next()
        prefetch.peek()
        assert stream.round == 3  # the stream ran ahead
    resumed = rounds()
    resumed.set_state(state)
    expected = rounds()
    next(expected), next(expected)
    chex.assert_trees_all_equal(next(resumed), next(expected))


def test_the_next_round_is_drawn_in_advance(sharding: NamedSharding) -> None:
    drawn = threading.Event()

    class Signaling(RandomRounds):
        def __next__(self) -> dict[str, np.ndarray]:
            batches = super().__next__()
            if self.round == 2:
                drawn.set()
            return batches

    with Prefetch(Signaling((8, 1, 1), 2, seed=0), sharding, num_rounds=3) as prefetch:
        prefetch.next()
        assert drawn.wait(timeout=30)


def test_no_more_rounds_are_drawn_than_are_used(sharding: NamedSharding) -> None:
    stream = rounds()
    with Prefetch(stream, sharding, num_rounds=2) as prefetch:
        peeked = prefetch.peek()
        first, _ = prefetch.next()
        assert peeked is first
        prefetch.next()
        with pytest.raises(IndexError, match="drawn all its rounds"):
            prefetch.next()
    assert stream.round == 2


def test_a_stream_that_ends_raises_with_the_number_of_missing_rounds(
    sharding: NamedSharding,
) -> None:
    class Ending(RandomRounds):
        def __next__(self) -> Any:
            if self.round == 1:
                raise StopIteration
            return super().__next__()

    with Prefetch(Ending((8, 1, 1), 2, seed=0), sharding, num_rounds=3) as prefetch:
        prefetch.next()
        with pytest.raises(ValueError, match=r"2 rounds before training.rounds.*Repeat the data"):
            prefetch.next()


def test_errors_of_the_stream_reach_the_training_loop(sharding: NamedSharding) -> None:
    class Broken(RandomRounds):
        def __next__(self) -> Any:
            raise OSError("the disk is gone")

    with (
        Prefetch(Broken((8, 1, 1), 2, seed=0), sharding, num_rounds=3) as prefetch,
        pytest.raises(OSError, match="the disk is gone"),
    ):
        prefetch.next()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            np.array([2**33, 1]),
            r"cohort\['n'\] has the value 8589934592 \(int64\)",
        ),
        (
            np.array([1.0, 1e300]),
            r"cohort\['n'\] has the value 1e\+300 \(float64\)",
        ),
        (np.array([1, 2], object), r"cohort\['n'\] has dtype object .*astype\(np\.float32\)"),
        (np.ma.masked_array([1, 2], [0, 1]), r"cohort\['n'\] is an array with masked values"),
        (np.array(["2020", "2021"], "M8[D]"), r"cohort\['n'\] has dtype datetime64"),
    ],
)
def test_values_that_jax_would_change_are_named(values: Any, words: str) -> None:
    """Also where the stream yields another tree than a `Cohort`."""

    class Rounds(RandomRounds):
        def __next__(self) -> Any:
            return {"n": values}

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Prefetch(Rounds((8, 2, 4), features=3, seed=5), device, num_rounds=1) as prefetch:
        with pytest.raises((TypeError, ValueError), match=words):
            prefetch.next()


def test_a_cohort_that_its_sharding_does_not_divide_is_named() -> None:
    mesh = make_mesh(clients=-1)
    sharding = NamedSharding(mesh, PartitionSpec("clients"))
    cohort = Cohort({"x": np.ones((6, 2), np.float32)})
    with pytest.raises(
        ValueError, match=r"clients=8 does not divide axis 0 of cohort\.batches\['x"
    ):
        put_on_mesh(cohort, sharding)
