"""A hub like huggingface.co on loopback: models made of folders, served by the same protocol. Large files (LFS) come from a
second server, another host as far as tokens are concerned."""
import hashlib
import json
import os
import re
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LFS_NAMES = (".safetensors", ".bin", "tokenizer.json")


def sha1_of(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repo:
    """files: {path: bytes}. gated and private: as on the hub."""

    def __init__(self, files, gated=False, private=False):
        self.gated, self.private, self.commits, self.refs = gated, private, {}, {}
        self.commit(files)

    def commit(self, files, ref="main"):
        sha = hashlib.sha1(repr(sorted((k, hashlib.sha256(v).hexdigest()) for k, v in files.items())).encode()).hexdigest()
        self.commits[sha], self.refs[ref] = dict(files), sha
        return sha

    def find(self, revision):
        return self.refs.get(revision, revision if revision in self.commits else None)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status, code, text):
        self.answer(status, json.dumps({"error": text}).encode(), X_Error_Code=code, X_Error_Message=text)

    def send_file(self, data, path, **headers):
        """The bytes of a file, from the offset that the client wants; `hub.faults` says what goes wrong."""
        hub = self.server.hub
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(wanted[1]) if wanted and not hub.no_ranges else 0
        if first:
            headers["Content_Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        body = bytes(data[first:])
        if path in hub.corrupt:
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_response(206 if first else 200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if path in hub.together:
            try:
                hub.together[path].wait()
            except threading.BrokenBarrierError:
                pass  # the test sees that the barrier is broken
        cut = hub.cut_after.get(path)
        if cut and hub.cuts_left > 0:
            hub.cuts_left -= 1
            body = body[:cut]
        for at in range(0, len(body), 65536):
            self.wfile.write(body[at:at + 65536])
            hub.sent += len(body[at:at + 65536])
            while hub.hold_after is not None and hub.sent >= hub.hold_after:
                time.sleep(0.01)
        self.wfile.flush()
        if cut:
            self.close_connection = True

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, url = self.server.hub, urllib.parse.urlparse(self.path)
        path = urllib.parse.unquote(url.path)
        hub.requests.append((self.server.is_cdn, self.command, path, self.headers.get("Authorization"), self.headers.get("Range")))
        if self.server.is_cdn:
            data, name = hub.by_hash[path.split("/")[-1]]
            return self.send_file(data, name)
        if hub.busy_left > 0:
            hub.busy_left -= 1
            return self.answer(429, b"slow down", Retry_After="1")
        if path.startswith("/moved/"):
            return self.answer(307, b"Temporary Redirect", Location="/" + path[len("/moved/"):])
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)/?", path)
        if found:
            return self.list_files(*found.groups())
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if found:
            return self.resolve(*found.groups())
        return self.error(404, "RepoNotFound", "Repository not found")

    def find(self, name, revision, needs_access):
        hub = self.server.hub
        repo, token = hub.repos.get(name), self.headers.get("Authorization")
        if token not in (None, *("Bearer " + t for t in hub.tokens)):
            self.answer(401, b"{}", X_Error_Message="Invalid credentials in Authorization header")
        elif not repo or (repo.private and not token):
            self.error(404 if token else 401, "RepoNotFound", "Repository not found")
        elif needs_access and repo.gated and (not token or repo.gated == "refused"):
            self.error(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted")
        elif not repo.find(revision):
            self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo, repo.find(revision)
        return None, None

    def list_files(self, name, kind, revision):
        repo, sha = self.find(name, revision, needs_access=False)
        if not repo:
            return
        hub, files = self.server.hub, []
        for path, data in sorted(repo.commits[sha].items()):
            is_lfs = path.endswith(LFS_NAMES)
            size = hub.claimed_size.get(path, len(data))
            blob = sha1_of(data)
            lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 130}
            if kind == "revision":
                files.append({"rfilename": path, "size": size, "blobId": blob, **({"lfs": lfs} if is_lfs else {})})
            else:
                files.append({"type": "file", "path": path, "size": size, "oid": blob,
                              **({"lfs": {**lfs, "oid": lfs["sha256"]}} if is_lfs else {})})
        files += [{"rfilename": p, "size": 1, "blobId": "0" * 40} for p in hub.extra_names if kind == "revision"]
        body = files if kind == "tree" else {"id": name, "modelId": name, "sha": sha, "siblings": files, "private": False,
                                             "gated": bool(repo.gated), "downloads": 0, "likes": 0, "tags": []}
        self.answer(200, json.dumps(body).encode(), Content_Type="application/json")

    def resolve(self, name, revision, path):
        repo, sha = self.find(name, revision, needs_access=True)
        if not repo:
            return
        hub, data = self.server.hub, repo.commits[sha].get(path)
        if data is None:
            return self.error(404, "EntryNotFound", "Entry not found")
        etag = sha1_of(data)
        if not path.endswith(LFS_NAMES):
            return self.send_file(data, path, X_Repo_Commit=sha, ETag=f'"{etag}"')
        sha256 = hashlib.sha256(data).hexdigest()
        hub.by_hash[sha256] = data, path
        body = b"Found. Redirecting to another host"  # as on the hub: a redirect has a body
        self.answer(302, body, Location=f"http://127.0.0.1:{hub.cdn.server_port}/{name}/{sha256}", X_Repo_Commit=sha,
                    X_Linked_Etag=f'"{sha256}"', X_Linked_Size=str(len(data)))


class FakeHub:
    def __init__(self):
        self.repos, self.tokens, self.requests, self.by_hash = {}, ["hf_right"], [], {}
        self.reset()
        self.main, self.cdn = (ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2))
        for server in (self.main, self.cdn):
            server.hub, server.is_cdn, server.daemon_threads = self, server is self.cdn, True
            threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.main.server_port}"

    def reset(self):
        """Nothing goes wrong from now on."""
        self.corrupt, self.cut_after, self.cuts_left, self.hold_after, self.sent = set(), {}, 10**9, None, 0
        self.no_ranges, self.busy_left, self.claimed_size, self.extra_names = False, 0, {}, []
        self.together = {}  # {path: barrier}: a file is sent when as many were asked for as the barrier has parties
        self.requests.clear()

    def close(self):
        for server in (self.main, self.cdn):
            server.shutdown()
            server.server_close()


def read_folder(folder):
    """{path: bytes} of all files in a folder."""
    files = {}
    for base, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(base, name), "rb") as f:
                files[os.path.relpath(os.path.join(base, name), folder)] = f.read()
    return files
