"""Settings that methods for islands share: the outer optimizer, fragments, and the wire format."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import optax

from fedpax.aggregators import codecs
from fedpax.algorithms import layer_fragments
from fedpax.algorithms.parts.fragments import FragmentFn
from fedpax.checks import CheckedConfig, Count, Decay, Positive
from fedpax.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class OuterSGD(CheckedConfig):
    """The outer optimizer: SGD with Nesterov momentum.

    Attributes:
        learning_rate: outer learning rate, eta.
        momentum: Nesterov momentum of the outer optimizer, beta; 0 is plain SGD.
    """

    group = "outer"
    learning_rate: Positive = 0.7
    momentum: Decay = 0.9

    def optimizer(self) -> optax.GradientTransformation:
        """Make the optimizer."""
        return optax.sgd(self.learning_rate, momentum=self.momentum, nesterov=True)


@dataclasses.dataclass(frozen=True)
class FragmentSettings(OuterSGD):
    """Fragments of the model that islands synchronize one at a time.

    Attributes:
        fragments: number of fragments, P: one for the embeddings and the final norm, the others for
            the layers. `data.local_steps` is a multiple of it.
        pattern: how layers are dealt to fragments.
    """

    learning_rate: Positive = 0.4
    fragments: Count = 4
    pattern: Literal["strided", "sequential"] = "strided"

    def fragment_fn(self) -> FragmentFn:
        """Assign the parameters to fragments."""
        assign, flag = layer_fragments(self.fragments, self.pattern), f"--{self.group}.fragments"

        def fragment_of(path: str, leaf: Any) -> int | Sequence[int]:
            try:
                return assign(path, leaf)
            except ArgumentError as error:
                text = str(error).replace("fragments is", f"{flag} is")
                error.in_flags = text.replace("Pass at most fragments", f"Set at most {flag}")
                raise

        return fragment_of


def wire_codec(compression: str) -> codecs.Codec | None:
    """Return the codec of this name without settings, such as "e3m0"; None for "float32"."""
    return None if compression == "float32" else getattr(codecs, compression)()
