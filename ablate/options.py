"""What the verbs of the command line are given: files, folders, settings, sizes."""

from __future__ import annotations

import re
from pathlib import Path

import click


def as_word(word: str) -> str:
    """A word that is no path."""
    from ablate.document import as_text

    return as_text(word)


FILE = click.argument("file")
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output, nothing else.")
RESULTS = click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of results."
)
REPORTS = click.option(
    "--reports", type=click.Path(path_type=Path), default=Path("reports"), show_default=True, help="Folder of reports."
)
SET = click.option(
    "--set", "sets", type=as_word, multiple=True, metavar="KEY=VALUE", help="Change a setting of the file."
)
DEVICE = click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to compute."
)
WORKERS = click.option(
    "--workers", type=click.IntRange(1, 1024), help="Trials at a time; chosen by the machine unless given."
)

_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _size(word: str) -> int:
    """Bytes as people write them: `8G`, `1.5GiB` or `500M`, in powers of 1024."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([KMGT]?)(?:i?B)?", word.strip(), re.IGNORECASE | re.ASCII)
    size = int(float(found[1]) * _FACTORS[found[2].upper()]) if found else 0
    if not size:
        raise click.BadParameter(f"{word!r} is no size of memory: write 8G or 500M")
    return size


MEMORY = click.option(
    "--memory",
    type=_size,
    metavar="SIZE",
    help="Most memory that each trial may take of its device, as 8G; on a CPU its share of what is left unless given.",
)
MAX_TRIALS = click.option(
    "--max-trials", type=click.IntRange(1), default=1000, show_default=True, help="Most combinations to accept."
)
CHECK_CLAIMS = click.option("--check-claims", is_flag=True, help="Exit status 1 unless every claim is supported.")
