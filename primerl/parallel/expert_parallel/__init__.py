"""Expert parallelism: each rank holds some of the experts of each layer."""
