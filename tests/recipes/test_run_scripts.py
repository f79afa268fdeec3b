"""The recipes' run.sh, whole: real commands, with a stand-in for the hub, tiny models and short texts."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from biphasic.config.convert import ConvertConfig
from biphasic.config.load import load_job
from biphasic.data.packing import document_number, validation_end
from biphasic.data.tokenizer import load_tokenizer
from helpers.decoders import saved_decoder
from helpers.hub_server import Repository, serve_hub
from helpers.texts import sentences, write_parquet, write_tokenizer
from helpers.tiny import ROOT, SIZE, losses

COMMIT = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
CARD = """---
configs:
- config_name: sample-100BT
  data_files:
  - split: train
    path: sample/100BT/*
---
"""
SMALL = {
    "global_batch_size": 2,
    "precision": "fp32",
    "max_duration": "3ba",
    "schedule": {"warmup": "1ba", "decay": "1ba"},
    "data.num_workers": 0,
    "data.num_canonical_nodes": 2,
    "evaluation": {"interval": "3ba", "batches": 1},
    "logging": {"tensorboard": False, "progress_bar": False},
}
"""Overrides of the recipes' pretrain.yaml."""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A repository of links, so that outputs are below `tmp_path`, and a hub with a little FineWeb-Edu."""
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("src", "data_prep", "yamls", "recipes"):
        (repository / name).symlink_to(ROOT / name)
    folder = tmp_path / "fineweb"
    (folder / "sample" / "100BT").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    texts = [*sentences(1000, seed=1), *sentences(30, seed=2, longest=20_000)]
    # One text in a thousand is for validation, by a hash of its id: make the longest one of them.
    fraction = load_job(ConvertConfig, ROOT / "recipes" / "long_context" / "data.yaml").validation_fraction
    ids = (f"long {number}" for number in itertools.count())
    longest = max(texts, key=lambda record: len(record["text"]))
    longest["id"] = next(name for name in ids if document_number(name) < validation_end(fraction))
    records = [{**record, "token_count": len(record["text"].split())} for record in texts]
    write_parquet(folder / "sample" / "100BT" / "000.parquet", records)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    more = {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    with serve_hub({"HuggingFaceFW/fineweb-edu": Repository({COMMIT: folder})}, tmp_path / "home") as hub:
        yield {**hub, **more, "BUCKET": str(tmp_path / "bucket")}


def run(environment: dict[str, str], script: str, *arguments: str, with_small: bool = True, **changes: Any) -> None:
    small = SMALL if with_small else {}
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**small, **changes}.items()]
    repository = Path(environment["BUCKET"]).parent / "repository"
    command = [*script.split(), *arguments, *overrides]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """A tiny decoder without a mask token, and its tokenizer."""
    folder = tmp_path / "decoder"
    special = {"bos": "<|bos|>", "eos": "<|eos|>"}
    words = load_tokenizer(str(write_tokenizer(folder, special))).tokenizer.get_vocab_size() - 1
    saved_decoder("llama", folder, vocab_size=words, max_position_embeddings=2048)
    return folder


@pytest.mark.slow
def test_a_decoder_then_a_detour(environment: dict[str, str], decoder: Path, tmp_path: Path) -> None:
    """A tiny decoder becomes an encoder, which takes the CLM detour."""
    run(environment, "recipes/continue_decoder/run.sh", str(decoder), "2000")
    first = tmp_path / "repository" / "encoders" / "decoder-mlm40-2000"
    words = AutoConfig.from_pretrained(decoder).vocab_size
    assert AutoConfig.from_pretrained(first).vocab_size == words + 1  # the mask token

    phases = [{"name": "clm", "until": "2ba"}, {"name": "mlm", "masking_ratio": 0.4}]
    data = f"data.folder={tmp_path}/bucket/fineweb-edu-decoder-2000"
    detour = ("run_name=detour", f"model.init_from={first}", data)
    script = "composer src/main.py recipes/clm_detour/pretrain.yaml"
    run(environment, script, *detour, **{"objective.phases": phases})
    for name in ("decoder-mlm40-2000", "detour"):
        assert len(losses(tmp_path / "repository" / "runs" / name)) == 3


@pytest.mark.slow
def test_the_decay_of_a_run_on_rows_of_8192_tokens(environment: dict[str, str], decoder: Path, tmp_path: Path) -> None:
    """Short rows and a run of the base YAML, then the recipe's script, twice."""
    run(environment, "biphasic convert yamls/data/fineweb_edu_100bt.yaml", f"tokenizer={decoder}", with_small=False)
    size = {f"model.{key}": value for key, value in {**SIZE, "preset": None, "vocab_size": None}.items()}
    tokenizer = load_tokenizer(str(tmp_path / "bucket" / "fineweb-edu-100bt" / "tokenizer"))
    size["model.vocab_size"] = tokenizer.tokenizer.get_vocab_size()
    first = {**size, "objective.phases.0.until": "1ba"}
    run(environment, "composer src/main.py yamls/610m_biphasic.yaml", "run_name=trunk", **first)
    last = {"objective.phases.1.until": "2ba", "objective.phases.2.global_batch_size": 1}
    start = f"start_from={tmp_path}/bucket/trunk/checkpoints"
    for _ in range(2):  # the second time it trains and converts nothing, and exports again
        run(environment, "recipes/long_context/run.sh", "longer", start, **first, **last)
        config = AutoConfig.from_pretrained(tmp_path / "repository" / "encoders" / "longer")
        assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (8192, 250_000.0)
        shutil.rmtree(tmp_path / "repository" / "encoders" / "longer")
    assert len(losses(tmp_path / "repository" / "runs" / "longer")) == 1


def test_a_script_of_one_s_own_does_nothing_after_its_end(tmp_path: Path) -> None:
    """A scheduler that starts it again gets status 0."""
    text = (ROOT / "recipes" / "own_script" / "train.py").read_text()
    for written, small in (
        ("200ba", "2ba"),
        ("20ba", "1ba"),
        ("40ba", "1ba"),
        ("50ba", "2ba"),
        ("range(6000)", "range(99)"),
    ):
        assert written in text
        text = text.replace(written, small)
    (tmp_path / "train.py").write_text(text)
    said = "the checkpoints hold the whole training; nothing to do"
    for ends in (False, True):
        command = [sys.executable, "train.py", "checkpoints"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert (said in done.stdout) == ends
        assert (tmp_path / "checkpoints/latest-rank0.pt").resolve().name.endswith("-ba2-rank0.pt")


def test_a_decoder_s_folder_is_relative_to_where_the_script_is_started(tmp_path: Path) -> None:
    """The script goes to the repository. Its two programs only say what they were given."""
    (tmp_path / "bin").mkdir()
    for program, status in (("python", 0), ("biphasic", 3)):
        (tmp_path / "bin" / program).write_text(f'#!/bin/bash\necho "{program} $*" >&2\nexit {status}\n')
        (tmp_path / "bin" / program).chmod(0o755)
    (tmp_path / "decoder").mkdir()
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    for given, expected in (("./decoder", f"{tmp_path}/decoder"), ("org/decoder", "org/decoder")):
        command = [ROOT / "recipes" / "continue_decoder" / "run.sh", given, "10"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 3, done.stderr
        assert f"python - {expected}\n" in done.stderr and f" tokenizer={expected} " in done.stderr
