"""Tests of the bytes between TPU slices, read from programs compiled for two slices."""

import dataclasses
from typing import Any

import pytest
from jax.sharding import use_abstract_mesh

from fedpax.experiments.diloco_text import OuterConfig
from fedpax.experiments.pretrain import pretrain_text
from fedpax.experiments.text_experiment import TextConfig
from fedpax.hlo.collectives import Collective, collectives
from fedpax.models.transformer import TransformerConfig
from fedpax.parallel.mesh import MeshConfig, default_devices
from fedpax.planning import find_topology
from fedpax.training.compiled_round import compile_round, with_shardings

pytestmark = pytest.mark.slow

STEPS, ROWS = 100, 16
MODEL = TransformerConfig(
    vocab_size=512, num_layers=2, embed_dim=256, num_heads=2, num_kv_heads=2, mlp_dim=512
)


def between_slices(
    islands: int, mesh: MeshConfig, dtype: str = "float32", num_levels: int | None = None
) -> list[Collective]:
    """Compile a round for two slices and return its collectives between them."""
    experiment = dataclasses.replace(
        pretrain_text(),
        islands=islands,
        mesh=mesh,
        model=dataclasses.replace(MODEL, dtype=dtype),
        outer=OuterConfig(num_levels=num_levels),
        data=TextConfig(local_steps=STEPS, batch_size=ROWS // islands, seq_len=256),
    )
    with default_devices(find_topology("v5e:2x2", slices=2).devices):
        run = experiment.build()
    batches = with_shardings(run.cohort_shapes, run.shardings.cohort)
    with use_abstract_mesh(run.mesh.abstract_mesh):
        text = compile_round(run, batches).round.as_text()
    return [c for c in collectives(text or "", run.mesh) if c.between_slices]


def bytes_per_round(communication: list[Collective]) -> int:
    executions: Any = (c.executions for c in communication)
    return sum(c.bytes * n for c, n in zip(communication, executions, strict=True))


def test_diloco_communicates_between_slices_once_per_round_outside_of_loops() -> None:
    pytest.importorskip("libtpu")
    diloco = between_slices(2, MeshConfig(islands=2, fsdp=4))
    assert all(c.axes == ("islands",) and not c.in_loop for c in diloco)
    shard = 4 * MODEL.num_params() / 4  # each of an island's four devices sends its shard
    assert shard <= bytes_per_round(diloco) <= 1.01 * shard
    parallel = between_slices(1, MeshConfig(data=2, fsdp=4))
    assert any(c.in_loop for c in parallel)
    assert bytes_per_round(parallel) >= STEPS * bytes_per_round(diloco)


def test_quantized_outer_gradients_need_fewer_bits_than_bfloat16() -> None:
    """Data parallelism sends bfloat16; DiLoCo sends words of eight digits, 4 bits per value."""
    pytest.importorskip("libtpu")
    diloco = between_slices(2, MeshConfig(islands=2, fsdp=4), "bfloat16", num_levels=4)
    assert all(c.axes == ("islands",) and not c.in_loop for c in diloco)
    shard = MODEL.num_params() / 2 / 4
    tile = 4 * 8 * 128  # collectives are padded to whole tiles of the chip's memory
    assert shard <= bytes_per_round(diloco) < shard + len(diloco) * tile
    parallel = between_slices(1, MeshConfig(data=2, fsdp=4), "bfloat16")
    assert bytes_per_round(parallel) >= 4 * STEPS * bytes_per_round(diloco)
