#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the GPU tests: deliberate mutations of toka_kernels.cu, each of which a test must catch.

    python3 test/gpu_mutants.py check            checks that every mutation still fits the file and that every kernel has one; needs no GPU, no nvcc
    python3 test/gpu_mutants.py parse            checks that the CUDA tests and all mutants are well formed; needs nvcc and a minute, no GPU
    GPU_ARCH=90a python3 test/gpu_mutants.py build [FOLDER]     makes one program that holds all mutants; needs nvcc, no GPU
    python3 test/gpu_mutants.py run [FOLDER] [--jobs 6] [--only EXPRESSION]     runs them on a GPU; without a GPU: those that a CPU can run
    (FOLDER: test/.build/mutants; `run` needs only the file `mutants` in it)

A mutation replaces one piece of text by a bug that a programmer could write. All mutations are put into one copy of toka_kernels.cu, each
behind a switch: `old` becomes `(mutant(7) ? (new) : (old))`. This copy, the op tests and gpu_model are compiled into one program, and
TOKA_TEST_MUTANT selects the mutant. Without a mutant, every test that is named below must pass. With a mutant, the test named in its line
must end with status 1 and print a FAILED line of the op that was mutated. A crash, a hang or another failure does not count as caught.
"""
import argparse
import concurrent.futures
import functools
import os
import re
import subprocess
import sys
import time
from collections import namedtuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KERNELS = os.path.join(ROOT, "toka_kernels.cu")
PROGRAMS = ["gpu_attn", "gpu_experts", "gpu_fp8", "gpu_gemm", "gpu_lora", "gpu_mla", "gpu_rows", "gpu_samp", "gpu_smallm"]

# name: the bug. old: text that occurs in the file once, whatever its line breaks; the part between backticks (all of it if there are none) is
# replaced by new. A part that ends with a semicolon is a statement, any other an expression. test: program and arguments. line: an
# expression that the FAILED line must match.
Mutant = namedtuple("Mutant", "name kernel old new test line")


def group(kernel, test, line, *mutants):
    """Mutants of one kernel (or host function) that the same test must catch: (name, old, new[, line])."""
    return [Mutant(m[0], kernel, m[1], m[2], test, m[3] if len(m) > 3 else line) for m in mutants]


# the LSE of a split or of a state, as if the sink belonged to it
WITH_SINK = ("args.sinks ? out.lse + log2f(1 + ex2(args.sinks[attn_head(args, item.q0 + query, kv_head)] * (float)M_LOG2E - out.lse))"
             " : out.lse")
MUTANTS = [
    # ---- rows: weights, embedding, norms, RoPE ----
    *group("load_convert_kernel", "rows small", "load ",
           ("the last element of a piece is not loaded", "if (i >= n_elems) return;", "if (i + 1 >= n_elems) return;"),
           ("a piece that begins inside a row is loaded as if it began a row", "col = (int)(`(first_elem + i) % cols`);", "(first_elem % 64 + i) % cols"),
           ("interleaved rows of gate and up are off by one", "const int to_row = job.interleaved ? `row / 8 * 16 + row % 8` : head_place(", "row / 8 * 16 + row % 7", "load .* by turns"),
           ("the rows of heads stay", "head_place(job.f32 ? head_order{} : job.heads, `row`);", "row / max(job.heads.D, 1) * job.heads.D", "load heads"),
           ("a norm without its offset", "(value + `job.add`) * (job.factor", "0.0f", "load heads.*vector")),
    *group("copy_pages_kernel", "rows small", "copies of pages",
           ("the page of the wrong layer", "char *pages = kv_layer_at(kv, `(int)blockIdx.y`);", "0"),
           ("a layer of bf16 as small as one of FP8", "kv.layer_bytes[kv_layer_bit(kv.windowed, layer)][`kv_is_fp8(kv.fp8, layer)`];", "1", "copies of pages.* in d"),
           ("windowed pages are as many as the others", "kv.layer_bytes[`kv_layer_bit(kv.windowed, layer)`][", "0", "copies of pages.*windowed 15"),
           ("the same pages with and without a window", "const toka_copy copy = (`is_windowed` ? windowed_copies : copies)", "false", "copies of pages.*windowed 15"),
           ("the last 16 bytes are missing", "i < `bytes / 16`; i += 256) to[i] = from[i];", "bytes / 16 - 1"),
           ("the ids of the page are not copied", "kv_ids[ids.to * B + (int)threadIdx.x] = kv_ids[`ids.from` * B + (int)threadIdx.x];", "ids.to")),
    *group("embed_kernel", "rows small", "embed ",
           ("the last 16 bytes of a row are missing", "uint4 vec = `table_row >= 0` && table_row < table.V", "table_row >= 0 && i + 1 < E / 8"),
           ("the last token of the previous seq", "id = id < 0 ? last_tokens[`-1 - id`] : id; if (kept.kv_ids", "max(-2 - id, 0)"),
           ("an id is kept at its row", "if (kept.kv_ids && threadIdx.x == 0) kept.kv_ids[`kept.kv_slot[blockIdx.x]`] = id;", "blockIdx.x")),
    *group("keep_ids_kernel", "rows small", "keep_ids ",
           ("the last id is not kept", "if (`t >= T`) return;", "t + 1 >= T")),
    *group("rmsnorm_kernel", "rows small", "norm ",
           ("without epsilon", "float scale = rsqrtf(`block_sum_128(sum) * inv_E + eps`); if constexpr (FP8)", "block_sum_128(sum) * inv_E"),
           ("selected rows are taken in order", "(size_t)(`row_index ? row_index[blockIdx.x] : blockIdx.x`) * E", "blockIdx.x", "norm .*chosen"),
           ("wrong element of the norm's weights", "pack_bf16(f[6] * scale * b.z, f[7] * scale * `b.w`)", "b.z"),
           ("the sum of one warp is missing", "(warp_sums[0] + warp_sums[1]) + (warp_sums[2] + `warp_sums[3]`)", "0.0f")),
    *group("rmsnorm", "rows small", "norm .*E=51", ("the mean is over the padded width", "const float inv_E = `1.0f / dev->shape->E`;", "1.0f / dev->E")),
    *group("add_norm_kernel", "rows small", "norm behind",
           ("x before is lost", "unpack_8(`to[i]`, old);", "from[i]"),
           ("without the weights", "old[j] += f[j] * scale * `w[8 * i + j]`;", "1.0f")),
    *group("copy_rows_kernel", "rows small", "copy of rows", ("the last vector is missing", "if (`i < n`) to[i] = from[i];", "i + 1 < n")),
    *group("heads_norm_kernel", "rows small", "norm of all heads",
           ("k with the norm of q", "const float *w = `blockIdx.y` ? k_norm : q_norm;", "false"),
           ("the mean is over one head", "rsqrtf(block_sum_128(sum) / `n` + eps)", "D"),
           ("weights in the order of the rows", "const float4 *weights = (const float4 *)(w + `8 * i`);", "at", "norm of all heads.*by turns")),
    *group("gelu_kernel", "rows small", "GELU",
           ("SiLU", "expf(`-1.59576912f * (g + 0.044715f * g * g * g)`)", "-g"),
           ("the last columns are missing", "if (`8 * i >= F`) return; const uint4 *from = (const uint4 *)(gate_up", "8 * i + 8 >= F")),
    *group("rope_table_kernel", "rows small", "RoPE table",
           ("sine without the scale", "make_float2((float)c * factor, `(float)s * factor`)", "(float)s", "RoPE table .*scale 1.37"),
           ("what does not rotate gets the scale", "const float factor = pair < pairs ? scale : `1`;", "scale", "RoPE table .*, 10 of them"),
           ("the next frequency", "freq[`pair`]", "(pair + 1) % half")),
    *group("rope_kernel", "rows small", "RoPE and pages",
           ("sine with the wrong sign", "hi = hi * cosine + `old_lo * sine`;", "-old_lo * sine"),
           ("the norm's weights of the lower half for the upper half", "norm_hi[k] = *(const float2 *)(`norm + half + i`);", "norm + i", "RoPE and pages .*norm"),
           ("q's norm for the first head of k", "const float *weights = `head < qkv.H` ? qkv.q_norm : qkv.k_norm;", "head <= qkv.H", "RoPE and pages .*norm"),
           ("V is rotated, too", "if (row < args.T && `head < qkv.H + qkv.K`) {", "head <= qkv.H + qkv.K"),
           ("FP8: the scale of K for V", "toka_kv_scale_at(qkv.B, kv_head, offset) + `is_v`] = scale;", "0", "RoPE and pages fp8"),
           ("FP8: the scale is found in one half", "for (int k = 0; k < `8`; k++) largest = max(largest, toka_float_bits", "4", "RoPE and pages fp8"),
           ("FP8: half the scale, so that 448 is not the largest", "toka_kv_scale(`__reduce_max_sync(~0u, largest)`)", "__reduce_max_sync(~0u, largest) - 0x800000", "RoPE and pages fp8"),
           ("wrong position in the page", "(uint32_t)(kv_slot & (`qkv.B - 1`));", "qkv.B / 2 - 1")),

    # ---- adapters ----
    *group("lora_shrink_kernel", "lora small", "adapters of",
           ("x of the first row for all", "(args.x + (size_t)`tile.rows[8 * j + g]` * args.ldx + k)", "tile.rows[0]"),
           ("the last columns of x are missing", "const int k = k0 + 32 * i + lane % 4 * 8; const bool exists = `k < args.K`;", "k + 8 < args.K"),
           ("the next row of A", "(a + (size_t)(`8 * j + g`) * args.K + k)", "8 * j + (g ^ 1)"),
           ("the sum of a warp is missing", "w < `LORA_SHRINK_WARPS`; w++) sum.x += sums[w][row][column]", "LORA_SHRINK_WARPS - 1", "adapters of down"),
           ("rows of other adapters are written, too", "if (`row >= begin && row < end`) { float2 sum = {};", "row < end"),
           ("the first slice for all", "(int)`blockIdx.z` * LORA_SLICE + warp * 32", "0", "adapters of down"),
           ("the first chunk of the rank for all", "tile.matrices[0][begin] + (size_t)`chunk` * LORA_RANKS * args.K,", "0"),
           ("the adapter of the first row for all rows", "const lora_part from = args.step.blocks[`slot`][part + k];", "args.step.slots[0]"),
           ("without the scale", "sum.x *= `tile.scales[0][row]`, sum.y", "1.0f"),
           ("A of q for k and v", "lora_load_tile(tile, args, first, args.first_part + `part`, 1, false);", "0", "adapters of q, k, v")),
    *group("lora_expand_kernel", "lora small", "adapters of",
           ("the last slice is missing", "for (int s = 0; s < `args.n_slices`; s++)", "max(1, args.n_slices - 1)", "adapters of down"),
           ("what gate adds is for up, too", "sum[m][`part * N_MMA + j`], a, pair", "j", "adapters of gate, up"),
           ("the adapter behind for a row", "if (`row >= begin && row < end`) acc[m][j][i % 4]", "row < end"),
           ("the row of B beside it", "(size_t)(`row0 + 2 * j`) * rank + r)", "(row0 + 2 * j) ^ 1"),
           ("the last rows of B are missing", "w[j] = `row0 + 2 * j < n_rows` ? *(const uint2 *)", "row0 + 2 * j + 8 < n_rows"),
           ("what is added to another row", "sums[i] += acc[i / 2][2 * `half` + i % 2];", "0", "adapters of (q|o|down)"),
           ("GELU for SiLU", "u[i] = `is_gelu` ? geglu(g[i], u[i])", "true", "adapters of gate, up"),
           ("columns of q for k and v", "`y += width, width = args.width[i + 1], part = i + 1;`", "width = args.width[i + 1], part = i + 1;", "adapters of q, k, v"),
           ("the next chunk of the rank", "(part * LORA_ROWS + 16 * m + g) * stride + `r` + 4 * q;", "0")),
    *group("gemm_wgmma_kernel", "lora small", "GEMM with adapters of",
           ("rows of other adapters, too", "const uint2 low = `rows >> g & 1` ? lora_low_4(", "tile.row0 + g < tile.M"),
           ("the upper rows have the low of the lower ones", "`tile.row0 + g + 8`, q)", "min(tile.row0 + g, tile.M - 1)"),
           ("gate's rows of B for the next 8 columns, too", "(add.is_pairs ? `col / 16 * 8` : col - add.begin[part]) + g;", "col / 32 * 8", "GEMM with adapters of gate, up"),
           ("q's rows of B for k and v", "(add.is_pairs ? col / 16 * 8 : `col - add.begin[part]`) + g;", "col % add.begin[1] % 64", "GEMM with adapters of q, k, v"),
           ("only the first adapter of 16 rows", "`todo &= ~rows;`", "todo = 0;"),
           ("only the first part of a tile", "`i < 2 ? matrices[i % 2] : lora_find_matrix(add, block, part)`", "matrices[0]", "GEMM with adapters of q, k, v"),
           ("only the first chunk of the rank", "chunk < `matrix.rank / LORA_RANKS`; chunk++) lora_add_chunk", "min(1, matrix.rank)")),
    *group("lora_sort_rows", "lora small", "order of",
           ("rows without an adapter first", "for (int t = 0, n_none = `n`; t < T; t++)", "0")),
    *group("lora_write_part", "lora small", "adapters of q, k, v",
           ("rows of B in the order of the file", "b + (size_t)`lora_row_at(dev, part, i)` * rank", "i"),
           ("q's rows of a fused matrix for k and v", "(size_t)(`source->matrix_row + i`) * from->b.cols", "i", "adapters of q, k, v .*fused")),

    # ---- FP8 ----
    *group("weight_set_scales", "fp8 small", "load form",
           ("gate's scales for up", "* 2 + `at / 8 % 2`] =\n                        load_scale(", "0", "load form 2 gate and up"),
           ("the next block of K", "load_scale(part, row, `part->col0 / 128 + k`)", "part->col0 / 128 + max(k - 1, 0)", "load form 2"),
           ("the scale of the next row", "`scales[at] = load_scale(part, row, 0)`;", "scales[at] = load_scale(part, max(row - 1, 0), 0)", "load form 1"),
           ("the static scale of q alone", "`to->x_scale = fmaxf(to->x_scale, part->quant->input_scale)`;", "to->x_scale = i ? to->x_scale : part->quant->input_scale")),
    *group("weight_has_block_scales", "fp8 small", "load form 2 q, k, v rows=192",
           ("blocks of two matrices in 128 rows", "ok = `!owner[slot] || owner[slot] == block`;", "true")),
    *group("load_scale", "fp8 small", "load form . .*from .128",
           ("a slice begins with the first scale", "(size_t)(`tensor->row0 + row * tensor->row_step`) / quant->block_rows", "row")),
    *group("quantize_rows_kernel", "fp8 small", "quantize",
           ("448 is not the largest", "largest / `FP8_MAX`", "240"),
           ("the static scale is ignored", "return `static_scale != 0` ? static_scale", "false", "quantize .*static 0.01"),
           ("the largest number of a warp is missing", "v = fmaxf(v, `warp_max[i]`);", "i == 3 ? 0.0f : warp_max[i]")),
    *group("rmsnorm_kernel", "fp8 small", "norm and quantize",
           ("the largest number before the norm", "largest = fp8_largest_8(`x_cached[k]`, largest)", "from[thread]"),
           ("the scale of row 0", "x_scale[`blockIdx.x`] = row_scale;", "0")),
    *group("gemm_wgmma_kernel", "fp8 small", "N=136 K=1000",
           ("a partial sum goes on", "wgmma_ss_fp8<PART>(part, a_desc + 2 * i, b_desc + b_step * i, `zero_part || i > 0`);", "1"),
           ("a partial sum is lost", "if constexpr (FMT::blocked) acc[i] += `part[i]` * (i / 4 % 2", "(i == 5 ? 0.0f : part[i])", "N=136 K=1000 blocks"),
           ("the scale of gate for up", "(`i / 4 % 2` ? scales.y : scales.x)", "0", "N=136 K=1000 blocks"),
           ("the scale of the K block before", "(const float2 *)cta.problem.w_scale + (size_t)`k` * blocks_n + block", "max(k - 1, 0)", "N=136 K=1000 blocks"),
           ("the scale of the block of rows before", "`min(col0 / 128, blocks_n - 1)`;", "0", "N=136 K=1000 blocks"),
           ("the scale of the next column", "w = *(const float2 *)(problem.w_scale + col + `2 * (tile.lane & 3)`);", "0", "N=136 K=1000 store"),
           ("the scale of another row of x", "high = problem.x_scale[`min(row + 8, last_row)`];", "min(row, last_row)")),
    *group("gemm_fp8_box_rows", "fp8 small", "N=136 K=1000",
           ("the last row of x is not loaded", "rows > 8 && `rows / 2 >= M`", "rows / 2 + 1 >= M")),

    *group("gemm_smallm_fp8_kernel", "fp8 small", "few ",
           ("the last 8 columns are missing", "x[i] = `thread + 128 * i < n_vecs` ? from[thread + 128 * i] : uint4{};", "thread + 128 * i < n_vecs - 1"),
           ("the codes of row 0 for all", "(codes + (vec / 2 * args.M + `m`) * 16 + vec % 2 * 8)", "0", "few M=[23]"),
           ("the norm's weights of the piece before", "x[i] = norm_scale_8(x[i], scale, norm_cached[i][0], `norm_cached[i][1]`);", "norm_cached[i][0]", "few .*norm"),
           ("the scale of row 0", "high = __fmul_rn(acc[i + 2], `x_scales[m]` * w[1]);", "x_scales[0]", "few M=[23]"),
           ("the next 32 columns are the same", "`ring.x_step`); if (++ring.buf == ring.n_bufs)", "0"),
           ("the scale of the K block before", "(const float2 *)args.w_scale + (size_t)`k` * blocks_n + block)", "max(k - 1, 0)", "few .*blocks")),

    # ---- experts ----
    *group("router_gemm_kernel", "experts small", "router's GEMM",
           ("the last columns are missing", "return row < n_rows && `col < K` ? *(const uint4 *)", "col + 8 < K"),
           ("one row too many is written", "if (`t + k % 2 < args.T` && n + k / 2 * 8", "t + k % 2 <= args.T"),
           ("the sum of a warp is missing", "for (int k = 1; k < `ROUTER_WARPS`; k++) { const float4 part", "ROUTER_WARPS - 1", "router's GEMM .*K=[1-9][0-9][0-9]")),
    *group("route_kernel", "experts small", "route ",
           ("of equal scores the highest expert", "(other == score && `other_expert < expert`)", "other_expert > expert"),
           ("a token of the second half is left out", "token < min(T, `token0 + ROUTE_TOKENS`); token += ROUTE_WARPS", "token0 + ROUTE_WARPS"),
           ("the weights are not divided by their sum", "router.scale / (`router.renormalize` ? sum + 1e-20f : 1)", "false"),
           ("the choice's bias is in the weight", "choice[i] = `scores[i]`; if (router.choice_bias", "scores[i] += router.choice_bias ? 0.25f : 0"),
           ("groups by their best expert only", "group[0] = `router.groups_by_top2` && size > 1", "false")),
    *group("pair_kernel", "experts small", "route ",
           ("a tile too few", "n_before += count, tiles_before += (count + `tile_rows - 1`) / tile_rows;", "0"),
           ("the pairs of a token are those of another choice", "if (lists.chosen[(size_t)token * k + i] == expert) lists.pairs[(size_t)token * k + `i`] = pair;", "0")),
    *group("expert_gemm_kernel", "experts small", "experts .*pairs=",
           ("the rows are not gathered", "from[i] = (uint32_t)(`args.rows ? args.rows[pair] : pair`) * (uint32_t)(args.ldx / 8)", "pair"),
           ("the first expert's W for all", "tma_load_2d(at, map_w, full, FMT::k_cols * k, `tile.expert * args.N` + tile.n0);", "0"),
           ("a pair too few is stored", "if (`pair < tile.n_pairs` && col < n_out)", "pair + 1 < tile.n_pairs"),
           ("the scale of another row of x", "return args.x_scale[`args.rows ? args.rows[pair] : pair`];", "0"),
           ("gate and up are exchanged", "acc[i] = `swiglu(acc[i], acc[i + 2])`;", "swiglu(acc[i + 2], acc[i])"),
           ("up has no lower limit", "up = fminf(`fmaxf(up, -limit)`, limit);", "up", "biased"),
           ("1 is not added to up", "__fdividef(gate * (`up + 1`), 1 + ex2(-1.702f", "up", "biased"),
           ("the bias of the row above", "upper = __ldg(bias + min(`n + 8`, args.N - 1));", "n + 7", "biased"),
           ("a scale of the other half of the columns", "scale = (from.scales >> `8 * i` & 0xFF) * 0x00800080", "8 * (i ^ 1)", "MXFP4"),
           ("the sign of the third pair is lost", "(word << 6 & SIZES) | (`word << 2 & SIGNS`)", "0u", "MXFP4"),
           ("the first expert's blocks for all", "block = ((size_t)`tile.expert` * per_expert + first + i) * n_k + k;", "0", "MXFP4")),
    *group("load_mxfp4_kernel", "experts small", "experts MXFP4",
           ("the codes of the even and the odd column are exchanged", "low = `(codes & 7) << size_at | (codes >> 3 & 1) << sign_at`,", "(codes >> 4 & 7) << size_at | (codes >> 7 & 1) << sign_at"),
           ("the second half of the columns is stored as the first", "word = r / 8 % 2 * 2 + `block % 2`;", "0"),
           ("a scale is stored at the row below", "((uint8_t *)to)[MXFP4_SCALES_AT + (r / 16 * 8 + `r % 8`) * 4 + word] = scales[i];", "(r + 1) % 8")),
    *group("expert_sum_kernel", "experts small", "sum ",
           ("the last expert is missing", "for (int i = 0; i < `k`; i++) add_weighted_8(sum, args.out", "k - 1"),
           ("the gate of the shared expert is left out", "add_weighted_8(sum, args.shared + (size_t)token * args.E + col, `gate`);", "1.0f"),
           ("the counts are kept", "`token == 0` && i < args.X; i += 128) lists.counts[i] = 0;", "false")),

    # ---- GEMM ----
    *group("gemm_mma_kernel", "smallm small", "mma (64|128)x",
           ("the last partial slice of K is missing", "int n_slices = `(args.K + MMA_K - 1) / MMA_K`;", "max(args.K / MMA_K, 1)"),
           ("one row too many is written", "if (`m >= args.M`) continue;\n#pragma unroll\n        for (int j = 0; j < WN / 8; j++) {", "m > args.M"),
           ("no residual in the last tile of columns", "values[0], values[1], `gemm_residual_pair(args, m, n)`);\n            else if",
            "n0 + WN >= args.N ? 0 : gemm_residual_pair(args, m, n)", "mma (64|128)x\\S+ residual"),
           ("the gate of the neighbouring column", "pack_bf16(swiglu(gate[0], up[0]), swiglu(`gate[1]`, up[1]))", "gate[0]", "mma (64|128)x\\S+ swiglu")),
    *group("gemm_gemv_kernel", "smallm small", "gemv ",
           ("the last warp's slice of K is missing", "for (int i = 0; `i < GEMV_WARPS` && valid; i++) {", "i < GEMV_WARPS - 1"),
           ("the other column of up", "second.x += warp_sum[8], second.y += `warp_sum[9]`;", "warp_sum[8]", "gemv \\d+ swiglu"),
           ("the last row is missing", "bool valid = `m < args.M` && n0 + n < args.N;", "m < args.M - (args.M > 1)"),
           ("one column is missing in the row sum of squares", "float sum = bf16_low(y) * bf16_low(y) + `bf16_high(y) * bf16_high(y)`;", "0.0f",
            "fused norm"),
           ("up without the scale of the fused norm", "second.x *= row_scale[m], `second.y *= row_scale[m]`;", "second.y *= 1", "fused norm .* swiglu")),
    *group("gemm_smallm_kernel", "smallm small", " \\d+/[1248] ",
           ("the last slice of K is missing", "cta.n_k_blocks = `k_blocks * (cta.k_rank + 1) / split - cta.k_block0`;",
            "k_blocks * (cta.k_rank + 1) / split - cta.k_block0 - (cta.k_rank + 1 == split)"),
           ("the partials of the last split-K rank are not added", "for (int k_rank = 0; `k_rank < cta.split`; k_rank++) {\n            float4 partial", "k_rank < cta.split - 1", " \\d+/[248] "),
           ("the residual of a pair is used twice", "add_residual(values[6], values[7], `residual.w`);", "residual.z", "/[1248] residual"),
           ("the bias of gate for up", "add_bias<8>(up, args.bias, `cta.n0 + n + 8`);", "cta.n0 + n", "/[1248] swiglu"),
           ("the pairs are rotated backwards", "rope_rotate(lo[k], hi[k], cosine, `sine`);", "-sine", "smallm rotated"),
           ("V is rotated, too", "`head < qkv.H + qkv.K` ? cos_sin : NULL};", "true", "smallm rotated"),
           ("the sum of squares of the head's other half is missing", "sum += `smem_load_float(sumsq_at)`;", "0", "smallm rotated normed .*D=128"),
           ("the sum of squares of another row", "st_async_8(mapa(`sumsq_at`, peer), sum", "sumsq_at ^ (cta.rows > 1 ? 8 : 0)",
            "smallm rotated normed .*D=128"),
           ("k's norm for q", "smallm_qk_norm norm = {qkv_norm_weights(qkv, `head`)};", "max(head, qkv.H)", "smallm rotated normed"),
           ("the norm's weights of the first half for both halves", "norm.hi[k] = norm.w ? `norm.w[qkv.D / 2 + elem + k]` : 1;", "norm.w[elem + k]", "smallm rotated normed"),
           ("V is normalized, too", "const int head = `n / qkv.D`, elem = n % qkv.D / 16 * 8;\n    smallm_qk_norm norm", "min(n / qkv.D, qkv.H)", "smallm rotated normed")),
    *group("gemm_wgmma_kernel", "gemm quick", "(store|residual) ",
           ("store: bias of another column", "int col = tile.col0 + 8 * j;\n        if (col >= tile.N) continue;\n        float2 b = *(const float2 *)(bias + `col`",
            "max(col - 8, 0)", "(store|residual) .* bias"),
           ("store: the last panel of columns is missing", "if (`col0 + panel * PANEL < n_cols`) tma_store_2d", "col0 + (panel + 1) * PANEL < n_cols + PANEL / 2"),
           ("residual: none in the last row", "y[i] = `r < tile.M` && col < tile.N ?", "r + 1 < tile.M", "residual .*BN 256"),
           ("residual: that of the other row", "add_residual(values[2 * i], values[2 * i + 1], `pairs[i]`);", "pairs[i ^ 1]", "residual "),
           ("the last band of units is as high as the others", "n = gemm_divide(in_band, height, `units_left < problem.raster_m ? problem.inv_last_height : problem.inv_height`)",
            "problem.inv_height", "M 257 .*group 8"),
           ("ping-pong: x of the upper half for both halves", "wgmma_ss<BN>(acc[half], a_desc + `half * (64 * 128 / 16)` + 2 * i,", "0", "ping-pong "),
           ("ping-pong: the lower half ends 16 rows too high", "if (half) tile.row0 += `64`, tile.tile_count++;", "48", "ping-pong "),
           ("split: partial sum of the neighbouring column", "to[3] += from_rank == k_rank ? values[3] : __uint_as_float(`other.w`);", "other.z", "split [24]"),
           ("swiglu: the gate of the neighbouring column", "pack_bf16(swiglu(logits_a[0], logits_a[4]), swiglu(`logits_a[1]`, logits_a[5]))", "logits_a[0]", "swiglu "),
           ("scatter: the first rows of a rank go to the rank before", "const int rank = `tile.row0 / epi_args.rows_per_rank`;", "max(tile.row0 - 16, 0) / epi_args.rows_per_rank", "scatter "),
           ("logits: columns exchanged", "make_float2(acc[4 * j + 2], `acc[4 * j + 3]`);\n        }", "acc[4 * j + 1]", "logits "),
           ("qkv: q's norm for the first head of k", "const float *weights = qkv_norm_weights(epi_args, `head`);", "head - (head == epi_args.H)", "qkv(64|128) .* norm"),
           ("qkv: the norm's lower half for both", "(weights + i / 8 * 8 + `i / 4 % 2 * (D / 2)` + 2 * (tile.lane & 3))", "0", "qkv(64|128) .* norm"),
           ("qkv: sine with the wrong sign", "rope_rotate(values[3], values[7], c1.z, `c1.w`);", "-c1.w", "qkv(64|128) "),
           ("qkv: the position of another row", "fetched.pos[1] = epi_args.pos[`min(row + 8, last_row)`];", "min(row, last_row)", "qkv(64|128) "),
           ("qkv: a tile that begins inside a head is rotated as if it began the head", "int elem = `(tile.col0 + 16 * block) % D / 2` + 2 * (tile.lane & 3);", "16 * block % D / 2",
            "qkv(64|128) .*BN (96|160|192)"),
           ("qkv: K and V go to another row's kv_slot", "kv_slot = __shfl_sync(~0u, fetched.kv_slot, `row`);", "row & 7", "qkv(64|128) "),
           ("qkv: K and V are exchanged", "const uint32_t head_row = qkv_head_row(epi_args, `head`);",
            "head < epi_args.H ? head : head < epi_args.H + epi_args.K ? head + epi_args.K : head - epi_args.K", "qkv(64|128) ")),
    *group("qkv_reorder_kernel", "gemm quick", "qkv(64|128) ",
           ("the last 8 columns of 64 are missing", "int n_chunks = `(K - (int)blockIdx.y * 64) / 8`, tid", "(K - (int)blockIdx.y * 64 - 8) / 8"),
           ("biases are not reordered", "bias[blockIdx.x * D + `qkv_interleave(tid, D / 2)`] = old_bias[tid];", "tid", "qkv(64|128) .* bias"),
           ("neighbouring rows are exchanged", "head + (size_t)qkv_interleave(`chunk / 8`, D / 2) * K", "chunk / 8 ^ 1")),
    *group("gemm_wgmma_kernel, epi_sample", "samp small", "row \\d+: (another time|id \\d+ logprob|-?\\d+ from stored)",
           ("an id after the vocabulary's end can be sampled", "if (`tile.col0 + 2 * group + i / 4 * 8 + i % 2 >= epi_args.V`) acc[i]", "tile.col0 + 2 * group + i / 4 * 8 + i % 2 > epi_args.V"),
           ("random numbers of the other row", "fetched.noise.y = `group < 2 ? from_peer : own`;", "group < 2 ? own : from_peer"),
           ("wrong word of the random numbers", "own = group < 2 ? group ? counter[1] : counter[0] : group == 2 ? counter[2] : `counter[3]`, for_peer", "counter[2]"),
           ("random numbers of the next block", "fetched.noise.w, `1 + (uint32_t)((epi_args.v0 + tile.col0) / SAMP_BLOCK)`, 0};", "2 + (uint32_t)((epi_args.v0 + tile.col0) / SAMP_BLOCK)"),
           ("the second row with the first one's temperature", "samp_group_max<8>(b.logits, `b.scale`, b.group);", "a.scale"),
           ("the second row's raw sum only if the first row needs one", "if (`b.two_sums`) samp_group_raw_sum<8>(b.logits, b.group);", "a.two_sums"),
           ("both warpgroups output the rows of one", "tile.row0 = coord.m * 128 + `((int)threadIdx.x / 32 - 4)` * 16; tile.col0 = coord.n * BN;",
            "(int)threadIdx.x / 32 % 4"),
           ("both warpgroups multiply the rows of one", "wgmma_desc(buf_at + `consumer.index * 64 * 128`), b_desc", "0"),
           ("a block that can win by a small margin is skipped", "float min_gumbel = `best_gumbel - 0.01f - 1e-6f * fabsf(best_gumbel)`,", "best_gumbel + 1", "V 70000 .* from stored")),

    # ---- Attention ----
    *group("attn_mma", "attn small", "(decode|prefill|tree) .*B=(16|32) ",
           ("one position too far", "to[r] = `min(pos[r] + 1, item.kv1)`;", "min(pos[r] + 2, item.kv1)", "prefill .*B=(16|32) "),
           ("the window ends one position too late", "from[r] = max(item.kv0 + item.skip, args.window ? `pos[r] - args.window + 1` : 0)", "pos[r] - args.window",
            "B=(16|32) window=70"),
           ("positions of an earlier span are read again", "from[r] = max(`item.kv0 + item.skip`, args.window", "item.kv0", "tails.* B=(16|32) .*shared"),
           ("a last tile of one position is skipped", "int first_kv = attn_first_kv(args, item, TOK), n_tiles = item.kv1 > first_kv ? `(item.kv1 - first_kv + TOK - 1) / TOK` : 0;",
            "(item.kv1 - first_kv + TOK - 2) / TOK"),
           ("the page before the last one is read twice", "args.pages[item.page0 + (`offset >> args.log2_B`)] * args.K + kv_head) * 2 + is_v;",
            "kv + row + 1 == item.kv1 && offset >> args.log2_B ? (offset >> args.log2_B) - 1 : offset >> args.log2_B"),
           ("V of the neighbouring row", "ldmatrix_x4_trans(b, smem_addr(v + attn_piece_at(TOK, `n * 16 + row`, c * 2 + piece)));", "n * 16 + (row ^ 1)")),
    *group("attn_small", "attn small", "decode .*B=64 ",
           ("a last tile of one position is skipped", "first_page = -32;\n    int n_tiles = item.kv1 > first_kv ? `(item.kv1 - first_kv + TOK - 1) / TOK` : 0;",
            "(item.kv1 - first_kv + TOK - 2 + args.prefetch) / TOK"), # with prefetch, the newest row is put into the last tile
           ("positions after the last one are used", "if (j / PIECES < from || `j / PIECES >= n_kv`)", "j / PIECES > n_kv"),
           ("the first eight positions are skipped if only some are the item's own", "int from = `max(0, item.skip - offset) / 8`, pieces", "(max(0, item.skip - offset) + 7) / 8",
            "tails.* B=64 .*shared"),
           ("whole tiles are loaded from the next position on", "tma_load_5d(to, ring.tile_map, bar, {0, 0, `row`, 0, 0});", "row + 1"),
           ("the page before the last one is read twice", "min(first_page + lane, `last_offset >> args.log2_B`)];\n        int page_bit", "max((last_offset >> args.log2_B) - 1, 0)")),
    *group("attn_cap_scores", "attn caps small", " cap",
           ("the scores have no cap", "if (`cap_scale == 0`) return;", "true"),
           ("a score is that of the column before it", "scores[i] = tanh_of(`scores[i]` * cap_scale);", "scores[i & ~1]"),
           ("scores behind a cap keep their scale", "(float)(M_LOG2E * (`cap != 0 ? cap : scale`)),", "scale")),
    *group("samp_cap_kernel", "samp small", "V \\d+ E \\d+ row", ("the last ids have no cap", "if (`id < V`) row[id] = samp_cap(", "id < V - 70")),
    *group("epi_sample", "samp small", "V \\d+ E \\d+ row",
           ("the logits have no cap", "if (`epi_args.logit_cap != 0`)", "false"),
           ("one row of two has a cap", "acc[i] = `samp_cap(acc[i], epi_args.logit_cap)`;", "i / 2 % 2 ? acc[i] : samp_cap(acc[i], epi_args.logit_cap)")),
    *group("attn_small", "attn small", "late rows",
           ("the newest V is not reloaded", "if (`is_v < 2`) *(uint4 *)(k + is_v * HALF", "is_v == 0"),
           ("the newest row is not reloaded", "n_tiles <= BUFS && `item.kv1 == item.pos_hi + 1`;", "false")),
    *group("attn_small", "attn fp8 small", "decode .*fp8",
           ("FP8: the neighbour's scale of K", "fp8_factor(scales[`(n * 8 + lane / 4)` * 2]) * 0x10001;", "((n * 8 + lane / 4) ^ 1)"),
           ("FP8: the scale of K for V", "factors[i] = `fp8_factor(pair >> 8 & 255)` | fp8_factor(pair >> 24) << 16;", "fp8_factor(pair & 255)"),
           ("FP8: the scale is forgotten", "return `scale == 255 ? 0x7FC0 : (scale + 120) << 7`;", "0x7B80"),
           ("FP8: columns are not sorted", "if constexpr (FP8) `attn_fp8_sort(acc)`;", "(void)0"),
           ("FP8: scales behind the last position may be NaN", "if (j < from || `j >= n_kv`) *(uint16_t *)(scales + 2 * j) = 0;", "j > n_kv + 2")),
    *group("attn_small", "attn fp8 small", "late rows.*fp8",
           ("FP8: the newest scales are not reloaded", "if (`FP8 && lane == 0`) *(uint16_t *)(scales + 2 * (n_kv - 1)) = last_scales;", "false")),
    *group("attn_unpack", "attn fp8 small", "(prefill|tree|tails) .*fp8",
           ("the scale of K for V", "fp8_factor(scales[offset * 2 + `is_v`]) * 0x10001;", "0"),
           ("the last page is not unpacked", "if (`at >= n_pages`) return;", "at + 1 >= n_pages"),
           ("pairs in the wrong order", "__byte_perm(even, odd, `0x5410`);\n            out[2 * k + 1]", "0x1054")),
    # ---- MLA ----
    *group("load_convert_kernel", "mla small", "load kv_b",
           ("W_uk is not transposed", "(`i < up.nope` ? (size_t)col * up.nope + i", "false"),
           ("the first head's place for all", "return `head * up_block_size(up)` + (i < up.nope", "0")),
    *group("gemm_heads_kernel", "mla small", "products of heads",
           ("the first head's W for all", "args.w += head * `strides.w`, args.y += head * strides.y;", "0")),
    *group("latent_rows_kernel", "mla small", "rows latent",
           ("the norm of the key's rotated part, too", "latent_norm(from, args.kv_norm, `args.latent`, args.eps, key);", "args.latent + 8"),
           ("without epsilon", "const float scale = rsqrtf(`block_sum_128(sum) / size + eps`)", "block_sum_128(sum) / size"),
           ("the padding of q's vector stays", "for (int i = `args.q_rank + threadIdx.x`; i < args.ld_low; i += 128)", "args.ld_low", "rows latent.*q_rank=36"),
           ("pairs are halves", "high = __bfloat162float(from[`neighbours` ? 2 * pair + 1 : pair + half]);", "false", "rows latent.*neighbours"),
           ("the position of the row before", "const float2 *table = args.table + (size_t)args.pos[`row`] * half; from += args.c_at;", "max(row - 1, 0)")),
    *group("latent_rope_kernel", "mla small", "rows latent",
           ("the last head stays", "if (`row >= args.T`) return; const bf16 *from = args.from + (size_t)row * args.ld", "row >= args.T || head == args.H - 1"),
           ("the head before", "(size_t)row * args.ld + `head` * (args.nope + args.rope) + args.nope;", "max(head - 1, 0)")),
    *group("attn_latent", "mla small", "attention of mixed rows",
           ("a last tile of one position is skipped", "attn_tiles tiles = {first_kv, `(item.kv1 - first_kv + LATENT_TOK - 1) / LATENT_TOK`, 0};",
            "(item.kv1 - first_kv + LATENT_TOK - 2) / LATENT_TOK"),
           ("always the first page", "const int page = args.pages[item.page0 + `(offset >> log2_B)`];", "0"),
           ("the second half of the positions has the mask of the first", "attn_mask(args, item, scores, pos, kv + `wg * (LATENT_TOK / 2)`);", "0"),
           ("the tile on the diagonal has no mask", "if (i < unmasked.x || `i >= unmasked.y`) attn_mask(args, item, scores, pos", "i > unmasked.y"),
           ("the other half's maximum is not known", "new_max = fmaxf(own_max[r], `other_max`) * args.scale;", "own_max[r]"),
           ("O is not rescaled", "if (`max_grew`) attn_rescale(acc, rescale);", "false"),
           ("P of the other half of the positions", "attn_piece_at(LATENT_Q, query + 8 * r, `wg * 4 + c`)) + threadIdx.x % 4)", "(1 - wg) * 4 + c"),
           ("positions behind the last one may be NaN", "if (`item.kv1 - kv < LATENT_TOK`) latent_zero_tail", "false"),
           ("the sum of one half", "const float sum = smem.exchange[0][query] + `smem.exchange[1][query]`;", "0.0f"),
           ("both warpgroups multiply the first columns", "latent_pv(acc, tile + 8 * LATENT_PANEL, tile + `wg * 4` * LATENT_PANEL);", "0"),
           ("the rotated key is left out", "for (int c = 0; c < `LATENT_KEY / 16`; c++) wgmma_ss<LATENT_TOK / 2>", "LATENT_VALUE / 16")),
    *group("attn_latent", "mla small", "attention below a prefix .* shared",
           ("the state is not merged", "if (`query < item.nq`) state_lse[r] = attn_state_lse(args, item, query, 0);", "false")),
    *group("attn_can_prefetch", "attn small", "late rows of others",
           ("a position that another row of the step stores is prefetched", "&& (`row != span->row0 || span->n_rows > 1`)) return false;", "false")),
    *group("attn_small", "attn splits", "many long ",
           ("wrong page after the 32nd", "if (`page - first_page >= 32`) { first_page = page; page_ids = args.pages[item.page0 + min(page + lane, (", "page - first_page >= 32 + (first_page >= 0)")),
    *group("attn_wgmma", "attn small", "(prefill|tree) .*B=64 ",
           ("a last tile of one position is skipped", "int first_kv = attn_first_kv(args, item, N), n_tiles = item.kv1 > first_kv ? `(item.kv1 - first_kv + N - 1) / N` : 0;",
            "(item.kv1 - first_kv + N - 2) / N"),
           ("the page before the last one is read twice", "page_ids = args.pages[item.page0 + min(page + lane, `last_offset >> args.log2_B`)];", "max((last_offset >> args.log2_B) - 1, 0)"),
           ("positions after the last one are used", "int n_kv = `item.kv1 - first_kv - (n_tiles - 1) * N`;", "item.kv1 - first_kv - (n_tiles - 1) * N + 1"),
           ("the tile on the diagonal has no mask", "if (j < unmasked.x || `j >= unmasked.y`)\n            attn_mask<FUSED>(", "j > unmasked.y"),
           ("a row's second query attends to the positions of the first", "make_int2(smem.pos[stats.query], `smem.pos[stats.query + 8]`)", "smem.pos[stats.query]"),
           ("the third box of 64 positions is not loaded", "n_boxes = min(`N / 64`, (last_offset - offset) / 64 + 1);", "2", "long tiles"),
           ("sums are not rescaled when the maximum grows", "if (`must_rescale`) attn_rescale(acc, rescale);", "must_rescale && FUSED", "prefill, logits of 50 .*B=64"),
           ("output rows are mixed up", "const int row = row0 + k * (32 / PIECES) + `lane / PIECES`, piece", "0"),
           ("the state gets the weight of the new result", "x += `out.state_weight` * state.x, y += out.state_weight * state.y;", "out.new_weight", "tails, 40 rows .*B=64 .*shared"),
           ("the reciprocal of G is rounded down", ".inv_G = (uint32_t)(`((1ll << 31) - 1) / G + 1`)", "(1ll << 31) / G - 1")),
    *group("attn_wgmma", "attn splits", "many long ",
           ("wrong page after the 32nd", "if (`page - first_page >= 32 || page < first_page`) { first_page = page;", "page - first_page >= 32 + (first_page >= 0) || page < first_page")),
    *group("attn_fused", "attn samples", "samples",
           ("zeros before a tile's positions count as keys", "if (`n_kv < TOK`) attn_own_mask<TOK>(scores, n_kv);", "n_kv < TOK / 2"),
           ("a tile continues after the end of its page", "min(min(TOK, end - offset), `(1 << args.log2_B) - (offset & (1 << args.log2_B) - 1)`);", "TOK"),
           ("the state of the row before", "query = `row.query` + min(head, args.G - 1);", "max(row.query - args.G, 0)"),
           ("the last taken row is not computed", "for (int row_index = 0, n_used = 0; `row_index < producer.n_taken`; row_index++) {", "row_index + 1 < producer.n_taken"),
           ("always the first page", "__shfl_sync(~0u, page_ids, `next_kv >> args.log2_B`) * args.K + kv_head", "0"),
           ("a short tile continues after its positions", "map, bar, {0, `n_kv - shape::TOK`, row, 0, 0});", "0"),
           ("the exchange buffer of the other item", "exchange.o + `(round & 1)` * attn_fused_shape<DP>::EXCHANGE", "0"),
           ("a maximum over half of the lanes", "for (int k = 4; `k < 32`; k *= 2) new_max = fmaxf(new_max", "k < 16"),
           ("the state is counted in every lane", "(`lane_group == 0` ? state_weight : 0)", "true"),
           ("the state is never merged", "`attn_own_merge_state<DP>(args, row, acc, row_max, row_sum, exchange)`;", "(void)row_max"),
           ("sums are rescaled by the other query's factor", "acc[i] *= rescale[`i & 1`];", "~i & 1"),
           ("the second half of a K tile is the first half", "ldmatrix_x4(x[c], (at ^ c * 32) + `i * 512`);", "0"),
           ("the second panel of V is the first panel", "ldmatrix_x4_trans(x[c], (at ^ c * 32) + `i * TOK * 32` + n * 2048);", "0", "samples .*D=128"),
           ("all CTAs share one exchange buffer", "global_exchange + `(size_t)blockIdx.x * 2 * shape::EXCHANGE`,", "0", "samples .*D=128")),
    *group("attn_open_pair_map", "attn samples", "samples .*D=128",
           ("the second panel begins with the next row", "strides[4] = {row, row, `128`, row", "row")),
    *group("attn_plan_jobs", "attn lists", "work list of samples",
           ("a job runs twice, another one never", "jobs[plan->ctas[i].id] = i < n_round ? `plan->round_jobs[i].id` : -1;", "plan->round_jobs[i & ~1].id"),
           ("the longest jobs go to the CTAs with the largest load", "plan->ctas[i].load -= `plan->round_jobs[i].load`;", "-plan->round_jobs[i].load")),
    *group("attn_plan_fused_items", "attn lists", "work list of samples",
           ("the remaining rows are in no item", "n_rows = span->row0 + `(j + 1) * span->n_rows / n_items` - row;", "(j + 1) * (span->n_rows / n_items)")),
    *group("attn_finish_query", "attn small", "tree .* shared",
           ("wrong weight when the state of a shared prefix is merged", "out.new_weight *= new_weight / sum; out.state_weight = `state_weight / sum`;", "state_weight / (1 + state_weight)"),
           ("the LSE of a state lacks the new part", "out.lse = `max_lse + log2f(sum)`;", "state_weight")),
    *group("attn_finish_query", "attn sinks small", " sinks",
           ("the sink of the first head of a group", "args.sinks[`attn_head(args, item.q0 + query, kv_head)`]);", "kv_head * args.G"),
           ("a merged state keeps its weight", "out.new_weight *= weight, out.state_weight *= `weight`;", "1", "(tree|tails|prefix) .*sinks.* shared"),
           ("the sink in base e", "1 + ex2(`sink * (float)M_LOG2E` - out.lse)", "sink"),
           ("each split has the sink", "if (writes_lse) args.split_lse[split_index] = `out.lse`;", WITH_SINK, "splits .*sinks"),
           ("each state has the sink", "if (writes_lse) args.state_lse[head_index] = `out.lse`;", WITH_SINK, "(tree|tails|prefix) .*sinks.* shared")),
    *group("attn_fused", "attn sinks small", "samples.* sinks",
           ("the sinks of the first kv head", "args.sinks[`row.head + sum_head`] * (float)M_LOG2E", "sum_head"),
           ("the sink does not know the maximum", "(float)M_LOG2E - `row_max[col]`);", "0")),
    *group("attn_merge_query", "attn groups", "by groups",
           ("the last split is missing", "if (`j >= merge.n_splits`) break;\n            if (split[j]", "j >= max(merge.n_splits - 1, 1)"),
           ("the second warp's maximum for all", "split[j].x = ex2(`split[j].x` - base)", "max_sum(min(1, merge.n_splits - 1)).x")),
    *group("attn_cluster_split", "attn groups", "by groups",
           ("queries that no warp stores", "row * CTAS + cta_rank < merge.nq; `row += warps`)", "row += 4 * warps"),
           ("a split without the query counts", "lane % CTAS), `-INFINITY`, 0,", "1e4f"),
           ("sums lie at the wrong query", "mapa(recv_smem + (split * ROWS + `query / CTAS`) * DP", "(stats.query + 8 * r) / CTAS")),
    *group("attn_uses_cluster", "attn lists", "graphs: ",
           ("a graph of other kernels for cluster split-KV", "const int kind = `attn_uses_cluster(dev->attn)` ? 0 : n_launches;", "false")),
    *group("attn_cta_split", "attn groups", "by groups",
           ("sums of a row's own split lie at the group's first query", "const int query = `item.q0 - merge.q0` + stats.query + 8 * r;", "0"),
           ("a split without the query counts", "[threadIdx.x % 32] = float2{`-INFINITY`, 0};", "0.0f"),
           ("one query too many", "if (`stats.query + 8 * r >= item.nq`) continue;\n            if (quad == 0) max_sum", "stats.query + 8 * r > item.nq")),
    *group("attn_plan_prefix_groups", "attn lists", "work list of samples in (few rows|mixed groups)",
           ("the last row's own span is left out", "for (int row = first_row; row < `first_row + n_rows`; row++)\n        for (int span_id = plan->row_span[row]; span_id >= 0;", "first_row + max(n_rows - 1, 1)"),
           ("rows of two prompts in one prefix group", "(mixed || (parent >= 0 && `plan->spans[plan->row_span[row + n_rows]].parent == parent`))) n_rows++;", "true"),
           ("a span that ends after the group counts rows of the next group", "visit(span_id, row, `min(first_row + n_rows, span->row0 + span->n_rows)` - row);", "span->row0 + span->n_rows"),
           ("a span that began before the group is left out", "if (row == `max(first_row, span->row0)`) visit(span_id, row,", "span->row0"),
           ("groups are never mixed", "return (`n_groups * plan->K > plan->n_sms` && attn_prefix_groups_fit(plan, step, true))", "false")),
    *group("attn_emit_cta_splits", "attn lists", "work list of (few|prompts|samples)",
           ("splits lie one page apart", "item->kv1);\n        split->skip = (short)(i ? offset % plan->B : item->skip), split->page0 = item->page0 + `page`;", "i"),
           ("splits begin at a page boundary", "split->skip = (short)(i ? `offset % plan->B` : item->skip)", "0")),
    *group("attn_merge_splits", "attn splits", "(parts|long prefix|logits of 50|one key rules) ",
           ("weight of the wrong group", "row_sum += weight_sums[`j * row_threads`]; acc.x", "j"),
           ("the last split is missing", "for (int j = group; `j < merge.n_splits`; j += groups) {", "j + 1 < merge.n_splits"),
           ("splits lie too close together", "split_stride = attn_split_at(args, `(merge.nq + ATTN_SMALL_Q - 1) / ATTN_SMALL_Q`, 0, 0);", "merge.nq / ATTN_SMALL_Q")),
    *group("group_agree", "attn lists", "ranks with .*",
           ("ranks plan for their own number of kv heads", "attn_agree(dev, `K`, n_sms);", "dev->shape->K", "ranks with .* a chain"),
           ("ranks plan for their own number of SMs", "attn_agree(dev, K, `n_sms`);", "dev->n_sms", "ranks with .* long sequences"),
           ("a tensor rank on another kind of GPU is not noticed", "if (`(ranks[rank].arch == 90) != (ranks[0].arch == 90)`) other = rank;", "false", "tensor ranks of two kinds")),
    *group("attn_plan_step", "attn lists", "work list of ",
           ("a prefix's small span runs last", "if (`last && span_plan->small`) span_plan->level = plan->n_levels - 1;", "span_plan->small", "work list of a tree"),
           ("the state of the level before is not merged", "span_plan->flags = (`span_plan->level` ? ATTN_MERGE_STATE : 0)", "span_plan->level > 1", "work list of a tree"),
           ("the newest position is missing", "min(span->kv0 + span->n_kv, `item.pos_hi + 1`));", "item.pos_hi"),
           ("splits share a split buffer", "i < n_splits; i++, plan->n_split_bufs += `ceil_div(item->nq, ATTN_SMALL_Q)`) {", "item->nq / ATTN_SMALL_Q"),
           ("a merge without its last split", "attn_merge{item->q0, item->nq, plan->n_split_bufs, `n_splits`, item->flags}", "n_splits - 1"),
           ("the page ranges of splits overlap", "split->page0 = item->page0 + `i * split_pages`", "i * (split_pages - 1)"),
           ("the last page of a span is missing", "return `((span->kv0 & (B - 1)) + span->n_kv + B - 1) >> log2_B`;", "(span->n_kv + B - 1) >> log2_B")),

    *group("attn_clip_step", "attn lists", "work list of .* window=[1-9]",
           ("the window begins one position late", "const int from = min(max(clip->from, `lowest - plan->window + 1`), end);", "lowest - plan->window + 2"),
           ("nobody reads what a shared span has left", "span->kv0 : `plan->clips[parent].from`;", "span->kv0"),
           ("a page that is not there", "if (`id < 0`) return false;", "false", "work list of (samples|prompts that end).* window=[1-9]"),
           ("a page of the layers without a window", "const int *pages = `step->windowed_pages ? step->windowed_pages : step->pages`;", "step->pages"),
           ("the window of a tile is that of its span", "if (`plan->window`) from = min(max(from,", "false")),
    *group("attention", "attn kinds small", "kinds, .* layer [01]",
           ("the window of the layer is forgotten", ".window = `dev->layers[layer].window`, .key_size", "0")),

    # ---- Sampling ----
    *group("samp_filter_kernel", "samp small", "V \\d+, case \\d+",
           ("one more than top-k", "samp_find_threshold(dist, true, `(samp_mass)filter.top_k`, samp_kth_bound(dist", "(samp_mass)filter.top_k + 1"),
           ("the last id that a filter keeps is removed", "return x > dist.min_logit || (x == dist.min_logit && `id <= dist.last_tied`); }", "id < dist.last_tied"),
           ("a block whose maximum equals the threshold is skipped", "{ return `dist.block_maxes[block] >= min_logit`; });", "dist.block_maxes[block] > min_logit"),
           ("presence penalty for prompt ids", "if (`count > 0`) logit = __fsub_rn(logit, filter.presence);", "count >= 0"),
           ("one prompt id is counted", "if (`i >= filter.n_prompt`) atomicAdd(&table[n_entries + index], 1u);", "i + 1 >= filter.n_prompt"),
           ("prompt ids of a long history are counted", "if (`i >= filter.n_prompt`) atomicAdd(&counts[index], 1u);", "true", "wide \\d+, sampling 13"),
           ("two ids of a history share one table entry", "(previous = atomicCAS(&table[index], 0u, key)) && `previous != key`;)", "false"),
           ("the highest gathered logit instead of the wanted one", "if (first && mass_above < target && (`lowest || mass_above + mass_tied >= target`))", "true"),
           ("a bad word of two ids is never complete", "bool open = `at >= filter.n_prompt`;", "last == first"),
           ("the first id of a bad word is not compared", "for (int k = `first`; k < last && open; k++)", "first + 1"),
           ("a step of a bad word is taken from every place", "if (`samp_is_at(places, step.from)`) atomicOr(&next[step.to / 32]", "true"),
           ("an id without text ends all beginnings of words", "if (`samp_has_no_text(filter, first, id)`) continue;", "false"),
           ("an id without text stops the way back", "!(`no_text || samp_has_steps(filter.words, first, id)`));", "samp_has_steps(filter.words, first, id)"),
           ("special tokens are never text", "!(`table.steps[first].to && filter.keep_special`));", "false"),
           ("the first id of a word's beginning is not read", "n_passed = stops ? `__ffs((int)stops) - 1` : 32;", "max(__ffs((int)stops) - 2, 0)"),
           ("only whole words are forbidden", "const int n_ends = `begin < filter.n_history` ? table.n_ends : table.n_whole;", "false"),
           ("a row uses the bad words of the row before it", "if (prev_row && `prev_row->words == table`) { filter->words", "prev_row->words != nullptr"),
           ("the last forbidden id is allowed", "for (int i = (int)threadIdx.x; `i < filter.n_forbidden`; i +=", "i + 1 < filter.n_forbidden"),
           ("wrong order of equal top log-probabilities", "index += top_logits[i] > logit || (top_logits[i] == logit && `top_ids[i] < id`);", "top_ids[i] > id", "edge .*top log-prob"),
           ("a bias is added only once", "for (unsigned remaining = same_id; remaining; `remaining &= remaining - 1`) logit = samp_clean", "remaining = 0", "V \\d+, case \\d+"),
           ("the threshold of min-p is too high", "float min_logit = __double2float_ru(fmax(`(double)dist.max + drop`,", "(double)dist.max + 0.9 * drop")),
    *group("samp_filter_kernel", "samp small", "cut row \\d+, sampling \\d+",
           ("the sum above the counted range is missing", "*sum_above = `samp_cta_sum(own_mass, scratch)`;", "0"),
           ("counted ids have at least the upper weight of their bin", "to[1] += count * ex2(`log2_weight - bin_step`) * (1 - margin);", "log2_weight"),
           ("all ids are counted in the highest bin", "bins[`samp_width_bin(map, logit)`], 1u)", "0"),
           ("ids that were gathered of a range are taken for all that are kept", "samp_has_gathered(dist, samp_logit_to_key(dist.min_logit), `samp_logit_to_key(dist.max)`);", "dist.gathered_high"),
           ("the mask of the next id", "if (!(mask[id / 32] >> `id % 32` & 1)) logits[id] = -INFINITY;", "(id + 1) % 32", "wide \\d+, sampling \\d+"),
           ("blocks whose logits only the mask has changed keep their maximum", "touched[block] = filter.n_allowed > 0 || `(filter.mask != NULL)`;", "false", "wide \\d+, sampling \\d+"),
           ("masks with the same place in the table are one", "while (plan->masks[at].list == plan->mask_list && `plan->masks[at].host != mask`)", "false", "parts \\d"),
           ("a block's bound comes from the wrong random number", "samp_log2_exponential(`min(min(counter[0], counter[1]), min(counter[2], counter[3]))`)",
            "max(max(counter[0], counter[1]), max(counter[2], counter[3]))"),
           ("eight blocks are enough", "return `!(dist.block_sums[block] < min_bound)`; });", "false", "(cut row|wide) \\d+, sampling \\d+"),
           ("block sums with penalties are wrong", "if (lane == 0) dist.block_sums[block] = `sum`;", "1.0f")),
    *group("samp_presence_kernel", "samp small", "presence case \\d+",
           ("presence penalty for the last id of the prompt", "if (`i >= row.n_prompt`) atomicOr(", "i + 1 >= row.n_prompt"),
           ("the first token of the history is missing", "for (int i = `row.first` + (int)threadIdx.x;", "row.first + 1"),
           ("no repetition penalty for negative logits", "x = `x < 0` ? __fmul_rn(x, repetition)", "false")),
    *group("epi_sample", "samp small", "penalized, V \\d+",
           ("the second row is not penalized", "for (int b = 0; `b < 2`; b++) samp_penalize_group(fetched", "b < 1"),
           ("the presence bits of the first tile", "(int)fetched.param_words[b].z, min((epi_args.v0 + `tile.col0`) / SAMP_BLOCK,", "0")),
    *group("samp_partials_kernel", "samp small", "V 259 .* from stored",
           ("the id after the end of an odd vocabulary", "own[2 * j + 1] = `id0 + 8 * j + 1 < V` ? pair.y", "id0 + 8 * j + 1 <= V")),
    *group("samp_partials_kernel", "samp draws", "(plain|temperature|flat|pairs|p-values)",
           ("two groups share their random numbers", "return group < 2 ? group ? counter[1] : counter[0] : group == 2 ? counter[2] : `counter[3]`;", "counter[2]"),
           ("the first block uses the row's uniform number", "uint32_t counter[4] = {params.sample, params.position, `1 + (uint32_t)block`, 0};", "(uint32_t)block"),
           ("positions in a group from one end only", "return __fmul_rn(__fmul_rn(__fadd_rn((float)(`from_end ? ~params.uniform : params.uniform`), 0.5f)", "params.uniform")),
    # each of them has the right distribution, but draws other ids than the CPU
    *group("samp_partials_kernel", "samp same 200000", "draws of row",
           ("the uniform number from the other end", "float target = samp_target(params, `from_end`, group.sum), octet_logits[8];", "!from_end"),
           ("two groups exchange their random words", "return group < 2 ? `group` ? counter[1] : counter[0] : group == 2", "!group")),
    *group("samp_filter_kernel", "samp same 200000", "draws of row",
           ("the uniform number from the other end", "float target = samp_target(params, `from_end`, group.sum); int octet = state.is_drawn", "!from_end")),
    *group("samp_plan_step", "samp same 200000", "draws of row",
           ("the position in place of the sample", "uint32_t counter[4] = {`row->sample`, row->position, 0, 0};", "row->position")),
    *group("samp_merge", "samp small", "(edge|V \\d+)",
           ("the higher one of equal ids", "take_b = `score_b > score_a || (score_b == score_a && take_b)`;", "score_b > score_a || (score_b == score_a && !take_b)", "edge 6"),
           ("wrong factor of the raw sum", "__fmul_rn(partial_b.raw_sum, ex2(__fmul_rn(rel_max_b, `SAMP_LOG2E`)))", "scale"),
           ("wrong factor of the sum", "__fmul_rn(partial_a.sum, ex2(__fmul_rn(rel_max_a, `scale`)))", "SAMP_LOG2E")),
    *group("samp_needs_two_sums", "samp small", "(edge|V \\d+)",
           ("raw sums for rows that want none, and not for the others", "return `params.forced_id == SAMP_DRAW` && params.scale > 0", "params.forced_id == SAMP_DRAW_NO_LOGPROB")),
    *group("samp_reduce_kernel", "samp small", "(edge|V \\d+)",
           ("log-probability from the sum at the row's temperature", "samp_make_result(params, partial, partial.max, logf(`partial.raw_sum`), 0);", "partial.sum"),
           ("seq 0 does not store its last token", "if (`params.seq >= 0`) last_tokens[params.seq] = result.id;", "params.seq > 0", "last tokens of ")),
    *group("samp_reduce_kernel", "samp draws", "flat|rare",
           ("blocks from 32 on are left out", "for (int half = `SAMP_MERGE_THREADS / 2`; half; half /= 2) {\n        __syncthreads();\n        if (thread < half)", "SAMP_MERGE_THREADS / 4")),
    *group("samp_unadjust", "samp small", "V \\d+, case \\d+.* logprob",
           ("the penalty in the wrong direction", "if (seen) logit = logit < 0 ? logit / filter.repetition : `logit * filter.repetition`;", "logit / filter.repetition"),
           ("presence penalty is not undone", "if (count) logit += `(double)filter.frequency * count + filter.presence`;", "(double)filter.frequency * count"),
           ("always the first bias", "if (filter.bias_ids[i] == id) logit -= `filter.bias[i]`;", "filter.bias[0]")),
    *group("samp_collect", "samp small", "(edge|V \\d+)", ("results in the order of the plan", "toka_sample_result *result = &host->caller_results[`host->order[i]`];", "i")),
    *group("samp_collect", "samp small", "where some want no log-probability",
           ("a log-probability that is not wanted", "result->logprob = `toka_wants_logprob(row)` ?", "true")),
    *group("samp_launch", "samp small", "parts [12], row",
           ("filters of earlier rows", "n_rows, n_plain, n_filtered > 0 ? `filters + (first_filtered - filters_first)` : NULL, !x);", "filters")),
    *group("samp_plan_step", "samp small", "V \\d+ E \\d+ row",
           ("rows of x in the caller's order", "rows[i] = `row->row`;", "step->samples[i].row")),
    *group("samp_plan_step", "samp draws", "pairs by the seed's upper half",
           ("the seed's upper half is ignored", "philox(counter, (uint32_t)seed, `(uint32_t)(seed >> 32)`);", "0")),

    # ---- The op table and the weights, by whole models ----
    *group("weights_load", "model only qwen2 qwen3 mistral-short-window", "logits",
           ("biases of k and v in q's place", "load_add_job(loader, biases[i], `bias + weight_row_at(&parts, i, 0)`, biases[i]->cols", "bias", "qwen2 "),
           ("no window", "to->window = `from->window`;", "0", "mistral-short-window "),
           ("q's norm for k", "weight_load_norm(dev, &loader, `&from->k_norm`, 1, heads)", "&from->q_norm", "qwen3 ")),
    *group("attention", "model only ministral", "ministral .*graphs",
           ("a launch that a plan does not have is that of an earlier step", "for (int i = attn_launches(plan); `i < n_nodes`; i++)", "false")),
    *group("qkv_params_of", "model only ministral", "ministral .*logits",
           ("K and V of layers with a window at the slots of the others", "const int *kv_slot = `weights->window` ? rows->windowed_slot", "false")),
    *group("graph_pad_step", "model only ministral", "ministral .*graphs",
           ("padding rows write to windowed page 0", "graphs->windowed_slot[i] = `dev->options.n_windowed * dev->shape->B`;", "0")),
    *group("graph_pad_step", "model only qwen2", "graphs",
           ("padding rows write to page 0", "graphs->kv_slot[i] = `dev->options.n_pages * dev->shape->B`;", "0")),
    *group("graph_at", "model only qwen2", "graphs",
           ("a graph samples before the masks of its step are known", "const int index = `is_body` * GRAPH_N_WHOLE + size", "0")),
    *group("graph_padded_step", "model only qwen2", "graphs",
           ("padded steps have the positions of an earlier step", "memcpy(graphs->pos, step->pos, (size_t)`step->T` * sizeof *graphs->pos);", "0")),
    *group("graph_update_node", "model only qwen2", "graphs",
           ("a graph keeps its old attention grid", "params.gridDim = `config->gridDim`,", "dim3((unsigned)dev->shape->K)")),
    *group("graph_switch_upload", "model only qwen2", "graphs",
           ("a graph reads an earlier step's upload", "*reader->upload_ptrs[i] += `delta`;", "0")),
    *group("graph_add_upload_node", "model only qwen2", "graphs",
           ("a kernel's second pointer into the upload is not found", "if (`word[j] < from || word[j] >= end`) continue;",
            "word[j] < from || word[j] >= end || reader.n_upload_ptrs")),
    *group("samp_update_graph", "model only qwen2", "graphs",
           ("a graph samples its filtered rows as plain ones", "if (`!samp_has_graph_nodes(dev, step)`) return;", "true"),
           ("a graph's LM head stores no logits", "samp_lm_head(dev, 0, step->n_samples, `plan->n_plain`);", "step->n_samples")),
    *group("samp_fill_filters", "model only qwen2", "graphs",
           ("plain rows among filtered ones are filtered", "row_filters[n_filled] = samp_filter{.min_p_drop = `-INFINITY`,", "-1")),
    *group("cuda_norm_mlp_residual", "model only qwen2", "qwen2 .*logits",
           ("the other norm of the layer", "hidden_norm(dev, x, `weights->mlp_norm`, &weights->gate_up, true);", "weights->attn_norm")),
]

# kernels without a result that a test could check; and kernels of several ranks, which none of these tests launches (gpu_ranks.c does)
NO_RESULT = {"attn_no_work", "bench_fill_kernel", "bench_read_kernel", "fault_kernel", "stall_kernel",
             "one_shot_kernel", "two_shot_kernel", "reduce_norm_kernel", "samp_merge_ranks_kernel", "samp_gather_logits_kernel"}


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


@functools.cache
def squeezed(text):
    """The text without white space and comments, and the position of each character: a mutant does not depend on line breaks."""
    text = re.sub(r"/\*.*?\*/", lambda c: " " * len(c[0]), text, flags=re.S)
    at = [i for i, c in enumerate(text) if not c.isspace()]
    return "".join(text[i] for i in at), at


def place(text, m):
    """The place of the replaced part of a mutant as (from, to), or a message why there is none."""
    parts = ["".join(part.split()) for part in m.old.split("`")]
    if len(parts) not in (1, 3):
        return f"{len(parts) - 1} backticks"
    context, (code, at) = "".join(parts), squeezed(text)
    if code.count(context) != 1:
        return f"its text occurs in the file {code.count(context)} times"
    head, part = parts[:2] if len(parts) == 3 else ("", context)
    if len(parts) == 1 and part.endswith(","):
        return "it ends with a comma"
    if not part.endswith(";") and re.match(r"(if|for|return)\b", m.new):
        return "an expression becomes a statement"
    first = code.index(context) + len(head)
    return at[first], at[first + len(part) - 1] + 1


def mutated(text):
    """The copy of the file with all mutants behind their switches, numbered from 1."""
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
    results += [(f"{k}: {n}", "occurs twice") for k, n in set(names) if names.count((k, n)) > 1]
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


def write_sources(folder):
    os.makedirs(folder, exist_ok=True)
    tests = os.path.join(ROOT, "test")
    source, c_source = (os.path.join(folder, n) for n in ("mutants.cu", "mutants.c"))
    text = mutated(open(KERNELS).read()).replace('#include "toka.h"', f'#include "{ROOT}/toka.h"')
    text += f'\n#include "{tests}/gpu.cuh"\n#include <memory>\n'
    for name in PROGRAMS:
        body = re.sub(r'^#include .*$', "", open(os.path.join(tests, name + ".cu")).read(), flags=re.M)
        text += f"\nnamespace {name} {{\n{re.sub(r'^int main[(]', 'static int run(', body, flags=re.M)}\n}}\n"
    text += MAIN % " ".join(f'what == "{name[4:]}" ? {name}::run(n, v) :' for name in PROGRAMS).rstrip(":")
    open(source, "w").write(text)
    model = re.sub(r'^#include .*$', "", open(os.path.join(tests, "gpu_model.c")).read(), flags=re.M)
    open(c_source, "w").write(f'#include "{tests}/gpu_samp.c"\n#include "{tests}/gpu_host.h"\n#include "{tests}/gpu_graphs.h"\n' + re.sub(r"^int main[(]", "int model_main(int, char **);\nint model_main(", model, flags=re.M))
    return source, c_source


NVCC = "nvcc", "-std=c++20", "-O3", "-w", "-Xcompiler", "-fno-exceptions"


def build(folder):
    source, c_source = write_sources(folder)
    arch, program = os.environ.get("GPU_ARCH", "90a"), os.path.join(folder, "mutants")
    run_tool(os.environ.get("CC", "cc"), "-std=c11", "-O2", "-w", "-DTOKA_SERVER", "-DTOKA_WITH_CUDA", '-DTOKA_EMBED="test/model"', "-c", c_source,
             "-o", program + ".o")
    run_tool(*NVCC, "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-o", program, source, program + ".o", "-lm", "-lpthread")


def parse(folder):
    """Only the front end, which takes seconds: the kernels, all mutants and the CUDA tests are well formed."""
    source, _ = write_sources(folder)
    run_tool(*NVCC, "-fdevice-syntax-only", "-gencode", "arch=compute_90a,code=sm_90a", "-c", "-o", os.path.join(folder, "parsed.o"), source)


# ---- Running them ----

def execute(program, test, number, timeout):
    """Runs one test with one mutant (0: none). Returns its output and status (None: it ran too long)."""
    env = {**os.environ, "TOKA_TEST_MUTANT": str(number), "TOKA_TEST_SEED": "1"}
    p = subprocess.Popen([program, *test.split()], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=ROOT)
    try:
        return p.communicate(timeout=timeout)[0], p.returncode
    except subprocess.TimeoutExpired:
        p.kill()
        return p.communicate()[0], None


def verdict(m, out, status):
    """The reason why a mutant does not count as caught; empty if it does."""
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
    p.add_argument("mode", choices=["check", "parse", "build", "run"])
    p.add_argument("folder", nargs="?", default=os.path.join(ROOT, "test/.build/mutants"))
    p.add_argument("--jobs", type=int, default=6, help="tests at a time")
    p.add_argument("--only", default="", help="mutants whose 'kernel: name [test]' matches this expression")
    p.add_argument("--timeout", type=float, default=90, help="seconds for one test")
    a = p.parse_args()
    folder = os.path.abspath(a.folder)
    if a.mode == "check":
        sys.exit(check())
    if a.mode in ("parse", "build"):
        sys.exit((parse if a.mode == "parse" else build)(folder))
    sys.exit(run(folder, a.jobs, a.only, a.timeout))


if __name__ == "__main__":
    main()
