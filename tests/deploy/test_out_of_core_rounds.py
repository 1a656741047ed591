"""Rounds whose data are read chunk by chunk equal the compiled rounds."""

import jax
import pytest
from batch_rounds import CASES, assert_equal_rounds, by_jit

from fedpax.deploy.local_stages import run_out_of_core


class Counted:
    """Clients that note how many of them are read at once."""

    def __init__(self, clients):
        self.shapes, self.client_ids, self._clients = clients.shapes, clients.client_ids, clients
        self.sizes = []

    def read_clients(self, number, ids):
        self.sizes.append(len(ids))
        return self._clients.read_clients(number, ids)


@pytest.mark.parametrize(
    ("name", "chunk_size"),
    [
        pytest.param("fedavg", 4, marks=pytest.mark.slow),
        ("poisson", 2),
        ("scaffold", 3),
        ("diloco", 1),
        ("three stages", 2),
    ],
)
def test_rounds_equal_the_compiled_rounds(name, chunk_size):
    program, state, open_clients = CASES[name]()
    counted = Counted(open_clients())
    streamed = run_out_of_core(
        program, state, clients=lambda: counted, chunk_size=chunk_size, rounds=2
    )
    assert max(counted.sizes) == chunk_size
    assert_equal_rounds(streamed, by_jit(program, state, open_clients(), 2))
    kinds = {type(x) for x in jax.tree.leaves(streamed[0][0])}
    assert kinds == {jax.ShapeDtypeStruct}  # no state but the last one is in memory


def test_rounds_are_counted_from_one():
    program, state, open_clients = CASES["fedavg"]()
    with pytest.raises(ValueError, match="rounds=0, expected at least 1"):
        run_out_of_core(program, state, clients=open_clients, chunk_size=1, rounds=0)
