"""The GPU image's essentials, without Docker: its environment for an unknown user, and its choice of packages."""

import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from conftest import Write
from helpers.tiny import ROOT, config_of, losses

DOCKERFILE = re.sub(r"^ *#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
UID = 12345
READ_ONLY = f"""
set -e
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
cd "$1"  # the folder before was that of the writable mount
shift
exec unshare --user --map-user={UID} --map-group={UID} "$@"
"""
CODE = """
import getpass, os, runpy, sys
from pathlib import Path

if os.access("src", os.W_OK):
    sys.exit("the source can be written")
print("user", os.getuid(), getpass.getuser())
from torch._inductor.runtime.cache_dir_utils import cache_dir
from triton import knobs
from huggingface_hub.constants import HF_HOME
for folder in (cache_dir(), knobs.cache.dir, HF_HOME):
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "written").touch()
sys.argv = ["src/main.py", *sys.argv[1:]]
runpy.run_path("src/main.py", run_name="__main__")
"""


def image_environment() -> dict[str, str]:
    """The variables that the Dockerfile's ENV lines set."""
    lines = re.findall(r"^ENV (.+)$", DOCKERFILE, re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def in_read_only_root(*command: str) -> list[str]:
    """A command that runs as a user without a name, in a mount namespace in which the repository is read-only."""
    return ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", READ_ONLY, "bash", str(ROOT), *command]


def test_a_run_of_a_user_that_the_image_does_not_know(write_yaml: Write, tmp_path: Path) -> None:
    """As `docker run --user "$(id -u):$(id -g)"`: no name, no home in /etc/passwd, and only mounted folders are writable."""
    if subprocess.run(in_read_only_root("true"), capture_output=True).returncode:
        pytest.skip("user namespaces are not allowed here")
    home = tmp_path / "home"
    home.mkdir()
    image = {name: value.replace("/home/biphasic", str(home)) for name, value in image_environment().items()}
    environment = {**image, "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "PYTHONPATH": "src"}  # fmt: skip
    path = write_yaml(max_duration="2ba", objective__phases=[{"name": "clm"}], schedule={"warmup": "0ba", "decay": "0ba"})
    command = in_read_only_root(sys.executable, "-c", CODE, str(path))
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert f"user {UID} {image['USER']}\n" in run.stdout
    assert len(losses(config_of(path).run_folder)) == 2
    written = {file.relative_to(home).as_posix() for file in home.rglob("written")}
    assert written == {".triton/cache/written", ".cache/huggingface/written"}


def test_the_printed_command(tmp_path: Path) -> None:
    """It starts node.sh as the caller, with writable folders for all that the YAML writes, and the caller's BUCKET."""
    text = (ROOT / "Dockerfile").read_text().partition("\n#\n# BUCKET")[0]
    lines = [line[1:] for line in text.splitlines() if line.startswith("#     ")]
    replaced = ["docker() { printf '%s\\0' \"$@\" >>calls; printf '\\n' >>calls; }", "git() { echo abc; }"]
    script = "\n".join([*replaced, *lines])
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True)
    build, run, _ = (tmp_path / "calls").read_bytes().decode().split("\n")
    assert build.split("\0")[:-1] == ["build", "--build-arg", "COMMIT=abc", "-t", "biphasic", "."]
    options, _, command = run.removesuffix("\0").partition("\0biphasic\0")
    words = options.split("\0")
    mounts = dict(words[index + 1].split(":") for index, word in enumerate(words) if word == "-v")
    assert mounts == {str(tmp_path / name): f"/app/{name}" for name in ("runs", "data")}
    assert all(Path(folder).is_dir() for folder in mounts), "Docker would create them as root"
    assert words[words.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert {words[index + 1] for index, word in enumerate(words) if word == "-e"} >= {"BUCKET", "AWS_SECRET_ACCESS_KEY"}
    assert {"--gpus", "--ipc=host", "memlock=-1"} <= set(words)
    script, file = command.split("\0")
    assert os.access(ROOT / script, os.X_OK)
    config = config_of(ROOT / file, global_batch_size=8)
    assert {Path(config.output).parts[0], *(Path(split.local).parts[0] for split in config.data.splits.values())} == {
        "runs",
        "data",
    }


def test_results_are_neither_removed_nor_copied_into_the_image() -> None:
    cleaned = subprocess.run(
        ["make", "--no-print-directory", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert cleaned.split() == ["rm", "-rf", ".venv", ".venv-oldest"]
    written = re.findall(r"^/(\w+)/$", (ROOT / ".gitignore").read_text(), re.MULTILINE)
    assert {"runs", "encoders"} <= set(written) <= set((ROOT / ".dockerignore").read_text().split())


def test_overrides_with_spaces_stay_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In Kubernetes' manifest, which also gets the YAML of a study's run."""
    monkeypatch.syspath_prepend(ROOT / "recipes" / "launch")
    import kubernetes_job

    prompt = "task.query_prompt=Which text = the answer?"
    monkeypatch.setenv("RUN_YAML", "am9iOiBwcmV0cmFpbg==")
    assert kubernetes_job.main(["mine", "a.yaml", "seed=1", prompt]) == 0
    _, job = yaml.safe_load_all(capsys.readouterr().out)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["a.yaml", "seed=1", prompt]
    assert {"name": "RUN_YAML", "value": "am9iOiBwcmV0cmFpbg=="} in container["env"]


def test_names_of_kubernetes_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are labels of DNS, with the number of a pod after them, and each run has its own."""
    monkeypatch.syspath_prepend(ROOT / "recipes" / "launch")
    import kubernetes_job

    runs = [
        "610m-clm-10k",
        "a-b",
        "a_b",
        "A.B",
        "a-b-",
        "日本",
        "日",
        "x" * 50,
        "x" * 80,
        "x" * 81,
        f"{'x' * 42}-{'y' * 40}",
    ]
    names = [kubernetes_job.resources(run, [], {})[1]["metadata"]["name"] for run in runs]
    assert names[:2] == ["biphasic-610m-clm-10k", "biphasic-a-b"] and names[7] == f"biphasic-{'x' * 50}"
    assert len(set(names)) == len(runs)
    assert all(re.fullmatch("[a-z]([a-z0-9-]{0,57}[a-z0-9])?", name) for name in names), names


def test_the_image_has_what_nccl_and_node_sh_use() -> None:
    [packages] = re.findall(r"apt-get install -y --no-install-recommends ([^&]+)", DOCKERFILE)
    assert {"libibverbs1", "ibverbs-providers", "procps", "g++", "libc6-dev", "python3-dev"} <= set(packages.split())


def wheel(folder: Path, name: str, version: str, *requirements: str) -> None:
    """Write a wheel without content."""
    stem = f"{name.replace('-', '_')}-{version}"
    record = f"{stem}.dist-info"
    metadata = "".join(f"Requires-Dist: {requirement}\n" for requirement in requirements)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        file.writestr(f"{record}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
        file.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{record}/RECORD", "".join(f"{record}/{name},,\n" for name in ("METADATA", "WHEEL", "RECORD")))


@pytest.mark.parametrize("backend", ["", "cu126"])
def test_the_image_s_torch_has_its_libraries(backend: str, tmp_path: Path) -> None:
    """The Dockerfile's command with stand-ins for wheels: another torch needs other packages than those of the lock."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    [build] = re.findall(r"^RUN (pip install .+)$", DOCKERFILE, re.MULTILINE)
    if backend:  # uv then looks at PyTorch's index alone, whose wheels have such versions
        build = build.replace("UV_TORCH_BACKEND=$TORCH_BACKEND", "")
        wheel(wheels, "torch", "2.14.0+cu126", "nvidia-cudnn-cu12==9.10", "triton==3.8.0")
    else:
        wheel(wheels, "torch", "2.15.0", "nvidia-cudnn-cu13==9.26", "triton==3.9.0")
    for name in ("numpy-2.4", "numpy-2.5", "nvidia-cudnn-cu12-9.10", "nvidia-cudnn-cu13-9.26", "triton-3.8.0",
                 "triton-3.9.0", "torchmetrics-1.9.0", "kernels-4.0"):  # fmt: skip
        wheel(wheels, *name.rsplit("-", 1))
    wheel(wheels, "mosaicml", "0.32.1", "torch<2.7.1", "numpy<2.3", "torchmetrics")
    lock = ["mosaicml==0.32.1", "numpy==2.4", "nvidia-cudnn-cu13==9.26", "torch==2.15.0", "torchmetrics==1.9.0",
            "triton==3.9.0"]  # fmt: skip
    (tmp_path / "requirements.lock").write_text("".join(f"{line}\n" for line in lock))
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\nversion = "1"\n'
        '[project.optional-dependencies]\nall = ["mosaicml==0.32.1", "torch>=2.11"]\ngpu = ["kernels"]\n'
        f'[tool.uv]\nno-index = true\nfind-links = ["{wheels}"]\noverride-dependencies = ["torch>=2.11", "numpy>=2.4"]\n'
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "uv").symlink_to(Path(sys.executable).parent / "uv")
    (programs / "pip").write_text("#!/bin/sh\n")
    (programs / "pip").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "TORCH_BACKEND": backend}
    venv = tmp_path / "venv"
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, venv], env=environment, check=True)
    build = build.replace("/tmp/", f"{tmp_path}/").replace("/opt/venv", str(venv))
    run = subprocess.run(["sh", "-e", "-c", build], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = {path.name.removesuffix(".dist-info").replace("_", "-") for path in venv.glob("lib/*/site-packages/*.dist-info")}
    same = {"mosaicml-0.32.1", "numpy-2.4", "torchmetrics-1.9.0"}
    cuda12 = {"torch-2.14.0+cu126", "nvidia-cudnn-cu12-9.10", "triton-3.8.0"}
    cuda13 = {"torch-2.15.0", "nvidia-cudnn-cu13-9.26", "triton-3.9.0", "kernels-4.0"}
    assert found == same | (cuda12 if backend else cuda13)


def test_the_page_leaves_the_same_lines_out_of_the_lock() -> None:
    [pattern] = re.findall(r"grep -vE '([^']+)' requirements\.lock", DOCKERFILE)
    assert f"grep -vE '{pattern}' requirements.lock >others.txt\n" in (ROOT / "docs" / "versions.md").read_text()
    names = {line.partition("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()}
    left_out = {name for name in names if re.match(pattern, f"{name}==1")}
    assert {"torch", "torchvision", "triton", "nvidia-nccl-cu13", "cuda-bindings"} <= left_out
    assert left_out.isdisjoint({"torchmetrics", "torch-optimizer", "numpy"})
