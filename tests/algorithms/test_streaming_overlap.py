"""Transfers of Streaming DiLoCo hide behind local steps, by the scheduled text for TPU slices."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from overlap import check_overlap, transfers

from fedpax import Cohort
from fedpax.aggregators import codecs, compressed_mean
from fedpax.algorithms import eager_diloco, streaming_diloco
from fedpax.parallel.mesh import make_mesh
from fedpax.training.shardings import state_shardings

FRAGMENTS, DELAY, LAYERS = 3, 2, 4


def loss_fn(params, batch):
    """Compute a loss after a scan over layers."""
    x, _ = jax.lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), batch["x"] @ params["embedding"], params["layers"]
    )
    return jnp.mean(x**2), {}


def streaming(islands, aggregator=None):
    """Make a method whose blocks have four steps, two of which each transfer may take."""
    return streaming_diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=optax.adamw(1e-3),
        fragments=FRAGMENTS,
        delay=DELAY,
        mixing=0.5,
        aggregator=aggregator,
    )


def compiled_text(algorithm, devices, islands, width):
    """Compile a round for TPU slices, an island on each."""
    mesh = make_mesh(devices=devices, islands=islands, fsdp=-1)

    def typed(shape, *axes):
        sharding = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = {
        "embedding": typed((width, width), "fsdp"),
        "layers": typed((LAYERS, width, width), None, "fsdp"),
    }
    steps = FRAGMENTS * (DELAY + 2)
    cohort = Cohort({"x": typed((islands, steps, 64, width), "islands", None, "fsdp")})
    with use_abstract_mesh(mesh.abstract_mesh):
        state = jax.eval_shape(algorithm.init, params)
        shardings = state_shardings(
            state,
            params,
            jax.tree.map(lambda leaf: leaf.sharding, params),
            mesh,
            placement="islands",
            num_participants=islands,
        )
        state = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state,
            shardings,
        )
        step = jax.jit(
            algorithm.round,
            donate_argnums=0,
            out_shardings=(shardings, NamedSharding(mesh, P())),
        )
        return step.lower(state, cohort).compile().as_text()


@pytest.mark.parametrize(
    ("topology", "slices", "width"),
    [
        ("v5e:2x2", 2, 512),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("v5e:2x2", 2, 2048),
                ("v5e:2x2", 4, 512),
                ("v6e:2x2", 2, 512),
                ("v6e:2x2", 4, 512),
                ("v5p:2x2x1", 2, 512),
                ("v5p:2x2x1", 4, 512),
            )
        ],
    ],
)
def test_each_fragment_is_sent_under_its_local_steps(tpu_devices, topology, slices, width):
    text = compiled_text(streaming(slices), tpu_devices(topology, slices), slices, width)
    check_overlap(text, FRAGMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
def test_four_bits_are_sent_under_the_local_steps_too(tpu_devices, topology):
    algorithm, width = streaming(2, compressed_mean(codecs.e3m0())), 512
    text = compiled_text(algorithm, tpu_devices(topology, 2), 2, width)
    check_overlap(text, FRAGMENTS)
    sent = re.findall(
        r" = \(u32\[([\d,]+)\][^()]*(?:\([^()]*\)[^()]*)*, u32\[\], token\[\]\) send\(", text
    )
    assert sent and all(shape.endswith(",128") for shape in sent)  # no tile is padded
    words = sum(math.prod(map(int, shape.split(","))) for shape in sent)
    bits = 32 * words / ((1 + LAYERS) * width**2 / 4)  # a device sends its quarter of the model
    assert 4 < bits < 4.5


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "width"), [("v5e:2x2", 512), ("v6e:2x2", 256)])
def test_metrics_beside_the_last_transfer_would_expose_it(
    tpu_devices, monkeypatch, topology, width
):
    """The negative control: without the barrier the metrics join the last fragment's transfer."""
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda values: values)
    text = compiled_text(streaming(2), tpu_devices(topology, 2), 2, width)
    found, loops = transfers(text)
    assert loops == 2 * FRAGMENTS and len(found) >= FRAGMENTS
    with pytest.raises(AssertionError):
        check_overlap(text, FRAGMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
def test_eager_diloco_sends_under_its_whole_inner_phase(tpu_devices, topology):
    algorithm = eager_diloco(loss_fn, islands=2, inner_optimizer=optax.adamw(1e-3))
    found, loops = transfers(compiled_text(algorithm, tpu_devices(topology, 2), 2, 512))
    assert loops == 1
    assert {(t.started, t.completed) for t in found} == {(0, 1), (1, 1)}, found  # (1, 1): metrics
    assert sum(t.started == 1 for t in found) == 1
