"""Workers as actors of a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from biphasic.errors import UserError
from biphasic.storage import first_line, is_remote
from biphasic.workers.engine import Call, Location, RemoteTraceback, WorkerLostError
from biphasic.workers.parent import die_with_parent
from biphasic.workers.resources import smallest_gpu_bytes

if TYPE_CHECKING:
    from ray import ObjectRef

_CONNECT_SECONDS = 10


@contextmanager
def ray_engine(
    address: str, environment: dict[str, str], report: Callable[..., None] | None = None
) -> Iterator[RayEngine]:
    """Connect to a cluster until the block ends, and then kill the workers.

    Args:
        address: `auto` or HOST:PORT of a running cluster.
        environment: environment variables of the workers, in addition to those of their nodes.
        report: called in this process, during `RayEngine.wait`, with the arguments that a worker passes to its own `report`.

    Raises:
        UserError: no cluster can be reached at the address.
    """
    # Ray would send usage statistics by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    _require_answer(address)
    try:
        runtime: dict[str, Any] = {"env_vars": environment}
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False, runtime_env=runtime)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"cluster.address {address}: no Ray cluster can be reached ({first_line(error)})") from None
    try:
        engine = RayEngine(report)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        ray.shutdown()


class RayEngine:
    """Starts workers on the connected cluster. See `Engine`."""

    def __init__(self, report: Callable[..., None] | None = None):
        resources = ray.cluster_resources()
        self.cpus, self.gpus = max(int(resources.get("CPU", 1)), 1), int(resources.get("GPU", 0))
        self._report, self._mailbox = report, None if report is None else _start_mailbox()
        self._actors: list[Any] = []
        self._stored: dict[tuple[int, ...], tuple[tuple[Any, ...], ObjectRef]] = {}

    def require_shared(self, output: str, shared_folder: bool) -> None:
        """Check that all nodes can write to the output.

        Raises:
            UserError: the output is a local folder that is not shared, and the cluster has several nodes.
        """
        machines = sum(node["Alive"] for node in ray.nodes())
        if not is_remote(output) and not shared_folder and machines > 1:
            raise UserError(
                f"output {output}: a folder of one machine, and the cluster has {machines}: name a bucket, or set "
                "cluster.shared_folder: true when all of them see this folder"
            )

    def smallest_gpu_bytes(self) -> int | None:
        """Return the memory of the smallest GPU of one of the nodes with GPUs, because this node may have none."""
        return ray.get(ray.remote(num_cpus=0, num_gpus=0.001, max_retries=3)(smallest_gpu_bytes).remote())

    def start(self, factory: Callable[..., Any], *arguments: Any, cpus: int = 1, gpu_share: float = 0.0) -> _RayWorker:
        """Start a worker process. See `Engine.start`.

        Ray does not restart it: a new worker may get another GPU, and one that dies at every start has to be reported.
        """
        actor: Any = ray.remote(_Actor).options(num_cpus=cpus, num_gpus=gpu_share, max_restarts=0).remote()  # pyright: ignore
        self._actors.append(actor)
        return _RayWorker(actor, actor.create.remote(factory, self._store(arguments), self._mailbox))

    def wait(self, calls: Iterable[Call], seconds: float) -> list[Call]:
        """Wait up to `seconds` for one of the calls to end, and return those that have ended."""
        by_reference = {call.reference: call for call in cast(Iterable[_RayCall], calls)}
        ready, _ = ray.wait(list(by_reference), num_returns=1, timeout=seconds)
        if self._report is not None and self._mailbox is not None:
            for values in ray.get(self._mailbox.take.remote()):
                self._report(*values)
        return [by_reference[reference] for reference in ready]

    def close(self) -> None:
        """Kill all workers."""
        for actor in self._actors:
            ray.kill(actor)

    def _store(self, arguments: tuple[Any, ...]) -> ObjectRef:
        """Store the arguments in the cluster once, however many workers are started with them."""
        key = tuple(map(id, arguments))
        if key not in self._stored:
            # The arguments are kept: `id` is unique only among objects that exist.
            self._stored[key] = arguments, ray.put(arguments)
        return self._stored[key][1]


class _RayCall:
    """A call, as the reference to its value."""

    def __init__(self, reference: ObjectRef):
        self.reference = reference

    def result(self) -> Any:
        try:
            return ray.get(self.reference)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise cause from RemoteTraceback(str(error))
        except (RayActorError, OutOfMemoryError, NodeDiedError, ObjectLostError) as error:
            out_of_memory = isinstance(error, OutOfMemoryError) or "low on memory" in str(error)
            raise WorkerLostError(str(error).strip().splitlines()[-1], out_of_memory) from None


class _RayWorker:
    """A worker process, as its actor."""

    def __init__(self, actor: Any, started: ObjectRef):
        self._actor, self.started = actor, _RayCall(started)

    def call(self, method: str, *arguments: Any) -> _RayCall:
        """Call a method of the worker's object."""
        return _RayCall(self._actor.call.remote(method, *arguments))


class _Actor:
    """Runs in a worker process, and calls the methods of its object."""

    def __init__(self) -> None:
        # Ray itself needs seconds to kill the workers of a driver that died.
        die_with_parent(os.getppid())
        self._object: Any = None

    def create(self, factory: Callable[..., Any], arguments: tuple[Any, ...], mailbox: Any) -> Location:
        """Create the object, and return this process's location."""
        self._object = factory(*arguments, **({} if mailbox is None else {"report": _Report(mailbox)}))
        return Location(ray.get_runtime_context().get_node_id(), tuple(map(str, ray.get_gpu_ids())))

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object."""
        return getattr(self._object, method)(*arguments)


class _Report:
    """Sends a worker's reports to the mailbox."""

    def __init__(self, mailbox: Any):
        self._mailbox = mailbox

    def __call__(self, *values: Any) -> None:
        self._mailbox.add.remote(values)


class _Mailbox:
    """Collects the reports of workers."""

    def __init__(self) -> None:
        self._reports: list[tuple[Any, ...]] = []

    def add(self, values: tuple[Any, ...]) -> None:
        """Add a worker's report."""
        self._reports.append(values)

    def take(self) -> list[tuple[Any, ...]]:
        """Return the reports since the last call."""
        reports, self._reports = self._reports, []
        return reports


def _start_mailbox() -> Any:
    # On this program's node, because other nodes may leave the cluster.
    this_node: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=this_node)(_Mailbox).remote()


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
