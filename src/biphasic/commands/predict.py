"""Predict new text with a fine-tuned model, or embed it.

FILE has the columns that the model's task reads: `text` (and `text_pair`), `tokens`, or `question` and `context`; and `id`,
if rows should be found again by it. A model for retrieval, or one that isn't fine-tuned, embeds `text`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from biphasic.devices import rank_device, supports_bf16
from biphasic.errors import UserError

if TYPE_CHECKING:
    from biphasic.downstream.tables import Table

_PREDICTIONS = (".jsonl", ".parquet")
_TEXTS_AT_ONCE = 10_000
"""Texts that are embedded before their embeddings are written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic predict`."""
    parser.add_argument("model", metavar="MODEL", help="folder of a fine-tuned model, such as runs/sst2/model")
    parser.add_argument("file", metavar="FILE", help="Parquet, JSON lines, CSV, TSV, .conll or SQuAD's JSON")
    parser.add_argument(
        "--out",
        metavar="OUT",
        help="the file to write: .jsonl or .parquet; embeddings: .parquet (default: from FILE's name)",
    )
    parser.add_argument(
        "--prompt", metavar="NAME", help="embed with this prompt of the model, such as query; none: without"
    )


def run(options: argparse.Namespace) -> int:
    """Write the predictions or embeddings, and return the exit status."""
    from biphasic.finetuning.finetuned_model import open_texts, read_task

    record = read_task(options.model)
    kind = "retrieval" if record is None else record["task"]["kind"]
    embeds = kind == "retrieval"
    suffixes = _PREDICTIONS[1:] if embeds else _PREDICTIONS
    stem = Path(options.file).name.split(".")[0]
    out = Path(options.out or f"{stem}-{'embeddings.parquet' if embeds else 'predictions.jsonl'}")
    if out.suffix not in suffixes:
        raise UserError(f"--out {out}: expected a name that ends with {' or '.join(suffixes)}")
    if options.prompt is not None and not embeds:
        raise UserError("--prompt: is for embeddings; the text of a task has its own template")
    table = open_texts(options.file, kind)
    what = "embeddings" if embeds else f"predictions ({kind})"
    print(f"{len(table):,} rows of {options.file}: {what} to {out}", flush=True)
    groups = _embed(options.model, table, options.prompt) if embeds else _predict(options.model, record, table)
    rows = _write(out, groups)
    print(f"{out}: {rows:,} rows")
    return 0


def _predict(model: str, record: Any, table: Table) -> Iterator[dict[str, Any]]:
    from biphasic.finetuning.finetuned_model import load_finetuned, portions, predict

    loaded = load_finetuned(model, record)
    for ids, columns in portions(table):
        yield predict(loaded, record, ids, columns)


def _embed(path: str, table: Table, prompt: str | None) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    from tqdm import tqdm

    from biphasic.evaluation.embedder import EncoderEmbedder
    from biphasic.finetuning.finetuned_model import portions
    from biphasic.finetuning.retrieval import titled_texts
    from biphasic.model.encoder import load_encoder

    encoder = load_encoder(path)
    prompts = {name: text for name, text in encoder.prompts.items() if text}
    if (prompts and prompt is None) or prompt not in (None, "none", *prompts):
        given = "" if prompt is None else f"; got {prompt}"
        raise UserError(f"--prompt: expected {', '.join([*prompts, 'none'])}, because {path} has prompts{given}"
                        if prompts else f"--prompt {prompt}: {path} has no prompts")  # fmt: skip
    before = prompts.get(prompt or "none", "")
    rank_device().module_to_device(encoder.backbone)
    embedder = EncoderEmbedder(encoder, path, "", supports_bf16())
    with tqdm(total=len(table), desc="embedding", unit="text", delay=5, disable=None) as bar:
        for ids, columns in portions(table):
            texts = [before + text for text in titled_texts(columns)]
            for first in range(0, len(texts), _TEXTS_AT_ONCE):
                embeddings = embedder.embed(texts[first : first + _TEXTS_AT_ONCE], bar.update)
                vectors = pa.FixedSizeListArray.from_arrays(pa.array(embeddings.reshape(-1)), encoder.width)
                yield {"id": ids[first : first + _TEXTS_AT_ONCE], "embedding": vectors}


def _write(out: Path, groups: Iterator[dict[str, Any]]) -> int:
    """Write groups of columns to a file, atomically, and return the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from biphasic.storage import atomic_path

    rows = 0
    try:
        with atomic_path(out) as partial:
            if out.suffix == ".jsonl":
                with partial.open("w", encoding="utf-8") as file:
                    for columns in groups:
                        for values in zip(*columns.values(), strict=True):
                            line = json.dumps(dict(zip(columns, values, strict=True)), ensure_ascii=False)
                            file.write(f"{line}\n")
                            rows += 1
            else:
                writer = None
                for columns in groups:
                    table = pa.table(columns)
                    writer = writer or pq.ParquetWriter(partial, table.schema, compression="zstd")
                    writer.write_table(table)
                    rows += len(table)
                if writer is not None:
                    writer.close()
    except OSError as error:
        raise UserError(f"{out}: can't be written ({error.strerror or error})") from None
    return rows
