"""Plan rounds: clients on several numbers of devices, and rounds that are watched."""

import dataclasses
from typing import Any

import pytest

from fedpax.experiments.fedavg_images import fedavg_population
from fedpax.experiments.pretrain import pretrain_text
from fedpax.planning import find_topology, plan_experiment
from fedpax.planning.compiled_plan import CompiledPlan

pytestmark = pytest.mark.slow


def plan_clients(topology: str, clients_per_device: int, **settings: Any) -> CompiledPlan:
    """Plan a round with a number of clients on each device."""
    base, devices = fedavg_population(), find_topology(topology).devices
    sizes: dict[str, Any] = {"size": clients_per_device * len(devices), "max_steps": 2}
    experiment = dataclasses.replace(
        base, cohort=dataclasses.replace(base.cohort, **sizes, **settings)
    )
    return plan_experiment(experiment, find_topology(topology))[0]


def sizes_of(plan: CompiledPlan) -> tuple[float, ...]:
    """Return the memory of a device but for the program."""
    memory = plan.memory
    return memory.arguments, memory.outputs, memory.aliased, memory.temporaries


def check_same(plans: list[CompiledPlan]) -> None:
    """Check that a round all-reduces updates and metrics, after the loop over clients."""
    for plan in plans:
        assert sizes_of(plan) == sizes_of(plans[0]) and plan.memory.temporaries > 0
        kinds = [(t.collective.kind, t.collective.shapes) for t in plan.collectives]
        assert kinds == [(t.collective.kind, t.collective.shapes) for t in plans[0].collectives]
        assert {kind for kind, _ in kinds} == {"all-reduce"}
        assert not any(t.collective.in_loop for t in plan.collectives)
        moved = sum(t.collective.bytes * t.executions for t in plan.collectives)
        assert 4 * 3_658 <= moved < plan.memory.arguments  # the parameters


@pytest.mark.parametrize("chunk_size", ["auto", 1])
def test_a_round_is_the_same_on_any_number_of_devices(chunk_size: Any) -> None:
    topologies = ("cpu:2", "cpu:4", "cpu:8")
    check_same([plan_clients(name, 4, chunk_size=chunk_size) for name in topologies])
    assert plan_clients("cpu:2", 8).memory.arguments > plan_clients("cpu:2", 4).memory.arguments


def test_a_round_is_the_same_on_tpu_pods() -> None:
    pytest.importorskip("libtpu")
    check_same([plan_clients(name, 8) for name in ("v5e:4x4", "v5e:8x8")])


def test_the_memory_of_watched_rounds_is_that_of_norms_and_of_a_second_state() -> None:
    base = pretrain_text()
    base = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, num_layers=1),
        data=dataclasses.replace(base.data, batch_size=1),
    )
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "gradient_norm": {"loss": dataclasses.replace(base.loss, gradient_norm=True)},
        "update_norm": {"training": dataclasses.replace(base.training, update_norm=True)},
        "skip": {"training": dataclasses.replace(base.training, on_spike="skip")},
    }
    memory = {
        name: plan_experiment(dataclasses.replace(base, **fields), find_topology("cpu:1"))[0].memory
        for name, fields in settings.items()
    }
    state, plain = memory["plain"].aliased, memory["plain"].temporaries
    more = {name: (used.temporaries - plain) / state for name, used in memory.items()}
    assert more["gradient_norm"] == pytest.approx(0.0, abs=0.02)
    assert 0 < more["update_norm"] < 0.5
    # Two states at once: the former and the new one.
    assert more["skip"] > 0.9
