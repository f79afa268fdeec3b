"""What recipes share that train other kinds of models on pairs and compare them with a dense model's ranking."""

from __future__ import annotations

import argparse
import gzip
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from biphasic.errors import UserError
from biphasic.storage import json_bytes, open_store, user_errors

if TYPE_CHECKING:
    from biphasic.evaluation.scoring import SplitScores
    from biphasic.evaluation.search import Qrels, Run

RUN = Path("runs/quickstart")


def recipe_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of the recipes' common arguments. `defaults` are `out`, `steps`, `lr` and `max_length`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("encoder", nargs="?", default=RUN / "clm-mlm/encoder", help="an export, or a model of the hub")
    parser.add_argument("--pairs", type=Path, default=RUN / "text/pairs", help="a retrieval set (docs/tasks.md)")
    parser.add_argument("--dense", type=Path, default=RUN / "dense/predictions/docstrings-test.run.gz")
    parser.add_argument("--split", default="test", help="the one to score, and that of the ranking")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--max-length", type=int, help="tokens of an input")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(**defaults)
    return parser


def trainer_inputs(arguments: Callable[..., Any], options: argparse.Namespace, model: Any) -> tuple[Any, Any]:
    """Return the arguments of a model's trainer, an instance of a class of sentence-transformers, and the training pairs.

    Raises a UserError if `--max-length` is more tokens than the model has vectors of positions.
    """
    import pyarrow.parquet as pq
    from datasets import Dataset
    from sentence_transformers.base.sampler import BatchSamplers
    from torch.nn import Embedding

    from biphasic.model.segments import reserved_positions

    network = model[0].auto_model.base_model
    if any(isinstance(part, Embedding) and "position" in name for name, part in network.named_modules()):
        # RoBERTa's table begins with reserved positions.
        positions = network.config.max_position_embeddings - reserved_positions(network)
        if options.max_length > positions:
            problem = f"expected at most {positions}, the positions of {options.encoder}"
            raise UserError(f"--max-length {options.max_length}: {problem}")
    made = arguments(
        output_dir=str(options.out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr,
        warmup_steps=0.1,
        # An epoch leaves out pairs of queries that have many passages:
        # findings/sentence_transformers_no_duplicates_leaves_out_pairs.sh.
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
    )
    return made, Dataset(pq.read_table(options.pairs / "train.parquet", columns=["query", "positive"]))


def train_and_compare(
    options: argparse.Namespace,
    train: Callable[[argparse.Namespace], Any],
    prepare: Callable[[dict[str, Any], Run], None] = lambda split, ranking: None,
    describe: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda model, split: {},
) -> int:
    """Train, save and score a model, and write `scores.json`. Return the exit status.

    It is 2 when the encoder, the pairs or the ranking is missing or doesn't fit. `prepare` may change the split, as mteb
    reads it, before it is scored; what `describe` returns is written beside the scores.
    """
    # Imported here because mteb takes seconds to import, which --help doesn't need.
    from biphasic.evaluation.scoring import score
    from biphasic.evaluation.sets import read_set

    try:
        task = read_set(str(options.pairs), "Pairs", "eng-Latn", only=[options.split])
        split = task.content["default"][options.split]
        ranking = read_ranking(options.dense, split)
        prepare(split, ranking)
        model = train(options)
        model.save_pretrained(str(options.out / "model"))
        [[scores], _] = score(model, task)
        result = {**compare(scores, ranking, split["relevant_docs"]), **describe(model, split)}
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    open_store(str(options.out)).write("scores.json", json_bytes(result))
    return 0


def read_ranking(file: Path, split: dict[str, Any]) -> Run:
    """Return the ranking of a split from a file. Raises a UserError if it can't be read, or is of other queries or texts."""
    ranking, queries = read_trec_run(file), split["relevant_docs"].keys()
    documents = {document for ranked in ranking.values() for document, _ in ranked}
    for problem, ids in (
        ("lacks a query of the split", queries - ranking.keys()),
        ("has a query that the split lacks", ranking.keys() - queries),
        ("has a document that the corpus lacks", documents.difference(split["corpus"]["id"][:])),
    ):
        if ids:
            more = f" and {len(ids) - 1:,} more" if len(ids) > 1 else ""
            expected = "expected a ranking of the set in --pairs and of its --split"
            raise UserError(f"{file}: {problem} ({min(ids)}{more}): {expected}")
    return ranking


def read_trec_run(file: Path) -> Run:
    """Return the ranking in a file of TREC's run format, compressed by gzip.

    The scores give the order, as in trec_eval, not the lines or their ranks: equal ones are in descending order of the ids.
    Raises a UserError if it can't be read.
    """
    run: Run = {}
    with user_errors(f"{file}: expected a ranking in TREC's format, compressed by gzip", ValueError, EOFError, zlib.error):
        for number, line in enumerate(gzip.decompress(file.read_bytes()).decode().splitlines(), start=1):
            if len(fields := line.split()) != 6:
                raise ValueError(f"line {number} has {len(fields)} fields, not 6")
            query, _, document, _, score, _ = fields
            run.setdefault(unquote(query), []).append((unquote(document), float(score)))
    for documents in run.values():
        documents.sort(key=lambda document: (document[1], document[0]), reverse=True)
    return run


def compare(scores: SplitScores, ranking: Run, qrels: Qrels) -> dict[str, Any]:
    """Return NDCG@10 of a `system`, of another `ranking` of its queries, and their `difference`, each with its interval.

    They are printed too.
    """
    from biphasic.evaluation.scoring import bootstrap_interval
    from biphasic.evaluation.search import scores_by_query

    other = scores_by_query(ranking, qrels, "ndcg_cut_10", 10)
    differences = [scores.by_query[query] - value for query, value in other.items()]
    columns = {"system": list(scores.by_query.values()), "ranking": list(other.values()), "difference": differences}
    result = {name: {"ndcg_at_10": fmean(x), "interval": bootstrap_interval(x)} for name, x in columns.items()}
    for name, values in result.items():
        print(f"{name}: {values['ndcg_at_10']:.3f} ({values['interval'][0]:.3f} to {values['interval'][1]:.3f})")
    return result
