"""`import biphasic` imports nothing else."""

import subprocess
import sys
from pathlib import Path


def test_importing_biphasic_is_light() -> None:
    code = "import sys; before = set(sys.modules); import biphasic; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["biphasic"]), done.stderr


def test_a_missing_task_is_said_before_pytorch_is_imported(tmp_path: Path) -> None:
    """Ten seconds before, on a slow disk a minute."""
    (tmp_path / "task.yaml").write_text(
        "job: finetune\nrun_name: trial\nmodel: {path: model}\ntask: {kind: classification, name: mine, data: nothing}\n"
        "output: out\nmax_duration: 1ep\n"
    )
    # `watch` would find out when it starts the first trial: after the run's first checkpoint.
    (tmp_path / "run").mkdir()
    for command in ("main.main(['task.yaml'])", "commands.main(['watch', 'run', '--task', 'task.yaml'])"):
        code = f"import sys; from biphasic import commands, main; {command}; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout == "False\n", done.stderr
        assert done.stderr == "task.data nothing: there is no such folder: expected one that `biphasic tasks` made\n"
