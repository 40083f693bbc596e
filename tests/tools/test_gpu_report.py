"""The runner of tests on a GPU, on small files of tests, without a GPU."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import torchrun
from forked_ranks import forked_ranks
from hidden_gpus import selects_gpu_tests

pytestmark = pytest.mark.thorough

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
SMALL = """
import os
import time

import pytest

pytestmark = pytest.mark.gpu


def test_passes():
    pass


def test_fails():
    assert 1 == 2, "one is not two"


def test_ends_its_process():
    os._exit(3)


@pytest.mark.parametrize("x", [{"a": 1}, [2]], ids=str)
def test_skips(x):
    pytest.skip("for a reason")


def test_measures(benchmark):
    benchmark.extra_info["ratio"] = 2
    benchmark.pedantic(lambda: None, rounds=3)


def test_hangs():
    time.sleep(3600)


def test_follows():
    pass
"""


BROKEN = """
import os

import pytest

pytestmark = pytest.mark.gpu


def test_uses_the_process_and_breaks_the_gpu():
    os.environ["BROKEN"] = "1"
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_has_a_new_process():
    assert "BROKEN" not in os.environ
"""


def report_of(root, folder, *arguments):
    command = [sys.executable, root / "tools/gpu_report.py", "--report", folder / "found"]
    # pytest-benchmark measures nothing where it believes to be one of several workers.
    outside = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(
        [*command, "--commit", "abc", *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**outside, **WITHOUT_GPU},
        timeout=300,
    )
    assert (folder / "found.json").exists(), done.stderr
    return done, json.loads((folder / "found.json").read_text())


def test_the_report_of_a_small_run(root, tmp_path):
    """What fails, ends its process, lacks a package or hangs keeps no other test from running."""
    files = [tmp_path / f"test_{name}.py" for name in ("absent", "broken", "small", "later")]
    absent, broken, small, later = files
    absent.write_text("import no_such_package\n")
    broken.write_text(BROKEN)
    small.write_text(SMALL)
    later.write_text(BROKEN.replace("raise ", "_ = "))

    done, report = report_of(root, tmp_path, "--test-seconds", "15", *files)

    results = report["results"]
    named = {result["test"]: result for result in results}
    (broke, renewed), (_, kept) = (
        [named.pop(f"{file}::{test}") for test in re.findall(r"def (test_\w+)", BROKEN)]
        for file in (broken, later)
    )
    results = list(named.values())
    assert broke["reason"].startswith("RuntimeError: CUDA error")
    assert renewed["outcome"] == "passed"
    assert kept["outcome"] == "failed"  # a file without a GPU error keeps its process
    found = {
        result["test"].rpartition("/")[2].rpartition("::")[2]: (
            result["outcome"],
            result.get("reason"),
        )
        for result in results
    }
    assert found == {
        "test_absent.py": ("skipped", "no_such_package is not installed"),
        "test_passes": ("passed", None),
        "test_fails": ("failed", "AssertionError: one is not two"),
        "test_ends_its_process": ("failed", "its process ended with 3"),
        "test_skips[{'a': 1}]": ("skipped", "for a reason"),
        "test_skips[[2]]": ("skipped", "for a reason"),
        "test_measures": ("passed", None),
        "test_hangs": ("failed", "ended after 15 s"),
        "test_follows": ("passed", None),
    }
    (measured,) = [result for result in results if "median_s" in result]
    assert measured["rounds"] == 3
    assert measured["measured"] == {"ratio": 2}
    assert done.returncode == 1
    facts = report["provenance"]
    assert facts["commit"] == "abc"
    assert facts["GPUs that torch sees"] == 0
    assert facts["missing packages"] == "none"
    assert {"date", "command", "machine", "python", "torch", "transformers", "vllm"} <= set(facts)
    written = (tmp_path / "found.md").read_text()
    assert "\n5 failed, 5 passed, 3 skipped; " in written
    assert report["row"]["passed, failed, not run"] == "5, 5, 0"
    assert "## Row of docs/verified.md" in written
    assert "| transformers |" in written
    assert "AssertionError: one is not two" in written
    assert "{'ratio': 2}" in written


@pytest.mark.parametrize(
    ("ends", "code"), [("import os\nos._exit(7)", 7), ("raise SystemExit(4)", 3)]
)
def test_a_file_that_ends_pytest_while_it_is_imported_hides_no_other(root, tmp_path, ends, code):
    for name, text in {
        "absent": "import pytest\npytest.importorskip('no_such_package')\n",
        "later": "import pytest\n\n\n@pytest.mark.gpu\ndef test_later():\n    pass\n",
        "ends": ends,
    }.items():
        (tmp_path / f"test_{name}.py").write_text(text)

    _, report = report_of(root, tmp_path, *sorted(tmp_path.glob("test_*.py")))

    found = {one["test"].rpartition("/")[2]: one["outcome"] for one in report["results"]}
    assert found == {
        "test_absent.py": "skipped",
        "test_ends.py": "failed",
        "test_later.py::test_later": "passed",
    }
    (reason,) = [one["reason"] for one in report["results"] if one["outcome"] == "failed"]
    assert reason == f"pytest ended with {code} before any test"


def test_without_time_all_is_reported_as_not_run(root, tmp_path):
    small = tmp_path / "test_small.py"
    small.write_text(SMALL)

    done, report = report_of(root, tmp_path, "--minutes", "0", small)

    assert [result["outcome"] for result in report["results"]] == ["not run"]
    assert report["results"][0]["reason"] == "the time was up"
    assert done.returncode == 1


def test_gpu_tests_are_collected_and_skip_without_a_gpu(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "tools")
    gpu_report = pytest.importorskip("gpu_report")
    files = [*gpu_report.gpu_tests(), gpu_report.RECIPES]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-q", *files],
        capture_output=True,
        encoding="utf-8",
        cwd=root,
        env={**os.environ, **WITHOUT_GPU},
        timeout=600,
    )

    assert done.returncode == 0, done.stdout[-3000:]
    (skipped,) = re.findall(r"^(\d+) skipped, \d+ deselected in", done.stdout, re.MULTILINE)
    assert int(skipped) >= 20
    reasons = re.findall(r"^SKIPPED \[(\d+)\] (.*)$", done.stdout, re.MULTILINE)
    assert sum(int(count) for count, _ in reasons) == int(skipped)
    assert all("needs a GPU: torch sees no CUDA device" in reason for _, reason in reasons)


def test_its_benchmarks_exist_and_fit_into_the_time(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "tools")
    gpu_report = pytest.importorskip("gpu_report")

    assert all(map(gpu_report.is_benchmark, gpu_report.gpu_benchmarks()))
    assert all(path.exists() for path in gpu_report.gpu_benchmarks())
    assert gpu_report.RECIPES.exists()
    assert gpu_report.RECIPES not in gpu_report.gpu_tests()
    expected_s = gpu_report.TESTS_S + sum(gpu_report.BENCHMARKS.values())
    assert expected_s <= 60 * gpu_report.MINUTES
    assert gpu_report.MINUTES < 9


COLLECTING = """
import pytest
import torch

