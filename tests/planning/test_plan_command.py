import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import stacked_layers
from jax.sharding import set_mesh

from fedpax.experiments.fedavg_images import fedavg_digits
from fedpax.experiments.pretrain import pretrain_text
from fedpax.main import main
from fedpax.parallel.mesh import MeshConfig, default_devices
from fedpax.planning import (
    MemoryOverflowError,
    PlanError,
    ahead_of_time,
    find_topology,
    plan_experiment,
    to_json,
    to_text,
)
from fedpax.planning.ahead_of_time import overflow_report
from fedpax.planning.compiled_plan import DeviceMemory
from fedpax.training.compiled_round import compile_round, with_shardings
from fedpax.training.experiment import Run as TrainingRun

TESTS = Path(__file__).parent.parent
EXP = "--exp=stacked_layers:stack"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    """Return a function that runs a command in this process: status, output and errors."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(TESTS)

    def call(*arguments: str) -> tuple[int, str, str]:
        return main(arguments), *capsys.readouterr()

    return call


def test_the_command_reports_a_plan_on_simulated_devices(run: Run, tmp_path: Path) -> None:
    files = (
        f"--json={tmp_path / 'plan.json'}",
        f"--picture={tmp_path / 'new' / 'mesh.png'}",
        f"--hlo={tmp_path / 'round.hlo'}",
    )
    status, output, errors = run("plan", EXP, "--topology=cpu:8", *files, "--num_layers=4")
    assert status == 0
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert lines[0] == "stacked_layers:stack on cpu:8: 8 devices"
    assert "parameters 16,384" in lines
    assert "islands 4 host" in lines and "fsdp 2 host" in lines
    assert any(line.startswith("compiled / model FLOPs 1.00") for line in lines)
    for words in ("building stacked_layers:stack for 8 devices", "compiling", "done"):
        assert words in errors

    content = json.loads((tmp_path / "plan.json").read_text())
    flops = 6 * 4 * 64**2
    assert content["computation"]["model_flops_per_step"] == flops * 4 * 16
    assert (
        content["computation"]["compiled_matmul_flops_per_device_per_round"]
        == flops * 4 * 16 * 5 / 8
    )
    assert content["memory"]["aliased"] > 0 and content["memory"]["fits"] is None
    # DiLoCo: local steps use fsdp alone; between islands, parameters and a loss once per round.
    collectives = content["collectives"]
    assert {tuple(c["axes"]) for c in collectives if c["in_loop"]} == {("fsdp",)}
    (between,) = [c for c in collectives if "islands" in c["axes"]]
    assert between["executions_per_round"] == 1
    assert between["operand_bytes_per_device_per_execution"] == 4 * 16384 // 2 + 4
    assert (tmp_path / "new" / "mesh.png").read_bytes().startswith(b"\x89PNG")
    assert "ENTRY" in (tmp_path / "round.hlo").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], ["`fedpax plan` has no --exp, expected --exp=NAME"]),
        (["plan", EXP], ["--topology=v5p:4x4x4 or --topology=cpu:8"]),
        (["plan", EXP, "--topology=v5z:4x4"], ["unknown device 'v5z'", "Did you mean v5"]),
        (["plan", EXP, "--topology=cpu:8", "--slices=many"], ["slices"]),
        (["plan", EXP, "--topology=cpu:8", "--picture=x.txt"], ["is not a PNG", "picture.png"]),
        (["plan", EXP, "--topology=cpu:8", "--slices=2"], ["only TPUs"]),
        (["plan", EXP, "--topology=cpu:8", "--bandwidth=100"], ["one slice", "--slices=2"]),
        (["plan", EXP, "--topology=cpu:8", "--bandwidth=0"], ["above 0", "--bandwidth=100"]),
        (["plan", EXP, "--topology=cpu:8", "--bandwidth=nan"], ["above 0", "--bandwidth=100"]),
        (["plan", EXP, "--topology=cpu:8", "--bandwidth=fast"], ["bandwidth"]),
        (["plan", EXP, "--topology=gpu"], ["0 GPUs"]),
        (["plan", EXP, "--topology=v5e:4x4x4"], ["2 dimensions"]),
        (
            ["plan", EXP, "--topology=cpu:6"],
            [
                "stack uses 8 devices (islands=4, fsdp=2), cpu:6 has 6. Change --mesh.islands and "
                "--mesh.fsdp, or plan for --topology=cpu:8."
            ],
        ),
        (
            ["plan", EXP, "--topology=cpu:8", "--mesh.islands=2"],
            ["8. Use all: --mesh.islands=2 --mesh.fsdp=4. Or plan for --topology=cpu:4."],
        ),
        (
            ["plan", EXP, "--topology=cpu:8", "--islands=6"],
            ["cannot be compiled for cpu:8", "does not divide the placement islands=6"],
        ),
        (
            ["plan", EXP, "--topology=cpu:8", "--batch=15"],
            ["fsdp=2 does not divide axis 2 of cohort.batches['x'], of size 15: make that size 14"],
        ),
        (
            ["plan", EXP, "--topology=cpu:8", "--embed_dim=65"],
            ["fsdp=2 does not divide axis 1 of params['w'], of size 65: make that size 64 or 66"],
        ),
        (["plan", EXP, "--topology=cpu:8", "--says_shapes=False"], ["cohort_shapes"]),
        (["plan", EXP, "--topology=cpu:8", "--num_layer=3"], ["Perhaps you meant"]),
        (["plan", EXP, "--topology=cpu:8", "--allow_config_change=x"], ["allow_config_change"]),
    ],
)
def test_invalid_arguments_are_errors_with_a_remedy(
    run: Run, arguments: list[str], words: list[str]
) -> None:
    status, output, errors = run(*arguments)
    text = " ".join((output + errors).replace("│", " ").split())
    assert status == 2 and all(part in text for part in words)


def test_help_shows_the_usage_of_plan(run: Run) -> None:
    status, output, _ = run("plan", "--help")
    assert status == 0
    assert "fedpax plan --exp=NAME --topology=v5p:4x8x8" in output and "--slices" in output


def test_unknown_flops_are_reported(run: Run) -> None:
    status, output, _ = run("plan", EXP, "--topology=cpu:8", "--says_flops=False")
    assert status == 0 and "no flops_per_item" in output


@pytest.mark.parametrize("on_spike", [pytest.param("ignore", marks=pytest.mark.slow), "skip"])
def test_the_planned_program_is_the_trained_one(on_spike: str) -> None:
    """`plan` compiles under an abstract mesh the same program as training under the real one."""
    experiment = stacked_layers.stack()
    training = dataclasses.replace(experiment.training, on_spike=on_spike)
    experiment = dataclasses.replace(experiment, training=training)
    run = experiment.build()
    batches = with_shardings(run.cohort_shapes, run.shardings.cohort)
    with set_mesh(run.mesh):
        trained = compile_round(run, batches, skip_spikes=on_spike == "skip")
    plan, _ = plan_experiment(experiment, find_topology("cpu:8"))
    result: dict = dict.fromkeys(("argument", "output", "alias", "temp"))
    for name in result:
        result[name] = getattr(trained.round.memory_analysis(), f"{name}_size_in_bytes")
    memory = plan.memory
    assert result == {
        "argument": memory.arguments,
        "output": memory.outputs,
        "alias": memory.aliased,
        "temp": memory.temporaries,
    }
    moved = sum(
        t.collective.bytes * t.executions
        for t in plan.collectives
        if "islands" in t.collective.axes
    )
    assert 2 * moved == trained.bytes_across_placement  # of the two devices of an island


def test_a_mesh_takes_the_devices_of_the_topology() -> None:
    experiment = dataclasses.replace(
        stacked_layers.stack(), mesh=MeshConfig(islands=-1, fsdp=2), islands=2
    )
    plan, run = plan_experiment(experiment, find_topology("cpu:4"))
    assert (run.mesh.size, run.mesh.shape["islands"], run.mesh.shape["fsdp"]) == (4, 2, 2)
    assert [(axis.name, axis.size) for axis in plan.axes] == [("islands", 2), ("fsdp", 2)]
    assert list(run.mesh.devices.flat) == jax.devices()[:4]
    assert plan.workload.num_participants == 2
    assert MeshConfig(fsdp=-1).size == 8  # restored


OVERFLOWS = {
    "temporaries alone": (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (74.01G) exceeds available HBM (15.75G).",
        ["needs 74.01G of 15.75G for temporaries alone."],
    ),
    "everything": (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 20.31G of 15.75G hbm. Exceeded hbm capacity by 4.56G.\n\n"
        "Largest program allocations in hbm:\n\n  1. Size: 8.00G\n     Operator: op_name=\"x\"\n"
        "     Shape: f32[2048,1048576]{1,0:T(8,128)}\n     Unpadded size: 8.00G\n",
        ["needs 20.31G of 15.75G", "8.00G", "f32[2048,1048576]"],
    ),
    "something else": ("RESOURCE_EXHAUSTED: no more of it", ["no more of it"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", OVERFLOWS)
def test_memory_overflow_is_reported_with_remedies(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    message, words = OVERFLOWS[kind]

    def overflow(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(ahead_of_time, "compile_round", overflow)
    status, output, errors = run("plan", EXP, "--topology=cpu:8", "--embed_dim=1024")
    assert (status, output) == (1, "") and "Traceback" not in errors
    for part in (*words, "the model", "--mesh.fsdp=2 now", "more chips"):
        assert part in errors
    assert "--model.remat" not in errors  # this experiment has no such field
    # 3 layers of 1024 x 1024 in float32, over two devices.
    assert f"{3 * 4 * 2**20 / 2 / 2**30:8.2f} GiB  the model" in errors


@pytest.mark.slow
def test_only_fields_that_can_help_are_proposed() -> None:
    """No microbatches without stages, no field at its smallest value, no missing field."""

    def proposed(experiment: Any) -> set[str]:
        name, topology = "x", find_topology("cpu:8")
        report = overflow_report(name, topology, experiment, experiment.build(), "is full")
        return set(re.findall(r"--([\w.]+)=", report))

    text = pretrain_text()
    assert proposed(text) == {
        *("mesh.fsdp", "mesh.tensor", "mesh.stage", "model.remat"),
        *("loss.grad_accum_steps", "optimizer.name", "data.batch_size", "data.seq_len"),
    }
    changes = {
        "model": dataclasses.replace(text.model, remat="full", num_layers=4, num_microbatches=2),
        "mesh": MeshConfig(stage=2, fsdp=4),
        "optimizer": dataclasses.replace(text.optimizer, name="adafactor"),
    }
    result = proposed(dataclasses.replace(text, **changes))
    assert "model.num_microbatches" in result and not result & {"model.remat", "optimizer.name"}
    assert proposed(fedavg_digits()) >= {"cohort.batch_size"}


def test_a_round_that_compiles_and_does_not_fit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The TPU compiler checks the temporaries alone; with the arguments it can be too much."""
    small = ahead_of_time.memory_of

    def memory_of(*arguments: Any) -> DeviceMemory:
        return small(*arguments)._replace(capacity=2.0**10)

    monkeypatch.setattr(ahead_of_time, "memory_of", memory_of)
    status, output, errors = run("plan", EXP, "--topology=cpu:8")
    assert status == 1 and "DOES NOT FIT" in output
    for part in ("does not fit: a device of cpu:8 needs 0.00G of 0.00G", "--mesh.fsdp=2 now"):
        assert part in errors


