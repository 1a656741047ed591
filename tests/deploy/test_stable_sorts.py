"""An exported client sorts ties by place, so that a runtime without a stable sort is right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from batch_rounds import loss_fn, open_rounds, params

import fedpax
from fedpax.algorithms import fedavg
from fedpax.deploy import export_stages
from fedpax.deploy.artifacts import with_unique_keys
from fedpax.primitives.jaxpr_analysis import inner_jaxprs


def sorts(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive is jax.lax.sort_p:
            yield eqn
        for inner in inner_jaxprs(eqn):
            yield from sorts(inner)


def ordered(x, taken):
    """Sort with ties: in a loop, by two keys, of rows, and alone."""

    def add(i, total):
        return total + x[jnp.argsort(~taken)[i]] * (i + 1)

    total = jax.lax.fori_loop(0, 3, add, jnp.float32(0))
    rows = jnp.argsort(jnp.round(x.reshape(3, 4)), axis=0, descending=True)
    return [total, jnp.lexsort((taken, jnp.round(x))), rows, jnp.sort(x)]


def test_ties_are_sorted_by_place():
    random = np.random.default_rng(2)
    x = jnp.asarray(random.normal(size=12).astype(np.float32))
    taken = jnp.asarray(random.random(12) < 0.5)
    changed = with_unique_keys(ordered)
    for actual, expected in zip(jax.jit(changed)(x, taken), ordered(x, taken), strict=True):
        np.testing.assert_array_equal(actual, expected)
    before, after = (sorts(jax.make_jaxpr(f)(x, taken).jaxpr) for f in (ordered, changed))
    keys = [
        (a.params["num_keys"], b.params["num_keys"]) for a, b in zip(before, after, strict=True)
    ]
    assert sorted(keys) == [(1, 1), (1, 2), (1, 2), (2, 3)]


def test_the_order_of_batches_has_unique_keys(tmp_path):
    clients = open_rounds()
    data = clients.read_clients(0, clients.client_ids(0))
    method = fedavg(loss_fn, cohort_size=6, client_optimizer=optax.sgd(0.05))
    stages = fedpax.stages(method.round, method.init(params()), data)
    text = export_stages(stages, tmp_path / "round").exported("client_0").mlir_module()
    assert text.count("stablehlo.sort") == 1
    comparison = text[text.index("stablehlo.sort") :].split("stablehlo.return")[0]
    assert comparison.count("stablehlo.compare") == 3  # equal first keys: less by place
