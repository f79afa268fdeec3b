"""Schema of a conversion YAML (`job: convert`): keys, types, defaults and checks."""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from biphasic.config.base import (
    Address,
    Bytes,
    ClusterConfig,
    Count,
    Destination,
    JobConfig,
    KeyProblems,
    Positive,
    Section,
    Seed,
    Size,
    matching,
    whole,
)

Separator = Annotated[str, matching(r"[^\r\n]+", "text without line ends")]


class FilesSource(Section):
    """Parquet, JSON (`.jsonl`, `.ndjson`, `.json`), CSV, TSV or plain text (`.txt`, `.md`, `.markdown`, `.rst`) files. All
    but Parquet may be compressed (`.gz`, `.zst`). CSV and TSV files begin with a line of column names."""

    kind: Literal["files"]
    paths: Annotated[list[Address], Field(min_length=1)]
    """Files, folders or glob patterns: local, `s3://…`, `gs://…`, `az://…` or `oci://…`. They are read in sorted order. A
    path that exists is no pattern."""
    text_files: Literal["file", "line", "paragraph"] = "file"
    """The unit of a plain text file that becomes a document: the file, each line, or each paragraph between empty lines."""
    separator: Separator | None = None
    """What separates documents within a text, such as `<|endoftext|>`; it belongs to none of them. Null: nothing."""


class HubSource(Section):
    """A dataset on the Hugging Face hub."""

    kind: Literal["hub"]
    path: str
    """Name of the dataset, e.g. `HuggingFaceFW/fineweb-edu`, or a local folder with the same layout."""
    name: str | None = None
    """Name of the dataset's configuration, e.g. `sample-100BT`."""
    split: str = "train"
    """Split of the dataset."""
    revision: str | None = None
    """Commit or tag. Default: the newest commit when the conversion starts, which is recorded."""
    separator: Separator | None = None
    """What separates documents within a text, such as `<|endoftext|>`; it belongs to none of them. Null: nothing."""


Scalar = StrictBool | StrictInt | StrictFloat | StrictStr


class FilterConfig(Section):
    """Keep the documents whose value in `column` meets every given condition. A null value meets none."""

    column: str
    """Name of the column."""
    min: int | float | None = None
    """Smallest value to keep: `min: 3` keeps an `int_score` of at least 3."""
    max: int | float | None = None
    """Largest value to keep."""
    any_of: Annotated[list[Scalar], Field(min_length=1)] | None = None
    """Keep only these values; of a list, documents with at least one of them. Text that YAML reads as something else needs
    quotes: `any_of: ["no", sv]`."""
    none_of: Annotated[list[Scalar], Field(min_length=1)] | None = None
    """Leave these values out; of a list, documents with any of them."""


class SegmentsConfig(Section):
    """How documents are packed into the segments of a row. A token attends only to tokens of its own segment."""

    kind: Literal["documents", "stream", "single"] = "documents"
    """`documents`: each segment is a document, with best-fit packing. `stream`: documents are joined and cut at random
    lengths, so that a segment may span several documents (the paper's runs). `single`: one document a row, and padding; a
    longer document fills several rows."""
    window: Positive = 8192
    """With `documents`: number of documents, or ends of long documents, that may wait for a row that they fit into. A
    larger window gives less padding, but needs more memory."""
    shortest: Positive = 12
    """With `stream`: shortest segment, in tokens. EuroBERT's packing draws lengths between 12 and sequence_length - 12."""


class ConvertCluster(ClusterConfig):
    """Where work units are converted. On this machine, a single worker runs in the main process."""

    workers: Positive | None = None
    """Number of work units to convert at a time. Default: the number of cores (of the cluster)."""
    retries: Count = 10
    """How often a work unit is retried on another worker after its worker died (killed, out of memory, node lost)."""


