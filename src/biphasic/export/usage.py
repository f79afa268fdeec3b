"""How a fine-tuned model is used, for its card: code that runs it with its head, and metadata for the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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
_EXAMPLE = {"text": "A man plays the guitar.", "text_pair": "Somebody makes music."}
_KINDS = {
    "classification": ("text-classification", "texts", '{"text": "…"}'),
    "tokens": ("token-classification", "sentences", '{"tokens": ["…", "…"]}'),
    "question_answering": ("question-answering", "questions", '{"question": "…", "context": "…"}'),
    "retrieval": ("sentence-similarity", "", ""),
}
"""The hub's pipeline tag, and the file for `biphasic predict`, by the kind of task."""


@dataclass(frozen=True)
class ExportForm:
    """The form of a fine-tuned model's export, on which its code depends.

    Attributes:
        family: the `model_type`.
        has_code: whether the folder has Python code, so that it needs `trust_remote_code=True`.
        has_head_class: whether transformers has a class with the head.
        marks_continuations: whether the tokenizer marks tokens within a word (WordPiece). transformers' pipeline then takes
            every other token for a word.
        lowercase: whether texts are lowercased before they are tokenized.
    """

    family: str
    has_code: bool = False
    has_head_class: bool = True
    marks_continuations: bool = False
    lowercase: bool = False


def describe_use(name: str, task: Any, form: ExportForm) -> tuple[str, str, str]:
    """Return the hub's pipeline tag, the library's name, and text with code that runs the model.

    Args:
        name: the model's name, which the code loads.
        task: the YAML's `task:` section.
        form: the form of the export.
    """
    tag, file, line = _KINDS[task.kind]
    names = {
        "name": name,
        "trust": ", trust_remote_code=True" if form.has_code else "",
        "version": "  # transformers >= 5" if form.has_code or form.family == "eurobert" else "",
    }
    if task.kind == "retrieval":
        prompts = {"query": task.query_prompt, "document": task.document_prompt}
        put = " and ".join(f"`{json.dumps(text)}` before a {role}" for role, text in prompts.items() if text)
        names["prompts"] = f"`prompt_name` puts {put}. " if put else ""
        return tag, "sentence-transformers", _SEARCH.format(**names)
    library = "transformers" if form.has_head_class else "biphasic"
    if task.kind == "question_answering" or not form.has_head_class:
        reason = _NO_PIPELINE if form.has_head_class else _NO_CLASS
        out = "answers" if task.kind == "question_answering" else "predictions"
        return tag, library, _PREDICT.format(file=file, out=out, line=line, reason=reason)
    if task.kind == "classification":
        return tag, library, _CLASSIFY.format(**names, text=_text(task.text, form.lowercase))
    return tag, library, (_TAG_WORDS if form.marks_continuations else _TAG_ENTITIES).format(**names)


def _text(template: str, lowercase: bool) -> str:
    """Return the code that makes a classifier's input."""
    texts = {name: json.dumps(text) for name, text in _EXAMPLE.items() if f"{{{name}}}" in template}
    lower = ".lower()" if lowercase else ""
    if template == "{text}":
        return f"text = {texts['text']}{lower}"
    arguments = ", ".join(f"{name}={text}" for name, text in texts.items())
    return f"text = {json.dumps(template, ensure_ascii=False)}.format({arguments}){lower}"
