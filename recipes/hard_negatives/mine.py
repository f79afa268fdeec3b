"""Add hard negatives to the training pairs of a retrieval set: documents that a model finds similar to a query.

`mine_hard_negatives` of sentence-transformers embeds the queries and all documents of the set on every GPU, and searches
exactly. A query's own positives are no negatives of it, nor are documents above 95% of their score (NV-Retriever's
TopK-PercPos): only by their score are those left out that repeat a positive, as beside a title.

    python recipes/hard_negatives/mine.py runs/own-retrieval/model data/tasks/mine data/my_set/mined.parquet

docs/finetune.md (Hard negatives) has the commands that follow. MODEL is one that is fine-tuned for retrieval; its prompts
`query` and `document` stand before the texts. The cost is that of embedding the set once. A pair that gets fewer than
`--count` negatives is left out, and counted.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from biphasic.finetuning.retrieval import titled_texts
from biphasic.storage import parquet_bytes, user_errors


def main(arguments: list[str] | None = None) -> int:
    """Mine hard negatives, and print the counts. Exit status 2 without a model, a set, or pairs with enough of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("set", metavar="TASK_FOLDER")
    parser.add_argument("out", metavar="OUT.parquet", type=Path)
    parser.add_argument("--count", type=int, default=7, help="negatives of a pair (default: 7)")
    parser.add_argument("--depth", type=int, default=100, help="documents to consider, best first (default: 100)")
    try:
        mine(parser.parse_args(arguments))
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def mine(options: argparse.Namespace) -> None:
    """Read a set of `biphasic tasks`, and write its pairs with negatives as a Parquet file; a UserError if none has any."""
    if not 1 <= options.count <= options.depth:
        raise UserError(f"--count {options.count}: expected a number from 1 to --depth, {options.depth}")
    # Made now, because a file that can't be written would be known only after the corpus is embedded.
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.is_dir():
        raise UserError(f"{options.out}: expected the name of a file to write; this is a folder")
    folder = TaskFolder(options.set, "runs/cache", "retrieval")
    pairs = folder.read("train", "pairs")
    corpus = titled_texts(folder.read("corpus", "corpus")) if "corpus" in folder.record["rows"] else []
    with user_errors(f"{options.model}: can't be loaded", ValueError):
        model = SentenceTransformer(options.model)
    mined: Any = mine_hard_negatives(
        Dataset.from_dict({name: pairs[name] for name in ("query", "positive")}),
        model,
        corpus=corpus,
        range_max=options.depth,
        relative_margin=0.05,
        num_negatives=options.count,
        output_format="n-tuple",
        output_scores=True,
        query_prompt=model.prompts.get("query"),
        corpus_prompt=model.prompts.get("document"),
        verbose=False,  # its advice names options that are not here
        use_multi_process=torch.cuda.device_count() > 1,
    ).to_dict()
    if not mined["query"]:
        problem = f"no pair gets {options.count} negatives among its {options.depth} best documents"
        raise UserError(f"{options.set}: {problem}: take a smaller --count, or a larger --depth")
    negatives = zip(*(mined[f"negative_{number}"] for number in range(1, options.count + 1)), strict=True)
    columns = {
        **{name: mined[name] for name in ("query", "positive", "scores")},
        "negatives": list(map(list, negatives)),
    }
    options.out.write_bytes(parquet_bytes(columns))
    print(f"{options.out}: {len(mined['query']):,} of {len(pairs['query']):,} pairs, each with {options.count} negatives")


if __name__ == "__main__":
    raise SystemExit(main())
