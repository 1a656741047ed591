"""Exported stages run without fedpax, and equal the stages; bad folders are told in a sentence."""

import datetime
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpax
from fedpax import federated_map, federated_mean, federated_sum
from fedpax.algorithms import diloco, fedavg, scaffold
from fedpax.deploy import (
    Artifact,
    ArtifactError,
    export_stages,
    inspect_round,
    load,
    pack_stages,
    run_local,
    runtime,
)
from fedpax.transforms.wiring import HEADINGS

N = 4
SGD = optax.sgd(0.1)


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


ROWS = normal(N, 3, seed=5)


@fedpax.program(clients=N)
def three_stages(w, personal, x, key):
    """Read keys, an array of all participants and a state; show values to the server."""
    keys = jax.random.split(key, N)

    def draw(personal, x, key, row):
        return personal + jax.random.normal(key, (3,)) * row, jnp.tanh(x)

    personal, scores = federated_map(draw, personal, x, keys, jnp.asarray(ROWS))
    largest = fedpax.federated_max(scores)
    mean = federated_mean(federated_map(lambda s: s / largest, scores))
    spread = federated_sum(federated_map(lambda s: jnp.sum((s - mean) ** 2), scores))
    return {"w": w + mean, "spread": spread}, personal, jnp.sort(scores, axis=0), 0.5


def three_stage_arguments():
    return normal(3), normal(N, 3, seed=1), normal(N, 3, seed=2), jax.random.key(3)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] - params["b"]) ** 2), {}


def round_of(method, **cohort):
    state = method.init({"w": jnp.ones(3), "b": jnp.zeros(())})
    return method.round, state, fedpax.Cohort(normal(N, 2, 5, 3), **cohort)


CALLS = {
    "three stages": lambda: (three_stages, *three_stage_arguments()),
    "FedAvg": lambda: round_of(
        fedavg(loss_fn, cohort_size=N, client_optimizer=SGD), num_examples=np.arange(1, N + 1)
    ),
    "SCAFFOLD": lambda: round_of(
        scaffold(loss_fn, cohort_size=N, num_clients=9, client_optimizer=SGD),
        client_ids=np.array([5, 2, 8, 0]),
    ),
    "DiLoCo": lambda: round_of(diloco(loss_fn, islands=N, inner_optimizer=optax.adamw(0.1))),
}


