"""Servers of S3 that people run on premises: Ceph's gateway, OpenStack Swift and s3rver. Each answers on this machine.

Used once `make stores` has installed s3rver, from npm. The others are Debian's packages ceph-mon, ceph-osd, radosgw,
swift-proxy, swift-account, swift-container, swift-object and memcached.
"""

import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from helpers.ports import answers, free_port
from helpers.s3_server import KEY, SECRET, s3_environment

_S3RVER = """
const [folder, port, key, secret] = process.argv.slice(1);
require("s3rver/lib/models/account").DUMMY_ACCOUNT.createKeyPair(key, secret);
const S3rver = require("s3rver");
new S3rver({address: "127.0.0.1", port: +port, directory: folder, silent: true}).run();
"""
Environment = dict[str, str]


@contextmanager
def s3rver(folder: Path) -> Iterator[Environment]:
    """An S3 server in Node.js, written before S3 had checksums and conditional writes."""
    port = free_port()
    command = ["node", "-e", _S3RVER, str(folder), str(port), KEY, SECRET]
    with _running([command], folder, [port], {"NODE_PATH": f"{sys.prefix}/node_modules"}):
        yield {**s3_environment(port), "AWS_MAX_ATTEMPTS": "5"}  # it answers some concurrent requests with a fault


