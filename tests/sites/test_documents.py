"""Rounds over sites with private documents, which adapt a model that every site has."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.checkpoints.saved_state import load_state
from fedpax.data import ClientSampler, train_tokenizer
from fedpax.experiments.fedavg_text import FedAvgText, fedavg_lora_text
from fedpax.experiments.parts.client_text import ClientTextConfig
from fedpax.models import huggingface
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.metrics import read_metrics
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_experiment import ClientRange
from fedpax.sites.site_files import SiteState
from fedpax.transport.calls import RefusedError
from sites.federation import run

SIZES: dict[str, Any] = dict(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32, vocab_size=264)
CLIENTS = {"a": {"": 12}, "b": {"north": 9, "south": 14}}  # documents of each client of a site


def write_model(folder: Path, seed: int) -> Path:
    """Write a random model."""
    config = TransformerConfig(**SIZES, scale_embeddings=False)
    shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
    random = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: jnp.float32(0.3 * random.normal(size=x.shape)), shapes)
    huggingface.save(folder, config, params)
    return folder


def write_documents(folder: Path) -> list[str]:
    """Write the documents of each site, and all of them; return the texts."""
    random, everything = np.random.default_rng(1), []
    folder.mkdir()
    for site, clients in CLIENTS.items():
        lines = []
        for ward, count in clients.items():
            for _ in range(count):
                letters = random.choice(list("abcdefghij "), random.integers(30, 90))
                text = {"text": "".join(letters)}
                lines.append(text | ({"ward": ward} if ward else {}))
                everything.append({**text, "client": f"{site} {ward}"})
        content = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{site}.jsonl").write_text(content)
    (folder / "all.jsonl").write_text("".join(json.dumps(x) + "\n" for x in everything))
    return [x["text"] for x in everything]


def experiment(base: Path, dataset: str = "stdlib_text", *, rank: int = 2, **data) -> FedAvgText:
    """Make an experiment on some files."""
    whole = fedavg_lora_text().with_weights(base)
    return dataclasses.replace(
        whole,
        data=ClientTextConfig(dataset, seq_len=16, heldout_fraction=0.3, **data),
        lora=dataclasses.replace(whole.lora, rank=rank),
        cohort=dataclasses.replace(whole.cohort, batch_size=4, max_steps=None),
        # With AdamW, or larger steps, a relative change of 1e-7 grows to 1e-2 in two rounds.
        optimizer=dataclasses.replace(
            whole.optimizer, name="sgd", learning_rate=0.1, schedule="cosine"
        ),
        training=dataclasses.replace(whole.training, rounds=2, evaluate_every=2),
    )


def two_sites(base: Path, folder: Path, **fields) -> dict[str, FedAvgText]:
    """Make the experiments of the two sites."""
    return {
        "a": experiment(base, f"{folder}/a.jsonl", **fields),
        "b": experiment(base, f"{folder}/b.jsonl", client_field="ward", **fields),
    }


def train_together(whole: FedAvgText) -> tuple[Any, dict[str, float]]:
    """Run the rounds in one program; return the parameters and the metrics."""
    whole = dataclasses.replace(whole, cohort=dataclasses.replace(whole.cohort, size=3))
    built = whole.build()
    params = built.init(jax.random.key(0)) if built.initial is None else built.initial.load()
    state = jax.jit(built.algorithm.init)(params)
    frozen = () if built.frozen is None else (built.frozen.load(),)
    step: Any = jax.jit(built.algorithm.round)
    for _ in range(2):
        # From the host: compiled once, though a state from `init` is placed differently.
        state, _ = step(jax.device_get(state), next(built.cohorts), *frozen)
    return jax.device_get(state.params), dict(built.evaluate(state.params))


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_equals_training_on_all_documents(tmp_path: Path, rank: int) -> None:
    base, texts = write_model(tmp_path / "base", 0), write_documents(tmp_path / "ours")
    sites = two_sites(base, tmp_path / "ours", rank=rank)
    outcome = run(experiment(base, rank=rank), sites, tmp_path / "runs")
    params, metrics = train_together(experiment(base, f"{tmp_path}/ours/all.jsonl", rank=rank))
    for leaf, other in zip(outcome.params, jax.tree.leaves(params), strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)
    lines = read_metrics(tmp_path / "runs" / "coordinator")
    whole = experiment(base, f"{tmp_path}/ours/all.jsonl", rank=rank)
    rows = len(whole._pack(whole.read_training(), whole.read_tokenizer())[0]["inputs"])
    assert lines[0]["item_unit"] == "tokens"
    assert [x["items"] for x in lines if x["kind"] == "training"] == [16 * rows, 2 * 16 * rows]
    (line,) = [x for x in lines if "site/a/loss" in x]
    heldout = {name: site._site_heldout for name, site in sites.items()}
    weights = [rows.main.num_targets.sum() for rows in heldout.values() if rows is not None]
    mean = np.average([line["site/a/loss"], line["site/b/loss"]], weights=weights)
    assert line["loss"] == pytest.approx(mean, rel=1e-6)
    # In one program, rows have tokens of both sites, and other contexts.
    assert line["loss"] == pytest.approx(metrics["loss"], rel=0.01)

    carried = [b"".join((*x.sent, *x.received)) for x in outcome.lines.values()]
    carried += [x.read_bytes() for x in (tmp_path / "runs/coordinator").rglob("*") if x.is_file()]
    everything = b"".join(carried)
    for text in texts:
        tokens = np.frombuffer(text.encode(), np.uint8)
        for content in (text[:20].encode(), np.int32(tokens[:8]).tobytes()):
            assert content not in everything
    if not rank:
        return
    for values in jax.tree.leaves(huggingface.load(base)[1]):
        for row in np.asarray(values).reshape(-1, values.shape[-1]):
            for dtype in (jnp.float32, jnp.bfloat16):
                assert row.astype(dtype).tobytes() not in everything


@pytest.mark.slow
def test_a_fine_tuned_model_of_a_site_is_saved(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", 0)
    write_documents(tmp_path / "ours")
    sites = two_sites(base, tmp_path / "ours")
    rules = RoundRules(2, 300.0)
    outcome = run(experiment(base), sites, tmp_path / "runs", rules=rules, personal=True)
    own = {site.name: site.heldout for site in outcome.coordinator.exchange.sites}
    alone = sites["b"].with_inputs(outcome.coordinator.exchange.inputs)
    alone = alone.sized(2)  # its clients
    trainable = alone.trainable(MeshConfig(clients=1).make())
    algorithm = alone._site_algorithm(trainable)
    state = algorithm.init(outcome.coordinator.params)
    rows, clients = alone._site_rows
    cohort = next(alone._make_rounds(rows, clients, ClientSampler(2, 2, alone.cohort.seed)))
    tuned = algorithm.round(state, cohort, trainable.frozen.load())[0].params
    folder = tmp_path / "runs" / "b" / "fine_tuned"
    saved = load_state(folder, 2, SiteState(tuned)).params
    for leaf, other, shared in zip(
        *map(jax.tree.leaves, (saved, tuned)), outcome.params, strict=True
    ):
        assert np.abs(leaf - shared).max() > 1e-3
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-5)
    metrics = alone.at_site(ClientRange(0, 2, 2)).evaluate(tuned)
    assert own["b"]["fine_tuned_loss"] == pytest.approx(metrics["loss"], abs=1e-5)
    assert own["b"]["fine_tuned_loss"] != own["b"]["loss"]


def test_another_model_or_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    base, other = write_model(tmp_path / "base", 0), write_model(tmp_path / "other", 1)
    write_documents(tmp_path / "ours")
    sites = two_sites(base, tmp_path / "ours")
    sites["b"] = two_sites(other, tmp_path / "ours")["b"]
    match = "another content of files: model.weights is sha256 .* Use the same files"
    with pytest.raises(RefusedError, match=match):
        run(experiment(base), sites, tmp_path / "weights")

    path = tmp_path / "tokenizer.json"
    train_tokenizer(["to be or not to be"] * 9, vocab_size=262, path=path)
    sites["b"] = experiment(base, f"{tmp_path}/ours/b.jsonl", tokenizer=str(path))
    match = "another content of files: data.tokenizer is .*, and bytes at the syncer"
    with pytest.raises(RefusedError, match=match):
        run(experiment(base), sites, tmp_path / "tokenizers")


@pytest.mark.slow
def test_files_without_held_out_documents_train_only(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", 0)
    texts = write_documents(tmp_path / "ours")
    sites = {
        name: dataclasses.replace(site, data=dataclasses.replace(site.data, heldout_fraction=0.0))
        for name, site in two_sites(base, tmp_path / "ours").items()
    }
    outcome = run(experiment(base), sites, tmp_path / "runs")
    assert all(np.abs(x).max() > 1e-3 for x in outcome.params)
    # The folder of a site is one of a run, also with fewer clients than a round has.
    sites["a"].read_inputs(tmp_path / "runs" / "a")
    built = sites["a"].build()
    assert next(built.cohorts).client_ids.tolist() == [0]
    with pytest.raises(ValueError, match="no held-out documents, expected some"):
        built.evaluate(built.init(jax.random.key(0)))
    rows = -(-sum(len(text) + 1 for text in texts[:12]) // 16)
    assert sites["a"].describe_site() == {"clients": 1, "max_steps": -(-rows // 4)}
