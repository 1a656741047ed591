"""What the benchmarks train: local steps of SGD on an MLP and on a CNN."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.models.classifiers import CNNConfig, MLPConfig, cnn, mlp
from fedpax.models.losses import classification_loss
from fedpax.models.nnx_functional import FunctionalModel

LOCAL_STEPS, BATCH, LEARNING_RATE = 5, 20, 0.1


class Workload(NamedTuple):
    """A classifier and the size of what it sees.

    Attributes:
        model: its functions.
        image: shape of an image.
        classes: number of classes.
    """

    model: FunctionalModel
    image: tuple[int, ...]
    classes: int

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """The cross-entropy of a batch: `image` [batch, ...], `label` [batch]."""
        return classification_loss(self.model.apply)(params, batch)[0]

    def local_train(
        self, params: Any, batches: Any, rate: Any = LEARNING_RATE, unroll: int = 1
    ) -> Any:
        """What a client's steps change: one step of SGD on each batch `[steps, batch, ...]`."""

        def step(params: Any, batch: Any) -> tuple[Any, None]:
            gradient = jax.grad(self.loss)(params, batch)
            return jax.tree.map(lambda p, g: p + -rate * g, params, gradient), None

        trained, _ = jax.lax.scan(step, params, batches, unroll=unroll)
        return jax.tree.map(jnp.subtract, trained, params)

    def arguments(self, clients: int, mesh: Mesh) -> tuple[Any, Any, Any]:
        """The types of a round's arguments: parameters, batches and numbers of examples."""

        def like(spec: P, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        params = jax.tree.map(lambda p: like(P(), p.dtype, *p.shape), shapes)
        rows = (clients, LOCAL_STEPS, BATCH)
        batches = {
            "image": like(P("clients"), jnp.float32, *rows, *self.image),
            "label": like(P("clients"), jnp.int32, *rows),
        }
        return params, batches, like(P("clients"), jnp.float32, clients)

    def draw(self, clients: int, mesh: Mesh) -> tuple[Any, Any, Any]:
        """Random arguments of these types."""
        random = np.random.default_rng(0)
        _, batches, num_examples = self.arguments(clients, mesh)
        image, label = batches["image"], batches["label"]
        init = jax.jit(self.model.init, out_shardings=NamedSharding(mesh, P()))
        values = {
            "image": random.random(image.shape, dtype=np.float32),
            "label": random.integers(0, self.classes, label.shape, dtype=np.int32),
        }
        weights = random.uniform(1, 5, num_examples.shape).astype(np.float32)
        put = functools.partial(jax.device_put, device=num_examples.sharding)
        return init(jax.random.key(0)), jax.tree.map(put, values), put(weights)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": lambda: Workload(mlp(MLPConfig(layer_sizes=(784, 200, 10))), (784,), 10),
    "cnn": lambda: Workload(cnn(CNNConfig(num_classes=62)), (28, 28, 1), 62),
}
