"""A minimal correct loop over a run's batches, as the baseline of Biphasic's trainer.

    python benchmarks/bare_loop.py RUN.yaml BATCHES.pt OUT.json [key=value …] [--seed N]
    torchrun --nproc-per-node 2 benchmarks/bare_loop.py …

The same network from the same seed, the same batches in the same order, the same masks, optimizer, clipping and
learning rates as the YAML's run; no Composer, no Streaming, no logging, no checkpoints. The batches are in memory.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from biphasic.config.load import load_job
from biphasic.config.phases import MLMPhase
from biphasic.config.pretrain import PretrainConfig
from biphasic.initial_model import build_language_model
from biphasic.model.losses import IGNORE
from biphasic.model.segments import Segments
from biphasic.objectives.targets import Vocabulary, clm_targets, mlm_inputs_and_targets


def train(config: PretrainConfig, batches: list[dict[str, Any]], vocabulary: Vocabulary, seed: int) -> dict[str, Any]:
    """Train on the batches, one per step; durations in the YAML are batches.

    Args:
        config: whose model, phases, optimizer, schedule and microbatch are used.
        batches: global batches, as `biphasic.data.streaming.collate` makes them.
        vocabulary: of the masks.
        seed: of the initial weights and the masks.

    Returns:
        The fields of `workload.Run` except `started`, over all ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    model: Any = build_language_model(config.model, config.data.sequence_length, seed)
    is_sharded = config.parallelism.strategy == "fsdp"
    if is_sharded:
        for layer in model.backbone.layers:
            fully_shard(layer)
        fully_shard(model)
        for module in (*model.backbone.layers, model):
            module.set_force_sum_reduction_for_comms(True)  # gloo's reduce-scatter has no mean
    elif ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    parameters, settings = list(model.parameters()), config.optimizer
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    assert isinstance(config.microbatch_size, int) and settings.clip_norm is not None
    share, size = config.global_batch_size // ranks, config.microbatch_size
    began, ends, losses, tokens = time.time(), [], [], []
    for step, global_batch in enumerate(batches):
        batch = {name: value[rank * share : (rank + 1) * share] for name, value in global_batch.items()}
        optimizer.param_groups[0]["lr"] = settings.lr * _factor(config, step)
        causal, inputs, targets = _objective(config, batch, vocabulary, seed, step)
        count = (targets != IGNORE).sum()
        if ranks > 1:
            dist.all_reduce(count)
        summed = torch.zeros(())
        for first in range(0, share, size):
            rows = slice(first, first + size)
            segments = Segments.of(_segments(batch["lengths"][rows], inputs.shape[1]), inputs.device)
            # DDP reduces gradients once, with the last microbatch; FSDP2 keeps no complete ones.
            with nullcontext() if is_sharded or ranks == 1 or first + size == share else model.no_sync():
                total, _ = model(inputs[rows].flatten(), targets[rows].flatten(), segments, causal)
                # Both divide by the number of ranks.
                (total * ranks / count).backward()
            summed += total.detach()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(summed)
        losses.append(float(summed / count))
        tokens.append(sum(map(sum, global_batch["lengths"])))
        ends.append(time.time())
    return {"began": began, "ends": ends, "losses": losses, "tokens": tokens}


def _objective(
    config: PretrainConfig, batch: dict[str, Any], vocabulary: Vocabulary, seed: int, step: int
) -> tuple[bool, Tensor, Tensor]:
    """Whether attention is causal; inputs and targets."""
    tokens, segment_ids = batch["input_ids"], batch["segment_ids"]
    first, second = config.objective.phases
    assert first.until is not None and isinstance(second, MLMPhase) and isinstance(second.masking_ratio, float)
    if step < first.until.value:
        return True, tokens, clm_targets(tokens, segment_ids)
    inputs, targets = mlm_inputs_and_targets(
        tokens, segment_ids, batch["row_ids"], vocabulary, seed=seed, counter=0, masking_ratio=second.masking_ratio
    )
    return False, inputs, targets


def _segments(lengths: list[list[int]], row: int) -> list[int]:
    """Segment lengths of all rows; the padding at a row's end is a segment."""
    results = []
    for row_lengths in lengths:
        rest = row - sum(row_lengths)
        results += [*row_lengths, rest] if rest else row_lengths
    return results


def _factor(config: PretrainConfig, step: int) -> float:
    """Linear warmup, then 1, then a linear decay to 0 at the end."""
    warmup, decay, last = config.schedule.warmup.value, config.schedule.decay.value, config.max_duration.value
    return min(step / warmup, 1.0, (last - step) / decay)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("yaml", type=Path)
    parser.add_argument("batches", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seed", type=int, help="default: the YAML's")
    options = parser.parse_intermixed_args(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    config = load_job(PretrainConfig, options.yaml, options.overrides)
    from workload import MASK, SPECIAL

    vocabulary = Vocabulary(config.model.vocab_size or 0, MASK, tuple(range(len(SPECIAL))))
    batches = torch.load(options.batches)
    results = train(config, batches, vocabulary, config.seed if options.seed is None else options.seed)
    if not dist.is_initialized() or dist.get_rank() == 0:
        options.out.write_text(json.dumps(results), encoding="utf-8")
    if dist.is_initialized():
        # Without the barrier, gloo (2.7) sometimes waits for a rank that has ended.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
