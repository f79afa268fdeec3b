"""The commit, machine and versions in records."""

import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from biphasic import provenance


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout whose package is provenance.py."""
    module = tmp_path / "src" / "biphasic" / "provenance.py"
    module.parent.mkdir(parents=True)
    shutil.copy(provenance.__file__, module)
    monkeypatch.setattr(provenance, "__file__", str(module))
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_and_changes(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance._commit() is None
    monkeypatch.setenv("BIPHASIC_COMMIT", "of the image")
    assert provenance._commit() == "of the image"
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    git(checkout, "tag", "v1")
    head = git(checkout, "rev-parse", "HEAD")
    assert provenance._commit() == head
    (checkout / "untracked").touch()
    assert provenance._commit() == head
    (checkout / "src" / "biphasic" / "provenance.py").write_text("changed")
    assert provenance._commit() == f"{head}+changes"


def test_without_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(checkout, "init", "-q")
    monkeypatch.setenv("PATH", str(checkout))
    assert provenance._commit() is None


def test_the_machine_is_named() -> None:
    record = provenance.provenance()
    assert record["versions"]["torch"] and record["host"]
    cpus = re.findall(r"(?<=: ).+", "\n".join(re.findall(r"model name.*", Path("/proc/cpuinfo").read_text())))
    assert record["hardware"] in {*cpus, f"CPU ({provenance.platform.machine()})"}


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the package of a checkout on PYTHONPATH."""
    monkeypatch.setattr(provenance, "_PACKAGES", ("biphasic-of-a-checkout", "torch"))
    versions = provenance.provenance.__wrapped__()["versions"]
    assert versions == {"biphasic-of-a-checkout": None, "torch": version("torch")}
