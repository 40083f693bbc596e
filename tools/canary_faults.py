"""A faulty vLLM worker for ``canary_table``, loaded into vLLM's process."""

from typing import Any

from primerl.serving.worker.receiver import WeightReceiver


class FaultyWorker(WeightReceiver):
    """A worker that can report logprobs other than those of the tokens it samples."""

    def set_logprobs_mode(self, mode: str) -> None:
        """Set the logprobs mode, like the server's argument ``logprobs_mode``."""
        runner: Any = self.model_runner
        sampler = runner.sampler
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = mode
