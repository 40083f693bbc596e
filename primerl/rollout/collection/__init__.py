"""From rollouts to the batches that are trained: groups, staleness, the buffer."""
