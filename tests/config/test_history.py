"""Where two configurations part, against a comparison of every batch."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from biphasic.config.history import Difference, first_difference, history_of
from biphasic.config.load import load
from biphasic.config.phases import MLMPhase, phase_problems, schedule_problems
from biphasic.config.pretrain import PretrainConfig
from biphasic.durations import TrainingProgress
from biphasic.timeline import learning_rate_factor, phase_at, resolve_phases

ROOT = Path(__file__).parents[2]
ROWS, LENGTH = 2, 3
"""Rows in a batch and tokens in a row: small, so that times in different units fall into one batch."""


SHARES = ["max_duration=360ba", "objective.phases.0.until=0.5dur", "schedule.warmup=0.05dur", "schedule.decay=0.2dur",
          "optimizer.lr=2e-3"]  # fmt: skip


def quickstart(*overrides: str) -> PretrainConfig:
    """The quickstart's configuration, at a rate of 2e-3 and with times as shares of 360 batches."""
    config = load(ROOT / "yamls" / "quickstart.yaml", [*SHARES, *overrides])
    assert isinstance(config, PretrainConfig)
    return config


def compare_histories(first: PretrainConfig, second: PretrainConfig, overrides: Sequence[str] = ()) -> Difference | None:
    return first_difference(history_of(first), history_of(second), overrides)


BASE = quickstart("microbatch_size=auto", f"global_batch_size={ROWS}", f"data.sequence_length={LENGTH}").model_dump(
    mode="json"
)


def config_of(keys: dict[str, Any]) -> PretrainConfig:
    return PretrainConfig.model_validate({**BASE, **keys})


# Configurations


def durations(units: list[str], most: int) -> st.SearchStrategy[str]:
    scale = {"ba": 1, "sp": ROWS, "tok": ROWS * LENGTH, "ep": 1}
    known = st.sampled_from([unit for unit in units if unit != "dur"])
    plain = known.flatmap(lambda unit: st.integers(0, most * scale[unit]).map(lambda value: f"{value}{unit}"))
    return plain | st.integers(0, 10).map(lambda tenths: f"{tenths / 10}dur") if "dur" in units else plain


RATIOS = st.sampled_from([0.2, 0.4]) | st.fixed_dictionaries(
    {"start": st.sampled_from([0.2, 0.4]), "end": st.sampled_from([0.2, 0.4])}
)
PHASES = st.fixed_dictionaries({"name": st.just("clm"), "reset_optimizer": st.booleans()}) | st.fixed_dictionaries(
    {
        "name": st.just("mlm"),
        "reset_optimizer": st.booleans(),
        "masking_ratio": RATIOS,
        "target": st.sampled_from(["same", "same", "next"]),
        "replacement": st.sampled_from([{"mask": 1.0}, {"mask": 0.8, "random": 0.2}]),
    }
)


@st.composite
def objectives(draw: st.DrawFn, units: list[str]) -> list[dict[str, Any]]:
    phases = draw(st.lists(PHASES, min_size=1, max_size=3))
    return [*({**phase, "until": draw(durations(units, 12))} for phase in phases[:-1]), phases[-1]]


def schedules(units: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "warmup": durations(units, 6),
            "decay": durations(units, 8),
            "decay_shape": st.sampled_from(["linear", "1-sqrt", "cosine"]),
            "final_lr": st.sampled_from([0.0, 0.5]),
        }
    )


@st.composite
def pairs(draw: st.DrawFn, units: list[str]) -> tuple[PretrainConfig, PretrainConfig]:
    """Two configurations, the second with some of the first's keys."""
    drawn = {
        "max_duration": durations([unit for unit in units if unit != "dur"], 14),
        "objective": objectives(units).map(lambda phases: {"phases": phases}),
        "schedule": schedules(units),
        "optimizer": st.sampled_from([1e-3, 1e-3, 2e-3]).map(lambda lr: {"lr": lr}),
    }
    first = {key: draw(values) for key, values in drawn.items()}
    second = {key: first[key] if draw(st.booleans()) else draw(values) for key, values in drawn.items()}
    # Often the same phases, up to a point.
    if draw(st.booleans()) and len(first["objective"]["phases"]) > 1:
        phases = first["objective"]["phases"]
        second["objective"] = {"phases": [*phases[:-1], draw(PHASES)]}
    configs = config_of(first), config_of(second)
    for config in configs:
        assume(config.max_duration.value)
        assume(not any(phase_problems(config.objective.phases, config.max_duration, config.batch_shapes)))
        problems = schedule_problems(config.schedule, config.max_duration, config.batch_shapes)
        assume(all(key.endswith(("decay_shape", "final_lr")) for keys, _ in problems for key in keys[:1]))
    return configs


# Every batch


Time = tuple[int, int]
"""Tokens and epochs before a batch."""


