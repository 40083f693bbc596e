"""How published weights reach the engines: shared memory, files, NCCL."""
