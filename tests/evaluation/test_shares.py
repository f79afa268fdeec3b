"""Ranks share the work: each text is embedded by one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from biphasic.evaluation import ranks, retriever
from biphasic.evaluation.embedder import RandomEmbedder
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
