"""A recurrent language model."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from fedpax.errors import ArgumentError
from fedpax.models.nnx_functional import FunctionalModel, count_params, functional_model


@dataclass(frozen=True)
class LSTMConfig:
    """Sizes of a recurrent language model.

    The defaults are the sizes of the model for next-word prediction on Stack Overflow.

    `vocab_size` counts padding and other special tokens too. `has_projections`: a dense layer
    projects each LSTM layer's output to `embed_dim` features.

    Raises:
        ValueError: a size is below 1.

    Reference:
        Reddi et al., arXiv:2003.00295, appendix C.
    """

    vocab_size: int = 10_004
    embed_dim: int = 96
    hidden_dim: int = 670
    num_layers: int = 1
    has_projections: bool = True

    def __post_init__(self) -> None:
        """Check the sizes."""
        if min(self.vocab_size, self.embed_dim, self.hidden_dim, self.num_layers) < 1:
            raise ArgumentError(f"{self}: expected positive sizes.")

    def num_params(self) -> int:
        """Count the parameters."""
        return count_params(lstm(self))

    @property
    def layer_inputs(self) -> list[int]:
        """Features that each LSTM layer reads, and then those that the logits read."""
        outputs = self.embed_dim if self.has_projections else self.hidden_dim
        return [self.embed_dim, *[outputs] * self.num_layers]


class LSTMLayer(nnx.Module):
    """An LSTM layer: `c <- f c + i g; h <- o tanh(c)`, with gates of the input and of h."""

    def __init__(self, inputs: int, units: int, *, rngs: nnx.Rngs):
        self.units = units
        kernel = jax.nn.initializers.he_normal()(rngs.params(), (inputs, 4 * units))
        recurrent = jax.nn.initializers.orthogonal()(rngs.params(), (units, 4 * units))
        self.kernel, self.recurrent_kernel = nnx.Param(kernel), nnx.Param(recurrent)
        # Gates i, f, g, o. A forget gate that starts open lets gradients reach far back.
        self.bias = nnx.Param(jnp.zeros((4, units)).at[1].set(1.0).reshape(-1))

    def __call__(self, x: Float[Array, "batch seq inputs"]) -> Float[Array, "batch seq units"]:
        """Map inputs to the hidden states h, from zero states on."""
        recurrent = self.recurrent_kernel[...]
        # One matmul for all steps: inside the loop only the matmul of the hidden state remains.
        from_inputs = jnp.swapaxes(x @ self.kernel[...] + self.bias[...], 0, 1)

        def step(
            state: tuple[jax.Array, jax.Array], gates: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = state
            i, f, g, o = jnp.split(gates + h @ recurrent, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        # Derived from x, so that the state varies over a mesh as x does.
        zeros = jnp.zeros_like(from_inputs[0, :, : self.units])
        return jnp.swapaxes(jax.lax.scan(step, (zeros, zeros), from_inputs)[1], 0, 1)


class LSTM(nnx.Module):
    """Embedding, LSTM layers, each with a projection if it has one, and a dense layer of logits."""

    def __init__(self, config: LSTMConfig, *, rngs: nnx.Rngs):
        embed, hidden = config.embed_dim, config.hidden_dim
        glorot = jax.nn.initializers.glorot_normal()
        shape = config.vocab_size, embed
        self.embedding = nnx.Param(
            jax.random.uniform(rngs.params(), shape, jnp.float32, -0.05, 0.05)
        )
        *inputs, last = config.layer_inputs
        self.layers = nnx.Dict(
            {f"lstm_{k}": LSTMLayer(size, hidden, rngs=rngs) for k, size in enumerate(inputs)}
        )
        self.projections = nnx.Dict(
            {
                f"dense_{k}": nnx.Linear(hidden, embed, kernel_init=glorot, rngs=rngs)
                for k in range(config.num_layers if config.has_projections else 0)
            }
        )
        self.logits = nnx.Linear(last, config.vocab_size, kernel_init=glorot, rngs=rngs)

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab_size"]:
        """Map tokens to the logits of each next token."""
        x = self.embedding[...][tokens]
        projections = list(self.projections.values())
        for k, layer in enumerate(self.layers.values()):
            x = projections[k](layer(x)) if projections else layer(x)
        return self.logits(x)


def lstm(config: LSTMConfig) -> FunctionalModel:
    """Make a recurrent language model: `apply(params, tokens)` -> logits `[batch, seq, vocab]`."""
    # Keras's defaults as the authors set them: uniform embeddings, He's normal kernels, orthogonal
    # recurrent kernels, Glorot's normal projections, forget biases of 1.
    return functional_model(LSTM, config)
