"""A `config.json` read field by field: what no family asks for, and no list declares harmless, is refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ablate.choice import Faults, SettingsError

ABSENT: Any = object()
_MOST, _FEW = 2**31 - 1, 4096
"""The largest size, and the most layers or experts: a file with more would take all memory before it is refused."""
_LARGEST = sys.float_info.max

_PAPERS = "_name_or_path architectures auto_map finetuning_task id2label label2id language model_type name_or_path"
_TOKENS = (
    "bos_token_id cls_token_id eos_token_id mask_token_id pad_token_id prefix sep_token_id tokenizer_class unk_token_id"
)
_STORAGE = "_commit_hash dtype torch_dtype torchscript transformers_version transformers.js_config use_bfloat16"
_RUNNING = "_attn_implementation attn_implementation chunk_size_feed_forward gradient_checkpointing output_attentions"
_OUTPUT = "output_hidden_states output_past return_dict use_cache use_return_dict"
_TASKS = "_num_labels num_labels problem_type task_specific_params"
_WRITING = """bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
output_scores remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate suppress_tokens
temperature top_k top_p typical_p"""
_TRAINING = "init_std initializer_factor initializer_range layerdrop"
HARMLESS = frozenset(" ".join([_PAPERS, _TOKENS, _STORAGE, _RUNNING, _OUTPUT, _TASKS, _WRITING, _TRAINING]).split())
"""Fields of any family that change no logit: names, tokens, how tensors are stored, how text is sampled from the
logits, and what only training reads. Rates of dropout are such too, and stand in each family's own list."""


def refusal(message: str, cure: str = "") -> Faults:
    """One fault, as all errors of an import are raised."""
    return Faults([fault(message, cure)])


def fault(message: str, cure: str = "") -> SettingsError:
    """A fault on one line: what a file says may hold line breaks, and characters that no terminal shows."""
    line = "".join(each if each.isprintable() else repr(each)[1:-1] for each in message)
    return SettingsError((), line, cure)


def shown(value: object) -> str:
    """A value as the file writes it, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """The fields of a file, each to be asked for once. Raises `Faults` for a value of the wrong kind."""

    def __init__(self, config: Mapping[str, Any], harmless: Iterable[str] = (), within: str = "") -> None:
        self._config, self._within = config, within
        self._asked = set(harmless)

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def take(self, *names: str, default: Any = ABSENT) -> Any:
        """The field's value under the first of its names that the file has; `default` where it has none of them."""
        self._asked.update(names)
        given = [name for name in names if name in self._config]
        if not given:
            if default is ABSENT:
                raise refusal(f"config.json: '{self._within}{names[0]}' is missing", "add it")
            return default
        value = self._config[given[0]]
        for other in given[1:]:
            if self._config[other] != value:
                both = f"'{given[0]}' is {shown(value)} and '{other}' is {shown(self._config[other])}"
                raise refusal(f"config.json: {both}, but they are two names of one setting", "keep one of them")
        return value

    def whole(self, *names: str, default: Any = ABSENT) -> Any:
        """A count of at least 1; `null` counts as not given."""
        return self._of_kind(names, default, "a whole number", lambda value: type(value) is int and 0 < value <= _MOST)

    def few(self, *names: str, default: Any = ABSENT) -> Any:
        """A count of what has modules of its own, layers and experts; `null` counts as not given."""
        kind = f"a whole number up to {_FEW}"
        return self._of_kind(names, default, kind, lambda value: type(value) is int and 0 < value <= _FEW)

    def count(self, name: str, default: int) -> int:
        """A whole number that may be 0, as `null` is."""
        value = self._of_kind((name,), default, "a whole number", lambda each: type(each) is int and 0 <= each <= _MOST)
        return int(value) if self._config.get(name, default) is not None else 0

    def number(self, *names: str, default: Any = ABSENT) -> Any:
        """A finite number; `null` counts as not given."""
        found = self._of_kind(names, default, "a number", lambda v: type(v) in (int, float) and abs(v) <= _LARGEST)
        return float(found) if type(found) is int else found

    def flag(self, *names: str, default: bool) -> bool:
        """True or false; `null` counts as not given."""
        found: bool = self._of_kind(names, default, "true or false", lambda value: isinstance(value, bool))
        return found

    def section(self, name: str) -> Fields | None:
        """The fields below `name`; None where it is absent, null or empty."""
        below = self._of_kind((name,), None, "a mapping", lambda value: isinstance(value, dict))
        return Fields(below, within=f"{self._within}{name}.") if below else None

    def unused(self, *names: str) -> None:
        """Fields that mean nothing beside the others."""
        self._asked.update(names)

    def only(self, name: str, *allowed: Any, reason: str = "") -> None:
        """The field, where it is there, must be one of `allowed`; it is refused by name otherwise."""
        value = self.take(name, default=allowed[0])
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
            self.refuse(name, reason)

    def refuse(self, name: str, reason: str) -> None:
        """Raises `Faults` for a field whose value cannot be imported."""
        why = f": {reason}" if reason else ""
        message = f"config.json: '{self._within}{name}' is {shown(self._config.get(name))}, which is not imported{why}"
        raise refusal(message, "choose a checkpoint without it")

    def close(self) -> None:
        """Raises `Faults` with every field that nobody asked for."""
        cure = "ablate cannot say whether it changes the numbers; leave it out of the file if you know that it does not"
        unknown = [name for name in self._config if name not in self._asked]
        found = [f"unknown field '{self._within}{name}', which is {shown(self._config[name])}" for name in unknown]
        if found:
            raise Faults(fault(f"config.json: {message}", cure) for message in found)

    def _of_kind(self, names: tuple[str, ...], default: Any, kind: str, holds: Any) -> Any:
        value = self.take(*names, default=default)
        if value is None:
            if default is ABSENT:
                raise refusal(f"config.json: '{self._within}{names[0]}' is null", f"write {kind}")
            return default
        if value is not default and not holds(value):
            given = next((name for name in names if name in self._config), names[0])
            raise refusal(f"config.json: '{self._within}{given}' must be {kind}, not {shown(value)}")
        return value
