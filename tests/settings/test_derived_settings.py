"""Settings that are made from functions: their fields, their checks, and the command line."""

import dataclasses
import inspect
import json
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax import Cohort, aggregators, algorithms
from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Scalar
from fedpax.algorithms import fedavg
from fedpax.commands.parts.options import configure
from fedpax.errors import ArgumentError
from fedpax.experiments.async_diloco_text import async_diloco_text
from fedpax.experiments.decoupled_diloco_text import DecoupledConfig
from fedpax.experiments.diloco_text import diloco_text
from fedpax.experiments.fedavg_images import fedavg_digits
from fedpax.experiments.streaming_diloco_text import StreamingConfig
from fedpax.run_files.configuration import (
    from_json,
    read_configuration,
    to_json,
    write_configuration,
)
from fedpax.settings.client_aggregators import AggregatorConfig, aggregator
from fedpax.settings.client_methods import ClientTraining, MethodConfig, method
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.settings.function_settings import documented_by, passes_on
from fedpax.settings.table_data import TableConfig


def fedmine(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    client_optimizer: optax.GradientTransformation,
    strength: Scalar,
    kind: Literal["plain", "fast"] = "plain",
    steps: int | None = None,
    aggregator: Aggregator | None = None,
    schedule: optax.Schedule | None = None,
) -> FederatedAlgorithm:
    """Train with a method of this test.

    More lines.

    Args:
        loss_fn: the loss.
        cohort_size: number of clients.
        client_optimizer: the optimizer.
        strength: how strong it is, at least
            one half.
        kind: which one.
        steps: a number.
        aggregator: combines.
        schedule: not a plain value.
    """
    if not strength >= 0.5:
        raise ValueError(f"fedmine(): strength is {strength}, expected at least 0.5. Pass 1.0.")
    return fedavg(
        loss_fn,
        cohort_size=cohort_size,
        client_optimizer=optax.chain(client_optimizer, optax.scale(strength)),
        aggregator=aggregator,
    )


def halves(share=0.5, *, seed: int, **unused: Any) -> Aggregator:
    """Average with an aggregator of this test.

    Args:
        share: the factor of the mean.
        seed: a seed.
    """
    mean = aggregators.mean()

    def aggregate(state: Any, updates: Any, weights: Any) -> Any:
        total, state, metrics = mean.aggregate(state, updates, weights)
        return jax.tree.map(lambda leaf: share * leaf, total), state, metrics

    return Aggregator(mean.init, aggregate)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """List the functions of this file, as the `__init__` of their packages would."""
    for package, function in ((algorithms, fedmine), (aggregators, halves)):
        name = function.__name__
        monkeypatch.setattr(package, name, function, raising=False)
        monkeypatch.setattr(package, "__all__", [*package.__all__, name])


def text_of_help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        configure("fedavg_digits", [*words, "--help"])
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", "").split())


@pytest.mark.usefixtures("listed")
def test_a_listed_function_is_a_choice_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of_help(capsys)
    assert "fedmine: Train with a method of this test." in text
    assert "halves: Average with an aggregator of this test." in text
    assert "--method.strength" not in text
    text = text_of_help(capsys, "--method=fedmine", "--aggregator=halves")
    assert "--method.strength FLOAT how strong it is, at least one half. (required)" in text
    assert "--method.kind {plain,fast} which one. (default: plain)" in text
    assert "--method.steps {None}|INT a number. (default: None)" in text
    assert "--aggregator.share FLOAT the factor of the mean. (default: 0.5)" in text
    assert "--method.schedule" not in text and "--method.loss_fn" not in text


@pytest.mark.usefixtures("listed")
def test_the_command_line_chooses_a_function_and_sets_its_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = configure(
        "fedavg_digits",
        ["--method", "fedmine", "--method.strength=2", "--aggregator=halves"],
    )
    assert chosen.method == method("fedmine", strength=2.0)
    assert chosen.aggregator == aggregator(halves)
    assert (
        dataclasses.replace(chosen, method=method("fedavg"), aggregator=aggregator("mean"))
        == fedavg_digits()
    )
    with pytest.raises(SystemExit) as stop:
        configure("fedavg_digits", ["--method=fedmine"])
    assert stop.value.code == 2 and "--method.strength" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        configure("fedavg_digits", ["--method=fedmine", "--method.strength=0.1"])
    text = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "method.strength=0.1: expected at least 0.5. Set --method.strength" in text


