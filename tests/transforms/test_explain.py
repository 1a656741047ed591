"""`explain` lists the loops of a program and the stored values."""

import re
import warnings

import jax
import jax.experimental
import jax.numpy as jnp
from program_table import (
    WEIGHTS,
    N,
    W,
    X,
    federated,
    local,
)

import fedpax
from fedpax import (
    federated_broadcast,
    federated_map,
    federated_mean,
)
from fedpax.clients import client_store, gather_clients, scatter_clients


def test_explain_lists_stored_values_with_reasons():
    text = fedpax.explain(federated("values_per_participant"), W, X, WEIGHTS)
    assert "float32[12]: the program returns it" in text
    assert "float32[12]: the server reads it in 'argmax'" in text


def test_explain_describes_the_programs_of_a_gradient():
    gradient = jax.grad(lambda w: jnp.sum(federated("average")(w, X, WEIGHTS)))
    assert fedpax.explain(gradient, W).count("program ") >= 2


def test_explain_describes_the_bodies_of_loops_and_conditionals():
    def stepped(reduce):
        def step(w, _):
            return w - reduce(federated_map(local, federated_broadcast(w), X)), jnp.sum(w)

        return lambda w: jax.lax.scan(step, w, length=3)[0]

    def either(w):
        again = lambda w: jax.lax.while_loop(lambda w: w[0, 0] < 3, stepped(federated_mean), w)
        return jax.lax.cond(jnp.sum(w) > 0, again, stepped(lambda d: jnp.median(d, 0)), w)

    def words(fn):
        return fedpax.explain(fedpax.program(clients=N, chunk_size=1)(fn), W).splitlines()[1:]

    loop = "clients=12, phase 0: 1 map, 1 reduction, chunk_size=1; nothing is stored."
    assert words(stepped(federated_mean)) == ["  in a loop of 3 steps:", "    " + loop]
    text = "\n".join(words(either))
    assert text.startswith("  in branch 0 of a conditional:\n    in a loop of 3 steps:")
    assert "1 reduction, chunk_size=1; stored for all participants:" in text
    assert "float32[12,3,2]: the server reads it in 'sort'" in text
    assert re.search(r"branch 1 .*:\n +in a while loop:\n +in a loop of 3 steps:\n +clients", text)
    assert words(lambda w: w) == [
        "  It has no federated_map, so there is no loop over participants."
    ]


def test_explain_numbers_the_phases_that_have_a_loop():
    def program(x):
        scaled = federated_map(jnp.sin, x)
        total = jnp.sum(scaled * federated_mean(scaled))  # by the server, in a phase of its own
        return federated_mean(federated_map(jnp.multiply, scaled, federated_broadcast(total)))

    text = fedpax.explain(fedpax.program(clients=N)(program), WEIGHTS)
    assert re.findall(r"phase (\d+)", text) == ["0", "1"], text


def report_on(sizes, **axes):
    """Explain a program on a mesh, and return the first line of its costs and the warnings too."""
    average = fedpax.program(**sizes)(lambda x: federated_mean(federated_map(jnp.sin, x)))
    shape = jax.ShapeDtypeStruct(tuple(sizes.values()), "float32")
    with warnings.catch_warnings(record=True) as caught, jax.set_mesh(fedpax.make_mesh(**axes)):
        warnings.simplefilter("always")
        explained, costs = fedpax.explain(average, shape), str(fedpax.cost(average, shape))
    return explained.splitlines()[1], costs.splitlines()[0], [str(w.message) for w in caught]


def test_the_mesh_axis_of_a_placement_is_stated_and_a_similar_name_warns():
    explained, costs, warned = report_on({"clients": 16}, client=8)
    assert explained == "  clients: not on the mesh, whose axes are client."
    assert costs == "clients: 16 participants, not on the mesh, whose axes are client"
    words = "an axis 'client' and none named 'clients', so each device computes all 16 clients"
    assert all(words in text and "make_mesh(clients=8)" in text for text in warned) and warned
    explained, costs, warned = report_on({"clients": 16}, clients=4, fsdp=2)
    assert explained == "  clients: on the mesh axis 'clients' of size 4." and not warned
    assert costs == "clients: 16 participants, on the mesh axis 'clients' of size 4"
    for legal in ({"fsdp": 8}, {"islands": 4, "fsdp": 2}, {"clients": 2, "client": 4}):
        assert not report_on({"clients": 16}, **legal)[2]
    with jax.set_mesh(fedpax.make_mesh(client=1, devices=jax.devices()[:1])):
        fedpax.explain(fedpax.program(clients=2)(federated_mean), jnp.ones(2))


def test_explain_of_a_function_without_programs():
    assert fedpax.explain(jnp.sin, 1.0) == "This function calls no fedpax program."


def test_rows_of_a_client_store_that_the_loop_accesses_are_not_stored():
    """Where the server reads the new states too, they are."""

    def report(is_read):
        @fedpax.program(clients=4, chunk_size=1)
        def update(store, ids):
            states = gather_clients(store, ids)
            new, losses = fedpax.federated_map(lambda s: (s + 1, jnp.sum(s)), states)
            total = fedpax.federated_sum(losses) + (jnp.argmax(new) if is_read else 0)
            return scatter_clients(store, ids, new), total

        store = client_store(jnp.zeros(3), num_clients=10)
        return fedpax.explain(update, store, jnp.array([5, 2, -1, 7]))

    line = "nothing is stored.\n    float32[4,3]: read and written in the rows of a store."
    assert line in report(is_read=False)
    assert "stored for all participants:\n    float32[4,3]:" in report(is_read=True)
    assert "rows of a store" not in report(is_read=True)
