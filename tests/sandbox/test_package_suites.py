"""Test suites of packages from the index give the outcome inside that they give outside."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from sandboxed import needed, with_pool

from primerl.sandbox import SandboxLimits

needed()

# Of pure Python, with their tests in the source distribution. The tests are in this folder of it.
PACKAGES = {"iniconfig": "testing", "toolz": "toolz", "cachetools": "tests"}
SITE_PACKAGES = str(Path(pytest.__file__).parents[1])


def downloaded(name, folder):
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--no-binary", name, "--dest", str(folder), name]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or not archives:
        pytest.skip(f"{name} can't be downloaded: {done.stderr[-300:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def outcome(text):
    """How many passed, failed and so on; the time that it took is left out."""
    last = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|error)", line)][-1]
    return sorted(re.findall(r"\d+ [a-z]+", last.split(" in ")[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_suite(name, tmp_path):
    source = downloaded(name, tmp_path)
    path = "src:." if (source / "src").is_dir() else "."
    program = (
        f"import sys; sys.path[:0] = {path.split(':')!r}; sys.path.append({SITE_PACKAGES!r}); "
        "import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-o', 'addopts=', "
        f"'-p', 'no:benchmark', '-p', 'no:hypothesispytest', {PACKAGES[name]!r}]))"
    )

    async def run(pool):
        files = {
            f"source/{file.relative_to(source)}": file.read_bytes()
            for file in source.rglob("*")
            if file.is_file()
        }
        async with pool.session() as session:
            await session.run(["true"], files=files)
            return await session.run(
                [pool._python, "-I", "-c", program], folder="/sandbox/source", timeout_s=600
            )

    limits = SandboxLimits(memory_bytes=2 << 30)
    inside = with_pool(run, concurrency=1, readable=[SITE_PACKAGES], limits=limits)
    python = Path(sys.base_prefix) / "bin/python3"
    outside = subprocess.run(
        [python, "-I", "-c", program], cwd=source, capture_output=True, encoding="utf-8"
    )
    assert outcome(inside.stdout.decode()) == outcome(outside.stdout), inside
    assert inside.exit == outside.returncode
    print(name, outcome(outside.stdout))
