#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Deliberate mutations of toka_kernels.cu, each of which a GPU test must catch: the test of the tests.

    python3 test/gpu_mutants.py check            no GPU, no nvcc: every mutation still fits the file, every kernel has one
    GPU_ARCH=90a python3 test/gpu_mutants.py build [FOLDER]     one program that holds all mutants; needs nvcc, no GPU
    python3 test/gpu_mutants.py run [FOLDER] [--jobs 6] [--only EXPRESSION]     on a GPU; without one: those that the CPU can tell
    (FOLDER: test/.build/mutants; what `run` needs of it is the file `mutants`)

A mutation replaces one piece of text, a bug that somebody might really write. All of them go into one copy of toka_kernels.cu, each behind
a switch: `old` becomes `(mutant(7) ? (new) : (old))`. That copy and the op tests, gpu_model among them, are compiled into one program, and
TOKA_TEST_MUTANT says which mutant it runs. With none, every test that is asked below must pass; with one, the test named there must end
with status 1 and a FAILED line of the op that was mutated. A crash, a hang or a failure of something else does not count as caught.
"""
import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import time
from collections import namedtuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KERNELS = os.path.join(ROOT, "toka_kernels.cu")
PROGRAMS = ["gpu_attn", "gpu_gemm", "gpu_rows", "gpu_samp", "gpu_smallm"]

# old: text that stands in the file once; the part between backticks (all of it if there are none) is replaced by new. A part that ends
# with a semicolon is a statement, any other an expression. test: program and arguments. line: what the FAILED line must match.
Mutant = namedtuple("Mutant", "name kernel old new test line")


def group(kernel, test, line, *mutants):
    """Mutants of one kernel (or host function) that the same test must catch: (name, old, new[, line])."""
    return [Mutant(m[0], kernel, m[1], m[2], test, m[3] if len(m) > 3 else line) for m in mutants]


MUTANTS = [
    # ---- rows: weights, embedding, norms, RoPE ----
    *group("load_place", "rows small", "load ",
           ("the last element of a piece stays behind", "if (i >= n) return;", "if (i + 1 >= n) return;"),
           ("a piece that begins inside a row begins a row", "c = (int)(`(at + i) % cols`);", "(at % 64 + i) % cols"),
           ("turns of gate and up are off by a row", "`r / 8 * 16 + r % 8` : r)) * j.stride + c", "r / 8 * 16 + r % 7", "load .* by turns")),
    *group("copy_pages_kernel", "rows small", "copies of pages",
           ("the page of another layer", "bf16 *pool = kv + `blockIdx.y * layer`;", "0 * layer"),
           ("the last 16 bytes", "i < `page / 8`; i += 256) to[i] = from[i];", "page / 8 - 1")),
    *group("embed_kernel", "rows small", "embed ",
           ("the last 16 bytes of a row", "const uint4 v = `row >= 0` && row < V", "row >= 0 && i + 1 < E / 8"),
           ("the last token of the slot before", "(id < 0 ? last[`-1 - id`] : id)", "max(-2 - id, 0)")),
    *group("rmsnorm_kernel", "rows small", "norm ",
           ("without epsilon", "rsqrtf(`block_sum_128(sum) * per_E + eps`)", "block_sum_128(sum) * per_E"),
           ("chosen rows are taken in order", "(size_t)(`rows ? rows[blockIdx.x] : blockIdx.x`) * E", "blockIdx.x", "norm .*chosen"),
           ("wrong element of the norm", "pack_bf16(f[6] * scale * b.z, f[7] * scale * `b.w`)", "b.z"),
           ("one warp's sum is lost", "(part[0] + part[1]) + (part[2] + `part[3]`)", "0.0f")),
    *group("rmsnorm", "rows small", "norm .*E=51", ("mean over the rounded-up width", "const float per_E = `1.0f / d->shape->E`;", "1.0f / d->E")),
    *group("rope_table_kernel", "rows small", "RoPE table",
           ("sine without the scale", "make_float2((float)c * scale, `(float)s * scale`)", "(float)s", "RoPE table .*scale 1.37"),
           ("frequencies one further", "freq[`i % half`]", "(i + 1) % half")),
    *group("rope_kernel", "rows small", "RoPE and pages",
           ("sine with the wrong sign", "store_pair(to + half + i, `v * cs.x + u * cs.y`", "v * cs.x - u * cs.y"),
           ("norm of the upper half", "norm_hi[k] = *(const float2 *)(`norm + half + i`);", "norm + i", "RoPE and pages .*norm"),
           ("q's norm for the first head of k", "const float *norm = `h < a.H` ? a.q_norm : h < a.H + a.K ? a.k_norm : NULL;", "h <= a.H", "RoPE and pages .*norm"),
           ("V is turned, too", "if (t < a.T && `h < a.H + a.K`) {", "h <= a.H + a.K"),
           ("the slot's place in its page", "(h >= a.H + a.K)) * a.B + `slot % a.B`) * a.D;", "slot % (a.B / 2)")),

    # ---- GEMM ----
    *group("gemm_mma_kernel", "smallm small", "mma (64|128)x",
           ("the last slice of K where it is not whole", "int slices = `(c.K + MMA_K - 1) / MMA_K`;", "max(c.K / MMA_K, 1)"),
           ("one row too many is written", "if (`m >= c.M`) continue;\n#pragma unroll\n        for (int j = 0; j < WN / 8; j++) {", "m > c.M"),
           ("no residual in the last tile of columns", "v[0], v[1], `gemm_old_pair(c, m, n)`);\n            else if",
            "n0 + WN >= c.N ? 0 : gemm_old_pair(c, m, n)", "mma (64|128)x\\S+ residual"),
           ("the gate of the neighbour", "pack_bf16(swiglu(g0, u0), swiglu(`g1`, u1))", "g0", "mma (64|128)x\\S+ swiglu")),
    *group("gemm_thin_kernel", "smallm small", "thin ",
           ("the last warp's part of K", "for (int i = 0; `i < THIN_WARPS` && puts; i++) {", "i < THIN_WARPS - 1"),
           ("the other column of up", "up.x += part[8], up.y += `part[9]`;", "part[8]", "thin \\d+ swiglu"),
           ("one row too many is written", "bool puts = `m < c.M` && n0 + n < c.N;", "m <= c.M"),
           ("a column's square is left out of the norm that follows", "float sum = bf16_low(y) * bf16_low(y) + `bf16_high(y) * bf16_high(y)`;", "0.0f",
            "fold"),
           ("ups without the norm's scale", "up.x *= scales[m], `up.y *= scales[m]`;", "up.y *= 1", "fold .* swiglu")),
    *group("gemm_few_kernel", "smallm small", " \\d+/[1248] ",
           ("the last slice of K", "w.n_kb = `slices * (w.part + 1) / split - w.kb0`;",
            "slices * (w.part + 1) / split - w.kb0 - (w.part + 1 == split)"),
           ("the last part of K is not added", "for (int q = 0; `q < w.split`; q++) {\n            float4 p", "q < w.split - 1", " \\d+/[248] "),
           ("half a pair of the residual", "v[6] += bf16_low(old.w), v[7] += `bf16_high(old.w)`;", "bf16_low(old.w)", "/[1248] residual"),
           ("up's bias", "few_bias(up, c.bias, `w.n0 + n + 8`);", "w.n0 + n", "/[1248] swiglu"),
           ("the second half turned back", "u[k] = u[k] * cs + `a * sn`;", "-a * sn", "few turned"),
           ("V is turned, too", "`h < p.H + p.K` ? turn : NULL};", "true", "few turned"),
           ("the squares of the head's other half", "sum += `smem_load_float(at)`;", "0", "few turned normed .*D=128"),
           ("the squares of another row", "send_pair_to_peer(peer_at(`at`, other), sum", "at ^ (w.rows > 1 ? 8 : 0)",
            "few turned normed .*D=128"),
           ("k's norm for q", "few_norm r = {h < p.H ? `p.q_norm` :", "p.k_norm", "few turned normed"),
           ("weights of the first half for both", "r.hi[k] = r.w ? `r.w[p.D / 2 + i + k]` : 1;", "r.w[i + k]", "few turned normed"),
           ("V is normed, too", "few_norm r = {h < p.H ? p.q_norm : `h < p.H + p.K ? p.k_norm : NULL`};", "p.k_norm", "few turned normed")),
    *group("gemm_kernel", "gemm quick", "(store|residual) ",
           ("store: bias of the neighbour", "int col = t.col0 + 8 * j;\n        if (col >= t.N) continue;\n        float2 b = *(const float2 *)(bias + `col`",
            "max(col - 8, 0)", "(store|residual) .* bias"),
           ("store: the last panel of columns", "if (`col0 + p * P < n_cols`) tma_store_2d", "col0 + (p + 1) * P < n_cols + P / 2"),
           ("residual: none in the last row, right half", "y[i] = `r < t.M` && col < t.N ?", "r + 1 < t.M", "residual .*BN 256"),
           ("residual: the first half's other row", "pack_bf16(v[2 * i] + bf16_low(r[i]), v[2 * i + 1] + bf16_high(`r[i]`))", "r[i ^ 1]", "residual "),
           ("the last group of tiles is as high as the others", "n = gemm_divide(i, height, `left < j.group ? j.per_last : j.per_height`)",
            "j.per_height", "M 257 .*group 8"),
           ("ping-pong: x of the upper half for both", "wgmma_ss<BN>(acc[half], a + `half * (64 * 128 / 16)` + 2 * i,", "0", "ping-pong "),
           ("ping-pong: the lower half ends a piece of 16 rows too high", "if (half) t.row0 += `64`, t.turn++;", "48", "ping-pong "),
           ("split: sums of the neighbour", "to[3] += q == part ? v[3] : __uint_as_float(`other.w`);", "other.z", "split [24]"),
           ("swiglu: the gate of the neighbour", "pack_bf16(swiglu(v[0], v[4]), swiglu(`v[1]`, v[5]))", "v[0]", "swiglu "),
           ("scatter: a share's first rows go to the rank before", "const int q = `t.row0 / p.share`;", "max(t.row0 - 16, 0) / p.share", "scatter "),
           ("logits: columns exchanged", "make_float2(acc[4 * j + 2], `acc[4 * j + 3]`);\n        }", "acc[4 * j + 1]", "logits "),
           ("qkv: q's norm for the first head of k", "const float *w = `head < p.H` ? p.q_norm : p.k_norm;\n            if (!w", "head <= p.H", "qkv(64|128) .* norm"),
           ("qkv: the norm's lower half for both", "(w + i / 8 * 8 + `i / 4 % 2 * (D / 2)` + 2 * (t.lane & 3))", "0", "qkv(64|128) .* norm"),
           ("qkv: sine with the wrong sign", "a = x * cosine - y * sine, b = `y * cosine + x * sine`;", "y * cosine - x * sine", "qkv(64|128) "),
           ("qkv: the position of another row", "h.pos[1] = p.pos[`min(r + 8, last)`];", "min(r, last)", "qkv(64|128) "),
           ("qkv: a tile that begins inside a head turns as one that does not", "int e = `(t.col0 + 16 * j) % D / 2` + 2 * (t.lane & 3);", "16 * j % D / 2",
            "qkv(64|128) .*BN (96|160|192)"),
           ("qkv: K and V to another row's slot", "slot = __shfl_sync(~0u, h.slot, `r`);", "r & 7", "qkv(64|128) "),
           ("qkv: K takes V's place", "(uint32_t)((kv - value * p.K) * 2 + `value`) << log2_B", "1 - value", "qkv(64|128) ")),
    *group("qkv_order_kernel", "gemm quick", "qkv(64|128) ",
           ("the last 8 columns of 64", "int left = `(K - (int)blockIdx.y * 64) / 8`, i", "(K - (int)blockIdx.y * 64 - 8) / 8"),
           ("biases stay", "bias[blockIdx.x * D + `qkv_place(i, D / 2)`] = b[i];", "i", "qkv(64|128) .* bias"),
           ("neighbouring rows exchanged", "head + (size_t)qkv_place(`c / 8`, D / 2) * K", "c / 8 ^ 1")),
    *group("gemm_kernel, epi_sample", "samp small", "row \\d+: (another time|id \\d+ logprob|-?\\d+ from stored)",
           ("an id behind the vocabulary can be drawn", "if (`t.col0 + 2 * g + i / 4 * 8 + i % 2 >= p.V`) acc[i]", "t.col0 + 2 * g + i / 4 * 8 + i % 2 > p.V"),
           ("noise of the other row", "h.noise.y = `g < 2 ? got : keep`;", "g < 2 ? keep : got"),
           ("wrong word of the noise", "keep = g < 2 ? g ? c[1] : c[0] : g == 2 ? c[2] : `c[3]`, give", "c[2]"),
           ("noise of the next block", "h.noise.w, `1 + (uint32_t)((p.v0 + t.col0) / SAMP_BLOCK)`, 0};", "2 + (uint32_t)((p.v0 + t.col0) / SAMP_BLOCK)"),
           ("the second row at the first one's temperature", "samp_highest<8>(other, `scale_b`, b);", "scale_a"),
           ("the second row's raw sum where the first one asks", "if (`apart_b`) samp_add_raw<8>(other, b);", "apart_a"),
           ("both warpgroups put out the rows of one", "t.row0 = at.m * 128 + `((int)threadIdx.x / 32 - 4)` * 16, t.col0 = at.n * BN;",
            "(int)threadIdx.x / 32 % 4"),
           ("both warpgroups multiply the rows of one", "wgmma_desc(stage + `group * 64 * 128`), b", "0"),
           ("a block that is only a little ahead is passed over", "float enough = `best - 0.01f - 1e-6f * fabsf(best)`,", "best + 1", "V 70000 .* from stored")),

    # ---- Attention ----
    *group("attn_mma", "attn small", "(decode|prefill|tree) .*B=(16|32) ",
           ("one position too far", "to[r] = `min(pos[r] + 1, it.kv1)`;", "min(pos[r] + 2, it.kv1)", "prefill .*B=(16|32) "),
           ("the window ends a position late", "from[r] = max(it.kv0 + it.skip, a.window ? `pos[r] - a.window + 1` : 0)", "pos[r] - a.window",
            "B=(16|32) window=70"),
           ("positions that another span has had", "from[r] = max(`it.kv0 + it.skip`, a.window", "it.kv0", "tails.* B=(16|32) .*shared"),
           ("a last tile of one position", "int first = attn_first(a, it, TOK), n_tiles = it.kv1 > first ? `(it.kv1 - first + TOK - 1) / TOK` : 0;",
            "(it.kv1 - first + TOK - 2) / TOK"),
           ("the last page is the one before", "a.pages[it.page0 + (`t >> a.log2_B`)] * a.K + h) * 2 + is_v;",
            "kv + row + 1 == it.kv1 && t >> a.log2_B ? (t >> a.log2_B) - 1 : t >> a.log2_B"),
           ("V of the next row", "ldmatrix_x4_trans(b, smem_at(v + attn_piece_at(TOK, `n * 16 + row`, c * 2 + piece)));", "n * 16 + (row ^ 1)")),
    *group("attn_small", "attn small", "decode .*B=64 ",
           ("a last tile of one position", "ids_at = -32;\n    int n_tiles = it.kv1 > first ? `(it.kv1 - first + TOK - 1) / TOK` : 0;",
            "(it.kv1 - first + TOK - 2 + a.early) / TOK"), # where rows are early, the newest is put into the last tile
           ("what lies behind the last position", "if (j / (DP / 8) < from || `j / (DP / 8) >= n`)", "j / (DP / 8) > n"),
           ("the first eight positions where not all are its own", "int from = `max(0, it.skip - t) / 8`, pieces", "(max(0, it.skip - t) + 7) / 8",
            "tails.* B=64 .*shared"),
           ("whole tiles are fetched from a position further on", "tma_load_5d(to, whole, bar, 0, 0, `row`, 0, 0);", "row + 1"),
           ("the last page is the one before", "min(ids_at + lane, `last >> a.log2_B`)];\n        int of", "max((last >> a.log2_B) - 1, 0)")),
    *group("attn_small", "attn small", "late rows",
           ("the newest V as it was before", "if (`is_v < 2`) *(uint4 *)(k + is_v * HALF", "is_v == 0"),
           ("the newest row is that of the part before", "n_tiles <= STAGES && `it.kv1 == it.pos_hi + 1`;", "false")),
    *group("attn_is_early", "attn small", "late rows of others",
           ("what another row of the step stores", "&& (`r != sp->row0 || sp->n_rows > 1`)) return false;", "false")),
    *group("attn_small", "attn parts", "many long ",
           ("beyond 32 pages", "if (`page - ids_at >= 32`) ids_at = page, ids = a.pages[it.page0 + min(page + lane, (", "page - ids_at >= 32 + (ids_at >= 0)")),
    *group("attn_wg", "attn small", "(prefill|tree) .*B=64 ",
           ("a last tile of one position", "int first = attn_first(a, it, N), n_tiles = it.kv1 > first ? `(it.kv1 - first + N - 1) / N` : 0;",
            "(it.kv1 - first + N - 2) / N"),
           ("the last page is the one before", "ids = a.pages[it.page0 + min(page + lane, `last >> a.log2_B`)];", "max((last >> a.log2_B) - 1, 0)"),
           ("what lies behind the last position", "int n = `it.kv1 - first - (n_tiles - 1) * N`;", "it.kv1 - first - (n_tiles - 1) * N + 1"),
           ("the diagonal's tile has no mask", "if (j < open.x || `j >= open.y`)\n            attn_mask(", "j > open.y"),
           ("a row's second query sees what the first one does", "make_int2(pos[w.i], `pos[w.i + 8]`)", "pos[w.i]"),
           ("the third block of 64 positions stays what it was", "blocks = min(`N / 64`, (last - t) / 64 + 1);", "2", "lengthy"),
           ("sums do not fade with a maximum that has grown", "if (`fades`) attn_fade(acc, fade);", "fades && BOTH", "prefill, logits of 50 .*B=64"),
           ("rows that leave exchanged", "const int row = row0 + k * (32 / PIECES) + `lane / PIECES`, piece", "0"),
           ("the state weighs as much as what is new", "x += `e.old` * s.x, y += e.old * s.y;", "e.own", "tails, 40 rows .*B=64 .*shared"),
           ("a row by a division that rounds down", ".inv_G = (uint32_t)(`((1ll << 31) - 1) / G + 1`)", "(1ll << 31) / G - 1")),
    *group("attn_wg", "attn parts", "many long ",
           ("beyond 32 pages", "if (`page - ids_at >= 32 || page < ids_at`) ids_at = page,", "page - ids_at >= 32 + (ids_at >= 0) || page < ids_at")),
    *group("attn_both", "attn samples", "samples",
           ("zeros ahead of a tile's positions count as keys", "if (`n < TOK`) attn_own_trim<TOK>(s, n);", "n < TOK / 2"),
           ("a tile goes on behind its page", "min(min(TOK, end - t), `(1 << a.log2_B) - (t & (1 << a.log2_B) - 1)`);", "TOK"),
           ("the state of the row before", "i = `row.query` + min(g, a.G - 1);", "max(row.query - a.G, 0)"),
           ("rows that were drawn are not done", "for (int k = 0, used = 0; `k < feed.n_drawn`; k++) {", "k + 1 < feed.n_drawn"),
           ("the page is the first one's", "__shfl_sync(~0u, page_ids, `t >> a.log2_B`) * a.K + h", "0"),
           ("a short tile goes on beyond its positions", "map, bar, 0, `n - shape::TOK`, row, 0, 0);", "0"),
           ("the hub of the other item", "hubs.o + `(round & 1)` * attn_both_shape<DP>::HUB", "0"),
           ("a maximum over half of the lanes", "for (int k = 4; `k < 32`; k *= 2) top = fmaxf(top", "k < 16"),
           ("the state counts once a lane", "(`group == 0` ? w_old : 0); /* of", "true"),
           ("the state never comes", "`attn_own_join<DP>(a, row, acc, m, l, hubs)`;", "(void)m"),
           ("sums fade by the other query's factor", "acc[i] *= fade[`i & 1`];", "~i & 1"),
           ("the second half of a tile of K is the first", "ldmatrix_x4(x[c], (at ^ c * 32) + `i * 512`);", "0"),
           ("the second panel of V is the first", "ldmatrix_x4_trans(x[c], (at ^ c * 32) + `i * TOK * 32` + n * 2048);", "0", "samples .*D=128"),
           ("all blocks have one hub", "far_hubs + `(size_t)blockIdx.x * 2 * shape::HUB`,", "0", "samples .*D=128")),
    *group("attn_open_pair_map", "attn samples", "samples .*D=128",
           ("the second panel begins with the next row", "strides[4] = {row, row, `128`, row", "row")),
    *group("attn_plan_jobs", "attn lists", "work list of samples",
           ("a job is done twice, another never", "jobs[p->blocks[i].id] = i < n ? `p->round[i].id` : -1;", "p->round[i & ~1].id"),
           ("the longest go to whoever has done most", "p->blocks[i].load -= `p->round[i].load`;", "-p->round[i].load")),
    *group("attn_plan_both_items", "attn lists", "work list of samples",
           ("rows that are left over are nobody's", "n = sp->row0 + `(j + 1) * sp->n_rows / n_items` - row;", "(j + 1) * (sp->n_rows / n_items)")),
    *group("attn_leave", "attn small", "tree .* shared",
           ("wrong factor in the merge with what a shared prefix left", "e.own *= w / sum, e.old = `w_old / sum`", "w_old / (1 + w_old)"),
           ("the state's LSE without its new part", "e.lse = `top + log2f(sum)`;", "old")),
    *group("attn_gang_meet", "attn kin", "by kin",
           ("the last part", "if (`j >= me.n`) break;\n            if (part[j]", "j >= max(me.n - 1, 1)"),
           ("the second warp's maximum for all", "part[j].x = ex2(`part[j].x` - base)", "marks(min(1, me.n - 1)).x")),
    *group("attn_squad", "attn kin", "by kin",
           ("queries that no warp puts out", "row * CTAS + rank < me.nq; `row += warps`)", "row += 4 * warps"),
           ("a part without the query counts", "lane % CTAS), `-INFINITY`, 0,", "1e4f"),
           ("sums lie at the part's own query", "room + ((n * ROWS + `i / CTAS`) * DP", "(w.i + 8 * r) / CTAS")),
    *group("attn_is_squad", "attn lists", "graphs: ",
           ("squads in a graph of other kernels", "size * GRAPH_KINDS + (`attn_is_squad(d->attn)` ? 0 : n)", "false")),
    *group("attn_gang", "attn kin", "by kin",
           ("sums of a row's own part lie at the gang's first query", "const int i = `it.q0 - me.q0` + w.i + 8 * r;", "0"),
           ("a part without the query counts", "[threadIdx.x % 32] = float2{`-INFINITY`, 0};", "0.0f"),
           ("one query too many", "if (`w.i + 8 * r >= it.nq`) continue;\n            if (quad == 0) marks", "w.i + 8 * r > it.nq")),
    *group("attn_plan_kin", "attn lists", "work list of samples in (few rows|mixed gangs)",
           ("the last row's own span is left out", "for (int r = row; r < `row + n`; r++)\n        for (int i = p->row_span[r]; i >= 0;", "row + max(n - 1, 1)"),
           ("rows of two prompts as kin", "(mixed || (parent >= 0 && `p->spans[p->row_span[row + n]].parent == parent`))) n++;", "true"),
           ("a span that goes on behind the gang counts for rows of the next", "each(i, r, `min(row + n, sp->row0 + sp->n_rows)` - r);", "sp->row0 + sp->n_rows"),
           ("a span that began ahead of the gang is left out", "if (r == `max(row, sp->row0)`) each(i, r,", "sp->row0"),
           ("gangs are never mixed", "return (`n_gangs * p->K > p->n_sms` && attn_kin_fits(d, s, true))", "false")),
    *group("attn_emit_gang_parts", "attn lists", "work list of (few|prompts|samples)",
           ("parts lie a page apart", "item->kv1);\n        a->skip = (short)(i ? at % d->shape->B : item->skip), a->page0 = item->page0 + `page`;", "i"),
           ("parts begin with their page", "a->skip = (short)(i ? `at % d->shape->B` : item->skip)", "0")),
    *group("attn_join", "attn parts", "(parts|long prefix|logits of 50|one key rules) ",
           ("weight of the wrong group", "l += weights[`j * row`], acc.x", "j"),
           ("the last part", "for (int j = group; `j < me.n`; j += groups) {", "j + 1 < me.n"),
           ("parts lie too close", "step = attn_part_at(a, `(me.nq + ATTN_SMALL_Q - 1) / ATTN_SMALL_Q`, 0, 0);", "me.nq / ATTN_SMALL_Q")),
    *group("group_agree", "attn lists", "ranks with .*",
           ("ranks plan for their own heads", "attn_agree(d, `K`, n_sms);", "d->shape->K", "ranks with .* a chain"),
           ("ranks plan for their own multiprocessors", "attn_agree(d, K, `n_sms`);", "d->n_sms", "ranks with .* long sequences"),
           ("a tensor rank of another kind is not seen", "if (`(r[q].arch == 90) != (r[0].arch == 90)`) other = q;", "false", "tensor ranks of two kinds")),
    *group("attn_plan_step", "attn lists", "work list of ",
           ("a prefix's small span runs last", "if (`last && a->small`) a->level = p->n_levels - 1;", "a->small", "work list of a tree"),
           ("a span's state is not begun with", "a->where = (`a->level` ? ATTN_SEED : 0)", "a->level > 1", "work list of a tree"),
           ("the newest position", "min(sp->kv0 + sp->n_kv, `item.pos_hi + 1`));", "item.pos_hi"),
           ("parts share a slot", "i < n; i++, p->n_slots += `ceil_div(item->nq, ATTN_SMALL_Q)`) {", "item->nq / ATTN_SMALL_Q"),
           ("a merge without its last part", "attn_merge{item->q0, item->nq, p->n_slots, `n`, item->where}", "n - 1"),
           ("parts begin on each other's pages", "a->page0 = item->page0 + `i * part_pages`", "i * (part_pages - 1)"),
           ("the last page of a span", "return `((sp->kv0 & (B - 1)) + sp->n_kv + B - 1) >> shift`;", "(sp->n_kv + B - 1) >> shift")),

    # ---- Sampling ----
    *group("samp_filter_kernel", "samp small", "V \\d+, case \\d+",
           ("one more than top-k", "samp_find_threshold(r, true, `(samp_mass)f.top_k`, samp_bound(r", "(samp_mass)f.top_k + 1"),
           ("the last id that a filter keeps", "return x > r.at || (x == r.at && `id <= r.last`); }", "id < r.last"),
           ("a block whose best is the cut itself", "{ return `r.maxes[block] >= at`; });", "r.maxes[block] > at"),
           ("presence of prompt ids", "if (`count > 0`) v = __fsub_rn(v, f.presence);", "count >= 0"),
           ("counts of prompt ids", "if (`i >= f.n_prompt`) atomicAdd(&table[n + at], 1u);", "i + 1 >= f.n_prompt"),
           ("counts of a long history's prompt ids", "if (`i >= f.n_prompt`) atomicAdd(&counts[at], 1u);", "true", "wide \\d+, sampling 13"),
           ("two ids of a history take one place", "(old = atomicCAS(&table[at], 0u, key)) && `old != key`;)", "false"),
           ("the highest gathered logit is the one sought", "if (first && above < want && (`lowest || above + same >= want`))", "true"),
           ("the last forbidden id", "for (int i = (int)threadIdx.x; `i < f.n_forbidden`; i +=", "i + 1 < f.n_forbidden"),
           ("order of equal top log-probabilities", "rank += x[i] > v || (x[i] == v && `ids[i] < id`);", "ids[i] > id", "edge .*top log-prob"),
           ("bias is added once", "for (unsigned left = same; left; `left &= left - 1`) v = samp_clean", "left = 0", "V \\d+, case \\d+"),
           ("min-p cuts too early", "float at = __double2float_ru(fmax(`(double)r.max + drop`,", "(double)r.max + 0.9 * drop")),
    *group("samp_filter_kernel", "samp small", "cut row \\d+, sampling \\d+",
           ("what lies above the counted range", "*over = `samp_all(own, scratch)`;", "0"),
           ("counted ids have their part's upper weight at least", "to[1] += n * ex2(`at - step`) * (1 - slack);", "at"),
           ("all counted ids in their part's highest", "bins[`samp_wide_part(parts, x)`], 1u)", "0"),
           ("what is gathered of a range for all that is kept", "samp_has(r, samp_logit_to_key(r.at), `samp_logit_to_key(r.max)`);", "r.near_high"),
           ("a block's key bound by its lowest noise", "samp_log2_exponential(`min(min(c[0], c[1]), min(c[2], c[3]))`)",
            "max(max(c[0], c[1]), max(c[2], c[3]))"),
           ("eight blocks are enough", "return `!(r.sums[block] < enough)`; });", "false", "(cut row|wide) \\d+, sampling \\d+"),
           ("sums of blocks with penalties", "if (lane == 0) r.sums[b] = `sum`;", "1.0f")),
    *group("samp_blocks_kernel", "samp small", "V 259 .* from stored",
           ("the id behind an odd vocabulary", "v[2 * j + 1] = `id0 + 8 * j + 1 < V` ? pair.y", "id0 + 8 * j + 1 <= V")),
    *group("samp_blocks_kernel", "samp draws", "(plain|temperature|flat|pairs|p-values)",
           ("two groups share their noise", "return g < 2 ? g ? c[1] : c[0] : g == 2 ? c[2] : `c[3]`;", "c[2]"),
           ("the first block's noise is the row's uniform", "uint32_t c[4] = {a.sample, a.position, `1 + (uint32_t)block`, 0};", "(uint32_t)block"),
           ("places in a group from one end only", "return __fmul_rn(__fmul_rn(__fadd_rn((float)(`flip ? ~a.u : a.u`), 0.5f)", "a.u")),
    *group("samp_merge", "samp small", "(edge|V \\d+)",
           ("the higher of equal ids", "second = `rank_b > rank_a || (rank_b == rank_a && second)`;", "rank_b > rank_a || (rank_b == rank_a && !second)", "edge 6"),
           ("wrong factor of the raw sum", "__fmul_rn(b.raw_sum, ex2(__fmul_rn(below_b, `SAMP_LOG2E`)))", "scale"),
           ("wrong factor of the sum", "__fmul_rn(a.sum, ex2(__fmul_rn(below_a, `scale`)))", "SAMP_LOG2E")),
    *group("samp_apart", "samp small", "(edge|V \\d+)",
           ("raw sums for those who want none, and for nobody else", "return `a.forced == SAMP_DRAW` && a.scale > 0", "a.forced == SAMP_DRAW_ONLY")),
    *group("samp_reduce_kernel", "samp small", "(edge|V \\d+)",
           ("log-probability from the sum at the row's temperature", "samp_finish(a, p, p.max, logf(`p.raw_sum`), 0);", "p.sum"),
           ("slot 0 does not learn its last token", "if (`a.slot >= 0`) last[a.slot] = out.id;", "a.slot > 0", "last tokens of ")),
    *group("samp_reduce_kernel", "samp draws", "flat|rare",
           ("blocks from 32 on are left", "for (int half = `SAMP_LANES / 2`; half; half /= 2) {\n        __syncthreads();\n        if (k < half)", "SAMP_LANES / 4")),
    *group("samp_undo", "samp small", "V \\d+, case \\d+.* logprob",
           ("the penalty the wrong way", "if (seen) x = x < 0 ? x / f.repetition : `x * f.repetition`;", "x / f.repetition"),
           ("presence is not undone", "if (count) x += `(double)f.frequency * count + f.presence`;", "(double)f.frequency * count"),
           ("one bias of two", "if (f.bias_ids[i] == id) x -= `f.bias[i]`;", "f.bias[0]")),
    *group("samp_collect", "samp small", "(edge|V \\d+)", ("picks in the order of the plan", "toka_sample_result *pick = &down->picks[`down->order[i]`];", "i")),
    *group("samp_collect", "samp small", "where some want no log-probability",
           ("a log-probability that was not wanted", "pick->logprob = `toka_wants_logprob(row)` ?", "true")),
    *group("samp_launch", "samp small", "parts [12], row",
           ("filters of the rows ahead", "n, n_plain, more > 0 ? `filters + (at - first)` : NULL);", "filters")),
    *group("samp_plan_step", "samp small", "V \\d+ E \\d+ row",
           ("rows of x in the caller's order", "rows[i] = `row->row`;", "s->samples[i].row")),
    *group("samp_plan_step", "samp draws", "pairs by the seed's upper half",
           ("the seed's upper half", "philox(c, (uint32_t)seed, `(uint32_t)(seed >> 32)`);", "0")),

    # ---- The op table and the weights, by whole models ----
    *group("weights_open", "model only qwen2 qwen3 mistral-short-window", "logits",
           ("biases of k and v in q's place", "load_add(l, b[i], `bias + row`, b[i]->cols", "bias", "qwen2 "),
           ("no window", "to->window = `from->window`;", "0", "mistral-short-window "),
           ("q's norm for k", "to->k_norm = `weight_vector(d, &l, &from->k_norm)`;", "to->q_norm", "qwen3 ")),
    *group("graph_fill", "model only qwen2", "graphs",
           ("rows of nobody's write to page 0", "g->slot[i] = `d->options.n_pages * d->shape->B`;", "0")),
    *group("graph_step", "model only qwen2", "graphs",
           ("rows have the positions of the step before", "memcpy(g->pos, s->pos, (size_t)`s->T` * sizeof *g->pos);", "0")),
    *group("graph_renew", "model only qwen2", "graphs",
           ("a graph keeps its grid of attention", "p.gridDim = `config->gridDim`,", "dim3((unsigned)d->shape->K)")),
    *group("graph_take_turn", "model only qwen2", "graphs",
           ("a graph reads what the step before was sent", "*r->words[i] += `by`;", "0")),
    *group("graph_add_reader", "model only qwen2", "graphs",
           ("a kernel's second address in the stage is not seen", "if (`word[j] < from || word[j] >= end`) continue;",
            "word[j] < from || word[j] >= end || r.n_words")),
    *group("samp_graph", "model only qwen2", "graphs",
           ("a graph draws its filtered rows as plain ones", "if (`!samp_keeps(d, s)`) return;", "true"),
           ("a graph's LM head stores no logits", "samp_head(d, 0, s->n_samples, `p->n_plain`);", "s->n_samples")),
    *group("samp_fill_rows", "model only qwen2", "graphs",
           ("plain rows among filtered ones are cut", "f[n] = samp_filter{.min_p_drop = `-INFINITY`,", "-1")),
    *group("cuda_norm_mlp_residual", "model only qwen2", "qwen2 .*logits",
           ("the other norm of the layer", "rmsnorm(d, dev_bf16(x), NULL, `l->mlp_norm`, d->xn, n);", "l->attn_norm")),
]

# kernels that compute nothing that a test could find wrong; and those of several ranks, which none of these tests starts (gpu_ranks.c does)
NO_RESULT = {"bench_fill_kernel", "bench_read_kernel", "fault_kernel", "stall_kernel",
             "one_shot_kernel", "two_shot_kernel", "sum_norm_kernel", "samp_exchange_kernel", "samp_gather_kernel"}


# ---- The mutated copy ----

SWITCH = """/* Made by test/gpu_mutants.py. */
#include <cuda_runtime.h>
static __constant__ int mutant_device;
static int mutant_host;
__host__ __device__ static inline bool mutant(int k) {
#ifdef __CUDA_ARCH__
    return mutant_device == k;
#else
    return mutant_host == k;
#endif
}
"""
MAIN = """
extern "C" int model_main(int argc, char **argv);
int main(int argc, char **argv) {
    const char *which = getenv("TOKA_TEST_MUTANT");
    mutant_host = which ? atoi(which) : 0;
    cudaMemcpyToSymbol(mutant_device, &mutant_host, sizeof mutant_host);
    cudaGetLastError(); /* without a GPU some tests still run */
    std::string what = argc > 1 ? argv[1] : "";
    int n = argc - 1;
    char **v = argv + 1;
    return %s: what == "model" ? model_main(n, v) : 3;
}
"""


def place(text, m):
    """Where the replaced part of a mutant lies: (from, to); or why there is no such place."""
    parts = m.old.split("`")
    if len(parts) not in (1, 3):
        return f"{len(parts) - 1} backticks"
    context = "".join(parts)
    if text.count(context) != 1:
        return f"its text stands in the file {text.count(context)} times"
    part = parts[1] if len(parts) == 3 else context
    if not part.endswith(";") and re.match(r"(if|for|return)\b", m.new):
        return "an expression becomes a statement"
    at = text.index(context) + (len(parts[0]) if len(parts) == 3 else 0)
    return at, at + len(part)


def mutated(text):
    """The copy with all mutants behind their switches, numbered from 1."""
    places = sorted((*place(text, m), k, m) for k, m in enumerate(MUTANTS, 1))
    out, end = [], 0
    for a, b, k, m in places:
        old = text[a:b]
        if old.endswith(";"):
            switched = f"{{ if (mutant({k})) {{ {m.new} }} else {{ {old} }} }}"
        else:
            switched = f"(mutant({k}) ? ({m.new}) : ({old}))"
        out += [text[end:a], switched]
        end = b
    return SWITCH + "".join(out) + text[end:]


def kernels_of(text):
    """Names of all kernels."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    names = set()
    for m in re.finditer(r"__global__\s+(?:static\s+)?void\s+", text):
        rest = text[m.end():]
        if rest.startswith("__launch_bounds__"):
            depth = 0
            for i, c in enumerate(rest):
                depth += (c == "(") - (c == ")")
                if c == ")" and depth == 0:
                    rest = rest[i + 1:]
                    break
        names.add(re.match(r"\s*(\w+)", rest).group(1))
    return names


