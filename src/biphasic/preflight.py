"""Check whether machines can run a job. Every rank runs these checks of `biphasic preflight`."""

import ipaddress
import json
import math
import os
import shutil
import socket
import statistics
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist

from biphasic.amounts import format_bytes
from biphasic.checkpointing.rank_group import RankGroup, require_node_folders
from biphasic.checkpointing.start_rules import ResumeGuard
from biphasic.config.conversion_checks import conversion_record, stored_row_problems
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.phase_inputs import sources
from biphasic.config.plan import plan
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.shards import require_shards
from biphasic.data.shared_memory import require_shared_memory
from biphasic.data.streams import INDEX, RowStream, opened_streams, read_conversions
from biphasic.data.tokenizer import load_tokenizer
from biphasic.devices import rank_device, require_compiler, require_precision, require_usable_gpus
from biphasic.errors import Unavailable, UserError, first_line
from biphasic.ranks import COLLECTIVE_SECONDS, FAILED, REFUSED, is_first_rank
from biphasic.storage import is_remote, open_store, user_error
from biphasic.storage.promises import broken_promises

_ALL_REDUCE_VALUES = 1 << 25
"""Number of fp32 values in the timed all-reduce on GPUs, 128 MiB. CPUs use an eighth of this."""
_ALL_REDUCE_ROUNDS = 5
_MIN_BANDWIDTH_SHARE = 0.5
"""A node is reported if its all-reduce has less than this share of the median node's bandwidth."""

RankFacts = dict[str, Any]
"""Results of one rank: its host and node, each check's result by name, `faults` (a list of messages), and `unavailable`
(how many of these are about a bucket that can't be reached at the moment)."""


def check(config: PretrainConfig | FinetuneConfig) -> int:
    """Run all checks on all ranks, print the report on rank 0, and return the exit status.

    The status is 0 without faults, `FAILED` if all faults may be temporary, and `REFUSED` otherwise. Raises a UserError
    if the other nodes can't reach this one by the address of its name.
    """
    require_reachable_name()  # before gloo, whose message doesn't name the cause
    all_facts: list[RankFacts] = dist.all_gather_object(rank_facts(config))
    faults = find_faults(all_facts)
    if is_first_rank():
        print("\n".join(report(all_facts, faults)), flush=True)
    dist.barrier()
    unavailable = sum(facts["unavailable"] for facts in all_facts)
    return 0 if not faults else FAILED if unavailable >= len(faults) else REFUSED


def require_reachable_name() -> None:
    """Raise a UserError if there are several nodes and this machine's name resolves to a loopback address, or not at all.

    Gloo sends the other nodes the address of the host's name, unless `GLOO_SOCKET_IFNAME` is set.
    """
    one_node = os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1")
    if one_node or os.environ.get("GLOO_SOCKET_IFNAME") or _is_loopback(os.environ.get("MASTER_ADDR", "")):
        return
    host = socket.gethostname()
    if _is_loopback(host):
        raise UserError(
            f"{host}: this machine's name resolves to a loopback address, so gloo would connect to itself instead of the "
            "other nodes: set GLOO_SOCKET_IFNAME to the network interface that they reach, or correct /etc/hosts"
        )


def _is_loopback(host: str) -> bool:
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError:
        return bool(host)
    return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


def rank_facts(config: PretrainConfig | FinetuneConfig) -> RankFacts:
    """Collect this rank's results. For pretraining, local rank 0 also checks the bucket, disks and data.

    Folders that nodes should share, or should not, are a fault of rank 0.
    """
    require_usable_gpus()  # before ranks of GPUs wait for one of CPUs
    dist.initialize_dist(rank_device(), COLLECTIVE_SECONDS)
    on_gpu = torch.cuda.is_available()
    dist.barrier()
    facts: RankFacts = {"host": socket.gethostname(), "node": dist.get_node_rank(), "faults": [], "unavailable": 0}
    device = torch.cuda.get_device_properties(dist.get_local_rank()) if on_gpu else None
    facts["device"] = f"{device.name}, {format_bytes(device.total_memory)}" if device is not None else "CPU"
    cuda = torch.version.cuda  # pyright: ignore[reportAttributeAccessIssue]
    facts["versions"] = f"torch {torch.__version__}, CUDA {cuda or 'none'}"
    facts["node_bandwidth"], facts["bandwidth"] = _bandwidths(on_gpu)
    if dist.get_local_rank() == 0:
        try:
            require_precision(config.precision)
            if on_gpu and isinstance(config, PretrainConfig) and config.compute.compile is not False:
                require_compiler()
        except UserError as error:
            facts["faults"].append(str(error))
    if dist.get_local_rank() == 0 and isinstance(config, PretrainConfig):
        for name, check_node in (("bucket", _bucket), ("disk", _disk), ("memory", _memory), ("data", _data)):
            try:
                facts[name] = check_node(config)
            except (UserError, OSError) as error:
                facts["faults"].append(str(error) if isinstance(error, UserError) else first_line(error))
                facts["unavailable"] += isinstance(error, Unavailable)
    if isinstance(config, PretrainConfig):
        try:
            require_node_folders(config.checkpoint_destination, config.splits, RankGroup())
        except UserError as error:  # the same one on all ranks
            facts["faults"] += [str(error)] if is_first_rank() else []
    return facts


