"""The pieces into which a run is split, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from biphasic.config.durations import Duration, Elapsed
from biphasic.config.load import load
from biphasic.config.pieces import BATCHES, BEGINNING, EPOCHS, TOKENS, Time, clock_time, objective_pieces, rate_pieces
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import BatchShape

ROOT = Path(__file__).parents[2]
SHAPE = BatchShape(rows=4, row_length=10)
FAR = 2**62
SIZES = ["global_batch_size=4", "microbatch_size=auto", "data.sequence_length=10", "optimizer.lr=0.5",
         "objective.phases.0.until=0.5dur", "schedule.warmup=0.05dur", "schedule.decay=0.2dur"]  # fmt: skip


def config_of(*overrides: str) -> PretrainConfig:
    config = load(ROOT / "yamls" / "quickstart.yaml", [*SIZES, "max_duration=20ba", *overrides])
    assert isinstance(config, PretrainConfig)
    return config


def batch(number: int) -> Time:
    return Time(BATCHES, number)


@pytest.mark.parametrize(
    ("time", "elapsed", "first_batch"),
    [
        (batch(3), Elapsed(3, 12, FAR, FAR), 3),
        (Time(TOKENS, 41), Elapsed(FAR, FAR, 41, FAR), 2),
        (Time(TOKENS, 40), Elapsed(FAR, FAR, 40, FAR), 1),
        (Time(EPOCHS, 2), Elapsed(FAR, FAR, FAR, 2), 2),
        (BEGINNING, Elapsed(0, 0, 0, 0), 0),
        (Time(TOKENS, 0), Elapsed(0, 0, 0, 0), 0),
    ],
)
def test_counts_at_a_time(time: Time, elapsed: Elapsed, first_batch: int) -> None:
    assert (time.elapsed(SHAPE), time.first_batch(SHAPE)) == (elapsed, first_batch)


@pytest.mark.parametrize(
    ("time", "by", "expected"),
    [
        (batch(3), batch(3), True),
        (batch(3), batch(2), False),
        (Time(TOKENS, 0), batch(0), True),
        # 80 tokens are at least 2 batches, an epoch at least one.
        (batch(2), Time(TOKENS, 80), True),
        (batch(3), Time(TOKENS, 80), False),
        (batch(2), Time(EPOCHS, 2), True),
        (batch(3), Time(EPOCHS, 2), False),
        (Time(TOKENS, 10), batch(9), False),
        (Time(EPOCHS, 1), Time(TOKENS, 10**9), False),
    ],
)
def test_what_is_certainly_reached(time: Time, by: Time, expected: bool) -> None:
    assert time.is_certainly_reached(by, SHAPE) is expected


@pytest.mark.parametrize(
    ("duration", "time"),
    [("13sp", batch(4)), ("12sp", batch(3)), ("0tok", BEGINNING), ("7tok", Time(TOKENS, 7)), ("2ep", Time(EPOCHS, 2))],
)
def test_the_first_batch_after_a_duration(duration: str, time: Time) -> None:
    assert clock_time(Duration.parse(duration), SHAPE) == time


def pieces_of(pieces: list[Any]) -> list[tuple[Any, ...]]:
    return [(p.start, p.fields, p.prefix, p.start_key, p.until_key, p.texts, p.clock, p.resets) for p in pieces]


def test_phases_are_pieces() -> None:
    config = config_of(
        "objective.phases=[{name: clm, until: 0.25dur, reset_optimizer: true}, {name: mlm, until: 8ba}, {name: mlm,"
        " masking_ratio: {start: 0.5, end: 0.3}, target: next, replacement: {mask: 0.7, random: 0.2, keep: 0.1},"
        " reset_optimizer: true}]"
    )
    at, switch = "objective.phases.", "5ba (0.25dur of 20ba)"
    pieces = objective_pieces(config)
    assert pieces_of(pieces) == [
        (BEGINNING, {"name": "clm"}, f"{at}0.", f"{at}0.until", f"{at}0.until",
         {f"{at}0.until": switch, f"{at}0.name": "clm", f"{at}0.reset_optimizer": "true"}, None, False),
        (batch(5), {"name": "mlm", "masking_ratio": 0.4, "target": "same", "replacement": (0.0, 0.0)},
         f"{at}1.", f"{at}0.until", f"{at}1.until",
         {f"{at}0.until": switch, f"{at}1.until": "8ba", f"{at}1.name": "mlm", f"{at}1.reset_optimizer": "false",
          f"{at}1.masking_ratio": "0.4", f"{at}1.target": "same", f"{at}1.replacement": "mask 1, random 0, keep 0"},
         None, False),
        (batch(8), {"name": "mlm", "masking_ratio": (0.5, 0.3, (BATCHES, 8), (BATCHES, 20)), "target": "next",
                    "replacement": (0.2, 0.1)}, f"{at}2.", f"{at}1.until", f"{at}2.until",
         {f"{at}1.until": "8ba", f"{at}2.until": "the end", f"{at}2.name": "mlm", f"{at}2.reset_optimizer": "true",
          f"{at}2.masking_ratio": "0.5 to 0.3 at 20ba", f"{at}2.target": "next",
          f"{at}2.replacement": "mask 0.7, random 0.2, keep 0.1"}, BATCHES, True),
    ]  # fmt: skip
    now = Elapsed(14, 56, 0, 0)
    assert [piece.value(now) for piece in pieces] == [None, 0.4, pytest.approx(0.4)]
    assert (pieces[1].boundary(True), pieces[1].boundary(False)) == (f"{at}0.until", f"{at}1.until")


def test_phases_that_train_alike_are_one_piece() -> None:
    phases = "objective.phases=[{name: clm, until: 2ba}, {name: clm, until: 9sp}, {name: mlm, until: 11sp, %s},"
    phases += " {name: clm, until: 13ba}, {name: mlm, masking_ratio: {start: 0.3, end: 0.3}}]"
    # The third phase has no batch; the fourth continues the second.
    first, second = objective_pieces(config_of(phases % "target: next"))
    assert (first.start, first.fields, first.prefix) == (BEGINNING, {"name": "clm"}, "objective.phases.0.")
    assert (first.start_key, first.until_key) == ("objective.phases.0.until", "objective.phases.3.until")
    assert {key: first.texts[key] for key in first.texts if key.endswith("until")} == {
        "objective.phases.0.until": "2ba", "objective.phases.1.until": "9sp", "objective.phases.2.until": "11sp",
        "objective.phases.3.until": "13ba",
    }  # fmt: skip
    # A ramp between equal ratios is one ratio.
    assert (second.start, second.clock, second.fields["masking_ratio"]) == (batch(13), None, 0.3)
    # A reset begins a piece.
    resetting = "objective.phases=[{name: clm, until: 2ba}, {name: clm, reset_optimizer: true}]"
    assert [(piece.start, piece.resets) for piece in objective_pieces(config_of(resetting))] == [
        (BEGINNING, False),
        (batch(2), True),
    ]


def test_warmup_stable_part_and_decay_are_pieces() -> None:
    config = config_of("schedule={warmup: 9sp, decay: 0.25dur, decay_shape: cosine, final_lr: 0.2}")
    texts = {"optimizer.lr": "0.5", "schedule.warmup": "9sp", "schedule.decay": "from 15ba to 20ba",
             "schedule.decay_shape": "cosine", "schedule.final_lr": "0.2"}  # fmt: skip
    rate = {"optimizer.lr": 0.5}
    pieces = rate_pieces(config)
    warmup, decay = "schedule.warmup", "schedule.decay"
    falls = {decay: ((BATCHES, 15), (BATCHES, 20)), "schedule.decay_shape": "cosine", "schedule.final_lr": 0.2}
    assert pieces_of(pieces) == [
        (BEGINNING, {**rate, warmup: (BATCHES, 9 / 4)}, "", warmup, warmup, texts, BATCHES, False),
        (batch(3), rate, "", warmup, decay, texts, None, False),
        (batch(15), {**rate, **falls}, "", decay, decay, texts, BATCHES, False),
    ]
    assert [piece.value(Elapsed(count, 4 * count, 0, 0)) for piece, count in zip(pieces, (1, 9, 20), strict=True)] == (
        pytest.approx([0.5 * 4 / 9, 0.5, 0.1])
    )


def test_without_warmup_and_decay_the_rate_is_one_piece() -> None:
    [piece] = rate_pieces(config_of("schedule={warmup: 0tok, decay: 0ba}"))
    assert (piece.start, piece.fields, piece.clock) == (BEGINNING, {"optimizer.lr": 0.5}, None)
    assert piece.texts["schedule.decay"] == "no decay"


def test_a_warmup_in_tokens_comes_before_the_decay() -> None:
    """Without padding it ends after 16 batches, where the decay begins; with padding later."""
    pieces = rate_pieces(config_of("schedule={warmup: 640tok, decay: 4ba}"))
    assert [(piece.start, piece.clock) for piece in pieces] == [(BEGINNING, TOKENS), (Time(TOKENS, 640), BATCHES)]
    shorter = rate_pieces(config_of("schedule={warmup: 600tok, decay: 4ba}"))
    assert [piece.start for piece in shorter] == [BEGINNING, Time(TOKENS, 600), batch(16)]
