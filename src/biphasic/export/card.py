"""Write an export's model card from the record of its training run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from biphasic.config.durations import Duration, TrainingProgress
from biphasic.export.metadata import hub_id, parse_card
from biphasic.export.usage import ExportForm, describe_use

_LOAD = """## Use

```python
from transformers import AutoModel, AutoTokenizer  # transformers >= 5

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModel.from_pretrained("{name}"{trust})
```

```python
from sentence_transformers import SentenceTransformer  # mean pooling

embeddings = SentenceTransformer("{name}"{trust}).encode(["a text", "another"])
```
{code}
Attention is bidirectional. Texts have no beginning-of-text token, as in training.
"""
_CODE = """
The folder holds Python code that makes this family's attention bidirectional; `trust_remote_code=True` lets transformers run
it. Read the code first, and name a `revision`, so that it does not change afterwards.
"""
_LIMITS = """## Limits

- It reproduces the errors, gaps and biases of its training text, which were not measured.
{more}"""
_PRETRAINED = "- It is a pretrained encoder, not trained for similarity or search: fine-tune it for a task.\n"
_LENGTH = "- Texts are cut after {length:,} tokens.\n"
_WINDOWS = "- A context is read in overlapping windows of up to {length:,} tokens, each with the question.\n"
_UNTRAINED = "- It is not trained: its outputs are random.\n"
_FINETUNED = """- It was trained for one task, on the data named above: measure it before other uses.
"""
_SHIFTED = """- Its head was trained with `target: next`: the logits at a position predict the token after it.
"""
_CAUSAL = """- It was trained with causal attention. Loaded, its attention is bidirectional: fine-tune it before use.
"""
_BASE = "- It was trained from `{base}`, whose license applies to it too; none is named here.\n"
_LANGUAGES = {"HuggingFaceFW/fineweb-edu": ["en"]}
"""Languages of datasets on the hub, according to their dataset cards."""


def model_name(config: dict[str, Any], record: dict[str, Any]) -> str:
    """Return the model's name: as the paper names its released models if the size is a preset, else from the run's name.

    The paper's scheme is `{size}-{objective}-{steps}`, with the objective and last step of each phase
    (`610m-clm-10k-mlm40-42k`). A checkpoint from before the end of the run also has its step in the name
    (`610m-mlm40-42k-1000`).
    """
    total, size = Duration.parse(config["max_duration"]), config["model"].get("preset")
    parts = [config["run_name"]] if size is None else [size, *_phase_names(config["objective"]["phases"], total)]
    done = TrainingProgress(**{name: record[name] for name in ("batches", "rows", "tokens", "epochs")})
    return "-".join(parts if done.reached(total) else [*parts, str(done.batches)])


def _phase_names(phases: list[dict[str, Any]], total: Duration) -> list[str]:
    names = []
    for phase in phases:
        ratio = phase.get("masking_ratio")
        end = Duration.parse(phase["until"]).resolve(total) if phase.get("until") else total
        thousands = end.unit == "ba" and end.value % 1000 == 0
        steps = f"{end.value / 1000:.0f}k" if thousands else str(end).removesuffix("ba")
        names += [phase["name"] + (f"{100 * ratio:.0f}" if isinstance(ratio, float) else ""), steps]
    return names


def pretrained_card(record: dict[str, Any], name: str | None = None, *, remote_code: bool = False) -> str:
    """Return the card of a pretrained model.

    Args:
        record: the checkpoint's record (`biphasic.model.checkpoint.Checkpoint.record`).
        name: the title. Default: `model_name`.
        remote_code: whether the export needs `trust_remote_code=True`, as families other than Llama's do.

    Raises:
        UserError: the hub would refuse the card's metadata.
    """
    config = yaml.safe_load(record["config"])
    name = name or model_name(config, record)
    datasets = [path for path in dict.fromkeys(s["path"] for s in _hub_sources(record["data"])) if hub_id(path)]
    languages = sorted({language for path in datasets for language in _LANGUAGES.get(path, [])})
    start = config["model"].get("init_from")
    family = json.loads(record["backbone"])["model_type"] if remote_code else "eurobert"
    front = _front(trained_from=start, datasets=datasets, languages=languages, family=family)
    parts = [front, f"# {name}\n", _summary(record)]
    parts.append(_table("Training", _training(record, config)))
    parts.append(_phases(record, config))
    if record["losses"]:
        losses = {key: f"{value:.4f}" for key, value in sorted(record["losses"].items())}
        parts.append(_table("Losses at the end (nats per predicted token)", losses))
    parts.append(f"The complete configuration:\n\n```yaml\n{record['config'].rstrip()}\n```\n")
    trained = [phase for phase in record["phases"] if phase["batches"]]
    last = config["objective"]["phases"][len(trained) - 1]
    limits = [_PRETRAINED, _LENGTH.format(length=config["data"]["sequence_length"])]
    limits += [_SHIFTED] if last.get("target") == "next" else []
    limits += [] if any(phase["name"] == "mlm" for phase in trained) else [_CAUSAL]
    return _finished([*parts, _use(name, remote_code), _limits(limits, hub_id(start))])


def untrained_card(config: dict[str, Any], name: str | None = None, *, remote_code: bool = False) -> str:
    """Return the card of a run's initial weights. `remote_code` and errors are as for `pretrained_card`."""
    name = name or f"{config['run_name']}-initial"
    start = config["model"].get("init_from")
    weights = f", from `{start}`" if start else f" (seed {config['seed']}), untrained"
    text = f"The initial weights of the run `{config['run_name']}`{weights}.\n"
    front = _front(trained_from=start, family=None if remote_code else "eurobert")
    limits = _limits([] if start else [_UNTRAINED], hub_id(start))
    return _finished([front, f"# {name}\n", text, _use(name, remote_code), limits])


