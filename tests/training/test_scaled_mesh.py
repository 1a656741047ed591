"""A mesh that shrinks with the processes of an elastic job."""

import dataclasses

from small_regression import regression

from fedpax.commands.parts.devices import fit_mesh, island_numbers, processes_per_island
from fedpax.experiments.diloco_text import diloco_text
from fedpax.parallel.mesh import MeshConfig


def test_a_mesh_shrinks_with_its_processes() -> None:
    islands = diloco_text()
    assert fit_mesh(islands, 4, 4) == []
    assert fit_mesh(islands, 1, 4) == ["--islands=1"]  # the mesh follows
    assert fit_mesh(islands, 4, 8) == ["--islands=2"]
    stated = dataclasses.replace(islands, mesh=MeshConfig(islands=4))
    assert fit_mesh(stated, 1, 4) == ["--mesh.islands=1", "--islands=1"]
    single = dataclasses.replace(islands, islands=1)
    assert fit_mesh(single, 3, 4) == []
    assert fit_mesh(islands, 7, 8) is None  # half an island
    plain = dataclasses.replace(regression(), mesh=MeshConfig(data=2, fsdp=4))
    assert fit_mesh(plain, 1, 2) == ["--mesh.data=1"]
    sharded = dataclasses.replace(plain, mesh=MeshConfig(fsdp=8))
    assert fit_mesh(sharded, 3, 4) == ["--mesh.fsdp=6"]
    assert fit_mesh(dataclasses.replace(plain, mesh=MeshConfig(fsdp=-1)), 3, 4) == []
    assert fit_mesh(dataclasses.replace(plain, mesh=MeshConfig(tensor=2)), 1, 2) is None
    assert processes_per_island(islands, 8) == 2 and processes_per_island(islands, 2) == 1
    assert processes_per_island(plain, 8) == 1 and island_numbers(plain, [0, 1], 2) is None
    # More islands than the mesh has are kept: each device trains several.
    two_each = dataclasses.replace(islands, mesh=MeshConfig(islands=2))
    assert fit_mesh(two_each, 1, 2) == ["--mesh.islands=1"]
    assert island_numbers(two_each, [1], 2) is None


def test_islands_have_the_numbers_of_their_processes() -> None:
    islands = diloco_text()  # 4 islands
    assert island_numbers(islands, [0, 2, 3], 4) == [0, 2, 3]
    assert island_numbers(islands, [1], 2) == [2, 3]
    assert island_numbers(islands, [2, 3, 6, 7], 8) == [1, 3]
    assert island_numbers(islands, [0, 2], 8) is None  # halves of two islands
    assert island_numbers(islands, [0, 1], 3) is None
