"""Compare two models on the same test sets: paired intervals and tests, and the examples that changed most."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.json
import pyarrow.parquet as pq
from scipy.stats import bootstrap, permutation_test
from tabulate import tabulate

from biphasic.downstream.overlap import TEXT_COLUMNS
from biphasic.errors import UserError
from biphasic.report.example_scores import ExampleValues, ScoredModel, SetScores, mean_score
from biphasic.report.formatting import format_p
from biphasic.report.scores import holm

RESAMPLES, CHANGED = 10_000, 10
"""Numbers of resamples of an interval and of a test, and of examples that are shown for a test set."""
_VALUES_AT_ONCE = 1 << 22
_LARGEST_TABLE, _SHOWN_CHARACTERS = 1 << 30, 120


def compare(first: ScoredModel, second: ScoredModel) -> dict[str, Any]:
    """Return a report of the differences between two models on each test set that both have.

    Raises:
        UserError: both are the same model of one run, the runs are of different jobs, no test set is in both, or the data
            of one differs.
    """
    if first.place == second.place:
        raise UserError(f"{first.place}: is compared with itself; expected two runs, or FOLDER@MODEL of two models")
    if first.kind != second.kind:
        kinds = f"{first.place} is of job: {first.kind}, {second.place} of job: {second.kind}"
        raise UserError(f"{kinds}: expected two evaluations, or two fine-tunings or sweeps")
    shared, sets = [key for key in first.sets if key in second.sets], []
    only = {model.place: [" ".join(key) for key in model.sets if key not in shared] for model in (first, second)}
    left_out = {model.place: model.left_out for model in (first, second)}
    if not shared:
        problem = "have no test set with stored predictions in common"
        raise UserError(
            f"the runs {problem}: predictions of {only}; none (other tasks, earlier versions) of {left_out}"
        )
    for name, metric in shared:
        scores = first.sets[name, metric], second.sets[name, metric]
        _require_same_data(f"{name}: {first.place} and {second.place}", *scores)
        seeds = sorted(scores[0].examples.keys() & scores[1].examples.keys())
        chosen = [[each.examples[seed] for seed in seeds or list(each.examples)[:1]] for each in scores]
        counts = {"set": name, "metric": metric, "examples": len(chosen[0][0].quality), "seeds": len(chosen[0])}
        sets.append({**counts, **paired_test(*chosen), "by_example": _by_example(*scores, *chosen)})
    for row, p in zip(sets, holm(pd.Series([row["p"] for row in sets])), strict=True):
        row["holm_p"] = float(p)
    return {"a": first.place, "b": second.place, "sets": sets, "only_in": only, "left_out": left_out}


def paired_test(first: Sequence[ExampleValues], second: Sequence[ExampleValues]) -> dict[str, Any]:
    """Return the scores `a` and `b` of two models, given by seed, their `difference` (b - a), its `interval` and its `p`.

    The 95% interval is a percentile bootstrap over the examples, which are the same for both models and all seeds. `p`
    is of a two-sided randomization test, which exchanges the models' predictions for random examples.
    """
    pooled = np.stack([np.concatenate([a.values, b.values]) for a, b in zip(first, second, strict=True)])
    score, count = first[0].score, len(first[0].values)
    if score is mean_score:  # so the seeds can be averaged before the resampling
        pooled = pooled.mean(0, keepdims=True)

    def scores(rows: np.ndarray) -> np.ndarray:
        return score(pooled[:, rows.astype(int)]).mean(0)

    def difference(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return scores(np.moveaxis(b, axis, -1)) - scores(np.moveaxis(a, axis, -1))

    rows = np.arange(count), np.arange(count, 2 * count)
    a, b = (float(scores(each)) for each in rows)
    low, high, p = b - a, b - a, 1.0
    if count > 1:
        options: Any = {"vectorized": True, "batch": max(_VALUES_AT_ONCE // pooled.size, 1), "rng": 0}
        options, interval = {**options, "n_resamples": RESAMPLES}, {"paired": True, "method": "percentile"}
        low, high = bootstrap(rows, difference, **interval, **options).confidence_interval
        p = permutation_test(rows, difference, permutation_type="samples", **options).pvalue
    return {"a": a, "b": b, "difference": b - a, "interval": (float(low), float(high)), "p": float(p)}


def _require_same_data(both: str, a: SetScores, b: SetScores) -> None:
    (one, *_), (other, *_) = a.predictions.values(), b.predictions.values()
    ids = sorted(set(one["id"]) ^ set(other["id"]))
    gold = [id for id, x, y in zip(one["id"], one["gold"], other["gold"], strict=False) if x != y]
    for differs, problem in (
        (ids or len(one["id"]) != len(other["id"]), f"have {len(ids)} different ids, e.g. {ids[:1]}"),
        (gold, f"have other gold answers for {len(gold)} examples, e.g. {gold[:1]}"),
        (a.data != b.data, f"have other data ({a.data} and {b.data})"),
    ):
        if differs:
            raise UserError(f"{both} {problem}: expected the same data: score both on one version of it")


def _by_example(a: SetScores, b: SetScores, first: list[ExampleValues], second: list[ExampleValues]) -> list[Any]:
    """Return every example with both scores, those that changed most first, of which ten have their predictions."""
    (one, *_), (other, *_) = a.predictions.values(), b.predictions.values()
    qualities = [np.mean([values.quality for values in each], 0) for each in (first, second)]
    rows = [{"id": id, "a": float(x), "b": float(y)} for id, x, y in zip(one["id"], *qualities, strict=True)]
    changes = np.abs(qualities[1] - qualities[0])
    order = np.argsort(-changes, kind="stable")
    changed = order[: min(CHANGED, np.count_nonzero(changes))]
    texts = _texts(a.folder, a.table, {one["id"][at] for at in changed})
    rankings = [each["predicted"][at] for at in changed for each in (one, other)] if a.table == "queries" else []
    ranked = {id for ranking in rankings for id in ranking}
    documents = _texts(a.folder, "corpus", ranked)
    for at in changed:
        predicted = one["predicted"][at], other["predicted"][at]
        text = one["text"][at] if "text" in one else texts.get(one["id"][at])
        rows[at] |= {"text": text, "gold": one["gold"][at], "a_predicted": predicted[0], "b_predicted": predicted[1]}
        if ranked:
            rows[at]["documents"] = {id: documents[id] for each in predicted for id in each if id in documents}
    return [rows[at] for at in order]


def _texts(folder: str, table: str, ids: set[str]) -> dict[str, str]:
    """Return the texts of these ids if the dataset is a folder on this machine whose table is of moderate size."""
    for suffix, read in ((".parquet", pq.read_table), (".jsonl", pyarrow.json.read_json)):
        file = Path(folder, f"{table}{suffix}")
        if ids and file.is_file() and file.stat().st_size < _LARGEST_TABLE:
            content = read(file)
            column = content["_id" if "_id" in content.column_names else "id"].to_numpy()
            rows = content.take(np.flatnonzero(np.isin(column, list(ids)))).to_pylist()
            parts = [[row[name] for name in ("_id", "id", *TEXT_COLUMNS) if row.get(name)] for row in rows]
            return {
                id: " ".join(" ".join(text) if isinstance(text, list) else text for text in texts)
                for id, *texts in parts
            }
    return {}


def describe(report: Mapping[str, Any]) -> str:
    """Return a table of a report's differences in Markdown, and the examples that changed most on each test set."""
    columns = ("set", "metric", "examples", "seeds", "A", "B", "B - A", "95% interval", "p", "p (Holm)")
    rows = [
        (row["set"], row["metric"], f"{row['examples']:,}", row["seeds"], f"{row['a']:.4f}", f"{row['b']:.4f}",
         f"{row['difference']:+.4f}", " to ".join(f"{end:+.4f}" for end in row["interval"]), format_p(row["p"]),
         format_p(row["holm_p"]))
        for row in report["sets"]
    ]  # fmt: skip
    table = tabulate(rows, columns, "pipe", disable_numparse=True, colalign=["left"] * 2 + ["right"] * 8)
    lines = [f"A: {report['a']}", f"B: {report['b']}", "", table]
    for key, title in (("only_in", "only in"), ("left_out", "without stored predictions in")):
        lines += [f"{title} {place}: {', '.join(names)}" for place, names in report[key].items() if names]
    for row in report["sets"]:
        changed = [example for example in row["by_example"] if "gold" in example]
        lines.append(f"\n{row['set']} {row['metric']}: the {len(changed)} examples that changed most")
        for example in changed:
            lines.append(
                f"  {example['id']}: {example['a']:.4f} to {example['b']:.4f}  {_short(example['text'] or '')}"
            )
            is_query = "documents" in example
            grades = {judged["id"]: judged["grade"] for judged in example["gold"]} if is_query else {}
            for name in ("a_predicted", "b_predicted") if is_query else ("gold", "a_predicted", "b_predicted"):
                value = example[name]
                if is_query:
                    value = ", ".join(f"{id} [{grades[id]}]" if id in grades else id for id in value)
                lines.append(f"    {name.removesuffix('_predicted')}: {value if is_query else _short(value)}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def flagged_scores(overlap: Mapping[str, Any], model: ScoredModel) -> list[dict[str, Any]]:
    """Return a model's scores with and without the examples that share n-grams with training text.

    `overlap` is a report of `find_overlap`. Its sets are found by their names or folders. A query is flagged by its own
    text and, in a further row, by that of a relevant document.

    Raises:
        UserError: none of the sets was scored.
    """
    rows = []
    pairs: Any = itertools.product(model.sets.items(), overlap["sets"])
    for ((name, metric), scores), part in pairs:
        names = {
            name.lower(),
            name.rpartition(" ")[0].lower().removesuffix("-judged"),
            Path(scores.folder).name.lower(),
        }
        found, columns = {example["id"] for example in part["found"]}, next(iter(scores.predictions.values()))
        if part["task"].lower() not in names or part["split"] not in (scores.table, "corpus"):
            continue
        relevant = (
            [[row["id"] for row in gold if row["grade"] > 0] for gold in columns["gold"]]
            if scores.table == "queries"
            else []
        )
        own = [[id] for id in columns["id"]] if part["split"] == scores.table else relevant
        flags = np.array([not found.isdisjoint(ids) for ids in own])
        row: dict[str, Any] = {"set": name, "metric": metric, "flagged by": part["split"]}
        for title, chosen in (("all", flags | True), ("flagged", flags), ("unflagged", ~flags)):
            parts = (
                [float(each.score(each.values[chosen])) for each in scores.examples.values()] if chosen.any() else []
            )
            row |= {f"{title} examples": int(chosen.sum()), title: float(np.mean(parts)) if parts else None}
        rows.append(row)
    if not rows:
        searched, scored = {part["task"] for part in overlap["sets"]}, {name for name, _ in model.sets}
        names = f"{', '.join(sorted(searched))}; it has scores of {', '.join(sorted(scored)) or 'no set'}"
        raise UserError(f"--scores {model.place}: expected scores of {names}")
    return rows
