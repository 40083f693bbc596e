"""Environments that are played in Ray actors, on many hosts."""
