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
        """The exceptions and console errors so far, but for the 503 of a server that loads its model."""
        return [e for e in self.events if e.get("method") == "Runtime.exceptionThrown" or
                (e.get("method") == "Log.entryAdded" and e["params"]["entry"]["level"] == "error" and
                    "status of 503" not in e["params"]["entry"]["text"])]

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
        assert s.get("/").headers["content-type"] == "text/html; charset=utf-8" and len(text) < 30_000
        assert not [x for x in ("http:", "https:", "//cdn", "src=", "@import") if x in text]  # the page loads nothing from outside
        browser.call("Emulation.setDeviceMetricsOverride", width=900, height=1000, deviceScaleFactor=1, mobile=False)
        browser.call("Page.navigate", url=url(s))
        browser.wait("document.getElementById('state')?.textContent == 'ready'")
        assert browser.js("document.getElementById('model').textContent") == "embedded"
        assert browser.js("document.getElementById('base').textContent") == url(s) + "v1"
        assert browser.js("getComputedStyle(document.getElementById('state'), '::before').color") == "rgb(22, 163, 74)"

        # after a failed request the page asks for the model again
        browser.js("{ const real = fetch; window.fetch = (at, o) => at != 'metrics' ? real(at, o) : "
                   "(window.fetch = real, Promise.reject(Error('gone'))) } model = 'another'")
        browser.wait("model == 'embedded'")

        # the answer to a prompt streams into the page
        browser.js("document.forms[0].temperature.value = 0; document.forms[0].requestSubmit()")
        browser.wait("document.querySelector('.assistant')?.textContent.includes('The answer is 12.')")
        browser.wait("/^\\d+ \\+ \\d+ tokens, [\\d.]+ s/.test(document.getElementById('usage').textContent)")
        # A long answer can be stopped, and its request is then cancelled. A script in the page stops it at the first text: a call from
        # here might come after its end.
        browser.js("document.forms[0].max_tokens.value = 900; document.forms[0].temperature.value = 3; "
                   "document.forms[0].prompt.value = '<b>Tom</b>'; const plain = fetch; "
                   "window.fetch = (at, o) => plain(at, o.body ? { ...o, body: o.body.replace('{', '{\"ignore_eos\":true,') } : o); "
                   "new Promise(done => { const box = document.getElementById('turns'), watch = new MutationObserver(() => { "
                   "  if (!box.lastChild.textContent) return; watch.disconnect(); window.fetch = plain; "
                   "  const button = document.querySelector('button.main').textContent; document.forms[0].requestSubmit(); done(button); }); "
                   "  document.forms[0].requestSubmit(); watch.observe(box, { childList: true, characterData: true, subtree: true }); })"
                   ".then(button => window.stopped = button)")
        assert browser.js("stopped") == "Stop"
        browser.wait("document.querySelector('button.main').textContent == 'Send'")
        s.wait_metric("num_requests_running", 0)
        assert browser.js("[...document.querySelectorAll('.user')].at(-1).textContent") == "<b>Tom</b>"  # text, not markup

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
        browser.wait("document.getElementById('area').getBBox().width > 0")
        # the plot has axes and shows values under the pointer; percentiles come from the histograms
        assert browser.js("[...document.querySelectorAll('#axes text')].map(t => t.textContent).slice(-2).join()") == "-30 s,now"
        browser.js("{ const figure = document.querySelector('figure'), box = figure.getBoundingClientRect(); "
                   "figure.dispatchEvent(new PointerEvent('pointermove', { clientX: box.right - 2 })) }")
        browser.wait("/^\\d+ s ago: [\\d.,]+ out, [\\d.,]+ prompt$/.test(document.getElementById('tip').textContent)")
        browser.wait("/^[\\d.]+ m?s . [\\d.]+ m?s$/.test(document.querySelectorAll('#tiles b')[6].textContent)")
        assert browser.js("/^version [\\d.]+, up for \\d+ (s|min)$/.test(document.getElementById('about').textContent)")
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
        assert browser.js("[...document.querySelectorAll('#tiles b')].every(b => { b.textContent = '12.5 ms / 384 ms'; return b.scrollWidth <= b.clientWidth && "
                          "b.clientHeight < 40 })")  # a value has one row
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
        browser.js("document.getElementById('key').value = 'secret'; document.getElementById('key').onchange()")
        browser.wait("document.getElementById('state').textContent == 'ready'")
        browser.wait("document.querySelector('#batches td:nth-child(2)')?.textContent == 'completed'")
        browser.wait("[...document.querySelectorAll('#batches td')].slice(2).map(x => x.textContent).join() == '1,0,1'")


CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_page_chats(tmp_path, browser):
    """Turns, regenerate, a new chat, and the command that repeats a request."""
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    with Server("--chat-template", str(template)) as s:
        browser.call("Page.navigate", url=url(s))
        browser.wait("document.getElementById('state')?.textContent == 'ready'")
        browser.js("window.sent = []; const plain = fetch; "
                   "window.fetch = (at, o) => { if (o?.body) sent.push([at, JSON.parse(o.body)]); return plain(at, o) }")

        def send(text):
            browser.js(f"document.forms[0].prompt.value = {json.dumps(text)}; document.forms[0].max_tokens.value = 4; "
                       "document.forms[0].temperature.value = 0; document.forms[0].requestSubmit()")
            browser.wait("!stop")

        def turns():
            return browser.js("[...document.querySelectorAll('.turn')].map(t => t.className)")

        send("Tom has 3 apples.")
        send("And 4 more.")
        assert turns() == ["turn user", "turn assistant"] * 2
        at, body = browser.js("sent[1]")
        assert at == "v1/chat/completions" and [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
        assert body["max_tokens"] == 4 and body["temperature"] == 0
        assert browser.js("document.getElementById('usage').textContent").endswith("cut at the limit of tokens")

        before = browser.js("document.querySelectorAll('.assistant')[1].textContent")
        browser.js("document.getElementById('again').onclick()")
        browser.wait("!stop")
        assert turns() == ["turn user", "turn assistant"] * 2
        assert browser.js("sent[2][1].messages.length") == 3
        assert browser.js("document.querySelectorAll('.assistant')[1].textContent") == before

        browser.js("document.getElementById('curl').onclick()")
        command = browser.js("document.getElementById('command').textContent")
        answer = json.loads(subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout)
        assert answer["choices"][0]["message"]["content"].split() == before.split()

        # a failed answer is shown, and left out of the next request
        browser.js("document.forms[0].temperature.value = 9; document.forms[0].prompt.value = 'x'; "
                   "const real = fetch; window.fetch = () => Promise.reject(Error('gone')); "
                   "document.forms[0].requestSubmit(); window.fetch = real")
        browser.wait("!stop && document.querySelector('.failed')?.textContent == 'gone'")
        send("And 5 more.")
        assert [m["content"] for m in browser.js("sent.at(-1)[1].messages")][::2] == ["Tom has 3 apples.", "And 4 more.", "And 5 more."]

        browser.js("document.getElementById('clear').onclick()")
        assert turns() == [] and browser.js("document.getElementById('usage').textContent") == "" and browser.js("document.getElementById('command').hidden")
        # a setting that is out of range is shown, although the settings are folded; nothing is sent
        n_sent = browser.js("document.querySelector('details').open = false; sent.length")
        browser.js("document.forms[0].prompt.value = 'x'; document.forms[0].temperature.value = -1; document.forms[0].requestSubmit()")
        browser.wait("document.querySelector('form details').open")
        assert browser.js("sent.length") == n_sent and turns() == []
        assert browser.errors() == []


def test_page_shows_markdown_as_elements_of_text(browser):
    """What a model writes becomes elements, and never markup."""
    with Server() as s:
        browser.call("Page.navigate", url=url(s))
        browser.wait("document.getElementById('state')?.textContent == 'ready'")
        text = "# Head\nA **bold** `x < y` and *soft* word\nnext line\n\n- one\n- two <img src=x onerror=alert(1)>\n3. three\n" \
               "```c\nint a; // **not bold**\n```\n<script>alert(1)</script>\n2 * 3 * 4\n***\n> said\n> twice\n\n" \
               "- a\n  1. b\n  2. c\n- d\n\n| x | y |\n|---|:-:|\n| 1 | **2** |\n[a link](https://a.b/c?d) [no](javascript:alert(1))"
        html = browser.js(f"{{ const box = document.createElement('div'); markdown(box, {json.dumps(text)}); box.innerHTML }}")
        assert html == "<h3>Head</h3><p>A <b>bold</b> <code>x &lt; y</code> and <em>soft</em> word<br>next line</p>" \
                       "<ul><li>one</li><li>two &lt;img src=x onerror=alert(1)&gt;</li></ul><ol><li value=\"3\">three</li></ol>" \
                       "<div class=\"code\"><button type=\"button\">Copy</button><pre><code>int a; // **not bold**</code></pre></div>" \
                       "<p>&lt;script&gt;alert(1)&lt;/script&gt;<br>2 * 3 * 4</p><hr><blockquote>said<br>twice</blockquote>" \
                       "<ul><li>a<ol><li value=\"1\">b</li><li value=\"2\">c</li></ol></li><li>d</li></ul>" \
                       "<table><tbody><tr><th>x</th><th>y</th></tr><tr><td>1</td><td><b>2</b></td></tr></tbody></table>" \
                       "<p><a href=\"https://a.b/c?d\" target=\"_blank\" rel=\"noreferrer\">a link</a> [no](javascript:alert(1))</p>"
        copied = browser.js("{ Object.defineProperty(navigator, 'clipboard', { value: undefined }); const box = document.body.appendChild("
                            "document.createElement('div')); code(box, 'x = 1'); box.querySelector('button').click(); getSelection().toString() }")
        assert copied == "x = 1"
        unfinished = browser.js("{ const box = document.createElement('div'); markdown(box, '```py\\nx = 1'); box.innerText }")
        assert "x = 1" in unfinished  # a block of code that still streams
