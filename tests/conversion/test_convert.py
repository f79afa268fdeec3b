import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from biphasic.commands import main
from biphasic.config.convert import ConvertConfig
from biphasic.config.load import dump
from biphasic.conversion import worker
from biphasic.conversion.convert import convert
from biphasic.conversion.verify import verify
from biphasic.data.packing import document_number, validation_end
from biphasic.data.shards import require_shards
from biphasic.data.streams import RowStream
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from helpers.cpu_time import run_measured
from helpers.outputs import Stored, rows_in, same_bytes
from helpers.texts import sentences, write_parquet, write_tokenizer, write_wide_tokenizer

ROOT = Path(__file__).parents[2]
WINDOW, SHORTEST = "  window: 8192\n", "  shortest: 12\n"
"""What a dumped configuration says of the other kind of segments, which its own check refuses."""
STREAM = {"kind": "stream"}
Make = Callable[..., ConvertConfig]


def texts_in(rows: Stored, config: ConvertConfig) -> list[str]:
    """The documents in rows whose segments end with EOS, each put together from its tokens."""
    tokenizer = load_tokenizer(config.tokenizer)
    ids = [token for row in rows for token in row["tokens"][: row["lengths"].sum()].tolist()]
    texts = tokenizer.tokenizer.decode(ids, skip_special_tokens=False).split("<|eos|>")
    assert texts[-1] == ""
    return texts[:-1]


def test_round_trip_of_documents(config_for: Make, tmp_path: Path) -> None:
    records = sentences(300, longest=12)
    config = config_for(records, validation_fraction=0.2)
    record = convert(config)
    for split, held_out in (("train", False), ("validation", True)):
        rows = rows_in(tmp_path / "out" / split)
        expected = [r["text"] for r in records if (document_number(r["id"]) < validation_end(0.2)) == held_out]
        assert sorted(texts_in(rows, config)) == sorted(expected)
        counts = record["splits"][split]
        assert counts["documents"] == len(expected)
        assert counts["rows"] == len(rows)
        assert counts["tokens"] == sum(int(row["lengths"].sum()) for row in rows)
        assert counts["fill"] == pytest.approx(counts["tokens"] / (64 * len(rows)))
        for row in rows:
            assert row["tokens"].dtype == np.uint16
            assert row["tokens"].shape == (64,)
            assert row["lengths"].dtype == np.uint32
            ends = np.cumsum(row["lengths"])
            assert (row["tokens"][ends[-1] :] == 0).all()
            # Short documents are whole, and each ends where its segment does.
            assert row["tokens"][ends - 1].tolist() == [2] * len(ends)
    assert json.loads((tmp_path / "out" / "conversion.json").read_text()) == record


def test_round_trip_of_a_stream(config_for: Make, tmp_path: Path) -> None:
    records = sentences(200)
    segments = {"kind": "stream", "shortest": 10}
    config = config_for(records, segments=segments)
    record = convert(config)
    rows = rows_in(tmp_path / "out" / "train")
    assert texts_in(rows, config) == [r["text"] for r in records]
    for row in rows[:-1]:
        assert row["lengths"].sum() == 64
        assert len(row["lengths"]) == 2
        assert row["lengths"].min() >= 10
    assert record["splits"]["train"]["fill"] > 0.99
    assert not (tmp_path / "out" / "validation").exists()


