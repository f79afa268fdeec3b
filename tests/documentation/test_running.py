"""The commands of pages run in their order, in a small working directory (small_repository.py): in every run of the tests
most of README's; with the slow tests all of README's, and then the other pages'."""

from pathlib import Path

import pytest

from helpers import small_repository
from helpers.documented_commands import OURS, ROOT, Call, calls, pages
from helpers.tiny import LENGTH, SIZE

# Parts of README's commands that only the slow test runs: many trainings, a traced graph, or what another command shows.
SLOW = ("run_name=210m-3e-4", "yamls/sweep/own.yaml", "biphasic report", "biphasic onnx")
# What is never run here, by how the command begins, and why.
NOT_RUN = {
    "make": "other tests run what these start",
    "recipes/": "tests/recipes runs the scripts' commands",
    "composer --world_size": "several machines",
    "composer -m biphasic preflight": "tests/test_preflight.py",
    "biphasic preflight": "tests/test_preflight.py",
    "python -m pytest": "tests",
    "python src/main.py FILE.yaml": "a name in a sentence",
    "composer src/main.py FILE.yaml": "a name in a sentence",
    "biphasic runs runs/NAME": "a name in a sentence",
    "biphasic watch runs/NAME --task FILE.yaml": "a name in a sentence",
}
# The text is a few rows of the tests' length.
SHORT_ROWS = {
    "sequence_length=256": f"sequence_length={LENGTH}",
    "model.vocab_size=8192": f"data.sequence_length={LENGTH}",
}
RUN = "runs/210m-clm-21k-mlm40-42k"
# Pages whose commands run after README's, in the same directory: what replaces parts of their commands, and parts of those
# commands that are not run.
PAGES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "docs/checkpoints.md": (
        {"model.preset=null": " ".join(f"model.{key}=null" for key in SIZE),
         "runs/210m-clm/": "runs/210m-42k/",
         "runs/my-run": RUN, "config.yaml 1234 5678": "config.yaml 1 2"},
        ("biphasic watch",),  # it waits for a run's end; tests/test_watch.py
    ),
    "docs/data.md": (
        {"data/mine": "data/mine-again", "VALUE": "data/mine", " OUT": " data/mine"},
        ("cluster.address=auto", "biphasic tokenizer", "deduplicated/", "recipes/overlap"),
    ),
    "docs/evaluate.md": (
        {"610m-clm-10k-mlm40-42k": "210m-clm-21k-mlm40-42k", "rank0.pt my-encoder": "rank0.pt another-encoder",
         "model.path=my-retriever": "model.path=my-encoder",
         "evaluate/quick.yaml": "evaluate/quick.yaml output=runs/evaluate-again",  # a folder of README's model alone
         "runs/evaluate/first": "runs/evaluate/quick", "runs/evaluate/second": "runs/evaluate-again/quick"},
        ("msmarco", "retrieval.yaml", "SciFact", "recipes/overlap", "@one"),  # README's sweep has one model
    ),
    "docs/export.md": (
        {"runs/NAME OUT": f"{RUN} of-the-run", "runs/NAME": RUN, "s3://my-bucket/NAME": "bucket/210m-clm-21k-mlm40-42k",
         "checkpoints OUT": "checkpoints newest", "biphasic.yaml OUT": "biphasic.yaml untrained",
         "CHECKPOINT": f"{RUN}/checkpoints/ba42000-rank0.pt",
         "OUT org/name --private": "OUT org/name --dry-run --private"},
        ("ep0-ba42000",),
    ),
    "docs/finetune.md": (
        {},
        # GLUE is on the hub; tests/downstream/test_glue.py reads its columns, tests/sweep the order of its trials.
        # The export from a bucket is named in a sentence.
        ("retrieval.yaml", "predict runs/squad", "mined", "glue", "s3://"),
    ),
    # tests/recipes/test_measured.py runs what compares a run with a recipe's row.
    "docs/report.md": ({}, ("runs/paper", "runs/mini", "recipes/measured.py", "FOLDER", "s3://")),
    "docs/sweeps.md": ({}, ()),
    "docs/tokenizer.md": (
        {"my/tokenizer": "my/second_tokenizer", "data/mine": "data/tokenized", "run_name=mine": "run_name=tokenized"},
        ("HuggingFaceTB",),
    ),
}  # fmt: skip
# Pages whose commands are read (test_commands.py) and not run, and why.
READ_ONLY = {
    "docs/architecture.md": "names commands of make",
    "docs/comparison.md": "has none",
    "docs/configuration.md": "usage lines",
    "docs/library.md": "tests/documentation/test_library.py runs its examples",
    "docs/quickstart.md": "minutes; tests/recipes/test_quickstart.py runs all steps, small",
    "docs/recipes.md": "repeats the recipes' commands",
    "docs/results.md": "hours; tests/recipes/test_protocol.py checks its runs and its records",
    "docs/study.md": "38 models; tests/recipes/test_reproduce.py runs them, small",
    "docs/tasks.md": "the hub; tests/downstream runs them on small files",
    "docs/throughput.md": "GPUs and minutes of measurement",
    "docs/versions.md": "other environments",
    "CONTRIBUTING.md": "names commands of make",
    "recipes/late_interaction/README.md": "minutes; tests/recipes/test_beyond_dense.py runs it, small",
    "recipes/reranker/README.md": "minutes; tests/recipes/test_beyond_dense.py runs it, small",
    "recipes/RESULTS.md": "is made by the command that it names",
    "recipes/sparse/README.md": "minutes; tests/recipes/test_beyond_dense.py runs it, small",
    "recipes/clm_detour/README.md": "the hub; tests/recipes/test_continued.py runs the YAML",
    "recipes/continue_decoder/README.md": "the hub; tests/recipes/test_continued.py runs the YAML",
    "recipes/launch/README.md": "clusters; tests/launch and `make test-slurm` run the scripts",
    "recipes/long_context/README.md": "the hub; tests/recipes/test_continued.py runs the YAML",
    "recipes/muon/README.md": "most of an hour; tests/recipes/test_muon.py makes its tables",
    "recipes/muon/results.md": "has none",
    "recipes/mini/log.md": "has none",
    "recipes/mini/README.md": "hours; tests/recipes/test_mini.py runs the study, small",
    "recipes/mini/protocol.md": "hours; tests/recipes/test_protocol.py checks its runs and its records",
    "recipes/mini/followup.md": "hours; tests/recipes/test_protocol.py checks its runs and its records",
    "recipes/mini/public/README.md": "files that are not ours; tests/recipes/test_protocol.py prepares rows in their form",
    "recipes/mini/protocol/results.md": "has none",
    "recipes/mini/ratios/results.md": "has none",
    "recipes/mini/longer/results.md": "has none",
    "recipes/mini/results/results.md": "is made by the command that it names",
    "recipes/quickstart/README.md": "minutes; tests/recipes/test_quickstart.py runs all steps, small",
    "recipes/three_phases/README.md": "minutes; tests/recipes/test_three_phases.py runs the study, small",
    "recipes/paper/harness/README.md": "the hub; tests/recipes/test_harness.py runs it with small models",
    "recipes/paper/README.md": "38 models; tests/study runs small studies",
    "recipes/your_language/README.md": "minutes; tests/recipes runs its steps",
}


