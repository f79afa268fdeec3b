"""The recipes that train an export with sentence-transformers' other classes: small, scored, and loaded again."""

import gzip
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mteb
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.evaluation.scoring import SplitScores, bootstrap_interval, score
from biphasic.evaluation.search import Run, trec_run
from biphasic.evaluation.sets import read_set
from biphasic.model.language_model import from_hf_config
from biphasic.storage import open_store, parquet_bytes
from helpers.exports import export_language_model
from helpers.families import bert_tokenizer
from helpers.tiny import ROOT, WORDS, write_tokenizer
from helpers.toy_sets import retrieval_pairs

TRAINING, QUERIES = 48, 12
pytestmark = pytest.mark.usefixtures("hub_is_offline")

WIDTH = 32
STEPS = ["--steps", "3", "--batch-size", "8"]


@pytest.fixture(scope="module")
def dense_ranking() -> ModuleType:
    sys.path.insert(0, str(ROOT / "recipes" / "quickstart"))
    import dense_ranking

    return dense_ranking


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained model as `biphasic export` writes it."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("beyond")
    write_tokenizer(folder / "tokenizer")
    export_language_model(from_hf_config(config, 0), load_tokenizer(str(folder / "tokenizer")), folder / "encoder")
    return folder / "encoder"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared retrieval set."""
    folder, rows = tmp_path_factory.mktemp("pairs"), retrieval_pairs(TRAINING + QUERIES, 0)
    ids = [f"t{at}" for at in range(QUERIES)]
    (queries, documents), (held_queries, held_documents) = (
        tuple(map(list, zip(*part, strict=True))) for part in (rows[:TRAINING], rows[TRAINING:])
    )
    for name, columns in {
        "train": {"query": queries, "positive": documents},
        "corpus": {"_id": ids, "text": held_documents},
        "queries": {"_id": ids, "text": held_queries},
        "qrels/test": {"query-id": ids, "corpus-id": ids, "score": [1] * QUERIES},
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        open_store(str(folder)).write(f"{name}.parquet", parquet_bytes(columns, 100))
    return folder


@pytest.fixture(scope="module")
def ranking(pairs: Path) -> Path:
    """The dense model's: the relevant document first, or third, or missing, for a third of the queries each."""
    run: Run = {}
    for at in range(QUERIES):
        others = [(f"t{other}", 0.5 - other / 100) for other in range(QUERIES) if other != at]
        relevant = [[(f"t{at}", 1.0)], [*others[:2], (f"t{at}", 0.1)], others[:4]]
        run[f"t{at}"] = relevant[at % 3]
    file = pairs.parent / "dense.run.gz"
    file.write_bytes(trec_run(run))
    return file


