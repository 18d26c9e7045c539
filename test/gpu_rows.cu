/* gpu_rows.cu - tests the row-wise kernels of chapters 3 and 4, each alone, against float64:
 * conversion and placement of weights, embedding, RMSNorm, the RoPE table, QK-norm with RoPE and
 * the store to the KV cache.
 *   gpu_rows            all tests
 *   gpu_rows small      fewer shapes (for compute-sanitizer) */
#include "../toka_kernels.cu"

#include "gpu.cuh"

static bool quick;

static std::vector<float> normals(size_t n, uint64_t seed, float scale) {
    std::vector<float> v(n);
    for (size_t i = 0; i < n; i++) v[i] = scale * gpu_normal(seed, i);
    return v;
}

/* ---- Weights ---- One tensor is loaded in pieces that end anywhere in a row. Every element must
 * be in its place, and all other memory must stay poisoned. */

static const char *type_name(toka_dtype t) { return t == TOKA_F32 ? "f32" : t == TOKA_F16 ? "f16" : "bf16"; }

static void test_load(toka_device *d, toka_dtype type, int rows, int cols, int stride, bool f32, bool by_turns, int row0) {
    size_t n = (size_t)rows * cols, size = type == TOKA_F32 ? 4 : 2, n_to = (size_t)(row0 + (by_turns ? 2 : 1) * rows + 16) * stride;
    std::vector<float> v = normals(n, gpu_seed * 100 + n, 1);
    std::vector<char> raw(n * size);
    for (size_t i = 0; i < n; i++)
        if (type == TOKA_F32) memcpy(&raw[4 * i], &v[i], 4);
        else if (type == TOKA_F16) {
            __half h = __float2half(v[i]);
            v[i] = __half2float(h), memcpy(&raw[2 * i], &h, 2);
        } else {
            bf16 b = __float2bfloat16(v[i]);
            v[i] = __bfloat162float(b), memcpy(&raw[2 * i], &b, 2);
        }
    gpu_buf<bf16> to(n_to * (f32 ? 2 : 1));
    gpu_buf<char> room(raw.size());
    std::vector<char> host(raw.size());
    toka_tensor t = {raw.data(), type, rows, cols, cols};
    load_job j = {&t, to.p(), stride, f32, row0, by_turns};
    for (size_t at = 0, step = 1; at < n; at += step, step = std::min(n - at, 7 * step + 3)) {
        GPU_OK(load_piece(&j, at, step, host.data(), room.p(), d->stream));
        GPU_OK(cudaStreamSynchronize(d->stream));
    }
    std::vector<bf16> got = to.host(), want(to.n);
    memset((void *)want.data(), 0xFF, want.size() * sizeof(bf16));
    for (size_t i = 0; i < n; i++) {
        size_t r = i / (size_t)cols, at = (row0 + (by_turns ? r / 8 * 16 + r % 8 : r)) * (size_t)stride + i % (size_t)cols;
        if (f32) memcpy((void *)&want[2 * at], &v[i], 4);
        else want[at] = __float2bfloat16(v[i]);
    }
    gpu_check(gpu_same_bits(got, want) && to.guards_hold(), "load %s %dx%d, rows of %d %s%s from row %d", type_name(type), rows, cols,
              stride, f32 ? "f32" : "bf16", by_turns ? " by turns" : "", row0);
}
/* Rows of q, or a vector of all its heads, of which the kernels take the pairs of RoPE D/2 apart: to_place is where each element of a head must be. */
static void test_load_heads(toka_device *d, int D, int dims, bool neighbours, bool vector) {
    const int heads = 3, rows = heads * D, cols = vector ? 1 : 24;
    const toka_rope rope = {NULL, dims, 1, neighbours};
    const head_order order = head_order_of(&rope, D);
    std::vector<int> to_place((size_t)D, -1);
    std::vector<bool> taken((size_t)D);
    for (int pair = 0; pair < dims / 2; pair++) {
        const int low = neighbours ? 2 * pair : pair, high = neighbours ? 2 * pair + 1 : pair + dims / 2;
        to_place[(size_t)low] = pair, to_place[(size_t)high] = pair + D / 2;
        taken[(size_t)pair] = taken[(size_t)(pair + D / 2)] = true;
    }
    for (int i = dims, at = 0; i < D; i++, at++) {
        while (taken[(size_t)at]) at++;
        to_place[(size_t)i] = at;
    }
    std::vector<float> v = normals((size_t)rows * cols, gpu_seed + D, 1), want_f(v.size());
    std::vector<bf16> h(v.size()), want(v.size());
    for (size_t i = 0; i < v.size(); i++) h[i] = __float2bfloat16(v[i]);
    for (int row = 0; row < rows; row++)
        for (int col = 0; col < cols; col++) {
            const size_t to = (size_t)(row / D * D + to_place[(size_t)(row % D)]) * cols + col;
            want[to] = h[(size_t)row * cols + col], want_f[to] = (__bfloat162float(want[to]) + 1) * 0.5f;
        }
    gpu_buf<bf16> to(v.size());
    gpu_buf<float> to_f(v.size());
    gpu_buf<char> room(v.size() * 2);
    std::vector<char> host(v.size() * 2);
    toka_tensor t = {h.data(), TOKA_BF16, vector ? 1 : rows, vector ? rows : cols, vector ? rows : cols};
    load_job j = {&t, vector ? (void *)to_f.p() : to.p(), vector ? rows : cols, vector, 0, false};
    j.heads = order, j.add = vector ? 1 : 0, j.factor = vector ? 0.5f : 0;
    GPU_OK(load_piece(&j, 0, v.size(), host.data(), room.p(), d->stream));
    GPU_OK(cudaStreamSynchronize(d->stream));
    gpu_check((vector ? gpu_same_bits(to_f.host(), want_f) : gpu_same_bits(to.host(), want)) && to.guards_hold() && to_f.guards_hold(),
              "load heads of %d, %d rotate%s%s", D, dims, neighbours ? ", neighbours" : "", vector ? ", a vector" : "");
}

