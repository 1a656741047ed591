"""Out-of-core programs: results equal the whole program; two chunks are on the devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_table import (
    MESHES,
    PROGRAMS,
    WEIGHTS,
    N,
    Rematerialized,
    W,
    X,
    cases,
    close,
    expected,
    federated,
    gradient_of,
    local,
    normal,
    slow,
)

import fedpax
from fedpax import federated_broadcast, federated_map, federated_mean

WITHOUT_MAPS = {
    "nothing_of_the_map",
    "rounds_in_a_scan",
    "rematerialized_rounds",
    "under_a_condition",
}


# Each phase of each program is compiled for two sizes of chunks.
FAST = {
    *["metrics_beside_deltas", "two_phases", "weights_of_a_later_phase", "reductions_of_numpy"],
    *["elementwise_between", "several_maps_on_shared_inputs", "small_and_boolean_types"],
}


@pytest.mark.parametrize(
    "name", [n if n in FAST else slow(n) for n in sorted(PROGRAMS.keys() - WITHOUT_MAPS)]
)
def test_chunks_equal_the_whole_program(name):
    close(fedpax.out_of_core(federated(name), chunk_size=5)(W, X, WEIGHTS), expected(name))


def test_a_program_that_returns_constants():
    @fedpax.program(clients=N)
    def program(x):
        return federated_mean(federated_map(jnp.sum, x)), 0.5, True, jnp.bfloat16(1.5)

    streamed = fedpax.out_of_core(program, chunk_size=5)(X)
    close(streamed, program(X))
    assert all(isinstance(leaf, jax.Array) for leaf in streamed)


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow("two_phases"), slow("variance"), "weights_of_a_later_phase"])
def test_chunks_of_rematerialized_programs(name):
    """Later phases rematerialize the maps of a chunk."""
    program = federated(name, functions=Rematerialized)
    close(fedpax.out_of_core(program, chunk_size=5)(W, X, WEIGHTS), expected(name))
    gradient = gradient_of(program)
    gradients = fedpax.out_of_core(gradient, chunk_size=5)(W, X, WEIGHTS)
    close(gradients, jax.jit(gradient)(W, X, WEIGHTS), 1e-4)


@pytest.mark.parametrize("name", [slow("average"), "values_per_participant", slow("two_phases")])
def test_chunks_on_every_mesh(name, current_mesh):
    close(fedpax.out_of_core(federated(name), chunk_size=8)(W, X, WEIGHTS), expected(name))


@pytest.mark.parametrize("chunk_size", [1, 4, N, N + 1])
def test_chunks_of_any_size(chunk_size):
    chunked = fedpax.out_of_core(federated("metrics_beside_deltas"), chunk_size=chunk_size)
    close(chunked(W, X, WEIGHTS), expected("metrics_beside_deltas"))


def test_device_arrays_and_memory_mapped_files_are_accepted(tmp_path):
    np.save(tmp_path / "x.npy", X)
    chunked = fedpax.out_of_core(federated("average"), chunk_size=5)
    for x in (jnp.asarray(X), np.load(tmp_path / "x.npy", mmap_mode="r")):
        close(chunked(jnp.asarray(W), x, WEIGHTS), expected("average"))


def test_gradients_run_out_of_core():
    x, w = normal(N, 4, seed=3), normal(4, seed=5)

    @fedpax.program(clients=N)
    def loss(w, x):
        return federated_mean(federated_map(lambda x: jnp.sum(jnp.sin(w * x)), x))

    gradient = jax.grad(loss, argnums=(0, 1))
    close(fedpax.out_of_core(gradient, chunk_size=5)(w, x), gradient(w, x))


def test_structure_keywords_and_random_keys():
    @fedpax.program(clients=N)
    def program(state, *, keys):
        noise = federated_map(
            lambda s, k: s["scale"] * jax.random.normal(k, (3,)), federated_broadcast(state), keys
        )
        results = {"mean": federated_mean(noise), "all": noise, "turned": noise.T}
        return results | {"step": state["step"] + 1}, keys

    keys = jax.random.split(jax.random.key(3), N)
    state = {"scale": np.float32(2.0), "step": 3}
    streamed, same = fedpax.out_of_core(program, chunk_size=7)(state, keys=keys)
    wanted, _ = program(state, keys=keys)
    close(streamed, wanted)
    assert isinstance(streamed["all"], np.ndarray)
    assert same is keys


def test_a_function_that_calls_programs_runs_out_of_core():
    average = federated("average")

    def round_(w, x, n):
        return jnp.sum(average(2 * w, x, n)), average(w, x, n), w

    wanted = round_(W, X, WEIGHTS)
    close(fedpax.out_of_core(round_, chunk_size=5)(W, X, WEIGHTS), wanted)


class Watched:
    """A host array that records the ranges of its rows that were read."""

    def __init__(self, array):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(range(*index.indices(len(self.array))))
        return self.array[index]


def test_a_participant_reads_a_broadcast_of_all_participants():
    """The loop reads the copies of all participants, which no server equation computes."""

    @fedpax.program(clients=N)
    def program(w, x):
        copies = federated_broadcast(w)

        def read_all(own):
            return jnp.einsum("bi,nio->no", own, copies)

        return fedpax.federated_sum(federated_map(read_all, x))

    with pytest.warns(fedpax.transforms.PlacedClosureWarning):
        streamed = fedpax.out_of_core(program, chunk_size=2)(W, X)
    close(streamed, jnp.broadcast_to(jnp.sum(X @ W, axis=(0, 1)), (N, 2)))


def test_at_most_two_chunks_are_on_the_devices():
    x = Watched(normal(64, 50, 100))

    @fedpax.program(clients=64, chunk_size=1)
    def program(w, x):
        return w - federated_mean(federated_map(lambda x: w + jnp.sum(jnp.sin(x)), x))

    alive = []
    watch = Watched.__getitem__

    def slices(self, index):
        alive.append(sum(a.nbytes for a in jax.live_arrays() if a.shape[1:] == (50, 100)))
        return watch(self, index)

    Watched.__getitem__ = slices
    try:
        streamed = fedpax.out_of_core(program, chunk_size=8)(1.0, x)
    finally:
        Watched.__getitem__ = watch
    close(streamed, program(1.0, x.array))
    assert [(r.start, r.stop) for r in x.asked] == [(i, i + 8) for i in range(0, 64, 8)]
    assert max(alive) <= 2 * 8 * 50 * 100 * 4


def test_a_second_call_compiles_nothing(caplog):
    chunked = fedpax.out_of_core(federated("two_phases"), chunk_size=6)
    chunked(W, X, WEIGHTS)
    with jax.log_compiles():
        chunked(2 * W, X + 1, WEIGHTS)
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]


@pytest.mark.parametrize("name", sorted(WITHOUT_MAPS))
def test_programs_without_maps_at_the_top_level_raise(name):
    with pytest.raises(ValueError, match="maps of one placement at its top level"):
        fedpax.out_of_core(federated(name), chunk_size=5)(W, X, WEIGHTS)


def test_nested_placements_run_inside_a_chunk():
    x = normal(6, 4, 3, seed=8)

    @fedpax.program(islands=6, clients=4)
    def program(w, x):
        def island(x):
            return federated_mean(
                federated_map(lambda x: jnp.sin(w * x), x, placement="clients"),
                placement="clients",
            )

        return federated_mean(federated_map(island, x, placement="islands"), placement="islands")

    close(fedpax.out_of_core(program, chunk_size=4)(W[:, 0], x), program(W[:, 0], x))


two_clients = fedpax.program(clients=2)(
    lambda w, x: federated_mean(federated_map(lambda x: local(w, x), x))
)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: fedpax.out_of_core(federated("average"), chunk_size=0),
            ValueError,
            "expected at least 1",
        ),
        (
            lambda: fedpax.out_of_core(lambda w: w + 1, chunk_size=2)(W),
            ValueError,
            "this one has none. Pass the program itself",
        ),
        (
            lambda: fedpax.out_of_core(
                lambda w, x: (federated("average")(w, x, WEIGHTS), two_clients(w, x[:2])),
                chunk_size=2,
            )(W, X),
            ValueError,
            "this one has clients=12 and clients=2",
        ),
        (
            lambda: jax.jit(fedpax.out_of_core(federated("average"), chunk_size=2))(W, X, WEIGHTS),
            TypeError,
            "Transform the program instead",
        ),
        (
            lambda: fedpax.out_of_core(federated("average"), chunk_size=2)(W, X[:5], WEIGHTS),
            ValueError,
            "expected a leading axis of size 12",
        ),
    ],
)
def test_errors_name_the_remedy(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_chunk_that_the_mesh_does_not_divide_raises():
    mesh = jax.make_mesh((4,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="Pass 4 or 8"):
        fedpax.out_of_core(federated("average"), chunk_size=6)(W, X, WEIGHTS)


def test_a_round_of_an_algorithm_runs_out_of_core():
    import optax

    from fedpax.algorithms import fedavg

    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2), {"scale": jnp.sum(w**2)}

    method = fedavg(
        loss_fn,
        cohort_size=N,
        client_optimizer=optax.sgd(0.1),
        server_optimizer=optax.adam(0.1),
        chunk_size=1,
    )
    state = method.init(jnp.asarray(W))
    cohort = fedpax.Cohort(
        normal(N, 4, 5, 3, seed=9), num_examples=np.arange(N), num_steps=np.arange(N) % 5
    )
    streamed = fedpax.out_of_core(method.round, chunk_size=5)(state, cohort)
    close(streamed, method.round(state, cohort))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "current_mesh"),
    cases(["where", "maximum"], MESHES, fast={("where", "automatic"), ("maximum", "explicit")}),
    indirect=["current_mesh"],
)
def test_chunks_of_second_derivatives(work, current_mesh):
    """They have a phase without a loop between two loops."""
    work = {
        "where": lambda y: jnp.where(y > 0, y, y * y),
        "maximum": lambda y: (y - fedpax.federated_max(y)) ** 2,
    }[work]
    w, x = normal(6), normal(8, 6)

    @fedpax.program(clients=8, chunk_size=2)
    def program(w, x):
        moved = fedpax.federated_map(lambda w, x: jnp.tanh(x) * w, fedpax.federated_broadcast(w), x)
        return fedpax.federated_mean(work(moved))

    hessian = jax.jacfwd(jax.grad(lambda w, x: jnp.sum(program(w, x) ** 2)))
    close(fedpax.out_of_core(hessian, chunk_size=4)(w, x), jax.jit(hessian)(w, x))


def test_a_value_that_jax_cannot_hold_is_named():
    @fedpax.program(clients=5)
    def mean_square(w, x):
        return fedpax.federated_mean(fedpax.federated_map(lambda x: (w - x) ** 2, x))

    run = fedpax.out_of_core(mean_square, chunk_size=2)
    assert run(np.float64(1.0), np.arange(5.0).astype(">f8")).item() == 3.0
    large = np.array([0, 1, 2, 3, 2**40])
    for arguments, name in (
        ((1.0, large), "x"),
        ((2**40, large % 5), "w"),
        ((large[4], large), "w"),
    ):
        message = rf"^out_of_core\(\): argument {name} has the value 1099511627776 \(int64\)"
        with pytest.raises(ValueError, match=message):
            run(*arguments)
    with pytest.raises(TypeError, match=r"argument x has dtype object.*\.astype"):
        run(1.0, large.astype(object))
