"""Training text: bytes from files, split into training and validation, and batches that each rank draws.

A byte is a token. The text is a numpy array, so that meters of tensor memory do not count it.

Legend: `b` sequences, `t` bytes in a sequence.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
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
"""Maximum number of bytes read: more than some minutes of training use once."""

_STRETCHES = 20
_VALIDATION_SHARE = 0.1

# Third-party packages, and modules that are tables and test data rather than code.
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
    """Read up to `limit` bytes of the file or folder `source`, or of Python's standard library if `None`.

    Validation takes the end of each of 20 equal stretches, so that both parts cover the whole text.

    Raises:
        ValueError: `source` does not exist, holds no text, or not enough for one sequence of `context` bytes.
    """
    files = list(_standard_library() if source is None else _text_files(source))
    text = _read(files, limit)
    if not len(text):
        raise ValueError(f"no text in {source or 'the standard library'}: give a text file or a folder with text files")
    stretches = rearrange(text[: len(text) // _STRETCHES * _STRETCHES], "(s n) -> s n", s=_STRETCHES)
    cut = round(stretches.shape[1] * (1 - _VALIDATION_SHARE))
    name = "the source of Python's standard library" if source is None else str(source)
    corpus = Corpus(source=name, train=stretches[:, :cut].flatten(), validation=stretches[:, cut:].flatten())
    _check_length(corpus, context)
    return corpus


def unigram_entropy(text: Bytes) -> float:
    """Return the loss on `text` of the best model without context, in nats per byte."""
    counts = np.bincount(text)
    share = counts[counts > 0] / len(text)
    return float(-(share * np.log(share)).sum())


def draw_batch(text: Bytes, *, shape: tuple[int, int], key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Draw `shape` = (b, t) sequences from `text`: bytes x [b t] and their following bytes y [b t].

    `key`, such as (seed, rank, step), seeds the draw.
    """
    b, t = shape
    return _windows(text, np.random.default_rng(key).integers(0, len(text) - t, size=b), t)


def draw_sequences(text: Bytes, length: int, keys: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Draw one sequence of `length` bytes for each key: bytes x [b t] and their following bytes y [b t].

    A key, such as (seed, number of the sequence), seeds one draw. So a sequence is the same on whichever rank it is.
    """
    starts = [np.random.default_rng(key).integers(0, len(text) - length) for key in keys]
    return _windows(text, np.array(starts), length)


def _windows(text: Bytes, starts: NDArray[np.int64], length: int) -> tuple[Tensor, Tensor]:
    import torch  # not before: the command line checks the text without it

    windows = torch.from_numpy(text[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not _NOT_PYTHON_CODE & set(path.relative_to(root).parts):
            yield path


def _text_files(source: Path) -> Iterator[Path]:
    """Yield `source` itself, or the files below it in name order, without hidden ones."""
    if source.is_file():
        yield source
    elif source.is_dir():
        for path in sorted(source.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
            if path.is_file() and not hidden and _looks_like_text(path):
                yield path
    else:
        raise ValueError(f"{source} does not exist: give a text file or a folder with text files")


def _looks_like_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(8192)


def _check_length(corpus: Corpus, context: int) -> None:
    """Check that both parts hold a sequence of `context` bytes and the following byte."""
    for part, text in (("training", corpus.train), ("validation", corpus.validation)):
        if len(text) <= context:
            raise ValueError(
                f"the {part} part of {corpus.source} has {len(text)} bytes, but a context of {context} needs at least"
                f" {context + 1}: give a longer text or a smaller context"
            )


def _read(files: list[Path], limit: int) -> Bytes:
    text = bytearray()
    for path in files:
        with path.open("rb") as file:
            text += file.read(limit - len(text))
        if len(text) >= limit:
            break
    return np.frombuffer(bytes(text), dtype=np.uint8)
