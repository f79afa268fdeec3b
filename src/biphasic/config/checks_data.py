"""Checks of what makes data: conversions and downstream sets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from biphasic.config.base import Found, changed
from biphasic.config.conversion import ConvertConfig
from biphasic.config.tasks import DatasetConfig, RetrievalData, SplitTask, TableConfig, TasksConfig

_OF_KIND = {"documents": ("window",), "stream": ("shortest",), "single": ("longer",)}
"""Keys of `segments` that mean something for one kind alone."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def conversion_problems(config: ConvertConfig) -> Found:
    """What can't be in a conversion."""
    segments = config.segments
    if segments.kind == "stream" and 2 * segments.shortest >= config.sequence_length:
        message = f"expected less than half of sequence_length ({config.sequence_length}); got {segments.shortest}"
        yield ["segments.shortest", "sequence_length"], message
    for kind, keys in _OF_KIND.items():
        for key in keys:
            if kind != segments.kind and changed(segments, key):
                yield [f"segments.{key}", "segments.kind"], f"has no effect with kind: {segments.kind}"
    for number, wanted in enumerate(config.filters):
        if all(getattr(wanted, name) is None for name in ("min", "max", "any_of", "none_of")):
            yield [f"filters.{number}"], "keeps everything; expected one of min, max, any_of, none_of"
        if wanted.min is not None and wanted.max is not None and wanted.min > wanted.max:
            yield [f"filters.{number}.min", f"filters.{number}.max"], "is above max, so nothing would be kept"
    if config.cluster.shared_folder and config.cluster.address is None:
        yield ["cluster.shared_folder", "cluster.address"], "has no effect on one machine: cluster.address is null"


def tasks_problems(config: TasksConfig) -> Found:
    """What can't be in a YAML of downstream sets."""
    for name, task in config.tasks.items():
        above = f"tasks.{name}"
        if not _NAME.fullmatch(name):
            yield [above], "expected a name of letters, digits, `.`, `_` and `-`"
        for key, place, splits in _datasets(above, task):
            if place.path is None and place.files is None:
                yield [key], "expected `path` (a hub id or a folder), `files`, or both"
            elif place.path is None and (place.name is not None or place.revision is not None):
                wrong = "name" if place.name is not None else "revision"
                yield [f"{key}.{wrong}", f"{key}.path"], "has no effect without `path`"
            files = dict.fromkeys(splits) if place.files is None else place.files
            for split in splits:
                if split not in files:
                    yield [f"{key}.files"], f"has no files for the split {split!r} (it has: {', '.join(files)})"
        if isinstance(task, RetrievalData):
            for split, qrels in task.qrels.items():
                if qrels.list_column is not None and qrels.score_column is not None:
                    key = f"{above}.qrels.{split}"
                    yield [f"{key}.list_column", f"{key}.score_column"], "expected score_column: null beside it"


def _datasets(above: str, task: SplitTask | RetrievalData) -> Iterator[tuple[str, DatasetConfig, list[str]]]:
    """All datasets that a task reads: the key, the dataset, and the splits."""
    if not isinstance(task, RetrievalData):
        yield f"{above}.source", task.source, list(task.splits.values())
        return
    tables: dict[str, TableConfig] = {"corpus": task.corpus}
    tables |= {} if task.train is None else {"train": task.train}
    tables |= {f"queries.{number}": table for number, table in enumerate(task.queries)}
    tables |= {f"qrels.{split}": table for split, table in task.qrels.items()}
    for key, table in tables.items():
        yield f"{above}.{key}", table, [table.split]
