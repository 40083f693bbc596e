"""Token-exact conversations: sampled tokens go back to the engine as they are."""
