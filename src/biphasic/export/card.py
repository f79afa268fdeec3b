"""Write an export's model card: of a pretrained model, of initial weights, or of a fine-tuned model."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData
from jinja2 import Template

from biphasic.config.model_names import model_name
from biphasic.durations import BatchShape, longest_row, recorded_shapes
from biphasic.export.folder import hub_id, parse_card, quote_numbers

_TEMPLATE = Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8")
_CARD = Template(_TEMPLATE, trim_blocks=True, keep_trailing_newline=True)
_PIPELINES = {"classification": "text-classification", "multi_label": "text-classification",
              "regression": "text-classification", "tokens": "token-classification",
              "question_answering": "question-answering", "answer_tokens": "question-answering",
              "retrieval": "sentence-similarity"}  # fmt: skip
"""The hub's pipeline tag by the kind of task."""


def pretrained_card(
    record: dict[str, Any], name: str | None = None, *, family: str = "eurobert", has_code: bool = False
) -> str:
    """Return a pretrained model's card from its checkpoint's record. The title is `name`, by default `model_name`.

    `family` is the export's `model_type`, and `has_code` whether the folder has Python code. Raises a UserError if the
    hub would refuse the card's metadata.
    """
    config = yaml.safe_load(record["config"])
    trained = [phase for phase in record["phases"] if phase["batches"]]
    order = ", then ".join(phase["words"] for phase in trained)
    datasets = [path for path in dict.fromkeys(s["path"] for s in _hub_sources(record["data"])) if hub_id(path)]
    return _card(
        "pretrained",
        name or model_name(config, record) + "-merged" * ("merged" in record),
        config["model"].get("init_from"),
        {"datasets": datasets or None},
        family=family,
        has_code=has_code,
        about=f"A text encoder pretrained with {order} (recipe: arXiv 2507.00994), {record['tokens']:,} tokens in all.",
        rows=_training(record, config),
        phases=_phases(record, config),
        losses={key: f"{value:.4f}" for key, value in sorted(record["losses"].items())},
        config=record["config"].rstrip(),
        length=f"{longest_row(config):,}",
        has_bos=bool(record["data"].get("add_bos")),
        shifted=config["objective"]["phases"][len(trained) - 1].get("target") == "next",
        causal=all(phase["causal"] for phase in trained),
    )


def untrained_card(
    config: dict[str, Any], name: str | None = None, *, family: str = "eurobert", has_code: bool = False
) -> str:
    """Return the card of a run's initial weights. Arguments and errors are as for `pretrained_card`."""
    start = config["model"].get("init_from")
    weights = f", from `{start}`" if start else f" (seed {config['seed']}), untrained"
    about = f"The initial weights of the run `{config['run_name']}`{weights}."
    name = name or f"{config['run_name']}-initial"
    return _card("initial", name, start, family=family, has_code=has_code, about=about)


def finetuned_card(
    name: str,
    rows: dict[str, Any],
    task: Any,
    max_length: int,
    *,
    family: str,
    has_code: bool,
    has_head_class: bool,
    has_own_code: bool = False,
    marks_continuations: bool = False,
) -> str:
    """Return the card of a fine-tuned model, with `rows` as its table and code that runs it on the YAML's `task:`.

    Errors are as for `pretrained_card`.

    Args:
        max_length: number of tokens to which inputs are truncated.
        has_head_class: whether transformers has a class with the head.
        has_own_code: whether the code is the model's own, not that of an export.
        marks_continuations: whether the tokenizer marks tokens within a word (WordPiece), so that a pipeline takes all
            others for words.
    """
    metadata = {"pipeline_tag": _PIPELINES[task.kind]}
    if task.kind == "retrieval" or not has_head_class:
        metadata["library_name"] = "sentence-transformers" if task.kind == "retrieval" else "biphasic"
    values: dict[str, Any] = {"has_head_class": has_head_class, "has_own_code": has_own_code}
    values["marks_continuations"] = marks_continuations
    if task.kind == "retrieval":
        roles = {"query": task.query_prompt, "document": task.document_prompt}
        values["prompts"] = [f"`{json.dumps(text)}` before a {role}" for role, text in roles.items() if text]
        values["dimensions"] = task.dimensions
    if task.kind in ("classification", "multi_label", "regression"):
        texts = {"text": '"A man plays the guitar."', "text_pair": '"Somebody makes music."'}
        arguments = ", ".join(f"{name}={text}" for name, text in texts.items() if f"{{{name}}}" in task.text)
        template = json.dumps(task.text, ensure_ascii=False)
        values["text"] = texts["text"] if task.text == "{text}" else f"{template}.format({arguments})"
        values["is_pair"] = "{text_pair}" in task.text
    values["labels_all"] = task.kind == "tokens" and task.labelled == "all"
    values |= {"family": family, "has_code": has_code, "rows": rows, "length": f"{max_length:,}"}
    return _card(task.kind, name, rows.get("From"), metadata, **values)


