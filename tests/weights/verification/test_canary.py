"""The canary, on engines that hold a real copy of the model and are made to fail."""

import math

import attrs
import numpy as np
import pytest
import torch
from copy_engine import CopyEngine, ReadableEngine
from random_steps import trained

from primerl import testing, weights
from primerl.weights.verification import scoring
from primerl.weights.verification.comparison import TensorComparison
from primerl.weights.verification.verdicts import Observation, ServerChecks

SIZES = {"count": 3, "length": 40, "new_tokens": 6}


def run(kind="llama", *, steps=3, lr=1e-3, config=None, canary=None, **faults):
    """Verdicts of the start and of each update, with an engine that fails from the start on."""
    model = testing.tiny_model(kind, **(config or {}))
    engine = CopyEngine(model, **faults)
    transport = weights.SharedMemory(model, engine)
    watch = weights.Canary(model, engine, **SIZES, **(canary or {}))
    verdicts = [watch.check(0)]
    for version in range(1, steps + 1):
        trained(model, seed=version, lr=lr)
        transport.publish(version)
        verdicts.append(watch.check(version))
    return verdicts


# ---- the parts, by hand ----


def test_movement_by_hand():
    d, e = np.array([1.0, 2.0, 0.0]), np.array([1.0, 0.5, 3.0])
    # m = (1 + 1) / 5; rest = e - m d = (0.6, -0.3, 3); d rest = (0.6, -0.6, 0)
    moved, error = scoring.movement(d, e)

    assert moved == pytest.approx(0.4)
    assert error == pytest.approx(math.sqrt(0.36 + 0.36) / 5)
    assert scoring.movement(d, d) == (1.0, 0.0)
    assert scoring.movement(d, 0 * d) == (0.0, 0.0)
    assert scoring.movement(0 * d, e)[1] == math.inf


@pytest.mark.parametrize(("share", "noise"), [(1.0, 0.1), (0.0, 0.1), (1.0, 3.0), (0.3, 1.0)])
def test_the_standard_error_of_movement_is_the_spread_of_its_estimates(share, noise):
    rng = np.random.default_rng(0)
    d = rng.normal(size=500) * rng.lognormal(size=500)
    size = noise * rng.lognormal(size=500)  # of another size for each token
    found = [scoring.movement(d, share * d + size * rng.normal(size=500)) for _ in range(2000)]
    moved, errors = np.array(found).T

    assert moved.mean() == pytest.approx(share, abs=4 * moved.std() / math.sqrt(2000))
    assert np.median(errors) == pytest.approx(moved.std(), rel=0.15)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_the_trainers_logprobs_are_those_of_the_model_and_leave_it_as_it_was(kind):
    model = testing.tiny_model(kind, attention_dropout=0.5)
    model.train()
    model.get_submodule("model.layers.1").eval()
    modes = [module.training for module in model.modules()]
    rows = [[5, 6, 7, 8], [9, 10, 11], [5, 6, 7, 8], *([one, 6, 2, 8] for one in range(5))]

    got = scoring.trainer_logprobs(model, rows)

    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    for row, logprobs in zip(rows, got, strict=True):
        every = model(torch.tensor([row])).logits[0].detach().log_softmax(-1)
        expected = [0.0] + [float(every[i, row[i + 1]]) for i in range(len(row) - 1)]
        np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_rounding_noise_tells_precisions_apart():
    model = testing.tiny_model("llama")
    row = scoring.sequences_for(model, count=1, length=64)[0]

    assert 0 < scoring.rounding_noise(model, row) < 1e-6
    assert 1e-4 < scoring.rounding_noise(model.to(torch.bfloat16), row) < 0.1


def test_default_sequences_are_fixed_and_away_from_the_vocabularys_ends():
    model = testing.tiny_model("llama", vocab_size=1600)
    rows = np.array(scoring.sequences_for(model, count=4, length=288))

    assert rows.shape == (4, 288)
    assert rows.min() >= 100
    assert rows.max() < 1500
    assert rows.tolist() == scoring.sequences_for(model, count=4, length=288)


