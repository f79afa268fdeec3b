"""The quickstart: all of its steps, small; which steps are repeated, skipped and continued."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from biphasic.storage import open_store
from biphasic.sweep.records import read_grid, read_records
from biphasic.sweep.selection import score_of
from biphasic.training.metrics_file import parse_metrics
from helpers import warm

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "quickstart"
BATCHES, SWITCH = 12, 6
SYSTEMS = ["CLM, then MLM", "MLM", "CLM", "untrained", "BM25"]


def start(folder: Path, code: str = "") -> warm.Job:
    """Start the quickstart in a folder that has its files."""
    call = f"import sys; sys.path.insert(0, {str(folder / 'recipes' / 'quickstart')!r}); import quickstart; {code}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return warm.start([], 1, environment, code=f"{call}\nsys.exit(quickstart.main([]))")


KILLED_AFTER_FIRST_CHECKPOINT = """
import os, signal
from biphasic.checkpointing.save import Saver
write = Saver._write
def write_and_kill_the_quickstart(self, content, manifest):
    write(self, content, manifest)
    if "clm-trunk" in str(self._local_folder):
        os.kill(os.getppid(), signal.SIGKILL)
Saver._write = write_and_kill_the_quickstart
"""


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
    for name in ("recipes/quickstart", "recipes/mini", "yamls"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("results*"))
    gather = tmp_path / "recipes" / "quickstart" / "gather.py"
    source = gather.read_text()
    for old, new in (
        ("roots = [(stdlib, stdlib,", "roots = [(stdlib / 'asyncio', stdlib,"),
        (
            '    "composer",\n    "datasets",\n',
            '    "fsspec",\n    "joblib",\n    "pyarrow",\n    "streaming",\n)\n_OTHERS = (\n',
        ),
        ('(("composer", "huggingface_hub", "networkx", "streaming"), "validation")', '(("streaming",), "validation")'),
        ('(("datasets", "pandas", "torchmetrics", "torchvision"), "test")', '(("joblib",), "test")'),
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
    change(
        tmp_path / "yamls" / "finetune" / "quickstart_parameters.yaml",
        {"max_duration": "3ba", "batch_size": 8, "task.max_length": 16},
    )
    change(tmp_path / "recipes" / "quickstart" / "sweep.yaml", {"learning_rates": [4e-3], "seeds": [0, 1]})
    change(tmp_path / "yamls" / "data" / "quickstart.yaml", {"validation_fraction": 0.3, "shard_bytes": 65536})
    return tmp_path


def test_small_from_text_to_report(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small / "runs" / "quickstart"
    metrics = run / "clm-trunk" / "metrics.jsonl"
    assert start(small, KILLED_AFTER_FIRST_CHECKPOINT).wait().returncode == -signal.SIGKILL

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
    scores = json.loads((run / "scores.json").read_text())
    assert list(scores["scores"]) == SYSTEMS
    assert all(
        low <= values["ndcg_at_10"] <= high for values in scores["scores"].values() for low, high in [values["interval"]]
    )
    # Retrieval is scored on the test package, among the documents of both held-out packages.
    gathered = json.loads((run / "text" / "gathered.json").read_text())
    assert gathered["packages"]["test"][0].startswith("joblib ")
    assert (
        scores["queries"] == gathered["rows"]["pairs/qrels/test"] < scores["documents"] == gathered["rows"]["pairs/corpus"]
    )
    # A busy machine takes minutes, which are printed as such.
    assert re.search(r"\([\d.]+ (s|min) in all\)\n\Z", second.stdout)
    assert (run / "summary.txt").read_text().strip() in second.stdout

    report = (run / "report.md").read_text()
    for text in ("(scores.png)", "(losses.png)", "## What next", "start_from=runs/quickstart/clm-trunk", "| BM25 |"):
        assert text in report
    assert "python src/main.py recipes/quickstart/sweep.yaml" in report
    assert (run / "report.html").read_text().count('src="data:image/png;base64,') == 2
    assert (run / "losses.png").stat().st_size and (run / "scores.png").stat().st_size
    figures: list[Any] = []
    monkeypatch.syspath_prepend(RECIPE)
    import report as quickstart_report

    monkeypatch.setattr(quickstart_report, "png", lambda figure: figures.append(figure) or b"")
    labelling = quickstart_report.read_labelling(run / "sweep" / "report")
    quickstart_report.draw_scores(labelling)
    quickstart_report.draw_losses(run, quickstart_report.read_runs(run))
    [bars], [mlm_losses, _] = (figure.axes for figure in figures)
    # The picture and the table have the scores of the sweep's own records.
    sweep = open_store(str(run / "sweep"))
    records = read_records(sweep, read_grid(sweep).trials).values()
    assert len(records) == 8
    for bar, model in zip(bars.patches, ["untrained", "clm", "mlm", "clm-mlm"], strict=True):
        f1 = [score_of(record, "parameters", "test") for record in records if record.cell.model == model]
        assert bar.get_width() == pytest.approx(50 * sum(f1)) and len(f1) == 2
        assert f"{bar.get_width():.1f} ± " in report
    assert {line.get_label() for line in mlm_losses.lines} >= {"CLM, then MLM", "MLM"}

    third = start(small, "quickstart.forked.start = None").wait()
    assert third.returncode == 0, third.stderr[-3000:]
    assert third.stdout.count("done before and unchanged") == len(list((run / "steps").glob("*.json")))


def test_conclusion_by_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECIPE)
    import report as quickstart_report

    def conclusion(over_mlm: tuple[float, float, float], over_clm: tuple[float, float, float]) -> str:
        given = {("clm-mlm", "mlm"): over_mlm, ("clm-mlm", "clm"): over_clm}
        differences = {pair: (mean, half, 1.0) for pair, (mean, half, _) in given.items()}
        p = {pair: p for pair, (_, _, p) in given.items()}
        return quickstart_report.conclusion(quickstart_report.Labelling({}, differences, p))

    ahead = conclusion((12.4, 0.8, 0.0002), (3.9, 6.5, 0.12))
    assert ahead.startswith("CLM, then MLM is better than MLM alone: +12.4 ± 0.8 points of F1, p 0.0004. Not")
    assert "CLM alone (+3.9 ± 6.5 points of F1, p 0.1200)" in ahead and "One pretraining seed" in ahead
    behind = conclusion((0.1, 0.2, 0.16), (-3.0, 1.0, 0.006))
    assert behind.startswith("Not shown: a difference between CLM, then MLM and MLM alone (+0.1 ± 0.2")
    assert "CLM, then MLM is worse than CLM alone: -3.0 ± 1.0" in behind
    # The interval of one comparison excludes zero, but there are two.
    assert conclusion((3.5, 3.0, 0.0375), (-0.5, 3.1, 0.55)).count("Not shown") == 2


def test_a_step_that_uses_all_cores_runs_alone(tmp_path: Path) -> None:
    for name in ("src", "yamls", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    summary = tmp_path / "runs" / "quickstart" / "summary.txt"
    summary.parent.mkdir(parents=True)
    summary.touch()
    (tmp_path / "job.py").write_text(
        "import sys, time\nf = open('order', 'a')\nf.write(f'+{sys.argv[1]} '); f.flush()\ntime.sleep(0.5)\n"
        "f.write(f'-{sys.argv[1]} '); f.flush()\n"
    )
    (tmp_path / "drive.py").write_text(f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(RECIPE)!r})
import quickstart
quickstart.ROOT = Path({str(tmp_path)!r})
quickstart.forked.import_libraries = lambda: None
quickstart.forked.AT_ONCE = 2
def step(name, **options):
    return quickstart.Step(name, name, ["python", "job.py", name], [], [], **options)
quickstart.make_steps = lambda seed: [step("a"), step("b", alone=True), step("c"), step("d")]
sys.exit(quickstart.main([]))
""")
    assert subprocess.run([sys.executable, tmp_path / "drive.py"], capture_output=True).returncode == 0
    order = (tmp_path / "order").read_text().split()
    at = order.index("+b")
    assert order[at + 1] == "-b" and order[:at].count("-a") == 1


