"""Text in a language that is on many machines: the message catalogues (`.mo`) of the installed programs.

Writes into a folder, by default `runs/your_language/text/`:

    documents.parquet     id, text: messages of one program joined to documents, and messages of several sentences
    pairs/train.parquet   id, query, positive, negatives (none): a message's first sentence and the rest of it
    pairs/task.json       the record that fine-tuning reads (see docs/tasks.md)
    sentences/            the same from documents of the conversion's validation split, in BEIR's layout, to be scored

Messages are about software, and short: enough to see that every step works in another language, but not to compare models.
"""

import argparse
import gettext
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.config.load import load_job
from biphasic.data.packing import document_number, validation_end
from biphasic.downstream.writer import TASK_RECORD
from biphasic.errors import UserError
from biphasic.storage import json_bytes, open_store, parquet_bytes

YAML = Path(__file__).parent / "data.yaml"
PLACES = (Path("/usr/share"), Path(sys.prefix))
"""Where catalogues are installed, as `LANGUAGE/LC_MESSAGES/PROGRAM.mo`."""
JOINED = 1000
"""Characters of a document that is made of short messages."""
_FIRST_SENTENCE = re.compile(r"(.{20,120}?[.:!?])\s+(\S.{40,})", re.DOTALL)
_MIN_CHARACTERS = 200_000
_ROWS_PER_GROUP = 1000


def messages(language: str, places: tuple[Path, ...] = PLACES) -> Iterator[tuple[str, str]]:
    """Yield each different message of a language with its program's name. Catalogues that can't be read are left out.

    Args:
        language: as in the folders' names, such as `fr` or `pt_BR`.
        places: folders to search.
    """
    seen: set[str] = set()
    files = chain.from_iterable(sorted(place.glob(f"**/{language}/LC_MESSAGES/*.mo")) for place in places)
    for file in files:
        try:
            with file.open("rb") as opened:
                catalogue: dict[object, str] = gettext.GNUTranslations(opened)._catalog  # pyright: ignore
        except (OSError, ValueError, UnicodeDecodeError):
            continue
        for original, text in catalogue.items():
            message = " ".join(text.split())
            key = re.sub(r"\W+", " ", message.casefold()).strip()
            # The empty message is the catalogue's header; an untranslated one is English.
            if original and message != original and key and key not in seen:
                seen.add(key)
                yield file.stem, message


def pair_of(message: str) -> tuple[str, str] | None:
    """Return a message's first sentence and the rest. Return None if it has one sentence, or an unusual form."""
    match = _FIRST_SENTENCE.fullmatch(message)
    return None if match is None else (match[1], match[2])


def documents(program_messages: Iterator[tuple[str, str]]) -> Iterator[tuple[str, tuple[str, str] | None]]:
    """Yield each document with its pair: a message with a pair alone, the others of a program joined."""
    program, lines = "", list[str]()
    for name, message in program_messages:
        if lines and (name != program or sum(map(len, lines)) >= JOINED):
            yield "\n".join(lines), None
            lines = []
        program, pair = name, pair_of(message)
        if pair is not None:
            yield message, pair
        else:
            lines.append(message)
    if lines:
        yield "\n".join(lines), None


def gather(language: str, folder: Path, validation_fraction: float, places: tuple[Path, ...] = PLACES) -> dict[str, int]:
    """Write the files.

    Args:
        language: see `messages`.
        folder: created if it does not exist.
        validation_fraction: of the conversion, so that scored pairs come from documents that are not trained on.
        places: see `messages`.

    Returns:
        Numbers of documents, characters, training and test pairs.

    Raises:
        UserError: the machine has little text in this language.
    """
    import pyarrow as pa

    texts, train, test = list[tuple[str, str]](), list[tuple[str, str, str]](), list[tuple[str, str, str]]()
    for text, pair in documents(messages(language, places)):
        identity = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        texts.append((identity, text))
        if pair is not None:
            split = test if document_number(identity) < validation_end(validation_fraction) else train
            split.append((identity, *pair))
    characters = sum(len(text) for _, text in texts)
    if characters < _MIN_CHARACTERS:
        raise UserError(
            f"language {language}: the message catalogues on this machine have {characters:,} characters; expected "
            f"at least {_MIN_CHARACTERS:,}: choose another folder of /usr/share/locale, or set source.paths in {YAML.name}"
        )
    columns: dict[str, Any] = {"id": [i for i, _ in texts], "text": [text for _, text in texts]}
    open_store(str(folder)).write("documents.parquet", parquet_bytes(columns, _ROWS_PER_GROUP))
    columns = {name: [pair[at] for pair in train] for at, name in enumerate(("id", "query", "positive"))}
    columns["negatives"] = pa.array([[]] * len(train), pa.list_(pa.string()))
    open_store(str(folder)).write("pairs/train.parquet", parquet_bytes(columns, _ROWS_PER_GROUP))
    record = {"task": "sentences", "kind": "retrieval", "license": "of the programs", "rows": {"train": len(train)}}
    open_store(str(folder / "pairs")).write(TASK_RECORD, json_bytes(record))
    _write_test_set(folder / "sentences", test)
    return {"documents": len(texts), "characters": characters, "train_pairs": len(train), "test_pairs": len(test)}


def _write_test_set(folder: Path, pairs: list[tuple[str, str, str]]) -> None:
    store = open_store(str(folder))
    for name, at in (("queries", 1), ("corpus", 2)):
        lines = [json.dumps({"_id": pair[0], "text": pair[at]}, ensure_ascii=False) for pair in pairs]
        store.write(f"{name}.jsonl", "".join(f"{line}\n" for line in lines).encode())
    judgments = "".join(f"{pair[0]}\t{pair[0]}\t1\n" for pair in pairs)
    store.write("qrels/test.tsv", f"query-id\tcorpus-id\tscore\n{judgments}".encode())


def main(arguments: list[str] | None = None) -> int:
    """Gather the text, and print the counts."""
    parser = argparse.ArgumentParser(description="Gather the messages of the installed programs in a language.")
    parser.add_argument("language", help="as in /usr/share/locale, such as fr, de or pt_BR")
    parser.add_argument("folder", nargs="?", type=Path, help="default: where data.yaml reads")
    options = parser.parse_args(arguments)
    config = load_job(ConvertConfig, YAML)
    assert isinstance(config.source, FilesSource)
    folder = options.folder or Path(config.source.paths[0]).parent
    try:
        counts = gather(options.language, folder, config.validation_fraction)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{folder}: " + ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
