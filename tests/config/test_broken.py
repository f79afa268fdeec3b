"""Broken YAMLs: every message names the key, the file and what was expected; none gets as far as Composer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from biphasic.config.errors import ConfigError
from biphasic.config.load import load

BROKEN = sorted((Path(__file__).parent / "broken").glob("*.yaml"))
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_the_message_names_the_key(path: Path) -> None:
    key, says = (line.partition(": ")[2] for line in path.read_text().splitlines()[:2])
    with pytest.raises(ConfigError) as caught:
        load(path)
    problems = caught.value.problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    assert problems[0].key == key
    assert says in problems[0].message
    # The place is this file, with the line where the key (or the section that lacks it) stands.
    assert problems[0].where.split(":")[0].endswith(("nowhere.yaml", path.name))


def test_there_are_at_least_thirty() -> None:
    assert len(BROKEN) >= 30


def test_none_reaches_torch_or_composer() -> None:
    code = (
        "import sys; sys.path.insert(0, 'src')\nimport main\n"
        f"for path in {[str(path) for path in BROKEN]!r}:\n"
        "    assert main.main([path]) == 2, path\n"
        "    assert main.main([path, '--plan']) == 2, path\n"
        "assert not {'torch', 'composer', 'streaming', 'transformers'} & set(sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr


def test_all_errors_of_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "many.yaml"
    path.write_text((ROOT / "yamls" / "quickstart.yaml").read_text() + "\nsede: 3\n")
    with pytest.raises(ConfigError) as caught:
        # An unknown key, a wrong type and, beside them, an impossible combination and a wrong override.
        load(path, ["optimizer.lr=fast", "microbatch_size=5", "schedule.warmpu=3ba"])
    found = {problem.key: problem.where for problem in caught.value.problems}
    lines = path.read_text().splitlines()
    assert found == {
        "sede": f"{path}:{lines.index('sede: 3') + 1}",
        "optimizer.lr": "command line",
        "microbatch_size": "command line",
        "schedule.warmpu": "command line",
    }


@pytest.mark.parametrize(
    ("override", "key"),
    [("optimizer.lr", "optimizer.lr"), ("objective.phases.7.until=3ba", "objective.phases.7.until"), ("=3", "=3")],
)
def test_overrides_that_cannot_be(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(ROOT / "yamls" / "quickstart.yaml", [override])
    assert caught.value.problems[0].where == "command line"
    assert caught.value.problems[0].key == key


def test_global_batch_must_divide_by_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size: expected a multiple of the number of ranks \(3\)"):
        load(ROOT / "yamls" / "quickstart.yaml", [], ranks=3)