def test_done_changed_and_failed_steps(tmp_path: Path) -> None:
    for name in ("src", "yamls", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    source, one, two = (tmp_path / name for name in ("source.txt", "one", "two"))
    source.write_text("1")
    append = "import pathlib, sys\np = pathlib.Path(sys.argv[1])\np.open('a').write('x')\n"
    (tmp_path / "first.py").write_text(append)
    (tmp_path / "second.py").write_text(f"{append}sys.exit('no' if not pathlib.Path('mended').exists() else 0)\n")
    summary = tmp_path / "runs" / "quickstart" / "summary.txt"
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
    assert "two: was interrupted; it starts again" in mended.stdout  # it has no checkpoint
    assert "the scores\nreport: runs/quickstart/report.html, report.md (" in mended.stdout
    assert (one.read_text(), two.read_text()) == ("x", "xx")

    # Nothing changed: nothing runs. A source changed: its step and what comes after start over.
    assert drive().returncode == 0
    assert (one.read_text(), two.read_text()) == ("x", "xx")
    source.write_text("2")
    assert drive().returncode == 0
    assert (one.read_text(), two.read_text()) == ("x", "x")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_to_the_process_group_ends_it_in_one_line(tmp_path: Path, number: signal.Signals, status: int) -> None:
    for name in ("src", "yamls", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "job.py").write_text("import time\nopen('started', 'w')\ntime.sleep(300)\n")
    # With the real imports, since Composer's replaces the handlers of these signals.
    (tmp_path / "drive.py").write_text(f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(RECIPE)!r})
import quickstart
quickstart.ROOT = Path({str(tmp_path)!r})
real = quickstart.forked.import_libraries
quickstart.forked.import_libraries = lambda: (real(), Path("imported").touch())
quickstart.make_steps = lambda seed: [
    quickstart.Step("job", "sleeps", ["python", "job.py"], [Path("started")], [], resumes=True)
]
sys.exit(quickstart.main([]))
""")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.Popen(
        [sys.executable, tmp_path / "drive.py"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not ((tmp_path / "imported").exists() and (tmp_path / "started").exists()):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(run.pid, number)
    if number == signal.SIGTERM:
        os.kill(run.pid, number)  # `make` passes it on
    _, errors = run.communicate(timeout=60)
    assert (run.returncode, errors) == (status, "interrupted: the same command continues\n")
    assert "spent" in json.loads((tmp_path / "runs" / "quickstart" / "steps" / "job.json").read_text())


def test_fine_tuning_reads_every_package_that_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the score of the model without pretraining would remain that of older code."""
    monkeypatch.syspath_prepend(str(RECIPE))
    import quickstart

    code = (
        "import sys, biphasic.finetuning.run, biphasic.finetuning.trainer\n"
        "print(*(module.__file__ for name, module in sys.modules.items() if name.startswith('biphasic.')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    imported = {Path(file).relative_to(ROOT / "src/biphasic").parts[0] for file in printed.split()}
    # These don't decide what is trained and scored; the first four are imported by what other jobs use.
    others = {"checkpointing", "conversion", "objectives", "workers", "amounts.py", "devices.py", "errors.py",
              "processes.py", "provenance.py", "quiet.py", "ranks.py", "storage", "versions.py"}  # fmt: skip
    assert imported - others == {Path(name).name for name in quickstart.FINETUNING} - {"main.py"}


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
