"""A model card holds the run's record, and the hub's parser accepts it."""

from pathlib import Path
from typing import Any, Literal

import pytest
import ruamel.yaml
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load

from biphasic.config.finetune import ClassificationConfig, TokensConfig
from biphasic.errors import UserError
from biphasic.export.card import finetuned_card, pretrained_card, untrained_card
from biphasic.export.folder import hub_id, parse_card, quote_numbers, read_card


def starting_from(record: dict[str, Any], path: str) -> dict[str, Any]:
    config = yaml.safe_load(record["config"])
    config["model"] = {"init_from": path}
    return {**record, "config": yaml.safe_dump(config)}


def tuned_card(rows: dict[str, Any], **export: Any) -> str:
    """Return the card of a model that was fine-tuned for classification; `export` says how it was written."""
    task = ClassificationConfig(kind="classification", name="sst2", data="data/tasks/sst2")
    export = {"family": "eurobert", "has_code": False, "has_head_class": True, **export}
    return finetuned_card("my-classifier", rows, task, 128, **export)


def metadata(card: str, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "README.md").write_text(card)
    content = metadata_load(tmp_path / "README.md")
    assert content == ModelCard(card).data.to_dict()
    return content


def test_metadata_of_a_run(record: dict[str, Any], tmp_path: Path) -> None:
    assert metadata(pretrained_card(record), tmp_path) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["biphasic", "eurobert", "encoder", "sentence-transformers"],
        "datasets": ["HuggingFaceFW/fineweb-edu"],
    }
    # Local files have no id.
    record["data"]["source"] = {"kind": "files", "paths": ["my_text/"]}
    assert not {"datasets", "language", "base_model"} & set(metadata(pretrained_card(record), tmp_path))
    record["data"] = {}
    assert "datasets" not in metadata(pretrained_card(record), tmp_path)


def test_datasets_of_a_mix(record: dict[str, Any], tmp_path: Path) -> None:
    other = {"kind": "hub", "path": "org/code", "revision": None}
    counts = {"tokens": 5, "tokenizer_sha256": "ab"}
    web = record["data"]["source"]
    mix = {"web": {"source": web}, "code": {"source": other}, "own": {"source": {"kind": "files", "paths": ["x"]}}}
    record["data"] = {**counts, "source": "a mix of web (0.8), code (0.1), own (0.1)", "mix": mix}
    card = pretrained_card(record)
    assert metadata(card, tmp_path)["datasets"] == ["HuggingFaceFW/fineweb-edu", "org/code"]
    assert f"| Data revision | HuggingFaceFW/fineweb-edu {web['revision']}, org/code, newest at the conversion |\n" in card


