"""How the examples of a cohort become batches: preprocessing, fields and images."""

import chex
import numpy as np
import pytest
from cohort_problem import keep_fields, problem

from fedpax.data import load
from fedpax.data.rounds.cohort_rounds import cohort_rounds
from fedpax.data.rounds.labeled_examples import preprocess_images, scale_pixels
from fedpax.populations.client_sampler import ClientSampler
from fedpax.populations.partition import partition_by_field


def test_only_the_examples_of_the_cohort_are_read():
    class Counting:
        def __init__(self):
            self.read = []

        def __len__(self):
            return 100

        def __getitem__(self, index):
            self.read.append(int(index))
            return {
                "image": np.full((2, 2, 1), index, np.uint8),
                "label": index,
                "note": b"x" * index,
            }

    source = Counting()
    population = [np.arange(10 * k, 10 * k + 10) for k in range(10)]
    sampler = ClientSampler(10, 2, seed=1)
    rounds = cohort_rounds(source, population, sampler, batch_size=5, local_epochs=3)
    source.read.clear()
    cohort = next(rounds)
    expected = np.concatenate([population[k] for k in sampler.sample(0)])
    assert sorted(source.read) == sorted(expected)  # each once, for three epochs
    np.testing.assert_array_equal(
        np.rint(cohort.batches["image"][..., 0, 0, 0] * 255), cohort.batches["label"]
    )


def test_a_source_and_its_arrays_give_the_same_rounds(digits):
    source = digits("train")
    arrays = {
        "image": np.stack([x["image"] for x in source]),
        "label": np.array([x["label"] for x in source]),
    }
    population = partition_by_field(source, "label", 10)
    from_files, from_memory = (
        cohort_rounds(examples, population, ClientSampler(10, 4), batch_size=16)
        for examples in (source, arrays)
    )
    for a, b in zip(
        next(from_files).batches.values(), next(from_memory).batches.values(), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def padded_text(fields):
    """Pad texts of different lengths, with a mask of their own that marks their tokens."""
    texts = [np.frombuffer(bytes(text), np.uint8) for text in fields["text"].tolist()]
    tokens, mask = np.zeros((2, len(texts), 6), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)], mask[row, : len(text)] = text, 1
    return {"tokens": tokens, "mask": mask.astype(np.float32)}


def test_a_mask_from_preprocess_is_kept_and_is_0_where_there_is_no_example():
    """Ragged examples: padding within an example and padding of a batch are both marked."""
    source = [{"text": b"a" * n} for n in (1, 6, 3, 2, 5)]
    population = [np.array([0, 1, 2]), np.array([3, 4]), np.array([], np.int64)]
    rounds = cohort_rounds(
        source, population, ClientSampler(3, 3), batch_size=2, preprocess=padded_text
    )
    cohort = next(rounds)
    mask = cohort.batches["mask"]
    chex.assert_trees_all_equal_shapes_and_dtypes(rounds.shapes, cohort)
    chex.assert_shape(mask, (3, 2, 2, 6))
    assert mask.dtype == np.float32
    lengths = dict(zip(cohort.client_ids.tolist(), mask.sum((1, 2, 3)).tolist(), strict=True))
    assert lengths == {0: 1 + 6 + 3, 1: 2 + 5, 2: 0}
    has_example = mask.any(-1).sum((1, 2))
    np.testing.assert_array_equal(has_example, cohort.num_examples)
    assert (cohort.batches["tokens"][mask == 1] == ord("a")).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"note": b"text"}, r"field 'note' has dtype .S4 after preprocess .*keep_fields"),
        ({"note": "text"}, r"field 'note' has dtype <U4 after preprocess"),
        ({"note": None}, r"field 'note' has dtype object after preprocess"),
    ],
)
def test_a_field_that_is_not_numeric_raises(fields, words):
    source = [{"x": np.float32(k), **fields} for k in range(4)]
    with pytest.raises(TypeError, match=words):
        cohort_rounds(
            source, [np.arange(4)], ClientSampler(1, 1), batch_size=2, preprocess=keep_fields
        )


