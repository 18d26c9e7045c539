"""Tests of toka chat: on a terminal (Python's pty, read by the terminal emulator pyte) and on a pipe. Run through test/run.sh."""
import json
import os
import pty
import re
import select
import signal
import subprocess
import time

import pytest

from scripted import write_model

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKA = os.environ.get("TOKA_BINARY") or os.path.join(ROOT, "toka")
PROBLEM = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"
OTHER = PROBLEM.replace("12", "20")
pyte = pytest.importorskip("pyte")


class Terminal:
    """A program on a terminal of 60 x 24; `screen` shows what the user sees."""

    def __init__(self, home, *args, columns=60, **env):
        self.screen = pyte.HistoryScreen(columns, 24, history=1000)
        self.stream, self.raw = pyte.ByteStream(self.screen), b""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("TOKA_", "XDG_"))}
        clean = {**clean, "TOKA_DEVICE": "cpu", "HOME": str(home), "TERM": "xterm-256color", "LINES": "24", "COLUMNS": str(columns), **env}
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.chdir(ROOT)
            subprocess.run(["stty", "cols", str(columns), "rows", "24"], check=False)
            os.execve(TOKA, [TOKA, *args], clean)

    def read(self, seconds=0.05):
        while select.select([self.fd], [], [], seconds)[0]:
            try:
                chunk = os.read(self.fd, 65536)
            except OSError:
                return False
            if not chunk:
                return False
            self.raw += chunk
            self.stream.feed(chunk)
        return True

    def lines(self):
        return [line.rstrip() for line in self.screen.display]

    def wait(self, what, seconds=20):
        """Waits until a line of the screen matches, then until it stays as it is."""
        end = time.time() + seconds
        while not (re.search(what, "\n".join(self.lines()), re.M) and self.quiet()):
            assert time.time() < end, "\n".join(self.lines())
            self.read()
        return self

    def quiet(self):
        before = len(self.raw)
        self.read(0.1)
        return len(self.raw) == before

    def type(self, keys):
        os.write(self.fd, keys.encode() if isinstance(keys, str) else keys)
        return self

    def end(self, seconds=20):
        end = time.time() + seconds
        while self.read() and time.time() < end:
            pass
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


READY = r"^> $|^>$"


def test_a_conversation(tmp_path):
    t = Terminal(tmp_path, "chat")
    t.wait(READY)
    assert t.lines()[0] == "embedded: /help lists the commands, Ctrl-D ends."
    t.type(PROBLEM + "\r").wait(r"19\.\s*$").wait(READY)
    assert "prompt" not in "\n".join(t.lines()).replace(PROBLEM, "")  # statistics on request
    t.type("/stats\r").wait(r"prompt \d+ tokens, generated \d+ tokens")
    t.type("1\x1b\r2\n3\\\r4").wait("> 1\n  2\n  3\n  4$").type("\x03").wait(READY)  # Alt-Enter, Ctrl-J and a backslash: more lines
    t.type("\x04")
    assert t.end() == 0 and t.raw.endswith(b"\r\n") and t.lines()[t.screen.cursor.y] == ""  # the shell's prompt has its own line


