"""``TransformersEngine``, which serves a transformers model in this process and needs torch."""