def find_faults(all_facts: list[RankFacts]) -> list[str]:
    """Return a line for each fault of a rank, and for each difference between nodes."""
    usual = {name: Counter(facts[name] for facts in all_facts).most_common(1)[0][0] for name in ("device", "versions")}
    bandwidths = {facts["node"]: facts["node_bandwidth"] for facts in all_facts}  # each of its ranks measures it
    median = statistics.median_high(bandwidths.values())
    faults = []
    for facts in all_facts:
        messages = list(facts["faults"])
        messages += [f"{name} is {facts[name]}, the others have {own}" for name, own in usual.items() if facts[name] != own]
        if (own := bandwidths[facts["node"]]) < _MIN_BANDWIDTH_SHARE * median:
            messages.append(f"its ranks all-reduce among themselves at {own:.3g} GB/s, the median node at {median:.3g}")
        faults += [f"node {facts['node']} ({facts['host']}): {message}" for message in messages]
    return list(dict.fromkeys(faults))


def report(all_facts: list[RankFacts], faults: list[str]) -> list[str]:
    """Return the lines of the printed report."""
    lines = []
    ranks = Counter(facts["node"] for facts in all_facts)
    firsts = {facts["node"]: facts for facts in reversed(all_facts)}
    for node, first in sorted(firsts.items()):
        bandwidth = f", {first['node_bandwidth']:.3g} GB/s among them" if first["node_bandwidth"] else ""
        lines.append(f"node {node}: {first['host']}, {ranks[node]} x {first['device']}{bandwidth}; {first['versions']}")
        lines += [f"    {first[name]}" for name in ("bucket", "disk", "memory", "data") if first.get(name)]
    if slowest := min(facts["bandwidth"] for facts in all_facts):
        lines.append(f"all-reduce over {len(all_facts)} ranks: {slowest:.3g} GB/s (slowest rank)")
    lines += [f"FAULT {fault}" for fault in faults]
    lines.append(f"{len(faults)} fault{'s' * (len(faults) > 1)}: nothing was started" if faults else "no faults")
    return lines


