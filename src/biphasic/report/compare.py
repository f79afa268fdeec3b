"""Compare two models on the same test sets: paired intervals and tests, and the examples that changed most."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from tabulate import tabulate

from biphasic.errors import UserError
from biphasic.report.example_scores import Columns, ScoredModel, SetScores
from biphasic.report.formatting import format_p
from biphasic.report.statistics import ExampleValues, holm, paired_test

_CHANGED = 10
"""Number of examples that are shown for a test set."""
_SHOWN_CHARACTERS = 120


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
        raise UserError(f"the runs {problem}: predictions of {only}; none (other tasks, old or unfinished) of {left_out}")
    for name, metric in shared:
        scores = first.sets[name, metric], second.sets[name, metric]
        _require_same_data(f"{name}: {first.place} and {second.place}", *scores)
        common = sorted(scores[0].examples.keys() & scores[1].examples.keys())
        seeds = [common or sorted(each.examples) for each in scores]
        # Without a seed in common all count, repeated to equal numbers, since the values are exchanged pair by pair.
        pairs, repeats = list(zip(scores, seeds, strict=True)), math.lcm(*map(len, seeds))
        chosen = [[each.examples[seed] for seed in own] * (repeats // len(own)) for each, own in pairs]
        one, other = (each.predictions[own[0]] for each, own in pairs)
        counts = {"set": name, "metric": metric, "examples": len(one["id"]), "seeds": seeds,
                  "unused_seeds": [sorted(each.examples.keys() - own) for each, own in pairs]}  # fmt: skip
        sets.append({**counts, **paired_test(*chosen), "by_example": _by_example(one, other, *chosen)})
    for row, p in zip(sets, holm(pd.Series([row["p"] for row in sets])), strict=True):
        row["holm_p"] = float(p)
    return {"a": first.place, "b": second.place, "sets": sets, "only_in": only, "left_out": left_out}


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


def _by_example(one: Columns, other: Columns, first: list[ExampleValues], second: list[ExampleValues]) -> list[Any]:
    """Return every example with both scores, those that changed most first, of which ten have their predictions."""
    qualities = [np.mean([values.quality for values in each], 0) for each in (first, second)]
    rows = [{"id": id, "a": float(x), "b": float(y)} for id, x, y in zip(one["id"], *qualities, strict=True)]
    changes = np.abs(qualities[1] - qualities[0])
    order = np.argsort(-changes, kind="stable")
    for at in order[: min(_CHANGED, np.count_nonzero(changes))]:
        rows[at] |= {
            "gold": one["gold"][at],
            "a_predicted": one["predicted"][at],
            "b_predicted": other["predicted"][at],
        }
        if "text" in one:
            rows[at]["text"] = one["text"][at]
    return [rows[at] for at in order]


def describe(report: Mapping[str, Any]) -> str:
    """Return a table of a report's differences in Markdown, and the examples that changed most on each test set."""
    columns = ("set", "metric", "examples", "seeds", "A", "B", "B - A", "95% interval", "p", "p (Holm)")
    rows = [
        (row["set"], row["metric"], f"{row['examples']:,}",
         " and ".join(dict.fromkeys(str(len(seeds)) for seeds in row["seeds"])), f"{row['a']:.4f}", f"{row['b']:.4f}",
         f"{row['difference']:+.4f}", " to ".join(f"{end:+.4f}" for end in row["interval"]), format_p(row["p"]),
         format_p(row["holm_p"]))
        for row in report["sets"]
    ]  # fmt: skip
    table = tabulate(rows, columns, "pipe", disable_numparse=True, colalign=["left"] * 2 + ["right"] * 8)
    lines = [f"A: {report['a']}", f"B: {report['b']}", "", table]
    for key, title in (("only_in", "only in"), ("left_out", "without all predictions in")):
        lines += [f"{title} {place}: {', '.join(names)}" for place, names in report[key].items() if names]
    for row in report["sets"]:
        name, (a, b) = f"{row['set']} {row['metric']}", row["seeds"]
        lines += [f"{name}: no seed is in both: means over the seeds {a} of A and {b} of B"] * (a != b)
        lines += [f"{name}: left out the seeds {own} of {model}: the other has none of them"
                  for model, own in zip("AB", row["unused_seeds"], strict=True) if own]  # fmt: skip
    for row in report["sets"]:
        if changed := [example for example in row["by_example"] if "gold" in example]:
            lines.append(f"\n{row['set']} {row['metric']}: the {len(changed)} examples that changed most")
        for example in changed:
            scores = f"{example['a']:.4f} to {example['b']:.4f}"
            lines.append(f"  {example['id']}: {scores}  {_short(example.get('text', ''))}".rstrip())
            for name in ("gold", "a_predicted", "b_predicted"):
                lines.append(f"    {name.removesuffix('_predicted')}: {_short(example[name])}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
