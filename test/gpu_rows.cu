/* gpu_rows.cu - tests the row-wise kernels of chapters 3 and 4, each alone, against float64:
 * conversion and placement of weights, embedding, RMSNorm, the RoPE table, QK-norm with RoPE and
 * the store to the KV cache.
 *   gpu_rows            all tests
 *   gpu_rows small      fewer shapes (for compute-sanitizer) */
#include "../toka_kernels.cu"

#include "gpu.cuh"

static bool quick;

static void done(toka_device *d, const char *what) {
    GPU_OK(cudaStreamSynchronize(d->stream));
    if (d->error.code) gpu_check(false, "%s: %s", what, d->error.msg), exit(gpu_report());
}
template <class T> static bool same_bits(const std::vector<T> &a, const std::vector<T> &b) {
    return a.size() == b.size() && !memcmp(a.data(), b.data(), a.size() * sizeof(T));
}
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
    gpu_check(same_bits(got, want) && to.guards_hold(), "load %s %dx%d, rows of %d %s%s from row %d", type_name(type), rows, cols,
              stride, f32 ? "f32" : "bf16", by_turns ? " by turns" : "", row0);
}
static void test_loads(toka_device *d) {
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

static void test_embed(toka_device *d, int T, int E, int v0, int n) {
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
    launch_dependent(d, "embedding", embed_kernel, {dim3((unsigned)T), 128}, ids.p(), last.p(), embed_table{table.p() + (size_t)v0 * E, v0, n}, x.p(), E,
                     fused_norm{}, kept_ids{slots.p(), kv_ids.p()});
    done(d, "embed");
    gpu_check(kv_ids.host() == want_ids && kv_ids.guards_hold(), "embed T=%d E=%d: kept ids", T, E);
    kv_ids.poison();
    GPU_OK(cudaDeviceSynchronize());
    launch_dependent(d, "ids", keep_ids_kernel, {dim3((unsigned)ceil_div(T, 256)), 256}, ids.p(), last.p(), slots.p(), kv_ids.p(), T);
    done(d, "keep_ids");
    gpu_check(kv_ids.host() == want_ids && kv_ids.guards_hold(), "keep_ids T=%d", T);
    std::vector<bf16> rows = table.host(), want;
    for (int i : id) {
        ptrdiff_t at = i < 0 ? kept[(size_t)(-1 - i)] : i;
        if (at < v0 || at >= v0 + n) want.insert(want.end(), (size_t)E, __float2bfloat16(0));
        else want.insert(want.end(), rows.begin() + at * E, rows.begin() + (at + 1) * E);
    }
    gpu_check(same_bits(x.host(), want) && x.guards_hold(), "embed T=%d E=%d, ids %d to %d", T, E, v0, v0 + n - 1);
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
    done(d, "copies of pages");
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
    done(d, "norm");
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

/* ---- RoPE ---- */

static void test_table(toka_device *d, int D, int max_len, float scale) {
    toka_shape sh = {};
    std::vector<float> freq((size_t)D / 2);
    for (int i = 0; i < D / 2; i++) freq[(size_t)i] = (float)pow(10000, -2.0 * i / D);
    toka_rope rope = {freq.data(), D, scale, false};
    sh.D = D, sh.max_len = max_len, d->shape = &sh;
    rope_open(d, &rope);
    done(d, "RoPE table");
    std::vector<float2> got((size_t)max_len * D / 2);
    GPU_OK(cudaMemcpy(got.data(), d->rope, got.size() * sizeof(float2), cudaMemcpyDeviceToHost));
    double max_error = 0;
    for (size_t i = 0; i < got.size(); i++) {
        double a = (float)(i / ((size_t)D / 2)) * freq[i % ((size_t)D / 2)];
        max_error = std::max(max_error, std::max(fabs(got[i].x - cos(a) * scale), fabs(got[i].y - sin(a) * scale)));
    }
    gpu_check(max_error < 3e-7 * scale, "RoPE table D=%d, %d positions, scale %g: off by %.2g", D, max_len, scale, max_error);
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
    done(d, "RoPE");
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
        for (int T : {1, 3, 70}) test_embed(d, T, E, 0, 300), test_embed(d, T, E, 100, 130);
    for (int E : {1, 51, 64, 1023, 1032, 2048, 8200})
        for (float scale : {1.0f, 1e-3f}) test_norm(d, 1, E, false, scale), test_norm(d, 37, E, true, scale);
    test_table(d, 64, quick ? 100 : 40000, 1);
    test_table(d, 24, 700, 1.37f);
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