static void test_loads(toka_device *d) {
    for (bool vector : {false, true})
        for (bool neighbours : {false, true})
            for (int D : {24, 64, 128})
                for (int dims : {D, D / 2, D - 8, 2}) test_load_heads(d, D, dims, neighbours, vector);
    for (toka_dtype type : {TOKA_BF16, TOKA_F16, TOKA_F32}) {
        test_load(d, type, 1, 513, 513, true, false, 0); /* a norm or bias */
        test_load(d, type, 40, 136, 136, false, false, 24);
        test_load(d, type, 37, 51, 56, false, false, 5);
        test_load(d, type, 24, 64, 64, false, true, 0);
        test_load(d, type, 21, 51, 56, false, true, 8);
    }
}

/* ---- Embedding ---- Of ids, and of the last token of a seq. The table has n ids from v0 on; other
 * ids give zeros. Each id is kept at its kv_slot. */

static void test_embed(toka_device *d, int T, int E, int v0, int n, float scale = 0) {
    const int V = 300, n_slots = 40;
    gpu_buf<bf16> table((size_t)V * E), x((size_t)T * E);
    gpu_buf<int> ids((size_t)T), last(n_slots), slots((size_t)T), kv_ids(2 * (size_t)T);
    std::vector<int> id((size_t)T), kept(n_slots);
    gpu_random(table, gpu_seed, 1);
    for (int i = 0; i < n_slots; i++) kept[(size_t)i] = (int)(gpu_mix(gpu_seed * 5 + i) % V);
    for (int i = 0; i < T; i++) id[(size_t)i] = i == 1 ? V - 1 : i % 3 == 2 ? -1 - i % n_slots : (int)(gpu_mix(gpu_seed + i) % V);
    std::vector<int> slot, want_ids(2 * (size_t)T, -1);
    for (int i = 0; i < T; i++) slot.push_back(2 * (T - 1 - i) + i % 2), want_ids[(size_t)slot.back()] = id[(size_t)i] < 0 ? kept[(size_t)(-1 - id[(size_t)i])] : id[(size_t)i];
    ids.set(id), last.set(kept), slots.set(slot);
    GPU_OK(cudaDeviceSynchronize());
    launch_dependent(d, "embedding", embed_kernel, {dim3((unsigned)T), 128}, ids.p(), last.p(), embed_table{table.p() + (size_t)v0 * E, v0, n, scale}, x.p(), E,
                     fused_norm{}, kept_ids{slots.p(), kv_ids.p()});
    gpu_done(d, "embed");
    gpu_check(kv_ids.host() == want_ids && kv_ids.guards_hold(), "embed T=%d E=%d: kept ids", T, E);
    kv_ids.poison();
    GPU_OK(cudaDeviceSynchronize());
    launch_dependent(d, "ids", keep_ids_kernel, {dim3((unsigned)ceil_div(T, 256)), 256}, ids.p(), last.p(), slots.p(), kv_ids.p(), T);
    gpu_done(d, "keep_ids");
    gpu_check(kv_ids.host() == want_ids && kv_ids.guards_hold(), "keep_ids T=%d", T);
    std::vector<bf16> rows = table.host(), want;
    for (int i : id) {
        ptrdiff_t at = i < 0 ? kept[(size_t)(-1 - i)] : i;
        if (at < v0 || at >= v0 + n) want.insert(want.end(), (size_t)E, __float2bfloat16(0));
        else want.insert(want.end(), rows.begin() + at * E, rows.begin() + (at + 1) * E);
    }
    for (size_t i = 0; scale != 0 && i < want.size(); i++) want[i] = __float2bfloat16(__bfloat162float(want[i]) * scale);
    gpu_check(gpu_same_bits(x.host(), want) && x.guards_hold(), "embed T=%d E=%d, ids %d to %d, times %g", T, E, v0, v0 + n - 1, scale);
}

