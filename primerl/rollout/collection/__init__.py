"""From rollouts to the groups of a step: scheduling, staleness, verification, the buffer."""
