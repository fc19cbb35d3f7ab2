"""What a layer's choices need of one another."""

from __future__ import annotations

from collections.abc import Iterator

from ablate.choice import Path, Problem, SettingsError
from ablate.settings.layer import CROSS, LayerSettings
from ablate.settings.model import ModelSettings
from ablate.settings.stack import StackSettings


def placed(problem: Problem, path: Path) -> SettingsError:
    """A problem where it belongs: below `path`."""
    return problem.below(path) if isinstance(problem, SettingsError) else SettingsError(path, problem)


def pairings(model: ModelSettings, given: ModelSettings) -> list[SettingsError]:
    """What each layer's choices need of one another and do not find; each sentence once."""
    found = [
        fault
        for stack in model.stacks
        for layer, _ in stack.distinct_layers()
        for fault in (*_attention_faults(layer, stack), *_position_faults(layer, stack, given))
    ]
    return list({fault.message: fault for fault in found}.values())


def _attention_faults(layer: LayerSettings, stack: StackSettings) -> Iterator[SettingsError]:
    attention, crossed = layer.attention, layer.cross_attention
    if not attention.is_causal(stack.shape) and "bidirectional" not in attention.offers:
        message = f"attention {attention.name} only goes forward; the {stack.name} must look both ways"
        yield SettingsError(("attention",), message, "choose another attention there")
    if crossed is not None and "cross" not in crossed.offers:
        message = f"attention {crossed.name} cannot read another sequence, as a decoder's cross attention must"
        yield SettingsError((CROSS,), message, f"choose another {CROSS}")


def _position_faults(layer: LayerSettings, stack: StackSettings, given: ModelSettings) -> Iterator[SettingsError]:
    """The hooks that a position scheme needs; a width that cannot be rotated is told where the file says it."""
    position, attention = layer.position, layer.attention
    usual = stack.usual.position
    if position.embeds and position != usual:
        message = f"position {position.name} adds to the embeddings, which no single layer has"
        yield SettingsError(("layers",), message, "choose it for the whole model, or another one for the layer")
    if usual.embeds and position != usual and not position.needs:
        message = f"position {usual.name} adds to the embeddings, and no layer is without it"
        yield SettingsError(("layers",), message, "take the position out of the rule")
    if missing := " and ".join(HOOKS[hook] for hook in sorted(position.needs - attention.offers)):
        message = f"position {position.name} needs an attention that can {missing}; {attention.name} cannot"
        yield SettingsError(("position",), message, "choose another position or another attention")
    else:
        said = attention.rotary_setting
        width = getattr(given.attention, said, None) if type(attention) is type(given.attention) else None
        for problem in position.problems(stack.scheme(layer).shape, attention.rotary_dim(stack.shape)):
            own = isinstance(problem, SettingsError) and problem.path
            yield placed(problem, ("attention", said) if width and not own else ("position",))


HOOKS = {"rotate": "rotate heads", "bias": "bias scores", "keys": "show the keys that it scores"}
