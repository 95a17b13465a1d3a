"""The directory in which one server keeps its sessions."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
from pathlib import Path

from tokenspeed.sessions.journal.store import JournalError

JOURNAL_FILE = "journal.db"
_LOCK_FILE = "lock"


class DataDirectory:
    """A hold on a directory: no other server can take it until `close`, or until this process has ended, however."""

    def __init__(self, path: Path) -> None:
        """Raises: JournalError, if the directory cannot be made or is another server's."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise JournalError(f"{path} cannot hold sessions: {error.strerror or error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._lock, 32).decode(errors="replace").strip()
            os.close(self._lock)
            raise JournalError(f"{path} is in use by the server with pid {holder or 'unknown'}") from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"{os.getpid()}\n".encode())

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL_FILE

    def close(self) -> None:
        os.close(self._lock)


def default_directory(name: str, tokens: str) -> Path:
    """Where the sessions of a model are kept if nothing else is said: in the user's data directory, apart from those
    of other models.

    Args:
        name: what clients call the model.
        tokens: the fingerprint of what gives its token ids their meaning.
    """
    given = os.environ.get("XDG_DATA_HOME", "")
    if given.startswith("/"):  # the standard has relative ones ignored
        home = Path(given)
    elif sys.platform == "darwin":
        home = Path.home() / "Library" / "Application Support"
    else:
        home = Path.home() / ".local" / "share"
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
    return home / "tokenspeed" / "sessions" / f"{plain[:64]}-{tokens[:12]}"


def tokens_fingerprint(model_directory: Path) -> str:
    """Of the files that give token ids their meaning: tokenizer and chat template, in hexadecimal.

    Raises:
        OSError: there is no tokenizer.
    """
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = model_directory / name
        content = path.read_bytes() if name == "tokenizer.json" or path.exists() else b""
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
