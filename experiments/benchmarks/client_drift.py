"""Client drift on quadratics: the distance from the exact optimum after each round.

    python -m fedpax.experiments.benchmarks.client_drift --plot=drift.png
    python -m fedpax.experiments.benchmarks.client_drift --local_steps=1,10,100 --methods=FedAvg

Client i has f_i(w) = (w - b_i)' A_i (w - b_i) / 2, and takes K exact gradient steps in a round, in
float64. All clients join each round. FedAvg with K above 1 converges to another point than the
optimum of the mean loss.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float
from matplotlib.figure import Figure

from fedpax import Cohort
from fedpax.experiments.benchmarks import harness, workloads
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option


class Quadratics(NamedTuple):
    hessians: Float[np.ndarray, "clients size size"]
    centers: Float[np.ndarray, "clients size"]

    @property
    def optimum(self) -> Float[np.ndarray, " size"]:
        weighted = np.einsum("ijk,ik->j", self.hessians, self.centers)
        return np.linalg.solve(self.hessians.sum(0), weighted)


def draw_quadratics(clients: int = 5, size: int = 4, seed: int = 0) -> Quadratics:
    """Draw Hessians with eigenvalues from 0.5 to 3, and the clients' optima from N(0, 9)."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(clients, size, size)))[0]
    values = rng.uniform(0.5, 3, size=(clients, 1, size))
    hessians = basis * values @ basis.transpose(0, 2, 1)
    return Quadratics(hessians, rng.normal(size=(clients, size)) * 3)


def loss_fn(w: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
    """Compute a client's loss; a batch holds its Hessian and its center."""
    hessian, center = batch["hessian"][0], batch["center"][0]
    return (w - center) @ hessian @ (w - center) / 2, None


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedProx": ("fedprox", {"mu": 0.5}),
    "MimeLite": ("mime_lite", {}),
    "SCAFFOLD I": ("scaffold", {"option": "I"}),
    "SCAFFOLD II": ("scaffold", {"option": "II"}),
    "FedDyn": ("feddyn", {"alpha": 1.0}),
    "Mime": ("mime", {}),
}


def distances(
    problem: Quadratics, method: str, *, rounds: int, local_steps: int = 10, rate: float = 0.1
) -> tuple[Float[np.ndarray, " size"], Float[np.ndarray, " rounds"]]:
    """Train from 0; return the last parameters and the distance from the optimum by round."""
    function, settings = METHODS[method]
    clients, size = problem.centers.shape
    sizes = {"cohort_size": clients, "num_clients": clients}
    fields = {"hessian": problem.hessians, "center": problem.centers}
    batches = {k: np.repeat(v[:, None, None], local_steps, 1) for k, v in fields.items()}
    cohort = Cohort(batches, client_ids=np.arange(clients))
    with jax.enable_x64(True):
        sgd = optax.sgd(rate)
        algorithm = workloads.method(function, loss_fn, client_optimizer=sgd, **sizes, **settings)

        def step(state: Any, _: None) -> tuple[Any, jax.Array]:
            state = algorithm.round(state, cohort)[0]
            return state, jnp.linalg.norm(state.params - problem.optimum)

        start = algorithm.init(jnp.zeros(size))
        state, errors = jax.jit(lambda state: jax.lax.scan(step, state, length=rounds))(start)
        return jax.device_get((state.params, errors))


class ClientDrift(Benchmark):
    clients: int = option(5, "number of clients", least=1)
    rounds: int = option(60, "rounds to train", least=1)
    local_steps: list[int] = option("10", "K; several with commas", harness.integers)
    rate: float = option(0.1, "the clients' learning rate")
    methods: list[str] | None = harness.some(";", lambda _: METHODS)
    seed: int = option(0, "seed of the clients' losses")

    def measure(self) -> Iterator[Row]:
        problem = draw_quadratics(self.clients, seed=self.seed)
        for steps in self.local_steps:
            for name in self.methods or METHODS:
                _, errors = distances(
                    problem, name, rounds=self.rounds, local_steps=steps, rate=self.rate
                )
                yield Row(method=name, local_steps=steps, distances=errors.tolist())

    def summary(self, rows: list[Row]) -> str:
        """Format the distances after some rounds, a table for each number of local steps."""
        shown = sorted({r for r in (1, 10, 20, 40, self.rounds) if r <= self.rounds})
        parts = []
        for steps in self.local_steps:
            cells = [
                Row(method=row.method, round=r, distance=row.distances[r - 1])
                for r in shown
                for row in rows
                if row.local_steps == steps
            ]
            table = harness.pivot(cells, "round", "method", "{distance:.1e}", "round")
            parts.append(f"\n{steps} local steps:\n\n{table}")
        return "\n".join(parts)

    def draw(self, rows: list[Row]) -> Figure:
        """Draw the distances for the last number of local steps, on a logarithmic scale."""
        axes = {"xlabel": "round", "ylabel": "distance from the optimum", "yscale": "log"}
        (panel,) = harness.panels(axes, size=(7, 4))
        for row in rows:
            if row.local_steps == self.local_steps[-1]:
                rounds = np.arange(1, len(row.distances) + 1)
                panel.plot(rounds, row.distances, label=row.method, linewidth=1)
        return harness.figure_of([panel])


main = command(ClientDrift)