def run_artifact(artifact, arguments, own, participants):
    """Run a round of exported stages; return the server's results and the own values."""
    own, server, reply = {i: dict(own[i]) for i in participants}, artifact.run(arguments), None
    while True:
        try:
            request = server.send(reply)
        except StopIteration as stop:
            return stop.value, own
        client, answers = artifact.client(request.stage), []
        for i in participants:
            rows = [row[i] for row in request.rows]
            terms, shown, kept = client(i, request.shared, rows, own[i])
            own[i] |= kept
            answers.append((terms, shown))
        terms = ()
        if answers:
            fold = artifact.fold(request.stage)
            terms = fold([jnp.stack(t) for t in zip(*(a[0] for a in answers), strict=True)])
        shown = [jnp.stack(s) for s in zip(*(a[1] for a in answers), strict=True)]
        reply = terms, shown, participants


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function that exports a program once: arguments, stages, artifact and folder."""

    @functools.cache
    def export(name):
        program, *args = CALLS[name]()
        stages = fedpax.stages(program, *args)
        folder = tmp_path_factory.mktemp("exported") / "round"
        return args, stages, export_stages(stages, folder), folder

    return export


@pytest.fixture
def small(exported, tmp_path):
    """Return the folder of a copy, so that a test can spoil it."""
    return Path(shutil.copytree(exported("FedAvg")[3], tmp_path / "round"))


@pytest.mark.each_value
@pytest.mark.parametrize("participants", [[0, 1, 2, 3], [], [1, 3]], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_exported_stages_equal_the_stages(name, participants, exported):
    args, stages, artifact, _ = exported(name)
    leaves = jax.tree.leaves_with_path(tuple(args))
    named = dict(zip(stages.argument_names, (leaf for _, leaf in leaves), strict=True))
    arguments = {n: jnp.asarray(named[n]) for n in artifact.manifest["arguments"]}
    states = stages.own(*args)
    own = [{k: rows[i] for k, rows in states.items()} for i in range(N)]
    actual, kept = run_artifact(artifact, arguments, own, participants)
    result = run_local(stages, *args, participants=participants)
    expected = {
        f"result{jax.tree_util.keystr(path)}": leaf
        for path, leaf in jax.tree.leaves_with_path(result)
    }
    for key, value in actual.items():
        if participants:
            assert np.all(np.isfinite(np.asarray(value, np.float64)))
        np.testing.assert_allclose(value, expected[key], rtol=0, atol=1e-6)
    if name == "DiLoCo":
        for i in participants:
            for key, rows in states.items():
                if key.startswith("state."):
                    new = expected[key.replace("state", "result[0]", 1)][i]
                    np.testing.assert_allclose(kept[i][key], new, rtol=0, atol=1e-6)
                    assert key.endswith("count") or not np.allclose(new, rows[i])


def test_a_server_whose_values_are_kept_between_its_parts(exported):
    args, stages, *_ = exported("three stages")
    artifact = Artifact(*pack_stages(stages, portable=False))
    states = stages.own(*args)
    own = [{k: rows[i] for k, rows in states.items()} for i in range(N)]
    named = dict(zip(stages.argument_names, jax.tree.leaves(args), strict=True))
    values, terms = artifact.begin(named), ()
    for part, wires in enumerate(artifact.manifest["server"]):
        values, request = artifact.advance(part, values, terms)
        terms = ()
        if request is None:
            continue
        answers = []
        for i in range(N):
            rows = [row[i] for row in request.rows]
            sent, shown, kept = artifact.client(request.stage)(i, request.shared, rows, own[i])
            own[i] |= kept
            answers.append((sent, shown))
        terms = artifact.fold(request.stage)(
            [jnp.stack(t) for t in zip(*(a[0] for a in answers), strict=True)]
        )
        shown = [jnp.stack(s) for s in zip(*(a[1] for a in answers), strict=True)]
        values |= dict(zip(wires["shown"], shown, strict=True))
    result = run_local(stages, *args)
    np.testing.assert_allclose(
        artifact.results(values)["result[0]['w']"], result[0]["w"], rtol=0, atol=1e-6
    )


def export_small(folder, **options):
    program, *args = CALLS["FedAvg"]()
    return export_stages(fedpax.stages(program, *args), folder, **options)


def test_a_client_needs_jax_and_numpy_alone(small):
    artifact = load(small)
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("runtime", {runtime.__file__!r})
runtime = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runtime)
import numpy as np
artifact = runtime.load({str(small)!r})
own = {{v["name"]: np.ones(v["shape"], v["dtype"]) for v in artifact.manifest["stages"][0]["own"]}}
shared = [np.ones(v["shape"], v["dtype"]) for v in artifact.manifest["stages"][0]["shared"]]
terms, shown, kept = artifact.client(0)(0, shared, (), own)
assert all(np.isfinite(t).all() for t in terms)
assert not {{"fedpax", "optax", "flax", "pickle5"}} & set(sys.modules), set(sys.modules)
print(artifact.program)
"""
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert completed.stdout.split() == [artifact.program]


def test_the_same_program_has_the_same_hash(exported, tmp_path):
    first = exported("FedAvg")[2]
    # From another place in the source, on another day.
    second = export_small(tmp_path / "second", not_after=datetime.date(2100, 1, 1))
    assert first.program == second.program != exported("DiLoCo")[2].program


def test_the_client_of_a_small_network_is_small(tmp_path):
    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
        logits = hidden @ params["out"] + params["shift"]
        labels = jax.nn.one_hot(batch["y"], 10)
        return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1)), {}

    params = {
        "in": normal(64, 200),
        "bias": normal(200),
        "out": normal(200, 10),
        "shift": normal(10),
    }
    method = fedavg(loss, cohort_size=N, client_optimizer=SGD)
    batches = {"x": normal(N, 3, 8, 64), "y": np.zeros((N, 3, 8), np.int32)}
    cohort = fedpax.Cohort(batches, num_examples=np.arange(1, N + 1))
    stages = fedpax.stages(method.round, method.init(jax.tree.map(jnp.asarray, params)), cohort)
    export_stages(stages, tmp_path / "round")
    assert sum(v.nbytes for v in stages[0].shared) == 60_040
    assert (tmp_path / "round" / "client_0.jax").stat().st_size <= 20_000
    assert (tmp_path / "round" / "client_0.stablehlo").stat().st_size <= 15_000


