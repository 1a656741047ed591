"""Workloads of the benchmarks: local SGD steps of an MLP and of a CNN."""

import abc
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import fedpax
from fedpax import algorithms
from fedpax.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, integers, option
from fedpax.models.classifiers import CNNConfig, MLPConfig, cnn, mlp
from fedpax.models.losses import classification_loss
from fedpax.models.nnx_functional import FunctionalModel, to_functional

LOCAL_STEPS, BATCH_SIZE, LEARNING_RATE = 5, 20, 0.1


class Workload(NamedTuple):
    """A classifier and the shape of its data."""

    model: FunctionalModel
    image_shape: tuple[int, ...]
    num_classes: int

    @property
    def loss_fn(self) -> LossFn:
        """The cross-entropy of a batch: `image` `[batch, ...]`, `label` `[batch]`."""
        return classification_loss(self.model.apply)

    def fedavg(self, clients: int, **settings: Any) -> FederatedAlgorithm:
        """Make FedAvg with plain SGD at the clients."""
        sgd = optax.sgd(LEARNING_RATE)
        return algorithms.fedavg(
            self.loss_fn, cohort_size=clients, client_optimizer=sgd, **settings
        )

    def local_train(
        self,
        params: Params,
        batches: chex.ArrayTree,
        rate: float | Float[Array, ""] = LEARNING_RATE,
        unroll: int = 1,
    ) -> Params:
        """Run one SGD step on each batch and return the update of the parameters."""

        def step(params: Params, batch: chex.ArrayTree) -> tuple[Params, None]:
            gradient = jax.grad(lambda p: self.loss_fn(p, batch)[0])(params)
            return jax.tree.map(lambda p, g: p + -rate * g, params, gradient), None

        trained, _ = jax.lax.scan(step, params, batches, unroll=unroll)
        return jax.tree.map(jnp.subtract, trained, params)

    def argument_types(
        self, clients: int, mesh: Mesh, steps: int = LOCAL_STEPS, batch_size: int = BATCH_SIZE
    ) -> tuple[Params, dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
        """Return the types of a round's arguments: parameters, batches and numbers of examples."""

        def like(spec: P, dtype: jax.typing.DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        params = jax.tree.map(lambda p: like(P(), p.dtype, *p.shape), shapes)
        shape, spec = (clients, steps, batch_size), P("clients")
        batches = {
            "image": like(spec, jnp.float32, *shape, *self.image_shape),
            "label": like(spec, jnp.int32, *shape),
        }
        return params, batches, like(spec, jnp.float32, clients)

    def random_arguments(
        self, clients: int, mesh: Mesh, steps: int = LOCAL_STEPS, batch_size: int = BATCH_SIZE
    ) -> tuple[Params, dict[str, jax.Array], jax.Array]:
        """Draw random arguments of the types of `argument_types`."""
        random = np.random.default_rng(0)
        _, batches, num_examples = self.argument_types(clients, mesh, steps, batch_size)
        init = jax.jit(self.model.init, out_shardings=NamedSharding(mesh, P()))
        image, label = batches["image"].shape, batches["label"].shape
        values = {
            "image": random.random(image, dtype=np.float32),
            "label": random.integers(0, self.num_classes, label, dtype=np.int32),
        }
        counts = random.uniform(1, 5, num_examples.shape).astype(np.float32)
        return init(jax.random.key(0)), *jax.device_put((values, counts), num_examples.sharding)


def changed(base: Any, **fields: Any) -> Any:
    """Return a dataclass with other values of fields; a dict changes fields of a field."""
    nested = {k: changed(getattr(base, k), **v) for k, v in fields.items() if isinstance(v, dict)}
    return dataclasses.replace(base, **fields | nested)


def method(function: str, loss_fn: LossFn, **settings: Any) -> FederatedAlgorithm:
    """Make a method of `fedpax.algorithms`; settings that are not its arguments are left out."""
    make: Callable[..., FederatedAlgorithm] = getattr(algorithms, function)
    accepted = inspect.signature(make).parameters
    return make(loss_fn, **{k: value for k, value in settings.items() if k in accepted})


class FedAvgCNN(nnx.Module):
    """The network that PFLlib calls FedAvgCNN: two 5 x 5 convolutions, each with max-pooling."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.convolution_0 = nnx.Conv(1, 32, (5, 5), padding="VALID", rngs=rngs)
        self.convolution_1 = nnx.Conv(32, 64, (5, 5), padding="VALID", rngs=rngs)
        self.dense_0 = nnx.Linear(1024, 512, rngs=rngs)
        self.dense_1 = nnx.Linear(512, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map images [batch, 28, 28, 1] to logits [batch, 10]."""
        for convolution in (self.convolution_0, self.convolution_1):
            x = nnx.max_pool(nnx.relu(convolution(x)), (2, 2), strides=(2, 2))
        return self.dense_1(nnx.relu(self.dense_0(x.reshape(len(x), -1))))


def mlp_workload(*sizes: int) -> Workload:
    """Make the workload of a multilayer perceptron with layers of these sizes."""
    return Workload(mlp(MLPConfig(layer_sizes=sizes)), sizes[:1], sizes[-1])


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": lambda: mlp_workload(784, 200, 10),
    "cnn": lambda: Workload(cnn(CNNConfig(num_classes=62)), (28, 28, 1), 62),
    "pfllib_cnn": lambda: Workload(to_functional(FedAvgCNN), (28, 28, 1), 10),
}


class Sizes(Benchmark):
    """A benchmark of rounds of several sizes, each in its own process."""

    model: str = option("mlp", "the clients' model", choices=WORKLOADS)
    clients: list[int] = option("64,1024", "numbers of clients in the round", integers)
    devices: list[int] = option("1,2", "numbers of devices; simulated on a CPU", integers)

    def measure(self) -> Iterator[Row]:
        for devices, clients in itertools.product(self.devices, self.clients):
            sizes = {"model": self.model, "devices": devices, "clients": clients}
            for row in timing.on_devices(devices, self.measure_on, devices, clients):
                yield Row(**sizes, **vars(row))

    def measure_on(self, devices: int, clients: int) -> list[Row]:
        """Return the rows of one size, without the options that `measure` adds."""
        chosen = jax.devices()[:devices]
        mesh = fedpax.make_mesh(devices=chosen, clients=devices)
        with jax.set_mesh(mesh):
            rows = self.measure_size(WORKLOADS[self.model](), mesh, clients)
            return [Row(device=chosen[0].device_kind, **vars(row)) for row in rows]

    @abc.abstractmethod
    def measure_size(self, workload: Workload, mesh: Mesh, clients: int) -> Iterable[Row]:
        """Yield the rows of one size. The mesh is set."""
