"""Whether engines compute with what was published: tensors in use, scores, a wiring test."""
