"""Every command in the `sh` blocks of docs/study.md, in order, in small: its own bucket, tiny rows, three tiny models."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.buckets import bucket_for
from helpers.texts import write_parquet
from helpers.tiny import LENGTH, ROOT, WORDS, documents, write_tokenizer
from helpers.toy_sets import classification_rows, config_of, retrieval_pairs

PAGE = ROOT / "docs" / "study.md"
MODEL = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
RUN = {
    "max_duration": "12ba",
    "global_batch_size": 8,
    "precision": "fp32",
    "data": {"sequence_length": LENGTH, "num_workers": 0, "num_canonical_nodes": 2, "shuffle_block_size": 64},
    "optimizer": {"lr": 5e-3},
    "schedule": {"warmup": "2ba", "decay": "3ba"},
    "evaluation": {"interval": "6ba", "batches": 1},
    "checkpoint": {"interval": "6ba"},
    "logging": {"tensorboard": False, "progress_bar": False},
}


def commands() -> list[str]:
    """The page's command lines."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_page_names_files_and_options_that_exist() -> None:
    lines = commands()
    assert len(lines) == 20
    for line in lines[1:]:
        words = shlex.split(line)
        assert words[0] in ("python", "composer", "biphasic"), line
        for word in words[1:]:
            if word.endswith((".py", ".yaml", ".csv")):
                assert (ROOT / word).is_file(), line


def write_json(path: Path, content: Any) -> str:
    """Write a YAML (JSON is one)."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def write_study(folder: Path) -> str:
    """Three models that the paper's base file describes, and the stages' files."""
    sweep = {
        "job": "sweep",
        "models": {"x": {"path": "x"}},
        "tasks": {"sst2": str(folder / "sst2.yaml")},
        "learning_rates": [1e-3, 5e-3],
        "seeds": [0, 1],
        "output": "x",
        "cluster": {"at_once": 1},
        "cost": {"dollars_per_hour": 3.5},
    }
    evaluation = {"job": "evaluate", "run_name": "x", "model": {"path": "x"}, "sets": [str(folder / "sentences")]}
    write_json(folder / "sweep.yaml", sweep)
    write_json(folder / "evaluate.yaml", {**evaluation, "cache": str(folder / "cache")})
    task = config_of("sst2", folder / "tasks", Path("x"), folder, max_duration="3ba")
    (folder / "sst2.yaml").write_text(yaml.safe_dump(task.model_dump(mode="json", exclude_unset=True)))
    for name, at in (("queries", 0), ("corpus", 1)):
        lines = [{"_id": str(number), "text": pair[at]} for number, pair in enumerate(retrieval_pairs(20, seed=1))]
        (folder / "sentences").mkdir(exist_ok=True)
        (folder / "sentences" / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "sentences" / "qrels").mkdir()
    judged = "".join(f"{number}\t{number}\t1\n" for number in range(20))
    (folder / "sentences" / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    clm, mlm = {"name": "clm"}, {"name": "mlm", "masking_ratio": 0.4}
    return write_json(
        folder / "study.yaml",
        {
            "job": "study",
            "folder": "${oc.env:BUCKET,runs}/paper",
            "base": {"defaults": "yamls/base/paper.yaml", **RUN, "model": MODEL},
            "models": {
                "610m-clm-12": {"objective.phases": [clm]},
                "610m-mlm40-12": {"objective.phases": [mlm]},
                "610m-clm-6-mlm40-12": {"objective.phases": [{**clm, "until": "6ba"}, mlm]},
            },
            "cost": {"peak_flops": 1e10, "mfu": 0.4, "dollars_per_hour": 2.5},
            "stages": {"finetune": str(folder / "sweep.yaml"), "evaluate": str(folder / "evaluate.yaml")},
        },
    )


def write_tasks(folder: Path) -> str:
    """One downstream set, as the hub has it."""
    sizes = {"train": 200, "validation": 40, "test": 40}
    for number, (split, count) in enumerate(sizes.items()):
        write_parquet(folder / f"{split}.parquet", classification_rows(count, number))
    task = {
        "kind": "classification",
        "license": "none",
        "text_column": "sentence",
        "id_column": "idx",
        "label_names": ["negative", "positive"],
        "source": {"files": {split: [str(folder / f"{split}.parquet")] for split in sizes}},
        "splits": {split: split for split in sizes},
    }
    return write_json(folder / "tasks.yaml", {"job": "tasks", "output": str(folder / "tasks"), "tasks": {"sst2": task}})


STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >>"$LOG"
if [[ $0 == */sbatch ]]; then wc -l <"$LOG"; fi
"""


