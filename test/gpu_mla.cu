/* gpu_mla.cu - tests multi-head latent attention on the GPU against float64 over the same bf16 inputs: attention over latent vectors with
 * rows that decode and rows of prompts, shared prefixes, split-KV; the products of each head; what a token stores, and RoPE of the
 * queries. Pages are in random order; unused pages and unused ends of pages are full of NaN. Arguments:
 *   none       all tests
 *   small      fewer cases (for compute-sanitizer)
 *   tiny       each kernel once (for racecheck)
 *   bench      timings of attention and of the products of heads */
#include "../toka_kernels.cu"

#include "gpu.cuh"

typedef struct mla_sizes { int H, latent, rope; } mla_sizes;
/* Positions 0 .. len-1 are known; the last `rows` of them belong to the step. The first `shared` of them are those of the first
 * sequence; they end where a page ends. */
typedef struct mla_seq { int len, rows, shared; } mla_seq;
static const int B = 64;

/* ---- Attention ---- */

/* One CTA of 128 threads for each row and head. slots: [T][ld] the cache positions that a row sees, n of them. */
__global__ static void reference(const bf16 *q, const bf16 *kv, const int *slots, int ld, const int *n_seen, double *o, int H, int D, int Dv,
                                 double scale) {
    __shared__ double p[128], acc[512];
    const int row = blockIdx.x / H, n = n_seen[row];
    const bf16 *query = q + (size_t)blockIdx.x * D;
    double total = 0, row_max = -1e300; /* the same in all threads */
    for (int j = threadIdx.x; j < Dv; j += 128) acc[j] = 0;
    for (int t0 = 0; t0 < n; t0 += 128) {
        const int t = t0 + threadIdx.x, m = min(128, n - t0);
        double score = -1e300, new_max = row_max;
        if (t < n) {
            const bf16 *key = kv + (size_t)slots[(size_t)row * ld + t] * D;
            score = 0;
            for (int j = 0; j < D; j++) score += (double)__bfloat162float(query[j]) * (double)__bfloat162float(key[j]);
            score *= scale;
        }
        p[threadIdx.x] = score;
        __syncthreads();
        for (int i = 0; i < m; i++) new_max = fmax(new_max, p[i]);
        __syncthreads();
        p[threadIdx.x] = t < n ? exp(score - new_max) : 0;
        __syncthreads();
        const double rescale = exp(row_max - new_max);
        row_max = new_max, total *= rescale;
        for (int i = 0; i < m; i++) total += p[i];
        for (int j = threadIdx.x; j < Dv; j += 128) {
            double x = acc[j] * rescale;
            for (int i = 0; i < m; i++) x += p[i] * (double)__bfloat162float(kv[(size_t)slots[(size_t)row * ld + t0 + i] * D + j]);
            acc[j] = x;
        }
        __syncthreads();
    }
    for (int j = threadIdx.x; j < Dv; j += 128) o[(size_t)blockIdx.x * Dv + j] = n ? acc[j] / total : 0;
}
/* Fills the cache positions with random numbers. */
__global__ static void fill_slots(bf16 *kv, const int *slots, int n, int D, uint64_t seed) {
    for (int i = blockIdx.x; i < n; i += gridDim.x)
        for (int j = threadIdx.x; j < D; j += blockDim.x)
            kv[(size_t)slots[i] * D + j] = __float2bfloat16(gpu_normal(seed, (uint64_t)slots[i] * D + j));
}

struct scene {
    const mla_sizes sizes;
    toka_device *d = gpu_device();
    layer_weights layers[1] = {};
    toka_shape shape = {};
    toka_step step = {};
    std::vector<int> pos, pages, n_seen, seen, filled; /* seen: [T][ld] */
    std::vector<toka_span> spans;
    int n_pages = 0, T = 0, ld = 1;
    gpu_buf<bf16> *kv = nullptr, *q = nullptr, *o = nullptr;
    double scale;

