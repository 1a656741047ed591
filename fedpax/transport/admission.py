"""Admission of sites: expelled ones are refused, headers are checked, and messages limited."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedpax.errors import ArgumentError, ConfigurationError
from fedpax.files import lock_file, open_unlinked, read_json, replace_file
from fedpax.transport.calls import BusyError, Handler, MalformedError, RefusedError
from fedpax.transport.message import Message

SECONDS_BETWEEN_LOOKS = 0.5
_BURST = 60.0  # seconds of the limits that a site may use at once
_REMEMBERED = 3600.0  # seconds in which malformed messages add up
_MOST_SITES = 1 << 14  # without certificates, anyone can invent names
_logger = logging.getLogger(__name__)


class SiteLimits(NamedTuple):
    """What a site may send; beyond it the site is muted, and in the end expelled.

    Attributes:
        mute_after: malformed messages in an hour after which each further one mutes the site.
        expel_after: malformed messages in an hour after which the site is expelled.
    """

    messages_per_minute: float = math.inf
    bytes_per_minute: float = math.inf
    mute_after: int = 3
    mute_seconds: float = 60.0
    expel_after: int = 10


NO_LIMITS = SiteLimits()
"""Of messages and bytes; malformed messages are limited in any case."""


class Admission:
    """Decides whether a message of a site is handled."""

    # Without certificates, a site is a name that a message claims: malformed messages then mute and
    # expel no site, as a stranger could send them.

    def __init__(
        self,
        folder: Path,
        limits: SiteLimits = NO_LIMITS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._limits, self._clock = folder, limits, clock
        self._lock = threading.Lock()
        self._sites: dict[str, _Site] = {}
        self._expelled = read_expulsions(folder)
        self._file, self._next_look = self._identify_file(), clock() + SECONDS_BETWEEN_LOOKS

    def guard(self, handler: Handler) -> Handler:
        """Return a handler that answers only the messages of sites that may send them."""

        def guarded(peer: str, message: Message) -> Message:
            site = site_of(peer, message)
            self.check(site)
            self._count(site, sum(array.nbytes for array in message.arrays.values()))
            try:
                answer = handler(peer, message)
            except MalformedError as error:
                if peer:  # a stranger can claim the name of any site
                    self.report(site, str(error))
                raise
            self.check_not_expelled(site)  # the answer of a long call can hold a new model
            return answer

        return guarded

    def check(self, site: str) -> None:
        """Raise the reason for which no message of a site is handled now."""
        self.check_not_expelled(site)
        with self._lock:
            known = self._sites.get(site)
            if known is None:
                return
            now = self._clock()
            if (seconds := known.muted_until - now) > 0:
                reason = f"{len(known.malformed)} malformed messages in the last hour"
            elif (seconds := known.messages_until - now - _BURST) > 0:
                reason = f"more than {self._limits.messages_per_minute:g} messages a minute"
            elif (seconds := known.bytes_until - now - _BURST) > 0:
                reason = f"more than {self._limits.bytes_per_minute:g} bytes a minute"
            else:
                return
        raise BusyError(
            f"site {site!r} is muted for {math.ceil(seconds)} s: it has sent {reason}. Wait, and "
            "send less."
        )

    def check_not_expelled(self, site: str) -> None:
        """Raise a `RefusedError` if a site is expelled, as the file tells."""
        with self._lock:
            if (now := self._clock()) >= self._next_look:
                self._next_look = now + SECONDS_BETWEEN_LOOKS
                self._look()
            expulsion = self._expelled.get(site)
        if expulsion is not None:
            raise RefusedError(
                f"site {site!r} is expelled from this run ({expulsion.reason}). Ask the "
                f"coordinator, who can admit it again by `fedpax sites admit {site}`."
            )

    def is_expelled(self, site: str) -> bool:
        """Return whether a site is expelled."""
        try:
            self.check_not_expelled(site)
        except RefusedError:
            return True
        return False

    def report(self, site: str, reason: str) -> None:
        """Count a malformed message of a site: the site is muted, and expelled by rule."""
        if not site:
            return
        limits, now = self._limits, self._clock()
        with self._lock:
            known = self._site(site)
            recent = [then for then in known.malformed if now - then < _REMEMBERED]
            known.malformed = [*recent, now]
            count = len(known.malformed)
            if count > limits.mute_after:
                known.muted_until = now + limits.mute_seconds
        if count > limits.expel_after:
            reason = "".join(char if char.isprintable() else "?" for char in reason)
            words = f"{count} malformed messages in an hour, the last one: {reason}"[:MAX_TEXT]
            _logger.warning("site %r is expelled: %s", site, words)
            expel(self._folder, site, words, by="rule")
            with self._lock:
                self._look()

    def _count(self, site: str, size: int) -> None:
        limits, now = self._limits, self._clock()
        if not site or min(limits.messages_per_minute, limits.bytes_per_minute) == math.inf:
            return
        with self._lock:
            known = self._site(site)
            # The times at which the messages and bytes so far are paid off.
            messages, size_seconds = 60 / limits.messages_per_minute, 60 / limits.bytes_per_minute
            known.messages_until = max(known.messages_until, now) + messages
            known.bytes_until = max(known.bytes_until, now) + size * size_seconds

    def _site(self, site: str) -> "_Site":
        if site not in self._sites and len(self._sites) >= _MOST_SITES:
            del self._sites[next(iter(self._sites))]
        return self._sites.setdefault(site, _Site())

    def _look(self) -> None:
        """Read the file again if it has changed."""
        identity = self._identify_file()
        if identity == self._file:
            return
        try:
            self._expelled = read_expulsions(self._folder)
            self._file = identity
        except (OSError, ConfigurationError) as error:
            _logger.warning("expelled sites stay as they were: %s", error)

    def _identify_file(self) -> tuple[int, int, int] | None:
        try:
            status = (self._folder / EXPELLED_FILE).stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


@dataclasses.dataclass
class _Site:
    """What a site has sent."""

    messages_until: float = -math.inf
    bytes_until: float = -math.inf
    muted_until: float = -math.inf
    malformed: list[float] = dataclasses.field(default_factory=list)  # times in the last hour


def site_of(peer: str, message: Message) -> str:
    """Return the site that a message is from: of its certificate, or without one as it claims."""
    if peer:
        return peer
    name = message.header.get("island", message.header.get("site"))
    return name if isinstance(name, str) and 0 < len(name) <= MAX_TEXT else ""


# ---- the sites that are expelled from a run, in `expelled.json` of its folder

EXPELLED_FILE = "expelled.json"
_LOCK = ".expelled.lock"
MAX_TEXT = 200


class Expulsion(NamedTuple):
    """Why and when a site was expelled."""

    reason: str
    by: str  # "command", or "rule" after messages that no site should send
    time: float  # seconds since 1970


def read_expulsions(folder: Path) -> dict[str, Expulsion]:
    """Return the expelled sites of a run by name; empty without the file."""
    path = folder / EXPELLED_FILE
    try:
        sites = {name: Expulsion(**fields) for name, fields in read_json(path).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        # Not a reason to let expelled sites return.
        raise ConfigurationError(
            f"{path} is damaged, expected reason, by and time for each expelled site. Restore the "
            "file, or remove it and expel the sites again by `fedpax sites expel`."
        ) from None
    return sites


def expel(folder: Path, site: str, reason: str, by: str = "command") -> None:
    """Expel a site from a run; a running coordinator notices it within a second."""
    check_site(site)
    check_site(reason, "reason")
    with _locked(folder):
        sites = read_expulsions(folder)
        if site not in sites:
            _write(folder, sites | {site: Expulsion(reason, by, time.time())})


def admit(folder: Path, site: str) -> bool:
    """Let an expelled site return; return False if it is not expelled."""
    with _locked(folder):
        sites = read_expulsions(folder)
        if known := sites.pop(site, None):
            _write(folder, sites)
    return known is not None


def check_site(name: str, argument: str = "site") -> None:
    """Check a name or a reason, which reach the user's terminal."""
    if not 0 < len(name) <= MAX_TEXT or not name.isprintable():
        raise ArgumentError(
            f"{argument}={name[:MAX_TEXT]!r} is not a text of 1 to {MAX_TEXT} printable characters."
            " Use the name that `fedpax sites list` shows."
        )


