"""Token-exact conversations: sampled tokens are fed back to the engine unchanged."""
