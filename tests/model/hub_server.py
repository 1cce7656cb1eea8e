"""A Hub on loopback: the endpoints that huggingface_hub calls to make a repository, commit to it and fetch from it."""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Files = dict[str, bytes]


@dataclass
class Hub:
    """What the server holds, and what it was asked. failures: (method, pattern) -> statuses of the next answers."""

    repositories: dict[str, dict[str, Files]] = field(default_factory=dict)  # name -> branch -> files
    private: set[str] = field(default_factory=set)
    blobs: dict[str, bytes] = field(default_factory=dict)  # uploaded large files by SHA-256
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)  # what came as Authorization
    failures: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    address: str = ""

    def fail(self, method: str, path: str) -> int | None:
        """The status of a planted failure, once."""
        for (wanted, pattern), statuses in self.failures.items():
            if wanted == method and re.search(pattern, path) and statuses:
                return statuses.pop(0)
        return None

    def count(self, pattern: str) -> int:
        """How many requests 'METHOD /path' match."""
        return sum(bool(re.search(pattern, request)) for request in self.requests)


def commit_of(files: Files) -> str:
    """A commit's name: 40 hex digits of its content."""
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:40]


class Server:
    """The server as a context: `with Server() as hub`."""

    def __enter__(self) -> Hub:
        hub = Hub()
        handler = type("Handler", (_Handler,), {"hub": hub})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        hub.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return hub

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        path = self.path.split("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        self.hub.requests.append(f"{method} {path}")
        if self.headers.get("Authorization"):
            self.hub.tokens.add(self.headers["Authorization"])
        status = self.hub.fail(method, path)
        if status is not None:
            return self._send(status, {"error": f"planted failure; you sent {self.headers.get('Authorization')}"})
        for pattern, act in ROUTES:
            found = re.fullmatch(pattern, f"{method} {path}")
            if found is not None:
                return act(self, body, *found.groups())
        return self._send(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})

    def _chunks(self) -> bytes:
        whole = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _files(self, repo: str, revision: str) -> Files | None:
        branches = self.hub.repositories.get(repo)
        if branches is None:
            self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return None
        for name, files in branches.items():
            if revision in (name, commit_of(files)):
                return files
        self._send(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        return None

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else f"me/{asked['name']}"
        if name in self.hub.repositories:
            return self._send(409, {"error": "exists", "url": f"{self.hub.address}/{name}"})
        self.hub.repositories[name] = {"main": {}}
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(name)
        return self._send(200, {"url": f"{self.hub.address}/{name}", "name": name})

    def branch(self, body: bytes, repo: str, name: str) -> None:
        branches = self.hub.repositories[repo]
        if name in branches:
            return self._send(409, {"error": "Reference already exists"})
        branches[name] = dict(branches["main"])
        return self._send(201, {})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        if self._files(repo, revision) is None:
            return
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".bin")) else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(body)["files"]
        ]
        self._send(200, {"files": modes})

    def batch(self, body: bytes, repo: str) -> None:
        objects = []
        for found in json.loads(body)["objects"]:
            actions = {}
            if found["oid"] not in self.hub.blobs:
                actions = {
                    "upload": {"href": f"{self.hub.address}/upload/{found['oid']}", "header": {}},
                    "verify": {"href": f"{self.hub.address}/verify", "header": {}},
                }
            objects.append({**found, "actions": actions} if actions else dict(found))
        self._send(200, {"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._send(400, {"error": "damaged upload"})
        self.hub.blobs[oid] = body
        return self._send(200, {})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        files = dict(self.hub.repositories[repo][revision])
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        self.hub.repositories[repo][revision] = files
        name = commit_of(files)
        self._send(200, {"commitOid": name, "commitUrl": f"{self.hub.address}/{repo}/commit/{name}", "success": True})

    def information(self, body: bytes, repo: str, revision: str = "main") -> None:
        files = self._files(repo, revision)
        if files is not None:
            siblings = [{"rfilename": name} for name in files]
            about = {"id": repo, "modelId": repo, "sha": commit_of(files), "private": repo in self.hub.private}
            self._send(200, {**about, "siblings": siblings})

    def tree(self, body: bytes, repo: str, revision: str) -> None:
        files = self._files(repo, revision)
        if files is not None:
            oid = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}  # noqa: S324
            self._send(
                200, [{"type": "file", "path": n, "size": len(c), "oid": oid[n]} for n, c in sorted(files.items())]
            )

    def resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        files = self._files(repo, revision)
        if files is None:
            return
        if name not in files:
            self._send(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
            return
        tag = hashlib.sha256(files[name]).hexdigest()
        self._send(200, files[name], {"ETag": f'"{tag}"', "X-Repo-Commit": commit_of(files)})


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES: tuple[tuple[str, Any], ...] = (
    (r"POST /api/repos/create", _Handler.create),
    (rf"POST /api/models/{REPO}/branch/(.+)", _Handler.branch),
    (r"POST /api/validate-yaml", lambda self, body: self._send(200, {"errors": [], "warnings": []})),
    (rf"POST /api/models/{REPO}/preupload/(.+)", _Handler.preupload),
    (rf"POST /{REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /upload/(\w+)", _Handler.put),
    (r"POST /verify", lambda self, body: self._send(200, {})),
    (rf"POST /api/models/{REPO}/commit/(.+)", _Handler.commit),
    (rf"GET /api/models/{REPO}/revision/(.+)", _Handler.information),
    (rf"GET /api/models/{REPO}/tree/(.+)", _Handler.tree),
    (rf"GET /api/models/{REPO}", _Handler.information),
    (rf"(?:HEAD|GET) /{REPO}/resolve/([\w.-]+)/(.+)", _Handler.resolve),
)
