"""Compare the scores of a sweep or a study with the paper's: differences, and which orders of models agree.

    python recipes/paper/against.py runs/paper
    python recipes/paper/against.py runs/mini/study --models recipes/mini/paper_models.yaml

It writes against.md, against.csv, orders.csv and, of a sweep, cells.csv into `report` in the (first local) folder, and
prints the page. docs/report.md explains them.
"""

import argparse
import sys
from itertools import combinations
from pathlib import Path

import pandas as pd
import yaml
from scipy import stats

from biphasic.config.load import load
from biphasic.config.model_names import facets_of_models
from biphasic.config.study import StudyConfig, expand
from biphasic.errors import UserError
from biphasic.report.formatting import (
    csv_table,
    escape,
    format_interval,
    format_points,
    format_rate,
    format_signed,
    markdown_page,
    markdown_table,
)
from biphasic.report.scores import ScoreTable, chosen_scores, differences, name_origins, read_sweep, score_table
from biphasic.report.statistics import CONFIDENCE, holm
from biphasic.report.study_folder import read_study
from biphasic.storage import is_remote, join, open_store
from biphasic.sweep.records import GRID_FILE

HERE = Path(__file__).parent
_CELL = ["test_set", "split", "lr", "seed"]


def read_reference(models: Path | None = None) -> pd.DataFrame:
    """Return reference.csv with `published` (0 to 1) in place of `score`, and `measured_model`.

    A line is the mean of a task group, with an empty `test_set`, or a cell: the score on one split of a test set with a
    learning rate and a seed. `models` is a YAML of `published model: measured model`; other models are left out.
    """
    table = pd.read_csv(HERE / "reference.csv", keep_default_na=False)
    names = {name: name for name in table.model}
    if models is not None:
        names = yaml.safe_load(models.read_text(encoding="utf-8"))
        if unknown := names.keys() - set(table.model):
            raise UserError(f"{models}: {min(unknown)}: expected a model with published scores")
    table = table[table.model.isin(list(names))]
    table = table.assign(measured_model=table.model.map(names), published=(table.score / 100).round(10))
    return table.drop(columns=["score", "note"])


def compare_scores(reference: pd.DataFrame, table: ScoreTable) -> pd.DataFrame:
    """Return published means of groups beside the measured ones, which are NaN where they are missing.

    `difference`: measured minus published. `complete`: no missing trial could change the measured score.
    """
    means = table.means.reset_index().query("test_set == '' and seeds > 0").rename(columns={"score": "measured"})
    means = means[["model", "group", "measured", "half_width", "seeds", "complete", "text"]]
    means = means.rename(columns={"model": "measured_model"})
    compared = reference[reference.test_set == ""].drop(columns=_CELL).merge(means, "left", ["measured_model", "group"])
    complete, seeds = compared.complete.eq(True), compared.seeds.fillna(0).astype(int)
    return compared.assign(complete=complete, seeds=seeds, difference=compared.measured - compared.published)


def compare_cells(reference: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """Return published cells beside those of a sweep's `trial_table` at the same rate, as means over the seeds.

    The difference has the 95% interval of the t-test with pooled variance; with one published seed, the spread is that of
    the measured ones, of which there are at least two. `agrees`: the interval includes zero. A test set of several
    training tasks has a cell for each.
    """
    cells = reference[reference.test_set != ""]
    cells = cells.assign(score=cells.published, lr=pd.to_numeric(cells.lr)).drop(columns="model")
    key = ["measured_model", "test_set", "split", "lr"]
    measured = trials.rename(columns={"model": "measured_model"}).assign(named=name_origins(trials).test_set)
    columns = ["measured_model", "named", "test_set", "lr", "seed"]
    measured = measured.melt(columns, ["validation", "test"], "split", "score").dropna()
    ours, theirs = (
        table.groupby(by).score.agg(["mean", "var", "count"]).reset_index()
        for table, by in ((measured, [*key, "named"]), (cells, key))
    )
    both = ours.merge(theirs, on=key, suffixes=("", "_published"))
    both["test_set"] = both.pop("named")
    both = both[both["count"] > 1]
    freedom = both["count"] + both.count_published - 2
    squares = both["var"] * (both["count"] - 1) + both.var_published.fillna(0.0) * (both.count_published - 1)
    error = (squares / freedom * (1 / both["count"] + 1 / both.count_published)) ** 0.5
    half, difference = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * error, both["mean"] - both.mean_published
    names = {"mean": "measured", "count": "seeds", "mean_published": "published", "count_published": "published_seeds"}
    both = both.assign(difference=difference, half_width=half, agrees=difference.abs() <= half)
    return both.rename(columns=names).drop(columns=["var", "var_published"])


def compare_orders(reference: pd.DataFrame, table: ScoreTable) -> pd.DataFrame:
    """Return, for each group and pair of models with different published scores, whether the measured order agrees.

    `first` is the model with the better published score. Pairs without a common seed are left out. P-values are
    corrected by Holm's method over these pairs. `agrees`: the measured order is the published one. `clear`: the 95%
    interval of the measured difference excludes zero.
    """
    reference = reference[reference.test_set == ""]
    orders = differences(table, list(combinations(reference.measured_model.unique(), 2)), table.groups)
    renamed = {"difference": "measured", "first": "first_measured", "second": "second_measured"}
    orders = orders[orders.seeds > 0].rename(columns=renamed)
    published = reference[["measured_model", "group", "model", "published"]]
    for side in ("first", "second"):
        of_side = published.set_axis([f"{side}_measured", "group", side, f"{side}_score"], axis=1)
        orders = orders.merge(of_side, on=[f"{side}_measured", "group"])
    orders["published"] = orders.first_score - orders.second_score
    worse = orders.published < 0
    orders.loc[worse, ["published", "measured"]] *= -1
    for names in (["first", "second"], ["first_measured", "second_measured"]):
        orders.loc[worse, names] = orders.loc[worse, names[::-1]].to_numpy()
    study = load(str(HERE / "study.yaml"))
    assert isinstance(study, StudyConfig)
    facets, _ = facets_of_models(reference.model.unique(), expand(study))
    budgets = {name: f"{of_model.size} {of_model.steps}" for name, of_model in facets.items()}
    orders = orders[orders.published != 0]
    return orders.assign(
        agrees=orders.measured > 0,
        clear=orders.measured.abs() > orders.half_width,
        same_size_and_steps=orders["first"].map(budgets) == orders["second"].map(budgets),
        p_holm=holm(orders.p.astype(float)),
    ).drop(columns=["first_score", "second_score", "test_set", "settled"])


def _scores_section(scores: pd.DataFrame) -> list[str]:
    body = [
        [_shown_name(row.model, row.measured_model), row.group,
         format_points(row.published) + (" (second-hand)" if row.second_hand == "yes" else ""), row.text,
         format_signed(row.difference)]
        for row in scores[scores.seeds > 0].itertuples()
    ]  # fmt: skip
    header = ["model", "group", "published", "measured", "measured minus published"]
    return [
        *["## Scores", "", *markdown_table(header, body)],
        f"{len(body)} of {len(scores)} published scores have a measured one. Second-hand: not read in the paper.",
        "",
    ]


def _orders_section(orders: pd.DataFrame) -> list[str]:
    body = []
    for group, of_group in orders.groupby("group", sort=False):
        for title, rows in (("all", of_group), ("same size and steps", of_group[of_group.same_size_and_steps])):
            counts = len(rows), rows.agrees.sum(), (rows.agrees & rows.clear).sum(), (~rows.agrees & rows.clear).sum()
            body.append([group, title, *counts])
    return [
        *["## Orders", ""],
        "For two models of the table, whether the one with the better published score also has the better measured one.",
        "Clearly: the 95% interval of the measured difference, paired by seed, doesn't contain zero.",
        "",
        *markdown_table(["group", "models", "orders", "agree", "clearly", "clearly opposite"], body),
    ]


def _cells_section(cells: pd.DataFrame) -> list[str]:
    body = [
        [escape(row.measured_model), escape(row.test_set), row.split, format_rate(row.lr),
         f"{format_points(row.measured)} ({row.seeds})", f"{format_points(row.published)} ({row.published_seeds})",
         format_interval(row.difference, row.half_width, format_signed), "yes" if row.agrees else "no"]
        for row in cells.itertuples()
    ]  # fmt: skip
    header = ["model", "test set", "split", "rate", "measured (seeds)", "published (seeds)", "difference", "agrees"]
    return ["", "## At the same rate", "", *markdown_table(header, body)]


def _shown_name(model: str, measured: str) -> str:
    return escape(model) if measured == model else f"{escape(model)} (here {escape(measured)})"


def write_comparison(folders: list[str], models: Path | None = None) -> None:
    """Write the files of the comparison, and print the page. `models` is as for `read_reference`."""
    reference, trials = read_reference(models), None
    if absent := [folder for folder in folders if not is_remote(folder) and not Path(folder).is_dir()]:
        raise UserError(f"{absent[0]}: doesn't exist")
    if open_store(folders[0]).stat(GRID_FILE) is not None:
        trials = read_sweep(folders[0])[1]
        scores = chosen_scores(trials)
    else:
        scores = read_study(folders).scores
    table = score_table(scores[scores.score.notna()], scores.seed.nunique())
    compared, orders = compare_scores(reference, table), compare_orders(reference, table)
    files = {"against.csv": csv_table(compared.drop(columns="text")), "orders.csv": csv_table(orders)}
    lines = ["# Against the paper", "", *_scores_section(compared), *_orders_section(orders)]
    if trials is not None:
        cells = compare_cells(reference, trials)
        files["cells.csv"] = csv_table(cells)
        lines += _cells_section(cells)
    files["against.md"] = markdown_page(lines)
    target = open_store(join(next(folder for folder in folders if not is_remote(folder)), "report"))
    for name, content in files.items():
        target.write(name, content)
    print(files["against.md"].decode())


def main(arguments: list[str] | None = None) -> int:
    """Write the comparison."""
    parser = argparse.ArgumentParser(description="Compare a sweep's or a study's scores with the paper's.")
    parser.add_argument("folders", nargs="+", help="a sweep's output or a study's folders, one of them local")
    parser.add_argument("--models", type=Path, help="a YAML with lines `published model: measured model`")
    options = parser.parse_args(arguments)
    try:
        write_comparison(options.folders, options.models)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
