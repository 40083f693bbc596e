"""Tiers whose sandboxes a zygote makes on this machine, and what such a sandbox is to its owner."""
