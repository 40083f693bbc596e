"""What the KV connector's scheduler and worker decide, without a server."""

import importlib
import warnings
from types import SimpleNamespace

import pytest
import torch

from primerl.serving.worker.chunk_files import WeightsLabel

BLOCK, CHUNK = 2, 4
PLACE, LATER = "12345678-1", "12345678-2"
LABEL = "run-1"


@pytest.fixture(scope="module")
def connectors():
    """The connector's module, imported only when its tests run: the import takes seconds."""
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM's own imports
        return importlib.import_module("primerl.serving.worker.folder_connector")


@pytest.fixture
def make(connectors, tmp_path, monkeypatch):
    monkeypatch.setattr(connectors, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def connector(role, **parallel):
        extra = {"folder": str(tmp_path / "store"), "chunk_tokens": CHUNK}
        sizes = ("pipeline_parallel_size", "prefill_context_parallel_size")
        sizes = {**dict.fromkeys(sizes, 1), "decode_context_parallel_size": 1}
        return connectors.FolderConnector(
            SimpleNamespace(
                kv_transfer_config=SimpleNamespace(
                    engine_id="one",
                    is_kv_consumer=True,
                    is_kv_producer=True,
                    get_from_extra_config=extra.get,
                    kv_connector_extra_config=extra,
                ),
                cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
                model_config=SimpleNamespace(
                    hf_text_config=SimpleNamespace(to_dict=dict), dtype="float32"
                ),
                parallel_config=SimpleNamespace(**{**sizes, "tensor_parallel_size": 1, **parallel}),
            ),
            connectors.KVConnectorRole[role],
            SimpleNamespace(kv_cache_groups=[None]),
        )

    return connector


@pytest.fixture
def pair(make):
    worker, scheduler = make("WORKER"), make("SCHEDULER")
    worker.weights_are(LABEL, PLACE)
    worker._caches = {"layer": torch.arange(24.0).reshape(12, BLOCK)}
    return scheduler, worker


def request(name, prompt, **other):
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=prompt,
        num_prompt_tokens=len(prompt),
        **{
            "cache_salt": LABEL,
            "num_output_tokens": 0,
            "mm_features": [],
            "lora_request": None,
            **other,
        },
    )


def scheduled(scheduler, blocks, *, computed=None, tokens):
    """The copies of a step that computes ``tokens`` tokens of each request."""
    return scheduler.build_connector_meta(
        SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=count)
                for name, count in (computed or dict.fromkeys(tokens, 0)).items()
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens=tokens,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (blocks[name],)),
        )
    )


def forward(worker, copies):
    """Execute a step; return the blocks that could not be loaded."""
    worker.bind_connector_metadata(copies)
    worker.start_load_kv(SimpleNamespace(no_compile_layers={}))
    worker.wait_for_save()
    worker.clear_connector_metadata()
    return worker.get_block_ids_with_load_errors()


def stored(scheduler, worker, prompt):
    asked = request("first", prompt)
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
    scheduler.update_state_after_alloc(asked, None, 0)
    blocks = list(range(-(-len(prompt) // BLOCK)))
    copies = scheduled(scheduler, {"first": blocks}, tokens={"first": len(prompt)})
    assert forward(worker, copies) == set()
    scheduler.request_finished(asked, [])


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 2), (5, 4), (8, 6), (9, 8), (11, 8)])
def test_all_but_the_last_token_are_loaded_in_whole_blocks(pair, length, found):
    scheduler, worker = pair
    prompt = list(range(length))
    stored(scheduler, worker, prompt)
    assert scheduler.get_num_new_matched_tokens(request("again", prompt), 0) == (found, False)
    assert scheduler.get_num_new_matched_tokens(request("again", prompt), 2) == (
        max(0, found - 2),
        False,
    )


def matched(scheduler, name, prompt):
    asked = request(name, prompt)
    count, _ = scheduler.get_num_new_matched_tokens(asked, 0)
    scheduler.update_state_after_alloc(asked, None, count)
    return count


