"""Measure which faults the canary detects on real vLLM, and print a Markdown table.

    python tools/canary_table.py --dtype bfloat16 --correct 10 > table.md

SmolLM2-135M is trained for one step at lr 1e-6. For each fault, a copy of the model gets the fault
and is published in place of the model, with correct receipts. Then the canary compares the server
with the trainer. Two columns say which check detected the fault: the comparison of the bytes of the
tensors in use, or the scores alone, as in an engine whose tensors can't be read. Correct
publications of further steps, between the faults, count false alarms.
"""

import argparse
import copy
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from primerl import models, serving, testing, weights

State = dict[str, Tensor]
Fault = Callable[[State, State], None]
"""Changes the tensors of the faulty copy in place; the second argument is the previous version."""
LR = 1e-6


def scaled(pattern: str, factor: float) -> Fault:
    """Multiply every tensor whose name matches the pattern."""

    def make(state: State, _old: State) -> None:
        for tensor in chosen(state, pattern):
            tensor.mul_(factor)

    return make


def noisy(pattern: str, share: float) -> Fault:
    """Add noise whose size is ``share`` of each tensor's root mean square."""

    def make(state: State, _old: State) -> None:
        generator = torch.Generator().manual_seed(0)
        for tensor in chosen(state, pattern):
            size = share * float(tensor.square().mean().sqrt())
            tensor.add_(size * torch.randn(tensor.shape, generator=generator))

    return make


def stale(pattern: str) -> Fault:
    """Keep the previous version of the tensors whose names match the pattern."""

    def make(state: State, old: State) -> None:
        for name in state:
            if re.search(pattern, name):
                state[name].copy_(old[name])

    return make


def swapped(first: str, second: str) -> Fault:
    """Swap two tensors."""

    def make(state: State, _old: State) -> None:
        one = state[first].clone()
        state[first].copy_(state[second])
        state[second].copy_(one)

    return make