@pytest.mark.usefixtures("listed")
def test_a_setting_without_a_default_is_named_with_the_table_of_defaults() -> None:
    words = "method=fedmine: strength has no value .* a row 'fedmine' to MethodConfig.defaults of"
    with pytest.raises(TypeError, match=words):
        method("fedmine")
    with pytest.raises(ArgumentError, match="to one of apfl, ditto, fedac"):
        method("scaffold").check_private("aggregator=private_mean", "control variates")


def test_the_command_line_names_the_choices() -> None:
    with pytest.raises(ArgumentError, match=r"expected one of agno.* mean scaffold\?"):
        configure("fedavg_digits", ["--method=scafold"])
    changed = configure("fedavg_digits", ["--method=scaffold", "--method.option=I"])
    assert changed.method == method("scaffold", option="I")
    changed = configure("fedavg_digits", ["--aggregator=krum", "--aggregator.num_byzantine=2"])
    assert changed.aggregator == aggregator("krum", num_byzantine=2)


def test_a_choice_is_checked_with_the_other_fields() -> None:
    """Fields that only the new choice allows can be set in the same command."""
    with pytest.raises(SystemExit):
        configure("fedavg_digits", ["--method=reptile", "--server.learning_rate=0.5"])
    exp = "methods_digits:fedadam"
    with pytest.raises(SystemExit):
        configure(exp, ["--method=reptile"])
    fields = ["--server.optimizer=sgd", "--server.learning_rate=1", "--server.b1=0"]
    assert configure(exp, ["--method=reptile", *fields]).method == method("reptile")


def test_settings_reach_an_own_function() -> None:
    rng = np.random.default_rng(0)
    cohort = Cohort(rng.normal(size=(2, 1, 3)).astype(np.float32))
    settings = ClientTraining(
        2, 5, 0.1, optax.sgd(1.0), 1, aggregator(halves, share=0.25).make(0, 2)
    )

    def loss_fn(w: Any, batch: Any) -> Any:
        return jnp.sum((w - batch) ** 2) / 2, {}

    made = method(fedmine, strength=3.0).make(loss_fn, settings)
    w = rng.normal(size=3).astype(np.float32)
    state, _ = made.round(made.init(w), cohort)
    gradient = np.mean(w - cohort.batches[:, 0], axis=0)
    np.testing.assert_allclose(state.params, w - 0.25 * 3.0 * 0.1 * gradient, rtol=1e-5)


def test_an_own_function_needs_arguments_that_are_plain_or_given() -> None:
    def with_a_table(loss_fn: LossFn, *, table: dict[str, int]) -> FederatedAlgorithm: ...

    with pytest.raises(TypeError, match=r"with_a_table: table has the type .* Give the arg"):
        method(with_a_table)


def test_settings_of_an_own_function_are_saved_and_read(tmp_path) -> None:
    experiment = dataclasses.replace(fedavg_digits(), method=method(fedmine, strength=1.5))
    write_configuration(tmp_path, experiment, exp="mine.py:f")
    assert read_configuration(tmp_path, experiment) == ("mine.py:f", experiment)


