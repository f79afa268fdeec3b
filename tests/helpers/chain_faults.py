"""Faults of one start of a run, for chains of them: each function starts the run, and returns what happened to it."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from biphasic.checkpointing.manifest import list_checkpoints
from biphasic.checkpointing.run_lock import KILLED, LOCK_FILE, read_attempts
from biphasic.storage import open_store
from helpers import tiny, warm
from helpers.buckets import client
from helpers.chain import DECAY, INTERVAL, LAST, OWN_TEMPORARY, SHORTER, Chain, parent_of, processes, wait_for
from helpers.ports import free_port
from helpers.signal_points import IN_SAVE, IN_TRAINING

OWN_SHARED_MEMORY = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, MS_REC_PRIVATE = 0x20000, 0x44000
assert libc.unshare(CLONE_NEWNS) == 0
assert libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) == 0
assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None) == 0
"""
"""Shared memory of a node's own, as on another machine."""

Fault = Callable[[Chain], str]
LEFT_OUT = ": left out, "
"""In the result of a fault that could not be made."""


def signal_at(point: str, number: int = signal.SIGKILL) -> str:
    """Return the code with which a rank sends a signal at a point of `signal_points`."""
    return f"from helpers import signal_points; signal_points.patch({point!r}, {int(number)})"


def begun_attempts(chain: Chain) -> int:
    """Return the number of attempts, also one that ended between taking the lock and writing its record."""
    store = open_store(chain.place)
    names = {attempt["attempt"] for attempt in read_attempts(store)}
    with suppress(FileNotFoundError):
        names.add(json.loads(store.read(LOCK_FILE))["attempt"])
    return len(names)


def kill_all(chain: Chain) -> str:
    """SIGKILL to all processes, at a point of a batch or of a save."""
    kinds = IN_TRAINING + (IN_SAVE if chain.strategy == "fsdp" else ("upload", "manifest", "delete"))
    point = f"{chain.draw.choice(kinds)}:{chain.next_batch(LAST - INTERVAL)}"
    chain.end(chain.start(code=signal_at(point)), -9, KILLED)
    return f"SIGKILL to all at {point}"


def kill_rank(chain: Chain) -> str:
    """SIGKILL to one rank."""
    rank, batch = chain.draw.randrange(2), chain.next_batch(LAST - INTERVAL)
    job = chain.start()
    wait_for(chain, batch, job)
    os.kill(job.ranks[rank], signal.SIGKILL)
    # Rank 0 holds the lock.
    chain.end(job, -9, KILLED if rank == 0 else "")
    chain.exact_repeats = False
    return f"SIGKILL to rank {rank} after batch {batch}"


def kill_loader(chain: Chain) -> str:
    """SIGKILL to a rank's loader process, of the training or the validation data."""
    batch = chain.next_batch(LAST - INTERVAL)
    job = chain.start()
    wait_for(chain, batch, job)
    rank = chain.draw.randrange(2)
    children = [pid for pid in processes() if parent_of(pid) == job.ranks[rank]]
    # Python's tracker of shared memory is a child too.
    loaders = [pid for pid in children if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(chain.draw.choice(loaders), signal.SIGKILL)
    chain.end(job, 1, "")
    chain.exact_repeats = False
    return f"SIGKILL to a loader of rank {rank} after batch {batch}"


def kill_node(chain: Chain) -> str:
    """SIGKILL to one of two nodes."""
    if os.geteuid():
        return f"a whole node{LEFT_OUT}only root can give it its own shared memory; {kill_all(chain)}"
    batch, port = chain.next_batch(LAST - INTERVAL), free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    jobs = []
    for node in range(2):
        copies = []
        for name in ("one", "two"):
            copy = chain.path.parent / f"node{node}" / name
            if not copy.exists():
                shutil.copytree(chain.path.parent / "data" / name, copy)
            copies.append(f"data.mix.{name}.local={copy}")
        place = {"RANK": str(node), "NODE_RANK": str(node), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        jobs.append(
            warm.start([str(chain.path), *copies], 1, environment, code=OWN_TEMPORARY, setup=OWN_SHARED_MEMORY, place=place)
        )
    chain.groups += [job.pid for job in jobs]
    wait_for(chain, batch, jobs[0])
    lost = chain.draw.randrange(2)
    jobs[lost].kill()
    run = jobs[1 - lost].wait(90)
    chain.outputs.append(run.stdout + run.stderr)
    assert run.returncode in (0, 1) and "another rank, or its machine, ended" in run.stderr, (
        run.returncode,
        run.stderr[-4000:],
    )
    chain.reasons.append(KILLED if lost == 0 else "")
    chain.exact_repeats = False
    return f"SIGKILL to node {lost} of 2 after batch {batch}"


def terminate(chain: Chain) -> str:
    """SIGTERM, SIGUSR1 or SIGHUP to one or both ranks, at a point of a batch, a save or a validation."""
    number = chain.draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
    point = f"{chain.draw.choice([*IN_TRAINING, 'upload', 'validation', 'delete'])}:{chain.next_batch(LAST - 8)}"
    only_first = point.startswith("delete") or (point.startswith("upload") and chain.strategy == "ddp")
    ranks = ("0",) if only_first else chain.draw.choice([("0",), ("1",), ("0", "1")])
    code = f"import os\nif os.environ['RANK'] in {ranks}:\n    {signal_at(point, number)}"
    before = len(chain.entries())
    run = chain.end(chain.start(code=code), 75, f"{number.name}: saved")
    assert f"{number.name}: saved at batch {chain.trained()}" in run.stdout, run.stdout[-2000:]
    assert len(chain.entries()) > before
    return f"{number.name} at {point} to rank {' and '.join(ranks)}"


def interrupt(chain: Chain) -> str:
    """Ctrl-C, which reaches both ranks."""
    point = f"{chain.draw.choice(IN_TRAINING)}:{chain.next_batch(LAST - INTERVAL)}"
    run = chain.end(chain.start(code=signal_at(point, signal.SIGINT)), 130, "interrupted with Ctrl-C (SIGINT)")
    assert "interrupted: what is finished is kept" in run.stderr, run.stderr[-2000:]
    return f"SIGINT at {point}"


def signal_while_it_starts(chain: Chain) -> str:
    """A signal to all processes, also loaders, up to some seconds after the start: none may hang, and nothing is lost.

    The ranks don't get to the same place, so what the start says depends on the moment.
    """
    number, seconds = chain.draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]), chain.draw.uniform(0, 4)
    attempts = begun_attempts(chain)
    job = chain.start()
    time.sleep(seconds)
    with suppress(ProcessLookupError):  # it was signalled where this ends it, or is done
        os.killpg(job.pid, number)
    run = job.wait(90)
    chain.outputs.append(run.stdout + run.stderr)
    assert run.returncode in (75, 1, -signal.SIGKILL, -number), (run.returncode, run.stdout[-2000:], run.stderr[-4000:])
    chain.reasons += [""] * (begun_attempts(chain) - attempts)
    return f"{number.name} to all {seconds:.2f} s after the start: status {run.returncode}"


