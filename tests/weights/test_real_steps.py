import os

import pytest
import torch
from publishing import Replicas, same_bits
from smollm2_steps import bf16_rounded, steps

from primerl import models, weights


@pytest.mark.slow
def test_a_delta_of_a_real_step_is_exact_and_below_one_percent(request, tmp_path):
    """SmolLM2 from weights in bfloat16, AdamW in float32 at lr 1e-6: a few words in a thousand."""
    folder = os.environ.get("PRIMERL_SMOLLM2") or request.getfixturevalue("smollm2_folder")
    model, tokenizer = bf16_rounded(folder)
    servers = Replicas()
    transport = weights.Disk(
        model, servers, folder=tmp_path, encoding="delta", dtype=torch.bfloat16
    )
    whole = transport.publish(0).bytes
    shares = []
    for step in steps(model, tokenizer, count=3):
        receipt = transport.publish(step)
        assert receipt.kind == "delta"
        shares.append(receipt.bytes / whole)
        held = servers.workers["http://replica0"].tensors
        expected = dict(models.checkpoint_tensors(model, dtype=torch.bfloat16))
        assert same_bits(held, expected)
        print(f"step {step}: {receipt.bytes:,} bytes of {whole:,}: {shares[-1]:.2%}")
    assert max(shares) <= 0.01
    servers.close()
