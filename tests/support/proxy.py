"""A TCP relay that can cut what goes through it, as a network does."""

import socket
import threading
from contextlib import suppress


class Proxy:
    """Relays to a port of this machine. Threads of their own pump each connection.

    Attributes:
        target: The port, for connections that come.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cut all connections; new ones are taken."""
        with self._lock:
            cut, self._open = self._open, []
        for end in cut:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def stop(self) -> None:
        """Cut all connections, and take no new ones."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # stopped
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # nobody is there for a while
                near.close()
                continue
            with self._lock:
                self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
