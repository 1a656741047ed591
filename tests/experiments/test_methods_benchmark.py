"""The benchmark of federated methods."""

import json

import pytest

from fedpax.experiments.benchmarks import methods


@pytest.mark.slow
def test_the_table_counts_rounds_bytes_and_flops_to_the_target(capsys, tmp_path):
    file = tmp_path / "rows.json"
    arguments = ["--group=methods_synthetic", "--rounds=25", "--rates=0.03", f"--json={file}"]
    arguments += ["--methods=fedavg,scaffold", f"--plot={tmp_path / 'plot.png'}", "--seeds=0,2"]
    assert methods.main([*arguments, "--target=accuracy=0.7"]) == 0
    rows = {row["method"]: row for row in json.loads(file.read_text())["rows"]}
    params = 4 * (60 * 10 + 10)
    for name, copies in (("fedavg", 1), ("scaffold", 2)):
        row = rows[name]
        assert row["learning_rate"] == 0.03
        for rounds, num_bytes, flops, course in zip(
            row["rounds"], row["num_bytes"], row["flops"], row["trajectories"], strict=True
        ):
            values = course["values"]
            assert values[rounds - 1] >= 0.7 > max(values[: rounds - 1])
            # Down and up, with the metrics (and the sum of weights) beside the update.
            assert 0 < num_bytes / rounds / 10 - 2 * copies * params <= 12
            assert flops > 0
        assert row["trajectories"][0]["values"] != row["trajectories"][1]["values"]
    assert rows["scaffold"]["rounds"][0] < rows["fedavg"]["rounds"][0]
    out = capsys.readouterr().out
    assert "rounds to accuracy 0.7" in out
    assert out.index("| scaffold") < out.index("| fedavg")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--methods=fedAvg", "unknown methods"),
        ("--rounds=0", "at least 1"),
        ("--target=0.7", "is no target"),
    ],
)
def test_wrong_options_are_refused(capsys, argument, words):
    with pytest.raises(SystemExit):
        methods.main(["--group=methods_synthetic", argument])
    assert words in capsys.readouterr().err
