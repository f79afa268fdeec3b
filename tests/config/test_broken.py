"""Broken YAMLs: every message names the key, the file and what was expected; none imports torch or Composer."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from biphasic.config.convert import ConvertConfig
from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.load import load, load_job
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import ConfigError, UserError

BROKEN = sorted((Path(__file__).parent / "broken").glob("*.yaml"))
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_message_names_the_key(path: Path) -> None:
    key, expected = (line.partition(": ")[2] for line in path.read_text().splitlines()[:2])
    with pytest.raises(ConfigError) as caught:
        load(path)
    problems = caught.value.problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    assert problems[0].key == key
    assert expected in problems[0].message
    # The place is this file, with the line where the key (or the section that lacks it) stands.
    assert problems[0].where.split(":")[0].endswith(("nowhere.yaml", path.name))


def test_broken_yamls_import_neither_torch_nor_composer() -> None:
    code = (
        "import sys; sys.path.insert(0, 'src')\nimport main\n"
        f"for path in {[str(path) for path in BROKEN]!r}:\n"
        "    assert main.main([path]) == 2, path\n"
        "    assert main.main([path, '--plan']) == 2, path\n"
        "assert not {'torch', 'composer', 'streaming', 'transformers'} & set(sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr


def test_all_errors_of_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "many.yaml"
    path.write_text((ROOT / "yamls" / "quickstart.yaml").read_text() + "\nsede: 3\n")
    with pytest.raises(ConfigError) as caught:
        # An unknown key, a wrong type and, beside them, an impossible combination and a wrong override.
        load(path, ["optimizer.lr=fast", "microbatch_size=5", "schedule.warmpu=3ba"])
    places = {problem.key: problem.where for problem in caught.value.problems}
    lines = path.read_text().splitlines()
    assert places == {
        "sede": f"{path}:{lines.index('sede: 3') + 1}",
        "optimizer.lr": "command line",
        "microbatch_size": "command line",
        "schedule.warmpu": "command line",
    }


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.lr", "optimizer.lr"),
        ("objective.phases.7.until=3ba", "objective.phases.7.until"),
        ("=3", "=3"),
        ("optimiser.lr=2e-4", "optimiser"),
        ("optimizer.lr.x=3", "optimizer.lr"),
    ],
)
def test_invalid_overrides(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(ROOT / "yamls" / "quickstart.yaml", [override])
    assert caught.value.problems[0].where == "command line"
    assert caught.value.problems[0].key == key


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("###", "null"), ("---", "null"), ("&a", "null"), ("--- x", '"x"'), ("exp #2", '"exp"'), ("東京\t#2", '"東京"'),
        ("null # none", "null"), ("5 # five", "5"), ("[a] #b", '["a"]'), ("|", '""'),
    ],
)  # fmt: skip
def test_an_override_of_which_yaml_ignores_a_part(text: str, read: str) -> None:
    """The override in the message, as a shell passes it, gives the text."""
    with pytest.raises(ConfigError) as caught:
        load(CONVERT, [f"source.separator={text}"])
    [problem] = caught.value.problems
    assert (problem.where, problem.key) == ("command line", "source.separator")
    assert problem.message.startswith(f"YAML reads {text!r} as {read}: ")
    [override] = shlex.split(problem.message.rpartition(", ")[2])
    config: Any = load(CONVERT, [override])
    assert config.source.separator == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("~", None),
        (" Null ", None),
        ("'###'", "###"),
        ('"a # b"', "a # b"),
        ("a#b", "a#b"),
        ("a ---", "a ---"),
    ],
)
def test_an_override_that_yaml_reads_as_a_whole(text: str, value: str | None) -> None:
    config: Any = load(CONVERT, [f"source.separator={text}"])
    assert config.source.separator == value


def test_global_batch_must_divide_by_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size: expected a multiple of the number of ranks \(3\)"):
        load(ROOT / "yamls" / "quickstart.yaml", [], ranks=3)


QUICKSTART = ROOT / "yamls" / "quickstart.yaml"
FINETUNE = ROOT / "yamls" / "finetune" / "sst2.yaml"
CONVERT = ROOT / "yamls" / "data" / "quickstart.yaml"
SWEEP = ROOT / "yamls" / "sweep" / "paper.yaml"


@pytest.mark.parametrize(
    ("path", "override", "message"),
    [
        # Numbers that no run can use.
        (QUICKSTART, "evaluation.interval=1e-12dur", "evaluation.interval: expected a positive length; got 1e-12dur"),
        (QUICKSTART, "optimizer.lr=.inf", "optimizer.lr: expected a finite number; got inf"),
        (QUICKSTART, "optimizer.weight_decay=.nan", "optimizer.weight_decay: expected a finite number; got nan"),
        (QUICKSTART, "seed=99999999999999999999", "seed: expected less than 4294967296; got 99999999999999999999"),
        (QUICKSTART, "seed=4294967296", "seed: expected less than 4294967296; got 4294967296"),
        (QUICKSTART, "seed=-1", "seed: expected at least 0; got -1"),
        (QUICKSTART, "checkpoint.keep=99999999999999999999", "checkpoint.keep: expected an integer of at most 64 bits"),
        (QUICKSTART, "max_duration=1e400ba", "max_duration: expected less than 2**63; got '1e400ba'"),
        (SWEEP, "learning_rates=[1e-5, .inf]", "learning_rates.1: expected a finite number; got inf"),
        # Addresses that nothing reads.
        (QUICKSTART, "data.train={local: a, remote: s3:/oops}", "data.train.remote: expected a local path, s3://…, gs://…, az://…"),
        (QUICKSTART, "checkpoint.folder=ftp://x", "checkpoint.folder: expected a local path, s3://…, gs://…, az://…"),
        (QUICKSTART, "checkpoint.folder=s3:///x", "checkpoint.folder: expected a local path, s3://…, gs://…, az://…"),
        (QUICKSTART, "output=s3://bucket/x", "output: expected a local path; got 's3://bucket/x'"),
        (QUICKSTART, "output=''", "output: expected a local path; got ''"),
        (FINETUNE, "model.path=http://host/x", "model.path: expected a local path, s3://…, gs://…, az://…, oci://…, hf"),
        (CONVERT, "source.paths=[text, file:///x]", "source.paths.1: expected a local path, s3://…"),
        # Sizes.
        (QUICKSTART, "data.cache_limit=10 gigs", "data.cache_limit: expected a size such as 200gb; got '10 gigs'"),
        (QUICKSTART, "data.cache_limit=10gb extra", "data.cache_limit: expected a size such as 200gb; got '10gb extra'"),
        (QUICKSTART, "data.cache_limit=0gb", "data.cache_limit: expected greater than 0; got '0gb'"),
        (CONVERT, "unit_bytes=1kb", "unit_bytes: expected at least 65536; got '1kb'"),
        (CONVERT, "shard_bytes=5gb", "shard_bytes: expected less than 4294967296; got '5gb'"),
        (CONVERT, "unit_bytes=1.5", "unit_bytes: expected a size such as 200gb; got 1.5"),
        (CONVERT, "max_tokens=1.5", "max_tokens: expected a valid integer; got 1.5"),
        (FINETUNE, "task.max_length=1.0", "task.max_length: expected less than 1; got 1.0"),
        # Texts without content.
        (QUICKSTART, "tokenizer=", "tokenizer: expected a value; got nothing (tokenizer=null sets null)"),
        (QUICKSTART, "tokenizer=' '", "tokenizer: expected a text that is not empty; got ' '"),
        (QUICKSTART, "data.folder=", "data.folder: expected a value; got nothing (data.folder=null sets null)"),
        (CONVERT, "text_column=''", "text_column: expected a text that is not empty; got ''"),
        (CONVERT, "source={kind: hub, path: ''}", "source.path: expected a text that is not empty; got ''"),
        # Each kind of pydantic's errors.
        (QUICKSTART, "run_name=a b", "run_name: expected a name of letters, digits, `.`, `_` and `-`; got 'a b'"),
        (QUICKSTART, "objective.phases=[]", "objective.phases: expected at least 1 item; got []"),
        (QUICKSTART, "optimizer.betas=[0.9]", "optimizer.betas: expected at least 2 items; got [0.9]"),
        (QUICKSTART, "optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas: expected at most 2 items; got [0.9, 0.9, 0.9]"),
        (QUICKSTART, "optimizer.betas=0.9", "optimizer.betas: expected a valid list; got 0.9"),
        (QUICKSTART, "logging.tensorboard=3", "logging.tensorboard: expected true or false; got 3"),
        (QUICKSTART, "data.mix=3", "data.mix: expected `key: value` lines below it; got 3"),
        (QUICKSTART, "data={1: 2}", "data.1: expected a text as key; got 1"),
        (QUICKSTART, "data=null", "data: expected `key: value` lines below it; got None"),
        (QUICKSTART, "objective.phases=[{until: 3ba}]", "objective.phases.0.name: is missing; expected one of clm, mlm"),
        (CONVERT, "validation_fraction=1.5", "validation_fraction: expected less than 1; got 1.5"),
        (CONVERT, "sequence_length=3", "sequence_length: expected at least 16; got 3"),
        # A value of several types.
        (
            QUICKSTART,
            "objective.phases.1.masking_ratio=1.5",
            "objective.phases.1.masking_ratio: expected less than 1; got 1.5",
        ),
        (
            QUICKSTART,
            "objective.phases.1.masking_ratio={start: 0.5}",
            "objective.phases.1.masking_ratio.end: is missing, and has no default",
        ),
        (
            QUICKSTART,
            "objective.phases.1.masking_ratio={start: 0.5, end: 1.5}",
            "objective.phases.1.masking_ratio.end: expected less than 1; got 1.5",
        ),
        (
            QUICKSTART,
            "objective.phases.1.masking_ratio=many",
            "objective.phases.1.masking_ratio: expected a valid number or `key: value` lines below it; got 'many'",
        ),
        (QUICKSTART, "objective.phases.5.until=3ba",
         "objective.phases.5.until: there is no item 5 in objective.phases: expected 0 to 1"),
        (QUICKSTART, "microbatch_size=many", "microbatch_size: expected a valid integer or 'auto'; got 'many'"),
        (QUICKSTART, "microbatch_size=0", "microbatch_size: expected greater than 0; got 0"),
        # YAML itself.
        (QUICKSTART, "tokenizer=" + "[" * 2000 + "]" * 2000, "tokenizer: a value contains itself, or is nested too deeply"),
        (QUICKSTART, f"seed={'9' * 5000}", "seed: Exceeds the limit (4300 digits)"),
        (QUICKSTART, "tokenizer=${nothing}",
         "tokenizer: refers to nothing, which has no value: set nothing, or correct the name"),
        (QUICKSTART, "output=${PATH}/runs",
         "output: refers to a key PATH: the environment's variable is ${oc.env:PATH}, or $PATH in a shell"),
    ],
)  # fmt: skip
def test_message_of_an_invalid_value(path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(path, [override])
    [problem] = caught.value.problems
    assert f"command line: {message}" in str(problem) or str(problem).endswith(message)
    assert problem.message.count("expected") == message.count("expected")


def test_sizes_are_decimal_numbers_of_bytes() -> None:
    remote = ["data.folder=s3://bucket"]
    for text, size in {"200gb": 200 * 10**9, "1.5 MB": 1_500_000, "1GiB": 2**30, "1000b": 1000, "4096": 4096}.items():
        config = load(QUICKSTART, [*remote, f"data.cache_limit={text}"])
        assert isinstance(config, PretrainConfig)
        assert config.data.cache_limit == size
    evaluation = load(ROOT / "yamls" / "evaluate" / "quick.yaml", ["cache_limit=2tb"])
    assert isinstance(evaluation, EvaluateConfig)
    assert evaluation.cache_limit == 2 * 10**12


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("unit_bytes=1mb", 10**6), ("unit_bytes=1_000kb", 10**6), ("unit_bytes=1_000_000", 10**6), ("unit_bytes=1e6", 10**6),
        ("shard_bytes=64MiB", 2**26), ("max_tokens=1e9", 10**9), ("max_tokens=1_000_000_000", 10**9),
        ("sequence_length=1e3", 1000), ("cluster.retries=1_0", 10),
    ],
)  # fmt: skip
def test_every_size_and_count_takes_the_same_forms(override: str, value: int) -> None:
    config = load(CONVERT, [override])
    number: Any = config
    for name in override.partition("=")[0].split("."):
        number = getattr(number, name)
    assert number == value


def test_texts_that_may_be_blank() -> None:
    load(CONVERT, ["filters=[{column: language, none_of: ['']}]"])
    load(ROOT / "yamls" / "finetune" / "own_retrieval.yaml", ["task.query_prompt=''"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 2000 + "]" * 2000, "is not valid YAML: a value contains itself, or is nested too deeply"),
        ("a: &a [*a]", "is not valid YAML: YAML recursive aliases are not supported"),
        ("a: !!int x", "is not valid YAML: "),
        ("a: " + "9" * 5000, "is not valid YAML: Exceeds the limit (4300 digits)"),
        ("defaults: {a: 3}", "defaults: expected the path of a YAML or a list of paths; got {'a': 3}"),
        ("defaults: [3]", "defaults: expected the path of a YAML or a list of paths; got [3]"),
        ("0", "expected `key: value` lines at the top"),
        ("abc", "expected `key: value` lines at the top"),
        ("- a", "expected `key: value` lines at the top"),
        ("a: 3", "job: is missing; expected one of pretrain, finetune, evaluate, convert, tasks, sweep"),
        ("job: [3]", "job: got "),
        ("job: null", "job: got None, expected one of"),
        ("job: pretrain\n0.5: 1", "0.5: expected a text as key; got 0.5"),
    ],
)  # fmt: skip
def test_message_of_an_invalid_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "invalid.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value) or "can't be read" in message


def test_a_folder_in_place_of_a_yaml(tmp_path: Path) -> None:
    """As of `biphasic show conv/main 0`, which needs the YAML of a run that reads the rows."""
    for schema, job in ((PretrainConfig, "pretrain"), (ConvertConfig, "convert")):
        with pytest.raises(UserError, match=rf"^{tmp_path}: is a folder; expected a YAML of job: {job}$"):
            load_job(schema, tmp_path)


@pytest.mark.parametrize("text", ["{text} {text_pair}", "{text}", "{text}: {text_pair}", " {text_pair}, {text}"])
def test_a_template_is_an_override_as_a_shell_passes_it(text: str) -> None:
    """YAML would take the first one for a damaged mapping and the second for a mapping."""
    file = ROOT / "yamls" / "finetune" / "own_classification.yaml"
    task: Any = load(file, [f"task.text={text}"]).task
    assert task.text == text


def test_the_override_in_a_yaml_s_comment_works_in_a_shell() -> None:
    file = ROOT / "yamls" / "finetune" / "own_classification.yaml"
    comment = file.read_text().splitlines()[0]
    [override] = [word for word in shlex.split(comment) if word.startswith("task.text=")]
    task: Any = load(file, [override]).task
    assert task.text == "{text} {text_pair}"
