"""Ray, started on this machine for one command, or a cluster's that is running already."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from biphasic.config.errors import UserError
from biphasic.storage import is_remote, short

_ANSWER_SECONDS = 10
_OBJECT_STORE_BYTES = 150 * 2**20


def cores() -> int:
    """Cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def connected(address: str | None, cpus: int, environment: dict[str, str]) -> Iterator[None]:
    """Ray, until the block ends.

    Args:
        address: None starts one here, which dies with this process; `auto` or HOST:PORT is a cluster's.
        cpus: cores of the one that is started here.
        environment: variables that workers have, beside this process's own.

    Raises:
        UserError: there is no such cluster.
    """
    import ray

    # Ray reports each start to its makers unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings: dict[str, Any] = {"log_to_driver": False}
    before = {name: os.environ.get(name) for name in environment}
    if address is None:
        # Its workers inherit them, which is seconds faster than Ray's runtime environments.
        os.environ.update(environment)
        # Not one that happens to run on this machine.
        settings |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        settings |= {"object_store_memory": _OBJECT_STORE_BYTES}
    else:
        settings |= {"address": address, "runtime_env": {"env_vars": environment}}
        _require_answer(address)
    try:
        ray.init(logging_level=logging.ERROR, **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"cluster.address {address}: no Ray cluster can be reached ({short(error)})") from None
    finally:
        if address is None:
            _restore(before)
    try:
        yield
    finally:
        ray.shutdown()


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def machines() -> int:
    """How many machines of the connected cluster are alive."""
    import ray

    return len([node for node in ray.nodes() if node["Alive"]])


def require_shared(output: str, shared_folder: bool) -> None:
    """A cluster's machines must all see what is written.

    Raises:
        UserError: the output is a folder of one machine.
    """
    if not is_remote(output) and not shared_folder and (count := machines()) > 1:
        raise UserError(
            f"output {output}: a folder of one machine, and the cluster has {count}: name a bucket, or set "
            "cluster.shared_folder: true when all of them see this folder"
        )


def _require_answer(address: str) -> None:
    """Ray itself tries for a quarter of an hour."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        expected = "expected auto, or the head's HOST:PORT that `ray start` has printed"
        raise UserError(
            f"cluster.address {address}: no Ray cluster can be reached ({short(error)}); {expected}"
        ) from None
