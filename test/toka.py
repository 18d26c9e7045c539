# SPDX-License-Identifier: Apache-2.0
"""toka from Python: LLM(model).generate(prompts, SamplingParams(...)), with the names of vLLM.

Copy this file and libtoka.so (`./build.sh lib`) into one folder; only numpy is needed. All prompts of a call run together, with
shared prefixes. Token ids and log-probabilities are numpy arrays. Errors are exceptions; Ctrl-C ends the requests and raises
KeyboardInterrupt. close() ends requests that run: then their streams and calls raise ValueError.

    from toka import LLM, SamplingParams
    llm = LLM("Qwen/Qwen3-0.6B")                     # a folder, or a model in the hub cache: toka pull Qwen/Qwen3-0.6B
    for answer in llm.generate(["Tom has", "Ann has"], SamplingParams(n=4, temperature=0.8, max_tokens=20)):
        print([choice.text for choice in answer.outputs])
    for piece in llm.stream("Tom has"):
        print(piece.text, end="", flush=True)
"""
import array
import collections
import atexit
import contextlib
import ctypes as C
import difflib
import json
import math
import os
import queue
import random
import re
import sys
import threading
import weakref
from dataclasses import dataclass, field

try:
    import numpy as np
except ImportError:
    raise ImportError("toka.py needs numpy: pip install numpy") from None

# ---- toka.h: the structs, field by field. The test of this file compares them with a C compiler's. ----

_TEXT, _IDS, _FLOATS = C.c_char_p, C.POINTER(C.c_int32), C.POINTER(C.c_float)


class _Err(C.Structure):
    _fields_ = [("code", C.c_int), ("msg", C.c_char * 500)]


class _Options(C.Structure):
    _fields_ = [("model", _TEXT), ("models_file", _TEXT), ("chat_template", _TEXT), ("device", _TEXT), ("n_threads", C.c_int),
                ("max_model_len", C.c_int), ("max_num_batched_tokens", C.c_int), ("max_num_seqs", C.c_int),
                ("tensor_parallel_size", C.c_int), ("pipeline_parallel_size", C.c_int), ("data_parallel_size", C.c_int),
                ("kv_tokens", C.c_int64), ("no_prefix_caching", C.c_bool), ("enforce_eager", C.c_bool),
                ("enable_sleep_mode", C.c_bool),
                ("gpu_memory_utilization", C.c_double), ("dtype", _TEXT), ("quantization", _TEXT), ("score_tokens", _TEXT),
                ("kv_cache_dtype", _TEXT), ("kv_cache_dtype_skip_layers", _TEXT),
                ("speculative_config", _TEXT), ("num_speculative_tokens", C.c_int), ("draft_model", _TEXT),
                ("enable_return_routed_experts", C.c_bool), ("max_loras", C.c_int), ("max_lora_rank", C.c_int),
                ("progress", C.c_void_p), ("progress_user", C.c_void_p)]


class _Info(C.Structure):
    _fields_ = [("model_name", _TEXT), ("architecture", _TEXT), ("device", _TEXT), ("n_parameters", C.c_int64), ("n_layers", C.c_int),
                ("n_heads", C.c_int), ("n_kv_heads", C.c_int), ("head_size", C.c_int), ("width", C.c_int), ("mlp_width", C.c_int),
                ("vocab_size", C.c_int), ("max_model_len", C.c_int), ("bos_id", C.c_int), ("eos_id", C.c_int),
                ("has_chat_template", C.c_int), ("not_on_gpu", _TEXT), ("no_drafts", _TEXT), ("n_routed", C.c_int)]


class _Sampling(C.Structure):
    _fields_ = [("temperature", C.c_float), ("top_p", C.c_float), ("min_p", C.c_float), ("top_k", C.c_int),
                ("repetition_penalty", C.c_float), ("presence_penalty", C.c_float), ("frequency_penalty", C.c_float),
                ("seed", C.c_uint64), ("max_tokens", C.c_int), ("min_tokens", C.c_int), ("ignore_eos", C.c_int), ("logprobs", C.c_int),
                ("stop_ids", _IDS), ("n_stop_ids", C.c_int), ("stop", C.POINTER(_TEXT)), ("n_stop", C.c_int), ("include_stop", C.c_int),
                ("bias_ids", _IDS), ("bias_values", _FLOATS), ("n_bias", C.c_int), ("allowed_ids", _IDS), ("n_allowed", C.c_int),
                ("bad_ids", _IDS), ("bad_lengths", C.POINTER(C.c_int)), ("n_bad", C.c_int), ("bad_words", C.c_void_p),
                ("constraint", C.c_void_p), ("max_thinking", C.c_int)]


class _Grammar(C.Structure):
    _fields_ = [("kind", C.c_int), ("text", _TEXT), ("text_bytes", C.c_size_t), ("no_whitespace", C.c_int), ("no_additional", C.c_int),
                ("whitespace_pattern", _TEXT), ("stop", C.c_void_p), ("stop_user", C.c_void_p)]