def change_manifest(folder, **changes):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    manifest["program"] = runtime.program_hash(manifest)
    path.write_text(json.dumps(manifest))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def damage(folder: Path) -> None:
    path = folder / "client_0.jax"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damage, r"client_0.jax is damaged: it does not match its sha256. Export again"),
        (lambda f: (f / "fold_0.jax").unlink(), r"fold_0.jax cannot be read .* copy the whole"),
        (lambda f: (f / "manifest.json").unlink(), "expected exported stages"),
        (lambda f: (f / "manifest.json").write_text("{"), "expected exported stages"),
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), "expected exported stages"),
        (lambda f: replace_by_pipe(f / "manifest.json"), "it is not a regular file"),
        (lambda f: replace_by_pipe(f / "fold_0.jax"), "it is not a regular file"),
        (lambda f: change_manifest(f, files=["a"]), "it lists no files"),
        (lambda f: (f / "manifest.json").write_text('{"a": 1}'), "is not a manifest of exported"),
        (lambda f: change_manifest(f, format_version=2), "has format 2, and this fedpax reads 1"),
        (lambda f: change_manifest(f, files={"../x": "0"}), "lists no file '../x'"),
        (lambda f: change_manifest(f, not_after="2100-1-1"), "its not_after is '2100-1-1', exp"),
        (
            lambda f: change_manifest(f, versions=None),
            "its versions are None, expected the",
        ),
        (
            lambda f: (f / "manifest.json").write_text(
                (f / "manifest.json").read_text().replace('"size": 4', '"size": 5')
            ),
            "manifest.json is damaged",
        ),
    ],
)
def test_bad_folders_are_told_in_a_sentence(spoil, message, small):
    spoil(small)
    with pytest.raises(ArtifactError, match=message):
        load(small)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_reported_and_portable(impl, tmp_path):
    arguments = [*three_stage_arguments()[:3], jax.random.key(3, impl=impl)]
    artifact = export_stages(fedpax.stages(three_stages, *arguments), tmp_path / "round")
    size = arguments[3].dtype.itemsize
    assert f"its row  computed from key: {arguments[3].dtype}[], {size} B" in inspect_round(
        tmp_path / "round"
    )
    text = artifact.exported("client_0").mlir_module()
    assert "stablehlo." in text and "sdy." not in text  # IREE does not read JAX's shardings


def stage_of_values(shape, dtype="int8"):
    value = {"name": "w", "shape": shape, "dtype": dtype}
    return {kind: [value] for kind in HEADINGS.values()}


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": [3]},
        {"stages": "x"},
        {"placement": None},
        {"flops": []},
        {"flops": ["x"]},
        {"platforms": 1},
        {"stages": [stage_of_values([1e400])]},
        {"stages": [stage_of_values([1.5])]},
        {"stages": [stage_of_values([2], "key<x>")]},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_a_malformed_manifest_with_its_sha256_is_told(changes, small):
    change_manifest(small, **changes)
    with pytest.raises(ArtifactError, match=r"manifest.json is malformed .* Export again"):
        inspect_round(small)


@pytest.mark.parametrize(
    ("participants", "message"),
    [([0, 4], "counts participant 4, expected numbers from 0 to 3"), ([1, 1], "twice")],
)
def test_replies_of_wrong_participants_are_told(participants, message, exported):
    artifact = exported("FedAvg")[2]
    server = artifact.run({"state.params['b']": jnp.zeros(()), "state.params['w']": jnp.ones(3)})
    next(server)
    with pytest.raises(ArtifactError, match=message):
        server.send(((), (), participants))


def test_the_last_day_of_use(tmp_path):
    day = datetime.date(2100, 1, 1)
    export_small(tmp_path / "round", not_after=day)
    load(tmp_path / "round", today=day)
    with pytest.raises(ArtifactError, match="could be used until 2100-01-01"):
        load(tmp_path / "round", today=day + datetime.timedelta(days=1))


def test_a_folder_with_files_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="has files, expected a new or an empty folder"):
        export_small(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
