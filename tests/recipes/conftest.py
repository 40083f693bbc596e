"""A model that the recipes' own task can be played with, in a moment."""

import pytest

from primerl import models, testing


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory):
    text = "Which is larger, 0123456789 or? Only please. Reply with the word or number only."
    tokenizer = testing.character_tokenizer(text)
    model = testing.tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    models.save_pretrained(model, folder, tokenizer=tokenizer)
    return folder
