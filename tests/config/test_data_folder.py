"""`data.folder`: one name for a conversion's splits and tokenizer; and the one place, BUCKET, of the paper's YAMLs."""

from pathlib import Path

import pytest
import yaml

from biphasic.config.convert import ConvertConfig
from biphasic.config.data import StreamConfig
from biphasic.config.history import first_difference, history_of
from biphasic.config.load import dump, load
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import ConfigError
from helpers.tiny import ROOT

PAPER = ("210m_biphasic", "210m_clm", "210m_mlm", "610m_biphasic", "1b_biphasic")


def load_paper(name: str = "210m_biphasic", *overrides: str) -> PretrainConfig:
    config = load(ROOT / "yamls" / f"{name}.yaml", list(overrides))
    assert isinstance(config, PretrainConfig)
    return config


def converted() -> str:
    conversion = load(ROOT / "yamls" / "data" / "fineweb_edu_100bt.yaml")
    assert isinstance(conversion, ConvertConfig)
    return conversion.output


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("bucket", [None, "", "s3://my-bucket", "gs://my-bucket/team", "/shared/team"])
def test_training_reads_what_the_conversion_writes(name: str, bucket: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUCKET", raising=False)
    if bucket is not None:
        monkeypatch.setenv("BUCKET", bucket)
    config, folder = load_paper(name), converted()
    assert folder == f"{bucket or 'data'}/fineweb-edu-100bt"
    assert config.tokenizer == f"{folder}/tokenizer"
    assert [stream.remote or stream.local for stream in config.data.splits.values()] == [
        f"{folder}/train",
        f"{folder}/validation",
    ]
    assert config.checkpoint_destination == f"{bucket or 'runs'}/{config.run_name}/checkpoints"


def test_a_folder_in_a_bucket_has_a_cache_and_a_local_one_has_none() -> None:
    data = load_paper("210m_biphasic", "data.folder=s3://b/text/", "data.cache=/scratch").data
    assert data.train == StreamConfig(local="/scratch/text/train", remote="s3://b/text/train")
    assert data.validation == StreamConfig(local="/scratch/text/validation", remote="s3://b/text/validation")
    assert load_paper("210m_biphasic", "data.folder=mine").data.train == StreamConfig(local="mine/train")


def test_a_folder_without_its_validation_split(tmp_path: Path) -> None:
    """Null in place of the split is kept, also by a recorded configuration."""
    nulls = ("data.validation=null", "evaluation.interval=null", "evaluation.batches=null")
    config = load_paper("210m_biphasic", "data.folder=mine", *nulls)
    assert list(config.data.splits) == ["data.train"]
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml") == config
    with pytest.raises(ConfigError, match=r"evaluation\.interval: has no effect without data\.validation"):
        load_paper("210m_biphasic", "data.folder=mine", *nulls[:1])


def test_the_tokenizer_may_be_another() -> None:
    assert load_paper("210m_biphasic", "data.folder=mine", "tokenizer=other").tokenizer == "other"


def test_a_mix_in_place_of_the_folder() -> None:
    mix = "data.mix={a: {local: a/train, proportion: 1.0}}"
    nulls = ("data.folder=null", "data.cache_limit=null")
    config = load_paper("210m_biphasic", *nulls, "tokenizer=t", mix, "data.validation.local=v")
    assert list(config.data.streams) == ["data.mix.a"]


def test_paths_may_change_when_a_run_resumes() -> None:
    here, there = (load_paper("1b_biphasic", f"data.folder={name}") for name in ("mine", "s3://b/mine"))
    assert first_difference(history_of(here), history_of(there)) is None


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.train.local=mine/train", "data.train"),
        ("data.validation.local=mine/validation", "data.validation"),
        ("data.mix={a: {local: a/train, proportion: 1.0}}", "data.mix"),
    ],
)
def test_streams_beside_a_folder_are_refused(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_paper("210m_biphasic", override)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert "can't be given beside data.folder" in str(caught.value)


def test_it_reads_back_as_itself(tmp_path: Path) -> None:
    config = load_paper("1b_biphasic", "data.folder=s3://b/text")
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml") == config


def test_launchers_name_one_place() -> None:
    launch = ROOT / "recipes" / "launch"
    for file in ("skypilot.yaml", "kubernetes.yaml", "mcli.yaml"):
        text = (launch / file).read_text()
        assert list(yaml.safe_load_all(text))
        assert text.count("s3://my-bucket") >= 1
        assert "data.train" not in text and "checkpoint.folder" not in text


def load_phases(*sections: str, **data: str) -> PretrainConfig:
    """The quickstart on data in a bucket, with further MLM phases that have these `data`."""
    phases = ["{name: clm, until: 10ba}", *(f"{{name: mlm, until: {20 + index}ba, data: {section}}}"
                                            for index, section in enumerate(sections))]  # fmt: skip
    phases[-1] = phases[-1].replace(f"until: {19 + len(sections)}ba, ", "")
    own = {"folder": "s3://b/own", **data}
    overrides = [f"objective.phases=[{', '.join(phases)}]", *(f"data.{key}={value}" for key, value in own.items())]
    if own["folder"] == "null":
        overrides.append("tokenizer=t")
    config = load(ROOT / "yamls" / "quickstart.yaml", overrides)
    assert isinstance(config, PretrainConfig)
    return config


def test_phases_take_the_run_s_own_cache() -> None:
    config = load_phases("{folder: s3://b/x, cache: /fast}", "{folder: s3://b/y}", cache="/scratch")
    assert [inputs.data.train.local for inputs in config.inputs if inputs.data.train is not None] == [
        "/scratch/own/train",
        "/fast/x/train",
        "/scratch/y/train",
    ]
    mix = "{mix: {a: {local: a, remote: s3://b/a, proportion: 1.0}}}"
    assert list(load_phases("{train: {local: one, remote: s3://b/one}}", mix, cache="/scratch").streams) == [
        "data.train",
        "objective.phases.1.data.train",
        "objective.phases.2.data.mix.a",
    ]
    with pytest.raises(ConfigError, match=r"objective\.phases\.1\.data\.cache: has no effect without data\.folder"):
        load_phases("{train: {local: one, remote: s3://b/one}, cache: /fast}")


def test_keys_of_a_cache_that_only_a_later_phase_has() -> None:
    local = {"folder": "null", "train": "{local: own}", "validation": "{local: held_out}"}
    phase = "{folder: s3://b/x}"
    keys = {"cache": "/scratch", "cache_limit": "10gb", "predownload": "64"}
    config = load_phases(phase, **local, **keys)
    train = config.inputs[1].data.train
    assert train is not None and train.local == "/scratch/x/train"
    for key in keys:
        with pytest.raises(ConfigError, match=rf"data\.{key}: has no effect without"):
            load_phases("{train: {local: one}}", **local, **{key: keys[key]})


def test_a_cache_limit_holds_for_the_mix_of_a_phase_too() -> None:
    mix = "{mix: {a: {local: a, remote: s3://b/a, proportion: 0.5}, c: {local: c%s, proportion: 0.5}}}"
    with pytest.raises(ConfigError) as caught:
        load_phases(mix % "", cache_limit="10gb")
    [problem] = caught.value.problems
    assert problem.key == "data.cache_limit" and "needs a remote for objective.phases.1.data.mix.c" in problem.message
    load_phases(mix % ", remote: s3://b/c", cache_limit="10gb")
    load_phases("{train: {local: one}}", cache_limit="10gb")  # a folder of its own, of which nothing is deleted
