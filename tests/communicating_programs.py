"""Programs with known communication, for tests of the readers of compiled text."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

STEPS = 5
SHAPES = {"first": (256, 512), "second": (512, 256)}


def shard_bytes(mesh: Mesh) -> int:
    """Return the bytes of the float32 parameters on one device."""
    return 4 * sum(map(math.prod, SHAPES.values())) // mesh.shape["fsdp"]


def training_round(mesh: Mesh) -> tuple[Callable, tuple]:
    """Return a round: STEPS local steps on every island, sharded over fsdp, then the mean."""

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["first"]) @ params["second"]) ** 2)

    def island(params, batches):
        def step(params, batch):
            gradient = jax.grad(loss)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), None

        params = jax.tree.map(lambda p: jax.lax.pcast(p, "islands", to="varying"), params)
        params, _ = jax.lax.scan(step, params, batches[0])
        return jax.lax.pmean(params, "islands")

    def program(params, batches):
        return jax.shard_map(
            island, in_specs=(P(), P("islands")), out_specs=P(), axis_names={"islands"}
        )(params, batches)

    specs = {"first": P("fsdp", None), "second": P(None, "fsdp")}
    params = {name: _array(mesh, shape, specs[name]) for name, shape in SHAPES.items()}
    rows = (mesh.shape["islands"], STEPS, 1024, 256)
    return program, (params, _array(mesh, rows, P("islands", None, "fsdp")))


def ring(mesh: Mesh) -> tuple[Callable, tuple]:
    """Return a program in which every island sends to the next."""
    islands = mesh.shape["islands"]
    pairs = [(source, (source + 1) % islands) for source in range(islands)]
    spec = P("islands", "fsdp")

    def program(x):
        return jax.shard_map(
            lambda x: jax.lax.ppermute(x, "islands", pairs), in_specs=spec, out_specs=spec
        )(x)

    return program, (_array(mesh, (64, 512), spec),)


def compile_text(mesh: Mesh, program: Callable, *args) -> str:
    """Return the compiled text of a program on a mesh."""
    with jax.set_mesh(mesh):
        return jax.jit(program).lower(*args).compile().as_text()


def _array(mesh: Mesh, shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
