"""Tasks: how files are divided, what is done again, where a limit stops, and that nothing but the text decides the bytes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from biphasic.config.conversion import ConvertConfig
from biphasic.config.errors import UserError
from biphasic.data import convert as converting
from biphasic.data.convert import convert
from biphasic.data.merge import repeated
from biphasic.data.rows import document_number, in_validation
from biphasic.data.sources import Looked, SourceFile
from biphasic.data.tokenizer import load_tokenizer
from biphasic.data.verify import verify
from biphasic.data.work import Limit, Task, Work, plan_tasks
from biphasic.data.worker import convert_task, encode
from outputs import rows_in, same_bytes, segments_in
from texts import sentences, write_parquet

Make = Callable[..., ConvertConfig]
MIB = 1 << 20


def file(name: str, size: int) -> SourceFile:
    return SourceFile(name, size, "v1")


def test_small_files_are_put_together_and_large_ones_divided() -> None:
    files = [file(name, 1) for name in ("a", "b", "c", "d.parquet", "e.parquet", "f")]
    looks = [
        Looked((10,), (40,)),
        Looked((10,), (50,)),
        Looked((10,), (20,)),
        Looked((1, 2, 3, 4), (60, 30, 20, 150)),
        Looked(fault="is empty"),
        Looked(),
    ]
    tasks = plan_tasks(files, looks, 100)
    assert [[(piece.path, piece.row_groups) for piece in task.pieces] for task in tasks] == [
        [("a", None), ("b", None)],
        [("c", None)],
        [("d.parquet", (0, 2))],
        [("d.parquet", (2, 3))],
        [("d.parquet", (3, 4))],
        [("f", None)],
    ]
    assert [task.bytes for task in tasks] == [90, 20, 90, 20, 150, 1]
    assert len({task.name for task in tasks}) == 6
    # A file that changes keeps its task's name; what else there is doesn't matter to it.
    changed = [SourceFile("f", 2, "v2")]
    assert plan_tasks(changed, [Looked()], 100)[0].name == tasks[-1].name


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Twelve files of text of very different sizes: about 5 MiB."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        write_parquet(folder / f"{number:02d}.parquet", sentences(500 + 900 * (number % 4), seed=number))
    return folder


KEYS: dict[str, Any] = {"validation_fraction": 0.1, "task_bytes": MIB, "shard_bytes": 1 << 17}
ALONE, TWO = {"workers": 1}, {"workers": 2}


def test_the_bytes_are_the_same_however_many_workers(many: Path, config_for: Make, tmp_path: Path) -> None:
    alone = convert(config_for(many, output=str(tmp_path / "alone"), cluster=ALONE, **KEYS))
    assert len(alone["tasks"]) > 4
    both = convert(config_for(many, output=str(tmp_path / "both"), cluster=TWO, **KEYS))
    assert same_bytes(tmp_path / "alone", tmp_path / "both")
    assert alone["splits"] == both["splits"]
    log = (tmp_path / "both" / "conversion.log").read_text().splitlines()
    assert len(log) == len(both["tasks"])
    assert all(" tokens/s (" in line for line in log)
    assert verify(str(tmp_path / "both"), progress=False).faults == []


@pytest.mark.parametrize("kind", ["documents", "stream", "single"])
def test_what_is_finished_is_kept(
    many: Path, config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Interrupted after each task but the last, ten times over; each time the next run does only what is missing."""
    keys = {**KEYS, "cluster": ALONE, "segments": {"kind": kind}, "output": str(tmp_path / "cut")}
    done: list[str] = []

    class Interrupted(Exception):
        pass

    def once(work: Work, task: Task, limit: Limit, report: Callable[[int, int], None]) -> dict[str, Any]:
        if runs and len(done) >= runs[0]:
            raise Interrupted
        done.append(task.name)
        return convert_task(work, task, limit, report)

    monkeypatch.setattr("biphasic.data.pool.convert_task", once)
    runs = [1]
    while True:
        try:
            record = convert(config_for(many, **keys))
            break
        except Interrupted:
            runs[0] += 1
            assert not list((tmp_path / "cut").rglob("index.json"))
    assert runs[0] == len(record["tasks"])
    assert done == record["tasks"]
    monkeypatch.undo()
    convert(config_for(many, **{**keys, "output": str(tmp_path / "whole")}))
    assert same_bytes(tmp_path / "cut", tmp_path / "whole")


