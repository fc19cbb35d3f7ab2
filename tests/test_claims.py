"""Claims as they are written: what the grammar takes and refuses, and whether their variants are there."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import Expand, Refused, Write
from hypothesis import assume, given
from hypothesis import strategies as st

from ablate import claims
from ablate.choice import Faults, SettingsError
from ablate.claims import DEEPEST, MOST_CHARACTERS, Call, Chain, Claim, Figure, Negative, Number, Term, known, parse
from ablate.cli import main
from ablate.document import FileFaults
from ablate.document import parse as parse_yaml
from ablate.experiment import Experiment
from ablate.metrics import METRICS
from ablate.variant import own_code

# --- What people write ------------------------------------------------------------------------------------------------

PLAIN = st.from_regex(r"[^\W\d]\w{0,8}", fullmatch=True)
NAMES = PLAIN | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
METRIC = st.sampled_from(known())
NUMBERS = st.floats(0, 1e300).map(Number) | st.integers(0, 10**9).map(float).map(Number)
FIGURES = st.builds(Figure, NAMES, METRIC)


def terms(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        def chain(signs: str) -> st.SearchStrategy[Any]:
            rest = st.lists(st.tuples(st.sampled_from(signs), inner), min_size=1, max_size=3).map(tuple)
            return st.builds(Chain, inner, rest)

        several = st.lists(inner, min_size=2, max_size=3).map(tuple)
        calls = st.builds(Call, st.sampled_from(["min", "max"]), several) | inner.map(lambda each: Call("abs", (each,)))
        return chain("+-") | chain("*/") | inner.map(Negative) | calls

    return st.recursive(leaves, larger, max_leaves=6)


def as_written(term: Term, quote: str = '"') -> str:
    """With every bracket, in another hand than the parser's."""
    if isinstance(term, Number):
        return repr(term.value)
    if isinstance(term, Figure):
        return f"{quote}{term.variant.replace(quote, quote * 2)}{quote}.{term.metric}"
    if isinstance(term, Negative):
        return f"-({as_written(term.inner, quote)})"
    if isinstance(term, Call):
        return f"{term.name}( {', '.join(as_written(each, quote) for each in term.terms)} )"
    parts = [f"({as_written(term.first, quote)})", *(f"{sign} ({as_written(each, quote)})" for sign, each in term.rest)]
    return " ".join(parts)


@given(terms(NUMBERS | FIGURES), st.sampled_from(["<", "<=", ">", ">=", "=="]), FIGURES, st.sampled_from("'\""))
def test_what_is_written_is_what_is_read(left: Any, sign: str, right: Figure, quote: str) -> None:
    assume("/ (0.0)" not in as_written(left))  # which is refused
    text = f"{as_written(left, quote)}{sign}{as_written(right, quote)}"
    if len(text) <= MOST_CHARACTERS and claims._alternatives(left) <= claims.MOST_ALTERNATIVES:
        found = parse(text)
        assert (found.left, found.sign, found.right) == (left, sign, right)


@given(NAMES)
def test_any_name_can_be_quoted(name: str) -> None:
    """Also those that the grid makes, and those of several budgets."""
    assert parse(f"{claims.written(name)}.val_loss < 3").left == Figure(name, "val_loss")


WORDS = (
    *("gqa.val_loss", '"a=b".val_loss', "baseline.", ".val_loss", "2M", "1e", "1e-3", "5%", "gqa", "'", '"', "(", ")"),
    *("abs(", "min(", ",", "+", "-", "*", "/", "**", "<", "<=", "=<", "=", "==", "!=", "and", "is", " ", "\n", "٣"),
)
ALMOST = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


class _Refused(Exception):
    """As it should be."""


def _read(text: str) -> Claim:
    try:
        return parse(text)
    except SettingsError as fault:
        raise (_Refused if fault.message and fault.cure else AssertionError)(text) from fault


@given(ALMOST | st.text(max_size=40))
def test_whatever_is_written_is_read_or_refused_with_a_cure(text: str) -> None:
    with contextlib.suppress(_Refused):
        found = _read(text)
        assert found.figures
        assert parse(text) == found


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(inner, st.sampled_from([" + ", "-", " * "]), inner).map("".join) | inner.map("({})".format)


@given(st.recursive(st.sampled_from(["2", "0.5", "3000", "1e1"]), joined, max_leaves=8))
def test_signs_bind_as_in_arithmetic(text: str) -> None:
    if text.count("(") <= DEEPEST:
        known = eval(text)  # made of digits and signs
        assert _value(parse(f"{text} < baseline.val_loss").left) == pytest.approx(known)


def _value(term: Term) -> float:
    if isinstance(term, Chain):
        value = _value(term.first)
        for sign, each in term.rest:
            other = _value(each)
            value = {"+": value + other, "-": value - other, "*": value * other}[sign]
        return value
    assert isinstance(term, Number)
    return term.value


