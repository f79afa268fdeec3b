"""node.sh and ssh.sh with a replacement for Composer's launcher: no network, no torch."""

import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "recipes" / "launch"
YAML = "some.yaml"

# Replaces composer.cli.launcher. It writes a line to LOG for each event, and ends with the statuses in STATUSES, of which it
# repeats the last one. "wait" starts a rank that runs until it receives a signal. With RECORD it records its own signals;
# otherwise launcher.py's handlers stay, and without those a signal would end it.
COMPOSER = '''
import json, os, signal, subprocess, sys, time
from pathlib import Path

LOG = Path(os.environ["LOG"])
RANK = """
import os, signal, sys, time
from pathlib import Path
got = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
def note(what):
    with Path(os.environ["LOG"]).open("a") as log: log.write(what + chr(10))
note(f"rank {os.getpid()}")
end = time.monotonic() + 20
while not got and time.monotonic() < end: time.sleep(0.01)
time.sleep(0.2)
note("rank got " + " ".join(got))
sys.exit(75 if got else 9)
"""

def note(what):
    with LOG.open("a") as log: log.write(what + chr(10))

def main():
    launched = LOG.read_text().count("args ") if LOG.exists() else 0
    note("args " + json.dumps(sys.argv[1:]))
    if os.environ.get("RECORD"):
        signal.signal(signal.SIGUSR1, lambda *_: note("launcher got SIGUSR1"))
        signal.signal(signal.SIGTERM, lambda *_: note("launcher got SIGTERM"))
    note(f"launcher {os.getpid()}")
    statuses = os.environ.get("STATUSES", "0").split(",")
    status = statuses[min(launched, len(statuses) - 1)]
    if status != "wait":
        return int(status)
    time.sleep(float(os.environ.get("SLOW", "0")))
    rank = subprocess.Popen([sys.executable, "-c", RANK])
    while rank.poll() is None: time.sleep(0.01)
    return rank.returncode
'''


class Node:
    """A folder and an environment for node.sh, without this machine's variables."""

    def __init__(self, folder: Path):
        self.started: list[subprocess.Popen[str]] = []
        self.bin, self.log = folder / "bin", folder / "log"
        package = folder / "fake" / "composer" / "cli"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package.parent / "__init__.py").touch()
        (package / "launcher.py").write_text(COMPOSER)
        self.bin.mkdir()
        self.program("python", f'exec {sys.executable} -S "$@"')
        self.program("nvidia-smi", "exit 9")
        self.environment = {
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin",
            "VIRTUAL_ENV": "/this-one",
            "PYTHONPATH": str(folder / "fake"),
            "LOG": str(self.log),
            "BIPHASIC_PREFLIGHT": "0",
            "BIPHASIC_PAUSE": "0",
        }

    def program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def start(self, *arguments: str, script: str = "node.sh", **variables: str) -> subprocess.Popen[str]:
        command = [str(LAUNCH / script), *(arguments or (YAML,))]
        environment = {**self.environment, **variables}
        process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def stop(self) -> None:
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def run(self, *arguments: str, script: str = "node.sh", **variables: str) -> int:
        process = self.start(*arguments, script=script, **variables)
        self.output = process.communicate(timeout=30)[0]
        return process.returncode

    def lines(self, start: str) -> list[str]:
        text = self.log.read_text() if self.log.exists() else ""
        return [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]

    def launches(self) -> list[list[str]]:
        return [json.loads(line) for line in self.lines("args ")]

    def wait_for(self, start: str, count: int = 1) -> str:
        end = time.monotonic() + 15
        while len(self.lines(start)) < count:
            assert time.monotonic() < end, (
                start,
                self.log.read_text() if self.log.exists() else "nothing was launched",
            )
            time.sleep(0.01)
        return self.lines(start)[count - 1]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.stop()


MAIN = str(LAUNCH.parents[1] / "src" / "main.py")


def multi(processes: int, world: int, rank: int, address: str, port: int) -> list[str]:
    where = ["--world_size", str(world), "--node_rank", str(rank), "--master_addr", address, "--master_port", str(port)]
    return ["-n", str(processes), *where, MAIN, YAML]


SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
SLURM = {
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_JOB_ID": "123456",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "biphasic-0.biphasic", "NPROC": "8"}
MCLI = {
    "NODE_RANK": "3",
    "WORLD_SIZE": "32",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "run-0.headless",
    "MASTER_PORT": "7777",
}
PLAIN = {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "first"}
PLACES = [
    pytest.param(SKYPILOT, multi(8, 16, 1, "10.0.0.4", 7501), id="skypilot"),
    pytest.param(SLURM, multi(4, 12, 2, "gpu07", 20000 + 3456), id="slurm"),
    pytest.param({**SLURM, "MASTER_ADDR": "ib-7"}, multi(4, 12, 2, "ib-7", 23456), id="slurm, a name of its own"),
    pytest.param(KUBERNETES, multi(8, 16, 1, "biphasic-0.biphasic", 7501), id="kubernetes"),
    pytest.param(MCLI, multi(8, 32, 3, "run-0.headless", 7777), id="mcli"),
    pytest.param(PLAIN, multi(1, 2, 0, "first", 7501), id="by hand"),
    pytest.param({**SLURM, **PLAIN, "NPROC": "2"}, multi(2, 4, 0, "first", 7501), id="by hand comes first"),
    pytest.param({"SLURM_NODEID": "0", "SLURM_NNODES": "1"}, ["-n", "1", MAIN, YAML], id="slurm, one node, no GPU"),
    pytest.param({**SKYPILOT, "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "0"},
                 ["-n", "1", MAIN, YAML], id="skypilot, one node, no GPU"),
    pytest.param({"NODE_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "a"},
                 ["-n", "8", MAIN, YAML], id="mcli, one node"),
    pytest.param({"CUDA_VISIBLE_DEVICES": "4,5,6"}, ["-n", "3", MAIN, YAML], id="some of the machine's GPUs"),
    pytest.param({"CUDA_VISIBLE_DEVICES": ""}, ["-n", "1", MAIN, YAML], id="none of the machine's GPUs"),
    pytest.param({}, ["-n", "1", MAIN, YAML], id="one machine"),
]  # fmt: skip


@pytest.mark.parametrize(("variables", "expected"), PLACES)
def test_a_node_s_rank_and_address(node: Node, variables: dict[str, str], expected: list[str]) -> None:
    node.program("scontrol", '[[ $* == "show hostnames gpu[07-09]" ]] && printf "gpu%s\\n" 07 08 09')
    assert node.run(**variables) == 0
    assert node.launches() == [expected]


def test_one_process_per_gpu(node: Node) -> None:
    node.program("nvidia-smi", '[[ $1 == -L ]] && printf "GPU %s: H200\\n" 0 1 2 3')
    assert node.run() == 0
    assert node.launches() == [["-n", "4", MAIN, YAML]]


def test_a_yaml_that_came_in_the_environment_is_written_first(node: Node, tmp_path: Path) -> None:
    """As a study's command sends it to a machine that has no such file."""
    file = tmp_path / "run.yaml"
    assert node.run(str(file), RUN_YAML=base64.b64encode(b"job: pretrain\n").decode()) == 0
    assert file.read_text() == "job: pretrain\n"
    assert node.launches() == [["-n", "1", MAIN, str(file)]]


def test_several_nodes_need_an_address(node: Node) -> None:
    assert node.run(NODE_RANK="1", NNODES="2") == 2
    assert "MASTER_ADDR" in node.output and not node.launches()


def test_the_preflight_runs_first_and_its_failure_ends_the_job(node: Node) -> None:
    assert node.run(YAML, "optimizer.lr=1e-4 ", BIPHASIC_PREFLIGHT="1", **KUBERNETES) == 0
    place = multi(8, 16, 1, "biphasic-0.biphasic", 7501)[:-2]
    arguments = [YAML, "optimizer.lr=1e-4 "]
    assert node.launches() == [[*place, "-m", "biphasic", "preflight", *arguments], [*place, MAIN, *arguments]]
    node.log.unlink()
    assert node.run(BIPHASIC_PREFLIGHT="1", STATUSES="2") == 2
    assert len(node.launches()) == 1


@pytest.mark.parametrize(
    ("statuses", "variables", "status", "launches"),
    [
        ("75,75,0", {}, 0, 3),
        ("75,0", KUBERNETES, 0, 2),
        ("75,0", SLURM, 75, 1),
        ("75,0", SKYPILOT, 75, 1),
        ("75,0", {"BIPHASIC_ON_PREEMPTION": "exit"}, 75, 1),
        ("75,0", {**SLURM, "BIPHASIC_ON_PREEMPTION": "restart"}, 0, 2),
        ("2,0", {}, 2, 1),
        ("130,0", {}, 130, 1),
        ("1,2,0", {}, 2, 2),
        ("1,0", {}, 0, 2),
        ("1,-9,0", {}, 0, 3),
        ("1", {"BIPHASIC_RESTARTS": "3"}, 1, 4),
        ("1,75,1", {"BIPHASIC_RESTARTS": "1"}, 1, 3),
        ("137", {"BIPHASIC_RESTARTS": "0"}, 137, 1),
    ],
)
def test_restarts_by_exit_status(node: Node, statuses: str, variables: dict[str, str], status: int, launches: int) -> None:
    node.program("scontrol", "echo gpu07")
    assert node.run(STATUSES=statuses, **variables) == status
    assert len(node.launches()) == launches
    assert all(launch == node.launches()[0] for launch in node.launches()), "nodes meet at the same address again"


def test_help_starts_nothing(node: Node) -> None:
    assert node.run("--help") == 0
    assert "recipes/launch/node.sh FILE.yaml [key=value ...]" in node.output and "Exit status" in node.output
    assert "set -e" not in node.output
    assert node.run("--plan") == 2 and node.output.startswith("usage: ")
    assert not node.launches()


def test_a_closed_pipe_ends_the_job(node: Node, tmp_path: Path) -> None:
    """As `node.sh FILE.yaml | head`: the reader ends, and no attempt could write any more."""
    with (tmp_path / "err").open("w") as errors:
        process = subprocess.Popen(
            [str(LAUNCH / "node.sh"), YAML], env={**node.environment, "STATUSES": "1"}, stdout=subprocess.PIPE, stderr=errors
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(15) in (-signal.SIGPIPE, 141)
    assert len(node.launches()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_goes_to_the_ranks_and_not_to_the_launcher(node: Node, number: int) -> None:
    process = node.start(STATUSES="wait", RECORD="1")
    node.wait_for("rank ")
    process.send_signal(number)
    assert process.wait(15) == 75, "this node was signaled, so it doesn't start again"
    assert node.lines("rank got ") == ["SIGUSR1"]
    assert not node.lines("launcher got")
    assert len(node.launches()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_launcher_survives_a_signal_to_every_process(node: Node, number: int) -> None:
    process = node.start(STATUSES="wait")
    rank, launcher = int(node.wait_for("rank ")), int(node.wait_for("launcher "))
    for pid in (launcher, rank, process.pid):
        os.kill(pid, number)
    assert process.wait(15) == 75
    assert node.lines("rank got ")


def test_a_signal_before_there_are_ranks_is_not_lost(node: Node) -> None:
    process = node.start(STATUSES="wait", SLOW="0.5")
    node.wait_for("launcher ")
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 75
    assert len(node.launches()) == 1


def test_a_signal_waits_for_the_ranks_of_a_slow_launcher(node: Node) -> None:
    """However often it is tried: without its pauses, some hundred times until there is a rank."""
    node.program("sleep", "exit 0")
    process = node.start(STATUSES="wait", SLOW="5")
    node.wait_for("launcher ")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75
    assert node.lines("rank got ") in ([], ["SIGUSR1"]), "a rank that has just begun dies of it"


def test_a_signal_during_the_preflight_starts_no_training(node: Node) -> None:
    process = node.start(STATUSES="wait,0", BIPHASIC_PREFLIGHT="1")
    node.wait_for("rank ")
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 75
    assert len(node.launches()) == 1


def test_a_signal_between_two_attempts_ends_the_job(node: Node) -> None:
    process = node.start(STATUSES="1", BIPHASIC_PAUSE="60")
    node.wait_for("launcher ")
    assert process.stdout is not None
    while "restart 1" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75
    assert len(node.launches()) == 1


# Runs the command on this machine, under the remote host's name.
SSH = "while [[ $1 == -* ]]; do shift 2; done\nhost=$1; shift\nexport REMOTE_HOST=$host LOG=$LOG.$host\n"
# The remote host doesn't inherit ignored signals.
REMOTE = 'exec env --default-signal=INT,TERM,HUP sh -c "$*"'


@pytest.fixture
def checkout(node: Node, tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    shutil.copytree(LAUNCH, folder / "recipes" / "launch")
    (folder / "src" / "biphasic").mkdir(parents=True)
    shutil.copy(LAUNCH.parents[1] / "src" / "biphasic" / "launcher.py", folder / "src" / "biphasic")
    node.program("ssh", SSH + REMOTE)
    return folder


def log_of(node: Node, host: str) -> Path:
    return node.log.with_name(f"log.{host}")


def test_ssh_hands_on_the_network_interfaces(node: Node, checkout: Path) -> None:
    node.program("ssh", SSH + 'echo "ssh $*" >>"$LOG"')
    names = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0,eth1"}
    assert node.run("one", "--", YAML, script="ssh.sh", BIPHASIC_HOME=str(checkout), **names) == 0
    node.log = log_of(node, "one")
    [command] = node.lines("ssh ")
    assert {f"{name}={value}" for name, value in names.items()} <= set(shlex.split(command))


def test_ssh_gives_each_host_its_rank(node: Node, checkout: Path) -> None:
    arguments = ("me@one", "two", "--", YAML, "name=with 'a quote' and $HOME")
    assert node.run(*arguments, script="ssh.sh", BIPHASIC_HOME=str(checkout), NPROC="2") == 0
    for rank, host in enumerate(arguments[:2]):
        node.log = log_of(node, "me@one").with_name(f"log.{host}")
        main = str(checkout / "src" / "main.py")
        assert node.launches() == [[*multi(2, 4, rank, "one", 7501)[:-2], main, YAML, arguments[-1]]]


@pytest.mark.parametrize(
    ("one", "two", "status"), [("0", "0", 0), ("75", "75", 75), ("2", "1", 2), ("0", "7", 7), ("75", "255", 255)]
)
def test_ssh_returns_the_hosts_status(node: Node, checkout: Path, one: str, two: str, status: int) -> None:
    node.program("ssh", SSH + f"[[ $host == one ]] && exit {one}\nexit {two}")
    assert node.run("one", "two", "--", YAML, script="ssh.sh", BIPHASIC_HOME=str(checkout)) == status


def test_ssh_forwards_a_signal(node: Node, checkout: Path) -> None:
    process = node.start("one", "two", "--", YAML, script="ssh.sh", BIPHASIC_HOME=str(checkout), STATUSES="wait")
    logs = [log_of(node, host) for host in ("one", "two")]
    for node.log in logs:
        node.wait_for("rank ")
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 75
    for node.log in logs:
        assert node.lines("rank got ") == ["SIGUSR1"]


def test_a_lost_connection_saves(node: Node, checkout: Path) -> None:
    """Nobody reads the output any more, and sshd gives programs that would end by that."""
    remote = REMOTE.replace("HUP", "HUP,PIPE")
    node.program("ssh", SSH + remote.removeprefix("exec ") + " > >(head -n 1 >/dev/null) 2> >(head -n 1 >/dev/null)")
    process = node.start("one", "--", YAML, script="ssh.sh", BIPHASIC_HOME=str(checkout), STATUSES="wait")
    node.log = log_of(node, "one")
    node.wait_for("rank ")
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 75
    assert node.lines("rank got ") == ["SIGUSR1"]


def test_ssh_ends_all_hosts_when_one_has_ended(node: Node, checkout: Path) -> None:
    node.program("ssh", SSH + "[[ $host == one ]] && { sleep 1; exit 255; }\n" + REMOTE)
    status = node.run("one", "two", "--", YAML, script="ssh.sh", BIPHASIC_HOME=str(checkout), STATUSES="wait")
    assert status == 255
    node.log = log_of(node, "two")
    assert node.lines("rank got ") == ["SIGUSR1"]


def test_ssh_prints_its_usage(node: Node) -> None:
    for arguments in (("one", "two"), ("--", YAML), ("one", "--")):
        assert node.run(*arguments, script="ssh.sh") == 2
        assert "usage" in node.output
