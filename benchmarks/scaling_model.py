"""Predicts the time of a training step on 8 to 512 GPUs, for DDP, FSDP2 and HSDP.

    python benchmarks/scaling_model.py --summary                    # efficiency by GPU count, and what costs most then
    python benchmarks/scaling_model.py --size 610m --gpus 64 128    # seconds of each part of a step

A model, not a measurement: compute time from FLOPs and one GPU's MFU, communication from bytes, bandwidth and hops. Units:
seconds, bytes, bytes per second, FLOPs per second, tokens; shares are between 0 and 1.

Why each strategy stops: every GPU of DDP updates all parameters; a gather of FSDP2 over n GPUs takes n - 1 hops, which stay
hidden until a layer computes faster; HSDP gathers embedding and head before everything. Left out: stragglers, waiting for
data, checkpoints, casts, and what NCCL takes from the compute; overlap is perfect. So it is 3 to 9 points above what is
published for FSDP (torchtitan, llm-foundry, arXiv 2411.13055: tests/benchmarks/test_scaling_model.py). Where FSDP2 drops
depends on the latency of a hop, which is NCCL's own estimate. nccl-tests on a cluster, and step times of FSDP2 and HSDP on
192 and 288 GPUs, would refute it.
"""

import argparse
import json
import math
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path

from biphasic.model.architecture import PRESETS, Architecture

RESULTS = Path(__file__).parent / "results"
STRATEGIES = ("ddp", "fsdp2", "hsdp")
BUCKET = 25 * 2**20  # bytes of a gradient bucket of PyTorch's DDP
OPTIMIZER_BYTES = 40  # per parameter: AdamW reads 16 and writes 12, clipping reads 8 and writes 4
USABLE = 0.8  # usable share of a GPU's memory
NOTICED = 0.03  # a cause below this share of a step is not named


@dataclass(frozen=True)
class Network:
    """Between machines: bytes per second of a GPU's share of the network, and seconds per hop."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """A GPU (H100 SXM) and its machine. Bandwidths are those that collectives and copies reach, not the data sheet's."""

    network: Network
    per_node: int = 8
    peak: float = 989e12  # dense bf16, H200 as well
    memory: float = 80e9
    memory_bandwidth: float = 2.9e12  # of 3.35e12 on paper
    nvlink: float = 360e9  # a GPU, one direction; 450e9 on paper
    nvlink_latency: float = 3.4e-6  # NCCL's own estimate of a ring's hop


# 80% of 400 Gb/s per GPU, and of 100 Gb/s that 8 GPUs share. 14 µs is NCCL's own estimate of a hop; 30 µs is a guess.
NETWORKS = (
    Network("InfiniBand, 400 Gb/s a GPU", 0.8 * 50e9, 14e-6),
    Network("Ethernet, 100 Gb/s a machine", 0.8 * 12.5e9 / 8, 30e-6),
)


@dataclass(frozen=True)
class Work:
    """A global batch and its computation on a GPU."""

    rows: int = 1152  # global_batch_size; yamls/base/paper.yaml
    mfu: float = 0.5  # model FLOPs utilization of one GPU on large microbatches
    row_tokens: int = 2048
    segment: float = 1357.0  # tokens that a token may attend to, on average; the paper's: lengths of 12 to 2,036
    causal: bool = False  # CLM; otherwise MLM
    masked: float = 0.4  # share of MLM's tokens that get logits; CLM's all do
    overhead_tokens: int = 512  # a microbatch costs as if it had this many more (launches, small matrices): a guess
    reshard: bool = True  # FSDP2 gathers layers again in the backward pass
    microbatch: int | None = None  # maximum rows in one; default: as many as fit the memory


@dataclass(frozen=True)
class Step:
    """Seconds of a step. `root` is the part of `exposed` for embedding and head; `ideal` counts FLOPs only."""

    compute: float
    exposed: float
    root: float
    optimizer: float
    ideal: float
    microbatches: int

    @property
    def seconds(self) -> float:
        """The complete step."""
        return self.compute + self.exposed + self.optimizer

    @property
    def efficiency(self) -> float:
        """Throughput of a GPU as a share (0 to 1) of the throughput at its MFU."""
        return self.ideal / self.seconds


