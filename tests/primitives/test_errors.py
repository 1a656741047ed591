"""Every error message has the argument, its value, the expectation and the remedy."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, normal, positive

import fedpax
from fedpax import (
    federated_broadcast,
    federated_map,
    federated_max,
    federated_mean,
    federated_min,
    federated_sum,
)

N = 4
REDUCTIONS = [federated_sum, federated_mean, federated_max, federated_min]
CALLS = {f.__name__: f for f in [*REDUCTIONS, federated_broadcast]}
CALLS["federated_map"] = lambda x, **k: federated_map(lambda x: x, x, **k)


def program(fn, n=N):
    return fedpax.program(clients=n)(fn)


# ---- where it is called


@pytest.mark.parametrize("name", CALLS)
def test_a_call_outside_a_program_raises(name):
    with pytest.raises(
        RuntimeError, match=rf"{name}\(\).*outside.*@fedpax\.program\(clients=1000\)"
    ):
        CALLS[name](normal(N))


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_placement_raises(name):
    with pytest.raises(
        ValueError, match=rf"(?s){name}\(placement='client'\).*'clients'.*declare it"
    ):
        program(lambda x: CALLS[name](x, placement="client"))(normal(N))


@pytest.mark.parametrize("name", CALLS)
def test_several_placements_need_a_name(name):
    several = fedpax.program(islands=2, clients=N)(CALLS[name])
    with pytest.raises(ValueError, match=r"islands=2, clients=4.*placement='islands'"):
        several(normal(N))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_a_participant_raises(name):
    with pytest.raises(ValueError, match=r"on a participant of 'clients'.*after federated_map\(\)"):
        program(lambda x: federated_map(CALLS[name], x))(normal(N, N))
    with pytest.raises(ValueError, match=r"on a participant of 'clients'.*after federated_map\(\)"):
        program(lambda x: federated_map(lambda x: CALLS[name](x, placement="clients"), x))(
            normal(N, N)
        )


def test_nested_programs_cannot_declare_the_same_placement():
    inner = program(federated_sum)
    for outer in (lambda x: inner(x), lambda x: federated_map(inner, x)):
        with pytest.raises(ValueError, match=r"'clients'.*enclosing program.*Rename"):
            program(outer)(normal(N, N))


def test_a_list_of_weights_is_told_to_be_an_array():
    words = r"weights is a list of 3 numbers, expected an array .*Pass jnp.array\(weights\)"
    with pytest.raises(ValueError, match=words):
        fedpax.program(clients=3)(lambda x: fedpax.federated_mean(x, [1, 2, 3]))(normal(3))


# ---- how a program is declared


def test_a_program_without_a_placement_raises():
    for call in (lambda: fedpax.program(), lambda: fedpax.program(placements={})):
        with pytest.raises(ValueError, match=r"no placement.*@fedpax\.program\(clients=1000\)"):
            call()


def test_placements_must_be_a_mapping():
    with pytest.raises(TypeError, match=r"placements='clients', expected sizes by name"):
        fedpax.program(placements="clients")


def test_a_decorator_without_parentheses_raises():
    with pytest.raises(TypeError, match=r"@fedpax\.program\(clients=1000\)"):

        @fedpax.program
        def fn(x):
            return x


@pytest.mark.parametrize("size", [0, -3])
def test_a_size_below_one_raises(size):
    with pytest.raises(ValueError, match=rf"clients={size}.*at least one.*skip the round"):
        fedpax.program(clients=size)


@pytest.mark.parametrize("size", [2.0, "3", None, True, np.float32(3)])
def test_a_size_must_be_an_int(size):
    with pytest.raises(TypeError, match=r"(?s)clients=.*expected an int.*int\(\.\.\.\)"):
        fedpax.program(clients=size)


@pytest.mark.parametrize("size", [np.int64(4), np.uint8(4)])
def test_a_size_can_be_an_integer_of_numpy(size):
    total = fedpax.program(clients=size)(fedpax.federated_sum)
    assert total(jnp.ones(4)) == 4
    assert total.with_options(clients=size)(jnp.ones(4)) == 4


def test_a_size_cannot_be_traced():
    with pytest.raises(TypeError, match=r"known before tracing"):
        jax.jit(lambda n: fedpax.program(clients=n)(lambda: federated_broadcast(1.0))())(3)


@pytest.mark.parametrize("name", ["", "two words", 3, None])
def test_a_placement_name_must_be_an_identifier(name):
    with pytest.raises(ValueError, match=r"expected an identifier.*'clients'"):
        fedpax.program(placements={name: 3})


def test_a_placement_declared_twice_raises():
    with pytest.raises(ValueError, match=r"'clients'.*expected each once"):
        fedpax.program(placements={"clients": 3}, clients=3)


@pytest.mark.parametrize("value", [0, -1, 1.5, "all", True])
def test_an_invalid_chunk_size_raises(value):
    message = r"chunk_size=.*positive int.*'auto'.*None"
    with pytest.raises(ValueError, match=message):
        fedpax.program(clients=N, chunk_size=value)
    with pytest.raises(ValueError, match=message):
        program(lambda x: federated_map(lambda x: x, x, chunk_size=value))(normal(N))


@pytest.mark.parametrize("value", [3, "name", None])
def test_only_functions_can_be_decorated(value):
    with pytest.raises(TypeError, match=rf"decorates a function, got {type(value).__name__}"):
        fedpax.program(clients=N)(value)


def test_the_mesh_axis_must_divide_the_placement(mesh_only):
    too_many = program(lambda x: federated_sum(x), 6)
    with pytest.raises(ValueError, match=r"'clients' of size 4.*clients=6.*4 or 8 participants"):
        too_many(normal(6))
    with pytest.raises(ValueError, match=r"clients=3.*Use 4 participants, or a mesh"):
        jax.jit(program(lambda x: federated_sum(x), 3))(normal(3))


# ---- values


@pytest.mark.parametrize("name", [n for n in CALLS if n != "federated_broadcast"])
def test_an_error_names_the_leaf_without_the_axis(name):
    good = normal(N, 2)
    where = r"args\[0\]" if name == "federated_map" else "x"
    remedy = rf"{where}\['model'\]\[1\].* size 4.*'clients'.*federated_broadcast\(\)"
    for bad in (normal(N + 1, 2), normal(2, N), np.float32(2.5), 3):
        with pytest.raises(ValueError, match=rf"{name}\(\): {remedy}"):
            program(CALLS[name])({"model": [good, bad]})


def test_an_error_names_the_position_of_a_maps_argument():
    with pytest.raises(ValueError, match=r"args\[1\]\['b'\] is a scalar"):
        program(lambda x, y: federated_map(lambda x, y: x, x, y))(normal(N), {"b": 1.0})


@pytest.mark.parametrize("bad", ["text", object(), b"bytes", np.array(["a", "b"]), {1, 2}])
@pytest.mark.parametrize("name", CALLS)
def test_a_leaf_must_be_an_array_or_number(name, bad):
    kind = type(bad).__name__
    with pytest.raises(TypeError, match=rf"(?s)\['a'\] is of type {kind}.*expected arrays"):
        program(lambda x: CALLS[name]({"a": bad, "b": x}))(normal(N))


@pytest.mark.parametrize("bad", ["text", object()])
def test_arguments_and_results_of_a_program_must_be_arrays(bad):
    kind = type(bad).__name__
    with pytest.raises(TypeError, match=rf"argument y\['a'\] is of type {kind}, expected arrays"):
        program(lambda x, y: x)(normal(N), {"a": bad})
    with pytest.raises(
        TypeError, match=rf"argument rate is of type {kind}.*static_argnames='rate'"
    ):
        program(lambda x, rate: x)(normal(N), rate=bad)
    with pytest.raises(TypeError, match=rf"result\['a'\] is of type {kind}, expected arrays"):
        program(lambda x: {"a": bad})(normal(N))


@pytest.mark.parametrize("bad", ["text", object(), {1}])
def test_results_of_the_mapped_function_must_be_arrays(bad):
    message = (
        rf"out\['a'\]\[0\], returned by .* is of type {type(bad).__name__}.*Return arrays, or None"
    )
    with pytest.raises(TypeError, match=message):
        program(lambda x: federated_map(lambda x: {"a": [bad]}, x))(normal(N))


def test_the_mapped_function_must_be_callable():
    with pytest.raises(TypeError, match=r"federated_map\(\).*function"):
        program(lambda x: federated_map(x, x))(normal(N))


@pytest.mark.parametrize("function", REDUCTIONS)
def test_random_keys_cannot_be_reduced(function):
    keys = jax.random.split(jax.random.key(0), N)
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\).*(x|x\['k'\]).*key"):
        program(lambda x: function({"k": x}))(keys)


@pytest.mark.parametrize("function", [federated_max, federated_min])
def test_complex_numbers_have_no_order(function):
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\).*complex.*real"):
        program(function)(normal(N) + 1j)


@pytest.mark.parametrize(
    "weights", [positive(N + 1), positive(N, 1), positive(1, N), np.float32(1), positive(0)]
)
def test_weights_of_the_wrong_shape_raise(weights):
    with pytest.raises(ValueError, match=r"weights.*expected \(4,\).*multiply inside"):
        program(lambda x: federated_mean(x, weights))(normal(N, 2))


def test_weights_cannot_be_a_pytree():
    x = {"a": normal(N), "b": normal(N)}
    with pytest.raises(ValueError, match=r"weights.*expected \(4,\).*multiply inside"):
        program(lambda x: federated_mean(x, x))(x)


@pytest.mark.parametrize("weights", ["weights", object()])
def test_weights_must_be_an_array(weights):
    with pytest.raises((TypeError, ValueError), match=r"weights.*expected"):
        program(lambda x: federated_mean(x, weights))(normal(N, 2))


def test_complex_weights_raise():
    with pytest.raises(TypeError, match=r"weights.*complex64.*weights\.real"):
        program(lambda x: federated_mean(x, positive(N) + 1j))(normal(N, 2))


def test_too_many_arguments_raise():
    for call in (federated_sum, federated_max, federated_min, federated_broadcast):
        with pytest.raises(TypeError, match="positional argument"):
            program(lambda x, call=call: call(x, x))(normal(N))
    with pytest.raises(TypeError, match="positional argument"):
        program(lambda x: federated_mean(x, x, x))(normal(N))


def test_a_gradient_by_integer_parameters_raises():
    fit = program(lambda w, x: federated_mean(federated_map(lambda x: w * x, x)))
    with pytest.raises(TypeError, match=r"real- or complex-valued inputs.*int32.*allow_int"):
        jax.grad(fit)(3, normal(N))


def test_a_reverse_derivative_of_a_loop_of_variable_length_raises():
    def steps(w, x, count):
        return jax.lax.fori_loop(0, count, lambda i, y: y * w, x)

    def loss(w, x, counts):
        return federated_mean(federated_map(lambda x, count: steps(w, x, count), x, counts))

    with pytest.raises(
        ValueError, match=r"loop of variable length.*Mark padding by a mask in place of num_steps"
    ):
        jax.grad(program(loss))(2.0, normal(N), jnp.arange(N))


# ---- errors of the user's own, and what stays behind


def test_an_exception_of_the_user_is_not_wrapped():
    class OwnError(Exception):
        pass

    def fail(*_):
        raise OwnError("told by the user")

    for fn in (fail, lambda x: federated_map(fail, x)):
        with pytest.raises(OwnError, match="told by the user"):
            program(fn)(normal(N))
        with pytest.raises(OwnError, match="told by the user"):
            jax.jit(program(fn))(normal(N))
        with pytest.raises(RuntimeError, match="outside"):
            federated_sum(normal(N))


def test_a_caught_exception_restores_the_active_placements():
    def fail(x):
        raise KeyError("x")

    @program
    def tolerant(x):
        try:
            federated_map(fail, x)
        except KeyError:
            pass
        return federated_sum(x)  # not on a participant any more

    x = normal(N)
    assert_close(tolerant(x), x.sum())


def test_threads_do_not_share_active_placements():
    errors = []

    def other():
        try:
            federated_sum(normal(N))
        except RuntimeError as error:
            errors.append(error)

    @program
    def waits(x):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return federated_sum(x)

    x = normal(N)
    assert_close(waits(x), x.sum())
    assert len(errors) == 1


def test_a_shape_error_contains_no_tracer():
    with pytest.raises(ValueError, match=r"has shape \(3, 2\)"):
        jax.jit(jax.grad(lambda x: jnp.sum(program(federated_sum)(x))))(normal(3, 2))


# ---- options of fedpax.program


@pytest.mark.parametrize(
    ("keywords", "suggestion"),
    [
        ({"chunksize": 2}, "chunk_size=2"),
        ({"chunk_sizes": "auto"}, "chunk_size='auto'"),
        ({"chunk": 2}, None),
        ({"placement": {"clients": 2}}, "placements={'clients': 2}"),
        ({"static_argname": "mode"}, "static_argnames='mode'"),
        ({"clients_per_step": 1}, None),
        ({"num_clients": 8}, None),
        ({"cohort_size": 8}, None),
        ({"cohort": 2}, None),
        ({"population": 100}, None),
    ],
)
def test_a_misspelt_option_is_not_a_placement(keywords, suggestion):
    (name,) = keywords
    message = rf"unknown option {name}=.*chunk_size, static_argnums.*placements={{'{name}': "
    for others in ({}, {"clients": N}):
        with pytest.raises(TypeError, match=message) as error:
            fedpax.program(**others, **keywords)
        assert ("Did you mean" in str(error.value)) == (suggestion is not None)
        assert (suggestion or "") in str(error.value)


def test_any_name_can_be_declared_in_placements():
    total = fedpax.program(placements={"num_clients": N})(federated_sum)
    assert_close(total(np.ones(N, np.float32)), np.float32(N))


def test_an_unknown_keyword_must_be_a_size():
    with pytest.raises(TypeError, match=r"mode='fast' of type str, expected an int"):
        fedpax.program(clients=N, mode="fast")


# ---- dtypes that JAX has not


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bad", [np.array(["a"] * N), np.array([1, "b", None, 2], object)])
def test_a_string_or_object_array_is_named_with_its_dtype(name, bad):
    where = r"args\[0\]" if name == "federated_map" else "x"
    message = rf"{name}\(\): {where}\['a'\] is of type ndarray with dtype {bad.dtype}, expected"
    with pytest.raises(TypeError, match=message):
        program(lambda x: CALLS[name]({"a": bad}))(normal(N))


def test_a_string_or_object_array_as_argument_weights_or_result():
    text, objects = np.array(["a"] * N), np.array([None] * N)
    with pytest.raises(TypeError, match=r"argument x is of type ndarray with dtype <U1.*static"):
        program(lambda x: x)(text)
    with pytest.raises(TypeError, match=r"weights is of type ndarray with dtype object"):
        program(lambda x: federated_mean(x, objects))(normal(N))
    with pytest.raises(TypeError, match=r"out, returned by .*with dtype object"):
        program(lambda x: federated_map(lambda x: objects, x))(normal(N))
