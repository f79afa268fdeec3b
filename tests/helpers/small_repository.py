"""A working directory in which the documentation's commands run as printed: this repository with smaller numbers in its
YAMLs, a little text, and sets that the hub would provide. Nothing of it needs a network or a GPU.
"""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from helpers import warm
from helpers.downstream_sets import make_glue
from helpers.mteb_mirror import write_own
from helpers.texts import write_parquet
from helpers.tiny import LENGTH, ROOT, SIZE, write_tokenizer

TASKS = ("mnli", "qqp", "conll2003", "ontonotes5", "uner", "squad", "squad_v2", "record", "msmarco", "nq", "mldr")
"""The paper's sets but SST-2, which is left."""
# A batch here is so many of the paper's.
SCALE = 2000
CHANGES: dict[str, dict[str, Any]] = {
    "yamls/base/paper.yaml": {
        "global_batch_size": 8, "microbatch_size": 4, "precision": "fp32", "logging": {"tensorboard": False},
        "data": {"sequence_length": LENGTH, "num_workers": 0, "num_canonical_nodes": 2, "shuffle_block_size": 64},
        "evaluation": {"batches": 1},
    },
    "yamls/base/paper_rows.yaml": {
        "tokenizer": "tokenizer", "sequence_length": LENGTH, "segments": {"shortest": 4}, "validation_fraction": 0.1,
        "shard_bytes": 8192, "cluster": {"workers": 1},
    },
    "yamls/data/fineweb_edu_100bt.yaml": {
        "source": {"kind": "files", "paths": ["my_text/"], "path": None, "name": None, "revision": None}
    },
    "yamls/data/tasks.yaml": {
        "tasks": {name: None for name in TASKS} | {"sst2": {"source": {"path": "hub/glue", "revision": None}}}
    },
    "yamls/base/finetune.yaml": {"precision": "fp32", "max_duration": "2ba"},
    "yamls/sweep/paper.yaml": {
        "models": {"610m-mlm40-42k": None, "610m-clm-42k": None, "610m-clm-10k-mlm40-42k": {"path": "my-encoder"}},
        "tasks": {name: None for name in TASKS} | {"sst2": "yamls/finetune/sst2.yaml"},
        "learning_rates": [1e-3], "seeds": [0],
    },
    "yamls/sweep/own.yaml": {
        "tasks": {"conll2003": None, "squad": None, "msmarco": None},
        "learning_rates": [1e-3], "seeds": [0], "rate_seeds": None,
    },
    "yamls/quickstart.yaml": {
        "max_duration": "4ba", "objective": {"phases": [{"name": "clm", "until": "2ba"}, {"name": "mlm"}]},
        "schedule": {"warmup": "1ba", "decay": "1ba"}, "evaluation": {"interval": "4ba", "batches": 1, "batch_size": 1},
    },
    "recipes/paper/study.yaml": {"stages": {"checkpoints": None}},  # plain numbers of batches, which `shorter` doesn't know
    "yamls/evaluate/quick.yaml": {"benchmarks": [], "sets": ["my-set"], "precision": "fp32"},
}  # fmt: skip
"""What replaces keys of the YAMLs; None removes a key."""


def make(folder: Path) -> None:
    """Write the working directory."""
    for path in [*(ROOT / "yamls").rglob("*.yaml"), *(ROOT / "recipes").rglob("*.yaml")]:
        name = path.relative_to(ROOT)
        if name.parts[1] == "launch":
            continue
        content = shorter(OmegaConf.to_container(OmegaConf.load(path)))
        if "preset" in content.get("model", {}):
            content["model"] = dict(SIZE)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(changed(content, CHANGES.get(str(name), {})), folder / name)
    shutil.copy(ROOT / "recipes" / "paper" / "reference.csv", folder / "recipes" / "paper")
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "my_text").mkdir()
    generator = np.random.default_rng(0)
    words = [" ".join(f"w{word}" for word in generator.integers(0, 60, generator.integers(3, 40))) for _ in range(400)]
    documents = [{"id": str(number), "text": text} for number, text in enumerate(words)]
    write_parquet(folder / "my_text" / "text.parquet", documents)
    write_tokenizer(folder / "tokenizer")
    make_glue(folder / "hub" / "glue")
    write_own(folder / "my-set")
    write_own_set(folder / "data" / "my_set")
    (folder / "new.jsonl").write_text('{"text": "w1 w2"}\n')


def write_own_set(folder: Path) -> None:
    """Write the files that `yamls/data/own_retrieval.yaml` names."""
    folder.mkdir(parents=True)
    documents = [{"_id": f"d{number}", "text": f"w{number} w{number + 1} w{number + 2}"} for number in range(8)]
    queries = [{"_id": f"q{number}", "text": f"w{number}"} for number in range(8)]
    pairs = [{"query": f"w{number % 50}", "positive": f"w{number % 50} w{number % 50 + 1}"} for number in range(200)]
    for name, rows in (("corpus", documents), ("queries", queries), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judgments = [f"q{number}\td{number}\t1\n" for number in range(8)]
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judgments))


def changed(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Replace keys, section by section; None removes a key."""
    merged = dict(content)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = changed(merged[key], value) if both else value
    return {key: value for key, value in merged.items() if value is not None}


def shorter(value: Any) -> Any:
    """Divide every number of batches (`42000ba`) by SCALE, also in the name of a checkpoint (`ba42000`)."""
    if isinstance(value, dict):
        return {key: shorter(child) for key, child in value.items()}
    if isinstance(value, list):
        return [shorter(child) for child in value]
    if not isinstance(value, str):
        return value
    value = re.sub(r"\b(\d+)ba\b", lambda match: f"{_batches(match[1])}ba", value)
    return re.sub(r"\bba(\d+)\b", lambda match: f"ba{_batches(match[1])}", value)


def _batches(number: str) -> int:
    return -(-int(number) // SCALE) if int(number) else 0


def run(words: tuple[str, ...], folder: Path, bucket: str) -> str:
    """Run `composer`, `python src/main.py` or `biphasic` in the working directory, and return what it printed.

    Args:
        words: the command; numbers of batches in it are made smaller.
        bucket: of the environment; a folder beside the others stands for a bucket.

    Raises:
        AssertionError: it failed.
    """
    place = {"BUCKET": "bucket"} if bucket else {}
    environment = {
        **{name: value for name, value in os.environ.items() if name != "BUCKET"},
        **place,
        "HF_HUB_OFFLINE": "1",
    }
    arguments = [shorter(word.replace("s3://my-bucket", "bucket")) for word in words]
    module, arguments = ("biphasic", arguments[1:]) if words[0] == "biphasic" else ("main", arguments[2:])
    code = f"import os, sys; os.chdir({str(folder)!r}); sys.path.insert(0, {str(ROOT / 'src')!r})"
    done = warm.start(arguments, 1, environment, module=module, code=code).wait(600)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout
