"""The quickstart's own steps, on the documentation of a few packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.conversion.convert import convert
from biphasic.conversion.packing import document_number, in_validation
from biphasic.conversion.train_tokenizer import train_tokenizer
from biphasic.conversion.verify import verify
from biphasic.data.tokenizer import load_tokenizer

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
    """Documents and pairs of numpy, torchmetrics, joblib and the standard library."""
    folder = tmp_path_factory.mktemp("text")
    patch = pytest.MonkeyPatch()
    patch.setattr(gather, "PACKAGES", ("numpy", "torchmetrics", "joblib", "not_installed"))
    gather.gather(folder, FRACTION)
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
    train, test = (pq.read_table(text / "pairs" / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    documents = {row["id"]: row["text"] for row in pq.read_table(text / "documents.parquet").to_pylist()}
    assert len(train) > 5 * len(test) * 0.8 > 400
    for split, pairs in ((False, train), (True, test)):
        for pair in pairs:
            assert in_validation(document_number(pair["id"]), FRACTION) == split
            document = documents[pair["id"]]
            assert document.startswith(pair["query"])
            assert document.endswith(pair["positive"])
            assert not pair["query"].endswith(".")
            assert len(pair["query"].split()) >= 4
            assert len(pair["positive"]) >= 100
    for column in ("query", "positive"):
        values = [gather.normalised(pair[column]) for pair in train + test]
        assert len(set(values)) == len(values)


def test_gathering_again_gives_the_same_files(gather: ModuleType, text: Path, tmp_path: Path) -> None:
    files = [file for file in gather.source_files() if file[2].startswith("joblib")]
    assert len(files) > 20
    first, second = ([document.id for document in gather.read_all(files)] for _ in range(2))
    assert first == second
    assert (
        json.loads((text / "gathered.json").read_text())["documents"]
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
    documents = [
        gather.Docstring("a.py", "a 1", f"{query}\n\n{body}") for query, body in zip(queries, bodies, strict=True)
    ]
    unique = gather.Docstring("a.py", "a 1", "Not like any other one.\n\n" + "d" * 100)
    train, test = gather.pairs([*documents, unique], 0.0)
    assert train["query"] == ["Not like any other one"]
    assert test["query"] == []


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
        texts = [row["text"] for row in table if in_validation(document_number(row["id"]), FRACTION) == held_out]
        expected = sum(len(ids) for ids in tokenizer.encode(texts)) + len(texts)
        assert record["splits"][split]["tokens"] == expected
        assert record["splits"][split]["fill"] >= 0.99


def test_the_yaml_fits_the_steps() -> None:
    """What `gather.py` writes is what is converted. (With this fraction all packages gave 2,600 test pairs.)"""
    config = load(ROOT / "yamls" / "data" / "quickstart.yaml")
    assert isinstance(config, ConvertConfig)
    assert isinstance(config.source, FilesSource)
    assert config.source.paths == ["runs/quickstart/text/documents.parquet"]
    assert config.validation_fraction == FRACTION
    training = load(ROOT / "yamls" / "quickstart.yaml")
    assert isinstance(training, PretrainConfig)
    assert training.data.sequence_length == config.sequence_length
    assert training.data.train.local == f"{config.output}/train"
    assert training.tokenizer in (config.tokenizer, f"{config.output}/tokenizer")