class _Request(C.Structure):
    _fields_ = [("text", _TEXT), ("text_bytes", C.c_size_t), ("text_flags", C.c_int), ("ids", _IDS), ("n_ids", C.c_size_t), ("n", C.c_int),
                ("sampling", _Sampling), ("prompt_logprobs", C.c_int), ("prompt_top", C.c_int), ("prompt_ranks", C.c_int),
                ("keep_special", C.c_int), ("ids_only", C.c_int), ("priority", C.c_int), ("length_class", C.c_uint64), ("pooling", C.c_int),
                ("dimensions", C.c_int), ("normalize", C.c_int), ("output_ids", _IDS), ("n_output_ids", C.c_int), ("adapter", _TEXT)]


class _Event(C.Structure):
    _fields_ = [("sample", C.c_int), ("id", C.c_int32), ("logprob", C.c_float), ("sampled_logprob", C.c_float), ("n_top", C.c_int),
                ("top_ids", _IDS), ("top_logprobs", _FLOATS), ("rank", C.c_int), ("text", C.c_void_p), ("text_bytes", C.c_size_t),
                ("finish", C.c_int), ("stop_id", C.c_int), ("stop_text", C.c_int), ("n_cached", C.c_int), ("more", C.c_int),
                ("vector", _FLOATS), ("n_vector", C.c_int), ("version", C.c_int)]


_EVENT_FN = C.CFUNCTYPE(C.c_int, C.c_void_p, C.POINTER(_Event))
_ADD_SPECIAL, _PARSE_SPECIAL, _SKIP_SPECIAL = 1, 2, 4
_JSON_SCHEMA, _JSON_OBJECT, _CHOICE, _REGEX, _GBNF = 1, 2, 3, 4, 5
_FINISH = [None, "stop", "length", "abort", "error"]
_ABORT = _FINISH.index("abort")
_CLOSED = "this LLM is closed"
_MAX_LOGPROBS = 100  # TOKA_MAX_LOGPROBS


def _load():
    path = os.environ.get("TOKA_LIBRARY")
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [path] if path else [os.path.join(folder, "libtoka.so") for folder in (here, os.path.dirname(here))]
    found = [p for p in paths if os.path.exists(p)]
    if not found:
        raise ImportError(f"libtoka.so is not in {' or '.join(map(os.path.dirname, paths))}; make it with: ./build.sh lib")
    lib = C.CDLL(found[0])
    err, model, size, text = C.POINTER(_Err), C.c_void_p, C.POINTER(C.c_size_t), C.POINTER(C.c_void_p)
    for name, result, *arguments in (
            ("toka_options_default", _Options), ("toka_request_default", _Request), ("toka_request_model_defaults", None, model, C.POINTER(_Request)),
            ("toka_open", C.c_int, C.POINTER(model), C.POINTER(_Options), err), ("toka_close", None, model), ("toka_get_info", _Info, model),
            ("toka_encode", C.c_int, model, _TEXT, C.c_size_t, C.c_int, C.POINTER(_IDS), size, err),
            ("toka_decode", C.c_int, model, _IDS, C.c_size_t, C.c_int, text, size, err),
            ("toka_apply_chat_template", C.c_int, model, _TEXT, C.c_size_t, _TEXT, text, size, err),
            ("toka_submit", C.c_int, model, C.POINTER(_Request), _EVENT_FN, C.c_void_p, C.POINTER(C.c_int64), err),
            ("toka_check_request", C.c_int, C.POINTER(_Request), err), ("toka_cancel", None, model, C.c_int64), ("toka_run", C.c_int, model, C.c_int, err),
            ("toka_request_embedding", C.c_int, model, C.POINTER(_Request), err),
            ("toka_routed_experts", C.c_int, model, C.c_int, C.c_void_p),
            ("toka_words_new", C.c_int, text, model, C.POINTER(_TEXT), C.c_int, err), ("toka_words_del", None, C.c_void_p),
            ("toka_constraint_new", C.c_int, text, model, C.POINTER(_Grammar), err), ("toka_constraint_del", None, C.c_void_p)):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    request = lib.toka_request_default()
    if (request.n, request.sampling.top_p, request.sampling.repetition_penalty, request.sampling.n_bad) != (1, 1, 1, 0):
        raise ImportError(f"{found[0]} is of another version than {__file__}")
    return lib


_lib = _load()
_free = C.CDLL(None).free
_free.argtypes, _free.restype = [C.c_void_p], None


# ---- Errors ----

class TokaError(Exception):
    """`code` is a toka_code. The subclasses are also Python's own exceptions of that kind."""


class TokaValueError(TokaError, ValueError):
    """A wrong argument, or a file or text that is broken or not supported."""


class TokaOSError(TokaError, OSError):
    pass


class TokaDeviceError(TokaError, RuntimeError):
    pass


class TokaMemoryError(TokaError, MemoryError):
    pass


def _check(code, err):
    if code:
        kind = {-1: TokaValueError, -2: TokaValueError, -3: TokaOSError, -4: TokaDeviceError, -5: TokaMemoryError}.get(code, TokaError)
        names = {"--" + name.replace("_", "-"): name for name, _ in _Options._fields_}  # a flag's name in a message
        error = kind(re.sub(r"--[a-z-]+", lambda flag: names.get(flag[0], flag[0]), err.msg.decode(errors="replace")))
        error.code = code
        raise error


class _Owned:
    """What a function of the library made; it is freed with this object. A request keeps what it needs."""

    def __init__(self, make, delete, *arguments):
        self.pointer, self._delete, err = C.c_void_p(), delete, _Err()
        _check(make(C.byref(self.pointer), *arguments, C.byref(err)), err)

    def __del__(self):
        self._delete(self.pointer)


