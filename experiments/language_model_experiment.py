"""Language models in experiments: their text, and the weights they begin from."""

import dataclasses
import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedpax.algorithm import LossFn, Metrics, Params
from fedpax.checks import CheckedConfig, Count, Decay
from fedpax.data import (
    BYTE_TOKENIZER,
    Conversation,
    Source,
    Tokenizer,
    load,
    load_chat_template,
    load_tokenizer,
)
from fedpax.data.load import load_with
from fedpax.data.rounds.documents import Field
from fedpax.data.rounds.heldout_tokens import HeldoutRows
from fedpax.errors import ArgumentError, FedpaxError
from fedpax.experiments.parts.client_evaluation import HeldoutSets, parse_heldout_sets
from fedpax.experiments.parts.weights import (
    NO_ADAPTERS,
    SENTENCEPIECE,
    TOKENIZER,
    Trainable,
    check_architecture,
    describe_flops,
    huggingface_obstacle,
    stored_weights,
    write_huggingface,
)
from fedpax.models import lora
from fedpax.models.huggingface import load_config, load_params
from fedpax.models.huggingface.config import EXECUTION_FIELDS
from fedpax.models.lora import LoRAConfig
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.axes import shardings
from fedpax.run_files.configuration import read_configuration
from fedpax.run_files.paths import latest_round, resolve_folder
from fedpax.settings.optimizer_settings import OptimizerConfig
from fedpax.text.chat_template import TEMPLATE_FILE, find_chat_template
from fedpax.text.tokenizer_json import VOCAB_SIZE
from fedpax.training.compiled_round import with_shardings
from fedpax.training.experiment import Experiment
from fedpax.user_files.file_remedies import with_flags
from fedpax.user_files.folders import is_files
from fedpax.user_files.formats import LoadOptions, parse_types
from fedpax.user_paths import expand_home


