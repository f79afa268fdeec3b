"""Everything a data-conversion YAML may say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from biphasic.config.base import Count, Positive, Section


def _compression(value: str) -> str:
    name, _, level = value.partition(":")
    if name != "zstd" or (value != name and not (level.isdigit() and 1 <= int(level) <= 22)):
        raise ValueError(f"expected zstd, zstd:LEVEL (1 to 22) or null; got {value!r}")
    return value


class FilesSource(Section):
    """Parquet or JSONL files."""

    kind: Literal["files"]
    paths: Annotated[list[str], Field(min_length=1)]
    """Files, folders or glob patterns; local or `s3://…`. Read in sorted order."""


class HubSource(Section):
    """A dataset of the Hugging Face hub."""

    kind: Literal["hub"]
    path: str
    name: str | None = None
    """Configuration, e.g. `sample-100BT`."""
    split: str = "train"
    revision: str | None = None
    """Commit or tag. Default: the newest, which may change between runs."""


class SegmentsConfig(Section):
    """What attends to itself within a row."""

    kind: Literal["documents", "stream"] = "documents"
    """`documents`: a segment is a document, best-fit packed. `stream`: documents are joined and cut at random lengths,
    with no boundary inside a segment (the paper's runs)."""
    window: Positive = 8192
    """`documents`: how many documents, or rests of long ones, may wait for a row that they fit into. More fills rows
    better and needs memory for as many documents."""
    shortest: Positive = 12
    """`stream`: the shortest cut, in tokens. EuroBERT's packing draws lengths between 12 and sequence_length - 12."""


class ConvertConfig(Section):
    """`job: convert`: text in, MDS shards of packed rows out."""

    job: Literal["convert"]
    source: Annotated[FilesSource | HubSource, Field(discriminator="kind")]
    text_column: str = "text"
    id_column: str | None = "id"
    """Null: a hash of the text names a document."""
    output: str
    """Local folder or `s3://…` prefix. It gets `train/`, `validation/`, `tokenizer/` and `conversion.json`."""
    tokenizer: str
    """Folder or hub id of a `tokenizers` tokenizer. It is copied to the output, with a mask token added if it has none."""
    sequence_length: Annotated[int, Field(ge=16)] = 2048
    segments: SegmentsConfig = SegmentsConfig()
    add_bos: bool = False
    add_eos: bool = True
    """EOS after each document, no BOS: as in EuroBERT's code."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of documents, chosen by a hash of their id, that goes to `validation/`."""
    max_documents: Positive | None = None
    """Read only so many, from the first."""
    seed: Count = 42
    """`stream`: decides the cuts."""
    shard_bytes: Annotated[int, Field(gt=0, lt=2**32)] = 64 * 2**20
    """Size of a shard before compression. MDS counts bytes with 32 bits."""
    compression: Annotated[str, AfterValidator(_compression)] | None = "zstd"
    """`zstd`, or `zstd:LEVEL` (1 to 22). Null: none."""
