"""Backends that multiply FP8 operands: a reference implementation, and libraries for GPUs."""