/* ---- Copies of KV pages: the listed pages in every layer, and no others. page, fp8_page: bytes; fp8, windowed: the layers with FP8, and
 * with windowed pages, which are fewer by 2 ---- */

static void test_copies(toka_device *d, int L, int n_pages, int page, int fp8_page, uint32_t fp8, uint32_t windowed = 0) {
    const int n_windowed = n_pages - 2;
    kv_layout layout = {NULL, {}, {page, fp8_page}, {fp8}, {windowed}};
    for (int i = 0; i < 4; i++) layout.layer_bytes[i / 2][i % 2] = (size_t)(i / 2 ? n_windowed : n_pages) * (i % 2 ? fp8_page : page);
    auto has = [](uint32_t bits, int l) { return l < 32 && bits >> l & 1; };
    auto bytes_of = [=](int l) { return has(fp8, l) ? fp8_page : page; };
    size_t all = 0; /* counted here, since kv_layer_at is what is tested */
    for (int l = 0; l < L; l++) all += (size_t)(has(windowed, l) ? n_windowed : n_pages) * bytes_of(l);
    std::vector<char> want(all);
    gpu_buf<char> kv(want.size());
    gpu_buf<toka_copy> copies(2), windowed_copies(2);
    const int B = 64;
    gpu_buf<int> kv_ids((size_t)(n_pages * B));
    std::vector<int> want_ids;
    for (int i = 0; i < n_pages * B; i++) want_ids.push_back(i);
    kv_ids.set(want_ids);
    const std::vector<toka_copy> c = {{0, n_pages - 1}, {2, 1}}, c_windowed = {{1, 0}, {n_windowed - 1, 2}};
    for (size_t i = 0; i < want.size(); i++) want[i] = (char)gpu_mix(gpu_seed + i);
    kv.set(want), copies.set(c), windowed_copies.set(c_windowed);
    layout.pool = kv.p();
    GPU_OK(cudaDeviceSynchronize());
    ptrdiff_t at = 0;
    for (int l = 0; l < L; l++) {
        const int bytes = bytes_of(l);
        for (toka_copy k : has(windowed, l) ? c_windowed : c)
            std::copy_n(want.begin() + at + k.from * (ptrdiff_t)bytes, bytes, want.begin() + at + k.to * (ptrdiff_t)bytes);
        at += (has(windowed, l) ? n_windowed : n_pages) * (ptrdiff_t)bytes;
    }
    for (toka_copy k : c) std::copy_n(want_ids.begin() + k.from * B, B, want_ids.begin() + k.to * B);
    launch_dependent(d, "copies", copy_pages_kernel, {dim3(2, (unsigned)L), 256}, copies.p(), windowed_copies.p(), layout,
                     kv_ids.p(), B);
    gpu_done(d, "copies of pages");
    gpu_check(kv_ids.host() == want_ids && kv_ids.guards_hold(), "copies of pages: kept ids");
    gpu_check(kv.host() == want && kv.guards_hold(), "copies of pages, %d layers, %d of %d bytes, FP8 %d bytes in %x, windowed %x", L, n_pages, page, fp8_page, fp8, windowed);
}

