"""Optimizers that are no optax optimizers raise in every method, and name the argument."""

import inspect
from typing import Any

import jax
import optax
import pytest
from method_table import METHODS

import fedpax.algorithms as algorithms

METHODS_WITH_OPTIMIZERS = {
    name: method
    for name, method in vars(algorithms).items()
    if name in algorithms.__all__
    and inspect.isfunction(method)
    and any(p.endswith("optimizer") for p in inspect.signature(method).parameters)
    and name != "local_steps"  # its caller has called the optimizer's `init`
}
ARGUMENTS = [
    (name, parameter)
    for name, method in METHODS_WITH_OPTIMIZERS.items()
    for parameter in inspect.signature(method).parameters
    if parameter.endswith("optimizer")
]
SETTINGS = {
    "cohort_size": 2,
    "num_clients": 2,
    "islands": 2,
    "buffer_size": 2,
    "max_staleness": 0,
    "regions": [0, 1],
    "num_clusters": 1,
    "fragments": 1,
    "steps_per_sync": 1,
    "hyperparameters": {"rate": 1.0},
    "make_algorithm": lambda h: METHODS["FedAvg"].algorithm(),
}


def settings_of(name: str) -> dict[str, Any]:
    """Return valid values of the arguments that a method requires."""
    collected = {}
    for key, parameter in inspect.signature(METHODS_WITH_OPTIMIZERS[name]).parameters.items():
        if parameter.default is not parameter.empty:
            continue
        if key == "loss_fn":
            collected[key] = lambda w, x: (jax.numpy.mean((w - x) ** 2), {})
        else:
            collected[key] = optax.sgd(0.1) if key.endswith("optimizer") else SETTINGS.get(key, 0.1)
    return collected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (optax.sgd, "is a function, expected an optax.GradientTransformation. Call it, for exa"),
        (0.1, r"is 0.1, expected an optax.GradientTransformation. Pass for example optax.sgd\(0"),
        (1, "is 1, expected an optax.GradientTransformation. Pass for example"),
    ],
)
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_an_optimizer_of_another_type_raises(name: str, argument: str, value: Any, words: str):
    method, settings = METHODS_WITH_OPTIMIZERS[name], settings_of(name)
    method(**settings)
    with pytest.raises(TypeError, match=rf"^{name}\(\): {argument} {words}"):
        method(**settings | {argument: value})
    if inspect.signature(method).parameters[argument].default is not None:
        with pytest.raises(TypeError, match=rf"^{name}\(\): {argument} is None, expected an optax"):
            method(**settings | {argument: None})


def test_methods_of_each_module_are_here():
    assert {"fedavg", "diloco", "reptile", "papa_2", "fine_tuning_evaluation"} <= set(
        METHODS_WITH_OPTIMIZERS
    )
