"""Write an export's model card: of a pretrained model, of initial weights, or of a fine-tuned model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from biphasic.config.model_names import model_name
from biphasic.export.folder import hub_id, parse_card

_LOAD = """```python
from transformers import AutoModel, AutoTokenizer  # transformers >= 5

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModel.from_pretrained("{name}"{trust})
```

```python
from sentence_transformers import SentenceTransformer  # mean pooling

embeddings = SentenceTransformer("{name}"{trust}).encode(["a text", "another"])
```

Attention is bidirectional. Texts have no beginning-of-text token, as in training.
"""
_CLASSIFY = """```python
from transformers import pipeline{version}

classify = pipeline("text-classification", model="{name}"{trust})
{text}
print(classify(text, truncation=True))
```
"""
_TAG_ENTITIES = """```python
from transformers import pipeline{version}

tag = pipeline("token-classification", model="{name}", aggregation_strategy="first"{trust})
entities = tag("Ada Lovelace lived in London .")
print(entities)
```

The label of a word, as spaces separate words, is that of its first token; its other tokens were not trained. `first` gives
whole words; with `simple`, entities are fragments of words.
"""
_TAG_WORDS = """```python
from transformers import pipeline{version}

tag = pipeline("token-classification", model="{name}", ignore_labels=[]{trust})
text = "Ada Lovelace lived in London ."
first_tokens = [token for token in tag(text) if (" " + text)[token["start"]].isspace()]
words = [(text[token["start"] :].split()[0], token["entity"]) for token in first_tokens]
print(words)
```

The label of a word, as spaces separate words, is that of its first token; its other tokens were not trained. No
`aggregation_strategy` gives whole words with this tokenizer, for which punctuation within a word begins another one.
"""
_SEARCH = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}"{trust})
queries = model.encode(["how do plants make energy"], prompt_name="query")
documents = model.encode(["Plants make energy from light."], prompt_name="document")
print(model.similarity(queries, documents))
```

Embeddings are means over tokens, compared by cosine similarity. {prompts}A document with a title is `title. text`.
"""
_PREDICT = """```sh
biphasic predict MODEL {file}.jsonl --out {out}.jsonl
```

MODEL is this folder. A line of `{file}.jsonl` is `{line}`. {reason} Biphasic runs the
encoder with its head, which is in `head.safetensors`.
"""
_NO_CLASS = "transformers has no class with this model's head."
_NO_PIPELINE = "transformers loads it (`AutoModelForQuestionAnswering`), but version 5 has no pipeline for questions."
_CODE = """
The folder holds Python code that makes this family's attention bidirectional; `trust_remote_code=True` lets transformers run
it. Read the code first, and name a `revision`, so that it does not change afterwards.
"""
_BIASES = "It reproduces the errors, gaps and biases of its training text, which were not measured."
_PRETRAINED = "It is a pretrained encoder, not trained for similarity or search: fine-tune it for a task."
_LENGTH = "Texts are cut after {length:,} tokens."
_WINDOWS = "A context is read in overlapping windows of up to {length:,} tokens, each with the question."
_UNTRAINED = "It is not trained: its outputs are random."
_FINETUNED = "It was trained for one task, on the data named above: measure it before other uses."
_SHIFTED = "Its head was trained with `target: next`: the logits at a position predict the token after it."
_CAUSAL = "It was trained with causal attention. Loaded, its attention is bidirectional: fine-tune it before use."
_BASE = "It was trained from `{base}`, whose license applies to it too; none is named here."
_LANGUAGES = {"HuggingFaceFW/fineweb-edu": ["en"]}
"""Languages of datasets on the hub, according to their dataset cards."""
_EXAMPLE = {"text": "A man plays the guitar.", "text_pair": "Somebody makes music."}
_TASKS = {
    "classification": ("text-classification", "texts", "predictions", '{"text": "…"}'),
    "tokens": ("token-classification", "sentences", "predictions", '{"tokens": ["…", "…"]}'),
    "question_answering": ("question-answering", "questions", "answers", '{"question": "…", "context": "…"}'),
    "retrieval": ("sentence-similarity", "", "", ""),
}
"""The hub's pipeline tag, and the files of `biphasic predict` with an input's line, by the kind of task."""