def changed_shard(chain: Chain) -> str:
    """Each unpacked shard of the datasets gets a flipped bit; the start names the first one it reads."""
    shards = {path: path.read_bytes() for path in (chain.path.parent / "data").rglob("*.mds")}
    if not shards:
        return f"a changed shard{LEFT_OUT}none is unpacked"
    changed = dict[Path, bytes]()
    for path, content in sorted(shards.items()):
        at = chain.draw.randrange(len(content))
        changed[path] = content[:at] + bytes([content[at] ^ 1 << chain.draw.randrange(8)]) + content[at + 1 :]
        path.write_bytes(changed[path])
    run = chain.end(chain.start(), 2, "")
    assert re.search(r"shard \S+\.mds\S*: is damaged: the xxh64 of \S+ is not the one", run.stderr), run.stderr[-2000:]
    # The one that was read is removed, and perhaps unpacked again by another process.
    unread = [path for path, content in changed.items() if path.exists() and path.read_bytes() == content]
    assert len(unread) < len(shards)
    for path in unread:
        path.write_bytes(shards[path])
    return f"a flipped bit in each of {len(shards)} unpacked shards"


def clock_jump(chain: Chain) -> str:
    """A start whose clock is hours ahead or behind, killed."""
    seconds, point = chain.draw.choice([-1, 1]) * chain.draw.uniform(60, 36_000), f"end:{chain.next_batch()}"
    code = f"""
import datetime, time
from biphasic.checkpointing import run_lock
class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + datetime.timedelta(seconds={seconds})
run_lock.datetime, real = Shifted, time.time
time.time = lambda: real() + {seconds}
{signal_at(point)}"""
    chain.end(chain.start(code=code), -9, KILLED)
    return f"a clock {seconds / 3600:+.1f} hours off, SIGKILL at {point}"


def bad_bucket(chain: Chain) -> str:
    """Failing requests, stalls, half answers, and a bucket that is away; then SIGKILL."""
    batch, rate, away = chain.next_batch(), chain.draw.uniform(0.05, 0.2), chain.draw.uniform(0, 4)
    chain.proxy.rate = rate
    job = chain.start(code=signal_at(f"end:{batch}"))
    entries = len(chain.entries())
    while len(chain.entries()) == entries and job.poll() is None:
        time.sleep(0.01)
    chain.proxy.away = True
    time.sleep(away)
    chain.proxy.away = False
    chain.end(job, -9, KILLED)
    chain.proxy.rate = 0.0
    chain.exact_repeats = False
    return f"{rate:.0%} of requests fail, bucket away for {away:.1f} s, SIGKILL at end:{batch}"


