"""Property tests: for any text and any override, `load` returns a configuration or raises a ConfigError with a message."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from biphasic.config.load import dump, load
from biphasic.errors import ConfigError

ROOT = Path(__file__).parents[2]
YAMLS = {
    name: ROOT / "yamls" / f"{name}.yaml"
    for name in ("quickstart", "210m_biphasic", "finetune/squad_v2", "finetune/msmarco", "sweep/paper",
                 "evaluate/retrieval", "data/quickstart", "data/tasks")
}  # fmt: skip
YAMLS["study"] = Path(__file__).parent / "study.yaml"


def keys_of(value: Any, key: str = "") -> list[str]:
    """All keys of a resolved configuration, those of lists and sections included."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    keys = [key] if key else []
    for name, child in children:
        keys += keys_of(child, f"{key}.{name}" if key else str(name))
    return keys


CONFIGS: dict[str, BaseModel] = {name: load(path) for name, path in YAMLS.items()}
KEYS = {name: keys_of(config.model_dump(mode="json")) for name, config in CONFIGS.items()}

# Values that are close to valid ones, and values that the readers of YAML handle specially.
SPECIAL = [
    "null", "~", "true", "on", "0", "-1", "1.5", "1e400", ".inf", "-.inf", ".nan", "0x1F", "1_000", "0o7", "12:30:45",
    "2001-99-99", "99999999999999999999", "9" * 5000, "''", '"\\ud800"', '"\\0"', "!!int x", "!!binary '='", "!!set {a}",
    "!!timestamp x", "&a [*a]", "*a", "${seed}", "${nothing}", "${oc.env:HOME}", "${", "???", "[", "{", "[[[[[[[[", "- a",
    "{a: 1, a: 2}", "{1: 2}", "{null: 1}", "[null]", "<<: 3", "{<<: 3}", "%", "@", "`", "\t", "s3:/x", "ftp://x", "s3://b/x",
    "200gb", "10 gigs", "21000ba", "0.5dur", "1dur", "0ba", "7sec", "1e300tok", "2ep", "{start: 0.5}", "[0.9, 0.95]", "auto",
    "[clm]", "{name: clm}", "[{name: mlm, until: 3ba}]", "{text}", "[" * 60 + "]" * 60,
]  # fmt: skip
TEXT = st.text(max_size=30)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | TEXT
    | st.sampled_from([*KEYS["quickstart"], "pretrain", "finetune", "sweep", "evaluate", "convert", "tasks", "mlm", "clm"])
)
NAMES = TEXT | st.sampled_from([name for keys in KEYS.values() for key in keys for name in key.split(".")])
TREES = st.recursive(
    SCALARS, lambda child: st.lists(child, max_size=4) | st.dictionaries(NAMES, child, max_size=4), max_leaves=12
)
VALUES = st.sampled_from(SPECIAL) | TEXT | TREES.map(lambda tree: yaml.safe_dump(tree, default_flow_style=True))


def require_config_or_message(path: Path, overrides: list[str], ranks: int = 1) -> None:
    """Load; a configuration must read back as itself, and an error must have a message for each problem."""
    try:
        config, refusal = load(path, overrides, ranks), None
    except ConfigError as error:
        config, refusal = None, error
    if refusal is not None:
        assert refusal.problems
        for problem in refusal.problems:
            assert problem.where and problem.message and "\n" not in problem.message
            assert not problem.message.startswith(("Input should", "Value error", "String should", "List should"))
        str(refusal).encode()  # it can be printed
    if config is not None:
        written = path.parent / "resolved.yaml"
        written.write_text(dump(config), encoding="utf-8")
        assert load(written, [], ranks) == config


def check_any_text(text: str, folder: Path) -> None:
    path = folder / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    require_config_or_message(path, [])


def check_any_override(name: str, data: st.DataObject, folder: Path) -> None:
    keys = st.sampled_from(KEYS[name]) | st.builds("{}.{}".format, st.sampled_from(KEYS[name]), NAMES) | TEXT
    overrides = data.draw(st.lists(st.builds("{}={}".format, keys, VALUES) | TEXT, min_size=1, max_size=3))
    path = folder / "valid.yaml"
    path.write_text(dump(CONFIGS[name]), encoding="utf-8")
    require_config_or_message(path, overrides, data.draw(st.sampled_from([1, 2, 3, 8])))


def check_any_values(name: str, data: st.DataObject, folder: Path) -> None:
    """Replace, remove or add values in the tree of a valid file."""
    tree = CONFIGS[name].model_dump(mode="json")
    for key in data.draw(st.lists(st.sampled_from(KEYS[name]), min_size=1, max_size=3)):
        *above, last = key.split(".")
        section: Any = tree
        for part in above:
            if isinstance(section, list):
                section = section[int(part)] if part.isdecimal() and int(part) < len(section) else None
            else:
                section = section.get(part)
            if not isinstance(section, dict | list):
                break
        if isinstance(section, dict):
            section[data.draw(st.just(last) | NAMES)] = data.draw(TREES)
        elif isinstance(section, list) and section:
            section[min(int(last), len(section) - 1) if last.isdecimal() else 0] = data.draw(TREES)
    path = folder / "changed.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=data.draw(st.booleans())), encoding="utf-8", errors="surrogatepass")
    require_config_or_message(path, [])


TEXTS = TEXT | TREES.map(yaml.safe_dump) | st.lists(st.builds("{}: {}".format, NAMES, VALUES), max_size=5).map("\n".join)
FEW = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(text=TEXTS)
@example(text="\x00").via("a control character")
@example(text="a: \ud800").via("a lone surrogate")
@example(text="? [a]\n: b").via("a list as key")
def test_any_text(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_any_text(text, tmp_path_factory.getbasetemp())


@FEW
@given(name=st.sampled_from(sorted(YAMLS)), data=st.data())
def test_any_override(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_any_override(name, data, tmp_path_factory.getbasetemp())


@FEW
@given(name=st.sampled_from(sorted(YAMLS)), data=st.data())
def test_any_values(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_any_values(name, data, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@MANY
@given(text=TEXTS)
def test_thousands_of_texts(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_any_text(text, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@MANY
@given(name=st.sampled_from(sorted(YAMLS)), data=st.data())
def test_thousands_of_overrides(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_any_override(name, data, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@MANY
@given(name=st.sampled_from(sorted(YAMLS)), data=st.data())
def test_thousands_of_values(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_any_values(name, data, tmp_path_factory.getbasetemp())
