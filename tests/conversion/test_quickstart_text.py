"""The quickstart's own steps, on the documentation of a few packages."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.conversion.convert import convert
from biphasic.conversion.train_tokenizer import train_tokenizer
from biphasic.conversion.verify import verify
from biphasic.data.packing import document_number, validation_end
from biphasic.data.tokenizer import load_tokenizer
from biphasic.evaluation.sets import read_set

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "quickstart"
FRACTION = 0.15
COLUMNS = "text id dump url file_path language language_score token_count score int_score".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def gather() -> ModuleType:
    sys.path.insert(0, str(RECIPE))  # as when its script runs; its processes import it by name
    import gather

    return gather


@pytest.fixture(scope="module")
def text(gather: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text of numpy, joblib, torchmetrics (test), streaming (validation) and the standard library."""
    folder = tmp_path_factory.mktemp("text")
    patch = pytest.MonkeyPatch()
    patch.setattr(gather, "PACKAGES", ("numpy", "torchmetrics", "streaming", "joblib", "not_installed"))
    gather.gather(folder)
    patch.undo()
    return folder


def test_documents_have_fineweb_edus_columns(gather: ModuleType, text: Path) -> None:
    table = pq.read_table(text / "documents.parquet")
    assert table.column_names == COLUMNS
    rows = table.to_pylist()
    assert len(rows) > 3000
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({gather.normalised(row["text"]) for row in rows}) == len(rows)
    assert min(len(row["text"]) for row in rows) > gather.SHORTEST
    by_place = {row["file_path"]: row["text"] for row in rows}
    assert by_place["joblib/parallel.py::Parallel"].startswith("Helper class for readable parallel mapping.\n\n")
    assert not any("/tests/" in place or place.startswith("/") for place in by_place)


def test_pairs_are_a_summary_and_its_body(gather: ModuleType, text: Path) -> None:
    rows = {file: pq.read_table(text / f"{file}.parquet").to_pylist() for file in ("docstrings", "pairs/train")}
    documents = {row["id"]: row for row in rows["docstrings"]}
    pairs = {pair["id"]: ("train", pair["query"], pair["positive"]) for pair in rows["pairs/train"]}
    read_set(str(text / "pairs"), "docstrings", "eng-Latn")  # refuses a query without a document
    corpus, queries = (
        {row["_id"]: row["text"] for row in pq.read_table(text / "pairs" / f"{name}.parquet").to_pylist()}
        for name in ("corpus", "queries")
    )
    for split in ("validation", "test"):
        qrels = pq.read_table(text / "pairs" / "qrels" / f"{split}.parquet").to_pylist()
        assert all(row["query-id"] == row["corpus-id"] and row["score"] == 1 for row in qrels)
        pairs |= {row["query-id"]: (split, queries[row["query-id"]], corpus[row["corpus-id"]]) for row in qrels}
    assert Counter(split for split, _, _ in pairs.values()).keys() == {"train", "validation", "test"}
    assert len(rows["pairs/train"]) > 400 and len(pairs) == len(rows["pairs/train"]) + len(queries)
    for id, (split, query, positive) in pairs.items():
        assert documents[id]["split"] == split
        assert documents[id]["text"].startswith(query) and documents[id]["text"].endswith(positive)
        assert not query.endswith(".") and len(query.split()) >= 4 and len(positive) >= 100
    for column in (1, 2):
        assert len({gather.normalised(pair[column]) for pair in pairs.values()}) == len(pairs)


def test_held_out_packages_are_not_trained_on(gather: ModuleType, text: Path) -> None:
    docstrings = pq.read_table(text / "docstrings.parquet").to_pylist()
    documents = pq.read_table(text / "documents.parquet").to_pylist()
    assert {row["id"] for row in documents} == {row["id"] for row in docstrings if row["split"] == "train"}
    assert not any(row["file_path"].startswith(("torchmetrics/", "streaming/")) for row in documents)
    splits = Counter(row["split"] for row in docstrings)
    assert min(splits[split] for split in ("train", "validation", "test")) > 100
    # A text that a held-out package shares with another is held out, although the other's name is first in the alphabet.
    shared = "The same words in two packages. " * 10
    [kept] = gather.unique(iter([gather.Docstring("torchmetrics/a.py", "torchmetrics 1", shared),
                                 gather.Docstring("joblib/a.py", "joblib 1", shared)]))  # fmt: skip
    assert kept.split == "test"
    order = [gather.HELD_OUT.get(package.partition(" ")[0], "train") for _, _, package in gather.source_files()]
    assert order.index("train") > max(at for at, split in enumerate(order) if split != "train")


