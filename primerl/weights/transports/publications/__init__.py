"""Versions of weights as files: written, read on servers' hosts, and sent between hosts."""
