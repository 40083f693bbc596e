"""Run by tests/vllm/test_adapters.py: prints how far vLLM's logprobs are from the trainer's.

python serve_adapter.py MODEL ADAPTER: the second is written. First with the adapter, then without.
"""

import os
import sys

import peft
import torch

from primerl import loss, models

IDS = torch.tensor([504, 3575, 282, 4649, 314, 7042, 30, 198])


def scored(model):
    logprobs = loss.model_logprobs(model, IDS, torch.arange(len(IDS)), IDS.roll(-1))
    return logprobs[:-1].detach()


def train(folder, adapter):
    model, _ = models.load_pretrained(folder)
    plain = scored(model)
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    peft.inject_adapter_in_model(config, model)
    models.save_adapters(model, adapter)
    return scored(model), plain


def serve(folder, adapter):
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        folder,
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        enforce_eager=True,
        max_model_len=256,
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    prompt = {"prompt_token_ids": IDS.tolist()}
    (done,) = llm.generate(prompt, params, lora_request=LoRARequest("adapter", 1, adapter))
    pairs = zip(IDS.tolist()[1:], done.prompt_logprobs[1:], strict=True)
    return torch.tensor([of_token[token].logprob for token, of_token in pairs])


if __name__ == "__main__":
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    model, adapter = sys.argv[1:]
    ours, plain = train(model, adapter)
    served = serve(model, adapter)
    gaps = [(other - ours).abs().max().item() for other in (served, plain)]
    print("gaps", *gaps, flush=True)
