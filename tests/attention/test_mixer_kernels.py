"""The kernels of flash-linear-attention, interpreted, against transformers' plain torch.

They run in a program of their own: transformers takes them wherever Python finds them.
"""

import os
import subprocess
import sys
from pathlib import Path

import interpreted_triton
import mixer_kernels
import pytest
import torch

pytest.importorskip("triton")
KERNELS = Path(sys.prefix) / "kernels"
RULES = {"qwen3_next": "gated_delta_rule", "olmo_hybrid": "gated_delta_rule", "kimi_linear": "kda"}
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not (KERNELS / "fla").is_dir(),
        reason=f"fla-core is not in {KERNELS}, where make test-all installs it",
    ),
    pytest.mark.parametrize(
        "family",
        [
            "qwen3_next",
            *(
                pytest.param(name, marks=pytest.mark.slow)
                for name in ("olmo_hybrid", "kimi_linear")
            ),
        ],
        scope="module",
    ),
]


@pytest.fixture(scope="module")
def interpreted(family, root, tmp_path_factory):
    """What the program found, and what it logged."""
    folder = tmp_path_factory.mktemp("mixers")
    interpreted_triton.write_entry_point(folder)
    helpers = root / "tests/helpers"
    path = [str(folder), str(KERNELS), str(helpers), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, helpers / "mixer_kernels.py", family, folder / "found"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    return torch.load(folder / "found"), ran.stderr


def test_packed_documents_are_scored_as_each_alone(family, interpreted):
    (logprobs, gradients, _), _ = interpreted
    model, documents = mixer_kernels.make_model(family), mixer_kernels.documents()
    logits = [model(document.unsqueeze(0), use_cache=False).logits[0] for document in documents]
    labels = torch.cat(documents).roll(-1).unsqueeze(-1)
    expected = torch.cat(logits).log_softmax(-1).gather(-1, labels).squeeze(-1)
    of_reference = mixer_kernels.gradients(expected, model)

    torch.testing.assert_close(logprobs, expected.detach(), atol=2e-5, rtol=0)
    assert (gradients - of_reference).norm() <= 1e-5 * of_reference.norm()


def test_the_embedded_engine_continues_from_the_kernels_states(family, interpreted):
    model = mixer_kernels.make_model(family)
    (_, _, generated), _ = interpreted
    for prompt, tokens, logprobs in generated:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        own = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        expected = own.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=0)


def test_the_kernels_were_taken(family, interpreted):
    """Where transformers takes its plain torch, it warns."""
    _, logged = interpreted
    assert "`causal_conv1d_fn` is falling back" in logged  # it is not installed
    for kind in ("chunk", "fused_recurrent"):
        assert f"`{kind}_{RULES[family]}` is falling back" not in logged
