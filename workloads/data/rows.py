"""Sparse rows and documents, as readers make them and learners go over them. No Ray here."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Documents", "LabelledRows"]

Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledRows:
    """Some rows of a sparse matrix (CSR), each with a label. An item of a collection.

    Args:
        labels: shape (n,).
        first: where each row's numbers begin, and where the last one's end; shape (n + 1,).
        columns: of each number, from 0, ascending within a row; shape (m,).
        values: shape (m,).
    """

    labels: Float64
    first: Int64
    columns: Int32
    values: Float64

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"LabelledRows({len(self):,} × {self.width:,}, {len(self.values):,} numbers)"

    @property
    def width(self) -> int:
        """One past the largest column; 0 where there are no numbers."""
        return int(self.columns.max()) + 1 if len(self.columns) else 0

    def matrix(self, width: int) -> Any:
        """As SciPy's CSR matrix of so many columns, without a copy."""
        from scipy import sparse

        shape = (len(self), width)
        return sparse.csr_matrix((self.values, self.columns, self.first), shape, copy=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Some documents as bags of words. An item of a collection.

    Args:
        numbers: of the documents, ascending; shape (n,).
        first: where each one's words begin, and where the last one's end; shape (n + 1,).
        words: numbers in the vocabulary, from 0; shape (m,).
        counts: how often the document has each; shape (m,).
    """

    numbers: Int64
    first: Int64
    words: Int32
    counts: Float64

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"Documents({len(self):,}, {len(self.words):,} entries)"

    def some(self, begin: int, end: int) -> Documents:
        """Those at [begin, end), without a copy of their words."""
        first = self.first[begin : end + 1]
        part = slice(int(first[0]), int(first[-1]))
        return Documents(
            self.numbers[begin:end], first - first[0], self.words[part], self.counts[part]
        )
