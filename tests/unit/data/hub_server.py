"""A small dataset repository behind the hub's HTTP interface, with faults on demand."""

import hashlib
import json
import threading
from collections import defaultdict, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PINNED, MOVED = "a" * 40, "b" * 40
REPO = "owner/math"


class HubServer:
    """Serves `files[commit][path]`; `main` points to MOVED.

    `faults[path]` holds one fault for each coming GET of that path ("tree" for the listing): a status code, "short"
    (the connection ends early), or "flip" (one byte is wrong). `requests` records (method, path) of every request.
    """

    def __init__(self, files):
        self.files = files
        self.faults = defaultdict(deque)
        self.requests = []
        self.token = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                server.answer(self)

            def do_GET(self):
                server.answer(self)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def answer(self, request):
        path = request.path.split("?")[0]
        self.requests.append((request.command, path))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return send(request, 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        tree, resolve = f"/api/datasets/{REPO}/tree/", f"/datasets/{REPO}/resolve/"
        if path.startswith(tree):
            return self._tree(request, path.removeprefix(tree))
        if path.startswith(resolve):
            commit, _, name = path.removeprefix(resolve).partition("/")
            return self._file(request, commit, name)
        return send(request, 404, {"X-Error-Code": "RepoNotFound"})

    def _tree(self, request, commit):
        if self.faults["tree"]:
            return send(request, self.faults["tree"].popleft())
        if commit not in self.files:
            return send(request, 404, {"X-Error-Code": "RevisionNotFound"})
        entries = [self._entry(name, content) for name, content in self.files[commit].items()]
        return send(request, 200, {"Content-Type": "application/json"}, json.dumps(entries).encode())

    def _entry(self, name, content):
        entry = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
        if name.endswith(".parquet"):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def _file(self, request, commit, name):
        content = self.files.get(commit, {}).get(name)
        if content is None:
            return send(request, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        fault = self.faults[name].popleft() if request.command == "GET" and self.faults[name] else None
        if isinstance(fault, int):
            return send(request, fault)
        etag = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        if fault == "flip":
            content = content[:-1] + bytes([content[-1] ^ 1])
        return send(request, 200, headers, content, short=fault == "short")


def send(request, status, headers=None, content=b"", short=False):
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(content)))
    if short or status >= 400:
        request.send_header("Connection", "close")
        request.close_connection = True
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(content[: len(content) // 2] if short else content)


def git_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
