"""What the objective schedule and the learning rate do to single batches, without a run."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from composer.core import Event, State, Timestamp
from composer.devices import DeviceCPU
from composer.loggers import InMemoryLogger, Logger
from torch import nn
from torchmetrics import Metric

from biphasic.data.streaming import collate
from biphasic.durations import TrainingProgress
from biphasic.errors import UserError
from biphasic.objectives.batch import Batch, segment_lengths, step_of
from biphasic.objectives.objective import CLM, MLM, Objective, Ramp, Replacement
from biphasic.objectives.targets import Vocabulary, clm_targets, mlm_inputs_and_targets
from biphasic.training import switch
from biphasic.training.optimizer import WarmupStableDecay
from biphasic.training.step import PretrainModel, data_spec
from biphasic.training.switch import ObjectiveSwitch

VOCABULARY = Vocabulary(size=50, mask_id=3, special_ids=(0, 1, 2, 3))
BYTE_LENGTHS = [0] * 4 + [1 + number % 5 for number in range(4, 50)]
PHASES = [
    CLM(until="2ba", reset_optimizer=True),
    MLM(until="4ba", masking_ratio=0.5, target="next"),
    MLM(masking_ratio=Ramp(0.2, 0.6), replacement=Replacement(mask=0.5, random=0.3, keep=0.2), reset_optimizer=True),
]


def raw_batch() -> Batch:
    """Three rows of 40 positions; the second has padding."""
    tokens = np.random.default_rng(0).integers(4, 50, (3, 40), dtype=np.uint16)
    tokens[1, 35:] = 0
    lengths = [[25, 15], [20, 10, 5], [40]]
    rows = zip((7, 11, 5), tokens, lengths, strict=True)
    return collate([{"row_id": row, "tokens": ids, "lengths": np.array(cut, np.uint32)} for row, ids, cut in rows])


class Run:
    """A run's state, on which an algorithm acts; it has taken one step, so that the optimizer has a state."""

    def __init__(self, repeats_rows: bool = False) -> None:
        self.repeats_rows = repeats_rows
        module = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.ones(2)).sum().backward()
        optimizer.step()
        self.state = State(module, 0, "run", DeviceCPU(), optimizers=optimizer, max_duration="8ba")
        self.logged = InMemoryLogger()
        self.logger = Logger(self.state, [self.logged])
        self.logged.init(self.state, self.logger)

    def apply(self, algorithm: Any, event: Event, **time: int) -> Any:
        """Run the algorithm at a timestamp, if it runs at this event; returns the batch."""
        self.state.timestamp = Timestamp(**time)
        self.state.batch = {**raw_batch(), **({} if self.repeats_rows else {"counter": time.get("epoch", 0)})}
        if algorithm.match(event, self.state):
            algorithm.apply(event, self.state, self.logger)
        return self.state.batch

    def last_metrics(self) -> dict[str, float]:
        """What was logged last, by name."""
        now = self.state.timestamp
        return {name: entries[-1][1] for name, entries in self.logged.data.items() if entries[-1][0] is now}


def schedule(phases: Sequence[Objective] = PHASES) -> ObjectiveSwitch:
    last = [phase for phase in phases if isinstance(phase, MLM)][-1]
    validation = {"clm": CLM(), "mlm": last.validating(0.3)}
    return ObjectiveSwitch(phases, VOCABULARY, 9, validation=validation, byte_lengths=BYTE_LENGTHS)


def prepare(batch: Any, objective: Objective, phase: int | None) -> Batch:
    return schedule().prepare(batch, objective, phase, 0, lambda: 0.0)


def assert_prepared(batch: Batch, objective: str, phase: int | None, inputs: Any, targets: Any) -> None:
    raw, step = raw_batch(), step_of(batch)
    assert (step.objective.name, step.phase, step.causal) == (objective, phase, objective == "clm")
    assert torch.equal(batch["input_ids"], inputs) and torch.equal(batch["labels"], targets)
    assert torch.equal(batch["row_ids"], raw["row_ids"]) and batch["lengths"] == raw["lengths"]
    assert step.mean_targets_per_rank.dtype == torch.float32 and step.mean_targets_per_rank == (targets >= 0).sum()
    assert step.mean_rows_per_rank == 3
    lengths = [BYTE_LENGTHS[token] for token in targets.flatten().tolist() if token >= 0]
    assert float(step.bytes_per_target) == pytest.approx(sum(lengths) / len(lengths))


