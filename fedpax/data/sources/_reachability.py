"""Whether hosts can be reached, asked quickly: a download without a network hangs for long."""

import http.client
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable


def unreachable(urls: Iterable[str], *, seconds: float = 8.0) -> list[str]:
    """Returns the hosts of some URLs if none of them answers; asks at most three, at once.

    Proxies of the environment are used, as a download would. A host that answers with an error
    is there.

    Args:
        urls: addresses; those that are neither http nor https are not asked.
        seconds: how long to wait for all of them together.

    Returns:
        Host names; empty if a host answered, or there was none to ask.
    """
    parts = (urllib.parse.urlsplit(url) for url in urls)
    addresses = sorted({f"{p.scheme}://{p.netloc}/" for p in parts if p.scheme.startswith("http")})
    answered: list[str] = []

    def ask(address: str) -> None:
        request = urllib.request.Request(address, method="HEAD")
        try:
            # Not urlopen, which keeps the proxies that it found when first called.
            urllib.request.build_opener().open(request, timeout=seconds).close()
        except (urllib.error.HTTPError, http.client.HTTPException):
            pass
        except OSError:
            return
        answered.append(address)

    # Threads, as looking a name up takes as long as it likes and cannot be given a limit.
    asked = addresses[:3]
    threads = [threading.Thread(target=ask, args=(a,), daemon=True) for a in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds / len(threads))
    return [] if answered else [urllib.parse.urlsplit(a).hostname or a for a in asked]
