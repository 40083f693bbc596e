"""Attention over packed documents: what a document sees, and the kernels that compute it."""
