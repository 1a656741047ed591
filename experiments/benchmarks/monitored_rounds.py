"""Compare the cost of rounds that report norms or skip spikes with that of plain rounds.

    python -m fedpax.experiments.benchmarks.monitored_rounds
    python -m fedpax.experiments.benchmarks.monitored_rounds \
        --exp=pretrain_c4_1b --topology=v5e:2x2 --num_layers=2 --batch_size=8

compiles the round of an experiment on text with each setting, and prints the memory of its
temporaries on a device, as a multiple of the state's, and the median ratio of its time to that of
the plain round, in interleaved calls. With `--topology` it compiles without the hardware, runs
nothing, and needs the extra `tpu`.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import use_abstract_mesh

from fedpax.experiments.benchmarks.timing import interleaved, paired_ratio, write
from fedpax.experiments.pretrain import pretrain_c4_1b, pretrain_text
from fedpax.experiments.text import TextExperiment
from fedpax.parallel.mesh import default_devices
from fedpax.planning import find_topology
from fedpax.training.compiled_round import CompiledRound, compile_round, init_state, with_shardings
from fedpax.training.experiment import Run
from fedpax.training.prefetch import put_on_mesh

EXPERIMENTS: dict[str, Callable[[], TextExperiment]] = {
    "pretrain_text": pretrain_text,
    "pretrain_c4_1b": pretrain_c4_1b,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient_norm": {},
    "update_norm": {"update_norm": True},
    "skip": {"skip_spikes": True},
}


class Row(NamedTuple):
    """The measurements of one setting.

    Attributes:
        setting: its name.
        temporary_bytes: bytes of temporaries on a device.
        temporaries_over_state: how many more they are than those of the plain round, divided by
            the bytes of the state on a device.
        time_ratio: median ratio of its time to that of the plain round; None without devices.
    """

    setting: str
    temporary_bytes: int
    temporaries_over_state: float
    time_ratio: float | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark.

    Args:
        arguments: the command line. Default None: that of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--exp", choices=EXPERIMENTS, default="pretrain_text", help="experiment")
    parser.add_argument("--topology", help="a pod, such as v5e:2x2; default: this machine")
    parser.add_argument("--num_layers", type=int, default=2, help="layers of the model")
    parser.add_argument("--batch_size", type=int, default=4, help="rows in a step")
    parser.add_argument("--repetitions", type=int, default=10, help="timed rounds per setting")
    parser.add_argument("--json", help="JSON file for the measurements; default: print them")
    options = vars(parser.parse_args(arguments))
    path = options.pop("json")
    rows = measure(**options)
    print("setting          temporaries of a device  more than plain  time over plain")
    for row in rows:
        ratio = "-" if row.time_ratio is None else f"{row.time_ratio:.3f}"
        print(
            f"{row.setting:15}  {row.temporary_bytes / 1e6:20,.1f} MB  "
            f"{row.temporaries_over_state:6.2f} states  {ratio:>15}"
        )
    write(path, rows, **options)


def measure(
    exp: str, topology: str | None, num_layers: int, batch_size: int, repetitions: int
) -> list[Row]:
    """Compile the round with each setting, and time it where there are devices for it.

    Args:
        exp: name of an experiment in `EXPERIMENTS`.
        topology: a pod to compile for. None: compile for this machine, and run.
        num_layers: layers of its model.
        batch_size: rows in a step.
        repetitions: timed rounds of each setting.

    Returns:
        The measurements, the plain round first.
    """
    devices = jax.devices()[:1] if topology is None else find_topology(topology).devices
    base = EXPERIMENTS[exp]()
    base = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, num_layers=num_layers),
        data=dataclasses.replace(base.data, batch_size=batch_size),
        mesh=base.mesh if topology else dataclasses.replace(base.mesh, fsdp=1),
    )
    measured = dataclasses.replace(base, loss=dataclasses.replace(base.loss, gradient_norm=True))
    with default_devices(devices):
        runs = {name: (measured if name == "gradient_norm" else base).build() for name in SETTINGS}
    run = runs["plain"]
    shapes = with_shardings(run.cohort_shapes, run.resolved_shardings.cohort)
    mesh: Any = use_abstract_mesh(run.mesh.abstract_mesh) if topology else jax.set_mesh(run.mesh)
    with mesh:
        compiled = {
            name: compile_round(runs[name], shapes, **options) for name, options in SETTINGS.items()
        }
        seconds = None if topology else _time(run, compiled, repetitions)
    plain = _temporary_bytes(compiled["plain"])
    memory: Any = compiled["plain"].round.memory_analysis()
    return [
        Row(
            name,
            _temporary_bytes(one),
            (_temporary_bytes(one) - plain) / memory.alias_size_in_bytes,
            None if seconds is None else paired_ratio(seconds[name], seconds["plain"]),
        )
        for name, one in compiled.items()
    ]


def _temporary_bytes(compiled: CompiledRound) -> int:
    memory: Any = compiled.round.memory_analysis()
    return int(memory.temp_size_in_bytes)


def _time(run: Run, compiled: dict[str, CompiledRound], repetitions: int) -> dict[str, list[float]]:
    """Time rounds, each of which continues from the last state of its setting."""
    cohort = put_on_mesh(next(run.cohorts), run.resolved_shardings.cohort)
    states = {name: init_state(run, one, seed=0) for name, one in compiled.items()}

    def call(name: str) -> Callable[[], Any]:
        threshold = (jnp.float32(jnp.inf),) if name == "skip" else ()

        def train() -> Any:
            states[name], metrics = compiled[name].round(states[name], *threshold, cohort)
            return metrics

        return train

    return interleaved({name: call(name) for name in compiled}, (), repetitions)


if __name__ == "__main__":
    main()
