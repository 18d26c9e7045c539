"""Tests of weights that come over NCCL. A thread here is the trainer, rank 0: it speaks the bytes of PyTorch's TCPStore, and sends tensors through
test/fake_nccl.c, which stands for libnccl.so.2. test/gpu_nccl.py does the same with torch and NCCL on two GPUs. Run through test/run.sh."""
import ctypes
import io
import json
import os
import pickle
import shutil
import socket
import struct
import subprocess
import threading
import time

import pytest

from server import ROOT, Server
from test_rollout import ASKS, DOWN, FORMS, answers, calls, read_tensors, sleep, turned, wake, write_folder, write_quantized

MAGIC = 0x3C85F7CE
TYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}


class ncclUniqueId(ctypes.Structure):  # pickled by its name, as vLLM's
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Store:
    """PyTorch's TCPStore on a free port: `values` by key; `joined` counts init/."""

    def __init__(self):
        self.values, self.changed, self.joined = {}, threading.Condition(), 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.open = self.listener.getsockname()[1], []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                c, _ = self.listener.accept()
            except OSError:
                return
            self.open.append(c)
            threading.Thread(target=self.serve, args=(c,), daemon=True).start()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def serve(self, c):
        f = c.makefile("rb")
        number = lambda form: struct.unpack(form, f.read(struct.calcsize(form)))[0]
        text = lambda: f.read(number("<Q")).decode()
        try:
            assert number("<B") == 0 and number("<I") == MAGIC  # VALIDATE, as the first query
            while True:
                query = number("<B")
                if query == 4:  # ADD
                    key, more = text(), number("<q")
                    assert (key, more) == ("init/", 1)
                    self.joined += more
                    c.sendall(struct.pack("<q", self.joined))
                elif query == 6:  # WAIT
                    keys = [text() for _ in range(number("<Q"))]
                    with self.changed:
                        self.changed.wait_for(lambda: all(k in self.values for k in keys))
                    c.sendall(b"\0")
                else:
                    assert query == 3, query  # GET
                    value = self.values[text()]
                    c.sendall(struct.pack("<Q", len(value)) + value)
        except (struct.error, OSError):
            c.close()

    def close(self):
        self.listener.close()
        for c in self.open:
            c.close()


class Trainer:
    """Rank 0. send() queues the bytes of one broadcast; `asked` has what the server asked for. die: after so many bytes of the next broadcast it dies."""

    def __init__(self, folder, world_size=2, key="/broadcast_from/0/0", pickled=True, value=None):
        self.world_size, self.queue, self.asked, self.die = world_size, [], [], None
        self.path = f"{folder}/nccl{time.monotonic_ns()}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.store = Store()
        name = self.path.encode().ljust(128, b"\0")
        assert len(name) == 128
        self.store.set(key, (pickle.dumps(ncclUniqueId.from_buffer_copy(name)) if pickled else name) if value is None else value)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                self.c, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.rank, args=(self.c,), daemon=True).start()

    def rank(self, c):
        while ask := c.recv(24, socket.MSG_WAITALL):
            op, n_ranks, rank, kind, size = struct.unpack("<4iQ", ask)
            self.asked.append((chr(op), kind, size))
            if n_ranks != self.world_size or (chr(op) == "B" and not self.queue):
                continue  # as NCCL: it waits
            data = self.queue.pop(0) if chr(op) == "B" else bytes(size)
            assert len(data) == size, (len(data), size)
            try:
                c.sendall(data if self.die is None or chr(op) != "B" else data[:self.die])
            except OSError:
                return
            if self.die is not None and chr(op) == "B":
                return c.shutdown(socket.SHUT_RDWR)

    def send(self, *pieces):
        self.queue += pieces

    def info(self, **more):
        return {"master_address": "127.0.0.1", "master_port": self.store.port, "rank_offset": 1, "world_size": self.world_size, "timeout": 20, **more}

    def close(self):
        self.listener.close()
        self.store.close()


class Unpickler(pickle.Unpickler):
    """Finds the two names that the pickle of an id has."""

    def find_class(self, module, name):
        if (module, name) == ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"):
            return ncclUniqueId
        assert (module, name) == ("_ctypes", "_unpickle"), (module, name)
        return super().find_class(module, name)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as c:
        return c.getsockname()[1]


