"""What does a transformer's architecture choice buy, and what does it cost?

`ablate.load(folder)` reads results, `ablate.Experiment.from_file(path)` an experiment, `ablate.build(settings)` makes
a model, `ablate.load_hf(folder)` reads a published one, and `ablate.generate(model, input_ids, n)` lets one write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ablate.building import build as build
    from ablate.experiment import Experiment as Experiment
    from ablate.importing import generate as generate
    from ablate.importing import load_hf as load_hf
    from ablate.results import load as load

__version__ = "0.1.0"

_HOMES = {
    "Experiment": "ablate.experiment",
    "build": "ablate.building",
    "generate": "ablate.importing",
    "load": "ablate.results",
    "load_hf": "ablate.importing",
}


def __getattr__(name: str) -> Any:
    """What the package offers, imported when it is asked for: `--help` and `report` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ablate' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
