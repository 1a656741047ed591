"""Experiments on prompts with answers and on chats: the loss is on answers alone."""

import json
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from fedpax.commands.parts.options import configure
from fedpax.errors import ArgumentError
from fedpax.experiments.language_model_experiment import TextDataConfig
from fedpax.main import main

SMALL = [
    "--model.num_layers=1",
    "--model.embed_dim=16",
    "--model.num_heads=2",
    "--model.mlp_dim=16",
    "--data.seq_len=32",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a file of chats of clients, and a template for the tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("chats")
    random = np.random.default_rng(0)
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        for n in range(200):
            prompt, answer = "p" * random.integers(1, 9), "a" * random.integers(1, 9)
            messages = [("user", prompt), ("assistant", answer)]
            example: dict[str, Any] = {"client": f"Zoë {n % 3}", "q": f"{n} {prompt}", "r": answer}
            example["messages"] = [{"role": r, "content": c} for r, c in messages]
            file.write(json.dumps(example) + "\n")
    (folder / "chat.jinja").write_text(
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}.{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    return folder


def flags(folder: Path, kind: str) -> list[str]:
    own = {
        "prompts": ["--data.prompt_field=q", "--data.answer_field=r"],
        "chats": ["--data.messages_field=messages", f"--data.chat_template={folder}/chat.jinja"],
    }
    return [f"--data.dataset={folder}/chats.jsonl", "--data.heldout_fraction=0.2", *own[kind]]


def check_answers(batches: dict[str, Any], kind: str) -> None:
    """Check that all answers, and nothing else, count in the loss."""
    targets, mask = batches["targets"], batches["mask"] > 0
    end = ord(".") if kind == "chats" else 255
    assert set(np.unique(targets[mask])) == {ord("a"), end}
    # "a" is also in the template's "<a>", where it follows "<".
    other = ~mask & (targets == ord("a")) & (batches["inputs"] != ord("<"))
    assert not other[mask.any(axis=-1)].any()  # other rows are padding


@pytest.mark.parametrize("kind", ["prompts", "chats"])
def test_islands_train_on_answers_alone(folder: Path, kind: str) -> None:
    sizes = ["--islands=2", "--data.batch_size=4", "--data.local_steps=2"]
    run = configure("diloco_text", [*SMALL, *flags(folder, kind), *sizes]).build()
    cohort = next(run.cohorts)
    chex.assert_trees_all_equal_shapes_and_dtypes(run.cohort_shapes, cohort)
    check_answers(cohort.batches, kind)


@pytest.mark.parametrize("kind", ["prompts", "chats"])
def test_clients_train_on_answers_alone_and_are_measured_on_them(folder: Path, kind: str) -> None:
    experiment = configure("fedavg_lora_text", [*SMALL, *flags(folder, kind), "--lora.rank=0"])
    run = experiment.build()
    assert "cohort.size=8: a round has all 3 clients" in run.notes
    check_answers(next(run.cohorts).batches, kind)
    params = jax.jit(run.init)(jax.random.key(0))
    with jax.set_mesh(run.mesh):
        together, by_client = run.evaluate(params), run.evaluate_clients(params)
    assert list(by_client.names) == [f"Zoë {k}" for k in range(3)]
    mean = np.average(by_client.metrics["loss"], weights=by_client.num_examples)
    assert mean == pytest.approx(together["loss"], rel=1e-4)


def test_an_exported_folder_has_the_template(folder: Path, tmp_path: Path) -> None:
    experiment: Any = configure("pretrain_text", [*SMALL, *flags(folder, "chats")])
    params = jax.jit(experiment.build().init)(jax.random.key(0))
    experiment.write_huggingface(tmp_path, params)
    assert (tmp_path / "chat_template.jinja").read_text() == (folder / "chat.jinja").read_text()


def test_the_model_of_a_coordinator_needs_no_chats(folder: Path, tmp_path: Path) -> None:
    own = ["--data.messages_field=messages", f"--data.chat_template={folder}/chat.jinja"]
    experiment = configure("fedavg_lora_text", [*SMALL, *own, "--lora.rank=0"])
    (tmp_path / "federation.json").write_text("{}")
    experiment.read_inputs(tmp_path)
    run = experiment.build()
    assert run.cohort_shapes.num_examples.shape == (1,)
    params = jax.jit(run.init)(jax.random.key(0))
    with pytest.raises(ValueError, match="no held-out documents, expected some"):
        run.evaluate(params)


def test_fields_that_do_not_fit_raise() -> None:
    with pytest.raises(ArgumentError, match="expected both prompt_field and answer_field"):
        TextDataConfig(prompt_field="q")


@pytest.mark.slow
def test_a_chat_is_trained_and_continued_by_the_commands(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"--job_log_dir={tmp_path / 'run'}"
    sizes = ["--lora.rank=0", "--cohort.size=3", "--training.rounds=3"]
    rates = ["--data.client_field=client"]
    own = [*SMALL, *flags(folder, "chats"), *sizes, *rates]
    assert main(["train", "--exp=fedavg_lora_text", *own, run]) == 0
    capsys.readouterr()
    arguments = ["--prompt=ppp", "--num_tokens=4", "--temperature=0"]
    assert main(["generate", run, *arguments]) == 0
    answer = capsys.readouterr().out
    assert "ppp" not in answer and len(answer.encode()) <= 5