def _write(folder: Path, sites: Mapping[str, Expulsion]) -> None:
    content = {name: expulsion._asdict() for name, expulsion in sites.items()}
    replace_file(folder / EXPELLED_FILE, (json.dumps(content, indent=2) + "\n").encode())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change the file: a command, or the coordinator by its rule."""
    file = open_unlinked(folder / _LOCK, os.O_WRONLY | os.O_CREAT)
    try:
        lock_file(file, wait=True)
        yield
    finally:
        os.close(file)


class CheckedHeader:
    """The header of a message, whose fields are checked when they are read."""

    # Every method raises a `MalformedError` if the field has another type, or is missing and not
    # optional.

    def __init__(self, header: Mapping[str, Any]) -> None:
        self._header = header

    def text(self, name: str) -> str:
        """Return a short text without control characters."""
        value = self._header.get(name)
        fits = isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()
        if not isinstance(value, str) or not fits:
            raise self._error(name, f"a printable text of 1 to {MAX_TEXT} characters")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a short text, or None."""
        return None if self._header.get(name) is None else self.text(name)

    def count(self, name: str, least: int = 0, most: int = 2**53 - 1) -> int:
        """Return an integer from `least` to `most`."""
        value = self._header.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self._error(name, f"an integer from {least} to {most}")
        return value

    def optional_count(self, name: str) -> int | None:
        """Return an integer of at least 0, or None."""
        return None if self._header.get(name) is None else self.count(name)

    def number(self, name: str) -> float:
        """Return a finite number, or NaN for null: JSON has no NaN."""
        value = self._header.get(name, "")
        if value is None:
            return math.nan
        # Integers of JSON can be larger than any float.
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise self._error(name, "a number")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a bool; False if the field is missing."""
        value = self._header.get(name, False)
        if not isinstance(value, bool):
            raise self._error(name, "true or false")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return a dict."""
        value = self._header.get(name)
        if not isinstance(value, dict):
            raise self._error(name, "a dict")
        return value

    def texts(self, name: str, most: int) -> dict[str, str]:
        """Return short texts by short names, at most `most`; empty if the field is missing."""
        value = self._header.get(name, {})
        if not isinstance(value, dict) or len(value) > most:
            raise self._error(name, f"at most {most} texts by name")
        for key in value:
            CheckedHeader({"name": key}).text("name"), CheckedHeader(value).text(key)
        return value

    def fragment(self, num_fragments: int) -> int:
        """Return the fragment's number."""
        value = self.count("fragment")
        if value >= num_fragments:
            raise self._error("fragment", f"a number below {num_fragments}")
        return value

    def versions(self, num_fragments: int) -> list[int]:
        """Return one integer for each fragment."""
        value = self._header.get("versions")
        if not isinstance(value, list) or len(value) != num_fragments:
            raise self._error("versions", f"{num_fragments} integers")
        if not all(type(version) is int and version >= -1 for version in value):
            raise self._error("versions", f"{num_fragments} integers of at least -1")
        return value

    def _error(self, name: str, expected: str) -> MalformedError:
        return MalformedError(
            f"the message's field {name!r} is {repr(self._header.get(name))[:100]}, expected "
            f"{expected}. Use the same version of fedpax on both sides."
        )
