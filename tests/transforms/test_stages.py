"""Stages: each participant run by itself gives the program's result, also without some of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from program_table import PROGRAMS, WEIGHTS, N, W, X, federated, gradient_of, normal, slow

import fedpax
from fedpax import federated_map, federated_mean, federated_sum
from fedpax.aggregators.sent_values import mark_server
from fedpax.algorithms import fedavg, scaffold
from fedpax.clients import client_store, gather_clients, scatter_clients
from fedpax.deploy import run_local
from fedpax.transforms.stages import drive

REFUSED = {
    "nothing_of_the_map": "has none",
    "reductions_of_numpy": "a sum over the clients divided by 12",
    **dict.fromkeys(["rounds_in_a_scan", "rematerialized_rounds"], "inside 'scan'"),
    "under_a_condition": "inside 'cond'",
}
FAST = {"average", "two_phases", "weights_of_a_later_phase", "variance"}
PRESENT = [0, 2, 3, 7, 10, 11]
IN_FLOAT64 = {("server_arrays_between", "gradient")}


def agree(actual, expected, present=None):
    """Compare with the program's result; of values per participant those that answered."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.result_type(a) == jnp.result_type(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.all(np.isfinite(b))
        a = a if a.shape == b.shape else a[present]
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "name", [n if n in FAST else slow(n) for n in sorted(PROGRAMS.keys() - REFUSED)]
)
@pytest.mark.parametrize("wanted", ["value", "gradient"])
def test_stages_equal_the_program(name, wanted):
    # In float32, the gradients of these programs are within 6e-5 of those in float64, compiled and
    # in stages: sums of exponentials are the arguments of sines.
    is_wide = (name, wanted) in IN_FLOAT64
    dtype = np.float64 if is_wide else np.float32
    with jax.enable_x64(is_wide):
        compare(name, wanted, *(jnp.asarray(np.asarray(x), dtype) for x in (W, X, WEIGHTS)))


def compare(name, wanted, w, x, weights):
    def program(size):
        whole = federated(name, size=size)
        return gradient_of(whole) if wanted == "gradient" else whole

    @jax.jit
    def compiled(w, x, weights):
        rows = jnp.array(PRESENT)
        return program(N)(w, x, weights), program(len(PRESENT))(w, x[rows], weights[rows])

    stages = fedpax.stages(program(N), w, x, weights)
    whole, few = compiled(w, x, weights)
    agree(run_local(stages, w, x, weights), whole)
    if name == "values_per_participant" and wanted == "value":
        return  # it returns the index of a participant
    agree(run_local(stages, w, x, weights, participants=PRESENT), few, PRESENT)


@pytest.mark.parametrize("name", REFUSED)
def test_programs_that_cannot_be_divided_are_refused(name):
    with pytest.raises(ValueError, match=REFUSED[name]):
        fedpax.stages(federated(name), W, X, WEIGHTS)


ROWS = normal(N, 3, seed=5)


@fedpax.program(clients=N)
def adapted_model(w, x, frozen):
    """Average terms of a server's value and of a frozen one."""
    terms = federated_map(lambda x: w * (x @ frozen["a"]).sum() + frozen["b"], x)
    return federated_mean(terms)


def test_known_values_are_in_no_message():
    frozen = {"a": normal(3, seed=8), "b": normal(N, seed=9)}  # "b" has as many rows as clients
    w = normal(N, seed=7)
    stages = fedpax.stages(adapted_model, w, X, frozen, known=["frozen"])
    assert [v.name for v in stages[0].shared] == ["w"]
    assert [v.name for v in stages[0].own] == ["x", "frozen['a']", "frozen['b']"]
    agree(run_local(stages, w, X, frozen), jax.jit(adapted_model)(w, X, frozen))
    types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), frozen)
    (sent,) = next(stages.run(w, jax.ShapeDtypeStruct(X.shape, X.dtype), types)).shared
    np.testing.assert_array_equal(sent, w)
    with pytest.raises(TypeError, match=r"frozen\['a'\] is a type"):
        stages.known(w, X, types)
    with pytest.raises(ValueError, match="known names 'froze', which is not an argument"):
        fedpax.stages(adapted_model, w, X, frozen, known=["froze"])


