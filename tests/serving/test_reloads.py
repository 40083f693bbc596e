"""Servers that are not sent weights; the receiver itself runs in tests/vllm, with vLLM."""

from types import SimpleNamespace

import pytest

from primerl.serving.worker.reload_refusals import reload_refusal


def parallel(*, enable_eplb):
    """What matters of vLLM's ParallelConfig, which refuses enable_eplb on a CPU."""
    return SimpleNamespace(enable_eplb=enable_eplb)


def test_experts_that_move_are_not_reloaded():
    refused = reload_refusal(parallel_config=parallel(enable_eplb=True), most_rank=0)
    assert "start it without enable_eplb" in refused


def test_a_base_model_under_adapters_is_not_reloaded():
    refused = reload_refusal(parallel_config=parallel(enable_eplb=False), most_rank=8)
    assert "start it without enable_lora" in refused


def test_padded_experts_are_not_reloaded():
    refused = reload_refusal(
        parallel_config=parallel(enable_eplb=False), most_rank=0, padded_experts=16
    )
    assert "experts of 16 intermediate dimensions" in refused
    assert "a multiple of 32" in refused


def test_other_servers_are_reloaded():
    assert reload_refusal(parallel_config=parallel(enable_eplb=False), most_rank=0) == ""


@pytest.mark.parametrize("unsafe", ["ExampleConnector", "LMCacheConnectorV1", "OfTheFuture"])
def test_a_store_of_keys_that_does_not_know_the_weights(unsafe):
    config = parallel(enable_eplb=False)
    for connectors in ([unsafe], ["MultiConnector", "OffloadingConnector", unsafe]):
        refused = reload_refusal(parallel_config=config, most_rank=0, connectors=connectors)
        assert f"KV connector {unsafe} can't be sent weights" in refused
        assert "serving.kv_folder" in refused


def test_connectors_with_which_weights_are_reloaded():
    config = parallel(enable_eplb=False)
    for name in ("FolderConnector", "NixlConnector", "OffloadingConnector"):
        assert reload_refusal(parallel_config=config, most_rank=0, connectors=[name]) == ""
