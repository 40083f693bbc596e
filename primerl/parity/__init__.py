"""Parity checks, which compare sharded training of a model family with plain Hugging Face code."""
