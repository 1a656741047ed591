"""Run gcp-storage-emulator with what it lacks of Cloud Storage, and with failures.

Cloud Storage sends the generation of an object with its content. TensorStore replaces an object
only if it still has the generation that was read, and fails if none was sent.

Usage: bucket_server.py PORT [--refuse=TEXT --times=N] [--hold=TEXT]: the first N uploads to names
that contain the first text get the status 403, and each upload to a name that contains the second
text takes a second longer.
"""

import argparse
import itertools
import threading
import time
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.storage import _FileStore

send_content, receive = objects.download, objects.insert


def download(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
    result = request.params["bucket_name"], request.params["object_id"]
    send_content(request, response, storage)
    if response.status != HTTPStatus.NOT_FOUND:
        response["x-goog-generation"] = storage.get_file_obj(*result)["generation"]


def write_whole(store: Any, name: str, content: bytes) -> None:
    """Write a file at once, as Cloud Storage does: a kill must leave no half of the index."""
    path = store._disk_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    draft.write_bytes(content)
    draft.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--refuse")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--hold")
    given = parser.parse_args()
    refusals = itertools.count()

    def insert(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
        name = "".join(request.query.get("name", ()))
        if given.refuse and given.refuse in name and next(refusals) < given.times:
            _ = request.data  # the next request follows it
            response.status = HTTPStatus.FORBIDDEN
        else:
            receive(request, response, storage)

    objects.download, objects.insert = download, insert
    _FileStore.write_bytes = write_whole
    # Its table of handlers is made when it is imported.
    from gcp_storage_emulator import server
    from gcp_storage_emulator.__main__ import main as start

    handle, lock = server.Router.handle, threading.Lock()

    def handle_in_turn(router: Any, method: str) -> None:
        """Handle one request at a time: its storage has no lock. The held ones wait before."""
        path = unquote(router._request_handler.path)
        if given.hold and method == "POST" and given.hold in path:
            time.sleep(1)
        with lock:
            handle(router, method)

    server.Router.handle, server.server.HTTPServer = handle_in_turn, ThreadingHTTPServer
    start(["start", "--host=127.0.0.1", f"--port={given.port}", "--default-bucket=runs"])


main()
