"""Any files give either a complete conversion that `verify` accepts, or the project's error and no dataset."""

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from biphasic.config.convert import ConvertConfig
from biphasic.conversion import worker
from biphasic.conversion.convert import convert
from biphasic.conversion.verify import verify
from biphasic.errors import UserError

TEXTS = st.one_of(
    st.text(max_size=60),
    st.sampled_from(["", "\0", " ", "\n", "a\0b", "<|eos|> <|mask|>", "é漢字😀", "\r\n\r\n"]),
    st.builds(lambda text, count: text * count, st.text(min_size=1, max_size=8), st.integers(100, 3000)),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
RECORDS = st.fixed_dictionaries({"id": VALUES, "text": TEXTS | st.none()})
LINES = st.one_of(
    st.builds(lambda record, ascii: json.dumps(record, ensure_ascii=ascii).encode(), RECORDS, st.booleans()),
    st.builds(lambda value: json.dumps(value).encode(), VALUES),
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"[" * 20_000,
            b'{"id": 1, "text": "\\uD800 \\ude00"}',
            b'{"text": "no id", "\\ud800": 1}',
            b'{"id": 2, "text": 5}',
        ]
    ),
)
KEYS = st.fixed_dictionaries(
    {"sequence_length": st.integers(16, 80)},
    optional={
        "segments": st.sampled_from(
            [
                {"kind": "stream", "shortest": 3},
                {"kind": "single"},
                {"window": 2},
            ]
        ),
        "add_bos": st.booleans(),
        "add_eos": st.booleans(),
        "id_column": st.none(),
        "validation_fraction": st.sampled_from([0.1, 0.5]),
        "max_tokens": st.integers(1, 400),
        "on_bad_document": st.sampled_from(["skip", "stop"]),
        "on_bad_file": st.sampled_from(["skip", "stop"]),
        "compression": st.none(),
        "filters": st.just([{"column": "id", "none_of": ["a", 1]}, {"column": "id", "min": 0}]) | st.just([]),
    },
)


@st.composite
def jsonl_files(draw: st.DrawFn) -> tuple[str, bytes]:
    content = b"\n".join(draw(st.lists(LINES, max_size=12)))
    return draw(st.sampled_from([("a.jsonl", content), ("a.jsonl.gz", gzip.compress(content))]))


@st.composite
def text_files(draw: st.DrawFn) -> tuple[str, bytes]:
    return "a.txt", draw(
        st.lists(TEXTS, max_size=6).map(lambda texts: "\n\n".join(texts).encode()) | st.binary(max_size=200)
    )


@st.composite
def parquet_files(draw: st.DrawFn) -> tuple[str, bytes]:
    texts = draw(st.lists(TEXTS.map(str.encode) | st.binary(max_size=20) | st.none(), max_size=20))
    ids = pa.array(draw(st.sampled_from([[str(n) for n in range(len(texts))], [n // 2 for n in range(len(texts))]])))
    column = pa.array(texts, pa.large_binary()).cast(draw(st.sampled_from([pa.string(), pa.large_string()])), safe=False)
    table = pa.table({"id": ids, "text": draw(st.sampled_from([column, column.dictionary_encode()]))})
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, row_group_size=draw(st.integers(1, 8)))
    return "a.parquet", buffer.getvalue().to_pybytes()


FILES = st.one_of(jsonl_files(), text_files(), parquet_files())
DAMAGE = st.none() | st.tuples(st.floats(0, 1), st.binary(max_size=3))
"""The share of a file that is kept, and what follows it."""


def damaged(content: bytes, damage: tuple[float, bytes] | None) -> bytes:
    return content if damage is None else content[: round(len(content) * damage[0])] + damage[1]


def check_conversion(
    files: list[tuple[str, bytes]], damage: Any, text_files: str, keys: dict[str, Any], tokenizer: Path
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (file, content) in enumerate(files):
            (folder / f"{number}-{file}").write_bytes(damaged(content, damage if number == 0 else None))
        source = {"kind": "files", "paths": [str(folder / "*.*")], "text_files": text_files}
        defaults = {"job": "convert", "source": source, "tokenizer": str(tokenizer), "cluster": {"workers": 1}}
        out = folder / "out"
        config = ConvertConfig.model_validate({**defaults, "output": str(out), "shard_bytes": 2000, **keys})
        try:
            record = convert(config)
        except UserError:
            assert not (out / "conversion.json").exists()
            assert not list(out.rglob("index.json"))
            return
        assert not (out / "conversion.started").exists()
        again = convert(config.model_copy(update={"output": str(folder / "again")}))
        assert again["splits"] == record["splits"]
        assert verify(str(out)).faults == []
        kept = sum(split["documents"] for split in record["splits"].values())
        left_out = record["documents"]["filtered"] + sum(record["documents"]["skipped"].values())
        if config.max_tokens is None:
            assert kept + left_out == record["documents"]["read"]
        else:
            assert record["splits"]["train"]["tokens"] <= config.max_tokens
        assert convert(config) == record


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_BATCH_CHARACTERS", 200)
    monkeypatch.setattr(worker, "_PART_CHARACTERS", 500)


ARGUMENTS = given(
    files=st.lists(FILES, min_size=1, max_size=3),
    damage=DAMAGE,
    text_files=st.sampled_from(["file", "line", "paragraph"]),
    keys=KEYS,
)
COMMON = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(COMMON, max_examples=30, derandomize=True)
@ARGUMENTS
def test_any_files_give_a_complete_conversion_or_an_error(
    files: list[tuple[str, bytes]], damage: Any, text_files: str, keys: dict[str, Any], tokenizer_folder: Path
) -> None:
    check_conversion(files, damage, text_files, keys, tokenizer_folder)


@pytest.mark.slow
@settings(COMMON, max_examples=3000)
@ARGUMENTS
def test_thousands_of_files_give_a_complete_conversion_or_an_error(
    files: list[tuple[str, bytes]], damage: Any, text_files: str, keys: dict[str, Any], tokenizer_folder: Path
) -> None:
    check_conversion(files, damage, text_files, keys, tokenizer_folder)
