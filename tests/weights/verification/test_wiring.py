"""The wiring test, on engines that hold a real copy of the model and are made to fail."""

import json
from pathlib import Path

import pytest
import torch
from copy_engine import CopyEngine
from forked_ranks import forked_ranks

from primerl import testing, weights
from primerl.weights.verification import wiring

SIZES = {"count": 3, "length": 40, "new_tokens": 4}


def parts(kind="llama", *, config=None, canary=None, **faults):
    model = testing.tiny_model(kind, **(config or {}))
    engine = CopyEngine(model, **faults)
    watch = weights.Canary(model, engine, **SIZES, **(canary or {}))
    return model, engine, (model, weights.SharedMemory(model, engine), watch)


def bits(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def require_same(model, before):
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "glm4_moe"])
def test_every_group_arrives_and_the_weights_are_restored(kind):
    model, engine, arguments = parts(kind, servers=2)
    before = bits(model)

    report = weights.wiring_test(*arguments, version=3)

    assert report.missing == ()
    assert report.unseen == ()
    require_same(model, before)
    for server in engine.servers.values():
        require_same(server.model, before)
    groups = {one.group: one for one in report.groups}
    assert groups["model.layers.*.self_attn.q_proj.weight"].tensors == 2
    assert groups["model.embed_tokens.weight"].tensors == 1
    if kind != "llama":
        assert "model.layers.*.mlp.experts.gate_up_proj" in groups
        assert "model.layers.*.mlp.gate.weight" in groups
    if kind == "glm4_moe":
        assert "model.layers.*.mlp.gate.e_score_correction_bias" in groups
    for one in report.groups:
        assert one.predicted >= 0.001
        assert set(one.moved) == set(one.rest) == {"server 0", "server 1"}
    # One publication for each group; one before, one after.
    assert engine.updates == [3] * (len(groups) + 2)
    table = str(report)
    assert table.count(" yes\n") == len(groups)


