"""Ranks share the work: each text is embedded by one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from biphasic.evaluation import ranks, retriever
from biphasic.evaluation.embedder import RandomEmbedder
from biphasic.evaluation.embedding_cache import EmbeddingCache
from biphasic.evaluation.retriever import Retriever
from biphasic.evaluation.sets import read_set
from mteb_mirror import write_own


class Counted(RandomEmbedder):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def embed(self, texts: Any, progress: Any) -> np.ndarray:
        self.seen += texts
        return super().embed(texts, progress)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_text_once(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "total", lambda tensor: tensor)
    monkeypatch.setattr(ranks, "same_on_all", lambda _: True)
    monkeypatch.setattr(retriever, "SMALL_BLOCK", 16)
    task = read_set(str(write_own(tmp_path / "mine")), "Mine", "eng-Latn")
    corpus = task.content["default"]["test"]["corpus"]
    texts = [f"text {at % 7} {at}" for at in range(50)]
    queries, documents = [], []
    for rank in range(world):
        monkeypatch.setattr(retriever.dist, "get_global_rank", lambda rank=rank: rank)
        monkeypatch.setattr(retriever.dist, "get_world_size", lambda: world)
        embedder = Counted()
        found = Retriever(embedder)._shared(texts, "", "queries")
        assert [bool(row.any()) for row in found] == [text in embedder.seen for text in texts]
        queries += embedder.seen
        embedder.seen = []
        places = [first for first, _ in Retriever(embedder)._documents(corpus, "", "documents")]
        assert places == list(range(16 * rank, len(corpus), 16 * world))
        documents += embedder.seen
    assert sorted(queries) == sorted(texts)
    assert len(documents) == len(corpus)


def test_ranks_with_different_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from biphasic.config.errors import UserError

    monkeypatch.setattr(ranks, "same_on_all", lambda _: False)
    with pytest.raises(UserError, match="queries: the ranks were given different texts"):
        Retriever(Counted())._shared(["a"], "", "queries")


def test_embeddings_are_kept_by_what_decides_them(tmp_path: Path) -> None:
    corpora = [Dataset.from_dict({"id": ["a", "b"], "text": [f"{kind} one", f"{kind} two"]}) for kind in ("x", "y")]
    embedder, cache = Counted(), EmbeddingCache(tmp_path, 1 << 20)

    def made(corpus: Dataset, prompt: str = "") -> int:
        embedder.seen = []
        [(_, found)] = list(Retriever(embedder, cache)._documents(corpus, prompt, "documents"))
        again = RandomEmbedder().embed([prompt + text for text in corpus["text"]], lambda _: None)
        np.testing.assert_array_equal(found, again)
        return len(embedder.seen)

    assert [made(corpora[0]), made(corpora[0])] == [2, 0]
    assert [made(corpora[1]), made(corpora[1]), made(corpora[0])] == [2, 0, 0]
    assert [made(corpora[0], "query: "), made(corpora[0], "query: ")] == [2, 0]
    embedder.revision = "another"
    assert made(corpora[0]) == 2
    embedder.settings = {"longest": 3}
    assert made(corpora[0]) == 2