def test_base_model_and_license(record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    card = pretrained_card(starting_from(record, "HuggingFaceTB/SmolLM2-135M"))
    content = metadata(card, tmp_path)
    assert content["base_model"] == "HuggingFaceTB/SmolLM2-135M"
    # The license of another model isn't known.
    assert "license" not in content
    assert "trained from `HuggingFaceTB/SmolLM2-135M`, whose license" in card
    (tmp_path / "mine" / "encoder").mkdir(parents=True)
    for local in (
        "mine/encoder",
        "/data/encoder",
        "./x/y",
        "runs/a/checkpoints/ba4-rank0.pt",
        "x/ba4.pt",
        "s3://b/x",
        None,
    ):
        assert hub_id(local) is None, local
    assert "base_model" not in metadata(pretrained_card(starting_from(record, "mine/encoder")), tmp_path)
    config = yaml.safe_load(starting_from(record, "EuroBERT/EuroBERT-210m")["config"])
    assert metadata(untrained_card(config), tmp_path)["base_model"] == "EuroBERT/EuroBERT-210m"
    tuned = metadata(tuned_card({"From": "EuroBERT/EuroBERT-210m"}), tmp_path)
    assert tuned["base_model"] == "EuroBERT/EuroBERT-210m"
    assert (tuned["library_name"], tuned["pipeline_tag"]) == ("transformers", "text-classification")
    # The folder of a model may hold another model's weights.
    assert "license" not in metadata(tuned_card({"From": "runs/x/model"}), tmp_path)


def test_the_record_as_tables(record: dict[str, Any]) -> None:
    record["command"] = "main.py a|b --to https://me:secret@host/x"
    record["versions"]["biphasic"] = None  # on the path, but not installed
    card = pretrained_card(record)
    assert "secret" not in card
    for line in (
        "| Hardware | 8 x NVIDIA H100, 1.50 hours |",
        "| Software | torch 2.7.0 |",
        f"| Data revision | HuggingFaceFW/fineweb-edu {record['data']['source']['revision']} |",
        "| Data | HuggingFaceFW/fineweb-edu, sample-100BT: 100 tokens, 4 rows |",
        "| 0 | clm | 6 | 1,536 |  |",
        "| 1 | mlm | 6 | 1,536 | 0.4 |",
        "| loss/train/mlm | 2.5000 |",
        "- Texts are cut after 32 tokens.",
        r"| Command | `main.py a\|b --to https://host/x` |",
    ):
        assert f"{line}\n" in card, line


def test_steps_have_the_size_of_their_batches(record: dict[str, Any]) -> None:
    assert "| Steps | 12 of 8 rows of 32 |\n" in pretrained_card(record)
    record["losses"]["loss/train/mlm_bits_per_byte"] = 1.5
    config = yaml.safe_load(record["config"])
    config["objective"]["phases"][1] |= {"global_batch_size": 4, "data": {"folder": "long", "sequence_length": 64}}
    config["objective"]["phases"].append({"name": "mlm", "masking_ratio": 0.2})
    record["phases"].append({**record["phases"][1], "batches": 1, "tokens": 256})
    record["config"] = yaml.safe_dump(config)
    card = pretrained_card(record)
    for line in (
        "| Steps | 12 |",
        "| 0 | clm | 6 of 8 rows of 32 | 1,536 |  |",
        "| 1 | mlm | 6 of 4 rows of 64 | 1,536 | 0.4 |",
        "| 2 | mlm | 1 of 4 rows of 64 | 256 | 0.2 |",
        "## Losses at the end (nats per predicted token, and bits per byte of text)",
    ):
        assert f"{line}\n" in card, line


def test_cards_of_families_that_need_code(record: dict[str, Any]) -> None:
    card = pretrained_card(record, "mine", family="qwen3", has_code=True)
    assert 'AutoModel.from_pretrained("mine", trust_remote_code=True)' in card
    assert 'SentenceTransformer("mine", trust_remote_code=True)' in card
    assert "# transformers >= 5" in card
    assert ModelCard(card).data.tags == ["biphasic", "qwen3", "encoder", "sentence-transformers"]
    plain = pretrained_card(record, "mine")
    assert "trust_remote_code=True" not in plain
    assert "# transformers >= 5" in plain
    assert "# transformers >= 5" not in tuned_card({}, family="bert", has_head_class=False)
    for card in (
        untrained_card(yaml.safe_load(record["config"]), family="qwen3", has_code=True),
        tuned_card({}, has_code=True),
    ):
        assert "trust_remote_code=True" in card


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("# mine\n", "doesn't begin with a block of metadata"),
        ("---\nlicense: [a\n---\n", "would refuse its metadata: while parsing"),
        ("---\n- a\n---\n", "metadata block should be a dict"),
        ("---\nlicense: Apache 2\n---\n", "license 'Apache 2'"),
        ("---\nlicense: {a: b}\n---\n", "license {'a': 'b'} is not one of its identifiers"),
        ("---\nlanguage: [False]\n---\n", "language 'False' is not"),
        ("---\nlanguage: [english]\n---\n", "'english' is not an ISO 639 code"),
        ("---\ndatasets: [a/b/c]\n---\n", "datasets 'a/b/c' is not an id on the hub"),
        ("---\nbase_model: my model\n---\n", "base_model 'my model' is not an id"),
        ("---\ntags: [[a]]\n---\n", r"tags \['a'\] is not a word"),
        ("---\nmodel-index: [{name: m}]\n---\n", "results"),
        ("---\nmodel-index: [{name: m, results: [{task: {type: t}, dataset: {name: n}, metrics: []}]}]\n---\n", "type"),
    ],
)
def test_metadata_that_the_hub_would_refuse(card: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_card(card)
    assert "\n" not in str(caught.value)


WRITTEN = """---
language: no
license: 010
datasets: [on, 1e3, 1.5e3, '2e3', org/0x1F, 2024-01-01]
tags:
- 12
- yes
inference: false
extra: 010
model-index:
- name: no
  results:
  - task: {type: Retrieval}
    dataset: {type: org/x, name: '007', config: 'off', split: 'no'}
    metrics: [{type: ndcg_at_10, value: 1.0e-05}]
---

# no

```yaml
eps: 1e8
```
"""
"""A card as a person writes it."""


def test_words_that_yaml_takes_for_something_else_stay_words(tmp_path: Path) -> None:
    """When read, written, and read by the hub, whose YAML is version 1.2."""
    datasets = ["on", "1e3", "1.5e3", "2e3", "org/0x1F", "2024-01-01"]
    (tmp_path / "biphasic.json").write_text("{}")
    (tmp_path / "README.md").write_text(WRITTEN)
    for _ in range(2):
        card = read_card(tmp_path)
        data: Any = card.data
        assert (data.language, data.license, data.tags) == ("no", "010", ["12", "yes"])
        assert (data.datasets, data.model_name) == (datasets, "no")
        [result] = data.eval_results or []
        shown = result.dataset_name, result.dataset_config, result.dataset_split, result.metric_value
        assert shown == ("007", "off", "no", 1e-5)  # as quoted by their author
        assert (data.inference, data.extra) == (False, 8)
        (tmp_path / "README.md").write_text(quote_numbers(str(card)))
    text = (tmp_path / "README.md").read_text()
    content: Any = ruamel.yaml.YAML(typ="safe", pure=True).load(text.split("---\n")[1])  # YAML 1.2
    assert (content["language"], content["license"], content["datasets"]) == ("no", "010", datasets)
    assert content["model-index"][0]["results"][0]["metrics"][0]["value"] == 1e-5
    assert "language: 'no'\n" in text and "- '1e3'\n" in text
    assert text.endswith("# no\n\n```yaml\neps: 1e8\n```\n")


def test_a_card_that_would_be_refused_is_not_made(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # A word that YAML reads as something else stays a word.
    card = parse_card(pretrained_card(record))
    card.data.language = ["no"]
    assert ModelCard(str(card)).data.language == ["no"]
    monkeypatch.setattr("biphasic.export.card.hub_id", lambda path: path)
    with pytest.raises(UserError, match="base_model"):
        tuned_card({"From": "not a model"})


@pytest.mark.parametrize("marks_continuations", [False, True])
@pytest.mark.parametrize("labelled", ["first", "all"])
def test_the_card_of_token_labels_says_which_tokens_were_trained_and_scored(
    labelled: Literal["first", "all"], marks_continuations: bool
) -> None:
    task = TokensConfig(kind="tokens", name="conll2003", data="data/tasks/conll2003", labelled=labelled)
    export = {"family": "eurobert", "has_code": False, "has_head_class": True}
    card = finetuned_card("my-tagger", {}, task, 128, marks_continuations=marks_continuations, **export)
    words = " ".join(card.split())
    assert ("its other tokens were not trained" in words) == (labelled == "first")
    assert ("The scores above take the label of most of a word's tokens" in words) == (labelled == "all")
    if marks_continuations:
        assert ("The code above takes the label of its first token." in words) == (labelled == "all")
    else:
        assert f'aggregation_strategy="{"average" if labelled == "all" else "first"}"' in card
        assert ("No `aggregation_strategy` does: `average`" in words) == (labelled == "all")
