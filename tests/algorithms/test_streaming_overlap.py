"""Transfers of Streaming DiLoCo hide behind local steps, by the scheduled text for TPU slices."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from overlap import check_overlap, transfers

from fedpax import Cohort
from fedpax.algorithms import streaming_diloco
from fedpax.parallel.mesh import make_mesh
from fedpax.training.shardings import state_shardings

FRAGMENTS, DELAY, LAYERS = 3, 2, 4


def loss_fn(params, batch):
    """Compute a loss after a scan over layers."""
    x, _ = jax.lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), batch["x"] @ params["embedding"], params["layers"]
    )
    return jnp.mean(x**2), {}


def compiled_text(devices, islands, width):
    """Compile a round of blocks of four steps, two of which each transfer may take."""
    mesh = make_mesh(devices=devices, islands=islands, fsdp=-1)
    algorithm = streaming_diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=optax.adamw(1e-3),
        fragments=FRAGMENTS,
        delay=DELAY,
        mixing=0.5,
    )

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
    text = compiled_text(tpu_devices(topology, slices), slices, width)
    check_overlap(text, FRAGMENTS)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "width"), [("v5e:2x2", 512), ("v6e:2x2", 256)])
def test_metrics_beside_the_last_transfer_would_expose_it(
    tpu_devices, monkeypatch, topology, width
):
    """The negative control: without the barrier the metrics join the last fragment's transfer."""
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda values: values)
    text = compiled_text(tpu_devices(topology, 2), 2, width)
    found, loops = transfers(text)
    assert loops == 2 * FRAGMENTS and len(found) >= FRAGMENTS
    with pytest.raises(AssertionError):
        check_overlap(text, FRAGMENTS)
