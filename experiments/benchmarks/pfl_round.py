"""A round of a method with pfl, run by `other_frameworks` in an environment without fedpax.

    torchrun --nproc_per_node=2 pfl_round.py arguments.npz result.npz fedavg

runs one round for each line of standard input, each from the parameters of the previous round. The
third argument is `fedavg`, `fedprox` or `scaffold`.
"""

# mypy: disable-error-code="import-not-found"

import importlib.metadata
import itertools
import math
import sys
from collections import OrderedDict
from typing import Any

import numpy as np


def classifier(params: dict[str, np.ndarray]) -> Any:
    """Make the network with these parameters: convolutions, max-pooling, dense layers."""
    import torch

    class Classifier(torch.nn.Sequential):
        """A sequence of layers with the methods that pfl calls on a model."""

        def loss(self, image: Any, label: Any) -> Any:
            """Compute the cross-entropy of a batch."""
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
    found = {}
    for name, like in params.items():
        indices = as_torch(name, np.arange(like.size).reshape(like.shape), params)
        found[name] = np.empty_like(like)
        found[name].flat[indices.ravel()] = variable(network, name).detach().numpy().ravel()
    return found


def main() -> None:
    """Run a round for each line of standard input, and write the result of the first."""
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

    path, result, method = sys.argv[1:]
    params = dict(np.load(path))
    images, labels, rate = (torch.tensor(params.pop(name)) for name in ("image", "label", "rate"))
    mu = float(params.pop("mu"))
    batch_size = labels.shape[2]
    images = images.flatten(1, 2)
    if images.ndim == 5:
        images = images.movedim(-1, 2).contiguous()  # clients, examples, channels, height, width
    labels = labels.flatten(1).long()
    network = classifier(params)
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
    methods: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "fedavg": (FederatedAveraging, NNAlgorithmParams, {}),
        "fedprox": (FedProx, FedProxParams, {"mu": mu}),
        "scaffold": (
            SCAFFOLD,
            SCAFFOLDParams,
            {
                "population": len(images),
                "use_gradient_as_control_variate": False,  # option II
                "user_state_storage": InMemoryUserStateStorage(),
            },
        ),
    }
    make_algorithm, make_settings, settings = methods[method]
    algorithm = make_algorithm()
    is_first_worker = torch.distributed.get_rank() == 0
    for repetition in itertools.count():
        requested = torch.tensor(is_first_worker and bool(sys.stdin.readline()))
        torch.distributed.broadcast(requested, 0)
        if not requested:
            break
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
                local_num_epochs=1, local_learning_rate=rate.item(), local_batch_size=batch_size
            ),
            send_metrics_to_platform=False,
        )
        if is_first_worker and repetition == 0:
            names = ("pfl", "torch")
            versions = (f"{name} {importlib.metadata.version(name)}" for name in names)
            np.savez(result, versions=", ".join(versions), **from_torch(network, params))
        if is_first_worker:
            print("done", flush=True)


if __name__ == "__main__":
    main()
