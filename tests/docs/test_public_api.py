"""The public surface is an artifact: listed, documented, cheap to import."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys

import pytest

import primerl

EXPORTS = {
    "primerl.advantage": [
        "AgentBaselines",
        "assign",
        "centered",
        "hierarchical",
        "leave_one_out",
        "max_rl",
        "of_rewards",
        "pass_at_k",
        "penalized",
        "standardized",
        "whitened",
    ],
    "primerl.checkpoint": ["Checkpoints", "Saved", "Stopped", "last_good"],
    "primerl.filters": ["completed", "fluent", "has_signal", "reward_in", "within_tokens"],
    "primerl.flops": [
        "Breakdown",
        "Parameters",
        "breakdown",
        "forward",
        "parameters",
        "training",
    ],
    "primerl.loss": [
        "cispo",
        "clipped",
        "cross_entropy",
        "decoupled",
        "distill",
        "dppo",
        "fixed_length_mean",
        "geometric_rejection",
        "gspo",
        "icepop",
        "ipo",
        "k1",
        "k2",
        "k3",
        "linear_logprobs",
        "mismatch_kl",
        "model_logprobs",
        "model_logprobs_and_entropy",
        "reinforce",
        "sapo",
        "sequence_mean",
        "sequence_mis",
        "sequence_ratio",
        "sequence_tis",
        "summarize",
        "token_logprobs",
        "token_mean",
        "token_mis",
        "token_ratio",
        "token_statistics",
        "token_tis",
        "topr",
        "veto",
    ],
    "primerl.optim": ["CPUAdamW", "Matrices", "Muon", "Offload", "muon_parameters"],
    "primerl.packing": ["PackedBatch", "bins", "pack"],
    "primerl.parallel": [
        "AllToAll",
        "DeepEP",
        "Mesh",
        "UpdateGuard",
        "World",
        "all_sum",
        "balance_experts",
        "clip_gradients",
        "divide_experts",
        "load_statistics",
        "freeze_indexer",
        "mesh",
        "process_group",
        "recompute",
        "scatter",
        "shard",
        "take_expert_counts",
    ],
    "primerl.rollout": [
        "BadCompletion",
        "Buffer",
        "Conversation",
        "DifficultyPools",
        "Engine",
        "Environment",
        "Evaluation",
        "InOrder",
        "Mixture",
        "RewardError",
        "Shuffled",
        "TaskStream",
        "TransformersEngine",
        "VLLMEngine",
        "VLLMServer",
        "Worker",
        "isolated",
        "load_groups",
        "route",
        "run_group",
        "save_groups",
        "serve_vllm",
        "single_turn",
        "verifiers",
        "worker",
    ],
    "primerl.testing": [
        "HostileEngine",
        "HostileEnvironment",
        "HostileServer",
        "ScriptedEngine",
        "character_tokenizer",
        "check_engine",
        "engine_faults",
        "environment_faults",
        "imitate",
        "lognormal",
        "server_faults",
        "smollm2",
        "tiny_model",
        "words",
    ],
    "primerl.track": [
        "LiveView",
        "Run",
        "Sink",
        "instead_of",
        "new_file",
        "number",
        "wandb_sink",
    ],
    "primerl.types": [
        "Completion",
        "Group",
        "LOGPROB_ROUNDING",
        "NOT_SAMPLED",
        "PolicyVersion",
        "Rollout",
        "Sample",
        "SamplingParams",
        "TrainingSample",
    ],
    "primerl.weights": [
        "Canary",
        "Disk",
        "Fetcher",
        "MismatchGate",
        "NCCL",
        "Receipt",
        "Receiver",
        "SharedMemory",
        "Verdict",
        "VerifiedTransport",
        "checkpoint_tensors",
        "empty_model",
        "load_pretrained",
        "load_shards",
        "save_adapters",
        "save_pretrained",
        "transport_to",
        "wiring_test",
    ],
}


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


def test_the_packages_are_listed():
    assert sorted(primerl.__all__) == sorted(name.split(".")[1] for name in EXPORTS)
    for name in primerl.__all__:
        assert inspect.ismodule(getattr(primerl, name))
    with pytest.raises(AttributeError, match="it has advantage, checkpoint"):
        _ = primerl.losses


@pytest.mark.parametrize("name", EXPORTS)
def test_the_exports_are_listed_and_exist(name):
    package = importlib.import_module(name)

    assert sorted(package.__all__) == sorted(EXPORTS[name])
    for export in package.__all__:
        assert getattr(package, export) is not None


@pytest.mark.parametrize("name", EXPORTS)
def test_no_export_shares_the_name_of_a_submodule(name):
    package = importlib.import_module(name)
    submodules = {module.name for module in pkgutil.iter_modules(getattr(package, "__path__", []))}

    assert not submodules & set(package.__all__)


@pytest.mark.parametrize("name", EXPORTS)
def test_every_export_has_a_docstring_and_a_place_in_the_documentation(name, root):
    package = importlib.import_module(name)
    page = (root / "docs" / "api.md").read_text()
    listed = re.search(rf"::: {re.escape(name)}\n(.*?)(?=\n:::|\Z)", page, re.DOTALL)

    assert package.__doc__
    assert listed, f"docs/api.md does not show {name}"
    members = re.search(r"members: \[(.*)\]", listed[1])
    for export in package.__all__:
        value = getattr(package, export)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{export} has no docstring"
            if members:
                assert export in members[1].split(", "), f"docs/api.md does not list {export}"


def test_importing_primerl_loads_nothing_heavy():
    code = """
import sys, primerl
heavy = {'torch', 'numpy', 'transformers', 'attrs', 'rich', 'asyncio'} & set(sys.modules)
print(sorted(heavy))
"""
    assert run_python(code) == "[]"


def test_importing_primerl_takes_less_than_0_3_seconds():
    code = "import time; t = time.perf_counter(); import primerl; print(time.perf_counter() - t)"

    assert min(float(run_python(code)) for _ in range(5)) < 0.3


def test_rollouts_tracking_and_the_host_side_load_no_torch():
    code = """
import sys
from primerl import advantage, filters, rollout, track, types
import primerl.packing
print('transformers' in sys.modules, 'rich' in sys.modules)
"""
    assert run_python(code) == "False False"
    code = "import sys; from primerl import advantage, filters, rollout, track, types; "
    assert run_python(code + "print('torch' in sys.modules)") == "False"


def test_losses_load_no_transformers():
    code = "import sys; from primerl import loss, packing; print('transformers' in sys.modules)"

    assert run_python(code) == "False"


def test_a_missing_extra_names_the_command_that_installs_it():
    code = """
import sys
sys.modules['transformers'] = None
from primerl import testing
try:
    testing.tiny_model('llama')
except ImportError as error:
    print(error)
"""
    message = "transformers is not installed; run: pip install 'primerl[transformers]'"
    assert run_python(code) == message


def test_a_module_that_is_missing_deeper_down_is_not_blamed_on_the_extra(tmp_path):
    (tmp_path / "shallow.py").write_text("import a_module_that_is_not_there")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from primerl._optional import require
try:
    require('shallow', extra='x')
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run_python(code) == "a_module_that_is_not_there"


def test_a_custom_loss_and_filter_are_tested_in_seconds_without_transformers(tmp_path, root):
    """The ten lines of docs/extending.md, run as a user would, in a folder of their own."""
    page = (root / "docs" / "extending.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    check = "\ndef test_light():\n    import sys\n    assert 'transformers' not in sys.modules\n"
    (tmp_path / "test_mine.py").write_text(example + check)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert "2 passed" in done.stdout, done.stdout + done.stderr
    body = example[example.index("def test_") :]
    assert len(body.strip().splitlines()) <= 10