def masked(**keys: Any) -> tuple[torch.Tensor, torch.Tensor]:
    raw = raw_batch()
    return mlm_inputs_and_targets(
        raw["input_ids"], raw["segment_ids"], raw["row_ids"], VOCABULARY, **{"seed": 9, "counter": 0, **keys}
    )


def test_a_batch_gets_the_objective_of_its_phase() -> None:
    run, objective, raw = Run(), schedule(), raw_batch()
    assert objective.phase_name == "clm"
    for batch in (0, 1):
        prepared = run.apply(objective, Event.BATCH_START, batch=batch)
        assert_prepared(prepared, "clm", 0, raw["input_ids"], clm_targets(raw["input_ids"], raw["segment_ids"]))
        assert run.last_metrics() == {"objective/phase": 0}
    prepared = run.apply(objective, Event.BATCH_START, batch=2, epoch=5)
    assert_prepared(prepared, "mlm", 1, *masked(counter=5, masking_ratio=0.5, target="next"))
    assert run.last_metrics() == {"objective/phase": 1, "objective/masking_ratio": 0.5}
    assert objective.phase_name == "mlm"
    prepared = run.apply(objective, Event.BATCH_START, batch=6)
    assert_prepared(prepared, "mlm", 2, *masked(masking_ratio=0.4, random_share=0.3, keep_share=0.2))
    assert run.last_metrics() == {"objective/phase": 2, "objective/masking_ratio": pytest.approx(0.4)}


def test_the_masks_count_batches_where_an_epoch_repeats_rows() -> None:
    for run, counter in ((Run(), 5), (Run(repeats_rows=True), 3)):
        prepared = run.apply(schedule(), Event.BATCH_START, batch=3, epoch=5)
        assert_prepared(prepared, "mlm", 1, *masked(counter=counter, masking_ratio=0.5, target="next"))


def test_other_events_leave_the_batch_as_it_is() -> None:
    run, objective = Run(), schedule()
    for event in (Event.BEFORE_FORWARD, Event.BATCH_END, Event.EVAL_BATCH_END):
        assert "step" not in run.apply(objective, event, batch=2)


def test_validation_has_its_own_masks_and_changes_nothing() -> None:
    run, objective, raw = Run(), schedule(), raw_batch()
    run.apply(objective, Event.BATCH_START, batch=1)
    logged = {name: len(entries) for name, entries in run.logged.data.items()}
    run.state.set_dataloader([], "mlm")
    prepared = run.apply(objective, Event.EVAL_BATCH_START, batch=3, epoch=2)
    assert_prepared(prepared, "mlm", None, *masked(masking_ratio=0.3))
    run.state.set_dataloader([], "clm")
    prepared = run.apply(objective, Event.EVAL_BATCH_START, batch=3, epoch=2)
    assert_prepared(prepared, "clm", None, raw["input_ids"], clm_targets(raw["input_ids"], raw["segment_ids"]))
    assert objective.last_batch == TrainingProgress(1, 0, 0, 0) and objective.phase_name == "clm"
    assert {name: len(entries) for name, entries in run.logged.data.items()} == logged


def test_validation_predicts_masked_tokens_where_the_last_mlm_phase_does() -> None:
    run, objective = Run(), schedule(phases=[PHASES[0], MLM(target="next")])
    run.state.set_dataloader([], "mlm")
    prepared = run.apply(objective, Event.EVAL_BATCH_START, batch=1)
    assert_prepared(prepared, "mlm", None, *masked(masking_ratio=0.3, target="next"))


def test_the_optimizer_is_reset_where_a_phase_begins_that_asks_for_it() -> None:
    def resets(*batches: int, objective: ObjectiveSwitch | None = None) -> list[bool]:
        objective, cleared = objective or schedule(), []
        for batch in batches:
            run = Run()
            run.apply(objective, Event.BATCH_START, batch=batch)
            cleared.append(not run.state.optimizers[0].state)
        return cleared

    # Neither in a run's first batch, nor at the second phase.
    assert resets(0, 1, 2, 3, 4, 5) == [False, False, False, False, True, False]
    # Nor after a resume within the phase, but after one from the batch before it.
    for last, expected in ((3, True), (4, False)):
        before, after = schedule(), schedule()
        Run().apply(before, Event.BATCH_START, batch=last, sample=3, token=115, epoch=1)
        after.load_state_dict(before.state_dict())
        assert after.last_batch == TrainingProgress(last, 3, 115, 1)
        assert resets(last + 1, objective=after) == [expected]


