#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sends weights to `toka serve` on GPU 0 from a trainer on GPU 1, over NCCL: as vLLM's clients do and as torch.distributed does.

    python3 test/gpu_nccl.py [--folder DIR]

Needs two GPUs (NCCL refuses two ranks on one), torch with CUDA, and a toka with the GPU half. The program takes torch's libnccl.so.2. Prints one
line for each check, PASS or FAIL, and ends with status 1 if one failed. --folder: a model to time, whose weights are sent whole, packed.
test/test_nccl.py checks the same routes without a GPU.
"""
import argparse
import ctypes
import datetime
import glob
import json
import os
import pickle
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from server import ROOT, Server  # noqa: E402

DOWN = "model.layers.0.mlp.down_proj.weight"
PROMPTS = [f"Tom has {i} apples. He buys 7 more apples." for i in range(6)]
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
TRAINER = 1  # the GPU of this process


class ncclUniqueId(ctypes.Structure):  # pickled by its name, as vLLM's
    _fields_ = [("internal", ctypes.c_byte * 128)]


def find_library():
    """torch's own libnccl.so.2: trainer and server must have versions that agree."""
    torch.cuda.nccl.version()
    with open("/proc/self/maps") as f:
        loaded = {line.split()[-1] for line in f if "libnccl.so" in line}
    packaged = glob.glob(os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia", "nccl", "lib", "libnccl.so.2"))
    return next(iter(loaded or packaged), "libnccl.so.2")


LIBRARY = None


class Communicator:
    """Rank 0 of a group as vLLM's PyNcclCommunicator makes it: the id as a pickle in a TCPStore, then an all-reduce of one float."""

    def __init__(self, server, world_size=2, libuv=False, **info):
        self.lib = ctypes.CDLL(LIBRARY)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        body = {"init_info": {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world_size, "timeout": 60, **info}}
        asked = later(server, "/init_weight_transfer_engine", body)
        self.store = dist.TCPStore("127.0.0.1", port, world_size, True, use_libuv=libuv, master_listen_fd=listener.detach())  # waits for the server
        unique = ncclUniqueId()
        self.check(self.lib.ncclGetUniqueId(ctypes.byref(unique)))
        self.store.set("broadcast_from/0/0", pickle.dumps(unique))
        self.comm = ctypes.c_void_p()
        self.check(self.lib.ncclCommInitRank(ctypes.byref(self.comm), world_size, unique, 0))
        one = torch.zeros(1, device=f"cuda:{TRAINER}")
        self.check(self.lib.ncclAllReduce(ctypes.c_void_p(one.data_ptr()), ctypes.c_void_p(one.data_ptr()), ctypes.c_size_t(1), 7, 0, self.comm, self.stream()))
        torch.cuda.synchronize()
        assert asked().status == 200, asked().body

    def check(self, result):
        assert result == 0, f"NCCL: {result}"

    def stream(self):
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def broadcast(self, tensor):
        kind = {torch.uint8: 1, torch.bfloat16: 9, torch.float16: 6, torch.float32: 7}[tensor.dtype]
        at = ctypes.c_void_p(tensor.data_ptr())
        self.check(self.lib.ncclBroadcast(at, at, ctypes.c_size_t(tensor.numel()), kind, 0, self.comm, self.stream()))

    def send(self, tensors, packed=True, limit=1 << 30):
        """As packed_nccl_broadcast_producer: a broadcast ends after the tensor that makes it longer than the limit."""
        if not packed:
            for t in tensors.values():
                self.broadcast(t)
        pieces, size = [], 0
        for i, t in enumerate(tensors.values() if packed else ()):
            pieces.append(t.contiguous().view(torch.uint8).view(-1))
            size += pieces[-1].numel()
            if size > limit or i == len(tensors) - 1:
                self.broadcast(torch.cat(pieces))
                pieces, size = [], 0
        torch.cuda.synchronize()

    def abort(self):
        self.lib.ncclCommAbort(self.comm)


def later(server, path, body):
    """Sends a request in a thread. The value waits for its answer."""
    got = []
    thread = threading.Thread(target=lambda: got.append(server.post(path, body)))
    thread.start()
    return lambda: (thread.join(200), got[0])[1]


def read_tensors(folder):
    out = {}
    for path in sorted(glob.glob(f"{folder}/*.safetensors")):
        with open(path, "rb") as f:
            head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            data = bytearray(f.read())
        for name, t in head.items():
            if name != "__metadata__":
                begin, end = t["data_offsets"]
                out[name] = torch.frombuffer(data, dtype=DTYPES[t["dtype"]], count=(end - begin) // DTYPES[t["dtype"]].itemsize, offset=begin).view(t["shape"])
    return out


def to_gpu(tensors):
    return {name: t.to(f"cuda:{TRAINER}") for name, t in tensors.items()}


def describe(tensors):
    return {"names": list(tensors), "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()], "shapes": [list(t.shape) for t in tensors.values()]}


def write_other(folder, base):
    """A copy of a model of one file with the rows of one matrix in reverse."""
    shutil.copytree(base, folder)
    path = f"{folder}/model.safetensors"
    with open(path, "rb") as f:
        raw = bytearray(f.read())
    n_head = struct.unpack("<Q", raw[:8])[0]
    t = json.loads(raw[8:8 + n_head])[DOWN]
    begin, end = (8 + n_head + x for x in t["data_offsets"])
    row = (end - begin) // t["shape"][0]
    raw[begin:end] = b"".join(raw[i:i + row] for i in reversed(range(begin, end, row)))
    with open(path, "wb") as f:
        f.write(raw)
    return folder


def answers(server):
    out = []
    for i, prompt in enumerate(PROMPTS):
        a = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 24, "temperature": 0.8, "seed": i, "logprobs": 1, "return_token_ids": True})
        assert a.status == 200, a.body
        choice = a.json()["choices"][0]
        out.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return out


def same(got, want):
    return all(g[0] == w[0] and max(abs(x - y) for x, y in zip(g[1], w[1])) < 2e-2 for g, w in zip(got, want))


def serve(folder, *flags):
    env = {"TOKA_DEVICE": "cuda", "TOKA_NCCL_LIBRARY": LIBRARY, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[0]}
    return Server("-m", folder, "--enable-sleep-mode", *flags, env=env)


def post(server, path, body, status=200):
    a = server.post(path, body)
    assert a.status == status, (path, a.status, a.body)
    return a.json()


def update(server, trainer, tensors, start=True, **more):
    """One update by vLLM's routes; returns the version's name."""
    if start:
        post(server, "/start_weight_update", {})
    asked = later(server, "/update_weights", {"update_info": {**describe(tensors), "packed": more.get("packed", True),
                                                              "packed_buffer_size_bytes": more.get("limit", 1 << 30)}})
    trainer.send(tensors, **more)
    assert asked().status == 200, asked().body
    return post(server, "/finish_weight_update", {})["weight_version"] if start else asked().json()["weight_version"]


class Checks:
    """The checks: one server of folder a; `want` are the answers of servers of a and of b."""

    def __init__(self, folders):
        self.folders, self.want = folders, []
        for folder in folders:
            with serve(folder) as s:
                self.want.append(answers(s))
        assert not same(*self.want)
        self.tensors = [to_gpu(read_tensors(f)) for f in folders]

    def vllm_packed(self, libuv=False, **more):
        with serve(self.folders[0]) as s:
            assert s.get("/server_info").json()["vllm_config"]["weight_transfer_config"] == {"backend": "nccl"}
            trainer = Communicator(s, libuv=libuv)
            for which in (1, 0, 1):  # twice in one group, and back
                update(s, trainer, self.tensors[which], **more)
                assert same(answers(s), self.want[which]), which
            post(s, "/close_communicator", {})
            assert same(answers(s), self.want[1])
            trainer.abort()

    def vllm_packed_in_pieces(self):
        self.vllm_packed(libuv=True, limit=100_000)

    def vllm_unpacked(self):
        self.vllm_packed(packed=False)

    def one_tensor_in_float32(self):
        with serve(self.folders[0]) as s:
            trainer = Communicator(s)
            update(s, trainer, {DOWN: self.tensors[1][DOWN].float()}, start=False)
            assert same(answers(s), self.want[1])
            trainer.abort()

    def torch_group(self):
        """slime's way: init_process_group of torch, which makes NCCL's id with the first broadcast."""
        from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world, rendezvous
        with serve(self.folders[0]) as s, socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
            free.close()
            asked = later(s, "/init_weights_update_group", {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2,
                                                            "group_name": "slime-pp_0", "backend": "nccl", "timeout": 60})
            store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2))
            group, _ = _new_process_group_helper(size, rank, [], "nccl", PrefixStore("slime-pp_0", store), group_name="slime-pp_0",
                                                 timeout=datetime.timedelta(seconds=120))
            _world.pg_group_ranks[group] = {0: 0, 1: 1}
            assert asked().status == 200, asked().body
            info = describe(self.tensors[1])
            asked = later(s, "/update_weights_from_distributed", {"names": info["names"], "dtypes": info["dtype_names"], "shapes": info["shapes"],
                                                                  "group_name": "slime-pp_0", "weight_version": "7"})
            for t in self.tensors[1].values():
                dist.broadcast(t, 0, group=group)
            torch.cuda.synchronize()
            assert asked().status == 200 and asked().json()["weight_version"] == "7", asked().body
            assert same(answers(s), self.want[1])
            post(s, "/destroy_weights_update_group", {"group_name": "slime-pp_0"})

    def trainer_dies(self):
        """It goes away in the middle: a 504, the old weights, and the next trainer's update is whole."""
        with serve(self.folders[0]) as s:
            trainer = Communicator(s, timeout=10)
            post(s, "/start_weight_update", {})
            some = {DOWN: self.tensors[1][DOWN]}
            asked = later(s, "/update_weights", {"update_info": {**describe(some), "packed": False}})
            trainer.send(some, packed=False)
            assert asked().status == 200
            asked = later(s, "/update_weights", {"update_info": {**describe(some), "packed": False}})
            time.sleep(1)
            trainer.abort()
            assert asked().status == 504, asked().body
            post(s, "/finish_weight_update", {}, 409)
            assert same(answers(s), self.want[0])
            trainer = Communicator(s)
            update(s, trainer, self.tensors[1])
            assert same(answers(s), self.want[1])
            trainer.abort()

    def requests_run_while_it_waits(self):
        """Steps go on while the server's kernel of NCCL waits for the trainer."""
        with serve(self.folders[0]) as s:
            trainer = Communicator(s)
            long = later(s, "/v1/completions", {"prompt": "Tom", "max_tokens": 900, "ignore_eos": True, "n": 8, "return_token_ids": True})
            asked = later(s, "/update_weights", {"update_info": {**describe(self.tensors[1]), "packed": True}})
            time.sleep(0.5)
            before = s.metric("generation_tokens_total")
            after, end = before, time.time() + 30
            while after == before and time.time() < end:
                assert same(answers(s), self.want[0])
                after = s.metric("generation_tokens_total")
            assert after > before, "no token while the transfer waits"
            trainer.send(self.tensors[1])
            assert asked().status == 200, asked().body
            assert all(len(c["token_ids"]) == 900 for c in long().json()["choices"])
            assert same(answers(s), self.want[1])
            trainer.abort()

    def fp8(self):
        with serve(self.folders[1], "--quantization", "fp8") as s:
            want = answers(s)
        with serve(self.folders[0], "--quantization", "fp8") as s:
            trainer = Communicator(s)
            update(s, trainer, self.tensors[1])
            assert same(answers(s), want)
            trainer.abort()

    def without_sleep_mode(self):
        env = {"TOKA_DEVICE": "cuda", "TOKA_NCCL_LIBRARY": LIBRARY, "CUDA_VISIBLE_DEVICES": "0"}
        with Server("-m", self.folders[0], env=env) as s:
            body = {"init_info": {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}}
            assert "--enable-sleep-mode" in post(s, "/init_weight_transfer_engine", body, 501)["message"]
            assert s.get("/server_info").json()["vllm_config"]["weight_transfer_config"] is None