    scene(mla_sizes sizes_, const std::vector<mla_seq> &seqs, bool share, float q_scale = 1.5f) : sizes(sizes_) {
        std::vector<std::vector<int>> tables;
        for (const mla_seq &seq : seqs) {
            n_pages += ceil_div(seq.len, B) - seq.shared / B, T += seq.rows;
            ld = std::max(ld, seq.len);
        }
        std::vector<int> order((size_t)n_pages);
        for (int i = 0; i < n_pages; i++) order[i] = i;
        for (int i = n_pages - 1; i > 0; i--) std::swap(order[i], order[gpu_mix(gpu_seed + i) % (i + 1)]);
        seen.assign((size_t)T * ld, 0);
        int taken = 0, shared_rows = 0;
        for (const mla_seq &seq : seqs) {
            std::vector<int> table;
            for (int i = 0; i < ceil_div(seq.len, B); i++) table.push_back(i < seq.shared / B ? tables[0][i] : order[taken++]);
            tables.push_back(table);
            if (seq.shared) shared_rows += seq.rows;
        }
        const int n_shared = seqs.back().shared;
        if (share && n_shared) { /* the first sequence and those that share its beginning are neighbours, the last ones */
            int first = 0;
            for (const mla_seq &seq : seqs) first += seq.shared ? 0 : seq.rows;
            spans.push_back({first, shared_rows, (int)pages.size(), 0, n_shared});
            pages.insert(pages.end(), tables[0].begin(), tables[0].begin() + n_shared / B);
        }
        for (size_t s = 0; s < seqs.size(); s++) {
            const mla_seq &seq = seqs[s];
            const int kv0 = share ? seq.shared : 0, row0 = (int)pos.size();
            if (seq.rows) spans.push_back({row0, seq.rows, (int)pages.size(), kv0, seq.len - kv0});
            pages.insert(pages.end(), tables[s].begin() + kv0 / B, tables[s].end());
            pages.push_back(n_pages); /* full of NaN: behind the end of each block table */
            for (int i = 0; i < seq.len; i++) filled.push_back(tables[s][i / B] * B + i % B);
            for (int i = seq.len - seq.rows; i < seq.len; i++) {
                pos.push_back(std::max(i, 0)), n_seen.push_back(i + 1);
                for (int t = 0; t <= i; t++) seen[(pos.size() - 1) * ld + t] = tables[s][t / B] * B + t % B;
            }
        }
        shape.H = sizes.H, shape.K = 1, shape.D = sizes.latent + sizes.rope, shape.Dv = sizes.latent, shape.B = B, shape.L = 1,
        shape.max_len = ld + 1, shape.attn_scale = 0.1147f * sqrtf(192.0f / shape.D);
        scale = shape.attn_scale;
        step.T = T, step.pos = pos.data(), step.pages = pages.data(), step.spans = spans.data(), step.n_spans = (int)spans.size();
        open(q_scale);
    }
    void open(float q_scale) {
        const size_t page = (size_t)B * shape.D;
        kv = new gpu_buf<bf16>((size_t)(n_pages + 1) * page), q = new gpu_buf<bf16>((size_t)T * sizes.H * shape.D),
        o = new gpu_buf<bf16>((size_t)T * sizes.H * shape.Dv);
        gpu_buf<int> at(std::max<size_t>(filled.size(), 1));
        at.set(filled);
        fill_slots<<<1024, 128>>>(kv->p(), at.p(), (int)filled.size(), shape.D, gpu_seed);
        gpu_random(*q, gpu_seed + 1, q_scale);
        GPU_OK(cudaDeviceSynchronize());
        d->shape = &shape, d->layers = layers, d->kv_pool = kv->p(), d->kv_layer_elems = (size_t)(n_pages + 1) * page;
        d->options.max_tokens = T, d->options.n_pages = n_pages + 1;
        attn_open(d);
        upload_open(d, &d->upload, attn_upload_bytes(d) + (size_t)T * sizeof(int) + 64, false);
        d->upload.used = 0;
        d->rows.pos = (const int *)upload_put(&d->upload, pos.data(), pos.size() * sizeof(int));
        attn_plan_step(d, &step);
        upload_send(d, &d->upload);
        GPU_OK(cudaStreamSynchronize(d->stream));
    }
    std::vector<bf16> run() {
        o->poison();
        GPU_OK(cudaDeviceSynchronize());
        attention(d, 0, q->p(), o->p());
        GPU_OK(cudaStreamSynchronize(d->stream));
        return o->host();
    }
    std::vector<double> wanted() {
        gpu_buf<int> slots(seen.size()), n((size_t)T);
        gpu_buf<double> r(o->n);
        slots.set(seen), n.set(n_seen);
        reference<<<T * sizes.H, 128>>>(q->p(), kv->p(), slots.p(), ld, n.p(), r.p(), sizes.H, shape.D, shape.Dv, scale);
        GPU_OK(cudaDeviceSynchronize());
        return r.host();
    }
    ~scene() {
        attn_close(d);
        for (int i = 0; i < d->n_allocations; i++) cudaFree(d->allocations[i]);
        upload_close(&d->upload);
        d->n_allocations = 0, d->error.code = 0;
        delete kv, delete q, delete o;
    }
};