# ---- engines that do as they should ----


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "glm4_moe"])
def test_updates_that_arrive_pass_and_are_seen_to_move(kind):
    first, *later = run(kind, servers=2)

    assert first.passed
    assert first.tolerance < 1e-4
    for version, verdict in enumerate(later, start=1):
        assert verdict.passed, verdict.reason
        assert verdict.version == version
        assert [one.server for one in verdict.servers] == ["server 0", "server 1"]
        for one in verdict.servers:
            assert one.moved == pytest.approx(1, abs=0.01)


def test_a_version_without_change_is_not_concluded_to_be_old():
    verdicts = run(lr=0.0)

    assert all(verdict.passed for verdict in verdicts)
    assert [verdict.servers[0].moved for verdict in verdicts] == [None] * 4


def test_a_change_within_the_trainers_own_rounding_is_not_concluded_from():
    assert all(verdict.passed for verdict in run(lr=1e-9))


# ---- faults ----


def failed(verdicts):
    assert verdicts[0].passed, verdicts[0].reason
    assert not any(verdict.passed for verdict in verdicts[1:])
    return verdicts[1].reason


def test_an_engine_that_stays_at_the_old_version_fails():
    reason = failed(run(asleep={"server 0"}))

    assert "version 1 failed the canary" in reason
    assert "0% of the change since an earlier check was seen: old weights" in reason


def test_one_of_two_replicas_that_stays_old_is_named():
    verdicts = run(servers=2, asleep={"server 1"})

    assert "server 1" in failed(verdicts)
    assert "server 0" not in verdicts[1].reason
    assert [one.passed for one in verdicts[1].servers] == [True, False]


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("llama", "model.embed_tokens.weight"),
        ("llama", "model.layers.1.self_attn.q_proj.weight"),
        ("llama", "model.norm.weight"),
        ("llama", "lm_head.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.down_proj"),
    ],
)
def test_a_tensor_that_is_not_sent_fails(kind, tensor):
    assert "scores differ by" in failed(run(kind, lr=1e-2, skip=lambda name: name == tensor))


def test_swapped_tensors_fail():
    q0, q1 = (f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1))

    assert "scores differ by" in failed(run(swap={q0: q1, q1: q0}))


def test_a_tied_head_that_is_not_loaded_again_fails():
    assert "scores differ by" in failed(run(config={"tie_word_embeddings": True}, untied=True))


def test_a_stale_prefix_cache_fails_by_the_continuation_alone():
    verdicts = run(clear_cache=False)

    assert "the continuation differs by" in failed(verdicts)
    (one,) = verdicts[1].servers
    assert one.difference < verdicts[1].tolerance, "scores do not read the cache"
    assert one.moved == pytest.approx(1, abs=0.01)


def test_after_a_repair_it_passes_again():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model, asleep={"server 0"})
    transport = weights.SharedMemory(model, engine)
    watch = weights.Canary(model, engine, **SIZES)
    assert watch.check(0).passed
    trained(model, seed=1, lr=1e-3)
    transport.publish(1)
    assert not watch.check(1).passed
    engine.asleep = set()
    transport.publish(2)

    assert watch.check(2).passed
    assert watch.check(2).servers[0].moved is None  # nothing has changed since


# ---- bfloat16: noise of each token is far above one update ----


def test_in_bfloat16_an_engine_that_does_not_move_at_all_is_caught():
    faults = {"dtype": torch.bfloat16, "asleep": {"server 0"}}
    verdicts = run(canary={"dtype": torch.bfloat16}, steps=1, lr=1e-4, **faults)

    assert "0% of the change" in failed(verdicts)
    assert verdicts[1].servers[0].difference < verdicts[1].tolerance


