"""`job: evaluate`: an encoder by mteb's rules, beside BM25 and vectors that know nothing."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mteb
import torch
from composer.utils import dist, get_device

from biphasic.amounts import bytes_of, in_time
from biphasic.checkpointing.fetched import fetched
from biphasic.config.errors import UserError
from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.places import folder_of
from biphasic.evaluation import ranks
from biphasic.evaluation.embedder import EncoderEmbedder, RandomEmbedder
from biphasic.evaluation.embedding_cache import EmbeddingCache
from biphasic.evaluation.retriever import Retriever
from biphasic.evaluation.scoring import Scores, bm25, score
from biphasic.evaluation.sets import judged_only
from biphasic.evaluation.table import table
from biphasic.evaluation.tasks import Planned, plan_tasks
from biphasic.model.checkpoint import is_checkpoint
from biphasic.model.encoder import load_encoder
from biphasic.model.mark import model_mark
from biphasic.model.pooling import Pooling
from biphasic.storage import as_bytes, is_remote, store

_DAY = 86_400.0
"""Seconds that ranks wait for each other: BM25 runs on the first one alone."""


@dataclass(frozen=True)
class _System:
    """What is scored: its name in tables, and what decides its numbers.

    `baselines` is where mteb's files of a baseline go; None: it is the model.
    """

    name: str
    mark: str
    baselines: Path | None
    make: Callable[[], Any]
    settings: Mapping[str, Any]


def run(config: EvaluateConfig) -> Path:
    """Score the model and the baselines; what is recorded already is left alone.

    Returns:
        The run's folder: `scores.md`, `scores.json`, and mteb's own files in `results/` (official tasks), `local/results/`
        (judged documents, own sets) and `baselines/results/`.

    Raises:
        UserError: model or data can't be used.
    """
    _use_all_gpus()
    planned = plan_tasks(config)
    if config.precision == "amp_bf16" and not torch.cuda.is_available():
        raise UserError("precision: amp_bf16 needs a GPU, and there is none here: precision=auto takes fp32")
    dist.initialize_dist(get_device(None), timeout=_DAY)
    folder = folder_of(config)
    _say(f"evaluating {config.model.path} on {', '.join(one.name for one in planned)}: mteb's results and {folder}")
    cache = EmbeddingCache(Path(config.cache), bytes_of(config.cache_limit))
    systems = [_model(config, cache), *_baselines(config, cache)]
    records = []
    for one in planned:
        data = _Data(one)
        for documents in config.documents:
            records += _score_all(one, documents, systems, folder, data)
        data.free()
    lines = table(records)
    if dist.get_global_rank() == 0:
        store(str(folder)).write("scores.md", "\n".join([f"# {config.run_name}\n", *lines, ""]).encode())
        store(str(folder)).write("scores.json", as_bytes({"settings": systems[0].settings, "records": records}))
    _say("\n".join(lines))
    dist.barrier()
    return folder


class _Data:
    """A task's data, loaded when it is first asked for; and the same over its judged documents."""

    def __init__(self, planned: Planned):
        self._planned = planned

    @functools.cached_property
    def full(self) -> Any:
        """As mteb has it."""
        return self._planned.load()

    @functools.cached_property
    def judged(self) -> Any:
        """See `judged_only`."""
        return judged_only(self.full)

    def free(self) -> None:
        """Give the memory back."""
        if "full" in self.__dict__ and self.full.data_loaded:
            self.full.unload_data()


def _score_all(one: Planned, documents: str, systems: list[_System], folder: Path, data: _Data) -> list[dict[str, Any]]:
    """A task's records, of all systems; the task is loaded when the first one is missing."""
    found = []
    for system in systems:
        if not one.retrieval and (documents == "judged" or system.baselines):
            continue  # only retrieval has documents
        about = {"system": system.mark, "task": one.name, "documents": documents, "data": one.mark,
                 "mteb": importlib.metadata.version("mteb")}  # fmt: skip
        name = f"records/{one.name}-{documents}/{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}.json"
        record = ranks.from_first(lambda name=name: _read(folder, name))
        if record is None:
            task = data.judged if documents == "judged" else data.full
            start = time.monotonic()
            rows = _score(system, task, folder / ("" if one.official and documents == "full" else "local"))
            record = {
                "system": system.name,
                "scores": rows,
                "about": {**about, "source": one.source, "settings": dict(system.settings)},
                "seconds": time.monotonic() - start,
            }
            if dist.get_global_rank() == 0:
                store(str(folder)).write(name, as_bytes(record))
            for row in rows:
                _say(f"{row['task']} {row['split']}, {system.name}: {row['metric']} {row['value']:.4f} "
                     f"({in_time(record['seconds'])})")  # fmt: skip
        found.append(record)
    return found