def pytest_configure():
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "is_available", lambda: True)
"""


def names_on_a_gpu(root, folder, *options):
    """Return the names of the report's benchmarks on a machine with a GPU."""
    (folder / "collecting.py").write_text(COLLECTING)
    path = os.pathsep.join(map(str, [folder, root, root / "tools"]))
    # pytest-benchmark refuses --benchmark-only in what seems to be a worker of pytest-xdist.
    inherited = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--collect-only", "-p", "collecting"],
        capture_output=True,
        encoding="utf-8",
        cwd=root,
        env={**inherited, "PYTHONPATH": path, "EVENTS_FILE": str(folder / "events")},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_benchmarks_of_all_columns_run(root, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(root / "tools")
    gpu_report = pytest.importorskip("gpu_report")
    files = [str(path) for path in gpu_report.gpu_benchmarks()]
    options = gpu_report.pytest_command(files, benchmarks=True, without=gpu_report.BY_HAND)

    names = names_on_a_gpu(root, tmp_path, *options[3:])

    for figures in gpu_report.COLUMNS.values():
        for ending, _ in figures:
            assert len([name for name in names if name.endswith(f"::{ending}")]) == 1, ending
    assert len(names) == 32


def test_figures_are_read_from_the_benchmarks(root, monkeypatch):
    """Names of benchmarks and of what they measure, as in their files."""
    monkeypatch.syspath_prepend(root / "tools")
    gpu_report = pytest.importorskip("gpu_report")
    step = "bench/test_train_step.py::test_model_flop_utilisation[Qwen3-0.6B-[16384]]"
    rates = {
        "bf16": "1 forward, 400.000 with backward",
        "torch": "9 forward, 500.000 with backward",
    }
    results = [
        {"test": step, "outcome": "passed", "measured": {"mfu": 0.45678}},
        {
            "test": "bench/test_fp8.py::test_a_layer[MLP, 8192 tokens]",
            "outcome": "failed",
            "measured": rates,
        },
    ]
    facts = {"gpu (name, driver, memory)": "NVIDIA H200, 580.1, 139 GiB", "commit": "c3dd316" * 6}
    facts |= {"date": "2026-11-26T00:00:00", "torch": "2.11.0"}

    row = gpu_report.row(facts, results)

    assert row["card, driver, torch"] == "NVIDIA H200, 580.1, 2.11.0"
    assert row["MFU at 16k, 64k, mixed"] == "0.457, -, -"
    assert row["FP8 / bf16"] == "1.25"
    assert row["passed, failed, not run"] == "1, 1, 0"
    benchmarks = "".join(path.read_text() for path in (root / "bench").glob("test_*.py"))
    for figures in gpu_report.COLUMNS.values():
        assert all(name in benchmarks for _, name in figures)


MEETS = """
import os
import time
from pathlib import Path

import pytest


@pytest.mark.gpu
def test_meets_the_other():
    folder = Path(__file__).parent
    (folder / f"{Path(__file__).stem}.process").write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.process"))) < 2:
        assert time.monotonic() < deadline, "the other does not run"
        time.sleep(0.05)
"""
STAYS = MEETS + "    time.sleep(3600)\n"


@pytest.fixture
def pair(root, tmp_path, monkeypatch):
    """Return the runner for two files in the places of the tests and of the recipes."""
    monkeypatch.syspath_prepend(root / "tools")
    gpu_report = pytest.importorskip("gpu_report")
    (tmp_path / "work").mkdir()
    tests, recipes = tmp_path / "test_tests.py", tmp_path / "test_recipes.py"
    tests.write_text(MEETS)
    recipes.write_text(MEETS)
    monkeypatch.setattr(gpu_report, "RECIPES", recipes)
    monkeypatch.setattr(gpu_report, "gpu_tests", lambda: [tests])

    def runs():
        stop_at = time.monotonic() + 120
        return gpu_report.runs([], "there is no GPU", 90, stop_at, tmp_path / "work")

    return runs, recipes


def test_recipes_run_beside_the_tests(pair):
    runs, _ = pair

    tests, recipes, skipped = runs()

    assert [one["outcome"] for one in (*tests, *recipes)] == ["passed", "passed"]
    assert {one["outcome"] for one in skipped} == {"skipped"}


def test_a_run_that_ends_early_ends_the_recipes(pair):
    runs, recipes = pair
    recipes.write_text(STAYS)
    found = runs()
    next(found)

    found.close()

    process = int(recipes.with_name("test_recipes.process").read_text())
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        ("gpu", True),
        ("gpu and not slow", True),
        ("", False),
        ("not (gpu or slow or vllm or agents)", False),
        ("not slow", False),
        ("vllm and not slow and not gpu", False),
        ("thorough", False),
    ],
)
def test_gpus_are_hidden_unless_only_their_tests_are_selected(expression, selected):
    assert selects_gpu_tests(expression) is selected


@pytest.mark.parametrize("launch", [forked_ranks, torchrun])
def test_ranks_of_tests_see_no_gpu(launch, tmp_path):
    """Else three ranks on a machine with one GPU would end with an error."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib\n"
        "seen = repr(os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
        "pathlib.Path(os.environ['RANK']).write_text(seen)\n"
    )

    launch(program, ranks=2, cwd=tmp_path)

    assert [(tmp_path / rank).read_text() for rank in "01"] == ["''", "''"]