/* Compares with float64, and a second run bit for bit. splits: split-KV must be used. */
static void test_attention(const char *name, mla_sizes sizes, const std::vector<mla_seq> &seqs, bool splits = false) {
    std::vector<double> want;
    for (int share = seqs.back().shared ? 1 : 0; share >= 0; share--) {
        scene s(sizes, seqs, share);
        char what[160];
        snprintf(what, sizeof what, "attention %s H=%d latent=%d rope=%d%s", name, sizes.H, sizes.latent, sizes.rope,
                 seqs.back().shared ? share ? " shared" : " unshared" : "");
        const std::vector<bf16> got = s.run(), again = s.run();
        if (!gpu_check(!s.d->error.code, "%s: %s", what, s.d->error.msg)) continue;
        want = s.wanted();
        const int Dv = sizes.latent;
        double err = 0, ref = 0, worst = 0;
        size_t at = 0;
        for (size_t i = 0; i < want.size(); i++) {
            const double e = (double)__bfloat162float(got[i]) - want[i];
            err += e * e, ref += want[i] * want[i];
            if (!(fabs(e) <= worst)) worst = fabs(e), at = i;
        }
        gpu_check(sqrt(err) <= 5e-3 * sqrt(ref) && worst < 0.05 && s.o->guards_hold() && s.q->guards_hold(),
                  "%s: relative error %.2e, largest %.3g (row %d head %d column %d: %.5g, expected %.5g)", what, sqrt(err / ref), worst,
                  (int)(at / Dv / sizes.H), (int)(at / Dv % sizes.H), (int)(at % Dv), (double)__bfloat162float(got[at]), want[at]);
        gpu_check(!memcmp(got.data(), again.data(), got.size() * sizeof(bf16)), "%s: a second run has other bits", what);
        int n_merges = 0;
        for (int i = 0; i < s.d->attn->n_levels; i++) n_merges += s.d->attn->levels[i].n_merges;
        gpu_check(!splits || n_merges, "%s: no split-KV", what);
    }
}
static void test_attention_all(bool small) {
    const std::vector<mla_seq> mixed = {{1, 1}, {63, 1}, {64, 1}, {65, 1}, {65, 65}, {130, 67}, {0, 1}, {200, 3}},
                               tree = {{128, 0}, {128, 1, 128}, {129, 1, 128}, {191, 1, 128}, {192, 1, 128}, {193, 1, 128}, {300, 37, 128}},
                               longer = {{4097, 1}, {1, 1}, {4097, 33}, {4096, 1}};
    for (mla_sizes sizes : {mla_sizes{16, 512, 64}, mla_sizes{128, 512, 64}, mla_sizes{3, 40, 16}, mla_sizes{5, 72, 24}}) {
        test_attention("of mixed rows", sizes, mixed);
        test_attention("below a prefix", sizes, tree);
        if (small) continue;
        test_attention("of 4097 positions", sizes, longer);
        test_attention("of one row", sizes, {{4097, 1}}, true);
        test_attention("of a prompt", sizes, {{777, 777}});
    }
}

/* ---- kv_b on the device ---- */

/* Loaded in two pieces: for each head W_uk transposed, then W_uv. */
static void test_load(int H, int nope, int v, int latent) {
    toka_device *d = gpu_device();
    const int rows = H * (nope + v);
    std::vector<bf16> from((size_t)rows * latent), want(from.size());
    for (size_t i = 0; i < from.size(); i++) from[i] = __float2bfloat16(gpu_normal(gpu_seed, i));
    bf16 *at = want.data();
    for (int h = 0; h < H; h++) {
        const bf16 *head = &from[(size_t)h * (nope + v) * latent];
        for (int c = 0; c < latent; c++)
            for (int i = 0; i < nope; i++) *at++ = head[(size_t)i * latent + c];
        for (int i = 0; i < v * latent; i++) *at++ = head[(size_t)nope * latent + i];
    }
    gpu_buf<bf16> to(from.size());
    gpu_buf<char> room(from.size() * 2);
    std::vector<char> host(from.size() * 2);
    const toka_tensor tensor = {from.data(), TOKA_BF16, rows, latent, latent};
    load_job job = {&tensor, to.p(), latent, false, 0, false};
    job.up = up_blocks{nope, v, latent};
    const size_t half = from.size() / 2 + 5;
    GPU_OK(load_piece(&job, 0, half, host.data(), room.p(), d->stream));
    GPU_OK(cudaStreamSynchronize(d->stream));
    GPU_OK(load_piece(&job, half, from.size() - half, host.data(), room.p(), d->stream));
    GPU_OK(cudaStreamSynchronize(d->stream));
    const std::vector<bf16> got = to.host();
    gpu_check(!memcmp(got.data(), want.data(), got.size() * sizeof(bf16)) && to.guards_hold(), "load kv_b H=%d nope=%d v=%d latent=%d", H, nope, v, latent);
}

