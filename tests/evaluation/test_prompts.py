"""Prompts and documents' texts equal those of sentence-transformers and mteb; the table of scores."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pytest
from datasets import Dataset
from mteb._create_dataloaders import _corpus_to_dict, _create_dataloader_from_texts
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models

from biphasic.errors import UserError
from biphasic.evaluation.retriever import Retriever, document_texts
from biphasic.evaluation.scoring import SplitScores, score_table
from biphasic.evaluation.sets import judged_only, retrieval_task
from biphasic.model.pooling import read_sentence_settings
from helpers.random_embedder import RandomEmbedder

CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "empty": {"prompts": {"query": "", "document": ""}},
    "query and document": {"prompts": {"query": "q: ", "document": "d: "}},
    "query alone": {"prompts": {"query": "q: "}},
    "query and passage": {"prompts": {"query": "q: ", "passage": "p: "}},
    "query, passage, and an empty document": {"prompts": {"query": "q: ", "document": "", "passage": "p: "}},
    "corpus": {"prompts": {"corpus": "c: "}},
    "null": {"prompts": {"query": None, "document": "d: "}},
    "task": {"prompts": {"NQ": "nq: ", "query": "q: ", "document": "d: "}},
    "task and role": {"prompts": {"NQ-query": "nq-q: ", "NQ-document": "nq-d: ", "NQ": "nq: ", "query": "q: "}},
    "task type and role": {"prompts": {"Retrieval-document": "r-d: ", "Retrieval-query": "r-q: ", "query": "q: "}},
    "task type": {"prompts": {"Retrieval": "r: ", "STS": "s: ", "query": "q: "}},
    "task before task type": {"prompts": {"NQ": "nq: ", "Retrieval-query": "r-q: ", "Retrieval-document": "r-d: "}},
    "names that mteb doesn't know": {"prompts": {"NoSuchTask-query": "n: ", "s2p_query": "s: ", "document": "d: "}},
    "default": {"prompts": {"any": "a: "}, "default_prompt_name": "any"},
    "default of a role": {"prompts": {"query": "q: ", "document": "d: "}, "default_prompt_name": "query"},
    "default beside a query": {"prompts": {"query": "q: ", "any": "a: "}, "default_prompt_name": "any"},
    "default that is a task type": {"prompts": {"Classification": "c: "}, "default_prompt_name": "Classification"},
}
CALLS = [("NQ", PromptType.query), ("NQ", PromptType.document), ("MSMARCO", PromptType.query),
         ("MSMARCO", PromptType.document), ("STS12", None), ("Banking77Classification", None)]  # fmt: skip


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a static word embedding in sentence-transformers' format."""
    folder = tmp_path_factory.mktemp("static")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=4)]).save_pretrained(str(folder))
    return folder


def reference_prompts(folder: Path) -> list[str]:
    """Return the prompts that mteb and sentence-transformers pass to the model's tokenizer for `CALLS`."""
    model = SentenceTransformer(str(folder), device="cpu")
    wrapper = SentenceTransformerEncoderWrapper(model)
    prompts: list[str] = []
    preprocess = model.preprocess

    def record(inputs: Any, prompt: str | None = None, **kwargs: Any) -> Any:
        prompts.append(prompt or "")
        return preprocess(inputs, prompt=prompt, **kwargs)

    model.preprocess = record
    for name, role in CALLS:
        inputs: Any = _create_dataloader_from_texts(["a"])
        task = mteb.get_task(name).metadata
        wrapper.encode(inputs, task_metadata=task, hf_split="test", hf_subset="default", prompt_type=role)
    return prompts


class RecordingEmbedder(RandomEmbedder):
    """Records the texts that it embeds."""

    def __init__(self, folder: Path):
        self.sentence_settings = read_sentence_settings(str(folder))
        self.texts: list[str] = []

    def embed(self, texts: Any, progress: Any) -> np.ndarray:
        self.texts += texts
        return super().embed(texts, progress)


