"""A round with pfl or Flower, run by `other_frameworks` in an environment without fedpax.

    torchrun --nproc_per_node=2 torch_rounds.py pfl arguments.npz result.npz fedavg
    python torch_rounds.py flower arguments.npz result.npz fedavg 2

runs one round for each line of standard input, each from the parameters of the previous one. The
method is `fedavg`, `fedprox` or `scaffold`, the last argument the number of Flower's workers.
"""

# mypy: disable-error-code="import-not-found"

# Ray sends functions to its workers without the names in their annotations.
from __future__ import annotations

import importlib.metadata
import itertools
import logging
import math
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def classifier(params: dict[str, np.ndarray]) -> Any:
    """Make the network with these parameters: convolutions, max-pooling, dense layers."""
    import torch

    class Classifier(torch.nn.Sequential):
        """A sequence of layers with the methods that pfl calls on a model."""

        def loss(self, image: Any, label: Any) -> Any:
            return torch.nn.functional.cross_entropy(self(image), label)

        def metrics(self, image: Any, label: Any) -> dict[str, Any]:
            """Return no metrics: only the round is timed."""
            return {}

    layers: OrderedDict[str, Any] = OrderedDict()
    for name in sorted({name.partition("/")[0] for name in params}):
        *_, inputs, outputs = params[f"{name}/kernel"].shape
        if name.startswith("convolution"):
            layer = torch.nn.Conv2d(inputs, outputs, 3)
        else:
            layer = torch.nn.Linear(inputs, outputs)
        if layers and name == "dense_0":
            layers["pool"], layers["flatten"] = torch.nn.MaxPool2d(2), torch.nn.Flatten()
        if layers:
            layers[f"relu before {name}"] = torch.nn.ReLU()
        layers[name] = layer
    network = Classifier(layers)
    with torch.no_grad():
        for name, value in params.items():
            variable(network, name).copy_(torch.tensor(as_torch(name, value, params)))
    return network


def variable(network: Any, name: str) -> Any:
    """Return a parameter of the network; `dense_0/kernel` is `dense_0.weight` in PyTorch."""
    layer, _, kind = name.partition("/")
    return getattr(getattr(network, layer), {"kernel": "weight"}.get(kind, kind))


