"""The plan of every YAML; `defaults:`, overrides, and reading a resolved configuration back."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from biphasic.config.load import dump, load
from biphasic.config.phases import ScheduleConfig
from biphasic.config.plan import plan
from biphasic.config.pretrain import PretrainConfig
from biphasic.durations import Duration, TrainingProgress
from biphasic.model.architecture import Architecture
from biphasic.timeline import learning_rate_factor
from helpers.cpu_time import run_measured

ROOT = Path(__file__).parents[2]
YAMLS = sorted(
    path.relative_to(ROOT)
    for folder in ("yamls", "recipes")
    for path in (ROOT / folder).rglob("*.yaml")
    if path.parent.name not in ("base", "launch")  # launchers' own files
    and path.name != "paper_models.yaml"  # for `biphasic report --models`
)


# A sweep's plan looks for its models on the hub.
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}


def main(*arguments: str) -> subprocess.CompletedProcess[str]:
    return timed_main(*arguments)[0]


def timed_main(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    return run_measured([sys.executable, "src/main.py", *arguments], cwd=ROOT, env=OFFLINE)


def test_every_yaml_has_a_plan(tmp_path: Path) -> None:
    # In a folder without `runs`: what is done in the clone has a shorter plan.
    for name in ("recipes", "yamls"):
        (tmp_path / name).symlink_to(ROOT / name)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\nimport main\n"
        f"for path in {[str(path) for path in YAMLS]!r}:\n"
        "    print('plan of', path, flush=True)\n"
        "    assert main.main([path, '--plan']) == 0, path\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=OFFLINE)
    assert run.returncode == 0, run.stderr
    plans = run.stdout.split("plan of ")[1:]
    assert len(plans) == len(YAMLS) and all(len(text.splitlines()) > 3 for text in plans)


def test_quickstart_runs_on_two_ranks() -> None:
    config = load(ROOT / "yamls" / "quickstart.yaml", ranks=2)
    assert isinstance(config, PretrainConfig)
    assert plan(config, 2).details["rows_per_rank"] == 4


def test_the_plan_answers_in_under_three_seconds_and_touches_nothing(tmp_path: Path) -> None:
    run, seconds = timed_main("yamls/1b_biphasic.yaml", "--plan", f"output={tmp_path / 'runs'}")
    assert seconds < 3
    assert run.returncode == 0
    assert not list(tmp_path.iterdir())


def test_numbers_of_the_paper() -> None:
    run = main("yamls/210m_biphasic.yaml", "--plan", "--json", "--ranks", "192")
    run_plan = json.loads(run.stdout)
    # Parameters: the paper's appendix, table 1, with the untied head.
    assert run_plan["parameters"]["total"] == 310_266_624
    assert run_plan["tokens_per_batch"] == 2_359_296
    assert run_plan["batches"] == 42_000
    assert [(p["objective"], p["first_batch"], p["last_batch"]) for p in run_plan["phases"]] == [
        ("clm", 0, 20_999),
        ("mlm", 21_000, 41_999),
    ]
    assert [(c["batch"], c["lr"]) for c in run_plan["learning_rate"]] == [
        (0, 0.0),
        (2_000, 5e-4),
        (40_000, 5e-4),
        (42_000, 0.0),
    ]
    assert run_plan["rows_per_rank"] == 6


@pytest.mark.parametrize(("budget", "switch"), [("12000ba", 6_000), ("22000ba", 11_000), ("42000ba", 21_000)])
def test_budgets_by_an_override(budget: str, switch: int) -> None:
    config = load(ROOT / "yamls" / "210m_biphasic.yaml", [f"max_duration={budget}"])
    assert isinstance(config, PretrainConfig)
    assert plan(config, 1).details["phases"][1]["first_batch"] == switch


@pytest.mark.parametrize(("name", "total"), [("610m", 755_625_600), ("1b", 1_409_482_944)])
def test_parameters_of_the_larger_models(name: str, total: int) -> None:
    config = load(ROOT / "yamls" / f"{name}_biphasic.yaml")
    assert isinstance(config, PretrainConfig)
    parameters = plan(config, 1).details["parameters"]
    assert parameters is not None
    assert parameters["total"] == total


@pytest.mark.parametrize("path", YAMLS, ids=str)
def test_a_resolved_configuration_reads_back_as_itself(path: Path, tmp_path: Path) -> None:
    config = load(ROOT / path)
    written = tmp_path / "config.yaml"
    written.write_text(dump(config))
    assert load(written) == config


def test_flops_by_hand() -> None:
    """Two layers of the 210M shape, segments of 3 and 5 tokens: matrices, attention and head, forward times three."""
    size = Architecture(1000, hidden=768, ffn=3072, layers=2, heads=12, kv_heads=12, head_dim=64)
    matrices = 8 * 2 * (4 * 768 * 768 + 3 * 768 * 3072)  # a token's multiplications and additions with all weights
    pair = 2 * 2 * 768  # a score, and a value that is added up
    head = 2 * 768 * 1000
    both, before = 2 * (matrices + (9 + 25) * pair), 2 * (matrices + (6 + 15) * pair)
    assert size.flops([3, 5], causal=False, predicted=4) == 3 * (both + 4 * head)
    assert size.flops([3, 5], causal=True, predicted=6) == 3 * (before + 6 * head)
    # One of the two layers computed again, and a row's padding of 2 with it.
    padded = 10 / 8 * matrices + (6 + 15 + 3) * pair
    expected = 3 * (2 * padded + 6 * head) + padded
    assert size.flops([3, 5, 2], causal=True, predicted=6, recomputed=1) == expected


def test_flops_with_grouped_queries() -> None:
    """One layer, queries of 4 heads and keys of 2, each 8 wide, which together are not the width."""
    size = Architecture(100, hidden=16, ffn=40, layers=1, heads=4, kv_heads=2, head_dim=8)
    matrices = 2 * (16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 40)
    assert size.flops([1], causal=True, predicted=0) == 3 * (matrices + 4 * 32)


def test_flops_with_local_layers_and_modernbert_s_head() -> None:
    """Pairs of tokens are counted one by one; the released configuration and transformers' give the same dimensions."""
    sizes = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5}
    sizes |= {"num_attention_heads": 2, "local_attention": 6, "pad_token_id": 0}
    for family, distance in (("modernbert", 3), ("modernbert-decoder", 2)):
        config = AutoConfig.for_model(family, **sizes)
        size = Architecture.from_hf_config(config)
        released = {**sizes, "global_attn_every_n_layers": 3}
        assert Architecture.from_hf_config(SimpleNamespace(model_type=family, **released)) == size
        assert (size.local_layers, size.window, size.tied, size.dense_head) == (3, distance + 1, True, True)
        network = AutoModelForCausalLM if family == "modernbert-decoder" else AutoModelForMaskedLM
        total = sum(weight.numel() for weight in network.from_config(config).parameters())
        # Besides biases, the norms of the embedding and the head, and the first layer's missing one.
        assert size.parameters == total - 100 - 16
        for causal in (True, False):
            near, pairs = 0, 0
            for length in (9, 2, 14):
                for query, key in itertools.product(range(length), repeat=2):
                    pairs += not causal or key <= query
                    near += (not causal or key <= query) and abs(query - key) <= distance
            matrices = 2 * 25 * 5 * (4 * 16**2 + 3 * 16 * 24)
            attention = 4 * 16 * (2 * pairs + 3 * near)
            head = 2 * 7 * (100 * 16 + 16**2)
            assert size.flops((9, 2, 14), causal, 7) == pytest.approx(3 * (matrices + attention + head))


