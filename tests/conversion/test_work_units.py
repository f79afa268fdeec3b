"""Work units: how files are divided, what is converted again, where a limit stops, and what decides the bytes."""

import difflib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from filelock import FileLock

from biphasic.config.convert import ConvertConfig
from biphasic.conversion import convert as converting
from biphasic.conversion import worker
from biphasic.conversion.convert import convert, inspect_sources
from biphasic.conversion.pool import UnitWorker
from biphasic.conversion.source_files import SourceFile
from biphasic.conversion.sources import FileLayout
from biphasic.conversion.verify import verify
from biphasic.conversion.worker import ConversionContext, Report, WorkUnit, convert_unit, encode_texts, plan_work_units
from biphasic.data.bulk_encoding import Backend, BulkEncoder
from biphasic.data.packing import document_number, validation_end
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.storage import LOCK_FILE
from helpers.outputs import rows_in, same_bytes, segments_in
from helpers.texts import sentences, write_kind, write_parquet

Make = Callable[..., ConvertConfig]
MIB = 1 << 20


def file(name: str, size: int) -> SourceFile:
    return SourceFile(name, size, "v1")


def test_small_files_are_put_together_and_large_ones_divided() -> None:
    a, b, c, d, e, f = (file(name, 1) for name in ("a", "b", "c", "d.parquet", "e.parquet", "f"))
    layouts = [
        FileLayout(a, (10,), (40,)),
        FileLayout(b, (10,), (50,)),
        FileLayout(c, (10,), (20,)),
        FileLayout(d, (1, 2, 3, 4), (60, 30, 20, 150)),
        FileLayout(e, fault="is empty"),
        FileLayout(f),
    ]
    units = plan_work_units(layouts, 100)
    assert [[(part.path, part.row_groups) for part in unit.files] for unit in units] == [
        [("a", None), ("b", None)],
        [("c", None)],
        [("d.parquet", (0, 2))],
        [("d.parquet", (2, 3))],
        [("d.parquet", (3, 4))],
        [("f", None)],
    ]
    assert [unit.bytes for unit in units] == [90, 20, 90, 20, 150, 1]
    assert len({unit.name for unit in units}) == 6
    # A changed file keeps its unit's name, whatever other files there are.
    changed = FileLayout(SourceFile("f", 2, "v2"))
    assert plan_work_units([changed], 100)[0].name == units[-1].name


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve files of text of very different sizes: about 2 MiB."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        write_parquet(folder / f"{number:02d}.parquet", sentences(200 + 360 * (number % 4), seed=number))
    return folder


KEYS: dict[str, Any] = {"validation_fraction": 0.1, "unit_bytes": 400_000, "shard_bytes": 1 << 16}
ALONE, TWO = {"workers": 1}, {"workers": 2}


def test_the_bytes_are_the_same_however_many_workers(many: Path, config_for: Make, tmp_path: Path) -> None:
    alone = convert(config_for(many, output=str(tmp_path / "alone"), cluster=ALONE, **KEYS))
    assert len(alone["units"]) > 4
    both = convert(config_for(many, output=str(tmp_path / "both"), cluster=TWO, **KEYS))
    assert same_bytes(tmp_path / "alone", tmp_path / "both")
    assert alone["splits"] == both["splits"]
    assert verify(str(tmp_path / "both")).faults == []


