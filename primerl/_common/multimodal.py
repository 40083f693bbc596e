"""Models with encoders of images or sound, of which only the language model is trained."""

from typing import Any

from primerl._common.optional import require


def auto_class(config: Any) -> Any:
    """Return the class of ``transformers`` that builds and loads the model of a config.

    Some families have a language model with and without encoders; ``config.architectures`` says
    which of them a checkpoint has, and so how its tensors are named.
    """
    transformers = require("transformers", extra="transformers")
    whole = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) in whole and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForImageTextToText
    if type(config) in whole and whole[type(config)].__name__ in (config.architectures or ()):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def freeze_encoders(model: Any) -> list[str]:
    """Freeze all parameters outside the language model, and return their names.

    These are the parameters of encoders and of the projections of their outputs. The language model
    is trained on text, which gives the others no gradients; frozen, they are still saved and
    published. Models without encoders are left as they are.
    """
    transformers = require("transformers", extra="transformers")
    whole = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(model.config) not in whole or not isinstance(model, whole[type(model.config)]):
        return []
    trained = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    kept = {id(parameter) for part in trained for parameter in part.parameters()}
    frozen = [name for name, parameter in model.named_parameters() if id(parameter) not in kept]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen
