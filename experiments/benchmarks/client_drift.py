"""Client drift on quadratics: the distance from the exact optimum after each round.

    python -m fedpax.experiments.benchmarks.client_drift --plot=drift.png
    python -m fedpax.experiments.benchmarks.client_drift --local_steps=1,10,100 --methods=FedAvg

Client i has f_i(w) = (w - b_i)' A_i (w - b_i) / 2, and takes K exact gradient steps in a round, in
float64. All clients join each round. The optimum of the mean loss solves a linear system. FedAvg
with K above 1 converges to another point, which `fixed_point` computes.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float
from matplotlib.figure import Figure

from fedpax import Cohort
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import fedavg, feddyn, fedprox, mime, mime_lite, scaffold
from fedpax.experiments.benchmarks.arguments import integers
from fedpax.reports.table import markdown_table


class Quadratics(NamedTuple):
    """The clients' losses.

    Attributes:
        hessians: A_i, float64 `[clients, size, size]`, positive definite.
        centers: b_i, the clients' own optima, float64 `[clients, size]`.
    """

    hessians: Float[np.ndarray, "clients size size"]
    centers: Float[np.ndarray, "clients size"]

    @property
    def optimum(self) -> Float[np.ndarray, " size"]:
        """The minimum of the clients' mean loss."""
        weighted = np.einsum("ijk,ik->j", self.hessians, self.centers)
        return np.linalg.solve(self.hessians.sum(0), weighted)


def draw_quadratics(clients: int = 5, size: int = 4, seed: int = 0) -> Quadratics:
    """Draw Hessians with eigenvalues from 0.5 to 3, and the clients' optima from N(0, 9).

    Args:
        clients: number of clients.
        size: number of parameters.
        seed: the random seed.

    Example:
        >>> problem = draw_quadratics(clients=3, size=2)
        >>> gaps = problem.optimum - problem.centers
        >>> bool(np.allclose(np.einsum("ijk,ik->j", problem.hessians, gaps), 0))  # the gradient
        True
    """
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(clients, size, size)))[0]
    values = rng.uniform(0.5, 3, size=(clients, 1, size))
    hessians = basis * values @ basis.transpose(0, 2, 1)
    return Quadratics(hessians, rng.normal(size=(clients, size)) * 3)


