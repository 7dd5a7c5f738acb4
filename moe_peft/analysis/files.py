"""Where reports are written: they replace an earlier report when they are whole, and nothing that is not one's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..reading import read_object


class ReportFiles(NamedTuple):
    """
    The files of one kind of reports.

    Args:
        main: a JSON file that every report has.
        keys: some of its keys, by which it is known.
        others: the names of all other files that a report may have.
    """

    main: str
    keys: frozenset[str]
    others: frozenset[str]

    def check(self, folder: Path, what: object) -> None:
        """
        Raises:
            ValueError: a file that a report would replace is there, but no report.
        """
        there = [name for name in (self.main, *sorted(self.others)) if os.path.lexists(folder / name)]
        with suppress(ValueError):
            if there and self.keys <= read_object(folder / self.main).keys():
                return
        if there:
            raise ValueError(f"{what}: {folder / there[0]} is there already, not of such a report; choose another")

    @contextmanager
    def replaced(self, folder: Path) -> Iterator[Path]:
        """
        A temporary folder to write a report into. When the block succeeds, its files replace those of an earlier
        report, of which nothing stays. The folder is held.
        """
        partial = folder / ".report.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir()
        try:
            yield partial
            written = {path.name for path in partial.iterdir()}
            for name in sorted(written, key=lambda name: name != self.main):  # by which all others are known
                (partial / name).replace(folder / name)
            for name in self.others - written:
                (folder / name).unlink(missing_ok=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
