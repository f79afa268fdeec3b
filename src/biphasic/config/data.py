"""Schema of the `data:` section of a pretraining YAML: one dataset or a mix of several, and their checks."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from posixpath import basename, join, normpath
from typing import Annotated, Any

from pydantic import Field

from biphasic.config.base import Address, Count, KeyProblems, LocalPath, Name, Positive, Section, Size, matching
from biphasic.data.streams import DEFAULT_CACHE, ReadingSettings, RowStream
from biphasic.durations import BatchShape, BatchShapes, Duration
from biphasic.storage import is_remote


class StreamConfig(Section):
    """One split of a converted dataset."""

    local: LocalPath
    """Folder of the shards, or the cache for `remote`. Each split and stream needs its own folder."""
    remote: Address | None = None
    """URL from which shards that are not in `local` are downloaded: `s3://…`, `gs://…`, `az://…`, `oci://…` or `hf://…`."""
    document_end: Count | None = None
    """For rows that another program wrote: id of the token that ends a document. Each document of a row is then a segment.
    Null: a row is one segment."""

    def stream(self, data: Any) -> RowStream:
        """Return the stream as `biphasic.data` reads it. `data` is the section that it is in."""
        return RowStream(**dict(self), cache=data.cache or DEFAULT_CACHE)


class MixedStreamConfig(StreamConfig):
    """One dataset of a mix."""

    proportion: Annotated[float, Field(gt=0, le=1)]
    """The dataset's share of the rows. The shares of a mix add up to 1."""


_NameInMix = Annotated[Name, matching(r"[^.]*", "a name without a dot, which separates keys")]


class _TrainingData(Section):
    folder: Address | None = None
    """The output of a conversion, a folder or a bucket prefix. Its `train/` becomes `train`; in the run's own `data`, its
    `validation/` also becomes `validation`, and its `tokenizer/` is the default of `tokenizer`."""
    train: StreamConfig | None = None
    """One converted dataset."""
    mix: Annotated[dict[_NameInMix, MixedStreamConfig], Field(min_length=1)] | None = None
    """Several converted datasets by name. Rows are sampled from them in their proportions."""
    epoch_rows: Positive | None = None
    """Number of rows in an epoch of the mix. Default: the total number of rows in its datasets."""

    @property
    def streams(self) -> dict[str, RowStream]:
        """The training streams by YAML key. A mix is sorted by name, because row ids depend on the order of streams."""
        if self.mix is not None:
            return {f"data.mix.{name}": self.mix[name].stream(self) for name in sorted(self.mix)}
        return {} if self.train is None else {"data.train": self.train.stream(self)}


class DataConfig(_TrainingData):
    """The training and validation data, and the order of rows. Exactly one of `folder`, `train` and `mix` is required."""

    sequence_length: Positive
    """Number of tokens in a row. It must equal the conversion's `sequence_length`."""
    cache: LocalPath = DEFAULT_CACHE
    """Local folder for the shards of a `folder` in a bucket, which are in a subfolder with the last name of `folder`. Each
    node needs one of its own."""
    validation: StreamConfig | None = None
    """The validation split, for `evaluation`. Null: no validation, also beside `folder`."""
    start_at: Duration = Duration(0, "ba")
    """What comes before the run in the order of rows, in batches, rows or tokens (padding counts), rounded up to whole
    batches. To continue another model's training, give what that run has read, also if that is more than an epoch."""
    shuffle_block_size: Positive = 1 << 18
    """Number of rows that are shuffled together. Each epoch has another order."""
    num_canonical_nodes: Positive = 64
    """Streaming's setting. It is fixed so that the order of rows does not depend on the number of nodes."""
    predownload: Positive | None = None
    """Number of rows that each loader process downloads ahead. Default: Streaming's, eight batches of a rank."""
    cache_limit: Size | None = None
    """Maximum size of a node's cache, e.g. `200gb`. It applies to training data and to validation data separately. The
    least recently read shards are deleted first. Default: keep all shards. A local `folder` is no cache and is kept."""
    num_workers: Count = 2
    """Number of loader processes for each rank."""

    def first_row(self, global_batch_size: int) -> int:
        """Return the number of rows that are ordered before the run's first batch."""
        shapes = BatchShapes(((0, BatchShape(global_batch_size, self.sequence_length)),))
        return shapes.batches(self.start_at) * global_batch_size

    @property
    def reading(self) -> ReadingSettings:
        """How the rows are read."""
        return ReadingSettings(**{each.name: getattr(self, each.name) for each in fields(ReadingSettings)})

    def identity(self) -> tuple[Any, ...]:
        """Return what decides the rows and their order: the streams and the settings of their epochs."""
        return self.streams, self.epoch_rows, self.sequence_length

    @property
    def splits(self) -> dict[str, RowStream]:
        """The training and validation streams by YAML key."""
        return self.streams | ({} if self.validation is None else {"data.validation": self.validation.stream(self)})


class PhaseDataConfig(_TrainingData):
    """Training data that replaces the data of the phase before. Exactly one of `folder`, `train` and `mix` is required."""

    cache: LocalPath | None = None
    """Local folder for the shards of a `folder` in a bucket. Default: `data.cache`."""
    sequence_length: Positive | None = None
    """Number of tokens in a row, as converted. Default: that of the phase before."""

    def after(self, before: DataConfig, cache: str) -> DataConfig:
        """Return the phase's data: what this section doesn't set is as in the phase before.

        `cache` is the run's own, for a `folder` without one.
        """
        own = {name: getattr(self, name) for name in type(self).model_fields}
        own["cache"] = self.cache or (DEFAULT_CACHE if self.folder is None else cache)
        own["sequence_length"] = self.sequence_length or before.sequence_length
        return before.model_copy(update={**own, "validation": None, "start_at": Duration(0, "ba")})


