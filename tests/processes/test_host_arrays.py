"""Broadcast: an array of process 0's host on every device of a mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fedpax
from fedpax.processes.communication import Broadcast


@pytest.mark.parametrize("shape", [(7, 3), (64,), (), (1, 0, 2)])
def test_an_array_arrives_and_each_device_is_given_a_part(shape: tuple[int, ...]) -> None:
    mesh = fedpax.make_mesh(fsdp=4, tensor=2)
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    broadcast = Broadcast(mesh, jax.ShapeDtypeStruct(shape, np.float32))
    rows = broadcast.lay_out(array)
    assert rows.sharding.shard_shape(rows.shape) == (1, max(-(-array.size // 8), 1))
    result = jax.jit(broadcast.read, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows)
    np.testing.assert_array_equal(result, array)


def test_processes_without_the_array_send_zeros() -> None:
    broadcast = Broadcast(fedpax.make_mesh(fsdp=8), jax.ShapeDtypeStruct((5, 5), np.float32))
    assert not np.asarray(broadcast.lay_out(None)).any()
