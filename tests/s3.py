"""A real S3 server (moto's program) for the tests, behind a wire that can be cut."""
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request

ENV = dict(AWS_ACCESS_KEY_ID="AKIATESTTESTTESTTEST", AWS_SECRET_ACCESS_KEY="verysecret" * 4, no_proxy="*",
           AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE="none", AWS_SHARED_CREDENTIALS_FILE="none")


class Wire:
    """A port on this machine that leads to another while it is not cut. The next `drops` connections are
    closed at once; of what the server says, `limit` bytes pass before a connection breaks, once. `sent`:
    what clients have sent, if it is not None."""

    def __init__(self, to):
        self.to, self.port, self.ends, self.drops, self.limit, self.sent = to, 0, [], 0, None, None
        self.mend()

    def mend(self):
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, args=(self.listener,), daemon=True).start()

    def serve(self, listener):
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                if self.drops:
                    self.drops -= 1
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self.to))
                self.ends += [near, far]
                for ends in (near, far, True), (far, near, False):
                    threading.Thread(target=self.carry, args=ends, daemon=True).start()

    def carry(self, a, b, client):
        with contextlib.suppress(OSError):
            while data := a.recv(2 ** 16):
                if client and self.sent is not None:
                    self.sent += data
                if not client and self.limit is not None:
                    self.limit -= len(data)
                    if self.limit < 0:
                        self.limit = None
                        break
                b.sendall(data)
            b.shutdown(socket.SHUT_RDWR)

    def cut(self):
        for end in [self.listener, *self.ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.ends = []


@contextlib.contextmanager
def server():
    """A Wire to a server of its own, with `check(on)`: whether the server knows strangers' keys as wrong."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
                               env=os.environ | dict(MOTO_S3_DEFAULT_MAX_KEYS="100"),       # S3's pages: 1000
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.05)
        wire = Wire(port)
        def check(on):                                      # how many requests go unchecked
            urllib.request.urlopen(urllib.request.Request(
                f"http://127.0.0.1:{port}/moto-api/reset-auth", b"0" if on else b"inf",
                {"Content-Type": "text/plain"}), timeout=20).close()
        wire.check = check
        yield wire
        wire.cut()
    finally:
        process.kill()
        process.wait()
