"""`fedpax generate`: continue a prompt with the language model of a run."""

import os
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.commands.parts.options import parse
from fedpax.commands.parts.saved_run import (
    build_run,
    checkpoint_round,
    load_whole_model,
    read_saved_run,
)
from fedpax.console import count_of, print_error, print_line
from fedpax.data import Conversation
from fedpax.errors import UsageError
from fedpax.experiments.language_model_experiment import LanguageModelExperiment
from fedpax.models.generation import generate as generate_tokens


def generate(arguments: Sequence[str]) -> int:
    """Print a prompt and its continuation."""
    # A prompt begins a document: the separator stands before it and ends the continuation.
    options, fields = parse("generate", arguments, needs_exp=False)
    saved = read_saved_run("generate", arguments, options, fields)
    experiment = saved.experiment
    if not isinstance(experiment, LanguageModelExperiment):
        raise UsageError(
            f"--job_log_dir={options.job_log_dir} holds --exp={saved.exp}, a "
            f"{type(experiment).__name__}, expected an experiment on text (a subclass of "
            "fedpax.experiments.language_model_experiment.LanguageModelExperiment). Give the "
            "folder of one, such as of --exp=diloco_text."
        )
    if options.prompt is None:
        raise UsageError(
            "--prompt is missing, expected the text to continue. Give for example "
            "--prompt='def main('; an empty prompt begins a document."
        )
    number = checkpoint_round("generate", saved, options.round)
    tokenizer = experiment.read_tokenizer()
    given = os.fsencode(options.prompt)  # its bytes, whatever the locale's encoding is
    field = experiment.data.read_field()
    if isinstance(field, Conversation) and field.template is not None:
        prompt, turn_ends = field.encode_prompt(given.decode(errors="replace"), tokenizer)
        tokens = np.zeros(0, np.int32)
    else:
        tokens = np.asarray(tokenizer.encode(given), np.int32)
        prompt = np.concatenate([np.array([tokenizer.separator], np.int32), tokens])
        turn_ends = []
    run = build_run(experiment)
    total, seq_len = len(prompt) + options.num_tokens, experiment.data.seq_len
    print_error(
        f"{saved.exp}: generating {count_of(options.num_tokens, 'token')} from round {number}"
    )
    if total > seq_len:
        print_error(
            f"{saved.exp}: the prompt and the new tokens are {total} together, but the model was "
            f"trained on rows of {seq_len}: text after the first {seq_len} can be worse."
        )
    with jax.set_mesh(run.mesh):
        (generated,) = np.asarray(
            generate_tokens(
                load_whole_model(saved, run, number),
                experiment.model,
                jnp.asarray(prompt)[None],
                num_tokens=options.num_tokens,
                key=jax.random.key(options.seed),
                temperature=options.temperature,
                top_p=options.top_p,
            )
        )
    (ends,) = np.nonzero(np.isin(generated, [tokenizer.separator, *turn_ends]))
    end = ends[0] if len(ends) else None
    continued = tokenizer.decode(np.concatenate([tokens, generated[:end]]))
    # A file or a pipe gets the text as it is; a terminal would execute control characters.
    print_line(continued) if sys.stdout.isatty() else print(continued)
    return 0
