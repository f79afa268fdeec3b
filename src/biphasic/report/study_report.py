"""Assemble the files of a study's report."""

from __future__ import annotations

from biphasic.report.formatting import (
    NOT_AVAILABLE,
    csv_table,
    escape,
    format_interval,
    format_p,
    format_points,
    format_signed,
    markdown_table,
)
from biphasic.report.study_figures import (
    ArrangedFigure,
    arrange_figures,
    differences_csv,
    draw_figure,
    figure_csv,
    figure_table,
)
from biphasic.report.study_folder import Study
from biphasic.report.study_layouts import FIGURES
from biphasic.report.study_losses import draw_losses, losses_csv
from biphasic.report.study_scores import ScoreTable, score_table
from biphasic.storage import json_bytes

LOSSES = "losses"
SIGNIFICANT = 0.05
"""Differences with a smaller corrected p-value are listed in the report; `differences.csv` has all."""


def report_files(study: Study) -> dict[str, bytes | None]:
    """Return the content of each file by name; None for a figure without data, whose file in an earlier report is stale.

    The same records and metrics give the same bytes.
    """
    table = score_table(study.rows)
    figures, missing = arrange_figures(table, study.models)
    files: dict[str, bytes | None] = {
        f"{figure.name}{suffix}": None for figure in FIGURES for suffix in (".png", ".csv")
    }
    for arranged in figures:
        files[f"{arranged.figure.name}.png"] = draw_figure(arranged, table)
        files[f"{arranged.figure.name}.csv"] = figure_csv(arranged, table)
    files[f"{LOSSES}.png"] = draw_losses(study.losses, study.events)
    files[f"{LOSSES}.csv"] = losses_csv(study.losses, study.events) if study.losses else None
    if not study.losses:
        missing[LOSSES] = "needs a run's metrics.jsonl beside its config.yaml"
    lines = ["# Study", "", *_models(study, table), *_figures(figures, table)]
    if study.losses:
        lines += [
            *["## Losses of the runs", "", f"![{LOSSES}]({LOSSES}.png)", ""],
            "Training losses are means over consecutive batches, with a band of their 95% interval. Diamonds: switches of",
            "the objective. Triangles: the learning rate begins to fall.",
            "",
        ]
    lines += [*_evaluations(study), *_left_out(study, figures, missing)]
    return {
        "report.md": ("\n".join(lines).rstrip() + "\n").encode(),
        "scores.csv": _scores_csv(study),
        "groups.json": _groups_json(table),
        "differences.csv": differences_csv(figures),
        "evaluations.csv": _evaluations_csv(study) if study.evaluations else None,
        **files,
    }


def _models(study: Study, table: ScoreTable) -> list[str]:
    body = []
    for name, facets in study.models.items():
        ratio = NOT_AVAILABLE if facets.masking_ratio is None else f"{100 * facets.masking_ratio:g}%"
        body.append([
            *(escape(name), escape(facets.size), facets.objective, ratio, f"{facets.clm_steps:,}", f"{facets.steps:,}"),
            escape(facets.continued_from or ""),
            *(_group_score(table, name, index) for index in range(len(table.groups))),
        ])  # fmt: skip
    header = ["model", "size", "objective", "masking ratio", "CLM steps", "steps", "continues"]
    return [
        *["## Models", "", *markdown_table([*header, *(escape(column.title) for column in table.groups)], body)],
        "Points (100 times the score): mean over seeds ± half of the 95% interval, at the learning rate with the best",
        "validation score. A group's mean is over its tasks. `missing`: a test set of the group has no score.",
        "",
    ]


def _group_score(table: ScoreTable, model: str, index: int) -> str:
    interval = table.cell(model, table.groups[index]).interval
    return "missing" if interval is None else format_interval(interval, format_points)


def _figures(figures: list[ArrangedFigure], table: ScoreTable) -> list[str]:
    lines: list[str] = []
    for arranged in figures:
        figure = arranged.figure
        lines += [f"## {figure.title}", "", f"![{figure.name}]({figure.name}.png)", ""]
        lines += [f"{figure.caption} Bars: 95% intervals. Hollow: not all seeds, or a rate that may still change.", ""]
        lines += [*figure_table(arranged, table), *_significant(arranged)]
    return lines


def _significant(arranged: ArrangedFigure) -> list[str]:
    if not arranged.differences:
        return []
    significant = [d for d in arranged.differences if d.corrected_p is not None and d.corrected_p < SIGNIFICANT]
    count = f"{len(arranged.differences)} differences between models with the same line or position"
    lines = [
        f"{count}, paired by seed: p < {SIGNIFICANT} after Holm's correction over them for {len(significant)}.",
        "",
    ]
    body = [
        [
            *(escape(compared.column.title), escape(compared.first), escape(compared.second)),
            format_interval(compared.difference, format_signed),
            format_p(compared.corrected_p),
        ]
        for compared in significant
    ]
    return lines + (markdown_table(["", "model", "minus", "difference", "p, Holm"], body) if body else [])


def _evaluations(study: Study) -> list[str]:
    if not study.evaluations:
        return []
    body = [
        [
            *(escape(row.model), escape(row.system), escape(row.task), escape(row.split), row.documents, row.metric),
            f"{row.value:.4f}",
            "" if row.interval is None else " to ".join(f"{bound:.4f}" for bound in row.interval),
        ]
        for row in study.evaluations
    ]
    header = ["model", "system", "task", "split", "documents", "metric", "score", "95% interval"]
    return ["## Evaluations", "", *markdown_table(header, body)]


def _left_out(study: Study, figures: list[ArrangedFigure], missing: dict[str, str]) -> list[str]:
    reasons = [f"- `{name}` {reason}." for name, reason in missing.items()]
    reasons += [
        f"- `{arranged.figure.name}` doesn't show {escape(name)}, because {escape(shown)} has the same place in it."
        for arranged in figures
        for name, shown in arranged.layout.hidden.items()
    ]
    reasons += [f"- {escape(reason)}." for reason in [*study.unplaced.values(), *study.notes]]
    return ["## Left out", "", *(reasons or ["Nothing."]), ""]


def _scores_csv(study: Study) -> bytes:
    rows = []
    for row in study.rows:
        facets = study.models.get(row.model)
        known = (facets.size, facets.objective, facets.masking_ratio, facets.clm_steps, facets.total_steps, facets.steps,
                 facets.continued_from) if facets is not None else (None,) * 7  # fmt: skip
        rows.append([
            *(row.model, *known, row.group, row.trained_on, row.task, row.test_set),
            *(row.seed, row.score, "yes" if row.settled else "no"),
        ])  # fmt: skip
    columns = (
        "model size objective masking_ratio clm_steps total_steps steps continued_from group trained_on task test_set"
    )
    return csv_table(f"{columns} seed score settled", rows)


def _groups_json(table: ScoreTable) -> bytes:
    """Return the groups' means by model, from 0 to 1, for programs such as `--check`."""
    means: dict[str, dict[str, float]] = {}
    for (model, column), cell in table.cells.items():
        if not column.task and cell.interval is not None:
            means.setdefault(model, {})[column.group] = cell.interval.mean
    return json_bytes(dict(sorted(means.items())))


def _evaluations_csv(study: Study) -> bytes:
    rows = [
        [
            row.model,
            row.system,
            row.task,
            row.split,
            row.documents,
            row.metric,
            row.value,
            *(row.interval or (None, None)),
        ]
        for row in study.evaluations
    ]
    return csv_table("model system task split documents metric value low high", rows)
