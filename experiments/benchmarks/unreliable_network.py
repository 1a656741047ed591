"""A TCP proxy that cuts, stalls, delays and throttles the connections through it."""

import contextlib
import socket
import threading
import time

Pair = tuple[socket.socket, socket.socket]


class UnreliableNetwork(contextlib.AbstractContextManager["UnreliableNetwork"]):
    """A proxy from a local port to a server. Set its attributes at any time."""

    def __init__(self, server_port: int) -> None:
        self.delay = 0.0
        self.bytes_per_second: float | None = None
        self.is_cut = self.is_stalled = self._closed = False
        self.num_connections = self.sent_bytes = self.received_bytes = 0
        self._server_port = server_port
        self._lock = threading.Lock()
        self._pairs: set[Pair] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections, and new ones at once."""
        self.is_cut = True
        for pair in list(self._pairs):
            _close(*pair)

    def restore(self) -> None:
        """Accept connections again, and forward without limits."""
        self.is_cut = self.is_stalled = False
        self.delay, self.bytes_per_second = 0.0, None

    def close(self) -> None:
        """Close the proxy and all connections."""
        self._closed = True
        _close(self._listener)
        self.cut()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            with contextlib.ExitStack() as stack:
                stack.callback(client.close)
                try:
                    if self.is_cut:
                        raise ConnectionError
                    server = socket.create_connection(("127.0.0.1", self._server_port), 5)
                    stack.callback(server.close)
                    server.settimeout(None)
                    pair = client, server
                    for end in pair:
                        # Small buffers: otherwise they hide a slow network for megabytes.
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
                except OSError:
                    continue
                stack.pop_all()
            self._pairs.add(pair)
            for is_sent in (True, False):
                arguments = pair, is_sent
                threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, pair: Pair, is_sent: bool) -> None:
        source, sink = pair if is_sent else pair[::-1]
        with contextlib.suppress(OSError):
            # `cut` may have closed all pairs just before it could know of this one.
            while not self.is_cut:
                block = source.recv(1 << 14 if self.bytes_per_second else 1 << 18)
                if not block:
                    break
                if self.bytes_per_second:
                    time.sleep(len(block) / self.bytes_per_second)
                if self.delay:
                    time.sleep(self.delay)
                while self.is_stalled and not self.is_cut:
                    time.sleep(0.01)
                sink.sendall(block)
                with self._lock:
                    self.sent_bytes += len(block) * is_sent
                    self.received_bytes += len(block) * (not is_sent)
        _close(*pair)
        self._pairs.discard(pair)


def _close(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
