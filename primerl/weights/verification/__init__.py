"""Do the engines compute with what was published? Receipts, read-back tensors, scores."""
