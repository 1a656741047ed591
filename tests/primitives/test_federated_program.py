"""`program`: arguments and results, tracing, and use under JAX's transformations."""

import threading
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, normal

import fedpax
from fedpax import federated_broadcast, federated_map, federated_mean, federated_sum

N = 4


@fedpax.program(clients=N)
def fit(w, x, rate=0.5):
    """One round of gradient descent for each participant, averaged."""
    gradient = lambda w, x: jax.grad(lambda w: jnp.sum(jnp.sin(w * x)))(w)
    moved = federated_map(lambda x: w - rate * gradient(w, x), x)
    return federated_mean(moved)


def fit_plainly(w, x, rate=0.5):
    return w - rate * jnp.mean(x * jnp.cos(w * x), axis=0)


def test_the_decorated_function_keeps_its_name_and_docstring():
    assert fit.__name__ == "fit"
    assert "gradient descent" in fit.__doc__


def test_arguments_by_position_keyword_and_default():
    w, x = normal(2), normal(N, 2)
    assert_close(fit(w, x), fit_plainly(w, x))
    assert_close(fit(w, x=x, rate=0.1), fit_plainly(w, x, 0.1))
    assert_close(fit(w, x, 0.1), fit_plainly(w, x, 0.1))


@pytest.mark.parametrize("sizes", [{"clients": N}, {"placements": {"clients": N}}])
def test_sizes_as_keywords_or_by_name(sizes):
    x = normal(N, 2)
    assert_close(fedpax.program(**sizes)(federated_sum)(x), x.sum(0))


def test_any_pytree_in_and_any_pytree_out():
    @fedpax.program(clients=N)
    def program(tree, nothing, *rest, **named):
        assert nothing is None
        return {"sum": federated_sum(tree), "rest": rest, "named": named, "none": None}, 3

    x = normal(N, 2)
    out, number = program({"a": x, "b": [x + 1, None]}, None, 1.5, (), key=jax.random.key(0))
    assert_close(out["sum"], {"a": x.sum(0), "b": [(x + 1).sum(0), None]})
    assert out["rest"][0].item() == 1.5
    assert out["rest"][1] == ()
    assert jnp.issubdtype(out["named"]["key"].dtype, jax.dtypes.prng_key)
    assert out["none"] is None
    assert number.item() == 3


def test_a_program_without_arguments_or_results():
    assert fedpax.program(clients=N)(lambda: None)() is None
    total = fedpax.program(clients=N)(lambda: federated_sum(federated_broadcast(2)))
    assert total().item() == 2 * N


def test_callables_other_than_functions():
    class Scaled:
        def __call__(self, x):
            return federated_sum(x) * 2

    x = normal(N)
    assert_close(fedpax.program(clients=N)(Scaled())(x), x.sum() * 2)
    scaled = partial(lambda scale, x: federated_sum(x) * scale, 3.0)
    assert_close(fedpax.program(clients=N)(scaled)(x), x.sum() * 3)


@pytest.mark.parametrize(
    ("run", "traced"), [(lambda f: f, [2, 3, 2, 1, 3]), (jax.jit, [2, 3, 1])], ids=["eager", "jit"]
)
def test_jit_traces_once_per_shape(run, traced):
    traces = []

    @run
    @fedpax.program(clients=N)
    def program(x):
        traces.append(x.shape[1])
        return federated_sum(x)

    for size in (2, 3, 2, 1, 3):
        x = normal(N, size)
        assert_close(program(x), x.sum(0))
    assert traces == traced


def test_a_second_call_under_jit_does_not_retrace():
    once = chex.assert_max_traces(n=1)(lambda w, x: fit.__wrapped__(w, x))
    step = jax.jit(fedpax.program(clients=N)(once))
    w, x = normal(2), normal(N, 2)
    assert_close(step(step(w, x), x), fit_plainly(fit_plainly(w, x), x))


