"""Chains of faults: seeded, for as long as asked, over small runs of two ranks with S3.

    make soak                                # five minutes, with a new seed, which it prints
    make soak SOAK_MINUTES=120 SOAK_SEED=7   # the same chains again

As an ordinary user, who can't fill a disk of their own or take a node's shared memory away:

    unshare --user --map-user=1000 --map-group=1000 make soak

Each chain is a run of its own (`chain.py`) whose starts meet five to eight faults (`chain_faults.py`), and that then trains
to its end. It must then be the run without faults. A failed chain ends the soak; its folder stays.
"""

import argparse
import os
import random
import secrets
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from helpers import tiny
from helpers.buckets import bucket_for
from helpers.chain import Chain, verify, write_data, write_yaml
from helpers.chain_faults import FAULTS, LEFT_OUT, Fault
from helpers.s3_proxy import Proxy
from helpers.s3_server import CREDENTIALS, serve_s3


def train_reference(folder: Path, strategy: str) -> Path:
    """Train the run without faults, and return its folder."""
    path = write_yaml(folder / f"undisturbed-{strategy}.yaml", folder / "data", strategy)
    run = tiny.launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-4000:]
    return folder / "runs" / path.stem


def run_chain(chain: Chain, faults: list[Fault], reference: Path, label: str) -> list[str]:
    """Let a run meet the faults, train it to its end, and check it. Returns the kinds of those that could be made."""
    os.environ["TMPDIR"], met = str(chain.temporary), list[str]()
    try:
        for number, fault in enumerate(faults, 1):
            start, chain.draw = time.monotonic(), random.Random(f"{chain.seed} {number}")
            print(
                f"{label}, {number} of {len(faults)}: {fault.__name__} after batch {chain.trained()}",
                end=" ",
                flush=True,
            )
            result = fault(chain)
            met += [] if LEFT_OUT in result else [fault.__name__]
            print(f"({result}; {time.monotonic() - start:.1f} s)", flush=True)
        chain.end(chain.start(), 0, "finished")
    except BaseException:
        for group in chain.groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        raise
    finally:
        del os.environ["TMPDIR"]
    verify(chain, reference)
    return met


def deal(draw: random.Random, count: int) -> list[Fault]:
    """Draw faults; each comes as often as it stands in `FAULTS`, give or take one."""
    dealt: list[Fault] = []
    while len(dealt) < count:
        dealt += draw.sample(FAULTS, len(FAULTS))
    return dealt


def main() -> None:
    """Run chains until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--faults", type=int, default=10**9, help="end after so many faults")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}, {options.minutes:g} minutes, in {folder}", flush=True)
    (folder / "s3").mkdir()
    server, port = serve_s3(folder / "s3")
    os.environ |= {**CREDENTIALS, "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    bucket = bucket_for(folder / "s3", "soak")
    write_data(folder / "data")
    start, chains, met = time.monotonic(), 0, Counter(dict.fromkeys((fault.__name__ for fault in FAULTS), 0))
    try:
        references = {strategy: train_reference(folder, strategy) for strategy in ("fsdp", "ddp")}
        deck = deal(random.Random(f"soak {seed}"), 10_000)
        while time.monotonic() - start < 60 * options.minutes and met.total() < options.faults:
            draw = random.Random(f"soak {seed} {chains}")
            strategy = draw.choice(["fsdp", "ddp"])
            proxy = Proxy(port, 0.0, seed + chains, stall_seconds=3, stalls=2)
            os.environ["S3_ENDPOINT_URL"] = proxy.address
            place = f"s3://{bucket}/chain{chains}"
            path = write_yaml(folder / f"chain{chains}.yaml", folder / "data", strategy, place)
            faults, deck = deck[: (count := draw.randint(5, 8))], deck[count:]
            chain = Chain(path, place, strategy, proxy, f"soak {seed} {chains}")
            met.update(run_chain(chain, faults, references[strategy], f"chain {chains} ({strategy})"))
            proxy.close()
            minutes = (time.monotonic() - start) / 60
            print(f"chain {chains}: the same run; {met.total()} faults in {minutes:.1f} min", flush=True)
            chains += 1
    finally:
        server.terminate()
    kinds = ", ".join(f"{count} {kind}" for kind, count in met.items())
    print(f"seed {seed}: {chains} chains, {met.total()} faults: {kinds}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
