"""The recipes one after the other, each on what the one before made."""

import json
import re
import subprocess
import sys

import pytest


@pytest.mark.slow  # over a minute: python -m pytest tests/recipes/test_whole_road.py -m slow
def test_the_road_is_passable(root, tmp_path):
    """With too few steps to learn what rewards teach: numbers come, whatever they are."""
    small = ["--sft-steps", "40", "--rl-steps", "1", "--tasks", "16"]
    done = subprocess.run(
        [sys.executable, root / "tools/whole_road.py", "--folder", tmp_path / "road", *small],
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=False,
    )

    printed = dict(re.findall(r"^  (\S+) +(\d\.\d+)$", done.stdout, re.MULTILINE))
    assert list(printed) == ["random", "fine-tuned", "reinforced"], done.stderr[-2000:]
    values = [float(value) for value in printed.values()]
    assert values[0] < values[1]
    improved = values == sorted(set(values))
    assert done.returncode == (0 if improved else 1)
    assert ("brought no improvement" in done.stderr) == (not improved)
    assert re.findall(r"^\$ python \S*?(\w+\.py) ", done.stdout, re.MULTILINE) == [
        "evaluate.py",
        "sft.py",
        "evaluate.py",
        "async_grpo.py",
        "evaluate.py",
    ]
    trained = (tmp_path / "road/chats.jsonl").read_text()
    lines = (tmp_path / "road/rl-measured/rollouts.jsonl").read_text().splitlines()
    held_out = [json.loads(line)["task"].rpartition("/")[2] for line in lines]
    assert len(held_out) == 16
    assert not [word for word in held_out if f': {word}"' in trained]
