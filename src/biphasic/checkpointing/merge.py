"""Merge checkpoints: the weighted mean of their weights, as a checkpoint without optimizer state."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from biphasic.amounts import format_bytes
from biphasic.checkpointing.fetch import local_checkpoint
from biphasic.checkpointing.manifest import Manifest, manifest_batches, newest_first
from biphasic.checkpointing.start_rules import batch_in_path, checkpoint_folder, recorded_config
from biphasic.config.merging import merge_weights
from biphasic.data.tokenizer import load_tokenizer
from biphasic.durations import Duration
from biphasic.errors import UserError
from biphasic.grouping import groups_up_to
from biphasic.model.checkpoint import read_record, read_weights, weight_shapes
from biphasic.storage import atomic_path, file_hash, is_free, is_remote, join, open_store, user_errors
from biphasic.timeline import decay_start, resolve_phases

PORTION_BYTES = 256_000_000
"""Bytes of a checkpoint that are read at a time, unless a single weight is larger."""


def merge_checkpoints(
    paths: Sequence[str], out: Path, *, last: int | None = None, weights: str | Sequence[float] = "mean"
) -> None:
    """Write the mean of checkpoints to the folder `out`, as a checkpoint whose batch and record are the last one's.

    The mean is computed in fp32, with the memory of its weights and of `PORTION_BYTES`, for any number of checkpoints.

    `paths` are checkpoints, and folders or bucket prefixes that runs save to: of such a place the newest checkpoint is
    merged, or the newest `last` of its `stable_checkpoints`. Those in a bucket are downloaded one at a time. `weights`
    are as for `merge_weights`. `out` appears when it is complete.

    Raises:
        UserError: a checkpoint is missing or can't be read, there are fewer than two, their architectures or tokenizers
            differ, the weights don't fit, or `out` is not an empty or missing folder, or can't be written.
    """
    if not is_free(out):
        raise UserError(f"{out} exists: choose another folder for the merged checkpoint, or remove it first")
    sources = [source for path in paths for source in _find(path, last)]
    if len(sources) < 2:
        raise UserError(f"expected at least two checkpoints to merge; got {', '.join(paths)}")
    shares = merge_weights(weights, [manifest.batch for _, manifest in sources])
    downloads = out.resolve().with_name(f".{out.name}.download")
    merged, total, parts, record, first = dict[str, Tensor](), 0.0, list[Any](), dict[str, Any](), dict[str, Any]()
    for (path, manifest), share in zip(sources, shares, strict=True):
        size = f", {format_bytes(manifest.size)} in {downloads} until it is read" * is_remote(path)
        print(f"{path}: weight {share:.6g}{size}", flush=True)
        try:
            local = local_checkpoint(path, downloads)
            record, shapes = read_record(local), weight_shapes(local)
            identity = _identity(record, shapes)
            first = first or identity
            if first != identity:
                key = next(key for key in first | identity if first.get(key) != identity.get(key))
                values = f"{key} is {first.get(key)} in {sources[0][0]}, and {identity.get(key)} in {path}"
                raise UserError(f"only checkpoints of one architecture and tokenizer can be merged: {values}")
            total += share
            _add(merged, local, shapes, share / total if share else 0.0)
            parts.append({"checkpoint": path, "manifest_sha256": manifest.sha256, "weight": share})
        finally:
            shutil.rmtree(downloads, ignore_errors=True)
    record |= {"losses": {}, "merged": parts}
    with user_errors(f"{out}: can't be written", RuntimeError):  # PyTorch raises one if the disk is full
        _write(merged, record, sources[-1][1], out)


def stable_checkpoints(folder: str) -> Iterator[Manifest]:
    """Yield the complete checkpoints of a run's stable phase, newest first.

    They are between warmup and decay, and in the last objective that begins before the decay; both ends are included. Raises
    a UserError or OSError if a checkpoint can't be read.
    """
    starts: list[Duration] = []
    for manifest in filter(None, (checkpoint.manifest for checkpoint in newest_first(open_store(folder)))):
        config, last_batch = recorded_config(manifest), manifest.last_batch
        if last_batch.reached(decay_start(config.schedule, config.max_duration)):
            continue
        phases = [span.start for span in resolve_phases(config.objective.phases, config.max_duration)]
        starts = starts or [config.schedule.warmup.resolve(config.max_duration), *filter(last_batch.reached, phases)]
        if not all(map(manifest.progress.reached, starts)):
            return
        yield manifest


def _find(path: str, last: int | None) -> list[tuple[str, Manifest]]:
    """Return the paths and manifests of the checkpoints that a path stands for, oldest first."""
    folder, batch = checkpoint_folder(path), batch_in_path(path)
    count = 1 if batch is not None else last or 1
    store = open_store(folder)
    with user_errors(f"checkpoint {path}: can't be used"):
        named = (checkpoint.manifest for checkpoint in newest_first(store) if batch in (None, checkpoint.batch))
        found = list(islice(filter(None, stable_checkpoints(folder) if batch is None and last else named), count))
        if len(found) < count:
            expected = f"expected {count} complete{' of its stable phase' * (batch is None and last is not None)}"
            got = f"{folder} {'holds none (an export is no checkpoint)' if store.list() else 'is not there, or empty'}"
            if batches := ", ".join(map(str, reversed(manifest_batches(store.list())))):
                advice = "A run deletes those beyond checkpoint.keep, except at batches in checkpoint.keep_at"
                got = f"got {len(found)} of batches {batches} in {folder}. {advice}"
            raise UserError(f"checkpoint {path}: {expected}; {got}")
    return [(join(folder, manifest.path), manifest) for manifest in reversed(found)]


def _identity(record: dict[str, Any], shapes: dict[str, Tensor]) -> dict[str, Any]:
    """Return what has to be equal in merged checkpoints."""
    backbone: dict[str, Any] = {**json.loads(record["backbone"]), "transformers_version": "", "_name_or_path": ""}
    tokenizer = record["data"].get("tokenizer_sha256")
    tokenizer = tokenizer or load_tokenizer(yaml.safe_load(record["config"])["tokenizer"]).sha256
    sizes = {f"the shape of {name}": list(weight.shape) for name, weight in shapes.items()}
    return {"the tokenizer's hash": tokenizer, **backbone, **sizes}


def _add(merged: dict[str, Tensor], path: str, shapes: dict[str, Tensor], share: float) -> None:
    """Move the running mean by `share` towards a checkpoint's weights. Equal weights stay exactly as they are."""
    for names in groups_up_to(PORTION_BYTES, shapes, lambda name: shapes[name].nbytes):
        for name, weight in read_weights(path, names).items():
            if name in merged:
                merged[name].lerp_(weight.float(), share)
            else:  # copied, because the file is mapped to memory
                merged[name] = weight.to(torch.float32, copy=True)


def _write(weights: dict[str, Tensor], record: dict[str, Any], last: Manifest, out: Path) -> None:
    state: dict[str, Any] = {"model": {f"model.{name}": weight for name, weight in weights.items()}}
    state["callbacks"] = {"RunRecord": {"record": json.dumps(record)}}
    with atomic_path(out) as partial:
        partial.mkdir()
        file = partial / f"ba{last.batch}-rank0.pt"
        torch.save({"state": state}, file)
        run = {**last.run, "name": out.name, "kept": True, "writers": 1, "merged": record["merged"]}
        manifest = replace(last, path=file.name, files={file.name: (file.stat().st_size, file_hash(file))}, run=run)
        (partial / manifest.name).write_bytes(manifest.to_bytes())
    print(f"{out / file.name}: {format_bytes(manifest.size)}", flush=True)