@pytest.mark.parametrize("kind", ["documents", "stream", "single"])
def test_finished_units_are_kept(
    many: Path, config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Interrupted after each unit but the last; each run converts only what is missing."""
    keys = {**KEYS, "cluster": ALONE, "segments": {"kind": kind}, "output": str(tmp_path / "cut")}
    done: list[str] = []

    class Interrupted(Exception):
        pass

    def once(
        context: ConversionContext, encoder: BulkEncoder, unit: WorkUnit, max_tokens: int | None, report: Report
    ) -> dict[str, Any]:
        if runs and len(done) >= runs[0]:
            raise Interrupted
        done.append(unit.name)
        return convert_unit(context, encoder, unit, max_tokens, report)

    monkeypatch.setattr("biphasic.conversion.pool.convert_unit", once)
    runs = [1]
    while True:
        try:
            record = convert(config_for(many, **keys))
            break
        except Interrupted:
            runs[0] += 1
            assert not list((tmp_path / "cut").rglob("index.json"))
    assert runs[0] == len(record["units"])
    assert done == record["units"]
    monkeypatch.undo()
    convert(config_for(many, **{**keys, "output": str(tmp_path / "whole")}))
    assert same_bytes(tmp_path / "cut", tmp_path / "whole")


def test_a_file_that_changed_in_between_is_read_again(many: Path, config_for: Make, tmp_path: Path) -> None:
    text = shutil.copytree(many, tmp_path / "text")
    config = config_for(text, cluster=ALONE, **KEYS)
    (text / "11.parquet").rename(tmp_path / "away")
    (text / "11.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(
        UserError, match=r"11\.parquet: is not a complete Parquet file .*; restore the file and run the same command"
    ):
        convert(config)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "units").iterdir()}
    (tmp_path / "away").rename(text / "11.parquet")
    # And one that was finished is another one now.
    write_parquet(text / "00.parquet", sentences(700, seed=99))
    record = convert(config)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "units").iterdir()}
    kept = [name for name in before if before[name] == after.get(name)]
    assert len(kept) >= len(record["units"]) - 2
    whole = convert(config_for(text, **{**KEYS, "cluster": ALONE, "output": str(tmp_path / "whole")}))
    assert record["splits"] == whole["splits"]
    assert same_bytes(tmp_path / "out", tmp_path / "whole")


def test_an_unfinished_output_with_other_settings_is_refused(
    many: Path, config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converting, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(config_for(many, cluster=ALONE, **KEYS))
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"unfinished conversion with other settings \(sequence_length\): choose another"):
        convert(config_for(many, cluster=ALONE, sequence_length=32, **KEYS))
    assert len(list((tmp_path / "out" / "units").iterdir())) > 4
    # What doesn't change the bytes may change.
    record = convert(config_for(many, cluster={"workers": 1, "retries": 3}, on_bad_file="skip", **KEYS))
    assert verify(str(tmp_path / "out")).faults == []
    assert len(record["units"]) > 4


def documents_before(many: Path, config: ConvertConfig) -> list[tuple[str, int, bool]]:
    """Each document's text, its tokens with EOS, and whether it is for validation; in order."""
    import pyarrow.parquet as pq

    documents = []
    for path in sorted(many.glob("*.parquet")):
        for record in pq.read_table(path).to_pylist():
            documents.append((record["text"], record["id"]))
    ids = load_tokenizer(config.tokenizer).encode([text for text, _ in documents])
    validation = [document_number(id) < validation_end(config.validation_fraction) for _, id in documents]
    return [(text, len(tokens) + 1, out) for (text, _), tokens, out in zip(documents, ids, validation, strict=True)]


@pytest.mark.parametrize("share", [0.001, 0.4, 0.999])
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
    assert verify(str(tmp_path / "out")).faults == []
    again = convert(config.model_copy(update={"output": str(tmp_path / "again")}))
    assert again["splits"] == record["splits"]


def test_a_budget_does_not_depend_on_the_workers_or_on_interruptions(
    many: Path, config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**KEYS, "max_tokens": 160_000}
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
    # With a larger budget than before, the unit that was stopped is converted to its end.
    raised = {**keys, "max_tokens": 400_000}
    convert(config_for(many, output=str(tmp_path / "fresh"), cluster=ALONE, **raised))
    convert(config_for(many, output=str(tmp_path / "raised"), cluster=ALONE, **raised))
    assert same_bytes(tmp_path / "fresh", tmp_path / "raised")


def test_a_unit_stops_once_it_has_filled_the_budget(
    config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit, of which only the batches up to the limit and the next one are tokenized, and only once."""
    encoded: list[str] = []

    def encode(encoder: BulkEncoder, texts: list[str], compared: list[int]) -> Any:
        encoded.extend(texts)
        return encode_texts(encoder, texts, compared)

    monkeypatch.setattr(worker, "_BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(worker, "encode_texts", encode)
    record = convert(config_for(sentences(2000), cluster=ALONE, max_tokens=1000))
    assert record["splits"]["train"]["tokens"] == 1000
    assert len(encoded) < 200
    monkeypatch.undo()
    assert verify(str(tmp_path / "out")).faults == []


@pytest.mark.parametrize("missing", [0, 1])
def test_a_budget_ends_the_text_also_before_validation_documents(config_for: Make, tmp_path: Path, missing: int) -> None:
    """Also if all of the text is converted already, when the budget is set to exactly its training tokens."""
    records = sentences(300)
    records[150:] = sorted(records[150:], key=lambda r: document_number(r["id"]) < validation_end(0.3))
    everything = convert(config_for(records, output=str(tmp_path / "all"), cluster=ALONE, validation_fraction=0.3))
    tokens = everything["splits"]["train"]["tokens"] - missing
    text = tmp_path / "text.parquet"
    limited = convert(config_for(text, cluster=ALONE, validation_fraction=0.3, max_tokens=tokens))
    [unit] = limited["units"]
    stopped_at = json.loads((tmp_path / "out" / "units" / f"{unit}.json").read_text())["stopped_at"]
    assert (stopped_at, limited["splits"]["train"]["tokens"]) == (tokens, tokens)
    assert 0 < limited["splits"]["validation"]["documents"] < everything["splits"]["validation"]["documents"]
    # The finished units of an unfinished conversion without a budget.
    for name in ("conversion.json", "train/index.json", "validation/index.json"):
        (tmp_path / "all" / name).unlink()
    started = {
        "config": everything["config"],
        "tokenizer": everything["tokenizer"],
        "commit": None,
        "units": {},
    }
    (tmp_path / "all" / "conversion.started").write_text(json.dumps(started))
    again = config_for(text, output=str(tmp_path / "all"), cluster=ALONE, validation_fraction=0.3, max_tokens=tokens)
    convert(again)
    assert same_bytes(tmp_path / "out", tmp_path / "all")


def test_a_budget_above_all_tokens_takes_everything(many: Path, config_for: Make, tmp_path: Path) -> None:
    convert(config_for(many, output=str(tmp_path / "all"), cluster=ALONE, **KEYS))
    convert(config_for(many, output=str(tmp_path / "more"), cluster=ALONE, max_tokens=10**12, **KEYS))
    assert same_bytes(tmp_path / "all", tmp_path / "more")


def test_one_document_a_row(config_for: Make, tmp_path: Path) -> None:
    records = sentences(200, longest=150)
    config = config_for(records, segments={"kind": "single"}, cluster=ALONE)
    record = convert(config)
    lengths = [len(ids) + 1 for ids in load_tokenizer(config.tokenizer).encode([r["text"] for r in records])]
    expected = []
    for length in lengths:
        whole, rest = divmod(length, 64)
        expected += [64] * whole + [rest] * (rest > 0)
    assert max(lengths) > 128
    rows = rows_in(tmp_path / "out" / "train")
    assert [row["lengths"].tolist() for row in rows] == [[length] for length in expected]
    assert record["splits"]["train"]["tokens"] == sum(expected)
    assert verify(str(tmp_path / "out")).faults == []


@pytest.mark.parametrize("backend", ["tokenizers", "gigatoken"])
def test_a_very_long_text_is_tokenized_in_parts(config_for: Make, backend: Backend) -> None:
    tokenizer = load_tokenizer(config_for([]).tokenizer)
    words = " ".join(record["text"] for record in sentences(12_000))
    assert len(words) > 1_500_000
    [whole] = tokenizer.encode([words])
    encoder = BulkEncoder(tokenizer, backend)
    [parts, short] = encode_texts(encoder, [words, "the model"], [0])
    assert short.tolist() == tokenizer.encode(["the model"])[0]
    # Cut before a space, where this tokenizer begins a new word anyway.
    assert parts.tolist() == whole
    unbroken = "a" * 2_500_000
    [ids] = encode_texts(encoder, [unbroken], [0])
    assert tokenizer.tokenizer.decode(ids.tolist()) == unbroken


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_parts_of_a_text_without_spaces(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cut changes a few tokens, also between a letter and its marks; the text stays the same."""
    monkeypatch.setattr(worker, "_PART_CHARACTERS", 1000)
    clauses = ["人類社会のすべての構成員の固有の尊厳と", "ปฏิญญาสากลว่าด้วยสิทธิมนุษยชน"]
    numbers = np.random.default_rng(0).integers(0, 25, (300, 2))
    text = "".join(clause[min(pair) : max(pair)] for pair in numbers for clause in clauses)
    tokenizer = load_tokenizer(str(write_kind(tmp_path, kind, " ".join(clauses))))
    [whole], cuts = tokenizer.encode([text]), len(text) // 1000
    [parts] = encode_texts(BulkEncoder(tokenizer, "tokenizers"), [text])
    assert cuts > 3 and tokenizer.tokenizer.decode(parts.tolist()).replace(" ", "") == text
    changes = difflib.SequenceMatcher(None, whole, parts.tolist(), autojunk=False).get_opcodes()
    changed = [max(end - start, other_end - other) for tag, start, end, other, other_end in changes if tag != "equal"]
    assert len(changed) <= cuts and max(changed, default=0) <= 6


def test_special_tokens_in_a_text_stay_text_on_every_worker(config_for: Make, tmp_path: Path) -> None:
    """Workers get a pickled copy of the tokenizer, which loses a setting."""
    records = [{"id": str(at), "text": f"{at} the <|mask|> model <|eos|>"} for at in range(40)]
    config = config_for(records, cluster=ALONE)
    convert(config)
    assert verify(str(tmp_path / "out")).faults == []
    [unit] = plan_work_units(inspect_sources(config)[1], config.unit_bytes)
    context = ConversionContext.of(
        config.model_copy(update={"output": str(tmp_path / "worker")}), load_tokenizer(config.tokenizer)
    )
    copy = pickle.loads(pickle.dumps(context))
    assert not copy.tokenizer.tokenizer.encode_special_tokens
    result = UnitWorker(copy, Mock()).convert(unit, None)
    assert result.record is not None
    hashes = [shard["zip_data"]["hashes"] for shard in result.record["splits"]["train"]["shards"]]
    index = json.loads((tmp_path / "out" / "train" / "index.json").read_text())
    assert [shard["zip_data"]["hashes"] for shard in index["shards"]] == hashes


def test_the_split_is_a_function_of_the_id(config_for: Make, tmp_path: Path) -> None:
    record = convert(config_for(sentences(500), cluster=ALONE, validation_fraction=0.25))
    assert record["splits"]["validation"]["documents"] == sum(
        document_number(r["id"]) < validation_end(0.25) for r in sentences(500)
    )


def test_two_conversions_of_one_output_are_refused(config_for: Make, tmp_path: Path) -> None:
    with FileLock(tmp_path / "out" / LOCK_FILE):
        with pytest.raises(UserError, match="another conversion is writing it at this moment"):
            convert(config_for(sentences(50)))
        with pytest.raises(UserError, match="another conversion is writing it at this moment"):
            convert(config_for(sentences(50)))
    convert(config_for(sentences(50)))
    assert not (tmp_path / "out" / LOCK_FILE).exists()


def test_unit_records_hold_their_keys(many: Path, config_for: Make, tmp_path: Path) -> None:
    convert(config_for(many, cluster=ALONE, **KEYS))
    for path in (tmp_path / "out" / "units").iterdir():
        record = json.loads(path.read_text())
        assert {"settings", "files", "stopped_at", "splits", "documents", "damaged", "seconds"} <= set(record)
        assert all(set(file) == {"path", "bytes", "version", "row_groups"} for file in record["files"])
