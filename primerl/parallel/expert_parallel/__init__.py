"""Expert parallelism: the experts of each layer divided among ranks."""
