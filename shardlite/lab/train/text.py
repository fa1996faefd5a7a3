"""Text from files, split into training and validation, and the batches that each rank draws from the text.

A byte is a token. The text is a numpy array, so measurements of tensor memory do not include the text.

Legend: `b` sequences, `t` bytes in a sequence.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Bytes = NDArray[np.uint8]

TEXT_LIMIT = 4 << 20
"""Maximum number of bytes to read. A few minutes of training use fewer bytes."""

_STRETCHES = 20
_VALIDATION_SHARE = 0.1

# Folders with third-party packages, tables or test data.
_NOT_PYTHON_CODE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text, split into training and validation."""

    source: str
    """Description of the source."""

    train: Bytes
    """Training bytes."""

    validation: Bytes
    """Validation bytes: a tenth of the text."""


def read_corpus(source: Path | None, *, context: int, limit: int = TEXT_LIMIT) -> Corpus:
    """Read up to `limit` bytes of the file or folder `source`, or of Python's standard library if `source` is `None`.

    The text is cut into 20 equal stretches. The last tenth of each stretch is for validation, so both the
    training bytes and the validation bytes come from all over the text.

    Raises:
        ValueError: `source` does not exist, has no text, or has too little text for a sequence of `context` bytes.
    """
    text = _read(_files(source), limit)
    if not len(text):
        raise ValueError(f"no text in {source or 'the standard library'}: give a text file or a folder with text files")
    stretches = rearrange(text[: len(text) // _STRETCHES * _STRETCHES], "(s n) -> s n", s=_STRETCHES)
    cut = round(stretches.shape[1] * (1 - _VALIDATION_SHARE))
    name = "the source of Python's standard library" if source is None else str(source)
    corpus = Corpus(source=name, train=stretches[:, :cut].flatten(), validation=stretches[:, cut:].flatten())
    for part, held in (("training", corpus.train), ("validation", corpus.validation)):
        if len(held) <= context:
            raise ValueError(
                f"the {part} part of {name} has {len(held)} bytes, but a context of {context} needs at least"
                f" {context + 1}: give a longer text or a smaller context"
            )
    return corpus


def unigram_entropy(text: Bytes) -> float:
    """Return the loss on `text` of the best model that ignores the context, in nats per byte."""
    counts = np.bincount(text)
    share = counts[counts > 0] / len(text)
    return float(-(share * np.log(share)).sum())


def draw_batch(text: Bytes, *, shape: tuple[int, int], key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Draw a batch of `shape` (b, t) from `text`: bytes x [b t], and the next byte after each of these bytes, y [b t].

    `key`, such as (seed, rank, step), seeds the random numbers of the draw.
    """
    b, t = shape
    return _windows(text, np.random.default_rng(key).integers(0, len(text) - t, size=b), t)


def draw_sequences(text: Bytes, length: int, keys: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Draw a sequence of `length` bytes x [b t] for each key, and the next byte after each of these bytes, y [b t].

    A key, such as (seed, number of the sequence), is the seed of its sequence, so a sequence does not depend on the
    rank that draws it.
    """
    starts = [np.random.default_rng(key).integers(0, len(text) - length) for key in keys]
    return _windows(text, np.array(starts), length)


def _windows(text: Bytes, starts: NDArray[np.int64], length: int) -> tuple[Tensor, Tensor]:
    import torch  # imported here, because the command line checks the text without PyTorch

    windows = torch.from_numpy(text[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _files(source: Path | None) -> Iterator[Path]:
    """Yield `source` if it is a file. Otherwise yield the text files in the folder `source`, sorted by name.

    `None` stands for the folder of Python's standard library. Hidden files are skipped.
    """
    root = source or Path(sysconfig.get_paths()["stdlib"])
    if root.is_file():
        yield root
    elif not root.is_dir():
        raise ValueError(f"{source} does not exist: give a text file or a folder with text files")
    for path in sorted(root.rglob("*" if source else "*.py")):
        parts = path.relative_to(root).parts
        skipped = any(part.startswith(".") for part in parts) if source else not _NOT_PYTHON_CODE.isdisjoint(parts)
        if not skipped and path.is_file() and 0 not in _read([path], 8192):  # a file with a zero byte is not text
            yield path


def _read(files: Iterable[Path], limit: int) -> Bytes:
    text = bytearray()
    for path in files:
        with path.open("rb") as file:
            text += file.read(limit - len(text))
        if len(text) >= limit:
            break
    return np.frombuffer(bytes(text), dtype=np.uint8)
