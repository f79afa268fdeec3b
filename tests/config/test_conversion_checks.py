"""What a pretraining plan compares: rows, tokenizer and vocabulary against the YAML."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from biphasic.config.conversion_checks import RowChecks, check_rows, initial_vocabulary_problem
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import ConfigError, UserError
from biphasic.initial_model import build_language_model
from helpers.decoders import saved_decoder
from helpers.texts import write_tokenizer
from helpers.tiny import ROOT

QUICKSTART = str(ROOT / "yamls" / "quickstart.yaml")
WORDS = 300


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion's record and tokenizer: rows of 512 tokens."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = load_tokenizer(str(write_tokenizer(folder / "tokenizer", words=WORDS)))
    splits = {}
    for split in ("train", "validation"):
        (folder / split).mkdir()
        (folder / split / "index.json").write_text("{}")
        splits[split] = {"rows": 4000, "tokens": 4000 * 510}
    record = {
        "sequence_length": 512,
        "splits": splits,
        "tokenizer": {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size},
    }
    (folder / "conversion.json").write_text(json.dumps(record))
    return folder


def overrides_of(data: Path) -> list[str]:
    streams = [f"data.{split}.local={data / split}" for split in ("train", "validation")]
    return [
        "data.folder=null",
        *streams,
        f"tokenizer={data / 'tokenizer'}",
        f"model.vocab_size={WORDS}",
        "data.sequence_length=512",
    ]


def checks_of(data: Path, *overrides: str) -> RowChecks:
    config = load(QUICKSTART, [*overrides_of(data), *overrides])
    assert isinstance(config, PretrainConfig)
    return check_rows(config)


def initial(model: Path) -> list[str]:
    keys = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "vocab_size")
    return [*(f"model.{key}=null" for key in keys), f"model.init_from={model}"]


def test_rows_that_fit(data: Path) -> None:
    assert checks_of(data) == RowChecks()


def test_another_row_length(data: Path) -> None:
    [problem] = checks_of(data, "data.sequence_length=256").problems
    assert problem.startswith("data.sequence_length is 256, but data.train, ")
    assert problem.endswith("was converted with sequence_length: 512")


def test_another_tokenizer(data: Path, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other", words=290)
    [problem] = checks_of(data, f"tokenizer={other}").problems
    assert f"is not the one that data.train, {data}, was converted with" in problem
    assert problem.endswith(f"use {data / 'tokenizer'}")


def test_a_vocabulary_of_another_size(data: Path) -> None:
    checks = checks_of(data, "model.vocab_size=256")
    assert checks.problems == [f"model.vocab_size is 256, but the tokenizer has {WORDS} tokens"]
    [warning] = checks_of(data, "model.vocab_size=8192").warnings
    assert warning.startswith(f"model.vocab_size is 8,192, but the tokenizer has only {WORDS} tokens")
    assert checks_of(data, "model.vocab_size=320") == RowChecks()


def test_an_epoch_with_fewer_rows_than_a_global_batch(data: Path, tmp_path: Path) -> None:
    """Also that of a later phase, of its own data, which another program wrote, and of a mix."""
    assert checks_of(data, "global_batch_size=4000").problems == []
    message = "data.train: an epoch has 4,000 rows, fewer than a global batch (4,008)"
    assert checks_of(data, "global_batch_size=4008").problems == [message]
    assert checks_of(data, "objective.phases.1.global_batch_size=4008").problems == [message]
    columns = {"column_names": ["tokens"], "column_encodings": ["ndarray:uint16:512"], "compression": None}
    files = [{**columns, "samples": 20, "raw_data": {"basename": f"{number}.mds"}, "zip_data": None} for number in range(2)]
    (tmp_path / "index.json").write_text(json.dumps({"shards": files}))
    of_phase = [f"objective.phases.1.data={{train: {{local: {tmp_path}}}}}", "objective.phases.1.global_batch_size=48"]
    key = "objective.phases.1.data.train"
    assert checks_of(data, *of_phase).problems == [f"{key}: an epoch has 40 rows, fewer than a global batch (48)"]
    mix = f"data.mix={{a: {{local: {data / 'train'}, proportion: 0.5}}, b: {{local: {tmp_path}, proportion: 0.5}}}}"
    [problem] = checks_of(data, "data.train=null", mix, "global_batch_size=4048").problems
    assert problem == "data.mix.a, data.mix.b: an epoch has 4,040 rows, fewer than a global batch (4,048)"


def test_what_is_missing(data: Path) -> None:
    missing = checks_of(data, "tokenizer=runs/nothing", "data.validation.local=runs/nowhere").missing
    assert missing == [
        "tokenizer runs/nothing: there is no such folder",
        "data.validation.local runs/nowhere: there is no such folder",
    ]


def test_what_is_not_there_and_is_made_by_no_job(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = tmp_path / "away" / "train"
    checks = checks_of(data, "tokenizer=/nowhere", f"data.train.local={split}")
    assert checks.missing == []
    assert checks.problems == [
        f"{path}: there is no such folder" for path in ("tokenizer /nowhere", f"data.train.local {split}")
    ]
    config = load(str(ROOT / "recipes" / "clm_detour" / "pretrain.yaml"), ["model.init_from=./nowhere"])
    assert isinstance(config, PretrainConfig)
    assert check_rows(config).problems == ["model.init_from ./nowhere: there is no such checkpoint or folder"]
    monkeypatch.setenv("BUCKET", str(tmp_path))
    checks = checks_of(data, f"data.train.local={split}")
    assert (len(checks.missing), checks.problems) == (1, [])


def test_folders_that_are_no_split(data: Path, tmp_path: Path) -> None:
    expected = "expected a split of a finished conversion"
    folder = shutil.copytree(data, tmp_path / "copy")
    (folder / "train" / "index.json").unlink()
    shutil.rmtree(folder / "validation")
    assert checks_of(folder).problems == [
        f"data.train.local {folder / 'train'}: has no index.json: {expected}",
        f"data.validation.local {folder / 'validation'}: there is no such folder",
    ]
    (folder / "conversion.json").rename(folder / "conversion.started")
    checks = checks_of(folder)
    assert (len(checks.missing), checks.problems) == (2, [])


def test_a_tokenizer_left_empty_is_not_replaced() -> None:
    for override, message in (
        ("tokenizer=", "expected a value; got nothing"),
        ("tokenizer=''", "expected a local path"),
    ):
        with pytest.raises(ConfigError, match=f"^command line: tokenizer: {message}"):
            load(QUICKSTART, [override])


def test_the_command_prints_them_and_fails(data: Path) -> None:
    command = [sys.executable, str(ROOT / "src" / "main.py"), QUICKSTART, "--plan", *overrides_of(data)]
    run = subprocess.run([*command, "data.sequence_length=256"], capture_output=True, text=True)
    assert run.returncode == 2 and not run.stderr
    assert "\n  PROBLEM        data.sequence_length is 256, but data.train" in run.stdout


def test_rows_without_the_bos_of_a_decoder_s_tokenizer_are_warned_of(data: Path, tmp_path: Path) -> None:
    decoder = tmp_path / "decoder"
    saved_decoder("llama", decoder)
    shutil.copytree(data / "tokenizer", decoder, dirs_exist_ok=True)
    loaded = initial(decoder)
    assert checks_of(data, *loaded).warnings == []
    settings = json.loads((decoder / "tokenizer_config.json").read_text())
    (decoder / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))
    [warning] = checks_of(data, *loaded).warnings
    assert warning.startswith(f"model.init_from {decoder}: its tokenizer puts <|bos|> (BOS) before each text, and the rows")
    record = json.loads((data / "conversion.json").read_text())
    try:
        (data / "conversion.json").write_text(json.dumps({**record, "config": {"add_bos": True}}))
        assert checks_of(data, *loaded).warnings == []
    finally:
        (data / "conversion.json").write_text(json.dumps(record))


def test_a_plan_compares_the_model_s_tokenizer_as_the_start_does(data: Path, tmp_path: Path) -> None:
    model, own = tmp_path / "model", load_tokenizer(str(data / "tokenizer"))
    saved_decoder("llama", model, vocab_size=WORDS, max_position_embeddings=512)

    def planned(*overrides: str) -> str | None:
        """Return the problem that plan and start have."""
        config = load(QUICKSTART, [*overrides_of(data), *initial(model), *overrides])
        assert isinstance(config, PretrainConfig)
        problem = initial_vocabulary_problem(config, own)
        if problem is None:
            build_language_model(config.model, 512, 0, own)
        else:
            with pytest.raises(UserError) as refused:
                build_language_model(config.model, 512, 0, own)
            assert str(refused.value) == problem
        return problem

    assert planned() is None  # a model without a tokenizer can't be compared
    shutil.copytree(data / "tokenizer", model, dirs_exist_ok=True)
    assert planned() is None
    assert "already has the tokenizer" in str(planned("model.new_vocabulary=overlap"))
    content = json.loads((model / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (model / "tokenizer.json").write_text(json.dumps(content))
    problem = planned()
    assert problem is not None and f"is not that of model.init_from, {model} (2 ids are those of other tokens)" in problem
    assert planned("model.new_vocabulary=overlap") is None
    command = [sys.executable, str(ROOT / "src" / "main.py"), QUICKSTART, "--plan", *overrides_of(data), *initial(model)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and f"\n  PROBLEM        {problem}\n" in run.stdout