class OldTrl(Trainer):
    """The client of TRL before 1.16: the server has the store, makes the id and is rank 0. This is rank 1, which sends."""

    def __init__(self, s, **more):
        self.s, self.world_size, self.queue, self.asked, self.die, self.n_barriers = s, 2, [], [], None, 0
        self.port = free_port()
        size, _ = calls(s, ("GET", "/get_world_size/", None), ("POST", "/init_communicator/", {
            "host": "0.0.0.0", "port": self.port, "world_size": 2, "client_device_uuid": "GPU-7", **more}))
        assert size["world_size"] == 1
        self.connect()
        ident = Unpickler(io.BytesIO(self.get("broadcast_from/0/0"))).load()
        self.path = bytes(ident.internal).rstrip(b"\0").decode()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        threading.Thread(target=self.serve, daemon=True).start()

    def connect(self):
        self.store = socket.create_connection(("127.0.0.1", self.port), 20)
        self.store.sendall(b"\0" + struct.pack("<I", MAGIC) + b"\x0d" + struct.pack("<I", 77))  # VALIDATE, PING
        assert self.read(4) == struct.pack("<I", 77)
        assert self.ask(4, b"init/", struct.pack("<q", 1), n=8) == struct.pack("<q", 1)  # ADD

    def read(self, n):
        out = self.store.recv(n, socket.MSG_WAITALL)
        assert len(out) == n
        return out

    def ask(self, query, *texts, n=0):
        """Sends a query, and returns n bytes of its answer. The arguments are texts; but ADD's number."""
        out = bytes([query])
        for i, text in enumerate(texts):
            out += text if query == 4 and i else struct.pack("<Q", len(text)) + text
        self.store.sendall(out)
        return self.read(n)

    def get(self, key):
        key = b"/" + key.encode()
        self.store.sendall(b"\x06" + struct.pack("<QQ", 1, len(key)) + key)  # WAIT
        assert self.read(1) == b"\0"
        n, = struct.unpack("<Q", self.ask(3, key, n=8))
        return self.read(n)

    def set(self, key, value):
        self.ask(1, b"/" + key.encode(), value)

    def barrier(self):
        """That of vLLM's StatelessProcessGroup."""
        self.n_barriers += 1
        name = pickle.loads(self.get(f"broadcast_from/0/{self.n_barriers}"))
        self.set(f"arrival_{name}_1", b"1")
        assert self.get(f"arrival_{name}_0") == self.get(f"arrival_{name}_1") == b"1"
        self.set(f"departure_{name}_1", b"1")

    def old_barrier(self):
        """That of vLLM before 0.9: each rank broadcasts a value."""
        self.n_barriers += 1
        pickle.loads(self.get(f"broadcast_from/0/{self.n_barriers}"))
        self.set(f"broadcast_from/1/{self.n_barriers - 1}", pickle.dumps(None))

    def update(self, some, barrier):
        for name, dtype, shape, data in some:
            self.send(data)
            calls(self.s, ("POST", "/update_named_param/", {"name": name, "dtype": f"torch.{dtype}", "shape": shape}))
            barrier()

    def close(self):
        self.listener.close()
        self.store.close()
        os.unlink(self.path)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("nccl") / "libnccl.so.2")
    subprocess.run([os.environ.get("CC", "cc"), "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", path, f"{ROOT}/test/fake_nccl.c", "-lpthread"], check=True)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("weights")
    return [write_folder(base / "a"), write_folder(base / "b", turned)]


@pytest.fixture(scope="module")
def alone(folders):
    out = []
    for folder in folders:
        with Server("-m", folder) as s:
            out.append(answers(s))
    assert out[0] != out[1]
    return out


@pytest.fixture(scope="module")
def server(folders, library):
    with Server("-m", folders[0], env={"TOKA_NCCL_LIBRARY": library}) as s:
        yield s


@pytest.fixture
def fresh(server, folders):
    """The server with the first weights and without a group."""
    calls(server, ("POST", "/close_communicator/", {}), ("POST", "/update_weights", {"weight_dir": folders[0], "weight_version": "old"}))
    return server


@pytest.fixture
def trainer(tmp_path):
    t = Trainer(tmp_path)
    yield t
    t.close()


def tensors(folder):
    """(name, dtype of torch, shape, bytes) of each tensor of a model."""
    head, data = read_tensors(f"{folder}/model.safetensors")
    return [(name, TYPES[t["dtype"]], t["shape"], data[slice(*t["data_offsets"])]) for name, t in head.items() if name != "__metadata__"]


def listed(some, **more):
    names, dtypes, shapes = ([t[i] for t in some] for i in range(3))
    return {"names": names, "dtype_names": dtypes, "shapes": shapes, **more}


def packed(some, limit):
    """The broadcasts of vLLM's packed protocol: each ends with the tensor that makes it longer than the limit."""
    out, now = [], b""
    for *_, piece in some:
        now += piece
        if len(now) > limit:
            out, now = [*out, now], b""
    return out + [now] * bool(now)


