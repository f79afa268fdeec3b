"""Whether the machines are fit for a run, before a GPU-hour is spent. Started like the run itself, on every node:

composer [node arguments] -m biphasic.preflight FILE.yaml [key=value ...]

Says what is wrong on which node; exit status 0 when nothing is, 2 otherwise.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from biphasic.amounts import in_bytes
from biphasic.config.errors import UserError
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.config.places import checkpoint_places, splits_of
from biphasic.config.schema import PretrainConfig
from biphasic.faults import run_together
from biphasic.storage import is_remote, short, store

_REDUCED = 1 << 25
"""Values in the all-reduce that is timed: 128 MiB of fp32 on a GPU, an eighth of it on a CPU."""
_ROUNDS = 5
_SKEW = 5.0
"""Seconds that clocks may differ by: signatures of requests to a bucket allow minutes, logs are compared by the second."""
_SLOW = 0.5
"""A node whose own all-reduce has less than this share of the median bandwidth is named."""

Facts = dict[str, Any]
"""What one rank found: host, node, and by the name of a check its value, or `faults`: what is wrong, in words."""


def main(arguments: list[str] | None = None) -> int:
    """Run all checks on all ranks; the first one reports."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if given else 2
    return run_together(lambda: _check(given))


def _check(given: list[str]) -> int:
    config = load(given[0], given[1:], int(os.environ.get("WORLD_SIZE", "1")))
    if not isinstance(config, PretrainConfig | FinetuneConfig):
        raise UserError(f"{given[0]}: expected job: pretrain or job: finetune; got {config.job}")
    found = facts(config)
    from composer.utils import dist

    everybody: list[Facts] = dist.all_gather_object(found)
    faults = faults_of(everybody)
    if dist.get_global_rank() == 0:
        print("\n".join(report(everybody, faults)), flush=True)
    dist.barrier()
    return 2 if faults else 0


def facts(config: PretrainConfig | FinetuneConfig) -> Facts:
    """What this rank sees. Disks, buckets and data, of a pretraining, are looked at by one rank of each node."""
    import torch
    from composer.utils import dist, get_device

    dist.initialize_dist(get_device(None))
    on_gpu = torch.cuda.is_available()
    dist.barrier()
    found: Facts = {"host": socket.gethostname(), "node": dist.get_node_rank(), "rank": dist.get_global_rank(),
                    "clock": time.time(), "faults": []}  # fmt: skip
    device = torch.cuda.get_device_properties(dist.get_local_rank()) if on_gpu else None
    found["device"] = f"{device.name}, {in_bytes(device.total_memory)}" if device is not None else "CPU"
    cuda = torch.version.cuda  # pyright: ignore[reportAttributeAccessIssue]
    found["versions"] = f"torch {torch.__version__}, CUDA {cuda or 'none'}"
    found["own"], found["all"] = _bandwidths(on_gpu)
    if dist.get_local_rank() == 0 and isinstance(config, PretrainConfig):
        checks: list[Callable[[PretrainConfig], str | None]] = [_bucket, _disk, _data]
        for check in checks:
            try:
                found[check.__name__.lstrip("_")] = check(config)
            except (UserError, OSError) as error:
                found["faults"].append(str(error) if isinstance(error, UserError) else short(error))
    return found