def test_a_file_that_changed_in_between_is_read_again(many: Path, config_for: Make, tmp_path: Path) -> None:
    config = config_for(many, cluster=ALONE, **KEYS)
    (many / "11.parquet").rename(tmp_path / "away")
    (many / "11.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(UserError, match=r"11\.parquet: is no whole Parquet file .*; mend it and run the same command"):
        convert(config)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "tasks").iterdir()}
    (tmp_path / "away").rename(many / "11.parquet")
    # And one that was finished is another one now.
    write_parquet(many / "00.parquet", sentences(700, seed=99))
    record = convert(config)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "tasks").iterdir()}
    kept = [name for name in before if before[name] == after.get(name)]
    assert len(kept) >= len(record["tasks"]) - 2
    whole = convert(config_for(many, **{**KEYS, "cluster": ALONE, "output": str(tmp_path / "whole")}))
    assert record["splits"] == whole["splits"]
    assert same_bytes(tmp_path / "out", tmp_path / "whole")


def test_an_unfinished_output_with_other_settings_is_refused(
    many: Path, config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converting, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(config_for(many, cluster=ALONE, **KEYS))
    monkeypatch.undo()
    with pytest.raises(
        UserError, match=r"unfinished conversion with other settings \(sequence_length\): choose another"
    ):
        convert(config_for(many, cluster=ALONE, sequence_length=32, **KEYS))
    assert len(list((tmp_path / "out" / "tasks").iterdir())) > 4
    # What doesn't change the bytes may change.
    record = convert(config_for(many, cluster={"workers": 1, "retries": 3}, on_bad_file="skip", **KEYS))
    assert verify(str(tmp_path / "out"), progress=False).faults == []
    assert len(record["tasks"]) > 4


def documents_before(many: Path, config: ConvertConfig) -> list[tuple[str, int, bool]]:
    """Each document's text, its tokens with EOS, and whether it is for validation; in order."""
    import pyarrow.parquet as pq

    found = []
    for path in sorted(many.glob("*.parquet")):
        for record in pq.read_table(path).to_pylist():
            found.append((record["text"], record["id"]))
    ids = load_tokenizer(config.tokenizer).encode([text for text, _ in found])
    held = [in_validation(id, config.validation_fraction) for _, id in found]
    return [(text, len(tokens) + 1, out) for (text, _), tokens, out in zip(found, ids, held, strict=True)]


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.999])
def test_a_budget_of_tokens_is_met_exactly(many: Path, config_for: Make, tmp_path: Path, share: float) -> None:
    documents = documents_before(many, config_for(many, **KEYS))
    budget = round(share * sum(length for _, length, held in documents if not held))
    config = config_for(many, cluster=ALONE, max_tokens=budget, **KEYS)
    record = convert(config)
    train, validation = (record["splits"][name] for name in ("train", "validation"))
    assert train["tokens"] == budget
    # The first documents, the last of them cut; and of the others those that come before it.
    taken = used = held_out = 0
    for _, length, held in documents:
        if used >= budget:
            break
        held_out += held
        taken += not held
        used += 0 if held else length
    assert (train["documents"], validation["documents"]) == (taken, held_out)
    assert sum(len(segment) for segment in segments_in(tmp_path / "out" / "train")) == budget
    assert verify(str(tmp_path / "out"), again=2, progress=False).faults == []


