"""Run gcp-storage-emulator with what it lacks of Cloud Storage, and with failures.

Cloud Storage sends the generation of an object with its content. TensorStore replaces an object
only if it still has the generation that was read, and fails if none was sent.

Usage: bucket_server.py PORT [--refuse=TEXT --times=N]: the first N uploads to names that contain
the text get the status 403.
"""

import argparse
import itertools
from http import HTTPStatus
from typing import Any

from gcp_storage_emulator.handlers import objects

send_content, receive = objects.download, objects.insert


def download(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
    found = request.params["bucket_name"], request.params["object_id"]
    send_content(request, response, storage)
    if response.status != HTTPStatus.NOT_FOUND:
        response["x-goog-generation"] = storage.get_file_obj(*found)["generation"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--refuse")
    parser.add_argument("--times", type=int, default=1)
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
    # Its table of handlers is made when it is imported.
    from gcp_storage_emulator.__main__ import main as start

    start(["start", "--host=127.0.0.1", f"--port={given.port}", "--default-bucket=runs"])


main()
