"""What ``canary_table`` has vLLM's worker do besides: it is loaded into vLLM's process."""

from typing import Any

from primerl.serving.worker.receiver import WeightReceiver


class FaultyWorker(WeightReceiver):
    """A worker that can be made to log other logprobs than those of what it samples."""

    def set_logprobs_mode(self, mode: str) -> None:
        """As the server's argument ``logprobs_mode`` would have it."""
        runner: Any = self.model_runner
        sampler = runner.sampler
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = mode
