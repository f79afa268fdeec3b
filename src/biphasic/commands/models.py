"""The commands that check, merge and export models, or apply one to text: check-attention, merge, export, predict, mine."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from biphasic.commands.next_step import after_export, after_mining
from biphasic.commands.parser import argument, command, local_path, positive, share
from biphasic.devices import rank_device, supports_bf16, use_all_gpus
from biphasic.errors import UserError
from biphasic.ranks import is_first_rank
from biphasic.storage import atomic_path

if TYPE_CHECKING:
    from biphasic.downstream.tables import Table

_TEXTS_AT_ONCE = 10_000
"""Number of texts to embed between writes."""
_IN_FOLDER, _TO_HUB = "in the exported folder", "to the hub"


@command(
    "show whether a model sees the future, other segments or padding",
    argument("model", metavar="MODEL", help="a Hugging Face folder or hub id"),
    argument(
        "--require",
        action="append",
        default=[],
        choices=("causal", "bidirectional", "segments", "padding"),
        help="status 1 unless this holds; repeatable",
    ),
    argument("--attention", metavar="NAME", help="transformers' attention function, e.g. eager; default: the model's"),
    argument("--trust-remote-code", action="store_true", help="allow the model to run its own Python files"),
)
def check_attention(options: Namespace) -> int:
    """Show whether a model's outputs depend on the future, other segments, or padding: biphasic check-attention MODEL

    Each way to ask for attention is a row: masks, positions that begin anew, and Biphasic's own.
    """
    from biphasic.model.attention_check import check_attention, load_for_check

    model = load_for_check(options.model, options.attention, options.trust_remote_code)
    try:
        print(check_attention(model, options.require))
    except ValueError as error:
        print(error)
        return 1
    return 0


@command(
    "write the mean of checkpoints",
    argument(
        "checkpoints", metavar="CHECKPOINT", nargs="+", help="as for export; a run's folder: its newest checkpoint"
    ),
    argument("out", metavar="OUT", type=local_path, help="the folder to write"),
    argument("--last", type=positive, metavar="N", help="of each run the last N checkpoints of its stable phase"),
    argument("--weights", default="mean", help="mean (default); numbers (1,2,3); as a decay: linear, 1-sqrt, cosine"),
)
def merge(options: Namespace) -> int:
    """Write the mean of checkpoints, of one run or of several: biphasic merge runs/NAME --last 10 OUT

    OUT is a checkpoint without optimizer state. Export or evaluate it, or train from it with model.init_from.
    """
    from biphasic.checkpointing.merge import merge_checkpoints

    merge_checkpoints(options.checkpoints, options.out, last=options.last, weights=options.weights)
    print(f"next: biphasic export {options.out} {options.out}-encoder")
    return 0


@command(
    "write a checkpoint as a folder that other libraries load",
    argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run's checkpoint, local or in a bucket: a .pt file, the folder of a sharded one, or a run's checkpoint "
        "folder, for its newest; or an exported folder, without OUT",
    ),
    argument("out", metavar="OUT", type=local_path, nargs="?", help="the folder to write"),
    argument("overrides", nargs="*", metavar="key=value", help="with --initial: replace a value of the YAML"),
    argument("--initial", action="store_true", help="CHECKPOINT is a pretraining YAML: its initial weights"),
    argument("--name", help="the model's name on its card"),
    argument("--dtype", choices=("fp32", "bf16"), help="of the weights on disk; default: fp32"),
    argument("--force", action="store_true", help="replace an earlier export in OUT"),
    argument("--onnx", action="store_true", help="write onnx/model.onnx, compared with the model", group=_IN_FOLDER),
    argument("--int8", action="store_true", help="with --onnx: also onnx/model_int8.onnx, compared", group=_IN_FOLDER),
    argument("--results", type=local_path, metavar="FOLDER", help="put mteb's results onto the card", group=_IN_FOLDER),
    argument("--results-of", metavar="MODEL", help="the model, if FOLDER has results of several", group=_IN_FOLDER),
    argument("--license", metavar="ID", help="of the weights, on the card, e.g. apache-2.0", group=_IN_FOLDER),
    argument(
        "--language",
        metavar="CODE",
        action="append",
        help="of the training text, e.g. en; repeatable",
        group=_IN_FOLDER,
    ),
    argument("--push", metavar="ORG/NAME", help="upload the folder; the token is HF_TOKEN's", group=_TO_HUB),
    argument("--revision", metavar="BRANCH", help="to a branch, created if missing; default: main", group=_TO_HUB),
    argument("--private", action="store_true", help="create a private repository, if it is new", group=_TO_HUB),
    argument("--dry-run", action="store_true", help="print what would be uploaded, without any request", group=_TO_HUB),
)
def export(options: Namespace) -> int:
    """Write a checkpoint as a folder that other libraries load: biphasic export CHECKPOINT OUT

    Further steps for an exported folder: biphasic export FOLDER --onnx, --results, --push.
    """
    _check_export(options)
    if options.out is not None:
        from biphasic.export.run import export_checkpoint, export_initial

        export = partial(export_initial, overrides=options.overrides) if options.initial else export_checkpoint
        export(options.checkpoint, options.out, name=options.name, dtype=options.dtype or "fp32", force=options.force)
    _further_steps(options, options.out or Path(options.checkpoint))
    if options.out is not None and options.push is None:
        print(after_export(options.out))
    return 0


def _check_export(args: Namespace) -> None:
    """Raise a UserError for invalid options before anything is loaded or written."""
    if args.overrides and not args.initial:
        raise UserError(f"{args.overrides[0]}: key=value needs --initial, which reads a YAML")
    if args.push is None and (args.revision or args.private or args.dry_run):
        raise UserError("--revision, --private and --dry-run belong to --push ORG/NAME, which is missing")
    if args.int8 and not args.onnx:
        raise UserError("--int8 belongs to --onnx, which is missing")
    if args.results_of and not args.results:
        raise UserError("--results-of belongs to --results FOLDER, which is missing")
    if args.out is None:
        from biphasic.export.folder import EXPORT_FILE, require_export

        folder = Path(args.checkpoint)
        steps = args.onnx or args.results or args.license or args.language or args.push
        if not steps and not (folder / EXPORT_FILE).is_file():
            raise UserError(f"{folder}: the folder to write, OUT, is missing")
        require_export(folder)
        for name in ("initial", "name", "dtype", "force"):
            if getattr(args, name):
                raise UserError(f"--{name} belongs to an export, and {folder} is one: give a checkpoint and OUT")
        if not steps:
            raise UserError(f"{folder} is an export: add --onnx, --results, --license, --language or --push")
    if args.results is not None:
        from biphasic.export.results import read_results

        read_results(args.results, args.results_of)
    if args.push is not None:
        from biphasic.export.push import require_repo, require_token

        require_repo(args.push)
        if not args.dry_run:
            require_token()
    if args.onnx:
        from biphasic.export.onnx import require_onnx

        require_onnx()


def _further_steps(args: Namespace, folder: Path) -> None:
    if args.license or args.language or args.results is not None:
        from biphasic.export.folder import CARD_FILE, read_card, write_card
        from biphasic.export.results import add_results

        card = read_card(folder)
        data: Any = card.data
        data.license = args.license or data.license
        data.language = args.language or data.language
        if args.results is not None:
            add_results(card, args.results, args.results_of)
        write_card(folder, card)
        print(f"{folder / CARD_FILE}: updated")
    if args.onnx:
        from biphasic.export.onnx import export_onnx

        export_onnx(folder, args.int8)
    if args.push is not None:
        from biphasic.export.push import push

        push(folder, args.push, revision=args.revision, private=args.private, dry_run=args.dry_run)


@command(
    "predict or embed new text with a model",
    argument("model", metavar="MODEL", help="folder of a fine-tuned model, such as runs/sst2/model"),
    argument("file", metavar="FILE", help="Parquet, JSON lines, CSV, TSV, .conll or SQuAD's JSON"),
    argument(
        "--out",
        type=local_path,
        metavar="OUT",
        help="the file to write: .jsonl or .parquet; embeddings: .parquet (default: from FILE's name)",
    ),
    argument("--prompt", metavar="NAME", help="embed with this prompt of the model, such as query; none: without"),
    argument("--trust-remote-code", action="store_true", help="run the Python code in MODEL, after reading it"),
)
def predict(options: Namespace) -> int:
    """Predict new text with a fine-tuned model, or embed it.

    FILE has the columns that the model's task reads: `text` (and `text_pair`), `tokens`, or `question` and `context`; and
    `id`, if rows should be found again by it. A model for retrieval, or one that isn't fine-tuned, embeds `text`.
    """
    from biphasic.finetuning.finetuned_model import open_texts, read_task

    record = read_task(options.model)
    kind = "retrieval" if record is None else record["task"]["kind"]
    embeds = kind == "retrieval"
    suffixes = (".parquet",) if embeds else (".jsonl", ".parquet")
    what = "embeddings" if embeds else "predictions"
    out = Path(options.out or f"{Path(options.file).name.split('.')[0]}-{what}{suffixes[0]}")
    if out.suffix not in suffixes:
        raise UserError(f"--out {out}: expected a name that ends with {' or '.join(suffixes)}")
    if options.prompt is not None and not embeds:
        raise UserError("--prompt: is for embeddings; the text of a task has its own template")
    table = open_texts(options.file, kind)
    print(f"{len(table):,} rows of {options.file}: {what}{'' if embeds else f' ({kind})'} to {out}", flush=True)
    model, trusts = options.model, options.trust_remote_code
    groups = _embed(model, table, options.prompt, trusts) if embeds else _predict(model, record, table, trusts)
    rows = _write(out, groups)
    print(f"{out}: {rows:,} rows")
    return 0


def _predict(model: str, record: Any, table: Table, trusts: bool) -> Iterator[dict[str, Any]]:
    from biphasic.finetuning.finetuned_model import load_finetuned, portions, predict

    trained, task = load_finetuned(model, record, trusts)
    for ids, columns in portions(table):
        predictions, cut = predict(trained, task, ids, columns)
        if description := cut.describe():
            print(description, flush=True)
        yield predictions


def _embed(path: str, table: Table, prompt: str | None, trusts: bool) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    from tqdm import tqdm

    from biphasic.evaluation.embedder import EncoderEmbedder
    from biphasic.finetuning.finetuned_model import portions
    from biphasic.finetuning.retrieval import titled_texts
    from biphasic.model.encoder import load_embedder

    encoder = load_embedder(path, trusts)
    prompts = {name: text for name, text in encoder.text_tokenizer.settings.prompts.items() if text}
    if (prompts and prompt is None) or prompt not in (None, "none", *prompts):
        given = "" if prompt is None else f"; got {prompt}"
        raise UserError(f"--prompt: expected {', '.join([*prompts, 'none'])}, because {path} has prompts{given}"
                        if prompts else f"--prompt {prompt}: {path} has no prompts")  # fmt: skip
    before = prompts.get(prompt or "none", "")
    rank_device().module_to_device(encoder.backbone)
    embedder = EncoderEmbedder(encoder, path, "", supports_bf16())
    with tqdm(total=len(table), desc="embedding", unit="text", delay=5, disable=None) as bar:
        for ids, columns in portions(table):
            texts = [before + text for text in titled_texts(columns)]
            for first in range(0, len(texts), _TEXTS_AT_ONCE):
                embeddings = embedder.embed(texts[first : first + _TEXTS_AT_ONCE], bar.update)
                vectors = pa.FixedSizeListArray.from_arrays(pa.array(embeddings.reshape(-1)), embedder.width)
                yield {"id": ids[first : first + _TEXTS_AT_ONCE], "embedding": vectors}
    if embedder.cut:
        print(f"{embedder.cut:,} texts were longer than {encoder.text_tokenizer.max_length:,} tokens and were cut")


def _write(out: Path, groups: Iterator[dict[str, Any]]) -> int:
    """Write groups of columns to a file, atomically, and return the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, writer = 0, None
    try:
        with atomic_path(out) as partial:
            for table in map(pa.table, groups):
                rows += len(table)
                if out.suffix == ".jsonl":
                    with partial.open("a", encoding="utf-8") as file:
                        file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in table.to_pylist())
                else:
                    writer = writer or pq.ParquetWriter(partial, table.schema, compression="zstd")
                    writer.write_table(table)
            if writer is not None:
                writer.close()
    except OSError as error:
        raise UserError(f"{out}: can't be written ({error.strerror or error})") from None
    return rows