def in_small(folder: Path) -> dict[str, list[str]]:
    """What replaces each YAML of the page, with overrides."""
    text = [" ".join(f"w{token - 4}" for token in document[:-1]) for document in documents(1500, seed=5)]
    source = write_parquet(folder / "text.parquet", [{"id": str(at), "text": words} for at, words in enumerate(text)])
    write_tokenizer(folder / "tokenizer")
    rows = [f"sequence_length={LENGTH}", "segments.shortest=4", "validation_fraction=0.1", "cluster.workers=1"]
    whole = {**RUN, "output": str(folder / "runs"), "model": {"preset": None, **MODEL}, "microbatch_size": 4}
    run = [f"{key}={json.dumps(value)}" for key, value in {**whole, "objective.phases.0.until": "6ba"}.items()]
    return {
        "yamls/data/fineweb_edu_100bt.yaml": [
            *("yamls/data/own_text.yaml", f"source.paths=[{source}]", f"tokenizer={folder / 'tokenizer'}"),
            *("id_column=id", f"output={os.environ['BUCKET']}/fineweb-edu-100bt", *rows),
        ],
        "yamls/610m_biphasic.yaml": ["yamls/610m_biphasic.yaml", *run],
        "yamls/data/tasks.yaml": [write_tasks(folder)],
        "recipes/paper/study.yaml": [write_study(folder), f"output={folder / 'runs'}"],
        "runs": [str(folder / "runs")],
        "8": ["2"],
        "32": ["2"],
        "$BUCKET/fineweb-edu-100bt": [f"{os.environ['BUCKET']}/fineweb-edu-100bt"],
        "$BUCKET/paper": [f"{os.environ['BUCKET']}/paper"],
    }


@pytest.mark.slow
def test_every_command_of_the_page(s3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKET", f"s3://{bucket_for(s3, 'reproduce')}/mlm")
    small = in_small(tmp_path)
    for name in ("sbatch", "squeue"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LOG": str(tmp_path / "log")}
    environment |= {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    outputs: dict[str, list[str]] = {}
    for line in commands()[1:]:
        words = [part for word in shlex.split(line) for part in small.get(word, [word])]
        run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, f"{line}\n{shlex.join(words)}\n{run.stdout[-2000:]}{run.stderr[-4000:]}"
        outputs.setdefault(line.removeprefix("python "), []).append(run.stdout)
    study, runs = "src/main.py recipes/paper/study.yaml", tmp_path / "runs"

    before, after = outputs[f"{study} --plan"]
    assert before.count(" ready") == 2 and before.count(" waits") == 1 and " dollars" in before
    assert after.count(" done") == 3
    assert "nothing" not in outputs[study][0] and "610m-mlm40-12: 12 batches" in outputs[study][0]
    assert "610m" not in outputs[study][1]
    # With Slurm only what is not done is submitted: nothing is left.
    assert (tmp_path / "log").read_text().startswith("squeue") and "sbatch" not in (tmp_path / "log").read_text()
    assert len(list(runs.glob("*/encoder/biphasic.json"))) == 3
    assert "12 trials: 0 done, 12 left" in outputs[f"{study} --stage finetune --plan"][0]
    assert len(list(runs.glob("evaluate/*/scores.json"))) == 3
    assert (runs / "report" / "report.md").is_file() and (runs / "report" / "against.md").is_file()
    assert (runs / "sweep" / "report" / "report.md").is_file() and not (ROOT / "report").exists()
