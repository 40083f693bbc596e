"""An engine in this process that holds real copies of the model, with configurable faults."""

import copy

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from primerl._common.checkpoint_tensors import checkpoint_tensors
from primerl.weights.verification.served_tensors import TensorSlice, as_builtins, reading_of


class Replica:
    """One copy of the model, with a prefix cache of keys and values in blocks."""

    def __init__(self, model, *, block, raw_logprobs):
        self.raw_logprobs = raw_logprobs
        self.model = copy.deepcopy(model).eval()
        self.block = block
        self.cached = {}

    def load(self, tensors, skip, swap):
        own = self.model.state_dict()
        with torch.no_grad():
            for name in tensors:
                if not skip(name):
                    own[name].copy_(tensors[swap.get(name, name)])

    @torch.no_grad()
    def score(self, sequence):
        row = torch.tensor([list(sequence)])
        logprobs = self.model(input_ids=row, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return np.concatenate([[0], logprobs.gather(1, row[0, 1:, None])[:, 0].numpy()])

    def continued(self, token_ids, cache):
        # Pass by position, since the name of the cache argument depends on the transformers
        # version.
        return self.model(torch.tensor([token_ids]), None, None, cache, use_cache=True)

    @torch.no_grad()
    def go_on(self, sequence, count, temperature=1.0):
        """Sample with a fixed seed; whole blocks of the prefix come from the cache."""
        whole = (len(sequence) - 1) // self.block * self.block
        prefix = tuple(sequence[:whole])
        if prefix not in self.cached:
            self.cached[prefix] = DynamicCache(config=self.model.config)
            if prefix:
                self.continued(prefix, self.cached[prefix])
        past = copy.deepcopy(self.cached[prefix])
        generator = torch.Generator().manual_seed(0)
        tokens, logprobs, left = [], [], list(sequence[whole:])
        for _ in range(count):
            out = self.continued(left, past)
            row = (out.logits[0, -1].float() / temperature).log_softmax(-1)
            tokens.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
            if self.raw_logprobs:
                row = out.logits[0, -1].float().log_softmax(-1)
            logprobs.append(float(row[tokens[-1]]))
            left = tokens[-1:]
        return tokens, logprobs


class CopyEngine:
    """An engine that receives weights from ``SharedMemory``, and that the canary can probe.

    Args:
        model: the model, which is copied for each server.
        servers: the number of servers.
        skip: a function of a tensor's name, true if the tensor never arrives.
        swap: for a name, the tensor that arrives in its place.
        asleep: servers that ignore updates.
        clear_cache: whether an update clears the prefix cache.
        untied: the head is a copy of tied embeddings that no update reaches.
        dtype: the dtype in which the engine computes.
        raw_logprobs: logprobs of sampled tokens ignore the temperature, as vLLM's do by default.
    """

    def __init__(
        self,
        model,
        *,
        servers=1,
        skip=lambda name: False,
        swap=None,
        asleep=(),
        clear_cache=True,
        untied=False,
        dtype=torch.float32,
        block=16,
        raw_logprobs=False,
    ):
        self.servers = {
            f"server {n}": Replica(model, block=block, raw_logprobs=raw_logprobs)
            for n in range(servers)
        }
        self.skip, self.swap = skip, swap or {}
        self.asleep, self.clear_cache = asleep, clear_cache
        self.updates = []
        for server in self.servers.values():
            server.model.to(dtype)
            if untied:
                head = server.model.get_output_embeddings()
                head.weight = nn.Parameter(head.weight.detach().clone())

    @property
    def cache_block(self):
        """The number of tokens in a block of the prefix cache."""
        return max(server.block for server in self.servers.values())

    @property
    def context_length(self):
        """The longest sequence of the model."""
        return max(one.model.config.max_position_embeddings for one in self.servers.values())

    def update_weights(self, tensors, *, version, timeout_s=1.0):
        self.updates.append(version)
        for name, server in self.servers.items():
            if name not in self.asleep:
                server.load(tensors, self.skip, self.swap)
                if self.clear_cache:
                    server.cached.clear()

    def probe(self, sequences, *, max_new_tokens=8, temperatures, timeout_s=60.0):
        answer = {}
        for name, server in self.servers.items():
            rows = []
            for sequence, temperature in zip(sequences, temperatures, strict=True):
                tokens, logprobs = server.go_on(sequence, max_new_tokens, temperature)
                rows.append(
                    {
                        "scores": server.score(sequence),
                        "token_ids": np.array(tokens),
                        "logprobs": np.array(logprobs),
                    }
                )
            answer[name] = rows
        return answer


class ReadableEngine(CopyEngine):
    """A copy engine that reports the tensors that it holds."""

    def read_weights(self, names, *, turn=0, timeout_s=60.0):
        return {
            server: as_builtins(
                reading_of(tensor, TensorSlice(name=name))
                for name, tensor in checkpoint_tensors(one.model)
                if name in names
            )
            for server, one in self.servers.items()
        }