def test_programs_of_different_sizes_do_not_share_a_cache():
    @jax.jit
    def total(x):  # cached by JAX, and called under two sizes
        return federated_sum(federated_broadcast(x))

    small, large = (fedpax.program(clients=n)(lambda x: total(x)) for n in (3, 7))
    x = normal(2)
    for program, n in ((small, 3), (large, 7), (small, 3), (jax.jit(large), 7)):
        assert_close(program(x), n * x)


def test_a_jitted_helper_is_traced_once_per_context():
    @jax.jit
    def helper(x):
        return federated_sum(federated_broadcast(x, placement="clients"), placement="clients")

    @fedpax.program(islands=2, clients=3)
    def program(x):
        at_islands = federated_broadcast(x, placement="islands")
        inside = federated_map(helper, at_islands, placement="islands")
        return federated_sum(inside, placement="islands"), helper(x)

    assert_close(program(2.0), (np.float32(12), np.float32(6)))


def test_a_program_runs_inside_a_program():
    inner = fedpax.program(clients=3)(
        lambda w, x: federated_mean(federated_map(lambda x: jnp.sin(w * x), x))
    )

    @fedpax.program(islands=2)
    def outer(w, x):
        at_server = inner(w, x[0])
        return at_server, federated_sum(federated_map(lambda x: inner(w, x), x))

    w, x = normal(2), normal(2, 3, 2)
    plain = lambda w, x: (jnp.sin(w * x[0]).mean(0), jnp.sin(w * x).mean(1).sum(0))
    assert_close(outer(w, x), plain(w, x))
    scored = lambda f: jax.jit(jax.grad(lambda w, x: sum(jnp.sum(o**2) for o in f(w, x))))
    assert_close(scored(outer)(w, x), scored(plain)(w, x))


def test_a_program_can_be_called_again_after_an_error_and_with_other_types():
    with pytest.raises(ValueError, match="leading axis"):
        fit(normal(2), normal(N + 1, 2))
    w, x = normal(2), normal(N, 2)
    assert_close(fit(w, x), fit_plainly(w, x))
    half = fit(w.astype(np.float16), x.astype(np.float16))
    assert half.dtype == jnp.float16
    np.testing.assert_allclose(half, fit_plainly(w, x), rtol=0.01, atol=0.01)


# ---- ways to compile and run


def test_donated_arguments():
    w, x = jnp.asarray(normal(2)), normal(N, 2)
    expected = fit_plainly(np.array(w), x)
    step = jax.jit(fit, donate_argnums=0)
    assert_close(step(w, x), expected)
    assert w.is_deleted()


def test_compiling_ahead_of_time():
    w, x = normal(2), normal(N, 2)
    compiled = jax.jit(fit).lower(w, x).compile()
    assert_close(compiled(w, x), fit_plainly(w, x))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (w, x))
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(fit(w, x)))).lower(*shapes).compile()
    assert_close(gradient(w, x), jax.grad(lambda w: jnp.sum(fit_plainly(w, x)))(w))


def test_an_exported_program_runs():
    w, x = normal(2), normal(N, 2)
    exported = jax.export.export(jax.jit(fit))(w, x)
    assert_close(exported.call(w, x), fit_plainly(w, x))


def test_threads_compile_at_the_same_time():
    result, failed = {}, []

    def run(n):
        try:
            x = normal(n, 2)
            program = fedpax.program(clients=n)(
                lambda x: federated_mean(federated_map(jnp.sin, x)) + federated_broadcast(1.0).sum()
            )
            for _ in range(3):
                result[n] = jax.jit(program)(x) - np.sin(x).mean(0)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in (2, 3, 4, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    for n in (2, 3, 4, 5):
        np.testing.assert_allclose(result[n], [n, n], rtol=1e-5)


def test_loops_over_a_program():
    w, x = normal(3, 2), normal(N, 2)
    each = np.stack([fit_plainly(w, x) for w in w])
    assert_close(jax.lax.map(lambda w: fit(w, x), w), each)
    count = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, fit(c[1], x)), (0, w[0]))
    assert_close(count[1], fit_plainly(fit_plainly(each[0], x), x))


