"""The model card of an export, filled in from what the run recorded of itself."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import yaml

from biphasic.config.durations import Duration, Elapsed
from biphasic.export.metadata import block, checked, hub_id

_LOAD = """## Use

```python
from transformers import AutoModel, AutoTokenizer{version}

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModel.from_pretrained("{name}"{trust})
```

```python
from sentence_transformers import SentenceTransformer  # mean pooling

embeddings = SentenceTransformer("{name}"{trust}).encode(["a text", "another"])
```
{code}
Attention looks both ways. Texts are given without a beginning-of-text token, as in training.
"""
_VERSION = "  # transformers >= 5"
_CODE = """
The folder holds Python code that makes this family's attention look both ways; `trust_remote_code=True` lets transformers
run it. Read it first, and name a `revision`, so that it stays what you read.
"""
_LIMITS = """## Limits

- It knows what its training text says, with that text's errors, gaps and biases. None of them is measured here.
{more}"""
_PRETRAINED = """- A pretrained encoder, not trained to put like texts together: fine-tune it for a task, also for search.
- Texts are cut after {length:,} tokens.
"""
_UNTRAINED = "- Nothing is trained: its numbers mean nothing.\n"
_FINETUNED = """- Trained for one task, on the data named above; for anything else measure it first.
"""
_SHIFTED = """- Its head was trained with `target: next`: the logits at a position predict the token after it.
"""
_CAUSAL = """- It was trained to look back only. Loaded it looks both ways: a start for fine-tuning, not yet of use.
"""
_BASE = "- The license of `{base}`, from which it was trained, holds for it too; none is named here.\n"
_LANGUAGES = {"HuggingFaceFW/fineweb-edu": ["en"]}
"""What the cards of these datasets say of their language."""


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


def pretrained_card(record: dict[str, Any], name: str | None = None, *, remote_code: bool = False) -> str:
    """The card of a pretrained model.

    Args:
        record: of the checkpoint (`biphasic.model.checkpoint.Checkpoint.record`).
        name: the title; default: from the run.
        remote_code: whether the export needs `trust_remote_code=True`, as families other than Llama's do.

    Raises:
        UserError: the hub would not take its metadata.
    """
    config = yaml.safe_load(record["config"])
    name = name or model_name(config, record)
    datasets = _datasets(record["data"])
    languages = sorted({language for path in datasets for language in _LANGUAGES.get(path, [])})
    base = hub_id(config["model"].get("init_from"))
    family = json.loads(record["backbone"])["model_type"] if remote_code else "eurobert"
    parts = [_front(base=base, datasets=datasets, languages=languages, family=family), f"# {name}\n", _summary(record)]
    parts.append(_table("Training", _training(record, config)))
    parts.append(_phases(record, config))
    if record["losses"]:
        losses = {key: f"{value:.4f}" for key, value in sorted(record["losses"].items())}
        parts.append(_table("Losses at the end (nats per predicted token)", losses))
    parts.append(f"The whole configuration:\n\n```yaml\n{record['config'].rstrip()}\n```\n")
    trained = [phase for phase in record["phases"] if phase["batches"]]
    last = config["objective"]["phases"][len(trained) - 1]
    more = [_PRETRAINED.format(length=config["data"]["sequence_length"])]
    more += [_SHIFTED] if last.get("target") == "next" else []
    more += [] if any(phase["name"] == "mlm" for phase in trained) else [_CAUSAL]
    return _finished([*parts, _use(name, remote_code), _limits(more, base)])


def untrained_card(config: dict[str, Any], name: str | None = None, *, remote_code: bool = False) -> str:
    """The card of an architecture with its initial weights. `remote_code` and errors as for `pretrained_card`."""
    name = name or f"{config['run_name']}-initial"
    start = config["model"].get("init_from")
    weights = f"of `{start}`, from which it starts" if start else f"(seed {config['seed']}); nothing is trained"
    text = f"The initial weights of the run `{config['run_name']}` {weights}.\n"
    front = _front(base=hub_id(start), family=None if remote_code else "eurobert")
    limits = _limits([] if start else [_UNTRAINED], hub_id(start))
    return _finished([front, f"# {name}\n", text, _use(name, remote_code), limits])


def finetuned_card(
    name: str,
    rows: dict[str, Any],
    *,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    remote_code: bool = False,
    family: str | None = "eurobert",
) -> str:
    """The card of a fine-tuned encoder.

    Args:
        name: the title.
        rows: what is known of its training.
        base_model: what it was trained from, where that is on the hub; default: `rows["From"]`, if it has a hub id's form.
        datasets: hub ids of what it was trained on.
        remote_code: as for `pretrained_card`.
        family: the exported model's type.

    Raises:
        UserError: the hub would not take its metadata.
    """
    base = base_model or hub_id(rows.get("From"))
    front = _front(
        "sentence-similarity", library="sentence-transformers", base=base, datasets=list(datasets), family=family
    )
    use = _use(name, remote_code, family == "eurobert")
    return _finished([front, f"# {name}\n", _table("Fine-tuning", rows), use, _limits([_FINETUNED], base)])


def _finished(parts: list[str]) -> str:
    """The card, without the logins that addresses in a configuration or command may hold."""
    return checked(re.sub(r"://[^/\s@]+@", "://", "\n".join(parts)))


def _front(
    pipeline: str = "feature-extraction",
    library: str = "transformers",
    *,
    base: str | None = None,
    datasets: Sequence[str] = (),
    languages: Sequence[str] = (),
    family: str | None = "eurobert",
) -> str:
    """The YAML block that the hub reads. Another model's license is its owner's to say: `--license` names it."""
    return block(
        {
            "language": list(languages),
            "license": None if base else "apache-2.0",
            "library_name": library,
            "pipeline_tag": pipeline,
            "tags": [tag for tag in ("biphasic", family, "encoder", "sentence-transformers") if tag],
            "base_model": base,
            "datasets": list(datasets),
        }
    )


def _use(name: str, remote_code: bool, eurobert: bool = True) -> str:
    trust, code = (", trust_remote_code=True", _CODE) if remote_code else ("", "")
    return _LOAD.format(name=name, trust=trust, code=code, version=_VERSION if eurobert or remote_code else "")


def _limits(more: Sequence[str], base: str | None) -> str:
    return _LIMITS.format(more="".join([*more, *([_BASE.format(base=base)] if base else [])]))


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
    if config["model"].get("init_from"):
        rows["Trained from"] = f"`{config['model']['init_from']}`"
    if data:
        counts = [f"{data[name]:,} {name}" for name in ("tokens", "documents", "rows") if name in data]
        rows["Data"] = f"{_source(data.get('source'))}: {', '.join(counts)}"
        revisions = [_revision(source) for source in _sources(data)]
        if any(revisions):
            rows["Data revision"] = ", ".join(revision for revision in revisions if revision)
        rows["Tokenizer"] = f"sha256 {data['tokenizer_sha256']}"
    return rows


def _sources(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversions' `source:` sections; a mix has several."""
    parts = data.get("mix") or {"": data}
    return [part["source"] for part in parts.values() if isinstance(part.get("source"), dict)]


def _datasets(data: dict[str, Any]) -> list[str]:
    """The hub's datasets among the sources."""
    found = {source["path"]: None for source in _sources(data) if source.get("kind") == "hub"}
    return [path for path in found if hub_id(path)]


def _revision(source: dict[str, Any]) -> str | None:
    if source.get("kind") != "hub":
        return None
    pinned = source.get("revision")
    return f"{source['path']} {pinned}" if pinned else f"{source['path']}, newest at the conversion"


def _source(source: Any) -> str:
    """The conversion's `source:` section in words."""
    if not isinstance(source, dict):
        return str(source)
    parts = source.get("paths") or [source.get(name) for name in ("path", "name", "split")]
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
