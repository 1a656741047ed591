"""Images of integers reach the devices as uint8, and are scaled there bit by bit as on the host."""

from typing import Any

import chex
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.data import ClientSampler, CohortRounds, cohort_rounds
from fedpax.data.rounds.labeled_examples import Preprocess, preprocess_images
from fedpax.parallel.mesh import make_mesh
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