@pytest.mark.parametrize(
    "number", [("2M", 2e6), ("1.5k", 1500), ("3B", 3e9), ("1e-3", 1e-3), (".5", 0.5), ("1E+2", 100)]
)
def test_numbers(number: tuple[str, float]) -> None:
    text, value = number
    assert parse(f"baseline.params_total > {text}").right == Number(value)


def test_what_it_speaks_of_comes_once_in_the_order_of_the_sentence() -> None:
    found = parse("max(a.val_loss, -b.val_loss) / a.val_loss < a.params_total")
    assert list(map(str, found.figures)) == ["a.val_loss", "b.val_loss", "a.params_total"]


def test_metrics_are_those_that_rows_hold() -> None:
    assert {"val_loss", "params_total", "kv_cache_bytes_per_token", "step_seconds_p50"} <= set(known())
    assert set(known()) < set(METRICS)


# --- What is refused --------------------------------------------------------------------------------------------------

NAMED = 'write variant.metric, and quote a name that is no plain word: "block=post_norm".val_loss'
COMPARED = "compare with one of <, <=, >, >= and =="
WRONG = {
    "gqa.val_los < 3": ("unknown metric 'val_los'", "did you mean 'val_loss'?"),
    "gqa.val_loss": ("no comparison at the end", COMPARED),
    "gqa.val_loss = 3": ("no comparison at '=' (character 14)", COMPARED),
    "gqa.val_loss != 3": ("no comparison at '!' (character 14)", COMPARED),
    "gqa.val_loss < ": ("a number, a figure or '(' is needed at the end", NAMED),
    "1 < gqa.val_loss < 3": ("two comparisons", "write two claims"),
    "gqa.val_loss < 3 and mla.val_loss < 3": ("nothing more is expected at 'and' (character 18)", "write two claims"),
    "gqa.val_loss < 5%": ("nothing more is expected at '%' (character 17)", "write 0.05 for 5 %"),
    "gqa < baseline": ("gqa is no figure", NAMED),
    "block=post_norm.val_loss < 3": ("block is no figure", NAMED),
    "gqa@params.val_loss < 3": ("gqa is no figure", NAMED),
    "gqa-2.val_loss < 3": ("gqa is no figure", NAMED),
    "1e5.val_loss < 3": ("1e5 is no figure", NAMED),
    "a.b.val_loss < 3": ("a is no figure", NAMED),
    "sqrt(gqa.val_loss) < 3": ("unknown function 'sqrt'", "known: abs, max, min"),
    "mx(gqa.val_loss, 1) < 3": ("unknown function 'mx'", "did you mean 'max'?"),
    "abs(gqa.val_loss, 1) < 3": ("abs of 2", "give it one value, with commas between"),
    "max(gqa.val_loss) < 3": ("max of 1", "give it at least two values, with commas between"),
    "(gqa.val_loss < 3": ("')' is missing at '<' (character 15)", "close each bracket"),
    "gqa.val_loss < 3)": ("nothing more is expected at ')' (character 17)", NAMED),
    "gqa.val_loss ** 2 < 3": ("a number, a figure or '(' is needed at '*' (character 15)", NAMED),
    "gqa.val_loss / 0 < 3": ("a division by zero", "divide by another number"),
    "3 > -abs(2 * (1 / 0.0 - gqa.val_loss))": ("a division by zero", "divide by another number"),
    "1 < 2": ("no variant", "speak of a variant's metric, as in gqa.val_loss"),
    "gqa.val_loss < 1e999": ("1e999 is no number that can be reckoned with", "write it as 1000, 1e-3 or 2M"),
    "gqa.val_loss < 1e3M": ("1e3M is no number that can be reckoned with", "write it as 1000, 1e-3 or 2M"),
    "__import__('os').system < 3": ("unknown function '__import__'", "known: abs, max, min"),
    "": ("a number, a figure or '(' is needed at the end", NAMED),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_told_with_its_cure(text: str) -> None:
    message, cure = WRONG[text]
    with pytest.raises(SettingsError) as caught:
        parse(text)
    assert (caught.value.message, caught.value.cure) == (f"{message} in the claim '{text}'", cure)


def test_no_claim_is_too_long_or_too_deep_to_be_refused() -> None:
    for text in ("(" * 100_000, "-" * 900 + "1", "abs(" * 200, "a.val_loss+" * 90 + "1", "1" * 10_000):
        with pytest.raises(SettingsError):
            parse(text)
    parse("+".join(["a.val_loss"] * 80) + " < 1")
    parse("(" * DEEPEST + "a.val_loss" + ")" * DEEPEST + " < 1")
    with pytest.raises(SettingsError, match=f"more than {DEEPEST} levels"):
        parse("(" * (DEEPEST + 1) + "a.val_loss" + ")" * (DEEPEST + 1) + " < 1")


def test_functions_of_what_is_measured_have_a_limit() -> None:
    choices = ["abs(a.val_loss - b.val_loss)"] * 6
    parse(" + ".join(choices) + " < 1")
    with pytest.raises(SettingsError, match="more than 64 alternatives"):
        parse(" + ".join([*choices, choices[0]]) + " < 1")
    parse(" + ".join(["abs(a.params_total)"] * 20) + " < 1")


# --- In a file --------------------------------------------------------------------------------------------------------

GQA = "variants: {gqa: {attention: {name: gqa, n_kv_heads: 1}}, also: {attention: mha}}\n"


def test_a_claim_is_a_sentence_or_says_more(expand: Expand) -> None:
    found = expand(
        f"{GQA}claims:\n- gqa.val_loss <= baseline.val_loss\n"
        "- {claim: gqa.params_total < 1M, says: 12.5, source: Table 3}\n- '\"also\".val_loss < 3'\n"
    ).with_claims()
    assert [each.text for each in found.claims][1:] == ["gqa.params_total < 1M", '"also".val_loss < 3']
    assert (found.claims[1].says, found.claims[1].source) == ("12.5", "Table 3")
    assert found.claims[2].document() == {"claim": '"also".val_loss < 3', "means": {"also": "baseline"}}
    for claim in found.claims:
        assert claims.read(claim.document()) == claim


REFUSED = {
    "claims: gqa.val_loss < 3": "tiny.yaml:6:1: 'claims': a list is needed (it is 'gqa.val_loss < 3')\n  "
    "write its values in brackets, as in [1, 2]",
    "claims: [3]": "tiny.yaml:6:10: 'claims.0': a sentence is needed (it is 3)\n  "
    "write one, as in gqa.val_loss < baseline.val_loss",
    "claims: [null]": "tiny.yaml:6:10: 'claims.0': a sentence is needed (it is null)\n  "
    "write one, as in gqa.val_loss < baseline.val_loss",
    "claims: [{claim: 3}]": "tiny.yaml:6:11: 'claims.0.claim': text is needed (it is 3)\n  write it in quotes",
    "claims: [{says: x}]": "tiny.yaml:6:10: 'claim' is missing\n  add it",
    "claims: [{claim: gqa.val_loss < 3, says: true}]": "tiny.yaml:6:36: 'claims.0.says': text is needed (it is True)\n"
    "  write it in quotes",
    "claims: [gqa.val_loss < 3, gqa.los < 3]": "tiny.yaml:6:28: unknown metric 'los' in the claim 'gqa.los < 3'\n  "
    "did you mean 'val_loss'?",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_claim_refuses_the_file_at_its_place(line: str, refused: Refused) -> None:
    assert refused(GQA + line) == REFUSED[line]


def test_a_misspelt_key_is_told_with_the_right_one(refused: Refused) -> None:
    assert "tiny.yaml:6:11: unknown setting 'clam'\n  did you mean 'claim'?" in refused(GQA + "claims: [{clam: x}]")


def test_all_wrong_claims_are_told_at_once(refused: Refused) -> None:
    said = refused(GQA + "claims:\n- gqa.los < 3\n- gqa.val_loss < 3\n- gqa <\n")
    assert [line[:12] for line in said.splitlines()[::2]] == ["tiny.yaml:7:", "tiny.yaml:9:"]


def test_a_variant_that_is_not_there_is_told_with_the_nearest(expand: Expand) -> None:
    added = "vary: {block: [pre_norm, post_norm]}\nclaims:\n- gqs.val_loss < 3\n- '\"block=post_nrm\".val_loss < 3'\n"
    with pytest.raises(FileFaults) as caught:
        expand(GQA + added).with_claims()
    assert caught.value.lines == [
        "tiny.yaml:8:3: unknown variant 'gqs'\n  did you mean 'gqa'?",
        "tiny.yaml:9:3: unknown variant '\"block=post_nrm\"'\n  did you mean '\"block=post_norm\"'?",
    ]


def test_invalid_combinations_can_be_named(expand: Expand) -> None:
    found = expand("vary: {n_heads: [4, 3]}\nclaims: ['\"n_heads=3\".val_loss < 3']\n")
    assert [each.name for each in found.invalid] == ["n_heads=3"]
    assert found.with_claims().claims[0].figures[0].variant == "n_heads=3"


@given(st.dictionaries(NAMES, st.just("x"), min_size=1, max_size=5), st.data())
def test_names_are_checked_whatever_they_are(known: dict[str, str], data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(known)) | NAMES)
    claim = parse(f"{claims.written(name)}.val_loss < 3")
    if name in known:
        assert claims.named([claim], known, {}) == [claim]
    else:
        with pytest.raises(Faults):
            claims.named([claim], known, {})


def test_what_a_claim_says_is_no_code_of_anybody() -> None:
    found = parse_yaml(
        "claims: [gqa.val_loss < 3, {claim: a.val_loss < 1, source: paper/x.py}]\nbaseline: {attention: a.b}", ""
    )
    assert [name for _, name in own_code(found.data)] == ["a.b"]


def test_claims_have_no_part_in_a_trials_identity(expand: Expand) -> None:
    def ids(found: Experiment) -> list[str]:
        return [trial.trial_id for trial in found.trials("cpu", 1)]

    assert ids(expand(GQA)) == ids(expand(GQA + "claims: [gqa.val_loss < 3]\n"))


# --- Before the run ---------------------------------------------------------------------------------------------------


def test_plan_and_status_tell_what_is_known_before_the_run(write: Write) -> None:
    file = str(write(GQA + "claims:\n- gqa.kv_cache_bytes_per_token == baseline.kv_cache_bytes_per_token / 4\n"
                     "- gqa.params_total > also.params_total\n- gqa.val_loss < 3\n"))  # fmt: skip
    for verb in ("plan", "status"):
        done = CliRunner().invoke(main, [verb, file, "--device", "cpu", "--json"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)["claims"]
        assert [each["verdict"] for each in found] == ["supported", "refuted", "inconclusive"]
        assert [each["why"] for each in found] == ["", "", "gqa: 1 not finished"]
        said = CliRunner().invoke(main, [verb, file, "--device", "cpu"]).stdout
        assert re.search("^inconclusive: gqa.val_loss < 3 \\(gqa: 1 not finished\\)$", said, re.MULTILINE)


def test_an_unknown_variant_refuses_before_anything_starts(write: Write) -> None:
    file = str(write(GQA + "claims: [gqs.val_loss < 3]\n"))
    for verb in ("plan", "run", "status"):
        done = CliRunner().invoke(main, [verb, file, "--device", "cpu"])
        assert done.exit_code == 2
        assert done.stderr == "tiny.yaml:6:10: unknown variant 'gqs'\n  did you mean 'gqa'?\n"
    assert [path.name for path in write().parent.iterdir()] == ["tiny.yaml"]


def test_there_must_be_claims_to_check(write: Write) -> None:
    done = CliRunner().invoke(main, ["run", str(write(GQA)), "--device", "cpu", "--check-claims"])
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "tiny.yaml: --check-claims, and there are no claims",
        "  write `claims` in the file, or leave --check-claims out",
    ]


def test_a_claim_holds_what_it_needs() -> None:
    found = Claim("x", Number(1), "<", Figure("a", "val_loss"), says="12 %")
    assert found.document() == {"claim": "x", "says": "12 %"}


# --- After the run ----------------------------------------------------------------------------------------------------


def test_the_exit_status_follows_the_claims(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--check-claims`, and without it not; the report takes them from what is stored."""
    monkeypatch.setattr("ablate.sweep._mirror", lambda *_, **__: None)
    monkeypatch.setattr("ablate.report.plots_of", lambda *_: [])

    def ended(*words: str, claims: str) -> Result:
        write(f"{GQA}claims: [{claims}]\n")
        return CliRunner().invoke(main, [*words, *(["--device", "cpu"] if words[0] == "run" else [])])

    true, false = "gqa.kv_cache_bytes_per_token * 4 == also.kv_cache_bytes_per_token", "gqa.val_loss < 1e-9"
    done = ended("run", "tiny.yaml", "--check-claims", claims=true)
    assert (done.exit_code, f"supported: {true}" in done.stdout) == (0, True), done.output
    assert ended("report", "tiny.yaml", "--check-claims", claims=true).exit_code == 0
    done = ended("report", "tiny.yaml", "--check-claims", claims=false)
    assert (done.exit_code, "its claims have changed since the last run" in done.stderr) == (1, True), done.output
    done = ended("run", "tiny.yaml", "--check-claims", claims=f"{true}, {false}")
    assert (done.exit_code, f"inconclusive: {false} (a single seed has no interval)" in done.stdout) == (1, True)
    assert ended("run", "tiny.yaml", claims=f"{true}, {false}").exit_code == 0
    done = ended("report", "results/tiny", "--check-claims", "--json", claims="")
    assert done.exit_code == 1
    assert [each["verdict"] for each in json.loads(done.stdout)["claims"]] == ["supported", "inconclusive"]
    assert "2 claims: 1 supported, 1 inconclusive." in Path("reports/tiny/report.md").read_text(encoding="utf-8")
    assert ended("run", "tiny.yaml", claims="").exit_code == 0
    assert ended("report", "results/tiny", "--check-claims", claims="").exit_code == 2
