"""A Python that has vLLM, for all that a judge is asked of it: chat completions of one answer.

It sleeps and wakes as vLLM does, and ends if it is asked for an answer while it sleeps.
"""

from __future__ import annotations

import stat
from pathlib import Path

from tests.scripts import head

TEXT = """{head}import http.server, json, os, sys, time
if sys.argv[1] == "-c":
    print(json.dumps(["vllm", "0.32.0", ""]))
    sys.exit()
said = dict(zip(sys.argv[3::2], sys.argv[4::2]))
is_asleep = False
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        global is_asleep
        asked = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
        if self.path in ("/sleep?level=1", "/wake_up"):
            is_asleep = self.path != "/wake_up"
            self.send_response(200); self.end_headers()
            return
        if is_asleep:
            os._exit(9)
        if "slowly" in str(asked):
            time.sleep(600)
        is_known = asked["model"] == said["--served-model-name"]
        text = "It is so.\\n0.75" if is_known and "{right}" in str(asked) else "{wrong}"
        choice = {{"message": {{"content": text}}, "finish_reason": "stop"}}
        body = json.dumps({{"choices": [choice]}}).encode()
        self.send_response(200); self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer((said["--host"], int(said["--port"])), Handler).serve_forever()
"""


def write_python(path: Path, *, right: str = "the answer", wrong: str = "no such model") -> Path:
    """Write it, ready to run.

    Args:
        right: text of a question that it finds right.
        wrong: its reply to any other.
    """
    path.write_text(TEXT.format(head=head(), right=right, wrong=wrong))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
