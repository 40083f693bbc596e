"""Tiers whose sandboxes are forked by a zygote process on this machine: the owner's side."""