@pytest.fixture
def recipe(request: pytest.FixtureRequest) -> ModuleType:
    """The recipe's script as a module."""
    spec = importlib.util.spec_from_file_location(request.param, ROOT / "recipes" / request.param / f"{request.param}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(recipe: ModuleType, out: Path, *arguments: object) -> dict[str, Any]:
    """Run a script. Returns its scores."""
    assert recipe.main([*map(str, arguments), "--out", str(out), *STEPS]) == 0
    scores = json.loads((out / "scores.json").read_text())
    # The ranking has the relevant document at rank 1, rank 3 (1 / log2(4)) and nowhere.
    assert scores["ranking"]["ndcg_at_10"] == pytest.approx((1 + 0.5 + 0) / 3)
    difference = scores["system"]["ndcg_at_10"] - scores["ranking"]["ndcg_at_10"]
    assert scores["difference"]["ndcg_at_10"] == pytest.approx(difference)
    return scores


def scored(model: Any, pairs: Path) -> float:
    """mteb's NDCG@10 of a model, which it rounds to five digits."""
    [[scores], _] = score(model, read_set(str(pairs), "Pairs", "eng-Latn", only=["test"]))
    assert scores.ndcg_at_10 is not None
    return scores.ndcg_at_10


def assert_trained(model: Any, export: Path) -> None:
    """The encoder's weights are near those of the export, and not the same."""
    from safetensors.torch import load_file

    initial, trained = load_file(export / "model.safetensors"), model[0].auto_model.state_dict()
    for name in ("layers.0.mlp.up_proj.weight", "layers.1.self_attn.q_proj.weight"):
        [after] = [value for key, value in trained.items() if key.endswith(name)]
        [before] = [value for key, value in initial.items() if key.endswith(name)]
        assert not torch.equal(after, before)
        torch.testing.assert_close(after, before, atol=0.05, rtol=0)


class PairsOfMteb(AbsTaskRetrieval):
    """A prepared set as a task of mteb, without Biphasic's code."""

    metadata = mteb.get_task("SciFact").metadata.model_copy(update={"name": "Own", "eval_splits": ["test"]})

    def __init__(self, folder: Path):
        super().__init__()
        tables = {name: pq.read_table(folder / f"{name}.parquet") for name in ("corpus", "queries", "qrels/test")}
        texts = {name: Dataset(tables[name].rename_columns(["id", "text"])) for name in ("corpus", "queries")}
        judged = {row["query-id"]: {row["corpus-id"]: row["score"]} for row in tables["qrels/test"].to_pylist()}
        self.dataset: Any = {"default": {"test": {**texts, "relevant_docs": judged, "top_ranked": None}}}
        self.data_loaded = True


def by_the_definition(model: Any, pairs: Path) -> float:
    """NDCG@10 with one relevant document for a query, of MaxSim: the sum of each query token's largest dot product."""
    tables = [pq.read_table(pairs / f"{name}.parquet") for name in ("queries", "corpus")]
    queries, documents = (table["text"].to_pylist() for table in tables)
    query_vectors, document_vectors = model.encode_query(queries), model.encode_document(documents)
    gains = []
    for at, query in enumerate(query_vectors):
        scores = torch.stack([(query @ document.T).amax(1).sum() for document in document_vectors])
        rank = int((scores > scores[at]).sum()) + 1
        gains.append(1 / math.log2(rank + 1) if rank <= 10 else 0.0)
    return sum(gains) / len(gains)


@pytest.mark.parametrize("recipe", ["late_interaction"], indirect=True)
def test_late_interaction(recipe: ModuleType, export: Path, pairs: Path, ranking: Path, tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    scores = run(recipe, tmp_path, export, "--pairs", pairs, "--dense", ranking, "--max-length", 5)
    model = MultiVectorEncoder(str(tmp_path / "model"))
    assert_trained(model, export)
    # A vector of length 1 for each token, at most --max-length.
    vectors = model.encode_document(["w1 w2 w3", "w1 w2 w3 w4 w5 w6 w7"])
    assert [tuple(each.shape) for each in vectors] == [(3, 128), (5, 128)]
    torch.testing.assert_close(vectors[0].norm(dim=1), torch.ones(3))
    # mteb alone with the saved folder, and the definition, give the recipe's score.
    result = mteb.evaluate(model, PairsOfMteb(pairs), cache=None, co2_tracker=False, overwrite_strategy="always")
    assert result.task_results[0].scores["test"][0]["ndcg_at_10"] == pytest.approx(
        scores["system"]["ndcg_at_10"],
        abs=1e-5,  # mteb rounds
    )
    assert by_the_definition(model, pairs) == pytest.approx(scores["system"]["ndcg_at_10"], abs=1e-5)


@pytest.mark.parametrize("recipe", ["sparse"], indirect=True)
def test_sparse(recipe: ModuleType, export: Path, pairs: Path, ranking: Path, tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    scores = run(recipe, tmp_path, export, "--pairs", pairs, "--dense", ranking)
    model = SparseEncoder(str(tmp_path / "model"))
    assert_trained(model, export)
    # A weight for each token of the vocabulary: those of the tokens whose logit is positive at some position.
    vector = model.encode_query("w1 w2 w3")
    assert vector.is_sparse and vector.shape == (WORDS,)
    logits = model[0](model.preprocess(["w1 w2 w3"]))["token_embeddings"]
    torch.testing.assert_close(vector.to_dense(), logits.relu().log1p().amax(1)[0].detach())
    assert 0 < scores["active"]["documents"] < WORDS
    assert scored(model, pairs) == pytest.approx(scores["system"]["ndcg_at_10"], abs=1e-5)


@pytest.mark.parametrize("recipe", ["reranker"], indirect=True)
def test_reranker(recipe: ModuleType, export: Path, pairs: Path, ranking: Path, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    scores = run(recipe, tmp_path, export, "--pairs", pairs, "--dense", ranking)
    # Only the ranking's documents are scored: a third of the queries has the relevant one alone, a third doesn't have it.
    assert scores["ranking"]["ndcg_at_10"] - 1e-9 <= scores["system"]["ndcg_at_10"] <= 2 / 3
    model = CrossEncoder(str(tmp_path / "model"))
    assert_trained(model, export)
    # The two texts are divided by the token that ends a text in pretraining.
    assert model.tokenizer.decode(model.preprocess([("w1 w2", "w3")])["input_ids"][0]) == "w1 w2 <|eos|> w3"
    first, again = model.predict([("w1 w2", "w31"), ("w1 w2", "w31")])
    assert 0 < first == again < 1


def words_of(special: dict[str, str], pair: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words with special tokens, and a template for pairs."""
    words = Tokenizer(WordLevel({word: at for at, word in enumerate([*special.values(), "w1", "w2", "w3"])}))
    words.pre_tokenizer = Whitespace()
    if pair is not None:
        ids = [(token, words.token_to_id(token)) for token in special.values()]
        words.post_processor = TemplateProcessing(single=pair.partition(" $B")[0], pair=pair, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


@pytest.mark.parametrize("recipe", ["reranker"], indirect=True)
@pytest.mark.parametrize(
    ("special", "pair", "expected"),
    [
        ({"eos_token": "[E]"}, None, "w1 w2 [E] w3"),
        # Between the texts is something, or nothing after a token at the beginning, or at the end.
        ({"cls_token": "[C]", "sep_token": "[S]"}, "[C] $A [S] $B [S]", "[C] w1 w2 [S] w3 [S]"),
        ({"bos_token": "[B]", "eos_token": "[E]"}, "[B] $A [B] $B", "[B] w1 w2 [B] w3"),
        ({"bos_token": "[B]", "eos_token": "[E]"}, "[B] $A $B", "[B] w1 w2 [E] w3"),
        ({"eos_token": "[E]"}, "$A $B [E]", "w1 w2 [E] w3 [E]"),
        # The heads of families with a CLS token read the first position.
        ({"cls_token": "[C]", "sep_token": "[S]"}, None, "[C] w1 w2 [S] w3"),
    ],
)
def test_a_reranker_s_texts_are_divided(
    recipe: ModuleType, special: dict[str, str], pair: str | None, expected: str
) -> None:
    tokenizer = words_of(special, pair)
    recipe.divide_texts(tokenizer, "w1", "w2")
    assert tokenizer.convert_ids_to_tokens(tokenizer("w1 w2", "w3")["input_ids"]) == expected.split()


@pytest.mark.parametrize("recipe", ["reranker"], indirect=True)
def test_a_reranker_s_tokenizer_without_a_token_that_ends_a_text(recipe: ModuleType) -> None:
    with pytest.raises(UserError, match="expected a token that ends a text, eos or sep; its tokenizer has none"):
        recipe.divide_texts(words_of({"pad_token": "[P]"}), "w1", "w2")


@pytest.mark.parametrize("recipe", ["late_interaction", "sparse", "reranker"], indirect=True)
def test_texts_longer_than_the_table_of_positions(
    recipe: ModuleType, dense_ranking: ModuleType, pairs: Path, tmp_path: Path
) -> None:
    """They are refused before the training, which the first long text would end. The table's first row is for padding."""
    bert_tokenizer(tmp_path)
    config = RobertaConfig(vocab_size=65, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
                           max_position_embeddings=25, pad_token_id=0)  # fmt: skip
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    keys = {"pairs": pairs, "encoder": tmp_path, "out": tmp_path / "out", "steps": 1, "lr": 1e-3, "batch_size": 4}
    parser = dense_ranking.recipe_parser("", **keys, scale=0.05, regularizer=0.0)
    assert recipe.train(parser.parse_args(["--max-length", "24"])) is not None
    with pytest.raises(UserError, match=f"^--max-length 25: expected at most 24, the positions of {tmp_path}$"):
        recipe.train(parser.parse_args(["--max-length", "25"]))


@pytest.mark.parametrize("recipe", ["sparse"], indirect=True)
def test_a_new_mlm_head_is_named_and_drawn_by_the_seed(
    recipe: ModuleType, dense_ranking: ModuleType, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warning = f"WARNING: {tmp_path}: its files have no MLM head: a random one is trained\n"
    keys = {"pairs": pairs, "encoder": tmp_path, "out": tmp_path / "out", "steps": 1, "batch_size": 4, "max_length": 9}
    parser = dense_ranking.recipe_parser("", **keys, lr=0.0, scale=0.05, regularizer=0.0)
    heads = []
    for saved, seed in ((BertForMaskedLM, 0), (BertModel, 0), (BertModel, 0), (BertModel, 1)):
        bert_tokenizer(tmp_path)
        saved(BertConfig(vocab_size=65, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)).save_pretrained(
            tmp_path
        )
        model = recipe.train(parser.parse_args(["--seed", str(seed)]))
        assert (warning in capsys.readouterr().err) == (saved is BertModel)
        heads.append(model[0].auto_model.cls.predictions.transform.dense.weight)
    assert torch.equal(heads[1], heads[2]) and not torch.equal(heads[1], heads[3])


def test_a_run_file_is_read_in_the_order_of_its_scores(dense_ranking: ModuleType, tmp_path: Path) -> None:
    read_trec_run = dense_ranking.read_trec_run
    run: Run = {"q2": [("b%201", 1.5), ("a 1\u3000", 1.5), ("c", -0.25)], "q 1": [("a", 0.125)]}
    file = tmp_path / "set-test.run.gz"
    file.write_bytes(trec_run(run))
    assert read_trec_run(file) == run and list(read_trec_run(file)) == ["q2", "q 1"]
    # Lines and ranks in any order: the scores decide, as in trec_eval.
    lines = ["q Q0 a 1 -2 x", "q Q0 b 2 1e1 x", "p Q0 c 3 1 x", "q Q0 d 4 9.5 x", "q Q0 e 5 9.5 x"]
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert read_trec_run(file) == {"q": [("b", 10.0), ("e", 9.5), ("d", 9.5), ("a", -2.0)], "p": [("c", 1.0)]}


def test_a_ranking_that_cannot_be_used_is_refused_before_the_training(
    dense_ranking: ModuleType, pairs: Path, ranking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, whole = tmp_path / "other.run.gz", gzip.decompress(ranking.read_bytes())
    for content, problem in (
        (whole, "expected a ranking in TREC's format, compressed by gzip (Not a gzipped file (b't0'))"),
        (
            gzip.compress(whole)[:-20],
            "expected a ranking in TREC's format, compressed by gzip (Compressed file ended before",
        ),
        (gzip.compress(whole + b"t0 Q0 t1 4 0.5\n"), "compressed by gzip (line 33 has 5 fields, not 6)"),
        (gzip.compress(whole + b"t0 Q0 t1 4 best x\n"), "compressed by gzip (could not convert string to float: 'best')"),
        (
            gzip.compress(whole.partition(b"t1 ")[0]),
            "lacks a query of the split (t1 and 10 more): expected a ranking of the set",
        ),
        (gzip.compress(whole + b"q Q0 t1 1 0.5 x\n"), "has a query that the split lacks (q): expected a ranking of"),
        (gzip.compress(whole + b"t0 Q0 t99 4 0.5 x\n"), "has a document that the corpus lacks (t99): expected"),
    ):
        file.write_bytes(content)
        options = dense_ranking.recipe_parser("").parse_args(["--pairs", str(pairs), "--dense", str(file)])
        assert dense_ranking.train_and_compare(options, train=lambda options: pytest.fail("it was trained")) == 2
        error = capsys.readouterr().err.splitlines()[-1]  # before it are the bars of datasets
        assert error.startswith(f"{file}: ") and problem in error


def test_comparison_with_a_ranking(dense_ranking: ModuleType) -> None:
    """The ranking has the relevant document at rank 1, rank 3 and nowhere; the system finds it twice."""
    qrels = {query: {"right": 1} for query in "abc"}
    wrong, right = [("x", 0.9), ("y", 0.8)], ("right", 0.7)
    ranking = {"a": [right], "b": [*wrong, right], "c": wrong}
    by_query = {"c": 0.0, "b": 1.0, "a": 1.0}
    scores = SplitScores("Set", "default", "test", "ndcg_at_10", 2 / 3, by_query=by_query)
    result = dense_ranking.compare(scores, ranking, qrels)
    means = {name: values["ndcg_at_10"] for name, values in result.items()}
    assert means == pytest.approx({"system": 2 / 3, "ranking": 0.5, "difference": 1 / 6})
    # Paired: of the queries' differences, which are 0, 0.5 and 0.
    assert result["difference"]["interval"] == bootstrap_interval([0.0, 0.5, 0.0])
