"""The complete job on this machine's own text: `make quickstart`, or this file.

The same number of tokens for masked language modeling (MLM) alone, for causal language modeling (CLM) followed by MLM, and
for CLM alone; each model, and one that was not pretrained, is fine-tuned alike, by a sweep on token labelling and once on
retrieval, which is scored beside BM25. Every step is a command that a person could type. It runs as a fork of this process,
which has made the imports, and two steps run side by side. A step that is done and unchanged is not repeated. An interrupted
step continues where it can (pretraining resumes from its newest checkpoint) and otherwise starts again.

    python recipes/quickstart/quickstart.py [--seed N]

Another seed shares the text, the tokenizer and the rows, and has a folder of its own, runs/quickstart/seed-N.
"""

import argparse
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import forked
from schedule import RUN, Schedule, Step

from biphasic.amounts import format_seconds
from biphasic.config.load import load_job
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import PREEMPTED, ConfigError
from biphasic.processes import INTERRUPTED

ROOT = Path(__file__).parents[2]
HERE, MINI = "recipes/quickstart", "recipes/mini"
PRETRAIN, DATA = "yamls/quickstart.yaml", "yamls/data/quickstart.yaml"
RETRIEVAL, LABELLING = "yamls/finetune/quickstart_retrieval.yaml", "yamls/finetune/quickstart_parameters.yaml"
TASKS, SWEEP = f"{HERE}/tasks.yaml", f"{HERE}/sweep.yaml"
MODELS = ("clm-mlm", "mlm", "clm", "untrained")
CODE = [
    *("src/biphasic/config", "src/biphasic/data", "src/biphasic/model"),
    *("src/biphasic/durations.py", "src/biphasic/timeline.py"),
]
CONVERSION = ["src/biphasic/config", "src/biphasic/data", "src/biphasic/conversion"]
TRAINING = [
    *CODE, "src/biphasic/main.py", "src/biphasic/initial_model.py", "src/biphasic/objectives", "src/biphasic/training",
    "src/biphasic/checkpointing",
]  # fmt: skip
FINETUNING = [
    *CODE, "src/biphasic/main.py", "src/biphasic/downstream", "src/biphasic/finetuning", "src/biphasic/export",
    "src/biphasic/training", "src/biphasic/evaluation", "src/biphasic/grouping.py",
]  # fmt: skip
REPORT = ["src/biphasic/report", "src/biphasic/report/report.html"]

MLM, CLM = "objective.phases=[{name: mlm, masking_ratio: 0.4}]", "objective.phases=[{name: clm}]"


