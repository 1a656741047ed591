"""Settings that methods for islands share: the outer optimizer, fragments, and the wire format."""

import dataclasses
from typing import ClassVar, Literal

import optax

from fedpax.aggregators import codecs
from fedpax.algorithms import layer_fragments
from fedpax.algorithms.parts.fragments import FragmentFn
from fedpax.checks import COUNT, DECAY, POSITIVE, check_ranges


@dataclasses.dataclass(frozen=True)
class OuterSGD:
    """The outer optimizer: SGD with Nesterov momentum.

    Attributes:
        learning_rate: outer learning rate, eta.
        momentum: Nesterov momentum of the outer optimizer, beta; 0 is plain SGD.
        group: the experiment's field that holds the settings, for messages.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    group: ClassVar[str] = "outer"

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, self.group, learning_rate=POSITIVE, momentum=DECAY)

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

    learning_rate: float = 0.4
    fragments: int = 4
    pattern: Literal["strided", "sequential"] = "strided"

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        check_ranges(self, self.group, fragments=COUNT)

    def fragment_fn(self) -> FragmentFn:
        """Assign the parameters to fragments."""
        return layer_fragments(self.fragments, self.pattern)


def wire_codec(compression: str) -> codecs.Codec | None:
    """Return the codec of this name without settings, such as "e3m0"; None for "float32"."""
    return None if compression == "float32" else getattr(codecs, compression)()