def _set(struct, name, value):
    """Sets a field of a struct; a value that does not fit is a ValueError that names it."""
    kind, given = dict(struct._fields_)[name], value
    try:
        if kind is _TEXT:
            value = None if value is None else os.fsencode(value)
        elif kind in (C.c_float, C.c_double):
            value = float(math.nan if isinstance(value, (str, bytes)) else value)
        else:
            value = value.__index__()  # of int, bool and numpy's
            limit = 1 if kind is C.c_bool else 2 ** (8 * C.sizeof(kind) - 1) - 1
            if not (0 if kind is C.c_bool else -limit - 1) <= value <= limit:
                raise ValueError
        if kind in (C.c_float, C.c_double) and math.isnan(value):
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        want = "a text" if kind is _TEXT else "a number" if kind in (C.c_float, C.c_double) else "True or False" if kind is C.c_bool else "a whole number"
        raise ValueError(f"{name}: {given!r}, expected {want}") from None
    setattr(struct, name, value)


# ---- Parameters and results, with vLLM's names ----

def _no_argument(called, name, known):
    near = difflib.get_close_matches(name, known, 1)
    return TypeError(f"{called}() has no argument {name!r}; " + (f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"))


class _Params:
    def __new__(cls, *_, **given):
        for name in given:  # the first that is wrong
            if name not in cls.__dataclass_fields__:
                raise _no_argument(cls.__name__, name, set(cls.__dataclass_fields__))
        return super().__new__(cls)


@dataclass
class StructuredOutputsParams(_Params):
    """The texts that an output may be: one of json (a schema as dict or as text), regex, choice, grammar (GBNF or Lark) and json_object."""
    json: str | dict | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def _compile(self, model):
        kinds = {"json": _JSON_SCHEMA, "regex": _REGEX, "choice": _CHOICE, "grammar": _GBNF, "json_object": _JSON_OBJECT}
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1 or self.json_object is False:
            raise ValueError(f"structured_outputs: {' and '.join(given) or 'nothing'} given, expected one of {', '.join(kinds)}")
        value = getattr(self, given[0])
        is_json = given[0] == "choice" or given[0] == "json" and not isinstance(value, str)
        if given[0] == "choice" and (isinstance(value, str) or not all(isinstance(x, str) for x in value)):
            raise ValueError("structured_outputs: choice: expected a list of texts")
        text = (json.dumps(value if given[0] == "json" else list(value)) if is_json else "" if value is True else value).encode()
        pattern = self.whitespace_pattern
        grammar = _Grammar(kinds[given[0]], text, len(text), self.disable_any_whitespace, self.disable_additional_properties,
                           None if pattern is None else pattern.encode())
        return _Owned(_lib.toka_constraint_new, _lib.toka_constraint_del, model, C.byref(grammar))


@dataclass
class SamplingParams(_Params):
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0                     # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None            # None: another one for each request
    max_tokens: int | None = 16        # None: as many as the model's length leaves
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None        # k, at most 100: the k best of each token, too
    prompt_logprobs: int | bool | None = None  # those of the prompt; k: the k best of each token, too
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | dict | None = None
    detokenize: bool = True            # False: outputs have token_ids and no text
    best_of: int | None = None         # only n: all samples are returned

    def __post_init__(self):
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of: {self.best_of}, expected n or None: sample n={self.best_of} and take the best by cumulative_logprob")
        if self.max_tokens == 0:
            raise ValueError("max_tokens: 0, expected 1 or more, or None: as many as the model's length leaves")
        if not self.detokenize and self.stop:
            raise ValueError("detokenize: False, but stop needs the text")
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = StructuredOutputsParams(**self.structured_outputs)
        request, err = _lib.toka_request_default(), _Err()
        self._fill(request)
        _check(_lib.toka_check_request(C.byref(request), C.byref(err)), err)

    def _fill(self, r):
        """Sets what needs no model in a C request, but its seed."""
        s = r.sampling
        _set(r, "n", self.n)
        r.keep_special, r.ids_only = not self.skip_special_tokens, not self.detokenize
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                     "min_tokens", "ignore_eos"):
            _set(s, name, getattr(self, name))
        if self.seed is not None and not hasattr(self.seed, "__index__"):
            raise ValueError(f"seed: {self.seed!r}, expected a whole number")
        _set(s, "max_tokens", self.max_tokens or 0)
        s.include_stop = self.include_stop_str_in_output
        for struct, name, field_of in ((s, "logprobs", "logprobs"), (r, "prompt_logprobs", "prompt_top")):
            k = getattr(self, name) or 0
            if not hasattr(k, "__index__") or not 0 <= k <= _MAX_LOGPROBS:
                raise ValueError(f"{name}: {k!r}, expected 0 to {_MAX_LOGPROBS}")
            setattr(struct, field_of, 0 if k is True else k)
        r.prompt_logprobs = self.prompt_logprobs is not None and self.prompt_logprobs is not False
        s.stop = _texts(self.stop, "stop")
        s.n_stop = 1 if isinstance(self.stop, str) else len(self.stop or [])
        for name, ids_field, count_field in (("stop_token_ids", "stop_ids", "n_stop_ids"), ("allowed_token_ids", "allowed_ids", "n_allowed")):
            given = getattr(self, name)
            values = _ids([] if given is None else given, name)
            setattr(s, ids_field, values), setattr(s, count_field, len(values))
        if self.allowed_token_ids is not None and not s.n_allowed:
            raise ValueError("allowed_token_ids: no ids, expected some, or None: all are allowed")
        try:
            bias = {int(i): float(value) for i, value in (self.logit_bias or {}).items()}
        except (AttributeError, TypeError, ValueError):
            raise ValueError(f"logit_bias: {self.logit_bias!r}, expected {{token id: number}}") from None
        s.bias_ids, s.bias_values, s.n_bias = _ids(list(bias), "logit_bias"), (C.c_float * len(bias))(*bias.values()), len(bias)


@dataclass
class CompletionOutput:
    """One sample. The arrays have one entry a token; top_* are [tokens][k], if logprobs=k was wanted. logprobs are of the raw
    logits, sampled_logprobs of the distribution that was drawn from. routed_experts: with LLM(enable_return_routed_experts=True),
    [tokens of the prompt and of this sample, but the last][layers][experts of a token]."""
    index: int
    text: str = ""
    token_ids: np.ndarray = None
    logprobs: np.ndarray = None
    sampled_logprobs: np.ndarray = None
    top_ids: np.ndarray = None
    top_logprobs: np.ndarray = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: np.ndarray = None

    @property
    def cumulative_logprob(self):
        return float(self.logprobs.sum(dtype=np.float64))


@dataclass
class RequestOutput:
    prompt: str | None
    prompt_token_ids: np.ndarray
    outputs: list[CompletionOutput]
    prompt_logprobs: np.ndarray = None      # [tokens]; the first is 0
    prompt_top_ids: np.ndarray = None       # [tokens][k], if prompt_logprobs=k was wanted; the first row is -1
    prompt_top_logprobs: np.ndarray = None
    num_cached_tokens: int = 0
    finished: bool = True
    request_id: str = None


@dataclass
class EmbeddingOutput:
    embedding: np.ndarray


@dataclass
class EmbeddingRequestOutput:
    prompt: str | None
    prompt_token_ids: np.ndarray
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass
class ScoringOutput:
    score: float


@dataclass
class ScoringRequestOutput:
    prompt_token_ids: np.ndarray  # of both texts
    outputs: ScoringOutput
    finished: bool = True


@dataclass
class StreamOutput:
    """One token of a stream; text is what became final with it."""
    index: int
    text: str
    token_id: int
    logprob: float
    finish_reason: str | None


@dataclass
class _Sample:  # while it grows
    text: bytearray = field(default_factory=bytearray)
    ids: array.array = field(default_factory=lambda: array.array("i"))
    logprobs: array.array = field(default_factory=lambda: array.array("f"))
    sampled: array.array = field(default_factory=lambda: array.array("f"))
    top_ids: array.array = field(default_factory=lambda: array.array("i"))
    top_logprobs: array.array = field(default_factory=lambda: array.array("f"))
    finish: str | None = None
    stop: int | str | None = None
    n_cached: int = 0
    experts: np.ndarray = None

    def add(self, event, stops):
        if event.text_bytes:
            self.text += C.string_at(event.text, event.text_bytes)
        if event.id >= 0:
            self.ids.append(event.id)
            self.logprobs.append(event.logprob)
            self.sampled.append(event.sampled_logprob)
        if event.n_top:
            self.top_ids.extend(event.top_ids[:event.n_top])
            self.top_logprobs.extend(event.top_logprobs[:event.n_top])
        self.finish, self.n_cached = _FINISH[event.finish], event.n_cached
        self.stop = stops[event.stop_text] if event.stop_text >= 0 else event.stop_id if event.stop_id >= 0 else None
        if event.id < 0 and self.finish in ("stop", "length"):
            self.stop = "nothing is left to draw"

    def output(self, index):
        view = lambda values, kind: np.frombuffer(values, kind) if values else np.empty(0, kind)  # no copy
        shape = (len(self.ids), -1) if self.ids else (0, 0)
        return CompletionOutput(index, self.text.decode(errors="replace"), view(self.ids, np.int32), view(self.logprobs, np.float32),
                                view(self.sampled, np.float32), view(self.top_ids, np.int32).reshape(shape) if self.top_ids else None,
                                view(self.top_logprobs, np.float32).reshape(shape) if self.top_ids else None, self.finish, self.stop,
                                self.experts)


def _id_array(values, name):
    try:
        ids = np.asarray(values)
        fits = ids.ndim == 1 and (not len(ids) or ids.dtype.kind in "iu" and -2**31 <= ids.min() and ids.max() < 2**31)
    except ValueError:  # lists of different lengths
        fits = False
    if not fits:
        raise ValueError(f"{name}: {repr(values):.200}, expected a list of token ids")
    return np.ascontiguousarray(ids, np.int32)


def _ids(values, name):
    ids = _id_array(values, name)
    return (C.c_int32 * len(ids)).from_buffer_copy(ids)


def _content(value, where):
    """The content of a message: a text, or a list of text parts, each on lines of its own."""
    if value is None or isinstance(value, str):
        return value
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in value] if isinstance(value, list) else [value]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{where}: {repr(value):.200}, expected a text or a list of text parts")
    return "\n".join(parts)


