"""Model families of the ``renderers`` package, with byte tokenizers and their special tokens."""

import inspect
import re
import typing

from byte_tokenizer import byte_tokenizer
from renderers import configs, create_renderer

NEEDED = re.compile(r"['\"]([^'\"]+)['\"]")


def families():
    """Return, by name, the renderer configurations that need no file or special tokenizer."""
    found = {}
    for _, config in inspect.getmembers(configs, inspect.isclass):
        if issubclass(config, configs.BaseRendererConfig) and "name" in config.model_fields:
            for name in typing.get_args(config.model_fields["name"].annotation):
                if name not in ("auto", "custom"):
                    found[name] = config
    return found


def toy_renderer(name, **options):
    """Return a renderer and its tokenizer, with all special tokens that the renderer requires."""
    config = families()[name](name=name, **options)
    special = ["<|endoftext|>"]
    while True:
        tokenizer = byte_tokenizer(special, "{{ messages }}")
        try:
            return create_renderer(tokenizer, config), tokenizer
        except (AssertionError, ValueError) as error:
            missing = NEEDED.search(str(error))
            if missing is None or missing[1] in special:
                raise
            special.append(missing[1])