def changed(pattern: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Apply ``change`` to every tensor whose name matches the pattern."""

    def make(state: State, _old: State) -> None:
        for tensor in chosen(state, pattern):
            tensor.copy_(change(tensor.clone()))

    return make


def chosen(state: State, pattern: str) -> list[Tensor]:
    """Return the tensors whose names match the pattern."""
    found = [tensor for name, tensor in state.items() if re.search(pattern, name)]
    assert found, pattern
    return found


def flip_signs(tensor: Tensor) -> Tensor:
    """Flip the signs of every 100th row."""
    tensor[::100] *= -1
    return tensor


def truncated_to_bfloat16(tensor: Tensor) -> Tensor:
    """Truncate to bfloat16 instead of rounding."""
    return (tensor.view(torch.int32) & ~0xFFFF).view(torch.float32)


def as_float8(tensor: Tensor) -> Tensor:
    """Round to float8_e4m3 with one scale for the tensor."""
    scale = tensor.abs().max() / 448
    return (tensor / scale).to(torch.float8_e4m3fn).float() * scale


def one_element(tensor: Tensor) -> Tensor:
    """Change one element by 10%."""
    tensor[0, 0] *= 1.1
    return tensor


def layer(number: int, name: str) -> str:
    """Return the name of a weight in a layer."""
    return f"model.layers.{number}.{name}.weight"


FAULTS: dict[str, Fault] = {
    "every norm x 1.01": scaled("norm", 1.01),
    "every norm x 1.004": scaled("norm", 1.004),
    "one norm x 1.05": scaled(r"layers\.7\.input_layernorm", 1.05),
    "final norm x 1.02": scaled(r"model\.norm", 1.02),
    "embedding (and tied head) x 1.01": scaled("embed_tokens", 1.01),
    "embedding: noise of 1%": noisy("embed_tokens", 0.01),
    "every `q_proj` x 1.05": scaled("q_proj", 1.05),
    "one `q_proj` x 1.05": scaled(r"layers\.7\.self_attn\.q_proj", 1.05),
    "one `k_proj` x 1.05": scaled(r"layers\.7\.self_attn\.k_proj", 1.05),
    "every `v_proj` x 1.1": scaled("v_proj", 1.1),
    "one `v_proj` x 1.1": scaled(r"layers\.7\.self_attn\.v_proj", 1.1),
    "one `o_proj`: noise of 5%": noisy(r"layers\.7\.self_attn\.o_proj", 0.05),
    "one `gate_proj`: noise of 10%": noisy(r"layers\.7\.mlp\.gate_proj", 0.1),
    "one `up_proj` x 1.02": scaled(r"layers\.7\.mlp\.up_proj", 1.02),
    "one `down_proj` x 0.98": scaled(r"layers\.7\.mlp\.down_proj", 0.98),
    "everything x 1.001": scaled(".", 1.001),
    "everything: noise of 0.5%": noisy(".", 0.005),
    "`k_proj` of layers 3 and 4 swapped": swapped(
        layer(3, "self_attn.k_proj"), layer(4, "self_attn.k_proj")
    ),
    "gate and up of layer 3 swapped": swapped(layer(3, "mlp.gate_proj"), layer(3, "mlp.up_proj")),
    "norms of layers 8 and 9 swapped": swapped(
        layer(8, "input_layernorm"), layer(9, "input_layernorm")
    ),
    "one `o_proj` transposed": changed(r"layers\.7\.self_attn\.o_proj", lambda one: one.T),
    "one `q_proj`: signs of 1 row of 100": changed(r"layers\.7\.self_attn\.q_proj", flip_signs),
    "one element of one `gate_proj` x 1.1": changed(r"layers\.7\.mlp\.gate_proj", one_element),
    "all of lr 1e-6 stale": stale("."),
    "half of the layers stale": stale(r"layers\.([0-9]|1[0-4])\."),
    "one layer stale": stale(r"layers\.7\."),
    "embedding and head stale": stale("embed_tokens"),
    "one `gate_proj` skipped": stale(r"layers\.7\.mlp\.gate_proj"),
    "one norm skipped": stale(r"layers\.7\.input_layernorm"),
    "matrices cut off to bfloat16": changed("proj", truncated_to_bfloat16),
    "matrices rounded to float8": changed("proj", as_float8),
}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take one policy-gradient step on random text."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3000, 46000, (2, 48), generator=generator)
    logprobs = model(rows).logits[:, :-1].log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0]
    (logprobs * torch.tensor([[1.0], [-1.0]])).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


class WrongTemperature:
    """An engine whose servers sample at a different temperature from the requested one."""

    def __init__(self, engine: serving.VLLMEngine, factor: float) -> None:
        self._engine, self._factor = engine, factor
        self.read_weights = engine.read_weights

    def probe(
        self, sequences: Sequence[Sequence[int]], *, temperatures: Sequence[float], **options: Any
    ) -> dict[str, Any]:
        """Probe the engine at scaled temperatures."""
        return self._engine.probe(
            sequences, temperatures=[self._factor * one for one in temperatures], **options
        )


class Table:
    """A trainer, a faulty copy of the trainer, and a server to publish to."""

    def __init__(self, engine: serving.VLLMEngine, folder: str, dtype: torch.dtype) -> None:
        self.engine = engine
        self.model, _ = models.load_pretrained(folder)
        self.faulty = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)
        self.right = weights.SharedMemory(self.model, engine, dtype=dtype)
        self.wrong = weights.SharedMemory(self.faulty, engine, dtype=dtype)
        self.canary = weights.Canary(self.model, engine, dtype=dtype)
        self.version = -1

    def publish_correctly(self) -> weights.CanaryVerdict:
        """Publish the trainer's weights, and check them with the canary."""
        self.version += 1
        self.right.publish(self.version)
        return self.canary.check(self.version)

    def with_fault(self, fault: Fault, old: State) -> weights.CanaryVerdict:
        """Publish a faulty copy of the trainer's weights, and check them with the canary."""
        self.version += 1
        with torch.no_grad():
            state = dict(self.faulty.named_parameters())
            for name, tensor in self.model.named_parameters():
                state[name].copy_(tensor)
            fault(state, old)
        self.wrong.publish(self.version)
        return self.canary.check(self.version)

    def rows(self, names: list[str], *, correct: int) -> Iterator[str]:
        """Yield the lines of the table."""
        alarms = 0
        yield "| fault | tensors found | scores, nats (tolerance) | by bytes | scores alone |"
        yield "|---|---|---|---|---|"
        assert self.publish_correctly().passed
        old = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        trained(self.model, self.optimizer, 0)
        alarms += not self.publish_correctly().passed
        for name in names:
            yield row(name, self.with_fault(FAULTS[name], old))
        alarms += not self.publish_correctly().passed
        for mode, factor in (("raw_logprobs", 1.0), ("processed_logprobs", 0.7)):
            body = {"method": "set_logprobs_mode", "args": [mode]}
            self.engine.call("/collective_rpc", body)
            self.canary._engine = WrongTemperature(self.engine, factor)
            label = "`logprobs_mode` raw" if factor == 1 else "another temperature (x 0.7)"
            yield row(label, self.publish_correctly())
        self.canary._engine = self.engine
        for step in range(correct):
            trained(self.model, self.optimizer, 1 + step)
            verdict = self.publish_correctly()
            alarms += not verdict.passed
            print(verdict.reason, file=sys.stderr)
        yield f"\n{alarms} false alarms in {2 + correct} correct publications."


def row(name: str, verdict: weights.CanaryVerdict) -> str:
    """Format a line of the table."""
    (one,) = verdict.servers
    print(name, verdict.reason, file=sys.stderr, flush=True)
    by_scores = re.sub(r"tensors differ from the trainer's: [^,]*(, [^ ,]*weight)*", "", one.reason)
    words = ("differ", "shifted", "arrived")
    alone = "yes" if not one.passed and any(word in by_scores for word in words) else "no"
    back = "**yes**" if one.wrong_tensors else "no"
    scores = f"{one.difference:.2g} ({verdict.tolerance:.2g})"
    return f"| {name} | {len(one.wrong_tensors)} | {scores} | {back} | {alone} |"


def main() -> None:
    """Start a server, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--correct", type=int, default=4, help="publications after the faults")
    parser.add_argument("--only", default=".", help="regular expression of fault names")
    arguments = parser.parse_args()
    names = [name for name in FAULTS if re.search(arguments.only, name)]
    with tempfile.TemporaryDirectory() as folder:
        path = str(testing.smollm2(Path(folder) / "smollm2"))
        tools = str(Path(__file__).parent)
        server = serving.serve_vllm(
            path,
            worker_extension_cls="canary_faults.FaultyWorker",
            dtype=arguments.dtype,
            max_model_len=1024,
            max_num_batched_tokens=1024,
            max_num_seqs=8,
            block_size=32,
            env={"PYTHONPATH": os.pathsep.join([tools, os.environ.get("PYTHONPATH", "")])},
        )
        with server, serving.VLLMEngine(server) as engine:
            started = time.monotonic()
            table = Table(engine, path, getattr(torch, arguments.dtype))
            for line in table.rows(names, correct=arguments.correct):
                print(line, flush=True)
            print(f"\n{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
