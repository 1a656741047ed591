"""Compare the cost of rounds that report norms or skip spikes with the cost of plain rounds.

    python -m fedpax.experiments.benchmarks.monitored_rounds
    python -m fedpax.experiments.benchmarks.monitored_rounds \
        --exp=pretrain_c4_1b --topology=v5e:2x2 --num_layers=2 --batch_size=8

compiles the round of an experiment on text with each setting, and prints the memory of its
temporaries on a device, as a multiple of the state's, and the median ratio of its time to the plain
round's time, in interleaved calls. With `--topology` it compiles without the hardware, runs
nothing, and needs the extra `tpu`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import use_abstract_mesh

from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Row, Timed, command, option
from fedpax.experiments.benchmarks.workloads import changed
from fedpax.experiments.pretrain import pretrain_c4_1b, pretrain_text
from fedpax.experiments.text import TextExperiment
from fedpax.parallel.mesh import default_devices
from fedpax.planning import find_topology
from fedpax.training.compiled_round import compile_round, init_state, with_shardings
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


class MonitoredRounds(Timed):
    exp: str = option("pretrain_text", "experiment", choices=EXPERIMENTS)
    topology: str | None = option(None, "a pod, such as v5e:2x2; default: this machine")
    num_layers: int = option(2, "layers of the model")
    batch_size: int = option(4, "rows in a step")
    repetitions: int = option(10, "timed rounds per setting")
    columns = (
        "setting {setting:15} | temporaries of a device {megabytes:,.1f} MB "
        "| more than plain {temporaries_over_state:.2f} states | time over plain {time_ratio:.3f}"
    )

    def measure(self) -> Iterator[Row]:
        topology = self.topology
        devices = jax.devices()[:1] if topology is None else find_topology(topology).devices
        base = changed(
            EXPERIMENTS[self.exp](),
            model={"num_layers": self.num_layers},
            data={"batch_size": self.batch_size},
            mesh={} if topology else {"fsdp": 1},
        )
        measured = changed(base, loss={"gradient_norm": True})
        with default_devices(devices):
            runs = {k: (measured if k == "gradient_norm" else base).build() for k in SETTINGS}
        run = runs["plain"]
        shapes = with_shardings(run.cohort_shapes, run.resolved_shardings.cohort)
        with use_abstract_mesh(run.mesh.abstract_mesh) if topology else jax.set_mesh(run.mesh):
            compiled = {k: compile_round(runs[k], shapes, **more) for k, more in SETTINGS.items()}
            seconds: timing.Seconds = {name: [] for name in SETTINGS}
            if not topology:
                cohort = put_on_mesh(next(run.cohorts), run.resolved_shardings.cohort)
                thresholds = {"skip": (jnp.float32(jnp.inf),)}
                calls = {}
                for name, own in compiled.items():
                    state, more = init_state(run, own, seed=0), thresholds.get(name, ())
                    calls[name] = timing.repeated(own.round, state, *more, cohort)
                seconds = self.time(calls)
        memory: Any = {name: own.round.memory_analysis() for name, own in compiled.items()}
        plain, state_bytes = memory["plain"].temp_size_in_bytes, memory["plain"].alias_size_in_bytes
        for name in SETTINGS:
            size = memory[name].temp_size_in_bytes
            yield Row(
                setting=name,
                temporary_bytes=size,
                megabytes=size / 1e6,
                temporaries_over_state=(size - plain) / state_bytes,
                time_ratio=timing.paired_ratio(seconds[name], seconds["plain"]),
            )


main = command(MonitoredRounds)
