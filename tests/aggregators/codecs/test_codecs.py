"""The codecs: against NumPy, by the laws of their papers, and on the wire."""

import functools
import math

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.aggregators import codecs
from fedpax.aggregators.codecs.blocks import choose_blocks, from_blocks, to_blocks
from fedpax.aggregators.codecs.codec import pack_bits, packed_words, unpack_bits
from fedpax.aggregators.codecs.rotated import hadamard_transform

CODECS = {
    "float32": codecs.float32(),
    "uniform": codecs.uniform(2),
    "rotated uniform": codecs.rotated(codecs.uniform(3)),
    "drive": codecs.drive(),
    "biased drive": codecs.drive(unbiased=False),
    "terngrad": codecs.terngrad(),
    "sign": codecs.sign(),
    "2-bit sign": codecs.sign(bits=2),
    "e3m0": codecs.e3m0(),
    "top-k": codecs.top_k(0.1),
    "2-bit top-k": codecs.top_k(0.1, values=codecs.sign(bits=2)),
    "random-k": codecs.random_k(0.25),
    "biased random-k": codecs.random_k(0.25, unbiased=False),
}
UNBIASED = ("float32", "uniform", "rotated uniform", "terngrad", "random-k")
CONTRACTIVE = [name for name, codec in CODECS.items() if codec.contractive]
ENTRIES, DRAWS = 64, 600


@functools.cache
def transmit(name):
    """Make `blocks [ENTRIES, 3] -> decoded [DRAWS, ENTRIES, 3]`, compiled once."""
    codec = CODECS[name]

    def once(key, x):
        return codec.decode(key, codec.encode(key, x), ENTRIES)

    return functools.partial(jax.jit(jax.vmap(once, in_axes=(0, None))), keys(DRAWS))


