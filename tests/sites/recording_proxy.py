"""A TCP proxy on loopback that keeps the bytes of both directions."""

import contextlib
import socket
import threading


class RecordingProxy:
    """Forwards connections to a port, and keeps what it forwards.

    Attributes:
        address: where it listens.
        up: bytes to the port, a part for each connection.
        down: bytes from the port.
    """

    def __init__(self, port: int) -> None:
        self._target, self._open = ("127.0.0.1", port), True
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.up: list[bytearray] = []
        self.down: list[bytearray] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "RecordingProxy":
        return self

    def __exit__(self, *exception: object) -> None:
        self._open = False
        self._socket.close()

    @property
    def content(self) -> bytes:
        """All bytes of both directions."""
        return b"\0".join(map(bytes, (*self.up, *self.down)))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of both directions."""
        return sum(map(len, (*self.up, *self.down)))

    def _accept(self) -> None:
        while self._open:
            try:
                near, _ = self._socket.accept()
                far = socket.create_connection(self._target)
            except OSError:
                if self._open:
                    with contextlib.suppress(OSError, UnboundLocalError):
                        near.close()
                continue
            self.up.append(up := bytearray())
            self.down.append(down := bytearray())
            for source, sink, record in ((near, far, up), (far, near, down)):
                forward = threading.Thread(
                    target=self._forward, args=(source, sink, record), daemon=True
                )
                forward.start()

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                record += content
                sink.sendall(content)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
