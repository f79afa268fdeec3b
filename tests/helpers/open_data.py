"""Helper of test_jobs_together.py: one rank of a job that opens the splits `train` and `validation` of a folder.

python open_data.py FOLDER
"""

import os
import sys

from composer.utils import dist, get_device

from biphasic.config.data import DataConfig, StreamConfig
from biphasic.data.streaming import build_loader
from helpers.tiny import LENGTH, release_streaming


def main(folder: str) -> None:
    """Open the data as a run does."""
    dist.initialize_dist(get_device(None))
    splits = {name: StreamConfig(local=f"{folder}/{name}") for name in ("train", "validation")}
    config = DataConfig(sequence_length=LENGTH, num_workers=0, shuffle_block_size=64, **splits)  # pyright: ignore
    loaders = [build_loader(config.reading, config.streams, 4, seed=3, train=True)]
    validation = {"data.validation": config.splits["data.validation"]}
    loaders.append(build_loader(config.reading, validation, 4, seed=3, train=False))
    dist.barrier()
    loaders.clear()
    release_streaming()
    os._exit(0)  # a process with these imports takes seconds to end


if __name__ == "__main__":
    main(sys.argv[1])
