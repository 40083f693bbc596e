"""Write the tables of ``docs/sizes.md``: which models the recipes train on one GPU, by planning.

    python tools/size_tables.py [--check]

Each recipe is planned as it is, then with the flags that need less memory, in this order.
``--check`` compares the page in the repository with the plans, and writes nothing.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import attrs
import torch

from primerl import models, parallel, planning

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/sizes.md"
GIB = 2**30
GPUS = {"24 GB": 23.5, "48 GB": 47.4, "80 GB": 79.1, "141 GB": 139.8}
"""GiB that torch can allocate on a GPU, by its size on paper."""
CACHE_SHARE = 0.15  # of the memory that is free when the embedded engine starts
COMMON = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
}
SHAPES = {  # the published configurations
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": True},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": False},
    "Qwen3-30B-A3B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
                      "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                      "tie_word_embeddings": False},
}  # fmt: skip


@attrs.frozen(kw_only=True)
class RecipeSettings:
    """Flags of a recipe that decide how much memory it needs."""

    words: str
    recompute: bool = False
    lora_rank: int = 0


SETTINGS = (
    RecipeSettings(words="as it is"),
    RecipeSettings(words="`--recompute`", recompute=True),
    RecipeSettings(words="LoRA, `--recompute`", recompute=True, lora_rank=16),
)
RECIPES = ("sft.py", "async_grpo.py")
PACK_TOKENS = 4096


def build(name: str) -> Any:
    """Build a model without values, in float32, as the recipes load it."""
    import transformers

    shape = COMMON | SHAPES[name]
    config_class = (
        transformers.Qwen3MoeConfig if "num_experts" in shape else transformers.Qwen3Config
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            config_class(**shape), dtype=torch.float32
        )


def prepare(model: Any, mesh: parallel.Mesh, settings: RecipeSettings) -> torch.optim.Optimizer:
    """Set a model up as the recipes do."""
    if settings.lora_rank:
        import peft

        targets = models.adapter_targets(model)
        rank = settings.lora_rank
        adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        peft.inject_adapter_in_model(adapters, model)
    if settings.recompute:
        parallel.recompute(model.train())
    parallel.shard(model, mesh, dtype=torch.bfloat16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0)


def trainer_memory(name: str, settings: RecipeSettings) -> planning.RankMemory:
    """Plan the memory of a trainer with one GPU."""
    (plan,) = planning.plan_trainers(
        lambda: build(name),
        lambda model, mesh: prepare(model, mesh, settings),
        [planning.TrainerLayout(nodes=1, gpus_per_node=1)],
        tokens=PACK_TOKENS,
        gpu_bytes=2**60,
        allowances=planning.Allowances(communicators=0, imbalance=0.0),
    )
    if not plan.ranks:
        raise RuntimeError(f"{name}, {settings.words}: {plan.refusal}")
    return plan.ranks[0]


def engine_memory(name: str) -> int:
    """Return the bytes of the embedded engine's copy of the weights, in bfloat16."""
    server = planning.plan_server(
        build(name), gpus=1, max_model_len=4096, max_num_seqs=1, gpu_bytes=2**60
    )
    return server.weights


@attrs.frozen(kw_only=True)
class RecipeMemory:
    """Bytes that a recipe needs on one GPU."""

    settings: RecipeSettings
    trainer: planning.RankMemory
    engine: int = 0
    """The engine's copy of the weights."""

    def fits(self, gpu_bytes: float) -> bool:
        """Return whether a GPU has room, also for the KV cache of an engine.

        The engine starts when the GPU holds the parameters and the engine's copy of them.
        """
        needed = self.trainer.device + self.engine
        free = gpu_bytes - self.trainer.parameters - self.engine
        return needed + (CACHE_SHARE * free if self.engine else 0.0) <= gpu_bytes


def plans() -> dict[str, dict[str, list[RecipeMemory]]]:
    """Plan all models with all settings, by recipe and model."""
    found: dict[str, dict[str, list[RecipeMemory]]] = {recipe: {} for recipe in RECIPES}
    for name in SHAPES:
        trainers = [trainer_memory(name, one) for one in SETTINGS]
        for recipe, engine in zip(RECIPES, (0, engine_memory(name)), strict=True):
            found[recipe][name] = [
                RecipeMemory(settings=one, trainer=trainer, engine=engine)
                for one, trainer in zip(SETTINGS, trainers, strict=True)
            ]
    return found


def fitting_table(by_model: dict[str, list[RecipeMemory]]) -> str:
    """Return a table of the first settings that fit, by model and GPU."""
    rows = [f"| | {' | '.join(GPUS)} |", f"|---|{'---|' * len(GPUS)}"]
    for name, memories in by_model.items():
        cells = []
        for size in GPUS.values():
            fitting = (one.settings.words for one in memories if one.fits(size * GIB))
            cells.append(next(fitting, "no"))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def bytes_table(by_model: dict[str, list[RecipeMemory]]) -> str:
    """Return a table of what the memory consists of, in GiB."""
    names = ("parameters", "gradients", "optimizer", "activations", "working", "other", "engine")
    rows = [f"| | flags | {' | '.join(names)} | sum |", f"|---|---|{'---:|' * 8}"]
    for name, memories in by_model.items():
        for one in memories:
            parts = one.trainer.by_name
            shown = [parts[part] for part in names[:5]]
            sizes = [*shown, one.trainer.device - sum(shown), one.engine]
            cells = [f"{size / GIB:.1f}" for size in (*sizes, sum(sizes))]
            rows.append(f"| {name} | {one.settings.words} | {' | '.join(cells)} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the page with the tables of today's plans."""
    found = plans()
    for recipe, by_model in found.items():
        for kind, table in (("fits", fitting_table), ("bytes", bytes_table)):
            begin, end = f"<!-- {recipe} {kind} -->", "<!-- end -->"
            if text.count(begin) != 1:
                raise ValueError(f"{PAGE} has {begin!r} {text.count(begin)} times; expected once")
            before, rest = text.split(begin)
            _, after = rest.split(end, maxsplit=1)
            text = f"{before}{begin}\n{table(by_model)}\n{end}{after}"
    return text


def main() -> int:
    """Write the tables, or compare them and return 1 if they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    made = page(text)
    if made == text:
        return 0
    if args.check:
        sys.stderr.write("the tables are out of date: run python tools/size_tables.py\n")
        return 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
