"""Tests that every number of every experiment's configuration is checked."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import optax
import pytest

from fedpax.checks import CheckedConfig, Count, Positive
from fedpax.commands.parts.options import configure
from fedpax.experiments.catalog import experiments, find_group
from fedpax.experiments.decoupled_diloco_text import decoupled_diloco_text
from fedpax.experiments.diloco_text import OuterConfig
from fedpax.experiments.listing import GROUPS
from fedpax.settings.optimizer_settings import OptimizerConfig
from fedpax.training import Experiment, Run, TrainingConfig

ANY_INTEGER = {"seed"}
MAY_BE_ZERO = {
    *("warmup_steps", "final_lr_ratio", "b1", "b2", "momentum", "weight_decay", "sigma"),
    "bandwidth_sigma",
    *("z_loss_weight", "load_balance_weight", "delay", "mixing", "grace_seconds", "max_staleness"),
    *("evaluate_every", "checkpoint_every", "keep_every", "export_every", "stop_after"),
    *("decay_fraction", "num_experts", "rank"),
    *("l2_factor", "heldout_fraction", "heldout_clients"),
    *("seconds_to_global", "seconds_from_global", "local_momentum", "global_momentum"),
    "merge_weight",
    *("mu", "lam", "mixing", "mixing_learning_rate", "adaptation_learning_rate"),
    *("FedProxClients.alpha", "FedProxClients.beta"),
    # What these methods document: 0 leaves out the part of the method.
    *("Feddyn.alpha", "Agnostic.mixture_learning_rate", "Reptile.meta_learning_rate"),
    "PrivateMean.learning_rate",
    *("PrivateMean.noise_multiplier", "quantile", "trim_fraction", "num_byzantine"),
}


def nested(config: Any) -> Iterator[Any]:
    """Yield a configuration, and those in its fields."""
    yield config
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from nested(value)


def numbers(config: Any) -> Iterator[tuple[str, type]]:
    """Yield the numeric fields of a configuration: the name, and int or float."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        kinds = {hint, *(typing.get_args(hint) if is_union else ())} & {int, float}
        if kinds and field.name not in ANY_INTEGER:
            yield field.name, kinds.pop()


CONFIGS = [
    config
    for experiment in (
        *(make() for make in experiments().values()),
        *(one for group in GROUPS for one in find_group(group).experiments.values()),
    )
    for config in nested(experiment)
]
FIELDS = {
    f"{type(config).__name__}.{name}": (config, name, kind)
    for config in CONFIGS
    for name, kind in numbers(config)
}
CHOICES = {
    f"{type(config).__name__}.{name}": (config, name)
    for config in CONFIGS
    for name, hint in typing.get_type_hints(type(config)).items()
    if typing.get_origin(hint) is typing.Literal
}


@pytest.mark.parametrize("field", FIELDS)
def test_every_number_out_of_range_raises(field: str) -> None:
    config, name, kind = FIELDS[field]
    wrong: list[float] = [-2]  # -1 is a size of MeshConfig
    if kind is float:
        wrong += [-0.5, math.nan, -math.inf]
    if not {name, field} & MAY_BE_ZERO:
        wrong.append(0)
    for value in wrong:
        with pytest.raises(ValueError, match=rf"\b{name}\b|expected positive sizes"):
            dataclasses.replace(config, **{name: kind(value)})


@pytest.mark.parametrize("field", CHOICES)
def test_every_choice_refuses_another_name(field: str) -> None:
    config, name = CHOICES[field]
    with pytest.raises(ValueError, match=rf"\b{name}='unknown'"):
        dataclasses.replace(config, **{name: "unknown"})


def test_the_fields_include_those_of_every_configuration() -> None:
    assert {"ServerConfig.optimizer", "OptimizerConfig.schedule", "Scaffold.option"} <= set(CHOICES)
    names = {field.partition(".")[2] for field in FIELDS}
    assert names >= {
        *("learning_rate", "client_learning_rate", "momentum", "alpha", "sigma", "tau"),
        *("size", "num_clients", "batch_size", "seq_len", "heldout_batch_size", "local_steps"),
    }


@pytest.mark.parametrize(
    ("exp", "override", "words"),
    [
        ("fedavg_digits", "--client_learning_rate=nan", "client_learning_rate=nan: expected a pos"),
        ("fedavg_digits", "--server.learning_rate=-1", "server.learning_rate=-1.0: expected a pos"),
        ("fedavg_digits", "--population.alpha=0", "population.alpha=0.0: expected a positive"),
        ("fedavg_population", "--population.sigma=nan", "population.sigma=nan: expected a finite"),
        ("diloco_text", "--outer.momentum=nan", "outer.momentum=nan: expected a number of at"),
        (
            "aggregators_digits:trimmed_mean",
            "--aggregator.trim_fraction=0.5",
            "aggregator.trim_fraction=0.5: expected a number of at least 0 and below 0.5. Set --ag",
        ),
        (
            "aggregators_digits:krum",
            "--aggregator.num_byzantine=4",
            "with cohort.size=10: expected at most 3. Set --aggregator.num_byzantine to at most 3",
        ),
    ],
)
def test_the_command_line_names_the_field_and_its_range(
    capsys: pytest.CaptureFixture[str], exp: str, override: str, words: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        configure(exp, [override])
    message = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert stop.value.code == 2 and words in message


def test_a_quorum_above_the_number_of_islands_is_refused_by_its_flag() -> None:
    experiment = decoupled_diloco_text()
    decoupled = dataclasses.replace(experiment.decoupled, quorum=experiment.islands + 1)
    experiment = dataclasses.replace(experiment, decoupled=decoupled)
    with pytest.raises(ValueError, match=r"Set --decoupled\.quorum to at most 4, or raise"):
        experiment.make_algorithm(lambda params, batch: (params, {}), optax.sgd(0.1))


def test_decay_rates_are_below_1_and_rates_are_finite() -> None:
    with pytest.raises(ValueError, match=r"outer\.momentum=1\.0: expected .* below 1"):
        OuterConfig(momentum=1.0)
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate=inf: expected a positive fin"):
        OptimizerConfig(learning_rate=math.inf)
    assert OptimizerConfig(grad_clip_norm=math.inf).make(10)  # no clipping


def test_the_message_names_the_flag_and_none_is_not_checked() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config(CheckedConfig):
        group = "x"
        size: Count = 0
        limit: Count | None = None

    with pytest.raises(
        ValueError, match=r"x\.size=0: expected an int of at least 1\. Set --x\.size to"
    ):
        Config()
    assert Config(size=1) == Config(size=1, limit=None)
    with pytest.raises(ValueError, match=r"x\.limit=0: expected an int of at least 1"):
        Config(size=1, limit=0)


def test_fields_of_an_own_experiment_are_checked_by_their_types() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(Experiment):
        rate: Positive
        rule: Literal["mean", "median"] | None = None

        def build(self) -> Run:
            raise NotImplementedError

    training = TrainingConfig(rounds=1, evaluate_every=1, checkpoint_every=1)
    assert Mine(training=training, rate=1.0).rule is None
    with pytest.raises(ValueError, match=r"^rate=nan: expected a positive .* Set --rate to"):
        Mine(training=training, rate=math.nan)
    with pytest.raises(ValueError, match=r"^rule='max': expected one of mean, median\."):
        Mine(training=training, rate=1.0, rule="max")  # type: ignore[arg-type]
