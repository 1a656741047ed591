"""Weights in Hugging Face folders, and the parameters that an experiment trains."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.errors import ArgumentError
from fedpax.files import read_json
from fedpax.models import huggingface, lora
from fedpax.models.huggingface import load_config, load_params
from fedpax.models.huggingface.config import differing_fields, to_entries
from fedpax.models.huggingface.read_model import CONFIG
from fedpax.models.huggingface.tensors import weight_files
from fedpax.models.lora import LoRAConfig
from fedpax.models.transformer import TransformerConfig
from fedpax.parallel.axes import ShardingTree
from fedpax.text.tokenizer import load_tokenizer
from fedpax.text.tokenizer_json import SOURCES, named_end
from fedpax.training.experiment import StoredParams, with_frozen_argument
from fedpax.user_paths import expand_home

TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
# Files that transformers reads beside the tokenizer's.
TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json", "generation_config.json")


def stored_weights(config: TransformerConfig, shapes: Params) -> StoredParams:
    """Describe the parameters in the folder `config.weights`."""

    def read() -> Params:
        folder = _weights_folder(config)
        check_architecture(config, load_config(folder))
        (dtype,) = {leaf.dtype for leaf in jax.tree.leaves(shapes)}
        sharded = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        return load_params(folder, config, shardings=sharded, dtype=dtype)

    source = "" if config.weights is None else f"model.weights={config.weights}"
    return StoredParams(source, shapes, read)


def hash_weights(config: TransformerConfig) -> str:
    """Return the hash of the files of weights in the folder `config.weights`."""
    folder, digest = expand_home(_weights_folder(config)), hashlib.sha256()
    for name in sorted(weight_files(folder)):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256 {digest.hexdigest()[:32]}"


def _weights_folder(config: TransformerConfig) -> str:
    if config.weights is None:
        raise ArgumentError(
            "model.weights is missing: adapters need a trained model, expected a Hugging Face "
            "folder. Give --model.weights=FOLDER; `fedpax export --job_log_dir=DIR --out=FOLDER` "
            "writes the model of a run."
        )
    return config.weights


def check_architecture(config: TransformerConfig, stored: TransformerConfig) -> None:
    """Check that a configuration describes the model that the folder `config.weights` has."""
    if differing := differing_fields(config, stored):
        # Other fields decide a default: the user gave no flag to leave out.
        is_given = [name for name in differing if getattr(config, name) != getattr(stored, name)]
        names = is_given or differing
        differences = ", ".join(
            f"--model.{name}={getattr(config, name)} (in the folder: {getattr(stored, name)})"
            for name in names
        )
        raise ArgumentError(
            f"model.weights={config.weights} has another model: {differences}. Leave out these "
            "flags: the folder's config.json gives the architecture. In Python, use "
            "experiment.with_weights(folder)."
        )


def huggingface_obstacle(config: TransformerConfig) -> str | None:
    """Return why a transformer cannot be written as a Hugging Face folder."""
    try:
        to_entries(without_scale(config), "float32")
    except ValueError as error:
        return str(error)
    return None


def without_scale(config: TransformerConfig) -> TransformerConfig:
    """Describe the same transformer with the scale of its embeddings in the embedding table."""
    # No Hugging Face family of `fedpax.models.huggingface` scales embeddings. A table that is
    # scaled cannot also be the output projection.
    if not config.scale_embeddings:
        return config
    return dataclasses.replace(config, scale_embeddings=False, tied_embeddings=False)


def _scaled(config: TransformerConfig, params: Params) -> Params:
    if not config.scale_embeddings:
        return params
    table = params["embedding"]
    scaled = (table.astype("float32") * config.embed_dim**0.5).astype(table.dtype)
    return {"output": table, **params, "embedding": scaled}


def write_huggingface(
    folder: Path,
    config: TransformerConfig,
    params: Params,
    *,
    tokenizer: str,
    end_of_document: str | None,
) -> None:
    """Write config.json, safetensors and the tokenizer's files."""
    weights = config.weights
    original = weights if weights is not None and Path(weights).is_dir() else None
    huggingface.save(
        folder, without_scale(config), _scaled(config, params), original_folder=original
    )
    if tokenizer == "bytes":
        _add_entry(folder / CONFIG, SOURCES[CONFIG], load_tokenizer(tokenizer).separator)
    file = expand_home(tokenizer)
    if file.is_file():  # not "bytes"
        is_model = not file.read_bytes().lstrip().startswith(b"{")  # of SentencePiece
        shutil.copyfile(file, folder / (SENTENCEPIECE if is_model else TOKENIZER))
        for name in _TOKENIZER_FILES:
            if (file.parent / name).is_file():
                shutil.copyfile(file.parent / name, folder / name)
        named = None if end_of_document is not None else named_end(file)
        if named is None or named[0].name != TOKENIZER_CONFIG:
            # The token that separated documents in the training, also where a rule found it.
            loaded = load_tokenizer(tokenizer, end_of_document=end_of_document)
            if loaded.end_of_document is not None:
                _add_entry(folder / TOKENIZER_CONFIG, "eos_token", loaded.end_of_document)
            _add_entry(folder / CONFIG, SOURCES[CONFIG], loaded.separator)