@fedpax.program(clients=N)
def three_stages(w, personal, x, key):
    """Read keys, a constant of all participants and a state; return a new state."""
    keys = jax.random.split(key, N)

    def draw(personal, x, key, row):
        noise = jax.random.normal(key, (3,))
        return personal + noise * row, jnp.sum(x, 0) + noise

    personal, sums = federated_map(draw, personal, x, keys, jnp.asarray(ROWS))
    largest = fedpax.federated_max(federated_map(jnp.max, sums))
    scaled = federated_map(lambda s: jnp.tanh(s / largest), sums)
    mean = federated_mean(scaled)
    spread = federated_sum(federated_map(lambda s: jnp.sum((s - mean) ** 2), scaled))
    return w + mean, personal, spread


def three_stage_arguments():
    return normal(3), normal(N, 3, seed=1), X, jax.random.key(3)


def test_three_stages_with_keys_rows_and_a_state():
    args = three_stage_arguments()
    stages = fedpax.stages(three_stages, *args)
    assert len(stages) == 3
    agree(run_local(stages, *args), jax.jit(three_stages)(*args))
    names = {kind: [v.name for v in getattr(stages[0], kind)] for kind in ("own", "kept", "shown")}
    assert names["own"] == ["personal", "x"]
    assert not names["shown"]
    assert len(stages[0].rows) == 2  # keys, and rows of the constant
    # A participant that does not answer the last stage keeps its old state.
    assert "personal" not in names["kept"]
    assert "personal" in [v.name for v in stages[2].kept]


def test_a_participant_that_does_not_answer_keeps_its_state():
    w, personal, x, key = three_stage_arguments()
    stages = fedpax.stages(three_stages, w, personal, x, key)
    _, after, _ = run_local(stages, w, personal, x, key, participants=PRESENT)
    whole = jax.jit(three_stages)(w, personal, x, key)[1]
    absent = [i for i in range(N) if i not in PRESENT]
    agree(after[jnp.array(PRESENT)], whole[jnp.array(PRESENT)])
    np.testing.assert_array_equal(after[jnp.array(absent)], personal[jnp.array(absent)])


def test_the_server_runs_without_what_participants_own():
    """As in a deployment: the server has types, and a participant its own values alone."""
    w, personal, x, key = args = three_stage_arguments()
    stages = fedpax.stages(three_stages, *args)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (personal, x)]
    server = stages.run(w, *types, key)
    own = [{"personal": personal[i], "x": x[i]} for i in range(N)]
    reply = None
    with pytest.raises(StopIteration) as stop:
        while True:
            request = server.send(reply)
            client, merged, shown = stages.client(request.stage), None, []
            for i in range(N):
                rows = [row[i] for row in request.rows]
                terms, seen, kept = client(i, request.shared, rows, own[i])
                own[i] |= kept
                merged = stages.merge(request.stage)(merged, terms) if merged else terms
                shown.append(seen)
            reply = merged, [jnp.stack(s) for s in zip(*shown, strict=True)], range(N)
    w, personal, spread = stop.value.value
    assert personal == types[0]  # it stays with the participants
    expected = jax.jit(three_stages)(*args)
    agree((w, spread), (expected[0], expected[2]))
    agree(jnp.stack([o["personal"] for o in own]), expected[1])


def test_the_fold_of_many_terms_equals_their_merge():
    stages = fedpax.stages(federated("extremes"), W, X, WEIGHTS)
    request = next(stages.run(W, X, WEIGHTS))
    own = stages.own(W, X, WEIGHTS)
    terms = [
        stages.client(0)(i, request.shared, (), {k: v[i] for k, v in own.items()})[0]
        for i in range(3)
    ]
    merge = stages.merge(0)
    folded = stages.fold(0)([jnp.stack(t) for t in zip(*terms, strict=True)])
    agree(merge(merge(terms[0], terms[1]), terms[2]), folded)


def linear_loss(params, batch):
    return jnp.mean((batch @ params["w"] - params["b"]) ** 2), {}