def test_tied_embeddings_are_one_group():
    _, _, arguments = parts(config={"tie_word_embeddings": True})
    names = {one.group for one in weights.wiring_test(*arguments, version=0).groups}

    assert len(names & {"model.embed_tokens.weight", "lm_head.weight"}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "lost", "group"),
    [
        ("llama", "layers.1.self_attn.q_proj", "model.layers.*.self_attn.q_proj.weight"),
        ("llama", "input_layernorm", "model.layers.*.input_layernorm.weight"),
        ("llama", "lm_head", "lm_head.weight"),
        ("qwen3_moe", "mlp.gate.", "model.layers.*.mlp.gate.weight"),
        ("qwen3_moe", "0.mlp.experts.down", "model.layers.*.mlp.experts.down_proj"),
        ("glm4_moe", "e_score", "model.layers.*.mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_group_that_does_not_arrive_is_named(kind, lost, group):
    model, engine, arguments = parts(kind, skip=lambda name: lost in name)
    before = bits(model)

    with pytest.raises(RuntimeError, match="do not reach the engines") as caught:
        weights.wiring_test(*arguments, version=0)

    first, *table = str(caught.value).splitlines()
    assert first.endswith(f"as they are sent: {group}")
    assert sum(line.endswith("NO") for line in table) == 1
    require_same(model, before)
    assert all(
        torch.equal(t, before[n]) for n, t in engine.servers["server 0"].model.state_dict().items()
    )


def test_one_replica_that_misses_a_group_is_enough():
    _, engine, arguments = parts(servers=2)
    plain = engine.servers["server 1"].load
    engine.servers["server 1"].load = lambda tensors, skip, swap: plain(
        tensors, lambda name: "up_proj" in name, swap
    )

    with pytest.raises(RuntimeError, match=r"as they are sent: model.layers.\*.mlp.up_proj.weight"):
        weights.wiring_test(*arguments, version=0)


def test_swapped_tensors_are_named():
    k, v = (f"model.layers.0.self_attn.{one}_proj.weight" for one in "kv")
    _, engine, arguments = parts()
    transport = arguments[1]
    engine.swap = {}
    weights.wiring_test(*arguments, version=0)
    plain = engine.update_weights

    def swapped_when_perturbed(tensors, **options):
        engine.swap = {} if len(engine.updates) % 9 == 0 else {k: v, v: k}
        plain(tensors, **options)

    engine.update_weights = swapped_when_perturbed
    engine.updates.clear()
    with pytest.raises(RuntimeError, match="wiring test|do not reach"):
        weights.wiring_test(arguments[0], transport, arguments[2], version=0)


def test_a_tied_head_that_is_not_loaded_again_is_named():
    _, _, arguments = parts(config={"tie_word_embeddings": True}, untied=True)

    with pytest.raises(RuntimeError, match="sent: .*embed_tokens.weight|sent: lm_head.weight"):
        weights.wiring_test(*arguments, version=0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["publish", "probe"])
def test_after_any_error_the_weights_are_restored_and_published(error, where, monkeypatch):
    model, engine, arguments = parts()
    before = bits(model)
    plain, calls = engine.update_weights, []

    def publish(tensors, **options):
        calls.append(options)
        plain(tensors, **options)
        if where == "publish" and len(calls) == 4:
            raise error("in the middle")

    def scores(sequences):
        if len(calls) == 4:
            raise error("in the middle")
        return plain_scores(sequences)

    plain_scores = arguments[2].scores
    monkeypatch.setattr(engine, "update_weights", publish)
    if where == "probe":
        monkeypatch.setattr(arguments[2], "scores", scores)

    with pytest.raises(error, match="in the middle"):
        weights.wiring_test(*arguments, version=0)

    assert len(calls) == 5
    require_same(model, before)
    require_same(engine.servers["server 0"].model, before)


def test_restored_weights_that_do_not_arrive_are_an_error(monkeypatch):
    _, engine, arguments = parts()
    plain, groups = engine.update_weights, wiring.tensor_groups(arguments[0])

    def publish(tensors, **options):
        if len(engine.updates) <= len(groups):
            plain(tensors, **options)

    monkeypatch.setattr(engine, "update_weights", publish)
    with pytest.raises(RuntimeError, match="with the weights restored: version 0 failed"):
        weights.wiring_test(*arguments, version=0)


def test_a_group_that_nothing_depends_on_is_reported_as_unseen(caplog):
    model = testing.tiny_model("llama")
    model.register_buffer("spare", torch.ones(3))
    engine = CopyEngine(model)
    watch = weights.Canary(model, engine, **SIZES)

    report = weights.wiring_test(model, weights.SharedMemory(model, engine), watch, version=0)

    assert report.unseen == ("spare",)
    assert "spare" in caplog.text
    assert str(report).count("unseen") == 1


def test_a_bfloat16_engine_passes_with_larger_perturbations():
    _, _, arguments = parts(dtype=torch.bfloat16, canary={"dtype": torch.bfloat16})

    assert weights.wiring_test(*arguments, version=0).missing == ()


def test_a_bfloat16_engine_that_misses_a_group_is_caught():
    _, _, arguments = parts(
        dtype=torch.bfloat16, canary={"dtype": torch.bfloat16}, skip=lambda n: "o_proj" in n
    )
    with pytest.raises(RuntimeError, match="o_proj"):
        weights.wiring_test(*arguments, version=0)


@pytest.mark.thorough
def test_a_sharded_model_on_two_ranks(tmp_path):
    script = Path(__file__).parents[2] / "ranks/weight_verification.py"
    done = forked_ranks(script, tmp_path / "found.json", ranks=2, cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["passed"] == [True, True, False]
    assert found["same on all ranks"]
    assert found["missing"] == []
    assert found["unseen"] == []
    assert found["restored"]
    assert "q_proj" in found["lost"][0]
    assert found["lost"][0] == found["lost"][1]
    refusal = "ValueError: the sequence exceeds the context"
    assert found["refused"] == [refusal, f"RuntimeError: rank 0 failed: {refusal}"]
