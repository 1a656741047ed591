"""Static arguments of a program, as in `jax.jit`, and `with_options`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, federated_names, normal

import fedpax
from fedpax import federated_map, federated_mean, federated_sum

N = 4
MODES = {"sin": jnp.sin, "square": jnp.square}


def round_of(w, x, mode="sin", *, scale=1):
    assert isinstance(mode, str)
    assert isinstance(scale, int)
    return federated_mean(federated_map(lambda x: scale * MODES[mode](w * x), x))


def plain(w, x, mode="sin", *, scale=1):
    return jnp.mean(scale * MODES[mode](w * x), axis=0)


BY_NAME = fedpax.program(clients=N, static_argnames=("mode", "scale"))(round_of)
BY_NUMBER = fedpax.program(clients=N, static_argnums=2, static_argnames="scale")(round_of)


def arguments():
    return normal(3), normal(N, 3, seed=1)


@pytest.mark.parametrize("program", [BY_NAME, BY_NUMBER], ids=["names", "numbers"])
def test_a_static_argument_by_position_keyword_and_default(program):
    w, x = arguments()
    assert_close(program(w, x), plain(w, x))
    assert_close(program(w, x, "square"), plain(w, x, "square"))
    assert_close(program(w, x, scale=3), plain(w, x, scale=3))


def test_names_are_inferred_from_numbers_and_numbers_from_names():
    w, x = arguments()
    for option in ({"static_argnums": (2,)}, {"static_argnums": -1}, {"static_argnames": "mode"}):
        program = fedpax.program(clients=N, **option)(lambda w, x, mode: round_of(w, x, mode))
        assert_close(program(w, x, "square"), plain(w, x, "square"))
        assert_close(program(w, x, mode="square"), plain(w, x, "square"))


def test_a_static_argument_before_traced_ones():
    @fedpax.program(clients=N, static_argnums=0)
    def program(mode, w, x):
        return round_of(w, x, mode)

    w, x = arguments()
    assert_close(program("square", w, x), plain(w, x, "square"))
    assert_close(program("square", w, x=x), plain(w, x, "square"))
    gradient = jax.grad(lambda w: jnp.sum(program("square", w, x)))(w)
    assert_close(gradient, jax.grad(lambda w: jnp.sum(plain(w, x, "square")))(w))


def test_a_static_argument_among_any_number_of_arguments():
    program = fedpax.program(clients=N, static_argnums=1)(lambda *rest: round_of(rest[0], rest[2]))
    w, x = arguments()
    assert_close(program(w, "ignored", x), plain(w, x))


def test_under_jit():
    w, x = arguments()
    step = jax.jit(BY_NAME, static_argnames=("mode", "scale"))
    for mode in ("sin", "square", "sin"):
        assert_close(step(w, x, mode), plain(w, x, mode))
        assert_close(step(w, x, mode=mode, scale=2), plain(w, x, mode, scale=2))


def test_under_grad_and_jvp():
    w, x = arguments()
    for kwargs in ({"mode": "square"}, {"mode": "sin", "scale": 3}):
        loss = lambda f, kwargs=kwargs: lambda w: jnp.sum(f(w, x, **kwargs))
        assert_close(jax.grad(loss(BY_NAME))(w), jax.grad(loss(plain))(w))
        assert_close(jax.jvp(loss(BY_NAME), (w,), (w,)), jax.jvp(loss(plain), (w,), (w,)))
    scalar = fedpax.program(clients=N, static_argnames="mode")(
        lambda w, x, mode: jnp.sum(round_of(w, x, mode))
    )
    expected = jax.grad(lambda w: jnp.sum(plain(w, x, "square")))(w)
    assert_close(jax.grad(scalar)(w, x, "square"), expected)
    assert_close(jax.grad(scalar)(w, x, mode="square"), expected)


def test_under_vmap():
    w, x = arguments()
    batch = np.stack([w, 2 * w])
    mapped = lambda f: jax.vmap(functools.partial(f, mode="square"), (0, None))(batch, x)
    assert_close(mapped(BY_NAME), mapped(plain))
    by_position = jax.vmap(lambda w: BY_NAME(w, x, "square"))(batch)
    assert_close(by_position, mapped(plain))


def test_inside_another_program():
    @fedpax.program(islands=2)
    def outer(w, x):
        return federated_sum(federated_map(lambda x: BY_NAME(w, x, "square"), x))

    w, x = normal(3), normal(2, N, 3)
    assert_close(outer(w, x), plain(w, x[0], "square") + plain(w, x[1], "square"))


# ---- errors


def test_an_argument_that_is_no_array_and_not_static():
    w, x = arguments()
    program = fedpax.program(clients=N)(round_of)
    message = r"program round_of: argument mode is of type str.*static_argnames='mode'"
    for call in (lambda: program(w, x, "sin"), lambda: program(w, x, mode="sin")):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(TypeError, match=message):
        jax.grad(lambda w: jnp.sum(program(w, x, "sin")))(w)
    with pytest.raises(TypeError, match=message):
        jax.vmap(lambda w: program(w, x, "sin"))(np.stack([w, w]))


def test_an_argument_that_is_no_array_among_any_number_of_arguments():
    with pytest.raises(TypeError, match=r"argument rest\[1\]\['a'\] is of type str"):
        fedpax.program(clients=N)(lambda w, *rest: w)(1.0, 2.0, {"a": "text"})


def test_a_static_argument_that_is_not_hashable():
    w, x = arguments()
    program = fedpax.program(clients=N, static_argnames="mode")(round_of)
    with pytest.raises(ValueError, match=r"static argument mode is of type list.*hashable.*tuple"):
        program(w, x, ["sin"])
    with pytest.raises(ValueError, match=r"static argument mode is of type .*hashable"):
        program(w, x, mode=jnp.ones(3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"static_argnames": "mod"}, ValueError, r"static_argnames='mod'.*w, x, mode, scale"),
        ({"static_argnums": 5}, ValueError, r"static_argnums=5.*takes 3 arguments by position"),
        ({"static_argnums": -4}, ValueError, r"static_argnums=-4.*counted from 0"),
        ({"static_argnums": "mode"}, TypeError, r"static_argnums='mode', expected an int"),
        ({"static_argnames": 2}, TypeError, r"static_argnames=2, expected a string"),
        ({"static_argnames": ("mode", 2)}, TypeError, r"expected a string or a sequence of str"),
    ],
)
def test_static_arguments_that_the_function_does_not_have(options, error, message):
    with pytest.raises(error, match=message):
        fedpax.program(clients=N, **options)(round_of)


# ---- the same program with other settings


def chunk_sizes(program, *args):
    (outer,) = jax.make_jaxpr(program)(*args).eqns
    maps = (e for e in outer.params["jaxpr"].eqns if e.primitive.name == "federated_map")
    return [eqn.params["chunk_size"] for eqn in maps]


def test_with_options_changes_what_is_given_and_keeps_the_rest():
    w, x = arguments()
    program = fedpax.program(clients=N, chunk_size=2, static_argnames="mode")(round_of)
    smaller = program.with_options(chunk_size=1)
    assert_close(smaller(w, x, mode="square"), plain(w, x, "square"))
    assert chunk_sizes(smaller, w, x) == [1]
    assert chunk_sizes(program.with_options(chunk_size=None), w, x) == [None]
    assert chunk_sizes(program.with_options(), w, x) == [2]
    assert chunk_sizes(program, w, x) == [2]
    assert smaller.__name__ == program.__name__ == "round_of"
    assert federated_names(smaller, w, x) == federated_names(program, w, x)


def test_with_options_changes_sizes_and_adds_placements():
    program = fedpax.program(clients=N)(round_of)
    w, x = normal(3), normal(N + 1, 3)
    assert_close(program.with_options(clients=N + 1)(w, x), plain(w, x))
    assert_close(program.with_options(placements={"clients": N + 1})(w, x), plain(w, x))
    several = program.with_options(islands=2)
    with pytest.raises(ValueError, match=r"clients=4, islands=2"):
        several(w, x)


def test_with_options_checks_them():
    program = fedpax.program(clients=N)(round_of)
    with pytest.raises(ValueError, match=r"chunk_size=0, expected a positive int"):
        program.with_options(chunk_size=0)
    with pytest.raises(TypeError, match=r"Did you mean chunk_size=1"):
        program.with_options(chunksize=1)
