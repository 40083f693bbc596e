"""Products of the LM head that torch does not compute in float32."""

import logging

import pytest
import torch

from primerl.loss import linear_head_tiles
from tests.helpers.pretended_gpu import GPU, PretendedGPU


@pytest.fixture(autouse=True)
def _forget():
    linear_head_tiles._device_widens.cache_clear()
    yield
    linear_head_tiles._device_widens.cache_clear()


def refuse(*_, **__):
    raise NotImplementedError("out_dtype is not supported here")


def add_twice(device):
    total = torch.zeros(4, 4, device=device)
    x = torch.ones(4, 4, device=device, dtype=torch.bfloat16)
    for first in (True, False):
        linear_head_tiles.add_product(total, x, x, first=first)
    return total


def test_a_refused_product_on_a_gpu_is_logged_once(monkeypatch, caplog):
    plain = torch.mm

    def mm(*factors, out_dtype=None):
        return refuse() if out_dtype else plain(*factors)

    monkeypatch.setattr(torch, "addmm", refuse)
    monkeypatch.setattr(torch, "mm", mm)

    with caplog.at_level(logging.WARNING), PretendedGPU():
        total = add_twice(GPU).cpu()

    assert torch.equal(total, torch.full((4, 4), 8.0))
    assert [record.message.partition(", more slowly: ")[0] for record in caplog.records] == [
        "The LM head rounds sums of products to torch.bfloat16",
        "The LM head rounds products to torch.bfloat16",
    ]
    assert "out_dtype is not supported here" in caplog.text


def test_a_cpu_is_not_expected_to_widen(caplog):
    with caplog.at_level(logging.WARNING):
        add_twice("cpu")

    assert not caplog.records