def check():
    text, n_bad, last = open(KERNELS).read(), 0, None
    results = [(f"{m.kernel}: {m.name}", place(text, m)) for m in MUTANTS]
    spans = sorted((p, what) for what, p in results if isinstance(p, tuple))
    for p, what in spans:
        if last and p[0] < last[1]:
            results.append((what, "overlaps the mutant before it"))
        last = p
    names = [(m.kernel, m.name) for m in MUTANTS]
    results += [(f"{k}: {n}", "is there twice") for k, n in set(names) if names.count((k, n)) > 1]
    covered = {re.match(r"\w+", m.kernel).group(0) for m in MUTANTS}
    results += [(f"kernel {k}", "has no mutant" if k not in covered else (0, 0)) for k in sorted(kernels_of(text) - NO_RESULT)]
    for what, found in results:
        if isinstance(found, str):
            n_bad += 1
            print(f"FAILED {what}: {found}")
    print(f"{len(MUTANTS)} mutants, {len(covered)} kernels and functions of the host")
    print(f"{len(results) - n_bad} passed, {n_bad} failed, 0 skipped")
    return n_bad != 0


def run_tool(*command):
    p = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    if p.returncode:
        sys.exit(p.stdout[-4000:] + f"gpu_mutants.py: {command[0]} ended with status {p.returncode}")