/* ---- RMSNorm ---- Of rows of x, in order or selected by row_index. E is the model's own width;
 * the padding up to a multiple of 8 must be 0. */

static void test_norm(toka_device *d, int T, int E, bool chosen, float scale) {
    toka_shape sh = {};
    sh.E = E, sh.eps = 1e-5f;
    d->shape = &sh, d->E = round_up_8(E);
    size_t Ep = (size_t)d->E, n = 2 * (size_t)T;
    std::vector<float> v = normals(n * Ep, gpu_seed + 5, scale), g = normals(Ep, gpu_seed + 6, 1);
    std::vector<bf16> h(v.size());
    std::vector<int> from((size_t)T);
    for (size_t i = 0; i < v.size(); i++) h[i] = __float2bfloat16(i % Ep < (size_t)E ? v[i] : 0), v[i] = __bfloat162float(h[i]);
    for (int t = 0; t < T; t++) from[(size_t)t] = chosen ? (t * 7 + 3) % (2 * T) : t;
    gpu_buf<bf16> x(h.size()), y((size_t)T * Ep);
    gpu_buf<float> w(Ep);
    gpu_buf<int> rows((size_t)T);
    x.set(h), w.set(g), rows.set(from);
    rmsnorm(d, x.p(), chosen ? rows.p() : NULL, w.p(), y.p(), T);
    gpu_done(d, "norm");
    std::vector<bf16> got = y.host();
    /* largest error / allowed error; allowed: half a unit in the last place of bf16 and a little
     * more */
    double max_error = 0;
    for (size_t t = 0; t < (size_t)T; t++) {
        const float *r = &v[(size_t)from[t] * Ep];
        double sum = 0;
        for (int e = 0; e < E; e++) sum += (double)r[e] * r[e];
        for (size_t e = 0; e < Ep; e++) {
            double want = r[e] / sqrt(sum / E + sh.eps) * g[e], over = fabs(__bfloat162float(got[t * Ep + e]) - want) / (fabs(want) * 0x1.02p-8 + 1e-30);
            max_error = over <= max_error ? max_error : over;
        }
    }
    gpu_check(max_error <= 1 && y.guards_hold(), "norm T=%d E=%d%s, x of %g: worst %.3g of what is allowed", T, E,
        chosen ? ", chosen rows" : "",
              scale, max_error);
}

/* ---- What is added to x behind attention and MLP, and the copy of x of layers without a norm before them ---- */

