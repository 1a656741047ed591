"""The quantized mean: against NumPy, by its laws, and on the wire."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.aggregators import quantized_mean
from fedpax.aggregators.quantized_mean import WORD, QuantizedMeanState, choose_packing
from fedpax.hlo.collectives import collectives
from fedpax.hlo.costs import count_costs
from fedpax.hlo.parsing import parse

N = 4


def exchange(num_levels, participants=N):
    """Make `(updates, residual, weights=None) -> (mean, residual)`, a program."""
    aggregator = quantized_mean(num_levels)

    @fedpax.program(islands=participants)
    def exchange(updates, residual, weights=None):
        state = QuantizedMeanState(residual)
        mean, state, metrics = aggregator.aggregate(state, updates, weights)
        assert metrics == {}
        return mean, state.residual

    return exchange


def zeros(x):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), x)


def draw(shape, participants=N, seed=0):
    rng = np.random.default_rng(seed)
    return np.float32(rng.standard_normal((participants, *shape)))


@pytest.mark.parametrize("num_levels", [2, 3, 4, 16, 256])
def test_equals_numpy(num_levels):
    x, error = draw((6, 26)), 0.1 * draw((6, 26), seed=1)
    mean, left = jax.jit(exchange(num_levels))(x, error)
    unsent = np.float64(x) + error
    # What was sent, and by which step: the levels are equally far from one another, around 0.
    sent = unsent - left
    gaps = np.diff(np.sort(sent, axis=None))
    step = np.min(gaps[gaps > 1e-4])
    # In standard deviations table I of Max 1960 has the steps.
    best = {2: 1.596, 3: 1.224, 4: 0.9957, 16: 0.3352, 256: 0.0308}[num_levels]
    assert step / (np.abs(unsent).mean() * np.sqrt(np.pi / 2)) == pytest.approx(best, rel=0.01)
    codes = sent / step + (num_levels - 1) / 2
    nearest = np.clip(np.round(unsent / step + (num_levels - 1) / 2), 0, num_levels - 1)
    np.testing.assert_allclose(codes, nearest, atol=5e-3)
    np.testing.assert_allclose(mean, sent.mean(0), atol=1e-5)


def test_the_step_is_the_best_for_normal_values():
    """Max 1960, table I: distortion of 2, 4 and 16 equally spaced levels."""
    for num_levels, distortion in ((2, 0.3634), (4, 0.1188), (16, 0.01154)):
        x = draw((400, 400), participants=1)
        _, left = jax.jit(exchange(num_levels, 1))(x, np.zeros_like(x))
        assert np.mean(left**2) == pytest.approx(distortion, rel=0.03)


@hypothesis.given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    participants=st.integers(1, 5),
    num_levels=st.integers(2, 256),
    seed=st.integers(0, 99),
)
@hypothesis.settings(max_examples=8)
def test_the_residual_is_what_was_not_sent(shape, participants, num_levels, seed):
    x = {"a": draw(shape, participants, seed), "b": draw((), participants, seed)}
    mean, left = jax.device_get(exchange(num_levels, participants)(x, zeros(x)))
    for name in x:
        np.testing.assert_allclose(
            mean[name] + left[name].mean(0), x[name].mean(0), rtol=1e-5, atol=1e-5
        )


def test_the_quantization_error_telescopes_over_rounds():
    """The means sum up to the exact ones but for the residual, which does not grow."""
    rounds = [draw((13, 8), seed=n) for n in range(40)]
    total, error, sizes = 0.0, np.zeros_like(rounds[0]), []
    step = jax.jit(exchange(2))
    for x in rounds:
        mean, error = step(x, error)
        total = total + np.float64(mean)
        sizes.append(np.sqrt(np.mean(error**2)))
    np.testing.assert_allclose(total + error.mean(0), sum(rounds).mean(0), atol=1e-4)
    assert np.mean(sizes[20:]) < 1.2 * np.mean(sizes[10:20]) < 3


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_zeros_and_nans_are_kept(value):
    x = np.full((N, 5), value, np.float32)
    mean, left = jax.jit(exchange(3))(x, np.zeros_like(x))
    np.testing.assert_array_equal(mean, x[0])
    np.testing.assert_array_equal(left, x)


def test_an_empty_tree():
    assert exchange(2, 3)({}, {}) == ({}, {})


def test_bfloat16_is_added_up_in_float32():
    x = draw((30,)).astype(jnp.bfloat16)
    average = jax.jit(exchange(4))
    mean, left = average(x, zeros(x))
    wide, expected = average(np.float32(x), zeros(x))
    assert mean.dtype == jnp.bfloat16 and left.dtype == jnp.float32
    np.testing.assert_array_equal(mean, wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(left, expected)


@pytest.mark.parametrize(
    ("shape", "participants", "num_levels", "digits"),
    [
        ((3, 192, 416), 4, 2, 13),  # 5^13 < 2^32 < 5^14
        ((3, 192, 4, 48), 4, 2, 12),
        ((32, 4096, 14336), 4, 4, 8),
        ((4096,), 1000, 2, 2),
        ((7,), 4, 2, 7),
        ((17,), 4, 2, 9),  # two words, the second one digit short
        ((8, 8), 1, 256, 4),
    ],
)
def test_number_of_digits_in_a_word(shape, participants, num_levels, digits):
    packing = choose_packing(shape, participants, num_levels)
    assert packing.entries_per_word == digits
    assert packing.base == participants * (num_levels - 1) + 1
    assert packing.base**packing.entries_per_word <= WORD


def test_no_word_spans_two_shards():
    assert choose_packing((8,), 4, 2).entries_per_word == 8
    assert choose_packing((8,), 4, 2, (2,)).entries_per_word == 4


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
def test_each_device_sends_the_words_of_its_shard(kind):
    mesh = jax.make_mesh((4, 2), ("islands", "fsdp"), axis_types=(kind, kind))
    shapes = {"up": (24, 26), "down": (26, 24), "norm": (24,), "scale": ()}
    specs = {"up": ("fsdp", None), "down": (None, "fsdp"), "norm": ("fsdp",), "scale": ()}
    x = {name: draw(shape) for name, shape in shapes.items()}
    expected = jax.jit(exchange(2))(x, zeros(x))
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(x[name], NamedSharding(mesh, P("islands", *specs[name])))
            for name in x
        }
        error = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, device=leaf.sharding), placed)
        compiled = jax.jit(exchange(2)).lower(placed, error).compile()
        got = compiled(placed, error)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, expected)
    communication = [c for c in collectives(compiled.as_text(), mesh) if "islands" in c.axes]
    assert {c.kind for c in communication} == {"all-reduce"}
    sent = [shape for c in communication for shape in c.shapes]
    assert [s for s in sent if s.startswith("f32")] == [f"f32[{len(shapes)}]"]
    # 26 values are 2 words of 13, 24 are 2 of 12, of which each of two devices sends its own.
    words = sum(np.prod([int(n) for n in s[4:-1].split(",") if n]) for s in sent if s[0] == "u")
    shard = 12 * 2 + 2 * 12 + 1 + 1
    if kind == AxisType.Auto or jax.__version_info__ >= (0, 11):
        assert words == shard


@pytest.mark.parametrize(
    ("num_levels", "error", "message"),
    [
        (1, ValueError, "num_levels is 1, expected an int from 2 to 256. Use"),
        (257, ValueError, "num_levels is 257, expected .* to 256"),
        (2.0, TypeError, "num_levels is 2.0, expected an int"),
        (True, TypeError, "num_levels is True, expected an int"),
    ],
)
def test_num_levels_out_of_range(num_levels, error, message):
    with pytest.raises(error, match=message):
        quantized_mean(num_levels)


def test_other_dtypes_and_too_many_levels_are_refused():
    with pytest.raises(TypeError, match=r"updates\['n'\] has dtype int32, expected floats"):
        exchange(2)({"n": np.ones(N, np.int32)}, {"n": np.zeros(N, np.float32)})
    with pytest.raises(ValueError, match=r"does not fit a 32-bit word\. Use fewer levels"):
        choose_packing((3,), 2**25, 256)


def test_weights_weigh_the_updates():
    x, weights = draw((6, 26)), np.array([1, 5, 0, 2], np.int32)
    mean, residual = jax.jit(exchange(256))(x, zeros(x), weights)
    exact = np.average(np.float64(x), axis=0, weights=weights)
    # Residuals are of the scaled updates n w_i x_i / sum(w).
    np.testing.assert_allclose(mean + residual.mean(0), exact, rtol=1e-5, atol=1e-5)
    assert not np.any(residual[2])
    for none in (np.zeros(N), np.zeros(N, np.int32)):
        mean, residual = jax.jit(exchange(4))(x, zeros(x), none)
        assert not np.any(mean) and not np.any(residual)


def test_init_makes_a_float32_residual_for_each_participant():
    params = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.float32(1)}
    state = fedpax.program(islands=N)(quantized_mean(2).init)(params)
    chex.assert_trees_all_equal(
        state, QuantizedMeanState({"w": jnp.zeros((N, 3, 2)), "b": jnp.zeros(N)})
    )
    chex.assert_tree_shape_prefix(state, (N,))


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_memory_traffic_is_proportional_to_the_participants(chunk_size):
    # The residuals are overwritten in place, by a loop that reads them for codes and residuals.
    def traffic(participants):
        run = exchange(4, participants).with_options(chunk_size=chunk_size)
        x = draw((200, 10), participants)
        text = jax.jit(run, donate_argnums=1).lower(x, zeros(x)).compile().as_text()
        return count_costs(parse(text)).memory_traffic

    assert 3.5 < traffic(64) / traffic(16) < 4.1
