"""Connect to Ray: start it on this machine for one command, or use a running cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from biphasic.errors import UserError
from biphasic.storage import first_line, is_remote

_CONNECT_SECONDS = 10
_OBJECT_STORE_BYTES = 150 * 2**20


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def ray_session(address: str | None, cpus: int, environment: dict[str, str]) -> Iterator[None]:
    """Connect to Ray until the block ends.

    Args:
        address: `auto` or HOST:PORT of a running cluster. None: start Ray on this machine until the block ends.
        cpus: number of cores for Ray if it is started on this machine.
        environment: environment variables to set in workers, in addition to this process's variables.

    Raises:
        UserError: no cluster can be reached at the address.
    """
    import ray

    # Ray would send usage statistics by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings: dict[str, Any] = {"log_to_driver": False}
    saved = {name: os.environ.get(name) for name in environment}
    if address is None:
        # Local workers inherit the variables. This is seconds faster than Ray's runtime environments.
        os.environ.update(environment)
        # `local` starts a new Ray even when another one runs on this machine.
        settings |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        settings |= {"object_store_memory": _OBJECT_STORE_BYTES}
    else:
        settings |= {"address": address, "runtime_env": {"env_vars": environment}}
        _require_answer(address)
    try:
        ray.init(logging_level=logging.ERROR, **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"cluster.address {address}: no Ray cluster can be reached ({first_line(error)})") from None
    finally:
        if address is None:
            for name, value in saved.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    try:
        yield
    finally:
        ray.shutdown()


def require_shared(output: str, shared_folder: bool) -> None:
    """Check that all nodes of the connected cluster can write to the output.

    Raises:
        UserError: the output is a local folder that is not shared, and the cluster has several nodes.
    """
    import ray

    machines = sum(node["Alive"] for node in ray.nodes())
    if not is_remote(output) and not shared_folder and machines > 1:
        raise UserError(
            f"output {output}: a folder of one machine, and the cluster has {machines}: name a bucket, or set "
            "cluster.shared_folder: true when all of them see this folder"
        )


def _require_answer(address: str) -> None:
    """Raise an error within seconds if no cluster answers, because Ray itself retries for 15 minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        expected = "expected auto, or the head's HOST:PORT that `ray start` has printed"
        raise UserError(
            f"cluster.address {address}: no Ray cluster can be reached ({first_line(error)}); {expected}"
        ) from None
