"""The paper's twelve tasks from small sets with exactly the hub's columns, and what goes wrong with them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Sequence

from biphasic.commands import main
from biphasic.config.load import dump, load
from biphasic.config.tasks import TasksConfig
from biphasic.downstream import tables
from biphasic.downstream.prepare import finished_record, plan_tasks, prepare_task
from biphasic.downstream.writer import TASK_RECORD
from biphasic.errors import UserError
from biphasic.storage import open_store
from helpers.buckets import bucket_for
from helpers.downstream_sets import ROWS, TEXT, jsonl, make_all, make_answers, one_task, rows_of, write_split
from helpers.hub_server import Repository, serve_hub
from helpers.tiny import ROOT

YAML = ROOT / "yamls" / "data" / "tasks.yaml"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All sets; gives the overrides by which the real YAML reads them instead of the hub."""
    labels = load(YAML).tasks["uner"].label_names  # pyright: ignore
    return make_all(tmp_path_factory.mktemp("sets"), labels)


def config_of(sets: dict[str, str], output: Path | str, *more: str) -> TasksConfig:
    config = load(YAML, [*(f"{key}={place}" for key, place in sets.items()), f"output={output}", *more])
    assert isinstance(config, TasksConfig)
    return config


def run(arguments: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "biphasic", "tasks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_command_prepares_all_twelve_sets(sets: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = run([str(YAML), *(f"{key}={place}" for key, place in sets.items()), f"output={out}"])
    assert command.returncode == 0, command.stderr
    names = list(config_of(sets, out).tasks)
    assert len(names) == 12
    lines = [line for line in command.stdout.splitlines() if " rows" in line]
    assert [line.partition(":")[0] for line in lines] == names
    assert lines[0].startswith(f"sst2: validation 2, train 38, test 40 rows; {out}/sst2 [")
    records = {name: json.loads((out / name / TASK_RECORD).read_text()) for name in names}
    assert all(record["license"] and record["left_out"] == {} for record in records.values())

    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(records[name]["kind"], []).append(name)
    assert sorted(kinds) == ["classification", "question_answering", "retrieval", "tokens"]
    assert all(len(tasks) == 3 for tasks in kinds.values())
    assert rows_of(out / "sst2", "test")[3] == {
        "id": "3",
        "text": "validation sentence 3",
        "text_pair": None,
        "label": 1,
    }
    assert records["sst2"]["label_names"] == ["no", "yes"]
    assert rows_of(out / "qqp", "test")[1] == {
        "id": "1", "text": "validation question1 1", "text_pair": "validation question2 1", "label": 1}  # fmt: skip
    assert sorted(path.stem for path in (out / "mnli").glob("*.parquet")) == [
        "test_matched", "test_mismatched", "train", "validation"]  # fmt: skip
    assert rows_of(out / "mnli", "test_mismatched")[0]["text_pair"] == "validation_mismatched hypothesis 0"
    for name in kinds["tokens"]:
        [row] = [row for row in rows_of(out / name, "validation") if row["tokens"][3] == "7"]
        assert row["tokens"] == ["validation", "New", "York", "7"] and row["labels"] == [0, 1, 2, 0]
        assert records[name]["rows"] == {"train": ROWS, "validation": ROWS, "test": ROWS}
    assert [len(records[name]["label_names"]) for name in kinds["tokens"]] == [9, 37, 7]
    [row] = [row for row in rows_of(out / "squad", "test") if row["id"] == "validation12"]
    assert row == {"id": "validation12", "question": "Which?", "context": "The number is 12.",
                   "answers": {"text": ["12", "12"], "answer_start": [14, 14]}}  # fmt: skip
    assert rows_of(out / "squad_v2", "test")[0]["answers"] == {"text": [], "answer_start": []}
    assert records["record"]["rows"] == {"validation": 2, "train": 38, "test": ROWS}


def test_validation_is_the_split_of_the_papers_evaluation(sets: dict[str, str], tmp_path: Path) -> None:
    prepare_task("squad", config_of(sets, tmp_path))
    rows = pq.read_table(Path(sets["tasks.squad.source.path"]) / "plain_text" / "train.parquet").to_pylist()
    split = Dataset.from_list(rows).train_test_split(train_size=0.95, seed=42)
    assert [row["id"] for row in rows_of(tmp_path / "squad", "train")] == split["train"]["id"]
    assert [row["id"] for row in rows_of(tmp_path / "squad", "validation")] == split["test"]["id"]


def test_generated_ids_differ_between_the_splits_that_are_divided_here(sets: dict[str, str], tmp_path: Path) -> None:
    prepare_task("squad", config_of(sets, tmp_path, "tasks.squad.id_column=null"))
    train, validation = ([row["id"] for row in rows_of(tmp_path / "squad", split)] for split in ("train", "validation"))
    assert train[:2] == ["train-0", "train-1"] and validation[:2] == ["validation-0", "validation-1"]


def test_a_retrieval_set_is_divided_as_in_the_papers_evaluation(sets: dict[str, str], tmp_path: Path) -> None:
    prepare_task("msmarco", config_of(sets, tmp_path))
    folder = tmp_path / "msmarco"
    assert rows_of(folder, "train")[2] == {"query": "query 2", "positive": "text 2", "negatives": []}
    # Judged in validation or test (queries 20 to 59): relevant ones, and those that were found not to be.
    assert [int(row["_id"]) for row in rows_of(folder, "corpus")] == list(range(20, 61))
    assert rows_of(folder, "corpus")[0] == {"_id": "20", "title": "", "text": "text 20"}
    assert [int(row["_id"]) for row in rows_of(folder, "queries")] == list(range(20, 60))
    assert rows_of(folder, "qrels/test") == [{"query-id": f"{at}", "corpus-id": f"{at}", "score": 2} for at in range(40, 60)]

    whole = config_of(sets, tmp_path / "whole", "tasks.msmarco.judged_only=false", "tasks.msmarco.min_score=0")
    prepare_task("msmarco", whole)
    assert len(rows_of(tmp_path / "whole" / "msmarco", "corpus")) == 100
    assert len(rows_of(tmp_path / "whole" / "msmarco", "qrels/test")) == 40


def test_halves_of_queries_depend_on_the_seed(sets: dict[str, str], tmp_path: Path) -> None:
    prepare_task("nq", config_of(sets, tmp_path))
    folder = tmp_path / "nq"
    judged = {split: {row["query-id"] for row in rows_of(folder, f"qrels/{split}")} for split in ("validation", "test")}
    assert not judged["validation"] & judged["test"]
    assert judged["validation"] | judged["test"] == {str(at) for at in range(20)}
    assert 4 <= len(judged["test"]) <= 16
    assert rows_of(folder, "corpus")[5]["text"] == "title 5. text 5"
    prepare_task("nq", config_of(sets, tmp_path / "other", "seed=43"))
    assert {row["query-id"] for row in rows_of(tmp_path / "other" / "nq", "qrels/test")} != judged["test"]


def test_judgments_can_be_lists(sets: dict[str, str], tmp_path: Path) -> None:
    record = prepare_task("mldr", config_of(sets, tmp_path))
    assert record["rows"] == {"queries": 20, "corpus": 40, "qrels/validation": 20, "qrels/test": 20}
    assert rows_of(tmp_path / "mldr", "qrels/validation")[1] == {
        "query-id": "q-dev-0", "corpus-id": "d-dev-0-1", "score": 1}  # fmt: skip


def test_the_same_sources_give_the_same_bytes(sets: dict[str, str], tmp_path: Path) -> None:
    for output in ("one", "two"):
        for name in ("mnli", "uner", "squad_v2", "nq"):
            prepare_task(name, config_of(sets, tmp_path / output))
    made = {path.relative_to(tmp_path / "one"): path for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert len(made) == 4 + 4 + 3 + 3 + 4
    for name, path in made.items():
        assert path.read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    before = {name: path.stat().st_mtime_ns for name, path in made.items()}
    prepare_task("mnli", config_of(sets, tmp_path / "one"))
    assert {name: path.stat().st_mtime_ns for name, path in made.items()} == before
    with pytest.raises(UserError, match=r"mnli was made with other settings \(seed differ\): remove it, or choose"):
        prepare_task("mnli", config_of(sets, tmp_path / "one", "seed=1"))


def test_an_interrupted_task_is_prepared_again(sets: dict[str, str], tmp_path: Path) -> None:
    prepare_task("sst2", config_of(sets, tmp_path))
    made = {path.name: path.read_bytes() for path in (tmp_path / "sst2").iterdir()}
    (tmp_path / "sst2" / TASK_RECORD).unlink()
    (tmp_path / "sst2" / "old.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"sst2 holds something else \(old.parquet\); choose another output"):
        prepare_task("sst2", config_of(sets, tmp_path))  # a user's own tables
    (tmp_path / "sst2" / "task.started").touch()
    assert finished_record("sst2", config_of(sets, tmp_path)) is None
    assert len(list((tmp_path / "sst2").iterdir())) == 5  # a plan removes nothing
    (tmp_path / "sst2" / ".unfinished-of-a-killed-command").mkdir()
    prepare_task("sst2", config_of(sets, tmp_path))
    assert {path.name: path.read_bytes() for path in (tmp_path / "sst2").iterdir()} == made
    (tmp_path / "qqp").mkdir()
    (tmp_path / "qqp" / "thesis.txt").write_text("text")
    with pytest.raises(UserError, match=r"qqp holds something else \(thesis.txt\); choose another output"):
        prepare_task("qqp", config_of(sets, tmp_path))
    assert [path.name for path in (tmp_path / "qqp").iterdir()] == ["thesis.txt"]


def test_a_task_in_a_bucket(s3: Path, sets: dict[str, str], tmp_path: Path) -> None:
    place = f"s3://{bucket_for(s3, 'tasks')}/sets"
    prepare_task("sst2", config_of(sets, place))
    prepare_task("sst2", config_of(sets, tmp_path))
    names = [TASK_RECORD, "test.parquet", "train.parquet", "validation.parquet"]
    assert list(open_store(place).list()) == [f"sst2/{name}" for name in names]
    assert open_store(place).read("sst2/train.parquet") == (tmp_path / "sst2" / "train.parquet").read_bytes()
    with pytest.raises(UserError, match=r"^s3://no-such-bucket/sets/sst2: can't be read \(.*not exist.*\)$"):
        plan_tasks(config_of(sets, "s3://no-such-bucket/sets"), ["sst2"])


def test_label_names_must_be_those_of_the_dataset(sets: dict[str, str], tmp_path: Path) -> None:
    names = "[O, I-PER, B-PER, B-ORG, I-ORG, B-LOC, I-LOC]"
    with pytest.raises(UserError, match=r"label_names are O, I-PER, .*but the dataset says O, B-PER"):
        prepare_task("uner", config_of(sets, tmp_path, f"tasks.uner.label_names={names}"))
    with pytest.raises(
        UserError, match="train: labels_column 'ner' has no lists of names: if it has lists of numbers, give"
    ):
        prepare_task("conll2003", config_of(sets, tmp_path, "tasks.conll2003.label_names=null"))
    # Named in another order than numbered: BIO breaks everywhere.
    wrong = "[O, I-PER, B-PER, B-ORG, I-ORG, B-LOC, I-LOC, B-MISC, I-MISC]"
    with pytest.raises(UserError, match=r"the first: .* row 1, .*: I-PER follows O"):
        prepare_task("conll2003", config_of(sets, tmp_path, f"tasks.conll2003.label_names={wrong}"))


def test_judgments_of_unknown_queries_and_documents_are_left_out(sets: dict[str, str], tmp_path: Path) -> None:
    path = jsonl(tmp_path / "qrels.jsonl", [{"query-id": "1", "corpus-id": str(at), "score": 1} for at in (1, 999)])
    task = config_of(sets, tmp_path).tasks["nq"].model_dump() | {"qrels": {"test": {"files": {"train": [path]}}}}
    with pytest.raises(UserError, match=r"qrels/test: 1 of 2 rows .* number 2, id '999': its document is not in the corpus"):
        prepare_task("it", one_task(tmp_path, task))
    # Its queries and corpus are written already: the next preparation may remove them.
    assert prepare_task("it", one_task(tmp_path, task, max_invalid_share=0.5))["rows"]["qrels/test"] == 1


def test_a_failing_task_does_not_stop_the_others(sets: dict[str, str], tmp_path: Path) -> None:
    overrides = [*(f"{key}={place}" for key, place in sets.items()), f"output={tmp_path}"]
    broken = f"tasks.qqp.source.path={tmp_path / 'nothing'}"
    command = run([str(YAML), "sst2", "qqp", "squad", *overrides, broken])
    assert command.returncode == 2
    assert "Traceback" not in command.stderr
    both = command.stdout + command.stderr
    assert both.count(str(tmp_path / "nothing")) == 2  # in the plan's line of its source, and as the fault
    assert f"\nqqp: {tmp_path / 'nothing'}: there is no such file or folder\n" in f"\n{command.stderr}"
    assert sorted(path.parent.name for path in tmp_path.glob(f"*/{TASK_RECORD}")) == ["squad", "sst2"]
    assert "1 of 3 tasks failed (qqp): change what the messages name first" in command.stderr
    planned = run([str(YAML), "sst2", "qqp", *overrides, broken, "--plan"])
    assert planned.returncode == 2, planned.stderr
    sst2, qqp, problem = planned.stdout.splitlines()[1:]
    assert "finished already" in sst2 and "finished already" not in qqp
    assert problem.startswith(f"  PROBLEM        qqp: {tmp_path / 'nothing'}: there is no such file or folder")
    made = run([str(YAML), "qqp", *overrides, "tasks.qqp.source.path=data/nothing-yet", "--plan"])
    assert made.returncode == 0 and "  MISSING        qqp: data/nothing-yet: there is no such file" in made.stdout, (
        made.stderr
    )
    unknown = run([str(YAML), "sst3", *overrides])
    assert unknown.returncode == 2 and unknown.stderr.startswith("no task 'sst3' (there are: sst2, mnli")


def test_a_missing_column_is_named_with_task_and_key(tmp_path: Path) -> None:
    """The task is named too if its name is that of the folder with its data."""
    (tmp_path / "it").mkdir()
    rows = jsonl(tmp_path / "it" / "rows.jsonl", [{"body": "a", "label": 0}])
    task = {"kind": "classification", "text_column": "text", "source": {"files": {"all": [rows]}}}
    task |= {"splits": {"test": "all"}}
    (tmp_path / "tasks.yaml").write_text(dump(one_task(tmp_path, task)))
    command = run([str(tmp_path / "tasks.yaml")])
    expected = "has no column 'text' (it has: body, label); set text_column"
    assert command.returncode == 2 and f"it: {rows}: {expected}\n" in command.stderr
    table = {"files": [rows]}
    retrieval = {"kind": "retrieval", "corpus": table, "queries": [table], "qrels": {"test": table}}
    with pytest.raises(UserError, match=r"has no column 'query-id' .*; set query_column"):
        prepare_task("it", one_task(tmp_path / "retrieval", retrieval))


def test_a_task_that_a_later_start_may_prepare(
    sets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside one that needs a change: the same command does something, so the status is 1."""

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("the hub is gone")

    monkeypatch.setattr(tables, "_load", fail)
    overrides = [*(f"{key}={place}" for key, place in sets.items()), f"output={tmp_path}"]
    broken = f"tasks.qqp.source.path={tmp_path / 'nothing'}"
    assert main(["tasks", str(YAML), "sst2", "qqp", *overrides, broken]) == 1
    assert "2 of 2 tasks failed (qqp, sst2); the same command tries them again" in capsys.readouterr().err


def test_a_hub_dataset_at_a_revision(tmp_path: Path) -> None:
    """A set whose owners publish a script, from the branch where the hub converts it; and one at its newest commit."""
    converted, newest, commits = tmp_path / "converted", tmp_path / "newest", ["c" * 40, "d" * 40]
    row = {"query": "@placeholder left", "passage": "Ann left.", "entities": ["Ann"], "answers": ["Ann"]}
    features = {"query": TEXT, "passage": TEXT, "entities": Sequence(TEXT), "answers": Sequence(TEXT)}
    for name in ("record", "boolq"):
        for split in ("train", "validation"):
            write_split(converted / name / split, "0000", [row] * (20 if name == "record" else 3), features)
    make_answers(newest, name="plain_text")
    script = tmp_path / "script"
    script.mkdir()
    (script / "super_glue.py").write_text("raise SystemExit('ran a script')")
    tables = tmp_path / "tables"
    tables.mkdir()
    for split in ("train", "validation"):
        (tables / f"{split}.csv").write_text("idx,sentence,label\n" + "007,NA,0\n" * 20)
    repositories = {
        "own/tables": Repository({commits[0]: tables}, {"main": commits[0]}),
        "aps/super_glue": Repository(
            {commits[0]: converted, "e" * 40: script}, {"refs/convert/parquet": commits[0], "main": "e" * 40}
        ),
        "rajpurkar/squad": Repository({commits[1]: newest}, {"main": commits[1]}),
    }
    files = {split: [f"record/{split}/*.parquet"] for split in ("train", "validation")}
    upstream = f"{{path: aps/super_glue, revision: refs/convert/parquet, files: {json.dumps(files)}}}"
    overrides = [
        f"tasks.record.source={upstream}",
        "tasks.record.question_column=query",
        "tasks.record.context_column=passage",
    ]
    with serve_hub(repositories, tmp_path / "home") as environment:
        command = run([str(YAML), "record", "squad", f"output={tmp_path / 'out'}", *overrides], environment)
        assert command.returncode == 0, command.stderr
        csv = ["tasks.sst2.source={path: own/tables, name: null}", "tasks.sst2.label_names=['0', '1']"]
        of_csv = run([str(YAML), "sst2", f"output={tmp_path / 'csv'}", *csv], environment)
        missing = run([str(YAML), "sst2", f"output={tmp_path / 'out'}"], environment)
        of_script = ["tasks.record.source={path: aps/super_glue}", *overrides[1:]]
        empty_home = {**environment, "HF_HOME": str(tmp_path / "other-home")}
        refused = run([str(YAML), "record", f"output={tmp_path / 'other'}", *of_script], empty_home)
    record = json.loads((tmp_path / "out" / "record" / TASK_RECORD).read_text())
    assert record["commits"] == {"aps/super_glue": commits[0]}
    assert record["rows"] == {"validation": 1, "train": 19, "test": 20}
    assert json.loads((tmp_path / "out" / "squad" / TASK_RECORD).read_text())["commits"] == {"rajpurkar/squad": commits[1]}
    assert of_csv.returncode == 0, of_csv.stderr
    assert rows_of(tmp_path / "csv" / "sst2", "test")[0] == {"id": "007", "text": "NA", "text_pair": None, "label": 0}
    assert refused.returncode == 2 and "give `revision: refs/convert/parquet` and its `files` there" in refused.stderr
    assert missing.returncode == 2
    assert missing.stderr.startswith("sst2: nyu-mll/glue, sst2, train: can't be read (")


def test_numbers_keep_their_types(sets: dict[str, str], tmp_path: Path) -> None:
    prepare_task("uner", config_of(sets, tmp_path))
    schema = pq.read_schema(tmp_path / "uner" / "train.parquet")
    assert schema.field("labels").type.value_type == "int32"
    assert np.asarray(pq.read_table(tmp_path / "uner" / "train.parquet")["labels"].combine_chunks().values).dtype == np.int32
