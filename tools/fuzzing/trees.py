"""What can be done to a file that one knows the meaning of, and what must come of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from fuzzing.case import Case, Must
from fuzzing.corpus import TINY
from fuzzing.settings import Place, every_setting
from fuzzing.writing import Pairs, Raw, written

Tree = dict[str, Any]
_UNKNOWN = "zzqx_unknown"
_EVIL_NAMES = (
    *(
        "../x",
        "a/b",
        "a\\b",
        ".",
        "..",
        "...",
        "",
        " ",
        "/",
        "/etc/x",
        "~",
        "C:x",
        "-x",
        ".x",
        "x ",
        "con",
        "NUL",
        "aux.txt",
    ),
    *(
        "com1",
        "lpt9.log",
        "x.",
        "Aux.",
        "mlflow.db",
        "mlartifacts",
        "x.lock",
        "x" * 101,
        "x" * 50_000,
        "n\u0430me",
        "\uff21",
        "a\u0301",
    ),
    *(
        "a\nb",
        "a\tb",
        "a\u202eb",
        "a\u200bb",
        "é",
        "*",
        "a?b",
        "a:b",
        "a|b",
        "a<b>",
        "%00",
        "$(x)",
        "`x`",
        "a;b",
        "a'b",
        'a"b',
    ),
)
_NASTY: tuple[Any, ...] = (
    *(
        0,
        1,
        -1,
        2,
        3,
        7,
        2**24,
        2**24 + 1,
        2**31 - 1,
        2**31,
        2**40,
        2**53,
        2**63,
        10**9,
        10**12,
        10**30,
        Raw("9" * 400),
        Raw("9" * 5000),
        Raw("0x" + "f" * 400),
    ),
    *(
        1e9,
        1e-9,
        1e308,
        5e-324,
        -0.0,
        0.5,
        0.1,
        1.0,
        1e12,
        Raw("1e999"),
        Raw("0o17"),
        Raw("017"),
        Raw("0x10"),
        Raw("1_000"),
    ),
    *(
        True,
        False,
        None,
        Raw("yes"),
        Raw("No"),
        Raw("on"),
        Raw("1:30:00"),
        Raw("2026-11-30"),
        Raw("2M"),
        Raw("1.5k"),
        Raw("B"),
    ),
    *(
        "",
        " ",
        "x",
        "gqa",
        "mha",
        "moe",
        "rope",
        "none",
        "null",
        "1",
        "x" * 5000,
        "é",
        "\u202e",
        "../x",
        "a.b",
        "./x.py",
        "<<",
    ),
    *(
        [],
        [[]],
        [None],
        [1, 2],
        ["a", "a"],
        {},
        {"name": None},
        {"name": "gqa"},
        {"name": "x.y"},
        {"a": {"b": {"c": 1}}},
    ),
    *(
        list(range(300)),
        [[1] * 40] * 40,
        {str(i): i for i in range(300)},
        [{"every": 1}],
        [{"first": 10**9, "norm": "rms_norm"}],
    ),
)
_TAGS = (
    *(
        "!!python/object/apply:os.system [x]",
        "!!python/name:os.system x",
        "!!python/object:os.system {}",
        "!!binary aGk=",
    ),
    *(
        "!!timestamp 2026-11-30",
        "!!set {a}",
        "!!omap [a: 1]",
        "!foo x",
        "!<tag:x> 1",
        "!!pairs [a: 1]",
        "!!python/tuple [1]",
    ),
    *("!!js/function x", "!!merge x", "!!value x"),
)


def places(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a tree."""
    yield above
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*above, key))