def test_a_damaged_chunk_fails_one_request_only(pair, tmp_path):
    scheduler, worker = pair
    prompt = list(range(9))
    stored(scheduler, worker, prompt)
    path = next(one for one in (tmp_path / "store").rglob("*") if one.is_file())
    path.write_bytes(b"short")
    assert matched(scheduler, "a", prompt) == 8
    step = {"tokens": {"a": 1}, "computed": {"a": 8}}
    damaged = forward(worker, scheduled(scheduler, {"a": [5, 6, 7, 8, 9]}, **step))
    assert damaged in ({5, 6}, {7, 8})
    assert not path.exists()
    assert matched(scheduler, "b", prompt) < 8


def test_nothing_is_stored_that_follows_a_chunk_which_could_not_be_loaded(
    connectors, pair, tmp_path
):
    scheduler, worker = pair
    stored(scheduler, worker, list(range(9)))
    longer = list(range(13))
    assert matched(scheduler, "a", longer) == 8
    for path in (tmp_path / "store").rglob("*.0"):
        path.unlink()
    copies = scheduled(scheduler, {"a": list(range(5, 12))}, tokens={"a": 5}, computed={"a": 8})
    assert len(copies.saves) == 1
    assert forward(worker, copies) == {5, 6, 7, 8}
    # The next step may have been scheduled before the failure was reported.
    late = connectors.StepCopies(saves=copies.saves)
    assert forward(worker, late) == set()
    assert list((tmp_path / "store").rglob("*.0")) == []


def test_other_weights_with_the_same_label(pair):
    """What is to be loaded is loaded; keys of two weights are not stored."""
    scheduler, worker = pair
    prompt = list(range(9))
    stored(scheduler, worker, prompt)
    assert matched(scheduler, "a", prompt) == 8
    worker.weights_are(LABEL, LATER)
    step = {"tokens": {"a": 1}, "computed": {"a": 8}}
    copies = scheduled(scheduler, {"a": [5, 6, 7, 8, 9]}, **step)
    assert {copy.place for copy in copies.loads} == {PLACE}
    new = list(range(20, 29))
    assert matched(scheduler, "b", new) == 0
    worker.weights_are(LABEL, PLACE)
    copies = scheduled(scheduler, {"b": [0, 1, 2, 3, 4]}, tokens={"b": 9})
    assert copies.saves == []


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": None},
        {"cache_salt": "other-1"},
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"num_output_tokens": 1},
    ],
)
def test_prompts_that_are_not_shared(pair, other):
    scheduler, worker = pair
    prompt = list(range(9))
    stored(scheduler, worker, prompt)
    assert scheduler.get_num_new_matched_tokens(request("a", prompt, **other), 0) == (0, False)


def test_a_request_that_ends_before_it_is_scheduled_is_forgotten(pair):
    scheduler, _ = pair
    asked = request("a", list(range(9)))
    scheduler.request_finished(asked, [])
    matched(scheduler, "a", list(range(9)))
    scheduler.request_finished(asked, [])
    assert scheduler._prompts == {}


def test_a_server_begins_without_the_label_of_another_with_its_id(make):
    WeightsLabel("one").set(LABEL, PLACE)
    make("WORKER")
    assert WeightsLabel("one").get() == (None, "")


@pytest.mark.parametrize(
    "name",
    ["pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"],
)
def test_caches_that_are_split_are_refused(make, name):
    with pytest.raises(ValueError, match=f"{name}=2"):
        make("SCHEDULER", **{name: 2})


def test_blocks_that_the_server_has_are_not_written_again(pair):
    """Others may read them; the load begins within a chunk."""
    scheduler, worker = pair
    prompt = list(range(9))
    stored(scheduler, worker, prompt)
    asked = request("again", prompt)
    count, _ = scheduler.get_num_new_matched_tokens(asked, BLOCK)
    assert count == 6
    scheduler.update_state_after_alloc(asked, None, count)
    copies = scheduled(
        scheduler, {"again": [11, 10, 9, 8, 7]}, computed={"again": 8}, tokens={"again": 1}
    )
    cache = worker._caches["layer"]
    before = cache.clone()
    assert forward(worker, copies) == set()
    assert torch.equal(cache[11], before[11]), "it was there"
    assert torch.equal(cache[[10, 9, 8]], before[[1, 2, 3]])
    assert torch.equal(cache[7], before[7]), "computed, not loaded"
