"""The model card of an export, filled in from what the run recorded of itself."""

from __future__ import annotations

import re
from typing import Any

import yaml

from biphasic.config.durations import Duration, Elapsed

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
_SHIFTED = """
Its head was trained with `target: next`: the logits at a position predict the token after it.
"""
_CAUSAL = """
It was trained to look back only. It looks both ways when it is loaded, which is a start for fine-tuning and not yet of use.
"""


def model_name(config: dict[str, Any], record: dict[str, Any]) -> str:
    """The model's name in the scheme of the paper's released models, where its size is one of theirs; else the run's.

    `{size}-{objective}-{steps}`, `{size}-{first}-{its end}-{second}-{total}` and so on (`610m-clm-10k-mlm40-42k`), and for
    a checkpoint from within the run its step behind that (`610m-mlm40-42k-1000`).
    """
    whole, size = Duration.parse(config["max_duration"]), config["model"].get("preset")
    parts = [config["run_name"]] if size is None else [size, *_phase_names(config["objective"]["phases"], whole)]
    done = Elapsed(**{name: record[name] for name in ("batches", "rows", "tokens", "epochs")})
    return "-".join(parts if done.reached(whole) else [*parts, str(done.batches)])


def _phase_names(phases: list[dict[str, Any]], whole: Duration) -> list[str]:
    names = []
    for phase in phases:
        ratio = phase.get("masking_ratio")
        end = Duration.parse(phase["until"]).of(whole) if phase.get("until") else whole
        thousands = end.unit == "ba" and end.value % 1000 == 0
        steps = f"{end.value / 1000:.0f}k" if thousands else str(end).removesuffix("ba")
        names += [phase["name"] + (f"{100 * ratio:.0f}" if isinstance(ratio, float) else ""), steps]
    return names


def pretrained_card(record: dict[str, Any], name: str | None = None) -> str:
    """The card of a pretrained model.

    Args:
        record: of the checkpoint (`biphasic.model.checkpoint.Checkpoint.record`).
        name: the title; default: from the run.
    """
    config = yaml.safe_load(record["config"])
    name = name or model_name(config, record)
    parts = [_front(), f"# {name}\n", _summary(record)]
    parts.append(_table("Training", _training(record, config)))
    parts.append(_phases(record, config))
    if record["losses"]:
        losses = {key: f"{value:.4f}" for key, value in sorted(record["losses"].items())}
        parts.append(_table("Losses at the end (nats per predicted token)", losses))
    parts.append(f"The whole configuration:\n\n```yaml\n{record['config'].rstrip()}\n```\n")
    trained = [phase for phase in record["phases"] if phase["batches"]]
    last = config["objective"]["phases"][len(trained) - 1]
    shifted = _SHIFTED if last.get("target") == "next" else ""
    causal = "" if any(phase["name"] == "mlm" for phase in trained) else _CAUSAL
    return _public("\n".join([*parts, _LOAD.format(name=name), _LIMITS + shifted + causal]))


def untrained_card(config: dict[str, Any], name: str | None = None) -> str:
    """The card of an architecture with its initial weights."""
    name = name or f"{config['run_name']}-initial"
    start = config["model"].get("init_from")
    weights = f"of `{start}`, from which it starts" if start else f"(seed {config['seed']}); nothing is trained"
    text = f"The initial weights of the run `{config['run_name']}` {weights}.\n"
    return _public("\n".join([_front(), f"# {name}\n", text, _LOAD.format(name=name)]))


def finetuned_card(name: str, rows: dict[str, Any]) -> str:
    """The card of a fine-tuned encoder: its title and what is known of its training."""
    limits = "## Limits\n\nTrained for one task, on the data named above.\n"
    front = _front("sentence-similarity", library="sentence-transformers")
    return _public("\n".join([front, f"# {name}\n", _table("Fine-tuning", rows), _LOAD.format(name=name), limits]))


def _public(card: str) -> str:
    """Without the logins that addresses in a configuration or command may hold."""
    return re.sub(r"://[^/\s@]+@", "://", card)


def _front(pipeline: str = "feature-extraction", library: str = "transformers") -> str:
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
        counts = [f"{data[name]:,} {name}" for name in ("tokens", "documents", "rows") if name in data]
        rows["Data"] = f"{_source(data.get('source'))}: {', '.join(counts)}"
        rows["Tokenizer"] = f"sha256 {data['tokenizer_sha256']}"
    return rows


def _source(source: Any) -> str:
    """The conversion's `source:` section in words."""
    if not isinstance(source, dict):
        return str(source)
    parts = source.get("paths") or [source.get(name) for name in ("path", "name", "split", "revision")]
    return ", ".join(str(part) for part in parts if part is not None)


def _phases(record: dict[str, Any], config: dict[str, Any]) -> str:
    lines = ["| phase | objective | steps | tokens | masking ratio |", "|-|-|-|-|-|"]
    for index, (done, said) in enumerate(zip(record["phases"], config["objective"]["phases"], strict=False)):
        ratio = said.get("masking_ratio", "")
        shown = f"{ratio['start']} to {ratio['end']}" if isinstance(ratio, dict) else ratio
        lines.append(f"| {index} | {done['name']} | {done['batches']:,} | {done['tokens']:,} | {shown} |")
    return "\n".join([*lines, ""])


def _table(title: str, rows: dict[str, Any]) -> str:
    cells = {name: str(value).replace("|", r"\|") for name, value in rows.items()}
    lines = [f"## {title}\n", "| | |", "|-|-|", *(f"| {name} | {value} |" for name, value in cells.items())]
    return "\n".join([*lines, ""])
