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
from fedpax.experiments.benchmarks.workloads import changed, start_run
from fedpax.experiments.pretrain import pretrain_c4_1b, pretrain_text
from fedpax.experiments.text_experiment import TextExperiment
from fedpax.parallel.mesh import default_devices
from fedpax.planning import find_topology

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
        mesh, thresholds = runs["plain"].mesh, {"skip": (jnp.float32(jnp.inf),)}
        with use_abstract_mesh(mesh.abstract_mesh) if topology else jax.set_mesh(mesh):
            started = {
                name: start_run(runs[name], *thresholds.get(name, ()), starts=not topology, **more)
                for name, more in SETTINGS.items()
            }
            calls = {} if topology else {name: run.call for name, run in started.items()}
            seconds = {name: list[float]() for name in SETTINGS} | self.time(calls)
        plain = started["plain"].memory
        for name in SETTINGS:
            size = started[name].memory.temp_size_in_bytes
            yield Row(
                setting=name,
                temporary_bytes=size,
                megabytes=size / 1e6,
                temporaries_over_state=(size - plain.temp_size_in_bytes)
                / plain.alias_size_in_bytes,
                time_ratio=timing.paired_ratio(seconds[name], seconds["plain"]),
            )


main = command(MonitoredRounds)
