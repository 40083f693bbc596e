import pytest

from primerl import testing, weights


class Engine:
    """Takes weights as an engine does."""

    def __init__(self):
        self.taken = []

    def update_weights(self, tensors, *, version, timeout_s=1.0):
        self.taken.append((version, {name: tensor.clone() for name, tensor in tensors.items()}))


def test_publishing_sends_every_parameter_and_saved_buffer_to_every_engine():
    model = testing.tiny_model("glm4_moe")
    engines = [Engine(), Engine()]

    weights.SharedMemory(model, *engines).publish(4)

    for engine in engines:
        ((version, tensors),) = engine.taken
        assert version == 4
        assert any("e_score_correction_bias" in name for name in tensors)
        assert set(tensors) == set(model.state_dict())


def test_a_tied_tensor_is_sent_once():
    model = testing.tiny_model("llama", tie_word_embeddings=True)
    engine = Engine()

    weights.SharedMemory(model, engine).publish(1)

    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(tied & set(engine.taken[0][1])) == 1


def test_publishing_without_an_engine_is_refused():
    with pytest.raises(ValueError, match="no engine"):
        weights.SharedMemory(testing.tiny_model("llama"))
