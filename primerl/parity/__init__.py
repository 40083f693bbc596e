"""Parity: is a family of models trained as plain Hugging Face code in one process trains it?"""