def linear_round(**settings):
    method = fedavg(linear_loss, cohort_size=N, client_optimizer=optax.sgd(0.1), **settings)
    state = method.init({"w": jnp.ones(3), "b": jnp.zeros(())})
    return method.round, state, fedpax.Cohort(X[:, :, None], np.arange(1, N + 1))


def test_parameters_with_as_many_rows_as_participants_are_the_servers():
    """Their first axis has the number of participants by chance."""

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["in"]) @ params["out"]) ** 2), {}

    params = {"in": jnp.asarray(normal(N, N)), "out": jnp.asarray(normal(N, 2))}
    method = fedavg(loss, cohort_size=N, client_optimizer=optax.sgd(0.1))
    cohort = fedpax.Cohort(normal(N, 2, 4, N), np.arange(1, N + 1))
    stages = fedpax.stages(method.round, method.init(params), cohort)
    assert [v.name for v in stages[0].own] == ["cohort.batches", "cohort.num_examples"]
    assert [v.shape for v in stages[0].shared] == [(N, N), (N, 2)]
    state = method.init(params)
    agree(run_local(stages, state, cohort), jax.jit(method.round)(state, cohort))


def test_equal_terms_are_sent_once():
    """A weighted mean of four leaves has four sums of the weights."""
    step, state, cohort = linear_round()
    (stage,) = fedpax.stages(step, state, cohort)
    assert sorted(v.shape for v in stage.terms) == [(), (), (), (3,)]  # loss, b, weights and w


def test_the_report_of_a_round():
    step, state, cohort = linear_round()
    assert fedpax.stages(step, state, cohort).explain().splitlines()[:7] == [
        "fedavg_round: 1 stage for each of 12 clients",
        "stage 0: receives 16 B, sends 24 B",
        "  receives state.params['b']: float32[], 4 B",
        "  receives state.params['w']: float32[3], 12 B",
        "  has      cohort.batches: float32[5, 1, 3], 60 B",
        "  has      cohort.num_examples: int32[], 4 B",
        "  sends    mean of local_update[0]['b']: float32[], 4 B",
    ]


def test_controls_in_a_store_are_own_values_that_are_kept():
    method = scaffold(linear_loss, cohort_size=N, num_clients=20, client_optimizer=optax.sgd(0.1))
    state = method.init({"w": jnp.ones(3), "b": jnp.zeros(())})
    cohort = fedpax.Cohort(X[:, :, None], client_ids=np.arange(N) + 5)
    (stage,) = fedpax.stages(method.round, state, cohort)
    controls = ["state.client_controls.rows['b']", "state.client_controls.rows['w']"]
    assert sorted(v.name for v in stage.kept) == controls
    assert set(controls) < {v.name for v in stage.own}
    assert not {v.name for v in stage.shared} & set(controls)


def test_own_values_can_be_named():
    step, state, cohort = linear_round()
    (stage,) = fedpax.stages(step, state, cohort, own=["cohort.batches"])
    assert [v.name for v in stage.own] == ["cohort.batches"]
    assert [v.name for v in stage.rows] == ["cohort.num_examples"]
    stages = fedpax.stages(step, state, cohort, own=["cohort.batches"])
    agree(run_local(stages, state, cohort), jax.jit(step)(state, cohort))


@fedpax.program(clients=N)
def sorts_and_maps(x):
    return federated_mean(federated_map(jnp.sum, x)), jnp.sort(x, axis=0)


