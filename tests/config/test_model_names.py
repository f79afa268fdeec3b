"""What names and configurations say of a study's models."""

from __future__ import annotations

import pytest

from biphasic.config.model_names import (
    Facets,
    facets_of_models,
    facets_of_name,
    model_name,
    parameters_in_size,
    short_steps,
)
from biphasic.errors import UserError
from helpers.studies import MODELS, config_of


@pytest.mark.parametrize(
    ("name", "facets"),
    [
        ("610m-clm-42k", Facets("610m-clm-42k", "610m", "clm", None, 42000, 42000, 42000)),
        ("1b-mlm50-42k", Facets("1b-mlm50-42k", "1b", "mlm", 0.5, 0, 42000, 42000)),
        (
            "610m-clm-10k-mlm40-42k",
            Facets("610m-clm-10k-mlm40-42k", "610m", "clm-mlm", 0.4, 10000, 42000, 42000),
        ),
        ("610m-mlm40-42k-5000", Facets("610m-mlm40-42k", "610m", "mlm", 0.4, 0, 42000, 5000)),
        (
            "610m-mlm40-dec42k-mlm40-54k",
            Facets("610m-mlm40-dec42k-mlm40-54k", "610m", "mlm", 0.4, 0, 54000, 54000, "610m-mlm40-42k", 42000),
        ),
        (
            "610m-clm-10k-mlm40-dec42k-mlm20-50k-44k",
            Facets("610m-clm-10k-mlm40-dec42k-mlm20-50k", "610m", "mlm", 0.2, 0, 50000, 44000,
                   "610m-clm-10k-mlm40-42k", 42000),
        ),
        (
            "1m-mlm30-1.5k-clm-1600-mlm20-2k",
            Facets("1m-mlm30-1.5k-clm-1600-mlm20-2k", "1m", "mlm-clm-mlm", None, 100, 2000, 2000),
        ),
    ],
)  # fmt: skip
def test_names_on_the_hub(name: str, facets: Facets) -> None:
    assert facets_of_name(name) == facets


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("encoder", "expected a name such as 610m-clm-10k-mlm40-42k"),
        ("610m-5000", "expected a name such as"),
        ("610m-mlm-42k", "expected a name such as"),
        ("610m-mlm100-42k", "expected a name such as"),
        ("610m-clm-ten", "expected a name such as"),
        ("610m-clm-0.0005k", "expected a name such as"),
        ("610m-clm-0k", "0k must be after 0 steps"),
        ("610m-clm-42k-mlm40-10k", "10k must be after 42,000 steps"),
        ("610m-clm-dec42k", "expected steps from 42,001 to 42,000 at the end"),
        ("610m-mlm40-42k-50000", "expected steps from 1 to 42,000 at the end"),
        ("610m-mlm40-dec42k-mlm40-54k-5000", "from 42,001 to 54,000"),
    ],
)
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        facets_of_name(name)
    assert f"model {name}: " in str(raised.value)
    assert message in str(raised.value)


def test_configurations_say_the_same_as_names() -> None:
    runs = [name for name in MODELS if facets_of_name(name).run == name]
    facets, problems = facets_of_models(list(MODELS), {name: config_of(name) for name in runs})
    assert facets == {name: facets_of_name(name) for name in MODELS}
    assert problems == {}


def test_a_configuration_counts_more_than_the_name() -> None:
    ramp = [{"name": "clm", "until": "0.25dur"}, {"name": "mlm", "masking_ratio": {"start": 0.3, "end": 0.1}}]
    config = config_of("610m-clm-100-mlm40-400", max_duration="102400tok", objective={"phases": ramp})
    facets, _ = facets_of_models(["a", "a-300", "a-500"], {"a": config})
    assert facets == {
        "a": Facets("a", "610m", "clm-mlm", None, 100, 400, 400),
        "a-300": Facets("a", "610m", "clm-mlm", None, 100, 400, 300),
    }


