"""Each text is embedded by one rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from biphasic.evaluation import retriever
from biphasic.evaluation.retriever import Retriever
from biphasic.evaluation.sets import read_set
from helpers.mteb_mirror import write_own
from helpers.random_embedder import RandomEmbedder


class RecordingEmbedder(RandomEmbedder):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def embed(self, texts: Any, progress: Any) -> np.ndarray:
        self.texts += texts
        return super().embed(texts, progress)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_text_is_embedded_once(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retriever.dist, "all_gather_object", lambda value: [value])
    monkeypatch.setattr(retriever, "SMALL_BLOCK", 16)
    task = read_set(str(write_own(tmp_path / "my-set")), "Mine", "eng-Latn")
    corpus = task.content["default"]["test"]["corpus"]
    texts = [f"text {at % 7} {at}" for at in range(50)]
    queries, documents = [], []
    for rank in range(world):
        monkeypatch.setattr(retriever.dist, "get_global_rank", lambda rank=rank: rank)
        monkeypatch.setattr(retriever.dist, "get_world_size", lambda: world)
        embedder = RecordingEmbedder()
        embeddings = Retriever(embedder)._embed_shared(texts, "", "queries")
        assert [bool(row.any()) for row in embeddings] == [text in embedder.texts for text in texts]
        queries += embedder.texts
        embedder.texts = []
        positions = [first for first, _ in Retriever(embedder)._embed_documents(corpus, "", "documents")]
        assert positions == list(range(16 * rank, len(corpus), 16 * world))
        documents += embedder.texts
    assert sorted(queries) == sorted(texts)
    assert len(documents) == len(corpus)


def test_ranks_with_different_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from biphasic.errors import UserError

    monkeypatch.setattr(retriever.dist, "all_gather_object", lambda value: [value, ("other", [], [])])
    with pytest.raises(UserError, match="queries: the ranks were given different texts"):
        Retriever(RecordingEmbedder())._embed_shared(["a"], "", "queries")


def test_cache_key_has_everything_that_decides_embeddings(tmp_path: Path) -> None:
    corpora = [Dataset.from_dict({"id": ["a", "b"], "text": [f"{kind} one", f"{kind} two"]}) for kind in ("x", "y")]
    embedder = RecordingEmbedder()

    def count_embedded(corpus: Dataset, prompt: str = "") -> int:
        embedder.texts = []
        [(_, embeddings)] = list(Retriever(embedder, tmp_path, 1 << 20)._embed_documents(corpus, prompt, "documents"))
        expected = RandomEmbedder().embed([prompt + text for text in corpus["text"]], lambda _: None)
        np.testing.assert_array_equal(embeddings, expected)
        return len(embedder.texts)

    assert [count_embedded(corpora[0]), count_embedded(corpora[0])] == [2, 0]
    assert [count_embedded(corpora[1]), count_embedded(corpora[1]), count_embedded(corpora[0])] == [2, 0, 0]
    assert [count_embedded(corpora[0], "query: "), count_embedded(corpora[0], "query: ")] == [2, 0]
    embedder.revision = "another"
    assert count_embedded(corpora[0]) == 2
    embedder.settings = {"max_length": 3}
    assert count_embedded(corpora[0]) == 2