static void test_add_norm(toka_device *d, int T, int E) {
    const size_t Ep = (size_t)round_up_8(E), n = (size_t)T * Ep;
    const float eps = 1e-5f;
    std::vector<float> v = normals(n, gpu_seed + 15, 1), before = normals(n, gpu_seed + 16, 3), g = normals(Ep, gpu_seed + 17, 1);
    std::vector<bf16> hy(n), hx(n);
    for (size_t i = 0; i < n; i++) {
        hy[i] = __float2bfloat16(i % Ep < (size_t)E ? v[i] : 0), hx[i] = __float2bfloat16(i % Ep < (size_t)E ? before[i] : 0);
        v[i] = __bfloat162float(hy[i]), before[i] = __bfloat162float(hx[i]);
    }
    gpu_buf<bf16> x(n), y(n), copy(n);
    gpu_buf<float> w(Ep);
    x.set(hx), y.set(hy), w.set(g);
    GPU_OK(cudaDeviceSynchronize());
    launch_dependent(d, "copy", copy_rows_kernel, {dim3((unsigned)((n / 8 + 255) / 256)), 256}, (const uint4 *)x.p(), (uint4 *)copy.p(), n / 8);
    launch_dependent(d, "norm behind", add_norm_kernel, {dim3((unsigned)T), 128}, x.p(), y.p(), w.p(), (int)Ep, 1.0f / E, eps);
    gpu_done(d, "norm behind");
    gpu_check(gpu_same_bits(copy.host(), hx) && copy.guards_hold(), "copy of rows T=%d E=%d", T, E);
    const std::vector<bf16> got = x.host();
    double max_error = 0;
    for (size_t t = 0; t < (size_t)T; t++) {
        double sum = 0;
        for (int e = 0; e < E; e++) sum += (double)v[t * Ep + e] * v[t * Ep + e];
        for (size_t e = 0; e < Ep; e++) {
            const double added = v[t * Ep + e] / sqrt(sum / E + eps) * g[e], want = before[t * Ep + e] + added;
            max_error = gpu_worse(max_error, fabs(__bfloat162float(got[t * Ep + e]) - want) / (fabs(want) * 0x1.02p-8 + 1e-6 * fabs(added) + 1e-30));
        }
    }
    gpu_check(max_error <= 1 && x.guards_hold() && gpu_same_bits(y.host(), hy), "norm behind T=%d E=%d: worst %.3g of what is allowed", T, E, max_error);
}

/* ---- One norm of all heads of q, and of k ---- */

static void test_heads_norm(toka_device *d, int T, int H, int K, int D, bool has_k, bool interleaved) {
    const int width = (H + 2 * K) * D;
    const float eps = 1e-5f;
    std::vector<float> v = normals((size_t)T * width, gpu_seed + 21, 1), qn = normals((size_t)H * D, gpu_seed + 22, 1), kn = normals((size_t)K * D, gpu_seed + 23, 1);
    std::vector<bf16> h(v.size());
    for (size_t i = 0; i < v.size(); i++) h[i] = __float2bfloat16(v[i]), v[i] = __bfloat162float(h[i]);
    gpu_buf<bf16> qkv(v.size());
    gpu_buf<float> q_norm(qn.size()), k_norm(kn.size());
    qkv.set(h), q_norm.set(qn), k_norm.set(kn);
    GPU_OK(cudaDeviceSynchronize());
    launch_dependent(d, "norm of heads", heads_norm_kernel, {dim3((unsigned)T, 2), 128}, qkv.p(), q_norm.p(), has_k ? k_norm.p() : NULL, H, K, D, eps, interleaved);
    gpu_done(d, "norm of all heads");
    const std::vector<bf16> got = qkv.host();
    double max_error = 0;
    for (int t = 0; t < T; t++)
        for (int part = 0; part < 3; part++) { /* q, k, v */
            const int n = (part ? K : H) * D;
            const size_t first = (size_t)t * width + (part == 0 ? 0 : part == 1 ? H : H + K) * D;
            double sum = 0;
            for (int i = 0; i < n; i++) sum += (double)v[first + i] * v[first + i];
            for (int i = 0; i < n; i++) {
                const size_t at = first + (interleaved ? i / D * D + qkv_interleave(i % D, D / 2) : i);
                const bool normed = part == 0 || (part == 1 && has_k);
                const double want = normed ? v[at] / sqrt(sum / n + eps) * (part ? kn : qn)[(size_t)i] : v[at];
                max_error = gpu_worse(max_error, fabs(__bfloat162float(got[at]) - want) / (fabs(want) * (normed ? 0x1.02p-8 : 0) + 1e-30));
            }
        }
    gpu_check(max_error <= 1 && qkv.guards_hold(), "norm of all heads T=%d H=%d K=%d D=%d%s%s: worst %.3g of what is allowed", T, H, K, D, has_k ? "" : ", q alone",
              interleaved ? " by turns" : "", max_error);
}

/* ---- GELU ---- */

