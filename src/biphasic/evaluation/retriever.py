"""Wrap a model for mteb: exact search over embeddings that the ranks compute together and cache on disk."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from mteb._create_dataloaders import _retrieval_texts
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.abs_encoder import AbsEncoder, get_prompt_name
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType
from torch import Tensor

from biphasic.errors import UserError
from biphasic.evaluation.blocks import corpus_folder, from_first_rank, progress_bar, stored
from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.search import ExactTopK
from biphasic.evaluation.sets import JUDGED

BLOCK, SMALL_BLOCK = 4096, 256
"""Number of documents in a file of embeddings. An interrupted job loses at most one file per rank."""


class Retriever(AbsEncoder):
    """Gives mteb access to an `EncoderEmbedder`: `index` and `search` for retrieval, `encode` for all other tasks.

    All ranks must make the same calls together; each rank embeds its share. Embeddings of documents are stored in the
    folder `cache`, at most `limit` bytes; without a folder, none are.
    """

    def __init__(self, embedder: EncoderEmbedder, cache: Path | None = None, limit: int = 0):
        self.embedder, self._cache, self._limit = embedder, cache, limit
        self._corpus: Any = None
        # sentence-transformers defines these two prompts for every model, so mteb never uses the default prompt or `passage`
        # for queries and documents. mteb warns about unknown names and ignores them.
        prompts = {"query": "", "document": "", **embedder.sentence_settings.prompts}
        self._prompts = self.validate_task_to_prompt_name(prompts, raise_for_invalid_keys=False)[0] or {}
        cosine = embedder.sentence_settings.similarity == "cosine"
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": embedder.name,
                "revision": embedder.revision,
                "embed_dim": embedder.width,
                "max_tokens": embedder.settings["max_length"],
                "use_instructions": any(embedder.sentence_settings.prompts.values()),
                "similarity_fn_name": ScoringFunction.COSINE if cosine else ScoringFunction.DOT_PRODUCT,
                "framework": ["PyTorch"],
            }
        )

    def index(self, corpus: Any, **kwargs: Any) -> None:
        """Set the documents to search."""
        self._corpus = corpus

    def search(
        self,
        queries: Any,
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> dict[str, dict[str, float]]:
        """Return the best documents for each query with their scores, as in mteb's `SearchProtocol`.

        Raises a UserError if an embedding is not finite, or the cache's folder can't be written to.
        """
        ids, query_ids, title = self._corpus["id"][:], queries["id"][:], f"{task_metadata.name} {hf_split}"
        texts = _retrieval_texts(queries, PromptType.query)
        embedded = self._embed_shared(texts, self._prompt(task_metadata, PromptType.query), f"{title}: queries")
        sought = torch.from_numpy(embedded).to(self.embedder.device)
        nearest = ExactTopK(sought, top_k, self.embedder.sentence_settings.similarity)
        mask = None if top_ranked is None else _candidate_mask(top_ranked, query_ids, ids)
        prompt = self._prompt(task_metadata, PromptType.document)
        for first, embeddings in self._embed_documents(self._corpus, prompt, f"{title}: documents"):
            rows = torch.from_numpy(np.array(embeddings))
            nearest.add(rows, first, None if mask is None else mask[:, first : first + len(rows)])
        if dist.get_world_size() > 1:
            nearest.merge(lambda best: [part.to(best.device) for part in dist.all_gather_object(best.cpu())])
        return {query: dict(documents) for query, documents in nearest.ranking(query_ids, ids).items()}

    def encode(
        self, inputs: Any, *, task_metadata: TaskMetadata, hf_split: str, prompt_type: Any = None, **kwargs: Any
    ) -> np.ndarray:
        """Return embeddings of mteb's batches of texts, fp32 [texts, width]."""
        texts = [text for batch in inputs for text in batch["text"]]
        role = "texts" if prompt_type is None else str(prompt_type.value)
        title = f"{task_metadata.name} {hf_split}: {role}"
        return self._embed_shared(texts, self._prompt(task_metadata, prompt_type), title)

    def _prompt(self, task: TaskMetadata, role: PromptType | None) -> str:
        """Return the prompt for an input that sentence-transformers and mteb together would choose."""
        original = task.model_copy(update={"name": task.name.removesuffix(JUDGED)})
        settings = self.embedder.sentence_settings
        name = get_prompt_name(self._prompts, original, role) or settings.default_prompt
        return "" if name is None else settings.prompts.get(name, "")

    def _embed_shared(self, texts: Sequence[str], prompt: str, title: str) -> np.ndarray:
        """Return embeddings of all texts on every rank. All ranks must pass the same texts."""
        rank, world = dist.get_global_rank(), dist.get_world_size()
        # Sorted by length, so that all ranks have about the same amount of work.
        order = sorted(range(len(texts)), key=lambda index: (len(texts[index]), index))
        local = order[rank::world]
        prompted = [prompt + texts[index] for index in local]
        with progress_bar(len(texts), title) as bar:
            embedded = self.embedder.embed(prompted, lambda done: bar.update(done * world))
        shares = dist.all_gather_object((_hash(list(texts)), local, embedded))
        if len({text_hash for text_hash, *_ in shares}) > 1:
            raise UserError(f"{title}: the ranks were given different texts; run this task with one process")
        embeddings = np.zeros((len(texts), self.embedder.width), np.float32)
        for _, rows, part in shares:
            embeddings[rows] = part
        return embeddings

    def _embed_documents(self, corpus: Any, prompt: str, title: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first document's position and the embeddings, fp32 [documents, width], of this rank's blocks."""
        embedder, count, rank, world = self.embedder, len(corpus), dist.get_global_rank(), dist.get_world_size()
        # Not by the number of ranks, so that another number finds the files. Every rank has some of a small corpus.
        block, folder = SMALL_BLOCK if count < 1 << 16 else BLOCK, None
        if self._cache is not None:
            key = {"revision": embedder.revision, "settings": dict(embedder.settings), "prompt": prompt, "block": block}
            key["corpus"] = from_first_rank(lambda: _corpus_hash(corpus))
            folder = corpus_folder(self._cache, self._limit, key, 4 * count * embedder.width)
        with progress_bar(count, title) as bar:

            def embed(first: int, end: int) -> tuple[np.ndarray, int]:
                texts = [prompt + text for text in document_texts(corpus[first:end])]
                return embedder.embed(texts, lambda done: bar.update(done * world)), embedder.cut - before

            finished = 0
            for number in range(rank, -(-count // block), world):
                first, end = number * block, min((number + 1) * block, count)
                file = None if folder is None else folder / f"{number:06d}.npy"
                before = embedder.cut
                embeddings, cut = stored(file, (end - first, embedder.width), partial(embed, first, end))
                embedder.cut = before + cut
                yield first, embeddings
                finished += end - first
                bar.update(finished * world - bar.n)  # stored embeddings, which `embed` doesn't count


def document_texts(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return documents as mteb passes them to models: the title, if there is one, a space and the text.

    Raises a UserError if a document has no text.
    """
    texts = columns["text"]
    if not all(isinstance(text, str) for text in texts):
        raise UserError("the corpus has a document whose text is missing")
    titles = columns.get("title") or [None] * len(texts)
    return [f"{title or ''} {text}".strip() for title, text in zip(titles, texts, strict=True)]


def _corpus_hash(corpus: Any) -> str:
    parts = (corpus[first : first + 10_000] for first in range(0, len(corpus), 10_000))
    return _hash([_hash([columns.get(name) for name in ("id", "title", "text")]) for columns in parts])


def _hash(content: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _candidate_mask(top_ranked: Mapping[str, Sequence[str]], queries: list[str], ids: list[str]) -> Tensor:
    """Return the documents to rerank for each query, as bool [queries, documents]."""
    positions = {id: position for position, id in enumerate(ids)}
    mask = torch.zeros((len(queries), len(ids)), dtype=torch.bool)
    for row, query in enumerate(queries):
        mask[row, [positions[id] for id in top_ranked.get(query, ())]] = True
    return mask
