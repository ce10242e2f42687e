r"""Documents in the UCI repository's format of bags of words, `docword.*.txt`, and vocabularies.

Three lines say how many documents there are (D), how many words the vocabulary has (W), and how
many lines follow (NNZ); each of these is `document word count`, numbers from 1, all lines of a
document together and documents in order.

A partition has the documents whose first lines begin in a range of bytes of the file: it leaves out
lines at its beginning that go on with the document before, and reads on to the end of its last
document. A compressed file is one partition of many items. Lines are converted by Arrow's CSV
reader; whatever it or a look at all of them finds odd goes to a reader of one line after the other,
which decides, and which can say where.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clamor_ray.collection.collection import DataCollection
from clamor_ray.collection.data import blocks
from clamor_ray.collection.io import read
from clamor_ray.collection.io.files import File, files, open_input, read_bytes, reading
from clamor_ray.collection.io.pieces import TextPiece, codec_of
from clamor_ray.collection.io.sources import FileSplit
from clamor_ray.errors import SourceError

from .libsvm import Malformed, columns_of, lines_before, shown
from .rows import Documents

__all__ = ["Header", "bag_splits", "documents_of", "read_bag_of_words", "read_vocabulary"]

ITEM_ENTRIES: Final = 1 << 18
_HEAD_BYTES: Final = 256
_TAIL_BYTES: Final = 64 << 10  # of the first look for the end of the last document
_LINE_BYTES: Final = 128  # no line is longer

Triples = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Args:
        n_documents, n_words, n_entries: D, W and NNZ.
        offset: byte where the first entry begins, uncompressed.
    """

    n_documents: int
    n_words: int
    n_entries: int
    offset: int


# ---------------------------------------------------------------- text to documents


def parse_triples(text: bytes, header: Header) -> Triples:
    """The entries of some whole lines, shape (n, 3): document, word, count, from 1 as they are.

    Raises:
        Malformed: A line is no entry.
    """
    found = _parse_at_once(text)
    if found is None or not _is_sound(found, header):
        found = _parse_lines(text, header)
    return found


def _parse_at_once(text: bytes) -> Triples | None:
    """None where anything is odd."""
    if not text.strip():
        return np.empty((0, 3), np.int64)
    columns = columns_of(text, ["d", "w", "n"], pa.int64(), " ")
    return None if columns is None else np.column_stack(columns)


def _is_sound(triples: Triples, header: Header) -> bool:
    documents, words, counts = triples.T
    return bool(
        (documents[1:] >= documents[:-1]).all()
        and ((documents >= 1) & (documents <= header.n_documents)).all()
        and ((words >= 1) & (words <= header.n_words)).all()
        and (counts >= 1).all()
    )


def _parse_lines(text: bytes, header: Header) -> Triples:
    """One line after the other.

    Raises:
        Malformed: A line is no entry.
    """
    found: list[tuple[int, int, int]] = []
    for number, line in enumerate(text.split(b"\n")):
        tokens = line.split()
        if not tokens:
            continue
        if len(tokens) != 3 or not all(token.isdigit() and len(token) < 19 for token in tokens):
            raise Malformed(number, f"{shown(line)} is not document, word and count")
        document, word, count = map(int, tokens)
        if not 1 <= document <= header.n_documents:
            raise Malformed(number, f"document {document} of {header.n_documents:,}")
        if not 1 <= word <= header.n_words:
            raise Malformed(number, f"word {word} of {header.n_words:,}")
        if count < 1:
            raise Malformed(number, f"document {document} has word {word} {count} times")
        if found and document < found[-1][0]:
            raise Malformed(number, f"document {document} comes after document {found[-1][0]}")
        found.append((document, word, count))
    return np.array(found, np.int64).reshape(-1, 3)


def documents_of(triples: Triples) -> Documents:
    """Documents of entries in order of documents. Of each its words ascend, and are there once."""
    same = triples[1:, 0] == triples[:-1, 0]
    if (same & (triples[1:, 1] <= triples[:-1, 1])).any():
        triples = triples[np.lexsort((triples[:, 1], triples[:, 0]))]
        new = np.ones(len(triples), bool)
        new[1:] = (triples[1:, :2] != triples[:-1, :2]).any(axis=1)
        counts = np.add.reduceat(triples[:, 2], np.flatnonzero(new))
        triples = np.column_stack([triples[new, :2], counts])
    begins = np.flatnonzero(np.diff(triples[:, 0], prepend=0))
    return Documents(
        triples[begins, 0],
        np.append(begins, len(triples)).astype(np.int64),
        (triples[:, 1] - 1).astype(np.int32),
        triples[:, 2].astype(np.float64),
    )


