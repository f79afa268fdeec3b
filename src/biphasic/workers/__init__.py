"""Worker processes on this machine or on a Ray cluster."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

from biphasic.config.base import ClusterConfig
from biphasic.storage import is_remote
from biphasic.workers.group import WorkerGroup
from biphasic.workers.local import LocalWorkers


@contextmanager
def open_workers(
    cluster: ClusterConfig, paths: Iterable[str], environment: dict[str, str], modules: Sequence[str]
) -> Iterator[WorkerGroup]:
    """Yield the workers of the YAML's `cluster:` section, for `WorkerGroup.open`, and kill them when the block ends.

    `environment` is added to that of this process, or of the cluster's nodes. Workers of this machine share one import
    of `modules`. `paths` are what workers read and write, and may be in buckets. Raises a UserError if no cluster can be
    reached at the address, or its nodes don't share a local one.
    """
    if cluster.address is None:
        with closing(LocalWorkers(environment, modules)) as group:
            yield group
        return
    from biphasic.workers.ray import RayWorkers

    with closing(RayWorkers(cluster.address, environment)) as group:
        group.require_shared([path for path in paths if not is_remote(path)])
        yield group