def refused(s, path, body, status, *words):
    a = s.post(path, body)
    assert a.status == status and all(w in a.error()["message"] for w in words), (a.status, a.body)
    return a.error()["message"]


def version(s):
    return s.get("/weight_info").json()["weight_version"]


def join(s, trainer, **more):
    calls(s, ("POST", "/init_weight_transfer_engine", {"init_info": trainer.info(**more)}))


def only(folder, *names):
    return [t for t in tensors(folder) if t[0] in names]


# ---- The calls of trainers ----

@pytest.mark.parametrize("limit", [0, 100_000, None])
def test_replay_trl(fresh, trainer, folders, alone, limit):
    """The client of TRL 1.16 and its asynchronous GRPO: vLLM's routes, packed broadcasts, twice in one group; answers are those of the new folder."""
    s = fresh
    info, size = calls(s, ("GET", "/server_info?config_format=json", None), ("GET", "/get_world_size", None))
    assert info["vllm_config"]["weight_transfer_config"] == {"backend": "nccl"} and size["world_size"] == 1
    join(s, trainer, packed=True)
    assert trainer.store.joined == 1 and [a[0] for a in trainer.asked] == ["I", "A"]
    more = {} if limit is None else {"packed_buffer_size_bytes": limit}
    for which, name in ((1, "step-1"), (0, "step-2")):
        new = tensors(folders[which])
        pieces = packed(new, 1 << 30 if limit is None else limit)
        assert len(pieces) == (1 if limit is None else len(new) if not limit else len(pieces)) and (limit != 100_000 or 1 < len(pieces) < len(new))
        trainer.send(*pieces)
        before = version(s)
        calls(s, ("POST", "/pause?mode=keep", None), ("POST", "/start_weight_update", {"is_checkpoint_format": True}),
              ("POST", "/update_weights", {"update_info": listed(new, **more)}))
        assert version(s) == before
        calls(s, ("POST", "/finish_weight_update", {"weight_version": name}), ("POST", "/resume", None), ("POST", "/reset_prefix_cache", None))
        assert version(s) == name and answers(s) == alone[which] and not trainer.queue
    calls(s, ("POST", "/close_communicator/", {}), ("POST", "/close_communicator/", {}))  # twice
    assert answers(s) == alone[0]


@pytest.mark.parametrize("older", [False, True])
def test_replay_trl_vllm_serve(fresh, folders, alone, older):
    """The client of TRL before 1.16: a call, a broadcast and a barrier for each tensor; /reset_prefix_cache/ makes them the weights."""
    t, now = OldTrl(fresh), 0
    for which in (1, 0, 1):
        t.update(tensors(folders[which]), t.old_barrier if older else t.barrier)
        assert answers(fresh, 1) == alone[now][:1]
        calls(fresh, ("POST", "/reset_prefix_cache/", None))
        now = which
        assert answers(fresh) == alone[now] and not t.queue
    assert [a[0] for a in t.asked[:2]] == ["I", "A"] and version(fresh) != "old"
    refused(fresh, "/update_weights", {"update_info": listed([])}, 409, "/update_named_param/")
    calls(fresh, ("POST", "/close_communicator/", None), ("POST", "/close_communicator/", None))
    refused(fresh, "/update_named_param/", {"name": DOWN, "dtype": "torch.bfloat16", "shape": [1]}, 409, "no group")
    t.close()


def test_trl_vllm_serve_goes_wrong(fresh, folders, alone):
    """Wrong names and shapes are refused before anything is sent; a client that dies leaves the old weights."""
    t = OldTrl(fresh, timeout=3)
    down, = only(folders[1], DOWN)
    body = {"name": DOWN, "dtype": "torch.bfloat16", "shape": down[2]}
    for more, words in (({"name": "x"}, "x: the open model has no such tensor"), ({"shape": [3, 4]}, "expected ["), ({"dtype": "torch.int8"}, "int8, expected BF16"),
                        ({"shape": None}, "counts"), ({"name": None}, "no such tensor")):
        refused(fresh, "/update_named_param/", {**body, **more}, 400, words)
    t.update([down], t.barrier)
    calls(fresh, ("POST", "/update_named_param/", body))  # and the broadcast does not come
    refused(fresh, "/reset_prefix_cache/", {}, 504, "nothing came for 3 s")
    refused(fresh, "/update_named_param/", body, 504, "nothing came for 3 s")
    assert answers(fresh) == alone[0] and version(fresh) == "old"
    t.close()
    t, done = OldTrl(fresh), []
    t.send(down[3])  # and the barrier does not come
    calls(fresh, ("POST", "/update_named_param/", body))
    waits = threading.Thread(target=lambda: done.append(fresh.post("/reset_prefix_cache/", {})))
    waits.start()
    time.sleep(0.3)
    calls(fresh, ("POST", "/close_communicator/", None))
    waits.join(20)
    assert done[0].status == 409 and "the group was closed" in done[0].error()["message"], done[0].body
    t.close()
    info = {"host": "127.0.0.1", "port": free_port(), "world_size": 2, "client_device_uuid": ""}
    for more, words in (({"world_size": 3}, "world_size: 3, expected 2"), ({"host": ""}, "host: expected"), ({"port": 0}, "port: 0"),
                        ({"port": fresh.address[1]}, "in use")):
        refused(fresh, "/init_communicator/", {**info, **more}, 400, words)
    calls(fresh, ("POST", "/reset_prefix_cache/", {}))
    assert answers(fresh) == alone[0]


