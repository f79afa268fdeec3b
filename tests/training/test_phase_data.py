"""Phases with their own data, batch size and rotary positions: what they read, resumed anywhere, and shared histories."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from biphasic.config.history import first_difference, history_of
from biphasic.config.plan import plan
from biphasic.config.pretrain import PretrainConfig
from biphasic.data import batches
from biphasic.data.batches import advance
from biphasic.data.streaming import build_loader
from biphasic.errors import ConfigError, UserError
from biphasic.export.run import export_checkpoint, export_initial
from biphasic.model.checkpoint import read_record
from biphasic.model.text_tokenizer import load_text_tokenizer
from biphasic.training.metrics_file import read_metrics
from biphasic.training.switch import ObjectiveSwitch
from conftest import Write
from helpers.tiny import LENGTH, config_of, keep_checkpoints_up_to, losses, train, train_alone, weights, write_rows

LONG = 2 * LENGTH


@pytest.fixture
def yaml_of(write_yaml: Write, tmp_path: Path) -> Write:
    """Writes a run of four phases: the run's data, longer rows, the run's data again, and half of its batch size."""

    def write(name: str = "run", **changes: Any) -> Path:
        path = write_yaml(name, **changes)
        if not (tmp_path / "data" / "long").exists():
            write_rows(tmp_path / "data" / "long", 500, seed=5, length=LONG)
        return path

    data = tmp_path / "data"
    phases = [
        {"name": "clm", "until": "5ba"},
        {"name": "mlm", "until": "9ba", "global_batch_size": 4, "model": {"rope_theta": 300.0},
         "data": {"train": {"local": str(data / "long")}, "sequence_length": LONG}},
        {"name": "mlm", "until": "0.75dur", "masking_ratio": 0.2, "global_batch_size": 8,
         "data": {"train": {"local": str(data / "train")}, "sequence_length": LENGTH}},
        {"name": "clm", "global_batch_size": 4},
    ]  # fmt: skip
    keys = {"objective__phases": phases, "max_duration": "16ba", "microbatch_size": 2}
    return lambda name="run", **changes: write(name, **{**keys, **changes})


def rows_read(config: PretrainConfig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int], int]]:
    """Train, and return the epoch, row ids and row length of each batch."""
    seen: list[tuple[int, list[int], int]] = []
    prepare = ObjectiveSwitch.prepare

    def record(self: Any, rows: Any, objective: Any, phase: Any, counter: int, share: Any) -> Any:
        seen.append((counter, rows["row_ids"].tolist(), rows["input_ids"].shape[1]))
        return prepare(self, rows, objective, phase, counter, share)

    monkeypatch.setattr(ObjectiveSwitch, "prepare", record)
    train(config)
    monkeypatch.setattr(ObjectiveSwitch, "prepare", prepare)
    return seen


def order_of(config: PretrainConfig, phase: int, rows: int) -> list[int]:
    """The first rows of a phase's data, read by a loader of its own in batches of one row."""
    own = config.inputs[phase]
    loader: Any = build_loader(own.data.reading, own.streams, 1, config.seed, train=True)
    return [int(batch["row_ids"]) for batch in itertools.islice(loader, rows)]


