"""A FedAvg round with FedJAX, run by `other_frameworks` in an environment without fedpax.

    python fedjax_round.py arguments.npz result.npz

runs one round for each line of standard input, from the same parameters every time.
"""

# mypy: disable-error-code="import-not-found"

import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def make_round(arguments: dict[str, np.ndarray]) -> Callable[[], dict[str, Any]]:
    """Make a function that runs the round and returns the new parameters."""
    import fedjax
    import jax
    import jax.numpy as jnp
    from fedjax.algorithms import fed_avg

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(classify(params, batch["image"]))
        return -jnp.mean(jnp.take_along_axis(scores, batch["label"][:, None], axis=1))

    images, labels, rate = (arguments.pop(name) for name in ("image", "label", "rate"))
    if jax.device_count() > 1:
        fedjax.set_for_each_client_backend("pmap")
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(float(rate)),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(labels.shape[2], skip_shuffle=True),
    )
    datasets = [
        fedjax.ClientDataset(
            {"image": image.reshape(-1, *image.shape[2:]), "label": label.reshape(-1)}
        )
        for image, label in zip(images, labels, strict=True)
    ]
    keys = jax.random.split(jax.random.PRNGKey(0), len(datasets))
    clients = [(str(i), data, keys[i]) for i, data in enumerate(datasets)]
    state = algorithm.init(jax.device_put(arguments))

    def run_round() -> dict[str, Any]:
        params = jax.block_until_ready(algorithm.apply(state, clients)[0].params)
        # On several devices, FedJAX returns arrays with a leading axis of length 1.
        return {name: params[name].reshape(like.shape) for name, like in arguments.items()}

    return run_round


def classify(params: dict[str, Any], x: Any) -> Any:
    """Compute the logits of images `[batch, ...]`: convolutions, max-pooling, dense layers."""
    import jax

    layers = sorted({name.partition("/")[0] for name in params})
    for i, layer in enumerate(layers):
        kernel, bias = params[f"{layer}/kernel"], params[f"{layer}/bias"]
        x = jax.nn.relu(x) if i else x
        if layer.startswith("convolution"):
            kinds = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=kinds)
            x += bias
        else:
            if x.ndim == 4:  # after the last convolution
                window = (1, 2, 2, 1)
                x = jax.lax.reduce_window(x, -np.inf, jax.lax.max, window, window, "VALID")
            x = x.reshape(len(x), -1) @ kernel + bias
    return x


def main() -> None:
    """Run a round for each line of standard input, and write the result of the first."""
    arguments, result = sys.argv[1:]
    run_round = make_round(dict(np.load(arguments)))
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("fedjax", "jax"))
    for repetition, _ in enumerate(sys.stdin):
        params = run_round()
        if repetition == 0:
            np.savez(result, versions=", ".join(versions), **params)
        print("done", flush=True)


if __name__ == "__main__":
    main()
