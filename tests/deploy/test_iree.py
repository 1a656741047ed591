"""The participant's part runs by IREE, without JAX, and equals JAX's result.

The tests need IREE in an environment of its own: FEDPAX_IREE names the folder of its commands.
FEDPAX_IREE_ARM64 is the command that runs the iree-run-module of arm64, such as
"qemu-aarch64-static -L /usr/aarch64-linux-gnu arm64/iree/_runtime_libs/iree-run-module".
"""

import json
import os
import shlex
import subprocess
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_rounds import CASES

import fedpax
from fedpax.algorithms import fedavg
from fedpax.deploy import artifacts, export_stages, iree_check, iree_client
from fedpax.deploy.iree_compiler import CompilationError, compile_client

IREE = os.environ.get("FEDPAX_IREE")
needs_iree = pytest.mark.skipif(
    IREE is None, reason="FEDPAX_IREE names no folder with python and iree-compile"
)

ARM64 = os.environ.get("FEDPAX_IREE_ARM64")
AARCH64 = 183  # the machine in the header of an ELF file
needs_arm64 = pytest.mark.skipif(
    ARM64 is None, reason="FEDPAX_IREE_ARM64 names no command for arm64, such as one by qemu-user"
)

PROGRAM = f"""
import importlib.util, json, sys
import numpy as np
spec = importlib.util.spec_from_file_location("iree_client", {iree_client.__file__!r})
iree_client = importlib.util.module_from_spec(spec)
spec.loader.exec_module(iree_client)
client = iree_client.load_client(sys.argv[1])
for path in sys.argv[2:]:
    given = np.load(path)
    shared = [given[f"shared {{i}}"] for i in range(sum(n.startswith("shared") for n in given))]
    own = {{name[4:]: given[name] for name in given if name.startswith("own ")}}
    terms, shown, kept = client(1, shared, [], own)
    found = {{f"term {{i}}": x for i, x in enumerate(terms)}}
    np.savez(path, **found, **{{f"kept {{n}}": kept[n] for n in kept}})
assert not {{"jax", "fedpax"}} & set(sys.modules), set(sys.modules)
"""


def client_call(program, state, data):
    """Return the stages, and the arguments of a participant."""
    stages = fedpax.stages(program, state, data)
    request = next(stages.run(state, data))
    own = {n: np.asarray(x[1]) for n, x in stages.own(state, data).items()}
    return stages, [np.asarray(x) for x in request.shared], own


def case_call(name):
    program, state, open_clients = CASES[name]()
    clients = open_clients()
    return client_call(program, state, clients.read_clients(0, clients.client_ids(0)))


def assert_equal_jax(stages, shared, owns, tmp_path):
    """Compare a participant's results on a device with JAX's, for each of its values."""
    export_stages(stages, tmp_path / "round")
    compile_client(tmp_path / "round", tmp_path / "device")
    paths = [tmp_path / f"{i}.npz" for i in range(len(owns))]
    for path, own in zip(paths, owns, strict=True):
        given = {f"shared {i}": x for i, x in enumerate(shared)}
        np.savez(path, **given, **{f"own {n}": x for n, x in own.items()})
    command = [Path(IREE) / "python", "-c", PROGRAM, tmp_path / "device", *paths]
    subprocess.run(command, check=True)
    for path, own in zip(paths, owns, strict=True):
        loaded = np.load(path)
        terms, _, kept = stages.client(0)(1, shared, [], own)
        expected = {f"term {i}": x for i, x in enumerate(terms)}
        expected |= {f"kept {n}": x for n, x in kept.items()}
        assert set(loaded) == set(expected)
        for key, value in expected.items():
            assert np.all(np.isfinite(value)) and loaded[key].dtype == value.dtype
            np.testing.assert_allclose(loaded[key], value, rtol=0, atol=1e-5)
        changed = [np.abs(np.asarray(x)).max() for x in jax.tree.leaves(terms)]
        assert max(changed) > 1e-3 or own.get("cohort.num_steps") == 0


