"""One trial: what it tells its parent, and how it ends."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from references import Parent

from ablate import child, cost, results, trial
from ablate.data.random_tokens import Config as RandomTokens
from ablate.job import Job
from ablate.keeping import Keeper
from ablate.machine import Resources
from ablate.profiling import decode, live, memory
from ablate.runner import Run
from ablate.settings import resolved, typed
from ablate.trial import Reporter, classify, perform

MODEL = {
    "d_model": 16,
    "n_layers": 1,
    "n_heads": 2,
    "max_seq_len": 16,
    "vocab_size": 16,
    "attention": "mqa",
    "position": "rope",
    "feed_forward": "moe",
    "norm": "rms_norm",
    "block": "pre_norm",
}
TRAIN = {"steps": 8, "batch_tokens": 64, "eval_every": 4, "eval_tokens": 64}
DATA = {"name": "random_tokens", "vocab_size": 16, "train_tokens": 2000, "validation_tokens": 200}
PROFILE = {"prefill": {"tokens": [8]}, "decode": {"context": [8], "new_tokens": 4}, "rounds": 1}


pytestmark = pytest.mark.usefixtures("one_thread")


def job(phases: tuple[str, ...] = ("train", "profile"), log: Path = Path("trial.log"), **sections: Any) -> Job:
    whole = {"model": MODEL, "train": TRAIN, "data": DATA, "profile": PROFILE}
    tree = {name: section | sections.get(name, {}) for name, section in whole.items()}
    if sections.get("profile") == {}:
        tree["profile"] = {}
    return Job(resolved(typed(tree)).model_dump(mode="json"), 0, "cpu", 1, phases, str(log))


def performed(job: Job) -> Parent:
    parent = Parent()
    perform(job, Reporter(parent), time.perf_counter())
    return parent


def test_what_is_said_to_be_done_does_not_lack_its_last_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SEND_EVERY", math.inf)
    messages = performed(job()).messages
    (done,) = [place for place, (kind, *content) in enumerate(messages) if kind == "columns" and "steps" in content[0]]
    points = [point for kind, *content in messages[:done] if kind == "curve" for point in _points(content[0])]
    assert {(TRAIN["steps"], "train", "loss"), (TRAIN["steps"], "val", "loss")} <= set(points)


def _points(curve: dict[str, list[Any]]) -> Iterator[tuple[int, str, str]]:
    return zip(curve["step"], curve["split"], curve["metric"], strict=True)


@pytest.fixture(scope="module")
def done() -> Parent:
    return performed(job())


# --- What is told -----------------------------------------------------------------------------------------------------


def test_a_trial_that_does_all_is_ok(done: Parent) -> None:
    assert done.outcome == ("ok", "profile", "")
    phases = done.of("phase")
    assert list(dict.fromkeys(phases)) == ["setup", "train", "evaluate", "profile"]
    assert phases.count("evaluate") == 2


def test_steps_alone_cost_what_those_of_a_training_do_and_leave_the_weights(
    done: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[list[float]] = []
    exercise = trial.exercise

    def watched(model: torch.nn.Module, *given: Any) -> Any:
        weights.append([float(p.detach().sum()) for p in model.parameters()])
        learner = exercise(model, *given)  # type: ignore[arg-type]
        weights.append([float(p.detach().sum()) for p in model.parameters()])
        return learner

    monkeypatch.setattr(trial, "exercise", watched)
    monkeypatch.setattr(trial, "MOST_STEPS", 6)
    alone = performed(job(("steps", "profile")))
    assert alone.outcome == ("ok", "profile", "")
    assert weights[0] == weights[1]
    exact = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes", "activation_bytes", "peak_live_bytes")
    exact += ("flops_per_token_counted", "train_flops_per_token_counted", "optimizer_state_dtype")
    assert {name: alone.columns[name] for name in exact} == {name: done.columns[name] for name in exact}
    losses = {"steps", "tokens", "train_loss", "val_loss", "best_val_loss", "diverged_step"}
    assert set(done.columns) - set(alone.columns) >= losses
    measured = [row["metric"] for row in alone.table("profiles") if row["sample"] is not None]
    assert [measured.count(f"{part}_seconds") for part in ("step", "forward", "backward", "optimizer")] == [3] * 4


def test_columns_are_those_of_the_record(done: Parent) -> None:
    assert set(done.columns) <= set(results.TRIALS.names)
    expected = {
        "steps": 8,
        "tokens": 8 * 64,
        "precision": "fp32",
        "param_dtype": "float32",
        "compute_dtype": "float32",
        "optimizer_state_dtype": "float32",
        "device": "cpu",
        "gpu_uuid": None,
        "threads": 1,
        "diverged_step": None,
        "deterministic": False,
        "mfu": None,
        "energy_joules_per_token": None,
        "val_bits_per_byte": None,
        "corpus_passes": 8 * 4 / 124,
        "torch": torch.__version__,
    }
    assert {name: done.columns[name] for name in expected} == expected
    assert done.columns["best_val_loss"] <= done.columns["val_loss"]
    assert done.columns["peak_rss_bytes"] > 2**20
    weights = 4 * cost.cost(typed(job().settings).model, 16).params_total
    assert done.columns["parameter_bytes"] == done.columns["gradient_bytes"] == weights
    assert 2 * weights < done.columns["optimizer_state_bytes"] < 2.1 * weights
    assert 4 * weights < done.columns["peak_live_bytes"] < done.columns["peak_rss_bytes"]
    assert done.columns["activation_bytes"] > 4 * 64 * 16 * 4
    assert done.columns["startup_seconds"] > 0
    assert done.columns["eval_seconds"] > 0
    assert len(done.columns["batch_order_hash"]) == 64
    kernels = json.loads(done.columns["kernels"])
    assert "_scaled_dot_product_flash_attention_for_cpu" in kernels["train"]
    assert "_scaled_dot_product_flash_attention_for_cpu" in kernels["decode"]
    assert "path expert by expert" in kernels["train"]
    assert "_fused_adamw_" in kernels["optimizer"]
    assert done.columns["compiled"] is False
    assert "graph_breaks" not in done.columns, "nobody counted"
    assert json.loads(done.columns["module_metrics"])["decoder.layers.0.feed_forward.dropped_fraction"] == 0


def test_curves_have_every_step(done: Parent) -> None:
    points = done.table("curve")
    losses = [p for p in points if p["split"] == "train" and p["metric"] == "loss"]
    assert [p["step"] for p in losses] == list(range(1, 9))
    assert [p["tokens"] for p in losses] == [64 * step for step in range(1, 9)]
    assert done.columns["train_loss"] == pytest.approx(sum(p["value"] for p in losses) / 8)
    held_out = [p for p in points if p["split"] == "val"]
    assert [(p["step"], p["metric"]) for p in held_out] == [(4, "loss"), (8, "loss")]
    assert held_out[-1]["value"] == done.columns["val_loss"]
    assert {"decoder.layers.0.feed_forward.idle_experts"} <= {p["metric"] for p in points if p["split"] == "model"}
    assert {p["metric"] for p in points if p["split"] == "train"} >= {"loss", "lr", "grad_norm", "aux_balance"}


def test_no_batch_is_made_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = typed(job().settings).train
    monkeypatch.setattr(trial, "pieces", None)
    nothing: Any = None
    assert trial.called_for(nothing, nothing, recipe) is None


def test_points_are_sent_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    parent = Parent()
    reporter = Reporter(parent)
    for step in range(100):
        now[0] += 0.01
        reporter.points(step, 0, "train", {"loss": 1.0})
    assert 4 <= len(parent.messages) <= 6
    reporter.flush()
    assert [p["step"] for p in parent.table("curve")] == list(range(100))


def test_profiles_are_rows_of_cells(done: Parent) -> None:
    rows = done.table("profiles")
    cells = {("train", 4, 16), ("prefill", 1, 8), ("decode", 1, 8)}
    assert {(r["phase"], r["batch"], r["context"]) for r in rows} == cells
    steps = [r["value"] for r in rows if r["metric"] == "step_seconds"]
    assert [r["sample"] for r in rows if r["metric"] == "step_seconds"] == [4, 5, 6, 7, 8]
    (summary,) = (r for r in rows if r["metric"] == "step_seconds_p50")
    assert summary["value"] == done.columns["step_seconds_p50"] == sorted(steps)[2]
    assert summary["sample"] is None
    settings = typed(job().settings).model
    assert done.columns["kv_cache_bytes_measured"] == cost.cache_bytes(settings, 1, 12, "fp32")


def test_a_latent_s_ways_and_the_lengths_are_profiled() -> None:
    profile = {"decode": {"context": [8], "new_tokens": [1, 4]}, "lengths": [8, 16]}
    parent = performed(job(("profile",), model={"attention": "mla"}, profile=profile))
    assert parent.outcome == ("ok", "profile", "")
    rows = parent.table("profiles")
    assert {r["context"] for r in rows if r["phase"] == "lengths"} == {8, 16}
    cells = {(r["new_tokens"], r["path"]) for r in rows if r["phase"] == "decode"}
    assert cells == {(n, way) for n in (1, 4) for way in ("absorbed", "expanded")}
    assert {(r["new_tokens"], r["path"]) for r in rows if r["phase"] != "decode"} == {(None, None)}
    assert "path absorbed" in json.loads(parent.columns["kernels"])["decode"]
    assert parent.columns["time_to_first_token_seconds_p50"] > 0
    assert parent.columns["decode_bandwidth_share"] is None, "nothing was calibrated"


def test_text_has_bits_per_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = typed(job().settings).data.corpus()
    text = type(corpus)(corpus.train, corpus.validation, 16, "", 2.0, "")
    monkeypatch.setattr(RandomTokens, "corpus", lambda _: text)
    parent = performed(job(("train",)))
    assert (
        performed(job(("train",), model={"family": "encoder", "vocab_size": 17})).columns["val_bits_per_byte"] is None
    )
    bits = parent.columns["val_loss"] / math.log(2) / 2
    assert parent.columns["val_bits_per_byte"] == pytest.approx(bits)
    points = [p["value"] for p in parent.table("curve") if p["metric"] == "bits_per_byte"]
    assert len(points) == 2
    assert points[-1] == pytest.approx(bits)


def test_the_same_job_gives_the_same_numbers(done: Parent) -> None:
    again = performed(job())
    assert again.table("curve") == done.table("curve")
    exact = ("val_loss", "train_loss", "best_val_loss", "batch_order_hash", "kv_cache_bytes_measured", "kernels")
    assert {name: again.columns[name] for name in exact} == {name: done.columns[name] for name in exact}


def test_an_encoder_is_ok_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ablate.model.Transformer.new_cache", None)
    parent = performed(job(model={"family": "encoder", "vocab_size": 17}))
    assert parent.outcome == ("ok", "profile", "")
    assert math.isfinite(parent.columns["val_loss"])
    assert parent.columns["tokens"] == 8 * 64, "all that is read, not the eighth that is told"
    assert parent.columns["prefill_tokens_per_second"] > 0
    assert not {name for name in parent.columns if "decode" in name or "kv_cache" in name}
    assert {row["phase"] for row in parent.table("profiles")} == {"train", "prefill"}
    assert list(json.loads(parent.columns["kernels"])) == ["train", "optimizer", "prefill"]


def test_a_decoder_that_looks_both_ways_is_ok_without_a_cache() -> None:
    attention = {"name": "mqa", "causal": False}
    parent = performed(job(("profile",), model={"attention": attention}))
    assert parent.outcome == ("ok", "profile", "")
    assert not {name for name in parent.columns if "decode" in name or "kv_cache" in name}


def test_an_encoder_decoder_keeps_its_source_in_the_cache(done: Parent) -> None:
    whole = job(model={"family": "encoder_decoder", "vocab_size": 17})
    parent = performed(whole)
    assert parent.outcome == ("ok", "profile", "")
    assert set(done.columns) <= set(parent.columns), "nothing is missing that a decoder has"
    settings = typed(whole.settings).model
    assert parent.columns["kv_cache_bytes_measured"] == cost.cache_bytes(settings, 1, 5, "fp32", 8)
    assert "decoder.layers.0.feed_forward.dropped_fraction" in json.loads(parent.columns["module_metrics"])


def test_without_decode_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ablate.model.Transformer.new_cache", None)
    parent = performed(job(profile={}))
    assert parent.outcome == ("ok", "profile", "")
    assert "kv_cache_bytes_measured" not in parent.columns
    assert {row["phase"] for row in parent.table("profiles")} == {"train"}
    assert list(json.loads(parent.columns["kernels"])) == ["train", "optimizer"]


def test_profiling_again_trains_nothing(monkeypatch: pytest.MonkeyPatch, done: Parent) -> None:
    monkeypatch.setattr(trial, "train", None)
    parent = performed(job(("profile",)))
    assert parent.outcome == ("ok", "profile", "")
    assert parent.of("curve") == []
    assert {"val_loss", "steps", "peak_rss_bytes", "batch_order_hash"}.isdisjoint(parent.columns)
    ran = json.loads(done.columns["kernels"])
    assert json.loads(parent.columns["kernels"]) == {phase: ran[phase] for phase in ("prefill", "decode")}
    assert parent.columns["kv_cache_bytes_measured"] == done.columns["kv_cache_bytes_measured"]


def test_bf16_is_said_and_halves_the_cache(done: Parent) -> None:
    parent = performed(job(train={"precision": "bf16"}))
    assert parent.outcome == ("ok", "profile", "")
    assert parent.columns["param_dtype"] == "float32"
    assert parent.columns["compute_dtype"] == "bfloat16"
    assert 2 * parent.columns["kv_cache_bytes_measured"] == done.columns["kv_cache_bytes_measured"]


def test_one_new_token_has_no_speed_and_is_ok() -> None:
    parent = performed(job(("profile",), profile={"decode": {"context": [8], "new_tokens": 1}}))
    assert parent.outcome == ("ok", "profile", "")
    assert "decode_tokens_per_second" not in parent.columns
    assert parent.columns["kv_cache_bytes_measured"] > 0


# --- How it ends ------------------------------------------------------------------------------------------------------


def test_divergence_is_a_result_with_its_step() -> None:
    parent = performed(job(train={"lr": 1e20, "optimizer": "sgd", "grad_clip": None, "steps": 40, "eval_every": 2}))
    status, phase, reason = parent.outcome
    step = parent.columns["diverged_step"]
    assert (status, phase) == ("diverged", "train")
    assert f"step {step};" in reason
    assert 1 < step < 40
    assert parent.columns["steps"] == step
    assert math.isfinite(parent.columns["train_loss"])
    assert max(p["step"] for p in parent.table("curve")) == step
    assert "decode_tokens_per_second" not in parent.columns


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "peak_rss_bytes", lambda: None)
    if sys.platform == "linux":
        parent = performed(job())
        assert parent.outcome == ("incomplete", "train", "peak_rss_bytes is missing")
        assert "decode" not in json.loads(parent.columns["kernels"]), "nothing is profiled beside it"
    monkeypatch.setattr(memory, "peak_rss_bytes", lambda: 10)
    status, _, reason = performed(job()).outcome
    assert status == "incomplete"
    assert "peak_rss_bytes of 10 is less" in reason


@pytest.mark.parametrize("column", ["peak_live_bytes", "peak_allocated_bytes"])
def test_a_peak_that_cannot_hold_weights_and_state_is_incomplete(monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    weights = 4 * cost.cost(typed(job().settings).model, 16).params_total
    state = 2 * weights + 4 * 24  # two moments, and a count of steps for each of 24 parameters
    peaks = live.training_split if column == "peak_live_bytes" else memory.peaks
    for peak, status in ((weights + state, "ok"), (weights + state - 1, "incomplete")):
        home, name = (live, "training_split") if column == "peak_live_bytes" else (memory, "peaks")
        monkeypatch.setattr(home, name, lambda *given, peak=peak: peaks(*given) | {column: peak})
        parent = performed(job(("train",)))
        assert parent.columns["optimizer_state_bytes"] == state
        assert parent.outcome[0] == status, parent.outcome
        assert (f"{column} of {peak} is less" in parent.outcome[2]) is (status == "incomplete")


def test_prompts_are_read_and_continued_without_dropout_and_without_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[torch.Tensor] = []

    def spy(method: Any) -> Any:
        def spied(self: decode.Writer, *given: torch.Tensor) -> torch.Tensor:
            assert not any(module.training for module in self.model.modules())
            assert not torch.is_grad_enabled()
            logits: torch.Tensor = method(self, *given)
            if torch.is_inference_mode_enabled():  # elsewhere it would be taken for a part of the cache
                timed.append(logits)
            return logits

        return spied

    for name in ("read", "write"):
        monkeypatch.setattr(decode.Writer, name, spy(getattr(decode.Writer, name)))
    parent = performed(job(model={"dropout": 0.5, "feed_forward": "gelu"}, profile={"rounds": 3}))
    assert parent.outcome[0] == "ok"
    prompts = [logits for logits in timed if logits.shape == (1, 8, 16)]
    assert len(prompts) >= 2 * 3, "all that is timed is in inference mode: prefill and decoding"
    assert all(torch.equal(logits, prompts[0]) for logits in prompts)


def test_what_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "median", lambda _: math.nan)
    status, phase, reason = performed(job(("profile",))).outcome
    assert (status, phase) == ("incomplete", "profile")
    assert "decode_tokens_per_second is nan" in reason


def test_a_cache_of_another_size_than_promised_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "cache_bytes", lambda *_: 7)
    status, phase, reason = performed(job(("profile",))).outcome
    assert (status, phase) == ("incomplete", "profile")
    assert "not the 7 that were promised" in reason


def test_a_wrong_cache_gives_no_decode_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "cache_difference", lambda *_, **__: 0.5)
    parent = performed(job())
    assert parent.outcome[:2] == ("decode_mismatch", "profile")
    assert not {name for name in parent.columns if "decode" in name or "kv_cache" in name}
    assert math.isfinite(parent.columns["val_loss"])


def test_a_crash_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("two\n  lines " + "and more " * 100)

    monkeypatch.setattr(trial, "build", broken)
    status, phase, reason = performed(job()).outcome
    assert (status, phase) == ("crashed", "setup")
    assert reason.startswith("ValueError: two lines and more")
    assert len(reason) <= trial.REASON_LENGTH
    assert "in broken" in capsys.readouterr().err


def test_a_corpus_too_small_says_so() -> None:
    status, phase, reason = performed(job(data={"train_tokens": 60})).outcome
    assert (status, phase) == ("crashed", "train")
    assert "corpus has 60 tokens, one step needs 65" in reason


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), "oom"),
        (RuntimeError("std::bad_alloc"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "oom"),
        (RuntimeError("CUDA error: device-side assert triggered"), "crashed"),
        (ValueError("the cache has room for 4 tokens: out of memory"), "crashed"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "crashed"),
    ],
)
def test_lack_of_memory_is_told_from_other_faults(error: Exception, status: str) -> None:
    assert classify(error).status == status


@pytest.fixture
def _deterministic_mode_off_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic_mode_off_afterwards")
def test_deterministic_mode_is_torchs_own_which_fails_loudly() -> None:
    parent = performed(job(train={"deterministic": True}))
    assert parent.outcome == ("ok", "profile", "")
    assert parent.columns["deterministic"] is True
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


# --- Its process ------------------------------------------------------------------------------------------------------


def _short_of_memory(job: Job, connection: Connection) -> None:
    import resource

    used = memory.status_bytes("VmData")
    assert used is not None
    room = used + 2**29
    resource.setrlimit(resource.RLIMIT_DATA, (room, room))
    child.perform(job, connection)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")
def test_running_out_of_memory_is_an_outcome_and_ctrl_c_is_not(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    log = tmp_path / "logs" / "trial.log"
    large = job(log=log, model={"d_model": 4096, "feed_forward": "gelu"})
    process = context.Process(target=_short_of_memory, args=(large, sender))
    process.start()
    sender.close()
    messages = [receiver.recv()]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    while messages[-1][0] != "outcome":
        messages.append(receiver.recv())
    process.join(60)
    assert messages[-1][1:3] in {("oom", "setup"), ("oom", "train")}
    assert process.exitcode == 0
    assert "Traceback" in log.read_text(encoding="utf-8")


def test_preloading_loads_all_and_starts_no_threads() -> None:
    code = (
        "import os, sys, numpy\n"
        "count = lambda: len(os.listdir('/proc/self/task')) if sys.platform == 'linux' else 0\n"
        "before = count()\n"
        "import ablate.trial\n"
        "assert count() == before, (before, count())\n"
        "wanted = {'torch._dynamo', 'torch.optim', 'ablate.attention.mla', 'ablate.feed_forward.moe'}\n"
        "assert wanted <= set(sys.modules)\n"
        "assert not {'mlflow', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules)\n"
        "import torch; assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_server_of_children_is_warm_before_the_first_trial_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first trial, which is always the baseline's, would pay for the imports of all."""
    order: list[str] = []
    monkeypatch.setattr(child, "warm_up", lambda *_: order.append("warm"))
    monkeypatch.setattr(Run, "_through_gates", lambda self, queue, _: order.append("gates") or queue)
    monkeypatch.setattr(Run, "_calibrate", lambda *_: order.append("calibrate"))
    monkeypatch.setattr(Run, "_seek_capacities", lambda *_: None)
    monkeypatch.setattr(Run, "_begin", lambda self, task: order.append("begin"))
    run = Run.__new__(Run)
    run.running, run.resources, run.fail_fast, run.failed = {}, Resources("cpu", 1, 1), False, False
    run.put_off, run.waits_for = [], ""
    run.keeper = Keeper(Path("nowhere"))
    monkeypatch.setattr(Run, "_wait", lambda self, _: False)
    monkeypatch.setattr(Run, "_repeat", lambda *_: order.append("repeat"))
    run.carry_out([object()], [])
    assert order == ["warm", "gates", "calibrate", "begin", "repeat"]