static void test_gelu(toka_device *d, int T, int F, int ldy) {
    std::vector<float> v = normals((size_t)T * 2 * F, gpu_seed + 31, 2);
    std::vector<bf16> h(v.size());
    for (size_t i = 0; i < v.size(); i++) h[i] = __float2bfloat16(v[i]), v[i] = __bfloat162float(h[i]);
    gpu_buf<bf16> from(v.size()), y((size_t)T * ldy);
    from.set(h);
    GPU_OK(cudaDeviceSynchronize());
    launch_dependent(d, "GELU", gelu_kernel, {dim3((unsigned)ceil_div(F, 2048), (unsigned)T), 256}, from.p(), y.p(), F, ldy);
    gpu_done(d, "GELU");
    const std::vector<bf16> got = y.host();
    double max_error = 0;
    size_t n_outside = 0;
    for (int t = 0; t < T; t++)
        for (int i = 0; i < ldy; i++) {
            uint16_t bits;
            memcpy(&bits, &got[(size_t)t * ldy + i], 2);
            if (i >= F) {
                n_outside += bits != 0xFFFF; /* still poisoned */
                continue;
            }
            const float *pair = &v[(size_t)t * 2 * F + i / 8 * 16 + i % 8];
            const double g = pair[0], want = g * 0.5 * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * pair[8];
            max_error = gpu_worse(max_error, fabs(__bfloat162float(got[(size_t)t * ldy + i]) - want) / (fabs(want) * 0x1.08p-8 + 1e-6 * fabs(g * pair[8]) + 1e-30));
        }
    gpu_check(max_error <= 1 && !n_outside && y.guards_hold(), "GELU T=%d F=%d, rows of %d: worst %.3g of what is allowed, %zu outside", T, F, ldy, max_error, n_outside);
}

/* ---- RoPE ---- */

static void test_table(toka_device *d, int D, int dims, int max_len, float scale) {
    toka_shape sh = {};
    std::vector<float> freq((size_t)D / 2);
    for (int i = 0; i < D / 2; i++) freq[(size_t)i] = (float)pow(10000, -2.0 * i / D);
    toka_rope rope = {freq.data(), dims, scale, false};
    sh.D = D, sh.max_len = max_len, d->shape = &sh;
    const float2 *table = rope_open(d, dims ? &rope : NULL);
    gpu_done(d, "RoPE table");
    std::vector<float2> got((size_t)max_len * D / 2);
    GPU_OK(cudaMemcpy(got.data(), table, got.size() * sizeof(float2), cudaMemcpyDeviceToHost));
    double max_error = 0;
    for (size_t i = 0; i < got.size(); i++) {
        double a = (float)(i / ((size_t)D / 2)) * freq[i % ((size_t)D / 2)], factor = scale;
        if ((int)(i % ((size_t)D / 2)) >= dims / 2) a = 0, factor = 1;
        max_error = gpu_worse(max_error, gpu_worse(fabs(got[i].x - cos(a) * factor), fabs(got[i].y - sin(a) * factor)));
    }
    gpu_check(max_error < 3e-7 * scale, "RoPE table D=%d, %d of them rotate, %d positions, scale %g: off by %.2g", D, dims, max_len, scale, max_error);
    while (d->n_allocations) cudaFree(d->allocations[--d->n_allocations]);
}