@fedpax.program(clients=3)
def by_the_server(w, x):
    recomputed = fedpax.federated_map(lambda x: mark_server(w * x), x)
    return fedpax.federated_sum(recomputed)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: fedpax.stages(sorts_and_maps, X),
            ValueError,
            r"the server reads x \(test_stages\.py:\d+\), .* return it from a federated_map\(\)",
        ),
        (
            lambda: fedpax.stages(federated("average"), W, X, WEIGHTS, own=["batches"]),
            ValueError,
            "own names 'batches', which is not an argument. The nearest names are",
        ),
        (
            lambda: fedpax.stages(three_stages, *three_stage_arguments(), own=["w"]),
            ValueError,
            "own names 'w', expected an argument with one row for each of the 12 clients",
        ),
        (
            lambda: fedpax.stages(three_stages, *three_stage_arguments(), own="x"),
            TypeError,
            "expected a list of names",
        ),
        (
            lambda: fedpax.stages(by_the_server, 2.0, jnp.ones(3)),
            ValueError,
            "does the server's work.*outside of federated_map",
        ),
        (
            lambda: next(
                fedpax.stages(federated("average"), W, X, WEIGHTS).run(
                    jax.ShapeDtypeStruct(W.shape, W.dtype), X, WEIGHTS
                )
            ),
            TypeError,
            "is a type, expected an array",
        ),
        (
            lambda: fedpax.stages(three_stages, *three_stage_arguments()).client(0)(0, (), (), {}),
            ValueError,
            r"own has no 'personal', expected \['personal', 'x'\]",
        ),
    ],
)
def test_errors_name_the_remedy(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_two_placements_side_by_side_are_told():
    @fedpax.program(islands=2, clients=3)
    def program(x, y):
        means = [
            federated_mean(federated_map(jnp.sin, z, placement=name), placement=name)
            for name, z in (("islands", x), ("clients", y))
        ]
        return sum(means)

    message = "has islands=2 and clients=3. Put the maps of one inside a federated_map"
    with pytest.raises(ValueError, match=message):
        fedpax.stages(program, jnp.ones(2), jnp.ones(3))


def test_a_reply_that_does_not_fit_is_named():
    stages = fedpax.stages(federated("average"), W, X, WEIGHTS)

    def send(*reply):
        server = stages.run(W, X, WEIGHTS)
        next(server)
        server.send(reply)

    with pytest.raises(ValueError, match="counts a participant twice"):
        send((), (), [3, 3])
    with pytest.raises(ValueError, match="counts participant 12, expected numbers from 0 to 11"):
        send((), (), [12])
    with pytest.raises(ValueError, match="participants has -1, expected numbers from 0 to 11"):
        run_local(stages, W, X, WEIGHTS, participants=[-1])
    with pytest.raises(ValueError, match=r"has 0 terms, expected \d"):
        send((), (), [3])


def test_a_round_without_an_answer_changes_nothing():
    step, state, cohort = linear_round()
    after, metrics = run_local(fedpax.stages(step, state, cohort), state, cohort, participants=[])
    agree(after, state)
    agree(metrics["loss"], jnp.float32(0))


def test_a_store_that_is_written_twice_is_told():
    @fedpax.program(clients=2)
    def twice(store, client_ids):
        states = gather_clients(store, client_ids)
        new = federated_map(lambda x: x + 1, states)
        store = scatter_clients(store, client_ids, new)
        store = scatter_clients(store, client_ids, federated_map(lambda x: 2 * x, new))
        return store, federated_sum(new)

    with pytest.raises(ValueError, match=r"the store store\.rows is written 2 times"):
        fedpax.stages(twice, client_store(jnp.float32(0), 5), np.array([1, 3]))


def test_the_server_has_its_effects(capsys):
    """They are part of no result, and follow what they read."""

    @fedpax.program(clients=3)
    def watched(w, x):
        jax.debug.print("before {}", w, ordered=True)
        placed = fedpax.federated_broadcast(w)
        total = fedpax.federated_sum(fedpax.federated_map(jnp.multiply, placed, x))
        jax.debug.print("after {}", total, ordered=True)
        return 2 * w

    args = jnp.int32(2), jnp.arange(3)
    stages = fedpax.stages(watched, *args)
    assert run_local(stages, *args) == 4
    jax.effects_barrier()
    assert capsys.readouterr().out.split("\n")[:2] == ["before 2", "after 6"]


def test_an_effect_that_reads_the_data_is_told():
    @fedpax.program(clients=3)
    def watched(x):
        jax.debug.print("{}", x)
        return fedpax.federated_sum(fedpax.federated_map(jnp.sin, x))

    with pytest.raises(ValueError, match=r"the server reads x \(test_stages.py:\d+\)"):
        fedpax.stages(watched, jnp.ones(3))


def test_a_generator_is_answered_until_it_returns_or_an_answer_is_none():
    def server():
        first = yield 3
        return first, (yield 4)

    assert drive(server(), lambda request: 10 * request) == (30, 40)
    assert drive(server(), {3: 30}.get) is None
