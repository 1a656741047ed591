"""An experiment for tests of plans: DiLoCo on a stack of square layers, with known FLOPs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax import Cohort
from fedpax.algorithms import diloco
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.experiment import Experiment, Run, Shardings
from fedpax.training.training_config import TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack(Experiment):
    """Layers x -> tanh(x W) in a scan, each W sharded over fsdp."""

    islands: int = 4
    num_layers: int = 3
    embed_dim: int = 64
    local_steps: int = 5
    batch: int = 16
    says_shapes: bool = True
    says_flops: bool = True

    def build(self) -> Run:
        mesh = self.mesh.make()

        def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict]:
            def layer(x, weight):
                return jnp.tanh(x @ weight), None

            return jnp.mean(jax.lax.scan(layer, batch["x"], params["w"])[0] ** 2), {}

        def init(key: jax.Array) -> dict[str, jax.Array]:
            return {"w": jax.random.normal(key, (self.num_layers, self.embed_dim, self.embed_dim))}

        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        rows = (self.islands, self.local_steps, self.batch)
        shapes = Cohort({"x": jax.ShapeDtypeStruct((*rows, self.embed_dim), jnp.float32)})
        return Run(
            algorithm=diloco(
                loss_fn,
                islands=self.islands,
                inner_optimizer=optax.sgd(0.1),
                outer_optimizer=outer,
            ),
            init=init,
            cohorts=None,  # nothing may ask for data
            evaluate=None,
            mesh=mesh,
            shardings=Shardings(
                params={"w": NamedSharding(mesh, P(None, "fsdp"))},
                cohort=NamedSharding(mesh, P("islands", None, "fsdp")),
            ),
            items_per_round=self.islands * self.local_steps * self.batch,
            placement="islands",
            cohort_shapes=shapes if self.says_shapes else None,
            flops_per_item=6.0 * self.num_layers * self.embed_dim**2 if self.says_flops else None,
        )


def stack() -> Stack:
    """Return the experiment on 4 islands of 2 devices."""
    return Stack(
        mesh=MeshConfig(islands=4, fsdp=2),
        training=TrainingConfig(rounds=1, evaluate_every=0, checkpoint_every=0),
    )