@dataclass(frozen=True)
class ExportForm:
    """The form of a model's export, on which the code in its card depends."""

    family: str = "eurobert"
    """The `model_type`."""
    has_code: bool = False
    """Whether the folder has Python code, so that it needs `trust_remote_code=True`."""
    has_head_class: bool = True
    """Whether transformers has a class with the head."""
    marks_continuations: bool = False
    """Whether the tokenizer marks tokens within a word (WordPiece), so that a pipeline takes all others for words."""
    lowercase: bool = False
    """Whether texts are lowercased before they are tokenized."""

    @property
    def trust(self) -> str:
        """The argument of the classes that load the folder."""
        return ", trust_remote_code=True" if self.has_code else ""


_PLAIN = ExportForm()


def pretrained_card(record: dict[str, Any], name: str | None = None, form: ExportForm = _PLAIN) -> str:
    """Return a pretrained model's card from its checkpoint's record. The title is `name`, by default `model_name`.

    Raises:
        UserError: the hub would refuse the card's metadata.
    """
    config = yaml.safe_load(record["config"])
    name = name or model_name(config, record)
    trained = [phase for phase in record["phases"] if phase["batches"]]
    names = {"clm": "causal language modeling", "mlm": "masked language modeling"}
    order = ", then ".join(names[phase["name"]] for phase in trained)
    sections = [
        f"A text encoder pretrained with {order} (recipe: arXiv 2507.00994), {record['tokens']:,} tokens in all.\n",
        _table("Training", _training(record, config)),
        _phases(record, config),
    ]
    if record["losses"]:
        losses = {key: f"{value:.4f}" for key, value in sorted(record["losses"].items())}
        sections.append(_table("Losses at the end (nats per predicted token)", losses))
    sections.append(f"The complete configuration:\n\n```yaml\n{record['config'].rstrip()}\n```\n")
    limits = [_BIASES, _PRETRAINED, _LENGTH.format(length=config["data"]["sequence_length"])]
    if config["objective"]["phases"][len(trained) - 1].get("target") == "next":
        limits.append(_SHIFTED)
    if not any(phase["name"] == "mlm" for phase in trained):
        limits.append(_CAUSAL)
    datasets = [path for path in dict.fromkeys(s["path"] for s in _hub_sources(record["data"])) if hub_id(path)]
    languages = sorted({language for path in datasets for language in _LANGUAGES.get(path, [])})
    metadata = {"language": languages or None, "datasets": datasets or None}
    use, start = _LOAD.format(name=name, trust=form.trust), config["model"].get("init_from")
    return _card(name, sections, use, limits, form, trained_from=start, metadata=metadata)


def untrained_card(config: dict[str, Any], name: str | None = None, form: ExportForm = _PLAIN) -> str:
    """Return the card of a run's initial weights. Errors are as for `pretrained_card`."""
    name = name or f"{config['run_name']}-initial"
    start = config["model"].get("init_from")
    weights = f", from `{start}`" if start else f" (seed {config['seed']}), untrained"
    text = f"The initial weights of the run `{config['run_name']}`{weights}.\n"
    limits = [_BIASES] if start else [_BIASES, _UNTRAINED]
    return _card(name, [text], _LOAD.format(name=name, trust=form.trust), limits, form, trained_from=start)


def finetuned_card(name: str, rows: dict[str, Any], task: Any, form: ExportForm, max_length: int) -> str:
    """Return the card of a fine-tuned model, with `rows` as its table and code that runs it on the YAML's `task:`.

    Inputs are truncated to `max_length` tokens. Errors are as for `pretrained_card`.
    """
    length = _WINDOWS if task.kind == "question_answering" else _LENGTH
    limits = [_BIASES, _FINETUNED, length.format(length=max_length)]
    metadata = {"pipeline_tag": _TASKS[task.kind][0]}
    if task.kind == "retrieval" or not form.has_head_class:
        metadata["library_name"] = "sentence-transformers" if task.kind == "retrieval" else "biphasic"
    use, table = _use_of_task(name, task, form), _table("Fine-tuning", rows)
    return _card(name, [table], use, limits, form, trained_from=rows.get("From"), metadata=metadata)