def ring(size: float, gpus: int, machine: Machine, pieces: int = 0) -> float:
    """Seconds of an all-gather or reduce-scatter of `size` bytes (not of a shard) over `gpus`.

    Each byte enters each machine once, over all of its links. With `pieces`, the seconds of that many all-reduces of
    `size` bytes in all: twice the bytes, and for each the hops of a tree, up and down.
    """
    nodes, links = max(1, gpus // machine.per_node), machine.per_node * machine.network.bandwidth
    moving = max((gpus - 1) / gpus * size / machine.nvlink, (nodes - 1) / nodes * size / links)
    if not pieces:
        return moving + (gpus - nodes) * machine.nvlink_latency + (nodes - 1) * machine.network.latency
    tree = (min(gpus, machine.per_node) - 1) * machine.nvlink_latency + math.log2(nodes) * machine.network.latency
    return 2 * (moving + pieces * tree)


def activation_bytes(size: Architecture, tokens: int) -> int:
    """Bytes that `tokens` store in bf16 for the backward pass without activation checkpointing."""
    # Inputs and outputs of the two norms, queries, keys, values, attention's output, gate, up, activation, product.
    per_layer = 5 * size.hidden + size.head_dim * (2 * size.heads + 2 * size.kv_heads) + 4 * size.ffn
    return 2 * tokens * size.layers * per_layer


def microbatch_rows(size: Architecture, rows: int, shards: int, machine: Machine, work: Work) -> int:
    """Largest divisor of a GPU's `rows` that fits the memory; 0 if one row does not fit."""
    buckets = size.bucket_bytes if shards == 1 else 0
    room = USABLE * machine.memory - size.state_bytes(shards) - buckets
    most = min(work.microbatch or rows, int(room // activation_bytes(size, work.row_tokens)))
    return max((n for n in range(1, rows + 1) if rows % n == 0 and n <= most), default=0)


def step(size: Architecture, strategy: str, gpus: int, machine: Machine, work: Work) -> Step | None:
    """The step on `gpus` GPUs; None if they don't divide the rows, or a row doesn't fit a GPU's memory."""
    rows, shards = work.rows // gpus, {"ddp": 1, "fsdp2": gpus, "hsdp": min(gpus, machine.per_node)}[strategy]
    micro = microbatch_rows(size, rows, shards, machine, work)
    if not micro or work.rows % gpus or (gpus > machine.per_node and gpus % machine.per_node):
        return None
    count, speed, predicted = rows // micro, machine.peak * work.mfu, 1.0 if work.causal else work.masked
    flops = size.flops([work.segment], work.causal, predicted * work.segment) / work.segment
    microbatch_seconds = (micro * work.row_tokens + work.overhead_tokens) / speed  # for a FLOP a token
    head = 6 * size.vocab_size * size.hidden * predicted
    forward, head_backward = microbatch_seconds * (flops - head) / size.layers / 3, microbatch_seconds * head * 2 / 3
    if strategy == "ddp":
        exposed, root = _ddp(size, gpus, machine, 2 * forward)
    else:
        exposed, root = _sharded(size, gpus // shards, shards, machine, work.reshard, forward, head_backward)
        exposed, root = count * exposed, count * root  # Composer communicates in every microbatch
    optimizer = OPTIMIZER_BYTES * size.parameters / shards / machine.memory_bandwidth
    ideal = rows * work.row_tokens * flops / speed
    return Step(count * microbatch_seconds * flops, exposed, root, optimizer, ideal, count)


def _ddp(size: Architecture, gpus: int, machine: Machine, backward: float) -> tuple[float, float]:
    """Communication not hidden by the last backward pass, and the embedding's part of it: fp32, once per step."""
    layer = ring(4 * size.layer_parameters, gpus, machine, pieces=math.ceil(4 * size.layer_parameters / BUCKET))
    head = ring(4 * size.head_parameters, gpus, machine, pieces=1) if size.head_parameters else 0.0
    embedding, hiding = ring(4 * size.embedding_parameters, gpus, machine, pieces=1), size.layers - 1
    return hiding * max(0.0, layer + head / hiding - backward) + layer + embedding, embedding


def _sharded(
    size: Architecture, replicas: int, shards: int, machine: Machine, reshard: bool, forward: float, head: float
) -> tuple[float, float]:
    """Communication not hidden by a microbatch, and the part of the root (embedding, head), which is first and last.

    Layers are gathered in bf16 while the previous one computes, and reduced in fp32 while the next one computes.
    """
    root, across = size.embedding_parameters + size.head_parameters + size.hidden, replace(machine, per_node=1)
    gather, gather_root = (ring(2 * n, shards, machine) for n in (size.layer_parameters, root))
    reduce, reduce_root = (ring(4 * n, shards, machine) for n in (size.layer_parameters, root))
    sync, sync_root = (ring(4 * n / shards, replicas, across, pieces=1) for n in (size.layer_parameters, root))
    second_gather = gather if reshard else 0.0
    backward = max(second_gather + reduce, sync)  # NVLink and network at the same time
    layers = (size.layers - 1) * (max(0.0, gather - forward) + max(0.0, backward - 2 * forward))
    last_layer, root_seconds = (
        gather + max(0.0, second_gather - head) + reduce + sync,
        gather_root + reduce_root + sync_root,
    )
    return layers + last_layer + root_seconds, root_seconds


def limit(size: Architecture, strategy: str, gpus: int, machine: Machine, work: Work) -> str:
    """The largest cost: the cause without which the step would be shortest."""
    base, network = step(size, strategy, gpus, machine, work), machine.network
    assert base is not None
    without = {
        "network bandwidth": (replace(machine, network=replace(network, bandwidth=math.inf)), work),
        "hops": (replace(machine, network=replace(network, latency=0.0), nvlink_latency=0.0), work),
        "NVLink": (replace(machine, nvlink=math.inf), work),
        "optimizer": (replace(machine, memory_bandwidth=math.inf), work),
        "small microbatches": (machine, replace(work, overhead_tokens=0)),
    }
    others = {cause: step(size, strategy, gpus, *changed) for cause, changed in without.items()}
    saved = {cause: base.seconds - other.seconds for cause, other in others.items() if other}
    cause = max(saved, key=saved.__getitem__)
    if saved[cause] < NOTICED * base.seconds:
        return "compute"
    part = " (embedding, head)" if base.root > base.exposed / 2 else " (layers)"
    return cause + (part if cause in ("network bandwidth", "hops", "NVLink") else "")


def divisors(rows: int, per_node: int, most: int = 512) -> list[int]:
    """GPU counts up to `most` that divide the batch, in complete machines."""
    return [gpus for gpus in range(per_node, most + 1, per_node) if rows % gpus == 0]


def measured_mfu(path: Path, size: str, phase: str) -> float | None:
    """`mfu.SIZE.PHASE` (0 to 1) from the file of `make bench-gpu`; None if it is missing."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return results.get("mfu", {}).get(size, {}).get(phase)


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def summary(works: dict[str, Work], machine: Machine, counts: list[int], floor: float) -> str:
    """Efficiency of each size and strategy at each count, the last count at or above `floor`, and what limits it."""
    rows: list[list[str]] = []
    for name, strategy in product(works, STRATEGIES):
        size, work = PRESETS[name], works[name]
        steps = {n: step(size, strategy, n, machine, work) for n in divisors(work.rows, machine.per_node)}
        efficiencies = {n: step_.efficiency for n, step_ in steps.items() if step_}
        last = max((n for n in efficiencies if efficiencies[n] >= floor), default=0)
        cause = limit(size, strategy, next((n for n in efficiencies if n > last), last), machine, work)
        shares = (f"{efficiencies[n]:.0%}" if n in efficiencies else "-" for n in counts)
        rows.append([name, strategy, *shares, str(last), cause])
    return _markdown(["size", "strategy", *map(str, counts), f"last ≥ {floor:.0%}", "then"], rows)


def table(name: str, work: Work, machine: Machine, counts: list[int]) -> str:
    rows: list[list[str]] = []
    for gpus, strategy in product(counts, STRATEGIES):
        step_, row = step(PRESETS[name], strategy, gpus, machine, work), [str(gpus), f"{work.rows / gpus:g}", strategy]
        rows.append([*row, *["-"] * 7, "not a divisor, or no room"])
        if step_:
            times = (f"{x:.3f}" for x in (step_.compute, step_.exposed, step_.optimizer, step_.seconds))
            row += [str(step_.microbatches), *times, f"{work.rows * work.row_tokens / step_.seconds / 1e6:.2f} M"]
            rows[-1] = [*row, f"{step_.efficiency:.0%}", limit(PRESETS[name], strategy, gpus, machine, work)]
    seconds = ("compute s", "exposed s", "optimizer s", "step s")
    return _markdown(["GPUs", "rows/GPU", "strategy", "parts", *seconds, "tokens/s", "efficiency", "limit"], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", nargs="*", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--gpus", nargs="*", type=int, default=[8, 16, 32, 64, 128, 192, 256, 288, 384, 512])
    parser.add_argument("--network", nargs=2, type=float, metavar=("BANDWIDTH", "HOP"), help="instead of the presets")
    parser.add_argument("--floor", type=float, default=0.8, help="efficiency at which scaling ends")
    parser.add_argument("--summary", action="store_true", help="only the summaries")
    for field in (*fields(Machine)[1:], *fields(Work)):
        parser.add_argument("--" + field.name.replace("_", "-"), type=json.loads, default=field.default)
    options = vars(parser.parse_args(arguments))
    machine = {field.name: options[field.name] for field in fields(Machine)[1:]}
    works: dict[str, Work] = {}
    # Those of gpu.py: gpu_run.py writes gpu-run.json.
    reports = [path for path in RESULTS.glob("gpu-*.json") if path.name != "gpu-run.json"]
    measured = max(reports, default=RESULTS / "none", key=lambda path: path.stat().st_mtime)
    for name in options["size"]:
        work = Work(**{field.name: options[field.name] for field in fields(Work)})
        mfu = measured_mfu(measured, name, "clm" if work.causal else "mlm")
        works[name] = replace(work, mfu=mfu or work.mfu)
        origin = f"measured, {measured.name}" if mfu else "assumed, not measured"
        print(f"{name}: MFU {works[name].mfu:.2f} ({origin}), {work.rows} rows of {work.row_tokens} tokens")
    print("GPUs that divide the rows, in complete machines:", *divisors(options["rows"], options["per_node"]))
    for network in (Network("your network", *options["network"]),) if options["network"] else NETWORKS:
        machine_ = Machine(network, **machine)
        shown = summary(works, machine_, options["gpus"], options["floor"])
        print(f"\n## {network.name}: assumed, not measured\n\n{shown}")
        for name in works if not options["summary"] else ():
            print(f"\n### {name}, {network.name}\n\n{table(name, works[name], machine_, options['gpus'])}")


if __name__ == "__main__":
    main()
