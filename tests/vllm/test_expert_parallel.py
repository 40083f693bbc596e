"""New weights for two workers of one server, each with half of the experts.

vLLM 0.32 loads experts like this on a CPU, but computes with them only on a GPU.
"""

import contextlib

import pytest
from publishing import train

from primerl import models, serving, weights


def test_each_worker_loads_and_checks_its_own_experts(tied_experts, two_workers, tmp_path):
    model, _ = models.load_pretrained(tied_experts)
    engine = serving.VLLMEngine(two_workers)

    def tell(fault):
        engine.call("/collective_rpc", {"method": "set_fault", "args": [fault]})

    with contextlib.closing(engine):
        transport = weights.Disk(model, engine, folder=tmp_path / "w", encoding="delta")
        for version in (1, 2):
            train(model, scale=0.05, fraction=1.0, seed=version)
            receipt = transport.publish(version)
            ((one, two),) = receipt.servers.values()
            assert one["digest"] == two["digest"] == receipt.digest
            assert one["ignored"] == two["ignored"] == []

        tell("altered expert")
        with pytest.raises(RuntimeError, match=r"'differing': \['model.layers.1.mlp.experts.3.up"):
            transport.publish(3)

        tell("expert of nobody")
        with pytest.raises(RuntimeError, match=r"coverage: model.layers.1.mlp.experts.99.up_proj"):
            transport.publish(4)

        tell("")
        assert transport.publish(5).version == 5