def _card(
    name: str,
    sections: Sequence[str],
    use: str,
    limits: Sequence[str],
    form: ExportForm,
    *,
    trained_from: str | None,
    metadata: dict[str, Any] | None = None,
) -> str:
    """Return a card without credentials in URLs, and without a license for a model trained from another one."""
    base = hub_id(trained_from)
    values: dict[str, Any] = {
        "license": None if trained_from else "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["biphasic", form.family, "encoder"],
        "base_model": base,
        **(metadata or {}),
    }
    if values["pipeline_tag"] in ("feature-extraction", "sentence-similarity"):
        values["tags"].append("sentence-transformers")
    limits = [*limits, *([_BASE.format(base=base)] if base else [])]
    end = "".join(f"- {limit}\n" for limit in limits)
    parts = [f"---\n{ModelCardData(**values).to_yaml()}\n---\n", f"# {name}\n", *sections, f"## Use\n\n{use}"]
    text = "\n".join([*parts, *([_CODE] if form.has_code else []), f"## Limits\n\n{end}"])
    text = re.sub(r"://[^/\s@]+@", "://", text)
    parse_card(text)
    return text


def _use_of_task(name: str, task: Any, form: ExportForm) -> str:
    """Return example code that runs a fine-tuned model with its head."""
    version = "  # transformers >= 5" if form.has_code or form.family == "eurobert" else ""
    names = {"name": name, "trust": form.trust, "version": version}
    if task.kind == "retrieval":
        prompts = {"query": task.query_prompt, "document": task.document_prompt}
        put = " and ".join(f"`{json.dumps(text)}` before a {role}" for role, text in prompts.items() if text)
        return _SEARCH.format(**names, prompts=f"`prompt_name` puts {put}. " if put else "")
    if task.kind == "question_answering" or not form.has_head_class:
        _, file, out, line = _TASKS[task.kind]
        reason = _NO_PIPELINE if form.has_head_class else _NO_CLASS
        return _PREDICT.format(file=file, out=out, line=line, reason=reason)
    if task.kind == "tokens":
        return (_TAG_WORDS if form.marks_continuations else _TAG_ENTITIES).format(**names)
    texts = {name: json.dumps(text) for name, text in _EXAMPLE.items() if f"{{{name}}}" in task.text}
    lower = ".lower()" if form.lowercase else ""
    arguments = ", ".join(f"{name}={text}" for name, text in texts.items())
    template = json.dumps(task.text, ensure_ascii=False)
    text = texts["text"] if task.text == "{text}" else f"{template}.format({arguments})"
    return _CLASSIFY.format(**names, text=f"text = {text}{lower}")


def _training(record: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    data = record["data"]
    rows = {
        "Steps": f"{record['batches']:,} of {config['global_batch_size']:,} rows of {config['data']['sequence_length']:,}",
        "Hardware": f"{record['ranks']} x {record['hardware']}, {record['seconds'] / 3600:.2f} hours",
        "Software": ", ".join(f"{package} {version}" for package, version in record["versions"].items()),
        "Command": f"`{record['command']}`",
    }
    if data:
        counts = [f"{data[name]:,} {name}" for name in ("tokens", "documents", "rows") if name in data]
        rows["Data"] = f"{_source(data.get('source'))}: {', '.join(counts)}"
        revisions = [
            source["path"] + (f" {source['revision']}" if source.get("revision") else ", newest at the conversion")
            for source in _hub_sources(data)
        ]
        rows |= {"Data revision": ", ".join(revisions)} if revisions else {}
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
