"""The metrics of servers, as vLLM writes them."""

import asyncio

from scripted_vllm import ScriptedVLLM

from primerl import serving
from primerl._common.engine_usage import READ
from primerl.serving.protocol.metrics import by_rank, totals

PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a model, with {braces}"} 3.0
vllm:num_requests_running{engine="1",model_name="a model, with {braces}"} 4.0
vllm:prefix_cache_hits_total{model_name="m",engine="1"} 1.5e+06
vllm:prefix_cache_hits_total{model_name="n",engine="1"} 2.0
vllm:prefix_cache_hits_created{engine="0"} 1.7e+09
vllm:e2e_bucket{engine="0",le="1"} 7
vllm:cache_config_info{engine="0",block_size="16"} 1.0
process_open_fds 55.0
python_gc_objects{generation="0"} not_a_number
"""


def test_counters_and_gauges_are_summed_over_labels():
    assert totals(PAGE) == {
        "vllm:num_requests_running": 7.0,
        "vllm:prefix_cache_hits_total": 1500002.0,
        "process_open_fds": 55.0,
    }


def test_counters_and_gauges_of_each_data_parallel_rank():
    assert by_rank(PAGE) == {
        0: {"vllm:num_requests_running": 3.0},
        1: {"vllm:num_requests_running": 4.0, "vllm:prefix_cache_hits_total": 1500002.0},
    }
    assert by_rank("") == by_rank("process_open_fds 55.0") == {}


def test_only_the_named_metrics_of_each_rank():
    assert by_rank(PAGE, names=READ) == by_rank(PAGE)
    assert by_rank(PAGE, names=["vllm:prefix_cache_hits_total"]) == {
        1: {"vllm:prefix_cache_hits_total": 1500002.0}
    }
    assert by_rank(PAGE, names=["vllm:prefix_cache_hits"]) == {}


def test_servers_that_do_not_answer_are_left_out():
    with (
        ScriptedVLLM(ranks=2) as good,
        ScriptedVLLM() as broken,
        ScriptedVLLM() as dead,
        serving.VLLMEngine([good, broken, dead]) as engine,
    ):
        engine.adopt(0)
        assert set(asyncio.run(engine.poll_metrics())) == {good.url, broken.url, dead.url}
        broken.faults["/metrics"] = [(500, "no metrics")] * 100
        dead.kill()
        found = asyncio.run(engine.poll_metrics())
    assert found == {
        good.url: {
            0: {"vllm:num_requests_running": 0.0},
            1: {"vllm:num_requests_running": 1.0},
        }
    }
