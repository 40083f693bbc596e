"""Packing: training samples into equally many micro-batches for every rank.

``bins`` decides what goes where (numpy alone); ``pack`` builds the ``PackedBatch`` values, the
seam between the host, where entry i describes token i, and the device, where row j predicts the
token after it; ``unpack`` leads back.
"""

from primerl.packing.batch import PackedBatch, minibatches, pack, unpack
from primerl.packing.binning import bins

__all__ = ["PackedBatch", "bins", "minibatches", "pack", "unpack"]
