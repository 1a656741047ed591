"""Transfers of the large Streaming DiLoCo experiments hide behind local steps, by their plans.

A case at 1B compiles for 5 to 7 minutes of CPU time and needs 6.4 GB of memory. A case
at 8B takes longer.
"""

import dataclasses
from pathlib import Path

import pytest
from overlap import check_overlap

from fedpax.experiments.streaming_diloco_text import (
    StreamingDiLoCoText,
    streaming_diloco_c4_1b,
    streaming_diloco_llama_8b,
    streaming_diloco_text,
)
from fedpax.parallel.mesh import MeshConfig
from fedpax.planning import find_topology, plan_experiment

pytestmark = pytest.mark.slow

EXPERIMENTS = {"1B": streaming_diloco_c4_1b, "8B": streaming_diloco_llama_8b}
BITS = {"e3m0": 4, "float32": 32}


def experiment(model: str, slices: int, compression: str) -> StreamingDiLoCoText:
    """Return an experiment with an island on each slice."""
    base = EXPERIMENTS[model]()
    return dataclasses.replace(
        base,
        islands=slices,
        mesh=MeshConfig(islands=slices, fsdp=-1),
        streaming=dataclasses.replace(base.streaming, compression=compression),
    )


@pytest.mark.parametrize(
    ("model", "compression", "topology", "slices"),
    [
        ("1B", "e3m0", "v5e:4x4", 2),
        ("1B", "e3m0", "v5e:2x2", 4),
        ("1B", "e3m0", "v6e:2x2", 2),
        ("1B", "e3m0", "v6e:2x2", 4),
        ("1B", "e3m0", "v5p:2x2x1", 2),
        ("1B", "e3m0", "v5p:2x2x1", 4),
        ("1B", "float32", "v5e:4x4", 2),
        ("8B", "e3m0", "v5e:16x16", 2),
        ("8B", "e3m0", "v5e:16x16", 4),
        ("8B", "e3m0", "v6e:16x16", 2),
        ("8B", "e3m0", "v6e:16x16", 4),
        ("8B", "e3m0", "v5p:8x8x4", 2),
        ("8B", "e3m0", "v5p:8x8x4", 4),
    ],
)
def test_each_fragment_is_sent_under_its_local_steps(
    tmp_path: Path, model: str, compression: str, topology: str, slices: int
) -> None:
    pytest.importorskip("libtpu")
    chosen = experiment(model, slices, compression)
    plan, _ = plan_experiment(
        chosen, find_topology(topology, slices), program_file=tmp_path / "round.hlo"
    )
    streaming, steps = chosen.streaming, chosen.data.local_steps
    check_overlap((tmp_path / "round.hlo").read_text(), streaming.fragments)

    # The plan says the same: all that is sent has `delay` steps to arrive, but the metrics.
    assert plan.overlap is not None and plan.memory.fits
    *fragments, metrics = plan.overlap.transfers
    block = steps // streaming.fragments
    ends = {round(transfer.end, 3) for transfer in fragments}
    assert ends == {block * (p + 1) for p in range(streaming.fragments)}
    assert {round(transfer.local_steps, 3) for transfer in fragments} == {streaming.delay}
    assert (round(metrics.end, 3), metrics.in_loop) == (steps, False)
    devices = len(plan.topology.devices) // slices
    assert metrics.bytes <= 4096 * devices
    assert plan.overlap.required_bandwidth[0.99] < plan.overlap.peak_bytes_per_second

    # Words of e3m0 are all-gathered, float32 is all-reduced: each device sends its shard of these.
    sent = sum(
        transfer.collective.bytes for transfer in plan.collectives if transfer.network == "DCN"
    )
    formula = plan.workload.num_parameters * BITS[compression] / 8 / devices
    assert formula < sent < 1.05 * formula


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
def test_a_delay_of_one_step_hides_each_fragment(topology: str) -> None:
    pytest.importorskip("libtpu")
    chosen = streaming_diloco_text()
    assert chosen.streaming.delay == 1
    plan, _ = plan_experiment(
        dataclasses.replace(chosen, islands=2, mesh=MeshConfig(islands=2, fsdp=-1)),
        find_topology(topology, 2),
    )
    assert plan.overlap is not None
    *fragments, metrics = plan.overlap.transfers
    assert {round(transfer.end, 3) for transfer in fragments} == {6, 12, 18}
    assert {round(transfer.local_steps, 3) for transfer in fragments} == {1}
    assert (round(metrics.end, 3), metrics.in_loop) == (18, False)
