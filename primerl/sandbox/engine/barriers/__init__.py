"""The walls of a sandbox: the kernel's calls, and both kinds of sandboxes that are made of them."""
