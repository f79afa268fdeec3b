"""Run `job: evaluate`: score an encoder by mteb's rules, together with BM25."""

import functools
import hashlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mteb
from composer.utils import dist

from biphasic.amounts import format_seconds
from biphasic.config.evaluate import EvaluateConfig
from biphasic.devices import rank_device, require_precision, supports_bf16, use_all_gpus
from biphasic.errors import UserError
from biphasic.evaluation.blocks import from_first_rank, local_model
from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.retriever import Retriever
from biphasic.evaluation.scoring import bm25, score, score_table
from biphasic.evaluation.search import query_columns, trec_run
from biphasic.evaluation.sets import judged_only
from biphasic.evaluation.tasks import PlannedTask, plan_tasks
from biphasic.model.checkpoint import is_checkpoint
from biphasic.model.encoder import load_embedder
from biphasic.model.hf_config import model_fingerprint
from biphasic.model.pooling import Pooling
from biphasic.ranks import is_first_rank, print_once
from biphasic.storage import is_remote, json_bytes, open_store, parquet_bytes

_BY_QUERY = ("by_query", "qrels", "ranking", "texts")
"""Fields of `SplitScores` that have files of their own."""


@dataclass(frozen=True)
class ScoredSystem:
    """A model or baseline to score."""

    name: str
    fingerprint: str
    """Fingerprint of everything that affects the scores."""
    results: Path | None
    """The folder for mteb's result files of a baseline; None for the model."""
    model: Any
    """The object that mteb scores."""
    settings: Mapping[str, Any]


def run(config: EvaluateConfig) -> Path:
    """Score the model and the baselines, and return the run's folder. Existing records are not computed again.

    mteb's own files are in `results/` (official tasks), `local/results/` (judged documents, local datasets) and
    `baselines/results/`. Raises a UserError if the model or the data can't be used.
    """
    use_all_gpus(sys.argv)
    tasks = plan_tasks(config)
    require_precision(config.precision)
    # The timeout is a day, because the other ranks wait while BM25 runs on rank 0.
    dist.initialize_dist(rank_device(), timeout=86_400.0)
    folder = config.run_folder
    names = ", ".join(task.name for task in tasks)
    print_once(f"evaluating {config.model.path} on {names}: mteb's results and {folder}")
    systems = [_model(config)]
    if config.baselines:
        fingerprint = f"bm25s {importlib.metadata.version('bm25s')}"
        systems.append(ScoredSystem("BM25", fingerprint, folder / "baselines", bm25(), {}))
    records = [record for task in tasks for record in _score_task(task, config.documents, systems, folder)]
    lines = score_table(records)
    if is_first_rank():
        store = open_store(str(folder))
        store.write("scores.md", "\n".join([f"# {config.run_name}\n", *lines, ""]).encode())
        store.write("scores.json", json_bytes({"settings": systems[0].settings, "records": records}))
    print_once("\n".join(lines))
    dist.barrier()
    return folder


def _score_task(
    task: PlannedTask, documents: Sequence[str], systems: list[ScoredSystem], folder: Path
) -> list[dict[str, Any]]:
    """Return the records of all systems. The task's data is loaded only if a record is missing."""
    full = functools.cache(task.load)
    judged = functools.cache(lambda: judged_only(full()))
    records = [
        _record(system, task, part, full if part == "full" else judged, folder)
        for part in documents
        for system in systems
        # Only tasks of retrieval and reranking have documents and baselines.
        if task.retrieval or (part == "full" and not system.results)
    ]
    if full.cache_info().currsize and full().data_loaded:
        full().unload_data()
    return records


