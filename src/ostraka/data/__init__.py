"""Data that fits any number of processes.

import grain
from ostraka.data import ElasticIterator

def make_iterator(shard):
    return iter(grain.MapDataset.range(1000)[shard::8].to_iter_dataset())

data = ElasticIterator(make_iterator, shards=8, batch=16)
batch = next(data)
"""

from ostraka.data._iterator import ElasticIterator

__all__ = ["ElasticIterator"]