def _at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def _with(node: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """The tree with something else in one place."""
    if not path:
        return change(node)
    other = copy.copy(node)
    other[path[0]] = _with(node[path[0]], path[1:], change)
    return other


def _mappings(tree: Tree, rng: Random, at_least: int = 0) -> tuple[Any, ...]:
    found = [p for p in places(tree) if isinstance(here := _at(tree, p), dict) and len(here) >= at_least]
    return rng.choice(found)


def _inner(tree: Tree, rng: Random) -> tuple[Any, ...]:
    return rng.choice([path for path in places(tree) if path])


def _case(kind: str, tree: Any, rng: Random, must: Must = "") -> Case:
    return Case(kind, written(tree, rng).encode("utf-8", "surrogatepass"), must)


def _unknown_key(tree: Tree, rng: Random) -> Case:
    def more(old: Tree) -> Tree:
        pairs = list(old.items())
        pairs.insert(rng.randrange(len(pairs) + 1), (_UNKNOWN, rng.choice((1, "x", True, 1.5))))
        return dict(pairs)

    return _case("an unknown key", _with(tree, _mappings(tree, rng), more), rng, "refuse")


def _doubled_key(tree: Tree, rng: Random) -> Case:
    def twice(old: Tree) -> Pairs:
        pairs = list(old.items())
        pairs.insert(rng.randrange(len(pairs) + 1), rng.choice(pairs))
        return Pairs(pairs)

    return _case("a key doubled", _with(tree, _mappings(tree, rng, at_least=1), twice), rng, "refuse")


def _put(tree: Tree, place: Place, value: Any) -> Tree:
    """The tree with a value at a place; what is no mapping on the way becomes one."""
    key, *rest = place
    if not rest:
        return {**tree, key: value}
    inner = tree.get(key)
    return {**tree, key: _put(inner if isinstance(inner, dict) else {}, tuple(rest), value)}


def _set(tree: Tree, rng: Random, values: Callable[[Any], Iterator[Any]]) -> Tree:
    """A setting's value, in a tree in which it means something."""
    setting, value = rng.choice([(s, value) for s in every_setting() for value in values(s)])
    for place, name in setting.beside.items():
        tree = _put(_put(tree, place[:-1], {}), place, name)
    return _put(tree, setting.place, value)


def _out_of_bounds(tree: Tree, rng: Random) -> Case:
    return _case("out of bounds", _set(tree, rng, lambda s: s.beyond()), rng, "refuse")


def _swapped_type(tree: Tree, rng: Random) -> Case:
    return _case("a type swapped", _set(tree, rng, lambda s: s.misfits()), rng, "refuse")


def _nasty_setting(tree: Tree, rng: Random) -> Case:
    return _case("a nasty value in a setting", _set(tree, rng, lambda s: iter(_NASTY)), rng)


def _nasty(tree: Tree, rng: Random) -> Case:
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = _with(tree, _inner(tree, rng), lambda old: rng.choice(_NASTY))
    return _case("a nasty value", tree, rng)


def _no_number(tree: Tree, rng: Random) -> Case:
    value = Raw(rng.choice((".nan", ".NaN", ".inf", "-.inf", "+.INF", "1e999", "!!float .nan")))
    return _case("no finite number", _with(tree, _inner(tree, rng), lambda old: value), rng, "refuse")


def _tag(tree: Tree, rng: Random) -> Case:
    return _case("a tag", _with(tree, _inner(tree, rng), lambda old: Raw(rng.choice(_TAGS))), rng, "refuse")


def _deep(tree: Tree, rng: Random) -> Case:
    n, (left, right) = (
        rng.choice((61, 61, 61, 200, 200, 200, 200, 5_000)),
        rng.choice((("[", "]"), ("{a: ", "}"), ("[{a: ", "}]"))),
    )
    return _case(
        "nested deeply", _with(tree, _inner(tree, rng), lambda old: Raw(left * n + "1" + right * n)), rng, "refuse"
    )


def _bomb(tree: Tree, rng: Random) -> Case:
    """Billion laughs: each anchor holds the one before ten times."""
    n = rng.choice((4, 4, 4, 4, 4, 4, 4, 9, 30))  # those beyond what is read to the end take a second each
    layers = ", ".join(f"&b{i} [" + ", ".join([f"*b{i - 1}"] * 10) + "]" for i in range(1, n))
    whole = _with(tree, _inner(tree, rng), lambda old: Raw(f"[&b0 [x, x], {layers}]"))
    return _case("an alias bomb", whole, rng, "refuse" if n > 4 else "")


def _aliases(tree: Tree, rng: Random) -> Case:
    """Anchors, aliases and merges in places of their own; some hold themselves."""
    kinds = (
        "&a {<<: *a}",
        "*nowhere",
        "&a [*a]",
        "{<<: 1}",
        "{<<: [{a: 1}, {a: 2}], <<: {b: 1}}",
        "&x 1",
        "[&x 1, &x 2, *x]",
    )
    whole = {**_with(tree, _inner(tree, rng), lambda old: Raw(rng.choice(kinds)))}
    return _case("aliases and merges", whole, rng)


def _renamed(tree: Tree, rng: Random) -> Case:
    def other(old: Tree) -> Tree:
        key = rng.choice(list(old))
        new = rng.choice(
            (key.upper(), key + "s", key[:-1], f" {key}", key.replace("_", "-"), "é", key + "\u200b", key * 2, "name")
        )
        return {new if k == key else k: v for k, v in old.items()}

    return _case("a key renamed", _with(tree, _mappings(tree, rng, at_least=1), other), rng)


def _deleted(tree: Tree, rng: Random) -> Case:
    path = _inner(tree, rng)

    def less(old: Any) -> Any:
        if isinstance(old, dict):
            return {key: value for key, value in old.items() if key != path[-1]}
        return [value for i, value in enumerate(old) if i != path[-1]]

    return _case("something deleted", _with(tree, path[:-1], less), rng)


def _moved(tree: Tree, rng: Random) -> Case:
    value, into = _at(tree, _inner(tree, rng)), _mappings(tree, rng)
    key = rng.choice([str(path[-1]) for path in places(tree) if path])
    return _case("something moved", _with(tree, into, lambda old: {**old, key: value}), rng)


def _wrapped(tree: Tree, rng: Random) -> Case:
    ways: tuple[Callable[[Any], Any], ...] = (
        lambda old: [old],
        lambda old: {"name": old},
        lambda old: {"zzqx": old},
        lambda old: [old] * 30,
        lambda old: old[0] if isinstance(old, list) and old else [],
        lambda old: list(old.values()) if isinstance(old, dict) else {},
        lambda old: str(old),
    )
    return _case("wrapped or bare", _with(tree, _inner(tree, rng), rng.choice(ways)), rng)


def _named(tree: Tree, rng: Random) -> Case:
    name = rng.choice(_EVIL_NAMES)
    if rng.random() < 0.5:
        return _case("a wrong name", {**tree, "name": name}, rng, "refuse")
    return _case("a strange variant", {**tree, "variants": {name: {"n_layers": 1}}}, rng)


def _numerous(tree: Tree, rng: Random) -> Case:
    """More than can be run, written in few words."""
    many = list(range(1, 90))
    ways: tuple[Tree, ...] = (
        {"vary": {"train.warmup_steps": many, "train.eval_every": many, "train.lr": many}, "design": "product"},
        {"vary": {f"train.{k}": many[:9] for k in ("lr", "steps", "eval_every", "warmup_steps")}, "design": "product"},
        {"seeds": 10**9},
        {"seeds": list(range(1500))},
        {"seeds": -1},
        {"seeds": []},
        {"variants": {f"v{i}": {"n_layers": i + 1} for i in range(90)}},
    )
    return _case("too many", {**tree, **rng.choice(ways)}, rng, "refuse")


def _huge(tree: Tree, rng: Random) -> Case:
    """Sizes within their bounds, and together beyond any machine."""
    sizes: dict[str, tuple[Any, ...]] = {
        "d_model": (2**24, 2**20, 4096, 96),
        "n_layers": (10_000, 1000, 7),
        "n_heads": (2**24, 2**20, 1024, 1),
        "max_seq_len": (2**24, 2**20),
        "vocab_size": (2**24, 300),
        "d_embed": (2**24, 1),
        "n_token_types": (2**24, 0),
        "family": ("encoder", "encoder_decoder", "decoder"),
    }
    recipe: dict[str, tuple[Any, ...]] = {
        "batch_tokens": (2**53, 2**24, 128),
        "seq_len": (2**24, 16),
        "steps": (2**53,),
    }
    below: dict[str, tuple[Any, ...]] = {
        "prefill": ({"batch": [2**53] * 50, "tokens": [2**24] * 50},),
        "decode": ({"batch": [2**53], "context": [2**24 - 32]},),
        "rounds": (2**53,),
        "lengths": ([2**24, 2],),
    }
    base = tree if rng.random() < 0.6 else TINY
    for key, values, chance in (("baseline", sizes, 0.4), ("train", recipe, 0.15), ("profile", below, 0.15)):
        old = base.get(key)
        changes = {name: rng.choice(each) for name, each in values.items() if rng.random() < chance}
        base = {**base, key: {**(old if isinstance(old, dict) else {}), **changes}}
    data = ({"name": "random_tokens", "vocab_size": 2**16}, {"name": "cycle", "period": 2**16})
    if rng.random() < 0.4:
        base = {**base, "data": rng.choice(data)}
    return _case("huge", base, rng)


def _reordered(tree: Tree, rng: Random) -> Case:
    keys = sorted(tree, key=lambda _: rng.random())
    text = written({key: tree[key] for key in keys}, rng)
    return Case("said otherwise", text.encode(), "same", written(tree, rng))


WAYS: tuple[Callable[[Tree, Random], Case], ...] = (
    *(
        _unknown_key,
        _unknown_key,
        _doubled_key,
        _out_of_bounds,
        _swapped_type,
        _swapped_type,
        _nasty_setting,
        _nasty_setting,
    ),
    *(
        _nasty,
        _nasty,
        _no_number,
        _tag,
        _deep,
        _bomb,
        _aliases,
        _renamed,
        _deleted,
        _moved,
        _wrapped,
        _named,
        _numerous,
        _huge,
    ),
    *(_huge, _reordered),
)