def test_quotes_begin_and_end_several_lines(tmp_path):
    t = Terminal(tmp_path, "chat", "-q").wait(READY)
    t.type('"""Tom has\r').wait('> """Tom has\n *$').type('/help apples.\r\r').type('Go"""\r')
    t.wait(READY).type(f"/save {tmp_path}/a.json\r").wait("saved in").type("/clear\r").wait("begins again")
    said = json.loads((tmp_path / "a.json").read_text())["messages"]
    assert [m["role"] for m in said] == ["user", "assistant"] and said[0]["content"] == "Tom has\n/help apples.\n\nGo"
    t.type('"""one line"""\r').wait(READY).type(f"/save {tmp_path}/b.json\r").wait("b.json")
    assert json.loads((tmp_path / "b.json").read_text())["messages"][0]["content"] == "one line"
    t.type('"""\r \r"""\r').wait(READY).type('"""a\r').wait("a$").type("\x03").wait(READY)  # blank: not sent; Ctrl-C drops it
    t.type(f"/save {tmp_path}/c.json\r").wait("c.json").type("/help\r").wait('Three quotation marks').type("\x04")
    assert t.end() == 0 and (tmp_path / "c.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_editing_is_what_the_screen_shows(tmp_path):
    t = Terminal(tmp_path, "chat", "-q", columns=20)
    t.wait(READY).type("hello wörld").wait("> hello wörld")
    t.type("\x1b[D\x1b[D\x1b[DX").wait("> hello wöXrld")
    assert (t.screen.cursor.x, t.screen.cursor.y) == (11, 0)
    t.type("\x01\x1b[CY\x05!").wait("> hYello wöXrld!")
    t.type(" and more words than a row").wait(r"> hYello wöXrld! and\n more words than a r\now")
    t.type("\x01")
    t.quiet()
    assert (t.screen.cursor.x, t.screen.cursor.y) == (2, 0)
    t.type("\x05\x15").wait(r"\A> *\n\Z|\A>\s*\Z")
    t.type("\x1b[200~first\nsecond \U0001F642\x1b[201~").wait("> first\n  second \U0001F642")
    t.type("\x1b[A\x05!").wait("> first!\n  second")
    t.type("\x1b[B\x05\x17\x17").wait("> first!$")
    t.type("\x03").wait(READY).type("\x03").wait("Ctrl-D or /exit ends")
    # exactly a full row, then one more
    t.type("a" * 18).wait("> " + "a" * 18)
    t.type("b").wait("> " + "a" * 18 + "\nb$")
    t.type("\x7f\x7fc").wait("> " + "a" * 17 + "c")
    t.type("\x03\x04")
    assert t.end() == 0


def test_history_across_runs(tmp_path):
    t = Terminal(tmp_path, "chat", "-q")
    t.wait(READY).type("/set top_p 0.9\r").wait("top_p is 0.9").type("/clear\r").wait("begins again")
    t.type("\x1b[A\x1b[A").wait("> /set top_p 0.9").type("\x1b[B").wait("> /clear").type("\x03\x04")
    assert t.end() == 0
    t = Terminal(tmp_path, "chat", "-q")
    t.wait(READY).type("\x1b[A").wait("> /clear").type("\x1b[A").wait("> /set top_p 0.9")
    t.type("\x08" * 40 + "\x04")
    assert t.end() == 0
    path = tmp_path / ".local/state/toka/history"
    assert [json.loads(line) for line in path.read_text().splitlines()] == ["/set top_p 0.9", "/clear"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_ends_the_answer_only(tmp_path):
    t = Terminal(tmp_path, "chat", "--temp", "3", "--ignore-eos", "-n", "1000", "-q")
    for _ in range(2):
        t.wait(READY).type("Tom\r")
        time.sleep(0.15)
        t.type("\x03").wait(READY)
    t.type("/stats\r").wait("generated")
    assert int(re.search(r"generated (\d+) tokens", "\n".join(t.lines()))[1]) < 1000
    t.type("/bye\r")
    assert t.end() == 0


def test_signals_and_the_end_of_the_terminal(tmp_path):
    t = Terminal(tmp_path, "chat", "-q").wait(READY)
    os.kill(t.pid, signal.SIGTERM)
    assert t.end() == 130 and t.raw.endswith(b"\x1b[?2004l\r\n")
    t = Terminal(tmp_path, "chat", "-q").wait(READY).type("abc")
    t.quiet()
    os.close(t.fd)
    assert os.waitstatus_to_exitcode(os.waitpid(t.pid, 0)[1]) in (0, 130)


def test_commands(tmp_path):
    t = Terminal(tmp_path, "chat", "--system", "Be brief.", columns=120)
    t.wait(READY).type("/help\r").wait("/regen .*seed").wait(READY)
    t.type("/hlp\r").wait("did you mean /help")
    t.type("/set temprature 1\r").wait("toka: /set temprature: not a value that /set changes; did you mean /set temperature")
    t.type("/set top_q 1\r").wait("/set top_q: .*did you mean /set top-p").type("/set\r").wait("toka: /set NAME VALUE: temp, top-p, ")
    t.type("/set temperature x\r").wait("temperature: 'x' is not a number").type("/set temperature -1\r").wait("toka: .*temperature")
    t.type("/set temperature\r").wait(r"/set temperature VALUE, as --temp").type("/load README.md\r").wait("README.md: not a conversation")
    t.type("/set temperature=0.5\r").wait("temperature is 0.5").type("/set parameter top_k 5\r").wait("top_k is 5")
    t.type("/set stop x\r").wait("toka: /set stop: not a value that /set changes: temp, top-p, ")
    t.type("/set seed 1 2\r").wait("toka: /set seed 1: 2: a second value").type("/bye x\r").wait("toka: /bye x: it takes nothing behind its name")
    t.type("/stats\r").wait("toka: /stats: there is no answer yet").type("/clear\r").wait("begins again").type("/?\r").wait("/regen .*seed").wait(READY)
    t.type("/regen\r").wait("no turn to answer again").type("/load /none\r").wait("/none: No such file")
    t.type("/set temperature 2\r").wait("temperature is 2").type("Tom has 3 apples.\r").wait(READY)
    t.type("/save talk.json\r".replace("talk", str(tmp_path / "talk"))).wait("saved in")
    first = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m["role"] for m in first] == ["system", "user", "assistant"] and first[0]["content"] == "Be brief."
    t.type("/regen\r").wait(READY).type(f"/save {tmp_path}/again.json\r").wait("again.json")
    again = json.loads((tmp_path / "again.json").read_text())["messages"]
    assert again[:2] == first[:2] and again[2] != first[2]
    t.type("/system\r").wait("no system message").type("/clear\r").wait("begins again")
    t.type(f"/load {tmp_path}/talk.json\r").wait("3 messages").type(f"/save {tmp_path}/third.json\r").wait("third.json")
    assert json.loads((tmp_path / "third.json").read_text())["messages"] == first
    t.type("/system\r").wait(r"talk\.json[\s\S]*no system message").type(f"/save {tmp_path}/fourth.json\r").wait("fourth.json")
    assert json.loads((tmp_path / "fourth.json").read_text())["messages"] == first[1:]
    t.type(" /etc is a folder\r").wait(READY).type("/exit\r")
    assert t.end() == 0


def test_a_terminal_without_escape_sequences(tmp_path):
    """As TERM=dumb says: commands and Ctrl-C are those of other terminals."""
    t = Terminal(tmp_path, "chat", TERM="dumb", columns=120).wait(READY)
    t.type("/help\r").wait("/regen .*seed").wait(READY).type("/stats\r").wait("toka: /stats: there is no answer yet")
    t.type("Tom \x03").wait("Ctrl-D or /exit ends").type(PROBLEM + "\r").wait(r"19\.\s*$").wait(READY).type("/stats\r").wait(r"generated \d+ tokens")
    t.type("/exit\r")
    assert t.end() == 0 and b"\x1b" not in t.raw and b"Alt-Enter" not in t.raw
    assert not (tmp_path / ".local").exists()


# ---- Reasoning and tool calls: models whose answers are scripted ----

TOOLS = [{"type": "function", "function": {"name": "get_time"}}]
CALL = '{"name": "get_time", "arguments": {"zone": "UTC"}}'
MODELS = {  # template, special tokens, answers
    "qwen": ("{# <tool_call> <think> </think> #}{{ tools | length if tools }}", [],
             {"sum": "<think>\nAdd them.\n</think>\n\nIt is 7.", "call": "Look:\n<tool_call>" + CALL.replace('": ', '":') + "</tool_call>"}),
    "mistral": ("{# [TOOL_CALLS][ARGS] [THINK][/THINK] #}", ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
                {"call": "[TOOL_CALLS]get_time[ARGS]{\"zone\": \"UTC\"}", "sum": "[THINK]Add them.[/THINK]It is 7."}),
    "gpt": ("{# <|channel|> <|message|> #}{% for m in messages %}{% if '<|channel|>' in m.content %}{{ raise_exception('a channel') }}{% endif %}"
            "{% endfor %}", ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"],
            {"sum": "<|channel|>analysis<|message|>Add them.<|end|><|start|>assistant<|channel|>final<|message|>It is 7."})}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    for name, (template, special, scripts) in MODELS.items():
        write_model(str(folder / name), scripts, template, special)
    (folder / "tools.json").write_text(json.dumps({"messages": [], "tools": TOOLS}))
    return folder


def test_reasoning_and_calls_are_dim(models, tmp_path):
    """Whatever form the model writes them in, they stand between the same tags."""
    for name in MODELS:
        t = Terminal(tmp_path, "chat", str(models / name), "-q", columns=100)
        t.wait(READY).type("sum\r").wait("It is 7").wait(READY)
        assert re.search(rb"\x1b\[2m<think>\r\n\r?\n?Add them.(\r\n)*</think>\x1b\[22m\r\n\r\n(\r\n)*It is 7\.", t.raw), (name, t.raw)
        t.type("sum\r").wait("(?s)It is 7.*It is 7").wait(READY)  # the history is one that the template takes
        if "call" in MODELS[name][2]:
            t.type(f"/load {models}/tools.json\r").wait("0 messages").type("call\r").wait("</tool_call>").wait(READY)
            assert b"\x1b[2m<tool_call>\r\n" + CALL.encode() in t.raw.replace(b'{"zone":"', b'{"zone": "'), (name, t.raw)
            assert b"</tool_call>\x1b[22m" in t.raw
            t.type(f"/save {tmp_path}/talk.json\r").wait("saved in")
            assert json.loads((tmp_path / "talk.json").read_text())["tools"] == TOOLS
        t.type("\x04")
        assert t.end() == 0
    t = Terminal(tmp_path, "chat", str(models / "qwen"), "-q", NO_COLOR="1")
    t.wait(READY).type("sum\r").wait("It is 7").type("\x04")
    assert t.end() == 0 and b"\x1b[2m" not in t.raw and b"<think>" in t.raw


def test_one_answer_of_gpt_oss_is_readable(models):
    r = run("-m", str(models / "gpt"), "-q", "-p", "sum")
    assert r.stdout == b"<think>\nAdd them.</think>\n\nIt is 7.\n"
    assert run("-m", str(models / "qwen"), "-q", "-p", "sum").stdout.decode() == MODELS["qwen"][2]["sum"] + "\n"  # as the model wrote it


# ---- On a pipe ----

def run(*args, stdin="", **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}
    return subprocess.run([TOKA, *args], input=stdin.encode(), capture_output=True, timeout=60, cwd=ROOT,
                          env={**clean, "TOKA_DEVICE": "cpu", **env})


def test_lines_of_a_pipe():
    want = run("--chat", stdin=f"{PROBLEM}\n{OTHER}\n")
    for args in (["chat"], ["chat", "test/model"], ["chat", "-m", "test/model"]):
        r = run(*args, stdin=f"{PROBLEM}\n{OTHER}\n")
        assert r.returncode == 0 and r.stdout == want.stdout
        assert len(re.findall(r"prompt \d+ tokens", r.stderr.decode())) == 2
    assert run("chat", "-p", PROBLEM, stdin=OTHER).stdout == want.stdout
    assert run("chat", "--raw").returncode == 1 and run("chat", "--samples", "2").returncode == 1
    slash = run("chat", "-q", stdin="/help\n")  # a line of a pipe is a turn, whatever it begins with
    assert slash.returncode == 0 and slash.stdout and not slash.stderr
