import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_regression import RandomRounds

from fedpax.parallel.mesh import make_mesh
from fedpax.training.prefetch import Prefetch


@pytest.fixture
def sharding() -> NamedSharding:
    return NamedSharding(make_mesh(clients=4, fsdp=2), PartitionSpec("clients"))


def rounds() -> RandomRounds:
    return RandomRounds((8, 2, 4), features=3, seed=5)


def test_batches_come_in_order_on_their_sharding(sharding: NamedSharding) -> None:
    expected = rounds()
    with Prefetch(rounds(), sharding, count=4) as prefetch:
        for _ in range(4):
            batches, _ = prefetch.next()
            assert batches["x"].sharding == sharding
            jax.tree.map(np.testing.assert_array_equal, batches, next(expected))


def test_the_state_is_that_after_the_round_not_of_what_was_drawn_ahead(
    sharding: NamedSharding,
) -> None:
    stream = rounds()
    with Prefetch(stream, sharding, count=5) as prefetch:
        for _ in range(2):
            _, state = prefetch.next()
        prefetch.peek()
        assert stream.round == 3  # it did run ahead
    resumed = rounds()
    resumed.set_state(state)
    expected = rounds()
    next(expected), next(expected)
    jax.tree.map(np.testing.assert_array_equal, next(resumed), next(expected))


def test_the_next_round_is_drawn_before_it_is_asked_for(sharding: NamedSharding) -> None:
    drawn = threading.Event()

    class Telling(RandomRounds):
        def __next__(self) -> dict[str, np.ndarray]:
            batches = super().__next__()
            if self.round == 2:
                drawn.set()
            return batches

    with Prefetch(Telling((8, 1, 1), 2, seed=0), sharding, count=3) as prefetch:
        prefetch.next()
        assert drawn.wait(timeout=30)


def test_no_more_is_drawn_than_will_be_used(sharding: NamedSharding) -> None:
    stream = rounds()
    with Prefetch(stream, sharding, count=2) as prefetch:
        peeked = prefetch.peek()
        first, _ = prefetch.next()
        assert peeked is first
        prefetch.next()
        with pytest.raises(IndexError, match="All rounds"):
            prefetch.next()
    assert stream.round == 2


def test_a_stream_that_ends_says_how_many_rounds_are_missing(sharding: NamedSharding) -> None:
    class Ending(RandomRounds):
        def __next__(self) -> Any:
            if self.round == 1:
                raise StopIteration
            return super().__next__()

    with Prefetch(Ending((8, 1, 1), 2, seed=0), sharding, count=3) as prefetch:
        prefetch.next()
        with pytest.raises(ValueError, match=r"2 rounds still to come.*repeat the data"):
            prefetch.next()


def test_an_error_of_the_stream_reaches_the_loop(sharding: NamedSharding) -> None:
    class Broken(RandomRounds):
        def __next__(self) -> Any:
            raise OSError("the disk is gone")

    with (
        Prefetch(Broken((8, 1, 1), 2, seed=0), sharding, count=3) as prefetch,
        pytest.raises(OSError, match="the disk is gone"),
    ):
        prefetch.next()
