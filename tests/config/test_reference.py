"""The reference of all keys: its pages are current, every key is described, and the terminal shows the same."""

import pytest

from biphasic.commands import main
from biphasic.config.base import JOBS
from biphasic.config.reference import KeySection, describe_keys, pages, sections_of
from helpers.tiny import ROOT

FOLDER = ROOT / "docs" / "reference"


def key_of(section: KeySection, name: str) -> tuple[str, str, str]:
    [key] = [key for key in section.keys if key.name == name]
    return key.type, key.default, key.description


def test_the_pages_are_current() -> None:
    written = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
    assert written == pages(), "run: biphasic keys --write docs/reference"


@pytest.mark.parametrize("job", JOBS)
def test_every_section_and_key_is_described(job: str) -> None:
    for section in sections_of(job):
        assert section.description, section.key
        for key in section.keys:
            assert key.description.endswith((".", "…")), f"{section.path(key)}: {key.description!r}"
            assert key.type and key.default


def test_types_limits_and_defaults() -> None:
    pretrain = {(section.key, section.kind): section for section in sections_of("pretrain")}
    top, mlm = pretrain["", ""], pretrain["objective.phases.N", "name: mlm"]
    assert key_of(top, "seed")[:2] == ("integer ≥ 0 and < 2**32", "default: `42`")
    assert key_of(top, "microbatch_size")[:2] == ("integer > 0 or `auto`", "default: `auto`")
    assert key_of(top, "max_duration")[:2] == ("length, such as `1000ba`", "required")
    assert key_of(mlm, "masking_ratio")[:2] == ("number > 0 and < 1 or section", "default: `0.4`")
    assert key_of(pretrain["optimizer", ""], "betas")[:2] == (
        "list (2) of number ≥ 0 and < 1",
        "default: `[0.9, 0.95]`",
    )
    assert key_of(pretrain["optimizer", ""], "lr")[1] == "default: `0.0005`"
    assert key_of(pretrain["data", ""], "cache_limit")[:2] == (
        "size in bytes, such as `200gb` or `null`",
        "default: `null`",
    )
    # A job may give a shared section other defaults.
    finetune = {section.key: section for section in sections_of("finetune")}
    assert key_of(finetune["optimizer"], "lr")[1] == "default: `5e-05`"
    assert key_of(finetune["logging"], "tensorboard")[1] == "default: `false`"


def test_keys_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert "pretrain:" in describe_keys() and "objective.phases.N" in describe_keys()
    shared = describe_keys("checkpoint.keep_at")
    assert shared.startswith("## `checkpoint` (job: pretrain)") and "never deleted" in shared
    assert describe_keys("logging.wandb").startswith("## `logging` (job: pretrain, finetune)"), "shown once for both"
    assert describe_keys("logging.wandb").count("Project of Weights & Biases") == 1
    assert describe_keys("phases.masking_ratio").count("`masking_ratio` (number") == 1
    assert "stride" in describe_keys("finetune.task") and "model_name" not in describe_keys("finetune.task")
    assert main(["keys", "optimizer.lrr"]) == 2
    assert "did you mean optimizer.lr" in capsys.readouterr().err
    assert main(["keys", "pretrain.optimizr"]) == 2
    assert "did you mean pretrain.optimizer?" in capsys.readouterr().err
