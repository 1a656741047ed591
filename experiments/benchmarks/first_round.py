"""Time from the start of a command to its first result: imports, the list, and the first round.

    python -m fedpax.experiments.benchmarks.first_round --exp=fedavg_digits --repetitions=5

Each repetition trains up to the first logged round, with an empty compilation cache and once more,
and runs `import fedpax` with all its public names, `fedpax list` and `import jax`. CPU seconds
include child processes, evaluation and save. `BARS` are for two cores.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.run_files.metrics import read_metrics, select

COMMANDS = {
    "import jax": ("-c", "import jax"),
    "import fedpax": ("-c", "import fedpax; [getattr(fedpax, name) for name in fedpax.__all__]"),
    "fedpax list": ("-m", "fedpax", "list"),
}
COLD, WARM = "first round, cache cold", "first round, cache warm"
BASELINES = dict.fromkeys(COMMANDS, "import jax") | {COLD: COLD, WARM: COLD}
BARS = {"fedavg_digits": {COLD: 13.0, WARM: 5.1}, "diloco_text": {COLD: 18.9, WARM: 8.3}}
Taken = tuple[float, float]  # seconds, and CPU seconds


def train_first_round(exp: str, folder: Path, cache: Path) -> Taken:
    """Train a round; the seconds are until it is logged."""
    command = [sys.executable, "-m", "fedpax", "train", f"--exp={exp}", f"--job_log_dir={folder}"]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(cache), "JAX_ENABLE_COMPILATION_CACHE": "1"}
    before, began, seconds, ended = timing.children_cpu_seconds(), time.perf_counter(), None, False
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [*command, "--training.rounds=1"], env=environment, stdout=quiet, stderr=quiet
    ) as process:
        while seconds is None and not ended:
            ended = process.poll() is not None
            if select(read_metrics(folder), "training"):
                seconds = time.perf_counter() - began
            time.sleep(0.005)
    if seconds is None or process.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` failed with status {process.returncode}, expected 0. Run it to "
            "see its message."
        )
    return seconds, timing.children_cpu_seconds() - before


class FirstRound(Benchmark):
    exp: str = option("fedavg_digits", "the experiment to train")
    repetitions: int = option(5, "pairs of each kind")
    columns = (
        "start {name:23} | median s {seconds:.2f} | CPU s {cpu_seconds:.2f} "
        "| compared with {baseline:23} | ratio {ratio:.2f}"
    )
    bar = "CPU seconds of a training with a cold and a warm cache"

    def measure(self) -> Iterator[Row]:
        # The files are then in memory and compiled to bytecode.
        timing.run_python(*COMMANDS["fedpax list"])
        taken: dict[str, list[Taken]] = {}
        for _ in range(self.repetitions):
            with timing.new_folder() as folder:
                for kind in (COLD, WARM):
                    trained = train_first_round(self.exp, folder / kind, folder / "cache")
                    taken.setdefault(kind, []).append(trained)
            for name, arguments in COMMANDS.items():
                taken.setdefault(name, []).append(timing.run_python(*arguments)[:2])
        for name, baseline in BASELINES.items():
            seconds, cpu = map(list, zip(*taken[name], strict=True))
            most = BARS.get(self.exp, {}).get(name, math.inf)
            yield Row(
                name=name,
                baseline=baseline,
                seconds=seconds,
                cpu_seconds=cpu,
                ratio=timing.paired_ratio(seconds, [other for other, _ in taken[baseline]]),
                met=statistics.median(cpu) <= most,
            )


main = command(FirstRound)
