"""Workers as actors of a Ray cluster."""

import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import ray
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from biphasic.errors import UserError, first_line
from biphasic.workers.group import WorkerGroup

_CONNECT_SECONDS = 10


class RayWorkers(WorkerGroup):
    """Workers of the cluster at `auto` or HOST:PORT, to which this process is connected until the group is closed.

    Raises a UserError if no cluster can be reached at the address.
    """

    lost = (RayActorError, OutOfMemoryError, NodeDiedError, ObjectLostError)

    def __init__(self, address: str, environment: dict[str, str]):
        # Ray would send usage statistics by default.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            if address != "auto":
                # Ray itself would retry for 15 minutes.
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            runtime: dict[str, Any] = {"env_vars": environment}
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False, runtime_env=runtime)
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            expected = "expected auto, or the head's HOST:PORT that `ray start` has printed"
            raise UserError(
                f"cluster.address {address}: no Ray cluster can be reached ({first_line(error)}); {expected}"
            ) from None
        total = ray.cluster_resources()
        self.cpus, self.gpus = max(int(total.get("CPU", 1)), 1), int(total.get("GPU", 0))
        self._actors: list[Any] = []
        self._folder: str | None = None

    def require_shared(self, paths: list[str]) -> None:
        """Raise a UserError if a node of the cluster doesn't see one of these local paths, which exist here.

        If there are relative ones among them, workers run in this process's folder, not in that of `ray start`.
        """
        if not all(map(os.path.isabs, paths)):
            self._folder = os.getcwd()
        first_missing: Any = ray.remote(num_cpus=0)(_first_missing)
        for node in ray.nodes() if paths else ():
            if node["Alive"]:
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                given = list(map(os.path.abspath, paths))
                missing: Any = ray.get(first_missing.options(scheduling_strategy=there).remote(given))
                if missing is not None:
                    machine = node["NodeManagerHostname"]
                    advice = "name a bucket, or a folder that all machines of the cluster share"
                    raise UserError(f"{paths[missing]}: is not there on {machine}: {advice}")

    def start(self, number: int, cpus: int, gpu_share: float) -> Executor:
        # Ray does not restart it: a new worker may get another GPU, and one that dies at every start has to be reported.
        actor: Any = ray.remote(_Actor).options(num_cpus=cpus, num_gpus=gpu_share, max_restarts=0).remote(self._folder)  # pyright: ignore
        self._actors.append(actor)
        return _ActorExecutor(actor)

    def store(self, arguments: tuple[Any, ...]) -> Any:
        return ray.put(arguments)

    def make_report(self) -> Callable[..., None]:
        # On this program's node, because other nodes may leave the cluster.
        here: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._reports = reports = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        return lambda *values: reports.put_nowait(values)

    def take_reports(self) -> list[tuple[Any, ...]]:
        return self._reports.get_nowait_batch(self._reports.qsize())

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()


class _ActorExecutor(Executor):
    def __init__(self, actor: Any):
        self._actor = actor

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._actor.run.remote(fn, *args, **kwargs).future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        ray.kill(self._actor)  # so that another one gets its cores and its GPU


def _first_missing(paths: list[str]) -> int | None:
    return next((number for number, path in enumerate(paths) if not os.path.exists(path)), None)


class _Actor:
    def __init__(self, folder: str | None):
        if folder is not None:
            os.chdir(folder)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)