def test_other_errors_of_the_compiler_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

    monkeypatch.setattr(ahead_of_time, "compile_round", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        plan_experiment(stacked_layers.stack(), find_topology("cpu:8"))


def test_a_mesh_that_does_not_fit_is_a_plan_error() -> None:
    # The islands of the mesh still divide the islands of the round.
    with pytest.raises(PlanError, match=r"cpu:4 has 4\. Use all: --mesh.islands=4 --mesh.fsdp=1\."):
        plan_experiment(stacked_layers.stack(), find_topology("cpu:4"))


def test_a_mesh_of_fewer_devices_is_reported_as_such() -> None:
    """The experiment takes two of four devices, as clients do that four do not divide."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Half(stacked_layers.Stack):
        def build(self) -> TrainingRun:
            two = dataclasses.replace(stacked_layers.stack(), mesh=MeshConfig(islands=2))
            with default_devices(jax.devices()[:2]):
                return two.build()

    half = Half(training=stacked_layers.stack().training, mesh=MeshConfig(islands=-1))
    plan, _ = plan_experiment(half, find_topology("cpu:4"), exp="half")
    text = to_text(plan)
    assert text.startswith("half on cpu:4: 2 of 4 devices\n")
    assert to_json(plan)["mesh_devices"] == 2
    (ratio,) = re.findall(r"compiled / model FLOPs +([\d.]+)", text)
    assert ratio == "1.00"


def test_a_long_compilation_reports_progress() -> None:
    messages: list[str] = []
    with ahead_of_time._repeated(messages.append, "still", every=0.01):
        while len(messages) < 3:
            time.sleep(0.01)
    count = len(messages)
    time.sleep(0.05)
    assert set(messages) == {"still"} and len(messages) == count  # no more lines after the end


def test_default_devices_are_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), default_devices(jax.devices()[:2]):
        assert MeshConfig(fsdp=-1).size == 2
        raise ZeroDivisionError
    assert MeshConfig(fsdp=-1).size == 8


@pytest.mark.parametrize(
    ("topology", "slices", "mesh"),
    [
        ("v5e:2x2", 2, {"islands": 4, "fsdp": 2}),
        ("v4:2x2x1", 1, {"islands": 2, "fsdp": 2}),
        ("tpu7x:2x2x1", 1, {"islands": 2, "fsdp": 4}),
    ],
)
def test_a_plan_needs_no_tpu(topology: str, slices: int, mesh: dict) -> None:
    pytest.importorskip("libtpu")
    experiment = dataclasses.replace(
        stacked_layers.stack(), islands=4, mesh=MeshConfig(**mesh), embed_dim=256, batch=64
    )
    plan, _ = plan_experiment(experiment, find_topology(topology, slices))
    flops = 6 * 3 * 256**2 * 4 * 64 * 5
    assert plan.matmul_flops * len(plan.topology.devices) == flops
    assert plan.memory.fits and plan.roofline.full_overlap_seconds > 0
    inside = {axis for t in plan.collectives if t.collective.in_loop for axis in t.collective.axes}
    assert inside == {"fsdp"}
    assert (plan.operand_bytes("DCN") > 0) == (slices > 1) and plan.operand_bytes(
        "DCN", in_loop=True
    ) == 0


def test_memory_overflow_is_found_without_a_tpu() -> None:
    pytest.importorskip("libtpu")
    experiment = dataclasses.replace(
        stacked_layers.stack(), islands=1, mesh=MeshConfig(fsdp=4), embed_dim=65536
    )
    topology = find_topology("v5e:2x2")
    with pytest.raises(MemoryOverflowError, match=r"of 15.75G for.*\n +12.00 GiB  the model"):
        plan_experiment(experiment, topology)
    # The temporaries fit, so it compiles; with the arguments it does not fit.
    plan, _ = plan_experiment(dataclasses.replace(experiment, embed_dim=28672), topology)
    memory = plan.memory
    assert memory.temporaries < memory.capacity < memory.temporaries + memory.arguments
    assert memory.fits is False


@pytest.mark.slow
def test_the_command_simulates_its_devices() -> None:
    """In a process of its own; its standard output is the report alone."""
    command = [sys.executable, "-m", "fedpax.main", "plan", EXP, "--topology=cpu:12"]
    process = subprocess.run(
        [*command, "--mesh.fsdp=3", "--embed_dim=48", "--batch=15"],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("stacked_layers:stack on cpu:12: 12 devices\n")
