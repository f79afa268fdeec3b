"""What Composer and transformers import in a run's process, and what the process can still do."""

import gc
import json
import subprocess
import sys

import pytest

from biphasic import composer_import

_PROCESS = """
import gc, json, signal, sys
from biphasic.composer_import import composer_imported

said = {}
def own(number, frame): ...
signal.signal(signal.SIGTERM, own)
with composer_imported():
    said["collects while it imports"] = gc.isenabled()
    import biphasic.training.recipe
said["handlers"] = [signal.getsignal(number).__name__ for number in (signal.SIGTERM, signal.SIGINT)]
said["collects after it"] = gc.isenabled() and gc.get_threshold()[0] > 0
said["left out of collections"] = frozen = gc.get_freeze_count()
said["not imported"] = not {"scipy", "matplotlib", "paramiko", "mcli.api"} & set(sys.modules)
with composer_imported():
    said["collects in a second block"] = gc.isenabled()
said["left out after a second block"] = gc.get_freeze_count()

import mcli
said["mcli"] = mcli.update_run_metadata.__name__
import torch, paramiko, scipy.optimize, scipy.stats
from lightning_utilities.core import imports
from transformers.utils import is_scipy_available
said["scipy can be used"] = imports.package_available("scipy") and bool(imports.RequirementCache("scipy"))
said["transformers finds scipy"] = is_scipy_available()
from torchmetrics.classification import MulticlassAccuracy
metric = MulticlassAccuracy(3)
metric.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
said["accuracy"] = metric.compute().item()
print(json.dumps(said))
"""


def test_a_process_imports_composer_without_what_training_does_not_use_and_can_use_it_all_the_same() -> None:
    run = subprocess.run([sys.executable, "-c", _PROCESS], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")  # the leaks that nanobind would show go to stderr
    said = json.loads(run.stdout)
    frozen = said.pop("left out of collections")
    assert frozen > 100_000
    assert said == {
        "collects while it imports": False,
        "handlers": ["own", "default_int_handler"],
        "collects after it": True,
        "not imported": True,
        "collects in a second block": True,
        "left out after a second block": frozen,
        "mcli": "update_run_metadata",
        "scipy can be used": True,
        "transformers finds scipy": True,
        "accuracy": 0.5,
    }


def test_collections_begin_again_when_an_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "composer", raising=False)
    monkeypatch.setattr(composer_import, "_import_composer", lambda: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    with pytest.raises(ModuleNotFoundError), composer_import.composer_imported():
        raise ModuleNotFoundError
    assert gc.isenabled()
