"""Calls from islands to a syncer, over gRPC: `serve` at the syncer, `connect` at an island."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from fedpax.errors import FedpaxError
from fedpax.transport.call_limits import CallPool, CallsBySite, LimitedLog, escape
from fedpax.transport.connection_checks import check_address, find_refusal
from fedpax.transport.message import (
    CHECKSUM_BYTES,
    CHUNK_BYTES,
    ChecksumError,
    Message,
    MessageError,
    decode,
    encode,
)
from fedpax.transport.optional_packages import import_grpc, read_certificates

if TYPE_CHECKING:
    import grpc


MAX_MESSAGE_BYTES = 1 << 30
"""Default limit on the arrays of a message: 1 GiB."""

Handler = Callable[[str, Message], Message]
"""Answers a message: called with the peer's name from its certificate (without certificates "")
and the message. It runs in several threads at once. `RefusedError` sends its text to the peer."""

_SERVICE, _METHOD = "fedpax.Sites", "Call"
_MAX_WORDS = 2000  # of a refusal; gRPC limits the metadata in which it travels to 8 KB
_logger = logging.getLogger(__name__)


class RefusedError(FedpaxError, ValueError):
    """A call that the other side refuses, with its reason; do not repeat the call."""

    is_told = False  # whether the server has told its user the reason


class MalformedError(RefusedError):
    """A message that no site of this version sends."""


class BusyError(FedpaxError, ConnectionError):
    """A call that a server does not handle now; the peer gets a `DisconnectedError`."""


class DisconnectedError(FedpaxError, ConnectionError):
    """A call without an answer in time, which may have been handled. Repeat it later."""


class WaitingError(DisconnectedError):
    """A server that cannot admit this site now, such as a syncer without a free shard."""


class Guard(Protocol):
    """Decides which messages are handled; see `fedpax.transport.admission.Admission`."""

    def guard(self, handler: Handler) -> Handler:
        """Return a handler that handles some messages, and raises for all others."""

    def check(self, site: str) -> None:
        """Raise the reason for which no message of a site is handled now."""

    def report(self, site: str, reason: str) -> None:
        """Count a malformed message of a site."""


class MessageServer:
    """A server of messages at `port`, made by `serve`."""

    def __init__(self, server: "grpc.Server", port: int) -> None:
        self.port = port
        self._server = server

    def close(self, grace: float = 1.0) -> None:
        """Stop: refuse new calls, and abort calls in progress after `grace` seconds."""
        self._server.stop(grace).wait()

    def __enter__(self) -> "MessageServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Connection:
    """A connection to a server, made by `connect`; threads may share it."""

    # It connects at the first call, and again after a failure.

    def __init__(
        self,
        channel: "grpc.Channel",
        address: str,
        certificates: Path | None,
        server_name: str,
        max_message_bytes: int,
    ) -> None:
        self.address = address
        self._channel = channel
        self._certificates = certificates
        self.server_name = server_name
        self.max_message_bytes = max_message_bytes
        self._stream = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")

    def call(self, message: Message, timeout: float) -> Message:
        """Send a message and wait at most `timeout` seconds for its answer."""
        # No call waits for another one. Do not write to the arrays before the call ends. After a
        # `RefusedError` do not repeat it; after a `DisconnectedError`, when the message may have
        # been handled, repeat it later.
        import grpc

        chunks = encode(message, self.max_message_bytes)
        call = self._stream(chunks, timeout=timeout)
        try:
            return decode(call, self.max_message_bytes)
        except grpc.RpcError as error:
            failure = error
        except ChecksumError as error:
            raise DisconnectedError(f"the answer of {self.address}: {error}") from None
        finally:
            call.cancel()  # does nothing to a call that has finished
        code, details = failure.code(), failure.details() or ""
        if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
            raise RefusedError(escape(details))
        if code == grpc.StatusCode.UNIMPLEMENTED:
            raise RefusedError(
                f"the server at {self.address} is not a syncer of fedpax. Pass the address of "
                "`fedpax syncer --listen`."
            )
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise DisconnectedError(f"{self.address}: {escape(details)}")
        if code == grpc.StatusCode.UNAVAILABLE:
            seconds = min(timeout, 3.0)
            if refusal := find_refusal(self.address, self._certificates, self.server_name, seconds):
                raise RefusedError(refusal)
            # gRPC repeats the address and names each attempt; the reason is its last part.
            details = f"no connection ({details.rpartition(': ')[2]})"
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"no answer within {timeout:g} s"
        raise DisconnectedError(
            f"{self.address}: {details or code.name}. Check that `fedpax syncer` listens there."
        )

    def close(self) -> None:
        """Close the connection; calls in progress raise `DisconnectedError`."""
        # On a stalled network, gRPC waits until keepalive closes the socket.
        closing = threading.Thread(target=self._channel.close, daemon=True)
        closing.start()
        closing.join(1.0)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def serve(
    handler: Handler,
    address: str,
    *,
    certificates: Path | str | None = None,
    admission: Guard | None = None,
    max_message_bytes: int | Callable[[], int] = MAX_MESSAGE_BYTES,
    max_calls: int = 128,
    max_calls_per_site: int = 128,
    keepalive: float = 5.0,
) -> MessageServer:
    """Serve messages: call `handler` for each, in threads, and send its result back."""
    # With certificates, `admission` is asked before a message is read. If `handler` raises another
    # exception than `RefusedError`, it is logged, and the peer gets a `DisconnectedError`. Memory
    # for received messages is at most `max_calls * max_message_bytes`, of a site with a certificate
    # `max_calls_per_site * max_message_bytes`. If all places for calls are taken, a new call ends
    # the one that has waited longest for its peer: `max_calls` must be twice the number of honest
    # peers' calls at a time. Connections take at most half of the files that the process may open.
    # The server closes a connection without a call for two minutes, with a handshake of more than
    # 10 seconds, or whose peer does not answer a ping, sent after `keepalive` seconds without
    # traffic, within three times as long.
    grpc = import_grpc()
    check_address("address", address, certificates, any_port=True)

    pool = CallPool(max_calls)
    method = grpc.stream_stream_rpc_method_handler(
        _respond(
            handler,
            max_message_bytes if callable(max_message_bytes) else lambda: max_message_bytes,
            pool,
            admission,
            max_calls_per_site,
        )
    )
    server = grpc.server(
        pool,
        handlers=[grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method})],
        options=[
            *_options(keepalive),
            ("grpc.so_reuseport", 0),  # a second syncer at this port has to fail
            ("grpc.http2.min_ping_interval_without_data_ms", 100),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.max_allowed_incoming_connections", _max_connections()),
            ("grpc.max_connection_idle_ms", 120_000),
            ("grpc.max_concurrent_streams", max_calls),  # of each connection
        ],
    )
    credentials = grpc.insecure_server_credentials()
    if certificates is not None:
        site = read_certificates(certificates)
        credentials = grpc.ssl_server_credentials(
            [(site.key, site.certificate)], site.authority, require_client_auth=True
        )
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise OSError(
            f"address={address!r} cannot be listened at: it is in use, or not an address of this "
            "machine. Stop the other server, or choose another port."
        )
    server.start()
    return MessageServer(server, port)


def connect(
    address: str,
    *,
    certificates: Path | str | None = None,
    server_name: str | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    keepalive: float = 5.0,
) -> Connection:
    """Make a connection to a server; nothing is sent before the first call."""
    # `server_name` is in the server's certificate. If the answer to a ping, sent after `keepalive`
    # seconds without traffic, takes more than three times as long, calls raise `DisconnectedError`
    # before their timeout.
    grpc = import_grpc()
    host = check_address("address", address, certificates)
    server_name = server_name or host
    options = [
        *_options(keepalive),
        ("grpc.use_local_subchannel_pool", 1),  # connections do not share a socket
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 10_000),  # time for a connection attempt
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    if certificates is None:
        options.append(("grpc.enable_http_proxy", 0))
        channel = grpc.insecure_channel(address, options)
        return Connection(channel, address, None, host, max_message_bytes)
    site = read_certificates(certificates)
    options.append(("grpc.ssl_target_name_override", server_name))
    credentials = grpc.ssl_channel_credentials(site.authority, site.key, site.certificate)
    channel = grpc.secure_channel(address, credentials, options)
    return Connection(channel, address, Path(certificates), server_name, max_message_bytes)


def _options(keepalive: float) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", CHECKSUM_BYTES + CHUNK_BYTES),
        ("grpc.max_send_message_length", CHECKSUM_BYTES + CHUNK_BYTES),
        ("grpc.keepalive_time_ms", round(1000 * keepalive)),
        ("grpc.keepalive_timeout_ms", round(3000 * keepalive)),  # also TCP's user timeout
        ("grpc.http2.ping_timeout_ms", round(3000 * keepalive)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _max_connections() -> int:
    """Return half of the number of files that this process may open, which is raised first."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return 1 << 14
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit than it states
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return min(soft if soft > 0 else 1 << 15, 1 << 15) // 2