def _score(system: _System, task: Any, folder: Path) -> list[dict[str, Any]]:
    """The scores on every rank, and mteb's own files."""
    rows: list[Scores] = []
    made = system.make()
    if isinstance(made, Retriever) or dist.get_global_rank() == 0:
        rows, result = score(made, task)
        if dist.get_global_rank() == 0:
            place = mteb.ResultCache(system.baselines or folder)
            place.save_to_cache(result, made.mteb_model_meta, encode_kwargs=dict(system.settings))  # pyright: ignore[reportArgumentType]
    plain = [{key: value for key, value in asdict(row).items() if key != "by_query"} for row in rows]
    return ranks.from_first(lambda: plain)


def _model(config: EvaluateConfig, cache: EmbeddingCache) -> _System:
    given = config.model
    path = _here(given.path, Path(config.cache) / "models")
    encoder = load_encoder(path, given.trust_remote_code, given.revision)
    if encoder.reader.sentences.pooling is None and not is_checkpoint(path):
        if given.pooling is None:
            raise UserError(
                f"model {given.path}: has no modules.json, which says how it pools (sentence-transformers' format): "
                "model.pooling=mean, cls, lasttoken or max says it"
            )
        encoder.choose_pooling(Pooling(given.pooling))
    elif given.pooling is not None and given.pooling != encoder.pooling.mode:
        raise UserError(f"model.pooling: {given.pooling}, but the model's own files say {encoder.pooling.mode}")
    half = torch.cuda.is_available() if config.precision == "auto" else config.precision == "amp_bf16"
    get_device(None).module_to_device(encoder.backbone)
    at_once = None if config.tokens_at_once == "auto" else config.tokens_at_once
    local = is_remote(given.path) or Path(given.path).exists()
    name = given.name or (f"biphasic/{config.run_name}" if local else given.path)
    embedder = EncoderEmbedder(encoder, name, "", half, at_once)
    settings = embedder.settings
    mark = model_mark(path, given.revision)
    # A hub's commit is the revision that mteb's results go by; of a folder it is what decides the numbers.
    digest = hashlib.sha256(json.dumps([mark, settings], sort_keys=True).encode()).hexdigest()
    embedder.revision = digest[:16] if local or mark == "None" else mark
    about = {"model": given.path, "revision": embedder.revision, **settings}
    retriever = Retriever(embedder, cache)
    return _System(name, digest, None, lambda: retriever, about)


def _baselines(config: EvaluateConfig, cache: EmbeddingCache) -> list[_System]:
    folder = folder_of(config) / "baselines"
    random = Retriever(RandomEmbedder(), cache)
    known = {
        "bm25": _System("BM25", f"bm25s {importlib.metadata.version('bm25s')}", folder, bm25, {}),
        "random": _System("random", RandomEmbedder.revision, folder, lambda: random, {}),
    }
    return [known[name] for name in config.baselines]


def _here(path: str, folder: Path) -> str:
    """The model on this machine, brought there by its first rank."""
    if is_remote(path):
        folder /= hashlib.sha256(path.encode()).hexdigest()[:16]  # checkpoints of two runs have the same names
    # Asked again, each rank would compare the files with their hashes again.
    found = fetched(path, folder) if dist.get_local_rank() == 0 else path
    dist.barrier()
    return ranks.from_first(lambda: found)


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _use_all_gpus() -> None:
    """Started with python on a machine with several GPUs, start again with a process for each."""
    count = torch.cuda.device_count()
    if "WORLD_SIZE" not in os.environ and count > 1:
        command = [sys.executable, "-m", "composer.cli", "-n", str(count), *sys.argv]
        sys.stdout.flush()
        os.execv(command[0], command)


def _say(line: str) -> None:
    if dist.get_global_rank() == 0:
        print(line, flush=True)