def test_memory_by_the_ranks_that_share_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    state_bytes = {}
    for strategy, degree in (("ddp", "all"), ("fsdp", "all"), ("fsdp", "node"), ("fsdp", 2)):
        keys = [f"parallelism.strategy={strategy}", f"parallelism.shard_degree={degree}", "microbatch_size=1"]
        config = load(ROOT / "yamls" / "210m_biphasic.yaml", keys, 16)
        assert isinstance(config, PretrainConfig)
        state_bytes[degree if strategy == "fsdp" else strategy] = plan(config, 16).details["memory_per_rank"]
    unsharded = 16 * 310_266_624
    assert state_bytes == {"ddp": unsharded, "all": unsharded // 16, "node": unsharded // 4, 2: unsharded // 2}
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # as on a laptop: machines of eight GPUs
    sharded = ["parallelism.strategy=fsdp", "parallelism.shard_degree=node"]
    config = load(ROOT / "yamls" / "210m_biphasic.yaml", sharded, 16)
    assert isinstance(config, PretrainConfig)
    assert plan(config, 16).details["memory_per_rank"] == unsharded // 8


def test_machines_that_would_download_the_same_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)  # Composer sets it where another test has trained
    for nodes, key, allowed in (
        (24, "", False),
        (16, "", True),
        (128, "", True),
        (24, "data.num_canonical_nodes=48", True),
        (24, "data.folder=rows", True),  # nothing is downloaded
    ):
        keys = ["global_batch_size=3072", "data.folder=s3://bucket/rows", *filter(None, [key])]
        config = load(ROOT / "yamls" / "1b_biphasic.yaml", keys, 8 * nodes)
        assert isinstance(config, PretrainConfig)
        warnings = [line for line in plan(config, 8 * nodes).warnings if "num_canonical_nodes" in line]
        assert (not warnings) == allowed, warnings
    assert (
        "with 64, several of 24 machines of 8 ranks download the same shards"
        in plan(
            load(ROOT / "yamls" / "1b_biphasic.yaml", ["data.folder=s3://bucket/rows"], 192),
            192,  # pyright: ignore[reportArgumentType]
        ).warnings[0]
    )


