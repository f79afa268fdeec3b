"""The commands for configurations, machines, runs and results: keys, preflight, runs, watch, report, compare, completion."""

import os
from argparse import Namespace
from pathlib import Path

from biphasic.commands.parser import argument, command, file_arguments, local_path, positive
from biphasic.composer_import import composer_imported
from biphasic.errors import UserError
from biphasic.storage import is_remote, json_bytes, open_store


@command(
    "print the keys of YAMLs: types, defaults, what they are",
    argument("section", metavar="SECTION", nargs="?", default="", help="a job, a section or a key"),
    argument("--write", type=local_path, metavar="FOLDER", help="write the reference's pages, docs/reference"),
)
def keys(options: Namespace) -> int:
    """Print keys of the YAMLs: type, limits, default, and what each is.

    biphasic keys                       the sections of all jobs
    biphasic keys pretrain              all keys of a job
    biphasic keys optimizer             a section, in all jobs that have it
    biphasic keys finetune.task         a section of one job
    biphasic keys optimizer.lr          a key
    """
    from biphasic.config.reference import describe_keys, pages

    if options.write is None:
        print(describe_keys(options.section))
        return 0
    options.write.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (options.write / name).write_text(text, encoding="utf-8")
    print(f"{options.write}: {len(pages())} pages")
    return 0


@command("check whether the machines can run a job", *file_arguments("job: pretrain or job: finetune"))
def preflight(options: Namespace) -> int:
    """Check whether the machines can run a job. Started like the run itself, on every node:

    composer [node arguments] -m biphasic preflight FILE.yaml [key=value ...]

    The exit status is 0 when nothing is wrong, 1 if a restart may help (a bucket can't be reached), 2 otherwise.
    """
    from biphasic.config.load import load

    config = load(options.file, options.overrides, int(os.environ.get("WORLD_SIZE", "1")))
    if config.job != "pretrain" and config.job != "finetune":
        raise UserError(f"{options.file}: expected job: pretrain or job: finetune; got {config.job}")
    with composer_imported():  # not for a wrong YAML: PyTorch and Composer take seconds to import
        from biphasic.preflight import check

    return check(config)


@command(
    "show a run's checkpoints and attempts",
    argument("folder", metavar="FOLDER", help="a run's folder, or where it saves: runs/my-run, or s3://bucket/prefix"),
)
def runs(options: Namespace) -> int:
    """Show a run's checkpoints, its attempts and why each ended, and the tokens lost between them."""
    from biphasic.checkpointing.start_rules import checkpoint_folder
    from biphasic.runs import report

    print("\n".join(report(checkpoint_folder(options.folder))))
    return 0


@command(
    "score a run's checkpoints on a task while it trains",
    argument("run", metavar="RUN", help="a run's folder, its YAML, or where it saves: runs/my-run, s3://bucket/prefix"),
    argument("overrides", nargs="*", default=[], metavar="key=value", help="replace a value of the task's YAML"),
    argument("--task", required=True, metavar="FILE.yaml", help="a fine-tuning, e.g. yamls/finetune/sst2.yaml"),
    argument(
        "--every",
        type=lambda text: positive(text.removesuffix("ba")),
        default=1,
        metavar="2000ba",
        help="batches between scores; default: score each",
    ),
)
def watch(options: Namespace) -> int:
    """Fine-tune a run's checkpoints on a task as they appear, in order, and write and log their scores.

    The run is never slowed or stopped. It ends once the run's last checkpoint is scored, or after Ctrl-C; the same command
    goes on from there. The exit status is 1 if a trial failed, 130 after Ctrl-C, 75 after SIGTERM.
    """
    from biphasic.checkpointing.start_rules import checkpoint_folder
    from biphasic.config.finetune import FinetuneConfig
    from biphasic.config.load import load_job
    from biphasic.config.pretrain import PretrainConfig
    from biphasic.finetuning.plan import require_data

    own = ["model={path: checkpoint}", "save_model=false"]
    task = load_job(FinetuneConfig, options.task, [*options.overrides, *own])
    if options.run.endswith((".yaml", ".yml")):
        place = load_job(PretrainConfig, options.run).checkpoint_destination
    elif not is_remote(options.run) and not Path(options.run).exists():
        raise UserError(f"{options.run}: is not there; to watch a run before its start, give its YAML")
    else:
        place = checkpoint_folder(options.run)
    require_data(task)
    with composer_imported():
        from biphasic.watch import Watcher

    return Watcher(place, task, options.every).watch()


@command(
    "write the report of a sweep or a study",
    argument("folders", metavar="RESULTS", nargs="+", help="a sweep's output or a study's folders"),
    argument("--out", help="the folder to write; default: `report` within the first local RESULTS, or ./report"),
)
def report(options: Namespace) -> int:
    """Write the report of a sweep or a study: tables with intervals, and figures.

    biphasic report RESULTS... [--out FOLDER]
    """
    from biphasic.report.run import write_report

    if gone := [folder for folder in options.folders if not is_remote(folder) and not Path(folder).is_dir()]:
        raise UserError(f"{', '.join(gone)}: is not a folder here")
    write_report(options.folders, options.out)
    return 0


@command(
    "compare two models on the same test sets",
    argument("first", metavar="A", help="an evaluation, a fine-tuning or a sweep; FOLDER@MODEL if it has several"),
    argument("second", metavar="B", help="another one, of the same kind"),
    argument("--out", type=local_path, metavar="FILE.json", help="write the report with the scores of all examples"),
)
def compare(options: Namespace) -> int:
    """Compare two models on the test sets that both were scored on: intervals, tests, and what changed most.

    biphasic compare runs/evaluate/first runs/evaluate/second
    biphasic compare runs/evaluate/first runs/evaluate/first@BM25
    biphasic compare runs/sweep@first-model runs/sweep@second-model --out compared.json
    """
    from biphasic.report.compare import compare, describe
    from biphasic.report.example_scores import read_scored_model

    report = compare(*map(read_scored_model, (options.first, options.second)))
    print(describe(report))
    if options.out is not None:
        open_store(str(options.out.parent)).write(options.out.name, json_bytes(report))
        print(f"{options.out}: the report, with the scores of all examples")
    return 0


@command("print a shell's completion script", argument("shell", choices=("bash", "zsh"), help="your shell"))
def completion(options: Namespace) -> int:
    """Print the completion script of a shell. In ~/.bashrc or ~/.zshrc:

    eval "$(biphasic completion bash)"
    eval "$(biphasic completion zsh)"
    """
    import argcomplete

    print(argcomplete.shellcode(["biphasic"], shell=options.shell))  # pyright: ignore[reportPrivateImportUsage]
    return 0