def _card(kind: str, name: str, trained_from: str | None, metadata: dict[str, Any] | None = None, **values: Any) -> str:
    """Return a card without credentials in URLs, and without a license for a model trained from another one.

    `kind` is `pretrained`, `initial` or that of the fine-tuned model's task.
    """
    base = hub_id(trained_from)
    data: dict[str, Any] = {
        "license": None if trained_from else "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["biphasic", values["family"], "encoder"],
        "base_model": base,
        **(metadata or {}),
    }
    if data["pipeline_tag"] in ("feature-extraction", "sentence-similarity"):
        data["tags"].append("sentence-transformers")
    values |= {"kind": kind, "name": name, "trained_from": trained_from, "base": base}
    text = quote_numbers(_CARD.render(metadata=ModelCardData(**data).to_yaml(), **values))
    text = re.sub(r"://[^/\s@]+@", "://", text)
    parse_card(text)
    return text


def _training(record: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    data, shapes = record["data"], recorded_shapes(config)
    rows = {
        "Steps": f"{record['batches']:,}{_of_rows(shapes[0]) if len(set(shapes)) == 1 else ''}",
        "Hardware": f"{record['ranks']} x {record['hardware']}, {record['seconds'] / 3600:.2f} hours",
        "Software": ", ".join(f"{package} {version}" for package, version in record["versions"].items() if version),
        "Command": f"`{record['command']}`",
    }
    if "merged" in record:
        parts = (f"{p['weight']:.6g} {p['checkpoint']} (manifest {p['manifest_sha256']})" for p in record["merged"])
        rows["Merged"] = f"mean of {len(record['merged'])} checkpoints, by weight: {', '.join(parts)}"
    if data:
        counts = [f"{data[name]:,} {name}" for name in ("tokens", "documents", "rows") if name in data]
        rows["Data"] = f"{_source(data.get('source'))}: {', '.join(counts)}"
        if later := [_source(each.get("source")) for each in data.get("later", [])]:
            rows["Data of later phases"] = "; ".join(later)
        revisions = [
            source["path"] + (f" {source['revision']}" if source.get("revision") else ", newest at the conversion")
            for source in _hub_sources(data)
        ]
        rows |= {"Data revision": ", ".join(revisions)} if revisions else {}
        rows["Tokenizer"] = f"sha256 {data['tokenizer_sha256']}"
    return rows


def _hub_sources(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the `source:` sections of the data's conversions (several for a mix) that name a dataset on the hub."""
    parts = [part for each in (data, *data.get("later", [])) for part in (each.get("mix") or {"": each}).values()]
    sources = [part.get("source") for part in parts]
    return [source for source in sources if isinstance(source, dict) and source.get("kind") == "hub"]


def _source(source: Any) -> str:
    """Format a conversion's `source:` section as one line."""
    if not isinstance(source, dict):
        return str(source)
    parts = source.get("paths") or [source.get(name) for name in ("path", "name", "split")]
    return ", ".join(str(part) for part in parts if part is not None)


def _phases(record: dict[str, Any], config: dict[str, Any]) -> list[list[str]]:
    """Return the objective, steps, tokens and masking ratio of each phase, and its batches if those of phases differ."""
    phases, shapes = [], recorded_shapes(config)
    for done, phase, shape in zip(record["phases"], config["objective"]["phases"], shapes, strict=False):
        ratio = phase.get("masking_ratio", "")
        shown = f"{ratio['start']} to {ratio['end']}" if isinstance(ratio, dict) else str(ratio)
        steps = f"{done['batches']:,}{_of_rows(shape) if len(set(shapes)) > 1 else ''}"
        phases.append([done["name"], steps, f"{done['tokens']:,}", shown])
    return phases


def _of_rows(shape: BatchShape) -> str:
    return f" of {shape.rows:,} rows of {shape.row_length:,}"
