"""The states of another number of participants: weights, dtypes, keys, and the errors."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedpax.checkpoints.participant_states import (
    check_resizable,
    check_rule,
    kept_participants,
    resize_participants,
    resize_weights,
    saved_struct,
)

counts = st.integers(1, 9)


def like(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(jax.make_mesh((1,), ("islands",)), PartitionSpec("islands"))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def overlaps(num_saved: int, num_participants: int) -> np.ndarray:
    """Return the weights of "average" by counting: each participant as many equal grains."""
    grains = np.arange(num_saved * num_participants)
    weights = np.zeros((num_participants, num_saved))
    np.add.at(weights, (grains // num_saved, grains // num_participants), 1 / num_saved)
    return weights


@given(counts, counts)
def test_an_average_keeps_the_mean_and_equals_the_count_of_grains(n: int, m: int) -> None:
    weights = resize_weights(n, m)
    np.testing.assert_allclose(weights, overlaps(n, m), rtol=1e-12, atol=0)
    np.testing.assert_allclose(weights.sum(axis=1), np.ones(m), rtol=1e-12)
    np.testing.assert_allclose(weights.sum(axis=0), np.full(n, m / n), rtol=1e-12)


@given(counts, counts)
def test_copies_that_are_averaged_again_are_the_states_themselves(n: int, factor: int) -> None:
    there, back = resize_weights(n, n * factor), resize_weights(n * factor, n)
    np.testing.assert_allclose(back @ there, np.eye(n), rtol=1e-12, atol=1e-15)


@given(counts, counts)
def test_a_copy_takes_the_saved_participants_in_turn(n: int, m: int) -> None:
    weights = resize_weights(n, m, "copy")
    assert weights.argmax(axis=1).tolist() == [i % n for i in range(m)]
    assert (weights.sum(axis=1) == 1).all() and np.isin(weights, (0, 1)).all()


@pytest.mark.parametrize("rule", ["average", "copy"])
@pytest.mark.parametrize(("n", "m"), [(4, 2), (2, 4), (4, 3), (1, 4), (4, 1)])
def test_arrays_equal_the_weighted_sum(n: int, m: int, rule: Any) -> None:
    saved = np.random.default_rng(n).normal(size=(n, 3, 2)).astype(np.float32)
    resized = resize_participants(jnp.asarray(saved), like((m, 3, 2), jnp.float32), rule)
    weights = resize_weights(n, m, rule)
    np.testing.assert_allclose(resized, np.einsum("mn,n...->m...", weights, saved), rtol=1e-6)
    if rule == "average":
        np.testing.assert_allclose(resized.mean(0), saved.mean(0), rtol=1e-5, atol=1e-7)
    if rule == "copy" or m % n == 0:  # bit by bit: -0.0 too
        saved[0, 0] = -0.0
        resized = resize_participants(jnp.asarray(saved), like((m, 3, 2), jnp.float32), rule)
        assert np.asarray(resized).tobytes() == saved[weights.argmax(axis=1)].tobytes()


@settings(max_examples=5)
@given(st.integers(0, 2**31))
def test_bfloat16_is_averaged_in_float32_and_rounded_once(seed: int) -> None:
    saved = jax.random.normal(jax.random.key(seed), (4, 5), jnp.bfloat16)
    resized = resize_participants(saved, like((3, 5), jnp.bfloat16))
    wide = np.asarray(saved, np.float32)
    expected = jnp.asarray(resize_weights(4, 3).astype(np.float32) @ wide, jnp.bfloat16)
    assert resized.dtype == jnp.bfloat16
    assert (np.asarray(resized) == np.asarray(expected)).all()


def test_a_nan_stays_with_the_participants_that_average_it() -> None:
    saved = jnp.array([[jnp.nan], [1.0], [2.0], [4.0]])
    resized = np.asarray(resize_participants(saved, like((2, 1), jnp.float32)))
    assert np.isnan(resized[0]).all() and resized[1] == 3.0


def test_counts_and_flags_come_from_the_largest_share() -> None:
    steps = jnp.array([7, 8, 9, 10], jnp.int32)
    assert resize_participants(steps, like((3,), jnp.int32)).tolist() == [7, 8, 10]
    assert resize_participants(steps, like((2,), jnp.int32)).tolist() == [7, 9]
    flags = jnp.array([True, False])
    assert resize_participants(flags, like((4,), jnp.bool_)).tolist() == [True, True, False, False]


def test_copied_random_keys_differ() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    resized = resize_participants(keys, like((4,), keys.dtype))
    assert resized.dtype == keys.dtype
    assert len({tuple(data) for data in jax.random.key_data(resized).tolist()}) == 4


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("n", "read"), [(8, "islands"), (4, "islands"), (3, None), (1, None)])
def test_a_device_reads_its_share_where_the_axis_divides_the_saved_number(
    n: int, read: str | None, kind: AxisType
) -> None:
    mesh = jax.make_mesh((2, 4), ("islands", "fsdp"), axis_types=(kind,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("islands", "fsdp"))
    wanted = jax.ShapeDtypeStruct((2, 8), jnp.float32, sharding=sharding)
    struct = saved_struct(wanted, (n, *wanted.shape[1:]), ("w",), wanted.shape[0])
    assert (struct.shape, struct.sharding.spec) == ((n, 8), PartitionSpec(read, "fsdp"))
    saved = np.random.default_rng(n).normal(size=(n, 8)).astype(np.float32)
    with jax.set_mesh(mesh):
        resized = resize_participants(jax.device_put(saved, struct.sharding), wanted)
    assert resized.sharding == sharding
    np.testing.assert_allclose(resized, resize_weights(n, 2) @ saved, rtol=1e-5, atol=1e-6)


class Experts(NamedTuple):
    params: jax.Array

    @property
    def fixed_participants(self) -> str:
        return "each expert belongs to a domain"


def test_a_method_that_fixes_its_number_raises_with_its_reason() -> None:
    words = "4 participants and the experiment has 2, .*: each expert belongs .*fedpax export"
    with pytest.raises(ValueError, match=words):
        check_resizable({"inner": [Experts(jnp.zeros(2))]}, 4, 2)
    check_resizable({"inner": [jnp.zeros(2)]}, 4, 2)


def test_an_unknown_rule_raises() -> None:
    with pytest.raises(ValueError, match=r"'mean', expected 'average' or 'copy'\. Set --part"):
        check_rule("mean")


@pytest.mark.parametrize("rule", ["average", "copy"])
def test_participants_that_are_kept_have_their_own_state(rule: Any) -> None:
    random = np.random.default_rng(3)
    saved = random.normal(size=(3, 5)).astype(np.float32)
    kept = kept_participants([0, 2, 3], [0, 1, 2, 3])
    assert kept == [0, None, 1, 2]
    assert kept_participants(None, [0]) is kept_participants([0], None) is None
    new = saved.mean(axis=0) if rule == "average" else saved[1]  # participant 1, modulo 3
    expected = np.stack([saved[0], new, saved[1], saved[2]])
    resized = resize_participants(jnp.asarray(saved), like((4, 5), np.float32), rule, kept)
    np.testing.assert_allclose(resized, expected, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(np.asarray(resized)[[0, 2, 3]], saved)  # bit by bit
    counts = random.integers(0, 100, 3).astype(np.int32)
    resized = resize_participants(jnp.asarray(counts), like((4,), np.int32), rule, kept)
    assert np.asarray(resized)[[0, 2, 3]].tolist() == counts.tolist()
    keys = jax.random.split(jax.random.key(1), 3)
    resized = jax.random.key_data(resize_participants(keys, like((4,), keys.dtype), rule, kept))
    np.testing.assert_array_equal(np.asarray(resized)[[0, 2, 3]], jax.random.key_data(keys))
    assert len({tuple(row) for row in np.asarray(resized).tolist()}) == 4  # the new one differs
    fewer = resize_participants(
        jnp.asarray(saved), like((2, 5), np.float32), rule, kept_participants([0, 2, 3], [0, 3])
    )
    np.testing.assert_array_equal(fewer, saved[[0, 2]])
