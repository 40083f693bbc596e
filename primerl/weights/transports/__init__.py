"""Transports of weights from the trainer to engines: shared memory, files and NCCL."""
