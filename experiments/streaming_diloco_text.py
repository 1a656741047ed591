"""Streaming DiLoCo on text: islands that synchronize fragment by fragment, in 4 bits."""

import dataclasses
from typing import Literal

import optax
from jax.sharding import Mesh

from fedpax.aggregators import compressed_mean
from fedpax.algorithm import FederatedAlgorithm, LossFn
from fedpax.algorithms import streaming_diloco
from fedpax.checks import CountOrZero, Decay
from fedpax.experiments.diloco_text import FragmentSettings, diloco_text, wire_codec
from fedpax.experiments.pretrain import diloco_c4_1b, diloco_llama_8b
from fedpax.experiments.text_experiment import TextExperiment, text_fields
from fedpax.parallel.compiler_options import memory_options, overlap_options
from fedpax.settings.function_settings import arguments_of, documented_by

MANY_FRAGMENTS = 8
"""From this number of fragments on, less memory costs no time on a CPU; with 2, it costs 3%."""


@dataclasses.dataclass(frozen=True)
@documented_by(streaming_diloco)
class StreamingConfig(FragmentSettings):
    """Streaming DiLoCo: its fragments, its outer optimizer, and what is sent.

    Attributes:
        compression: format of an outer gradient on the wire.
    """

    group = "streaming"
    delay: CountOrZero = 1
    mixing: Decay = 0.5
    compression: Literal["float32", "e3m0"] = "e3m0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingDiLoCoText(TextExperiment):
    """Islands that synchronize each fragment of the model once in `data.local_steps` steps.

    Attributes:
        streaming: the method's settings.
    """

    streaming: StreamingConfig = StreamingConfig()

    def make_algorithm(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation
    ) -> FederatedAlgorithm:
        """Make Streaming DiLoCo."""
        streaming, codec = self.streaming, wire_codec(self.streaming.compression)
        return streaming_diloco(
            loss_fn,
            islands=self.islands,
            inner_optimizer=optimizer,
            outer_optimizer=streaming.optimizer(),
            fragments=streaming.fragment_fn(),
            **arguments_of(streaming_diloco, streaming),
            aggregator=None if codec is None else compressed_mean(codec),
        )

    def compiler_options(self, mesh: Mesh) -> dict[str, str]:
        """Return the options for the overlap of transfers between slices, and for less memory."""
        platform = mesh.devices.flat[0].platform
        is_many = self.streaming.fragments >= MANY_FRAGMENTS
        return overlap_options(mesh) | (memory_options(platform) if is_many else {})


def streaming_diloco_text() -> StreamingDiLoCoText:
    """Streaming DiLoCo: the islands, model and data of diloco_text, in 3 fragments of 4 bits.

    Every 6 steps, one fragment is sent in E3M0 during one local step.
    """
    streaming = StreamingConfig(fragments=3, mixing=0.0, learning_rate=0.9, momentum=0.7)
    return _stream(diloco_text(), streaming)


def streaming_diloco_c4_1b() -> StreamingDiLoCoText:
    """Streaming DiLoCo of the 1B model on C4: diloco_c4_1b in 5 fragments of 4 bits, delay 5.

    A fragment is sent every 20 steps.
    """
    return _stream(diloco_c4_1b(), StreamingConfig(fragments=5, delay=5))


def streaming_diloco_llama_8b() -> StreamingDiLoCoText:
    """Streaming DiLoCo of Llama 3.1 8B: diloco_llama_8b in 5 fragments of 4 bits, delay 5.

    A fragment is sent every 20 steps.
    """
    return _stream(diloco_llama_8b(), StreamingConfig(fragments=5, delay=5))


def _stream(base: TextExperiment, streaming: StreamingConfig) -> StreamingDiLoCoText:
    """Return an experiment with all settings of another one but its method."""
    return StreamingDiLoCoText(**text_fields(base), streaming=streaming)