def items_of(documents: Documents) -> npt.NDArray[Any]:
    """The same as several of about ITEM_ENTRIES entries; at least one."""
    n_items = max(1, -(-len(documents.words) // ITEM_ENTRIES))
    at = [len(documents.words) * i // n_items for i in range(1, n_items)]
    borders = [0, *np.searchsorted(documents.first[:-1], at).tolist(), len(documents)]
    out = np.empty(n_items, object)
    out[:] = [documents.some(begin, end) for begin, end in itertools.pairwise(borders)]
    return out


# ---------------------------------------------------------------- files


@dataclasses.dataclass(frozen=True)
class BagPiece:
    """The documents of a file whose first lines begin in a range of bytes.

    Args:
        file, header: which one.
        start, stop: of the range; not before the header's end. Of a compressed file all of it.
    """

    file: File
    header: Header
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Of the range."""
        return self.stop - self.start

    def describe(self) -> str:
        """File and byte range."""
        return self._text(self.start, self.stop).describe()

    def _text(self, start: int, stop: int) -> TextPiece:
        return TextPiece(self.file, start, stop, "latin-1", False)

    def read(self) -> npt.NDArray[Any]:
        """The documents, as items of about ITEM_ENTRIES entries; at least one.

        Raises:
            SourceError: a line is no entry; names file and line.
            StorageError: the file system does not answer.
        """
        data, begin = self._text(self.start, self.stop).lines()
        if codec_of(self.file) is not None:
            return items_of(documents_of(self._triples(data[self.header.offset :], 0)))
        triples = self._triples(data, begin)
        before = self._document_before(begin) if len(triples) else 0
        if before:
            if triples[0, 0] < before:
                why = f"document {triples[0, 0]} comes after document {before}"
                raise self._refused(begin, Malformed(0, why))
            triples = triples[np.searchsorted(triples[:, 0], before, "right") :]
        if len(triples):
            rest = self._rest_of(int(triples[-1, 0]), begin + len(data))
            triples = np.concatenate([triples, rest])
        return items_of(documents_of(triples))

    def _triples(self, data: bytearray, begin: int) -> Triples:
        """Of lines that begin at a byte; 0: right after the header of a compressed file."""
        try:
            return parse_triples(bytes(data), self.header)
        except Malformed as error:
            raise self._refused(begin, error) from None

    def _refused(self, begin: int, error: Malformed) -> SourceError:
        before = lines_before(self._text(0, begin), begin) if begin else 3
        return SourceError(f"{self.file.name}, line {before + error.line + 1}: {error.why}.")

    def _document_before(self, begin: int) -> int:
        """Whose line ends at a byte; 0: nobody's, the header is before it."""
        start = max(self.header.offset, begin - _LINE_BYTES)
        with open_input(self.file) as source:
            lines = bytes(read_bytes(self.file, source, start, begin)).split()
        # Of a line that is no entry the piece before will say so.
        return int(lines[-3]) if len(lines) >= 3 and lines[-3].isdigit() else 0

    def _rest_of(self, document: int, at: int) -> Triples:
        """Entries of a document from a byte on."""
        found, step = [np.empty((0, 3), np.int64)], _TAIL_BYTES
        while at < self.file.size_bytes:
            data, begin = self._text(at, min(at + step, self.file.size_bytes)).lines()
            triples = self._triples(data, begin)
            mine = triples[triples[:, 0] == document]
            found.append(mine)
            if len(mine) < len(triples):
                break
            at, step = begin + len(data), 2 * step
        return np.concatenate(found)


def read_header(file: File) -> Header:
    """The first three lines.

    Raises:
        SourceError: They are not three numbers.
    """
    codec = codec_of(file)
    with open_input(file) as source:
        if codec is None:
            n_bytes = min(_HEAD_BYTES, file.size_bytes)
            head = bytes(read_bytes(file, source, 0, n_bytes))
        else:
            with reading(file, "decompressing it"):
                head = pa.CompressedInputStream(source, codec).read(_HEAD_BYTES)
    lines = head.split(b"\n")[:3]
    numbers = [line.strip() for line in lines]
    if len(lines) < 3 or not all(n.isdigit() and len(n) < 19 for n in numbers):
        raise SourceError(
            f"{file.name}: not a bag of words: its first three lines should be the numbers of "
            "documents, of words and of entries."
        )
    offset = min(sum(len(line) + 1 for line in lines), len(head))
    return Header(int(numbers[0]), int(numbers[1]), int(numbers[2]), offset)


def bag_splits(path: Any, filesystem: Any = None, n: int = 1) -> tuple[list[FileSplit], Header]:
    """What partitions are made of; see `read_bag_of_words`."""
    found = files(path, filesystem)
    if len(found) != 1:
        raise SourceError(
            f"{path} is {len(found)} files.", hint="Each has a vocabulary of its own: name one."
        )
    file = found[0]
    header = read_header(file)
    if header.n_words >= 1 << 31:
        raise SourceError(f"{file.name}: a vocabulary of {header.n_words:,} words; 2^31 are most.")
    whole = codec_of(file) is not None
    start = 0 if whole else header.offset
    length, n = file.size_bytes - start, 1 if whole else max(1, n)
    borders = [start + length * i // n for i in range(n + 1)]
    pieces = [BagPiece(file, header, *each) for each in itertools.pairwise(borders)]
    pieces = [piece for piece in pieces if piece.size_bytes] or pieces[:1]
    return [FileSplit((piece,)) for piece in pieces], header


def read_bag_of_words(
    path: Any, *, filesystem: Any = None, partitions: int = 1
) -> tuple[DataCollection, Header]:
    """Documents of a `docword` file: items are `Documents`, several a partition, at least one.

    Args:
        path: one file; local or `s3://`, also compressed (`.gz`, `.bz2`, `.zst`, `.lz4`), which
            makes one partition.
        filesystem: a `pyarrow.fs.FileSystem` that the path belongs to; None: by the path.
        partitions: about so many.

    Returns:
        The documents, and what the file says of itself. A document without words is not there.

    Raises:
        SourceError: No such file, or none of this kind; from reading: a line is no entry, which
            names file and line.
        StorageError: The store does not answer, after retries.
    """
    splits, header = bag_splits(path, filesystem, partitions)
    return read._made("bag of words", splits), header


def read_vocabulary(path: Any, n_words: int, *, filesystem: Any = None) -> list[str]:
    """The words of a `vocab` file, a line each.

    Raises:
        SourceError: No such file, or it has another number of words.
    """
    found = files(path, filesystem)
    pieces = [TextPiece(file, 0, file.size_bytes, "utf-8", True) for file in found]
    words = [str(word) for piece in pieces for word in blocks.items(piece.read())]
    if len(words) != n_words:
        raise SourceError(f"{path} has {len(words):,} words, and the documents {n_words:,}.")
    return words