def _respond(
    handler: Handler,
    most_bytes: Callable[[], int],
    pool: CallPool,
    admission: Guard | None,
    max_calls_per_site: int,
) -> Callable[..., Iterator[bytes]]:
    """Return a gRPC method that decodes a message, calls the handler and encodes its answer."""
    import grpc

    # A refused site can ask again each second.
    log, sites = LimitedLog(_logger, remember=600.0), CallsBySite(max_calls_per_site)
    if admission is not None:
        handler = admission.guard(handler)

    def refuse(sender: str, error: RefusedError | BusyError, context: Any) -> NoReturn:
        if not getattr(error, "is_told", False):
            log.warning("%s is refused: %s", sender, error)
        busy = isinstance(error, BusyError)
        code = grpc.StatusCode.RESOURCE_EXHAUSTED if busy else grpc.StatusCode.FAILED_PRECONDITION
        _abort(context, code, str(error))

    def respond(chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
        peer = _peer_name(context)
        with sites.count(peer) as fits:
            return pool.send(answer(peer, fits, chunks, context), context.cancel)

    def answer(peer: str, fits: bool, chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
        sender = peer or context.peer()
        try:
            if not fits:
                raise BusyError(
                    f"site {peer!r} has more than {max_calls_per_site} calls at a time. Wait for "
                    "their answers."
                )
            if admission is not None and peer:
                admission.check(peer)
            message = decode(pool.receive(chunks, context.cancel), most_bytes())
        except MessageError as error:
            if not context.is_active():  # the peer has cancelled the call, or is gone
                return iter(())
            log.warning("a message of %s is refused: %s", sender, error)
            damaged = isinstance(error, ChecksumError)
            if admission is not None and not damaged:
                admission.report(peer, str(error))
            code = grpc.StatusCode.DATA_LOSS if damaged else grpc.StatusCode.INVALID_ARGUMENT
            _abort(context, code, str(error))
        except grpc.RpcError:  # the peer has cancelled the call, or is gone
            return iter(())
        except (RefusedError, BusyError) as error:
            refuse(sender, error, context)
        try:
            return encode(handler(peer, message), most_bytes())
        except (RefusedError, BusyError) as error:
            refuse(sender, error, context)
        except Exception:
            _logger.exception("a message of %s could not be handled", sender)
            _abort(context, grpc.StatusCode.INTERNAL, "internal error: see the log of the server")

    return respond


def _abort(context: Any, code: Any, words: str) -> NoReturn:
    context.abort(code, words[:_MAX_WORDS])
    raise AssertionError("abort raises")


def _peer_name(context: Any) -> str:
    names = context.auth_context().get("x509_common_name", [])
    return names[0].decode() if names else ""
