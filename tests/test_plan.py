"""What would run and what it costs: the facts of `plan`, reckoned without running anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import Expand, Write

from ablate import building, model, plan, registry
from ablate.cli import main
from ablate.document import FileFaults

MORE = """\
question: why?
variants: {größe: {attention: {name: gqa, n_kv_heads: 1}}, moe: {feed_forward: {name: moe, n_experts: 4, top_k: 1}}}
vary: {n_heads: [4, 3], block: [pre_norm, post_norm]}
"""


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    """A file of the same name in another folder is another choice."""
    for remembered in (registry._config, registry._foreign, registry.announce):
        remembered.cache_clear()


def said(*arguments: str, status: int = 0) -> str:
    """What `plan` writes to standard output."""
    done = CliRunner().invoke(main, ["plan", *arguments])
    assert done.exit_code == status, done.output
    return done.stdout


def facts(file: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    found: dict[str, Any] = json.loads(said(str(file), "--json", *arguments, status=status), parse_constant=refuse)
    return found


def test_plan_json_gives_counts_variants_and_reasons(write: Write) -> None:
    found = facts(write(MORE), status=1)
    assert found["counts"] == {"raw": 6, "excluded": 0, "invalid": 2, "merged": 0, "planned": 4, "trials": 4}
    by_name = {variant["name"]: variant for variant in found["variants"]}
    assert list(by_name) == ["baseline", "größe", "moe", "block=post_norm"]
    assert by_name["größe"]["changes"] == {"attention": "gqa", "attention.n_kv_heads": 1}
    assert by_name["baseline"]["kv_cache_bytes_per_token"] == 2 * 32 * 4
    assert by_name["größe"]["kv_cache_bytes_per_token"] == 2 * 8 * 4
    assert by_name["moe"]["params_active"] < by_name["moe"]["params_total"]
    assert by_name["baseline"]["params_active"] == by_name["baseline"]["params_total"]
    assert by_name["größe"]["kv_cache_bytes_by_devices"] == dict.fromkeys("1248", 2 * 8 * 4 * 32) | {"8": None}
    assert by_name["baseline"]["kv_cache_bytes_by_devices"]["2"] == 32 * 4 * 32
    assert by_name["baseline"]["kv_cache_equals_weights_at_tokens"] == -(-by_name["baseline"]["params_total"] // 64)
    for variant in found["variants"]:
        assert variant["flops_per_token"] == sum(variant["flops_terms"].values()) > 0
        assert variant["predicted_memory_bytes"] > 16 * variant["params_total"]
        assert variant["predicted_seconds"] > 0
    assert found["invalid"] == [
        {"variant": name, "reason": "d_model 32 is not divisible by n_heads 3"}
        for name in ("n_heads=3", "n_heads=3,block=post_norm")
    ]


def test_the_parameters_of_the_plan_are_those_of_the_model(expand: Expand) -> None:
    for each in plan.plan(expand(MORE), timed=False):
        built = model.build(each.variant.settings.model)
        assert each.cost.params_total == sum(parameter.numel() for parameter in built.parameters())
        assert each.predicted_seconds is None


def test_the_cost_is_that_at_the_training_length(write: Write) -> None:
    short, long = (facts(write(), "--set", f"train.seq_len={n}")["variants"][0] for n in (8, 16))
    assert long["flops_terms"]["head"] == short["flops_terms"]["head"]
    scores = [each["flops_terms"]["attention.scores"] for each in (short, long)]
    assert scores == [2 * 32 * (8 + 1) / 2, 2 * 32 * (16 + 1) / 2]


def test_half_precision_halves_the_cache(write: Write) -> None:
    full, half = (facts(write(), "--set", f"train.precision={p}")["variants"][0] for p in ("fp32", "bf16"))
    assert half["kv_cache_bytes_per_token"] * 2 == full["kv_cache_bytes_per_token"]


def test_plan_for_people_shows_the_same(write: Write) -> None:
    shown = said(str(write(f"{MORE}seeds: 2")), status=1)
    assert "tiny: why?" in shown
    assert "6 raw, 0 excluded, 2 invalid, 0 merged, 4 planned variants; 8 trials, 0 of them stored" in shown
    for name in ("baseline", "größe", "moe", "block=post_norm"):
        assert name in shown
    assert "profile:" not in shown
    assert "invalid: n_heads=3: d_model 32 is not divisible by n_heads 3" in shown


def test_plan_tells_what_is_profiled(write: Write) -> None:
    asked = "profile: {decode: {context: [8], new_tokens: [4, 8]}, lengths: [8, 16], rounds: 2}\n"
    shown = said(str(write(asked)), status=0)
    assert "profile: decode (batch 1; context 8; new tokens 4, 8); lengths 8, 16; rounds 2\n" in shown
    assert facts(write(asked))["profile"]["lengths"] == [8, 16]


def test_plan_says_which_names_mean_the_same(write: Write) -> None:
    file = write("variants: {a: {n_layers: 1}, b: {n_layers: 2}, c: {n_layers: 2}}")
    assert facts(file)["same"] == {"a": "baseline", "c": "b"}
    assert "the same as b: c" in said(str(file))


def test_plan_starts_nothing_and_leaves_nothing(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a plan starts nothing")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", forbidden)
    monkeypatch.setattr("ablate.mirror.Mirror.__init__", forbidden)
    file = write(MORE)
    facts(file, status=1)
    said(str(file), status=1)
    assert [path.name for path in Path().iterdir()] == ["tiny.yaml"]


def test_exit_status(write: Write) -> None:
    said(str(write()), status=0)
    said(str(write("vary: {n_heads: [3]}")), status=1)
    assert said(str(write("vary: {n_heads: [0]}")), status=2) == ""
    assert said(str(write("vary: {n_heads: [0]}")), "--json", status=2) == ""


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("data: {name: cycle, train_tokens: 64}", "corpus has 64 tokens, one step needs 65"),
        (
            "data: {name: cycle, validation_tokens: 16}",
            "corpus has 16 tokens for validation, one sequence needs 17",
        ),
    ],
)
def test_a_corpus_too_small_for_a_step_refuses_the_file(added: str, message: str, expand: Expand) -> None:
    with pytest.raises(FileFaults, match=message) as caught:
        plan.checked(expand(added))
    assert len(caught.value.lines) == 1
    assert caught.value.lines[0].startswith("tiny.yaml:3:")
    assert plan.checked(expand(added.replace("64", "65").replace("16", "17"))).variants


def test_a_corpus_too_small_for_a_combination_leaves_that_one_out(expand: Expand) -> None:
    found = plan.checked(expand("data: {name: cycle, train_tokens: 100}\nvary: {train.batch_tokens: [64, 128]}"))
    assert [(each.name, each.reason) for each in found.invalid] == [
        ("train.batch_tokens=128", "corpus has 100 tokens, one step needs 129")
    ]
    assert [variant.name for variant in found.variants] == ["baseline"]
    assert found.counts == {"raw": 2, "excluded": 0, "invalid": 1, "merged": 0, "planned": 1, "trials": 1}


BROKEN = '''"""Attention that cannot be built."""

from torch import nn

from ablate.attention import AttentionChoice


class Attention(nn.Module):
    def __init__(self):
        raise RuntimeError("no\\nway")


class Config(AttentionChoice):
    def build(self, shape):
        return Attention()

    def params(self, shape):
        return 1
'''


def test_a_choice_that_cannot_be_built_is_told_in_one_line(write: Write, expand: Expand) -> None:
    write()
    Path("broken.py").write_text(BROKEN, encoding="utf-8")
    with pytest.raises(FileFaults) as caught:
        plan.checked(expand("variants: {x: {attention: ./broken.py}}"))
    assert str(caught.value) == (
        "tiny.yaml:5:12: variant x cannot be built: RuntimeError: no way\n"
        "  the fault is in the code of one of its choices"
    )
    found = plan.checked(expand("vary: {attention: [./broken.py, gqa]}"))
    assert [variant.name for variant in found.variants] == ["baseline", "attention=gqa"]
    assert "RuntimeError: no way" in found.invalid[0].reason


def test_models_are_checked_without_memory(expand: Expand) -> None:
    sizes = "d_model: 65536, n_heads: 64, n_layers: 4, max_seq_len: 32"
    (found,) = plan.plan(plan.checked(expand(f"baseline: {{{sizes}}}")), timed=False)
    assert found.cost.params_total > 2e11, "nearly a terabyte in float32"


def test_experiment_json_is_strict_and_maps_ids_to_names(expand: Expand) -> None:
    experiment = plan.checked(expand(f"{MORE}seeds: 2"))
    machine = {"device": "cpu", "threads": 1}
    document = plan.document(experiment, plan.plan(experiment, timed=False), machine, "python -m ablate run tiny.yaml")
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    ids = {trial.trial_id: (trial.variant.name, trial.seed) for trial in experiment.trials("cpu", 1)}
    assert len(ids) == 8
    for variant in document["variants"]:
        for seed, trial_id in variant["trials"].items():
            assert ids.pop(trial_id) == (variant["name"], int(seed))
    assert not ids
    assert document["resolved"]["question"] == "why?"


def test_the_plan_disturbs_no_generator(write: Write) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    facts(write(MORE), status=1)
    assert torch.equal(torch.random.get_rng_state(), before)


OWN_NORM = """from ablate.norm import rms_norm
class Config(rms_norm.Config):
    def {method}:
        {body}