@pytest.mark.parametrize(("wrong", "passes"), [((), True), (("w",), False)])
def test_in_bfloat16_one_odd_token_fails_only_where_a_tensor_differs(wrong, passes):
    """Of SmolLM2 on vLLM, 3.4 nats at one of 190 tokens, with noise of 0.14, all tensors equal."""
    noise = np.resize([0.14, -0.14], 570)
    odd = np.where(np.arange(570) == 400, 3.5, noise)
    checks = ServerChecks(dtype=torch.bfloat16, tolerance=None)

    def verdict(differences, wrong):
        one = Observation(expected=np.zeros(570), scores=differences, ends=noise[:16])
        comparison = TensorComparison(published=1, compared=1, wrong=wrong)
        return checks.verdicts({"a": one}, {"a": comparison}, rounding=0.1)[0]

    assert verdict(noise, ()).passed
    assert verdict(odd, wrong).passed == passes
    assert not verdict(np.where(np.arange(570) == 400, math.nan, noise), ()).passed


@pytest.mark.parametrize(("odd", "passes"), [(2, True), (3, False)])
def test_in_bfloat16_two_of_sixteen_sampled_tokens_may_be_off(odd, passes):
    """A router of 4 experts that decided a near tie differently changed a token by 4.7 nats."""
    noise = np.resize([0.1, -0.1], 570)
    checks = ServerChecks(dtype=torch.bfloat16, tolerance=None)

    def verdict(ends):
        one = Observation(expected=np.zeros(570), scores=noise, ends=ends)
        comparison = TensorComparison(published=1, compared=1, wrong=())
        return checks.verdicts({"a": one}, {"a": comparison}, rounding=0.1)[0]

    assert verdict(noise[:16]).passed
    assert verdict(np.where(np.arange(16) < odd, 4.7, noise[:16])).passed == passes
    assert not verdict(np.where(np.arange(16) < 1, math.nan, noise[:16])).passed


@pytest.mark.parametrize("fault", [{"raw_logprobs": True}, {"clear_cache": False}])
def test_in_bfloat16_faults_of_most_tokens_fail_though_tensors_are_right(fault):
    model = testing.tiny_model("qwen3_moe", initializer_range=0.2)
    engine = ReadableEngine(model, dtype=torch.bfloat16)
    transport = weights.SharedMemory(model, engine, dtype=torch.bfloat16)
    watch = weights.Canary(model, engine, dtype=torch.bfloat16, **SIZES | {"count": 4})
    transport.publish(0)
    assert watch.check(0).passed
    engine.clear_cache = fault.get("clear_cache", True)
    for server in engine.servers.values():
        server.raw_logprobs = fault.get("raw_logprobs", False)
    trained(model, seed=1, lr=0.03)
    transport.publish(1)

    verdict = watch.check(1)

    assert verdict.servers[0].compared_tensors == verdict.servers[0].tensors > 0
    assert "the continuation differs by" in verdict.reason


def test_few_means_that_agree_by_chance_are_no_shift():
    """Noise of short sequences, whose means of 32 tokens happen to be equal."""
    checks = ServerChecks(dtype=torch.float32, tolerance=None)
    noise = np.random.default_rng(0).normal(0, 2e-5, (2, 142))
    for part in np.array_split(np.arange(142), 5):
        noise[1, part] += 3.5e-6 - (noise[1, part] - noise[0, part]).mean()

    for differences in noise:
        one = Observation(expected=np.zeros(142), scores=differences, ends=differences[:16])
        (verdict,) = checks.verdicts({"a": one}, {}, rounding=1e-5)
        assert verdict.passed, verdict.reason


def test_in_bfloat16_updates_that_arrive_pass_whether_or_not_anything_is_concluded():
    verdicts = run(canary={"dtype": torch.bfloat16}, dtype=torch.bfloat16, steps=8, lr=1e-4)

    assert all(verdict.passed for verdict in verdicts), [one.reason for one in verdicts]


