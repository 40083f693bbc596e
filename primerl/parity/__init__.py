"""Parity checks: sharded training of a family gives the results of plain Hugging Face code."""
