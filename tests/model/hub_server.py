"""A Hub on loopback, with the endpoints that huggingface_hub calls to make a repository, commit
and fetch."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Files = dict[str, bytes]


class Refused(Exception):
    def __init__(self, status: int, code: str = "", url: str = "") -> None:
        self.status, self.code, self.url = status, code, url


@dataclass
class Hub:
    """Methods answer requests with JSON values, or with a file's content and headers."""

    repositories: dict[str, dict[str, Files]] = field(
        default_factory=dict
    )  # name -> branch -> files
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)  # received Authorization headers
    failures: dict[tuple[str, str], list[int]] = field(
        default_factory=dict
    )  # (method, pattern) -> next statuses
    address: str = ""

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, request)) for request in self.requests)

    def files(self, repo: str, revision: str | None = "main") -> Files:
        if repo in self.gated:
            raise Refused(403, "GatedRepo")
        if repo not in self.repositories:
            raise Refused(404, "RepoNotFound")
        for name, files in self.repositories[repo].items():
            if revision in (name, commit_of(files)):
                return files
        raise Refused(404, "RevisionNotFound")

    def create(self, body: bytes) -> Any:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.repositories:
            raise Refused(409, url=f"{self.address}/{name}")
        self.repositories[name] = {"main": {}}
        self.private |= (
            {name} if asked.get("private") or asked.get("visibility") == "private" else set()
        )
        return {"url": f"{self.address}/{name}", "name": name}

    def branch(self, body: bytes, repo: str, name: str) -> Any:
        if name in self.repositories[repo]:
            raise Refused(409)
        self.repositories[repo][name] = dict(self.files(repo))
        return {}

    def preupload(self, body: bytes, repo: str, revision: str) -> Any:
        """All files come with the commit, also those that the real Hub wants as large ones."""
        kept = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
        return {"files": [{"path": file["path"], **kept} for file in json.loads(body)["files"]]}

    def commit(self, body: bytes, repo: str, revision: str) -> Any:
        files = dict(self.files(repo, revision))
        for entry in map(json.loads, body.decode().splitlines()):
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        self.repositories[repo][revision] = files
        name = commit_of(files)
        return {
            "commitOid": name,
            "commitUrl": f"{self.address}/{repo}/commit/{name}",
            "success": True,
        }

    def information(self, body: bytes, repo: str, revision: str | None) -> Any:
        files = self.files(repo, revision or "main")
        return {
            "id": repo,
            "modelId": repo,
            "sha": commit_of(files),
            "private": repo in self.private,
            "tags": re.findall(
                r"(?m)^- (\S+)$", files.get("README.md", b"").decode()
            ),  # the card's
            "siblings": [{"rfilename": name} for name in files],
        }

    def tree(self, body: bytes, repo: str, revision: str) -> Any:
        return [
            {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha256(c).hexdigest()}
            for n, c in sorted(self.files(repo, revision).items())
        ]

    def resolve(self, body: bytes, repo: str, revision: str, name: str) -> Any:
        files = self.files(repo, revision)
        if name not in files:
            raise Refused(404, "EntryNotFound")
        tag = hashlib.sha256(files[name]).hexdigest()
        return files[name], {"ETag": f'"{tag}"', "X-Repo-Commit": commit_of(files)}


def commit_of(files: Files) -> str:
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:40]


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES: tuple[tuple[str, Any], ...] = (
    (r"POST /api/repos/create", Hub.create),
    (r"POST /api/validate-yaml", lambda hub, body: {"errors": [], "warnings": []}),
    (rf"POST /api/models/{REPO}/branch/(.+)", Hub.branch),
    (rf"POST /api/models/{REPO}/preupload/(.+)", Hub.preupload),
    (rf"POST /api/models/{REPO}/commit/(.+)", Hub.commit),
    (rf"GET /api/models/{REPO}(?:/revision/(.+))?", Hub.information),
    (rf"GET /api/models/{REPO}/tree/(.+)", Hub.tree),
    (rf"(?:HEAD|GET) /{REPO}/resolve/([\w.-]+)/(.+)", Hub.resolve),
)


@contextmanager
def served() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        hub, token = self.hub, self.headers.get("Authorization")
        request = f"{self.command} {self.path.split('?')[0]}"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(request)
        hub.tokens |= {token} if token else set()
        status, headers = 200, {}
        try:
            for (method, pattern), statuses in hub.failures.items():
                if method == self.command and re.search(pattern, self.path) and statuses:
                    raise Refused(statuses.pop(0))
            act, found = next(
                (act, found) for route, act in ROUTES if (found := re.fullmatch(route, request))
            )
            value = act(hub, body, *found.groups())
            value, headers = value if isinstance(value, tuple) else (value, {})
        except Refused as refused:
            status, headers = refused.status, {"X-Error-Code": refused.code}
            value = {"error": f"planted, or no such thing; you sent {token}", "url": refused.url}
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_POST = do_GET
