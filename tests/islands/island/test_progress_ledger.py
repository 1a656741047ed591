"""The ledger of an island: the fragment that it sends next, and the steps that are not sent."""

from fedpax.islands.island.island import Ledger


def test_an_island_sends_the_fragment_of_the_next_merge():
    ledger = Ledger(num_fragments=2, steps_per_sync=4)
    ledger.add_steps(4, tokens=64.0)
    assert ledger.next_merge(merges=0) == 0
    ledger.sent(0, process="a", merge=0)
    assert [fragment.steps for fragment in ledger.fragments] == [0, 4] and ledger.sequence == 1
    assert ledger.next_merge(merges=0) == 1
    assert ledger.next_merge(merges=5) == 5  # an island that is late skips to the syncer's merge
