"""What each family is taught: which tokens it sees, which it is to tell, and that it cannot see what it is to tell."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from ablate.batches import Batches, HeldOut
from ablate.objectives import IGNORED, Batch, MaskedTokens, NextToken, Objective, SecondHalf, shifted

WORDS, MASK, START = 50, 60, 70
FAMILIES: dict[str, Objective] = {
    "decoder": NextToken(),
    "encoder": MaskedTokens(mask=MASK, n_tokens=WORDS),
    "encoder_decoder": SecondHalf(start=START),
}
TEXT = np.random.default_rng(0).integers(0, WORDS, 20_000)


def batches(family: str, seq_len: int = 20, sequences: int = 5, seed: int = 0) -> Batches:
    return Batches(TEXT, seq_len, sequences, seed, FAMILIES[family])


def held_out(family: str, seq_len: int = 20, windows: int = 12) -> HeldOut:
    return HeldOut(TEXT, seq_len, np.arange(windows) * seq_len, FAMILIES[family])


def fingerprint(*made: Batch) -> str:
    digest = hashlib.sha256()
    for batch in made:
        for array in batch.arrays:
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def joined(made: list[Batch]) -> list[np.ndarray]:
    return [np.concatenate(arrays) for arrays in zip(*(batch.arrays for batch in made), strict=True)]


# --- One shift --------------------------------------------------------------------------------------------------------


def test_the_shift_is_by_one() -> None:
    inputs, targets = shifted(np.arange(12).reshape(2, 6))
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10]]
    assert (targets == inputs + 1).all()


def test_a_decoder_tells_each_next_token() -> None:
    made = batches("decoder").batch(3)
    windows = batches("decoder").windows(3)
    assert list(made.inputs) == ["input_ids"]
    assert (made.inputs["input_ids"] == windows[:, :-1]).all()
    assert (made.targets == windows[:, 1:]).all()
    assert made.n_targets == 5 * 20


@pytest.mark.parametrize("seq_len", [2, 7, 20])
def test_an_encoder_decoder_reads_the_first_half_and_tells_the_second(seq_len: int) -> None:
    made = batches("encoder_decoder", seq_len).batch(2)
    text = batches("encoder_decoder", seq_len).windows(2)[:, :-1]
    source, written = made.inputs["input_ids"], made.inputs["decoder_input_ids"]
    assert list(made.inputs) == ["input_ids", "decoder_input_ids"], "by the names of the model's arguments"
    assert source.shape[1] == seq_len // 2
    assert (np.concatenate([source, made.targets], axis=1) == text).all()
    assert (written[:, 0] == START).all(), "nothing of the target is seen before its first token is told"
    assert (written[:, 1:] == made.targets[:, :-1]).all()
    assert made.n_targets == made.targets.size


# --- Masked tokens ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masked() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Text, what is shown of it, and targets: 4000 windows of 40 tokens."""
    source = Batches(np.tile(TEXT, 9), 40, 4000, 0, FAMILIES["encoder"])
    shown, targets = source.batch(1).arrays
    return source.windows(1)[:, :-1], shown, targets


def test_of_the_tokens_15_percent_are_chosen_in_every_window(masked: tuple[np.ndarray, ...]) -> None:
    text, _, targets = masked
    chosen = targets != IGNORED
    assert (chosen.sum(axis=1) == 6).all()
    assert (targets[chosen] == text[chosen]).all()
    share = chosen.mean(axis=0)
    assert share.min() > 0.13, "every place of a window is chosen as often as any other"
    assert share.max() < 0.17


def test_of_the_chosen_80_percent_are_masked_10_replaced_and_10_left(masked: tuple[np.ndarray, ...]) -> None:
    text, shown, targets = masked
    chosen = targets != IGNORED
    assert (shown[~chosen] == text[~chosen]).all()
    assert (text < WORDS).all(), "the mask is no token of the text"
    masks, left = shown[chosen] == MASK, shown[chosen] == text[chosen]
    other = shown[chosen][~masks & ~left]
    n = chosen.sum()
    # Standard deviations over 24,000 tokens: 0.26 % and 0.19 %. A random token is the old one once in 50.
    assert masks.sum() / n == pytest.approx(0.8, abs=0.01)
    assert left.sum() / n == pytest.approx(0.1 + 0.1 / WORDS, abs=0.008)
    assert len(other) / n == pytest.approx(0.1 - 0.1 / WORDS, abs=0.008)
    counts = np.bincount(other, minlength=WORDS)
    assert len(counts) == WORDS, "any token of the text"
    assert counts.min() > 20
    assert counts.max() < 90


@pytest.mark.parametrize(("seq_len", "chosen"), [(1, 1), (3, 1), (6, 1), (10, 2), (20, 3), (128, 19)])
def test_at_least_one_token_of_a_window_is_chosen(seq_len: int, chosen: int) -> None:
    made = batches("encoder", seq_len).batch(1)
    assert ((made.targets != IGNORED).sum(axis=1) == chosen).all()
    assert made.n_targets == 5 * chosen


# --- What is drawn belongs to the window ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_a_function_of_seed_and_step(family: str) -> None:
    one, other = batches(family, seed=7), batches(family, seed=7)
    for step in range(1, 9):
        one.batch(step)
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    assert fingerprint(one.batch(9)) == fingerprint(other.batch(9))
    assert (np.random.get_state()[1] == before).all(), "nothing is drawn from the global generator"
    assert fingerprint(one.batch(9)) != fingerprint(batches(family, seed=8).batch(9))
    assert fingerprint(one.batch(9)) != fingerprint(one.batch(8))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_drawn_does_not_depend_on_the_size_of_a_batch(family: str) -> None:
    large = batches(family, sequences=6).batch(1)
    small = [batches(family, sequences=2).batch(step) for step in (1, 2, 3)]
    for whole, parts in zip(large.arrays, joined(small), strict=True):
        assert (whole == parts).all()


def test_a_window_is_masked_anew_in_each_pass_and_for_each_seed() -> None:
    source = Batches(TEXT[:500], 20, 24, 0, FAMILIES["encoder"])
    assert source.windows_per_pass == 24
    chosen = [source.batch(step).targets != IGNORED for step in range(1, 6)]
    assert len({tuple(row) for each in chosen for row in each}) > 100, "no two windows are masked alike"
    assert (batches("encoder", seed=1).batch(1).targets != IGNORED).tolist() != chosen[0][:5].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sequences", [1, 5, 12, 100])
def test_an_evaluation_is_the_same_however_it_is_cut(family: str, sequences: int) -> None:
    whole = joined(list(held_out(family).batches(12)))
    cut = joined(list(held_out(family).batches(sequences)))
    assert all((a == b).all() for a, b in zip(whole, cut, strict=True))


def test_an_evaluation_is_not_masked_as_training_is() -> None:
    made = batches("encoder", sequences=12).batch(1), next(held_out("encoder").batches(12))
    train, evaluation = (batch.targets != IGNORED for batch in made)
    assert (train != evaluation).any()


def test_only_a_decoder_tells_every_token() -> None:
    assert {family: each.tells_every_token for family, each in FAMILIES.items()} == {
        "decoder": True,
        "encoder": False,
        "encoder_decoder": False,
    }
