"""The phases: where they begin, their batches, and what happens at the switch."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from biphasic.config.plan import plan
from biphasic.data.streaming import Batch
from biphasic.errors import UserError
from biphasic.training.metrics_file import read_metrics
from biphasic.training.switch import ObjectiveSwitch
from conftest import Write
from helpers.tiny import config_of, keep_checkpoints_up_to, losses, train, weights, write_rows


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_batch_of_a_phase_is_the_one_that_the_plan_names(write_yaml: Write, workers: int) -> None:
    phases = [
        {"name": "mlm", "until": "3ba"},
        {"name": "clm", "until": "0.5dur"},
        {"name": "mlm", "until": "8ba", "masking_ratio": {"start": 0.5, "end": 0.3}},
        {"name": "clm"},
    ]
    config = config_of(write_yaml(objective__phases=phases, data__num_workers=workers))
    entries = read_metrics(train(config) / "metrics.jsonl")
    expected = plan(config, 1).details["phases"]
    assert [(p["first_batch"], p["last_batch"]) for p in expected] == [(0, 2), (3, 5), (6, 7), (8, 11)]
    for index, entry in enumerate(entries):
        # `batch` counts what is done, so the line of batch b says b + 1.
        batch = entry["batch"] - 1
        assert batch == index
        phase = next(i for i, p in enumerate(expected) if p["first_batch"] <= batch <= p["last_batch"])
        assert entry["objective/phase"] == phase
        assert (f"loss/train/{expected[phase]['objective']}" in entry) is True
    assert [entries[b].get("objective/masking_ratio") for b in (0, 3, 6, 7)] == [0.4, None, 0.5, pytest.approx(0.4)]


def test_each_batch_is_trained_with_its_learning_rate(write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer steps with, and what is logged, is the schedule's rate at that batch; after a resume too."""
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *arguments: object, **keywords: object) -> object:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *arguments, **keywords)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    path = write_yaml(schedule={"warmup": "3ba", "decay": "4ba"}, checkpoint__interval="1ba")
    folder = train(config_of(path))
    expected = [0, 1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]
    assert rates == pytest.approx([5e-3 * factor for factor in expected])
    logged = [entry["lr-AdamW/group0"] for entry in read_metrics(folder / "metrics.jsonl")]
    assert logged == rates
    keep_checkpoints_up_to(folder, 9)
    rates.clear()
    train(config_of(path))
    # Loading makes PyTorch take a step of its own, at rate 0.
    assert rates[-3:] == pytest.approx([5e-3 * factor for factor in expected[9:]])


def test_phases_in_tokens_count_no_padding(write_yaml: Write) -> None:
    """A phase that ends after 1,000 tokens ends with the batch that reaches them; padding does not count."""
    phases = [{"name": "clm", "until": "1000tok"}, {"name": "mlm"}]
    config = config_of(write_yaml(objective__phases=phases, max_duration="2500tok", schedule__decay="500tok"))
    entries = read_metrics(train(config) / "metrics.jsonl")
    seen = [0, *(int(entry["tokens"]) for entry in entries)]
    for before, entry in zip(seen, entries, strict=False):
        assert entry["objective/phase"] == (before >= 1000)
    assert seen[-2] < 2500 <= seen[-1]
    # Eight rows of 32 positions hold fewer tokens than positions.
    assert all(b - a < 256 for a, b in pairwise(seen))
    from helpers.tiny import documents

    assert seen[1] < sum(len(document) for document in documents(700, seed=1))


def test_reset_optimizer_clears_the_optimizer_state(write_yaml: Write) -> None:
    def phases(reset: bool) -> list[dict[str, object]]:
        return [{"name": "clm", "until": "6ba"}, {"name": "mlm", "reset_optimizer": reset}]

    kept = losses(train(config_of(write_yaml("kept", objective__phases=phases(False)))))
    path = write_yaml("reset", objective__phases=phases(True))
    folder = train(config_of(path))
    reset = losses(folder)
    assert reset[:7] == kept[:7]
    assert reset[7] != kept[7]
    # Resumed exactly at the switch, the reset happens as well.
    again = folder.parent / "again"
    shutil.copytree(folder, again)
    keep_checkpoints_up_to(again, 6)
    (again / "metrics.jsonl").unlink()
    train(config_of(path, run_name="again"))
    assert losses(again) == reset[6:]


