"""Compare the cost of rounds that report norms or skip spikes with the cost of plain rounds.

    python -m fedpax.experiments.benchmarks.monitored_rounds
    python -m fedpax.experiments.benchmarks.monitored_rounds \
        --exp=pretrain_c4_1b --topology=v5e:2x2 --num_layers=2 --batch_size=8

compiles the round of an experiment on text with each setting, and prints the memory of its
temporaries on a device, as a multiple of the state's, and the median ratio of its time to the plain
round's time, in interleaved calls. With `--topology` it compiles without the hardware, runs
nothing, and needs the extra `tpu`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import use_abstract_mesh

from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, Timed, option
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Timed):
    """The options."""

    exp: str = option("pretrain_text", "experiment", choices=EXPERIMENTS)
    topology: str | None = option(None, "a pod, such as v5e:2x2; default: this machine")
    num_layers: int = option(2, "layers of the model")
    batch_size: int = option(4, "rows in a step")
    repetitions: int = option(10, "timed rounds per setting")


def measure(settings: Settings) -> Iterator[Row]:
    """Compile the round with each setting, and time it where there are devices for it."""
    topology = settings.topology
    devices = jax.devices()[:1] if topology is None else find_topology(topology).devices
    base = EXPERIMENTS[settings.exp]()
    base = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, num_layers=settings.num_layers),
        data=dataclasses.replace(base.data, batch_size=settings.batch_size),
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
        seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
        if not topology:
            calls = _calls(run, compiled)
            seconds = timing.interleaved(calls, (), settings.repetitions, settings.clock)
    memory = {name: _memory(round) for name, round in compiled.items()}
    plain = memory["plain"].temp_size_in_bytes
    for name in SETTINGS:
        temporaries = memory[name].temp_size_in_bytes
        yield Row(
            setting=name,
            temporary_bytes=temporaries,
            temporaries_over_state=(temporaries - plain) / memory["plain"].alias_size_in_bytes,
            time_ratio=timing.paired_ratio(seconds[name], seconds["plain"]),
        )


def _memory(compiled: CompiledRound) -> Any:
    return compiled.round.memory_analysis()


def _calls(run: Run, compiled: dict[str, CompiledRound]) -> dict[str, Callable[[], Any]]:
    """Make calls that run a round, each from the last state of its setting."""
    cohort = put_on_mesh(next(run.cohorts), run.resolved_shardings.cohort)
    states = {name: init_state(run, one, seed=0) for name, one in compiled.items()}

    def call(name: str) -> Callable[[], Any]:
        threshold = (jnp.float32(jnp.inf),) if name == "skip" else ()

        def train() -> Any:
            states[name], metrics = compiled[name].round(states[name], *threshold, cohort)
            return metrics

        return train

    return {name: call(name) for name in compiled}


main = Benchmark(
    __doc__,
    Settings,
    measure,
    {
        "setting": "{setting:15}",
        "temporaries of a device": lambda row: f"{row.temporary_bytes / 1e6:,.1f} MB",
        "more than plain": "{temporaries_over_state:.2f} states",
        "time over plain": "{time_ratio:.3f}",
    },
)


if __name__ == "__main__":
    raise SystemExit(main())