@pytest.mark.thorough
def test_small_updates_add_up_until_they_are_conclusive():
    """Each change is far below the noise of a noisy engine; an engine that stays old is caught."""

    class Noisy(CopyEngine):
        calls = 0

        def probe(self, sequences, **options):
            answer = super().probe(sequences, **options)
            rng = np.random.default_rng(type(self).calls)
            type(self).calls += 1
            for rows in answer.values():
                for row in rows:
                    row["scores"] = row["scores"] + 0.05 * rng.normal(size=len(row["scores"]))
            return answer

    def verdicts(**faults):
        model = testing.tiny_model("llama")
        engine = Noisy(model, **faults)
        transport = weights.SharedMemory(model, engine)
        watch = weights.Canary(model, engine, dtype=torch.bfloat16, **SIZES | {"count": 8})
        watch.check(0)
        for version in range(1, 61):
            trained(model, seed=7, lr=3e-4)  # the same way each time
            transport.publish(version)
            yield watch.check(version)

    good, old = list(verdicts()), list(verdicts(asleep={"server 0"}))
    assert all(verdict.passed for verdict in good)
    assert good[0].servers[0].moved is None, "one update alone is not conclusive"
    concluded = [v.servers[0].moved for v in good if v.servers[0].moved is not None]
    assert concluded
    assert min(concluded) > 0.5
    first = next(verdict for verdict in old if not verdict.passed)
    assert first.version > 1
    assert "old weights" in first.reason
    assert first.servers[0].difference < first.tolerance


# ---- calibration ----


def test_other_weights_at_the_first_check_are_refused():
    engine = CopyEngine(testing.tiny_model("llama", seed=1))
    watch = weights.Canary(testing.tiny_model("llama", seed=0), engine, **SIZES)

    with pytest.raises(RuntimeError, match="does not hold the trainer's weights.*dtype="):
        watch.check(0)
    with pytest.raises(RuntimeError, match="does not hold the trainer's weights"):
        watch.check(0)  # nor does a second try calibrate


def test_logprobs_that_leave_temperature_out_fail_the_first_check():
    """Their scores are right, and so is all that is sampled at temperature 1."""
    for temperature in (1.0, 0.5):
        model = testing.tiny_model("llama", initializer_range=0.2)
        engine = CopyEngine(model, raw_logprobs=True)
        watch = weights.Canary(model, engine, temperature=temperature, **SIZES)
        verdict = watch.check(0)

        assert not verdict.passed
        assert "logprobs that are not processed" in verdict.reason
        assert verdict.servers[0].difference < verdict.tolerance


def test_the_trainers_logprobs_at_a_temperature_are_those_of_the_scaled_logits():
    model = testing.tiny_model("llama")
    row = [5, 6, 7, 8, 9]
    (got,) = scoring.trainer_logprobs(model, [row], sampled=[(2, 0.5)])
    logits = model(torch.tensor([row])).logits[0].detach()
    warmth = [1.0, 1.0, 0.5, 0.5]
    expected = [float((logits[i] / warmth[i]).log_softmax(-1)[row[i + 1]]) for i in range(4)]

    np.testing.assert_allclose(got, [0.0, *expected], atol=1e-6)


def test_a_bfloat16_engine_is_refused_if_declared_as_float32():
    model = testing.tiny_model("llama")
    watch = weights.Canary(model, CopyEngine(model, dtype=torch.bfloat16), **SIZES)

    with pytest.raises(RuntimeError, match=r"that torch.float32 explains"):
        watch.check(0)


def test_an_explicit_tolerance_stands():
    verdicts = run(canary={"tolerance": 1e-3})

    assert {verdict.tolerance for verdict in verdicts} == {1e-3}


def test_nan_fails():
    model = testing.tiny_model("llama")
    engine = CopyEngine(model)
    watch = weights.Canary(model, engine, **SIZES)
    watch.check(0)
    engine.servers["server 0"].model.lm_head.weight.data.fill_(math.nan)
    plain = engine.servers["server 0"].go_on
    engine.servers["server 0"].go_on = lambda *_: ([5] * 6, [math.nan] * 6)

    assert plain is not None
    assert not watch.check(0).passed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": None}, "pass the engine on rank 0"),
        ({"new_tokens": 0}, "new_tokens=0"),
        ({"length": 1}, "1 sequence of 2 tokens"),
        ({"count": 0}, "count=0"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"dtype": torch.float8_e4m3fn}, "pass tolerance="),
    ],
)
def test_arguments_out_of_range_are_named(change, message):
    model = testing.tiny_model("llama")
    arguments = {"engine": CopyEngine(model)} | change
    with pytest.raises(ValueError, match=message):
        weights.Canary(model, **arguments)


def test_a_stale_prefix_cache_of_long_blocks_fails():
    """vLLM's blocks of models with recurrent layers have hundreds of tokens."""
    model = testing.tiny_model("llama", max_position_embeddings=1024)
    engine = CopyEngine(model, block=300, clear_cache=False)
    transport = weights.SharedMemory(model, engine)
    watch = weights.Canary(model, engine)
    assert watch.check(0).passed
    trained(model, seed=1, lr=1e-3)
    transport.publish(1)

    verdict = watch.check(1)

    assert not verdict.passed
    assert "the continuation differs by" in verdict.reason


class Server:
    """An engine whose servers' cache is known, or not."""

    def __init__(self, block, context_length=4096):
        self._block, self.context_length = block, context_length

    @property
    def cache_block(self):
        if self._block is None:
            raise RuntimeError("no worker extension")
        return self._block


@pytest.mark.parametrize(
    ("block", "context", "few_show", "few_do_not"),
    [
        (16, 4096, 72, 288),
        (32, 4096, 72, 288),
        (128, 4096, 264, 288),
        (528, 4096, 1064, 1064),
        (528, 1000, 992, 992),
    ],
)
def test_the_length_of_sequences_by_hand(block, context, few_show, few_do_not):
    server = Server(block, context)
    found = [scoring.default_length(server, few_show=one, new_tokens=8) for one in (True, False)]
    assert found == [few_show, few_do_not]


@pytest.mark.parametrize("engine", [Server(None), object()])
def test_the_length_of_sequences_for_an_unknown_cache(engine):
    assert scoring.default_length(engine, few_show=True, new_tokens=8) == 288


@pytest.mark.parametrize(
    ("kind", "dtype", "length"),
    [
        (CopyEngine, torch.float32, 72),
        (CopyEngine, torch.bfloat16, 288),
        (ReadableEngine, torch.bfloat16, 72),
    ],
)
def test_sequences_are_long_where_many_scores_are_needed(kind, dtype, length):
    model = testing.tiny_model("llama", max_position_embeddings=1024)
    watch = weights.Canary(model, kind(model), dtype=dtype)
    assert {len(one) for one in watch.sequences} == {length}


def test_an_engine_that_answers_nonsense_is_an_error():
    model = testing.tiny_model("llama")

    class Short(CopyEngine):
        def probe(self, sequences, **options):
            answer = super().probe(sequences, **options)
            answer["server 0"][1]["scores"] = answer["server 0"][1]["scores"][:-1]
            return answer

    class Gone(CopyEngine):
        def probe(self, sequences, **options):
            return {}

    with pytest.raises(RuntimeError, match="server 0 returned 39 scores for 40 tokens"):
        weights.Canary(model, Short(model), **SIZES).check(0)
    with pytest.raises(RuntimeError, match="no server"):
        weights.Canary(model, Gone(model), **SIZES).check(0)


def test_the_verdict_is_plain_data():
    assert isinstance(attrs.asdict(run(steps=1)[1])["servers"][0]["moved"], float)
