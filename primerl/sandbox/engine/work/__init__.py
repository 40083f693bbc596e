"""What a process does for an order once it is confined: it can do no more than the code itself."""