def batches(config: PretrainConfig, times: list[Time]) -> Iterator[tuple[object, ...]]:
    """What decides each batch of a run, when the data's batches begin at these times."""
    laid_out, previous = resolve_phases(config.objective.phases, config.max_duration), None
    for batch, (tokens, epochs) in enumerate(times):
        now = TrainingProgress(batch, batch * ROWS, tokens, epochs)
        if now.reached(config.max_duration):
            return
        span = phase_at(laid_out, now)
        resets = previous not in (None, span.index) and span.phase.reset_optimizer
        objective: tuple[object, ...] = (span.phase.name,)
        if isinstance(span.phase, MLMPhase):
            shares = span.phase.replacement
            ratio = span.phase.objective.metrics(partial(span.share, now))["objective/masking_ratio"]
            objective += (ratio, span.phase.target, shares.random, shares.keep)
        previous = span.index
        rate = config.optimizer.lr * learning_rate_factor(config.schedule, config.max_duration, now)
        yield resets, objective, rate


def parting(first: PretrainConfig, second: PretrainConfig, times: list[Time]) -> int | None:
    together = zip(batches(first, times), batches(second, times), strict=False)
    return next((batch for batch, (one, other) in enumerate(together) if one != other), None)


def require_safety(first: PretrainConfig, second: PretrainConfig, times: list[Time]) -> None:
    """No batch is called equal that differs, whatever the batches' tokens and epochs are."""
    difference, actual = compare_histories(first, second), parting(first, second, times)
    if difference is None:
        assert actual is None
    elif actual is not None:
        assert difference.batch <= actual
        for batch in range(actual, len(times)):
            assert difference.is_past(TrainingProgress(batch, batch * ROWS, *times[batch]))


SHORT: list[Time] = [(batch, 0) for batch in range(40)]
"""Times of batches that are almost only padding."""


@st.composite
def padded(draw: st.DrawFn) -> list[Time]:
    steps = draw(st.lists(st.tuples(st.integers(1, ROWS * LENGTH), st.sampled_from([0, 0, 1])), min_size=40, max_size=40))
    times = [(0, 0)]
    for tokens, epochs in steps:
        times.append((times[-1][0] + tokens, times[-1][1] + epochs))
    return times


PROFILE = {"deadline": None, "suppress_health_check": list(HealthCheck)}
ANY = ["ba", "sp", "tok", "ep", "dur"]


@settings(max_examples=60, **PROFILE)
@given(pairs(ANY), padded())
def test_tokens_and_epochs_never_hide_a_difference(
    configs: tuple[PretrainConfig, PretrainConfig], times: list[Time]
) -> None:
    require_safety(*configs, times)


@pytest.mark.slow
@settings(max_examples=2000, **PROFILE)
@given(pairs(ANY) | pairs(["tok", "dur"]) | pairs(["tok", "ba"]), padded())
def test_tokens_and_epochs_never_hide_a_difference_for_long(
    configs: tuple[PretrainConfig, PretrainConfig], times: list[Time]
) -> None:
    require_safety(*configs, times)


def test_a_difference_that_another_unit_may_bring_forward() -> None:
    """One run switches after two batches, the other after an epoch; which comes first depends on the data."""
    phases = ([{**CLM, "until": until}, MLM] for until in ("2ba", "1ep"))
    batches, epochs = (config_of({"max_duration": "9ba", "objective": {"phases": each}}) for each in phases)
    for first, second in ((batches, epochs), (epochs, batches)):
        difference = compare_histories(first, second)
        assert difference is not None and difference.batch == 1
        assert {str(time) for time in difference.times} == {"2ba", "1ep"}


def test_a_later_phase_may_begin_first() -> None:
    """With short segments, batch 4 comes before token 12: one run is then in its last phase, the other in its first."""
    first = [{**CLM, "until": "12tok"}, {**MLM, "until": "4ba"}, {**MLM, "target": "next"}]
    phases = (first, [{**CLM, "until": "13tok"}, MLM])
    require_safety(*(config_of({"max_duration": "9ba", "objective": {"phases": each}}) for each in phases), SHORT)


def difference(*overrides: str, allowed: tuple[str, ...] = ()) -> tuple[int, str, str, str] | None:
    """The first difference between the quickstart and the quickstart with overrides."""
    parting = compare_histories(quickstart(), quickstart(*overrides), allowed)
    return None if parting is None else (parting.batch, parting.key, parting.first, parting.second)


