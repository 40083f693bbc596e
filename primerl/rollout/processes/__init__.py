"""Child processes: starting, calling, watching and ending them."""