def time_folder(folder):
    with serve(folder) as s:
        trainer, tensors = Communicator(s), to_gpu(read_tensors(folder))
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        for _ in range(3):
            begin = time.time()
            update(s, trainer, tensors)
            print(f"{size / 1e9:.2f} GB in {time.time() - begin:.2f} s, from start_weight_update to the end of finish_weight_update", flush=True)
        trainer.abort()


def main():
    global LIBRARY
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        raise SystemExit(f"gpu_nccl: {torch.cuda.device_count()} GPUs, expected two")
    torch.cuda.set_device(TRAINER)
    LIBRARY = find_library()
    print(f"torch {torch.__version__}, NCCL {torch.cuda.nccl.version()} of {LIBRARY}, {torch.cuda.get_device_name(0)}", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as tmp:
        base = shutil.copytree(f"{ROOT}/test/model", f"{tmp}/a")
        checks = Checks([base, write_other(f"{tmp}/b", base)])
        for name in [n for n in vars(Checks) if not n.startswith("_")]:
            begin = time.time()
            try:
                getattr(checks, name)()
                print(f"PASS {name} {time.time() - begin:.1f} s", flush=True)
            except Exception:
                failed += 1
                print(f"FAIL {name}", flush=True)
                traceback.print_exc()
    if options.folder:
        time_folder(options.folder)
    print(f"gpu_nccl: {failed} failed", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