/* ---- Products of each head ---- */

static double dot(const bf16 *x, const bf16 *w, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)__bfloat162float(x[i]) * (double)__bfloat162float(w[i]);
    return sum;
}
static void test_heads(int M, int N, int K, int H) {
    toka_device *d = gpu_device();
    const head_strides strides = {(size_t)K + 64, (size_t)N * K + 128, (size_t)N + 2};
    const int ldx = (int)strides.x * H, ldy = (int)strides.y * H;
    gpu_buf<bf16> x((size_t)M * ldx), w(strides.w * H), y((size_t)M * ldy);
    gpu_random(x, gpu_seed, 1), gpu_random(w, gpu_seed + 1, 1);
    GPU_OK(cudaDeviceSynchronize());
    gemm_heads(d, gemm_kernel_args{.x = x.p(), .w = w.p(), .y = y.p(), .M = M, .N = N, .K = K, .ldx = ldx, .ldy = ldy, .epi = EPI_STORE},
               strides, H);
    GPU_OK(cudaStreamSynchronize(d->stream));
    const std::vector<bf16> hx = x.host(), hw = w.host(), hy = y.host();
    int wrong = 0;
    for (int i = 0; i < 4000; i++) {
        const uint64_t r = gpu_mix(gpu_seed + (uint64_t)i);
        const int m = i < 8 ? M - 1 : (int)(r % M), h = i < 8 ? H - 1 : (int)(r >> 20 & 0xFFFF) % H, n = i < 8 ? N - 1 - i : (int)(r >> 40) % N;
        const double want = dot(&hx[(size_t)m * ldx + h * strides.x], &hw[h * strides.w + (size_t)n * K], K),
                     got = __bfloat162float(hy[(size_t)m * ldy + h * strides.y + n]);
        wrong += !(fabs(got - want) <= fabs(want) / 256 + 1e-4 * sqrt(K));
    }
    int written = 0; /* the gap of two columns between the heads */
    for (int m = 0; m < M; m++)
        for (int h = 0; h < H; h++) written += __bfloat162float(hy[(size_t)m * ldy + h * strides.y + N]) == __bfloat162float(hy[(size_t)m * ldy + h * strides.y + N]);
    gpu_check(!wrong && !written && y.guards_hold(), "products of heads M=%d N=%d K=%d H=%d: %d of 4000 wrong, %d written between heads", M, N, K, H, wrong,
              written);
}

/* ---- What a token stores ---- */