def expand_folder(content: Any) -> Any:
    """Return a pretraining YAML's content with the keys that `data.folder` implies: the streams and `tokenizer`.

    Explicit keys are kept, including `validation: null`; `data_problems` reports those that contradict `data.folder`.
    The `data` sections of phases get their stream.
    """
    content, data = _expand_phases(content), _section(content, "data")
    if not isinstance(folder := data.get("folder"), str):
        return content
    expanded, cache = dict(data), data.get("cache", DEFAULT_CACHE)
    if data.get("mix") is None and data.get("train") is None:
        expanded["train"] = _split_of(folder, cache, "train")
    expanded.setdefault("validation", _split_of(folder, cache, "validation"))
    tokenizer = content.get("tokenizer")
    tokenizer = join(folder.rstrip("/"), "tokenizer") if tokenizer is None else tokenizer
    return {**content, "tokenizer": tokenizer, "data": expanded}


def _expand_phases(content: Any) -> Any:
    objective, cache = _section(content, "objective"), _section(content, "data").get("cache", DEFAULT_CACHE)
    if not isinstance(phases := objective.get("phases"), list):
        return content
    expanded = list[Any]()
    for phase in phases:
        data = _section(phase, "data")
        if isinstance(folder := data.get("folder"), str) and not (data.get("train") or data.get("mix")):
            phase = {**phase, "data": {**data, "train": _split_of(folder, data.get("cache") or cache, "train")}}
        expanded.append(phase)
    return {**content, "objective": {**objective, "phases": expanded}}


def _section(content: Any, name: str) -> dict[str, Any]:
    section = content.get(name) if isinstance(content, dict) else None
    return section if isinstance(section, dict) else {}


def _split_of(folder: str, cache: object, split: str) -> dict[str, Any]:
    remote = join(folder.rstrip("/"), split)
    if not is_remote(folder):
        return {"local": remote, "remote": None}
    return {"local": f"{cache}/{basename(folder.rstrip('/'))}/{split}", "remote": remote}


def data_problems(data: DataConfig, global_batch_size: int, later: Sequence[PhaseDataConfig] = ()) -> KeyProblems:
    """Report invalid streams, and keys without effect: also not on the data of `later` phases."""
    if data.folder is not None and (contradictions := list(_folder_contradictions(data, data.folder))):
        yield from contradictions
        return
    if all(each.folder is None for each in (data, *later)) and not data.is_default("cache"):
        yield ["data.cache", "data.folder"], "has no effect without data.folder"
    if (data.train is None) == (data.mix is None):
        message = "expected exactly one of data.train (one dataset) and data.mix (several)"
        got = "neither" if data.mix is None else "both; `data.train: null` removes the value from `defaults:`"
        yield ["data.mix", "data.train"], f"{message}; got {got}"
        return
    if data.mix is None and data.epoch_rows is not None:
        yield ["data.epoch_rows", "data.mix"], "has no effect without data.mix"
    elif data.epoch_rows is not None and data.epoch_rows < global_batch_size:
        yield ["data.epoch_rows", "global_batch_size"], f"expected at least global_batch_size ({global_batch_size})"
    if data.mix is not None and abs((total := sum(stream.proportion for stream in data.mix.values())) - 1) > 1e-6:
        shares = " + ".join(f"{stream.proportion:g}" for stream in data.mix.values())
        yield ["data.mix"], f"expected proportions that add up to 1; got {shares} = {total:g}"
    yield from _folder_problems(data)
    if not any(stream.remote is not None for each in (data, *later) for stream in each.streams.values()):
        where = "data.train.remote" if data.mix is None else "a remote in data.mix"
        # A YAML may set a limit in case its data.folder is in a bucket.
        names = ["predownload", *(["cache_limit"] if data.folder is None else [])]
        yield from data.require_defaults(names, "data", list(data.streams), f"has no effect without {where}")
    yield from cache_limit_problems(data, data.streams)
    if data.start_at.unit not in ("ba", "sp", "tok"):
        yield ["data.start_at"], "expected a time in batches (ba), rows (sp) or tokens (tok)"


def cache_limit_problems(data: DataConfig, streams: Mapping[str, RowStream]) -> KeyProblems:
    """Report streams without a remote beside some with one. `streams` are those of `data`, by their keys in the YAML."""
    local = [key for key, stream in streams.items() if stream.remote is None]
    for key in local if data.cache_limit is not None and len(local) < len(streams) else ():
        # Streaming would delete shards even if it could not download them again.
        message = f"needs a remote for {key}, from which deleted shards can be downloaded again"
        yield ["data.cache_limit", key], message


def _folder_contradictions(data: DataConfig, folder: str) -> KeyProblems:
    splits = {split: _split_of(folder, data.cache, split) for split in ("train", "validation")}
    others = [split for split in splits if getattr(data, split) not in (None, StreamConfig(**splits[split]))]
    for name in others if data.mix is None else ["mix"]:
        message = f"can't be given beside data.folder: {folder}; `data.folder: null` removes the value from `defaults:`"
        yield [f"data.{name}", "data.folder"], message


def _folder_problems(data: DataConfig) -> KeyProblems:
    """Report folders that are used twice: shards of different splits and streams have the same names."""
    folders: dict[str, str] = {}
    for key, stream in data.splits.items():
        folder = normpath(stream.local)
        if folder in folders:
            yield [f"{key}.local", folders[folder]], f"expected another folder than {folders[folder]}"
        elif stream.remote is not None and normpath(stream.remote) == folder:
            yield [f"{key}.remote", f"{key}.local"], "is the local folder too: remove this key"
        folders.setdefault(folder, f"{key}.local")
