"""A fake Hugging Face Hub on 127.0.0.1: set HF_ENDPOINT to `HubServer.url`.

    with HubServer() as hub:
        repo = hub.repo("user/repo")              # Repo: files, commit, gated, private, revisions
        repo.files["model.gguf"] = b"..."         # the branch main
        ...
        hub.requests                              # [(method, path), ...] in order
        hub.fetched                               # [path, ...] of the files that were sent
        hub.cut_after = 1000                      # cut the next `cut_times` longer answers there
        hub.delay_s = 0.2                         # before each answer
        hub.status = 503                          # of each answer
        hub.ignores_ranges = True                 # send whole files for range requests
        hub.n_sent                                # bytes of files that were sent

It answers the requests of huggingface_hub: search, model info (siblings, sha), HEAD and GET of `resolve` with ETag,
X-Repo-Commit, X-Linked-Size and Range, and errors with the Hub's X-Error-Code. The ETag of a file is its SHA-256, as
for large files on the Hub; `Repo.etags` overrides it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?")


@dataclass
class Repo:
    """One repository: its files on main, and those of other revisions."""

    name: str
    files: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # announced in place of the files' own
    older: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit or tag -> files
    gated: bool = False  # without the right token: 401 GatedRepo
    token: str = ""

    @property
    def commit(self) -> str:
        """The commit of main, which depends on its files."""
        return _commit(self.files)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a revision, or None if it does not exist."""
        if revision in ("main", self.commit):
            return self.commit, self.files
        for name, files in self.older.items():
            if revision in (name, _commit(files)):
                return _commit(files), files
        return None


def _commit(files: dict[str, bytes]) -> str:
    digest = hashlib.sha1(b"".join(name.encode() + body for name, body in sorted(files.items())))
    return digest.hexdigest()


class HubServer:
    """The server; a context manager."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.cut_after: int | None = None
        self.cut_times = 1
        self.delay_s = 0.0
        self.status: int | None = None
        self.ignores_ranges = False
        self.n_sent = 0
        server = self

        class Handler(_Handler):
            hub = server

        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._httpd.server_address[1]}"
        self._thread = threading.Thread(target=self._httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def repo(self, name: str) -> Repo:
        """The repository of that name, made on first use."""
        return self.repos.setdefault(name, Repo(name))

    def methods(self, file: str) -> list[str]:
        """The methods of the requests for `file`."""
        return [method for method, path in self.requests if path.endswith(f"/{file}")]

    @property
    def fetched(self) -> list[str]:
        """The paths of the files that were sent, whole or in part."""
        return [path for method, path in self.requests if method == "GET" and _RESOLVE.fullmatch(path)]

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        time.sleep(self.hub.delay_s)
        if self.hub.status is not None:
            return self._error(self.hub.status, "")
        if path == "/api/models":
            return self._search()
        if match := _INFO.fullmatch(path):
            return self._info(match["repo"], match["revision"] or "main")
        if match := _RESOLVE.fullmatch(path):
            return self._resolve(match["repo"], match["revision"], match["file"])
        return self._error(404, "")

    def _admit(self, name: str) -> Repo | None:
        """The repository, if it exists and this request may see it; else the error is sent."""
        repo = self.hub.repos.get(name)
        if repo is None:
            self._error(401, "RepoNotFound")
        elif repo.gated and self.headers.get("Authorization") != f"Bearer {repo.token}":
            self._error(403 if "Authorization" in self.headers else 401, "GatedRepo")
        else:
            return repo
        return None

    def _search(self) -> None:
        words = parse_qs(urlsplit(self.path).query).get("search", [""])[0].lower().split()
        found = [
            {"id": name, "modelId": name} for name in self.hub.repos if all(word in name.lower() for word in words)
        ]
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(found).encode())

    def _info(self, name: str, revision: str) -> None:
        repo = self._admit(name)
        found = repo.at(revision) if repo else None
        if repo is None:
            return None
        if found is None:
            return self._error(404, "RevisionNotFound")
        commit, files = found
        info = {"id": name, "modelId": name, "sha": commit, "private": False, "gated": repo.gated, "tags": []}
        info |= {"downloads": 0, "siblings": [{"rfilename": file} for file in files]}
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(info).encode())

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo = self._admit(name)
        if repo is None:
            return None
        found = repo.at(revision)
        if found is None:
            return self._error(404, "RevisionNotFound")
        commit, files = found
        if file not in files:
            return self._error(404, "EntryNotFound", {"X-Repo-Commit": commit})
        body = files[file]
        etag = repo.etags.get(file) or hashlib.sha256(body).hexdigest()
        size = str(repo.sizes.get(file, len(body)))
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "X-Linked-Size": size, "X-Linked-Etag": etag}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None or self.hub.ignores_ranges:
            return self._send(200, {**headers, "Accept-Ranges": "bytes"}, body)
        start, stop = int(asked[1]), min(int(asked[2] or len(body) - 1), len(body) - 1)
        headers["Content-Range"] = f"bytes {start}-{stop}/{len(body)}"
        return self._send(206, headers, body[start : stop + 1])

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        extra = {"X-Error-Code": code, "X-Error-Message": HTTPStatus(status).phrase} if code else {}
        self._send(status, {**(headers or {}), **extra}, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut_after
        if cut is not None and len(body) > cut and self.hub.cut_times > 0:
            self.hub.cut_times -= 1
            self.wfile.write(body[:cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        try:
            for at in range(0, len(body), 1 << 16):
                self.hub.n_sent += self.wfile.write(body[at : at + (1 << 16)])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