def make_steps(seed: int | None = None) -> list[Step]:
    """Return the steps in an order in which they can run. Default: the YAMLs' seeds.

    Raises:
        ConfigError: the pretraining YAML is invalid.
    """
    config = load_job(PretrainConfig, PRETRAIN)
    switch = config.objective.phases[0].until
    folder = RUN if seed is None else RUN / f"seed-{seed}"
    of_seed = [] if seed is None else [f"seed={seed}", f"output={folder}"]
    shared = [
        Step(
            "gather",
            "real English text: the docstrings of the installed packages, eight of which are held out for the tasks",
            ["python", f"{HERE}/gather.py"],
            [RUN / "text" / name for name in ("documents.parquet", "docstrings.parquet", "pairs", "gathered.json")],
            [f"{HERE}/gather.py", DATA, "requirements.lock"],
        ),
        Step(
            "examples",
            "token labelling: which words of a docstring's parameters are names, which are types?",
            ["python", f"{MINI}/make_tasks.py", str(RUN / "text"), "parameters"],
            [RUN / "text" / "sources"],
            [f"{MINI}/make_tasks.py"],
            ("gather",),
        ),
        Step(
            "tasks",
            "the examples in the columns that fine-tuning reads",
            ["biphasic", "tasks", TASKS],
            [RUN / "tasks"],
            [TASKS, "src/biphasic/config", "src/biphasic/downstream"],
            ("examples",),
        ),
        Step(
            "tokenizer",
            "a byte-level BPE tokenizer of the text's own",
            ["biphasic", "tokenizer", DATA, "--size", str(config.model.vocab_size)],
            [RUN / "tokenizer"],
            ["src/biphasic/conversion/train_tokenizer.py", DATA],
            ("gather",),
        ),
        Step(
            "convert",
            "packed rows as MDS shards, training and validation",
            ["biphasic", "convert", DATA],
            [RUN / "data"],
            [DATA, *CONVERSION],
            ("gather", "tokenizer"),
        ),
        Step(
            "verify",
            "every shard is read again and compared with the conversion's record",
            ["biphasic", "verify", str(RUN / "data")],
            [],
            CONVERSION,
            ("convert",),
        ),
    ]

    def pretrain(run_name: str, description: str, overrides: list[str], after: str) -> Step:
        command = ["composer", "src/main.py", PRETRAIN, f"run_name={run_name}", *overrides, *of_seed]
        return Step(
            f"pretrain-{run_name}",
            description,
            command,
            [folder / run_name],
            [PRETRAIN, *TRAINING],
            (after,),
            resumes=True,
            folder=folder,
        )

    trunk = f"start_from={folder / 'clm-trunk'}"
    beginning = [f"max_duration={switch}", "schedule.decay=0ba", CLM]
    pretraining = [
        pretrain("clm-trunk", "the CLM batches before the switch, which two models share", beginning, "convert"),
        pretrain("mlm", "MLM alone", [MLM], "convert"),
        # Before clm-mlm, because it takes longer.
        pretrain("clm", "CLM alone", [CLM, trunk], "pretrain-clm-trunk"),
        pretrain("clm-mlm", "CLM up to the switch, then MLM", [trunk], "pretrain-clm-trunk"),
    ]
    exports, finetunings = list[Step](), list[Step]()
    encoders = {name: folder / name / "encoder" for name in MODELS}
    for name, out in encoders.items():
        is_new = name == "untrained"
        export = ["export-initial", PRETRAIN] if is_new else ["export", str(folder / name / "checkpoints")]
        initial_seed = of_seed[:1] if is_new else []
        exports.append(
            Step(
                f"export-{name}",
                "a folder that transformers and sentence-transformers load",
                ["biphasic", *export, str(out), *initial_seed, "--force"],
                [out],
                [PRETRAIN, *CODE, "src/biphasic/export"],
                ("tokenizer" if is_new else f"pretrain-{name}",),
                folder=folder,
            )
        )
        finetuned = f"{name}-finetuned"
        finetunings.append(
            Step(
                f"finetune-{name}",
                "retrieval: a docstring's first line finds the rest of it",
                ["composer", "src/main.py", RETRIEVAL, f"model.path={out}", f"run_name={finetuned}", *of_seed],
                [folder / finetuned],
                [RETRIEVAL, *FINETUNING],
                (f"export-{name}", "gather"),
                folder=folder,
            )
        )
    of_folder = [f"output={folder / 'sweep'}", *(f"models.{name}.path={out}" for name, out in encoders.items())]
    last = [
        Step(
            "sweep",
            "token labelling: each encoder at the best of three rates by validation, with three seeds",
            ["python", "src/main.py", SWEEP, *([] if seed is None else of_folder)],
            [folder / "sweep"],
            [SWEEP, LABELLING, *FINETUNING, "src/biphasic/sweep"],
            (*(step.name for step in exports), "tasks"),
            resumes=True,
            alone=True,
            folder=folder,
        ),
        Step(
            "score",
            "retrieval from held-out packages scored with mteb, BM25 beside it",
            ["python", f"{HERE}/score.py", str(folder)],
            [folder / "scores.json"],
            [f"{HERE}/score.py", *CODE, "src/biphasic/evaluation"],
            tuple(step.name for step in finetunings),
            folder=folder,
        ),
        Step(
            "sweep-report",
            "the sweep's tables and figures",
            ["biphasic", "report", str(folder / "sweep")],
            [folder / "sweep" / "report"],
            REPORT,
            ("sweep",),
            folder=folder,
        ),
        Step(
            "report",
            "what was shown and what wasn't, with pictures of scores and losses",
            ["python", f"{HERE}/report.py", str(folder)],
            [folder / name for name in ("report.md", "report.html", "summary.txt", "scores.png", "losses.png")],
            [f"{HERE}/report.py", *REPORT],
            ("score", "sweep-report", "verify"),
            folder=folder,
        ),
    ]
    return [*shared, *pretraining, *exports, *finetunings, *last]


def _end(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `make` passes on one that its process group has too
    sys.exit(PREEMPTED)


def main(arguments: list[str] | None = None) -> int:
    """Run the steps that are missing or changed.

    Exit status: that of the first step that fails; 130 after Ctrl-C, 75 after SIGTERM.
    """
    parser = argparse.ArgumentParser(description="Text in, biphasic encoders out, and what the biphasic recipe gains.")
    parser.add_argument("--seed", type=int, help="of weights, order and masks; default: the YAMLs'")
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, _end)
    start = time.monotonic()
    try:
        steps = make_steps(options.seed)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    folder = steps[-1].folder
    print(
        f"quickstart: text in, encoders out; {len(steps)} commands, {forked.AT_ONCE} at a time, 5 minutes on two "
        f"cores, into {folder}/"
    )
    try:
        status = Schedule(steps).run()
    except (KeyboardInterrupt, SystemExit) as end:
        # While Composer is imported, its handlers exit with 128 + the signal.
        status = PREEMPTED if getattr(end, "code", None) in (PREEMPTED, 128 + signal.SIGTERM) else INTERRUPTED
        print("interrupted: the same command continues", file=sys.stderr)
    gc.unfreeze()  # otherwise extension modules report leaks at the end
    if status:
        return status
    print((folder / "summary.txt").read_text(encoding="utf-8").rstrip())
    print(f"report: {folder / 'report.html'}, report.md ({format_seconds(time.monotonic() - start)} in all)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
