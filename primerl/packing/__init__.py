"""Packing of training samples into equally many micro-batches for every rank.

``bins`` assigns samples to micro-batches and ranks, with numpy alone. ``pack`` builds the
``PackedBatch`` values. It converts from the layout of the host, where entry i describes token i,
to that of the device, where row j predicts the token after it. ``unpack`` converts results back.
``document_cost`` makes packs balanced by the FLOPs of a model.
"""

from primerl.packing.batch import PackedBatch, minibatches, pack, unpack
from primerl.packing.binning import bins
from primerl.packing.costs import document_cost

__all__ = ["PackedBatch", "bins", "document_cost", "minibatches", "pack", "unpack"]
