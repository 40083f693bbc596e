"""Context parallelism: each rank holds some of the rows of long documents."""
