"""Print the text of rows by their ids, as `anomalous_batches.jsonl` in a run's folder lists them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from biphasic.errors import UserError

if TYPE_CHECKING:
    from biphasic.config.pretrain import PretrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic show`."""
    parser.add_argument("file", metavar="FILE.yaml", help="the pretraining YAML")
    parser.add_argument("ids", metavar="ID", nargs="+", type=int, help="row ids in the dataset or the mix")


def run(options: argparse.Namespace) -> int:
    """Print the rows and return the exit status."""
    from biphasic.config.load import load_job
    from biphasic.config.pretrain import PretrainConfig

    config = load_job(PretrainConfig, options.file)
    for line in _texts(config, options.ids):
        print(line)
    return 0


def _texts(config: PretrainConfig, ids: list[int]) -> Iterator[str]:
    from biphasic.data.mds_reader import read_rows, row_as_text, row_count
    from biphasic.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.tokenizer)
    # The ids of a mix's second dataset follow those of its first.
    first_ids: dict[str, int] = {}
    total = 0
    for stream in config.data.streams.values():
        dataset = stream.remote or stream.local
        first_ids[dataset] = total
        total += row_count(dataset)
    if unknown := [id for id in ids if not 0 <= id < total]:
        raise UserError(f"row {unknown[0]}: expected an id from 0 to {total - 1:,}")
    for dataset, first_id in first_ids.items():
        for row_id, row in read_rows(dataset, [id - first_id for id in ids]):
            yield f"=== row {first_id + row_id}: {dataset}\n{row_as_text(row, tokenizer)}"