def _add_entry(path: Path, name: str, value: str | int) -> None:
    """Set an entry of a JSON file, which need not exist."""
    entries = read_json(path) if path.is_file() else {}
    text = json.dumps({**entries, name: value}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


NO_ADAPTERS = LoRAConfig(rank=0)

Evaluation = TypeVar("Evaluation")


class Trainable(NamedTuple):
    """The parameters that a run trains: a whole transformer, or adapters of a frozen one."""

    init: Callable[[jax.Array], Params]  # `key -> params`
    logical_axes: Params
    shardings: ShardingTree
    flops_per_token: float  # floating-point operations per token, forward and backward
    flops_convention: str
    # the initial parameters, where they are read from a folder, as in `Run`
    initial: StoredParams | None = None
    frozen: StoredParams | None = None  # the transformer below adapters, as in `Run`
    # `params -> parameters of the transformer`, as in `Run`
    whole_model: Callable[[Params], Params] | None = None
    lora: LoRAConfig = NO_ADAPTERS

    def algorithm(
        self, make: Callable[[LossFn], FederatedAlgorithm], loss_fn: LossFn
    ) -> FederatedAlgorithm:
        """Make an algorithm that trains these parameters."""
        if self.frozen is None:
            return make(loss_fn)
        return with_frozen_argument(
            lambda base: make(lora.adapter_loss(loss_fn, base, self.lora)), self.frozen.shapes
        )

    def evaluate(
        self, make: Callable[[LossFn], Callable[[Params], Evaluation]], loss_fn: LossFn
    ) -> Callable[[Params], Evaluation]:
        """Make a function that evaluates these parameters."""
        frozen = self.frozen
        if frozen is None:
            return make(loss_fn)

        def adapted(params: Any, batch: Any) -> tuple[jax.Array, Metrics | None]:
            base, adapters = params
            return lora.adapter_loss(loss_fn, base, self.lora)(adapters, batch)

        evaluate = make(adapted)
        return lambda adapters: evaluate((frozen.load(), adapters))


def describe_flops(config: TransformerConfig, seq_len: int, adapters: LoRAConfig) -> str:
    """Describe the floating-point operations of a token that MFU counts."""
    active, these = "active " if config.num_experts else "", "parameters in matmuls and norms"
    if adapters.rank:
        terms = (
            "4 N + 6 A",
            f"N frozen {active}{these}, A parameters of adapters",
        )
    else:
        terms = "6 N", f"N {active}{these}"
    window = config.sliding_window
    if window is not None and window < seq_len:
        keys = f"the T = {window} keys of the sliding window"
    else:
        keys = f"all T = {seq_len} keys"
    return f"{terms[0]} + 12 L H d T for {terms[1]}, and {keys}; no recomputation"
