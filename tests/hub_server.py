"""A small Hub on loopback, for tests: repositories in memory, with faults that can be switched on.

It answers the requests with which huggingface_hub's client validates a card, creates a repository or branch, asks for
upload modes, uploads large files (LFS: batch, PUT, verify), commits, lists and resolves. The LFS protocol is git-lfs's
batch API; the rest was read from huggingface_hub 2.4. Xet is not supported: clients are asked to do without it.
"""

import hashlib
import json
import re
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from huggingface_hub import close_session, constants, hf_api
from huggingface_hub.utils import _http
from transformers.utils import hub as transformers_hub

TOKEN = "hf_" + "SecretOfTheTests" * 2
LARGE = (".safetensors", ".png", ".bin")
"""Endings of files that go through LFS."""


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str = "") -> str:
        """A new commit on `branch` with these files and no others; its id."""
        oid = hashlib.sha1(f"{branch}{len(self.commits)}{message}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = dict(files), oid
        self.messages.append(message)
        return oid

    def files(self, revision: str = "main") -> dict[str, bytes] | None:
        return self.commits.get(self.branches.get(revision, revision))


class Hub:
    """`url` to reach it at; what it holds; what it was asked; what it is to do wrong."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.puts: Counter[str] = Counter()
        """Whole uploads of a large file, by its SHA-256."""
        self.drop: Callable[[int], bool] = lambda _: False
        """Whether to cut the connection in the middle of a PUT of so many bytes."""
        self.fail: dict[str, int] = {}
        """`METHOD /path` as a pattern: the status to answer with."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def repository(self, name: str) -> Repository:
        repository = self.repositories.setdefault(name, Repository())
        if "main" not in repository.branches:
            repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return repository

    @contextmanager
    def running(self) -> Iterator["Hub"]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running one, which this process takes for the Hub; nobody waits between two tries."""
    with Hub().running() as running:
        home = tmp_path / "hf-home"
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        values = {"ENDPOINT": running.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_DISABLE_XET": True}
        values |= {"HF_HUB_CACHE": str(home / "hub"), "HF_TOKEN_PATH": str(home / "token"), "HF_HUB_OFFLINE": False}
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hf_api.api, "endpoint", running.url)
        monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)  # it keeps its first address
        monkeypatch.setattr(_http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None}))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield running
        close_session()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for the acknowledgement of its headers

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        address = urlsplit(self.path)
        self.address, self.query = unquote(address.path), parse_qs(address.query)
        asked = f"{self.command} {self.address}"
        self.hub.asked.append(asked)
        for pattern, status in self.hub.fail.items():
            if re.search(pattern, asked):
                self._body()
                return self._json({"error": f"no, whatever {self.headers.get('Authorization')} says"}, status)
        for method, pattern, answer in _ROUTES:
            found = re.fullmatch(pattern, self.address)
            if method == self.command.replace("HEAD", "GET") and found:
                return answer(self, *found.groups())
        self._body()
        return self._json({"error": "unknown"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        self._send(json.dumps(value).encode(), status, Content_Type="application/json", **headers)

    def _no(self, status: int, code: str) -> None:
        self._body()
        self._json({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    @property
    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _may_write(self) -> bool:
        if not self._known:
            self._body()
            self._json({"error": "Invalid credentials in Authorization header"}, 401)
        return self._known

    def _found(self, name: str, revision: str) -> tuple[Repository, dict[str, bytes]] | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self._known):
            self._no(401 if not self._known else 404, "RepoNotFound")
        elif repository.files(revision) is None:
            self._no(404, "RevisionNotFound")
        else:
            return repository, repository.files(revision)
        return None

    def whoami(self) -> None:
        if self._may_write():
            self._json({"name": "user", "type": "user", "orgs": []})

    def validate(self) -> None:
        content = json.loads(self._body())["content"]
        try:
            metadata = yaml.safe_load(content.split("---")[1])
        except (yaml.YAMLError, IndexError):
            return self._json({"errors": [{"message": "no YAML"}], "warnings": []}, 400)
        wrong = [f'"{key}" must be a string' for key in ("license",) if not isinstance(metadata.get(key, ""), str)]
        relation = metadata.get("base_model_relation", "adapter")
        if relation not in ("adapter", "finetune", "merge", "quantized"):
            wrong.append(f'"base_model_relation" must not be "{relation}"')
        return self._json({"errors": [{"message": text} for text in wrong], "warnings": []}, 400 if wrong else 200)

    def create(self) -> None:
        if not self._may_write():
            return
        asked = json.loads(self._body())
        name = f"{asked['organization'] or 'user'}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if not name.startswith("user/"):
            return self._json({"error": "You don't have the rights to create a model under this namespace"}, 403)
        if name in self.hub.repositories:
            return self._json(url, 409)
        self.hub.repository(name).private = asked.get("visibility") == "private" or asked.get("private") is True
        return self._json(url)

    def branch(self, name: str, branch: str) -> None:
        if not self._may_write():
            return
        self._body()
        repository = self.hub.repositories[name]
        if branch in repository.branches:
            return self._json({"error": "Reference already exists"}, 409)
        repository.branches[branch] = repository.branches["main"]
        return self._json({})

    def preupload(self, name: str, revision: str) -> None:
        if self._may_write() and (found := self._found(name, revision)):
            files = []
            for file in json.loads(self._body())["files"]:
                path, held = file["path"], found[1].get(file["path"])
                mode = "lfs" if path.endswith(LARGE) else "regular"
                files.append({"path": path, "uploadMode": mode, "shouldIgnore": False})
                files[-1]["oid"] = None if held is None else _oid(path, held)
            self._json({"files": files})

    def batch(self, name: str) -> None:
        if not self._may_write():
            return
        objects = []
        for entry in json.loads(self._body())["objects"]:
            if entry["oid"] not in self.hub.stored:
                upload = {"href": f"{self.hub.url}/storage/{entry['oid']}"}
                verify = {"href": f"{self.hub.url}/{name}.git/info/lfs/verify"}
                entry["actions"] = {"upload": upload, "verify": verify}
            objects.append(entry)
        self._json({"objects": objects, "transfer": "basic"})

    def put(self, oid: str) -> None:
        size = int(self.headers["Content-Length"])
        if self.hub.drop(size):
            self.rfile.read(size // 2)
            self.close_connection = True
            self.connection.close()
            return
        content = self.rfile.read(size)
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.stored[oid] = content
        self.hub.puts[oid] += 1
        self._send(b"")

    def verify(self, _: str) -> None:
        if self._may_write():
            asked = json.loads(self._body())
            self._json({}, 200 if len(self.hub.stored.get(asked["oid"], b"")) == asked["size"] else 404)

    def commit(self, name: str, revision: str) -> None:
        if not (self._may_write() and (found := self._found(name, revision))):
            return
        repository, files = found[0], dict(found[1])
        message = ""
        for line in self._body().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
            else:
                files.pop(value["path"])
        oid = repository.commit(revision, files, message)
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})

    def info(self, name: str, revision: str | None = None) -> None:
        if found := self._found(name, revision or "main"):
            repository, files = found
            sha = repository.branches.get(revision or "main", revision)
            siblings = [{"rfilename": path} for path in files]
            known = {"_id": "1", "id": name, "modelId": name, "sha": sha, "private": repository.private}
            self._json({**known, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, name: str, revision: str, folder: str | None) -> None:
        if found := self._found(name, revision):
            inside = {path: held for path, held in found[1].items() if path.startswith(folder or "")}
            if not inside:
                return self._no(404, "EntryNotFound")
            rows = []
            for path, held in inside.items():
                rows.append({"type": "file", "path": path, "size": len(held), "oid": _oid(path, held)})
                if path.endswith(LARGE):
                    rows[-1]["lfs"] = {"oid": _oid(path, held), "size": len(held), "pointerSize": 130}
            self._json(rows)
        return None

    def resolve(self, name: str, revision: str, path: str) -> None:
        if found := self._found(name, revision):
            held = found[1].get(path)
            if held is None:
                return self._no(404, "EntryNotFound")
            sha = found[0].branches.get(revision, revision)
            oid = f'"{_oid(path, held)}"'
            self._send(held, ETag=oid, X_Repo_Commit=sha, X_Linked_Etag=oid, X_Linked_Size=str(len(held)))
        return None


def _oid(path: str, content: bytes) -> str:
    """SHA-256 of a large file, git's SHA-1 of another."""
    if path.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_NAME, _REVISION = r"([^/]+/[^/]+)", r"([^/]+|refs/\w+/\d+)"
_ROUTES = (
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", f"/api/models/{_NAME}/branch/(.+)", _Handler.branch),
    ("POST", f"/api/models/{_NAME}/preupload/(.+)", _Handler.preupload),
    ("POST", f"/{_NAME}.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/storage/([0-9a-f]{64})", _Handler.put),
    ("POST", f"/{_NAME}.git/info/lfs/verify", _Handler.verify),
    ("POST", f"/api/models/{_NAME}/commit/(.+)", _Handler.commit),
    ("GET", f"/api/models/{_NAME}", _Handler.info),
    ("GET", f"/api/models/{_NAME}/revision/(.+)", _Handler.info),
    ("GET", f"/api/models/{_NAME}/tree/{_REVISION}(?:/(.+))?", _Handler.tree),
    ("GET", f"/{_NAME}/resolve/{_REVISION}/(.+)", _Handler.resolve),
)
