"""A local HTTP server whose answers have faults, and which is also an HTTP proxy."""

import contextlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Serves `data` at every path. `fault` is one of the names in `Handler`, or empty."""

    daemon_threads = True

    def __init__(self, data):
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.fault, self.at, self.asked = data, "", 0, []
        self.pause_s = 0.0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """A client that closed the connection is no error here."""

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        with contextlib.suppress(ConnectionError):
            self.answer()

    def answer(self):
        server, fault, at = self.server, self.server.fault, self.server.at
        have = self.headers.get("Range", "")
        server.asked.append((self.path, have))
        start = int(have[6:-1]) if have and fault != "no ranges" else 0
        data = server.data
        if fault == "other bytes":
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        elif fault == "a page":
            data = b"<html>log in</html>"
        elif fault.isdigit():
            self.send_response(int(fault))
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        elif fault == "loop" or (fault == "redirect" and self.path != "/moved"):
            self.send_response(302)
            self.send_header("Location", f"{server.url}/{'loop' if fault == 'loop' else 'moved'}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if start >= len(data):
            self.send_error(416)
            return
        total = len(data) + {"too long": 1 + at, "too short": -1 - at}.get(fault, 0)
        total += 10**9 if fault == "huge" else 0
        self.send_response(206 if start else 200)
        if start:
            wrong = 1 if fault == "other range" else 0
            self.send_header("Content-Range", f"bytes {start + wrong}-{total - 1}/{total}")
        if fault != "no length":
            self.send_header("Content-Length", str(max(total - start, 0)))
        self.end_headers()
        body = data[start : max(start, at)] if fault == "cut" else data[start:]
        for i in range(0, len(body), 65536):
            self.wfile.write(body[i : i + 65536])
            self.wfile.flush()
            time.sleep(server.pause_s)