def _record(
    system: ScoredSystem, task: PlannedTask, documents: str, load: Callable[[], Any], folder: Path
) -> dict[str, Any]:
    """Return a system's record for a task, scoring the task first if there is no record."""
    about = {"system": system.fingerprint, "task": task.name, "documents": documents, "data": task.fingerprint,
             "mteb": importlib.metadata.version("mteb"), **task.chosen}  # fmt: skip
    key = f"{task.name}-{documents}/{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}"
    name = f"records/{key}.json"
    if (recorded := from_first_rank(lambda: _read_record(folder / name))) is not None:
        return recorded
    mteb_task, start, record = load(), time.monotonic(), dict[str, Any]()
    # BM25 runs on the first rank only.
    is_embedded = isinstance(system.model, Retriever)
    before = system.model.embedder.cut if is_embedded else 0
    scored = score(system.model, mteb_task) if is_embedded or is_first_rank() else None
    cut = sum(dist.all_gather_object(system.model.embedder.cut - before if is_embedded else 0))
    if is_first_rank() and scored is not None:
        store = open_store(str(folder))
        results = folder if task.official and documents == "full" else folder / "local"
        cache = mteb.ResultCache(system.results or results)
        cache.save_to_cache(scored[1], system.model.mteb_model_meta, encode_kwargs=dict(system.settings))  # pyright: ignore[reportArgumentType]
        rows = []
        for split in scored[0]:
            row = {name: value for name, value in vars(split).items() if name not in _BY_QUERY}
            if split.ranking:
                row["ranking"] = f"rankings/{key}-{split.subset}-{split.split}.run.gz"
                store.write(row["ranking"], trec_run(split.ranking))
                row["by_query"] = f"rankings/{key}-{split.subset}-{split.split}.parquet"
                columns = query_columns(split.ranking, split.qrels, split.texts, {"ndcg_at_10": split.by_query})
                store.write(row["by_query"], parquet_bytes(columns))
            rows.append(row)
        seconds = time.monotonic() - start
        about |= {"source": task.source, "settings": dict(system.settings)}
        record = {"system": system.name, "scores": rows, "about": about, "seconds": seconds, "cut": cut}
        store.write(name, json_bytes(record))
        if cut:
            print_once(f"{task.name}, {system.name}: {cut:,} texts were longer than the model's maximum and were cut")
        for row in rows:
            value = f"{row['metric']} {row['value']:.4f}"
            print_once(f"{row['task']} {row['split']}, {system.name}: {value} ({format_seconds(seconds)})")
    return from_first_rank(lambda: record)


def _model(config: EvaluateConfig) -> ScoredSystem:
    model = config.model
    path = local_model(model.path, Path(config.cache))
    encoder = load_embedder(path, model.trust_remote_code, model.revision)
    if encoder.text_tokenizer.settings.pooling is None and not is_checkpoint(path):
        if model.pooling is None:
            problem = "has no modules.json (sentence-transformers' format), so its pooling is unknown"
            raise UserError(f"model {model.path}: {problem}: set model.pooling to mean, cls, lasttoken or max")
        encoder.pooling = Pooling(model.pooling)
    elif model.pooling is not None and model.pooling != encoder.pooling.mode:
        raise UserError(f"model.pooling: {model.pooling}, but the model's own files say {encoder.pooling.mode}")
    bf16 = supports_bf16() if config.precision == "auto" else config.precision == "amp_bf16"
    rank_device().module_to_device(encoder.backbone)
    is_local = is_remote(model.path) or Path(model.path).exists()
    name = model.name or (f"biphasic/{config.run_name}" if is_local else model.path)
    if (model.dimension or 0) > encoder.width:
        raise UserError(f"model.dimension: {model.dimension} is more than the model's width of {encoder.width}")
    embedder = EncoderEmbedder(encoder, name, "", bf16, model.dimension)
    fingerprint = model_fingerprint(path, model.revision, model.trust_remote_code)
    digest = hashlib.sha256(json.dumps([fingerprint, embedder.settings], sort_keys=True).encode()).hexdigest()
    # mteb stores results by revision: the hub's commit, or a hash of everything that affects the scores if the model is
    # local or its embeddings are truncated.
    embedder.revision = digest[:16] if is_local or model.dimension else fingerprint
    settings = {"model": model.path, "revision": embedder.revision, **embedder.settings}
    retriever = Retriever(embedder, Path(config.cache), config.cache_limit)
    return ScoredSystem(name, digest, None, retriever, settings)


def _read_record(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
