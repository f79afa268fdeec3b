"""The quickstart: all of its steps, small; which steps are repeated, skipped and continued."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from biphasic.training.metrics_file import parse_metrics
from helpers import warm

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "quickstart"
BATCHES, SWITCH = 12, 6
SYSTEMS = ["BM25", "CLM", "CLM, then MLM", "untrained", "MLM"]


def start(folder: Path, code: str = "") -> warm.Job:
    """Start the quickstart in a folder that has its files."""
    call = f"import sys; sys.path.insert(0, {str(folder / 'recipes' / 'quickstart')!r}); import quickstart; {code}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return warm.start([], 1, environment, code=f"{call}\nsys.exit(quickstart.main([]))")


def change(file: Path, values: dict[str, Any]) -> None:
    """Replace values of a YAML; keys have dots."""
    content = yaml.safe_load(file.read_text())
    for key, value in values.items():
        section, *parts = content, *key.split(".")
        for part in parts[:-1]:
            section = section[int(part) if isinstance(section, list) else part]
        section[parts[-1]] = value
    file.write_text(yaml.safe_dump(content))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with the quickstart's files, for little text and few batches."""
    for name in ("src", "requirements.lock"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("recipes/quickstart", "yamls"):
        shutil.copytree(ROOT / name, tmp_path / name)
    gather = tmp_path / "recipes" / "quickstart" / "gather.py"
    source = gather.read_text()
    for old, new in (
        ("roots = [(stdlib, stdlib,", "roots = [(stdlib / 'asyncio', stdlib,"),
        ('    "composer",\n', '    "joblib",\n)\n_OTHERS = (\n'),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    gather.write_text(source)
    change(
        tmp_path / "yamls" / "quickstart.yaml",
        {"max_duration": f"{BATCHES}ba", "objective.phases.0.until": f"{SWITCH}ba", "schedule.warmup": "2ba",
         "schedule.decay": "3ba", "evaluation.interval": "6ba", "evaluation.batches": 1, "checkpoint.interval": "1ba"},
    )  # fmt: skip
    change(
        tmp_path / "yamls" / "finetune" / "quickstart_retrieval.yaml",
        {"max_duration": "3ba", "batch_size": 8, "task.max_length": 16},
    )
    change(tmp_path / "yamls" / "data" / "quickstart.yaml", {"validation_fraction": 0.3, "shard_bytes": 65536})
    return tmp_path


def test_small_from_text_to_report(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small / "runs" / "quickstart"
    metrics = run / "clm-trunk" / "metrics.jsonl"
    first = start(small)
    deadline = time.monotonic() + 300
    while not (run / "clm-trunk" / "checkpoints" / "ba1.json").exists():
        assert first.poll() is None and time.monotonic() < deadline, first.wait(1).stderr[-3000:]
        time.sleep(0.002)
    os.kill(first.ranks[0], signal.SIGKILL)
    first.wait()

    # The same command continues. What the killed one had done is not done again.
    second = start(small).wait()
    assert second.returncode == 0, second.stdout[-2000:] + second.stderr[-3000:]
    assert "gather: done before and unchanged" in second.stdout
    assert "pretrain-clm-trunk: was interrupted; it resumes from its newest checkpoint" in second.stdout
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [entry["batch"] for entry in lines if "loss/train/total" in entry]
    assert sorted(set(trained)) == list(range(1, SWITCH + 1)) and trained.count(1) == 1

    # Two runs begin at the switch, with the batches of the shared one before it.
    for name, begins, objective in (("mlm", 1, "mlm"), ("clm-mlm", SWITCH + 1, "mlm"), ("clm", SWITCH + 1, "clm")):
        entries = parse_metrics((run / name / "metrics.jsonl").read_text())
        assert [entry["batch"] for entry in entries] == list(range(begins, BATCHES + 1))
        assert all(f"loss/train/{objective}" in entry for entry in entries)
    scores = json.loads((run / "scores" / "scores.json").read_text())
    assert list(scores["scores"]) == SYSTEMS
    for difference in scores["differences"]:
        first_score, second_score = (scores["scores"][difference[name]]["ndcg_at_10"] for name in ("first", "second"))
        assert difference["mean"] == pytest.approx(first_score - second_score, abs=2e-5)  # mteb rounds scores
        assert difference["interval"][0] <= difference["mean"] <= difference["interval"][1]
    assert second.stdout.endswith("s in all)\n") and "CLM, then MLM over MLM" in second.stdout

    report = (run / "report.md").read_text()
    for text in ("(scores.png)", "(losses.png)", "## What next", "start_from=runs/quickstart/clm-trunk", "| BM25 |"):
        assert text in report
    assert (run / "losses.png").stat().st_size and (run / "scores.png").stat().st_size
    figures: list[Any] = []
    monkeypatch.syspath_prepend(RECIPE)
    import report as quickstart_report

    monkeypatch.setattr(quickstart_report, "png", lambda figure: figures.append(figure) or b"")
    quickstart_report.draw_scores(scores)
    quickstart_report.draw_losses(run, quickstart_report.read_runs(run))
    [bars], [mlm_losses, _] = (figure.axes for figure in figures)
    assert [bar.get_width() for bar in bars.patches] == [scores["scores"][name]["ndcg_at_10"] for name in SYSTEMS[::-1]]
    assert {line.get_label() for line in mlm_losses.lines} >= {"CLM, then MLM", "MLM"}

    third = start(small, "quickstart.forked.start = None").wait()
    assert third.returncode == 0, third.stderr[-3000:]
    assert third.stdout.count("done before and unchanged") == len(list((run / "steps").glob("*.json")))


def test_done_changed_and_failed_steps(tmp_path: Path) -> None:
    for name in ("src", "yamls", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    source, one, two = (tmp_path / name for name in ("source.txt", "one", "two"))
    source.write_text("1")
    append = "import pathlib, sys\np = pathlib.Path(sys.argv[1])\np.open('a').write('x')\n"
    (tmp_path / "first.py").write_text(append)
    (tmp_path / "second.py").write_text(f"{append}sys.exit('no' if not pathlib.Path('mended').exists() else 0)\n")
    summary = tmp_path / "runs" / "quickstart" / "scores" / "summary.txt"
    summary.parent.mkdir(parents=True)
    summary.write_text("the scores\n")
    (tmp_path / "drive.py").write_text(f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(RECIPE)!r})
import quickstart
quickstart.ROOT = Path({str(tmp_path)!r})
quickstart.forked.import_libraries = lambda: None  # these steps need none
quickstart.make_steps = lambda seed: [
    quickstart.Step("one", "first", ["python", "first.py", "one"], [Path("one")], [{str(source)!r}]),
    quickstart.Step("two", "second", ["python", "second.py", "two"], [Path("two")], [], ("one",), resumes=True),
]
sys.exit(quickstart.main([]))
""")

    def drive() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, tmp_path / "drive.py"], capture_output=True, text=True)

    # The second step fails until a file appears: its output stays, and it continues from there.
    failed = drive()
    assert failed.returncode == 1
    assert "no\n" in failed.stderr and "the same command continues here" in failed.stderr
    (tmp_path / "mended").touch()
    mended = drive()
    assert mended.returncode == 0
    assert "one: done before and unchanged" in mended.stdout
    assert "two: was interrupted" in mended.stdout
    assert "the scores\nreport: runs/quickstart/report.md (" in mended.stdout
    assert (one.read_text(), two.read_text()) == ("x", "xx")

    # Nothing changed: nothing runs. A source changed: its step and what comes after start over.
    assert drive().returncode == 0
    assert (one.read_text(), two.read_text()) == ("x", "xx")
    source.write_text("2")
    assert drive().returncode == 0
    assert (one.read_text(), two.read_text()) == ("x", "x")


def test_steps_read_existing_files_and_follow_those_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    monkeypatch.chdir(ROOT)
    import quickstart

    for seed, folder in ((None, "runs/quickstart"), (7, "runs/quickstart/seed-7")):
        seen: set[str] = set()
        for step in quickstart.make_steps(seed):
            assert set(step.after) <= seen, step.name
            for name in step.reads:
                assert (ROOT / name).exists(), (step.name, name)
            seen.add(step.name)
            if step.name.startswith(("pretrain", "finetune")):
                assert step.makes == [Path(folder) / step.makes[0].name]
                assert seed is None or {"seed=7", f"output={folder}"} <= set(step.command)
