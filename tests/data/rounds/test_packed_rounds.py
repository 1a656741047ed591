"""Images of integers reach the devices as uint8, and are scaled there bit by bit as on the host."""

from typing import Any

import chex
import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.data import ClientSampler, CohortRounds, cohort_rounds
from fedpax.data.rounds.cohort_stream import MOSTLY_PADDING
from fedpax.data.rounds.labeled_examples import Preprocess, preprocess_images
from fedpax.parallel.mesh import make_mesh
from fedpax.sources import reused_memory
from fedpax.training import prefetch
from fedpax.training.prefetch import Prefetch


def rounds(preprocess: Preprocess = preprocess_images, dtype: Any = np.uint8) -> CohortRounds:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (60, 5, 3, 1)).astype(dtype)
    images[0].flat = np.arange(15) * 17
    examples = {"image": images, "label": random.integers(0, 9, 60, np.int32)}
    clients = [random.permutation(60)[: 1 + 3 * k] for k in range(12)]
    return cohort_rounds(
        examples, clients, ClientSampler(12, 8), batch_size=4, preprocess=preprocess
    )


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("preprocess", "dtype", "sent"),
    [
        (preprocess_images, np.uint8, np.uint8),
        (preprocess_images, np.int64, np.uint8),
        (preprocess_images, np.float32, np.float32),
        (dict, np.uint8, np.uint8),
    ],
    ids=["uint8", "int64", "float32", "own"],
)
def test_cohorts_on_the_devices_are_those_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
    preprocess: Preprocess,
    dtype: Any,
    sent: Any,
    axis_type: AxisType,
) -> None:
    put, sent_dtypes = prefetch.put_on_mesh, set()

    def spy(tree: Any, sharding: Any) -> Any:
        sent_dtypes.add(tree.batches["image"].dtype)
        return put(tree, sharding)

    monkeypatch.setattr(prefetch, "put_on_mesh", spy)
    mesh = make_mesh(clients=8, axis_types={"clients": axis_type})
    sharding = NamedSharding(mesh, P("clients"))
    expected, stream = rounds(preprocess, dtype), rounds(preprocess, dtype)
    with Prefetch(stream, sharding, num_rounds=3) as cohorts:
        for _ in range(3):
            cohort, _ = cohorts.next()
            for leaf in jax.tree.leaves(cohort):
                assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            on_host = next(expected)
            chex.assert_trees_all_equal_dtypes(cohort, on_host)
            bits = [jax.tree.map(lambda x: np.asarray(x).tobytes(), c) for c in (cohort, on_host)]
            assert bits[0] == bits[1]
    assert sent_dtypes == {np.dtype(sent)}


def test_packed_rounds_have_the_same_position() -> None:
    packed, plain = rounds(), rounds()
    for _ in range(2):
        packed.next_packed(), next(plain)
    assert packed.get_state() == plain.get_state()
    chex.assert_trees_all_equal(next(packed), next(plain))


@example(65, preprocess_images, "population", 1)  # one round is nearly nothing but padding
@given(
    st.integers(0, 10**6),
    st.sampled_from([preprocess_images, dict]),
    st.sampled_from(["population", "round"]),
    st.sampled_from([1, 2**23]),
)
def test_cohorts_in_reused_memory_are_those_of_new_memory(
    seed: int, preprocess: Preprocess, pad_to: Any, shared_bytes: int
) -> None:
    random = np.random.default_rng(seed)
    examples = {"image": random.random((40, 3, 2, 1), np.float32) + 1, "label": np.arange(40) % 7}
    clients = [random.integers(0, 40, size) for size in [9, *random.integers(0, 17, 8)]]

    def stream(state: Any = None) -> CohortRounds:
        rounds = cohort_rounds(
            examples,
            clients,
            ClientSampler(9, 4),
            batch_size=2,
            preprocess=preprocess,
            pad_to=pad_to,
        )
        rounds.set_state(state or rounds.get_state())
        return rounds

    reused, held = stream(), []
    for _ in range(9):
        state = reused.get_state()
        repeated = next(stream(state))  # padding repeats an example: it is too short for zeros
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reused_memory, "_LONG_PADDING", 1)
            patch.setattr(reused_memory, "SHARED_BYTES", shared_bytes)
            expected = next(stream(state))
            is_packed = random.random() < 0.7
            cohort = reused.next_packed() if is_packed else next(reused)
        chex.assert_trees_all_equal(cohort, expected)
        for name, values in expected.batches.items():
            mask = expected.batches["mask"]
            np.testing.assert_array_equal(values[mask], repeated.batches[name][mask])
        image = cohort.batches["image"]
        # Rounds of nearly nothing but padding are copied into new memory, which nobody shares.
        num_steps, slots = cohort.num_steps.sum(), cohort.batches["mask"][..., 0].size
        is_copied = 0 < MOSTLY_PADDING * num_steps < slots
        assert image.flags.writeable == (is_copied or not is_packed)
        if not is_packed:
            image.fill(np.nan)  # as a user can
            expected.batches["image"].fill(np.nan)
        held = [*held, (cohort, expected)][-random.integers(1, 4) :]
        for one, other in held:  # a device can still read them
            chex.assert_trees_all_equal(one, other)