def _messages(messages):
    """The messages as chat templates read them. Refuses what is no list of dicts, and a dict without role or content. An answer with tool
    calls needs no content."""
    if not isinstance(messages, (list, tuple)) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"messages: {repr(messages):.200}, expected a list, as [{{'role': 'user', 'content': 'Hello'}}]")
    for i, message in enumerate(messages):
        for name in ("role", "content"):
            if name not in message and not (name == "content" and message["role"] == "assistant"):
                near = difflib.get_close_matches(name, map(str, message), 1)
                raise ValueError(f"messages[{i}] has no {name!r}" + (f", but {near[0]!r}; did you mean {name}?" if near else f": {repr(message):.200}"))
        if not isinstance(message["role"], str):
            raise ValueError(f"messages[{i}]: role: {message['role']!r}, expected a text")
    return [{**message, "content": _content(message["content"], f"messages[{i}]: content")} if "content" in message else message
            for i, message in enumerate(messages)]


def _texts(values, name):
    """One text or a list of them, None for none, as an array of C strings."""
    texts = [] if values is None else [values] if isinstance(values, str) else values
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name}: {values!r}, expected a text or a list of texts")
    return (_TEXT * len(texts))(*(text.encode() for text in texts))


_UNUSED = {  # arguments of vLLM's LLM that ask for what is always so: the values that mean it, and why
    "trust_remote_code": ((False, True), "no code of a model is ever run"),
    "tokenizer_mode": (("auto",), "the tokenizer is that of the model"),
    "skip_tokenizer_init": ((False,), "prompts may be prompt_token_ids all the same; detokenize=False leaves out the text"),
    "enable_chunked_prefill": ((None, True), "long prompts are always computed in parts"),
    "disable_log_stats": ((False, True), "nothing is logged"),
    "cpu_offload_gb": ((0,), "weights stay on the device"),
    "swap_space": ((), "preempted sequences are computed again, not swapped"),
    "block_size": ((), "a page has 16 tokens on a CPU, 64 on a GPU"),
    "load_format": (("auto", "safetensors"), "weights are safetensors"),
    "runner": (("auto", "generate", "pooling"), "every model generates and embeds"),
    "task": (("auto", "generate", "embed"), "every model generates and embeds"),
    "distributed_executor_backend": ((None, "mp", "uni"), "ranks are threads of one process"),
    "async_scheduling": ((None, True), "it is always on"),
}

