"""A Hub of a few endpoints on loopback: makes repositories, takes LFS files and commits, and can break halfway."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_thisIsASecretOfTheTests"


@dataclass
class FakeHub:
    """What the server knows and what it saw.

    Attributes:
        breaks: how many uploads of large files to break off.
        refuse: status to answer everything with; 0: serve.
        repos: name -> whether it is private.
        files: content by path, as of the last commit.
        stored: LFS objects by their hash.
        commits: number of commits.
        seen: method and path of every request.
        tokens: Authorization headers seen.
    """

    breaks: int = 0
    refuse: int = 0
    repos: dict[str, bool] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    seen: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def start(self) -> str:
        """Serve until `stop`, and return the address."""
        hub = self

        class Bound(_Handler):
            state = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: FakeHub

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def answer(self, data: Any, status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def note(self) -> bool:
        """Write the request down; false where it was refused."""
        self.state.seen.append(f"{self.command} {self.path}")
        self.state.tokens.add(self.headers.get("Authorization"))
        if self.state.refuse:
            self.read()
            self.answer({"error": "no"}, self.state.refuse)
        return not self.state.refuse

    def read(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        if self.note():
            self.answer({"error": "not here"}, 404)

    def do_POST(self) -> None:
        if not self.note():
            return
        body = self.read()
        if self.path == "/api/repos/create":
            return self.create(json.loads(body))
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            kind = {True: "lfs", False: "regular"}
            modes = [
                {"path": f["path"], "uploadMode": kind[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                for f in files
            ]
            return self.answer({"files": modes})
        if self.path.endswith("/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        if "/commit/" in self.path:
            return self.commit([json.loads(line) for line in body.splitlines()])
        return self.answer({}) if "validate" in self.path or "verify" in self.path else self.answer({}, 404)

    def create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or 'alice'}/{wanted['name']}"
        url = {"url": f"http://{self.headers['Host']}/{name}"}
        if name in self.state.repos:
            return self.answer({"error": "You already created this model repo"} | url, 409)
        self.state.repos[name] = bool(wanted.get("private") or wanted.get("visibility") == "private")
        return self.answer(url)

    def batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for item in wanted["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.state.stored:
                href = f"http://{self.headers['Host']}/store/{item['oid']}"
                entry["actions"] = {"upload": {"href": href}}
            objects.append(entry)
        self.answer({"transfer": "basic", "objects": objects})

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.state.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.state.files[value["path"]] = self.state.stored[value["oid"]]
        self.state.commits += 1
        url = f"http://{self.headers['Host']}/alice/model/commit/1"
        self.answer({"success": True, "commitOid": "1" * 40, "commitUrl": url, "hookOutput": ""})

    def do_PUT(self) -> None:
        if not self.note():
            return
        if self.state.breaks:
            self.state.breaks -= 1
            # Half of it is read, then the line is dead.
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.close_connection = True
            self.connection.close()
            return
        self.state.stored[self.path.rsplit("/", 1)[1]] = self.read()
        self.answer({})
