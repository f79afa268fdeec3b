"""Helper of test_ranks.py: ranks that wait for each other until some of them fail.

composer -n 3 failing_ranks.py CASE REASON      rank 0 writes why the job ended to the file REASON
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed

from biphasic import ranks
from biphasic.errors import Unavailable, UserError
from biphasic.ranks import close_on_fault, run_rank


def fail(case: str, rank: int) -> None:
    if case == "one" and rank == 1:
        raise UserError("the shard is damaged\nput it right")
    if case == "bug" and rank == 1:
        raise OSError("not open") from ValueError("no key")
    if case == "away" and rank == 1:
        raise Unavailable("the bucket can't be reached")
    if case == "all":
        time.sleep(0 if rank else 1)
        raise UserError("the loss is not a finite number")
    if case == "two" and rank:
        raise UserError(f"the disk of rank {rank} is full")
    if case == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "stuck":
        # With NCCL, the other ranks' main threads wait on the GPU, and no collective fails.
        if rank == 2:
            os.abort()
        time.sleep(60)


def job(case: str, reason: Path) -> int:
    rank = int(os.environ["RANK"])
    if case == "early" and rank == 1:
        raise UserError("the file is not the same on this node")
    # As in a run, which on SIGTERM finishes its batch (checkpointing/stopping.py): the launcher sends it 0.1 s after a rank
    # was killed, and it may come before the collective fails.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"  # Composer's launcher sets 1
    torch.distributed.init_process_group("gloo")

    def close(why: str) -> None:
        if not rank:
            reason.write_text(why)

    with close_on_fault(close):
        torch.distributed.barrier()
        fail(case, rank)
        torch.distributed.barrier()
    return 0


if __name__ == "__main__":
    if sys.argv[1] != "all":  # where rank 0 fails a second after the others
        ranks._GRACE_SECONDS = 0.5
    if sys.argv[1] == "stuck" and os.environ["RANK"] == "2":
        # The rank is ready to train before its listening thread has reached the store, as on a busy machine.
        exchange = ranks._Ranks._exchange
        ranks._Ranks._exchange = lambda self: (time.sleep(2), exchange(self))[1]
    sys.exit(run_rank(lambda: job(sys.argv[1], Path(sys.argv[2]))))
