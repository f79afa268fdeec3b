"""The wheel: it holds all that the package needs, and installs beside a Composer that plain pip gives."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Write
from helpers.tiny import losses

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "recipes" / "own_script" / "train.py"
VERSIONS = "import torch, transformers, numpy; print(*(m.__version__ for m in (torch, transformers, numpy)))"
PLAIN = ("mosaicml==0.32.1", "mosaicml-streaming==0.13.0", "transformers<5")
"""What plain pip makes of `mosaicml==0.32.1 mosaicml-streaming==0.13.0 transformers`: torch 2.7.0, transformers 4.57.6."""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    keys = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=keys, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    copied = folder / "copy"
    shutil.copytree(ROOT / "src", copied / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copied)
    run("uv", "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder, copied,
        cwd=folder)  # fmt: skip
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_pretrains_without_the_repository(wheel: Path, write_yaml: Write, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    run("uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--target", installed, wheel, cwd=tmp_path)
    where = run(sys.executable, "-c", "import biphasic; print(biphasic.__file__)", cwd=tmp_path, PYTHONPATH=str(installed))
    assert Path(where.strip()).is_relative_to(installed)
    path = write_yaml(max_duration="8ba")
    command = (sys.executable, "-m", "composer.cli", "-n", "1", "-m", "biphasic.main", path)
    run(*command, cwd=tmp_path, PYTHONPATH=str(installed))
    assert len(losses(tmp_path / "runs" / "run")) == 8
    card = tmp_path / "encoder"
    export = (sys.executable, "-m", "biphasic", "export", tmp_path / "runs" / "run" / "checkpoints", card)
    run(*export, cwd=tmp_path, PYTHONPATH=str(installed))
    assert (card / "README.md").is_file()


@pytest.mark.slow
def test_the_wheel_beside_what_plain_pip_installs(wheel: Path, tmp_path: Path) -> None:
    """No version changes; the script trains, and resumes from Composer's checkpoints."""
    python = tmp_path / "venv" / "bin" / "python"
    run("uv", "venv", "--quiet", "--python", "3.11", tmp_path / "venv", cwd=tmp_path)
    # Without the overrides of this repository's pyproject.toml.
    run("uv", "pip", "install", "--quiet", "--python", python, *PLAIN, cwd=tmp_path)
    before = run(python, "-c", VERSIONS, cwd=tmp_path).split()
    assert before[:2] == ["2.7.0+cu126", "4.57.6"]
    run("uv", "pip", "install", "--quiet", "--python", python, wheel, cwd=tmp_path)
    assert run(python, "-c", VERSIONS, cwd=tmp_path).split() == before
    output = run(python, SCRIPT, "checkpoints", cwd=tmp_path)
    assert "biphasic.packed_attention      bidirectional  yes     no" in output
    # As if it had been stopped after half of its batches: Composer's autoresume reads the link.
    latest = tmp_path / "checkpoints" / "latest-rank0.pt"
    latest.unlink()
    latest.symlink_to("ep0-ba100-rank0.pt")
    for later in (tmp_path / "checkpoints").glob("ep1-*"):  # Composer doesn't overwrite
        later.unlink()
    run(python, SCRIPT, "checkpoints", cwd=tmp_path)
    assert latest.resolve().name.endswith("-ba200-rank0.pt")
