"""A server that generates tokens at a fixed speed: `python engine_server.py PORT FILE`.

Each request is a thread, and each token takes TOKEN_S times the number in FILE: requests do not
slow each other down.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN_S = 0.05


class Generate(BaseHTTPRequestHandler):
    """Responds to POST with as many tokens as the request asks for."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"tokens": decode(request["tokens"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self) -> None:
        """Nothing can be read here, metrics included."""
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Log no requests."""


def decode(num_tokens: int) -> list[int]:
    """Return that many tokens, after their time."""
    tokens, factor = [], float(Path(sys.argv[2]).read_text())
    for token in range(num_tokens):
        time.sleep(TOKEN_S * factor)
        tokens.append(token)
    return tokens


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Generate).serve_forever()
