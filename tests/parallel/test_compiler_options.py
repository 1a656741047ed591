import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax import Cohort
from fedpax.algorithms import streaming_diloco
from fedpax.experiments.diloco_text import diloco_text
from fedpax.experiments.streaming_diloco_text import StreamingConfig, streaming_diloco_text
from fedpax.parallel import make_mesh, overlap_options
from fedpax.parallel.compiler_options import memory_options, run_once_options


def test_several_slices_of_v5e_alone_need_an_option(two_slices):
    v5e = two_slices(2, 4)
    [(name, value)] = overlap_options(v5e).items()
    assert ("all_gather" in name, value) == (True, "false")
    one_slice = Mesh(v5e.devices[:1], v5e.axis_names)
    v6e = np.array(
        [dataclasses.replace(device, device_kind="TPU v6 lite") for device in v5e.devices.flat]
    )
    assert overlap_options(one_slice) == overlap_options(Mesh(v6e, "islands")) == {}
    assert overlap_options(make_mesh(islands=-1)) == {}


def test_the_compiler_accepts_it(tpu_devices):
    mesh = Mesh(np.array(tpu_devices("v5e:2x2", 2)).reshape(2, 4), ("islands", "fsdp"))
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        jax.jit(lambda x: 2 * x).lower(x).compile({"no_such_option": "false"})
    jax.jit(lambda x: 2 * x).lower(x).compile(overlap_options(mesh))


def test_streaming_diloco_alone_uses_them(two_slices):
    mesh = two_slices(2, 4)
    assert streaming_diloco_text().compiler_options(mesh) == overlap_options(mesh)
    assert diloco_text().compiler_options(mesh) == {}


@pytest.mark.slow
def test_fragments_need_less_memory_on_a_cpu():
    def loss_fn(params, x):
        layer = lambda x, w: (x + jnp.tanh(x @ w), None)
        return jnp.mean((jax.lax.scan(layer, x, params["layers"])[0] @ params["out"]) ** 2), {}

    mesh = make_mesh(islands=2, devices=jax.devices()[:2])
    replicated, placed = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("islands",)))
    algorithm = streaming_diloco(loss_fn, islands=2, inner_optimizer=optax.adam(1e-3), fragments=8)
    with jax.set_mesh(mesh):
        params = {"layers": jnp.zeros((8, 64, 64)), "out": jnp.zeros(64)}
        state = jax.eval_shape(algorithm.init, params)
        state, cohort = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=placed if x.shape[:1] == (2,) else replicated
            ),
            (state, Cohort(jax.ShapeDtypeStruct((2, 32, 4, 64), "float32"))),
        )
        lowered = jax.jit(algorithm.round, donate_argnums=0).lower(state, cohort)
        options = memory_options("cpu")
        default, less = (
            lowered.compile(given).memory_analysis().temp_size_in_bytes for given in ({}, options)
        )
    assert less < 0.95 * default


def test_many_fragments_alone_need_less_memory_on_a_cpu():
    mesh = make_mesh(islands=-1)
    many = dataclasses.replace(streaming_diloco_text(), streaming=StreamingConfig(fragments=8))
    assert many.compiler_options(mesh) == memory_options("cpu") != {}
    assert streaming_diloco_text().compiler_options(mesh) == {}
    assert memory_options("tpu") == memory_options("gpu") == {}


def test_programs_that_run_once_compile_as_usual_on_a_tpu():
    assert run_once_options("tpu") == {}
