"""Does a family of models train right, packed, sharded and recomputed? Plain code is compared."""