static bool is_near(double got, double want) { return fabs(got - want) <= fabs(want) / 128 + 1e-3; }
/* Compares a row with norm(from) * w. */
static int norm_errors(const bf16 *got, const bf16 *from, const std::vector<float> &w, int n, double eps) {
    double sum = 0;
    int wrong = 0;
    for (int i = 0; i < n; i++) sum += pow((double)__bfloat162float(from[i]), 2);
    for (int i = 0; i < n; i++) wrong += !is_near(__bfloat162float(got[i]), __bfloat162float(from[i]) * w[i] / sqrt(sum / n + eps));
    return wrong;
}
static int rope_errors(const bf16 *got, const bf16 *from, const std::vector<float2> &table, int pos, int rope, bool neighbours) {
    int wrong = 0;
    for (int p = 0; p < rope / 2; p++) {
        const double a = __bfloat162float(from[neighbours ? 2 * p : p]), b = __bfloat162float(from[neighbours ? 2 * p + 1 : p + rope / 2]);
        const float2 cs = table[(size_t)pos * (rope / 2) + p];
        wrong += !is_near(__bfloat162float(got[p]), a * cs.x - b * cs.y) + !is_near(__bfloat162float(got[p + rope / 2]), b * cs.x + a * cs.y);
    }
    return wrong;
}
static void test_rows(int latent, int rope, int q_rank, int H, int nope, bool neighbours) {
    toka_device *d = gpu_device();
    const int T = 5, c_at = q_rank ? q_rank : H * (nope + rope), ld = round_up_8(c_at + latent + rope), ld_low = round_up_8(q_rank), D = latent + rope,
              max_len = 50;
    const std::vector<int> pos = {0, 7, 49, 3, 3}, slot = {130, 64, 63, 5, 6};
    gpu_buf<bf16> from((size_t)T * ld), kv((size_t)3 * B * D), low((size_t)T * std::max(ld_low, 8)), q((size_t)T * H * D);
    gpu_buf<float> kv_norm((size_t)latent), q_norm((size_t)std::max(q_rank, 1)), table((size_t)max_len * rope);
    gpu_buf<int> dev_pos((size_t)T), dev_slot((size_t)T);
    gpu_random(from, gpu_seed, 1), gpu_random(kv_norm, gpu_seed + 1, 1), gpu_random(q_norm, gpu_seed + 2, 1), gpu_random(table, gpu_seed + 3, 1);
    dev_pos.set(pos), dev_slot.set(slot);
    GPU_OK(cudaDeviceSynchronize());
    latent_rows_args args = {.from = from.p(), .ld = ld, .c_at = c_at, .latent = latent, .rope = rope, .q_rank = q_rank, .neighbours = neighbours,
                             .q_norm = q_norm.p(), .kv_norm = kv_norm.p(), .eps = 1e-2f, .table = (const float2 *)table.p(), .pos = dev_pos.p(),
                             .kv_slot = dev_slot.p(), .kv = kv.p(), .low = low.p(), .ld_low = ld_low};
    launch_dependent(d, "rows", latent_rows_kernel, {dim3(T, q_rank ? 2 : 1), 128}, args);
    const int ld_q = q_rank ? H * (nope + rope) : ld;
    gpu_buf<bf16> heads((size_t)T * ld_q);
    gpu_random(heads, gpu_seed + 4, 1);
    GPU_OK(cudaDeviceSynchronize());
    const latent_rope_args rope_args = {.from = heads.p(), .ld = ld_q, .T = T, .H = H, .nope = nope, .rope = rope, .latent = latent,
                                        .neighbours = neighbours, .table = (const float2 *)table.p(), .pos = dev_pos.p(), .q = q.p()};
    launch_dependent(d, "rope", latent_rope_kernel, {dim3((unsigned)ceil_div(T * H, 8)), 256}, rope_args);
    GPU_OK(cudaStreamSynchronize(d->stream));
    const std::vector<bf16> hf = from.host(), hkv = kv.host(), hlow = low.host(), hq = q.host(), hh = heads.host();
    const std::vector<float> hkn = kv_norm.host(), hqn = q_norm.host(), ht = table.host();
    std::vector<float2> cs((size_t)max_len * rope / 2);
    memcpy(cs.data(), ht.data(), cs.size() * sizeof(float2));
    int wrong_c = 0, wrong_r = 0, wrong_low = 0, wrong_q = 0, touched = 0;
    for (int t = 0; t < T; t++) {
        const bf16 *row = &hf[(size_t)t * ld], *key = &hkv[(size_t)slot[t] * D];
        wrong_c += norm_errors(key, row + c_at, hkn, latent, args.eps);
        wrong_r += rope_errors(key + latent, row + c_at + latent, cs, pos[t], rope, neighbours);
        if (q_rank) wrong_low += norm_errors(&hlow[(size_t)t * ld_low], row, hqn, q_rank, args.eps);
        for (int i = q_rank; i < ld_low; i++) wrong_low += !(__bfloat162float(hlow[(size_t)t * ld_low + i]) == 0);
        for (int h = 0; h < H; h++) {
            const bf16 *head = &hq[((size_t)t * H + h) * D];
            wrong_q += rope_errors(head + latent, &hh[(size_t)t * ld_q + h * (nope + rope) + nope], cs, pos[t], rope, neighbours);
            for (int i = 0; i < latent; i++) touched += __bfloat162float(head[i]) == __bfloat162float(head[i]);
        }
    }
    for (int i = 0; i < 3 * B; i++)
        if (!std::count(slot.begin(), slot.end(), i))
            for (int j = 0; j < D; j++) touched += __bfloat162float(hkv[(size_t)i * D + j]) == __bfloat162float(hkv[(size_t)i * D + j]);
    gpu_check(!wrong_c && !wrong_r && !wrong_low && !wrong_q && !touched && kv.guards_hold() && low.guards_hold() && q.guards_hold(),
              "rows latent=%d rope=%d q_rank=%d H=%d %s: wrong: %d of c, %d of r, %d of q's vector, %d of q; %d written beside them", latent, rope, q_rank,
              H, neighbours ? "neighbours" : "halves", wrong_c, wrong_r, wrong_low, wrong_q, touched);
}

