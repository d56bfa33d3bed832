"""Open files of a folder from an untrusted source, only if they are regular files of that folder."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class LinkedFile(OSError):
    """A symbolic link in place of a file: it may point at anything, such as a secret."""


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. OSError if it does not exist; LinkedFile for a symbolic link. Pipes and devices are
    refused, since they block or have no end.

    Example: with open_file(Path("runs/a/config.toml")) as file: text = file.read()
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP or path.is_symlink():
            raise LinkedFile(f"{path} is a symbolic link and is not followed: put the file itself there") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return os.fdopen(descriptor, "rb")
