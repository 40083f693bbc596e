"""``TransformersEngine``: a transformers model in this process; the only part with torch."""