def test_a_budget_does_not_depend_on_the_workers_or_on_interruptions(
    many: Path, config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**KEYS, "max_tokens": 400_000}
    convert(config_for(many, output=str(tmp_path / "alone"), cluster=ALONE, **keys))
    convert(config_for(many, output=str(tmp_path / "both"), cluster=TWO, **keys))
    assert same_bytes(tmp_path / "alone", tmp_path / "both")
    # Interrupted after everything was done but published.
    monkeypatch.setattr(converting, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(config_for(many, cluster=ALONE, **keys))
    monkeypatch.undo()
    shutil.copytree(tmp_path / "out", tmp_path / "raised")
    convert(config_for(many, cluster=ALONE, **keys))
    assert same_bytes(tmp_path / "alone", tmp_path / "out")
    # And with more allowed than before: the task that was stopped is done whole.
    raised = {**keys, "max_tokens": 1_000_000}
    convert(config_for(many, output=str(tmp_path / "fresh"), cluster=ALONE, **raised))
    convert(config_for(many, output=str(tmp_path / "raised"), cluster=ALONE, **raised))
    assert same_bytes(tmp_path / "fresh", tmp_path / "raised")


def test_a_budget_above_what_there_is_takes_everything(many: Path, config_for: Make, tmp_path: Path) -> None:
    convert(config_for(many, output=str(tmp_path / "all"), cluster=ALONE, **KEYS))
    convert(
        config_for(many, output=str(tmp_path / "more"), cluster=ALONE, max_tokens=10**12, max_documents=10**9, **KEYS)
    )
    assert same_bytes(tmp_path / "all", tmp_path / "more")


@pytest.mark.parametrize("count", [1200, 3201])
def test_the_first_documents_over_several_tasks(many: Path, config_for: Make, count: int) -> None:
    documents = documents_before(many, config_for(many, **KEYS))[:count]
    record = convert(config_for(many, cluster=ALONE, max_documents=count, **KEYS))
    assert record["documents"]["read"] == count
    assert record["splits"]["validation"]["documents"] == sum(held for *_, held in documents)
    assert sum(split["tokens"] for split in record["splits"].values()) == sum(length for _, length, _ in documents)


@pytest.mark.parametrize("longer", ["cut", "truncate"])
def test_one_document_a_row(config_for: Make, tmp_path: Path, longer: str) -> None:
    records = sentences(200, longest=150)
    config = config_for(records, segments={"kind": "single", "longer": longer}, cluster=ALONE)
    record = convert(config)
    lengths = [len(ids) + 1 for ids in load_tokenizer(config.tokenizer).encode([r["text"] for r in records])]
    expected = []
    for length in lengths:
        whole, rest = divmod(length, 64)
        expected += [min(length, 64)] if longer == "truncate" else [64] * whole + [rest] * (rest > 0)
    assert max(lengths) > 128
    found = rows_in(tmp_path / "out" / "train")
    assert [row["lengths"].tolist() for row in found] == [[length] for length in expected]
    assert record["splits"]["train"]["tokens"] == sum(expected)
    assert verify(str(tmp_path / "out"), progress=False).faults == []


def test_a_very_long_text_is_tokenized_in_parts(config_for: Make, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(config_for([]).tokenizer)
    words = " ".join(record["text"] for record in sentences(12_000))
    assert len(words) > 1_500_000
    [whole] = tokenizer.encode([words])
    [parts, short] = encode(tokenizer, [words, "the model"])
    assert short == tokenizer.encode(["the model"])[0]
    # Cut before a space, where this tokenizer begins a new word anyway.
    assert parts == whole
    unbroken = "a" * 2_500_000
    [found] = encode(tokenizer, [unbroken])
    assert tokenizer.tokenizer.decode(found) == unbroken


def test_special_tokens_in_a_text_stay_text_on_every_worker(config_for: Make, tmp_path: Path) -> None:
    """Ray's workers get a copy of the tokenizer."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(2):
        # Parquet stores equal texts once, and so little text would be one task.
        records = [
            {"id": f"{number}-{at}", "text": f"{at} " + "the <|mask|> model <|eos|> " * 1500} for at in range(40)
        ]
        write_parquet(folder / f"{number}.parquet", records)
    keys = {"task_bytes": MIB, "shard_bytes": 1 << 17}
    record = convert(config_for(folder, output=str(tmp_path / "both"), cluster=TWO, **keys))
    assert len(record["tasks"]) == 2
    convert(config_for(folder, output=str(tmp_path / "alone"), cluster=ALONE, **keys))
    assert same_bytes(tmp_path / "alone", tmp_path / "both")
    assert verify(str(tmp_path / "both"), progress=False).faults == []


def test_repeated_documents_are_counted(config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [*sentences(100), *sentences(10)]
    record = convert(config_for(records, cluster=ALONE))
    assert record["documents"]["repeated"] == 10
    assert verify(str(tmp_path / "out"), progress=False).faults == [
        "documents/: 10 documents have an id that came before; the source repeats them"
    ]
    generator = np.random.default_rng(0)
    numbers = [np.sort(generator.integers(0, 1 << 64, 5000, np.uint64)) for _ in range(20)]
    numbers += [numbers[3][:7], numbers[4][-5:], np.array([0, 0, (1 << 64) - 1], np.uint64)]
    monkeypatch.setattr("biphasic.data.merge._IN_MEMORY", 12_000)
    assert repeated(numbers) == 7 + 5 + 1


def test_the_split_is_a_function_of_the_id(config_for: Make, tmp_path: Path) -> None:
    record = convert(config_for(sentences(500), cluster=ALONE, validation_fraction=0.25))
    [task] = record["tasks"]
    numbers = np.fromfile(tmp_path / "out" / "documents" / f"{task}.u64", "<u8").tolist()
    assert numbers == sorted(document_number(r["id"]) for r in sentences(500))
    assert record["splits"]["validation"]["documents"] == sum(in_validation(r["id"], 0.25) for r in sentences(500))


def test_two_conversions_of_one_output(config_for: Make, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "out").mkdir()
    lock = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another conversion is writing it at this moment"):
        convert(config_for(sentences(50)))
    os.close(lock)
    convert(config_for(sentences(50)))


def test_records_are_json_that_people_can_read(many: Path, config_for: Make, tmp_path: Path) -> None:
    convert(config_for(many, cluster=ALONE, **KEYS))
    for path in (tmp_path / "out" / "tasks").iterdir():
        record = json.loads(path.read_text())
        assert {"settings", "pieces", "limit", "splits", "documents", "damaged", "seconds"} <= set(record)
        assert all(set(piece) == {"path", "bytes", "version", "row_groups"} for piece in record["pieces"])
