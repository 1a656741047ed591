"""Workloads of the benchmarks: local SGD steps of an MLP and of a CNN."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from fedpax.algorithm import Params
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Row, integers, option
from fedpax.models.classifiers import CNNConfig, MLPConfig, cnn, mlp
from fedpax.models.losses import classification_loss
from fedpax.models.nnx_functional import FunctionalModel

LOCAL_STEPS, BATCH_SIZE, LEARNING_RATE = 5, 20, 0.1


class Workload(NamedTuple):
    """A classifier and the shape of its data."""

    model: FunctionalModel
    image_shape: tuple[int, ...]
    num_classes: int

    def loss(self, params: Params, batch: chex.ArrayTree) -> Float[Array, ""]:
        """Compute the cross-entropy of a batch: `image` `[batch, ...]`, `label` `[batch]`."""
        return classification_loss(self.model.apply)(params, batch)[0]

    def local_train(
        self,
        params: Params,
        batches: chex.ArrayTree,
        rate: float | Float[Array, ""] = LEARNING_RATE,
        unroll: int = 1,
    ) -> Params:
        """Run one SGD step on each batch and return the update of the parameters."""

        def step(params: Params, batch: chex.ArrayTree) -> tuple[Params, None]:
            gradient = jax.grad(self.loss)(params, batch)
            return jax.tree.map(lambda p, g: p + -rate * g, params, gradient), None

        trained, _ = jax.lax.scan(step, params, batches, unroll=unroll)
        return jax.tree.map(jnp.subtract, trained, params)

    def argument_types(
        self, clients: int, mesh: Mesh
    ) -> tuple[Params, dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
        """Return the types of a round's arguments: parameters, batches and numbers of examples."""

        def like(spec: P, dtype: jax.typing.DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        params = jax.tree.map(lambda p: like(P(), p.dtype, *p.shape), shapes)
        shape = (clients, LOCAL_STEPS, BATCH_SIZE)
        batches = {
            "image": like(P("clients"), jnp.float32, *shape, *self.image_shape),
            "label": like(P("clients"), jnp.int32, *shape),
        }
        return params, batches, like(P("clients"), jnp.float32, clients)

    def random_arguments(
        self, clients: int, mesh: Mesh
    ) -> tuple[Params, dict[str, jax.Array], jax.Array]:
        """Draw random arguments of the types of `argument_types`."""
        random = np.random.default_rng(0)
        _, batches, num_examples = self.argument_types(clients, mesh)
        image, label = batches["image"], batches["label"]
        init = jax.jit(self.model.init, out_shardings=NamedSharding(mesh, P()))
        values = {
            "image": random.random(image.shape, dtype=np.float32),
            "label": random.integers(0, self.num_classes, label.shape, dtype=np.int32),
        }
        counts = random.uniform(1, 5, num_examples.shape).astype(np.float32)
        put = functools.partial(jax.device_put, device=num_examples.sharding)
        return init(jax.random.key(0)), jax.tree.map(put, values), put(counts)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": lambda: Workload(mlp(MLPConfig(layer_sizes=(784, 200, 10))), (784,), 10),
    "cnn": lambda: Workload(cnn(CNNConfig(num_classes=62)), (28, 28, 1), 62),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The options of a benchmark of rounds of several sizes."""

    model: str = option("mlp", "the clients' model", choices=WORKLOADS)
    clients: list[int] = option(
        "64,1024", "numbers of clients in the round, separated by commas", integers
    )
    devices: list[int] = option(
        "1,2", "numbers of devices, separated by commas; simulated on a CPU", integers
    )

    def measure_each(self, measure: Callable[..., list[Row]]) -> Iterator[Row]:
        """Measure each number of devices, in a process of its own, with each number of clients."""
        for devices, clients in itertools.product(self.devices, self.clients):
            yield from timing.on_devices(devices, measure, self, devices, clients)
