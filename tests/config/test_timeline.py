"""Phases and the learning rate as functions of time, and which of them are refused."""

from typing import Any

import pytest

from biphasic.config.phases import ObjectiveConfig, ScheduleConfig, phase_problems, schedule_problems
from biphasic.durations import BatchShape, BatchShapes, Duration, TrainingProgress
from biphasic.timeline import ResolvedPhase, decay_start, learning_rate_factor, phase_at, resolve_phases

SHAPE = BatchShapes(((0, BatchShape(rows=4, row_length=10)),))
END = Duration(10, "ba")
RAMP = {"start": 0.5, "end": 0.3}


def phases(*changes: dict[str, Any]) -> list[Any]:
    return ObjectiveConfig.model_validate({"phases": [{"name": "mlm", **change} for change in changes]}).phases


def elapsed(batch: int) -> TrainingProgress:
    """Batches of 4 rows and, with padding, 35 tokens."""
    return TrainingProgress(batch, 4 * batch, 35 * batch, 0)


@pytest.mark.parametrize(("duration", "batches"), [("8ba", 8), ("8sp", 2), ("9sp", 3), ("80tok", 2), ("81tok", 3)])
def test_padding_counts_when_durations_are_converted(duration: str, batches: int) -> None:
    """The batch that begins there, or the next one."""
    assert SHAPE.batches(Duration.parse(duration)) == batches
    assert SHAPE.progress(batches).reached(Duration.parse(duration))
    assert not SHAPE.progress(batches - 1).reached(Duration.parse(duration))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("3ba", "3ba", True), ("2ba", "3ba", False), ("12sp", "3ba", True), ("8sp", "3ba", False),
        ("120tok", "3ba", True), ("80tok", "3ba", False), ("119tok", "3ba", True), ("2ep", "1ep", True),
        ("1ep", "1ep", True), ("1ep", "2ep", False), ("9ep", "1ba", False), ("9ba", "1ep", False),
    ],
)  # fmt: skip
def test_durations_are_compared_where_they_can_be(a: str, b: str, expected: bool) -> None:
    assert SHAPE.not_before(Duration.parse(a), Duration.parse(b)) is expected


@pytest.mark.parametrize("text", ["0.5dur", "1dur", "0dur", "0.07142857dur", "1e-07dur", "21000ba", "50000000000tok"])
def test_a_duration_is_recorded_as_it_is(text: str) -> None:
    """Records hold the text: with fewer digits, 3,000 batches of 42,000 would be 3,001 after a resume."""
    assert str(Duration.parse(text)) == text


def test_a_phase_begins_where_the_one_before_it_ends() -> None:
    laid_out = resolve_phases(phases({"until": "0.25dur"}, {"until": "200tok"}, {}), END)
    assert [(span.index, str(span.start), str(span.end)) for span in laid_out] == [
        (0, "0ba", "3ba"), (1, "3ba", "200tok"), (2, "200tok", "10ba")
    ]  # fmt: skip
    # The batch that begins at 175 tokens is the last one before 200.
    assert [phase_at(laid_out, elapsed(batch)).index for batch in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]


def masking_ratio(span: ResolvedPhase, batch: int) -> float:
    return span.phase.objective.metrics(lambda: span.share(elapsed(batch)))["objective/masking_ratio"]


def test_a_ramp_goes_from_its_phase_s_start_to_its_end() -> None:
    first, second = resolve_phases(phases({"until": "70tok", "masking_ratio": RAMP}, {"masking_ratio": 0.2}), END)
    assert [masking_ratio(first, batch) for batch in (0, 1)] == [0.5, pytest.approx(0.4)]
    assert masking_ratio(second, 2) == 0.2
    _, ramp = resolve_phases(phases({"until": "2ba"}, {"masking_ratio": RAMP}), END)
    assert [masking_ratio(ramp, batch) for batch in (2, 4, 8)] == pytest.approx([0.5, 0.45, 0.35])


@pytest.mark.parametrize(
    "changes",
    [
        [{"until": "9ba"}, {}],
        [{"until": "3ba"}, {"until": "4ba"}, {}],
        [{"until": "3ba"}, {"until": "24sp"}, {}],
        [{"replacement": {"mask": 0.1, "random": 0.2, "keep": 0.7}}],
        [{"until": "80tok", "masking_ratio": RAMP}, {}],
        [{"until": "3ba"}, {"masking_ratio": RAMP}],
        [{"until": "80tok"}, {"until": "320tok", "masking_ratio": RAMP}, {}],
    ],
)
def test_phases_that_can_be(changes: list[dict[str, Any]]) -> None:
    assert list(phase_problems(phases(*changes), END, SHAPE)) == []


