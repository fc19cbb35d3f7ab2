"""The file is the name: built-in choices, and a user's own."""

from __future__ import annotations

import py_compile
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from references import tiny

from ablate import registry
from ablate.attention import mha
from ablate.choice import Faults, SettingsError
from ablate.cost import cache_bytes, cost
from ablate.model import build

OWN_ATTENTION = '''"""Attention whose values are its keys: half the KV cache."""

from torch import nn

from ablate.attention import AttentionChoice, Cache, Scoring, attend


class SharedKeyValue(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.width = n_heads, d_model // n_heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.kv = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, position, start, mask=None, cache=None):
        q, kv = (w(x).unflatten(-1, (self.n_heads, self.width)).transpose(1, 2) for w in (self.q, self.kv))
        if cache is not None:
            (kv,) = cache.append(kv)
        q, k = position.rotate(q, start), position.rotate(kv, 0)
        y = attend(q, k, kv, Scoring(causal=True), mask=mask, bias=position.bias(q, k, start, 0))
        return self.out(y.transpose(1, 2).flatten(2))

    def new_cache(self, batch, tokens, dtype, device):
        return Cache((batch, self.n_heads, tokens, self.width), dtype=dtype, device=device)


class Config(AttentionChoice):
    def build(self, shape):
        return SharedKeyValue(shape.d_model, shape.n_heads)

    def cache_elements(self, shape, tokens):
        return shape.d_model * tokens
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for imported in ("my_lab", "my_lab.shared_kv"):
        sys.modules.pop(imported, None)
    for remembered in (registry._config, registry._foreign, registry.announce):
        remembered.cache_clear()
    return tmp_path


def fault_of(slot: str, raw: object) -> SettingsError:
    with pytest.raises(Faults) as caught:
        registry.configure(slot, raw, ("here",))
    (fault,) = caught.value.faults
    assert "\n" not in fault.message + fault.cure
    return fault


@pytest.mark.parametrize("slot", [*registry.SLOTS, *registry.SOURCES])
def test_a_choice_is_its_file(slot: str) -> None:
    folder = Path(registry.__file__).parent / slot
    files = [file.stem for file in folder.glob("*.py") if not file.stem.startswith("_")]
    assert registry.names(slot) == sorted(files) != []
    for name in registry.names(slot):
        assert registry.configure(slot, name).name == name
        assert registry.config_class(slot, name).__module__ == f"ablate.{slot}.{name}"


def test_names_and_summaries_need_neither_torch_nor_the_choices() -> None:
    code = (
        "import sys; from ablate import registry\n"
        "found = [registry.summary(s, n) for s in (*registry.SLOTS, *registry.SOURCES) for n in registry.names(s)]\n"
        "assert all(found)\n"
        "print([m for m in sys.modules if m in ('torch', 'mlflow', 'ablate.attention', 'ablate.data')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("slot", "raw", "message", "cure"),
    [
        ("attention", "gqaa", "unknown attention 'gqaa'", "did you mean 'gqa'?"),
        ("block", "prenorm", "unknown block 'prenorm'", "did you mean 'pre_norm'?"),
        ("block", "_blank", "unknown block '_blank'", "known: "),
        ("attention", False, "attention needs a name or a mapping with a name, not False", "write one of: "),
        ("attention", None, "attention needs a name or a mapping with a name, not None", "in quotes"),
        ("attention", {"n_kv_heads": 2}, "attention has no name: None", "known: "),
        ("attention", {"name": "gqa", "n_kv_head": 2}, "unknown setting 'n_kv_head'", "did you mean 'n_kv_heads'?"),
        ("attention", {"name": "gqa", "n_groups": 2}, "unknown setting 'n_groups'", "never a group size"),
    ],
)
def test_a_wrong_name_is_told_with_the_nearest_right_one(slot: str, raw: object, message: str, cure: str) -> None:
    fault = fault_of(slot, raw)
    assert fault.message == message
    assert cure in fault.cure
    assert fault.path[0] == "here"


@pytest.mark.parametrize("name", ["./shared_kv.py", "shared_kv.py", "my_lab.shared_kv", "my_lab/shared_kv.py"])
def test_a_users_own_file_is_found_by_path_and_by_dotted_name(here: Path, name: str) -> None:
    (here / "my_lab").mkdir()
    for folder in (here, here / "my_lab"):
        (folder / "shared_kv.py").write_text(OWN_ATTENTION, encoding="utf-8")
    choice = registry.configure("attention", name)
    assert choice.name == name
    assert registry.configure("attention", choice.settings()) == choice
    assert len(registry.source_sha256(name)) == 64


@torch.no_grad()
def test_a_users_own_attention_works_from_settings_to_cached_decoding(here: Path) -> None:
    (here / "shared_kv.py").write_text(OWN_ATTENTION, encoding="utf-8")
    offered = registry.config_class("attention", "./shared_kv.py").offers  # type: ignore[attr-defined]
    for position in registry.names("position"):
        if not registry.config_class("position", position).needs <= offered:  # type: ignore[attr-defined]
            continue
        settings = tiny(attention="./shared_kv.py", position=position)
        model = build(settings).eval()
        cache, ids = model.new_cache(2, 8), torch.arange(16).view(2, 8)
        decoded = torch.cat([model(piece, cache=cache) for piece in ids.split((4, 1, 3), dim=1)], 1)
        torch.testing.assert_close(decoded, model(ids), atol=1e-4, rtol=0)
        assert cache.written_bytes() == cache_bytes(settings, 2, 8, "fp32") == 2 * 2 * 8 * 32 * 4
        promised = cost(settings, 8)
        assert promised.params_total == sum(p.numel() for p in model.parameters())
        assert promised.flops_per_token is None  # the file does not say


def test_a_users_own_file_may_extend_a_built_in_choice(here: Path) -> None:
    text = "from ablate.attention import mha\n\n\nclass Config(mha.Config):\n    window: int = 3\n"
    (here / "windowed.py").write_text(text, encoding="utf-8")
    choice = registry.configure("attention", {"name": "./windowed.py", "window": 5})
    assert isinstance(choice, mha.Config)
    assert choice.settings()["window"] == 5


def test_the_source_of_a_users_own_file_is_part_of_what_it_is(here: Path) -> None:
    for name, text in (("one", OWN_ATTENTION), ("two", OWN_ATTENTION + "\n")):
        (here / f"{name}.py").write_text(text, encoding="utf-8")
    assert registry.source_sha256("./one.py") != registry.source_sha256("./two.py")


@pytest.mark.parametrize(
    ("text", "message", "cure"),
    [
        ("x = 1\n", "attention './own.py' holds no attention choice", "derive from ablate.attention.AttentionChoice"),
        ("from ablate.norm.rms_norm import Config\n", "attention './own.py' holds no attention choice", "derive from"),
        ("Config = 3\n", "attention './own.py' holds no attention choice", "derive from"),
        ("import nowhere_at_all\n", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere_at_all'", ""),
        ("raise KeyError('a')\n", "attention './own.py' cannot be loaded: KeyError: 'a'", ""),
        ("def\n", "attention './own.py' cannot be loaded: SyntaxError: ", ""),
        ("raise ValueError('one\\ntwo')\n", "attention './own.py' cannot be loaded: ValueError: one", ""),
        (None, "attention './own.py' cannot be loaded: FileNotFoundError: no Python file at own.py", ""),
    ],
)
def test_a_users_file_that_does_not_work_says_why_in_one_line(
    here: Path, text: str | None, message: str, cure: str
) -> None:
    if text is not None:
        (here / "own.py").write_text(text, encoding="utf-8")
    fault = fault_of("attention", "./own.py")
    assert message in fault.message
    assert cure in fault.cure


def test_a_dotted_name_that_leads_nowhere_says_so(here: Path) -> None:
    assert "ModuleNotFoundError: No module named 'my_lab'" in fault_of("attention", "my_lab.shared_kv").message


@pytest.mark.parametrize("ending", ["SystemExit(0)", "GeneratorExit(0)"])
def test_a_users_own_file_ends_nothing_but_itself(here: Path, ending: str) -> None:
    (here / "own.py").write_text(f"raise {ending}\n", encoding="utf-8")
    message = f"attention './own.py' cannot be loaded: {ending.partition('(')[0]}: 0"
    assert fault_of("attention", "./own.py").message == message


def test_what_a_users_own_file_prints_is_no_result(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "own.py").write_text(f"print('hello')\n{OWN_ATTENTION}", encoding="utf-8")
    registry.configure("attention", "./own.py")
    assert capsys.readouterr() == ("", "hello\n")


def test_the_slot_of_a_users_own_choice_is_that_of_its_class(here: Path) -> None:
    (here / "own.py").write_text(OWN_ATTENTION, encoding="utf-8")
    (here / "none.py").write_text("Config = 3\n", encoding="utf-8")
    assert registry.slot_of("./own.py") == registry.slot_of("own.py") == "attention"
    with pytest.raises(Faults, match=r"'\./none\.py' holds no choice"):
        registry.slot_of("./none.py")


def test_code_that_lies_compiled_beside_a_file_is_not_run(here: Path) -> None:
    """It was neither announced nor hashed, and Python takes it unlooked at where it says so itself."""
    file = here / "own.py"
    file.write_text("raise KeyError('compiled')\n", encoding="utf-8")
    py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    file.write_text("raise KeyError('source')\n", encoding="utf-8")
    assert "KeyError: 'source'" in fault_of("attention", "./own.py").message
