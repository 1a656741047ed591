"""A training step of one island, compared with the same step written in plain JAX.

    python -m fedpax.experiments.benchmarks.training_step --model=base_1m --mesh=fsdp=2
    python -m fedpax.experiments.benchmarks.training_step \
        --model=base_100m --batch_size=2 --seq_len=256

The hand-written step is `jax.jit` of `jax.value_and_grad` and an optax update, with the same model
and loss. The command exits with status 1 if the collectives differ. `--matmul=8192` also times a
chain of square bfloat16 matmuls: the ceiling of the chip, of which the last column is the part that
the model's FLOPs take, without recomputation and the masked half of attention.

`--topology=v5e:4x4` compiles for a TPU pod without the hardware and runs nothing; it needs the
extra `tpu`.
"""

import dataclasses
import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from fedpax.algorithm import LossFn
from fedpax.algorithms import data_parallel
from fedpax.data import token_round_shapes
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Row, Timed, command, option
from fedpax.hlo.collectives import collectives
from fedpax.models import presets
from fedpax.models.losses import transformer_loss
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.axes import partition_spec, shardings
from fedpax.parallel.mesh import MeshConfig
from fedpax.planning import find_topology
from fedpax.training.compiled_round import state_shardings, with_shardings

MATMULS = 8  # of a chain


class Step(NamedTuple):
    """A compiled round `(state, batches) -> (state, metrics)`, and the types of its arguments."""

    compiled: jax.stages.Compiled
    types: tuple[Any, Any]


class Structure(NamedTuple):
    """Collectives and memory of a compiled program."""

    collectives: Counter[tuple[str, tuple[str, ...], tuple[str, ...], int | None]]
    argument_bytes: int
    temporary_bytes: int


def hand_written_round(
    loss_fn: LossFn, optimizer: optax.GradientTransformation
) -> Callable[[Any, Any], Any]:
    """Make a round of training steps in plain JAX."""

    def step(state: Any, batch: Any) -> Any:
        params, optimizer_state = state
        (loss, aux), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        params = optax.apply_updates(params, updates)
        return (params, optimizer_state), {**(aux or {}), "loss": loss}

    def hand_round(state: Any, batches: Any) -> Any:
        state, metrics = jax.lax.scan(step, state, batches)
        return state, jax.tree.map(jnp.mean, metrics)

    return hand_round


def compile_both(
    config: TransformerConfig, mesh: Mesh, *, batch_size: int, seq_len: int, steps: int = 1
) -> dict[str, Step]:
    """Compile steps of one island, and the same steps written in plain JAX."""
    model, loss_fn = transformer(config), transformer_loss(config)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    island = data_parallel(loss_fn, islands=1, optimizer=optimizer)
    rows = partition_spec(("batch", "sequence"), mesh, shape=(batch_size, seq_len))
    shapes = token_round_shapes(
        islands=1, local_steps=steps, batch_size=batch_size, seq_len=seq_len
    )

    def batches(axes: int) -> Any:
        sharding = NamedSharding(mesh, P(*[None] * axes, *rows))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[2 - axes :], x.dtype, sharding=sharding), shapes
        )

    def compiled(fn: Callable[..., Any], state: Any, sharding: Any, batches: Any) -> Step:
        results = sharding, NamedSharding(mesh, P())
        step = jax.jit(fn, donate_argnums=0, out_shardings=results)
        return Step(step.lower(state, batches).compile(), (state, batches))

    # The mesh's devices may not be present: nothing may run on them.
    key = jax.eval_shape(lambda: jax.random.key(0))
    with use_abstract_mesh(mesh.abstract_mesh):
        params = jax.eval_shape(model.init, key)
        state = jax.eval_shape(island.init, params)
        of_params = shardings(model.logical_axes, params, mesh)
        sharding: Any = state_shardings(
            state, params, of_params, mesh, placement="islands", num_participants=1
        )
        state, hand = with_shardings(state, sharding), hand_written_round(loss_fn, optimizer)
        return {
            "island": compiled(island.round, state, sharding, batches(2)),
            "hand": compiled(hand, tuple(state), tuple(sharding), batches(1).batches),
        }