def as_torch(name: str, value: np.ndarray, params: dict[str, np.ndarray]) -> np.ndarray:
    """Transpose an array to PyTorch's layout: outputs first, channels before pixels."""
    if value.ndim == 4:  # height, width, inputs, outputs
        return value.transpose(3, 2, 0, 1)
    if name == "dense_0/kernel" and "convolution_1/bias" in params:
        channels = len(params["convolution_1/bias"])
        side = math.isqrt(len(value) // channels)
        pixels = value.reshape(side, side, channels, -1)
        return pixels.transpose(3, 2, 0, 1).reshape(-1, len(value))
    return value.T


def from_torch(network: Any, params: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the network's parameters with the names and the layout of `params`."""
    converted = {}
    for name, like in params.items():
        indices = as_torch(name, np.arange(like.size).reshape(like.shape), params)
        converted[name] = np.empty_like(like)
        converted[name].flat[indices.ravel()] = (
            variable(network, name).detach().cpu().numpy().ravel()
        )
    return converted


class Problem:
    """The arguments of a round, in PyTorch's layout."""

    def __init__(self, path: str) -> None:
        self.params = dict(np.load(path))
        images, labels = self.params.pop("image"), self.params.pop("label")
        self.rate, self.mu = (float(self.params.pop(name)) for name in ("rate", "mu"))
        self.batch_size = labels.shape[2]
        images = images.reshape(len(images), -1, *images.shape[3:])
        if images.ndim == 5:
            images = np.ascontiguousarray(np.moveaxis(images, -1, 2))
        self.images, self.labels = images, labels.reshape(len(labels), -1).astype(np.int64)


def run_pfl(problem: Problem, result: str, method: str) -> None:
    """Run rounds of a method with pfl, in a process that `torchrun` started."""
    import torch
    from pfl.internal.ops import pytorch_ops
    from pfl.internal.ops.selector import set_framework_module

    set_framework_module(pytorch_ops)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
    from pfl.algorithm.fedprox import FedProx, FedProxParams
    from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
    from pfl.data import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.data.user_state import InMemoryUserStateStorage
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    device = pytorch_ops.get_default_device()  # also the model's
    images, labels = (torch.tensor(x, device=device) for x in (problem.images, problem.labels))
    network = classifier(problem.params)
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    backend = SimulatedBackend(
        training_data=FederatedDataset(
            lambda user: PyTorchTensorDataset((images[user], labels[user]), user_id=str(user)),
            get_user_sampler("minimize_reuse", list(range(len(images)))),
        ),
        val_data=None,
        postprocessors=[WeightByDatapoints()],
    )
    scaffold_settings = {
        "population": len(images),
        "use_gradient_as_control_variate": False,  # option II
        "user_state_storage": InMemoryUserStateStorage(),
    }
    methods: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "fedavg": (FederatedAveraging, NNAlgorithmParams, {}),
        "fedprox": (FedProx, FedProxParams, {"mu": problem.mu}),
        "scaffold": (SCAFFOLD, SCAFFOLDParams, scaffold_settings),
    }
    make_algorithm, make_settings, settings = methods[method]
    algorithm = make_algorithm()
    for repetition in requests(device):
        algorithm.run(  # up to this total number of rounds, so one more
            make_settings(
                central_num_iterations=repetition + 1,
                evaluation_frequency=sys.maxsize,
                train_cohort_size=len(images),
                val_cohort_size=0,
                **settings,
            ),
            backend,
            model,
            NNTrainHyperParams(
                local_num_epochs=1,
                local_learning_rate=problem.rate,
                local_batch_size=problem.batch_size,
            ),
            send_metrics_to_platform=False,
        )
        if repetition == 0 and torch.distributed.get_rank() == 0:
            save(result, "pfl", from_torch(network, problem.params))


def requests(device: Any) -> Iterator[int]:
    """Yield the number of each round that the first worker's input requests, then answer."""
    import torch

    is_first_worker = torch.distributed.get_rank() == 0
    for repetition in itertools.count():
        requested = torch.tensor(is_first_worker and bool(sys.stdin.readline()), device=device)
        torch.distributed.broadcast(requested, 0)
        if not requested:
            break
        # The result of the first round is compared; the others run in PyTorch's default precision.
        torch.backends.cudnn.allow_tf32 = repetition > 0
        yield repetition
        if device.type == "cuda":
            torch.cuda.synchronize()
        if is_first_worker:
            print("done", flush=True)


def run_flower(problem: Problem, result: str, method: str, workers: int) -> None:
    """Run rounds of a method with Flower's simulation engine.

    Flower has no SCAFFOLD, and its FedProx leaves the proximal term to the client.
    """
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg, FedProx
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    params, batch_size, rate = problem.params, problem.batch_size, problem.rate
    folder = tempfile.TemporaryDirectory()
    data = [str(Path(folder.name) / name) for name in ("images.npy", "labels.npy")]
    for path, array in zip(data, (problem.images, problem.labels), strict=True):
        np.save(path, array)  # each client reads its own examples
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        client_id = int(context.node_config["partition-id"])
        images, labels = (torch.tensor(np.load(path, mmap_mode="r")[client_id]) for path in data)
        network = classifier(params)
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        start = [variable.detach().clone() for variable in network.parameters()]
        mu = float(message.content["config"].get("proximal-mu", 0.0))
        optimizer = torch.optim.SGD(network.parameters(), rate)
        for image, label in zip(images.split(batch_size), labels.split(batch_size), strict=True):
            optimizer.zero_grad()
            loss = network.loss(image, label)
            if mu:
                moved = zip(network.parameters(), start, strict=True)
                loss = loss + mu / 2 * sum(((new - old) ** 2).sum() for new, old in moved)
            loss.backward()
            optimizer.step()
        content = {
            "arrays": ArrayRecord(network.state_dict()),
            "metrics": MetricRecord({"num-examples": len(labels)}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    def after_round(round: int, arrays: Any) -> None:
        if round == 1:
            network = classifier(params)
            network.load_state_dict(arrays.to_torch_state_dict())
            save(result, "flwr", from_torch(network, params))
        if round:
            print("done", flush=True)
        if not sys.stdin.readline():
            raise EOFError

    @server.main()
    def main(grid: Any, context: Any) -> None:
        clients = len(problem.images)
        settings = {"fraction_evaluate": 0.0, "min_available_nodes": clients}
        strategy = (
            FedProx(proximal_mu=problem.mu, **settings)
            if method == "fedprox"
            else FedAvg(**settings)
        )
        arrays = ArrayRecord(classifier(params).state_dict())
        try:
            strategy.start(grid, arrays, num_rounds=sys.maxsize, evaluate_fn=after_round)
        except EOFError:
            pass

    with folder:
        run_simulation(
            server,
            client,
            num_supernodes=len(problem.images),
            backend_config={
                "init_args": {"num_cpus": workers, "include_dashboard": False},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )


def save(path: str, library: str, params: dict[str, Any]) -> None:
    """Write parameters, with the versions of a library and of PyTorch."""
    names = (library, "torch")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    np.savez(path, versions=versions, **params)


def main() -> None:
    """Run a round for each line of standard input, and write the result of the first."""
    library, arguments, result, method, *workers = sys.argv[1:]
    problem = Problem(arguments)
    if library == "pfl":
        run_pfl(problem, result, method)
    else:
        run_flower(problem, result, method, *map(int, workers))


if __name__ == "__main__":
    main()
