"""FP8 with FSDP2, experts, replay, recomputation and LoRA: two gloo ranks, one launch."""

import json

import pytest
from forked_ranks import forked_ranks

from primerl import fp8, models, testing

pytestmark = pytest.mark.thorough

RANKS = 2
KINDS = [
    "dense",
    "dense, fp8 gradients, recompute",
    "dense, lora",
    "moe, replay",
    "moe, ep 2, replay, recompute",
]


class NoTokenizer:
    def save_pretrained(self, folder):
        pass


@pytest.fixture(scope="module")
def found(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    form = fp8.Format.of_blocks(16)
    model = testing.tiny_model("qwen3_moe", seed=3)
    fp8.convert_linears(model, form=form)
    quantize = fp8.CheckpointQuantizer(model, experts=fp8.GroupedMatmul(form=form))
    models.save_pretrained(model, folder / "model", tokenizer=NoTokenizer(), quantize=quantize)
    script = root / "tests/ranks/fp8_training.py"
    done = forked_ranks(script, folder / "model", folder, ranks=RANKS, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Warning" not in done.stderr, done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_one_process_does(found, kind):
    for rank_found in found:
        one = rank_found[kind]
        expected, losses = one["losses"]
        assert losses == pytest.approx(expected, rel=1e-4)
        assert one["gap"] < one["moved"] / 50
        assert one["moved"] > 1e-3


def test_sharded_trainers_publish_and_load_the_same_bytes(found):
    for rank_found in found:
        assert rank_found["published"]
        assert rank_found["loaded"]


def test_a_sharded_model_is_refused(found):
    for rank_found in found:
        assert (
            "the model is sharded already; apply these steps in the order fp8 -> adapters"
            in rank_found["refused"]
        )