def structure(step: Step, mesh: Mesh) -> Structure:
    """Read the collectives and the memory of a compiled program."""
    exchanges = collectives(step.compiled.as_text() or "", mesh)
    memory: Any = step.compiled.memory_analysis()
    return Structure(
        Counter((c.kind, c.axes, c.shapes, c.executions) for c in exchanges),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def values_of(types: Any) -> Any:
    """Make arrays of the types: small positive numbers and tokens that differ from neighbors."""

    def value(x: jax.ShapeDtypeStruct) -> jax.Array:
        # Not random: XLA needs minutes to compile sharded random bits for a CPU.
        i = jnp.zeros(x.shape, jnp.int32)
        for axis, stride in zip(range(x.ndim)[-2:][::-1], (1, 31), strict=False):
            i += stride * jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return (0.02 * (1.01 + jnp.sin(i))).astype(x.dtype)
        return (1 + i % 53).astype(x.dtype)

    sharding = jax.tree.map(lambda x: x.sharding, types)
    return jax.jit(lambda: jax.tree.map(value, types), out_shardings=sharding)()


def matmuls(rows: int) -> Callable[[], Any]:
    """Make a call of a chain of square bfloat16 matmuls of random numbers."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (rows, rows), jnp.bfloat16) for key in keys)

    def chain(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, MATMULS, lambda _, a: (a @ b) * rows**-0.5, a)

    return functools.partial(jax.jit(chain), a, b)


class TrainingStep(Timed):
    model: str = option("base_1m", "name of a function of fedpax.models.presets")
    mesh: dict[str, int] = option(
        "data=1",
        "sizes of the mesh's axes, such as fsdp=4,tensor=2",
        lambda text: {k: int(size) for k, size in (axis.split("=") for axis in text.split(","))},
    )
    topology: str | None = option(None, "TPU pod to compile for, such as v5e:4x4")
    batch_size: int = option(8, "rows in a step")
    seq_len: int = option(128, "tokens in a row")
    steps: int = option(1, "steps in a call")
    remat: str | None = option(
        None, "what a layer stores for the backward pass; default: the model's"
    )
    matmul: int = option(0, "rows of square matmuls that are timed beside the steps; 0: none")
    columns = (
        "model {model} | device {device} | devices {devices} | collectives {collectives} "
        "| argument bytes of a device {bytes[0]:,} | by hand {hand_bytes[0]:,} "
        "| temporaries {bytes[1]:,} | of those by hand {hand_bytes[1]:,} "
        "| s per call {island_seconds:.4f} | s by hand {hand_seconds:.4f} | ratio {ratio:.3f} "
        "| model TFLOP/s {teraflops:.1f} | of matmuls' {utilization:.1%}"
    )
    bar = "the same collectives"

    def measure(self) -> list[Row]:
        devices, subgroups = math.prod(self.mesh.values()), len(self.mesh) > 1
        return [timing.on_devices(devices, self.compare_steps, subgroups=subgroups)]

    def compare_steps(self) -> Row:
        devices = find_topology(self.topology).devices if self.topology else jax.devices()
        mesh = MeshConfig(**self.mesh).make(devices)
        sizes = {"batch_size": self.batch_size, "seq_len": self.seq_len, "steps": self.steps}
        config = getattr(presets, self.model)()
        if self.remat is not None:
            config = dataclasses.replace(config, remat=self.remat)
        both = compile_both(config, mesh, **sizes)
        island, hand = (structure(both[name], mesh) for name in ("island", "hand"))
        seconds: timing.Seconds = {name: [] for name in both}
        if self.repetitions and not self.topology:
            with jax.set_mesh(mesh):
                calls = {
                    k: timing.repeated(s.compiled, *values_of(s.types)) for k, s in both.items()
                }
                if self.matmul:
                    calls["matmuls"] = matmuls(self.matmul)
                seconds = self.time(calls)
        tokens, chain = self.steps * self.batch_size * self.seq_len, seconds.get("matmuls")
        flops = tokens * config.flops_per_token(self.seq_len, causal=True)
        rate = flops / statistics.median(seconds["island"]) if seconds["island"] else None
        ceiling = MATMULS * 2 * self.matmul**3 / statistics.median(chain) if chain else None
        return Row(
            model=self.model,
            device=devices[0].device_kind,
            devices=len(devices),
            collectives=island.collectives.total(),
            met=island.collectives == hand.collectives,
            bytes=island[1:],
            hand_bytes=hand[1:],
            island_seconds=seconds["island"],
            hand_seconds=seconds["hand"],
            ratio=timing.paired_ratio(seconds["island"], seconds["hand"]),
            teraflops=rate and rate / 1e12,
            utilization=rate and ceiling and rate / ceiling,
        )


main = command(TrainingStep)