def test_size_without_a_preset() -> None:
    size = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2}
    facets, _ = facets_of_models(
        ["tiny", "1m-clm-400"], {name: config_of("1m-clm-400", model=size) for name in ("tiny", "1m-clm-400")}
    )
    # 95,040 parameters: two layers of 64 x (4 x 64 + 3 x 128) + 128, a norm of 64, and twice 100 x 64.
    assert (facets["tiny"].size, facets["1m-clm-400"].size) == ("0.095m", "1m")


@pytest.mark.parametrize("checkpoint", ["ba300-rank0.pt", "ep0-ba300", "ep12-ba300/", "ba300-validating-rank0.pt"])
def test_a_run_that_continues_a_checkpoint_or_another_decoder(checkpoint: str) -> None:
    base = config_of("610m-clm-400")
    middle = config_of("610m-mlm40-100", model={"init_from": f"s3://b/study/610m-clm-400/{checkpoint}"})
    decoder = config_of("610m-mlm40-100", model={"init_from": "models/llama"})
    configs = {"610m-clm-400": base, "middle": middle, "other": decoder, "610m-mlm40-100": decoder}
    facets, problems = facets_of_models(list(configs), configs)
    assert (facets["middle"].base_steps, facets["middle"].total_steps) == (300, 400)
    assert facets["middle"].continued_from == "610m-clm-400"
    assert facets["610m-mlm40-100"].continued_from == "models/llama"
    assert list(problems) == ["other"]
    assert "its size is not known, because model.init_from is not a model of the study" in problems["other"]


def test_epochs_and_unknown_names_are_problems() -> None:
    config = config_of("610m-clm-400", max_duration="2ep", schedule={})
    facets, problems = facets_of_models(["610m-clm-400", "encoder"], {"610m-clm-400": config})
    assert facets == {}
    assert "2ep can't be given in steps" in problems["610m-clm-400"]
    assert "model encoder: expected a name" in problems["encoder"]


def test_sizes_and_steps() -> None:
    assert sorted(["1b", "mini", "610m", "1.5b", "500k"], key=parameters_in_size) == [
        "500k",
        "610m",
        "1b",
        "1.5b",
        "mini",
    ]
    assert [short_steps(steps) for steps in (500, 1000, 1500, 1550, 42000)] == ["500", "1k", "1.5k", "1550", "42k"]


def test_model_names_follow_the_paper() -> None:
    def name(size: str | None, *phases: dict[str, object], total: str = "42000ba", batches: int = 42_000) -> str:
        config = {
            "model": {"preset": size},
            "objective": {"phases": list(phases)},
            "max_duration": total,
            "run_name": "mine",
        }
        return model_name(config, {"batches": batches, "rows": 0, "tokens": 0, "epochs": 0})

    mlm = {"name": "mlm", "masking_ratio": 0.4}
    assert name("610m", {"name": "clm"}) == "610m-clm-42k"
    assert name("1b", {**mlm, "masking_ratio": 0.5}) == "1b-mlm50-42k"
    assert name("610m", {"name": "clm", "until": "10000ba"}, mlm) == "610m-clm-10k-mlm40-42k"
    assert name("210m", {"name": "clm", "until": "0.5dur"}, mlm) == "210m-clm-21k-mlm40-42k"
    assert name(None, mlm) == "mine"
    assert name("610m", mlm, batches=1000) == "610m-mlm40-42k-1000"
    checkpoint = name("610m", {"name": "clm", "until": "10000ba"}, mlm, batches=5000)
    assert checkpoint == "610m-clm-10k-mlm40-42k-5000"
    assert facets_of_name(checkpoint) == Facets("610m-clm-10k-mlm40-42k", "610m", "clm-mlm", 0.4, 10_000, 42_000, 5000)
    assert name("610m", {**mlm, "masking_ratio": {"start": 0.3, "end": 0.05}}, total="50ba") == "610m-mlm-50"
    assert name("610m", {"name": "clm"}, total="1000000tok") == "610m-clm-1000000tok-42000"
