"""A model as mteb calls it: exact search over embeddings that are shared out among ranks and kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from tqdm import tqdm

from biphasic.config.errors import UserError
from biphasic.evaluation import ranks
from biphasic.evaluation.embedder import Embedder, named_prompts, prompt_of
from biphasic.evaluation.embedding_cache import Blocks, EmbeddingCache
from biphasic.evaluation.search import Nearest
from biphasic.evaluation.sets import JUDGED

BLOCK, SMALL_BLOCK = 4096, 256
"""Documents in a file of embeddings, and between two moments from which an interrupted evaluation goes on."""
_SMALL = 1 << 16
"""Documents of a corpus that is cut into small blocks, so that all ranks have some."""
_log = logging.getLogger(__name__)


class Retriever(AbsEncoder):
    """An `Embedder` for mteb: `index` and `search` for retrieval, `encode` for all other tasks.

    All ranks call the same at the same time; each embeds its share.

    Args:
        embedder: the model.
        cache: where documents' embeddings are kept; None: nowhere.
    """

    def __init__(self, embedder: Embedder, cache: EmbeddingCache | None = None):
        self.embedder, self._cache = embedder, cache
        self._corpus: Any = None
        # With prompts of other names mteb itself warns and passes them over.
        names = self.validate_task_to_prompt_name(named_prompts(embedder.sentences), raise_for_invalid_keys=False)[0]
        self._named = names or {}
        self.mteb_model_meta = _meta(embedder)

    def index(self, corpus: Any, **kwargs: Any) -> None:
        """Remember which documents will be searched."""
        self._corpus = corpus

    def search(
        self,
        queries: Any,
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> dict[str, dict[str, float]]:
        """The best documents of each query with their scores, as mteb's `SearchProtocol` has it.

        Raises:
            UserError: an embedding is not finite, or the cache's folder can't be written to.
        """
        corpus, ids = self._corpus, list(self._corpus["id"])
        asked, where = list(queries["id"]), f"{task_metadata.name} {hf_split}"
        texts = _retrieval_texts(queries, PromptType.query)
        sought = self._shared(texts, self._prompt(task_metadata, PromptType.query), f"{where}: queries")
        device = self.embedder.device
        nearest = Nearest(torch.from_numpy(sought).to(device), top_k, self.embedder.sentences.similarity)
        wanted = None if top_ranked is None else _wanted(top_ranked, asked, ids)
        prompt = self._prompt(task_metadata, PromptType.document)
        for first, embeddings in self._documents(corpus, prompt, f"{where}: documents"):
            rows = torch.from_numpy(np.array(embeddings))
            some = None if wanted is None else wanted[:, first : first + len(rows)]
            nearest.add(rows, first, some)
        if dist.get_world_size() > 1:
            nearest.merge(ranks.gathered)
        scores, places = (found.cpu() for found in nearest.result())
        return {
            query: {ids[place]: score for place, score in zip(*row, strict=True) if place >= 0}
            for query, *row in zip(asked, places.tolist(), scores.tolist(), strict=True)
        }

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Embeddings fp32 [texts, width] of mteb's batches of texts."""
        texts = [text for batch in inputs for text in batch["text"]]
        role = "texts" if prompt_type is None else str(prompt_type.value)
        return self._shared(texts, self._prompt(task_metadata, prompt_type), f"{task_metadata.name} {hf_split}: {role}")

    def _prompt(self, task: TaskMetadata, role: PromptType | None) -> str:
        whole = task.model_copy(update={"name": task.name.removesuffix(JUDGED)})
        return prompt_of(self.embedder.sentences, get_prompt_name(self._named, whole, role))

    def _shared(self, texts: Sequence[str], prompt: str, title: str) -> np.ndarray:
        """Embeddings of all texts on every rank; the texts have to be the same on all."""
        rank, world = dist.get_global_rank(), dist.get_world_size()
        # By length, so that all ranks have as much to do.
        order = sorted(range(len(texts)), key=lambda at: (len(texts[at]), at))
        mine = order[rank::world]
        found = np.zeros((len(texts), self.embedder.width), np.float32)
        with _bar(len(texts), title) as bar:
            found[mine] = self.embedder.embed([prompt + texts[at] for at in mine], lambda n: bar.update(n * world))
        _require_same(texts, title)
        return ranks.total(torch.from_numpy(found)).numpy()

    def _documents(self, corpus: Any, prompt: str, title: str) -> Iterator[tuple[int, np.ndarray]]:
        """This rank's blocks of the corpus: the first document's place, and embeddings fp32 [documents, width]."""
        rank, world, count = dist.get_global_rank(), dist.get_world_size(), len(corpus)
        block = SMALL_BLOCK if count < _SMALL else BLOCK
        with _bar(count, title) as bar, self._kept(corpus, prompt, block) as blocks:
            for number in range(rank, -(-count // block), world):
                first, end = number * block, min((number + 1) * block, count)
                found = blocks.get(number) if blocks else None
                if found is None or found.shape != (end - first, self.embedder.width):
                    texts = [prompt + text for text in document_texts(corpus[first:end])]
                    found = self.embedder.embed(texts, lambda n: bar.update(n * world))
                    if blocks:
                        blocks.put(number, found)
                else:
                    bar.update((end - first) * world)
                yield first, found
            if blocks and blocks.refused:
                _log.warning(
                    "%s: %d blocks of embeddings found no room in the cache (cache_limit, or the disk): when this is "
                    "interrupted, they are made again", title, blocks.refused,
                )  # fmt: skip

    def _kept(self, corpus: Any, prompt: str, block: int) -> AbstractContextManager[Blocks | None]:
        if self._cache is None:
            return nullcontext()
        key = {
            "revision": self.embedder.revision,
            "settings": dict(self.embedder.settings),
            "prompt": prompt,
            "corpus": ranks.from_first(lambda: corpus_hash(corpus)),
            "block": block,
        }
        return self._cache.blocks(key, 4 * len(corpus) * self.embedder.width)


def document_texts(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Documents as mteb has models read them: the title, where there is one, a space, and the text.

    Args:
        columns: `text`, and maybe `title`.

    Raises:
        UserError: a document is no text.
    """
    titles = columns.get("title") or [""] * len(columns["text"])
    if not all(isinstance(text, str) for text in columns["text"]):
        raise UserError("the corpus has a document whose text is missing")
    return [
        f"{title} {text}".strip() if title else text.strip()
        for title, text in zip(titles, columns["text"], strict=True)
    ]


def corpus_hash(corpus: Any) -> str:
    """Of ids and texts, in their order."""
    found = hashlib.blake2b(digest_size=16)
    for first in range(0, len(corpus), 10_000):
        columns = corpus[first : first + 10_000]
        for name in ("id", "title", "text"):
            found.update(json.dumps(columns.get(name)).encode())
    return found.hexdigest()


def _wanted(top_ranked: Mapping[str, Sequence[str]], queries: list[str], ids: list[str]) -> Tensor:
    """Which documents are ranked again for which query: bool [queries, documents]."""
    places = {id: at for at, id in enumerate(ids)}
    found = torch.zeros((len(queries), len(ids)), dtype=torch.bool)
    for row, query in enumerate(queries):
        found[row, [places[id] for id in top_ranked.get(query, ())]] = True
    return found


def _meta(embedder: Embedder) -> ModelMeta:
    settings, prompts = embedder.settings, embedder.sentences.prompts
    cosine = embedder.sentences.similarity == "cosine"
    return ModelMeta.create_empty(
        {
            "name": embedder.name,
            "revision": embedder.revision,
            "embed_dim": embedder.width,
            "max_tokens": settings.get("longest"),
            "use_instructions": any(prompts.values()),
            "similarity_fn_name": ScoringFunction.COSINE if cosine else ScoringFunction.DOT_PRODUCT,
            "framework": ["PyTorch"],
        }
    )


def _bar(total: int, title: str) -> Any:
    return tqdm(total=total, desc=title, unit="text", delay=3, disable=dist.get_global_rank() > 0)


def _require_same(texts: Sequence[str], title: str) -> None:
    if not ranks.same_on_all(hashlib.blake2b(json.dumps(list(texts)).encode(), digest_size=8).hexdigest()):
        raise UserError(f"{title}: the ranks were given different texts; run this task with one process")
