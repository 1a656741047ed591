"""Tests of `fedpax generate`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import NAMED, Command

from fedpax.checkpoints import load_params
from fedpax.models.generation import generate
from fedpax.run_files.configuration import read_configuration
from fedpax.text.tokenizer_json import SEPARATOR, decode, encode

PROMPT = "def naïve("


@pytest.mark.slow
def test_the_continuation_is_that_of_the_models_own_function(command: Command, text: Path) -> None:
    _, experiment = read_configuration(text)
    prompt = jnp.array([SEPARATOR, *encode(PROMPT)])[None]
    (tokens,) = generate(
        load_params(text),
        experiment.model,
        prompt,
        num_tokens=9,
        key=jax.random.key(3),
        temperature=0.7,
        top_p=0.9,
    )
    tokens = np.asarray(tokens)
    end = int(np.argmax(tokens == SEPARATOR)) if SEPARATOR in tokens else len(tokens)
    settings = ("--num_tokens=9", "--temperature=0.7", "--top_p=0.9", "--seed=3")
    arguments = ("generate", f"--job_log_dir={text}", f"--prompt={PROMPT}", *settings)
    status, output, errors = command(*arguments)
    assert (status, output) == (0, decode([*encode(PROMPT), *tokens[:end]]) + "\n")
    assert output.startswith(PROMPT)
    assert "generating 9 tokens from round 2" in errors
    assert "21 together, but the model was trained on rows of 16" in errors
    assert command(*arguments)[1] == output
    assert command(*arguments, "--seed=4")[1] != output


def test_an_empty_prompt_begins_a_document(command: Command, text: Path) -> None:
    arguments = ("--prompt=", "--num_tokens=4", "--mesh.islands=1", "--mesh.fsdp=1")
    status, output, errors = command("generate", f"--job_log_dir={text}", *arguments)
    assert status == 0 and output.endswith("\n") and "together" not in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--prompt is missing, expected the text to continue"),
        (("--prompt=x", "--num_tokens=0"), "num_tokens=0: expected at least 1 token"),
        (("--prompt=x", "--num_tokens=many"), "num_tokens"),
        (("--prompt=x", "--top_p=2"), "top_p=2.0: expected"),
        (("--prompt=x", "--temperature=-1"), "temperature=-1.0"),
        (("--prompt=x", "--round=7"), "--round=7 has no checkpoint"),
    ],
)
def test_arguments_that_are_refused(
    command: Command, text: Path, arguments: tuple[str, ...], words: str
) -> None:
    status, output, errors = command("generate", f"--job_log_dir={text}", *arguments)
    assert (status, output) == (2, "") and words in errors


def test_an_experiment_without_text_is_refused(command: Command, regression: Path) -> None:
    status, output, errors = command("generate", NAMED, f"--job_log_dir={regression}", "--prompt=x")
    assert (status, output) == (2, "")
    assert "holds --exp=small_regression:regression, a Regression, expected an exp" in errors


def test_a_misspelled_flag_names_the_right_one(command: Command, text: Path) -> None:
    status, _, errors = command("generate", f"--job_log_dir={text}", "--promt=x")
    assert status == 2 and "--promt" in errors
    assert "`fedpax generate` takes --exp, --job_log_dir, " in errors and "--prompt, " in errors
