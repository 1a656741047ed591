"""Tests of collectives that are known: rounds and rings on CPU, GPU and TPU."""

from pathlib import Path

import pytest
from communicating_programs import STEPS, compile_text, ring, shard_bytes, training_round
from jax.sharding import Mesh

from fedpax.hlo.collectives import collectives, operand_bytes_along
from fedpax.parallel.mesh import make_mesh

RECORDED = Path(__file__).parent / "compiled"


def check_round(text: str, mesh: Mesh) -> None:
    """A step gathers the parameters and sums the gradient over fsdp, once a leaf.

    The islands' mean comes after the loop, once.
    """
    communication = collectives(text, mesh)
    inside = [c for c in communication if c.in_loop]
    assert all(c.executions == STEPS and c.axes == ("fsdp",) for c in inside)
    gathers = [c for c in inside if c.kind == "all-gather"]
    sums = [c for c in inside if c.kind in ("all-reduce", "reduce-scatter")]
    assert len(inside) == len(gathers) + len(sums)
    assert sum(len(c.shapes) for c in gathers) == 2
    assert sum(len(c.shapes) for c in sums) == 2
    # A TPU multiplies in bfloat16, and gathers the parameters in it.
    width = 2 if all(shape.startswith("bf16") for c in gathers for shape in c.shapes) else 1
    assert sum(c.bytes for c in gathers) == shard_bytes(mesh) // width
    assert sum(c.bytes for c in sums) == shard_bytes(mesh) * mesh.shape["fsdp"]

    between = [c for c in communication if not c.in_loop]
    assert between
    assert all(c.executions == 1 and c.axes == ("islands",) for c in between)


def check_ring(text: str, mesh: Mesh) -> None:
    """Each device sends its part of the [64, 512] array once."""
    communication = collectives(text, mesh)
    pairs = {pair for c in communication for pair in c.groups}
    islands, fsdp = mesh.devices.shape
    assert pairs == {
        (island * fsdp + i, (island + 1) % islands * fsdp + i)
        for island in range(islands)
        for i in range(fsdp)
    }
    assert {(c.kind, c.axes) for c in communication} == {("collective-permute", ("islands",))}
    assert operand_bytes_along(text, mesh, "islands") == 4 * 64 * 512 // 8


def test_a_round_on_cpu_has_the_known_collectives():
    mesh = make_mesh(islands=4, fsdp=2)
    program, arguments = training_round(mesh)
    text = compile_text(mesh, program, *arguments)
    check_round(text, mesh)
    (mean,) = [c for c in collectives(text, mesh) if "islands" in c.axes]
    assert mean.kind == "all-reduce"
    assert len(mean.shapes) == 2
    assert mean.bytes == operand_bytes_along(text, mesh, "islands") == shard_bytes(mesh)


def test_a_round_on_gpu_has_the_known_collectives():
    mesh = make_mesh(islands=4, fsdp=2)
    text = (RECORDED / "gpu_4x2_round.hlo").read_text()
    check_round(text, mesh)
    assert operand_bytes_along(text, mesh, "islands") == shard_bytes(mesh)
    check_ring((RECORDED / "gpu_4x2_ring.hlo").read_text(), mesh)


def check_slices(text: str, mesh: Mesh) -> None:
    """Over two TPU slices: islands that are slices, or two islands in each slice."""
    check_round(text, mesh)
    kinds = {c.kind for c in collectives(text, mesh) if c.axes == ("fsdp",)}
    assert kinds == {"all-gather", "reduce-scatter"}
    communication = [c for c in collectives(text, mesh) if "islands" in c.axes]
    kinds = [c.kind for c in communication if not c.between_slices]
    assert {c.kind for c in communication if c.between_slices} == {"all-reduce"}
    sent = sum(c.bytes for c in communication if c.between_slices)
    if mesh.shape["islands"] == 2:
        assert kinds == []
        assert sent == operand_bytes_along(text, mesh, "islands") == shard_bytes(mesh)
    else:  # summed within a slice, then half by each of its two islands between slices
        assert set(kinds) == {"reduce-scatter", "all-gather"}
        assert sent == shard_bytes(mesh) // 2
        assert operand_bytes_along(text, mesh, "islands") == 2 * shard_bytes(mesh)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_a_recorded_round_on_two_slices_has_the_known_collectives(
    two_slices, shape: tuple[int, int]
):
    islands, fsdp = shape
    text = (RECORDED / f"tpu_two_slices_{islands}x{fsdp}_round.hlo").read_text()
    check_slices(text, two_slices(islands, fsdp))


def test_a_recorded_round_on_sparse_cores_has_the_known_collectives():
    """A tpu7x runs collectives on cores of their own, each in a computation that it calls."""
    mesh = make_mesh(islands=2, fsdp=4)
    text = (RECORDED / "tpu7x_2x4_round.hlo").read_text()
    assert 'execution_thread="sparsecore"' in text
    check_round(text, mesh)
    kinds = {c.kind for c in collectives(text, mesh) if c.axes == ("fsdp",)}
    assert kinds == {"all-gather", "reduce-scatter"}
    assert operand_bytes_along(text, mesh, "islands") == shard_bytes(mesh)


def test_a_recorded_ring_on_two_slices_has_the_known_collectives(two_slices):
    check_ring((RECORDED / "tpu_two_slices_4x2_ring.hlo").read_text(), two_slices(4, 2))


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_a_round_on_two_slices_has_the_known_collectives(tpu_devices, shape: tuple[int, int]):
    islands, fsdp = shape
    mesh = make_mesh(devices=tpu_devices("v5e:2x2", 2), islands=islands, fsdp=fsdp)
    program, arguments = training_round(mesh)
    check_slices(compile_text(mesh, program, *arguments), mesh)
    program, arguments = ring(mesh)
    check_ring(compile_text(mesh, program, *arguments), mesh)


@pytest.mark.parametrize("name", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_a_round_on_one_slice_has_the_known_collectives(tpu_devices, name: str):
    mesh = make_mesh(devices=tpu_devices(name), islands=4, fsdp=2)
    program, arguments = training_round(mesh)
    text = compile_text(mesh, program, *arguments)
    check_round(text, mesh)
    (mean,) = [c for c in collectives(text, mesh) if "islands" in c.axes]
    assert (mean.kind, mean.bytes, mean.between_slices) == ("all-reduce", shard_bytes(mesh), False)