def test_each_phase_reads_its_own_rows_in_their_order(yaml_of: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(yaml_of())
    seen = rows_read(config, monkeypatch)
    sizes = [(8, LENGTH)] * 5 + [(4, LONG)] * 4 + [(8, LENGTH)] * 3 + [(4, LENGTH)] * 4
    assert [(len(rows), length) for _, rows, length in seen] == sizes
    short = [row for _, rows, length in seen if length == LENGTH for row in rows]
    assert short == order_of(config, 0, len(short))  # the third phase goes on where the first one was
    long = [row for _, rows, length in seen if length == LONG for row in rows]
    assert long == order_of(config, 1, len(long))
    entries = read_metrics(config.run_folder / "metrics.jsonl")
    assert [entry["objective/phase"] for entry in entries] == [0] * 5 + [1] * 4 + [2] * 3 + [3] * 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("unit", ["ba", "tok"])
def test_a_run_resumes_bit_for_bit_at_any_batch(yaml_of: Write, workers: int, unit: str) -> None:
    path = yaml_of(data__num_workers=workers)
    if unit == "tok":
        text = path.read_text().replace("until: 5ba", "until: 1100tok").replace("until: 9ba", "until: 2000tok")
        text = text.replace("max_duration: 16ba", "max_duration: 3300tok").replace("decay: 4ba", "decay: 600tok")
        path.write_text(text)
    run = train_alone if workers else lambda path: train(config_of(path))
    folder = run(path)
    expected, phases = losses(folder), [entry["objective/phase"] for entry in read_metrics(folder / "metrics.jsonl")]
    end, switch = len(expected), phases.index(1)
    assert set(phases) == {0, 1, 2, 3}
    last = weights(folder, end)
    if workers:
        batches_to_resume_at = [switch - 1, switch, switch + 1, phases.index(2)]
    elif unit == "tok":
        batches_to_resume_at = [phases.index(phase) + offset for phase in (1, 2, 3) for offset in (-1, 0, 1)]
    else:
        batches_to_resume_at = [*range(1, end)]
    for batch in batches_to_resume_at:
        keep_checkpoints_up_to(folder, batch)
        (folder / "metrics.jsonl").unlink()
        run(path)
        assert losses(folder) == expected[batch:], batch
        assert all(torch.equal(weight, last[name]) for name, weight in weights(folder, end).items()), batch


def test_runs_share_the_trunk_before_a_phase_with_other_data(yaml_of: Write, tmp_path: Path) -> None:
    trunk = train(config_of(yaml_of("trunk")))
    write_rows(tmp_path / "data" / "other", 500, seed=9, length=LONG)
    other = json.loads(json.dumps(config_of(yaml_of()).model_dump(mode="json")))["objective"]["phases"]
    other[1]["data"]["train"]["local"] = str(tmp_path / "data" / "other")
    branch = config_of(yaml_of("branch", objective__phases=other, start_from=str(trunk)))
    alone = config_of(yaml_of("alone", objective__phases=other))
    difference = first_difference(history_of(config_of(yaml_of("trunk"))), history_of(branch))
    assert difference is not None
    assert (difference.batch, difference.key) == (5, "objective.phases.1.data.train.local")
    train(branch)
    attempts = read_metrics(branch.run_folder / "metrics.jsonl")
    assert attempts[0]["batch"] == 6
    expected = losses(train(alone))
    assert losses(branch.run_folder) == expected[5:] != losses(trunk)[5:]


def test_a_later_phase_s_data_may_move_but_not_change(yaml_of: Write, tmp_path: Path) -> None:
    path = yaml_of()
    folder = train(config_of(path))
    expected = losses(folder)
    keep_checkpoints_up_to(folder, 7)
    (folder / "metrics.jsonl").unlink()
    data = tmp_path / "data"
    shutil.copytree(data / "long", data / "moved")
    moved = path.read_text().replace(f"{data / 'long'}", f"{data / 'moved'}")
    path.write_text(moved)
    train(config_of(path))
    assert losses(folder) == expected[7:]
    keep_checkpoints_up_to(folder, 7)
    shutil.rmtree(data / "moved")
    write_rows(data / "moved", 500, seed=6, length=LONG)
    with pytest.raises(UserError, match=r"\n  objective.phases.1.data.train.index: '\w+' until now"):
        train(config_of(path))
    # Before the phase has begun, its data may be another one.
    keep_checkpoints_up_to(folder, 5)
    train(config_of(path))
    assert losses(folder)[-11:] != expected[5:]


def test_the_rotary_positions_change_with_the_phase(yaml_of: Write, tmp_path: Path) -> None:
    folder = train(config_of(yaml_of(logging__jsonl=True)))
    bases = []
    for batch in (5, 6, 16):
        backbone = json.loads(read_record(str(folder / "checkpoints" / f"ba{batch}-rank0.pt"))["backbone"])
        bases.append(backbone["rope_parameters"]["rope_theta"])
        assert backbone["max_position_embeddings"] == LONG
    assert bases == [10_000.0, 300.0, 300.0]
    without = yaml_of("without")
    without.write_text(without.read_text().replace("rope_theta: 300.0", "rope_theta: 10000.0"))
    other = losses(train(config_of(without)))
    assert other[:5] == losses(folder)[:5] and other[5] != losses(folder)[5]


def test_an_epoch_ends_with_its_last_complete_batch() -> None:
    """Positions are those of reading batch after batch."""
    for rows, epoch_rows, start in ((8, 87, (0, 0)), (4, 30, (2, 24)), (5, 5, (0, 0)), (6, 20, (1, 17))):
        position = start
        for count in range(12):
            assert advance(start, count, rows, epoch_rows) == (
                position if epoch_rows - position[1] >= rows else (position[0] + 1, 0)
            ), (rows, count)
            if epoch_rows - position[1] < rows:
                position = (position[0] + 1, 0)
            position = (position[0], position[1] + rows)


def test_small_data_of_a_phase_is_read_again(yaml_of: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = yaml_of()
    write_rows(tmp_path / "data" / "small", 40, seed=8, length=LONG)
    path.write_text(path.read_text().replace(f"{tmp_path}/data/long", f"{tmp_path}/data/small"))
    seen = [each for each in rows_read(config_of(path), monkeypatch) if each[2] == LONG]
    count = len(set(order_of(config_of(path), 1, 100)))
    whole = count // 4
    assert [epoch for epoch, _, _ in seen] == [index // whole for index in range(4)]
    assert len({row for epoch, rows, _ in seen for row in rows if not epoch}) == min(4, whole) * 4


def test_the_plan_shows_what_each_phase_reads(yaml_of: Write, tmp_path: Path) -> None:
    config = config_of(yaml_of())
    shown = plan(config, 1)
    phases = shown.details["phases"]
    assert [phase["tokens"] for phase in phases] == [5 * 8 * 32, 4 * 4 * 64, 3 * 8 * 32, 4 * 4 * 32]
    assert [phase["sequence_length"] for phase in phases] == [32, 64, 32, 32]
    assert shown.details["tokens"] == sum(phase["tokens"] for phase in phases)
    assert shown.details["flops"] == pytest.approx(sum(phase["flops"] for phase in phases))
    rows = {dataset["key"]: dataset["run_rows"] for dataset in shown.details["datasets"]}
    assert rows == {"data.train": 5 * 8 + 3 * 8 + 4 * 4, "objective.phases.1.data.train": 16}
    line = shown.lines["phase 1"]
    assert "in batches of 256 tokens: 4 rows of 64, RoPE base 300, of " in line and str(tmp_path) in line


@pytest.mark.parametrize(
    ("phase", "changes", "message"),
    [
        (0, {"global_batch_size": 4}, "objective.phases.0.global_batch_size: the first phase has the run's own"),
        (1, {"data": {"sequence_length": 64}}, "objective.phases.1.data.mix: expected exactly one of"),
        (1, {"data": {"folder": "x", "mix": {"a": {"local": "b", "proportion": 1.0}}}}, "objective.phases.1.data.mix"),
        (1, {"data": {"train": {"local": "x"}, "epoch_rows": 5}}, "objective.phases.1.data.epoch_rows: has no effect"),
        (
            1,
            {"global_batch_size": 3},
            "objective.phases.1.global_batch_size: expected a multiple of the number of ranks",
        ),
        (1, {"model": {"rope": 1.0}}, "objective.phases.1.mlm.model.rope"),
    ],
)
def test_phases_that_can_t_be_are_refused(yaml_of: Write, phase: int, changes: dict[str, Any], message: str) -> None:
    from biphasic.config.load import load

    phases = [{"name": "clm", "until": "5ba"}, {"name": "mlm"}]
    phases[phase] |= changes
    with pytest.raises(ConfigError) as refused:
        load(yaml_of(objective__phases=phases), [], ranks=2)
    assert message.replace(".mlm", "") in str(refused.value).replace(".mlm", "")


def test_checkpoints_at_shares_of_the_run(yaml_of: Write) -> None:
    folder = train(config_of(yaml_of(checkpoint__interval="0.2dur")))
    # 0.2 of 16 is 4 batches, rounded up; also at the switches and the decay's start.
    saved = sorted(int(path.stem[2:]) for path in (folder / "checkpoints").glob("ba*.json"))
    assert saved == [4, 5, 8, 9, 12, 16]


def test_a_phase_that_has_begun_can_not_begin_again(yaml_of: Write) -> None:
    """Where a run goes on in the data of its phases follows from the batches at which they began."""
    path = yaml_of()
    folder = train(config_of(path))
    keep_checkpoints_up_to(folder, 7)
    path.write_text(path.read_text().replace("until: 5ba", "until: 8ba"))
    allowed = {"checkpoint.resume_overrides": "[objective]"}
    written = (folder / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"ba7-rank0.pt was trained in phase 1 and would continue in phase 0 here\. As"):
        train(config_of(path, **allowed))
    assert (folder / "config.yaml").read_text() == written
    # Phases that read the same may.
    phases = [{"name": "clm", "until": "5ba"}, {"name": "mlm"}]
    same = train(config_of(yaml_of("same", objective__phases=phases)))
    keep_checkpoints_up_to(same, 7)
    train(config_of(yaml_of("same", objective__phases=phases[1:]), **allowed))
    assert len(losses(same)) == 16


def test_epochs_have_no_meaning_with_several_lengths(yaml_of: Write) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.interval: expected batches, rows or tokens, because the phases'"):
        config_of(yaml_of(checkpoint__interval="1ep"))


def test_a_checkpoint_of_a_later_phase_is_exported(yaml_of: Write, tmp_path: Path) -> None:
    from transformers import AutoConfig

    path = yaml_of()
    checkpoint = str(train(config_of(path)) / "checkpoints" / "ba16-rank0.pt")
    export_checkpoint(checkpoint, tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rope_parameters["rope_theta"] == 300.0 and config.max_position_embeddings == LONG
    # Fine-tuning and evaluation cut the same texts.
    assert load_text_tokenizer(checkpoint).max_length == load_text_tokenizer(str(tmp_path / "out")).max_length == LONG
    assert f"Texts are cut after {LONG} tokens" in (tmp_path / "out" / "README.md").read_text()
    export_initial(str(path), tmp_path / "initial")
    assert AutoConfig.from_pretrained(tmp_path / "initial").max_position_embeddings == LONG


def test_a_missing_shard_of_a_later_phase_stops_the_run_before_its_first_batch(yaml_of: Write, tmp_path: Path) -> None:
    config = config_of(yaml_of())
    shards = sorted((tmp_path / "data" / "long").glob("shard.*"))
    shards[-1].unlink()
    with pytest.raises(UserError, match=f"shard .*{shards[-1].name}: is missing"):
        train(config)
    assert not (config.run_folder / "metrics.jsonl").exists()
    shards[0].write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"shard .*shard.00000.*: is damaged"):
        train(config)


def test_the_next_phase_s_loader_starts_before_the_phase(yaml_of: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[int, int]] = []
    trained = list[int]()
    open_, prepare = batches._Source.open, ObjectiveSwitch.prepare

    def record(self: Any, position: Any) -> None:
        if position != self._next:
            opened.append((len(trained), self.dataset.epoch_size))
        open_(self, position)

    def count(self: Any, *given: Any, **named: Any) -> Any:
        trained.append(0)
        return prepare(self, *given, **named)

    monkeypatch.setattr(batches, "_BATCHES_AHEAD", 2)
    monkeypatch.setattr(batches._Source, "open", record)
    monkeypatch.setattr(ObjectiveSwitch, "prepare", count)
    train(config_of(yaml_of()))
    # The first phase's data, the second's 2 batches before batch 5, the first's again 2 batches before batch 9.
    assert [batch for batch, _ in opened] == [0, 3, 7]
    assert opened[0][1] == opened[2][1] != opened[1][1]