@pytest.mark.parametrize(
    "override",
    ["run_name=other", "output=elsewhere", "microbatch_size=4", "logging.tensorboard=false", "checkpoint.interval=7ba",
     "data.num_workers=5", "data.folder=moved", "evaluation.interval=1ba", "checkpoint.keep=9",
     "parallelism.strategy=fsdp", "data.folder=null data.train.local=a data.validation.local=b", "tokenizer=moved/tokenizer",
     "start_from=runs/other", "compute.compile=false", "optimizer.max_skipped_batches=2",
     "data.folder=s3://bucket data.cache_limit=10gb data.predownload=9"],
)  # fmt: skip
def test_keys_that_do_not_affect_the_weights_may_change(override: str) -> None:
    assert difference(*override.split()) is None


def test_the_cache_of_phases_may_be_deleted_from_some_restart_on() -> None:
    phases = "objective.phases.1.data={train: {local: other, remote: s3://bucket/other}}"
    assert compare_histories(quickstart(phases), quickstart(phases, "data.num_workers=1")) is None


@pytest.mark.parametrize(
    ("override", "batch", "key", "first", "second"),
    [
        ("seed=43", 0, "seed", "42", "43"),
        ("global_batch_size=16", 0, "global_batch_size", "8", "16"),
        ("data.shuffle_block_size=9", 0, "data.shuffle_block_size", "262144", "9"),
        ("data.start_at=9ba", 0, "data.start_at", "'0ba'", "'9ba'"),
        ("model.num_kv_heads=2", 0, "model.num_kv_heads", "nothing", "2"),
        ("precision=amp_bf16", 0, "precision", "'fp32'", "'amp_bf16'"),
        ("optimizer.eps=1e-6", 0, "optimizer.eps", "1e-05", "1e-06"),
        ("optimizer.lr=1e-3", 0, "optimizer.lr", "0.002", "0.001"),
        ("schedule.warmup=9ba", 0, "schedule.warmup", "18ba (0.05dur of 360ba)", "9ba"),
        ("objective.phases.1.masking_ratio=0.3", 180, "objective.phases.1.masking_ratio", "0.4", "0.3"),
        ("objective.phases.1.target=next", 180, "objective.phases.1.target", "same", "next"),
        ("objective.phases.1.reset_optimizer=true", 180, "objective.phases.1.reset_optimizer", "false", "true"),
        ("objective.phases.0.until=170ba", 170, "objective.phases.0.until", "180ba (0.5dur of 360ba)", "170ba"),
        # The decay begins at batch 288, which still has the full rate.
        ("schedule.decay_shape=cosine", 289, "schedule.decay_shape", "linear", "cosine"),
        ("schedule.final_lr=0.1", 289, "schedule.final_lr", "0.0", "0.1"),
        ("schedule.decay=60ba", 289, "schedule.decay", "from 288ba to 360ba", "from 300ba to 360ba"),
        ("schedule.decay=0ba", 289, "schedule.decay", "from 288ba to 360ba", "no decay"),
    ],
)
def test_the_first_batch_and_the_key_are_named(override: str, batch: int, key: str, first: str, second: str) -> None:
    assert difference(override) == (batch, key, first, second)
    assert difference(override, allowed=(key,)) is None
    assert difference(override, allowed=(key.partition(".")[0],)) is None
    assert difference(override, allowed=(key[:-1],)) is not None


def test_only_shares_make_another_length_a_difference() -> None:
    absolute = ("objective.phases.0.until=180ba", "schedule.warmup=18ba", "schedule.decay=0ba")
    longer = (*absolute, "max_duration=500ba")
    assert compare_histories(quickstart(*absolute), quickstart(*longer)) is None
    parting = compare_histories(quickstart(*absolute), quickstart(*longer, "objective.phases.0.until=0.5dur"))
    assert parting is not None and (parting.batch, parting.second) == (180, "250ba (0.5dur of 500ba)")


def test_long_runs_are_compared_quickly() -> None:
    """The time doesn't depend on the length: a study of 40 models has 780 pairs."""
    path = ROOT / "yamls" / "210m_mlm.yaml"

    def run(*overrides: str) -> PretrainConfig:
        config = load(path, list(overrides))
        assert isinstance(config, PretrainConfig)
        return config

    ramp = "objective.phases.0.masking_ratio={start: 0.5, end: 0.3}"
    pairs_of_runs = [
        (run(), run()),
        (run(ramp), run(ramp, "schedule.decay=0ba")),
        (run(), run("optimizer.lr=1e-3", "schedule.warmup=4000ba")),
        (run(), run("max_duration=10_000_000ba")),
    ]
    start = time.process_time()
    for first, second in pairs_of_runs * 5:
        compare_histories(first, second)
    assert (time.process_time() - start) / (5 * len(pairs_of_runs)) < 0.02


def ramp(until: str, start: float, end: float) -> dict[str, Any]:
    return {"name": "mlm", "masking_ratio": {"start": start, "end": end}, "until": until}


CLM, MLM = {"name": "clm"}, {"name": "mlm"}
RATIO, UNTIL = "objective.phases.0.masking_ratio", "objective.phases.0.until"


