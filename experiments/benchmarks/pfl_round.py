"""A FedAvg round with pfl, for `other_environments`: it runs where there is no fedpax.

    torchrun --nproc_per_node=2 pfl_round.py arguments.npz result.npz

takes a round for each line on the standard input, and goes on from the parameters of the last.
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
    """Makes the network of these parameters: convolutions and max-pooling, then dense layers."""
    import torch

    class Classifier(torch.nn.Sequential):
        """Layers in their order, with what pfl asks of a model."""

        def loss(self, image: Any, label: Any) -> Any:
            """The cross-entropy of a batch."""
            return torch.nn.functional.cross_entropy(self(image), label)

        def metrics(self, image: Any, label: Any) -> dict[str, Any]:
            """Nothing: there is only the round to be timed."""
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
    """The parameter of the network: that of `dense_0/kernel` is `dense_0.weight`."""
    layer, _, kind = name.partition("/")
    return getattr(getattr(network, layer), {"kernel": "weight"}.get(kind, kind))


def as_torch(name: str, value: np.ndarray, params: dict[str, np.ndarray]) -> np.ndarray:
    """Lays an array out as PyTorch does: outputs first, and channels before pixels."""
    if value.ndim == 4:  # height, width, inputs, outputs
        return value.transpose(3, 2, 0, 1)
    if name == "dense_0/kernel" and "convolution_1/bias" in params:
        channels = len(params["convolution_1/bias"])
        side = math.isqrt(len(value) // channels)
        pixels = value.reshape(side, side, channels, -1)
        return pixels.transpose(3, 2, 0, 1).reshape(-1, len(value))
    return value.T


def from_torch(network: Any, params: dict[str, np.ndarray]) -> dict[str, Any]:
    """The network's parameters, by the names and in the layout of `params`."""
    found = {}
    for name, like in params.items():
        places = as_torch(name, np.arange(like.size).reshape(like.shape), params)
        found[name] = np.empty_like(like)
        found[name].flat[places.ravel()] = variable(network, name).detach().numpy().ravel()
    return found


def main() -> None:
    """Takes a round whenever it is asked for one, and writes the first result."""
    import torch
    from pfl.internal.ops import pytorch_ops
    from pfl.internal.ops.selector import set_framework_module

    set_framework_module(pytorch_ops)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
    from pfl.data import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    path, result = sys.argv[1:]
    params = dict(np.load(path))
    images, labels, rate = (torch.tensor(params.pop(name)) for name in ("image", "label", "rate"))
    batch = labels.shape[2]
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
    algorithm = FederatedAveraging()
    first = torch.distributed.get_rank() == 0
    for turn in itertools.count():
        asked = torch.tensor(first and bool(sys.stdin.readline()))
        torch.distributed.broadcast(asked, 0)
        if not asked:
            break
        algorithm.run(  # up to this many rounds in all, and so one more
            NNAlgorithmParams(
                central_num_iterations=turn + 1,
                evaluation_frequency=sys.maxsize,
                train_cohort_size=len(images),
                val_cohort_size=0,
            ),
            backend,
            model,
            NNTrainHyperParams(
                local_num_epochs=1, local_learning_rate=rate.item(), local_batch_size=batch
            ),
            send_metrics_to_platform=False,
        )
        if first and turn == 0:
            names = ("pfl", "torch")
            versions = (f"{name} {importlib.metadata.version(name)}" for name in names)
            np.savez(result, versions=", ".join(versions), **from_torch(network, params))
        if first:
            print("done", flush=True)


if __name__ == "__main__":
    main()
