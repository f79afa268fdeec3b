"""Commands for models: check their attention, merge, export and publish them, and predict with one."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from biphasic.commands.next_step import after_export
from biphasic.commands.parser import argument, command, local_path, positive
from biphasic.errors import UserError
from biphasic.storage import atomic_path, user_errors


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
    from biphasic.model.probe import check_attention, load_for_check

    model = load_for_check(options.model, options.attention, options.trust_remote_code)
    try:
        print(check_attention(model, options.require))
    except ValueError as error:
        print(error)
        return 1
    return 0


@command(
    "write the mean of checkpoints",
    argument("checkpoints", metavar="CHECKPOINT", nargs="+", help="as for export; a run's folder: its newest checkpoint"),
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


_DTYPE = argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights on disk; default: fp32")
_FORCE = argument("--force", action="store_true", help="replace an earlier export in OUT")


@command(
    "write a checkpoint as a folder that other libraries load",
    argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run's checkpoint, local or in a bucket: a .pt file, the folder of a sharded one, or a run's folder, for "
        "its newest",
    ),
    argument("out", metavar="OUT", type=local_path, help="the folder to write"),
    argument("--name", help="the model's name on its card"),
    _DTYPE,
    _FORCE,
)
def export(options: Namespace) -> int:
    """Write a checkpoint as a folder that other libraries load: biphasic export CHECKPOINT OUT

    `biphasic onnx` adds an ONNX graph to the folder, and `biphasic push` uploads it.
    """
    from biphasic.export.run import export_checkpoint

    given = {"name": options.name, "dtype": options.dtype, "force": options.force}
    export_checkpoint(options.checkpoint, options.out, **given)
    print(after_export(options.out))
    return 0


@command(
    "write a run's initial weights as a folder",
    argument("file", metavar="FILE.yaml", help="the YAML of a pretraining"),
    argument("out", metavar="OUT", type=local_path, help="the folder to write"),
    argument("overrides", nargs="*", default=[], metavar="key=value", help="replace a value of the YAML"),
    _DTYPE,
    _FORCE,
)
def export_initial(options: Namespace) -> int:
    """Write the untrained weights of a pretraining YAML as `biphasic export` does: biphasic export-initial FILE.yaml OUT"""
    from biphasic.export.run import export_initial

    export_initial(options.file, options.out, options.overrides, dtype=options.dtype, force=options.force)
    print(after_export(options.out))
    return 0


@command("write an exported folder as an ONNX graph", argument("folder", metavar="FOLDER", type=local_path))
def onnx(options: Namespace) -> int:
    """Write onnx/model.onnx into an exported folder, after comparing it with the model: biphasic onnx FOLDER"""
    from biphasic.export.onnx import export_onnx

    export_onnx(options.folder)
    return 0


@command(
    "upload an exported folder to the hub",
    argument("folder", metavar="FOLDER", type=local_path),
    argument("repo", metavar="ORG/NAME", help="the model's name on the hub"),
    argument("--revision", metavar="BRANCH", help="to a branch, created if missing; default: main"),
    argument("--private", action="store_true", help="create a private repository, if it is new"),
    argument("--dry-run", action="store_true", help="print what would be uploaded, without any request"),
)
def push(options: Namespace) -> int:
    """Upload an exported folder to the hub in one commit: biphasic push FOLDER ORG/NAME. The token is HF_TOKEN's."""
    from biphasic.export.push import push

    given = {"revision": options.revision, "private": options.private, "dry_run": options.dry_run}
    push(options.folder, options.repo, **given)
    return 0


@command(
    "predict new text with a fine-tuned model",
    argument("model", metavar="MODEL", help="folder of a fine-tuned model, such as runs/sst2/model"),
    argument("file", metavar="FILE", help="Parquet, JSON lines, CSV, TSV, .conll or SQuAD's JSON"),
    argument(
        "--out",
        type=local_path,
        metavar="OUT",
        help="the file to write: .jsonl or .parquet (default: from FILE's name)",
    ),
    argument("--trust-remote-code", action="store_true", help="run the Python code in MODEL, after reading it"),
)
def predict(options: Namespace) -> int:
    """Predict new text with a fine-tuned model: biphasic predict MODEL FILE

    FILE has the columns that the model's task reads: `text` (and `text_pair`), `tokens`, or `question` and `context`; and
    `id`, if rows should be found again by it.
    """
    name = Path(options.file).name.removesuffix(".gz").removesuffix(".zst")
    out = Path(options.out or f"{Path(name).stem}-predictions.jsonl")
    if out.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"--out {out}: expected a name that ends with .jsonl or .parquet")
    if out.resolve() == Path(options.file).resolve():
        raise UserError(f"--out {out}: is the file with the texts, which it would replace")
    from biphasic.finetuning.finetuned_model import predict_file

    rows = _write(out, predict_file(options.model, options.file, options.trust_remote_code))
    print(f"{out}: {rows:,} rows")
    return 0


def _write(out: Path, groups: Iterator[dict[str, Any]]) -> int:
    """Write groups of columns to a file, atomically, and return the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, writer = 0, None
    with user_errors(f"{out}: can't be written"), atomic_path(out) as partial:
        for table in map(pa.table, groups):
            rows += len(table)
            if out.suffix == ".jsonl":
                finite = (json.loads(json.dumps(row), parse_constant=lambda _: None) for row in table.to_pylist())
                with partial.open("a", encoding="utf-8") as file:  # JSON has no Infinity: it is null
                    file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in finite)
            else:
                writer = writer or pq.ParquetWriter(partial, table.schema, compression="zstd")
                writer.write_table(table)
        if writer is not None:
            writer.close()
    return rows
