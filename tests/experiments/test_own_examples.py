"""Examples of all clients in parts: each once, with little padding."""

import numpy as np
import pytest

from fedpax.data import ClientSampler, cohort_rounds
from fedpax.experiments.parts import file_experiments
from fedpax.experiments.parts.file_experiments import OwnExamples


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("most_bytes", [1, 5000, 2**28])
def test_parts_have_the_examples_of_each_client_once(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, multiple: int
) -> None:
    monkeypatch.setattr(file_experiments, "MOST_BYTES", most_bytes)
    rng = np.random.default_rng(0)
    sizes = np.append(rng.integers(1, 9, 60), [3000, 200, 1])
    held = np.append(rng.integers(0, 3, 60), [700, 0, 50])
    owner = np.repeat(np.arange(63), sizes + held)
    values = rng.normal(size=(len(owner), 3)).astype(np.float32)
    of_client = np.split(rng.permutation(len(owner)), np.cumsum(sizes + held)[:-1])
    training = [part[:size] for part, size in zip(of_client, sizes, strict=True)]
    heldout = [part[size:] for part, size in zip(of_client, sizes, strict=True)]
    rounds = cohort_rounds(
        {"x": values}, training, ClientSampler(63, 1), batch_size=4, preprocess=dict
    )
    parts = OwnExamples(rounds, heldout, lambda rows: {"x": values[rows]}, (), multiple)
    for _ in range(2):
        seen, slots = [], 0
        for cohort, own in parts:
            assert len(own["mask"]) % multiple == 0
            for k, client in enumerate(np.asarray(cohort.client_ids)):
                batches, mask = cohort.batches["x"][k], cohort.batches["mask"][k]
                slots += mask.size + own["mask"][k].size
                rows = training[client] if client >= 0 else []
                got, expected = batches[mask > 0], values[rows]
                np.testing.assert_array_equal(np.unique(got, axis=0), np.unique(expected, axis=0))
                rows = heldout[client] if client >= 0 else []
                np.testing.assert_array_equal(own["x"][k][own["mask"][k] > 0], values[rows])
                if client >= 0:
                    assert cohort.num_steps[k] == -(-sizes[client] // 4)
                    seen.append(int(client))
        assert sorted(seen) == [*range(63)]
        assert slots < 3 * 4 * multiple * len(owner)  # all clients together: 63 * 3700
    heldout_alone = OwnExamples(
        rounds, heldout, lambda rows: {"x": values[rows]}, (), multiple, with_batches=False
    )
    seen = []
    for cohort, own in heldout_alone:
        assert not cohort.batches and len(own["mask"]) % multiple == 0
        for client, x, mask in zip(cohort.client_ids, own["x"], own["mask"], strict=True):
            if client >= 0:
                np.testing.assert_array_equal(x[mask > 0], values[heldout[client]])
                seen.append(int(client))
    assert sorted(seen) == [*range(63)]
    assert (parts._kept is not None) == (most_bytes == 2**28)
    model = {"w": np.zeros(most_bytes, np.uint8)}
    with_models = OwnExamples(rounds, heldout, lambda rows: {"x": values[rows]}, model, multiple)
    assert {len(own["mask"]) for _, own in with_models} == {multiple}