def test_gathering_again_gives_the_same_files(gather: ModuleType, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of cores."""
    files = [file for file in gather.source_files() if file[2].startswith("joblib")]
    assert len(files) > 20
    pool, processes, ids = gather.ProcessPoolExecutor, list[int](), list[list[str]]()

    def counted(count: int, **keywords: Any) -> Any:
        processes.append(count)
        return pool(min(count, 2), **keywords)

    monkeypatch.setattr(gather, "ProcessPoolExecutor", counted)
    for cores in (1, 2, 96):
        monkeypatch.setattr(gather, "available_cores", lambda cores=cores: cores)
        ids.append([document.id for document in gather.read_all(files)])
    assert processes == [1, 2, gather.MOST_PROCESSES]
    assert ids[0] == ids[1] == ids[2]
    assert (
        json.loads((text / "gathered.json").read_text())["rows"]["documents"]
        == pq.read_table(text / "documents.parquet").num_rows
    )


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Return the sum of squares.\n\n" + "x" * 100, ("Return the sum of squares", "x" * 100)),
        ("Return the sum of squares\n\n" + "x" * 100, ("Return the sum of squares", "x" * 100)),
        ("Return the sum of squares.\n" + "x" * 100, ("Return the sum of squares", "x" * 100)),
        ("Return the sum of\nsquares.\n\n" + "x" * 100, None),
        ("Return the sum.\n\n" + "x" * 100, None),
        ("Return the sum of squares. Not more.\n\n" + "x" * 100, None),
        ("Return the sum of squares.\n\n" + "x" * 99, None),
    ],
)
def test_what_is_a_pair(gather: ModuleType, docstring: str, expected: tuple[str, str] | None) -> None:
    assert gather.pair_of(gather.Docstring("a.py", "a 1", docstring)) == expected


def test_an_ambiguous_query_is_in_neither_file(gather: ModuleType) -> None:
    bodies = ["a" * 100, "b" * 100, "c" * 100, "c" * 100]
    queries = [
        "Return the sum of squares.",
        "return the  sum of squares",
        "The first of its kind",
        "The second of its kind",
    ]
    documents = [gather.Docstring("a.py", "a 1", f"{query}\n\n{body}") for query, body in zip(queries, bodies, strict=True)]
    unique = gather.Docstring("a.py", "a 1", "Not like any other one.\n\n" + "d" * 100)
    pairs = gather.pairs([*documents, unique])
    assert [query for _, query, _ in pairs["train"]] == ["Not like any other one"]
    assert pairs["validation"] == pairs["test"] == []


def test_tokenizer_conversion_and_fill(text: Path, tmp_path: Path, config_for: Callable[..., ConvertConfig]) -> None:
    config = config_for(
        text / "documents.parquet",
        tokenizer=str(tmp_path / "tokenizer"),
        validation_fraction=FRACTION,
        sequence_length=512,
        shard_bytes=1 << 20,
    )
    train_tokenizer(config, tmp_path / "tokenizer", size=2000)
    tokenizer = load_tokenizer(config.tokenizer)
    assert tokenizer.vocab_size == 2000
    first = (tmp_path / "tokenizer" / "tokenizer.json").read_bytes()
    train_tokenizer(config, tmp_path / "tokenizer", size=2000, force=True)
    assert (tmp_path / "tokenizer" / "tokenizer.json").read_bytes() == first

    record = convert(config)
    assert verify(config.output).faults == []
    table = pq.read_table(text / "documents.parquet", columns=["text", "id"]).to_pylist()
    for split, held_out in (("train", False), ("validation", True)):
        texts = [row["text"] for row in table if (document_number(row["id"]) < validation_end(FRACTION)) == held_out]
        expected = sum(len(ids) for ids in tokenizer.encode(texts)) + len(texts)
        assert record["splits"][split]["tokens"] == expected
        assert record["splits"][split]["fill"] >= 0.99


def test_the_yaml_fits_the_steps() -> None:
    """What `gather.py` writes is what is converted."""
    config = load(ROOT / "yamls" / "data" / "quickstart.yaml")
    assert isinstance(config, ConvertConfig)
    assert isinstance(config.source, FilesSource)
    assert config.source.paths == ["runs/quickstart/text/documents.parquet"]
    training = load(ROOT / "yamls" / "quickstart.yaml")
    assert isinstance(training, PretrainConfig)
    assert training.data.sequence_length == config.sequence_length
    assert training.data.train.local == f"{config.output}/train"
    assert training.tokenizer in (config.tokenizer, f"{config.output}/tokenizer")