def run_page(page: str, folder: Path, reading: Path, replaced: dict[str, str], left_out: tuple[str, ...]) -> list[Call]:
    """Run a page's commands in their order, and return those that ran."""
    reading.mkdir()
    done = []
    for call in calls(ROOT / page, reading):
        command = " ".join(call.words)
        only_named = len(call.words) == 2  # `biphasic convert`, in a sentence
        if call.words[0] not in OURS or only_named or any(command.startswith(begin) for begin in NOT_RUN):
            continue
        if any(part in command for part in left_out):
            continue
        words = list(call.words)
        for old, new in replaced.items():
            words = "\0".join(words).replace(old.replace(" ", "\0"), new.replace(" ", "\0")).split("\0")
        small_repository.run(tuple(word for word in words if word), folder, call.bucket)
        done.append(call)
    return done


def make_directory(folder: Path) -> Path:
    small_repository.make(folder)
    # README trains before it explains where the rows come from.
    small_repository.run(("biphasic", "convert", "yamls/data/fineweb_edu_100bt.yaml"), folder, "")
    return folder


def test_readme_from_top_to_bottom(tmp_path: Path) -> None:
    folder = make_directory(tmp_path / "small")
    done = run_page("README.md", folder, tmp_path / "reading", SHORT_ROWS, ("yamls/1b_biphasic.yaml", *SLOW))
    assert len(done) >= 18
    assert (folder / "bucket/210m-clm-21k-mlm40-42k/checkpoints/ba21.json").exists()
    assert (folder / "bucket/mine/checkpoints/ba21.json").exists()
    assert (folder / "my-encoder/model.safetensors").exists()
    assert (folder / "runs/sst2/record.json").exists()
    assert (folder / "runs/evaluate/quick/scores.md").exists()
    assert (folder / "runs/evaluate/own/scores.md").exists()


@pytest.fixture(scope="module")
def after_readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory after all of README's commands."""
    folder = make_directory(tmp_path_factory.mktemp("pages") / "small")
    run_page("README.md", folder, folder / "reading", SHORT_ROWS, ("yamls/1b_biphasic.yaml",))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_after_readme(page: str, after_readme: Path, tmp_path: Path) -> None:
    assert (after_readme / "runs/sweep/report/report.md").exists()
    assert (after_readme / "my-encoder/onnx/model.onnx").exists()
    assert run_page(page, after_readme, tmp_path / "reading", *PAGES[page])


def test_every_page_is_run_or_has_a_reason() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in pages() if page.suffix == ".md"}
    names = {name for name in names if not name.startswith("docs/reference/")}
    assert names == {"README.md", *PAGES, *READ_ONLY}