def build(folder):
    os.makedirs(folder, exist_ok=True)
    arch, cc = os.environ.get("GPU_ARCH", "90a"), os.environ.get("CC", "cc")
    tests = os.path.join(ROOT, "test")
    source, c_source, program = (os.path.join(folder, n) for n in ("mutants.cu", "mutants.c", "mutants"))
    text = mutated(open(KERNELS).read()).replace('#include "toka.h"', f'#include "{ROOT}/toka.h"')
    text += f'\n#include "{tests}/gpu.cuh"\n#include <memory>\n'
    for name in PROGRAMS:
        body = re.sub(r'^#include .*$', "", open(os.path.join(tests, name + ".cu")).read(), flags=re.M)
        text += f"\nnamespace {name} {{\n{re.sub(r'^int main[(]', 'static int run(', body, flags=re.M)}\n}}\n"
    text += MAIN % " ".join(f'what == "{name[4:]}" ? {name}::run(n, v) :' for name in PROGRAMS).rstrip(":")
    open(source, "w").write(text)
    model = re.sub(r'^#include .*$', "", open(os.path.join(tests, "gpu_model.c")).read(), flags=re.M)
    open(c_source, "w").write(f'#include "{tests}/gpu_samp.c"\n#include "{tests}/gpu_host.h"\n#include "{tests}/gpu_graphs.h"\n' + re.sub(r"^int main[(]", "int model_main(int, char **);\nint model_main(", model, flags=re.M))
    run_tool(cc, "-std=c11", "-O2", "-w", "-DTOKA_WITH_CUDA", '-DTOKA_EMBED="test/model"', "-c", c_source, "-o", program + ".o")
    run_tool("nvcc", "-std=c++20", "-O3", "-w", "-Xcompiler", "-fno-exceptions", "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-o", program,
             source, program + ".o", "-lm", "-lpthread")