SAME_UNIT = "a ramp needs its phase's start and end in the same unit, in batches (ba), rows (sp) or tokens (tok)"


@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        ([{}, {}], ["0.until"], "is missing: only the last phase is open-ended"),
        ([{"until": "3ba"}, {"until": "5ba"}], ["1.until"],
         "the last phase runs to the end (max_duration): remove this key"),
        ([{"until": "10ba"}, {}], ["0.until", "max_duration"],
         "the phase must end before the run does (max_duration: 10ba), by at least a batch; got 10ba"),
        ([{"until": "3ba"}, {"until": "3ba"}, {}], ["1.until"],
         "the phase must end after it starts (3ba), by at least a batch; got 3ba"),
        ([{"until": "0ba"}, {}], ["0.until"], "the phase must end after it starts (0ba), by at least a batch; got 0ba"),
        ([{"replacement": {"mask": 0.5, "random": 0.2, "keep": 0.2}}], ["0.replacement"],
         "mask, random and keep must add up to 1; got 0.5 + 0.2 + 0.2"),
        ([{"until": "3ba"}, {"replacement": {"mask": 1, "random": 0.2}}], ["1.replacement"],
         "mask, random and keep must add up to 1; got 1.0 + 0.2 + 0.0"),
        ([{"until": "80tok"}, {"masking_ratio": RAMP}], ["1.masking_ratio", "1.until", "max_duration"],
         f"{SAME_UNIT}; got 80tok to 10ba"),
        ([{"until": "2ep", "masking_ratio": RAMP}, {}], ["0.masking_ratio", "0.until", "max_duration"],
         f"{SAME_UNIT}; got 0ba to 2ep"),
    ],
)  # fmt: skip
def test_phases_that_cannot_be_are_refused(changes: list[dict[str, Any]], keys: list[str], message: str) -> None:
    names = [key if key == "max_duration" else f"objective.phases.{key}" for key in keys]
    assert list(phase_problems(phases(*changes), END, SHAPE)) == [(names, message)]


def test_every_open_end_is_named() -> None:
    keys = [keys for keys, _ in phase_problems(phases({}, {"until": "20ba"}, {}, {"until": "3ba"}), END, SHAPE)]
    assert keys == [["objective.phases.0.until"], ["objective.phases.2.until"], ["objective.phases.3.until"]]
    # The order of the phases is compared only when each end is known.
    for changes in ([{"until": "20ba"}, {}, {}], [{"until": "3ba"}, {"until": "3ba"}, {"until": "5ba"}]):
        assert len(list(phase_problems(phases(*changes), END, SHAPE))) == 1


@pytest.mark.parametrize(
    ("values", "keys", "message"),
    [
        ({"warmup": "4ba", "decay": "6ba"}, [], ""),
        ({"warmup": "0.4dur", "decay": "0.6dur", "decay_shape": "cosine", "final_lr": 0.1}, [], ""),
        ({"warmup": "160tok", "decay": "6ba"}, [], ""),
        ({"decay": "10ba"}, [], ""),
        ({"decay": "0tok"}, [], ""),
        ({"decay": "40tok"}, ["decay", "max_duration"],
         "expected the unit of max_duration (10ba) or dur, since the decay ends with the run"),
        ({"warmup": "9ba"}, [], ""),
        ({"warmup": "10ba"}, ["warmup", "max_duration"], "expected less than max_duration (10ba)"),
        ({"warmup": "40sp", "decay": "2ba"}, ["warmup", "max_duration"], "expected less than max_duration (10ba)"),
        ({"warmup": "161tok", "decay": "6ba"}, ["warmup", "decay", "max_duration"],
         "warmup (161tok) and decay (6ba) are longer than the run (10ba)"),
        ({"decay": "11ba"}, ["decay", "max_duration"], "expected at most max_duration (10ba)"),
        ({"decay_shape": "cosine"}, ["decay_shape", "decay"], "has no effect without a decay: set schedule.decay as well"),
        ({"final_lr": 0.1}, ["final_lr", "decay"], "has no effect without a decay: set schedule.decay as well"),
    ],
)  # fmt: skip
def test_schedules_that_cannot_be_are_refused(values: dict[str, Any], keys: list[str], message: str) -> None:
    problems = list(schedule_problems(ScheduleConfig.model_validate(values), END, SHAPE))
    names = [key if key == "max_duration" else f"schedule.{key}" for key in keys]
    assert problems == ([(names, message)] if keys else [])