"""


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("resolve(self, shape)", "./own.py fails in these settings: SystemExit: 0"),
        ("build(self, d_model)", "variant x cannot be built: SystemExit: 0"),
    ],
)
def test_a_choice_that_ends_the_program_is_told(method: str, said: str, write: Write, expand: Expand) -> None:
    write()
    Path("own.py").write_text(OWN_NORM.format(method=method, body="raise SystemExit(0)"), encoding="utf-8")
    with pytest.raises(FileFaults, match=said):
        plan.checked(expand("variants: {x: {norm: ./own.py}}"))


def test_data_that_end_the_program_are_told(write: Write, expand: Expand) -> None:
    write()
    code = "from ablate.data import Base\nclass Config(Base):\n    def corpus(self):\n        raise SystemExit(0)\n"
    Path("own.py").write_text(code, encoding="utf-8")
    with pytest.raises(FileFaults, match=r"\./own\.py fails in these settings: SystemExit: 0"):
        expand("data: ./own.py")


def test_parameters_promised_are_those_of_the_model(write: Write, expand: Expand) -> None:
    write()
    Path("own.py").write_text(OWN_NORM.format(method="params(self, d_model)", body="return 1"), encoding="utf-8")
    said = r"variant x promises [\d,]+ parameters, has [\d,]+ \(each different layer once\)\n  .*params\(\)"
    with pytest.raises(FileFaults, match=said):
        plan.checked(expand("variants: {x: {norm: ./own.py}}"))


def test_more_threads_than_there_are_refuse_the_file(expand: Expand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ablate.plan.available_threads", lambda: 2)
    assert plan.checked(expand("", "train.threads=2")).variants
    with pytest.raises(FileFaults) as caught:
        plan.checked(expand("", "train.threads=3"))
    assert str(caught.value) == (
        "--set train.threads=3: train.threads 3 is more than the 2 that this process may use\n"
        "  leave it out, or give at most 2"
    )


def test_one_of_a_thing_is_not_told_as_many(write: Write) -> None:
    shown = said(str(write()), "--workers", "1024")
    assert "1 trial, 0 of them stored" in shown
    assert "1 thread each" in shown
    assert "tensors ~" in shown


@pytest.mark.parametrize(
    ("added", "place", "message", "cure"),
    [
        ("vary: {seeds: [[1], [2]]}", "5:8", "'seeds' is a key of the file, not of a variant", "top level"),
        ("variants: {x: {question: y}}", "5:16", "'question' is a key of the file, not of a variant", "top level"),
        ("baseline: {train: {lr: 1}}", "4:12", "'train' is a key of the file, not of a model", "top level"),
        ("baseline: {data.period: 3}", "4:12", "'data.period' is a key of the file, not of a model", "top level"),
        ("vary: {train.betas: [[0.5, 0.5]]}", "5:8", "unknown setting 'betas'", "write train.optimizer.betas"),
        ("vary: {layers.0.norm: [a]}", "5:8", "'layers.0.norm': a list has no dotted path", "give all of layers"),
    ],
)
def test_what_stands_at_the_wrong_place_is_told_with_the_right_one(
    added: str, place: str, message: str, cure: str, expand: Expand
) -> None:
    with pytest.raises(FileFaults) as caught:
        expand(added)
    first, second = str(caught.value).splitlines()
    assert first == f"tiny.yaml:{place}: {message}"
    assert cure in second


def test_a_setting_of_a_variant_that_the_file_does_not_have_is_refused(expand: Expand) -> None:
    with pytest.raises(FileFaults) as caught:
        expand("variants: {gqa: {attention: gqa}}", "variants.gqx.attention=mha")
    assert str(caught.value) == ("--set variants.gqx.attention=mha: unknown variant 'gqx'\n  did you mean 'gqa'?")
    assert len(expand("", "variants={x: {n_layers: 2}}").variants) == 2


def test_build_takes_a_variants_own_settings(expand: Expand) -> None:
    settings = expand().baseline.settings.model
    assert building.build(settings).settings == settings


def test_what_cannot_be_trained_on_a_device_refuses_the_file(expand: Expand) -> None:
    found = expand("variants: {x: {attention: {name: mha, kernel: flex}}}")
    plan.check_device(found, "cuda")
    with pytest.raises(FileFaults, match=r"5:12: variant x: kernel 'flex' cannot train on a CPU: choose sdpa or math"):
        plan.check_device(found, "cpu")


def test_the_speed_of_products_is_that_of_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine that something else held up for a second each, and one of a millisecond."""
    ticks = iter([moment for n in range(10) for moment in (10.0 * n, 10.0 * n + (0.001 if n == 4 else 1.0))])
    monkeypatch.setattr(plan.time, "perf_counter", lambda: next(ticks))
    assert plan._matmul_flops_per_second() == pytest.approx(2 * 512**3 / 0.001)