/* One head of a token after norm and RoPE, in float64. in: [D]; kind 0: q, 1: k, 2: v. */
static std::vector<double> rotated_head(const qkv_params &a, const float *in, const float *norm, const float2 *table, int pos, int kind) {
    std::vector<double> v(in, in + a.D);
    double sum = 0;
    for (double x : v) sum += x * x;
    for (int i = 0; i < a.D && norm && kind < 2; i++) v[(size_t)i] *= norm[i] / sqrt(sum / a.D + a.eps);
    for (int i = 0; i < a.D / 2 && kind < 2; i++) {
        float2 c = table[(size_t)pos * a.D / 2 + i];
        double x = v[(size_t)i], y = v[(size_t)(i + a.D / 2)];
        v[(size_t)i] = x * c.x - y * c.y, v[(size_t)(i + a.D / 2)] = y * c.x + x * c.y;
    }
    return v;
}
/* Is this head of K or V stored as FP8 by the rule of toka.h? V is copied, so its bytes are known. */
static bool rounded_head(const unsigned char *codes, unsigned char scale, const std::vector<double> &want, bool is_v) {
    const double unit = toka_kv_scale_value(scale);
    double largest = 0;
    for (double x : want) largest = std::max(largest, fabs(x));
    bool ok = largest <= 448 * unit * (1 + 1e-5) && largest >= 224 * unit * (1 - 1e-5);
    for (size_t i = 0; i < want.size(); i++) {
        if (is_v) ok = ok && codes[i] == toka_kv_round((float)want[i], scale);
        ok = ok && fabs(toka_from_fp8(codes[i]) * unit - want[i]) <= fabs(want[i]) / 15.9 + unit * 0x1.01p-10 + 1e-6 * largest;
    }
    return ok;
}
static void test_rope(toka_device *d, int T, int H, int K, int D, int B, bool norm, bool interleaved, bool fp8 = false) {
    const int max_len = 500, n_pages = T / B + 2, heads = H + 2 * K;
    size_t n = (size_t)T * heads * D;
    std::vector<float> v = normals(n, gpu_seed + D, 1), qn = normals(D, gpu_seed + 8, 1), kn = normals(D, gpu_seed + 9, 1);
    std::vector<bf16> h(n);
    for (size_t i = 0; i < n; i++) {
        bf16 *to = &h[interleaved ? i / D * D + qkv_interleave((int)(i % D), D / 2) : i];
        *to = __float2bfloat16(v[i]), v[i] = __bfloat162float(*to);
    }
    std::vector<float2> cs((size_t)max_len * D / 2);
    std::vector<int> p((size_t)T), s((size_t)n_pages * B);
    for (size_t i = 0; i < cs.size(); i++) cs[i] = {cosf(0.1f * i), sinf(0.1f * i)};
    for (size_t i = 0; i < s.size(); i++) s[i] = (int)i;
    for (size_t i = s.size() - 1; i > 0; i--) std::swap(s[i], s[gpu_mix(gpu_seed + i) % (i + 1)]);
    for (int t = 0; t < T; t++) p[(size_t)t] = (int)(gpu_mix(gpu_seed * 3 + t) % max_len);
    gpu_buf<bf16> qkv(n), q((size_t)T * H * D), kv((size_t)n_pages * B * K * (fp8 ? D + 1 : 2 * D));
    gpu_buf<float2> table(cs.size());
    gpu_buf<float> q_norm(qn.size()), k_norm(kn.size());
    gpu_buf<int> pos(p.size()), kv_slot(s.size());
    qkv.set(h), table.set(cs), q_norm.set(qn), k_norm.set(kn), pos.set(p), kv_slot.set(s);
    rope_args a = {{NULL, norm ? q_norm.p() : NULL, norm ? k_norm.p() : NULL, 1e-5f, H, K, B, pos.p(), kv_slot.p(), table.p(),
                    q.p(), kv.p(), D}, qkv.p(), T, interleaved};
    launch_dependent(d, "RoPE", fp8 ? rope_kernel<true> : rope_kernel<false>, {dim3((unsigned)ceil_div(T * heads, 8)), 256}, a);
    gpu_done(d, "RoPE");
    std::vector<bf16> got_q = q.host(), got_kv = kv.host();
    std::vector<char> written(got_kv.size() * 2); /* bytes */
    const unsigned char *bytes = (const unsigned char *)got_kv.data();
    double max_error = 0;
    size_t n_outside = 0;
    for (int t = 0; t < T; t++)
        for (int w = 0; w < heads; w++) {
            int kind = w < H ? 0 : w < H + K ? 1 : 2, head = w - (kind == 0 ? 0 : kind == 1 ? H : H + K), at = s[(size_t)t];
            std::vector<double> want = rotated_head(a.to, &v[((size_t)t * heads + w) * D],
                norm ? (kind ? kn : qn).data() : NULL, cs.data(), p[(size_t)t], kind);
            size_t to = kind ? ((((size_t)(at / B) * K + head) * 2 + (kind == 2)) * B + at % B) * D : ((size_t)t * H + head) * D;
            if (fp8 && kind) {
                const size_t page = (size_t)(at / B) * 2 * K * B * (D + 1), first = page + (((size_t)head * 2 + (kind == 2)) * B + at % B) * D;
                const size_t scale = page + 2 * K * B * D + ((size_t)head * B + at % B) * 2 + (kind == 2);
                if (!rounded_head(bytes + first, bytes[scale], want, kind == 2)) max_error = INFINITY;
                std::fill_n(written.begin() + (ptrdiff_t)first, D, 1), written[scale] = 1;
                continue;
            }
            for (int i = 0; i < D; i++) {
                double e = fabs(__bfloat162float(kind ? got_kv[to + i] : got_q[to + i]) - want[(size_t)i]);
                e /= fabs(want[(size_t)i]) * 0x1.02p-8 + 5e-6;
                max_error = e <= max_error ? max_error : e;
                if (kind) written[2 * (to + i)] = written[2 * (to + i) + 1] = 1;
            }
        }
    for (size_t i = 0; i < written.size(); i++) n_outside += !written[i] && bytes[i] != 0xFF;
    gpu_check(max_error <= 1 && !n_outside && q.guards_hold() && kv.guards_hold(),
              "RoPE and pages%s T=%d H=%d K=%d D=%d B=%d%s%s: worst %.3g of what is allowed, %zu outside", fp8 ? " fp8" : "", T, H, K, D, B, norm ? " norm" : "",
              interleaved ? " by turns" : "", max_error, n_outside);
}