@contextmanager
def swift(folder: Path) -> Iterator[Environment]:
    """OpenStack Swift with its S3 interface: one server of each kind."""
    ports = {name: free_port() for name in ("proxy", "account", "container", "object", "memcached")}
    (folder / "devices/d1").mkdir(parents=True)
    for name in ("account", "container", "object"):
        builder = ["swift-ring-builder", f"{name}.builder"]
        device = f"r1z1-127.0.0.1:{ports[name]}/d1"
        for arguments in (["create", "4", "1", "1"], ["add", device, "1"], ["rebalance"]):
            subprocess.run([*builder, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        filters = {f"app:{name}-server": f"egg:swift#{name}"}
        _write_swift(
            folder, name, ports[name], [f"{name}-server"], filters, f"devices = {folder}/devices\nmount_check = false"
        )
    (folder / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_suffix = a\nswift_hash_path_prefix = b\n[storage-policy:0]\nname = p\ndefault = yes\n"
    )
    names = ["catch_errors", "gatekeeper", "healthcheck", "cache", "listing_formats", "s3api", "tempauth", "slo", "dlo"]
    filters = {f"filter:{name}": f"egg:swift#{'memcache' if name == 'cache' else name}" for name in names}
    filters["filter:cache"] += f"\nmemcache_servers = 127.0.0.1:{ports['memcached']}"
    account, _, user = KEY.partition(":")
    filters["filter:tempauth"] += f"\nuser_{account}_{user} = {SECRET} .admin"
    filters["app:proxy-server"] = "egg:swift#proxy\naccount_autocreate = true"
    _write_swift(folder, "proxy", ports["proxy"], [*names, "proxy-server"], filters)
    memory = ["memcached", "-u", getpass.getuser(), "-l", "127.0.0.1", "-p", str(ports["memcached"])]
    parts = [
        [f"swift-{name}-server", f"{folder}/{name}-server.conf"] for name in ("account", "container", "object", "proxy")
    ]
    with _running([memory, *parts], folder, [port for name, port in ports.items() if name != "memcached"], {}):
        yield s3_environment(ports["proxy"])


def _write_swift(
    folder: Path, name: str, port: int, pipeline: list[str], filters: dict[str, str], settings: str = ""
) -> None:
    sections = "".join(f"[{section}]\nuse = {use}\n" for section, use in filters.items())
    (folder / f"{name}-server.conf").write_text(
        f"[DEFAULT]\nbind_ip = 127.0.0.1\nbind_port = {port}\nswift_dir = {folder}\nworkers = 0\n"
        f"user = {getpass.getuser()}\n{settings}\n[pipeline:main]\npipeline = {' '.join(pipeline)}\n{sections}"
    )


@contextmanager
def ceph(folder: Path) -> Iterator[Environment]:
    """Ceph's gateway over one monitor and one store in memory."""
    port, cluster, keyring = free_port(), uuid.uuid4(), folder / "keyring"
    monitor = f"[v2:127.0.0.1:{free_port()},v1:127.0.0.1:{free_port()}]"
    (folder / "ceph.conf").write_text(f"""[global]
fsid = {cluster}
mon host = {monitor}
keyring = {keyring}
run dir = {folder}
admin socket = {folder}/$name.$pid.asok
log file = {folder}/$name.log
pid file = {folder}/$name.pid
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
public addr = 127.0.0.1
cluster addr = 127.0.0.1
rgw frontends = beast endpoint=127.0.0.1:{port}
""")
    environment, rights = (
        {"CEPH_CONF": str(folder / "ceph.conf")},
        ["--cap", "mon", "allow *", "--cap", "osd", "allow *"],
    )

    def run(*command: str) -> str:
        done = subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout

    run("ceph-authtool", "--create-keyring", str(keyring), "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    for name in ("client.admin", "osd.0"):
        run("ceph-authtool", str(keyring), "--gen-key", "-n", name, *rights)
    run("monmaptool", "--create", "--fsid", str(cluster), "--addv", "a", monitor, f"{folder}/monmap")
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{folder}/monmap", "--keyring", str(keyring))
    with _running([["ceph-mon", "-i", "a", "-f"]], folder, [], environment):
        device = str(uuid.uuid4())
        run("ceph", "--connect-timeout", "30", "osd", "new", device, "0")
        (folder / "osd").mkdir()
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", device)
        with _running([["ceph-osd", "-i", "0", "-f"]], folder, [], environment):
            run("ceph", "osd", "crush", "add", "osd.0", "1", "root=default", "host=localhost")
            keys = ["--access-key", KEY, "--secret", SECRET]
            run("radosgw-admin", "user", "create", "--uid=a", "--display-name=a", *keys)
            gateway = ["radosgw", "-n", "client.admin", f"--rgw-data={folder}", "-f"]
            with _running([gateway], folder, [port], environment):
                yield s3_environment(port)


@contextmanager
def _running(commands: list[list[str]], folder: Path, ports: Iterable[int], environment: Environment) -> Iterator[None]:
    """Run programs until the end of the block, which begins once all ports answer anything."""
    servers, log = [], folder / f"{commands[0][0]}.out"
    try:
        for command in commands:
            with log.open("a") as output:
                everything = {"stdout": output, "stderr": output, "env": os.environ | environment}
                servers.append(subprocess.Popen(command, start_new_session=True, **everything))
        deadline = time.monotonic() + 90
        while not all(answers(f"http://127.0.0.1:{port}/") for port in ports):
            if any(server.poll() is not None for server in servers) or time.monotonic() > deadline:
                raise RuntimeError(f"{commands[0][0]} does not answer: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield
    finally:
        for server in reversed(servers):
            server.send_signal(signal.SIGKILL)
            server.wait(10)


def version(name: str) -> str:
    """The version of an installed server."""
    if name in ("s3rver", "azurite"):
        return json.loads(Path(f"{sys.prefix}/node_modules/{name}/package.json").read_text())["version"]
    command = {"swift": ["dpkg-query", "-W", "-f", "${Version}", "swift-proxy"], "ceph": ["radosgw", "--version"]}[name]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"\d+\.\d+\.\d+", text)
    assert match is not None, text
    return match[0]


_ALL: dict[str, Callable[[Path], AbstractContextManager[Environment]]] = {
    "s3rver": s3rver,
    "swift": swift,
    "ceph": ceph,
}
_S3RVER_PACKAGE = Path(f"{sys.prefix}/node_modules/s3rver/package.json")
_PROGRAMS = {"s3rver": "node", "swift": "swift-proxy-server", "ceph": "radosgw"}
PREMISES = {name: server for name, server in _ALL.items() if _S3RVER_PACKAGE.exists() and shutil.which(_PROGRAMS[name])}
"""The servers that are installed, by name; none before `make stores`."""
