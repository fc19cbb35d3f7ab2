"""A picture of any position scheme: what it does at each place, and how alike place 0 and the others are."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.choice import Faults, Problem, SettingsError, Shape
from ablate.init import initialise
from ablate.position import Position, PositionChoice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHAPE = Shape(d_model=128, n_layers=1, n_heads=4, max_seq_len=128, vocab_size=2)
WIDTH = SHAPE.d_model // SHAPE.n_heads
STD, SEED = 0.02, 0


@dataclass(frozen=True)
class View:
    """What one hook does: a heat map `(rows, columns)`, NaN where nothing is seen, and curves along the places."""

    title: str
    rows: str
    columns: str
    heat: Tensor
    alike: str
    along: str
    curves: dict[str, Tensor]


@torch.no_grad()
def views(choice: PositionChoice) -> list[View]:
    """A view of each hook that the scheme fills, in float64, for a causal stack of `SHAPE`.

    Raises `Faults` where it fills none, or does not work in this shape.
    """
    if problems := choice.problems(SHAPE, WIDTH):
        raise Faults(map(_as_fault, problems))
    module = choice.build(SHAPE, WIDTH).double()
    initialise(module, "normal", STD, SEED)
    if found := [view for hook in (_embedding, _rotation, _bias) for view in hook(module)]:
        return found
    raise Faults([SettingsError((), f"position {choice.name} does nothing that could be drawn", "plot another one")])


def _as_fault(problem: Problem) -> SettingsError:
    return problem if isinstance(problem, SettingsError) else SettingsError((), problem)


def _embedding(module: Position) -> Iterator[View]:
    nothing = torch.zeros(1, SHAPE.max_seq_len, SHAPE.d_model, dtype=torch.float64)
    added = module.embed(nothing, 0, torch.zeros(1, SHAPE.max_seq_len, dtype=torch.long))[0]
    if added.any():
        unit = added / added.norm(dim=-1, keepdim=True)
        curves = {"": unit @ unit[0]}
        yield View("what is added", "position", "dimension", added, "cosine with position 0", "position", curves)


def _rotation(module: Position) -> Iterator[View]:
    fixed = torch.full((1, 1, SHAPE.max_seq_len, WIDTH), WIDTH**-0.5, dtype=torch.float64)
    turned = module.rotate(fixed, 0)[0, 0]
    if not torch.equal(turned, fixed[0, 0]):
        title, alike = "a unit vector, rotated", "its score with itself at position 0"
        yield View(title, "position", "dimension", turned, alike, "position", {"": turned @ turned[0]})


def _bias(module: Position) -> Iterator[View]:
    fixed = torch.full((1, SHAPE.n_heads, SHAPE.max_seq_len, WIDTH), WIDTH**-0.5, dtype=torch.float64)
    bias = module.bias(fixed, fixed, 0, 0)
    if bias is not None:
        of_heads = bias[0] if bias.dim() == 4 else bias
        later = torch.ones_like(of_heads[0], dtype=torch.bool).triu(1)
        heat = of_heads[0].masked_fill(later, float("nan"))
        # The last query has keys at all distances.
        curves = {f"head {h + 1}": row.flip(-1) for h, row in enumerate(of_heads[:, -1])}
        title, along = "bias of head 1, all queries and keys alike", "distance to an earlier key"
        yield View(title, "query", "key", heat, "bias", along, curves)


# --- The picture ------------------------------------------------------------------------------------------------------


def png(choice: PositionChoice) -> bytes:
    """The views below each other; the same bytes for the same numbers. Raises `Faults` like `views`."""
    import matplotlib

    found, buffer = views(choice), io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9})
        _figure(title(choice), found).savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def title(choice: PositionChoice) -> str:
    """The scheme, the shape that it is drawn for, and whether its numbers are drawn at random."""
    shape = f"d_model {SHAPE.d_model}, {SHAPE.n_heads} heads, {SHAPE.max_seq_len} positions"
    random = f"; untrained weights from N(0, {STD}²), seed {SEED}" if choice.params(SHAPE, WIDTH) else ""
    return f"position {choice.name} ({shape}{random})"


def _figure(heading: str, found: Sequence[View]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8 * len(found)), layout="constrained", facecolor="white")
    figure.suptitle(heading, fontsize=10).set_parse_math(False)
    for view, (heat, curves) in zip(found, figure.subplots(len(found), 2, squeeze=False), strict=True):
        _draw_heat(figure, heat, view)
        _draw_curves(curves, view)
    return figure


def _draw_heat(figure: Figure, axes: Axes, view: View) -> None:
    seen = view.heat[view.heat.isfinite()]
    # Signs have two colours only where both occur.
    signed = bool((seen < 0).any() and (seen > 0).any())
    low, high = float(seen.min()), float(seen.max())
    reach = max(-low, high)
    image = axes.imshow(
        view.heat.numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r" if signed else "viridis",
        vmin=-reach if signed else low,
        vmax=reach if signed else high,
    )
    axes.set(title=view.title, xlabel=view.columns, ylabel=view.rows)
    figure.colorbar(image, ax=axes)


def _draw_curves(axes: Axes, view: View) -> None:
    for label, curve in view.curves.items():
        axes.plot(range(len(curve)), curve.numpy(), label=label, linewidth=1.4)
    axes.set(title=view.alike, xlabel=view.along)
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    if len(view.curves) > 1:
        axes.legend(frameon=False)
