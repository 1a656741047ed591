"""The mean of compressed updates on the wire: what islands and devices send to each other."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressed_updates import SPARSELOCO, N, draw, exchange, zero_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.aggregators import codecs, compressed_mean
from fedpax.aggregators.codecs.device_exchange import choose_exchange
from fedpax.aggregators.codecs.update_coder import UpdateCoder
from fedpax.aggregators.compressed_mean import CompressedMeanState
from fedpax.hlo.collectives import collectives
from fedpax.primitives.layout import unplaced_aval

# ---- on the wire

# "up" has two heads of 129 features, an odd number that two devices cannot share.
SHAPES = {"up": (512, 2, 129), "down": (256, 512), "norm": (24,), "scale": ()}
SPECS = {"up": ("fsdp", None, None), "down": (None, "fsdp"), "norm": ("fsdp",), "scale": ()}


def compile_on(mesh, aggregator, updates):
    """Return the compiled exchange, its arguments, and its collectives between islands."""
    step = exchange(aggregator, len(updates["up"]))
    with jax.set_mesh(mesh):
        put = lambda tree: {
            name: jax.device_put(x, NamedSharding(mesh, P("islands", *SPECS[name])))
            for name, x in tree.items()
        }
        state = zero_state(updates)
        arguments = state._replace(residual=put(state.residual)), put(updates)
        compiled = step.lower(*arguments).compile()
    communication = [c for c in collectives(compiled.as_text(), mesh) if "islands" in c.axes]
    return compiled, arguments, communication


@functools.cache
def updates(participants=N):
    return {name: draw(participants, *shape) for name, shape in SHAPES.items()}


@functools.cache
def without_mesh(codec):
    step = exchange(compressed_mean(codec, error_feedback=True))
    return step(zero_state(updates()), updates())


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "codec",
    [
        codecs.e3m0(),
        pytest.param(codecs.rotated(codecs.uniform(5)), marks=pytest.mark.slow),
        pytest.param(SPARSELOCO, marks=pytest.mark.slow),
    ],
    ids=range(3),
)
def test_islands_gather_words(codec, kind):
    aggregator = compressed_mean(codec, error_feedback=True)
    mesh = jax.make_mesh((4, 2), ("islands", "fsdp"), axis_types=(kind, kind))
    compiled, arguments, communication = compile_on(mesh, aggregator, updates())
    with jax.set_mesh(mesh):
        got = compiled(*arguments)
    chex.assert_trees_all_close(got, without_mesh(codec), rtol=1e-5, atol=2e-5)
    assert {c.kind for c in communication} == {"all-gather"}
    assert all(shape.startswith("u32") for c in communication for shape in c.shapes)
    assert all(c.executions == 1 for c in communication)
    # Two devices of an island send half each; the small leaves are sent by both.
    bits = codecs.wire_bits(codec, {name: x[0] for name, x in updates().items()})
    sent = 2 * 8 * sum(c.bytes for c in communication)
    # A device fills a leaf's last row of 128 words up.
    assert bits <= sent < 1.01 * bits + 2 * len(communication) * 128 * 32
    assert all(shape.endswith(",128]") for c in communication for shape in c.shapes)


@pytest.mark.parametrize(
    ("participants", "kinds"),
    [
        pytest.param(4, {"all-gather"}, marks=pytest.mark.slow),
        (16, {"all-to-all", "all-gather"}),
        pytest.param(48, {"all-reduce"}, marks=pytest.mark.slow),
    ],
)
def test_the_exchange_with_the_fewest_bits_is_compiled(participants, kinds):
    """On four devices at 4 bits. `choose_exchange` counts the same bits, but for padded rows."""
    mesh = jax.make_mesh((4, 1), ("islands", "fsdp"), devices=jax.devices()[:4])
    codec, params = codecs.e3m0(), {name: x[0] for name, x in updates().items()}
    aggregator = compressed_mean(codec, error_feedback=True)
    _, _, communication = compile_on(mesh, aggregator, updates(participants))
    assert {c.kind for c in communication} == kinds
    # What a device receives from three others, per byte of its own operand.
    factors = {"all-gather": 3, "all-to-all": 3 / 4, "all-reduce": 2 * 3 / 4}
    received = sum(factors[c.kind] * 8 * c.bytes for c in communication)
    exchange = choose_exchange(codec, params, participants, devices=4)
    if exchange.parts is None:
        assert received == exchange.bits
    else:
        sent = {
            1: participants // 4,
            4: participants + 1,
        }  # arrays of whole rows, by number of parts
        rows = sum(sent[parts] for parts in exchange.parts)
        assert exchange.bits <= received < exchange.bits + 3 * rows * 128 * 32
    bits = codecs.wire_bits(codec, params)
    values = sum(x.size for x in params.values())
    each = {4: 3 * bits, 16: 3 / 4 * (4 * bits + 32 * values), 48: 48 * values}
    assert exchange.bits == pytest.approx(each[participants], rel=0.02)


@pytest.mark.parametrize(
    "kind", [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit], ids=str
)
def test_all_to_all_gives_the_bits_of_all_gather(kind):
    """Both add in the same order. The parts of no leaf have the same number of blocks."""
    mesh = jax.make_mesh((4, 2), ("islands", "fsdp"), axis_types=(kind, kind))
    codec = codecs.uniform(5)
    x = [draw(N, 512, 2, 129), draw(N, 66_000)]

    @jax.jit
    @fedpax.program(islands=N)
    def sums(x):
        types = [unplaced_aval(jax.typeof(own)) for own in x]
        coder = UpdateCoder(codec, jax.random.key(0), types, ("fsdp",))
        words = fedpax.federated_map(coder.encode, jnp.arange(N), x)

        def average(*parts):
            tiles = coder.send_words(words, "islands", parts)
            means = coder.average_words(jnp.arange(N), tiles, "islands", parts)
            return coder.join_means(N, means, "islands", parts)

        return average(1, 1), average(N, N)

    with jax.set_mesh(mesh):
        placed = [jax.device_put(own, NamedSharding(mesh, P("islands"))) for own in x]
        gathered, exchanged = sums(placed)
    chex.assert_trees_all_equal(gathered, exchanged)
    for mean, own in zip(gathered, x, strict=True):
        # An entry errs by less than one of the 31 steps between the extremes of its block.
        np.testing.assert_allclose(mean, own.mean(0), atol=10 / 31)


def test_the_mean_is_rounded_and_sent_in_few_bits():
    codec, params = codecs.e3m0(), {name: x[0] for name, x in updates().items()}
    aggregator = compressed_mean(codec, error_feedback=True, mean_codec=codecs.sign())
    mesh = jax.make_mesh((4, 2), ("islands", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    compiled, arguments, communication = compile_on(mesh, aggregator, updates())
    with jax.set_mesh(mesh):
        got, state = compiled(*arguments)
    exact, expected = without_mesh(codec)
    chex.assert_trees_all_close(state.residual, expected.residual, rtol=1e-5, atol=2e-5)
    for name, mean in exact.items():
        same = np.sign(got[name]) == np.sign(mean)
        assert np.mean(same | (np.abs(mean) < 1e-5)) == 1
    # One scale for each block of 512 entries of "up", of signs of the mean's mean magnitude.
    scale = np.abs(exact["up"]).mean(0, keepdims=True)
    np.testing.assert_allclose(np.abs(got["up"]), np.broadcast_to(scale, SHAPES["up"]), rtol=1e-4)
    assert {c.kind for c in communication} == {"all-to-all", "all-gather"}
    assert all(shape.startswith("u32") for c in communication for shape in c.shapes)
    received = sum(
        {"all-gather": 3, "all-to-all": 3 / 4}[c.kind] * 8 * c.bytes for c in communication
    )
    planned = choose_exchange(codec, params, N, devices=4, mean_codec=codecs.sign())
    # Two devices share an island's words. Rows of 128 words are filled up.
    assert planned.bits / 2 <= received < 1.11 * planned.bits / 2
    assert planned.bits < 0.45 * choose_exchange(codec, params, N, devices=4).bits


def test_clients_of_islands_gather_words_within_their_island():
    aggregator = compressed_mean(codecs.sign())

    @jax.jit
    @fedpax.program(islands=2, clients=4)
    def average(x):
        def island(x):
            state = CompressedMeanState(jnp.int32(0), None)
            return aggregator.aggregate(state, x, None)[0]

        return fedpax.federated_map(island, x, placement="islands")

    x = draw(2, 4, 512, 256)
    mesh = jax.make_mesh((2, 4), ("islands", "clients"))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("islands", "clients")))
        compiled = average.lower(placed).compile()
        got = compiled(placed)
    communication = collectives(compiled.as_text(), mesh)
    assert {(c.kind, c.axes) for c in communication} == {("all-gather", ("clients",))}
    # One block of 512 entries for each of 256 columns.
    scale = np.abs(x).mean(2, keepdims=True)
    np.testing.assert_allclose(got, np.mean(np.copysign(scale, x), axis=1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_tpu_pads_no_words(tpu_devices):
    """The words of a large parameter fill tiles of 8 x 128 words; nothing else is sent."""
    mesh = jax.sharding.Mesh(np.array(tpu_devices("v5e:2x4")).reshape(4, 2), ("islands", "fsdp"))
    codec = codecs.top_k(1 / 64, values=codecs.sign(bits=2))
    step = exchange(compressed_mean(codec, error_feedback=True))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("islands", "fsdp"))
        x = jax.ShapeDtypeStruct((4, 4096, 1024), jnp.float32, sharding=sharding)
        state = CompressedMeanState(jax.ShapeDtypeStruct((), jnp.int32), x)
        text = step.lower(state, x).compile().as_text()
    (gather,) = [c for c in collectives(text, mesh) if "islands" in c.axes]
    (shape,) = gather.shapes
    *_, rows, lanes = (int(size) for size in re.fullmatch(r"u32\[(.*)\]", shape)[1].split(","))
    assert (rows % 8, lanes) == (0, 128)
    assert 2 * 8 * gather.bytes == codecs.wire_bits(codec, jax.ShapeDtypeStruct((4096, 1024), "f4"))
    # A TPU selects the largest entries on each device's part.
    within = [c for c in collectives(text, mesh) if c.axes == ("fsdp",)]
    assert {c.kind for c in within} <= {"all-to-all"}