def test_examples_of_different_shapes_raise_unless_preprocess_pads_them():
    source = [{"x": np.ones(1 + k, np.float32)} for k in range(4)]
    rounds = cohort_rounds(
        source, [np.arange(4)], ClientSampler(1, 1), batch_size=2, preprocess=keep_fields
    )
    with pytest.raises(TypeError, match=r"field 'x' has dtype object .*pad examples of different"):
        next(rounds)
    rounds = cohort_rounds(
        source, [np.array([2])], ClientSampler(1, 1), batch_size=2, preprocess=keep_fields
    )
    with pytest.raises(ValueError, match=r"field 'x' with another shape .*\(1, 2, 3\)"):
        next(rounds)


def test_a_preprocess_that_drops_examples_raises():
    examples, population = problem([4])
    with pytest.raises(ValueError, match=r"'label' has shape \[0\] after preprocess .*\[1, ...\]"):
        cohort_rounds(
            examples,
            population,
            ClientSampler(1, 1),
            batch_size=2,
            preprocess=lambda fields: {"label": fields["label"][1:]},
        )


def test_other_fields_need_a_preprocess():
    examples = {"x": np.random.default_rng(0).random((5, 3)), "y": np.arange(5.0)}
    population, sampler = [np.arange(5)], ClientSampler(1, 1)
    with pytest.raises(KeyError, match=r"the fields 'x', 'y', expected .* Pass preprocess=dict"):
        cohort_rounds(examples, population, sampler, batch_size=5)
    cohort = next(cohort_rounds(examples, population, sampler, batch_size=5, preprocess=dict))
    assert sorted(cohort.batches["y"].ravel()) == [0, 1, 2, 3, 4]


def test_images_are_scaled_and_labels_are_int32():
    fields = {"image": np.array([[0, 255]], np.uint8), "label": np.array([3], np.int64)}
    result = preprocess_images(fields)
    np.testing.assert_array_equal(result["image"], np.float32([[0, 1]]))
    assert result["label"].dtype == np.int32


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 40_000), (2**16,), (7, 3, 5, 2)])
def test_pixels_are_divided_by_255(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    for images in (pixels, pixels.T, pixels.astype(np.int32)):
        expected = np.asarray(images.astype(np.float32) / np.float32(255))
        np.testing.assert_array_equal(scale_pixels(images), expected, strict=True)


def test_images_of_different_shapes_raise():
    source = [{"image": np.ones((k, 2, 1)), "label": k} for k in (2, 3)]
    rounds = cohort_rounds(source, [np.array([0, 1])], ClientSampler(1, 1), batch_size=2)
    with pytest.raises(ValueError, match="resize them when the data set is prepared"):
        next(rounds)


def test_damaged_records_raise(tmp_path):
    source = load("digits", "test", data_dir=tmp_path)
    for file in source.folder.glob("*test*array_record*"):
        file.write_bytes(file.read_bytes()[:3000] + bytes(3000) + file.read_bytes()[6000:])
    source = load("digits", "test", data_dir=tmp_path)
    rounds = cohort_rounds(source, [np.arange(len(source))], ClientSampler(1, 1), batch_size=50)
    with pytest.raises(OSError, match="are damaged: delete that folder and load again"):
        next(rounds)


@pytest.mark.parametrize("preprocess", [None, "label", {"x": 1}])
def test_a_preprocess_that_is_no_function_is_told(preprocess):
    with pytest.raises(TypeError, match=r"preprocess is .*expected a function.*preprocess=dict"):
        cohort_rounds(
            {"x": np.arange(4.0)},
            [np.arange(4)],
            ClientSampler(num_clients=1, cohort_size=1),
            batch_size=2,
            preprocess=preprocess,
        )
