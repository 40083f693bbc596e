"""Which task comes next: streams, mixtures, curricula."""