def test_store_of_the_server(fresh):
    """The queries of PyTorch's client that the replay does not send, in pieces, and bytes that are no query."""
    t = OldTrl(fresh)
    check = lambda key: t.store.sendall(b"\x05" + struct.pack("<QQ", 1, len(key)) + key) or t.read(1)
    assert check(b"/a") == b"\1" and t.ask(8, b"/a", n=8) == struct.pack("<q", 0)
    t.set("a", b"x" * 5000)
    assert t.get("a") == b"x" * 5000 and check(b"/a") == b"\0"
    assert t.ask(8, b"/a", n=8) == struct.pack("<q", 1) and check(b"/a") == b"\1"
    t.store.sendall(b"\x06" + struct.pack("<QQ", 1, 2) + b"/a")  # WAIT
    time.sleep(0.05)
    t.store.sendall(b"\x0c")  # CANCEL_WAIT
    assert t.read(1) == b"\1"
    for byte in b"\x01" + struct.pack("<Q", 2) + b"/b" + struct.pack("<Q", 3) + b"new":
        t.store.sendall(bytes([byte]))
    assert t.get("b") == b"new" and t.ask(4, b"/n", struct.pack("<q", 5), n=8) == struct.pack("<q", 5)
    assert t.ask(4, b"/n", struct.pack("<q", -7), n=8) == struct.pack("<q", -2)
    for odd in (b"\xff", b"\0" + b"\0" * 4, b"\x01" + b"\xff" * 8 + b"k" * 300_000):
        with socket.create_connection(("127.0.0.1", t.port), 20) as c:
            try:
                c.sendall(odd)
                assert not c.recv(1)
            except ConnectionError:
                pass
    assert t.get("b") == b"new"
    t.close()


def test_one_tensor_at_a_time(fresh, trainer, folders, alone):
    """TRL's update_named_param: a start and a finish around each; unpacked broadcasts have the type of the tensor."""
    join(fresh, trainer)
    for t in only(folders[1], DOWN, "model.norm.weight"):
        trainer.send(t[3])
        calls(fresh, ("POST", "/start_weight_update", {}), ("POST", "/update_weights", {"update_info": listed([t], packed=False)}),
              ("POST", "/finish_weight_update", {}))
        assert trainer.asked[-1] == ("B", 9, len(t[3]))
    assert answers(fresh) == alone[1]


def test_without_a_start(fresh, trainer, folders, alone):
    """vLLM before 0.21: each list is an update."""
    join(fresh, trainer)
    change = only(folders[1], DOWN)
    trainer.send(change[0][3])
    calls(fresh, ("POST", "/update_weights", {"update_info": listed(change), "weight_version": "w"}))
    assert version(fresh) == "w" and answers(fresh) == alone[1]


def test_replay_sglang(fresh, tmp_path, folders, alone):
    """slime's calls: a group of torch.distributed, whose id is in the store as it is, and a broadcast for each tensor."""
    t, key = Trainer(tmp_path, key="/slime/slime//cuda//0", pickled=False), "/slime/slime//cuda//0"
    ident = t.store.values.pop(key)  # torch makes the id with the first broadcast, after the answer to the init
    new = tensors(folders[1])
    names, dtypes, shapes = ([x[i] for x in new] for i in range(3))
    t.send(*[x[3] for x in new])
    calls(fresh, ("POST", "/init_weights_update_group", t.info(group_name="slime", backend="nccl")), ("POST", "/pause_generation", {}), ("GET", "/flush_cache", None))
    assert t.store.joined == 1 and not t.asked
    refused(fresh, "/init_weights_update_group", t.info(group_name="other"), 409, "in the group 'slime'")
    refused(fresh, "/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": [], "group_name": "other"}, 400, "group_name")
    threading.Timer(0.1, t.store.set, (key, ident)).start()
    calls(fresh,
          ("POST", "/update_weights_from_distributed", {"names": names, "dtypes": [f"torch.{x}" for x in dtypes], "shapes": shapes, "group_name": "slime",
                                                        "flush_cache": True, "weight_version": "7"}),
          ("POST", "/continue_generation", {}))
    assert version(fresh) == "7" and answers(fresh) == alone[1] and "A" not in [a[0] for a in t.asked]
    calls(fresh, ("POST", "/destroy_weights_update_group", {"group_name": "slime"}))
    t.close()