def faults_of(everybody: list[Facts]) -> list[str]:
    """What is wrong, a line each: what a node found by itself, and what differs between nodes."""
    faults = [f"node {one['node']} ({one['host']}): {fault}" for one in everybody for fault in one["faults"]]
    for what in ("device", "versions"):
        faults += list(_unlike(everybody, what))
    clocks = [one["clock"] for one in everybody]
    middle = sorted(clocks)[len(clocks) // 2]
    for one in everybody:
        if abs(one["clock"] - middle) > _SKEW:
            faults.append(
                f"node {one['node']} ({one['host']}): its clock is {one['clock'] - middle:+.0f} s off the others'"
            )
    own = {one["node"]: one["own"] for one in everybody if one["own"]}
    if len(own) > 1:
        median = sorted(own.values())[len(own) // 2]
        for node, speed in own.items():
            if speed < _SLOW * median:
                faults.append(
                    f"node {node}: its ranks reduce among themselves at {speed:.3g} GB/s, the median node at {median:.3g}"
                )
    return list(dict.fromkeys(faults))


def report(everybody: list[Facts], faults: list[str]) -> list[str]:
    """The lines that are printed."""
    lines = []
    for node in sorted({one["node"] for one in everybody}):
        ranks = [one for one in everybody if one["node"] == node]
        first = ranks[0]
        own = f", {first['own']:.3g} GB/s among them" if first["own"] else ""
        lines.append(f"node {node}: {first['host']}, {len(ranks)} x {first['device']}{own}; {first['versions']}")
        lines += [f"    {first[name]}" for name in ("bucket", "disk", "data") if first.get(name)]
    together = [one["all"] for one in everybody if one["all"]]
    if together:
        lines.append(f"all-reduce over {len(everybody)} ranks: {min(together):.3g} GB/s (slowest rank)")
    lines += [f"FAULT {fault}" for fault in faults]
    lines.append(f"{len(faults)} faults: nothing was started" if faults else "no faults")
    return lines


def _unlike(everybody: list[Facts], what: str) -> Iterator[str]:
    usual, _ = Counter(one[what] for one in everybody).most_common(1)[0]
    for one in everybody:
        if one[what] != usual:
            yield f"node {one['node']} ({one['host']}): {what} is {one[what]}, the others have {usual}"


def _bandwidths(on_gpu: bool) -> tuple[float, float]:
    """Bus bandwidth in GB/s of all-reduces within this node and over all ranks; 0 for a single rank."""
    import torch
    from composer.utils import dist

    ranks, local = dist.get_world_size(), dist.get_local_world_size()
    if ranks == 1:
        return 0.0, 0.0
    nodes = [list(range(start, start + local)) for start in range(0, ranks, local)]
    groups = [torch.distributed.new_group(node) for node in nodes]
    mine: Any = groups[dist.get_global_rank() // local]
    values = torch.ones(_REDUCED if on_gpu else _REDUCED // 8, device="cuda" if on_gpu else "cpu")

    def speed(group: Any, size: int) -> float:
        if size == 1:
            return 0.0
        times = []
        for _ in range(_ROUNDS + 1):
            torch.distributed.barrier(group=group)
            start = time.perf_counter()
            torch.distributed.all_reduce(values, group=group)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            values.fill_(1)
        # The first round sets connections up. A ring moves 2 (n-1)/n of the bytes over each link.
        return values.nbytes * 2 * (size - 1) / size / min(times[1:]) / 1e9

    return speed(mine, local), speed(None, ranks)


def _bucket(config: PretrainConfig) -> str:
    """Write, read and delete where the run saves."""
    place, _ = checkpoint_places(config)
    name, content = f"preflight-{socket.gethostname()}-{os.getpid()}", os.urandom(1 << 16)
    try:
        there = store(place)
        start = time.perf_counter()
        there.write(name, content)
        same = there.read(name) == content
        there.remove([name])
        gone = there.stat(name) is None
    except OSError as error:
        raise UserError(f"checkpoint.folder {place}: can't be written, read and deleted ({short(error)})") from error
    if not same or not gone:
        what = "reads back other bytes than were written" if not same else "does not delete"
        raise UserError(f"checkpoint.folder {place}: {what}")
    if not is_remote(place):
        Path(place).rmdir() if not any(Path(place).iterdir()) else None
    return f"{place}: written, read and deleted in {time.perf_counter() - start:.2g} s"


def _disk(config: PretrainConfig) -> str:
    """Room for the cache of shards and the newest checkpoints."""
    from composer.utils import dist

    from biphasic.config.plan import plan

    needs: dict[int, tuple[Path, int]] = {}

    def add(folder: Path, size: int) -> None:
        while not folder.exists():
            folder = folder.parent
        device = folder.stat().st_dev
        needs[device] = folder, needs.get(device, (folder, 0))[1] + size

    if config.data.cache_limit is not None:
        from streaming.base.util import bytes_to_int

        for stream in splits_of(config.data).values():
            if stream.remote is not None:
                add(Path(stream.local), bytes_to_int(config.data.cache_limit))
    found = plan(config, dist.get_world_size())
    if found.parameters is not None:
        # Weights and two moments in fp32; the newest one, and the one that is being written.
        add(Path(config.output), 2 * 12 * found.parameters["total"])
    said = []
    for folder, size in needs.values():
        free = shutil.disk_usage(folder).free
        if free < size:
            raise UserError(
                f"{folder}: {in_bytes(free)} free, but the data's cache and two checkpoints need {in_bytes(size)}"
            )
        said.append(f"{folder}: {in_bytes(free)} free for {in_bytes(size)}")
    return "; ".join(said)


def _data(config: PretrainConfig) -> str:
    """The tokenizer is the data's, every index can be read, and so can the first shard, which is whole."""
    from biphasic.data.shards import require_first_shard
    from biphasic.data.tokenizer import load_tokenizer
    from biphasic.training.pretrain import conversion_record

    tokenizer = load_tokenizer(config.tokenizer)
    conversion_record(config, tokenizer)
    splits = splits_of(config.data)
    for stream in splits.values():
        require_first_shard(stream)
    return f"{len(splits)} splits readable; tokenizer {tokenizer.sha256[:12]}, {tokenizer.vocab_size:,} tokens"


if __name__ == "__main__":
    sys.exit(main())