def test_the_last_batch_of_a_run_that_has_trained_nothing_is_its_start() -> None:
    objective, start = schedule(), TrainingProgress(0, 0, 0, 0)
    state = objective.state_dict()
    assert objective.last_batch == start and objective.phase_name == "clm"
    Run().apply(objective, Event.BATCH_START, batch=1)
    objective.load_state_dict(state)
    assert objective.last_batch == start


def test_progress_has_composer_s_counts() -> None:
    assert TrainingProgress.of(Timestamp(epoch=1, batch=2, sample=3, token=4)) == TrainingProgress(2, 3, 4, 1)


def test_fewer_targets_than_ranks_are_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(switch.dist, "all_reduce", lambda *_, **__: None)  # the other ranks have none
    batch = raw_batch()
    segments = batch["segment_ids"]
    segments.zero_()
    segments[0, :2] = 1  # its first token is the only one with a target
    assert step_of(prepare(batch, PHASES[0], 0)).mean_targets_per_rank == 1 / 8


def test_a_batch_without_targets_counts_as_one() -> None:
    """The loss is divided by the count. The first batch of a run is refused, which may be all that it ever trains."""
    batch = raw_batch()
    batch["segment_ids"].zero_()
    assert step_of(prepare(batch, MLM(), None)).mean_targets_per_rank == 1
    with pytest.raises(UserError, match=r"expected targets at positions .*; the first batch of mlm has none"):
        prepare(batch, MLM(), 1)


def test_microbatches_have_the_batch_s_rows_in_order() -> None:
    batch = prepare(raw_batch(), PHASES[0], 0)
    spec = data_spec([])
    parts: Any = spec.split_batch(batch, 2)
    assert [part["row_ids"].tolist() for part in parts] == [[7, 11], [5]]
    assert [part["lengths"] for part in parts] == [batch["lengths"][:2], batch["lengths"][2:]]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), batch["input_ids"])
    assert torch.equal(torch.cat([part["labels"] for part in parts]), batch["labels"])
    assert all(step_of(part) is step_of(batch) for part in parts)
    assert segment_lengths(parts[0]) == [25, 15, 20, 10, 5, 5] and segment_lengths(parts[1]) == [40]
    # Composer counts the rows, and the tokens without padding, before and after the objective.
    for counted in (raw_batch(), batch):
        assert (spec.get_num_samples_in_batch(counted), spec.get_num_tokens_in_batch(counted)) == (3, 115)


def test_each_batch_gets_its_learning_rate() -> None:
    run = Run()
    algorithm = WarmupStableDecay("4ba", "2ba", 0.4, final_lr=0.5)
    rates = []
    for batch in range(8):
        run.apply(algorithm, Event.BATCH_START, batch=batch)
        rates.append(run.state.optimizers[0].param_groups[0]["lr"])
        run.apply(algorithm, Event.BATCH_END, batch=batch + 1)
        assert run.state.optimizers[0].param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.3])


def mean_loss(*microbatches: tuple[float, int]) -> float:
    """The metric after microbatches with these summed losses and numbers of targets."""
    model = PretrainModel(cast("Any", nn.Linear(1, 1)))
    metric: Metric = model.get_metrics()["loss"]
    for total, targets in microbatches:
        model.update_metric(cast("Any", None), (torch.tensor(total), torch.tensor(targets)), metric)
    return float(metric.compute())


def test_the_validation_loss_is_the_mean_over_targets() -> None:
    assert mean_loss((2.0, 1), (12.0, 3)) == 3.5
    assert mean_loss((2.0, 1), (0.0, 0), (12.0, 3)) == 3.5, "a microbatch without a target changes nothing"


def test_nan_is_not_left_out() -> None:
    assert math.isnan(mean_loss((2.0, 1), (math.nan, 3)))