def halves(some, kind):
    """The tensors as float32 or float16, with the bytes."""
    out = []
    for name, _, shape, data in some:
        numbers = [struct.unpack("<f", struct.pack("<I", x << 16))[0] for x in struct.unpack(f"<{len(data) // 2}H", data)]
        out.append((name, kind, shape, struct.pack(f"<{len(numbers)}{'f' if kind == 'float32' else 'e'}", *numbers)))
    return out


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_other_types(fresh, trainer, folders, alone, kind):
    """A trainer with float32 weights: the numbers get the type of the model's file, rounded to nearest."""
    join(fresh, trainer)
    new = halves(only(folders[1], DOWN), kind)
    nudged = bytearray(new[0][3])
    if kind == "float32":  # less than half of a step of bfloat16: rounded away
        nudged[0] ^= 1
    trainer.send(bytes(nudged))
    calls(fresh, ("POST", "/update_weights", {"update_info": listed(new)}))
    if kind == "float32":
        assert answers(fresh) == alone[1]
    else:  # float16 has fewer exponents: small numbers are rounded
        assert answers(fresh) != alone[0]


def test_weights_that_are_quantized(trainer, folders, library):
    """--quantization fp8 quantizes what comes by the rule of a start."""
    with Server("-m", folders[1], "--quantization", "fp8") as s:
        want = answers(s, 2)
    with Server("-m", folders[0], "--quantization", "fp8", env={"TOKA_NCCL_LIBRARY": library}) as s:
        join(s, trainer)
        change = only(folders[1], DOWN)
        trainer.send(change[0][3])
        calls(s, ("POST", "/update_weights", {"update_info": listed(change)}))
        assert answers(s, 2) == want