def loss_fn(w: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
    """Compute a client's loss; a batch holds its Hessian and its center."""
    hessian, center = batch["hessian"][0], batch["center"][0]
    return (w - center) @ hessian @ (w - center) / 2, None


METHODS: dict[str, tuple[Callable[..., FederatedAlgorithm], dict[str, Any]]] = {
    "FedAvg": (fedavg, {}),
    "FedProx": (fedprox, {"mu": 0.5}),
    "MimeLite": (mime_lite, {}),
    "SCAFFOLD I": (scaffold, {"option": "I"}),
    "SCAFFOLD II": (scaffold, {"option": "II"}),
    "FedDyn": (feddyn, {"alpha": 1.0}),
    "Mime": (mime, {}),
}
"""The methods by name, with their settings beside the learning rate."""


def distances(
    problem: Quadratics, method: str, *, rounds: int, local_steps: int = 10, rate: float = 0.1
) -> tuple[Float[np.ndarray, " size"], Float[np.ndarray, " rounds"]]:
    """Train from 0 and measure the distance from the optimum.

    Args:
        problem: the clients.
        method: a name in `METHODS`.
        rounds: number of rounds.
        local_steps: K, number of local steps in a round.
        rate: the clients' learning rate.

    Returns:
        The last model, and its distance from the optimum after each round.

    Example:
        >>> _, errors = distances(draw_quadratics(), "SCAFFOLD I", rounds=20)
        >>> bool(errors[0] > 0.1 and errors[-1] < 1e-8)
        True
    """
    build, settings = METHODS[method]
    clients, size = problem.centers.shape
    if build in (scaffold, feddyn):
        settings = {"num_clients": clients, **settings}
    fields = {"hessian": problem.hessians, "center": problem.centers}
    batches = {k: np.repeat(v[:, None, None], local_steps, 1) for k, v in fields.items()}
    cohort = Cohort(batches, client_ids=np.arange(clients))
    with jax.enable_x64(True):
        algorithm = build(
            loss_fn, cohort_size=clients, client_optimizer=optax.sgd(rate), **settings
        )

        def step(state: Any, _: None) -> tuple[Any, jax.Array]:
            state = algorithm.round(state, cohort)[0]
            return state, jnp.linalg.norm(state.params - problem.optimum)

        start = algorithm.init(jnp.zeros(size))
        state, errors = jax.jit(lambda state: jax.lax.scan(step, state, length=rounds))(start)
        return jax.device_get((state.params, errors))


def fixed_point(
    problem: Quadratics, *, mu: float = 0.0, local_steps: int = 10, rate: float = 0.1
) -> Float[np.ndarray, " size"]:
    """Return the point to which FedAvg converges, or FedProx with weight `mu`.

    From x, client i ends at x - M_i (x - b_i), with M_i the sum over k < K of
    (I - eta (A_i + mu I))^k eta A_i. At the fixed point, these moves have mean 0.

    Args:
        problem: the clients.
        mu: weight of FedProx's proximal term. Default 0: FedAvg.
        local_steps: K, number of local steps in a round.
        rate: eta, the clients' learning rate.

    Example:
        >>> problem = draw_quadratics()
        >>> bool(np.allclose(fixed_point(problem, local_steps=1), problem.optimum))
        True
    """
    hessians, centers = problem
    moves = np.zeros_like(hessians)
    for _ in range(local_steps):
        moves += rate * (hessians - (hessians + mu * np.eye(len(centers[0]))) @ moves)
    return np.linalg.solve(moves.sum(0), np.einsum("ijk,ik->j", moves, centers))


def table(errors: Mapping[str, Sequence[float]], rounds: Sequence[int]) -> str:
    """Format the distances after some rounds as a Markdown table."""
    cells = [[str(r), *(f"{found[r - 1]:.1e}" for found in errors.values())] for r in rounds]
    return markdown_table(["round", *errors], cells)


def draw(errors: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the distance from the optimum over rounds, on a logarithmic scale."""
    figure = Figure(figsize=(7, 4), layout="constrained", dpi=110)
    axes = figure.subplots()
    for name, found in errors.items():
        axes.semilogy(np.arange(1, len(found) + 1), found, label=name, linewidth=1)
    axes.set_xlabel("round")
    axes.set_ylabel("distance from the optimum")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Train the methods, and print a table for each number of local steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60, help="rounds to train")
    parser.add_argument("--local_steps", type=integers, default="10", help="K; several with commas")
    parser.add_argument("--rate", type=float, default=0.1, help="the clients' learning rate")
    parser.add_argument("--methods", help="names separated by semicolons; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the clients' losses")
    parser.add_argument("--json", help="file for the distances after each round")
    parser.add_argument("--plot", help="file for the figure of the last K, such as drift.png")
    options = parser.parse_args(argv)
    chosen = list(METHODS) if options.methods is None else options.methods.split(";")
    if unknown := set(chosen) - set(METHODS):
        parser.error(f"unknown methods {sorted(unknown)}; choose from {'; '.join(METHODS)}")
    steps = options.local_steps
    if min(options.rounds, options.clients, *steps) < 1:
        parser.error("--rounds, --clients and --local_steps are expected to be at least 1")
    problem = draw_quadratics(options.clients, seed=options.seed)
    shown = sorted({r for r in (1, 10, 20, 40, options.rounds) if r <= options.rounds})
    results: dict[int, dict[str, list[float]]] = {}
    for count in steps:
        results[count] = {
            name: distances(
                problem, name, rounds=options.rounds, local_steps=count, rate=options.rate
            )[1].tolist()
            for name in chosen
        }
        if len(steps) > 1:
            print(f"\n{count} local steps:\n")
        print(table(results[count], shown))
    if options.json:
        content = {"settings": vars(options), "distances": results}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        draw(results[steps[-1]]).savefig(options.plot)


if __name__ == "__main__":
    main()
