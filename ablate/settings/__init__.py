"""A variant's settings, typed: the model, the training recipe, what is profiled. Defaults have their home here."""

from ablate.settings.layer import CROSS, LAYER_SLOTS, LayerRule, LayerSettings
from ablate.settings.matching import MatchSettings
from ablate.settings.model import Dropout, EncoderSettings, HeadSettings, ModelSettings
from ablate.settings.profile import DecodeSettings, ProfileSettings
from ablate.settings.reading import VariantSettings, typed
from ablate.settings.recipe import ADDED, BUDGETS, OF_NO_NUMBER, OptimizerSettings, TrainSettings
from ablate.settings.resolution import resolved
from ablate.settings.stack import StackSettings

__all__ = [
    "ADDED",
    "BUDGETS",
    "CROSS",
    "LAYER_SLOTS",
    "OF_NO_NUMBER",
    "DecodeSettings",
    "Dropout",
    "EncoderSettings",
    "HeadSettings",
    "LayerRule",
    "LayerSettings",
    "MatchSettings",
    "ModelSettings",
    "OptimizerSettings",
    "ProfileSettings",
    "StackSettings",
    "TrainSettings",
    "VariantSettings",
    "resolved",
    "typed",
]
