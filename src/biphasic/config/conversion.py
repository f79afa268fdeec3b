"""Everything a data-conversion YAML may say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from biphasic.config.base import Count, Positive, Section


def _compression(value: str) -> str:
    name, _, level = value.partition(":")
    if name != "zstd" or (value != name and not (level.isdigit() and 1 <= int(level) <= 22)):
        raise ValueError(f"expected zstd, zstd:LEVEL (1 to 22) or null; got {value!r}")
    return value


class FilesSource(Section):
    """Parquet, JSONL or plain text files; the last two also as `.gz` and `.zst`."""

    kind: Literal["files"]
    paths: Annotated[list[str], Field(min_length=1)]
    """Files, folders or glob patterns; local, `s3://…`, `gs://…`, `az://…` or `oci://…`. Read in sorted order."""
    text_files: Literal["file", "line", "paragraph"] = "file"
    """What a document is in `.txt` files: the whole file, each line, or what stands between empty lines."""


class HubSource(Section):
    """A dataset of the Hugging Face hub."""

    kind: Literal["hub"]
    path: str
    name: str | None = None
    """Configuration, e.g. `sample-100BT`."""
    split: str = "train"
    revision: str | None = None
    """Commit or tag. Default: the newest, which is looked up when the conversion starts, and recorded."""


Scalar = StrictBool | StrictInt | StrictFloat | StrictStr


class FilterConfig(Section):
    """Keep the documents whose value in `column` passes everything that is given here; a null value passes nothing."""

    column: str
    min: float | None = None
    """Least value, itself included: `int_score` of 3 and more is `min: 3`."""
    max: float | None = None
    any_of: Annotated[list[Scalar], Field(min_length=1)] | None = None
    none_of: Annotated[list[Scalar], Field(min_length=1)] | None = None


class SegmentsConfig(Section):
    """What attends to itself within a row."""

    kind: Literal["documents", "stream", "single"] = "documents"
    """`documents`: a segment is a document, best-fit packed. `stream`: documents are joined and cut at random lengths,
    with no boundary inside a segment (the paper's runs). `single`: one document a row, the rest is padding."""
    longer: Literal["cut", "truncate"] = "cut"
    """`single`: what becomes of a document that is longer than a row: several rows, or its beginning alone."""
    window: Positive = 8192
    """`documents`: how many documents, or rests of long ones, may wait for a row that they fit into. More fills rows
    better and needs memory for as many documents."""
    shortest: Positive = 12
    """`stream`: the shortest cut, in tokens. EuroBERT's packing draws lengths between 12 and sequence_length - 12."""


class ClusterConfig(Section):
    """Where the tasks run. One worker runs in the command's own process, several on Ray."""

    address: str | None = None
    """Null: this machine. `auto`: the Ray cluster that this machine belongs to. Else a cluster's address."""
    workers: Positive | None = None
    """Tasks at a time. Default: as many as there are cores (of the cluster), over `cpus_per_worker`."""
    cpus_per_worker: Positive = 1
    """Cores that a worker's tokenizer uses."""
    shared_folder: bool = False
    """On several machines, a local `output` or source is a folder that all of them see."""
    retries: Count = 10
    """How often a task is given to another worker when its own dies (killed, out of memory, machine lost)."""


class ConvertConfig(Section):
    """`job: convert`: text in, MDS shards of packed rows out."""

    job: Literal["convert"]
    source: Annotated[FilesSource | HubSource, Field(discriminator="kind")]
    text_column: str = "text"
    id_column: str | None = "id"
    """Null: a hash of the text names a document."""
    filters: list[FilterConfig] = []
    """Which documents are taken: those that pass all of them."""
    output: str
    """Local folder or bucket prefix. It gets `train/`, `validation/`, `tokenizer/`, `tasks/` and `conversion.json`."""
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
    """Read only so many, from the first (those that a filter leaves out are counted)."""
    max_tokens: Positive | None = None
    """Stop at exactly so many tokens in `train/`; the last document is cut there."""
    max_text_characters: Positive = 16_777_216
    """A longer text is a bad document."""
    on_bad_document: Literal["skip", "stop"] = "skip"
    """Without text, not UTF-8, not JSON, or too long: leave it out and count it, or stop."""
    on_bad_file: Literal["stop", "skip"] = "stop"
    """A damaged file. `stop`: the others are converted, and the output is published once the file is mended. `skip`:
    what lies before the damage is taken, the rest is left out and counted."""
    task_bytes: Annotated[int, Field(ge=2**20)] = 256 * 2**20
    """Text in a task: the piece of work that is done anew after an interruption. Small files are put together, row
    groups of a large Parquet file are divided."""
    cluster: ClusterConfig = ClusterConfig()
    seed: Count = 42
    """`stream`: decides the cuts."""
    shard_bytes: Annotated[int, Field(gt=0, lt=2**32)] = 64 * 2**20
    """Size of a shard before compression. MDS counts bytes with 32 bits."""
    compression: Annotated[str, AfterValidator(_compression)] | None = "zstd"
    """`zstd`, or `zstd:LEVEL` (1 to 22). Null: none."""

    @property
    def splits(self) -> list[str]:
        """The splits that the output gets."""
        return ["train", *(["validation"] if self.validation_fraction else [])]
