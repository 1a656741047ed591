"""A quick check whether hosts can be reached: a download without a network blocks for minutes."""

import http.client
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable


def unreachable_hosts(urls: Iterable[str], *, timeout: float = 8.0) -> list[str]:
    """Return the hosts of some URLs if none of them answers within `timeout` seconds."""
    # Sends HEAD requests to at most three hosts at the same time, through the proxies that the
    # environment names, as a download would. An answer with an HTTP error counts as an answer.
    parts = (urllib.parse.urlsplit(url) for url in urls)
    addresses = sorted({f"{p.scheme}://{p.netloc}/" for p in parts if p.scheme.startswith("http")})
    answered: list[str] = []

    def send_request(address: str) -> None:
        request = urllib.request.Request(address, method="HEAD")
        try:
            # urlopen would use the proxies that were set when it was first called.
            urllib.request.build_opener().open(request, timeout=timeout).close()
        except (urllib.error.HTTPError, http.client.HTTPException):
            pass
        except OSError:
            return
        answered.append(address)

    # Threads, because the time that a name lookup takes cannot be limited.
    checked = addresses[:3]
    threads = [threading.Thread(target=send_request, args=(a,), daemon=True) for a in checked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout / len(threads))
    return [] if answered else [urllib.parse.urlsplit(a).hostname or a for a in checked]
