"""Joining the other ranks, stopping on a signal, and noticing dead ranks."""