def test_bos_and_eos_as_the_yaml_says(config_for: Make, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(config_for([]).tokenizer)
    [ids] = tokenizer.encode(["the model reads"])
    for name, bos, eos, expected in (
        ("eos", False, True, [*ids, 2]),
        ("both", True, True, [1, *ids, 2]),
        ("none", False, False, ids),
    ):
        text = write_parquet(tmp_path / "one.parquet", [{"id": "1", "text": "the model reads"}])
        convert(config_for(text, output=str(tmp_path / name), add_bos=bos, add_eos=eos))
        [row] = rows_in(tmp_path / name / "train")
        assert row["tokens"][: row["lengths"].sum()].tolist() == expected


def test_a_wide_vocabulary_is_stored_in_32_bits(config_for: Make, tmp_path: Path) -> None:
    folder = write_wide_tokenizer(tmp_path / "wide", 70_000)
    record = convert(config_for(sentences(5), tokenizer=str(folder)))
    assert (record["dtype"], record["tokenizer"]["vocab_size"]) == ("uint32", 70_000)
    rows = rows_in(tmp_path / "out" / "train")
    assert rows[0]["tokens"].dtype == np.uint32
    assert sum(int((row["tokens"] == 69_999).sum()) for row in rows) == 5
    # Reading unpacked the shards there; that is no fault.
    assert (tmp_path / "out" / "train" / record["units"][0] / "shard.00000.mds").exists()
    assert verify(str(tmp_path / "out")).faults == []


def test_the_same_text_gives_the_same_files(config_for: Make, tmp_path: Path) -> None:
    records = sentences(300)
    for name in ("one", "two"):
        convert(config_for(records, output=str(tmp_path / name), validation_fraction=0.1))
    one, two = (sorted(path for path in (tmp_path / name).rglob("*") if path.is_file()) for name in ("one", "two"))
    assert len(one) == len(two) > 6
    assert same_bytes(tmp_path / "one", tmp_path / "two")


def test_the_size_of_batches_changes_nothing(config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = sentences(100)
    first = convert(config_for(records, output=str(tmp_path / "one")))
    monkeypatch.setattr(worker, "_BATCH_CHARACTERS", 500)
    assert convert(config_for(records, output=str(tmp_path / "two")))["splits"] == first["splits"]


def test_documents_without_text_are_counted(config_for: Make, tmp_path: Path) -> None:
    records = [{"id": "empty", "text": ""}, *sentences(10, longest=10)]
    config = config_for(records)
    record = convert(config)
    assert record["documents"] == {"read": 11, "filtered": 0, "skipped": {"without text": 1}}
    assert sorted(texts_in(rows_in(tmp_path / "out" / "train"), config)) == sorted(r["text"] for r in records[1:])


def test_bpe_dropout_changes_no_file_and_is_recorded(
    config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(sentences(100))
    plain = convert(config)
    tokenizer = tmp_path / "random"
    shutil.copytree(config.tokenizer, tokenizer)
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.3
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    record = convert(config_for(sentences(100), output=str(tmp_path / "again"), tokenizer=str(tokenizer)))
    assert record["splits"] == plain["splits"]
    assert record["tokenizer"] == {**plain["tokenizer"], "dropout": 0.3}
    assert f"tokenizer {tokenizer}: its BPE dropout of 0.3 is turned off" in capsys.readouterr().out


def test_a_finished_conversion_is_left_as_it_is(
    config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(sentences(50))
    record = convert(config)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    capsys.readouterr()
    assert convert(config) == record
    assert "already converted" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    # Killed after the record was written.
    (tmp_path / "out" / "conversion.started").write_text("{}")
    assert verify(str(tmp_path / "out")).faults == []
    assert convert(config) == record


def test_a_finished_output_with_other_settings_is_refused(config_for: Make, tmp_path: Path) -> None:
    convert(config_for(sentences(50)))
    text = tmp_path / "text.parquet"
    with pytest.raises(UserError, match=r"other settings \(sequence_length, add_bos\): choose another output"):
        convert(config_for(text, sequence_length=32, add_bos=True))
    with pytest.raises(UserError, match=r"other settings \(tokenizer\)"):
        convert(config_for(text, tokenizer=str(write_tokenizer(tmp_path / "other", words=290))))
    with pytest.raises(UserError, match=r"holds a conversion of other files \(.*text\.parquet\): choose another"):
        convert(config_for(sentences(51)))


def test_a_finished_output_that_lost_a_shard_is_refused(config_for: Make, tmp_path: Path) -> None:
    config = config_for(sentences(50))
    convert(config)
    next((tmp_path / "out" / "train").glob("*/shard.00000.mds.zstd")).unlink()
    with pytest.raises(UserError, match=r"is damaged: train/\w+/shard\.00000\.mds\.zstd is missing; remove the folder"):
        convert(config)


@pytest.mark.parametrize("name", ["train", "train/*/"])
def test_a_folder_of_a_finished_output_may_be_a_link(config_for: Make, tmp_path: Path, name: str) -> None:
    config, moved = config_for(sentences(50)), tmp_path / "elsewhere"
    convert(config)
    [folder] = (tmp_path / "out").glob(name)
    folder.rename(moved)
    folder.symlink_to(moved)
    assert convert(config) is not None
    assert verify(str(tmp_path / "out")).faults == []
    require_shards(RowStream(local=str(tmp_path / "out" / "train")))
    next(moved.rglob("shard.00000.mds.zstd")).write_bytes(b"")
    with pytest.raises(UserError, match=r"shard\.00000\.mds\.zstd has 0 bytes instead of \d+; remove the folder"):
        convert(config)


def test_an_output_with_something_else_is_refused(config_for: Make, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("text")
    with pytest.raises(UserError, match=r"already holds files that do not belong to a conversion \(e\.g\. thesis\.txt\)"):
        convert(config_for(sentences(50)))
    assert (tmp_path / "out" / "thesis.txt").read_text() == "text"


def test_a_split_without_documents_is_an_error(config_for: Make, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"1 documents were read \(0 left out by filters, 1 skipped\), and none is for train: is the source",
    ):
        convert(config_for([{"id": "1", "text": ""}], output=str(tmp_path / "two")))
    assert not list((tmp_path / "two").rglob("index.json"))
    assert not (tmp_path / "two" / "conversion.json").exists()


def test_add_eos_needs_an_eos_token(config_for: Make, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", {"pad": "<p>", "mask": "<m>"})
    with pytest.raises(UserError, match="has no eos token, which add_eos: true needs"):
        convert(config_for(sentences(3), tokenizer=str(folder)))
    assert convert(config_for(sentences(3), tokenizer=str(folder), add_eos=False))["splits"]["train"]["documents"] == 3


def test_convert_and_verify_commands(config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config_for(sentences(40), validation_fraction=0.2, segments=STREAM)).replace(WINDOW, ""))
    assert main(["convert", str(path), "seed=5"]) == 0
    assert "train: " in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["config"]["seed"] == 5
    assert main(["verify", str(tmp_path / "out"), "--sample", "2"]) == 0
    output = capsys.readouterr().out
    assert "complete and consistent with its record" in output
    assert output.count("=== train, row") == 2
    assert "<|eos|>" in output
    shard = next((tmp_path / "out" / "train").glob("*/shard.00000.mds.zstd"))
    shard.unlink()
    assert main(["verify", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"out: train/{shard.parent.name}/{shard.name}: is missing")
    assert main(["verify", str(tmp_path)]) == 2


def test_the_plan_counts_and_estimates_and_writes_nothing(
    config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = sentences(3000)
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config_for(records, validation_fraction=0.2)))
    before = sorted(tmp_path.rglob("*"))
    planned, seconds = run_measured([sys.executable, "-m", "biphasic", "convert", path, "--plan"])
    assert seconds < 5
    assert planned.returncode == 0, planned.stderr
    assert sorted(tmp_path.rglob("*")) == before
    lines = dict(line.split(maxsplit=1) for line in planned.stdout.splitlines())
    assert "20% of documents, by id" in lines["writes"]
    assert "3,000 documents; 1 work unit" in lines["files"]
    tokens = int(lines["tokens"].split()[1].replace(",", ""))
    record = convert(config_for(records, validation_fraction=0.2))
    assert tokens == pytest.approx(sum(split["tokens"] for split in record["splits"].values()), rel=0.1)
    assert main(["convert", str(path), "--plan", "max_tokens=1000"]) == 0
    assert "about 1,000, of" in capsys.readouterr().out


def test_files_that_are_not_read_are_counted_by_suffix(
    config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "text"
    (folder / "more").mkdir(parents=True)
    (folder / "_temporary").mkdir()
    for name in ("a.html", "b.pdf", "more/c.html", "d.tar.gz", "LICENSE", "_SUCCESS", ".hidden.txt", "_temporary/a.md"):
        (folder / name).write_text("x")
    for record in sentences(9):
        (folder / "more" / f"{record['id']}.md").write_text(record["text"])
    expected = "8 files (3 hidden, 2 .html, 1 no suffix, 1 .pdf, 1 .tar.gz)"
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config_for(folder)))
    assert main(["convert", str(path), "--plan"]) == 0
    planned = capsys.readouterr().out
    assert "9 files, " in planned and f"not read {expected}" in " ".join(planned.split())
    assert main(["convert", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"not read: {expected}\n") == 2  # before and after it
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["documents"]["read"] == 9
    assert record["source"]["unread"] == {"hidden": 3, "no suffix": 1, ".html": 2, ".pdf": 1, ".tar.gz": 1}
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert f"not read: {expected}" in capsys.readouterr().out


def problems_of(config: ConvertConfig, folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """The PROBLEM lines of a plan. With them its exit status is 2, without them 0."""
    path = folder / "convert.yaml"
    path.write_text(dump(config))
    status = main(["convert", str(path), "--plan", *overrides])
    output = capsys.readouterr().out
    problems = [line.split(maxsplit=1)[1] for line in output.splitlines() if line.split()[:1] == ["PROBLEM"]]
    assert status == (2 if problems else 0), output
    assert ("about" in output) == (not problems and "MISSING" not in output)
    return problems


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"id": 1, "body": "x"}\n', "a.jsonl, line 1: has no column 'text' (it has: body, id); set text_column, "
         'id_column or filters; expected a line such as {"text": "…", "id": "…"}'),
        ("a.csv", "id,body\n1,x\n", "a.csv, line 1: has no column 'text' (it has: body, id); set text_column, id_column or "
         "filters; expected text,id in the first line"),
        ("a.parquet", None, "a.parquet: has no column 'text' (it has: body); set text_column, id_column or filters; "
         "expected the columns text, id"),
        ("a.parquet", "PAR1", "a.parquet: is not a complete Parquet file ("),
        ("a.jsonl", "", "a.jsonl: is empty (0 bytes); restore the file and run the same command again, "
         "or set on_bad_file: skip"),
        ("a.jsonl.gz", "no gzip", "a.jsonl.gz: is damaged after line 0 ("),
        ("a.jsonl", "\n\n", "expected documents; the source's files hold none"),
        ("a.jsonl", '{"id": 1\n{"id": 1, "text": "x"}]\n', "a.jsonl, line 1: is not JSON (Expecting ',' delimiter"),
        ("a.csv", "id,text\n1,\n", "a.csv, line 2: has no text"),
        ("a.txt", "\ufeffx", "a.txt: is UTF-16 or UTF-32; expected UTF-8"),
    ],
)  # fmt: skip
def test_the_plan_finds_files_that_can_not_be_read(
    config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, message: str
) -> None:
    (tmp_path / "text").mkdir()
    file = tmp_path / "text" / name
    if content is None:
        write_parquet(file, [{"body": "x"}])
    else:
        file.write_text(content, encoding="utf-16" if name == "a.txt" else "utf-8")
    [problem] = problems_of(config_for(tmp_path / "text"), tmp_path, capsys)
    assert problem.startswith("source") and message in problem
    assert main(["convert", str(tmp_path / "convert.yaml")]) == 2
    assert not (tmp_path / "out" / "train").exists()


def test_the_plan_finds_a_missing_column_in_the_last_of_many_files(
    config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number:02}.jsonl").write_text('{"id": "1", "text": "x"}\n' * 300)
    config = config_for(tmp_path / "text")
    assert problems_of(config, tmp_path, capsys) == []
    (tmp_path / "text" / "28.jsonl").write_text('{"text": "x"}\n')
    [problem] = problems_of(config, tmp_path, capsys)
    assert "28.jsonl, line 1: has no column 'id'" in problem
    (tmp_path / "text" / "28.jsonl").write_text("")
    assert problems_of(config, tmp_path, capsys, "on_bad_file=skip") == []
    (tmp_path / "text" / "28.jsonl").write_text('{"id": "1", "text": null}\n')
    assert problems_of(config, tmp_path, capsys) == []
    (tmp_path / "text" / "00.jsonl").write_text('{"id": "1", "text": null}\n')
    [problem] = problems_of(config, tmp_path, capsys, "on_bad_document=stop")
    assert "00.jsonl, line 1: has no text" in problem


def test_the_plan_tells_what_is_made_later_from_what_is_not_there(
    config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_for(sentences(3))
    for path in ("/nowhere", "./nowhere", "a/b/c"):
        [problem] = problems_of(config, tmp_path, capsys, f"tokenizer={path}")
        assert problem.startswith(f"tokenizer {path}: ")
        [problem] = problems_of(config, tmp_path, capsys, f"source.paths=[{path}]")
        assert problem.startswith(f"source.paths {path}: there is no such file or folder")
    for path in ("runs/nowhere", "data/x/y"):
        assert problems_of(config, tmp_path, capsys, f"tokenizer={path}", f"source.paths=[{path}]") == []
    wrong = "source.paths=[" + str(write_parquet(tmp_path / "wrong.parquet", [{"body": "x"}])) + "]"
    [problem] = problems_of(config, tmp_path, capsys, "tokenizer=runs/nowhere", wrong)
    assert "has no column 'text'" in problem
    store = tmp_path / "store"
    assert len(problems_of(config, tmp_path, capsys, f"tokenizer={store}/tokenizer")) == 1
    monkeypatch.setenv("BUCKET", str(store))
    assert problems_of(config, tmp_path, capsys, f"tokenizer={store}/tokenizer") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokenizer="], "command line: tokenizer: expected a value; got nothing (tokenizer=null sets null)"),
        (["tokenizer=''"], "command line: tokenizer: expected a local path, s3://…"),
        (["sequence_lenght=64"], "command line: sequence_lenght: unknown key; did you mean `sequence_length`?"),
        (["segments.shortest=5"], "command line: segments.shortest: has no effect with kind: documents"),
        (["compression=gzip"], "command line: compression: expected zstd, zstd:LEVEL (1 to 22) or null; got 'gzip'"),
        (["tokenizer=/nowhere"], "tokenizer /nowhere: there is no such folder"),
        (["source.paths=[/nowhere.parquet]"], "source /nowhere.parquet: there is no such file"),
    ],
)
def test_a_mistake_is_a_message_of_one_line_and_status_2(
    config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config_for(sentences(3))).replace(WINDOW, "").replace(SHORTEST, ""))
    assert main(["convert", str(path), *arguments]) == 2
    output = capsys.readouterr().err
    assert output.startswith(message)
    assert output.count("\n") == 1