int main(int argc, char **argv) {
    toka_device *d = gpu_device();
    quick = argc > 1 && !strcmp(argv[1], "small");
    test_loads(d);
    test_copies(d, 1, 4, 16 * 4 * 64, 0, 0), test_copies(d, 5, 9, 2 * 4 * 64 * 80, 0, 0);
    test_copies(d, 5, 9, 2 * 4 * 64 * 64, 2 * 2 * 64 * 65, 0xD), test_copies(d, 40, 5, 4 * 64 * 64, 2 * 64 * 65, 0xFFFFFFFF);
    test_copies(d, 5, 9, 2 * 4 * 64 * 64, 2 * 2 * 64 * 65, 0xD, 0x15), test_copies(d, 40, 6, 4 * 64 * 64, 2 * 64 * 65, 0xFF00FF00, 0xFFFF);
    for (int E : {8, 56, 1024, 1032, 2048, 8200})
        for (int T : {1, 3, 70}) test_embed(d, T, E, 0, 300), test_embed(d, T, E, 100, 130, 12.3f);
    for (int E : {1, 51, 64, 1023, 1032, 2048, 8200})
        for (float scale : {1.0f, 1e-3f}) test_norm(d, 1, E, false, scale), test_norm(d, 37, E, true, scale);
    for (int E : {1, 51, 64, 1032, 8200})
        for (int T : {1, 37}) test_add_norm(d, T, E);
    for (int D : {24, 40, 64, 128})
        for (bool has_k : {false, true}) test_heads_norm(d, 19, 5, 2, D, has_k, false), test_heads_norm(d, 3, 4, 1, D, has_k, D == 64 || D == 128);
    for (int F : {8, 104, 2048, 2056, 7168}) test_gelu(d, 1, F, F), test_gelu(d, 37, F, F + 16);
    test_table(d, 64, 64, quick ? 100 : 40000, 1);
    test_table(d, 24, 24, 700, 1.37f), test_table(d, 24, 10, 300, 1.37f), test_table(d, 64, 0, 100, 1);
    const int Ds[] = {8, 24, 40, 64, 80, 128, 192, 256};
    for (int D : Ds)
        for (int norm = 0; norm < 2; norm++) {
            test_rope(d, 1, 1, 1, D, 16, norm, false);
            test_rope(d, quick ? 19 : 67, 6, 2, D, 64, norm, false);
            /* rows interleaved, as after a GEMM with a reordered W */
            test_rope(d, 21, 6, 2, D, 64, norm, D == 64 || D == 128, true);
            if (D == 64 || D == 128) test_rope(d, 23, 5, 2, D, 32, norm, true);
            if (!quick) test_rope(d, 300, 9, 3, D, 16, norm, false);
        }
    if (d->error.code) gpu_check(false, "%s", d->error.msg);
    return gpu_report();
}
