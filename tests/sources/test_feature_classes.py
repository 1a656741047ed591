import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fedpax.data import load

EVIL = "payload_of_features.Evil"
INNER = {"type": EVIL, "content": {}}
FEATURES: list[dict[str, Any]] = [
    {"pythonClassName": EVIL, "featuresDict": {"features": {}}},
    INNER,
    {
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
        "featuresDict": {"features": {"x": {"pythonClassName": EVIL, "tensor": {}}}},
    },
    {
        "pythonClassName": "tensorflow_datasets.core.features.sequence_feature.Sequence",
        "jsonFeature": {"json": json.dumps({"feature": INNER, "length": 1})},
    },
]


@pytest.mark.parametrize("features", FEATURES, ids=["class", "type", "nested", "text"])
@pytest.mark.parametrize("where", ["evil/1.0.0", "evil/small/1.0.0"])
def test_a_prepared_data_set_runs_no_code_that_its_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: dict[str, Any], where: str
) -> None:
    (tmp_path / "payload_of_features.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "data" / where
    folder.mkdir(parents=True)
    info = {"name": "evil", "version": "1.0.0", "fileFormat": "array_record"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    (folder / "features.json").write_text(json.dumps(features))
    with pytest.raises(ValueError, match=f"names the class {EVIL}, expected classes of tensorflow"):
        load("evil", "train", data_dir=tmp_path / "data")
    assert "payload_of_features" not in sys.modules