def full_disk(chain: Chain) -> str:
    """A disk without room for a checkpoint."""
    folder = chain.folder / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=60k tmpfs {folder}"):
        return f"full disk{LEFT_OUT}only root can mount a small one"
    try:
        run = chain.end(chain.start(), 2, "")
    finally:
        os.system(f"umount -l {folder}")
    assert "No space left on device" in run.stderr, run.stderr[-4000:]
    chain.exact_repeats = False
    return "full disk"


def damaged_checkpoint(chain: Chain) -> str:
    """The newest checkpoint is truncated, or has a flipped bit; the next start is on another machine."""
    stored = [checkpoint for checkpoint in list_checkpoints(open_store(chain.place)) if checkpoint.manifest]
    if not stored or stored[0].manifest is None:
        return f"damage{LEFT_OUT}no checkpoint is stored"
    manifest = stored[0].manifest
    name = chain.draw.choice(sorted(manifest.files))
    bucket, _, prefix = chain.place.removeprefix("s3://").partition("/")
    content = bytearray(client().get_object(Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read())
    position, kind = chain.draw.randrange(len(content)), chain.draw.choice(["truncated", "with a flipped bit"])
    if kind == "truncated":
        del content[position:]
    else:
        content[position] ^= 1 << chain.draw.randrange(8)
    client().put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=bytes(content))
    chain.lose_machine()
    chain.exact_repeats = False
    point = f"end:{min(max(stored[0].batch - INTERVAL, 0) + chain.draw.randint(1, 8), LAST - 1)}"
    run = chain.end(chain.start(code=signal_at(point)), -9, KILLED)
    # A newer one may have been uploaded completely before a kill; its manifest is then written at the start.
    assert f"resuming at batch {stored[0].batch} " not in run.stdout, run.stdout[-2000:]
    return f"{name} {kind} at byte {position}, then SIGKILL at {point}"


def other_ranks(chain: Chain) -> str:
    """One rank instead of two, killed."""
    point = f"{chain.draw.choice(IN_TRAINING)}:{chain.next_batch()}"
    chain.end(chain.start(ranks=1, code=signal_at(point)), -9, KILLED)
    return f"one rank, SIGKILL at {point}"


def empty_machine(chain: Chain) -> str:
    """A start on an empty machine, killed."""
    chain.lose_machine()
    return f"an empty machine, then {kill_all(chain)}"


def shorter_run(chain: Chain) -> str:
    """A start with a shorter `max_duration`, killed before the learning rate decays; later starts are longer again."""
    batch = chain.next_batch()
    if batch >= SHORTER - DECAY:
        return kill_all(chain)
    code = signal_at(f"end:{batch}")
    chain.end(chain.start(f"max_duration={SHORTER}ba", code=code), -9, KILLED)
    return f"max_duration={SHORTER}ba, SIGKILL at end:{batch}"


def beside_other_jobs(chain: Chain) -> str:
    """One to three other runs on the machine, and SIGKILL."""
    count = chain.draw.randint(1, 3)
    jobs = []
    for _ in range(count):
        keys = ("max_duration=9ba", "objective.phases=[{name: clm}]", "schedule.decay=2ba", "checkpoint.folder=null")
        jobs.append(
            tiny.start(chain.path, f"run_name={chain.path.stem}-other{len(chain.groups)}", *keys, code=OWN_TEMPORARY)
        )
        chain.groups.append(jobs[-1].pid)
    result = kill_all(chain)
    for job in jobs:
        run = job.wait(300)
        assert run.returncode == 0, run.stderr[-4000:]
    return f"beside {count} other runs, {result}"


def two_starts(chain: Chain) -> str:
    """Two starts at the same moment: one trains until SIGKILL, the other names it."""
    point = f"end:{chain.next_batch()}"
    # The one that trains stops there until the other has ended, which may start later than this batch is trained.
    jobs = [chain.start(code=signal_at(point, signal.SIGSTOP)) for _ in range(2)]
    deadline = time.monotonic() + 120
    while all(job.poll() is None for job in jobs):
        assert time.monotonic() < deadline, "none of two starts has ended"
        time.sleep(0.01)
    for job in jobs:
        if job.poll() is None:
            job.kill()
    runs = sorted((job.wait(300) for job in jobs), key=lambda run: run.returncode)
    chain.outputs += [run.stdout + run.stderr for run in runs]
    assert [run.returncode for run in runs] == [-9, 2], [(run.returncode, run.stderr[-3000:]) for run in runs]
    assert "is locked by a running process: process" in runs[1].stderr, runs[1].stderr
    chain.reasons.append(KILLED)
    return f"two starts at once, SIGKILL at {point}"


FAULTS: tuple[Fault, ...] = (
    kill_all, kill_rank, kill_loader, kill_node, terminate, bad_bucket, full_disk, damaged_checkpoint, other_ranks,
    empty_machine, shorter_run, beside_other_jobs, two_starts, terminate, kill_all, interrupt, signal_while_it_starts,
    signal_while_it_starts, changed_shard, clock_jump,
)  # fmt: skip
