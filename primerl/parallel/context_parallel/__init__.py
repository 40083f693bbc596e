"""Context parallelism: the rows of long documents divided among ranks."""
