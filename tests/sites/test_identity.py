"""Tests of the identity that syncer and islands must share."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from fedpax.experiments.decoupled_diloco_text import decoupled_diloco_text
from fedpax.experiments.fedavg_text import fedavg_lora_text
from fedpax.islands.island.link import Link
from fedpax.secure_sums.arithmetic import EXACT_WORDS, WORDS
from fedpax.sites.site_process import WIRE_FORMAT, find_difference, find_other_format, identify
from fedpax.transport.calls import RefusedError
from fedpax.transport.message import Message, decode, encode
from sites.small_experiment import small

PARAMS = {"w": np.zeros((2, 3), np.float32)}


@pytest.mark.parametrize(
    ("field", "value", "may_differ"),
    [
        ("hang_after", 5.0, True),
        ("on_hang", "exit", True),
        ("profile_at", "3", True),
        ("checkpoint_every", 1, True),
        ("rounds", 9, True),
        ("seed", 1, False),
    ],
)
def test_settings_without_effect_on_the_model_may_differ(
    field: str, value: Any, may_differ: bool
) -> None:
    experiment = decoupled_diloco_text()
    training = dataclasses.replace(experiment.training, **{field: value})
    other = dataclasses.replace(experiment, training=training)
    difference = find_difference(identify(experiment, PARAMS), identify(other, PARAMS)._asdict())
    assert difference is None if may_differ else f"training.{field}" in (difference or "")


def test_paths_of_a_machine_may_differ() -> None:
    for experiment in (decoupled_diloco_text(), fedavg_lora_text()):
        data = dataclasses.replace(experiment.data, data_dir="here")
        model = dataclasses.replace(experiment.model, weights="there")
        other: Any = dataclasses.replace(experiment, data=data, model=model)
        assert identify(other, PARAMS) == identify(experiment, PARAMS)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (1, f"sends messages of format 1, expected format {WIRE_FORMAT}. Install the same commit"),
        (None, "sends messages of a format without a number"),
        (True, "sends messages of a format without a number"),
    ],
)
def test_another_wire_format_is_refused_on_both_sides(stated: Any, words: str) -> None:
    own = identify(decoupled_diloco_text(), PARAMS)
    assert find_difference(own, own._asdict()) is None
    difference = find_difference(own, own._asdict() | {"wire_format": stated})
    assert difference is not None and difference.startswith("this process") and words in difference

    answer = {"status": "ok", "merges": 0, "finished": False, "saved": {}, "wire_format": stated}
    link = Link(
        lambda message, timeout: Message(answer), {"island": "a", "incarnation": "1"}, [], []
    )
    with pytest.raises(RefusedError, match=f"the syncer {words}"):
        link.join()


def test_another_format_is_described():
    assert find_other_format(2, 2) is None
    text = "sends messages of format 1, expected format 2. Install the same commit of fedpax on "
    assert find_other_format(1, 2) == f"{text}both sides."


def test_the_format_of_messages_changes_with_the_words_of_secure_sums() -> None:
    assert (WIRE_FORMAT, WORDS, EXACT_WORDS) == (6, 3, 14)  # change the first one with the others


def test_an_infinite_setting_is_sent_and_compared() -> None:
    experiment = decoupled_diloco_text()
    optimizer = dataclasses.replace(experiment.optimizer, grad_clip_norm=math.inf)
    infinite = identify(dataclasses.replace(experiment, optimizer=optimizer), PARAMS)
    sent = decode(encode(Message(infinite._asdict()), 1), 1).header
    assert find_difference(infinite, sent) is None
    difference = find_difference(identify(experiment, PARAMS), sent)
    assert "optimizer.grad_clip_norm is Infinity, and 1.0" in (difference or "")


def test_fields_of_ones_own_class_can_be_those_of_sites() -> None:
    """A field that differs can be one that each site sets, where the class can name it."""
    own = small()
    other = identify(small(features=4), PARAMS, {})
    same = "Give `fedpax join` the flags of `fedpax syncer`"
    for fields, content, remedy in (
        ({}, {}, f"{same}, or add a field that each site sets to own_fields of the experiment's "),
        ({"class": "fedpax.experiments.fedavg_table:FedAvgTable"}, {}, f"{same}."),
        ({}, None, f"{same}."),  # islands
    ):
        expected = identify(own, PARAMS, content)
        expected = expected._replace(experiment={**expected.experiment, **fields})
        stated = other._replace(experiment={**other.experiment, **fields}, content=content)
        difference = find_difference(expected, stated._asdict()) or ""
        assert "features is 4, and 3 at the syncer. " + remedy in difference