class ConvertConfig(JobConfig):
    """`job: convert`: tokenize text, pack it into rows, and write them as MDS shards."""

    job: Literal["convert"]
    source: Annotated[FilesSource | HubSource, Field(discriminator="kind")]
    """The text: files, or a dataset on the hub."""
    text_column: str = "text"
    """Column, or JSON key, with the text."""
    id_column: str | None = "id"
    """Column with the document ids. Null, or a document without an id: a hash of the text is the id."""
    filters: list[FilterConfig] = []
    """Convert only documents that pass all filters."""
    output: Destination
    """Local folder or bucket prefix for `train/`, `validation/`, `tokenizer/`, `units/` and `conversion.json`."""
    tokenizer: Address
    """Folder or hub id of a `tokenizers` tokenizer. It is copied to the output; a mask token is added if it has none."""
    tokenizer_backend: Literal["auto", "tokenizers", "gigatoken"] = "auto"
    """Library that encodes the text: `tokenizers`, or `gigatoken` (the extra `biphasic[fast]`), which gives the same ids
    many times faster for byte-level BPE. One document in a hundred is encoded by both. `auto`: gigatoken if it is installed,
    gives the same ids for a sample and is faster; should it once differ, the whole conversion is done by tokenizers."""
    sequence_length: Annotated[int, Field(ge=16, lt=2**31), whole] = 2048
    """Number of tokens in a row. Default: the paper's context length (appendix, table 1)."""
    segments: SegmentsConfig = SegmentsConfig()
    """How documents are packed into rows."""
    add_bos: bool = False
    """Whether to add the BOS token before each document, and later before each text that the encoder reads. Default: as
    EuroBERT's code."""
    add_eos: bool = True
    """Whether to add the EOS token after each document. Default: as EuroBERT's code."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the documents to write to `validation/`, chosen by a hash of their id. If it draws none, the document with
    the smallest hash is for validation; if it draws all, the one with the largest hash is for training."""
    max_tokens: Positive | None = None
    """Stop at exactly this number of tokens in `train/`, in the middle of a document if necessary."""
    on_bad_document: Literal["skip", "stop"] = "skip"
    """A bad document has no text, is not valid UTF-8, JSON or CSV, or has more than 16,777,216 characters.
    `skip`: leave out and count them."""
    on_bad_file: Literal["stop", "skip"] = "stop"
    """`stop`: convert the other files, but publish the output only once the damaged file is repaired. `skip`: convert the
    documents before the damage; leave out and count the rest."""
    unit_bytes: Annotated[Size, Field(ge=2**16)] = Bytes(256 * 2**20)
    """Bytes of text in a work unit, at least 65,536. After an interruption, unfinished work units are converted again. Small
    files are grouped; a large Parquet file is divided by its row groups."""
    cluster: ConvertCluster = ConvertCluster()
    """Where it runs."""
    seed: Seed = 42
    """Random seed for the segment lengths with `stream`."""
    shard_bytes: Annotated[Size, Field(lt=2**32)] = Bytes(64 * 2**20)
    """Size of a shard before compression, below 2**32: MDS stores byte offsets in 32 bits."""
    compression: Annotated[str, matching(r"zstd(:([1-9]|1\d|2[0-2]))?", "zstd, zstd:LEVEL (1 to 22) or null")] | None = (
        "zstd"
    )
    """`zstd`, or `zstd:LEVEL` (1 to 22). Null: no compression."""

    def problems(self, ranks: int) -> KeyProblems:
        segments = self.segments
        if segments.kind == "stream" and 2 * segments.shortest >= self.sequence_length:
            message = f"expected less than half of sequence_length ({self.sequence_length})"
            yield ["segments.shortest", "sequence_length"], message
        for key, kind in {"window": "documents", "shortest": "stream"}.items():
            if kind != segments.kind and not segments.is_default(key):
                yield [f"segments.{key}", "segments.kind"], f"has no effect with kind: {segments.kind}"
        if segments.kind != "stream" and not self.is_default("seed"):
            yield ["seed", "segments.kind"], f"has no effect with kind: {segments.kind}"
        if self.source.separator and isinstance(self.source, FilesSource) and self.source.text_files != "file":
            yield ["source.text_files", "source.separator"], "two ways to divide a text: expected only one"
        for index, condition in enumerate(self.filters):
            if all(getattr(condition, name) is None for name in ("min", "max", "any_of", "none_of")):
                yield [f"filters.{index}"], "keeps everything; expected one of min, max, any_of, none_of"
            if condition.min is not None and condition.max is not None and condition.min > condition.max:
                yield [f"filters.{index}.min", f"filters.{index}.max"], "is above max, so nothing would be kept"

    @property
    def splits(self) -> list[str]:
        """Names of the splits that the conversion writes."""
        return ["train", *(["validation"] if self.validation_fraction else [])]