@pytest.mark.parametrize(
    ("end", "until", "fits"),
    [
        ("300tok", ["281tok"], False),
        ("300tok", ["280tok"], True),
        ("300tok", ["0.999dur"], False),
        ("300tok", ["20tok", "21tok"], False),
        ("300tok", ["40tok", "41tok"], True),
        ("30sp", ["5sp", "7sp"], False),
        ("30sp", ["29sp"], False),
        ("10ba", ["361tok"], False),
    ],
)
def test_a_phase_or_a_decay_without_a_batch_is_refused(end: str, until: list[str], fits: bool) -> None:
    total, ends = Duration.parse(end), [{"until": each} for each in until]
    assert bool(list(phase_problems(phases(*ends, {}), total, SHAPE))) is not fits
    for decay, expected in (("0.001dur", False), ("1dur", True)):
        fault = [(["schedule.decay", "max_duration"], f"expected a length in which a batch begins; got {decay}")]
        problems = list(schedule_problems(ScheduleConfig.model_validate({"decay": decay}), total, SHAPE))
        assert problems == ([] if expected or total.unit == "ba" else fault)


@pytest.mark.parametrize(("rows", "fit"), [((8, 1), True), ((1, 8), False)])
def test_the_decay_s_own_batches_count(rows: tuple[int, int], fit: bool) -> None:
    """Batches 0 to 4 and 5 to 9 have different sizes. The decay begins at batch 4; the warmup ends before batch 4 or 7."""
    parts = [(first, BatchShape(count, 10)) for first, count in zip((0, 5), rows, strict=True)]
    schedule = ScheduleConfig.model_validate({"warmup": "320tok" if fit else "200tok", "decay": "6ba"})
    assert bool(list(schedule_problems(schedule, END, BatchShapes(tuple(parts))))) is not fit


@pytest.mark.parametrize(
    ("values", "end", "messages"),
    [
        ({"warmup": "9ba"}, "1ep", {}),
        ({"warmup": "0dur", "decay": "0dur"}, "1ep", {}),
        ({"warmup": "1ep"}, "10ba", {"warmup": "expected batches (ba), rows (sp) or tokens (tok), here or in"}),
        (
            {"warmup": "0.05dur", "decay": "0.2dur"},
            "2ep",
            {
                "warmup": "instead of epochs; got 0.05dur of 2ep",
                "decay": "expected batches (ba), rows (sp) or tokens (tok), here or in max_duration",
            },
        ),
    ],
)
def test_epochs_are_too_coarse_for_the_rate(values: dict[str, Any], end: str, messages: dict[str, str]) -> None:
    problems = list(schedule_problems(ScheduleConfig.model_validate(values), Duration.parse(end), SHAPE))
    assert [keys for keys, _ in problems] == [[f"schedule.{key}", "max_duration"] for key in messages]
    assert all(part in message for (_, message), part in zip(problems, messages.values(), strict=True))


def test_the_decay_ends_with_the_run() -> None:
    def start(decay: str) -> str:
        return str(decay_start(ScheduleConfig.model_validate({"decay": decay}), END))

    assert [start(decay) for decay in ("4ba", "0.3dur", "0ba", "0tok")] == ["6ba", "7ba", "10ba", "10ba"]


@pytest.mark.parametrize(
    ("shape", "final", "falling"),
    [
        ("linear", 0.0, [1, 0.75, 0.5, 0.25]),
        ("linear", 0.2, [1, 0.8, 0.6, 0.4]),
        ("1-sqrt", 0.0, [1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]),
        ("cosine", 0.5, [1, 0.75 + 0.25 * 0.5**0.5, 0.75, 0.75 - 0.25 * 0.5**0.5]),
    ],
)
def test_the_rate_of_each_batch(shape: str, final: float, falling: list[float]) -> None:
    schedule = ScheduleConfig.model_validate({"warmup": "105tok", "decay": "4ba", "decay_shape": shape, "final_lr": final})
    rates = [learning_rate_factor(schedule, END, elapsed(batch)) for batch in range(11)]
    assert rates == pytest.approx([0, 1 / 3, 2 / 3, 1, 1, 1, *falling, final])


def test_without_warmup_and_decay_the_rate_is_constant() -> None:
    assert {learning_rate_factor(ScheduleConfig(), END, elapsed(batch)) for batch in range(11)} == {1.0}


def test_a_warmup_may_be_a_share() -> None:
    assert learning_rate_factor(ScheduleConfig(warmup=Duration(0.4, "dur")), END, elapsed(1)) == 0.25
