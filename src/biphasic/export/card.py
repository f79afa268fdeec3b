"""The model card of an export, filled in from what the run recorded of itself."""

from __future__ import annotations

from typing import Any

import yaml

_LOAD = """## Use

```python
from transformers import AutoModel, AutoTokenizer  # transformers >= 5; with 4.57: import biphasic first

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModel.from_pretrained("{name}")
```

```python
from sentence_transformers import SentenceTransformer  # mean pooling

embeddings = SentenceTransformer("{name}").encode(["a text", "another"])
```

Attention looks both ways. Texts are given without a beginning-of-text token, as in training.
"""
_LIMITS = """## Limits

A pretrained encoder: fine-tune it for a task. It knows what its training text says, with that text's errors and biases.
"""


def run_name_of(config: dict[str, Any], batches: int) -> str:
    """The model's name in the scheme of the paper's released models, where its size is one of theirs.

    `{size}-{objective}-{steps}`, `{size}-{first}-{its steps}-{second}-{total}` and so on: `610m-clm-10k-mlm40-42k`.
    """
    size = config["model"].get("preset")
    if size is None:
        return config["run_name"]
    parts = [size]
    phases = config["objective"]["phases"]
    for phase in phases:
        ratio = phase.get("masking_ratio")
        objective = phase["name"] + (f"{round(100 * ratio)}" if isinstance(ratio, float) else "")
        until = phase.get("until")
        end = _end(until, config["max_duration"]) if until else batches
        parts += [objective, _steps(end) if isinstance(end, int) else str(end)]
    return "-".join(parts)


def _end(until: str, whole: str) -> int | str:
    if until.endswith("ba"):
        return int(until[:-2])
    if until.endswith("dur") and whole.endswith("ba"):
        return round(float(until[:-3]) * int(whole[:-2]))
    return until


def _steps(batches: int) -> str:
    return f"{batches // 1000}k" if batches and batches % 1000 == 0 else str(batches)


def pretrained_card(record: dict[str, Any], name: str | None = None) -> str:
    """The card of a pretrained model.

    Args:
        record: of the checkpoint (`biphasic.model.checkpoint.Checkpoint.record`).
        name: the title; default: from the run.
    """
    config = yaml.safe_load(record["config"])
    name = name or run_name_of(config, record["batches"])
    parts = [_front("fill-mask"), f"# {name}\n", _summary(record)]
    parts.append(_table("Training", _training(record, config)))
    parts.append(_phases(record, config))
    if record["losses"]:
        losses = {key: f"{value:.4f}" for key, value in sorted(record["losses"].items())}
        parts.append(_table("Losses at the end (nats per predicted token)", losses))
    parts.append(f"The whole configuration:\n\n```yaml\n{record['config'].rstrip()}\n```\n")
    return "\n".join([*parts, _LOAD.format(name=name), _LIMITS])


def untrained_card(config: dict[str, Any], name: str | None = None) -> str:
    """The card of an architecture with its initial weights."""
    name = name or f"{config['run_name']}-initial"
    text = f"The initial weights (seed {config['seed']}) of the run `{config['run_name']}`; nothing is trained.\n"
    return "\n".join([_front("feature-extraction"), f"# {name}\n", text, _LOAD.format(name=name)])


def finetuned_card(name: str, rows: dict[str, Any]) -> str:
    """The card of a fine-tuned encoder: its title and what is known of its training."""
    limits = "## Limits\n\nTrained for one task, on the data named above.\n"
    front = _front("sentence-similarity", library="sentence-transformers")
    return "\n".join([front, f"# {name}\n", _table("Fine-tuning", rows), _LOAD.format(name=name), limits])


def _front(pipeline: str, library: str = "transformers") -> str:
    """The YAML block that the hub reads."""
    content = {
        "license": "apache-2.0",
        "library_name": library,
        "pipeline_tag": pipeline,
        "tags": ["biphasic", "eurobert", "encoder", "sentence-transformers"],
    }
    return f"---\n{yaml.safe_dump(content, sort_keys=False)}---\n"


def _summary(record: dict[str, Any]) -> str:
    names = {"clm": "causal language modeling", "mlm": "masked language modeling"}
    order = ", then ".join(names[phase["name"]] for phase in record["phases"] if phase["batches"])
    return f"A text encoder pretrained with {order} (recipe: arXiv 2507.00994), {record['tokens']:,} tokens in all.\n"


def _training(record: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    data, optimizer, schedule = record["data"], config["optimizer"], config["schedule"]
    decay = f"{schedule['decay']} {schedule['decay_shape']} decay to {schedule['final_lr']}"
    rows = {
        "Steps": f"{record['batches']:,} of {config['global_batch_size']:,} rows of {config['data']['sequence_length']:,}",
        "Learning rate": f"{optimizer['lr']}, {schedule['warmup']} warmup, {decay}",
        "AdamW": f"betas {optimizer['betas']}, eps {optimizer['eps']}, weight decay {optimizer['weight_decay']}",
        "Precision": config["precision"],
        "Hardware": f"{record['ranks']} x {record['hardware']}, {record['seconds'] / 3600:.2f} hours",
        "Software": ", ".join(f"{package} {version}" for package, version in record["versions"].items()),
        "Command": f"`{record['command']}`",
    }
    if data:
        rows["Data"] = f"{data.get('source')}: {data['tokens']:,} tokens in {data['documents']:,} documents"
        rows["Tokenizer"] = f"sha256 {data['tokenizer_sha256']}"
    return rows


def _phases(record: dict[str, Any], config: dict[str, Any]) -> str:
    lines = ["| phase | objective | steps | tokens | masking ratio |", "|-|-|-|-|-|"]
    for index, (done, said) in enumerate(zip(record["phases"], config["objective"]["phases"], strict=False)):
        ratio = said.get("masking_ratio", "")
        shown = f"{ratio['start']} to {ratio['end']}" if isinstance(ratio, dict) else ratio
        lines.append(f"| {index} | {done['name']} | {done['batches']:,} | {done['tokens']:,} | {shown} |")
    return "\n".join([*lines, ""])


def _table(title: str, rows: dict[str, Any]) -> str:
    lines = [f"## {title}\n", "| | |", "|-|-|", *(f"| {name} | {value} |" for name, value in rows.items())]
    return "\n".join([*lines, ""])
