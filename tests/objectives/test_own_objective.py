"""A third objective, which a test defines, is configured, trained, switched to, exported and drawn like the others."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from biphasic.config.history import first_difference, history_of
from biphasic.config.load import load
from biphasic.config.plan import plan
from biphasic.errors import ConfigError
from biphasic.export.run import export_checkpoint
from biphasic.objectives.objective import Draws
from biphasic.objectives.targets import Vocabulary
from biphasic.report.study_losses import loss_points
from biphasic.training.metrics_file import read_metrics
from conftest import Write
from helpers.masked_spans import MaskedSpans
from helpers.tiny import config_of, keep_checkpoints_up_to, losses, train

NAME = "helpers.masked_spans.MaskedSpans"
PHASES: list[dict[str, Any]] = [{"name": "clm", "until": "4ba"}, {"name": NAME, "span": 2, "masking_ratio": 0.25}]


def test_it_masks_spans_of_its_share() -> None:
    tokens = torch.arange(10, 10 + 64).repeat(200, 1)
    segments = torch.ones_like(tokens)
    segments[:, 60:] = 0
    draws = Draws(torch.arange(200), 3, 0)
    inputs, targets = MaskedSpans(span=3).inputs_and_targets(tokens, segments, Vocabulary(80, 1, (0, 1)), draws, lambda: 0)
    masked = inputs == 1
    assert torch.equal(masked, targets != -100) and torch.equal(targets[masked], tokens[masked])
    assert not masked[:, 60:].any() and float(masked[:, :60].float().mean()) == pytest.approx(0.3, abs=0.02)
    alone = masked[:, 1:59] & ~masked[:, :58] & ~masked[:, 2:60]
    assert not alone.any()


def test_it_is_trained_and_validated_and_the_run_resumes(write_yaml: Write, tmp_path: Path) -> None:
    keys = {"max_duration": "8ba", "data__validation": {"local": str(tmp_path / "data" / "validation")}}
    config = config_of(write_yaml(objective__phases=PHASES, **keys))
    folder = train(config)
    entries = read_metrics(folder / "metrics.jsonl")
    assert [("loss/train/clm" in e, "loss/train/spans" in e) for e in entries] == [(True, False)] * 4 + [(False, True)] * 4
    assert {"metrics/clm/loss", "metrics/mlm/loss", "metrics/spans/loss"} <= entries[-1].keys()
    expected = losses(folder)
    keep_checkpoints_up_to(folder, 5)
    train(config)
    assert losses(folder) == expected

    points = loss_points("run", entries, 0)
    assert {"clm", "spans"} <= set(points[points.kind == "validation"].objective)
    encoder = tmp_path / "encoder"
    export_checkpoint(str(folder / "checkpoints"), encoder, name="x", dtype="fp32", force=False)
    card = (encoder / "README.md").read_text()
    assert "pretrained with causal language modeling, then span masking" in card
    assert "| 1 | spans | 4 |" in card


def test_plans_and_histories_know_its_keys(write_yaml: Write) -> None:
    path = write_yaml(objective__phases=PHASES)
    config = config_of(path)
    shown = plan(config, 1).details["phases"][1]
    mlm = plan(config_of(path, **{"objective.phases.1": "{name: mlm, masking_ratio: 0.25}"}), 1).details["phases"][1]
    assert (shown["objective"], shown["masking_ratio"], shown["flops"]) == (NAME, "0.25", mlm["flops"])
    other = config_of(path, **{"objective.phases.1.span": 3})
    difference = first_difference(history_of(config), history_of(other))
    assert difference is not None
    assert (difference.batch, difference.key) == (4, "objective.phases.1.span")
    assert load(write_recorded(config, path), []) == config


def write_recorded(config: Any, path: Path) -> Path:
    recorded = path.with_name("recorded.yaml")
    recorded.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return recorded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "helpers.nothing.Spans"},
            "helpers.nothing.Spans can't be imported (No module named 'helpers.nothing')",
        ),
        ({"name": "helpers.masked_spans.Nothing"}, "can't be imported (module 'helpers.masked_spans' has no attribute"),
        ({"name": "json.JSONDecoder"}, "json.JSONDecoder is not a subclass of biphasic.Objective"),
        ({"spam": 3}, "unknown key; did you mean `objective.phases.1.span`?"),
        ({"span": "wide"}, "objective.phases.1.span: expected a valid integer; got 'wide'"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str, write_yaml: Write) -> None:
    path = write_yaml(objective__phases=[PHASES[0], {**PHASES[1], **changes}])
    with pytest.raises(ConfigError) as caught:
        config_of(path)
    assert message in str(caught.value), caught.value
    assert len(caught.value.problems) == 1 and "yaml:" in str(caught.value)
    assert "objective.phases.1" in str(caught.value)


def test_no_file_of_the_package_names_it() -> None:
    package = Path(sys.modules["biphasic"].__file__ or "").parent
    assert not [path for path in package.rglob("*.py") if "spans.MaskedSpans" in path.read_text()]
