"""What names and configurations say of a study's models."""

import pytest

from biphasic.config.model_names import (
    Facets,
    facets_of_models,
    model_name,
    parameters_in_size,
    short_steps,
)
from helpers.studies import MODELS, config_of, facets_of_name


def test_configurations_and_checkpoints() -> None:
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
    assert (facets["tiny"].size, facets["1m-clm-400"].size) == ("0.095m", "0.095m")


@pytest.mark.parametrize("checkpoint", ["ba300-rank0.pt", "ep0-ba300", "ep12-ba300/", "ba300-validating-rank0.pt"])
def test_a_run_that_continues_a_checkpoint_or_another_decoder(checkpoint: str) -> None:
    base = config_of("610m-clm-400")
    middle = config_of("610m-mlm40-100", model={"init_from": f"s3://b/study/610m-clm-400/{checkpoint}"})
    decoder = config_of("610m-mlm40-100", model={"init_from": "models/llama"})
    configs = {"610m-clm-400": base, "middle": middle, "other": decoder}
    facets, _ = facets_of_models(list(configs), configs)
    assert (facets["middle"].base_steps, facets["middle"].total_steps) == (300, 400)
    assert facets["middle"].continued_from == "610m-clm-400"
    assert (facets["other"].continued_from, facets["other"].size) == ("models/llama", "unknown")


def test_epochs_and_unknown_names_are_problems() -> None:
    config = config_of("610m-clm-400", max_duration="2ep", schedule={})
    facets, problems = facets_of_models(["610m-clm-400", "encoder"], {"610m-clm-400": config})
    assert facets == {}
    assert "2ep can't be given in steps" in problems["610m-clm-400"]
    assert "encoder" not in problems, "nothing is known of it"


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
    assert name("610m", {**mlm, "masking_ratio": {"start": 0.3, "end": 0.05}}, total="50ba") == "610m-mlm-50"
    assert name("610m", {"name": "clm"}, total="1000000tok") == "610m-clm-1000000tok-42000"
