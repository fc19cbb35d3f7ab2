"""The picture of a position scheme: the numbers behind it, and the file."""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from ablate import catalogue, registry
from ablate.choice import Faults
from ablate.cli import main
from ablate.position import PositionChoice
from ablate.position_plot import SHAPE, STD, WIDTH, View, png, title, views

PLACES = SHAPE.max_seq_len


def choice(name: str) -> PositionChoice:
    made = registry.configure("position", name)
    assert isinstance(made, PositionChoice)
    return made


def only_view(name: str) -> View:
    (view,) = views(choice(name))
    return view


def test_what_sinusoids_add_and_its_cosine_with_position_0() -> None:
    view = only_view("sinusoidal")
    assert view.heat.shape == (PLACES, SHAPE.d_model)
    assert view.heat[5, 2].item() == pytest.approx(math.sin(5 / 10000 ** (2 / SHAPE.d_model)), abs=1e-12)
    pairs = SHAPE.d_model // 2
    expected = [sum(math.cos(p / 10000 ** (i / pairs)) for i in range(pairs)) / pairs for p in range(PLACES)]
    assert view.curves[""].tolist() == pytest.approx(expected, abs=1e-12)


def test_how_a_rotated_vector_scores_with_itself() -> None:
    view = only_view("rope")
    assert view.heat.shape == (PLACES, WIDTH)
    assert view.heat[3, 0].item() == pytest.approx((math.cos(3) - math.sin(3)) * WIDTH**-0.5, abs=1e-12)
    pairs = WIDTH // 2
    expected = [sum(math.cos(p / 10000 ** (i / pairs)) for i in range(pairs)) / pairs for p in range(PLACES)]
    assert view.curves[""].tolist() == pytest.approx(expected, abs=1e-12)


def test_biases_of_the_first_head_and_by_distance_of_every_head() -> None:
    view = only_view("alibi")
    assert list(view.curves) == ["head 1", "head 2", "head 3", "head 4"]
    for h, curve in enumerate(view.curves.values()):
        assert curve.tolist() == [-(4.0 ** -(h + 1)) * distance for distance in range(PLACES)]
    assert view.heat[7, :8].tolist() == [-0.25 * distance for distance in range(7, -1, -1)]
    assert view.heat[7, 8:].isnan().all()


@pytest.mark.parametrize("name", ["learned", "t5", "transformer_xl"])
def test_weights_are_drawn_the_same_every_time_and_the_title_says_so(name: str) -> None:
    one, other = only_view(name), only_view(name)
    assert torch.equal(one.heat.nan_to_num(), other.heat.nan_to_num())
    assert 0 < one.heat.nan_to_num().abs().max() < 10 * STD
    assert "untrained weights" in title(choice(name))
    assert "untrained" not in title(choice("rope"))


def test_a_scheme_that_fills_two_hooks_has_two_views(tmp_path: Path) -> None:
    file = tmp_path / "both.py"
    file.write_text(
        "from ablate.position import alibi, rope, Position, PositionChoice\n\n\n"
        "class Both(rope.Rotary):\n    def bias(self, q, k, start, first):\n"
        "        return alibi.Alibi(q.shape[1]).bias(q, k, start, first)\n\n\n"
        "class Config(PositionChoice):\n    def build(self, shape, rotary_dim):\n        return Both(rotary_dim)\n",
        encoding="utf-8",
    )
    assert [view.rows for view in views(choice(str(file)))] == ["position", "query"]
    assert _size(png(choice(str(file))))[1] > 1.5 * _size(png(choice("rope")))[1]


def _size(picture: bytes) -> tuple[int, int]:
    """Width and height, as the header of a PNG has them."""
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def describe(*arguments: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, ["describe", *arguments])
    assert done.exit_code == status, done.output
    return done


DRAWN = [name for name in catalogue.names("position") if name != "none"]


@pytest.mark.parametrize("name", DRAWN)
def test_describe_leaves_a_picture(name: str) -> None:
    shown = describe(f"position/{name}", "--plot", f"{name}.png").stdout
    assert shown.endswith(f"\nplot: {name}.png\n")
    assert shown.startswith(describe(f"position/{name}").stdout)
    picture = Path(f"{name}.png").read_bytes()
    width, height = _size(picture)
    assert width > height > 400
    assert 20_000 < len(picture) < 500_000


def test_the_same_numbers_are_the_same_bytes() -> None:
    assert png(choice("t5")) == png(choice("t5"))


def test_a_picture_without_a_name_is_position_png() -> None:
    found: Any = json.loads(describe("rope", "--json", "--plot").stdout)
    assert found["plot"] == "position.png"
    assert [file.name for file in Path().iterdir()] == ["position.png"]
    assert "plot" not in json.loads(describe("rope", "--json").stdout)


@pytest.mark.parametrize("target", ["attention/gqa", "gelu", "preset/llama", "grid.yaml", "data/text"])
def test_only_positions_are_drawn(target: str) -> None:
    said = describe(target, "--plot", "x.png", status=2).stderr.splitlines()
    assert said == [f"only a position scheme can be plotted, not {target}", "  give position/NAME"]
    assert not Path("x.png").exists()


def test_what_does_nothing_is_not_drawn() -> None:
    said = describe("position/none", "--plot", "x.png", status=2).stderr.splitlines()
    assert said[0] == "position none does nothing that could be drawn"
    with pytest.raises(Faults):
        views(choice("none"))
    assert not Path("x.png").exists()


def test_a_picture_that_is_no_png_is_refused() -> None:
    said = describe("position/rope", "--plot", "x.svg", status=2).stderr.splitlines()
    assert said == ["x.svg: a plot is a PNG file", "  write --plot x.png"]


def test_without_matplotlib_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = describe("position/rope", "--plot", "x.png", status=2).stderr.splitlines()
    assert said == ["matplotlib, which draws, is not installed", "  pip install matplotlib"]


def test_a_folder_that_is_not_there_is_told() -> None:
    said = describe("position/rope", "--plot", "nowhere/x.png", status=2).stderr
    assert said.startswith("nowhere/x.png: No such file or directory")


def test_settings_below_a_setting_are_described() -> None:
    found = json.loads(describe("position/rope", "--json").stdout)["settings"]
    assert found["scaling"]["type"] == "settings"
    assert found["scaling.kind"]["type"] == "linear | ntk | yarn | llama3"
    assert found["scaling.factor"] == {
        "type": "number",
        "default": None,
        "description": "how much longer sequences become",
        "bounds": ">= 1",
    }
