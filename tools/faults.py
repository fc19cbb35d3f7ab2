"""What happens to a run when something goes wrong around it, one fault at a time, and is anything lost?

Usage: python tools/faults.py [--only NAME ...] [--every N] [--at-once N] [--out reports/faults.md] [--list]

A tiny experiment is run by the command line with one fault injected: a full disk, a signal, a dead tracking server, a
damaged file. Then the same command is given again, and what is stored must be that of a run that nobody disturbed.
`--every N` takes only each Nth moment of a fault, for a quick look. Writes the table as it goes on; exit status 1 where
anything was lost, or not as expected. Linux only: it reads /proc. Root may write everything; it puts that down by
`setpriv --bounding-set=-dac_override,-dac_read_search python tools/faults.py`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory

from faulting import children, damage, disk, signals, tracking
from faulting.bench import Bench, Case, Seen, Skipped
from faulting.catalogue import FAULTS, Fault, some
from faulting.page import Row, page

PARTS = (signals, damage, children, tracking, disk)
"""Each puts its faults into the catalogue."""


def study(bench: Bench, faults: Sequence[Fault], at_once: int, out: Path, every: int = 1) -> list[Row]:
    """Inject them all, and write the report as it goes on."""
    rows: list[Row] = []
    undisturbed = bench.undisturbed
    with ThreadPoolExecutor(at_once) as pool:
        for n, fault in enumerate(faults, 1):
            rows.append(row := Row(fault))
            try:
                cases = some(list(fault.cases(bench)), every, n)
            except Skipped as reason:
                cases = []
                row.skipped.append(str(reason))
            waiting = [pool.submit(_seen, bench, f"{n}-{i}", case) for i, case in enumerate(cases)]
            for each in as_completed(waiting):
                seen = each.result()
                if isinstance(seen, Seen):
                    row.seen.append(seen)
                else:
                    row.skipped.append(seen)
                write(out, page(rows, undisturbed, len(faults) - n))
            row.seen.sort(key=lambda each: [case.moment for case in cases].index(each.moment))
            write(out, page(rows, undisturbed, len(faults) - n))
    return rows


def _seen(bench: Bench, name: str, case: Case) -> Seen | str:
    """What came of a case, or why it could not be carried out."""
    try:
        return bench.carry_out(name, case)
    except Skipped as reason:
        return f"{case.moment}: {reason}"
    except Exception as error:  # one case that the study cannot carry out must not end it
        return Seen(case.moment, None, 0.0, "", "", [f"the study failed: {type(error).__name__}: {error}"], [])


def write(out: Path, text: str) -> None:
    """The report, as far as it is."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")


def main(arguments: argparse.Namespace) -> int:
    """Carry out what is asked for, and say whether all was kept."""
    if unknown := [name for name in arguments.only if name not in FAULTS]:
        print(f"no fault {', '.join(map(repr, unknown))}\nknown: {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    # A handler, since one is not inherited: what was told to ignore it, as by nohup, would let its children ignore it.
    signal.signal(signal.SIGHUP, lambda *_: None)
    chosen = [FAULTS[name] for name in arguments.only or FAULTS]
    if arguments.list:
        print("\n".join(f"{each.name}: {each.told}" for each in chosen))
        return 0
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bench = Bench(Path(folder) / "bench")
        with bench.ending:
            rows = study(bench, chosen, arguments.at_once, arguments.out, arguments.every)
    return 1 if any(row.bad for row in rows) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("reports/faults.md"))
    parser.add_argument("--list", action="store_true")
    sys.exit(main(parser.parse_args()))