def keys(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


def draw(*shape, seed=0):
    """Draw entries with heavy tails."""
    return np.float32(np.random.default_rng(seed).standard_t(4, size=shape))


@functools.cache
def draws(name):
    """Return three blocks, and what they are decoded to with many keys."""
    x = draw(ENTRIES, 3)
    return np.float64(x), np.float64(transmit(name)(x))


# ---- what is decoded


def test_float32_is_exact():
    x, decoded = draws("float32")
    np.testing.assert_array_equal(decoded[0], x)


def test_uniform_rounds_to_a_neighboring_level():
    x, decoded = draws("uniform")
    low, step = x.min(0), np.ptp(x, axis=0) / 3
    place, code = (x - low) / step, (decoded - low) / step
    np.testing.assert_allclose(code, np.round(code), atol=1e-4)
    assert np.all(np.abs(code - place) < 1 + 1e-4)


def test_terngrad_sends_the_maximum_with_the_right_sign_or_zero():
    x, decoded = draws("terngrad")
    sent = decoded / np.abs(x).max(0)
    assert np.all((sent == 0) | (np.abs(sent - np.sign(x)) < 1e-6))


def test_terngrad_clips_to_standard_deviations():
    codec, x = codecs.terngrad(clip=1.5), draw(ENTRIES, 2)
    decoded = jax.jit(lambda key: codec.decode(key, codec.encode(key, x), ENTRIES))(keys(1)[0])
    np.testing.assert_allclose(np.abs(decoded).max(0), 1.5 * x.std(0), rtol=1e-5)


def test_sign_equals_numpy():
    x, decoded = draws("sign")
    expected = np.where(x < 0, -1, 1) * np.abs(x).mean(0)
    np.testing.assert_allclose(decoded[0], expected, rtol=1e-5)


def test_two_bits_are_signs_and_the_means_of_two_intervals():
    x, decoded = draws("2-bit sign")
    expected = np.empty_like(x)
    for column in range(3):
        size = np.abs(x[:, column])
        large = size >= (size.min() + size.max()) / 2
        expected[:, column] = np.where(large, size[large].mean(), size[~large].mean())
    np.testing.assert_allclose(decoded[0], np.copysign(expected, x), rtol=1e-5)


def test_e3m0_rounds_to_the_nearest_level():
    x, decoded = draws("e3m0")
    levels = np.array([0.0, *(2.0**-e for e in range(7))])
    relative = x / np.abs(x).max(0)
    nearest = levels[np.argmin(np.abs(np.abs(relative)[..., None] - levels), axis=-1)]
    np.testing.assert_allclose(decoded[0] / np.abs(x).max(0), np.copysign(nearest, x), rtol=1e-6)


def test_top_k_equals_numpy():
    x, decoded = draws("top-k")
    expected = np.zeros_like(x)
    for column in range(3):
        largest = np.argsort(-np.abs(x[:, column]))[:7]  # ceil(0.1 * 64)
        expected[largest, column] = x[largest, column]
    np.testing.assert_array_equal(decoded[0], expected)


LARGE = 2**16  # entries of which groups are searched, or bits where the groups have one entry


@pytest.mark.parametrize(
    ("entries", "sent", "total"),
    [
        *((1, 1, 4), (31, 1, 4), (40, 40, 4), (1000, 16, 4)),
        *((64, 40, LARGE), (129, 3, LARGE), (4096, 1, LARGE)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((64, 40, 4), (129, 3, 4), (4096, 1, 4), (1, 1, LARGE), (31, 1, LARGE)),
                *((40, 40, LARGE), (1000, 16, LARGE)),
            )
        ),
    ],
)
def test_top_k_sends_the_largest_entries_of_blocks_of_any_size(entries: int, sent: int, total: int):
    random = np.random.default_rng(entries + sent)
    x = random.standard_normal((entries, max(4, -(-total // entries)))).astype(np.float32)
    x[:, 1] = np.round(x[:, 1])  # many ties
    x[:, 2] = 0
    x[random.random(entries) < 0.1, 3] = np.nan  # counts as the largest, so that it is sent
    codec, key = codecs.top_k(sent / entries), jax.random.key(0)
    decode = jax.jit(lambda x: codec.decode(key, codec.encode(key, x), entries))
    decoded = np.asarray(decode(x))
    expected = np.sort(np.abs(x), axis=0)[entries - sent :]
    np.testing.assert_array_equal(np.sort(np.abs(decoded), axis=0)[entries - sent :], expected)
    kept = decoded != 0
    assert np.all(kept.sum(0) <= sent)
    np.testing.assert_array_equal(decoded[kept], x[kept])


def test_top_k_sends_nan_where_xla_ranks_it_last(monkeypatch):
    """As XLA does on a GPU."""
    top_k = jax.lax.top_k
    monkeypatch.setattr(
        jax.lax, "top_k", lambda x, k: top_k(jnp.where(jnp.isnan(x), -jnp.inf, x), k)
    )
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    x[9, 1] = np.nan
    codec, key = codecs.top_k(1 / 64), jax.random.key(0)
    decode = jax.jit(lambda x: codec.decode(key, codec.encode(key, x), 64))
    decoded = np.asarray(decode(x))
    assert np.isnan(decoded[9, 1]) and np.isfinite(np.delete(decoded, 1, 1)).all()


@pytest.mark.parametrize(("name", "scale"), [("random-k", 4), ("biased random-k", 1)])
def test_random_k_sends_a_quarter_at_the_same_places_of_every_block(name, scale):
    x, decoded = draws(name)
    sent = decoded != 0
    assert np.all(sent.sum(1) == ENTRIES // 4)
    assert np.all(sent == sent[..., :1])
    np.testing.assert_allclose(decoded, np.where(sent, scale * x, 0), rtol=1e-6)
    # Every entry is sent with the probability 1/4.
    frequency = sent[..., 0].mean(0)
    assert np.abs(frequency - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / DRAWS)


@pytest.mark.parametrize("entries", [1, 2, 64, 1024])
def test_the_hadamard_transform_equals_its_matrix(entries):
    matrix = np.ones((1, 1))
    while len(matrix) < entries:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = draw(entries, 3)
    expected = matrix @ np.float64(x) / math.sqrt(entries)
    np.testing.assert_allclose(jax.jit(hadamard_transform)(x), expected, rtol=1e-4, atol=1e-5)


def test_top_k_is_decoded_without_a_transposed_copy() -> None:
    codec, entries, others = codecs.top_k(1 / 64), 1024, (9, 128)

    def decode(key: jax.Array, words: jax.Array) -> jax.Array:
        return codec.decode(key, words, entries)

    key = jax.random.key(0)
    words = jax.eval_shape(codec.encode, key, jax.ShapeDtypeStruct((entries, *others), "float32"))
    compiled = jax.jit(decode).lower(key, words).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * entries * math.prod(others) / 2


def test_a_rotation_is_undone():
    codec, x = codecs.rotated(codecs.float32()), draw(50, 3)  # padded to 64

    @jax.jit
    def both(x):
        words = codec.encode(keys(1)[0], x)
        return words, codec.decode(keys(1)[0], words, 50)

    words, decoded = both(x)
    assert words.shape == (64, 3)
    np.testing.assert_allclose(decoded, x, rtol=1e-4, atol=1e-5)


# ---- laws


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased(name):
    x, decoded = draws(name)
    # The variance of an entry that is rarely sent, and so is in no draw, is taken from its block.
    variance = decoded.var(0)
    error = np.sqrt(np.where(variance == 0, variance.mean(0), variance) / DRAWS)
    assert np.all(np.abs(decoded.mean(0) - x) <= 5 * error + 1e-5)


def test_drive_is_nearly_unbiased_with_the_squared_error_of_theorem_2():
    # The Hadamard transform stands in for a uniformly random rotation: a bias remains.
    x, decoded = draws("drive")
    squares = np.sum(x**2)
    assert np.sum((decoded - x) ** 2) / DRAWS / squares == pytest.approx(math.pi / 2 - 1, rel=0.1)
    assert np.sum((decoded.mean(0) - x) ** 2) / squares < 0.02
    x, decoded = draws("biased drive")
    assert np.sum((decoded - x) ** 2) / DRAWS / squares == pytest.approx(1 - 2 / math.pi, rel=0.1)


def test_squared_errors_of_the_papers():
    def error(name):
        x, decoded = draws(name)
        return x, np.sum((decoded - x) ** 2, axis=1).mean(0)

    x, uniform = error("uniform")
    step = np.ptp(x, axis=0) / 3
    assert np.all(uniform < ENTRIES * step**2 / 4)
    place = (x - x.min(0)) / step
    up = place - np.floor(place)
    np.testing.assert_allclose(uniform, np.sum(step**2 * up * (1 - up), axis=0), rtol=0.1)
    x, terngrad = error("terngrad")
    size = np.abs(x)
    np.testing.assert_allclose(terngrad, np.sum(size * (size.max(0) - size), axis=0), rtol=0.1)
    x, unbiased = error("random-k")
    np.testing.assert_allclose(unbiased, 3 * np.sum(x**2, axis=0), rtol=0.2)
    x, biased = error("biased random-k")
    np.testing.assert_allclose(biased, 0.75 * np.sum(x**2, axis=0), rtol=0.1)


def test_a_rotation_spreads_large_entries():
    x = draw(ENTRIES, 3)
    x[5] = 50.0
    plain = np.sum((np.float64(transmit("uniform")(x)) - x) ** 2)
    rotated = np.sum((np.float64(transmit("rotated uniform")(x)) - x) ** 2)
    # The rotated codec has one more bit, which divides the error by (7 / 3)^2 = 5.4. The rotation
    # divides it further, from the order of d to the order of log d.
    assert rotated < plain / 5.4 / 3


@pytest.mark.parametrize("name", CONTRACTIVE)
@hypothesis.given(
    x=hnp.arrays(
        np.float32,
        (ENTRIES, 3),
        elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False),
    )
)
@hypothesis.settings(max_examples=8)
def test_contractive_codecs_contract(name, x):
    x = np.where(np.abs(x) < 2.0**-20, np.float32(0), x)
    x[3] = 1 + np.abs(x[3])  # no block is zero
    decoded = np.float64(transmit(name)(x))
    error = np.sum((decoded - x) ** 2, axis=(0, 1)) / DRAWS
    assert np.all(error < np.sum(np.float64(x) ** 2, axis=0))


def test_only_codecs_that_contract_say_so():
    assert not set(CONTRACTIVE) & {"uniform", "drive", "terngrad", "random-k"}
    assert codecs.uniform(5).contractive
    assert not codecs.uniform(4).contractive
    assert codecs.uniform(4, block_size=256).contractive
    assert not codecs.top_k(0.1, values=codecs.uniform(1)).contractive


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros_and_nans_arrive(name):
    x = np.zeros((ENTRIES, 3), np.float32)
    x[:, 1] = np.nan
    x[4, 2] = np.nan
    decoded = transmit(name)(x)
    assert not np.any(decoded[:, :, 0])
    assert np.isnan(decoded[:, :, 1]).any()
    assert np.isnan(decoded[:, :, 2]).any()


# ---- the wire


@pytest.mark.parametrize(
    ("bits", "entries"), [(1, 70), (3, 33), (5, 70), (8, 1), (12, 70), (20, 9), (32, 5)]
)
def test_packed_codes_are_unpacked(bits, entries):
    codes = np.random.default_rng(bits).integers(2**bits, size=(entries, 2), dtype=np.uint32)
    words = jax.jit(pack_bits, static_argnums=1)(codes, bits)
    assert words.dtype == jnp.uint32
    assert words.shape == (packed_words(entries, bits), 2)
    unpacked = jax.jit(unpack_bits, static_argnums=(1, 2))(words, bits, entries)
    np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.parametrize(("bits", "operations"), [(5, 200), (12, 50)])
def test_packing_compiles_few_operations(bits, operations):
    # 669 and 103 if each code moved alone.
    codes = jax.ShapeDtypeStruct((1024,), jnp.uint32)
    packed = jax.make_jaxpr(pack_bits, static_argnums=1)(codes, bits)
    assert len(packed.eqns) < operations


def test_codes_that_fill_words_waste_no_bit():
    assert all(packed_words(64, bits) == 2 * bits for bits in range(1, 33))


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (codecs.float32(), 32),
        (codecs.uniform(3), 3 + 64 / 1024),
        (codecs.rotated(codecs.uniform(4)), 4 + 64 / 1024),
        (codecs.drive(), 1 + 32 / 1024),
        (codecs.drive(block_size=4096), 1 + 32 / 4096),
        (codecs.terngrad(), (52 * 32 + 32) / 1024),  # 205 bytes of 5 codes are 51.25 words
        (codecs.sign(), 1 + 32 / 1024),
        (codecs.e3m0(), 4 + 32 / 1024),
        (codecs.top_k(1 / 64), (12 + 32) / 64),
        # SparseLoCo's: 12 + 2 bits for 1 value of 64 are 0.21875, and the two magnitudes.
        (codecs.top_k(1 / 64, values=codecs.sign(bits=2)), (12 + 2) / 64 + 64 / 4096),
        (codecs.random_k(1 / 64), 32 / 64),
    ],
)
def test_bits_on_the_wire(codec, bits):
    leaf = jax.ShapeDtypeStruct((8192, 512), jnp.float32)
    assert codecs.wire_bits(codec, {"kernel": leaf}) == bits * 8192 * 512


@pytest.mark.parametrize(
    ("shape", "block_size", "blocks", "cut"),
    [
        ((), 8, (None, 1, 1), (1, 1)),
        ((0, 3), 8, (None, 1, 1), (1, 1)),
        ((5, 7), 16, (None, 3, 12), (12, 3)),
        ((5, 8), 4, (None, 10, 4), (4, 10)),
        ((3, 300, 100), 128, (1, 3, 100), (100, 3, 3, 100)),
        ((3, 257, 100), 256, (1, 2, 129), (129, 3, 2, 100)),
    ],
)
def test_blocks_are_cut_and_put_together(shape, block_size, blocks, cut):
    x = draw(*shape)
    chosen = choose_blocks(codecs.uniform(4, block_size=block_size), shape)
    assert chosen == blocks

    @jax.jit
    def both(x):
        parts = to_blocks(x, chosen)
        return parts, from_blocks(parts, chosen, shape)

    parts, whole = both(x)
    assert parts.shape == cut
    np.testing.assert_array_equal(whole, x)
    if chosen.axis == 1:  # with n blocks, a block has every n-th entry of the axis
        second = x[2, 1 :: chosen.num_blocks, 7]
        np.testing.assert_array_equal(parts[: len(second), 2, 1, 7], second)


# ---- bad input


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: codecs.uniform(0),
            ValueError,
            r"is 0, expected an int from 1 to 16. Use 4, for example",
        ),
        (lambda: codecs.uniform(17), ValueError, "bits is 17, .* 16. Use 16, the largest"),
        (lambda: codecs.uniform(2.0), TypeError, "bits is 2.0, expected an int .* Use 4"),
        (lambda: codecs.sign(True), TypeError, "bits is True, expected an int"),
        (
            lambda: codecs.sign(5),
            ValueError,
            r"from 1 to 4.*Use codecs.uniform\(bits\) for more",
        ),
        (lambda: codecs.e3m0(block_size=0), ValueError, "block_size is 0.*Use a power of two"),
        (lambda: codecs.top_k(0), ValueError, r"fraction is 0.*Use 0\.01 to send one entry in"),
        (lambda: codecs.top_k(1.5), ValueError, "fraction is 1.5, expected .* at most 1"),
        (lambda: codecs.random_k(math.nan), ValueError, "fraction is nan, expected"),
        (lambda: codecs.random_k(0.1, values=codecs.e3m0), TypeError, "values is a function.*Call"),
        (lambda: codecs.rotated(4), TypeError, "codec is a int, expected a codec.*uniform"),
        (lambda: codecs.terngrad(clip=0.0), ValueError, r"clip is 0\.0.*Use 2\.5.*None for no"),
    ],
)
def test_arguments_out_of_range(make, error, message):
    with pytest.raises(error, match=message):
        make()
