"""Read and plan many mutated experiment files: each is refused in two lines, or planned; nothing else ever happens.

Usage: python tools/fuzz.py [--files 2000] [--seed 0] [--first 0] [--keep FOLDER]

About a minute for a thousand files. Each file is a pure function of the seed and its number. It is read and planned as
`plan FILE` does, in a child that may take some seconds of CPU time and some gigabytes for it. What must be refused is
known beforehand for many kinds of mutations; see `fuzzing/`. Files with which something is wrong are kept, with what
is wrong. Exit status 1 where there are any.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import torch
from fuzzing import text, trees
from fuzzing.case import Case
from fuzzing.corpus import corpus, tree
from fuzzing.generated import made_up
from fuzzing.judge import judge

SECONDS = 8.0
"""CPU time that a file may take; an ordinary one takes a twentieth of a second."""

WAITING = 120
"""Seconds by the clock after which it is taken to wait for something."""

BYTES = 6 * 2**30
"""Memory that may be added to what the imports take."""

BLOCK = 400
"""Files that one child reads before a fresh one goes on."""

Found = tuple[int, str, str, str]
"""A file's number, its kind, its outcome, and what is wrong."""


def main(given: Sequence[str]) -> int:
    """Fuzz, and tell what was found."""
    wanted = _arguments(given)
    begin, counts, kept = time.monotonic(), Counter[tuple[str, str]](), 0
    for number, kind, outcome, wrong in fuzzed(wanted.seed, range(wanted.first, wanted.first + wanted.files)):
        counts[kind, outcome] += 1
        if outcome == "fault":
            kept += 1
            _keep(wanted.keep, wanted.seed, number, f"{kind}\n{wrong}")
            print(f"{number}: {kind}: {wrong.strip().rpartition(chr(10))[2][:200]}", flush=True)
        if (done := counts.total()) % 1000 == 0:
            print(f"{done} files, {kept} faults, {time.monotonic() - begin:.0f} s", flush=True)
    print(_table(counts))
    print(f"{counts.total()} files, {kept} faults, {time.monotonic() - begin:.0f} s")
    return 1 if kept else 0


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first file, whole hundreds")
    parser.add_argument("--keep", type=Path, default=Path(".fuzzed"), metavar="FOLDER", help="for files with faults")
    return parser.parse_args(given)


def cases(seed: int, numbers: Sequence[int]) -> Iterator[tuple[int, Case]]:
    """The files of these numbers, which begin a block: one in four is made up, the others are mutated."""
    invented = made_up(seed * 1_000_003 + numbers[0], len(numbers) // 4)
    for number in numbers:
        if number % 4 == 0 and invented:
            yield number, invented.pop()
        else:
            yield number, _mutated(Random(f"{seed}:{number}"))


def _mutated(rng: Random) -> Case:
    origin = rng.choice(corpus())
    way = rng.randrange(len(text.WAYS) + len(trees.WAYS))
    if way < len(text.WAYS):
        return text.WAYS[way](origin, rng)
    return trees.WAYS[way - len(text.WAYS)](tree(origin), rng)


def fuzzed(seed: int, numbers: Sequence[int]) -> Iterator[Found]:
    """What came of each file. A child that ends over one is a fault of that file, and another goes on after it."""
    torch.set_num_threads(1)
    for origin in corpus():
        tree(origin)  # read once here, and by no child
    blocks = [numbers[i : i + BLOCK] for i in range(0, len(numbers), BLOCK)]
    for block in blocks:
        done = 0
        while done < len(block):
            for found in _by_a_child(seed, block, done):
                yield found
                done += 1


def _by_a_child(seed: int, block: Sequence[int], done: int) -> Iterator[Found]:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        child = multiprocessing.get_context("fork").Process(
            target=_work, args=(seed, block, done, theirs, folder, log.fileno()), daemon=True
        )
        child.start()
        theirs.close()
        current = done
        try:
            while True:
                yield ours.recv()
                current += 1
        except EOFError:
            child.join()
        if child.exitcode:
            log.seek(0)
            kind = dict(cases(seed, block))[block[current]].kind
            yield block[current], kind, "fault", f"{log.read()[-8000:]}\nended by {child.exitcode}"


def _work(seed: int, block: Sequence[int], done: int, connection: Connection, folder: str, log: int) -> None:
    """In a child: judge the files of a block from one on, and say of each what came of it."""
    sys.path[:0] = [str(Path.cwd())]
    os.chdir(folder)
    os.dup2(log, 2)
    _bound_memory()
    faulthandler.register(signal.SIGVTALRM, chain=True)  # tells where it hangs, and then ends the process
    for number, case in list(cases(seed, block))[done:]:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        faulthandler.dump_traceback_later(WAITING, exit=True)
        connection.send((number, case.kind, *judge(case)))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    faulthandler.cancel_dump_traceback_later()


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + BYTES,) * 2)


def _keep(folder: Path, seed: int, number: int, wrong: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    first = number - number % BLOCK
    content = dict(cases(seed, range(first, first + BLOCK)))[number].content
    (folder / f"{seed}-{number}.yaml").write_bytes(content)
    (folder / f"{seed}-{number}.txt").write_text(wrong, encoding="utf-8")


def _table(counts: Counter[tuple[str, str]]) -> str:
    from tabulate import tabulate

    outcomes = ("refused", "planned", "fault")
    rows = [(kind, *(counts[kind, outcome] for outcome in outcomes)) for kind in sorted({kind for kind, _ in counts})]
    return tabulate(rows, ("kind", *outcomes), "simple")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
