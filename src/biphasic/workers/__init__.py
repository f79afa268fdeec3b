"""Worker processes whose methods are called: on this machine, or on a Ray cluster of several machines.

A conversion and a sweep open an `Engine`, start workers with it, and keep them running with a `WorkerGroup`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from biphasic.config.base import ClusterConfig
from biphasic.workers.engine import Engine
from biphasic.workers.local import LocalEngine


@contextmanager
def open_engine(
    cluster: ClusterConfig,
    output: str,
    environment: dict[str, str],
    modules: Sequence[str] = (),
    report: Callable[..., None] | None = None,
) -> Iterator[Engine]:
    """Open the engine for the YAML's `cluster:` section, and kill its workers when the block ends.

    Args:
        cluster: the YAML's `cluster:` section.
        output: the folder or bucket to which workers write.
        environment: environment variables of the workers, in addition to this process's variables.
        modules: modules that a process imports once for all workers of this machine.
        report: called in this process, during `Engine.wait`, with the arguments that a worker passes to its own `report`.

    Raises:
        UserError: no cluster can be reached at the address, or its nodes don't share the output.
    """
    if cluster.address is None:
        engine = LocalEngine(environment, modules, report)
        try:
            yield engine
        finally:
            engine.close()
        return
    from biphasic.workers.ray import ray_engine

    with ray_engine(cluster.address, environment, report) as engine:
        engine.require_shared(output, cluster.shared_folder)
        yield engine
