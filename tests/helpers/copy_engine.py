"""An engine in this process that really holds copies of the model, and can be made to fail."""

import copy

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from primerl._common.checkpoint_tensors import checkpoint_tensors
from primerl.weights.verification.served_tensors import Part, as_builtins, reading_of


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
        # By position: the cache's name depends on the version of transformers.
        return self.model(torch.tensor([token_ids]), None, None, cache, use_cache=True)

    @torch.no_grad()
    def go_on(self, sequence, count, temperature=1.0):
        """Sampled with a fixed seed; whole blocks of the prefix come from the cache."""
        whole = (len(sequence) - 1) // self.block * self.block
        prefix = tuple(sequence[:whole])
        if prefix not in self.cached:
            self.cached[prefix] = DynamicCache(config=self.model.config)
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
    """Receives weights as ``SharedMemory`` sends them, and is probed by the canary.

    Args:
        model: copied for each replica.
        replicas: how many.
        skip: names of tensors that never arrive, as a function.
        swap: for a name, the tensor that arrives in its place.
        asleep: replicas that take no update.
        clear_cache: whether an update clears the prefix cache.
        untied: the head is a copy of tied embeddings that no update reaches.
        dtype: that it computes in.
        raw_logprobs: those of sampled tokens leave temperature out, as vLLM's do by default.
    """

    def __init__(
        self,
        model,
        *,
        replicas=1,
        skip=lambda name: False,
        swap=None,
        asleep=(),
        clear_cache=True,
        untied=False,
        dtype=torch.float32,
        block=16,
        raw_logprobs=False,
    ):
        self.replicas = {
            f"replica {n}": Replica(model, block=block, raw_logprobs=raw_logprobs)
            for n in range(replicas)
        }
        self.skip, self.swap = skip, swap or {}
        self.asleep, self.clear_cache = asleep, clear_cache
        self.updates = []
        for replica in self.replicas.values():
            replica.model.to(dtype)
            if untied:
                head = replica.model.get_output_embeddings()
                head.weight = nn.Parameter(head.weight.detach().clone())

    def update_weights(self, tensors, *, version, timeout_s=1.0):
        self.updates.append(version)
        for name, replica in self.replicas.items():
            if name not in self.asleep:
                replica.load(tensors, self.skip, self.swap)
                if self.clear_cache:
                    replica.cached.clear()

    def probe(self, sequences, *, max_new_tokens=8, temperatures, timeout_s=60.0):
        answer = {}
        for name, replica in self.replicas.items():
            rows = []
            for sequence, temperature in zip(sequences, temperatures, strict=True):
                tokens, logprobs = replica.go_on(sequence, max_new_tokens, temperature)
                rows.append(
                    {
                        "scores": replica.score(sequence),
                        "token_ids": np.array(tokens),
                        "logprobs": np.array(logprobs),
                    }
                )
            answer[name] = rows
        return answer


class ReadableEngine(CopyEngine):
    """A copy engine that says what it holds."""

    def read_weights(self, names, *, turn=0, timeout_s=60.0):
        return {
            replica: as_builtins(
                reading_of(tensor, Part(name=name))
                for name, tensor in checkpoint_tensors(one.model)
                if name in names
            )
            for replica, one in self.replicas.items()
        }
