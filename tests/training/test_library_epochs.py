"""Composer scripts in epochs, and switches in another unit than the run: where rates fall and objectives change."""

import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from composer import Evaluator, Trainer
from composer.core import Algorithm, Callback, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader, IterableDataset

from biphasic import CLM, MLM, ObjectiveSwitch, WarmupStableDecay
from biphasic.errors import UserError
from training.test_own_script import decoder, packed_rows, tokenizer


class Seen(Callback):
    """Keeps each batch's rate and objective."""

    def __init__(self) -> None:
        self.rates, self.objectives = list[float](), list[str]()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        batch: Any = state.batch
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])
        self.objectives.append(batch["step"][0].objective.name)


class Unsized(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from packed_rows()


def train(duration: str, *algorithms: Algorithm, rows: Any = None, late: bool = False, **settings: Any) -> Seen:
    """Train on 4 batches in an epoch. `late`: what can be given to `fit` is given there."""
    seen, model = Seen(), HuggingFaceModel(decoder(), tokenizer=tokenizer())
    keys: dict[str, Any] = {"train_dataloader": DataLoader(rows or packed_rows(32), batch_size=8)}
    if not any(isinstance(each, ObjectiveSwitch) for each in algorithms):
        algorithms = ObjectiveSwitch([CLM()], tokenizer(), 0), *algorithms
    trainer = Trainer(
        model=model, max_duration=duration, algorithms=list(algorithms), callbacks=[seen], device="cpu",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1), progress_bar=False, **({} if late else keys), **settings,
    )  # fmt: skip
    trainer.fit(**(keys if late else {}))
    return seen


@pytest.mark.parametrize(
    ("duration", "schedule", "expected"),
    [
        ("2ep", {"decay": "0.5dur"}, [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        ("2ep", {"decay": "1ep"}, [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        ("2ep", {"decay": "2ba"}, [1, 1, 1, 1, 1, 1, 1, 0.5]),
        ("8ba", {"decay": "1ep"}, [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        ("1ep", {"warmup": "0.5dur"}, [0, 0.5, 1, 1]),
        ("1ep", {"warmup": "0.1dur", "decay": "0.5dur"}, [0, 1, 1, 0.5]),
        ("5ba", {"warmup": "1ep"}, [0, 0.25, 0.5, 0.75, 1]),
        ("1ep", {"decay": "1dur", "final_lr": 0.5}, [1, 0.875, 0.75, 0.625]),
        ("2ep", {}, [1] * 8),
    ],
)
def test_the_rate_of_a_run_in_epochs_changes_within_them(duration: str, schedule: Any, expected: list[float]) -> None:
    assert train(duration, WarmupStableDecay(lr=1.0, **schedule)).rates == pytest.approx(expected)


def test_the_loader_may_be_given_to_fit_and_its_epochs_cut_short() -> None:
    schedule = WarmupStableDecay(decay="0.5dur", lr=1.0)
    assert train("2ep", schedule, late=True).rates == pytest.approx([1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert train("2ep", schedule, train_subset_num_batches=2).rates == pytest.approx([1, 1, 1, 0.5])


def test_times_that_can_t_be_converted_are_refused() -> None:
    for schedule, message in (
        ({"warmup": "1ep"}, "warmup: expected ba, sp or tok with a loader whose length isn't known; got 1ep"),
        ({"decay": "1ep"}, r"decay: expected the unit of max_duration \(2ba\), or dur; got 1ep"),
    ):
        with pytest.raises(UserError, match=message):
            train("2ba", WarmupStableDecay(**schedule), rows=Unsized())
    with pytest.raises(UserError, match="decay: expected the unit of max_duration"):
        train("2ep", WarmupStableDecay(decay="8sp"))


def switch(*until: str) -> ObjectiveSwitch:
    """CLM and MLM in turn."""
    phases = [(MLM if index % 2 else CLM)(until=each) for index, each in enumerate(until)]
    return ObjectiveSwitch([*phases, CLM() if len(until) % 2 == 0 else MLM()], tokenizer(), 0)


@pytest.mark.parametrize(
    ("duration", "until", "first"),
    [
        ("3ep", ["0.5dur"], [6]), ("1ep", ["0.5dur"], [2]), ("1ep", ["0.3dur"], [2]), ("2ep", ["0.5dur"], [4]),
        ("2ep", ["1ep"], [4]), ("2ep", ["3ba"], [3]), ("2ep", ["0.25dur", "1ep"], [2, 4]), ("8ba", ["1ep"], [4]),
    ],
)  # fmt: skip
def test_a_switch_may_be_within_an_epoch(duration: str, until: list[str], first: list[int]) -> None:
    for late in (False, True):
        seen = train(duration, switch(*until), late=late).objectives
        changes = [batch for batch, (a, b) in enumerate(pairwise(seen), 1) if a != b]
        assert changes == first


def test_validation_s_loader_doesn_t_move_the_switch() -> None:
    evaluator = Evaluator(label="other", dataloader=DataLoader(packed_rows(8), batch_size=1), metric_names=[])
    seen = train("3ep", switch("0.5dur"), eval_dataloader=evaluator, eval_interval="1ba", eval_subset_num_batches=1)
    assert seen.objectives == ["clm"] * 6 + ["mlm"] * 6


@pytest.mark.parametrize(
    ("duration", "until"), [("2ep", ["100ba"]), ("2ep", ["8ba"]), ("4ba", ["1ep"]), ("2ep", ["5ba", "1ep"])]
)
def test_a_phase_that_would_never_begin_is_refused(duration: str, until: list[str]) -> None:
    for late in (False, True):
        with pytest.raises(UserError, match=r"phases: phase 1 begins at \d+(ba|ep) and ends at "):
            train(duration, switch(*until), late=late)


def test_a_phase_that_has_not_begun_is_named_at_the_end() -> None:
    """Batches and tokens can't be compared before."""
    for duration, until in (("2ba", "100000tok"), ("2ep", "100000tok"), ("16sp", "2ba")):
        with pytest.warns(
            UserWarning, match=f"phase 1 has not begun: phase 0 lasts until {until}, and the run was {duration}"
        ):
            train(duration, switch(until))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train("2ba", switch("1sp"))
    assert not [each for each in caught if "has not begun" in str(each.message)]