def finetuned_card(name: str, rows: dict[str, Any], task: Any, form: ExportForm, max_length: int) -> str:
    """Return the card of a fine-tuned model.

    Args:
        name: the title.
        rows: the rows of the card's fine-tuning table.
        task: the YAML's `task:` section.
        form: the form of the export.
        max_length: number of tokens to which the model's inputs are cut.

    Raises:
        UserError: the hub would refuse the card's metadata.
    """
    start = rows.get("From")
    pipeline, library, use = describe_use(name, task, form)
    front = _front(pipeline, library, trained_from=start, family=form.family)
    parts = [front, f"# {name}\n", _table("Fine-tuning", rows), f"## Use\n\n{use}", *([_CODE] if form.has_code else [])]
    length = _WINDOWS if task.kind == "question_answering" else _LENGTH
    return _finished([*parts, _limits([_FINETUNED, length.format(length=max_length)], hub_id(start))])


def _finished(parts: list[str]) -> str:
    """Return the card without credentials, which URLs in the configuration or command may contain."""
    text = re.sub(r"://[^/\s@]+@", "://", "\n".join(parts))
    parse_card(text)
    return text


def _front(
    pipeline: str = "feature-extraction",
    library: str = "transformers",
    *,
    trained_from: str | None = None,
    datasets: Sequence[str] = (),
    languages: Sequence[str] = (),
    family: str | None = "eurobert",
) -> str:
    """Return the metadata for the hub. A model trained from another one has no license unless `--license` names it."""
    embeds = pipeline in ("feature-extraction", "sentence-similarity")
    data = ModelCardData(
        language=list(languages) or None,
        license=None if trained_from else "apache-2.0",
        library_name=library,
        pipeline_tag=pipeline,
        tags=[tag for tag in ("biphasic", family, "encoder", embeds and "sentence-transformers") if tag],
        base_model=hub_id(trained_from),
        datasets=list(datasets) or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _use(name: str, remote_code: bool) -> str:
    trust, code = (", trust_remote_code=True", _CODE) if remote_code else ("", "")
    return _LOAD.format(name=name, trust=trust, code=code)


def _limits(limits: Sequence[str], base: str | None) -> str:
    return _LIMITS.format(more="".join([*limits, *([_BASE.format(base=base)] if base else [])]))


def _summary(record: dict[str, Any]) -> str:
    names = {"clm": "causal language modeling", "mlm": "masked language modeling"}
    order = ", then ".join(names[phase["name"]] for phase in record["phases"] if phase["batches"])
    return f"A text encoder pretrained with {order} (recipe: arXiv 2507.00994), {record['tokens']:,} tokens in all.\n"


_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for the layers' matrices, AdamW for the rest"}


def _training(record: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    data, optimizer, schedule = record["data"], config["optimizer"], config["schedule"]
    decay = f"{schedule['decay']} {schedule['decay_shape']} decay to {schedule['final_lr']}"
    rows = {
        "Steps": f"{record['batches']:,} of {config['global_batch_size']:,} rows of {config['data']['sequence_length']:,}",
        "Learning rate": f"{optimizer['lr']}, {schedule['warmup']} warmup, {decay}",
        "Optimizer": f"{_OPTIMIZERS[optimizer['name']]}, betas {optimizer['betas']}, eps {optimizer['eps']}, weight decay "
        f"{optimizer['weight_decay']}",
        "Precision": config["precision"],
        "Hardware": f"{record['ranks']} x {record['hardware']}, {record['seconds'] / 3600:.2f} hours",
        "Software": ", ".join(f"{package} {version}" for package, version in record["versions"].items()),
        "Command": f"`{record['command']}`",
    }
    if config["model"].get("init_from"):
        rows["Trained from"] = f"`{config['model']['init_from']}`"
    if data:
        counts = [f"{data[name]:,} {name}" for name in ("tokens", "documents", "rows") if name in data]
        rows["Data"] = f"{_source(data.get('source'))}: {', '.join(counts)}"
        revisions = [
            f"{source['path']} {source['revision']}"
            if source.get("revision")
            else f"{source['path']}, newest at the conversion"
            for source in _hub_sources(data)
        ]
        if revisions:
            rows["Data revision"] = ", ".join(revisions)
        rows["Tokenizer"] = f"sha256 {data['tokenizer_sha256']}"
    return rows


def _hub_sources(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the `source:` sections of the data's conversions (several for a mix) that name a dataset on the hub."""
    sources = [part.get("source") for part in (data.get("mix") or {"": data}).values()]
    return [source for source in sources if isinstance(source, dict) and source.get("kind") == "hub"]


def _source(source: Any) -> str:
    """Format a conversion's `source:` section as one line."""
    if not isinstance(source, dict):
        return str(source)
    parts = source.get("paths") or [source.get(name) for name in ("path", "name", "split")]
    return ", ".join(str(part) for part in parts if part is not None)


def _phases(record: dict[str, Any], config: dict[str, Any]) -> str:
    lines = ["| phase | objective | steps | tokens | masking ratio |", "|-|-|-|-|-|"]
    for index, (done, phase) in enumerate(zip(record["phases"], config["objective"]["phases"], strict=False)):
        ratio = phase.get("masking_ratio", "")
        shown = f"{ratio['start']} to {ratio['end']}" if isinstance(ratio, dict) else ratio
        lines.append(f"| {index} | {done['name']} | {done['batches']:,} | {done['tokens']:,} | {shown} |")
    return "\n".join([*lines, ""])


def _table(title: str, rows: dict[str, Any]) -> str:
    cells = {name: str(value).replace("|", r"\|") for name, value in rows.items()}
    lines = [f"## {title}\n", "| | |", "|-|-|", *(f"| {name} | {value} |" for name, value in cells.items())]
    return "\n".join([*lines, ""])