@pytest.mark.parametrize("case", CASES)
def test_prompts_equal_those_of_sentence_transformers_and_mteb(case: str, static: Path, tmp_path: Path) -> None:
    file = static / "config_sentence_transformers.json"
    content = {**json.loads(file.read_text()), "prompts": {}, "default_prompt_name": None, **CASES[case]}
    file.write_text(json.dumps(content))
    (tmp_path / file.name).write_text(json.dumps(content))  # without its modules.json, which names a module that is refused
    retriever = Retriever(RecordingEmbedder(tmp_path))
    prompts = [retriever._prompt(mteb.get_task(name).metadata, role) for name, role in CALLS]
    assert prompts == reference_prompts(static)


def test_prompts_are_put_before_texts(tmp_path: Path) -> None:
    """A task over judged documents has the prompts of the original task."""
    prompts = {"NQ-query": "nq: ", "NQ-document": "of nq: ", "query": "q: ", "document": "d: "}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    for name, before in (("NQ", ("nq: ", "of nq: ")), ("Mine", ("q: ", "d: "))):
        task = retrieval_task(name, {"d1": "text"}, {"q1": "question"}, {"test": {"q1": {"d1": 1}}})
        task.load_data()
        judged = judged_only(task)
        judged.load_data()
        for one in (task, judged):
            embedder = RecordingEmbedder(tmp_path)
            retriever, data = Retriever(embedder), one.dataset["default"]["test"]
            retriever.index(data["corpus"])
            about: dict[str, Any] = {"task_metadata": one.metadata, "hf_split": "test", "hf_subset": "default"}
            assert list(retriever.search(data["queries"], **about, top_k=10)["q1"]) == ["d1"]
            assert embedder.texts == [f"{before[0]}question", f"{before[1]}text"]


def test_documents_equal_mteb() -> None:
    titles = ["T", "", " ", "  two  ", "é", "T"]
    texts = ["text", " only a text ", "x", " y\n", "", "\tz "]
    ids = [str(at) for at in range(len(texts))]
    with_titles = Dataset.from_dict({"id": ids, "title": titles, "text": texts})
    assert document_texts(with_titles[:]) == [_corpus_to_dict(row)["text"] for row in with_titles]
    assert document_texts(with_titles[:])[0] == "T text"
    without = with_titles.remove_columns("title")
    assert document_texts(without[:]) == [_corpus_to_dict(row)["text"] for row in without]
    # mteb itself fails for these.
    assert document_texts({"title": [None, "T"], "text": ["a ", "b"]}) == ["a", "T b"]
    with pytest.raises(UserError, match="a document whose text is missing"):
        document_texts({"text": ["a", None]})


def cells(line: str) -> list[str]:
    assert line.startswith("| ") and line.endswith(" |")
    return [cell.strip() for cell in line[2:-2].split(" | ")]


def test_score_table() -> None:
    retrieval = SplitScores("NQ", "default", "test", "ndcg_at_10", 0.51234, 0.51234, 0.4, 0.9, (0.5, 0.525), 3452, 2_681_468)
    german = SplitScores("MultiLong", "de", "dev", "ndcg_at_10", 0.3, 0.3, 0.2, 1.0, (0.1, 0.4), 200, 10_000)
    other = SplitScores("STS12", "default", "test", "cosine_spearman", 0.70006)
    records = [{"system": "our/model", "scores": [asdict(retrieval), asdict(german)]},
               {"system": "BM25", "scores": [asdict(other)]}]  # fmt: skip
    lines = score_table(records)
    assert len({len(line) for line in lines}) == 1 and len(lines) == 5
    assert [cells(line) for line in (lines[0], *lines[2:])] == [
        ["task", "split", "documents", "queries", "system", "NDCG@10", "95% interval", "MRR@10", "Recall@100"],
        ["NQ", "test", "2,681,468", "3,452", "our/model", "0.5123", "0.5000 to 0.5250", "0.4000", "0.9000"],
        ["MultiLong", "de, dev", "10,000", "200", "our/model", "0.3000", "0.1000 to 0.4000", "0.2000", "1.0000"],
        ["STS12", "test", "", "", "BM25", "cosine_spearman 0.7001", "", "", ""],
    ]
    rule = lines[1].strip("|").split("|")
    assert [cell.endswith(":") for cell in rule] == [False, False, True, True, False, True, True, True, True]
    assert [len(cell) for cell in rule] == [len(cell) for cell in lines[0].strip("|").split("|")]
    assert lines[2].index("0.5123") + 6 == lines[3].index("0.3000") + 6 == lines[4].index("0.7001") + 6
    assert len(score_table([])) == 2
