"""A release that primerl is not tested with is named where it is first used."""

import importlib.metadata
import logging
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest

from primerl._common.optional import TESTED, require, warn_if_untested

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def installed(monkeypatch):
    """Sets which release of a package seems to be installed."""
    versions = {}
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: versions.get(name) or real(name)
    )
    warn_if_untested.cache_clear()
    yield versions
    warn_if_untested.cache_clear()


def constraint(file, package):
    text = (ROOT / file).read_text(encoding="utf-8")
    return re.search(rf"^{package}==([\d.]+)", text, re.MULTILINE)[1]


def minor(version):
    return tuple(int(part) for part in version.split(".")[:2])


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0", "5.24.3.dev0", "5.19.1+local"])
def test_a_tested_release_is_passed_in_silence(installed, caplog, version):
    installed["transformers"] = version
    warn_if_untested("transformers")
    assert not caplog.records


@pytest.mark.parametrize("version", ["5.16.1", "5.25.0", "6.0.0", "4.57.6", "unknown"])
def test_an_untested_release_is_named_once_with_what_to_install(installed, caplog, version):
    installed["transformers"] = version
    warn_if_untested("transformers")
    warn_if_untested("transformers")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"transformers {version} is installed, but primerl is tested only with >=5.17,<5.25, and "
        "internals that it relies on may have changed; if something fails, run: pip install "
        "'transformers>=5.17,<5.25'"
    )


def test_the_first_use_of_transformers_looks_at_torch_too(installed, caplog):
    installed["transformers"], installed["torch"] = "5.99.0", "2.99.0"
    require("transformers.models", extra="transformers")
    assert [record.args[0] for record in caplog.records] == ["transformers", "torch"]


def test_a_package_without_tested_releases_or_metadata_is_let_be(installed, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "in_no_index", types.ModuleType("in_no_index"))
    monkeypatch.setitem(TESTED, "in_no_index", ((1, 0), (1, 0)))
    require("in_no_index", extra="transformers")
    require("tyro", extra="recipes")
    assert not caplog.records


@pytest.mark.parametrize("package", TESTED)
def test_what_is_declared_is_what_is_tested(package):
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    (declared,) = {one for group in groups for one in group if one.startswith(f"{package}>")}
    first, last = TESTED[package]
    assert declared == f"{package}>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    assert first <= minor(constraint("constraints.txt", package)) <= last


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_first_and_the_last_release_are_run(package):
    first, last = TESTED[package]
    assert minor(constraint("constraints-oldest.txt", package)) == first
    assert minor(constraint("constraints-newest.txt", package)) == last
