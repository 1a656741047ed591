"""Sentences that commands print."""

import inspect
from typing import Any

import pytest

from fedpax.commands.flag_table import FLAGS, describe_flags
from fedpax.commands.join import describe as describe_island
from fedpax.commands.join import describe_site
from fedpax.commands.parts.field_parsing import join_lines, split_columns
from fedpax.commands.parts.options import describe_group, did_you_mean_flag, parse
from fedpax.commands.parts.output_files import output_file
from fedpax.commands.train import describe as describe_run
from fedpax.commands.train_object import in_python
from fedpax.experiments.catalog import find_experiment
from fedpax.islands.island.join import join
from fedpax.islands.syncer.merge_votes import GuardRules
from fedpax.islands.syncer.run_syncer import run_syncer
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.run_coordinator import run_coordinator
from fedpax.sites.site_process import JoinResult
from fedpax.sites.take_part import take_part
from fedpax.training.trainer import TrainingResult
from fedpax.transport.admission import SiteLimits


def test_flags_are_listed_with_their_defaults() -> None:
    assert describe_flags(["days", "secure_sums"]).splitlines() == [
        "  --secure_sums     learn the sums of what sites send alone",
        "  --days            days until certificates expire (default 365)",
    ]


def test_results_are_told_in_a_sentence() -> None:
    result = JoinResult(7, finished=True, signal=None)
    assert describe_site(result, "runs/a", "oslo:7000", has_model=True) == (
        "Finished: this site took part in 7 rounds; the model is saved in runs/a."
    )
    assert describe_island(result, "runs/a", "oslo:7000") == (
        "Finished: the syncer has done all merges; 7 rounds of this island are saved in runs/a."
    )
    done = TrainingResult(4, True, rounds_trained=0, signal=None, evaluation=None)
    assert describe_run(done, 4, "runs/digits") == (
        "Nothing to do: runs/digits holds all 4 of 4 rounds."
    )


def test_lines_of_a_paragraph_are_joined() -> None:
    text = "The loss, such as\n`mean`.\n\nDefault: none."
    assert join_lines(text) == "The loss, such as `mean`.\n\nDefault: none."


def test_lists_of_columns_are_divided_at_commas() -> None:
    words = ["--data.optional_columns=note,size", "--data.types", "a=int8,b=int8"]
    divided = ["--data.optional_columns", "note", "size", "--data.types", "a=int8", "b=int8"]
    assert split_columns(words) == divided
    size = ["--data.image_size", "8", "9"]
    for words in (size, ["--data.image_size=8x9"], ["--data.image-size", "8x9"]):
        assert [word.replace("-size", "_size") for word in split_columns(words)] == size


def test_the_nearest_flag_is_named() -> None:
    options, unknown = parse("show", ["--job_logdir=x"])
    assert did_you_mean_flag(options, unknown) == " Did you mean --job_log_dir?"


def test_a_group_of_fields_is_told_from_a_field() -> None:
    text = describe_group(find_experiment("diloco_text")(), ["--mesh=4"])
    assert text.startswith("--mesh is a MeshConfig, set in the code of the experiment. Set one of")


def test_no_output_file_is_none() -> None:
    assert output_file("json", None) is None


def test_a_message_names_arguments_of_python() -> None:
    text = "Set another --job_log_dir, or --allow_config_change=training.rounds,rate to"
    assert in_python(text) == (
        "Set another job_log_dir, or allow_config_change=['training.rounds', 'rate'] to"
    )


@pytest.mark.parametrize(
    "function",
    [RoundRules, GuardRules, SiteLimits, run_syncer, run_coordinator, join, take_part],
    ids=lambda function: function.__name__,
)
def test_a_flag_has_the_default_of_the_argument_that_it_sets(function: Any) -> None:
    """The flags state the defaults again, because the command line starts without JAX."""
    arguments = inspect.signature(function).parameters.items()
    defaults = {n: p.default for n, p in arguments if n in FLAGS and p.default != p.empty}
    assert defaults
    for name in defaults.keys() - {"exp", "allow_config_change"}:
        assert FLAGS[name].default == defaults[name], name
