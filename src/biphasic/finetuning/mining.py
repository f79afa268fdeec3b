"""Mine hard negatives for a retrieval set: documents that a model finds similar to a query but that are not relevant."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from composer.utils import dist
from torch import Tensor

from biphasic.devices import rank_device, supports_bf16
from biphasic.downstream.prepare import read_finished
from biphasic.downstream.task_folder import TaskFolder
from biphasic.downstream.writer import SCHEMAS, STARTED, TASK_RECORD
from biphasic.errors import UserError
from biphasic.evaluation.blocks import embed_blocks, from_first_rank, local_model
from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.search import ExactTopK
from biphasic.finetuning.retrieval import titled_texts
from biphasic.grouping import groups_up_to
from biphasic.model.backbone import model_fingerprint
from biphasic.model.encoder import load_embedder
from biphasic.ranks import print_once
from biphasic.storage import is_remote, json_bytes, open_store

_WRITE_ROWS, _PAIRS_AT_ONCE = 1000, 1 << 14


class _Pool:
    """The training pairs of a set and its documents: the distinct positives, then the other texts of the corpus.

    Pair i is `queries[query_of[i]]` with `documents[positive_of[i]]`. `files` are hashes of the files with the texts.
    """

    def __init__(self, source: TaskFolder):
        pairs = source.read("train", "pairs")
        tables = ["train", *(["corpus"] if "corpus" in source.record["rows"] else [])]
        corpus = source.read("corpus", "corpus") if tables[1:] else {"_id": [], "text": []}
        texts = titled_texts(corpus)
        self.queries = list(dict.fromkeys(pairs["query"]))
        self.positives = len(set(pairs["positive"]))
        self.documents = list(dict.fromkeys([*pairs["positive"], *texts]))
        self.files = [source.content_hash(table) for table in tables]
        self.query_of, self.positive_of = (
            np.array([numbers[text] for text in pairs[column]])
            for column, texts in (("query", self.queries), ("positive", self.documents))
            for numbers in [{text: number for number, text in enumerate(texts)}]
        )
        self._relevant: dict[str, set[str]] = {}
        judged = _judged_texts(source, dict(zip(corpus["_id"], texts, strict=True)))
        for query, document in chain(zip(pairs["query"], pairs["positive"], strict=True), judged):
            self._relevant.setdefault(" ".join(query.split()), set()).add(document)

    def is_relevant(self, query: int, document: int) -> bool:
        """Return whether a document is relevant to a query, or its words contain those of one that is, or the reverse."""
        text, relevant = self.documents[document], self._relevant[" ".join(self.queries[query].split())]
        words, others = _words(text), filter(str.strip, map(_words, relevant))
        return text in relevant or any(words.strip() and (words in other or other in words) for other in others)


def _judged_texts(source: TaskFolder, documents: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the texts of each query and document that a judgment of at least the set's `min_score` names."""
    tables = [table for table in source.record["rows"] if table.startswith("qrels/")]
    queries = source.read("queries", "queries") if tables else {"_id": [], "text": []}
    query_texts = dict(zip(queries["_id"], queries["text"], strict=True))
    min_score = source.record.get("settings", {}).get("min_score", 1)
    for query, document, score in chain.from_iterable(
        zip(*source.read(t, "qrels").values(), strict=True) for t in tables
    ):
        if score >= min_score and query in query_texts and document in documents:
            yield query_texts[query], documents[document]


@lru_cache(maxsize=1 << 16)
def _words(text: str) -> str:
    """Return the words of a text, each between spaces, for comparison."""
    return " ".join(["", *re.findall(r"\w+", text.casefold()), ""])


def mine(
    model: str, task_folder: str, out: str, cache: str,
    count: int = 7, depth: int = 100, below: float = 0.95,
) -> dict[str, Any]:  # fmt: skip
    """Write a copy of a retrieval set whose training pairs have mined negatives, and return its record.

    All ranks must call this together. The result doesn't depend on their number. Embeddings are stored in the folder
    `cache`, so that a call after an interruption resumes. A finished set is not mined again. `biphasic mine --help`
    describes the other arguments; of a query's positives, the one with the lowest score counts for `below`.

    Raises:
        UserError: the set or the model can't be used, no pair gets a negative, or `out` holds something else.
    """
    limits = {"count": count, "depth": depth, "below": below}
    if depth < count:
        raise UserError(f"--depth: expected at least --count ({count}); got {depth}")
    if not is_remote(out) and Path(out).resolve() == Path(task_folder).resolve():
        raise UserError(f"OUT {out}: is TASK_FOLDER, which is kept; choose another folder")
    source = TaskFolder(task_folder, cache, "retrieval")
    pool = _Pool(source)
    # The timeout is a day, because the other ranks wait while rank 0 writes.
    dist.initialize_dist(rank_device(), timeout=86_400.0)
    embedder = _load(model, Path(cache))
    tables = {table: source.content_hash(table) for table in source.record["rows"]}
    settings = {**limits, "model": embedder.revision, "embedding": embedder.settings, "tables": tables}
    settings = json.loads(json.dumps(settings))
    if (record := from_first_rank(lambda: read_finished(out, settings))) is None:
        print_once(f"mining for {len(pool.queries):,} queries among {len(pool.documents):,} documents into {out}")
        mined = _mine(embedder, pool, settings, Path(cache))
        cut = sum(dist.all_gather_object(embedder.cut))
        about = {"model": model, "task_folder": task_folder, "texts_cut": cut}
        record = from_first_rank(lambda: _write(source, out, pool, mined, about, settings))
    return record


