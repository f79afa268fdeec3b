"""The quickstart repeats changed steps, skips those that are done, and continues those that were interrupted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "recipes" / "quickstart" / "quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "quickstart", module)
    spec.loader.exec_module(module)
    return module


def test_steps_read_existing_files_and_follow_those_they_need(quickstart: ModuleType) -> None:
    seen: set[str] = set()
    for step in quickstart.STEPS:
        assert set(step.after) <= seen, step.name
        for name in step.reads:
            assert (ROOT / name).exists(), (step.name, name)
        seen.add(step.name)


def test_done_changed_and_interrupted_steps(
    quickstart: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # main() changes folder; this puts it back
    Step = quickstart.Step
    source = tmp_path / "source.txt"
    source.write_text("1")
    append = (
        "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.write_text((p.read_text() if p.exists() else '') + 'x');"
    )

    def steps(second: str) -> list[object]:
        return [
            Step("one", "first", ["python", "-c", append, "one"], [Path("one")], [str(source)]),
            Step("two", "second", ["python", "-c", append + second, "two"], [Path("two")], [], ("one",), resumes=True),
        ]

    run = tmp_path / "run"
    (run / "scores").mkdir(parents=True)
    (run / "scores" / "summary.txt").write_text("the scores\n")
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    monkeypatch.setattr(quickstart, "RUN", run)
    one, two = tmp_path / "one", tmp_path / "two"

    # The second step fails until a file appears: its output stays, and it continues from there.
    monkeypatch.setattr(quickstart, "STEPS", steps("sys.exit(not pathlib.Path('mended').exists())"))
    assert quickstart.main() == 1
    assert "the same command continues here" in capfd.readouterr().err
    (tmp_path / "mended").touch()
    assert quickstart.main() == 0
    out = capfd.readouterr().out
    assert "one: done before and unchanged" in out
    assert "two: was interrupted" in out
    assert out.endswith(f"the scores\nreport: {run / 'report.md'}\n")
    assert (one.read_text(), two.read_text()) == ("x", "xx")

    # Nothing changed: nothing runs. A source changed: its step and what comes after start over.
    assert quickstart.main() == 0
    assert (one.read_text(), two.read_text()) == ("x", "xx")
    source.write_text("2")
    assert quickstart.main() == 0
    assert (one.read_text(), two.read_text()) == ("x", "x")
