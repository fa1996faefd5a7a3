"""Checks of the files that a command is to write, made before it begins to work."""

from __future__ import annotations

from pathlib import Path


def check_file(option: str, path: Path | None) -> None:
    """Raise an error if a file cannot be where an option says. `None`: the option was not given.

    Raises:
        OSError: the folder of `path` does not exist, or `path` is a folder.
    """
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder; a file is needed")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no folder {path.absolute().parent}")


def check_folder(option: str, path: Path | None) -> None:
    """Raise an error if `path` is a file. A folder that does not exist is made later. `None`: it was not given.

    Raises:
        OSError: `path` is a file.
    """
    if path is not None and path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{option} {path} is a file; a folder is needed")
