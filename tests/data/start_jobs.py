"""Helper of test_jobs_together.py: several jobs of two ranks each that open their data at the same time, again and again.

python start_jobs.py ROUNDS FOLDER...     one job for each folder, which has the splits `train` and `validation`

Prints a line for each rank that failed. Ranks are forked, so that none has to wait for imports.
"""

from __future__ import annotations

import os
import sys

from composer.utils import dist, get_device

from biphasic.config.schema import DataConfig, StreamConfig
from biphasic.data.streaming import loader
from s3_server import free_port
from tiny import LENGTH, release_streaming

RANKS = 2


def open_data(folder: str) -> None:
    """What a job's rank does with its data when it starts."""
    dist.initialize_dist(get_device(None))
    splits = {name: StreamConfig(local=f"{folder}/{name}") for name in ("train", "validation")}
    config = DataConfig(sequence_length=LENGTH, num_workers=0, shuffle_block_size=64, **splits)  # pyright: ignore
    held = [loader(config, config.streams, 4, seed=3, train=True)]
    held.append(loader(config, {"data.validation": splits["validation"]}, 4, seed=3, train=False))
    dist.barrier()


def rank(number: int, port: int, folder: str) -> None:
    place = {"RANK": number, "LOCAL_RANK": number, "NODE_RANK": 0, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        open_data(folder)
    except Exception as error:
        print(f"{folder} rank {number}: {type(error).__name__}: {error}", flush=True)
        os._exit(1)
    release_streaming()
    os._exit(0)  # a process that has imported this much takes seconds to end


def main(rounds: int, folders: list[str]) -> None:
    for _ in range(rounds):
        ranks: list[int] = []
        for folder in folders:
            port = free_port()
            for number in range(RANKS):
                pid = os.fork()
                if not pid:
                    rank(number, port, folder)
                ranks.append(pid)
        for pid in ranks:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
