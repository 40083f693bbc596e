"""A fake of the library DeepEP on gloo, which follows its documentation."""

import torch
import torch.distributed as dist


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, ranks):
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, ranks):
        return 0


class Buffer:
    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        assert num_nvl_bytes > 0
        self.group, self.ranks = group, dist.get_world_size(group)

    @staticmethod
    def get_dispatch_config(ranks):
        return Config()

    @staticmethod
    def get_combine_config(ranks):
        return Config()

    def get_dispatch_layout(self, topk_idx, num_experts):
        here = num_experts // self.ranks
        goes = torch.stack([(topk_idx // here == r).any(1) for r in range(self.ranks)], 1)
        per_expert = torch.bincount(topk_idx.reshape(-1), minlength=num_experts)
        return goes.sum(0), None, per_expert, goes, None

    def _exchange(self, parts):
        """Send one tensor to each rank, and receive one from each rank."""
        sent = torch.tensor([len(part) for part in parts])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        out = parts[0].new_empty(int(received.sum()), *parts[0].shape[1:])
        sizes = received.tolist()
        dist.all_to_all_single(
            out, torch.cat(parts).contiguous(), sizes, sent.tolist(), group=self.group
        )
        return out, sizes

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
    ):
        if handle is not None:
            rows, _, _ = handle
            return self._exchange([x[r] for r in rows])[0], None, None, None, handle, None
        rows = [goes.nonzero().flatten() for goes in is_token_in_rank.T]
        arrived, sizes = self._exchange([x[r] for r in rows])
        here = len(num_tokens_per_expert) // self.ranks
        local = []
        for rank, of_rank in enumerate(rows):
            index = topk_idx[of_rank] - rank * here
            local.append(index.where((index >= 0) & (index < here), -1))
        indices, _ = self._exchange(local)
        weights, _ = self._exchange([topk_weights[r] for r in rows])
        weights = weights * (indices >= 0)
        counts = torch.bincount(indices[indices >= 0], minlength=here).tolist()
        return arrived, indices, weights, counts, (rows, sizes, len(x)), None

    def combine(self, x, handle, topk_weights=None):
        rows, sizes, tokens = handle

        def back(values):
            parts = self._exchange(list(values.split(sizes)))[0].split([len(r) for r in rows])
            whole = values.new_zeros(tokens, *values.shape[1:])
            for of_rank, part in zip(rows, parts, strict=True):
                whole.index_add_(0, of_rank, part)
            return whole

        return back(x), None if topk_weights is None else back(topk_weights), None
