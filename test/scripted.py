"""A model folder whose greedy answers are given texts.

The embedding of token i is a unit vector, attention and MLP are zero, and row j of the LM head is the unit vector of the token before
j. So each token has one next token. A script is a text in pieces, one token each; no piece may occur twice in all scripts. The chat
template ends the prompt with the token <go:NAME>, where NAME is the content of the last message of a user or tool; it begins the script
NAME. Text that is no piece is encoded byte by byte.
"""
import json
import os
import struct

import numpy as np


def byte_letters():
    """The letters that byte-level BPE writes for the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(rest)) for b in range(256)]


def raw(text):
    """The bytes of a text in which U+DC80 .. U+DCFF are bytes, as Python's surrogateescape has them."""
    return text.encode("utf-8", "surrogateescape")


def cut(text, tokens, taken):
    """Cuts a text into pieces that are not taken: texts of `tokens`, which are whole, and else as few characters as possible. A byte 0 is
    no part of the text: there a piece ends, so text with it is none of `tokens`."""
    pieces = []
    while text:
        whole = next((t for t in tokens if text.startswith(t)), None)
        most = min((text.index(t) for t in (*tokens, "\0") if t in text), default=len(text))
        n = len(whole) if whole else min(3, most)
        while not whole and (text[:n] in taken or len(raw(text[:n])) == 1) and n < most:
            n += 1
        piece = text[:n]
        while (piece in taken or len(raw(piece)) == 1) and pieces:  # the end of the text
            taken.remove(pieces[-1])
            piece = pieces.pop() + piece
        assert piece not in taken, f"the piece {piece!r} occurs twice"
        taken.add(piece)
        pieces.append(piece)
        text = text[n:].removeprefix("\0")
    return pieces


def write_safetensors(path, tensors):
    head, data = {}, b""
    for name, values in tensors.items():
        raw = values.astype("<f4").tobytes()
        head[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(head).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def write_model(folder, scripts, template, special=()):
    """scripts: NAME -> text. template: begins the prompt. special: texts that are special tokens of their own."""
    os.makedirs(folder, exist_ok=True)
    letters = byte_letters()
    texts = ["<eos>", *special, *(f"<go:{name}>" for name in scripts)]  # added tokens
    taken, chains = set(), {}
    for name, text in scripts.items():
        chains[name] = cut(text, special, taken)
    pieces = [p for chain in chains.values() for p in chain if p not in special]
    vocab = {t: i for i, t in enumerate(texts)}
    vocab.update({c: len(texts) + i for i, c in enumerate(letters)})
    for p in pieces:
        vocab["".join(letters[b] for b in raw(p))] = len(vocab)
    ids = {p: vocab[p] if p in special else vocab["".join(letters[b] for b in raw(p))] for p in taken}
    n = len(vocab)
    head = np.zeros((n, n), dtype=np.float32)
    following = np.zeros(n, dtype=int)  # <eos> after everything else
    for name, chain in chains.items():
        run = [vocab[f"<go:{name}>"], *(ids[p] for p in chain), 0]
        following[run[:-1]] = run[1:]
    head[following, np.arange(n)] = 1
    zeros = lambda *shape: np.zeros(shape, dtype=np.float32)
    layer = "model.layers.0."
    write_safetensors(os.path.join(folder, "model.safetensors"), {
        "model.embed_tokens.weight": np.eye(n, dtype=np.float32), "lm_head.weight": head, "model.norm.weight": np.ones(n),
        layer + "input_layernorm.weight": np.ones(n), layer + "post_attention_layernorm.weight": np.ones(n),
        layer + "self_attn.q_proj.weight": zeros(16, n), layer + "self_attn.k_proj.weight": zeros(16, n),
        layer + "self_attn.v_proj.weight": zeros(16, n), layer + "self_attn.o_proj.weight": zeros(n, 16),
        layer + "mlp.gate_proj.weight": zeros(16, n), layer + "mlp.up_proj.weight": zeros(16, n), layer + "mlp.down_proj.weight": zeros(n, 16)})
    added = [{"id": vocab[t], "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for t in texts]
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": n, "num_attention_heads": 1, "num_key_value_heads": 1,
              "head_dim": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": n, "max_position_embeddings": 4096,
              "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 0, "torch_dtype": "float32"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": level,
                 "post_processor": None, "decoder": level, "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                 "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []}}
    last = "{% for m in messages %}{% if m.role in ('user', 'tool') %}{% set go.name = m.content %}{% endif %}{% endfor %}{{ '<go:' ~ go.name ~ '>' }}"
    files = {"config.json": config, "generation_config.json": {"eos_token_id": 0, "temperature": 0}, "tokenizer.json": tokenizer,
             "tokenizer_config.json": {"chat_template": "{% set go = namespace(name='') %}" + template + last}}
    for name, value in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            json.dump(value, f, ensure_ascii=False)