@command(
    "mine hard negatives for a retrieval set",
    argument("model", metavar="MODEL", help="the encoder: an exported folder, a checkpoint, another folder or a hub id"),
    argument("task_folder", metavar="TASK_FOLDER", help="a retrieval set of `biphasic tasks` with training pairs"),
    argument("out", metavar="OUT", help="the folder to write: the same set, its pairs with negatives and scores"),
    argument("--count", type=positive, default=7, metavar="N", help="negatives of a query (default: 7)"),
    argument("--depth", type=positive, default=100, metavar="K", help="documents to consider, best first (default: 100)"),
    argument("--below", type=share, default=0.95, metavar="SHARE",
             help="leave out documents above this share of the positive's score (default: 0.95)"),
    argument("--near-duplicate", type=share, default=0.95, metavar="COSINE",
             help="leave out documents with a higher cosine similarity to a positive (default: 0.95)"),
    argument("--cache", default="runs/cache", metavar="FOLDER", help="for embeddings (default: runs/cache)"),
)  # fmt: skip
def mine(options: Namespace) -> int:
    """Mine hard negatives for a retrieval set: documents that a model finds similar to a query but that are not relevant.

    The same command resumes after an interruption. Every GPU of the machine is used; on several machines, use
    composer [node arguments] -m biphasic mine MODEL TASK_FOLDER OUT.
    """
    use_all_gpus(["-m", "biphasic", *sys.argv[1:]])
    from biphasic.finetuning.mining import mine

    limits = (options.count, options.depth, options.below, options.near_duplicate)
    record = mine(options.model, options.task_folder, options.out, options.cache, *limits)
    if is_first_rank():
        mined = record["mined"]
        print(
            f"{options.out}: {mined['pairs']:,} pairs, {mined['negatives'] / mined['pairs']:.1f} negatives on average; "
            f"{mined['fewer']:,} have fewer than {options.count}, {mined['without']:,} had none and were left out; "
            f"{mined['near_duplicates']:,} positives and near duplicates were not used"
            + f"; {mined['texts_cut']:,} texts were cut at the model's maximum length"
            * bool(mined["texts_cut"])
        )
        print(after_mining(options.model, options.out, options.count))
    return 0