def _bandwidths(on_gpu: bool) -> tuple[float, float]:
    """Return the bus bandwidth in GB/s of all-reduces within this node and over all ranks; 0 for a single rank."""
    ranks, local = dist.get_world_size(), dist.get_local_world_size()
    if ranks == 1:
        return 0.0, 0.0
    groups = [torch.distributed.new_group(range(start, start + local)) for start in range(0, ranks, local)]
    size = _ALL_REDUCE_VALUES if on_gpu else _ALL_REDUCE_VALUES // 8
    values = torch.ones(size, device="cuda" if on_gpu else "cpu")

    def bandwidth(group: Any, group_size: int) -> float:
        times = []
        for _ in range(_ALL_REDUCE_ROUNDS + 1):
            torch.distributed.barrier(group=group)
            start = time.perf_counter()
            torch.distributed.all_reduce(values, group=group)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            values.fill_(1)
        # The first round sets up connections. A ring all-reduce moves 2 (n-1)/n of the bytes over each link.
        return values.nbytes * 2 * (group_size - 1) / group_size / min(times[1:]) / 1e9

    return bandwidth(groups[dist.get_global_rank() // local], local), bandwidth(None, ranks)


def _bucket(config: PretrainConfig) -> str:
    """Check that files can be written, read and deleted where the run saves checkpoints, and what that store promises."""
    destination = config.checkpoint_destination
    start = time.perf_counter()
    try:
        broken = broken_promises(destination, f"preflight-{socket.gethostname()}-{os.getpid()}")
    except OSError as error:
        message = f"can't be written, read and deleted ({first_line(error)})"
        raise user_error(f"checkpoint.folder {destination}: {message}", error) from error
    if broken:
        raise UserError("\n".join(f"checkpoint.folder {destination}: {line}" for line in broken))
    if not is_remote(destination):
        with suppress(OSError):  # not empty, or removed by another node that shares the folder
            Path(destination).rmdir()
    return f"{destination}: written, read and deleted in {time.perf_counter() - start:.2g} s"


def _disk(config: PretrainConfig) -> str:
    """Check the free disk space for the shard cache and the checkpoints."""
    needs: dict[int, tuple[Path, int]] = {}
    for folder, size in disk_needs(config):
        while not folder.exists():
            folder = folder.parent
        device = folder.stat().st_dev
        needs[device] = folder, needs.get(device, (folder, 0))[1] + size
    lines = []
    for folder, size in needs.values():
        free = shutil.disk_usage(folder).free
        if free < size:
            message = f"the data's cache and the checkpoints need {format_bytes(size)}"
            raise UserError(f"{folder}: {format_bytes(free)} free, but {message}")
        lines.append(f"{folder}: {format_bytes(free)} free for {format_bytes(size)}")
    return "; ".join(lines)


def disk_needs(config: PretrainConfig) -> list[tuple[Path, int]]:
    """Return the bytes that a run will still write on a node, by folder: shards from a bucket, and checkpoints.

    A cache grows to the dataset's unpacked size or to `data.cache_limit`. A local folder has all checkpoints that the
    run keeps (`checkpoint.keep`, `checkpoint.keep_at`, the switches and the decay's start). If they are saved to a
    bucket, only the newest and the one being written are on the disk. Files that exist already are subtracted.
    """
    needs = []
    limit = config.data.cache_limit
    opened = opened_streams(config.splits)[0]
    datasets = [{key: opened[key] for key in each.streams} for each in sources(config.inputs)]
    datasets.append({key: stream for key, stream in opened.items() if key == "data.validation"})
    for dataset in datasets:
        sizes = {Path(s.local): _cache_bytes(s, limit) for s in dataset.values() if s.remote is not None}
        # The limit is that of a mix's streams together.
        share = 1.0 if limit is None else min(1.0, limit / max(sum(sizes.values()), 1))
        needs += [(folder, round(size * share)) for folder, size in sizes.items()]
    remote = is_remote(config.checkpoint_destination)
    checkpoints = plan(config, 1, start=None if remote else ResumeGuard(config).plan_start()).details["checkpoints"]
    if checkpoints["bytes_each"] is not None:
        most = 2 if remote else checkpoints["most"] or 2
        needs.append((config.local_checkpoints, most * checkpoints["bytes_each"]))
    stored = {folder: sum(file.bytes for file in open_store(str(folder)).list().values()) for folder, _ in needs}
    return [(folder, max(0, size - stored[folder])) for folder, size in needs]


def _cache_bytes(stream: RowStream, limit: int | None) -> int:
    """Return the size to which a stream's cache grows; if its index can't be read, which `_data` reports, the limit."""
    size = sum(int(shard["raw_data"]["bytes"]) for shard in _shards(stream)) or limit or 0
    return size if limit is None else min(size, limit)


def _shards(stream: RowStream) -> list[dict[str, Any]]:
    """Return the entries of a stream's index; none if it can't be read, which `_data` reports."""
    try:
        return json.loads(open_store(stream.remote or stream.local).read(INDEX))["shards"]
    except (UserError, OSError, ValueError, LookupError, TypeError):
        return []


def _memory(config: PretrainConfig) -> str:
    """Check the room in the machine's shared memory for the data that needs most, beside what other jobs have there."""
    ranks, lines = dist.get_local_world_size(), dict[int, str]()
    for each in sources(config.inputs):
        rows = each.data.epoch_rows or sum(int(s["samples"]) for stream in each.streams.values() for s in _shards(stream))
        batch_rows, loaders = math.ceil(each.rows / dist.get_world_size()), each.data.num_workers * ranks
        lines[rows] = require_shared_memory(rows, each.data.sequence_length, batch_rows, loaders)
    return lines[max(lines)]


def _data(config: PretrainConfig) -> str:
    """Check that the data was converted with this tokenizer, and that each split's index and first shard can be read."""
    tokenizer = load_tokenizer(config.tokenizer)
    conversion_record(config, tokenizer, read_conversions(config.streams))
    for stream in config.splits.values():
        require_shards(stream, only_first=True)
    if problems := stored_row_problems(config.splits, config.row_lengths, tokenizer, first_shards=True):
        raise UserError("\n".join(problems))
    splits = len(config.splits)
    line = f"{splits} splits readable; tokenizer {tokenizer.sha256[:12]}, {tokenizer.vocab_size:,} tokens"
    return "; ".join([line, *opened_streams(config.splits)[1]])