# arguments of vLLM's and transformers' functions that are none of a template
_NOT_OF_TEMPLATES = {"chat_template", "chat_template_content_format", "continue_final_message", "lora_request", "mm_processor_kwargs",
                     "tokenization_kwargs", "use_tqdm", "padding", "truncation", "max_length", "return_tensors", "return_dict"}


def _is_allowed(value, allowed):
    """Is it one of these values? None given: is it a number of 0 or more?"""
    if not allowed:
        return isinstance(value, (int, float)) and 0 <= value < math.inf
    return any(value is x or type(value) is type(x) and value == x for x in allowed)


@contextlib.contextmanager
def _hub_cache(folder):
    """Makes the library look for models in this folder, as --download-dir; None: in the usual one."""
    before = os.environ.get("HF_HUB_CACHE")
    if folder is not None:
        os.environ["HF_HUB_CACHE"] = os.fspath(folder)
    try:
        yield
    finally:
        if folder is not None:
            os.environ.pop("HF_HUB_CACHE")
            if before is not None:
                os.environ["HF_HUB_CACHE"] = before


class LLM:
    """An open model. The arguments are those of the command line, with vLLM's names; model None is the embedded one. seed: from it
    come the seeds of requests that have none, in their order; None: they are random. download_dir: the hub cache."""

    def __init__(self, model=None, *, enable_prefix_caching=True, num_threads=0, seed=None, revision=None, download_dir=None,
                 **options):
        self._pid = os.getpid()
        # _lock guards these: the threads that are in a call of the library, and the callback of each request that runs. An
        # exception of a signal handler leaves it free, as its `with` is not a Python function (that of a Condition is one).
        self._lock = threading.RLock()
        self._changed, self._users, self._running, self._closed = threading.Condition(self._lock), [], {}, False
        o, err = _lib.toka_options_default(), _Err()
        if seed is not None and (isinstance(seed, bool) or not hasattr(seed, "__index__")):
            raise ValueError(f"seed: {seed!r}, expected a whole number")
        self._random = random.SystemRandom() if seed is None else random.Random(int(seed))
        if (tokenizer := options.pop("tokenizer", None)) not in (None, model):
            raise ValueError(f"tokenizer: {tokenizer!r}, expected None or the model: the tokenizer is that of the model")
        if isinstance(config := options.get("speculative_config"), dict):
            options["speculative_config"] = json.dumps(config)
        _set(o, "model", model if revision is None else f"{os.fspath(model)}@{revision}")
        if not isinstance(enable_prefix_caching, bool):
            raise ValueError(f"enable_prefix_caching: {enable_prefix_caching!r}, expected True or False")
        o.no_prefix_caching = not enable_prefix_caching
        _set(o, "n_threads", num_threads)
        known = {name for name, _ in _Options._fields_} - {"model", "no_prefix_caching", "n_threads", "progress", "progress_user"}
        for name, value in options.items():
            if name in _UNUSED:
                allowed, why = _UNUSED[name]
                if not _is_allowed(value, allowed):
                    raise ValueError(f"{name}: {value!r}, expected {' or '.join(map(repr, allowed)) or 'a number of 0 or more'}: {why}")
            elif name not in known:
                raise _no_argument("LLM", name, known | set(_UNUSED))
            else:
                _set(o, name, "float32" if name == "dtype" and value == "float" else value)
                if name.endswith("_parallel_size") and not value:  # the library takes 0 as the default
                    raise ValueError(f"{name}: {value!r}, expected 1 to 64")
        self._open = C.c_void_p()
        with _hub_cache(download_dir):
            _check(_lib.toka_open(C.byref(self._open), C.byref(o), C.byref(err)), err)
        _open_models.add(self)
        info = _lib.toka_get_info(self._open)
        self.info = {name: v.decode() if isinstance(v := getattr(info, name), bytes) else v for name, _ in _Info._fields_}

    @contextlib.contextmanager
    def _use(self):
        """The handle, for a call of the library. Once the LLM is closed, the last call that ends frees the model."""
        if os.getpid() != self._pid:
            raise RuntimeError("this LLM was made before a fork, and its threads are not in this process: make it here, or start processes with spawn")
        # the handler of a signal may raise after any call, so also before the yield
        thread, entered = threading.get_ident(), False
        try:
            with self._lock:
                if self._closed:
                    raise ValueError(_CLOSED)
                entered = True
                self._users.append(thread)
            yield self._open
        finally:
            if entered:
                with self._lock:
                    self._users.remove(thread)
                    self._free_if_unused()

    def _free_if_unused(self):
        if self._closed and self._open and not self._users:
            _lib.toka_close(self._open)
            self._open = C.c_void_p()
            self._running.clear()
            self._changed.notify_all()

    def close(self):
        """Frees the model, and cancels the requests that run: after the tokens that are there, their streams raise ValueError, as
        generate() does on another thread. Waits until other threads have left the library."""
        if os.getpid() != self._pid:
            return  # after a fork it is the other process's
        with self._lock:
            self._closed = True
            self._cancel(self._running)
            self._free_if_unused()
            # in a signal handler this thread may be in a call itself, which then frees the model
            while self._open and threading.get_ident() not in self._users:
                self._changed.wait()

    def __del__(self):
        if getattr(self, "_open", None):
            self.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # ---- Text and tokens ----

    def encode(self, text, add_special_tokens=True):
        if not isinstance(text, str):
            raise TypeError(f"text: {text!r}, expected a text")
        data, out, n, err = text.encode(), _IDS(), C.c_size_t(), _Err()
        flags = _PARSE_SPECIAL | (_ADD_SPECIAL if add_special_tokens else 0)
        with self._use() as model:
            _check(_lib.toka_encode(model, data, len(data), flags, C.byref(out), C.byref(n), C.byref(err)), err)
        ids = np.ctypeslib.as_array(out, (n.value,)).copy() if n.value else np.empty(0, np.int32)
        _free(out)
        return ids

    def decode(self, token_ids, skip_special_tokens=False):
        ids, flags = _ids(token_ids, "token_ids"), _SKIP_SPECIAL if skip_special_tokens else 0
        return self._text(_lib.toka_decode, ids, len(ids), flags)

    def apply_chat_template(self, messages, add_generation_prompt=True, tokenize=False, chat_template_kwargs=None, **arguments):
        """The text of a conversation; with tokenize its ids. arguments: of the template, such as tools and enable_thinking; they may
        also be in the dict chat_template_kwargs. Another template than the model's: LLM(chat_template=FILE)."""
        for name in [name for name in arguments if name in _NOT_OF_TEMPLATES]:
            if arguments.pop(name) not in (None, False, "auto"):
                raise ValueError(f"{name}: it is not done here, expected None" + ("; LLM(chat_template=FILE) is" if name == "chat_template" else ""))
        arguments |= chat_template_kwargs or {}
        context = json.dumps({"messages": _messages(messages), "add_generation_prompt": add_generation_prompt, **arguments}).encode()
        text = self._text(_lib.toka_apply_chat_template, context, len(context), None)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _text(self, function, *arguments):
        out, n, err = C.c_void_p(), C.c_size_t(), _Err()
        with self._use() as model:
            _check(function(model, *arguments, C.byref(out), C.byref(n), C.byref(err)), err)
        text = C.string_at(out, n.value).decode(errors="replace")
        _free(out)
        return text

    def score(self, data_1, data_2=None):
        """With one argument, token ids: the log-probability of each token after those before it; 0 for the first. With two, each
        a text or a list of texts: the cosine of the embeddings of each pair, as vLLM; one text of data_1 goes with all of data_2.
        The texts are taken as they are: without the prompts that the folder has for queries and documents."""
        if data_2 is not None:
            return self._score_pairs(*([x] if isinstance(x, str) else list(x) for x in (data_1, data_2)))
        request = self._request({"prompt_token_ids": _id_array(data_1, "data_1")}, SamplingParams(prompt_logprobs=True))

        def begin(r, stops):
            r.n, scored = 0, _Sample()
            return scored, lambda event: scored.add(event, stops)

        (_, scored), = self._run_all([request], begin)
        return scored.output(0).logprobs

    def _score_pairs(self, queries, documents):
        if len(queries) not in (1, len(documents)) or not documents:
            raise ValueError(f"{len(queries)} texts for {len(documents)}, expected one or as many")
        vectors = self.embed(queries + documents)
        pairs = zip(vectors[:len(queries)] * (len(documents) if len(queries) == 1 else 1), vectors[len(queries):])
        unit = lambda x: x.outputs.embedding / np.linalg.norm(x.outputs.embedding)
        return [ScoringRequestOutput(np.concatenate((a.prompt_token_ids, b.prompt_token_ids)), ScoringOutput(float(unit(a) @ unit(b))))
                for a, b in pairs]

    # ---- Requests ----

    def _request(self, prompt, params, parse_only=False):
        """The C request, what must live as long as it, and the ids of the prompt. A prompt is text, a dict with
        prompt_token_ids, or a list of ids."""
        r = _lib.toka_request_default()
        if isinstance(prompt, dict):
            if not {"prompt", "prompt_token_ids"} & prompt.keys():
                raise ValueError(f"a prompt with {', '.join(map(repr, prompt))}, expected 'prompt' or 'prompt_token_ids'")
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        ids = self.encode(prompt, not parse_only) if isinstance(prompt, str) else _id_array(prompt, "prompts")
        held = [ids]
        r.ids, r.n_ids = ids.ctypes.data_as(_IDS), len(ids)
        if params is None:
            with self._use() as model:
                _lib.toka_request_model_defaults(model, C.byref(r))
            return r, held, ids, [r.sampling.stop[i].decode() for i in range(r.sampling.n_stop)]
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params: {params!r}, expected SamplingParams or None")
        params._fill(r)
        s, stops = r.sampling, [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
        s.seed = self._random.getrandbits(64) if params.seed is None else params.seed % 2**64
        if params.bad_words:
            texts = _texts(params.bad_words, "bad_words")
            with self._use() as model:
                held.append(_Owned(_lib.toka_words_new, _lib.toka_words_del, model, texts, len(texts)))
            s.bad_words = held[-1].pointer
        if params.structured_outputs is not None:
            with self._use() as model:
                held.append(params.structured_outputs._compile(model))
            s.constraint = held[-1].pointer
        return r, held, ids, stops

    def _experts(self):
        """Of the sample whose event is delivered."""
        n = _lib.toka_routed_experts(self._open, 0, None)
        experts = np.zeros((n, self.info["n_layers"], self.info["n_routed"]), np.int16)
        if n:
            _lib.toka_routed_experts(self._open, 0, experts.ctypes.data)
        return experts

    def _submit(self, r, held, callback, numbers):
        """Appends the request's number to numbers even if the handler of a signal raises."""
        number, err, code = C.c_int64(-1), _Err(), 0
        with self._lock, self._use() as model:
            try:
                code = _lib.toka_submit(model, C.byref(r), callback, None, C.byref(number), C.byref(err))
            finally:
                if number.value >= 0:
                    self._running[number.value] = callback
                    numbers.append(number.value)
        held.clear()
        _check(code, err)

    @contextlib.contextmanager
    def _ending(self, numbers):
        """Inside, requests are submitted and run; an exception cancels them, and is raised again once they have ended. If the
        LLM is closed they end with it: a stream may be left when Python ends and starts no more threads."""
        try:
            yield
        except BaseException:
            self._cancel(numbers)
            with contextlib.suppress(Exception):  # the first exception is the one that matters
                if not self._closed:
                    self._drive()
            raise
        finally:
            self._forget(numbers)

    def _cancel(self, numbers):
        with self._lock:
            for number in numbers if self._open else ():
                _lib.toka_cancel(self._open, number)

    def _forget(self, numbers):
        """The requests have ended. If the LLM was closed before, they may not have: then freeing the model ends them."""
        with self._lock:
            for number in () if self._closed else numbers:
                del self._running[number]

    def _run(self, then):
        """Runs the engine on another thread until all requests have ended; there calls then(None), or then(exception)."""
        def run():
            err = _Err()
            try:
                with self._use() as model:
                    code = _lib.toka_run(model, 0, C.byref(err))
                _check(code, err)
            except Exception as error:
                return then(error)
            then(None)

        threading.Thread(target=run, daemon=True).start()

    def _drive(self):
        """Runs the engine until all requests have ended, so that Ctrl-C reaches this thread."""
        ended = queue.SimpleQueue()  # not an Event: if Ctrl-C interrupts its functions, its lock may stay taken
        self._run(ended.put)
        error = ended.get()
        if error:
            raise error

    @staticmethod
    def _list(prompts):
        """One prompt, or a list of them, as a list."""
        if not isinstance(prompts, (str, dict)) and not hasattr(prompts, "__len__"):
            raise TypeError(f"prompts: {prompts!r}, expected a text, a list of ids, or a list of such prompts")
        is_one = isinstance(prompts, (str, dict)) or (len(prompts) and isinstance(prompts[0], (int, np.integer)))
        return [prompts] if is_one else list(prompts)

    def _run_all(self, requests, begin):
        """Runs requests of _request together; if one is refused, none runs. begin(request, stops) returns what becomes the
        result, and the function that takes an event; _run_all returns these with the prompts' ids."""
        numbers, jobs, aborted = [], [], False
        with self._ending(numbers):
            for r, held, ids, stops in requests:
                result, take = begin(r, stops)

                def on_event(_, event, take=take):
                    nonlocal aborted
                    aborted |= event.contents.finish == _ABORT
                    take(event.contents)
                    return 0

                callback = _EVENT_FN(on_event)
                jobs.append((ids, result, callback))
                self._submit(r, held, callback, numbers)
            self._drive()
        if aborted:
            raise ValueError(_CLOSED)
        return [job[:2] for job in jobs]

    def generate(self, prompts, sampling_params=None, use_tqdm=False, *, _parse_only=False):
        """Runs all prompts together; the results are in their order. sampling_params: one for all, a list with one for each, or
        None: the defaults of the model's generation_config.json. use_tqdm: counts the samples that are done on standard error."""
        n_done = 0
        prompts = self._list(prompts)
        params = list(sampling_params) if isinstance(sampling_params, (list, tuple)) else [sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} sampling_params")

        def begin(r, stops):
            samples, scored = collections.defaultdict(_Sample), _Sample()  # an n that is refused makes no samples

            def take(event):
                nonlocal n_done
                if event.sample >= 0:
                    samples[event.sample].add(event, stops)
                    if event.finish and self.info["n_routed"]:
                        samples[event.sample].experts = self._experts()
                    if use_tqdm and event.finish:
                        n_done += 1
                        print(f"\r{n_done} samples done", end="", file=sys.stderr, flush=True)
                else:
                    if not scored.ids:  # what could come first is not known
                        scored.top_ids.extend([-1] * r.prompt_top), scored.top_logprobs.extend([math.nan] * r.prompt_top)
                    scored.add(event, stops)

            return (samples, scored.output), take

        done = self._run_all((self._request(p, s, _parse_only) for p, s in zip(prompts, params)), begin)
        if n_done:
            print(file=sys.stderr)
        results = []
        for i, (prompt, (ids, (samples, scored))) in enumerate(zip(prompts, done)):
            of_prompt = scored(0)
            results.append(RequestOutput(prompt if isinstance(prompt, str) else None, ids, [samples[k].output(k) for k in range(len(samples))],
                                         of_prompt.logprobs if len(of_prompt.logprobs) else None, of_prompt.top_ids,
                                         of_prompt.top_logprobs, samples[0].n_cached, True, str(i)))
        return results

    def embed(self, prompts, dimensions=None):
        """Embeds all texts, or lists of ids, together, as the model's folder defines it; the results are in their order.
        dimensions: the vectors are cut to so many elements (Matryoshka) before they are normalized."""
        prompts, err = self._list(prompts), _Err()

        def begin(r, stops):
            with self._use() as model:
                _check(_lib.toka_request_embedding(model, C.byref(r), C.byref(err)), err)
            r.dimensions = r.dimensions if dimensions is None else dimensions
            vectors = []

            def take(event):
                if event.n_vector:
                    vectors.append(np.ctypeslib.as_array(event.vector, (event.n_vector,)).copy())

            return vectors, take

        done = self._run_all((self._request(p, SamplingParams()) for p in prompts), begin)
        return [EmbeddingRequestOutput(p if isinstance(p, str) else None, ids, EmbeddingOutput(vectors[0]))
                for p, (ids, vectors) in zip(prompts, done)]

    def chat(self, messages, sampling_params=None, use_tqdm=False, **arguments):
        """generate() through the chat template. messages: one conversation or a list of them; arguments: of the template."""
        many = messages if isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], list) else [messages]
        return self.generate([self.apply_chat_template(m, **arguments) for m in many], sampling_params, use_tqdm, _parse_only=True)

    def stream(self, prompt, sampling_params=None, *, _parse_only=False):
        """Yields a StreamOutput for each token of one prompt, as it comes. Leaving the loop ends the request."""
        events, numbers = queue.SimpleQueue(), []  # tokens; an exception; None at the end
        r, held, _, _ = self._request(prompt, sampling_params, _parse_only)

        def on_event(_, event):
            e = event.contents
            if e.finish == _ABORT:
                events.put(ValueError(_CLOSED))
            elif e.sample >= 0:
                text = C.string_at(e.text, e.text_bytes).decode(errors="replace") if e.text_bytes else ""
                events.put(StreamOutput(e.sample, text, e.id, e.logprob, _FINISH[e.finish]))
            return 0

        with self._ending(numbers):
            self._submit(r, held, _EVENT_FN(on_event), numbers)
            self._run(events.put)
            while (event := events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event

    def chat_stream(self, messages, sampling_params=None, **arguments):
        return self.stream(self.apply_chat_template(messages, **arguments), sampling_params, _parse_only=True)

    def get_default_sampling_params(self):
        """The values of the model's generation_config.json, to change some of them."""
        r = _lib.toka_request_default()
        with self._use() as model:
            _lib.toka_request_model_defaults(model, C.byref(r))
        s = r.sampling
        numbers = {name: float(f"{getattr(s, name):.7g}") for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
        return SamplingParams(n=r.n, top_k=s.top_k, max_tokens=s.max_tokens or None, min_tokens=s.min_tokens,
                              stop=[s.stop[i].decode() for i in range(s.n_stop)] or None, **numbers)

    def get_tokenizer(self):
        return self  # it has encode, decode and apply_chat_template


_open_models = weakref.WeakSet()


@atexit.register
def _close_all():
    """Before Python ends, since a thread in the library could not return to it later."""
    for model in list(_open_models):
        model.close()
