import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax.experiments.diloco_text import diloco_text
from fedpax.experiments.streaming_diloco_text import streaming_diloco_text
from fedpax.parallel import make_mesh, overlap_options
from fedpax.parallel.compiler_options import run_once_options


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


def test_programs_that_run_once_compile_as_usual_on_a_tpu():
    assert run_once_options("tpu") == {}
