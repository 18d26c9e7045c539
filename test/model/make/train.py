#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the embedded model: tokenizer, training, judgement. RECORD.md says what one run of it gave.

    python3 test/model/make/problems.py --seed 20261121 --n 1000 --jsonl > test/model/heldout.jsonl
    python3 test/model/make/train.py tokenizer                 tokenizer.json, tokenizer_config.json and the two configs
    python3 test/model/make/train.py train                     model.safetensors; one GPU, under seven minutes on an H200
    python3 test/model/make/train.py judge                     accuracy of the saved bf16 weights by transformers in float32
    python3 test/model/make/train.py golden                    golden.json: greedy ids from transformers, float32, on the CPU

Needs torch, transformers, tokenizers, safetensors, numpy. `--dir` names another folder than test/model.

How it learns. A document is a conversation in the chat template (one problem, sometimes several, sometimes with a system message)
or, now and then, plain text. Only the assistant's tokens are learnt from, in plain text all of them. Documents are laid
end to end in one long row per step and attention stays inside each document (cu_seqlens), so nothing is padded and the model always
sees a document from position 0, as it does in use. Data is written while the GPU trains, by processes of the same program.
Matrix products run in bfloat16 under autocast, so the weights are already used rounded as they will be saved.
"""
import argparse
import json
import math
import multiprocessing
import os
import shutil
import tempfile
import time

import numpy as np

import problems

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = os.path.dirname(HERE)

# --- the model -------------------------------------------------------------------------------------------------------
E, L, H, K, D, F, V = 256, 6, 4, 2, 64, 448, 1024        # letters as in the engine: width, layers, heads, kv heads, head size, mlp, vocabulary
THETA, EPS, MAX_POS = 10000.0, 1e-5, 1024
BOS, EOS, TURN, TURN_END = "<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"
SPECIAL = [BOS, EOS, TURN, TURN_END]                     # ids 0 to 3

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# --- the training text -----------------------------------------------------------------------------------------------
N = 65536                                                # tokens per step
MAX_DOCS = 2048                                          # documents per step at most; cu_seqlens has this size
STEPS_PER_CHUNK = 32
SYSTEM = ["You are a helpful assistant.", "You solve word problems.", "You are a careful math tutor.", "Think step by step.",
          "Solve the problem and end with the answer.", "Answer briefly.", "You are toka.", "Show your work, then give the answer."]
SMALL_TALK = [
    (["Hi", "Hi!", "Hello", "Hello!", "Hey", "Hey there!", "Good morning!", "hi", "hello"],
     "Hello! Give me a word problem and I will solve it."),
    (["Who are you?", "What are you?", "What is your name?", "What can you do?", "Help", "help"],
     "I am a very small model. I solve short word problems."),
    (["Thanks", "Thanks!", "Thank you", "Thank you!", "Great!", "Well done!"], "You are welcome."),
    (["Bye", "Bye!", "Goodbye", "Goodbye!", "See you!"], "Goodbye!"),
]


def document(r, held_out):
    """One training text as a list of (text, learn) pieces, markers written out as in the chat template."""
    def turn():
        x = r.random()
        if x < 0.01:
            asks, reply = r.pick(SMALL_TALK)
            return r.pick(asks), reply
        if x < 0.16:
            return problems.finish(*problems.drill(r))[:2]
        while True:
            prompt, reply, _ = problems.problem(r)
            if prompt not in held_out:
                return prompt, reply

    if r.random() < 0.08:                                # plain text, for use without the template; the marker in front may be missing
        prompt, reply = turn()
        # "?" and a newline are one token in running text, but a prompt that ends in "?" leaves the newline to the model: learn both.
        body = [(prompt + "\n" + reply, True)] if r.random() < 0.3 else [(prompt, True), ("\n" + reply, True)]
        return [(BOS, False)] * (r.random() < 0.75) + body + [(EOS, True)]
    x = r.random()
    turns = 1 if x < 0.86 else 2 if x < 0.95 else 3 if x < 0.98 else r.n(4, 6)
    pieces = [(BOS, False)]
    if r.random() < 0.2:
        pieces += [(TURN, False), ("system\n" + r.pick(SYSTEM), False), (TURN_END, False), ("\n", False)]
    for _ in range(turns):
        prompt, reply = turn()
        pieces += [(TURN, False), ("user\n" + prompt, False), (TURN_END, False), ("\n", False),
                   (TURN, False), ("assistant\n", False), (reply, True), (TURN_END, True), ("\n", False)]
    return pieces[:-1]


def held_out_prompts():
    with open(os.path.join(MODEL, "heldout.jsonl")) as f:
        return {json.loads(line)["prompt"] for line in f}


def make_chunk(job):
    """STEPS_PER_CHUNK rows of N tokens, written to a file: tokens, targets (-1 = not learnt from), positions and cu_seqlens."""
    index, seed, folder, out = job
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    special = {s: [tok.token_to_id(s)] for s in SPECIAL}
    fixed = {}
    r, held_out = problems.Draw(f"toka training text {seed} {index}"), held_out_prompts()

    def encoded_documents():
        while True:
            docs = [document(r, held_out) for _ in range(512)]
            texts = [t for d in docs for t, _ in d if t not in special]
            ids = iter(tok.encode_batch(texts, add_special_tokens=False))
            for d in docs:
                tokens, learn = [], []
                for text, l in d:
                    piece = special[text] if text in special else next(ids).ids
                    tokens += piece
                    learn += [l] * len(piece)
                yield tokens, learn

    docs = encoded_documents()
    tokens = np.zeros((STEPS_PER_CHUNK, N), np.int16)
    target = np.full((STEPS_PER_CHUNK, N), -1, np.int16)
    pos = np.zeros((STEPS_PER_CHUNK, N), np.int16)
    cu = np.full((STEPS_PER_CHUNK, MAX_DOCS + 1), N, np.int32)
    n_docs, waiting = 0, next(docs)
    for s in range(STEPS_PER_CHUNK):
        at = row_docs = 0
        while at + len(waiting[0]) <= N and row_docs < MAX_DOCS - 1:
            t, learn = waiting
            n = len(t)
            assert n <= MAX_POS, n
            cu[s, row_docs] = at
            tokens[s, at:at + n] = t
            pos[s, at:at + n] = np.arange(n)
            target[s, at:at + n - 1] = np.where(learn[1:], t[1:], -1)
            at, row_docs, waiting = at + n, row_docs + 1, next(docs)
        cu[s, row_docs] = at                             # what is left of the row is one document without targets
        pos[s, at:] = np.arange(N - at) % MAX_POS
        n_docs += row_docs
    path = os.path.join(out, f"{index}.npz")
    np.savez(path + ".part.npz", tokens=tokens, target=target, pos=pos, cu=cu)
    os.rename(path + ".part.npz", path)
    return path, n_docs


# --- tokenizer and configs -------------------------------------------------------------------------------------------
def cmd_tokenizer(args):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tok.pre_tokenizer = pre_tokenizers.Sequence([                       # Qwen2's: every digit is a token of its own
        pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=V, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                  special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    r, held_out = problems.Draw("toka tokenizer text"), held_out_prompts()
    tok.train_from_iterator(("".join(t for t, _ in document(r, held_out) if t not in SPECIAL) for _ in range(60000)), trainer)
    tok.post_processor = processors.Sequence([                          # Llama-3's: a bos in front of every plain text
        processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tok.token_to_id(BOS))])])
    assert tok.get_vocab_size() == V
    tok.save(os.path.join(args.dir, "tokenizer.json"), pretty=True)

    bos, eos, end = (tok.token_to_id(x) for x in (BOS, EOS, TURN_END))
    write_json(args.dir, "tokenizer_config.json", {
        "added_tokens_decoder": {str(tok.token_to_id(s)): {"content": s, "lstrip": False, "normalized": False, "rstrip": False,
                                                           "single_word": False, "special": True} for s in SPECIAL},
        "bos_token": BOS, "eos_token": TURN_END, "pad_token": EOS, "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False, "model_max_length": MAX_POS, "tokenizer_class": "PreTrainedTokenizerFast"})
    write_json(args.dir, "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": bos, "eos_token_id": [end, eos], "head_dim": D, "hidden_act": "silu", "hidden_size": E,
        "initializer_range": 0.02, "intermediate_size": F, "max_position_embeddings": MAX_POS, "mlp_bias": False,
        "num_attention_heads": H, "num_hidden_layers": L, "num_key_value_heads": K, "pad_token_id": eos, "pretraining_tp": 1,
        "rms_norm_eps": EPS, "rope_scaling": None, "rope_theta": THETA, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": V})
    write_json(args.dir, "generation_config.json", {"bos_token_id": bos, "eos_token_id": [end, eos], "pad_token_id": eos,
                                                    "do_sample": False})
    lengths = [len(tok.encode("".join(t for t, _ in document(r, held_out)), add_special_tokens=False)) for _ in range(2000)]
    print(f"{V} tokens; documents have {np.mean(lengths):.0f} tokens on average, {max(lengths)} at most")


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w") as f:
        json.dump(value, f, indent=2)
        f.write("\n")


# --- training --------------------------------------------------------------------------------------------------------
def build_model(torch, mlp=None):
    """The embedded model, or one whose layers have mlp() as their feed-forward. A feed-forward may leave a loss in its `cost`."""
    nn, fn = torch.nn, torch.nn.functional

    def attention(q, k, v, cu):                          # [N][H][D] each, causal inside every document
        if q.is_cuda:
            from torch.nn.attention.varlen import varlen_attn
            return varlen_attn(q, k, v, cu, cu, MAX_POS, MAX_POS, window_size=(-1, 0))
        out = torch.empty_like(q)                        # slow, for a trial on a machine without a GPU
        for a, b in zip(cu[:-1].tolist(), cu[1:].tolist()):
            if a < b:
                x = [t[a:b].transpose(0, 1)[None] for t in (q, k, v)]
                out[a:b] = fn.scaled_dot_product_attention(*x, is_causal=True)[0].transpose(0, 1)
        return out

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(E))

        def forward(self, x):
            x = x.float()
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight

    def linear(n_in, n_out, std=0.02):
        m = nn.Linear(n_in, n_out, bias=False)
        nn.init.normal_(m.weight, std=std)
        return m

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = linear(E, H * D), linear(E, K * D), linear(E, K * D)
            self.o_proj = linear(H * D, E, 0.02 / math.sqrt(2 * L))

        def forward(self, x, cos, sin, cu):
            def rope(t):                                 # halves, as transformers stores it
                a, b = t.float().chunk(2, -1)
                return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(v.dtype)
            v = self.v_proj(x).view(-1, K, D)
            q, k = rope(self.q_proj(x).view(-1, H, D)), rope(self.k_proj(x).view(-1, K, D))
            k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
            return self.o_proj(attention(q, k, v, cu).reshape(-1, H * D))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = linear(E, F), linear(E, F), linear(F, E, 0.02 / math.sqrt(2 * L))

        def forward(self, x):
            return self.down_proj(fn.silu(self.gate_proj(x)) * self.up_proj(x))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
            self.self_attn, self.mlp = Attention(), mlp() if mlp else Mlp()

        def forward(self, x, cos, sin, cu):
            x = x + self.self_attn(self.input_layernorm(x), cos, sin, cu)
            return x + self.mlp(self.post_attention_layernorm(x))

    class Model(nn.Module):                              # parameter names are those of the file
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(V, E)
            nn.init.normal_(self.embed_tokens.weight, std=0.02)
            self.layers = nn.ModuleList(Layer() for _ in range(L))
            self.norm = Norm()
            angle = torch.arange(MAX_POS)[:, None] / THETA ** (torch.arange(0, D, 2) / D)
            self.register_buffer("cos", angle.cos()[:, None], persistent=False)
            self.register_buffer("sin", angle.sin()[:, None], persistent=False)

        def forward(self, tokens, target, pos, cu):
            x, cos, sin = self.embed_tokens(tokens), self.cos[pos], self.sin[pos]
            for layer in self.layers:
                x = layer(x, cos, sin, cu)
            logits = fn.linear(self.norm(x), self.embed_tokens.weight)
            costs = [layer.mlp.cost for layer in self.layers] if mlp else []
            return fn.cross_entropy(logits.float(), target, ignore_index=-1) + sum(costs)

    return Model()


def train(args, make_model):
    """Trains make_model(torch) on args.steps steps, or as many as there is time for. Returns it."""
    out = tempfile.mkdtemp(prefix="text-", dir=args.scratch)
    n_chunks = -(-args.steps // STEPS_PER_CHUNK)
    # Writers are started before CUDA is, because a process that has used CUDA must not fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pool = multiprocessing.get_context("fork").Pool(args.writers)
    chunks = pool.imap(make_chunk, [(i, args.seed, args.dir, out) for i in range(n_chunks)])

    import torch
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(torch).to(device)
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
                            lr=args.lr, betas=(0.9, 0.98), fused=True)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {args.steps} steps of {N} tokens on "
          f"{torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}", flush=True)
    step_model = torch.compile(model) if device == "cuda" else model

    n_docs, step, losses, start, t_first = 0, 0, [], time.time(), None
    for path, docs in chunks:
        with np.load(path) as z:
            tokens, target, pos, cu = (torch.from_numpy(z[k]).to(device) for k in ("tokens", "target", "pos", "cu"))
        os.remove(path)
        n_docs += docs
        for i in range(min(STEPS_PER_CHUNK, args.steps - step)):
            done = max(step / args.steps, (time.time() - start) / args.max_seconds if args.max_seconds else 0)
            if done >= 1:
                args.steps = step                        # out of time; the learning rate has come down all the same
                break
            lr = args.lr * min(1, (step + 1) / args.warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
            for g in opt.param_groups:
                g["lr"] = lr
            with torch.autocast(device, torch.bfloat16):
                loss = step_model(tokens[i].int(), target[i].long(), pos[i].int(), cu[i])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            step += 1
            if step % args.log == 0 or step == args.steps:
                mean, now = torch.stack(losses).mean().item(), time.time()
                if t_first is None:
                    t_first, step_first = now, step      # the first stretch holds the compilation
                rate = (step - step_first) * N / max(now - t_first, 1e-9)
                print(f"step {step}  loss {mean:.5f}  lr {lr:.2e}  {now - start:.0f} s  {rate / 1e6:.2f} M tokens/s", flush=True)
                losses = []
        if step >= args.steps:
            break
    pool.terminate()
    shutil.rmtree(out, ignore_errors=True)
    print(f"{n_docs} documents, {step * N} tokens, {time.time() - start:.0f} s, seed {args.seed}")
    return model


def cmd_train(args):
    model = train(args, build_model)
    import torch
    from safetensors.torch import save_file
    path = os.path.join(args.dir, "model.safetensors")
    save_file({"model." + k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()},
              path, metadata={"format": "pt"})
    os.chmod(path, 0o644)


# --- judgement: transformers, float32, the saved weights ---------------------------------------------------------------
def load(args, device):
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tok = transformers.AutoTokenizer.from_pretrained(args.dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.dir, dtype=torch.float32).to(device).eval()
    return torch, transformers, tok, model


def chat(tok, prompt):
    return tok.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)


def cmd_judge(args):
    import torch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch, transformers, tok, model = load(args, device)
    tok.padding_side = "left"
    with open(os.path.join(MODEL, "heldout.jsonl")) as f:
        held = [json.loads(line) for line in f][:args.n]
    texts = [chat(tok, x["prompt"]) for x in held]
    rng = problems.Draw("toka judge")
    fresh = []                                           # for a tighter figure than 1,000 problems give
    while len(fresh) < args.fresh:
        p, _, a = problems.problem(rng)
        fresh.append({"prompt": p, "answer": a})

    def answers(texts, batch=500, **how):
        replies = []
        for i in range(0, len(texts), batch):
            x = tok(texts[i:i + batch], return_tensors="pt", padding=True, add_special_tokens=False).to(device)
            with torch.no_grad():
                y = model.generate(**x, max_new_tokens=128, **how)
            replies += tok.batch_decode(y[:, x["input_ids"].shape[1]:], skip_special_tokens=True)
        return replies

    def report(name, problems_, replies, n=1, show=0):
        good = [problems.answer_of(t) == problems_[i // n]["answer"] for i, t in enumerate(replies)]
        line = f"{name}: {sum(good)} of {len(good)} = {100 * sum(good) / len(good):.2f} %"
        if n > 1:
            line += f"; at least one of {n} right: {sum(any(good[i:i + n]) for i in range(0, len(good), n))} of {len(problems_)}"
        print(line, flush=True)
        for i in [i for i, g in enumerate(good) if not g][:show]:
            print(f"    wrong: {problems_[i // n]['prompt']}\n           {replies[i]!r}, expected {problems_[i // n]['answer']}")

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device}, float32")
    report("greedy, held out", held, answers(texts, do_sample=False), show=args.show)
    if fresh:
        report("greedy, fresh", fresh, answers([chat(tok, x["prompt"]) for x in fresh], batch=2500, do_sample=False))
    torch.manual_seed(1)
    for t in args.temps:
        n, few = 16, 200
        out = answers(texts[:few], do_sample=True, temperature=t, top_k=0, top_p=1.0, num_return_sequences=n)
        report(f"sampled, T={t}, {few} problems x {n}", held[:few], out, n)
    system = [tok.apply_chat_template([{"role": "system", "content": SYSTEM[i % len(SYSTEM)]}, {"role": "user", "content": x["prompt"]}],
                                      add_generation_prompt=True, tokenize=False) for i, x in enumerate(held[:500])]
    report("greedy, with a system message", held[:500], answers(system, do_sample=False))
    second = [tok.apply_chat_template([{"role": "user", "content": a["prompt"]}, {"role": "assistant", "content": f"The answer is {a['answer']}."},
                                       {"role": "user", "content": b["prompt"]}], add_generation_prompt=True, tokenize=False)
              for a, b in zip(held[:500], held[500:1000])]
    if second:
        report("greedy, as second turn after a terse first", held[500:1000], answers(second, do_sample=False))
    raw = [BOS + x["prompt"] for x in held[:500]]
    report("greedy, plain text without the template", held[:500], answers(raw, do_sample=False))


def cmd_golden(args):
    torch, transformers, tok, model = load(args, "cpu")
    with open(os.path.join(MODEL, "heldout.jsonl")) as f:
        held = [json.loads(line) for line in f][:20]

    def one(prompt_text, **about):
        ids = tok(prompt_text, add_special_tokens=False)["input_ids"]
        x, past, greedy, gaps = torch.tensor([ids]), None, [], []
        while not greedy or (greedy[-1] not in model.config.eos_token_id and len(greedy) < 128):
            with torch.no_grad():
                y = model(x, past_key_values=past, use_cache=True)
            top, past = y.logits[0, -1].topk(2), y.past_key_values
            greedy.append(top.indices[0].item())
            gaps.append((top.values[0] - top.values[1]).item())
            x = torch.tensor([greedy[-1:]])
        return {**about, "prompt_text": prompt_text, "prompt_ids": ids, "greedy_ids": greedy, "min_gap": round(min(gaps), 4),
                "text": tok.decode(greedy, skip_special_tokens=True)}

    cases = [one(chat(tok, x["prompt"]), kind="chat", prompt=x["prompt"], answer=x["answer"]) for x in held]
    talk = [{"role": "system", "content": SYSTEM[3]}, {"role": "user", "content": held[0]["prompt"]},
            {"role": "assistant", "content": cases[0]["text"]}, {"role": "user", "content": held[1]["prompt"]}]
    cases.append(one(tok.apply_chat_template(talk, add_generation_prompt=True, tokenize=False), kind="messages", messages=talk,
                     answer=held[1]["answer"]))
    cases.append(one(BOS + held[2]["prompt"], kind="raw", prompt=held[2]["prompt"], answer=held[2]["answer"]))
    golden = {"made_with": f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, float32, CPU", "cases": cases}
    with open(os.path.join(args.dir, "golden.json"), "w") as f:          # one case to a line
        f.write(json.dumps({"made_with": golden["made_with"]})[:-1] + ', "cases": [\n' + ",\n".join(json.dumps(c) for c in cases) + "\n]}\n")
    right = sum(problems.answer_of(c["text"]) == c["answer"] for c in cases)
    print(f"{len(cases)} cases, {right} right, smallest gap {min(c['min_gap'] for c in cases)}")


def add_training_options(t, steps, lr):
    t.add_argument("--steps", type=int, default=steps)
    t.add_argument("--seed", type=int, default=1)
    t.add_argument("--lr", type=float, default=lr)
    t.add_argument("--warmup", type=int, default=300)
    t.add_argument("--log", type=int, default=500)
    t.add_argument("--writers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    t.add_argument("--scratch", default=tempfile.gettempdir(), help="where the training text waits; about 7 bytes a token")
    t.add_argument("--max-seconds", type=float, default=0, help="end by then, with the learning rate following the clock if need be")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--dir", default=MODEL, help="the model folder (default: test/model)")
    sub = p.add_subparsers(dest="command", required=True)
    sub.add_parser("tokenizer").set_defaults(run=cmd_tokenizer)
    t = sub.add_parser("train")
    t.set_defaults(run=cmd_train)
    add_training_options(t, steps=27000, lr=3e-3)
    j = sub.add_parser("judge")
    j.set_defaults(run=cmd_judge)
    j.add_argument("--n", type=int, default=1000)
    j.add_argument("--fresh", type=int, default=0, help="that many new problems beside the held-out ones")
    j.add_argument("--show", type=int, default=10)
    j.add_argument("--temps", type=float, nargs="*", default=[0.6, 0.8, 1.0])
    sub.add_parser("golden").set_defaults(run=cmd_golden)
    args = p.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
