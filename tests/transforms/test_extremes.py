"""Derivatives of the maximum and minimum over participants that are rematerialized."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_table import MESHES, Federated, N, Rematerialized, cases, close, normal, slow, together

import fedpax
from fedpax import federated_broadcast, federated_map, federated_max, federated_min

EXTREMA = [federated_max, federated_min]


ROUNDED = [
    lambda w, y, x: jnp.sin(y) + x * jnp.tanh(w),
    lambda w, y, x: jnp.tanh(y * w + x),
    lambda w, y, x: jnp.tanh(y) * jnp.sum(x * w) * 0.3,
    lambda w, y, x: y * w + x * jnp.sin(w),
]


# Comparing values again finds no participant in each of the fast pairs.
@pytest.mark.slow
@pytest.mark.parametrize(
    "pairs", [[(1, 0), (1, 3)], slow(list(itertools.product(range(4), repeat=2)))], ids=len
)
def test_gradients_of_extrema_do_not_depend_on_rounding(pairs):
    """A rematerialized value can round differently from the one that attained the maximum."""
    ws = np.stack([normal(16, 3, seed=8)[4 * first + second] for first, second in pairs])
    x = normal(N, 3, seed=9)

    def body(functions, ws, x):
        total = 0
        for (first, second), w in zip(pairs, ws, strict=True):
            copies, fn = federated_broadcast(w), ROUNDED[first]
            y = federated_map(lambda w, x, fn=fn: fn(w, x, x), copies, x)
            total += jnp.sum(federated_min(functions.map(ROUNDED[second], copies, y, x)))
        return total

    def gradient(functions):
        program = fedpax.program(clients=N, chunk_size=5)(functools.partial(body, functions))
        return jax.jit(jax.vmap(jax.grad(program), (0, None)))(jnp.stack([ws, ws + 1, -ws]), x)

    close(gradient(Rematerialized), gradient(Federated), 1e-3)


def tied(participants, width):
    """Return values whose maxima in even columns are ties, in several chunks and devices."""
    x = normal(participants, width)
    for column in range(0, width, 2):
        who = np.random.default_rng(column).choice(participants, 2 + column % 5, replace=False)
        x[who, column] = 4.0
    return x


@jax.custom_vjp
def clipped_below(v):
    return v


clipped_below.defvjp(lambda v: (v, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def test_three_ties_that_the_backward_pass_rounds_differently_share_the_gradient():
    """Clipped gradients make ties, whose values XLA computes in two fusions of one program."""
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        x, w = jnp.asarray(random.normal(size=(8, 3, 4))), -jnp.asarray(random.normal(size=4))
        is_even = jnp.arange(8) % 2 == 0

        def local(w, x, is_even):
            loss = lambda v: jnp.mean(jnp.sin(x @ clipped_below(v)))
            v = jax.lax.scan(lambda v, _: (v - 0.1 * jax.grad(loss)(v), None), w, length=3)[0]
            return jnp.where(is_even, 1.1 * v, jnp.tanh(v)) - w

        @fedpax.program(clients=8)
        def moved(w):
            moves = federated_map(local, federated_broadcast(w), x, is_even)
            return w + fedpax.federated_mean(moves) + federated_min(moves)

        total = lambda w: jnp.sum(jnp.sin(moved(w)))
        jitted = jax.jit(jax.grad(total))(w)
        close(jitted, jax.grad(total)(w), 1e-12)
        close(jitted, jax.jit(jax.jacfwd(total))(w), 1e-12)


@pytest.mark.parametrize("participants", [128, 129])
def test_ties_of_any_participants_share_the_gradient(participants):
    x = jnp.asarray(tied(participants, 10))
    program = fedpax.program(clients=participants, chunk_size=50)(federated_max)
    reference = lambda x: jnp.max(x, 0)
    for derive in (jax.jacrev, jax.jacfwd):
        close(*together(derive(program), derive(reference))(x), 1e-6)


def total_of_maxima(reduce, functions, chunk_size):
    @fedpax.program(clients=N, chunk_size=chunk_size)
    def program(w, x):
        moved = functions.map(lambda w, x: jnp.tanh(x) * w, functions.broadcast(w), x)
        return reduce(moved), reduce(-x)

    return lambda w, x: sum(jnp.sum(jnp.sin(leaf)) for leaf in program(w, x))


@pytest.mark.parametrize("functions", [slow(Federated), Rematerialized])
@pytest.mark.parametrize("chunk_size", [slow(1), 5, slow(None)])
@pytest.mark.parametrize(
    "current_mesh", cases(MESHES, fast={("automatic",)}), indirect=["current_mesh"]
)
def test_ties_share_the_gradient_equally(functions, chunk_size, current_mesh):
    w, x = np.abs(normal(16)) + 0.1, tied(N, 16)
    federated = total_of_maxima(federated_max, functions, chunk_size)
    plain = lambda w, x: jnp.sum(jnp.sin(jnp.max(jnp.tanh(x) * w, 0)) + jnp.sin(jnp.max(-x, 0)))
    close(*together(*(jax.grad(fn, (0, 1)) for fn in (federated, plain)))(w, x))
    along = lambda fn: lambda *args: jax.jvp(fn, args, (w, jnp.cos(x)))[1]
    close(*together(along(federated), along(plain))(w, x), 1e-4)


@pytest.mark.slow
def test_a_tie_loses_no_gradient_if_one_rounds_differently():
    """One is in a full chunk and the other in the remainder, which is compiled separately.

    CPUs differ in whether the two round alike. If not, the larger one has the whole gradient.
    """
    w, x = normal(4, 6, seed=1), normal(8, 6, seed=2)
    x[0] = x[7] = 3 + 0.2 * normal(6, seed=3)
    train = lambda w, x: jax.nn.softmax(x * w) @ jnp.ones((6, 6)) * w + x * w

    @fedpax.program(clients=8, chunk_size=3)
    def program(w, x):
        return federated_max(federated_map(jax.checkpoint(train), federated_broadcast(w), x))

    plain = lambda w, x: jnp.max(jax.vmap(train, (None, 0))(w, x), 0)
    (dw, dx), (plain_dw, plain_dx) = (
        jax.jit(jax.vmap(jax.grad(lambda w, x, f=fn: jnp.sum(f(w, x)), (0, 1)), (0, None)))(w, x)
        for fn in (program, plain)
    )
    close(dw, plain_dw, 1e-3)
    close(dx.sum(1), plain_dx.sum(1), 1e-3)
    close(dx[:, 1:7], plain_dx[:, 1:7], 1e-3)
    tied = np.abs(plain_dx[:, 0]) > 1e-3
    shares = np.asarray(dx)[:, [0, 7]].swapaxes(1, 2)[tied] / plain_dx[:, 0][tied][:, None]
    nearest = np.abs(shares[..., None] - np.array([0.0, 1.0, 2.0])).min(-1)
    assert tied.any() and nearest.max() < 1e-2  # nothing, its half, or all of it


@pytest.mark.slow
@pytest.mark.parametrize("functions", [slow(Federated), Rematerialized])
def test_ties_share_the_gradient_out_of_core(functions):
    w, x = np.abs(normal(16)) + 0.1, tied(N, 16)
    gradient = jax.grad(total_of_maxima(federated_max, functions, 2), (0, 1))
    close(
        fedpax.out_of_core(gradient, chunk_size=5)(w, x), jax.tree.map(np.asarray, gradient(w, x))
    )


@pytest.mark.parametrize("chunk_size", [slow(1), 5, slow(None)])
def test_the_gradient_of_a_nan_maximum_goes_to_the_nan_participants(chunk_size, current_mesh):
    x = normal(N, 3)
    x[4, 0] = x[7, 0] = x[9, 2] = np.nan

    @fedpax.program(clients=N, chunk_size=chunk_size)
    def program(x):
        return federated_max(federated_map(lambda x: 2 * x, x))

    expected = np.zeros_like(x)
    expected[4, 0] = expected[7, 0] = 1
    expected[np.argmax(x[:, 1]), 1] = expected[9, 2] = 2
    close(jax.jit(jax.grad(lambda x: jnp.sum(program(x))))(x), expected)


def test_gradients_of_nested_extrema():
    w, x = normal(3), normal(4, N, 3)

    def island(w, x):
        return federated_max(
            federated_map(jax.checkpoint(lambda x: jnp.sin(w * x)), x, placement="clients"),
            placement="clients",
        )

    @fedpax.program(islands=4, clients=N, chunk_size=1)
    def program(w, x):
        most = federated_map(jax.checkpoint(functools.partial(island, w)), x, placement="islands")
        return federated_min(most, placement="islands")

    total = lambda w, x: jnp.sum(program(w, x))
    plain = lambda w, x: jnp.sum(jnp.min(jnp.max(jnp.sin(w * x), 1), 0))
    close(*together(jax.grad(total, (0, 1)), jax.grad(plain, (0, 1)))(w, x))


@pytest.mark.each_value
@pytest.mark.parametrize("chunk_size", [1, 5, slow(None)])
def test_an_extremum_is_nan_if_one_participant_is_nan(chunk_size, current_mesh):
    """XLA's all-reduce between simulated devices does not propagate NaN."""
    x = normal(N, 40)
    x[np.arange(N), np.arange(N)] = [np.nan, -np.nan, np.inf, -np.inf] * 3
    x[:, 30:] *= 1e-40  # subnormal
    program = fedpax.program(clients=N, chunk_size=chunk_size)
    moved = program(lambda x: [f(federated_map(lambda x: -x, x)) for f in EXTREMA])
    close(jax.jit(moved)(x), [np.max(-x, 0), np.min(-x, 0)])
    close(jax.jit(program(lambda x: [f(x) for f in EXTREMA]))(x), [np.max(x, 0), np.min(x, 0)])


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_extremum_is_exact_for_any_bits(dtype, current_mesh):
    bits = np.random.default_rng(0).integers(0, 2**32, (N, 500), np.uint32)
    x = np.asarray(jax.lax.bitcast_convert_type(bits.astype(f"u{np.dtype(dtype).itemsize}"), dtype))
    result = jax.jit(fedpax.program(clients=N)(lambda x: [f(x) for f in EXTREMA]))(x)
    wide = np.float32(x)
    for extremum, expected in zip(result, (np.max(wide, 0), np.min(wide, 0)), strict=True):
        np.testing.assert_array_equal(np.float32(extremum), expected)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2"])
def test_extrema_of_eight_bits(dtype):
    """Some of these dtypes have no infinities to initialize the loop with."""
    x = jnp.array([[1.0, -2.0], [-1.0, -4.0]]).astype(dtype)
    program = fedpax.program(clients=2, chunk_size=1)
    result = program(lambda x: [f(federated_map(lambda x: -x, x)) for f in EXTREMA])(x)
    assert [leaf.astype(jnp.float32).tolist() for leaf in result] == [[1.0, 4.0], [-1.0, 2.0]]
