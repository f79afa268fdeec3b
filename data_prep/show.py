"""Print the text of rows by their ids, as `odd_batches.jsonl` names them.

python data_prep/show.py FILE.yaml ID [ID ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from biphasic.config.errors import ConfigError, UserError
from biphasic.config.load import load
from biphasic.config.schema import PretrainConfig


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when the YAML or an id can't be used."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="the pretraining YAML")
    parser.add_argument("ids", nargs="+", type=int, help="rows, as they are numbered in the dataset or the mix")
    given = parser.parse_args(arguments)
    try:
        config = load(given.file)
        if not isinstance(config, PretrainConfig):
            raise UserError(f"{given.file}: expected job: pretrain; got {config.job}")
        for line in _texts(config, given.ids):
            print(line)
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _texts(config: PretrainConfig, ids: list[int]) -> Iterator[str]:
    from biphasic.data.stored import row_as_text, row_count, rows_at
    from biphasic.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.tokenizer)
    # Ids count on from one dataset of a mix to the next.
    places = {stream.remote or stream.local: 0 for stream in config.data.streams.values()}
    total = 0
    for place in places:
        places[place], total = total, total + row_count(place)
    if beyond := [one for one in ids if not 0 <= one < total]:
        raise UserError(f"row {beyond[0]}: expected an id from 0 to {total - 1:,}")
    for place, first in places.items():
        for number, row in rows_at(place, [one - first for one in ids]):
            yield f"=== row {first + number}: {place}\n{row_as_text(row, tokenizer)}"


if __name__ == "__main__":
    sys.exit(main())