@dataclasses.dataclass(frozen=True)
class TextDataConfig(CheckedConfig):
    """The text to train and to evaluate on.

    Attributes:
        dataset: a name for `fedpax.data.load`, with the splits `train` and `heldout_split`, such as
            "c4/en:3.1.0", or files, such as "corpus/{split}-*.jsonl.zst".
        heldout_split: the split to evaluate on.
        heldout_fraction: the share of the texts of files that `heldout_split` has and "train" has
            not, chosen by a hash of the text. Default 0: `{split}` in the path names the files.
        field: the field of an example that contains its text.
        prompt_field: the field with a prompt; the loss is on its answer alone. Default None: text
            is in `field`.
        answer_field: the field with the answer to `prompt_field`.
        messages_field: the field with a list of chat messages; the loss is on the assistant's
            messages alone.
        chat_template: a Jinja file that writes messages as text, or a model's folder. Default None:
            the template beside the tokenizer. Without one, an answer follows its prompt directly.
        tokenizer: "bytes", or the path of a `tokenizer.json` or of a SentencePiece model.
        end_of_document: the token of `tokenizer` that separates documents, such as "<|im_end|>".
            Default None: the files beside the tokenizer name it, see `fedpax.data.load_tokenizer`.
        seq_len: tokens in a row.
        heldout_batch_size: rows that a participant evaluates at once.
        heldout_tokens: number of tokens of each set to evaluate on; None: the whole split.
        heldout_sets: further texts to evaluate on, as "NAME=DATASET", "NAME=DATASET@SPLIT" or
            "NAME=DATASET#FIELD@SPLIT". Their metrics are "heldout/NAME/loss" and
            "heldout/NAME/perplexity". Defaults: `heldout_split` and `field`.
        types: types of Arrow for columns of files, as "COLUMN=TYPE", such as "tokens=uint16" for
            tokens in a .bin without an .idx.
        data_dir: the folder of prepared data sets. Default None: the folder of TensorFlow Datasets.
    """

    group = "data"
    dataset: str = "stdlib_text"
    heldout_split: str = "heldout"
    heldout_fraction: Decay = 0.0
    field: str = "text"
    prompt_field: str | None = None
    answer_field: str | None = None
    messages_field: str | None = None
    chat_template: str | None = None
    tokenizer: str = "bytes"
    end_of_document: str | None = None
    seq_len: Count = 128
    heldout_batch_size: Count = 16
    heldout_tokens: Count | None = 65_536
    heldout_sets: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    data_dir: str | None = None

    def __post_init__(self) -> None:
        parse_heldout_sets(self.heldout_sets)
        parse_types("--data.types", self.types)
        prompt, answer, messages = self.prompt_field, self.answer_field, self.messages_field
        if (prompt is None) != (answer is None) or None not in (prompt, messages):
            raise ArgumentError(
                f"data.prompt_field={prompt}, data.answer_field={answer} and data.messages_field="
                f"{messages}, expected both prompt_field and answer_field, or messages_field alone."
            )
        super().__post_init__()

    def load(self, dataset: str, split: str, field: str | None = None) -> Source:
        """Open a split of a data set by name, or of files."""
        types = parse_types("--data.types", self.types)
        texts = {f"{dataset}#": field} if field else self._text_columns()
        if not is_files(dataset):
            # Types are for files, which can be in a mixture or among the held-out sets.
            alone = not (getattr(self, "mixture", ()) or self.heldout_sets)
            if types and alone:
                return load(dataset, split, types=types)  # raises
            return load(dataset, split, data_dir=self.data_dir)
        by = next(iter(texts.values())) if self.heldout_fraction else "example"
        options = LoadOptions(
            split, types=types, heldout_fraction=self.heldout_fraction, heldout_by=by, texts=texts
        )
        try:
            return load_with(dataset, options)
        except FedpaxError as error:
            error.in_flags = with_flags(str(error))
            raise

    def _text_columns(self) -> dict[str, str]:
        names = ("prompt_field", "answer_field", "messages_field")
        columns = {f"--data.{name}=": getattr(self, name) for name in names}
        return {k: c for k, c in columns.items() if c is not None} or {"--data.field=": self.field}

    @property
    def has_mask(self) -> bool:
        """Whether the loss is on answers alone."""
        return self.prompt_field is not None or self.messages_field is not None

    def read_field(self) -> Field:
        """Return the field with the text, or the fields of a conversation with its template."""
        if self.prompt_field is None and self.messages_field is None:
            return self.field
        template = (
            load_chat_template(self.chat_template)
            if self.chat_template is not None
            else None
            if self.tokenizer == BYTE_TOKENIZER.name
            else find_chat_template(self.tokenizer)
        )
        return Conversation(self.prompt_field, self.answer_field, self.messages_field, template)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelExperiment(Experiment):
    """An experiment that trains a transformer on text, or adapters of one.

    Attributes:
        model: the transformer. With `model.weights`, training begins from a Hugging Face folder.
        data: the text.
        lora: the adapters of the transformer's weights. Default: rank 0, train all parameters.
        own_fields: paths of the fields that may differ between sites and between islands.
    """

    model: TransformerConfig
    data: TextDataConfig
    lora: LoRAConfig = NO_ADAPTERS
    own_fields: ClassVar[tuple[str, ...]] = ("data.data_dir", "model.weights")

    def with_weights(self, folder: str | Path) -> Self:
        """Begin from the weights in a Hugging Face folder.

        Its config.json sets the architecture and the dtype of the layers, and its
        tokenizer.json (or tokenizer.model) is `data.tokenizer`. A model of bytes, with 256 tokens,
        needs none.
        """
        folder = expand_home(folder).absolute()
        config, tokenizer = load_config(folder), folder / TOKENIZER
        if not tokenizer.is_file() and (folder / SENTENCEPIECE).is_file():
            tokenizer = folder / SENTENCEPIECE
        needed = tokenizer.is_file() or config.vocab_size != VOCAB_SIZE
        return self._with_architecture(
            config, folder, str(tokenizer) if needed else self.data.tokenizer
        )

    def _with_architecture(self, config: TransformerConfig, folder: Path, tokenizer: str) -> Self:
        """Change what a model is, and keep how it is computed."""
        kept = {name: getattr(self.model, name) for name in EXECUTION_FIELDS - {"dtype"}}
        return dataclasses.replace(
            self,
            model=dataclasses.replace(config, **kept | {"weights": str(folder)}),
            data=dataclasses.replace(self.data, tokenizer=tokenizer),
        )

    def resolve(
        self, default: Experiment, given: Collection[str], job_log_dir: str | Path | None
    ) -> Self:
        """Take the architecture from the folder that `--model.weights` names."""
        # A run that resumes takes it from its own folder, and does not read the other one.
        assert isinstance(default, type(self))
        if self.model.weights is None or self.model.weights == default.model.weights:
            return self
        folder = expand_home(self.model.weights).absolute()
        saved = _saved_run(job_log_dir, self)
        if isinstance(saved, type(self)) and saved.model.weights == str(folder):
            begun = self._with_architecture(saved.model, folder, saved.data.tokenizer)
        else:
            begun = self.with_weights(folder)
        own = {k: x for k, x in vars(self.model).items() if f"model.{k}" in given}
        model = dataclasses.replace(begun.model, **own | {"weights": str(folder)})
        check_architecture(model, begun.model)
        data = self.data if "data.tokenizer" in given else begun.data
        return dataclasses.replace(begun, model=model, data=data)

    def notes(self, optimizer: OptimizerConfig, num_steps: int) -> list[str]:
        """Describe a warmup without an end, and a router that the loss does not train."""
        config, lines = self.model, optimizer.describe_warmup(num_steps)
        if config.num_experts > 1 and config.num_experts_per_token == 1 and not self.lora.rank:
            lines.append(
                "--model.num_experts_per_token=1: the weight of one expert is always 1, so the "
                "cross-entropy does not train the router, only --loss.load_balance_weight does. "
                "With 2 or more experts, the cross-entropy trains it too"
            )
        return lines

    def trainable(self, mesh: Mesh) -> Trainable:
        """Return the parameters that the run trains, and what it reads for them."""
        model, config = transformer(self.model), self.model
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
        sharded = shardings(model.logical_axes, shapes, mesh)
        flops = config.flops_per_token(self.data.seq_len)
        convention = describe_flops(config, self.data.seq_len, self.lora)
        whole = stored_weights(config, with_shardings(shapes, sharded))
        if not self.lora.rank:
            initial = None if config.weights is None else whole
            return Trainable(model.init, model.logical_axes, sharded, flops, convention, initial)

        def init(key: jax.Array) -> Params:
            return lora.init(key, shapes, self.lora)

        # Frozen weights need no more bits than they are computed with.
        frozen = stored_weights(
            config, jax.tree.map(lambda x: x.update(dtype=jnp.dtype(config.dtype)), whole.shapes)
        )
        axes = lora.logical_axes(model.logical_axes, self.lora)
        adapters = jax.eval_shape(lambda: init(jax.random.key(0)))
        num_adapters = sum(leaf.size for leaf in jax.tree.leaves(adapters))
        merge = jax.jit(functools.partial(lora.merge, config=self.lora), donate_argnums=0)
        return Trainable(
            init,
            axes,
            shardings(axes, adapters, mesh),
            # 6 N and attention, without the gradients of the N frozen parameters.
            flops - config.flops_per_token(0) / 3 + 6 * num_adapters,
            convention,
            frozen=frozen._replace(load=functools.cache(frozen.load)),
            whole_model=lambda params: merge(whole.load(), params),
            lora=self.lora,
        )

    def write_model(self, folder: Path, params: Params, exp: str) -> None:
        """Write the model as a Hugging Face folder, or with Orbax if no family fits."""
        config = self.model
        if self.lora.rank:
            assert config.weights is not None
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                whole = load_params(config.weights, config, dtype=jnp.float32)
                params = lora.merge(whole, params, self.lora)
        if huggingface_obstacle(config) is None:
            self.write_huggingface(folder, params)
        else:
            super().write_model(folder, params, exp)

    def write_huggingface(self, folder: Path, params: Params) -> None:
        """Write a whole model with its tokenizer as a Hugging Face folder."""
        data = self.data
        write_huggingface(
            folder,
            self.model,
            params,
            tokenizer=data.tokenizer,
            end_of_document=data.end_of_document,
        )
        field = data.read_field()
        if isinstance(field, Conversation) and field.template is not None:
            (folder / TEMPLATE_FILE).write_text(field.template.text, encoding="utf-8")

    def read_tokenizer(self) -> Tokenizer:
        """Load the tokenizer, and check that the model has its tokens."""
        data, config = self.data, self.model
        tokenizer = load_tokenizer(data.tokenizer, end_of_document=data.end_of_document)
        if tokenizer.vocab_size > config.vocab_size:
            remedy = (
                f"Set --model.vocab_size to at least {tokenizer.vocab_size}."
                if config.weights is None
                else "Set --data.tokenizer to the tokenizer of the weights."
            )
            raise ArgumentError(
                f"data.tokenizer={data.tokenizer!r} has {tokenizer.vocab_size:,} tokens, but "
                f"model.vocab_size={config.vocab_size:,}. {remedy}"
            )
        if config.weights is not None and tokenizer.vocab_size < config.vocab_size / 2:
            raise ArgumentError(
                f"data.tokenizer={data.tokenizer!r} has {tokenizer.vocab_size:,} tokens, but "
                f"the weights in model.weights={config.weights!r} are for {config.vocab_size:,}. "
                "Set --data.tokenizer to the tokenizer of the weights."
            )
        return tokenizer

    def read_training(self) -> Source:
        """Open the training split of `data.dataset`."""
        return self.data.load(self.data.dataset, "train")

    def read_heldout(self, tokenizer: Tokenizer) -> HeldoutSets:
        """Open the splits to evaluate on, which the first evaluation tokenizes."""
        data = self.data

        def read(dataset: str, split: str | None, field: str | None) -> HeldoutRows:
            return HeldoutRows(
                data.load(dataset, split or data.heldout_split, field),
                seq_len=data.seq_len,
                max_tokens=data.heldout_tokens,
                field=field or data.read_field(),
                tokenizer=tokenizer,
                divide=True,
            )

        others = {
            heldout.name: read(heldout.dataset, heldout.split, heldout.field)
            for heldout in parse_heldout_sets(data.heldout_sets)
        }
        return HeldoutSets(read(data.dataset, None, None), others)


def _saved_run(job_log_dir: str | Path | None, experiment: Experiment) -> Any:
    """Return the experiment of a run that will resume, or None."""
    if job_log_dir is None:
        return None
    saved_in = resolve_folder(experiment.training.checkpoint_dir or job_log_dir)
    if latest_round(saved_in) is None:
        return None
    saved = read_configuration(saved_in, experiment)
    return saved and saved[1]


def without_token_count(loss_fn: LossFn) -> LossFn:
    """Drop the metric "tokens" of a loss: packed rows have equal numbers."""

    def loss(params: Params, batch: Any) -> tuple[jax.Array, Metrics]:
        value, aux = loss_fn(params, batch)
        return value, {name: x for name, x in (aux or {}).items() if name != "tokens"}

    return loss
