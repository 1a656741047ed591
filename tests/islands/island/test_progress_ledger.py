"""The ledger of an island: the fragment that it sends next, and the steps that are not sent."""

from types import SimpleNamespace
from typing import Any

from fedpax.islands.island.island import Ledger
from fedpax.islands.island.training_rounds import TrainingRounds
from fedpax.training.run_writers import RunFiles


def test_an_island_sends_the_fragment_of_the_next_merge():
    ledger = Ledger(num_fragments=2, steps_per_sync=4)
    ledger.add_steps(4, tokens=64.0)
    assert ledger.next_merge(merges=0) == 0
    ledger.sent(0, process="a", merge=0)
    assert [fragment.steps for fragment in ledger.fragments] == [0, 4] and ledger.sequence == 1
    assert ledger.next_merge(merges=0) == 1
    assert ledger.next_merge(merges=5) == 5  # an island that is late skips to the syncer's merge


def test_an_island_that_is_far_ahead_tells_it_once() -> None:
    notes: list[str] = []
    island: Any = SimpleNamespace(
        has_model=True,
        is_ahead=False,
        must_stop=lambda: False,
        status=SimpleNamespace(merges=25),
        ledger=SimpleNamespace(fragments=[None, None]),
        train=lambda *args: SimpleNamespace(metrics={"loss": 1.0}),
    )
    experiment: Any = SimpleNamespace(training=SimpleNamespace(rounds=90))
    ignored: Any = SimpleNamespace(add=lambda *args: None, steps_per_sync=1)
    progress: Any = SimpleNamespace(note=notes.append)
    files = RunFiles(progress, ignored, ignored, ignored)
    rounds = TrainingRounds(
        experiment, ignored, island, ignored, files, ignored, done=0, give_up_after=1.0
    )
    told_at = []
    for _ in range(40):
        rounds._train_round(None)
        told_at.append(len(notes))
    assert told_at.index(1) + 1 == 24 and told_at[-1] == 1
    assert notes[0].startswith("its round 24 is far ahead of the syncer's round 12: the run ends")
    assert "round 90 of the syncer" in notes[0] and "schedule" in notes[0]