def test_a_restart_may_change_the_future_but_not_the_past(write_yaml: Write) -> None:
    phases = [{"name": "clm", "until": "0.5dur"}, {"name": "mlm"}]
    keys: dict[str, Any] = {"schedule": {"warmup": "3ba"}}
    folder = train(config_of(write_yaml(max_duration="8ba", objective__phases=phases, **keys)))
    # A share that moves the end of a phase that is done.
    longer = write_yaml(max_duration="16ba", objective__phases=phases, **keys)
    with pytest.raises(UserError, match=r"4ba \(0.5dur of 8ba\) until now, 8ba \(0.5dur of 16ba\) here, from batch 4 on\n"):
        train(config_of(longer))
    with pytest.raises(UserError, match=r"^max_duration: 6ba ends before run's checkpoint ba8-rank0.pt"):
        train(
            config_of(
                write_yaml(max_duration="6ba", objective__phases=[{"name": "clm", "until": "4ba"}, *phases[1:]], **keys)
            )
        )
    # The end, a decay and a phase of the future.
    phases = [{"name": "clm", "until": "4ba"}, {"name": "mlm", "until": "10ba"}, {"name": "clm"}]
    keys = {"max_duration": "12ba", "objective__phases": phases, "schedule": {"warmup": "3ba", "decay": "4ba"}}
    train(config_of(write_yaml(**keys)))
    whole = train(config_of(write_yaml("whole", **keys)))
    assert losses(folder) == losses(whole)
    for name, weight in weights(whole, 12).items():
        assert torch.equal(weight, weights(folder, 12)[name]), name


def test_a_changed_configuration_is_refused(write_yaml: Write, tmp_path: Path) -> None:
    folder = train(config_of(write_yaml()))
    keep_checkpoints_up_to(folder, 8)
    before = losses(folder)[:8]
    with pytest.raises(UserError) as refused:
        train(config_of(write_yaml(seed=8, global_batch_size=16, logging__tensorboard=True)))
    assert str(refused.value).splitlines() == [
        "run: its checkpoint ba8-rank0.pt was trained with another configuration:",
        "  global_batch_size: 8 until now, 16 here",
        "  seed: 7 until now, 8 here",
        "restore the earlier values, choose another run_name (start_from can use the common part), or allow the difference: "
        "checkpoint.resume_overrides=[seed]",
    ]
    with pytest.raises(UserError, match=r"\n  optimizer.lr: 0.005 until now, 0.001 here\n"):
        train(config_of(write_yaml(optimizer__lr=1e-3)))
    # Other rows under the same name.
    write_rows(tmp_path / "other" / "train", 700, seed=3)
    moved = write_yaml(data__train__local=str(tmp_path / "other" / "train"))
    with pytest.raises(UserError, match=r"\n  data.train.index: '\w+' until now, '\w+' here\n"):
        train(config_of(moved))
    train(config_of(write_yaml(optimizer__lr=1e-3, checkpoint__resume_overrides=["optimizer"], logging__tensorboard=True)))
    assert len(losses(folder)) >= 12
    assert losses(folder)[:8] == before


def test_a_finished_run_is_not_trained_again(write_yaml: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_yaml(max_duration="8ba")
    folder = train(config_of(path))
    before = losses(folder)
    train(config_of(path))
    assert "already trained" in capsys.readouterr().out
    assert losses(folder) == before


def test_missing_data_and_another_sequence_length_are_refused(write_yaml: Write, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no dataset in"):
        train(config_of(write_yaml(data__train__local=str(tmp_path / "nothing"))))
    with pytest.raises(UserError, match="converted with another sequence_length"):
        train(config_of(write_yaml(data__sequence_length=64)))


def test_validation_doesn_t_depend_on_the_phase(write_yaml: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CLM and MLM loss, at masks that stay the same: with a rate of almost 0 both losses stay where they are.

    Each reads every row of the split once.
    """
    prepare, validated = ObjectiveSwitch.prepare, list[int]()

    def record(self: ObjectiveSwitch, batch: Batch, phase: Any, index: int | None, *rest: Any, **keys: Any) -> Any:
        if index is None:
            validated.extend(batch["row_ids"].tolist())
        return prepare(self, batch, phase, index, *rest, **keys)

    monkeypatch.setattr(ObjectiveSwitch, "prepare", record)

    def validate(name: str, **changes: Any) -> list[dict[str, Any]]:
        path = write_yaml(
            name,
            data__num_canonical_nodes=16,
            data__validation={"local": str(tmp_path / "data" / "validation")},
            optimizer__lr=1e-12,
            **changes,
        )
        lines = read_metrics(train(config_of(path)) / "metrics.jsonl")
        return [line for line in lines if "metrics/clm/loss" in line]

    entries = validate("run", evaluation={"interval": "3ba"})
    assert len(entries) >= 4
    index = json.loads((tmp_path / "data" / "validation" / "index.json").read_text())
    rows = range(sum(shard["samples"] for shard in index["shards"]))
    assert sorted(validated) == sorted([*rows] * (len(validated) // len(rows)))
    for name in ("metrics/clm/loss", "metrics/mlm/loss"):
        values = [entry[name] for entry in entries]
        assert values == pytest.approx([values[0]] * len(values), abs=1e-5)
    assert entries[0]["metrics/clm/loss"] != entries[0]["metrics/mlm/loss"]
    # Rows have different numbers of masked tokens, so a mean of means would depend on the microbatch.
    [single] = validate("single", microbatch_size=1)
    assert single["metrics/mlm/loss"] == pytest.approx(entries[0]["metrics/mlm/loss"], abs=1e-5)