def test_the_line_of_memory_says_what_it_counts() -> None:
    config = load(ROOT / "yamls" / "1b_biphasic.yaml", ["parallelism.strategy=fsdp"], 8)
    assert isinstance(config, PretrainConfig)
    line = "memory a rank  2.82 GB weights, gradients and optimizer; benchmarks/rehearse.py adds activations"
    assert line in plan(config, 8).describe()


@pytest.mark.parametrize(("shape", "halfway"), [("linear", 0.5), ("1-sqrt", 1 - 0.5**0.5), ("cosine", 0.5)])
def test_warmup_stable_decay(shape: str, halfway: float) -> None:
    schedule = ScheduleConfig(warmup=Duration(10, "ba"), decay=Duration(0.2, "dur"), decay_shape=shape)  # pyright: ignore

    def factor(batch: int) -> float:
        return learning_rate_factor(schedule, Duration(100, "ba"), TrainingProgress(batch, 0, 0, 0))

    assert [factor(b) for b in (0, 5, 10, 50, 80)] == [0, 0.5, 1, 1, 1]
    assert factor(90) == pytest.approx(halfway)
    assert factor(100) == pytest.approx(0)


def test_warmup_in_tokens_and_final_rate() -> None:
    schedule = ScheduleConfig(warmup=Duration(1000, "tok"), decay=Duration(20, "ba"), final_lr=0.1)
    whole = Duration(100, "ba")
    assert learning_rate_factor(schedule, whole, TrainingProgress(3, 0, 250, 0)) == 0.25
    assert learning_rate_factor(schedule, whole, TrainingProgress(90, 0, 9000, 0)) == pytest.approx(0.55)


def test_a_file_builds_on_another(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text((ROOT / "yamls" / "quickstart.yaml").read_text())
    (tmp_path / "mine.yaml").write_text("defaults: base.yaml\nseed: 5\nobjective: {phases: [{name: mlm}]}\n")
    config = load(tmp_path / "mine.yaml", ["optimizer.lr=1e-4", "objective.phases.0.masking_ratio=0.2"])
    assert isinstance(config, PretrainConfig)
    assert (config.seed, config.optimizer.lr) == (5, 1e-4)
    # A list replaces the list below it.
    assert [phase.name for phase in config.objective.phases] == ["mlm"]
    assert config.objective.phases[0].masking_ratio == 0.2  # pyright: ignore
