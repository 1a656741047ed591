"""Tests of the identity that syncer and islands must share."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from fedpax.experiments.decoupled_diloco_text import decoupled_diloco_text
from fedpax.sites.identity import find_difference, identify

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
