"""The commands that write and read data: tokenizer, convert, verify, show, tasks, overlap."""

import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from biphasic.amounts import format_bytes
from biphasic.commands.next_step import after_conversion, after_tasks
from biphasic.commands.parser import argument, command, count, file_arguments, local_path, positive
from biphasic.commands.plan import print_job_plan
from biphasic.errors import Unavailable, UserError
from biphasic.ranks import FAILED, REFUSED
from biphasic.storage import is_remote, join
from biphasic.storage.hub import is_local_path


@command(
    "train a byte-level BPE tokenizer on own text",
    *file_arguments("job: convert"),
    argument("--out", type=local_path, metavar="FOLDER", help="folder to write; default: the YAML's tokenizer"),
    argument("--size", type=positive, default=32_768, metavar="N", help="tokens, special ones included; default: 32,768"),
    argument("--special", action="append", default=[], metavar="ROLE=TOKEN", help="a special token, e.g. mask=<mask>"),
    argument("--add", action="append", default=[], metavar="TOKEN", help="a further token that is never split; repeatable"),
    argument("--max-text", metavar="SIZE", help="text to read at most, e.g. 1gb: from each file its share"),
    argument("--force", action="store_true", help="replace an earlier tokenizer"),
)
def tokenizer(options: Namespace) -> int:
    """Train a byte-level BPE tokenizer on the text of a conversion's training split, before the conversion itself."""
    from pydantic import TypeAdapter, ValidationError

    from biphasic.config.base import Size
    from biphasic.config.convert import ConvertConfig
    from biphasic.config.load import load_job

    config = load_job(ConvertConfig, options.file, options.overrides)
    from biphasic.conversion.train_tokenizer import ROLES, SPECIAL_TOKENS, train_tokenizer

    special_tokens = dict(SPECIAL_TOKENS)
    for pair in options.special:
        role, equals, token = pair.partition("=")
        if role not in ROLES or not equals or not token:
            raise UserError(f"--special: expected ROLE=TOKEN with a role of {', '.join(ROLES)}; got {pair!r}")
        special_tokens[role] = token
    try:
        max_bytes = TypeAdapter(Size | None).validate_python(options.max_text)
    except ValidationError:
        raise UserError(f"--max-text: expected a size such as 200gb; got {options.max_text!r}") from None
    folder = options.out or _tokenizer_folder(config.tokenizer)
    limits = {"size": options.size, "max_bytes": max_bytes, "force": options.force}
    trained = train_tokenizer(config, folder, special_tokens=special_tokens, added_tokens=tuple(options.add), **limits)
    text = f"{trained.documents:,} documents, {format_bytes(trained.text_bytes)} of text"
    print(f"{folder}: {trained.tokens:,} tokens, trained on {text}")
    if trained.marks is not None:
        print(f"{trained.marks:.0%} of the text's characters are combining marks: words are divided by GPT-4o's pattern")
    if trained.tokens < options.size:
        print(f"the text has no more pairs to merge: {trained.tokens:,} tokens instead of {options.size:,}")
    override = [] if str(folder) == config.tokenizer else [f"tokenizer={folder}"]
    print(f"next: {shlex.join(['biphasic', 'convert', options.file, *options.overrides, *override])}")
    return 0


def _tokenizer_folder(tokenizer: str) -> Path:
    folder = Path(tokenizer)
    # A hub id has one slash: EuroBERT/EuroBERT-210m.
    is_hub_id = len(folder.parts) == 2 and not is_local_path(tokenizer) and not folder.parent.exists()
    if is_remote(tokenizer) or is_hub_id:
        raise UserError(f"tokenizer: {tokenizer} is not a local folder; set the folder to write with --out")
    return folder


@command(
    "convert text to MDS shards of packed rows",
    *file_arguments("job: convert"),
    argument("--plan", action="store_true", help="print what would be done: files, tokens, bytes, hours, peak disk"),
)
def convert(options: Namespace) -> int:
    """Convert text to MDS shards of packed rows. The same command resumes an interrupted conversion."""
    from biphasic.config.convert import ConvertConfig
    from biphasic.config.load import load_job

    config = load_job(ConvertConfig, options.file, options.overrides)
    from biphasic.conversion.plan import describe_record, plan_conversion

    if options.plan:
        return print_job_plan(plan_conversion(config))
    from biphasic.conversion.convert import convert

    record = convert(config)
    print(describe_record(config.output, record))
    print(after_conversion(config.output, record))
    return 0


