"""A TCP proxy that cuts, stalls, delays and throttles the connections through it."""

import contextlib
import socket
import threading
import time


class UnreliableNetwork(contextlib.AbstractContextManager["UnreliableNetwork"]):
    """A proxy from a local port to a server. Set its attributes at any time."""

    def __init__(self, server_port: int) -> None:
        self.delay = 0.0
        self.bytes_per_second: float | None = None
        self.is_cut = self.is_stalled = self._closed = False
        self.num_connections = self.sent_bytes = self.received_bytes = 0
        self._server_port = server_port
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
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
        self._closed = True
        _close(self._listener)
        self.cut()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                ends = [self._listener.accept()[0]]
            except OSError:
                return
            self.num_connections += 1
            try:
                if self.is_cut:
                    raise ConnectionError
                ends.append(socket.create_connection(("127.0.0.1", self._server_port), 5))
                ends[1].settimeout(None)
                for end in ends:
                    # Small buffers: otherwise they hide a slow network for megabytes.
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            except OSError:
                _close(*ends)
                continue
            client, server = ends
            self._pairs.add((client, server))
            for source, sink in ((client, server), (server, client)):
                arguments = source, sink, source is client
                threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_sent: bool) -> None:
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
        _close(source, sink)
        self._pairs -= {(source, sink), (sink, source)}


def _close(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
