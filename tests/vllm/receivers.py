"""Loaded by vLLM's process in place of ``WeightReceiver``: with a fault that a test chooses."""

import time

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from primerl._common.digests import digest_of
from primerl.serving.worker.receiver import WeightReceiver
from primerl.serving.worker.transfer_engines import BroadcastTransfer, FolderTransfer


class FaultyTransfer(FolderTransfer):
    fault = ""

    def __init__(self, *args):
        super().__init__(*args)
        self.other = StoreTransfer(*args)
        self.other.other = self

    def prepare(self, update):
        if self.fault == "slow":
            time.sleep(3)
        prepared = super().prepare(update)
        if self.fault == "restarted":  # a new process, which has prepared nothing
            self.shutdown()
        return prepared

    def _load(self, tensors, expected):
        pairs = dict(tensors)
        if self.fault == "lost":
            del pairs["model.layers.1.self_attn.k_proj.weight"]
        if self.fault == "swapped":
            one, two = (f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 1))
            pairs[one], pairs[two] = pairs[two], pairs[one]
        if self.fault == "altered expert":
            pairs["model.layers.1.mlp.experts.3.up_proj.weight"] += 1
        if self.fault == "expert of nobody":
            name = "model.layers.1.mlp.experts.99.up_proj.weight"
            pairs[name] = torch.zeros(3)
            expected = {**expected, name: digest_of(pairs[name])}
        if self.fault == "unreached":  # everything is sent, but the model ignores some of it
            expected = {n: e for n, e in expected.items() if "k_proj" not in n}
            pairs = {n: t for n, t in pairs.items() if n in expected}
        return super()._load(pairs.items(), expected)

    def _load_into_model(self, tensors):
        return super()._load_into_model(self._half(tensors) if self.fault == "half" else tensors)

    def _half(self, tensors):
        for name, tensor in tensors:
            # After k_proj and before v_proj, which make one layer of vLLM's with it.
            if name == "model.layers.1.self_attn.q_proj.weight":
                raise OSError("the file is gone")
            yield name, tensor

    def _discard_half_loaded(self):
        if self.fault != "kept":
            super()._discard_half_loaded()

    def _repack_tied_head(self):
        if self.fault != "no repacked head":
            super()._repack_tied_head()

    def _repack_experts(self):
        if self.fault != "no repacked experts":
            super()._repack_experts()


class StoreTransfer(BroadcastTransfer):
    """Bytes go through a store of the test's instead of NCCL."""

    def _connect(self, place):
        from publishing import StoreCommunicator

        return StoreCommunicator(place)


class FaultyReceiver(WeightReceiver):
    def other_transfer(self):
        """From a folder to a store, and back: what the command line would choose at the start."""
        self.weight_transfer_engine = self.weight_transfer_engine.other

    def set_logprobs_mode(self, mode):
        """As the server's argument ``logprobs_mode`` would have it."""
        sampler = self.model_runner.sampler
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = mode

    def scale_norm(self, factor):
        """Change the base model, of which a server that takes adapters can't be sent another."""
        self.model_runner.model.model.norm.weight.data.mul_(factor)

    def set_fault(self, fault):
        self.weight_transfer_engine.fault = fault


if "primerl_faulty" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("primerl_faulty", FaultyTransfer)