@needs_iree
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "diloco"])
def test_a_client_without_jax_equals_jax(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", IREE, prepend=os.pathsep)
    stages, shared, own = case_call(name)
    assert_equal_jax(stages, shared, [own], tmp_path)


STEPS, BATCH, WORDS, WIDTH = 5, 4, 30, 6


def normal(*shape):
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def mean_loss(losses, batch):
    weights = batch["mask"].astype(jnp.float32)
    return jnp.sum(losses * weights) / jnp.maximum(weights.sum(), 1), {}


def cross_entropy(logits, batch):
    labels = batch["y"][..., None]
    return mean_loss(-jnp.take_along_axis(jax.nn.log_softmax(logits), labels, -1)[..., 0], batch)


def next_word(params, batch):
    return cross_entropy(params["words"][batch["y"][::-1]] @ params["out"], batch)


def network(params, batch):
    return cross_entropy(jax.nn.relu(batch["x"] @ params["in"]) @ params["out"], batch)


def recurrent(params, batch):
    def step(state, x):
        return jnp.tanh(state @ params["square"] + x[:, None] * params["in"][0]), None

    start = jnp.zeros((BATCH, WIDTH))
    return cross_entropy(jax.lax.scan(step, start, batch["x"].T)[0] @ params["out"], batch)


def convolution(params, batch):
    x = batch["x"].reshape(BATCH, 1, WIDTH, 1)
    kernel = params["in"].reshape(1, WIDTH, 1, WIDTH)
    x = jax.lax.conv_general_dilated(x, kernel, (1, 2), "SAME", dimension_numbers=_NHWC)
    return cross_entropy(jax.nn.relu(x).mean((1, 2)) @ params["out"], batch)


def in_order_of_signs(params, batch):
    """Weigh examples by their places in an order that has ties."""
    losses = (batch["x"] @ params["in"]).mean(1) ** 2
    order = jnp.argsort(batch["x"][:, 0] > 0)
    return mean_loss(losses[order] * (1 + jnp.arange(BATCH)), batch)


_NHWC = ("NHWC", "HWIO", "NHWC")
MODELS = {f.__name__: f for f in (next_word, network, recurrent, convolution, in_order_of_signs)}


@needs_iree
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.sgd(0.5), optax.adam(0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", MODELS)
def test_a_client_of_each_number_of_steps_equals_jax(name, optimizer, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", IREE, prepend=os.pathsep)
    random = np.random.default_rng(3)
    mask = random.random((2, STEPS, BATCH)) < 0.7
    mask[:, 1] = False  # a step of padding between others
    batches = {
        "x": normal(2, STEPS, BATCH, WIDTH),
        "y": random.integers(0, WORDS, mask.shape, np.int32),
        "mask": mask,
    }
    cohort = fedpax.Cohort(batches, mask.sum((1, 2)), np.int32([STEPS, STEPS]))
    shapes = {"words": (WORDS, WIDTH), "in": (WIDTH, WIDTH), "square": (WIDTH, WIDTH)}
    params = {n: jnp.asarray(normal(*s) / 2) for n, s in (shapes | {"out": (WIDTH, WORDS)}).items()}
    method = fedavg(MODELS[name], cohort_size=2, client_optimizer=optimizer)
    stages, shared, own = client_call(method.round, method.init(params), cohort)
    owns = [own | {"cohort.num_steps": np.int32(steps)} for steps in range(STEPS + 1)]
    assert_equal_jax(stages, shared, owns, tmp_path)


@needs_iree
@needs_arm64
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "diloco"])
def test_a_client_on_arm64_equals_jax(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", IREE, prepend=os.pathsep)
    stages, shared, own = case_call(name)
    export_stages(stages, tmp_path / "round")
    compile_client(tmp_path / "round", tmp_path / "device", target="arm64")
    about = json.loads((tmp_path / "device" / "client_0.json").read_text())
    terms, _, kept = stages.client(0)(1, shared, [], own)
    expected = [*terms, *(kept[v["name"]] for v in about["messages"]["kept"])]
    values = [np.int32(1), *shared, *(own[v["name"]] for v in about["messages"]["own"])]
    for i in about["inputs"]:
        np.save(tmp_path / f"{i}.npy", values[i])
    out = tmp_path / "out.npy"
    subprocess.run(
        [
            *shlex.split(ARM64),
            "--device=local-sync",
            f"--module={tmp_path / 'device' / 'client_0.vmfb'}",
            "--function=main",
            *(f"--input=@{tmp_path / f'{i}.npy'}" for i in about["inputs"]),
            f"--output=@{out}",
            *[f"--output=+{out}"] * (len(expected) - 1),
        ],
        check=True,
    )
    with out.open("rb") as file:
        for value in expected:
            loaded = np.load(file)
            assert np.all(np.isfinite(loaded))
            np.testing.assert_allclose(loaded, value, rtol=0, atol=1e-5)


@needs_iree
@pytest.mark.slow
def test_a_compiled_client_that_differs_from_jax_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", IREE, prepend=os.pathsep)
    monkeypatch.setattr(artifacts, "with_unique_keys", lambda fn: fn)  # IREE's sort is not stable
    export_stages(case_call("fedavg")[0], tmp_path / "round")
    with pytest.raises(CompilationError, match=r"\['b'\] differs from JAX's by .* are 3\. "):
        compile_client(tmp_path / "round", tmp_path / "device", target="arm64")
    assert not (tmp_path / "device").exists()


@needs_iree
@pytest.mark.slow
@pytest.mark.parametrize("name", ["three stages", "quantized"])
def test_clients_with_keys_and_codes_are_compiled(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", IREE, prepend=os.pathsep)
    program, state, open_clients = CASES[name]()
    clients = open_clients()
    data = clients.read_clients(0, clients.client_ids(0))
    stages = fedpax.stages(program, state, data)
    export_stages(stages, tmp_path / "round")
    compile_client(tmp_path / "round", tmp_path / "device")  # it compares each stage with JAX
    assert len(list((tmp_path / "device").glob("*.vmfb"))) == len(list(stages))


@pytest.mark.parametrize(("change", "is_told"), [(1e-6, False), (1e-3, True), (np.nan, True)])
def test_results_may_differ_by_rounding_alone(change, is_told, tmp_path, monkeypatch):
    artifact = export_stages(case_call("fedavg")[0], tmp_path / "round")

    def changed_results(command, module, values, results):
        return [x * np.asarray(1 + change, x.dtype) for x in results]

    monkeypatch.setattr(iree_check, "_run", changed_results)
    with pytest.raises(CompilationError, match="differs") if is_told else nullcontext():
        iree_check.check_compiled(artifact, 0, tmp_path / "client_0.vmfb", "iree-run-module")


@needs_iree
@pytest.mark.slow
def test_a_client_is_compiled_for_arm64(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", IREE, prepend=os.pathsep)
    stages, _, _ = case_call("fedavg")
    export_stages(stages, tmp_path / "round")
    for target in ("arm64", "android"):
        compile_client(tmp_path / "round", tmp_path / target, target=target)
        about = json.loads((tmp_path / target / "client_0.json").read_text())
        assert about["target"] == target
        content = (tmp_path / target / "client_0.vmfb").read_bytes()
        header = content[content.index(b"\x7fELF") :][:20]  # the machine code inside
        is_64_bit, machine = header[4] == 2, int.from_bytes(header[18:20], "little")
        assert is_64_bit and machine == AARCH64


def test_unknown_targets_and_missing_compilers_are_told(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="target='wasm' is unknown, expected one of"):
        compile_client(tmp_path, tmp_path / "out", target="wasm")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImportError, match="needs the commands iree-compile and iree-run"):
        compile_client(tmp_path, tmp_path / "out")
