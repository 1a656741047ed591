"""Rows whose bits differ have different fingerprints, on every layout of the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.clients import row_blocks as module
from fedpax.clients.row_blocks import (
    padded_count,
    row_blocks,
    row_fingerprints,
    take_rows,
    write_rows,
)
from fedpax.parallel.mesh import make_mesh

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64", "float8_e4m3fn"]


def prints_of(*leaves: jax.Array) -> np.ndarray:
    blocks = row_blocks([*leaves])
    assert blocks is not None
    return row_fingerprints([*leaves], blocks)


def flip(x: np.ndarray, row: int, bit: int) -> np.ndarray:
    """Flip one bit of a row."""
    x = x.copy()
    row_bytes = x[row : row + 1].view(np.uint8).reshape(-1)
    row_bytes[bit // 8 % len(row_bytes)] ^= 1 << bit % 8
    return x


@settings(max_examples=30)
@given(st.data(), st.sampled_from(DTYPES), st.integers(1, 7), st.integers(0, 2**16))
def test_a_flipped_bit_changes_the_fingerprint_of_its_row_alone(data, dtype, size, seed) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8, size)).astype(jnp.dtype(dtype))
    row = data.draw(st.integers(0, 7))
    if dtype == "bool":
        y = x.copy()
        y[row, 0] ^= True
    else:
        y = flip(x, row, data.draw(st.integers(0, 8 * x[0].nbytes - 1)))
    differ = prints_of(jnp.asarray(x)) != prints_of(jnp.asarray(y))
    assert differ.tolist() == [k == row for k in range(8)]


def test_fingerprints_of_many_rows_differ_although_they_have_the_same_numbers() -> None:
    rng = np.random.default_rng(0)
    rows = rng.permuted(np.tile(np.arange(8, dtype="f"), (4000, 1)), axis=1)
    found = prints_of(jnp.asarray(rows))
    assert len(np.unique(found)) == len(np.unique(rows, axis=0))
    halves = np.concatenate([found.astype(np.uint32), (found >> np.uint64(32)).astype(np.uint32)])
    ones = np.unpackbits(halves.view(np.uint8)).mean()
    assert ones == pytest.approx(0.5, abs=0.01)


def test_two_leaves_are_not_exchanged() -> None:
    one, other = (jnp.asarray(np.random.default_rng(k).normal(size=(8, 3))) for k in (0, 1))
    assert (prints_of(one, other) != prints_of(other, one)).all()


@pytest.mark.parametrize("spec", [("clients",), ("clients", "fsdp"), (None, "fsdp"), ()])
def test_rows_on_several_devices_change_as_on_one(spec: tuple[str | None, ...]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 4)).astype("f"), rng.normal(size=16).astype("f")
    changed_x, changed_y = flip(x, 3, 77), flip(y[:, None], 9, 5)[:, 0]
    mesh = make_mesh(clients=4, fsdp=2)
    put = lambda a: jax.device_put(a, NamedSharding(mesh, P(*spec[: a.ndim])))
    before, after = prints_of(put(x), put(y)), prints_of(put(changed_x), put(changed_y))
    assert np.flatnonzero(before != after).tolist() == [3, 9]


def test_memory_does_not_grow_with_the_rows() -> None:
    def temporaries(count: int) -> int:
        rows = jax.ShapeDtypeStruct((count, 512), jnp.float32)
        lowered = jax.jit(module._of_block).lower(rows, jax.ShapeDtypeStruct((), jnp.uint32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(10_000), temporaries(100_000)
    assert many - few <= 3 * 8 * 90_000  # the results, not the words
    assert few < 6 * module.CHUNK_BYTES


@settings(max_examples=20)
@given(st.sets(st.integers(0, 31)), st.sampled_from([None, ("clients",), ("clients", "fsdp"), ()]))
def test_rows_that_are_taken_and_written_are_those_of_numpy(row_ids, spec) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 4)).astype("f"), rng.integers(0, 9, 32).astype(np.int32)
    put = jnp.asarray
    if spec is not None:
        mesh = make_mesh(clients=4, fsdp=2)
        put = lambda a: jax.device_put(a, NamedSharding(mesh, P(*spec[: a.ndim])))
    leaves = [put(x), put(y)]
    blocks = row_blocks(leaves)
    assert blocks is not None
    ids = np.array(sorted(row_ids), np.int64)
    taken, rows = take_rows(leaves, blocks, ids)
    is_row = taken >= 0
    assert taken[is_row].tolist() == ids.tolist()
    np.testing.assert_array_equal(np.asarray(rows[0])[is_row], x[ids])
    new = [-np.asarray(leaf) for leaf in rows]
    written = write_rows(leaves, blocks, taken, new)
    for leaf, expected, negated in zip(written, (x, y), new, strict=True):
        expected[ids] = negated[is_row]
        np.testing.assert_array_equal(np.asarray(leaf), expected)
        assert len(leaf.addressable_shards) == blocks.mesh.size


def test_arrays_without_a_common_layout_on_devices_have_no_blocks() -> None:
    mesh = make_mesh(clients=4, fsdp=2)
    one = jax.device_put(jnp.zeros((8, 2)), NamedSharding(mesh, P("clients")))
    assert row_blocks([one, jax.device_put(jnp.zeros(8), NamedSharding(mesh, P()))]) is None
    assert row_blocks([one, jnp.zeros(8)]) is None
    assert row_blocks([]) is None


def test_numbers_of_rows_are_rounded_up_by_at_most_an_eighth() -> None:
    assert (padded_count(5, 100), padded_count(995, 5000), padded_count(99, 100)) == (8, 1024, 100)
