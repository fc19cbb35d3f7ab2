"""What several test files share: a tiny experiment file to add lines to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from ablate.document import FileFaults
from ablate.experiment import Experiment

hypothesis.settings.register_profile("ablate", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ablate")

if "PYTEST_XDIST_WORKER" not in os.environ:
    # Children and xdist's workers inherit it: what this machine can do is measured once for all tests, and no user's
    # cache is touched.
    _CACHE = tempfile.TemporaryDirectory(prefix="ablate-cache-")
    os.environ["ABLATE_CACHE"] = _CACHE.name

TINY = """\
name: tiny
baseline: {d_model: 32, n_layers: 1, n_heads: 4, max_seq_len: 32}
data: {name: cycle, period: 16}
train: {steps: 4, batch_tokens: 64, seq_len: 16}
"""

Write = Callable[..., Path]
Expand = Callable[..., Experiment]
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from a second thread, and tests run beside one another."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes `tiny.yaml` into an empty folder to stand in: four lines, and the given ones in their place or below."""
    monkeypatch.chdir(tmp_path)

    def write(added: str = "") -> Path:
        keys = {line.partition(":")[0] for line in added.splitlines()}
        kept = [line for line in TINY.splitlines() if line.partition(":")[0] not in keys]
        file = Path("tiny.yaml")
        file.write_text("\n".join([*kept, added]), encoding="utf-8")
        return file

    return write


@pytest.fixture
def expand(write: Write) -> Expand:
    """The tiny experiment with lines added, and settings of the command line."""

    def expand(added: str = "", *sets: str, max_trials: int = 1000) -> Experiment:
        return Experiment.from_file(write(added), sets, max_trials)

    return expand


@pytest.fixture
def refused(expand: Expand) -> Refused:
    """What is said of the tiny experiment with faulty lines added."""

    def refused(added: str = "", *sets: str, max_trials: int = 1000) -> str:
        with pytest.raises(FileFaults) as caught:
            expand(added, *sets, max_trials=max_trials)
        for line in caught.value.lines:
            assert line.count("\n") <= 1, "one line for the fault, one for the cure"
        return str(caught.value)

    return refused
