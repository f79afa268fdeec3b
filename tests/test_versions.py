"""What Biphasic replaces inside other libraries: another form is refused before anything is replaced."""

import os
import re
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from mteb.abstasks.retrieval import AbsTaskRetrieval

from biphasic.errors import UserError
from biphasic.evaluation import scoring, tasks
from biphasic.evaluation.sets import retrieval_task
from biphasic.training import parallel
from biphasic.versions import require_form


class Library:
    """Stands for a library's class."""

    folder = Path("cache")

    def take(self, names, retry=0):
        pass

    @property
    def degree(self):
        return -1


def take(self, names, retry=1):
    pass


def test_the_original_is_returned_when_its_form_is_known():
    assert require_form("pytest", Library, "take", take) is Library.take
    assert require_form("pytest", Library, "degree", property(lambda self: 2)) is Library.degree
    assert require_form("pytest", Library, "folder", Path("other")) == Path("cache")


def test_a_method_is_compared_without_self_where_it_is_bound():
    def bound(names, retry):
        pass

    library = Library()
    assert require_form("pytest", library, "take", bound) == library.take
    with pytest.raises(UserError):
        require_form("pytest", library, "take", take)


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("take", lambda self, names: None, "has the parameters (self, names, retry), but .* parameters (self, names)"),
        ("take", lambda self, retry, names: None, "has the parameters (self, names, retry), but .*"),
        ("took", take, "does not exist, but Biphasic replaces one that has the parameters (self, names, retry)"),
        ("degree", take, "is of type property, but Biphasic replaces one that has the parameters"),
        ("folder", "other", "is of type PosixPath, but Biphasic replaces one that is of type str"),
    ],
)
def test_another_form_is_refused_in_one_line(name, replacement, message):
    with pytest.raises(UserError) as refused:
        require_form("pytest", Library, name, replacement)
    expected = re.escape(message).replace(r"\.\*", ".*")
    begin = re.escape(f"pytest {version('pytest')}: {__name__}.Library.{name} ")
    assert re.match(f"{begin}{expected}.*requirements.lock.*docs/versions.md", str(refused.value))
    assert "\n" not in str(refused.value)


def test_a_module_is_named_by_its_path():
    module = types.ModuleType("library.inside")
    with pytest.raises(UserError, match=r"library\.inside\.take does not exist"):
        require_form("pytest", module, "take", take)


def test_offline_flags_in_another_form_are_refused(monkeypatch):
    from datasets import config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", "0")
    with pytest.raises(UserError, match=r"huggingface_hub \S+: huggingface_hub.constants.HF_HUB_OFFLINE is of type str"):
        tasks._local_only(Path("cache")).__enter__()
    monkeypatch.delattr(config, "HF_HUB_OFFLINE")
    with pytest.raises(UserError, match=r"datasets \S+: datasets.config.HF_HUB_OFFLINE does not exist"):
        tasks._local_only(Path("cache")).__enter__()
    assert "HF_HUB_OFFLINE" not in os.environ


def test_a_cache_folder_in_another_form_is_refused(monkeypatch, tmp_path):
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"datasets \S+: datasets.config.HF_DATASETS_CACHE is of type str"):
        tasks._local_only(tmp_path).__enter__()


def test_scores_by_query_in_another_form_are_refused(monkeypatch):
    task = retrieval_task("set", {"d": "text"}, {"q": "query"}, {"test": {"q": {"d": 1}}})
    monkeypatch.setattr(AbsTaskRetrieval, "task_specific_scores", lambda self, scores, qrels, split: {})
    with pytest.raises(UserError, match=r"mteb \S+: .*task_specific_scores has the parameters \(scores, qrels, split\)"):
        scoring.score(None, task)
    assert "task_specific_scores" not in vars(task)


def test_degrees_of_sharding_in_another_form_are_refused(monkeypatch):
    assert parallel._FSDP2(2, 4).data_parallel_shard_degree == 4
    monkeypatch.setattr(parallel.FSDP2Config, "data_parallel_shard_degree", lambda self: -1)
    with pytest.raises(UserError, match=r"mosaicml \S+: \S+FSDP2Config.data_parallel_shard_degree has the parameters"):
        parallel._FSDP2(2, 4)
