"""The order in which shards read documents."""

from fedpax.data.rounds.document_shard import DocumentOrder
from fedpax.sources.shuffle import hash_key


def test_shards_divide_the_documents():
    orders = [DocumentOrder(5, shard, 2, hash_key(0)) for shard in range(2)]
    assert [len(order) for order in orders] == [3, 2]
    documents = (order[n] for order in orders for n in range(len(order)))
    assert sorted(documents) == [0, 1, 2, 3, 4]
