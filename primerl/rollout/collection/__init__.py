"""Collection of rollouts into the groups of a step: scheduling, staleness, verification, buffer."""
