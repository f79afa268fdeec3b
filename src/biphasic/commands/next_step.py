"""The last line that a command prints: what to run next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from posixpath import basename
from typing import TYPE_CHECKING, Any

from biphasic.storage import join

if TYPE_CHECKING:
    from biphasic.config.load import Config
    from biphasic.config.tasks import TasksConfig

_PAPER = ("yamls/210m_biphasic.yaml", 2048, 128_256)
_SMALL = ("yamls/quickstart.yaml", 256, 4096)
"""A pretraining YAML, and its row length and vocabulary, which the command overrides only if a conversion's differ."""
_SMALL_TOKENS = 10_000_000
"""Text with fewer tokens is a few batches of the paper's (2.4 million), and has its own command in README."""
_FINETUNE = Path("yamls/finetune")


def after_conversion(output: str, record: Mapping[str, Any]) -> str:
    """Return the pretraining command for a finished conversion."""
    output = output.rstrip("/")
    is_small = record["splits"]["train"]["tokens"] < _SMALL_TOKENS
    file, length, vocabulary = _SMALL if is_small else _PAPER
    words = [f"run_name={basename(output)}", *["output=runs", "tokenizer=null"] * is_small, f"data.folder={output}"]
    if not record["splits"].get("validation", {}).get("rows"):
        words += ["data.validation=null", "evaluation.interval=null", "evaluation.batches=null"]
    if record["sequence_length"] != length:
        words.append(f"data.sequence_length={record['sequence_length']}")
    tokens = record["tokenizer"]["vocab_size"]
    if not 0.99 * vocabulary <= tokens <= vocabulary:
        words.append(f"model.vocab_size={tokens}")
    return _next("composer", "src/main.py", file, *words)


def after_tasks(config: TasksConfig, names: list[str]) -> str:
    """Return the fine-tuning command for the first prepared task that has training data."""
    trained = [name for name in names if getattr(config.tasks[name], "train", True) is not None]
    if not trained:
        folder = join(config.output, names[0])
        return _next("python", "src/main.py", "yamls/evaluate/own.yaml", "model.path=ENCODER", f"sets=[{folder}]")
    with_yaml = [name for name in trained if (_FINETUNE / f"{name}.yaml").is_file()]
    name = (with_yaml or trained)[0]
    data = join(config.output, name)
    own_data = [] if with_yaml and data == f"data/tasks/{name}" else [f"task.data={data}"]
    own_name = [] if with_yaml else [f"task.name={name}"]
    file = _FINETUNE / f"{name if with_yaml else f'own_{config.tasks[name].kind}'}.yaml"
    return _next("composer", "src/main.py", str(file), "model.path=ENCODER", *own_name, *own_data)


def after_mining(model: str, out: str, count: int) -> str:
    """Return the fine-tuning command for a set with mined negatives."""
    words = [f"run_name={basename(out.rstrip('/'))}", f"model.path={model}", f"task.data={out}"]
    words.append(f"task.hard_negatives={count}")
    return _next("composer", "src/main.py", f"{_FINETUNE}/own_retrieval.yaml", *words)


def after_export(folder: Path) -> str:
    """Return how to load an exported folder, and which commands can use it."""
    return (
        f'load it: AutoModel.from_pretrained("{folder}") or SentenceTransformer("{folder}"); its README.md says more\n'
        + _next("composer", "src/main.py", f"{_FINETUNE}/sst2.yaml", f"model.path={folder}")
    )


def after_run(config: Config) -> str:
    """Return the next step after a pretraining run, a fine-tuning, an evaluation, or a sweep without failures."""
    if config.job == "pretrain":
        return _next("biphasic", "export", config.checkpoint_destination, str(config.run_folder / "encoder"))
    if config.job == "finetune":
        model = config.run_folder / "model"
        if config.task.kind == "retrieval" and config.save_model:
            sets = ", ".join(config.task.retrieval_sets.values())
            return _next("python", "src/main.py", "yamls/evaluate/own.yaml", f"model.path={model}", f"sets=[{sets}]")
        step = f"scores: {config.run_folder}/record.json"
        if config.save_model:
            step = f"biphasic predict {model} FILE.jsonl; {model}/README.md says how to load it"
        sweep = shlex.join(
            ["python", "src/main.py", "yamls/sweep/own.yaml", f"models.encoder.path={config.model.path}"]
        )
        return f"next: {step}; other tasks, learning rates and seeds: {sweep} --plan"
    if config.job == "evaluate":
        table = f"next: the table is in {config.run_folder}/scores.md"
        if not Path(config.model.path).is_dir():
            return table
        return f"{table}; onto the model's card: biphasic export {config.model.path} --results {config.run_folder}"
    report = f"biphasic report {config.output} --against FILE.csv"
    return f"next: the tables are in {config.output}/report; {report} compares them with published ones"


def _next(*words: str) -> str:
    return f"next: {shlex.join(words)}"
