"""Tensors that an engine computes with, compared with those that were published."""

import json

import attrs
import pytest
import torch
import whole_comparison
from copy_engine import ReadableEngine
from forked_ranks import forked_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl import models, testing, weights
from primerl._common.digests import content_of, digest_of, digest_of_contents, raw_bytes
from primerl.serving.worker.tracked_tensors import TrackedTensors
from primerl.weights.transports.receipts import check_receipts
from primerl.weights.verification.comparison import combine, distinct_readings, examine
from primerl.weights.verification.served_tensors import (
    BYTES,
    CONTENT,
    TensorSlice,
    as_builtins,
    from_builtins,
    reading_of,
    rearranged_reading,
)

SIZES = {"count": 3, "length": 40, "new_tokens": 6}


def matrix(*, dtype=torch.float32, seed=0, shape=(6, 8)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compared_by_ranks(ranks, servers, wire):
    """Compare as the ranks do, each with its own tensors; results travel as JSON."""
    readings = from_builtins(json.loads(json.dumps(as_builtins(distinct_readings(servers)))))
    found = [examine(tensors.items(), readings, wire=wire).as_json() for tensors in ranks]
    return combine(servers, readings, json.loads(json.dumps(found)))


def compared(tensors, readings, wire=torch.float32):
    return compared_by_ranks([tensors], {"server": readings}, wire)["server"]


# ---- readings ----


@given(
    row=st.integers(0, 5),
    column=st.integers(0, 7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_element_that_is_the_next_number_is_seen(row, column, dtype):
    own = matrix(dtype=dtype)
    held = own.clone()
    bits = held.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[row, column] += 1

    assert compared({"w": own}, [reading_of(own.clone(), TensorSlice(name="w"))]).wrong == ()
    assert compared({"w": own}, [reading_of(held, TensorSlice(name="w"))]).wrong == ("w",)
    assert compared({"w": own}, [rearranged_reading(held, [TensorSlice(name="w")])]).wrong == ("w",)


@given(
    rows=st.tuples(st.integers(0, 2), st.integers(3, 6), st.integers(1, 2)),
    columns=st.tuples(st.integers(0, 3), st.integers(4, 8), st.integers(1, 3)),
)
def test_a_part_is_compared_with_the_same_part(rows, columns):
    own = matrix()
    part = TensorSlice(name="w", rows=rows, columns=columns)
    held = own[slice(*rows)][:, slice(*columns)].contiguous()

    assert compared({"w": own}, [reading_of(held, part)]).wrong == ()
    assert compared({"w": own}, [reading_of(held + 1e-3, part)]).wrong == ("w",)
    assert compared({"w": own + 1e-3}, [reading_of(held, part)]).wrong == ("w",)


@given(seed=st.integers(0, 9), padding=st.integers(0, 5))
def test_rearranged_parts_are_compared_by_their_elements(seed, padding):
    gate, up = matrix(seed=1), matrix(seed=2)
    order = torch.randperm(96 + padding, generator=torch.Generator().manual_seed(seed))
    held = torch.cat([gate.flatten(), up.flatten(), torch.zeros(padding)])[order]
    parts = [TensorSlice(name="gate"), TensorSlice(name="up")]
    tensors = {"up": up, "other": matrix(), "gate": gate}

    found = compared(tensors, [rearranged_reading(held, parts)])
    assert (found.published, found.compared, found.wrong) == (3, 2, ())
    held[int(order.argmin())] *= 1.01
    assert compared(tensors, [rearranged_reading(held, parts)]).wrong == ("gate", "up")


def test_a_merged_tensor_with_a_part_that_was_never_published_is_wrong():
    held = torch.cat([matrix(seed=1), matrix(seed=2)])
    reading = rearranged_reading(held, [TensorSlice(name="gate"), TensorSlice(name="up")])

    assert compared({"gate": matrix(seed=1)}, [reading]).wrong == ("gate", "up")


CONJUGATED = torch.tensor([[1 + 2j, 3 - 4j], [5 + 6j, 7 - 8j]]).conj()


@pytest.mark.parametrize(
    ("view", "values"),
    [
        (CONJUGATED, [[1 - 2j, 3 + 4j], [5 - 6j, 7 + 8j]]),
        (CONJUGATED.T, [[1 - 2j, 5 - 6j], [3 + 4j, 7 + 8j]]),
        (CONJUGATED[0, 0], 1 - 2j),
        (CONJUGATED[:0], [[], []]),
        (CONJUGATED.imag, [[-2.0, 4.0], [-6.0, 8.0]]),
        (CONJUGATED[1:, 1:].imag, [[8.0]]),
        (CONJUGATED.real[:, 1], [3.0, 7.0]),
        (torch.arange(12.0)[1::3], [1.0, 4.0, 7.0, 10.0]),
        (torch.arange(2).expand(2, 2), [[0, 1], [0, 1]]),
    ],
)
def test_a_digest_is_that_of_the_values_however_they_are_stored(view, values):
    plain = torch.tensor(values, dtype=view.dtype).reshape(view.shape)
    assert raw_bytes(view).tobytes() == plain.numpy().tobytes()
    assert digest_of(view) == digest_of(plain)
    assert content_of(view) == content_of(plain)


def test_contents_are_sums_modulo_2_to_the_64():
    first = torch.tensor([3, -5], dtype=torch.int16).view(torch.bfloat16)
    # sum -2, sum of squares 34
    assert content_of(first) == (-2, 34)
    assert digest_of_contents([(-2, 34), (2, 2**64)]) == f"{0:016x}{34:016x}"


def test_rounded_and_unrounded_values_both_pass_in_a_wider_dtype():
    own = matrix()
    for held in (own, own.bfloat16().float()):
        part = TensorSlice(name="w")
        assert compared({"w": own}, [reading_of(held, part)], torch.bfloat16).wrong == ()
    cut_off = (own.view(torch.int32) & ~0xFFFF).view(torch.float32)
    for held in (cut_off, cut_off.bfloat16()):
        assert compared({"w": own}, [reading_of(held, part)], torch.bfloat16).wrong == ("w",)


# ---- by ranks ----

NAMES = ["a", "b", "c", "d", "a_scale_inv"]
PUBLISHED = {
    name: matrix(seed=seed, dtype=torch.float32 if name.startswith("a") else torch.bfloat16)
    for seed, name in enumerate(NAMES)
} | {"counts": torch.arange(12).reshape(3, 4)}


SPANS = st.sampled_from([None, (0, 2, 1), (1, 3, 2)])


def parts_of(*names):
    part = st.tuples(st.sampled_from(names), SPANS, SPANS, st.booleans())
    return st.lists(part, min_size=1, max_size=3)


READINGS = st.fixed_dictionaries(
    {
        "parts": parts_of(*"abcd", "unknown") | parts_of("a_scale_inv") | parts_of("counts"),
        "kind": st.sampled_from([BYTES, CONTENT]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "right": st.sampled_from([True, True, True, False]),
        "seed": st.integers(0, 3),
    }
)


def drawn_reading(*, parts, kind, dtype, right, seed, wire):
    """A reading as an engine may report it: right, wrong, rounded, or of an unknown tensor."""
    slices, held = [], []
    for name, rows, columns, rounded in parts if kind == CONTENT else parts[:1]:
        whole = PUBLISHED.get(name, matrix(seed=9))
        slices.append(TensorSlice(name=name, rows=rows, columns=columns))
        own = slices[-1].of(whole)
        own = own.to(wire) if rounded and own.is_floating_point() else own
        held.append(own.to(dtype).reshape(-1))
    values = torch.cat(held) + (not right)
    if kind == BYTES:
        return reading_of(values, slices[0])
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    return rearranged_reading(values[order], slices)


@settings(max_examples=300, deadline=None)
@given(
    drawn=st.lists(READINGS, min_size=1, max_size=6),
    held=st.lists(st.sets(st.integers(0, 5)), min_size=2, max_size=2),
    owners=st.lists(st.integers(0, 2), min_size=len(PUBLISHED), max_size=len(PUBLISHED)),
    wire=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_ranks_find_what_one_rank_with_all_tensors_finds(drawn, held, owners, wire):
    """However the tensors are divided, also if a rank has none or parts have several owners."""
    readings = [drawn_reading(**one, wire=wire) for one in drawn]
    servers = {
        f"server {n}": [readings[i] for i in chosen if i < len(readings)]
        for n, chosen in enumerate(held)
    }
    ranks = [
        {name: t for (name, t), owner in zip(PUBLISHED.items(), owners, strict=True) if owner == n}
        for n in range(3)
    ]
    expected = whole_comparison.compare(PUBLISHED.items(), servers, wire=wire)

    assert compared_by_ranks(ranks, servers, wire) == expected


def test_parts_of_a_rearranged_tensor_may_have_different_owners():
    gate, up = matrix(seed=1), matrix(seed=2)
    reading = rearranged_reading(
        torch.cat([up.flatten(), gate.flatten()]),
        [TensorSlice(name="gate"), TensorSlice(name="up")],
    )
    found = compared_by_ranks([{"gate": gate}, {}, {"up": up}], {"a": [reading]}, torch.float32)
    assert (found["a"].published, found["a"].compared, found["a"].wrong) == (2, 2, ())
    found = compared_by_ranks([{"gate": gate}, {"up": gate}], {"a": [reading]}, torch.float32)
    assert found["a"].wrong == ("gate", "up")


def test_equal_readings_of_many_servers_are_compared_once():
    readings = [reading_of(matrix(), TensorSlice(name="w")) for _ in range(9)]

    assert distinct_readings({str(n): [one] for n, one in enumerate(readings)}) == readings[:1]


def test_ranks_compare_the_layers_that_they_own(root, tmp_path):
    done = forked_ranks(root / "tests/ranks/tensor_comparison.py", tmp_path, ranks=3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    ranks = [json.loads((tmp_path / f"found-{n}.json").read_text()) for n in range(3)]
    first = ranks[0]

    assert first["got"] == [one for one in first["expected"] for _ in range(2)]
    assert len(first["wrong"]) == 3, "also merged adapters, and weights without adapters"
    for results, wrong in zip(first["expected"], first["wrong"], strict=True):
        right, off = results["right"], results["wrong"]
        assert right["wrong"] == []
        assert off["wrong"] == [wrong]
        assert off["compared"] == off["published"] - 1
    assert all(rank["got"] == [{}] * 6 for rank in ranks[1:])
    assert sum(rank["examined"] for rank in ranks) == first["whole"]
    shares = [rank["examined"] for rank in ranks]
    assert max(shares) < 1.5 * min(shares)
    for rank in ranks:  # experts: one fused and those cut from it
        assert 0 < rank["peak"] <= 2 * first["layer"] < first["whole"] / 2
    assert "not callable" in ranks[1]["failure"]
    for n in (0, 2):
        assert ranks[n]["failure"].startswith("rank 1 failed: TypeError")


def test_readings_survive_json():
    held = matrix()
    readings = [
        reading_of(held[:2], TensorSlice(name="a", rows=(0, 2, 1))),
        rearranged_reading(held, [TensorSlice(name="a"), TensorSlice(name="b", columns=(1, 8, 2))]),
    ]

    assert from_builtins(json.loads(json.dumps(as_builtins(readings)))) == readings
    for broken in ({}, {"parts": []}, attrs.asdict(readings[0]) | {"dtype": "nn"}):
        with pytest.raises(RuntimeError, match="malformed"):
            from_builtins([broken])


# ---- in the canary ----


def watched(dtype, **faults):
    model = testing.tiny_model("qwen3_moe")
    engine = ReadableEngine(model, dtype=dtype, **faults)
    watch = weights.Canary(model, engine, dtype=dtype, **SIZES)
    assert watch.check(0).passed
    return model, engine, watch


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_far_below_the_noise_is_seen_in_any_tensor(dtype):
    model, engine, watch = watched(dtype)
    held = engine.servers["server 0"].model.state_dict()
    for version, name in enumerate(model.state_dict(), start=1):
        kept = held[name].clone()
        held[name].mul_(1.01)
        verdict = watch.check(version)
        held[name].copy_(kept)

        assert not verdict.passed, name
        assert verdict.servers[0].wrong_tensors, name
        assert "tensors differ from the trainer's: " in verdict.reason
    verdict = watch.check(99)
    assert verdict.passed, verdict.reason
    assert "tensors are the trainer's bit for bit" in verdict.reason
    assert "by scores alone, a fault of" in verdict.reason
    (one,) = verdict.servers
    assert one.compared_tensors == one.tensors == len(dict(models.checkpoint_tensors(model)))


def test_one_stale_layer_at_1e_6_is_seen_in_bfloat16():
    model, engine, watch = watched(torch.bfloat16, skip=lambda name: "layers.1." in name)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-6 * torch.randn(parameter.shape, generator=generator).sign()
    weights.SharedMemory(model, engine).publish(1)
    verdict = watch.check(1)

    assert verdict.servers[0].difference < verdict.tolerance, "scores don't tell"
    assert {name.split(".")[2] for name in verdict.servers[0].wrong_tensors} == {"1"}


def test_an_engine_without_read_weights_is_checked_by_its_scores_alone(caplog):
    class Unable(ReadableEngine):
        def read_weights(self, names, *, turn=0, timeout_s=60.0):
            raise RuntimeError("there is no such method")

    model = testing.tiny_model("llama")
    watch = weights.Canary(model, Unable(model), **SIZES)

    for version in range(2):
        assert "no tensor was compared" in watch.check(version).reason
    assert [one.message for one in caplog.records] == [
        "the engine's tensors can't be read, so only scores are compared: there is no such method"
    ]


def test_a_server_that_is_busy_at_the_first_check_is_compared_at_the_next():
    class Busy(ReadableEngine):
        asked = 0

        def read_weights(self, names, *, turn=0, timeout_s=60.0):
            self.asked += 1
            if self.asked == 1:
                raise RuntimeError("/collective_rpc answered 503")
            return super().read_weights(names, turn=turn, timeout_s=timeout_s)

    model = testing.tiny_model("llama")
    watch = weights.Canary(model, Busy(model), **SIZES)

    assert "no tensor was compared" in watch.check(0).reason
    assert "no tensor was compared" not in watch.check(1).reason


# ---- what a server ignores ----


def test_tensors_that_a_loader_skips_are_named():
    kept = {name: torch.zeros(2, 2) for name in ("a", "b", "c", "d")}
    given = ((name, torch.ones(2, 2)) for name in (*kept, "skipped", "inv_freq"))
    with TrackedTensors(given) as handed:
        for name, tensor in handed:
            if name == "a":
                kept[name].copy_(tensor)
            elif name == "b":
                kept[name][:1] = tensor.narrow(0, 0, 1)
            elif name == "c":
                kept[name] = tensor.to(torch.bfloat16)
            elif name == "d":
                kept[name] = torch.cat([tensor, tensor])

    assert handed.ignored == ["inv_freq", "skipped"]
    assert all(type(one) is torch.Tensor for one in kept.values())
    assert all(float(one.sum()) in (4.0, 2.0, 8.0) for one in kept.values())


def receipt(**fields):
    return {"version": 1, "digest": "d", "tensors": 2, **fields}


def test_a_tensor_that_every_rank_ignores_did_not_arrive():
    def check(*workers):
        check_receipts({"url": list(workers)}, version=1, digest="d", tensors=2)

    check(receipt(), receipt(ignored=["a"]))
    check(receipt(ignored=["b"]), receipt(ignored=["a"]))
    with pytest.raises(RuntimeError, match=r"lm_head.weight was sent to url.*tied"):
        check(receipt(ignored=["lm_head.weight"]), receipt(ignored=["a", "lm_head.weight"]))


def test_a_tensor_that_one_server_ignores_did_not_arrive_there_though_another_uses_it():
    servers = {
        "http://a": [receipt(), receipt(ignored=["b"])],
        "http://b": [receipt(ignored=["a", "b"]), receipt(ignored=["b"])],
        "http://c": [receipt(ignored=["b", "c"])],
    }
    with pytest.raises(RuntimeError, match="did not arrive") as error:
        check_receipts(servers, version=1, digest="d", tensors=2)
    assert "b was sent to http://b but is not used there" in str(error.value)
    assert "b, c was sent to http://c but" in str(error.value)
    assert "http://a" not in str(error.value)
