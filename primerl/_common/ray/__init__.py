"""Ray clusters: joining one, and actors that run code of this process on its hosts."""