def _load(path: str, cache: Path) -> EncoderEmbedder:
    """Load an encoder on this rank's device; the revision is a hash of everything that decides its embeddings."""
    local = local_model(path, cache)
    encoder = load_embedder(local)
    rank_device().module_to_device(encoder.backbone)
    embedder = EncoderEmbedder(encoder, path, "", supports_bf16())
    embedder.revision = embedder.digest(model_fingerprint(local, None))[:16]
    return embedder


def _mine(
    embedder: EncoderEmbedder, pool: _Pool, settings: dict[str, Any], cache: Path
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Return the pairs' scores, and the numbers and the scores of each query's negatives."""
    prompts, device = embedder.sentence_settings.prompts, embedder.device

    def blocks(role: str, texts: list[str]) -> Iterator[tuple[int, np.ndarray]]:
        prompt = prompts.get(role, "")
        key = {"texts": f"{role} of training pairs", "files": pool.files, "prompt": prompt}

        def prompted(first: int, end: int) -> list[str]:
            return [prompt + text for text in texts[first:end]]

        return embed_blocks(embedder, prompted, len(texts), key, role, cache, sys.maxsize)

    documents = partial(blocks, "document", pool.documents)
    queries = _gather(blocks("query", pool.queries), len(pool.queries)).to(device)
    positives = _gather(documents(), pool.positives).to(device)
    is_cosine = embedder.sentence_settings.similarity == "cosine"
    exact = partial(F.normalize, dim=1) if is_cosine else Tensor.contiguous
    pair_scores = _similarities(exact(queries.double()), exact(positives.double()), pool.query_of, pool.positive_of)
    # As in NV-Retriever (Moreira et al., 2024), but also below a negative score.
    limits = pair_scores - pair_scores.abs() * (1 - settings["below"])
    ceilings = torch.full((len(queries),), torch.inf, device=device)
    ceilings.scatter_reduce_(0, torch.from_numpy(pool.query_of).to(device), limits, "amin")
    nearest = ExactTopK(queries, settings["depth"], "cosine" if is_cosine else "dot", ceilings=ceilings)
    for first, rows in documents():
        nearest.add(torch.from_numpy(np.array(rows)), first)
    if dist.get_world_size() > 1:
        nearest.merge(lambda best: [part.to(best.device) for part in dist.all_gather_object(best.cpu())])
    scores, positions = (part.cpu().numpy() for part in nearest.result())

    negatives, negative_scores = list[list[int]](), list[list[float]]()
    for query, found in enumerate(positions.tolist()):
        places = (at for at, document in enumerate(found) if document >= 0 and not pool.is_relevant(query, document))
        chosen = list(islice(places, settings["count"]))
        negatives.append(positions[query, chosen].tolist())
        negative_scores.append(scores[query, chosen].tolist())
    return pair_scores.tolist(), negatives, negative_scores


def _gather(blocks: Iterable[tuple[int, np.ndarray]], count: int) -> Tensor:
    """Return the first `count` embeddings of all ranks' blocks, fp32 [count, width]. All blocks are computed."""
    local = [(first, np.array(rows[: count - first])) for first, rows in blocks if first < count]
    parts = [part for rank in dist.all_gather_object(local) for part in rank]
    return torch.from_numpy(np.concatenate([rows for _, rows in sorted(parts, key=lambda part: part[0])]))


def _similarities(left: Tensor, right: Tensor, lefts: np.ndarray, rights: np.ndarray) -> Tensor:
    """Return the dot products of `left[lefts[i]]` and `right[rights[i]]`, fp32 [i]."""
    parts = [torch.empty(0, device=left.device)]
    for first in range(0, len(lefts), _PAIRS_AT_ONCE):
        at = slice(first, first + _PAIRS_AT_ONCE)
        parts.append((left[lefts[at]] * right[rights[at]]).sum(1).float())
    return torch.cat(parts)


def _write(
    source: TaskFolder, out: str, pool: _Pool, mined: Any, about: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Write the tables and, last, the record, which is returned. `mined` is the result of `_mine`."""
    pair_scores, negatives, scores = mined
    counts = [len(negatives[query]) for query in pool.query_of]
    kept = [pair for pair, count in enumerate(counts) if count]
    if not kept:
        raise UserError(f"{source.path}: no pair gets a negative: all documents are relevant or "
                        "above the share of the positives' score (--below)")  # fmt: skip

    def row(pair: int) -> dict[str, Any]:
        query = pool.query_of[pair]
        return {
            "query": pool.queries[query],
            "positive": pool.documents[pool.positive_of[pair]],
            "negatives": [pool.documents[document] for document in negatives[query]],
            "scores": [pair_scores[pair], *scores[query]],
        }

    store = open_store(out)
    scratch = store.scratch()
    try:
        store.remove(file for file in store.list() if file.endswith(".parquet"))
        store.write(STARTED, b"`biphasic mine` may remove the tables beside this file\n")
        with pq.ParquetWriter(scratch / "train.parquet", SCHEMAS["scored_pairs"], compression="zstd") as writer:
            for group in groups_up_to(_WRITE_ROWS, kept):
                writer.write_table(pa.Table.from_pylist([row(pair) for pair in group], SCHEMAS["scored_pairs"]))
        store.move(scratch / "train.parquet", "train.parquet")
        for table in source.record["rows"]:
            if table != "train":
                store.upload(source.file(table), f"{table}.parquet")
        summary = {
            **about,
            "pairs": len(kept),
            "negatives": sum(counts),
            "fewer": sum(0 < count < settings["count"] for count in counts),
            "without": len(counts) - len(kept),
        }
        rows = {**source.record["rows"], "train": len(kept)}
        record = {**source.record, "rows": rows, "mined": summary, "settings": settings}
        store.write(TASK_RECORD, json_bytes(record))
        store.remove([STARTED])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return record
