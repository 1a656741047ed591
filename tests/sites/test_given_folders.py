"""The paths of a machine and the secrets in the folder of a site, and in an export."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedpax.checkpoints import load_params
from fedpax.checkpoints.exports import write_orbax
from fedpax.islands.island.join import Member, write_member
from sites.federation import run, write_hospitals
from sites.test_equals_training import SIZES, experiment


def test_one_file_of_a_folder_has_paths(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv") for s in SIZES}
    run(experiment(), sites, tmp_path)
    for name in sites:
        assert (tmp_path / name / "site.json").stat().st_mode & 0o777 == 0o600
        with_paths = {p.name for p in files_with(tmp_path / name, str(tmp_path))}
        assert with_paths == {"config.json"}
    params = load_params(tmp_path / "a")
    write_orbax(tmp_path / "model", params)
    assert not files_with(tmp_path / "model", str(tmp_path))
    assert (tmp_path / "model" / "params" / "commit_success.txt").exists()
    restored = ocp.StandardCheckpointer().restore(tmp_path / "model" / "params")
    np.testing.assert_equal(jax.device_get(restored), jax.device_get(params))


def files_with(folder: Path, text: str) -> list[Path]:
    """Return the files below a folder that have a text."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert found
    return [path for path in found if text.encode() in path.read_bytes()]


def test_the_secret_of_an_island_is_for_its_user_alone(tmp_path: Path) -> None:
    write_member(tmp_path, Member("secret"))
    assert (tmp_path / "island.json").stat().st_mode & 0o777 == 0o600
