"""Tests of the status page at / in headless Chromium, controlled through its debugging pipe. Skipped without Chromium.
PAGE_SCREENSHOT=FILE saves screenshots FILE-dark.png and FILE-light.png. Run through test/run.sh."""
import base64
import json
import os
import shutil
import subprocess
import threading
import time

import pytest

from server import Server

CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome", "chrome"])), None)


class Browser:
    """One page. Messages are JSON objects, each followed by a NUL, on descriptors 3 and 4 of the browser."""

    def __init__(self, folder):
        to_browser, self.write = os.pipe()
        self.read, from_browser = os.pipe()
        command = f"exec {CHROMIUM} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe " \
              f"--user-data-dir={folder} about:blank 3<&{to_browser} 4>&{from_browser} 2>/dev/null"
        self.p = subprocess.Popen(["bash", "-c", command], pass_fds=(to_browser, from_browser))
        os.close(to_browser), os.close(from_browser)
        self.n, self.got, self.session, self.events = 0, b"", None, []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t for t in targets if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")

    def call(self, method, **params):
        self.n += 1
        message = {"id": self.n, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.got:
                piece = os.read(self.read, 65536)
                assert piece, "the browser ended"
                self.got += piece
            line, self.got = self.got.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("id") == self.n:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def js(self, expression):
        r = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in r, r
        return r["result"].get("value")

    def wait(self, expression, seconds=100):
        end = time.time() + seconds
        while not (v := self.js(expression)):
            assert time.time() < end, (expression, self.js("document.body.innerText"))
            time.sleep(0.05)
        return v

    def errors(self):
        """The exceptions and console errors so far."""
        return [e for e in self.events if e.get("method") == "Runtime.exceptionThrown" or
                (e.get("method") == "Log.entryAdded" and e["params"]["entry"]["level"] == "error")]

    def close(self):
        self.p.terminate()
        self.p.wait()
        os.close(self.write), os.close(self.read)


@pytest.fixture
def browser(tmp_path):
    if not CHROMIUM:
        pytest.skip("no Chromium")
    b = Browser(tmp_path / "profile")
    yield b
    b.close()


def url(server):
    return "http://127.0.0.1:%d/" % server.address[1]


def test_page(tmp_path, browser):
    with Server(files=str(tmp_path / "files")) as s:
        text = s.get("/").body.decode()
        assert s.get("/").headers["content-type"] == "text/html; charset=utf-8" and len(text) < 10_000
        assert not [x for x in ("http:", "https:", "//cdn", "src=", "@import") if x in text]  # the page loads nothing from outside
        browser.call("Emulation.setDeviceMetricsOverride", width=900, height=1000, deviceScaleFactor=1, mobile=False)
        browser.call("Page.navigate", url=url(s))
        browser.wait("document.getElementById('state')?.textContent == 'ready'")
        assert browser.js("document.getElementById('model').textContent") == "embedded"

        # after a failed request the page asks for the model again
        browser.js("{ const real = fetch; window.fetch = (at, o) => at != 'metrics' ? real(at, o) : "
                   "(window.fetch = real, Promise.reject(Error('gone'))) } model = 'another'")
        browser.wait("model == 'embedded'")

        # the answer to a prompt streams into the page
        browser.js("document.forms[0].requestSubmit()")
        browser.wait("document.getElementById('answer').textContent.includes('The answer is 12.')")
        browser.wait("/^\\d+ \\+ \\d+ tokens, [\\d.]+ s$/.test(document.getElementById('usage').textContent)")
        # A long answer can be stopped, and its request is then cancelled. A script in the page stops it at the first text: a call from
        # here might come after its end.
        browser.js("document.forms[0].max_tokens.value = 900; document.forms[0].temperature.value = 3; "
                   "document.forms[0].prompt.value = '<b>Tom</b>'; const plain = fetch; "
                   "window.fetch = (at, o) => plain(at, o.body ? { ...o, body: o.body.replace('{', '{\"ignore_eos\":true,') } : o); "
                   "new Promise(done => { const box = document.getElementById('answer'), watch = new MutationObserver(() => { "
                   "  if (!box.textContent) return; watch.disconnect(); window.fetch = plain; "
                   "  const button = document.querySelector('button').textContent; document.forms[0].requestSubmit(); done(button); }); "
                   "  watch.observe(box, { childList: true, characterData: true, subtree: true }); document.forms[0].requestSubmit(); })"
                   ".then(button => window.stopped = button)")
        assert browser.js("stopped") == "Stop"
        browser.wait("document.querySelector('button').textContent == 'Run'")
        s.wait_metric("num_requests_running", 0)

        # the tiles and the plot show the load
        seen = threading.Event()

        def ask():
            while not seen.is_set():
                s.post("/v1/completions", {"prompt": "Tom", "n": 30, "max_tokens": 200, "temperature": 2, "ignore_eos": True})

        load = threading.Thread(target=ask, daemon=True)
        load.start()
        browser.wait("Number(document.querySelector('#tiles b').textContent) > 0")
        browser.wait("Number(document.querySelectorAll('#tiles b')[2].textContent.replaceAll(',', '')) > 0")
        browser.wait("document.getElementById('out').getAttribute('points').split(' ').length >= 5")
        seen.set()
        for scheme in ("dark", "light"):
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            color = browser.js("getComputedStyle(document.body).color")
            assert (color == "rgb(255, 255, 255)") == (scheme == "dark")
            if os.environ.get("PAGE_SCREENSHOT"):
                picture = base64.b64decode(browser.call("Page.captureScreenshot")["data"])
                open(f"{os.environ['PAGE_SCREENSHOT']}-{scheme}.png", "wb").write(picture)
        assert browser.js("document.documentElement.scrollWidth <= innerWidth")
        browser.call("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True)
        assert browser.js("document.documentElement.scrollWidth <= innerWidth")  # nor on a phone
        load.join()
        assert browser.errors() == []


def test_page_shows_batches_and_asks_for_a_key(tmp_path, browser):
    with Server("--api-key", "secret", files=str(tmp_path / "files")) as s:
        form = b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; name=file; " \
               b"filename=<i>x\r\n\r\n%s\r\n--b--" % json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions",
                                                                "body": {"prompt": "Tom", "max_tokens": 2}}).encode()
        key = {"Authorization": "Bearer secret"}
        f = s.post("/v1/files", form, Content_Type="multipart/form-data; boundary=b", **key).json()
        s.post("/v1/batches", {"input_file_id": f["id"], "endpoint": "/v1/completions", "completion_window": "24h"}, **key)
        browser.call("Page.navigate", url=url(s))
        browser.wait("document.getElementById('keys')?.hidden == false")
        browser.wait("document.getElementById('state').textContent.toLowerCase().includes('key')")  # shown a moment later
        browser.js("document.forms[0].key.value = 'secret'; document.forms[0].key.onchange()")
        browser.wait("document.getElementById('state').textContent == 'ready'")
        browser.wait("document.querySelector('#batches td:nth-child(2)')?.textContent == 'completed'")
        browser.wait("[...document.querySelectorAll('#batches td')].slice(2).map(x => x.textContent).join() == '1,0,1'")