@pytest.mark.parametrize("policy", ["everything_saveable", "nothing_saveable", "dots_saveable"])
def test_checkpoint_policies(policy):
    w, x = normal(2), normal(N, 2)
    saved = jax.checkpoint(fit, policy=getattr(jax.checkpoint_policies, policy))
    loss = lambda f: lambda w, x: jnp.sum(f(w, x) ** 2)
    expected = jax.jit(jax.grad(loss(fit_plainly)))(w, x)
    assert_close(jax.jit(jax.grad(loss(saved)))(w, x), expected)


def test_a_custom_derivative_around_a_program():
    clipped = jax.custom_vjp(lambda w, x: fit(w, x))

    def backward(pullback, cotangent):
        return jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1), pullback(cotangent))

    clipped.defvjp(lambda w, x: jax.vjp(fit, w, x), backward)
    w, x = normal(2), normal(N, 2)
    loss = lambda f: jax.jit(jax.grad(lambda w: jnp.sum(f(w, x))))
    assert_close(loss(clipped)(w), np.clip(loss(fit_plainly)(w), -0.1, 0.1))


def test_named_axes_of_a_vmap_around_a_program():
    @fedpax.program(clients=N)
    def program(x):
        fn = lambda x: (x - jax.lax.pmean(x, "batch")) * jax.lax.axis_index("batch")
        return federated_sum(federated_map(fn, x))

    x = normal(3, N)
    expected = (x - x.mean(0)).sum(1) * np.arange(3)
    assert_close(jax.vmap(program, axis_name="batch")(x), expected)


def test_a_map_that_reads_only_the_index_of_a_vmap_is_batched():
    # No argument of the map is batched, but its result differs along the batch.
    fn = lambda x: (x, jax.lax.axis_index("batch"))
    program = fedpax.program(clients=N)(lambda x: federated_sum(federated_map(fn, x)))
    alone = fedpax.program(clients=N)(
        lambda x: federated_sum(federated_map(lambda: jax.lax.axis_index("batch"))) + 0 * x
    )
    x = normal(3, N)
    assert_close(jax.vmap(program, axis_name="batch")(x), (x.sum(1), N * np.arange(3)))
    assert_close(jax.vmap(alone, axis_name="batch")(x)[:, 0], N * np.arange(3, dtype=np.float32))


def test_the_transpose_of_a_linear_program():
    program = fedpax.program(clients=N)(
        lambda x: federated_mean(federated_map(lambda x: 3 * x[::-1], x))
    )
    cotangent = normal(2)
    (result,) = jax.linear_transpose(program, jax.ShapeDtypeStruct((N, 2), jnp.float32))(cotangent)
    assert_close(result, np.stack([3 * cotangent[::-1] / N] * N))


# ---- eager calls


def test_an_eager_call_reads_current_values_of_closures():
    # A cache must not keep the closed-over values of the first call: gradients would be zero.
    held = {"w": jnp.float32(1.0)}
    x = np.arange(3.0, dtype=np.float32)

    @fedpax.program(clients=3)
    def scaled(x):
        return fedpax.federated_sum(fedpax.federated_map(lambda x: x * held["w"], x))

    def loss(w):
        held["w"] = w
        return scaled(x)

    assert scaled(x) == 3.0
    held["w"] = jnp.float32(10.0)
    assert scaled(x) == 30.0
    assert jax.grad(loss)(2.0) == 3.0
    held["w"] = 4.0  # a Python number, so a constant of the program
    assert scaled(x) == 12.0


def test_an_eager_call_compiles_each_lowered_text_once():
    held = {"w": jnp.float32(1.0)}
    compiled, first = [], 0

    @fedpax.program(clients=3)
    def scaled(x):
        return fedpax.federated_mean(fedpax.federated_map(lambda x: jnp.cos(x) * held["w"], x))

    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        for w in range(4):
            held["w"] = jnp.float32(w)
            jax.block_until_ready((scaled(np.ones(3)), jax.grad(scaled)(np.ones(3, np.float32))))
            first = first or len(compiled)
        assert len(compiled) == first > 0
    finally:
        jax.monitoring.clear_event_listeners()