@command(
    "check a conversion against its record",
    argument("output", metavar="OUT", help="the conversion's folder or bucket prefix"),
    argument("--sample", type=count, default=0, metavar="N", help="print N rows as text"),
    argument("--split", default="train", help="split of the sample (default: train)"),
    argument("--no-sources", action="store_true", help="don't compare with the files that were read"),
)
def verify(options: Namespace) -> int:
    """Read a conversion again and compare it with its record: files, hashes, rows, counts.

    The exit status is 0 without faults, 1 with faults, 2 if there is nothing to verify.
    """
    from biphasic.conversion.verify import verify
    from biphasic.data.mds_reader import read_rows, row_as_text
    from biphasic.data.tokenizer import load_tokenizer

    output, split = options.output, options.split
    result = verify(output, sources=not options.no_sources)
    print(*result.summary, sep="\n")
    print(*(f"{output}: {fault}\n" for fault in result.faults), sep="", end="", file=sys.stderr)
    if result.faults:
        return 1
    record = result.record
    if options.sample:
        if split not in record["splits"]:
            raise UserError(f"{output}: has no split {split!r}; expected one of {', '.join(record['splits'])}")
        tokenizer, rows = load_tokenizer(join(output, "tokenizer")), record["splits"][split]["rows"]
        number = min(options.sample, rows)
        row_ids = {round(index * (rows - 1) / max(number - 1, 1)) for index in range(number)}  # evenly spaced
        for row_id, row in read_rows(join(output, split), row_ids):
            print(f"=== {split}, row {row_id:,}\n{row_as_text(row, tokenizer)}")
    print(f"{output}: complete and consistent with its record")
    print(after_conversion(output, record))
    return 0


@command(
    "print the text of rows by their ids",
    argument("file", metavar="FILE.yaml", help="the pretraining YAML"),
    argument("ids", metavar="ID", nargs="+", type=int, help="row ids in the dataset or the mix"),
    argument("--phase", type=count, default=0, metavar="N", help="the phase that reads these rows; default: 0, the first"),
)
def show(options: Namespace) -> int:
    """Print the text of rows by their ids, as `anomalous_batches.jsonl` in a run's folder lists them."""
    from biphasic.config.load import load_job
    from biphasic.config.pretrain import PretrainConfig
    from biphasic.data.mds_reader import read_rows, row_as_text, row_reader
    from biphasic.data.streams import read_index
    from biphasic.data.tokenizer import load_tokenizer

    config = load_job(PretrainConfig, options.file)
    tokenizer = load_tokenizer(config.tokenizer)
    if options.phase >= len(config.inputs):
        raise UserError(f"--phase: expected a phase from 0 to {len(config.inputs) - 1}; got {options.phase}")
    own, first_id = config.inputs[options.phase], 0
    for key, stream in own.streams.items():
        dataset = stream.remote or stream.local
        index = read_index(dataset)
        read = row_reader(key, stream, index, own.data.sequence_length, tokenizer)
        for row_id, row in read_rows(dataset, [id - first_id for id in options.ids]):
            print(f"=== row {first_id + row_id}: {dataset}\n{row_as_text(read(row), tokenizer)}")
        # Row ids of a mix continue from one dataset to the next.
        first_id += sum(shard["samples"] for shard in index["shards"])
    if unknown := [id for id in options.ids if not 0 <= id < first_id]:
        raise UserError(f"row {unknown[0]}: expected an id from 0 to {first_id - 1:,}")
    return 0


@command(
    "prepare the downstream datasets",
    argument("file", metavar="FILE.yaml", help="the YAML of job: tasks, e.g. yamls/data/tasks.yaml"),
    argument(
        "rest", nargs="*", default=[], metavar="task | key=value", help="only these tasks; overrides of the YAML's keys"
    ),
    argument("--plan", action="store_true", help="print what would be read and written"),
)
def tasks(options: Namespace) -> int:
    """Prepare downstream datasets in the schemas that fine-tuning reads.

    The exit status is 1 if a task failed that the same command may do later, 2 if something must be changed first.
    """
    from biphasic.config.load import load_job
    from biphasic.config.tasks import TasksConfig

    config = load_job(TasksConfig, options.file, [text for text in options.rest if "=" in text])
    from biphasic.downstream.prepare import chosen_tasks, describe_record, plan_tasks

    names = chosen_tasks(config, [text for text in options.rest if "=" not in text])
    plan = plan_tasks(config, names)
    if options.plan:
        return print_job_plan(plan)
    print(replace(plan, problems=[], missing=[]).describe())
    faults = [*plan.problems, *plan.missing]
    print(*(f"{fault}\n" for fault in faults), sep="", end="", file=sys.stderr, flush=True)
    from biphasic.downstream.prepare import prepare_task

    failed = {name: REFUSED for name in names if any(fault.startswith(f"{name}: ") for fault in faults)}
    for name in (name for name in names if name not in failed):
        try:
            print(describe_record(name, join(config.output, name), prepare_task(name, config)), flush=True)
        except UserError as error:
            print(error if str(error).startswith(f"{name}: ") else f"{name}: {error}", file=sys.stderr, flush=True)
            failed[name] = FAILED if isinstance(error, Unavailable) else REFUSED
    if failed:
        text = f"{len(failed)} of {len(names)} tasks failed ({', '.join(failed)})"
        status = min(failed.values())
        advice = "; the same command tries them again" if status == FAILED else ": change what the messages name first"
        print(f"{text}{advice}", file=sys.stderr)
        return status
    print(after_tasks(config, names))
    return 0
