"""What multiplies two operands in FP8: the reference, and libraries for GPUs."""