FORMER = {
    "client_methods": "FedAvg FedProx Scaffold FedDyn FedNova Mime MimeLite FedAc Agnostic "
    "SelfTuningFedAvg",
    "personal_methods": "Ditto APFL HypCluster PerFedAvg Reptile",
    "client_aggregators": "Mean ClippedMean PrivateMean SecureMean PrivateSecureMean QuantizedMean "
    "CompressedMean",
    "robust_aggregators": "CoordinateMedian TrimmedMean Krum Bulyan GeometricMedian",
}
FORMER_FIELDS = {
    "FedProx": {"mu": 0.7},
    "CompressedMean": {"codec": "sign"},
    "Krum": {"num_byzantine": 2},
}


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in FORMER.items() for name in names.split()],
)
def test_configurations_of_older_runs_are_read(module: str, name: str) -> None:
    fields = FORMER_FIELDS.get(name, {})
    read = from_json({"class": f"fedpax.experiments.{module}:{name}", **fields})
    assert isinstance(read, AggregatorConfig if "aggr" in module else MethodConfig)
    assert read.function.__name__.replace("_", "").endswith(name.lower())
    assert {name: getattr(read, name) for name in fields} == fields
    assert from_json(json.loads(json.dumps(to_json(read)))) == read


@pytest.mark.parametrize(
    ("module", "config"),
    [
        ("fedavg_images", fedavg_digits()),
        ("populations", fedavg_digits().population),
        ("cohort_settings", fedavg_digits().population),
        ("text", diloco_text().data),
        ("text", diloco_text().loss),
        ("optimizers", diloco_text().optimizer),
        ("optimizer_settings", diloco_text().optimizer),
        ("traces", async_diloco_text().trace),
        ("table_data", TableConfig(files=("a.csv",), label="y")),
        ("trace_settings", async_diloco_text().trace),
    ],
)
def test_settings_in_modules_of_former_names_are_read(module: str, config: Any) -> None:
    saved = to_json(config)
    former = f"fedpax.experiments.{module}:{type(config).__name__}"
    assert from_json(saved | {"class": former}) == config


def test_texts_of_fields_come_from_the_functions_that_they_set() -> None:
    attributes = (StreamingConfig.__doc__ or "").partition("Attributes:")[2]
    assert "delay: tau, number of inner steps between the start of a transfer" in attributes
    assert attributes.count("compression:") == 1  # its own text


def test_a_default_that_the_field_does_not_have_is_left_out() -> None:
    attributes = (DecoupledConfig.__doc__ or "").partition("Attributes:")[2]
    assert DecoupledConfig().grace_seconds == 0.5  # the function's is 0.0
    assert "Default 0.0" not in attributes and "Default 1." in attributes  # grace_seconds; quorum


@pytest.mark.parametrize("base", [MethodConfig, AggregatorConfig])
def test_every_field_has_a_text_and_every_choice_its_defaults(base) -> None:
    for name in base.functions():
        chosen = base.of(name)
        for field in dataclasses.fields(chosen):
            assert f"    {field.name}: " in inspect.getdoc(chosen)
        assert chosen() == base.configure(base.functions()[name], {})


def test_fields_have_the_texts_of_the_arguments_that_they_set() -> None:
    def train(rate: float = 0.5) -> None:
        """Train.

        Args:
            rate: the learning rate. Default 0.5.
        """

    @documented_by(train)
    class Config:
        """How to train."""

        rate: float = 0.1

    assert Config.__doc__ == "How to train.\n\nAttributes:\n    rate: the learning rate."


def test_a_function_has_the_settings_of_the_functions_to_which_it_passes_arguments() -> None:
    def scale(rate: float, decay: float = 0.5) -> float:
        """Scale.

        Args:
            rate: set by the caller.
            decay: how fast it falls.
        """
        return rate * decay

    @passes_on(scale, sets=["rate"])
    def train(*, steps: int = 3, **arguments: float) -> float:
        """Train.

        Args:
            steps: how many.
        """
        return steps * scale(rate=2.0, **arguments)

    assert str(inspect.signature(train)) == "(*, decay: float = 0.5, steps: int = 3)"
    assert train.__doc__ == "Train.\n\nArgs:\n    decay: how fast it falls.\n    steps: how many."
    assert train(decay=0.25) == 1.5


def test_settings_are_stated_where_they_are_used() -> None:
    assert MethodConfig.of("fedac").__doc__.count("mu, positive: of the loss, or a guess") == 1
    assert "per step and client" in (CohortConfig.__doc__ or "")
    assert "a comma, in TSV a tab" in (TableConfig.__doc__ or "")