@pytest.mark.parametrize(
    ("end", "first", "second", "expected"),
    [
        # Which comes first depends on the data; both after the run's end.
        ("9ba", [{**CLM, "until": "4ba"}, MLM], [{**CLM, "until": "18tok"}, MLM], (3, UNTIL, "4ba", "18tok")),
        ("3ba", [{**CLM, "until": "4ba"}, MLM], [{**CLM, "until": "18tok"}, MLM], None),
        ("9ba", [{**CLM, "until": "5ba"}, MLM], [{**CLM, "until": "7sp"}, MLM], (4, UNTIL, "5ba", "7sp")),
        ("9ba", [{**CLM, "until": "4ba"}, MLM], [{**CLM, "until": "7sp"}, MLM], None),
        ("30tok", [{**CLM, "until": "18tok"}, MLM], [{**CLM, "until": "19tok"}, MLM], (3, UNTIL, "18tok", "19tok")),
        ("30tok", [{**CLM, "until": "18tok"}, MLM], [{**CLM, "until": "18tok"}, MLM], None),
        ("3ep", [{**CLM, "until": "2ep"}, MLM], [{**CLM, "until": "1ep"}, MLM], (1, UNTIL, "2ep", "1ep")),
        # Ramps.
        ("9ba", [ramp("8ba", 0.4, 0.2), CLM], [ramp("8ba", 0.4, 0.3), CLM],
         (0, RATIO, "0.4 to 0.2 at 8ba", "0.4 to 0.3 at 8ba")),
        ("9ba", [ramp("20tok", 0.4, 0.2), CLM], [{**MLM, "until": "20tok"}, CLM], (0, RATIO, "0.4 to 0.2 at 20tok", "0.4")),
        # An objective, and a reset at a boundary that both have, or one.
        ("9ba", [CLM], [MLM], (0, "objective.phases.0.name", "clm", "mlm")),
        ("9ba", [MLM], [CLM], (0, "objective.phases.0.name", "mlm", "clm")),
        ("9ba", [{**CLM, "until": "2ba"}, MLM], [{**CLM, "until": "2ba"}, {**MLM, "reset_optimizer": True}],
         (2, "objective.phases.1.reset_optimizer", "false", "true")),
        ("9ba", [CLM], [{**CLM, "until": "2ba"}, {**CLM, "reset_optimizer": True}], (2, UNTIL, "the end", "2ba")),
        ("9ba", [{**CLM, "until": "2ba"}, CLM], [CLM], (2, UNTIL, "2ba", "the end")),
    ],
)  # fmt: skip
def test_two_objectives_part_by_hand(
    end: str, first: list[Any], second: list[Any], expected: tuple[Any, ...] | None
) -> None:
    runs = [config_of({"max_duration": end, "objective": {"phases": phases}}) for phases in (first, second)]
    parting = compare_histories(*runs)
    if expected is None:
        assert parting is None
        return
    assert parting is not None
    assert (parting.batch, parting.key, parting.first, parting.second) == expected
    assert compare_histories(*runs, ["objective"]) is None
    other = compare_histories(*runs, [parting.key])
    assert other is None or other.key != parting.key


def test_a_difference_is_past_once_a_batch_began_at_its_time() -> None:
    phases = [[{**CLM, "until": until}, MLM] for until in ("4ba", "18tok")]
    parting = compare_histories(*(config_of({"max_duration": "9ba", "objective": {"phases": each}}) for each in phases))
    assert parting is not None
    last = [TrainingProgress(3, 6, 17, 0), TrainingProgress(4, 8, 17, 0), TrainingProgress(3, 6, 18, 0)]
    assert [parting.is_past(batch) for batch in last] == [False, True, True]


CHANGED = {
    "name": "clm", "until": "12ba", "reset_optimizer": True, "masking_ratio": 0.3, "target": "next",
    "replacement": {"mask": 0.8, "random": 0.1, "keep": 0.1}, "global_batch_size": 4, "model": {"rope_theta": 5.0},
    "data": {"train": {"local": "other"}},
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(MLMPhase.model_fields))
def test_each_key_of_a_phase_is_compared(key: str) -> None:
    """A key that is missing in CHANGED is a new one: name another value of it."""
    phases = [{**CLM, "until": "4ba"}, {**MLM, "until": "8ba"}, {"name": "clm"}]
    changed = [phases[0], {**phases[1], key: CHANGED[key]}, phases[2]]
    if key == "name":
        changed[1] = {"name": "clm", "until": "8ba"}
    first, second = (config_of({"max_duration": "20ba", "objective": {"phases": value}}) for value in (phases, changed))
    difference = compare_histories(first, second)
    assert difference is not None and difference.batch == (8 if key == "until" else 4)
    assert difference.key.startswith(f"objective.phases.1.{key}")