/* ---- Timings ---- */

static void bench_attention(const char *name, int H, int n, int len, int rows) {
    std::vector<mla_seq> seqs((size_t)n, mla_seq{len, rows});
    scene s({H, 512, 64}, seqs, false);
    const double us = gpu_time_us(s.d->stream, 4, 15, [&](int) { attention(s.d, 0, s.q->p(), s.o->p()); });
    double pairs = 0;
    for (int seen : s.n_seen) pairs += seen;
    const double bytes = (double)n * len * 1152 + (double)s.T * H * 2 * (576 + 512), flop = 2.0 * H * (576 + 512) * pairs;
    int n_items = s.d->attn->n_items, n_merges = s.d->attn->n_merges;
    printf("%-38s H=%-4d %9.1f us %7.0f GB/s %7.1f TFLOP/s  %d items, %d merges%s\n", name, H, us, bytes / us * 1e-3, flop / us * 1e-6, n_items, n_merges,
           s.d->error.code ? s.d->error.msg : "");
}
static void bench_heads(int M, int N, int K, int H) {
    toka_device *d = gpu_device();
    gpu_buf<bf16> x((size_t)M * H * K), w((size_t)8 * H * N * K), y((size_t)M * H * N);
    gpu_random(x, 1, 1), gpu_random(w, 2, 1);
    GPU_OK(cudaDeviceSynchronize());
    const double us = gpu_time_us(d->stream, 8, 15, [&](int i) {
        gemm_heads(d, gemm_kernel_args{.x = x.p(), .w = w.p() + (size_t)(i % 8) * H * N * K, .y = y.p(), .M = M, .N = N, .K = K, .ldx = H * K, .ldy = H * N, .epi = EPI_STORE},
                   {(size_t)K, (size_t)N * K, (size_t)N}, H);
    });
    printf("products of heads M=%-5d N=%d K=%d H=%-4d %9.1f us %7.0f GB/s %7.1f TFLOP/s\n", M, N, K, H, us,
           2e-3 * H * ((double)N * K + (double)M * (N + K)) / us, 2e-6 * H * M * N * K / us);
}
static void bench_all() {
    for (int H : {16, 128}) {
        bench_attention("decode, 64 sequences of 4096", H, 64, 4096, 1);
        bench_attention("decode, 512 sequences of 1024", H, 512, 1024, 1);
        bench_attention("decode, 1 sequence of 16384", H, 1, 16384, 1);
        bench_attention("prompt of 4096", H, 1, 4096, H == 16 ? 4096 : 1024);
        for (int M : {1, 64, 512, 4096}) bench_heads(M, 512, 128, H), bench_heads(M, 128, 512, H);
    }
}

int main(int argc, char **argv) {
    const bool tiny = argc > 1 && !strcmp(argv[1], "tiny"), small = tiny || (argc > 1 && !strcmp(argv[1], "small"));
    gpu_device();
    if (argc > 1 && !strcmp(argv[1], "bench")) return bench_all(), 0;
    for (bool neighbours : {false, true}) {
        test_rows(40, 16, 36, 3, 24, neighbours);
        if (tiny) continue;
        test_rows(512, 64, 0, 16, 128, neighbours), test_rows(512, 64, 1536, 3, 128, neighbours);
    }
    test_load(3, 24, 20, 40), test_load(2, 128, 128, 512);
    test_heads(65, 20, 40, 3);
    if (tiny) {
        test_attention("of mixed rows", {3, 40, 16}, {{65, 1}, {70, 3}});
        return gpu_report();
    }
    for (int M : {1, 63, 64, 129}) test_heads(M, 512, 128, 16), test_heads(M, 128, 512, 16);
    if (!small) test_heads(300, 512, 128, 128), test_heads(300, 128, 512, 128);
    test_attention_all(small);
    return gpu_report();
}