# ---- Running them ----

def execute(program, test, number, timeout):
    """Output and status (None: ran too long) of one test with one mutant; 0 is none."""
    env = {**os.environ, "TOKA_TEST_MUTANT": str(number), "TOKA_TEST_SEED": "1"}
    p = subprocess.Popen([program, *test.split()], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=ROOT)
    try:
        return p.communicate(timeout=timeout)[0], p.returncode
    except subprocess.TimeoutExpired:
        p.kill()
        return p.communicate()[0], None


def verdict(m, out, status):
    """Why a mutant does not count as caught; empty if it does."""
    if status is None:
        return "hung"
    lines = [line for line in out.splitlines() if line.startswith("FAILED")]
    if status != 1:
        return f"ended with status {status}: {(out.strip().splitlines() or [''])[-1]}"
    if not any(re.search(m.line, line) for line in lines):
        return f"{len(lines)} other lines failed, none matches '{m.line}': {(lines or [''])[0]}"
    return ""


def has_gpu():
    try:
        return subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.startswith(b"GPU")
    except OSError:
        return False


def run(folder, jobs, only, timeout):
    program, gpu = os.path.join(folder, "mutants"), has_gpu()
    passed = failed = skipped = 0
    chosen = [(k, m) for k, m in enumerate(MUTANTS, 1) if re.search(only, f"{m.kernel}: {m.name} [{m.test}]")]
    work = [(0, Mutant("as it is", t, "", "", t, "")) for t in sorted({m.test for _, m in chosen})] + chosen

    def one(item):
        k, m = item
        if not gpu and m.test != "attn lists":
            return item, "skipped", 0
        begin = time.time()
        out, status = execute(program, m.test, k, timeout)
        bad = verdict(m, out, status) if k else "" if status == 0 else f"status {status}: {out[-1500:]}"
        return item, bad, time.time() - begin

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for (k, m), bad, took in pool.map(one, work):
            if bad == "skipped":
                skipped += 1
                continue
            passed, failed = passed + (not bad), failed + bool(bad)
            print(f"{'FAILED' if bad else 'ok    '} {k:3} {m.kernel}: {m.name} [{m.test}, {took:.1f} s]{': ' if bad else ''}{bad}", flush=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return failed != 0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("mode", choices=["check", "build", "run"])
    p.add_argument("folder", nargs="?", default=os.path.join(ROOT, "test/.build/mutants"))
    p.add_argument("--jobs", type=int, default=6, help="tests at a time")
    p.add_argument("--only", default="", help="mutants whose 'kernel: name [test]' matches this expression")
    p.add_argument("--timeout", type=float, default=90, help="seconds for one test")
    a = p.parse_args()
    folder = os.path.abspath(a.folder)
    if a.mode == "check":
        sys.exit(check())
    if a.mode == "build":
        sys.exit(build(folder))
    sys.exit(run(folder, a.jobs, a.only, a.timeout))


if __name__ == "__main__":
    main()
