"""Choose how encoded updates are sent among the devices of a mesh axis."""

import math
from typing import NamedTuple

import chex
import jax

from fedpax.aggregators.codecs.blocks import choose_blocks, num_words
from fedpax.aggregators.codecs.codec import Codec


class Exchange(NamedTuple):
    """An exchange of encoded updates among the devices of a mesh axis, which gives their mean.

    Attributes:
        parts: for each leaf, the number of parts that an all-to-all divides its words into, one for
            each device; 1 where all words are all-gathered. None if no words are sent: the decoded
            updates are all-reduced in float32.
        bits: bits that a device receives for one mean, with scales and the padding of blocks.
    """

    parts: tuple[int, ...] | None
    bits: int


def choose_exchange(
    codec: Codec,
    updates: chex.ArrayTree,
    participants: int,
    devices: int,
    *,
    mean_codec: Codec | None = None,
) -> Exchange:
    """Choose the exchange in which a device receives the fewest bits.

    With n participants on d devices and b bits per value, a device receives, per value:

        all-gather of the words:                                n b (d - 1) / d;
        all-to-all of the words, all-gather of float32 means:   (n b / d + 32) (d - 1) / d;
        all-reduce of decoded updates in float32:               64 (d - 1) / d.

    With a participant on each device, the second one has the fewest if n is above 1 + 32 / b. It is
    chosen leaf by leaf. With `mean_codec` of b' bits, b' takes the place of 32.

    Args:
        codec: how one participant's update is encoded.
        updates: one participant's update, or its types.
        participants: n, number of participants.
        devices: d, number of devices along the participants' mesh axis.
        mean_codec: how the mean is encoded. Default None: in float32.

    Returns:
        The exchange. On one device it has 0 bits.

    Example:
        >>> from fedpax.aggregators import codecs
        >>> params = jax.ShapeDtypeStruct((1024, 1024), "float32")
        >>> for n in 2, 8, 16:  # islands of a device each
        ...     exchange = choose_exchange(codecs.e3m0(), params, n, n)
        ...     print(n, exchange.parts, round(exchange.bits / 1024**2, 1))
        2 (1,) 4.0
        8 (1,) 28.2
        16 (16,) 33.8
    """
    if devices == 1:
        return Exchange(None, 0)
    peers, values, words, parts = devices - 1, 0, 0, []
    for leaf in jax.tree.leaves(updates):
        blocks = choose_blocks(codec, tuple(leaf.shape))
        entries = math.prod(leaf.shape)
        columns = 1 if blocks.axis is None else entries // leaf.shape[blocks.axis]
        count, length = blocks.num_blocks * columns, num_words(codec, blocks.size)
        mean_length = blocks.size if mean_codec is None else num_words(mean_codec, blocks.size)
        per_device = participants // devices
        part = -(-count // devices)
        choices = {
            1: peers * per_device * length * count,
            devices: peers * part * (per_device * length + mean_length),
        }
        parts.append(min(choices, key=choices.__getitem__))
        words += choices[parts[-1]]
        values += entries
    reduced = 64 * values * peers // devices
    return Exchange(None, reduced) if reduced <= 32 * words else Exchange(tuple(parts), 32 * words)