@pytest.mark.parametrize("form", FORMS)
def test_plain_numbers_for_quantized_ones(trainer, folders, library, tmp_path, form):
    """A checkpoint in FP8 or int4 gets bfloat16 or float32 numbers: its rule quantizes them."""
    old, new = (write_quantized(tmp_path / name, folder, form) for name, folder in zip("ab", folders))
    with Server("-m", new) as s:
        want = answers(s, 2)
    with Server("-m", old, env={"TOKA_NCCL_LIBRARY": library}) as s:
        before = answers(s, 2)
        join(s, trainer)
        down, = only(folders[1], DOWN)
        for update in ([(DOWN, "bfloat16", [down[2][0], down[2][1] // 2], b"")], [(DOWN, "int32", down[2], b"")], [(DOWN + "x", *down[1:])]):
            refused(s, "/update_weights", {"update_info": listed(update)}, 400, DOWN)
        for some, then in (([down], want), (halves(only(folders[0], DOWN), "float32"), before), (tensors(folders[1]), want)):
            trainer.send(*[t[3] for t in some])
            calls(s, ("POST", "/update_weights", {"update_info": listed(some)}))
            assert answers(s, 2) == then


def test_after_the_weights_were_dropped(fresh, trainer, folders, alone):
    """vLLM's cycle, twice: sleep at level 2, wake the weights, new ones, wake K and V."""
    join(fresh, trainer)
    for which in (1, 0):
        new = tensors(folders[which])
        sleep(fresh, "?level=2"), wake(fresh, "?tags=weights")
        refused(fresh, "/v1/completions", ASKS[0], 503)
        trainer.send(*packed(new, 1 << 30))
        calls(fresh, ("POST", "/start_weight_update", {}), ("POST", "/update_weights", {"update_info": listed(new, packed=True)}),
              ("POST", "/finish_weight_update", {}))
        refused(fresh, "/v1/completions", ASKS[0], 503)
        wake(fresh, "?tags=kv_cache")
        assert answers(fresh) == alone[which]
    down, = only(folders[1], DOWN)
    sleep(fresh, "?level=2")
    trainer.send(down[3])
    calls(fresh, ("POST", "/start_weight_update", {}), ("POST", "/update_weights", {"update_info": listed([down])}))
    refused(fresh, "/finish_weight_update", {}, 400, "missing")
    assert "came as a delta" in wake(fresh, status=500)["message"]
    calls(fresh, ("POST", "/update_weights", {"weight_dir": folders[0]}))
    wake(fresh)
    assert answers(fresh) == alone[0]


def test_lists_after_the_weights_were_dropped(fresh, tmp_path, folders, alone):
    """slime's cycle: each list is an update. The weights are incomplete until the last one has come, and the server stays asleep."""
    t, new = Trainer(tmp_path, key="/slime/slime//cuda//0", pickled=False), tensors(folders[1])
    lists = [new[i:i + 20] for i in range(0, len(new), 20)]
    calls(fresh, ("POST", "/init_weights_update_group", t.info(group_name="slime", backend="nccl")))
    for _ in range(2):
        calls(fresh, ("POST", "/release_memory_occupation", {}), ("POST", "/resume_memory_occupation", {"tags": ["weights"]}))
        for i, some in enumerate(lists):
            t.send(*[x[3] for x in some])
            answer, = calls(fresh, ("POST", "/update_weights_from_distributed", {"names": [x[0] for x in some], "dtypes": [x[1] for x in some],
                                                                                 "shapes": [x[2] for x in some], "group_name": "slime", "weight_version": "9"}))
            assert answer["status"] == ("ok" if i == len(lists) - 1 else "incomplete")
            if i < len(lists) - 1:
                a = fresh.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
                assert a.status == 503 and "weights incomplete" in a.error()["message"], a.body
        calls(fresh, ("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]}))
        assert answers(fresh) == alone[1] and version(fresh) == "9"
    calls(fresh, ("POST", "/release_memory_occupation", {}))
    t.send(*[x[3] for x in lists[0]])
    calls(fresh, ("POST", "/update_weights_from_distributed", {"names": [x[0] for x in lists[0]], "dtypes": [x[1] for x in lists[0]],
                                                               "shapes": [x[2] for x in lists[0]]}),
          ("POST", "/update_weights", {"weight_dir": folders[0]}), ("POST", "/resume_memory_occupation", {}))
    assert answers(fresh) == alone[0]
    t.close()


def cut_off(s, path, body):
    with pytest.raises((OSError, EOFError)):
        s.post(path, body)


def test_killed_while_tensors_come(folders, alone, library, trainer):
    """kill -9 in the middle of an update: a new start has the weights of the folder."""
    with Server("-m", folders[0], env={"TOKA_NCCL_LIBRARY": library}) as s:
        join(s, trainer)
        new = tensors(folders[1])
        trainer.send(*[t[3] for t in new[:len(new) // 2]])
        asks = threading.Thread(target=cut_off, args=(s, "/update_weights", {"update_info": listed(new)}))
        asks.start()
        while len(trainer.asked) < 2 + len(new) // 2:
            time.sleep(0.005)
        assert answers(s, 1) == alone[0][:1]
        s.p.kill()
        asks.join(20)
    with Server("-m", folders[0]) as s:
        assert answers(s) == alone[0]


def test_while_requests_run(fresh, trainer, folders, alone):
    """An answer that was under way goes on, and has both versions."""
    join(fresh, trainer)
    change, done = only(folders[1], DOWN), []
    before = fresh.metric("generation_tokens_total")
    ask = {"prompt": "Tom", "max_tokens": 400, "ignore_eos": True, "n": 2, "return_token_ids": True}
    long = threading.Thread(target=lambda: done.append(fresh.post("/v1/completions", ask).json()["choices"]))
    long.start()
    while fresh.metric("generation_tokens_total") < before + 20:
        time.sleep(0.002)
    trainer.send(change[0][3])
    calls(fresh, ("POST", "/update_weights", {"update_info": listed(change), "weight_version": "new"}))
    long.join(60)
    assert all(len(c["token_ids"]) == 400 and [v for _, v in c["weight_versions"]] == ["old", "new"] for c in done[0])
    assert answers(fresh) == alone[1]


# ---- What goes wrong ----

def test_wrong_lists_write_nothing(fresh, trainer, folders, alone):
    """Each is refused before a byte is asked for; the next list in the same group is taken."""
    join(fresh, trainer)
    down, = only(folders[1], DOWN)
    norm, = only(folders[1], "model.norm.weight")
    lists = [(listed([("model.layers.99.x", *down[1:])]), "model.layers.99.x: the open model has no such tensor"),
             (listed([norm, (DOWN, down[1], down[2][::-1], b"")]), f"{DOWN}: [{down[2][1]},{down[2][0]}], expected [{down[2][0]},{down[2][1]}]"),
             (listed([(DOWN, down[1], [down[2][0] * down[2][1]], b"")]), "expected ["), (listed([(DOWN, down[1], [1 << 62, 1 << 62], b"")]), "counts"),
             (listed([(DOWN, down[1], [-1, 1], b"")]), "counts"), (listed([(DOWN, "bfloat17", down[2], b"")]), "dtype 'bfloat17' is not known"),
             (listed([(DOWN, "int8", down[2], b"")]), f"{DOWN}: int8, expected BF16"), ({**listed([down]), "shapes": []}, "lists of equal length"),
             ({"names": 5}, "lists of equal length"), ({**listed([down]), "names": [7]}, "no such tensor"), ({**listed([down]), "shapes": [7]}, "counts")]
    for update, words in lists:
        refused(fresh, "/update_weights", {"update_info": update}, 400, words)
    assert [a[0] for a in trainer.asked] == ["I", "A"] and version(fresh) == "old" and answers(fresh, 2) == alone[0][:2]
    trainer.send(down[3])
    calls(fresh, ("POST", "/update_weights", {"update_info": listed([down])}))
    assert answers(fresh) == alone[1]


@pytest.mark.parametrize("die", [0, 1000])
def test_trainer_dies(fresh, tmp_path, folders, alone, die):
    """In the middle of an update: what came is dropped, the old weights stay whole, and a whole update by the next trainer works."""
    first, second = Trainer(tmp_path), Trainer(tmp_path)
    join(fresh, first)
    down, norm = only(folders[1], DOWN)[0], only(folders[1], "model.norm.weight")[0]
    first.send(down[3])
    calls(fresh, ("POST", "/start_weight_update", {}), ("POST", "/update_weights", {"update_info": listed([down])}))
    first.die = min(die, len(norm[3]) - 1)
    first.send(norm[3])
    refused(fresh, "/update_weights", {"update_info": listed([norm])}, 504, "weights from the trainer: NCCL: remote process exited")
    refused(fresh, "/finish_weight_update", {}, 409, "broken off")
    refused(fresh, "/start_weight_update", {}, 409, "no group")
    assert version(fresh) == "old" and answers(fresh) == alone[0] and fresh.get("/health").status == 200
    join(fresh, second)
    second.send(*packed(tensors(folders[1]), 1 << 30))
    calls(fresh, ("POST", "/start_weight_update", {}), ("POST", "/update_weights", {"update_info": listed(tensors(folders[1]), packed=True)}),
          ("POST", "/finish_weight_update", {}))
    assert answers(fresh) == alone[1]
    first.close(), second.close()


def test_trainer_waits(fresh, trainer, folders, alone):
    """Nothing comes: requests are answered meanwhile, a second transfer is refused, and the wait ends by the time limit, or by a close."""
    for closes in (False, True):
        join(fresh, trainer, timeout=60 if closes else 0.5)
        down, done = only(folders[1], DOWN), []
        waits = threading.Thread(target=lambda: done.append(fresh.post("/update_weights", {"update_info": listed(down)})))
        n = len(trainer.asked)
        waits.start()
        while len(trainer.asked) == n:
            time.sleep(0.005)
        assert answers(fresh, 1) == alone[0][:1]
        if closes:
            refused(fresh, "/start_weight_update", {}, 409, "another transfer of weights is under way")
            calls(fresh, ("POST", "/close_communicator/", {}))
        waits.join(20)
        status, words = (409, "the group was closed") if closes else (504, "nothing came for 0.5 s")
        assert done[0].status == status and words in done[0].error()["message"], done[0].body
    assert version(fresh) == "old"


def test_stopped_while_it_waits(folders, library, trainer):
    with Server("-m", folders[0], env={"TOKA_NCCL_LIBRARY": library}) as s:
        join(s, trainer)
        threading.Thread(target=lambda: s.connect().request("POST", "/update_weights", {"update_info": listed(only(folders[1], DOWN))}), daemon=True).start()
        while trainer.asked[-1][0] != "B":
            time.sleep(0.005)
        assert s.stop() == 0


def test_groups_that_do_not_form(fresh, trainer, tmp_path, alone):
    """A store that is gone or never has the id, a wrong number of ranks, values that are no id."""
    route = "/init_weight_transfer_engine"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    refused(fresh, route, {"init_info": trainer.info(master_port=port, timeout=0.3)}, 504, f"the trainer's store at 127.0.0.1, port {port}", "0.3 s")
    refused(fresh, route, {"init_info": trainer.info(world_size=3, timeout=0.3)}, 504, "the ranks of the trainer's group: nothing came for 0.3 s")
    silent = Trainer(tmp_path, key="/other")
    refused(fresh, route, {"init_info": silent.info(timeout=0.3)}, 504, "nothing came for 0.3 s")
    silent.close()
    good = pickle.dumps(ncclUniqueId())
    for value in (b"", good[:-1], good[:40], pickle.dumps(b"short"), pickle.dumps([ncclUniqueId()]), pickle.dumps(print), good + b".", b"\x80\x04C\xff", b"c"):
        odd = Trainer(tmp_path, value=value)
        refused(fresh, route, {"init_info": odd.info()}, 400, "the pickle of NCCL's id")
        odd.close()
    torch = Trainer(tmp_path, key="/g/g//cuda//0", value=b"x" * 127)
    calls(fresh, ("POST", "/init_weights_update_group", torch.info(group_name="g")))
    refused(fresh, "/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": [], "group_name": "g"}, 400, "an id of 127 bytes, expected 128")
    torch.close()
    refused(fresh, "/update_weights", {"update_info": listed([])}, 409, "there is no group of NCCL")
    assert answers(fresh, 1) == alone[0][:1]


@pytest.mark.parametrize("info, words", [({"rank_offset": 2}, "rank_offset: 2, expected 1 to 1"), ({"rank_offset": 0}, "rank_offset: 0"), ({"world_size": 1}, "world_size: 1"),
                                         ({"master_port": 70000}, "master_port: 70000"), ({"master_address": ""}, "master_address"), ({"backend": "gloo"}, "backend: expected nccl"),
                                         ({"timeout": -1}, "timeout"), ({"group_name": "g" * 300}, "group_name")])
def test_wrong_groups(fresh, trainer, info, words):
    refused(fresh, "/init_weight_transfer_engine", {"init_info": trainer.info(**info)}, 400, words)


def test_who_may(folders, library, trainer):
    """The admin key; the library; a device that has no NCCL."""
    paths = ["/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update", "/init_weights_update_group", "/update_weights_from_distributed",
             "/destroy_weights_update_group", "/init_communicator/", "/update_named_param/", "/close_communicator/"]
    with Server("-m", folders[0], "--admin-key", "k", env={"TOKA_NCCL_LIBRARY": "/none/libnccl.so.2"}) as s:
        assert {s.post(path, {}).status for path in paths} == {401}
        a = s.post("/init_weight_transfer_engine", {"init_info": trainer.info()}, Authorization="Bearer k")
        assert a.status == 501 and "/none/libnccl.so.2" in a.error()["message"] and "TOKA_NCCL_LIBRARY" in a.error()["message"], a.body
    with Server("-m", folders[0]) as s:
        for path in [*paths[:5], *paths[6:8]]:
            refused(s, path, {"init_info": trainer.info()}, 501, "this server runs on the CPU")
        assert s.get("/server_info").json()["vllm_config"]["weight_transfer_config"] is None
    with Server("-m", folders[0], "--device", "plain", env={"TOKA_NCCL_LIBRARY": library}) as s:
        join(s, trainer)


@pytest.mark.parametrize("flags", [["--data-parallel-size", "2"], ["--pipeline-parallel-size", "2"]])
def test_ranks_get_them(folders, alone, library, trainer, flags):
    """The server is one rank, whatever it has: the update reaches all devices."""
    with Server("-m", folders[0], *flags, env={"TOKA_NCCL_LIBRARY": library}) as s:
        join(s, trainer)
        change = only(folders[1], DOWN)
        trainer.send(change[0][3])
        calls(s, ("POST", "/update_weights", {"update_info": listed(change)}))
        assert answers(s) == alone[1]


def test_torch_client(fresh):
    """PyTorch's own client of a TCPStore, and the unpickler of Python, find the id that the server made. Only where torch is installed."""
    torch = pytest.importorskip("torch.distributed", reason="torch is not installed")
    t = OldTrl(fresh)
    store = torch.TCPStore("127.0.0.1", t.port, None, False, use_libuv=False)
    assert Unpickler(io.BytesIO(store.get("broadcast_from/0/0"))).load().internal[:5] == t.path[:5].encode()
    store.set("x", "1")
    assert store.get("x") == b"1" and store.check(["x"]) and not store.check(["y"]) and store.delete_key("x") and store.add("n", 3) == 3
    t.close()


def test_torch_store(fresh, tmp_path):
    """PyTorch's own TCPStore, both of its servers, is joined in the same way. Only where torch is installed."""
    torch = pytest.importorskip("torch.distributed", reason="torch is not installed")
    for libuv in (False, True):
        t = Trainer(tmp_path)
        stores = []
        make = threading.Thread(target=lambda: stores.append(torch.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False, use_libuv=libuv)))
        make.start()
        make.join()
        stores[0].set("broadcast_from/0/0", t.store.values["/broadcast_from/0/0"])
        join(fresh, t, master_port=stores[0].port)
        assert [a[0] for a in t.asked] == ["I", "A"]
        t.close()
