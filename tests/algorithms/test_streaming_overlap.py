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
from fedpax.algorithms.parts import streaming_diloco_blocks
from fedpax.hlo import parsing
from fedpax.parallel.mesh import make_mesh
from fedpax.training.compiled_round import state_shardings

FRAGMENTS, DELAY, LAYERS = 3, 2, 4


def loss_fn(params, batch):
    """Compute a loss after a scan over layers."""
    x, _ = jax.lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), batch["x"] @ params["embedding"], params["layers"]
    )
    return jnp.mean(x**2), {}


def streaming(islands, aggregator=None, delay=DELAY):
    """Make a method whose blocks have two steps before the transfers, and then `delay` steps."""
    return streaming_diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=optax.adamw(1e-3),
        fragments=FRAGMENTS,
        delay=delay,
        mixing=0.5,
        aggregator=aggregator,
    )


def compiled_text(algorithm, devices, islands, width, delay=DELAY, options=None):
    """Compile a round for TPU slices, an island on each."""
    mesh = make_mesh(devices=devices, islands=islands, fsdp=-1)

    def typed(shape, *axes):
        sharding = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = {
        "embedding": typed((width, width), "fsdp"),
        "layers": typed((LAYERS, width, width), None, "fsdp"),
    }
    steps = FRAGMENTS * (delay + 2)
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
        return step.lower(state, cohort).compile(compiler_options=options).as_text()


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
def test_a_fragment_of_a_loop_is_sent_under_its_local_steps(tpu_devices, monkeypatch, topology):
    """The loop over fragments has the order of an unrolled block."""
    monkeypatch.setattr(streaming_diloco_blocks, "SHORTEST_LOOP", 2)
    text = compiled_text(streaming(2), tpu_devices(topology, 2), 2, 512)
    module = parsing.parse(text)
    orders = {}
    for computation in module.computations.values():
        opcodes = [i.opcode for i in computation.instructions.values()]
        order = [o for o in opcodes if o in ("while", "send", "send-done")]
        if "send" in order:
            orders[computation.name == module.entry] = order
    block = ["while", "send", "while", "send-done"]
    assert orders == {False: block, True: ["while", *block, "send", "send-done"]}  # the metrics


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
def test_four_bits_are_sent_under_the_local_steps_too(tpu_devices, topology):
    algorithm, width = streaming(2, compressed_mean(codecs.e3m0())), 512
    text = compiled_text(algorithm, tpu_devices(topology, 2), 2, width)
    check_overlap(text, FRAGMENTS)
    sent = re.findall(
        r" = \(u32\[([\d,]+)\][^()]*(?:\([^()]*\)[^()]*)*, u32\[\]\S*, token\[\]\) send\(", text
    )
    assert sent and all(shape.endswith(",128") for shape in sent)  # no tile is padded
    words = sum(math.prod(map(int, shape.split(","))) for shape in sent)
    bits = 32 * words / ((1 + LAYERS) * width**2 / 4)  # a device sends its quarter of the model
    assert 4 < bits < 4.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "slices", "codec", "mean_codec"),
    [
        ("v5e:2x2", 4, codecs.e3m0(), codecs.e3m0()),
        ("v6e:2x2", 4, codecs.e3m0(), codecs.e3m0()),
        ("v6e:2x2", 10, codecs.e3m0(), None),
        ("v5p:2x2x1", 4, codecs.uniform(16), None),
    ],
    ids=range(4),
)
def test_two_transfers_are_each_sent_under_their_local_steps(
    tpu_devices, topology, slices, codec, mean_codec
):
    """An all-to-all of the words, and an all-gather of the mean that depends on it."""
    v5e = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false"}
    options = v5e if topology.startswith("v5e") else None
    width, delay = 512, 4
    algorithm = streaming(slices, compressed_mean(codec, mean_codec=mean_codec), delay)
    text = compiled_text(algorithm, tpu_devices(topology, slices), slices, width, delay, options)
    check_overlap(text, FRAGMENTS, stages=2)
    kinds = set(re.findall(r'_xla_megascale_transfer_type="(\w+)"', text))
    assert kinds == {"ALL_TO_ALL", "ALL_GATHER", "ALL_REDUCE"}  # the last of metrics


@pytest.mark.parametrize(
    ("platform", "delay"),
    [
        ("tpu", 1),
        pytest.param("tpu", 2, marks=pytest.mark.slow),
        ("cpu", 1),
        pytest.param("cuda", 1, marks=pytest.mark.slow),
    ],
)
def test_a_phase_of_one_step_stays_together_on_a_tpu(platform, delay):
    """XLA would inline its loop, and then order the transfer as it likes."""
    algorithm = streaming(2, delay=delay)
    params = {"embedding": jnp.ones((4, 4)), "layers": jnp.ones((LAYERS, 4, 4))}
    cohort = Cohort({"x": jnp.ones((2, FRAGMENTS * (delay + 2), 1, 4))})
    state = jax.eval_shape(algorithm.init, params)
    lowered = jax.jit(algorithm.round).trace(state, cohort).lower(lowering_platforms=(platform,))
    predicates = re.findall(r"optimization_barrier %\S+ : tensor<i1>", lowered.as_text())
    assert len(predicates) == (FRAGMENTS if (platform, delay) == ("tpu", 1) else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "width"), [("v5e:2x2", 512), ("v6e:2x2", 256)])
def test_metrics_beside_the_last_transfer_would_expose_it(
    tpu_devices, monkeypatch, topology, width
):
    """The negative control: without the barrier the metrics join the last fragment's transfer."""
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda values: values)
    text = compiled_text(streaming(2), tpu_devices(topology, 2), 2, width)
    result, loops = transfers(text)
    assert loops == 2 * FRAGMENTS and len(result) >= FRAGMENTS
    with pytest.raises(AssertionError):
        check_overlap(text, FRAGMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
def test_eager_diloco_sends_under_its_whole_inner_phase(tpu_devices, topology):
    algorithm = eager_diloco(loss_fn, islands=2, inner_optimizer=optax.adamw(1e-3))
    result, loops = transfers(compiled_text(algorithm, tpu_devices(topology, 2), 2, 512))
    assert loops == 1
    assert {(t.started, t.completed) for t in result} == {(0, 1), (1, 1)}, result  # (1, 1): metrics
    assert sum(t.started == 1 for t in result) == 1
