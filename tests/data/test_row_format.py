"""Datasets that other programs wrote: read as rows of segments, or refused in one line, by plan, preflight and run."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import MDSWriter
from streaming.base.util import merge_index

from biphasic.commands import plan as commands_plan
from biphasic.config.conversion_checks import check_rows, stored_row_problems
from biphasic.data.mds_reader import ShardError, row_reader
from biphasic.data.streaming import build_loader
from biphasic.data.streams import RowStream
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.errors import UserError
from conftest import Write
from helpers.numbered_rows import data, open_rows
from helpers.tiny import EOS, LENGTH, PAD, WORDS, config_of, launch, losses, train, write_tokenizer

Make = Callable[[np.ndarray], dict[str, Any]]
ROWS = 60


def ids_of(number: int, length: int = LENGTH) -> np.ndarray:
    """A row that ends documents at two places, not at its end."""
    ids = np.random.default_rng(number).integers(4, WORDS, length)
    ids[[3, length // 2]] = EOS
    return ids


def write(
    folder: Path, columns: dict[str, str], make: Make, length: Callable[[int], int] = lambda _: LENGTH, **keys: Any
) -> Path:
    with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 12, **keys) as out:
        for number in range(ROWS):
            out.write(make(ids_of(number, length(number))))
    return folder


def tokenizer_of(folder: Path) -> Tokenizer:
    write_tokenizer(folder / "tokenizer")
    return load_tokenizer(str(folder / "tokenizer"))


FORMATS: dict[str, tuple[dict[str, str], Make]] = {
    # llm-foundry's convert_dataset_hf.py, in two versions
    "bytes of int64": ({"tokens": "bytes"}, lambda ids: {"tokens": ids.astype(np.int64).tobytes()}),
    "int32": ({"tokens": "ndarray:int32"}, lambda ids: {"tokens": ids.astype(np.int32)}),
    "uint32": ({"tokens": f"ndarray:uint32:{LENGTH}"}, lambda ids: {"tokens": ids.astype(np.uint32)}),
    "int64": ({"input_ids": "ndarray:int64"}, lambda ids: {"input_ids": ids.astype(np.int64)}),
    # ModernBERT's pre-tokenized data
    "ModernBERT": (
        {"input_ids": "ndarray:uint16", "id": "str", "len": "int"},
        lambda ids: {"input_ids": ids.astype(np.uint16), "id": "0123" * 9, "len": len(ids)},
    ),
    "uint16": ({"tokens": f"ndarray:uint16:{LENGTH}"}, lambda ids: {"tokens": ids.astype(np.uint16)}),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("end", [None, EOS])
def test_rows_of_others_are_read(name: str, end: int | None, tmp_path: Path) -> None:
    columns, make = FORMATS[name]
    config = data(write(tmp_path / "made", columns, make, compression="zstd" if end else None))
    stream = replace(config.streams["data.train"], document_end=end)
    batches: Any = build_loader(
        config.reading, {"data.train": stream}, 8, seed=3, train=False, tokenizer=tokenizer_of(tmp_path)
    )
    rows = 0
    for batch in batches:
        for tokens, segments, row, lengths in zip(
            *(batch[each] for each in ("input_ids", "segment_ids", "row_ids", "lengths")), strict=True
        ):
            assert np.array_equal(tokens, ids_of(int(row)))
            expected = [LENGTH] if end is None else [4, LENGTH // 2 - 3, LENGTH // 2 - 1]
            assert lengths == expected
            assert np.array_equal(segments, np.repeat(range(1, len(expected) + 1), expected))
            rows += 1
    assert rows == ROWS


def test_a_document_that_ends_with_the_row(tmp_path: Path) -> None:
    """No empty segment follows it."""
    make: Make = lambda ids: {"tokens": np.append(ids[1:], EOS).astype(np.uint16)}  # noqa: E731
    made = write(tmp_path, {"tokens": "ndarray:uint16"}, make)
    stream = RowStream(local=str(made), document_end=EOS)
    read = row_reader("data.train", stream, json.loads((made / "index.json").read_text()), LENGTH, None)
    assert read(make(ids_of(0)))["lengths"].tolist() == [3, LENGTH // 2 - 3, LENGTH // 2]


@pytest.mark.parametrize(
    ("roles", "end", "row"),
    [
        ({}, PAD, [PAD, PAD]),  # what separates documents
        ({"eos_id": PAD}, None, [PAD, PAD]),  # GPT-2's padding, and ends of empty documents
        ({"unknown_id": PAD}, None, [PAD, PAD]),
        ({}, None, [PAD, PAD]),  # so few may separate documents
    ],
)
def test_tokens_that_need_not_be_padding(roles: dict[str, int], end: int | None, row: list[int], tmp_path: Path) -> None:
    make: Make = lambda ids: {"tokens": np.append(ids[2:], row).astype(np.uint16)}  # noqa: E731
    made = write(tmp_path / "made", {"tokens": "ndarray:uint16"}, make)
    index, tokenizer = json.loads((made / "index.json").read_text()), replace(tokenizer_of(tmp_path), **roles)
    read = row_reader("data.train", RowStream(local=str(made), document_end=end), index, LENGTH, tokenizer)
    assert read(make(ids_of(0)))["tokens"].tolist()[-2:] == row


def shorter(number: int) -> int:
    return LENGTH - 5 - number % 9


REFUSED: dict[str, tuple[dict[str, str], Make, Callable[[int], int], str]] = {
    "text": (
        {"text": "str"},
        lambda _: {"text": "some text"},
        lambda _: LENGTH,
        rf"^data\.train: the rows of .*made have text \(str\): expected .* a column `tokens` or `input_ids` of {LENGTH} ids",
    ),
    "a mask": (
        {"attention_mask": "ndarray:uint8", "input_ids": "ndarray:uint16"},
        lambda ids: {"input_ids": ids.astype(np.uint16), "attention_mask": np.ones(LENGTH, np.uint8)},
        lambda _: LENGTH,
        r"have attention_mask \(ndarray:uint8\), input_ids \(ndarray:uint16\): expected",
    ),
    "both": (
        {"tokens": "ndarray:uint16", "input_ids": "ndarray:uint16"},
        lambda ids: {"tokens": ids.astype(np.uint16), "input_ids": ids.astype(np.uint16)},
        lambda _: LENGTH,
        r"have input_ids \(ndarray:uint16\), tokens \(ndarray:uint16\): expected",
    ),
    "a type": (
        {"tokens": "ndarray:float32"},
        lambda ids: {"tokens": ids.astype(np.float32)},
        lambda _: LENGTH,
        r"have tokens \(ndarray:float32\): expected",
    ),
    "variable": (
        {"input_ids": "ndarray:uint16", "len": "int"},
        lambda ids: {"input_ids": ids.astype(np.uint16), "len": len(ids)},
        shorter,
        r"a row has [12]\d tokens; expected exactly data\.sequence_length",
    ),
    "longer": (
        {"tokens": f"ndarray:int32:{2 * LENGTH}"},
        lambda ids: {"tokens": ids.astype(np.int32)},
        lambda _: 2 * LENGTH,
        rf"^data\.sequence_length is {LENGTH}, but the rows of data\.train in .*made have {2 * LENGTH} tokens$",
    ),
    "padded": (
        {"tokens": "ndarray:uint16", "len": "int"},
        lambda ids: {"tokens": ids.astype(np.uint16), "len": LENGTH - 1},
        lambda _: LENGTH,
        rf"a row has {LENGTH - 1} tokens; expected exactly data\.sequence_length",
    ),
    "padded at the end": (
        {"input_ids": "ndarray:int32"},
        lambda ids: {"input_ids": np.append(ids[:-8], [PAD] * 8).astype(np.int32)},
        lambda _: LENGTH,
        rf"a row has padding \(id {PAD}\) at an end; expected .* cut: .* set data\.train\.document_end={PAD}$",
    ),
    "padded at the beginning": (
        {"input_ids": "ndarray:int64"},
        lambda ids: {"input_ids": np.append([PAD] * 9, ids[9:]).astype(np.int64)},
        lambda _: LENGTH,
        rf"a row has padding \(id {PAD}\) at an end",
    ),
    "bytes of int32": (
        {"tokens": "bytes"},
        lambda ids: {"tokens": ids.astype(np.int32).tobytes()},
        lambda _: LENGTH,
        rf"a row has {LENGTH // 2} tokens; expected exactly data\.sequence_length",
    ),
    "beyond the vocabulary": (
        {"tokens": "ndarray:int32"},
        lambda ids: {"tokens": (ids + 10).astype(np.int32)},
        lambda _: LENGTH,
        rf"a row has token ids from 1\d to 7\d, but `tokenizer` has {WORDS} tokens$",
    ),
    "below zero": (
        {"tokens": "ndarray:int64"},
        lambda ids: {"tokens": ids - 4},
        lambda _: LENGTH,
        r"a row has token ids from -2 to \d\d, but",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_rows_are_refused_in_one_line(name: str, tmp_path: Path, write_yaml: Write) -> None:
    """By the plan of a local dataset, by preflight, which reads first shards in buckets too, and when they are read."""
    columns, make, length, message = REFUSED[name]
    made = write(tmp_path / "made", columns, make, length)
    config = config_of(write_yaml(data__train={"local": str(made)}))
    [problem] = commands_plan._pretraining_plan(config, 1).problems
    [in_preflight] = stored_row_problems(config.splits, config.row_lengths, tokenizer_of(tmp_path), first_shards=True)
    with pytest.raises(UserError, match=message) as caught:
        list(build_loader(config.data.reading, config.streams, 8, seed=3, train=True, tokenizer=tokenizer_of(tmp_path)))
    for line in (problem, in_preflight, str(caught.value)):
        assert "\n" not in line
        assert re.search(message, line)


def test_nested_folders_whose_indexes_streaming_merged_are_refused(tmp_path: Path, write_yaml: Write) -> None:
    """Streaming 0.13 names the shards of more/0 as those of 0, which would be read twice, in place of more/0."""
    columns, make = FORMATS["uint16"]
    made = tmp_path / "made"
    for part in ("0", "more/0"):
        write(made / part, columns, make)
    merge_index(str(made))
    config = config_of(write_yaml(data__train={"local": str(made)}))
    [problem] = commands_plan._pretraining_plan(config, 1).problems
    [in_preflight] = stored_row_problems(config.splits, config.row_lengths, tokenizer_of(tmp_path), first_shards=True)
    with pytest.raises(UserError) as caught:
        build_loader(config.data.reading, config.streams, 8, seed=3, train=True, tokenizer=tokenizer_of(tmp_path))
    message = f"data.train: the index of {made} lists 0/shard.00000.mds 2 times, so another file is never read: expected"
    assert all(line.startswith(message) and "\n" not in line for line in (problem, in_preflight, str(caught.value)))


def test_a_plan_names_the_first_shard_if_it_is_missing(tmp_path: Path, write_yaml: Write) -> None:
    made = write(tmp_path / "made", *FORMATS["uint16"])
    (made / "shard.00000.mds").unlink()
    [problem] = commands_plan._pretraining_plan(config_of(write_yaml(data__train={"local": str(made)})), 1).problems
    assert problem == f"dataset {made}: shard.00000.mds can't be read (No such file or directory)"


def test_a_row_of_another_length_far_inside_is_refused_when_it_is_read(tmp_path: Path) -> None:
    columns, make = FORMATS["uint16"][0] | {"tokens": "ndarray:uint16"}, FORMATS["uint16"][1]
    made = write(tmp_path / "made", columns, make, lambda number: LENGTH - (number == ROWS - 1))
    with pytest.raises(ShardError, match=f"made: a row has {LENGTH - 1} tokens; expected exactly"):
        list(open_rows(data(made), train=False))


def test_shards_with_different_columns_are_refused(tmp_path: Path) -> None:
    one, other = (write(tmp_path / name, *FORMATS[name]) for name in ("int32", "uint16"))
    shards = [shard for each in (one, other) for shard in json.loads((each / "index.json").read_text())["shards"]]
    stream = RowStream(local="both")
    with pytest.raises(UserError, match=r"tokens \(ndarray:int32\) or tokens \(ndarray:uint16:32\): expected"):
        row_reader("data.train", stream, {"shards": shards}, LENGTH, None)


def test_document_end_that_can_not_be_used(tmp_path: Path, write_yaml: Write) -> None:
    made = write(tmp_path / "made", *FORMATS["int32"])
    config = config_of(write_yaml(data__train={"local": str(made), "document_end": WORDS}))
    assert check_rows(config).problems == [f"data.train.document_end: expected an id below {WORDS} ({made})"]
    own = tmp_path / "data" / "train"
    config = config_of(write_yaml(data__train={"local": str(own), "document_end": EOS}))
    message = f"data.train.document_end: has no effect on a conversion's rows: remove it ({own})"
    assert check_rows(config).problems == [message]
    with pytest.raises(UserError) as caught:
        open_rows(config.data)
    assert str(caught.value) == message


def test_ids_of_a_conversion_beyond_the_vocabulary_are_refused(tmp_path: Path, write_yaml: Write) -> None:
    """Without its record nothing else compares the tokenizer: an index error of the embedding would be left."""
    config, small = config_of(write_yaml()), replace(tokenizer_of(tmp_path), vocab_size=20)
    with pytest.raises(ShardError, match=r"but `tokenizer` has 20 tokens$"):
        list(build_loader(config.data.reading, config.streams, 8, seed=3, train=True, tokenizer=small))


def test_a_mix_of_own_rows_and_those_of_others(tmp_path: Path, write_yaml: Write) -> None:
    """With validation data of others, and a phase's own: each is read in its own way."""
    made = write(tmp_path / "made", *FORMATS["ModernBERT"])
    later = write(tmp_path / "later", *FORMATS["bytes of int64"])
    validation = write(tmp_path / "validation", *FORMATS["int64"])
    mix = {
        "own": {"local": str(tmp_path / "data" / "train"), "proportion": 0.5},
        "theirs": {"local": str(made), "proportion": 0.5, "document_end": EOS},
    }
    phases = [
        {"name": "clm", "until": "4ba"},
        {"name": "mlm", "data": {"train": {"local": str(later)}}},
    ]
    path = write_yaml(
        data__train=None,
        data__mix=mix,
        data__validation={"local": str(validation), "document_end": EOS},
        objective__phases=phases,
        max_duration="8ba",
        schedule__decay="2ba",
        checkpoint__interval="100ba",
    )
    config = config_of(path)
    assert check_rows(config).problems == []
    assert len(losses(train(config))) == 8


def test_a_run_ends_with_status_2_and_shows_one_line(tmp_path: Path, write_yaml: Write) -> None:
    """Status 1 would make a launcher start it again."""
    columns, make, length, _ = REFUSED["beyond the vocabulary"]
    made = write(tmp_path / "made", columns, make, length)
    run = launch(write_yaml(data__train={"local": str(made)}, data__num_workers=1))
    assert run.returncode == 2
    assert f"{made}: a row has token ids from" in run.stderr
    assert "Traceback" not in run.stderr
