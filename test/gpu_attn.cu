/* gpu_attn.cu - tests attention on the GPU against float64 over the same bf16 inputs: lengths
 * around every tile boundary, many head shapes, trees of shared prefixes, windows, split-KV. Unused
 * pages and unused ends of pages are full of NaN. Other tests check the work list alone. Arguments:
 *   none                 all tests
 *   small                fewer cases (for compute-sanitizer)
 *   tiny                 each kernel once (for racecheck)
 *   splits               only long sequences (split-KV)
 *   samples              only samples of a prompt
 *   groups               only few samples (prefix groups)
 *   lists                only the work list; needs no GPU
 *   fp8 [small]          FP8 K and V, D = 64 and 128
 *   sinks [small]        attention sinks
 *   caps                 soft-capped scores
 *   kinds [small]        layers with a window, which have pages of their own, beside layers without one
 *   bench [decode|tiles|samples|groups|running] [fp8] [--json]   timings */
#include "../toka_kernels.cu"
#include "gpu.cuh"

static bool test_fp8;   /* scenes have FP8 K and V */
static bool test_sinks; /* scenes have a sink for each head */
static float test_cap;  /* soft cap of the scores of scenes; 0: none */

typedef struct shape_case { int D, K, G, B, window; } shape_case;

struct seq { /* positions 0 .. len-1 are known; the last `rows` of them belong to this step */
    std::vector<int> pages;
    int len, rows, row0;
    /* positions from .. upto-1 lie on pages of its own that are copies of those of sequence `like`;
     * upto 0: there are none */
    int like, from, upto;
};

/* The sequences of a step, their pages, and the shared spans. */
struct scene {
    shape_case c;
    std::vector<seq> seqs;
    /* page0: the index of a sequence whose block table has the pages */
    std::vector<toka_span> shared;
    std::vector<int> free_pages;
    int n_pages = 0, T = 0;
    explicit scene(shape_case c_) : c(c_) {}
    std::vector<int> take_pages(int n) {
        std::vector<int> v;
        for (int i = 0; i < n; i++) v.push_back(n_pages++);
        return v;
    }
    void add(int len, int rows, const std::vector<int> &prefix = {}) {
        seq q = {prefix, len, rows, T, 0, 0, 0};
        std::vector<int> own = take_pages(ceil_div(len, c.B) - (int)prefix.size());
        q.pages.insert(q.pages.end(), own.begin(), own.end());
        T += rows;
        seqs.push_back(q);
    }
    void share(int first_seq, int n_seqs, int from_page, int n) {
        int row0 = seqs[first_seq].row0, end = seqs[first_seq + n_seqs - 1].row0 + seqs[first_seq + n_seqs - 1].rows;
        shared.push_back({row0, end - row0, first_seq, from_page * c.B, n * c.B});
    }
    /* Extends the last shared span by n positions. Each of its sequences has its own copy of
     * these. */
    void share_tail(int first_seq, int n_seqs, int n) {
        toka_span &sp = shared.back();
        int from = sp.kv0 + sp.n_kv;
        sp.n_kv += n;
        for (int i = first_seq + 1; i < first_seq + n_seqs; i++) seqs[i].like = first_seq, seqs[i].from = from, seqs[i].upto = from + n;
    }
};

/* The arrays of a scene's step. Page i of the scene is page order[i] of the pool. Page n_pages is
 * full of NaN; each block table ends with it. */
struct host_step {
    std::vector<int> order, pos, kv_slot, pages;
    /* windowed pages: page i of the scene is windowed_order[i], or -1 if no row sees it; there are n_windowed */
    std::vector<int> windowed_order, windowed_slot, windowed_pages;
    int n_windowed = 0;
    std::vector<toka_span> spans;
    toka_shape shape = {};
    toka_step step = {};
    host_step(scene &s, bool share, uint64_t seed) : order((size_t)s.n_pages) {
        std::vector<int> prefix_len(s.seqs.size(), 0), first;
        for (int i = 0; i < s.n_pages; i++) order[i] = i;
        for (int i = s.n_pages - 1; i > 0; i--) std::swap(order[i], order[gpu_mix(seed + i) % (i + 1)]);
        for (seq &x : s.seqs) {
            for (int i = x.len - x.rows; i < x.len; i++) pos.push_back(i), kv_slot.push_back(order[x.pages[i / s.c.B]] * s.c.B + i % s.c.B);
            shape.max_len = std::max(shape.max_len, x.len);
            first.push_back((int)pages.size());
            for (int pg : x.pages) pages.push_back(order[pg]);
            for (int i = 0; i < 3; i++) pages.push_back(s.n_pages);
        }
        for (toka_span sp : s.shared) {
            if (!share) break;
            for (size_t i = 0; i < s.seqs.size(); i++)
                if (s.seqs[i].row0 >= sp.row0 && s.seqs[i].row0 < sp.row0 + sp.n_rows) prefix_len[i] = sp.kv0 + sp.n_kv;
            sp.page0 = first[sp.page0] + sp.kv0 / s.c.B;
            spans.push_back(sp);
        }
        for (size_t i = 0; i < s.seqs.size(); i++)
            spans.push_back({s.seqs[i].row0, s.seqs[i].rows, first[i] + prefix_len[i] / s.c.B, prefix_len[i],
                s.seqs[i].len - prefix_len[i]});
        shape.H = s.c.K * s.c.G, shape.K = s.c.K, shape.D = s.c.D, shape.B = s.c.B, shape.L = 1;
        find_windowed(s, seed);
        step.T = s.T, step.pos = pos.data(), step.kv_slot = kv_slot.data(), step.pages = pages.data(),
            step.spans = spans.data(), step.n_spans = (int)spans.size();
    }
    void find_windowed(scene &s, uint64_t seed) {
        std::vector<int> at((size_t)s.n_pages + 1, -1); /* by page of the pool */
        windowed_order.assign((size_t)s.n_pages, -1);
        for (seq &x : s.seqs)
            for (size_t i = 0; i < x.pages.size(); i++) {
                const bool seen = (int)(i + 1) * s.c.B > x.len - x.rows - s.c.window + 1;
                if (s.c.window && seen && windowed_order[x.pages[i]] < 0) windowed_order[x.pages[i]] = n_windowed++;
            }
        for (int &id : windowed_order)
            if (id >= 0) id = (int)((id + seed) % n_windowed);
        for (int i = 0; i < s.n_pages; i++) at[order[i]] = windowed_order[i];
        for (int page : pages) windowed_pages.push_back(at[page]);
        for (int slot : kv_slot) windowed_slot.push_back(at[slot / s.c.B] * s.c.B + slot % s.c.B);
    }
    void use_windowed() { step.windowed_pages = windowed_pages.data(), step.windowed_slot = windowed_slot.data(); }
};

/* Fills kv_slot .x with the random values of kv_slot .y. */
__global__ static void fill_slots(bf16 *kv, const int2 *slots, int n, int K, int D, int log2_B, uint64_t seed, float scale) {
    auto at = [=](int kv_slot, int j) {
        int page = kv_slot >> log2_B, off = kv_slot & ((1 << log2_B) - 1);
        return ((((size_t)page * K * 2 + j / D) << log2_B) + off) * D + j % D;
    };
    for (int i = blockIdx.x; i < n; i += gridDim.x)
        for (int j = threadIdx.x; j < K * 2 * D; j += blockDim.x)
            kv[at(slots[i].x, j)] = __float2bfloat16(scale * gpu_normal(seed, at(slots[i].y, j)));
}

/* The same, but as the previous kernel of attention, and a slow one. */
__global__ static void fill_slots_late(bf16 *kv, const int2 *slots, int n, int K, int D, int log2_B, uint64_t seed) {
    grid_launch_dependents();
    grid_wait();
    for (long long until = clock64() + 50000; clock64() < until;) {}
    for (int j = threadIdx.x; j < K * 2 * D; j += blockDim.x) {
        int page = slots[blockIdx.x].x >> log2_B, off = slots[blockIdx.x].x & ((1 << log2_B) - 1);
        size_t at = ((((size_t)page * K * 2 + j / D) << log2_B) + off) * D + j % D;
        kv[at] = __float2bfloat16(gpu_normal(seed, at));
    }
}

/* Rounds K and V of a kv_slot to FP8: kv has the rounded values, fp8 the page. One thread for each slot, head, and K or V. */
__device__ static inline void round_slots(bf16 *kv, unsigned char *fp8, const int2 *slots, int n, int K, int D, int log2_B) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), head = i % (2 * K);
    if (i >= n * 2 * K) return;
    const int slot = slots[i / (2 * K)].x, B = 1 << log2_B, page = slot >> log2_B, off = slot & (B - 1);
    bf16 *from = kv + ((((size_t)page * K * 2 + head) << log2_B) + off) * D;
    unsigned char *to = fp8 + (size_t)page * 2 * K * B * (D + 1);
    uint32_t largest = 0;
    for (int j = 0; j < D; j++) largest = max(largest, toka_float_bits(__bfloat162float(from[j])) & 0x7FFFFFFF);
    const unsigned char scale = toka_kv_scale(largest);
    for (int j = 0; j < D; j++) {
        const unsigned char code = toka_kv_round(__bfloat162float(from[j]), scale);
        to[(size_t)(head * B + off) * D + j] = code;
        from[j] = __float2bfloat16(toka_from_fp8(code) * toka_kv_scale_value(scale));
    }
    to[2 * K * B * D + (head / 2 * B + off) * 2 + head % 2] = scale;
}
__global__ static void round_all(bf16 *kv, unsigned char *fp8, const int2 *slots, int n, int K, int D, int log2_B) {
    round_slots(kv, fp8, slots, n, K, D, log2_B);
}
__global__ static void round_late(bf16 *kv, unsigned char *fp8, const int2 *slots, int n, int K, int D, int log2_B) {
    grid_launch_dependents();
    grid_wait();
    for (long long until = clock64() + 50000; clock64() < until;) {}
    round_slots(kv, fp8, slots, n, K, D, log2_B);
}

/* Attention in float64: one CTA per row and head. tables: [row][table_len] pages. sinks: [K G] or NULL. */
__global__ static void reference(const bf16 *q, const bf16 *kv, const int *tables, int table_len, const int *pos, double *o, int K,
                                 int G, int D, int log2_B, int window, const float *sinks, double cap) {
    int row = blockIdx.x / (K * G), head = blockIdx.x % (K * G), p = pos[row], from = window && p >= window ? p - window + 1 : 0;
    __shared__ double acc[256], total, row_max;
    __shared__ double scores[128];
    const bf16 *qr = q + (size_t)blockIdx.x * D;
    for (int j = threadIdx.x; j < 256; j += blockDim.x) acc[j] = 0;
    if (!threadIdx.x) total = 0, row_max = -1e300;
    for (int t0 = from; t0 <= p; t0 += 128) {
        int t = t0 + threadIdx.x, n = min(128, p + 1 - t0);
        __syncthreads();
        double s = 0;
        size_t at = 0;
        if (t <= p) {
            at = ((((size_t)tables[(size_t)row * table_len + (t >> log2_B)] * K + head / G) * 2 << log2_B) +
                  (t & ((1 << log2_B) - 1))) * D;
            for (int j = 0; j < D; j++) s += (double)__bfloat162float(qr[j]) * (double)__bfloat162float(kv[at + j]);
            s /= sqrt((double)D);
            scores[threadIdx.x] = cap != 0 ? cap * tanh(s / cap) : s;
        }
        __syncthreads();
        double m = row_max;
        for (int i = 0; i < n; i++) m = fmax(m, scores[i]);
        double rescale = exp(row_max - m);
        for (int j = threadIdx.x; j < D; j += blockDim.x) {
            double x = acc[j] * rescale;
            for (int i = 0; i < n; i++) {
                int u = t0 + i;
                size_t v = ((((size_t)tables[(size_t)row * table_len + (u >> log2_B)] * K + head / G) * 2 + 1 << log2_B) +
                            (u & ((1 << log2_B) - 1))) * D;
                x += exp(scores[i] - m) * (double)__bfloat162float(kv[v + j]);
            }
            acc[j] = x;
        }
        __syncthreads();
        if (!threadIdx.x) {
            double l = total * rescale;
            for (int i = 0; i < n; i++) l += exp(scores[i] - m);
            total = l, row_max = m;
        }
    }
    __syncthreads();
    const double sink = sinks ? exp((double)sinks[head] - row_max) : 0;
    for (int j = threadIdx.x; j < D; j += blockDim.x) o[(size_t)blockIdx.x * D + j] = acc[j] / (total + sink);
}

/* Sinks around the LSE of some hundred keys, so that each has a weight of its own. One head has all its mass in the sink, another one
 * none. */
static std::vector<float> sinks_of(int H, uint64_t seed) {
    std::vector<float> sinks((size_t)H);
    for (int h = 0; h < H; h++) sinks[h] = 5 + 3 * (float)gpu_normal(seed + 17, (uint64_t)h);
    if (H > 1) sinks[1] = 90;
    if (H > 2) sinks[2] = -300;
    return sinks;
}

/* A scene on the device, ready to run attention. kinds: layer 0 has the window and windowed pages, layer 1 has neither. Else there is
 * one layer. */
struct device_scene : host_step {
    scene &sc;
    toka_device *d = gpu_device();
    layer_weights layers[2] = {};
    const bool kinds;
    const size_t page, windowed_elems; /* elements of a page; of layer 0 with kinds, else 0 */
    gpu_buf<bf16> kv, q, o;     /* kv: layer after layer */
    gpu_buf<unsigned char> fp8; /* with test_fp8: the pages; kv has their values */
    gpu_buf<float> sinks;       /* [H] */
    device_scene(scene &s, bool share, float q_scale, int seed, bool kinds_ = false)
        : host_step(s, share, seed), sc(s), kinds(kinds_), page((size_t)s.c.K * 2 * s.c.B * s.c.D),
          windowed_elems(kinds ? (size_t)n_windowed * page : 0), kv(windowed_elems + (size_t)(s.n_pages + 1) * page),
          q((size_t)s.T * s.c.K * s.c.G * s.c.D), o(q.n), fp8(test_fp8 ? kv.n / s.c.D * (s.c.D + 1) : 16),
          sinks((size_t)s.c.K * s.c.G) {
        layers[0].window = s.c.window, shape.attn_cap = test_cap;
        if (test_sinks) sinks.set(sinks_of(s.c.K * s.c.G, (uint64_t)seed)), layers[0].sinks = layers[1].sinks = sinks.p();
        d->shape = &shape, d->layers = layers, d->kv_pool = test_fp8 ? (bf16 *)fp8.p() : kv.p();
        d->kv_layer_elems = (size_t)(s.n_pages + 1) * page;
        d->kv_fp8[0] = test_fp8 ? 3 : 0;
        if (kinds) shape.L = 2, d->kv_windowed[0] = 1, d->kv_windowed_elems = windowed_elems, use_windowed();
        if (test_fp8) GPU_OK(cudaMemset(fp8.p(), 0xFF, fp8.n));
        for (int layer = 0; layer < shape.L; layer++) fill(layer, seed);
        gpu_random(q, seed + 1, q_scale);
        d->options.max_tokens = s.T, d->options.n_pages = s.n_pages + 1;
        attn_open(d);
        upload_open(d, &d->upload, attn_upload_bytes(d) + (size_t)s.T * sizeof(int) + 64, false);
        plan();
    }
    bf16 *kv_of(int layer) { return kv.p() + (kinds && layer ? windowed_elems : 0); }
    unsigned char *fp8_of(int layer) { return fp8.p() + (kinds && layer ? windowed_elems / sc.c.D * (sc.c.D + 1) : 0); }
    /* K and V of all positions. Both layers have the same numbers. */
    void fill(int layer, int seed) {
        const scene &s = sc;
        const bool windowed = kinds && !layer;
        std::vector<int2> slots; /* a slot, and the slot whose random numbers it has */
        for (const seq &x : s.seqs)
            for (int i = 0; i < x.len; i++) {
                const seq &like = i >= x.from && i < x.upto ? s.seqs[x.like] : x;
                const int at = windowed ? windowed_order[x.pages[i / s.c.B]] : order[x.pages[i / s.c.B]];
                if (at >= 0) slots.push_back({at * s.c.B + i % s.c.B, order[like.pages[i / s.c.B]] * s.c.B + i % s.c.B});
            }
        gpu_buf<int2> dev_slots(slots.size());
        dev_slots.set(slots);
        fill_slots<<<1024, 128>>>(kv_of(layer), dev_slots.p(), (int)slots.size(), s.c.K, s.c.D, __builtin_ctz(s.c.B), seed, 1);
        GPU_OK(cudaDeviceSynchronize());
        if (!test_fp8) return;
        /* each slot once: pages of a shared prefix are in many sequences */
        auto less = [](int2 a, int2 b) { return a.x < b.x; };
        auto equal = [](int2 a, int2 b) { return a.x == b.x; };
        std::sort(slots.begin(), slots.end(), less);
        slots.erase(std::unique(slots.begin(), slots.end(), equal), slots.end());
        dev_slots.set(slots);
        round_all<<<ceil_div((int)slots.size() * 2 * s.c.K, 128), 128>>>(kv_of(layer), fp8_of(layer), dev_slots.p(), (int)slots.size(), s.c.K,
                                                                        s.c.D, __builtin_ctz(s.c.B));
        GPU_OK(cudaDeviceSynchronize());
    }
    void plan() {
        d->upload.used = 0;
        d->rows.pos = (const int *)upload_put(&d->upload, pos.data(), pos.size() * sizeof(int));
        attn_plan_step(d, &step);
        upload_send(d, &d->upload);
        GPU_OK(cudaStreamSynchronize(d->stream));
    }
    void run(int layer = 0) { attention(d, layer, q.p(), o.p()); }
    /* K and V of the step's rows are NaN until the previous kernel stores them, and attention may
     * start before. */
    void run_late() {
        std::vector<int2> at;
        for (int i : kv_slot) at.push_back({i, i});
        gpu_buf<int2> dev((size_t)sc.T);
        dev.set(at);
        fill_slots<<<16, 128>>>(kv.p(), dev.p(), sc.T, sc.c.K, sc.c.D, __builtin_ctz(sc.c.B), 1, NAN);
        GPU_OK(cudaDeviceSynchronize());
        const int n_threads = sc.T * 2 * sc.c.K, log2_B = __builtin_ctz(sc.c.B);
        if (test_fp8) round_all<<<ceil_div(n_threads, 128), 128>>>(kv.p(), fp8.p(), dev.p(), sc.T, sc.c.K, sc.c.D, log2_B);
        GPU_OK(cudaDeviceSynchronize());
        launch_dependent(d, "late rows", fill_slots_late, {dim3((unsigned)sc.T), 128}, kv.p(), dev.p(), sc.T, sc.c.K, sc.c.D, log2_B, (uint64_t)gpu_seed);
        if (test_fp8)
            launch_dependent(d, "late rows", round_late, {dim3((unsigned)ceil_div(n_threads, 128)), 128}, kv.p(), fp8.p(), (const int2 *)dev.p(), sc.T,
                             sc.c.K, sc.c.D, log2_B);
        run();
        GPU_OK(cudaDeviceSynchronize());
    }
    bool ok(const char *what) {
        GPU_OK(cudaStreamSynchronize(d->stream));
        return gpu_check(!d->error.code, "%s: %s", what, d->error.msg);
    }
    std::vector<double> wanted(int layer = 0) {
        size_t table_len = 0, row = 0;
        for (seq &x : sc.seqs) table_len = std::max(table_len, x.pages.size());
        std::vector<int> t((size_t)sc.T * table_len, 0);
        for (size_t i = 0, at = 0; i < sc.seqs.size(); at += sc.seqs[i].pages.size() + 3, i++)
            for (int r = 0; r < sc.seqs[i].rows; r++, row++)
                for (size_t j = 0; j < sc.seqs[i].pages.size(); j++) t[row * table_len + j] = (kinds && !layer ? windowed_pages : pages)[at + j];
        gpu_buf<int> tables(t.size());
        gpu_buf<double> r(q.n);
        tables.set(t);
        reference<<<sc.T * sc.c.K * sc.c.G, 128>>>(q.p(), kv_of(layer), tables.p(), (int)table_len, d->rows.pos, r.p(), sc.c.K, sc.c.G,
                                                   sc.c.D, __builtin_ctz(sc.c.B), layers[layer].window, layers[layer].sinks, (double)test_cap);
        GPU_OK(cudaDeviceSynchronize());
        return r.host();
    }
    ~device_scene() {
        attn_close(d);
        for (int i = 0; i < d->n_allocations; i++) cudaFree(d->allocations[i]);
        upload_close(&d->upload);
        d->n_allocations = 0, d->error.code = 0, d->kv_fp8[0] = d->kv_windowed[0] = 0;
    }
};

/* Pretends that the GPU has so few SMs that a step in prefix groups must mix prompts in a CTA,
 * because it has more groups than can run at once. */
static void set_few_sms_for_groups(attn_plan *p, int T) {
    p->n_sms = ceil_div(T, std::min(p->small_rows, (int)ATTN_PREFIX_GROUP)) * p->K;
    p->group_max_work = p->group_max_work_fused = INT64_MAX / 2;
}

static void check_o(device_scene &st, const std::vector<bf16> &got, const std::vector<double> &want, const char *what) {
    const int D = st.sc.c.D, HD = st.sc.c.K * st.sc.c.G * D;
    double err = 0, ref = 0, worst = 0;
    size_t worst_at = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double e = (double)__bfloat162float(got[i]) - want[i];
        err += e * e, ref += want[i] * want[i];
        if (!(fabs(e) <= worst)) worst = fabs(e), worst_at = i;
    }
    gpu_check(sqrt(err / ref) < 5e-3 && worst < 0.05 && st.o.guards_hold() && st.q.guards_hold(),
              "%s: relative error %.2e, largest %.3g (row %d head %d column %d: %.5g, expected %.5g)", what, sqrt(err / ref), worst,
              (int)(worst_at / HD), (int)(worst_at % HD / D), (int)(worst_at % D), (double)__bfloat162float(got[worst_at]), want[worst_at]);
}

static void check(scene &s, const char *name, float q_scale = 1.5f, bool late = false) {
    enum { DEFAULT, MIXED, LEVELS };
    std::vector<double> want;
    char what[200];
    for (int share = s.shared.empty() ? 0 : 1; share >= 0; share--) {
        device_scene st(s, share, q_scale, (int)(gpu_mix(gpu_seed + s.T * 31 + s.c.D) >> 33));
        for (int mode : {DEFAULT, MIXED, LEVELS}) {
            attn_plan *p = st.d->attn;
            if (mode && !p->prefix_groups) break;
            if (mode == MIXED) {
                const int n_sms = p->n_sms;
                set_few_sms_for_groups(p, s.T), st.plan(), p->n_sms = n_sms;
                if (!p->prefix_groups || !p->mixed_groups) continue;
            }
            if (mode == LEVELS) p->group_max_work = 0, st.plan();
            snprintf(what, sizeof what, "%s D=%d K=%d G=%d B=%d window=%d%s%s%s%s", name, s.c.D, s.c.K, s.c.G, s.c.B, s.c.window,
                     test_cap != 0 ? " cap" : test_sinks ? " sinks" : "", test_fp8 ? " fp8" : "", s.shared.empty() ? "" : share ? " shared" : " unshared",
                         mode == LEVELS ? " by levels" : mode == MIXED ? " mixed" : p->prefix_groups ? " by groups" : "");
            st.o.poison();
            late ? st.run_late() : st.run();
            if (!st.ok(what)) continue;
            /* after attention has run: only now are the late rows stored */
            if (!mode) want = st.wanted();
            const std::vector<bf16> got = st.o.host();
            if (attn_uses_cluster(st.d->attn)) {
                st.d->attn->allow_clusters = false;
                st.o.poison();
                late ? st.run_late() : st.run();
                st.ok(what);
                const std::vector<bf16> alone = st.o.host();
                gpu_check(!memcmp(alone.data(), got.data(), got.size() * sizeof(bf16)) && st.o.guards_hold(),
                          "%s: cluster split-KV and CTA-local split-KV have different results", what);
                st.d->attn->allow_clusters = true;
            }
            if (p->any_fp8 && p->n_tile_pages > 1 && !late) { /* no space to unpack the pages of all tiles at once */
                const int max_unpacked = p->max_unpacked;
                p->max_unpacked = p->n_tile_pages - 1;
                st.o.poison();
                st.run();
                st.ok(what);
                const std::vector<bf16> parts = st.o.host();
                gpu_check(attn_unpacks_spans(p) && !memcmp(parts.data(), got.data(), got.size() * sizeof(bf16)),
                          "%s: pages unpacked span by span give another result", what);
                p->max_unpacked = max_unpacked;
            }
            check_o(st, got, want, what);
        }
    }
}

/* The same for the layers of a model with windows in some layers. Of a shared prefix of which the window leaves too little, the layer
 * with the window has no shared span. n_levels: of its plan; 0: any. */
static void check_kinds(scene &s, const char *name, int n_levels = 0) {
    char what[200];
    for (int share = s.shared.empty() ? 0 : 1; share >= 0; share--) {
        device_scene st(s, share, 1.5f, (int)(gpu_mix(gpu_seed + s.T * 37 + s.c.D) >> 33), true);
        for (int layer = 0; layer < 2; layer++) {
            snprintf(what, sizeof what, "kinds, %s D=%d K=%d G=%d B=%d window=%d%s%s%s, layer %d", name, s.c.D, s.c.K, s.c.G, s.c.B, s.c.window,
                     test_cap != 0 ? " cap" : test_sinks ? " sinks" : "", test_fp8 ? " fp8" : "", s.shared.empty() ? "" : share ? " shared" : " unshared", layer);
            st.o.poison();
            st.run(layer);
            if (!st.ok(what)) continue;
            check_o(st, st.o.host(), st.wanted(layer), what);
        }
        const int levels = st.d->attn_windowed->n_levels;
        gpu_check(!share || !n_levels || levels == n_levels, "%s: the plan of the layer with the window has %d levels, expected %d", what, levels, n_levels);
    }
}

static const int lengths[] = {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 257, 899, 900, 901};

/* A tree with `depth` levels of shared pages. The first level has `pages` pages, the others one or
 * two, with three children each. The sequences' own spans have various lengths. */
static void grow(scene &s, int depth, int pages, const std::vector<int> &prefix, int rows, int fan) {
    std::vector<int> path = prefix, more = s.take_pages(pages);
    path.insert(path.end(), more.begin(), more.end());
    int first = (int)s.seqs.size();
    size_t at = s.shared.size();
    s.shared.push_back({});
    for (int i = 0; i < fan; i++) {
        int n = (int)path.size() * s.c.B, extra = lengths[(i * 5 + depth) % 18];
        if (depth > 1 && i < 3) grow(s, depth - 1, 1 + i % 2, path, rows, fan);
        else s.add(n + std::max(extra, rows), rows, path);
    }
    int n_seqs = (int)s.seqs.size() - first;
    toka_span last = {};
    s.share(first, n_seqs, (int)prefix.size(), pages);
    last = s.shared.back(), s.shared.pop_back(), s.shared[at] = last;
}
/* Runs a test as on a GPU with so few SMs that no item is split. */
template <class Test> static void few_sms(const Test &test) {
    int n_sms = gpu_device()->n_sms;
    gpu_device()->n_sms = 2;
    test();
    gpu_device()->n_sms = n_sms;
}
/* n samples of a prompt of `pages` pages and `tail` positions, each with up to `max_own` own
 * positions. */
static void add_samples(scene &s, int n, int pages, int tail, int max_own) {
    std::vector<int> prefix = s.take_pages(pages);
    int first = (int)s.seqs.size();
    for (int i = 0; i < n; i++) s.add(pages * s.c.B + tail + 1 + (int)(gpu_mix(i) % (uint64_t)max_own), 1, prefix);
    s.share(first, n, 0, pages);
    if (tail) s.share_tail(first, n, tail);
}
/* Samples of a prompt that ends within a page. The first one is so far ahead that a short window does not reach the prompt any more: its
 * page with the prompt's tail is gone, which the others still read. */
static void add_ahead(scene &s, int n) {
    const std::vector<int> prefix = s.take_pages(2);
    const int prompt = 2 * s.c.B + s.c.B / 2 - 2, first = (int)s.seqs.size();
    for (int i = 0; i < n; i++) s.add(prompt + 1 + (i ? i % 20 : 400), 1, prefix);
    s.share(first, n, 0, 2), s.share_tail(first, n, s.c.B / 2 - 2);
}
/* The case for attn_fused: enough samples that it is chosen. */
static void test_samples(int D, int G, int rows) {
    scene s({D, 8, G, 64, 0});
    s.add(500, 1), s.add(90, 20);
    for (int pages : {1, 2, 4, 11}) add_samples(s, rows + pages, pages, pages == 4 ? 0 : pages * 5, pages * 33);
    add_samples(s, rows, 0, 40, 700);
    s.add(70, 1);
    check(s, "samples");
    few_sms([=] { /* many items per CTA, most of them not filled with rows */
        scene t({D, 8, G, 64, 0});
        for (int i = 0; i < 40; i++) add_samples(t, 2 + i * 11 % 40, 1 + i % 3, i % 2 * 9, 1 + i % 5 * 90);
        check(t, "samples of many prompts");
    });
    if (G != 4) return;
    scene deep({D, 8, G, 64, 0}); /* after a level that all sequences share */
    std::vector<int> head = deep.take_pages(3);
    deep.shared.push_back({});
    for (int i = 0; i < 5; i++) {
        std::vector<int> path = head, more = deep.take_pages(2);
        path.insert(path.end(), more.begin(), more.end());
        for (int j = 0; j < rows; j++) deep.add(320 + 1 + (int)(gpu_mix(j) % 200), 1, path);
        deep.share(i * rows, rows, 3, 2);
    }
    deep.share(0, 5 * rows, 0, 3);
    deep.shared[0] = deep.shared.back(), deep.shared.pop_back();
    check(deep, "samples of a tree");
}
/* Samples of prompts that do not end at a page boundary. The last level of shared spans ends within
 * a page, where the own spans begin. */
static void add_tails(scene &s, int rows) {
    int n = 0;
    for (int tail : {1, 7, 8, 15}) {
        std::vector<int> prefix = s.take_pages(n % 3);
        int first = (int)s.seqs.size(), n_pages = n++ % 3, B = s.c.B;
        tail = tail * B / 16 + (B > 16);
        for (int len : {1, 2, 9, 33, 64, 130, 899}) s.add(n_pages * B + tail + std::max(len, rows), rows, prefix);
        s.share(first, 7, 0, n_pages), s.share_tail(first, 7, tail);
    }
}
static void test_tails(shape_case c) {
    for (int rows : {1, 3, 40}) {
        scene s(c);
        s.add(100, 1);
        add_tails(s, rows);
        check(s, rows == 1 ? "tails" : rows == 3 ? "tails, 3 rows" : "tails, 40 rows");
    }
}
static void test_decode(shape_case c) {
    scene s(c);
    for (int n : lengths) s.add(n, 1);
    check(s, "decode");
}
/* Few rows, whose K and V are prefetched before the previous kernel has stored the newest
 * positions. In the last scene, rows attend to each other's positions. */
static void test_late(shape_case c) {
    for (int len : lengths) {
        scene s(c);
        s.add(len, 1);
        check(s, "late rows, one", 1.5f, true);
    }
    for (int i = 0; i < 3; i++) {
        scene s(c);
        for (int n = 0; n < 8; n++) s.add(i ? lengths[(n * 7 + i) % 18] : 640 - n * 9, 1);
        check(s, "late rows, eight", 1.5f, true);
    }
    scene shared(c), other(c);
    shared.add(130, 1);
    add_samples(shared, 4, 2, 5, 90);
    check(shared, "late rows, samples", 1.5f, true);
    std::vector<int> page = other.take_pages(1);
    other.add(c.B, 1, page), other.add(c.B + 1, 1, page), other.add(c.B + 4, 4, page);
    check(other, "late rows of others", 1.5f, true);
}
/* Whole prompts, chunks after earlier pages, and decode rows in the same step. */
static void test_prefill(shape_case c) {
    scene s(c);
    for (int n : lengths) s.add(n, n);
    s.add(300, 1);
    s.add(700, 37);
    s.add(901, 200);
    check(s, "prefill");
    if (c.B == 64) check(s, "prefill, logits of 50", 14);
}
/* Tiles of spans with ATTN_LONG_KV positions or more, which a short window makes shorter. Under few_sms no item is split. */
static void check_long(scene &s, const char *name) {
    const bool want = !s.c.window || s.c.window >= ATTN_LONG_KV;
    gpu_check(device_scene(s, false, 1, 5).d->attn->levels[0].long_tiles == want, "%s: long tiles: want %d", name, want);
    check(s, name);
}
static void test_long(shape_case c) {
    scene s(c);
    s.add(ATTN_LONG_KV, 37);
    s.add(ATTN_LONG_KV + 333, 70);
    check_long(s, "long tiles");
    check(s, "long tiles, logits of 50", 14);
}
static void test_tree(shape_case c, int depth, int pages, int rows, int fan) {
    scene s(c);
    s.add(77, 1);
    grow(s, depth, pages, {}, rows, fan);
    s.add(130, 5);
    grow(s, 1, 1, {}, 1, 2);
    char name[60];
    snprintf(name, sizeof name, "tree of depth %d, %d pages, %d rows, fan %d", depth, pages, rows, fan);
    check(s, name);
}

/* 100 runs must give the same bits. */
static void repeat(scene &s, const char *what) {
    device_scene st(s, true, 1.5f, 7);
    st.run();
    if (!st.ok(what)) return;
    std::vector<bf16> first = st.o.host();
    int bad = 0;
    for (int i = 0; i < 100; i++) {
        st.o.poison();
        st.run();
        std::vector<bf16> again = st.o.host();
        bad += memcmp(first.data(), again.data(), first.size() * sizeof(bf16)) != 0;
    }
    gpu_check(bad == 0, "100 repeats D=%d, %s: %d differ", s.c.D, what, bad);
}
static void test_repeat(shape_case c) {
    scene s(c);
    grow(s, 2, 9, {}, 1, 20);
    for (int n : lengths) s.add(n + 1000, 1);
    s.add(2000, 100);
    repeat(s, "all kinds");
}
static void test_samples_repeat(int D) {
    scene s({D, 8, 4, 64, 0});
    for (int i = 0; i < 30; i++) add_samples(s, 20 + i % 9, 1 + i % 8, i % 2 * 9, 1 + i % 5 * 60);
    repeat(s, "samples of prompts");
}

/* ---- The work list alone: no GPU needed ---- */

/* Follows the items level by level. Every query sees each of its positions once, on the right page.
 * It merges a state if and only if it has one, and it ends in o. */
struct list_check {
    host_step &h;
    const attn_plan *p;
    const int *pages;       /* as they were uploaded */
    std::vector<int> table; /* [row] the index in h.pages of the row's first page */
    /* [row] positions below `tail` are read from the pages that begin at index `like` */
    std::vector<int> tail, like_table;
    std::vector<std::vector<char>> seen;
    std::vector<int> state; /* 0: none, 1: has a state, 2: done */
    /* the last level that computed the query: items of one level run concurrently */
    std::vector<int> when;
    int bad = 0, splits = 0, now = 0;
    int window = 0;         /* of the plan: positions before it count for nothing */
    /* Is position t of the row on this page? A shared tail may be read from the row's own page if there is a window. */
    bool is_on(int page, int row, int t) const {
        const std::vector<int> &ids = window ? h.windowed_pages : h.pages;
        return (t < tail[row] && page == ids[like_table[row] + t / h.shape.B]) || ((t >= tail[row] || window) && page == ids[table[row] + t / h.shape.B]);
    }
    void finish_queries(int q0, int nq, int where) {
        for (int q = q0; q < q0 + nq; q++) {
            bad += state[q] != (where & ATTN_MERGE_STATE ? 1 : 0) || when[q] == now;
            state[q] = where & ATTN_TO_O ? 2 : 1, when[q] = now;
        }
    }
    void item(const attn_item &it) {
        int G = h.shape.H / h.shape.K, lo = INT_MAX, hi = -1;
        for (int q = it.q0; q < it.q0 + it.nq; q++) {
            int row = q / G, end = std::min(it.kv1, h.pos[row] + 1);
            lo = std::min(lo, h.pos[row]), hi = std::max(hi, h.pos[row]);
            for (int t = it.kv0 + it.skip; t < end; t++) {
                const int page = pages[it.page0 + (t - it.kv0) / h.shape.B];
                bad += seen[q][t]++ != 0 || page < 0 || (first_seen(row) <= t && !is_on(page, row, t));
            }
        }
        bad += lo != it.pos_lo || hi != it.pos_hi || it.kv0 % h.shape.B || it.kv1 > hi + 1;
        /* what is read: the window and a page, and the rows between the first and the last one */
        bad += window && it.kv1 > it.kv0 && it.kv1 - it.kv0 > window + hi - lo + h.shape.B;
    }
    int first_seen(int row) const { return window ? std::max(0, h.pos[row] - window + 1) : 0; }
    int left(int q, int G) const { return state[q] != 2 || std::count(seen[q].begin() + first_seen(q / G), seen[q].end(), 0) != 0; }
    void level(const attn_level &l) {
        std::vector<char> slots((size_t)p->max_split_bufs, 0);
        for (int m = l.merge0; m < l.merge0 + l.n_merges; m++) {
            const attn_merge &me = p->merges[m];
            int units = ceil_div(me.nq, ATTN_SMALL_Q);
            bad += me.nq > l.merge_nq || me.first + me.n_splits * units > p->max_split_bufs;
            for (int i = me.first; i < me.first + me.n_splits * units && i < p->max_split_bufs; i++) bad += slots[i]++ != 0;
        }
        std::vector<char> written((size_t)p->max_split_bufs, 0);
        for (int i = l.tile0; i < l.small0 + l.n_small; i++) {
            const attn_item &it = p->items[i];
            bad += it.nq > (i < l.tile0 + l.n_tiles ? p->tile_q : (int)ATTN_SMALL_Q);
            item(it);
            if (it.flags & (ATTN_TO_O | ATTN_TO_STATE)) finish_queries(it.q0, it.nq, it.flags);
            else
                for (int u = 0; u < ceil_div(it.nq, ATTN_SMALL_Q); u++, splits++) bad += written[(it.flags >> ATTN_INDEX_SHIFT) + u]++ != 0;
        }
        bad += slots != written;
        for (int m = l.merge0; m < l.merge0 + l.n_merges; m++) finish_queries(p->merges[m].q0, p->merges[m].nq, p->merges[m].flags);
        for (int m = l.cta_merge0; m < l.cta_merge0 + l.n_cta_merges; m++) {
            const attn_merge &me = p->merges[m];
            bad += me.n_splits < 1 || me.n_splits > l.cta_split_warps || l.cta_split_warps > attn_cta_split_max(h.shape.D) || l.n_small;
            for (int i = 0; i < me.n_splits; i++, splits++) {
                const attn_item &it = p->items[l.small0 + me.first + i];
                bad += it.q0 < me.q0 || it.q0 + it.nq > me.q0 + me.nq || me.nq > ATTN_SMALL_Q;
                item(it);
            }
            finish_queries(me.q0, me.nq, me.flags);
        }
        now++;
    }
    void fused_items() { /* each fused item, and the own items of its rows */
        const attn_item *items = p->items + p->fused0;
        for (int i = 0; i < p->n_fused; i++) {
            const attn_item &it = items[i];
            int G = h.shape.H / h.shape.K;
            bad += it.nq % G || it.nq > ATTN_FUSED_Q || it.nq / G > ATTN_FUSED_ROWS;
            /* otherwise the item is a row without a shared prefix */
            if (!(it.flags & ATTN_TO_O)) item(it), finish_queries(it.q0, it.nq, it.flags);
            for (int r = 0; r < it.nq / G; r++) {
                const attn_item &own = items[(it.flags >> ATTN_INDEX_SHIFT) + r];
                bad += own.q0 != it.q0 + r * G || own.nq != G;
                now++, item(own), finish_queries(own.q0, own.nq, own.flags), now--;
            }
        }
        if (p->n_fused) schedule();
    }
    /* Each item and kv head occurs once. The loads of two CTAs differ by at most the largest
     * job. */
    void schedule() {
        const int K = h.shape.K, n = p->n_fused * K;
        std::vector<char> had((size_t)n, 0);
        std::vector<int> load((size_t)p->grid, 0);
        int most = 0, all = 0;
        for (int i = 0; i < p->grid * p->n_rounds; i++) {
            const int job = p->dev_jobs[i];
            /* only the last round may have gaps */
            bad += job < -1 || job >= n || (job < 0 && i < p->grid * (p->n_rounds - 1));
            if (job < 0 || job >= n || had[job]++) continue;
            const attn_item *items = p->items + p->fused0, &it = items[job / K];
            int work = 0;
            for (int r = 0; r < it.nq * K / h.shape.H; r++) {
                const attn_item &own = items[(it.flags >> ATTN_INDEX_SHIFT) + r];
                work += own.kv1 - own.kv0 - own.skip + ATTN_OWN_COST;
            }
            load[i % p->grid] += work, most = std::max(most, work), all++;
        }
        bad += all != n || *std::max_element(load.begin(), load.end()) - *std::min_element(load.begin(), load.end()) > most;
    }
};
enum list_mode { ANY, FUSED, GROUPS, MIXED };
/* Follows the lists of one plan. */
static void check_plan(const scene &s, host_step &h, const attn_plan *plan, bool share, bool want_splits, const char *name, const toka_err &error) {
    list_check c = {h, plan, plan->dev_pages};
    const int G = s.c.G;
    int at = 0, left = 0;
    c.window = plan->window;
    for (const seq &x : s.seqs) {
        c.table.insert(c.table.end(), (size_t)x.rows, at);
        c.tail.insert(c.tail.end(), (size_t)x.rows, share ? x.upto : 0);
        c.like_table.insert(c.like_table.end(), (size_t)x.rows, x.upto ? c.table[s.seqs[x.like].row0] : at);
        at += (int)x.pages.size() + 3;
    }
    for (int q = 0; q < s.T * G; q++) c.seen.emplace_back((size_t)h.pos[q / G] + 1, 0);
    c.state.resize((size_t)s.T * G, 0), c.when.resize((size_t)s.T * G, -1);
    for (int i = 0; i < plan->n_levels; i++) c.level(plan->levels[i]);
    c.fused_items();
    for (int q = 0; q < s.T * G; q++) left += c.left(q, G);
    gpu_check(!c.bad && !left && !error.code && (!want_splits || c.splits),
              "work list of %s G=%d D=%d window=%d: %d wrong, %d queries left, %d splits%s", name, G, s.c.D, plan->window, c.bad, left, c.splits,
              error.code ? error.msg : "");
}
/* With a window in the scene, there are two layers, one of them with that window and windowed pages. */
static void check_list(scene &s, bool share, bool hopper, bool want_splits, const char *name, list_mode mode = ANY,
                       int n_sms = 132) {
    host_step h(s, share, 99);
    toka_device d = {};
    layer_weights layers[2] = {};
    layers[1].window = s.c.window;
    d.shape = &h.shape, d.n_sms = n_sms, d.hopper = hopper, d.options.max_tokens = s.T, d.kv_layer_elems = 1 << 20;
    if (s.c.window) d.layers = layers, h.shape.L = 2, h.use_windowed();
    attn_plan_open(&d);
    std::vector<char> up(attn_upload_bytes(&d) + 64);
    d.upload.host[0] = d.upload.device[0] = (char *)(((uintptr_t)up.data() + 15) & ~(uintptr_t)15), d.upload.cap = up.size() - 16;
    if (mode == MIXED) set_few_sms_for_groups(d.attn, s.T);
    attn_plan_step(&d, &h.step);
    if (d.error.code) d.attn->n_levels = d.attn->n_fused = 0; /* the list is not complete */
    gpu_check(mode != FUSED || d.attn->n_fused || s.c.D > ATTN_FUSED_D,
        "work list of %s G=%d D=%d: no item for attn_fused", name, s.c.G, s.c.D);
    gpu_check((mode != GROUPS && mode != MIXED) || (d.attn->prefix_groups && d.attn->mixed_groups == (mode == MIXED)),
        "work list of %s G=%d D=%d: not by %s", name, s.c.G, s.c.D,
              mode == MIXED ? "mixed groups" : "groups");
    check_plan(s, h, d.attn, share, want_splits, name, d.error);
    if (d.attn_windowed) check_plan(s, h, d.attn_windowed, share, false, name, d.error);
    attn_close(&d);
}
/* A chain of `turns` prefixes, each `pages` pages longer than the one before. `each` rows continue
 * from each prefix, with `own` positions of their own. */
static void add_chain(scene &s, int turns, int pages, int each, int own) {
    std::vector<int> prefix;
    for (int i = 0; i < turns; i++) {
        std::vector<int> more = s.take_pages(pages);
        prefix.insert(prefix.end(), more.begin(), more.end());
        for (int k = 0; k < each; k++) s.add((int)prefix.size() * s.c.B + own, 1, prefix);
    }
    for (int i = 0; i < turns; i++) s.share(i * each, (turns - i) * each, i * pages, pages);
}
static void test_lists_of(int D, int G, bool hopper, int window) {
    const shape_case two = {D, 2, G, 64, window}, eight = {D, 8, G, 64, window};
    scene few(two), many(two), tree(two), chunk(two), tails(two), samples(eight);
    add_tails(tails, 1), add_tails(tails, 5);
    scene ahead(eight);
    add_ahead(ahead, 200);
    check_list(ahead, true, hopper, false, "samples, one of them ahead");
    for (int i = 0; i < 5; i++) add_samples(samples, 300 + i, i, 9 * i + 1, 1 + i * 30);
    check_list(samples, true, hopper, false, "samples", hopper && D >= 64 && G <= 8 ? FUSED : ANY);
    for (int rows : {1, 2, 9, 26}) { /* prefix groups */
        scene few_samples(eight);
        for (int i = 0; i < 3; i++) add_samples(few_samples, rows, 1 + 4 * i, 9 * i + 1, 1 + i * 60);
        few_samples.add(130, 1);
        check_list(few_samples, true, hopper, false, "samples in few rows", hopper && D >= 64 && G <= 8 ? GROUPS : ANY);
        if (rows > 8 && hopper && D >= 64 && G <= 8) check_list(few_samples, true, hopper, false,
            "samples in mixed groups", MIXED);
    }
    scene turns(two), far(two);
    add_chain(turns, 100, 1, 2, 5), add_chain(far, 8, 128, 1, 2001);
    check_list(turns, true, hopper, false, "many levels");
    check_list(far, true, hopper, true, "many levels, split", ANY, 8);
    check_list(tails, true, hopper, false, "prompts that end within a page");
    for (int n : {5000, 3000, 900, 17}) few.add(n, 1);
    few.add(4000, 50);
    for (int i = 0; i < 700; i++) many.add(41 + i * 37 % 400, 1 + i % 90 / 88 * 40);
    grow(tree, 3, 5, {}, 1, 12), grow(tree, 1, 70, {}, 2, 30), tree.add(300, 300);
    chunk.add(9000, 512);
    check_list(few, false, hopper, true, "few long sequences");
    check_list(many, false, hopper, false, "many sequences");
    check_list(tree, true, hopper, false, "a tree");
    check_list(tree, false, hopper, false, "a tree, unshared");
    check_list(chunk, false, hopper, false, "a chunk");
}
static void test_lists() {
    for (int G : {1, 4, 24})
        for (int D : {40, 64, 128})
            for (bool hopper : {false, true}) {
                test_lists_of(D, G, hopper, 0);
                if (D != 64 || G != 4) continue;
                for (int window : {1, 70, 128, 1500}) test_lists_of(D, G, hopper, window);
            }
}

/* ---- Which steps are graphs: no GPU needed ---- */

/* A step is padded to a graph's size if there is a graph with its number of attention launches (0:
 * with clusters). Otherwise it stays as it is. */
static void check_graph_padding(scene &s, bool share, int size, int launches, bool hopper = false) {
    host_step h(s, share, 7);
    std::vector<int> ids((size_t)s.T, 3), kv_slot((size_t)s.T, 65);
    std::vector<toka_sample_row> out((size_t)s.T);
    toka_device *d = (toka_device *)calloc(1, sizeof *d);
    d->shape = &h.shape, d->n_sms = 132, d->options.max_tokens = 512, d->options.n_pages = 1000, d->kv_layer_elems = 1 << 20, d->hopper = hopper;
    h.step.ids = ids.data(), h.step.kv_slot = kv_slot.data(), h.step.samples = out.data(), h.step.n_samples = s.T;
    attn_plan_open(d);
    std::vector<char> up(attn_upload_bytes(d) + 8192);
    d->upload.host[0] = d->upload.device[0] = (char *)(((uintptr_t)up.data() + 15) & ~(uintptr_t)15), d->upload.cap = up.size() - 16;
    for (int n = 0; n < GRAPH_N_KINDS; n++) {
        step_graph *g = &d->graphs.all[size * GRAPH_N_KINDS + n];
        g->exec = (cudaGraphExec_t)d;
        step_write_upload(d, &h.step, size);
        const bool fits = n == launches;
        int wrong = d->rows.T != (fits ? graph_sizes[size] : s.T) || d->graphs.current != (fits ? g : NULL) || d->step->T != d->rows.T;
        for (int i = 0; i < d->rows.T; i++)
            wrong += d->rows.ids[i] != (i < s.T ? 3 : 0) || d->rows.pos[i] != (i < s.T ? h.pos[i] : 0) || d->rows.kv_slot[i] != (i < s.T ? 65 : 64000);
        list_check c = {h, d->attn, d->attn->dev_pages};
        wrong += (const char *)c.pages < (const char *)(d->rows.kv_slot + d->rows.T);
        gpu_check(!wrong, "graphs: %d rows, %d launches, a graph with %d of %d rows: %d wrong", s.T, launches, n, graph_sizes[size], wrong);
        g->exec = NULL;
    }
    attn_close(d);
    free(d);
}
/* The largest size that is captured. */
static int max_captured_size(int n_seqs, int max_tokens) {
    toka_shape shape = {.B = 64};
    toka_device *d = (toka_device *)calloc(1, sizeof *d);
    int max_size = 0;
    d->shape = &shape, d->options.max_tokens = d->options.max_samples = max_tokens, d->options.n_seqs = n_seqs;
    for (const toka_step *s; (s = cuda_capture(d));) max_size = s->T;
    free(d);
    return max_size;
}
/* Tensor ranks with different numbers of kv heads, on GPUs with different numbers of SMs, must make
 * the same work list, so that both have a graph for a step or neither. Without group_agree their
 * lists differ. graphs: in this case only one of them would have a graph. */
static void check_agreement(scene &s, bool graphs, const char *name) {
    struct rank {
        toka_shape shape;
        toka_device d;
        std::vector<char> up;
    } ranks[2] = {};
    cuda_group *g = (cuda_group *)calloc(1, sizeof *g);
    host_step h(s, true, 7);
    int launches[2][2], n_items[2][2]; /* [0: before group_agree, 1: after][rank] */
    bool same = true;
    g->tp_size = 2, g->pp_size = 1;
    for (int agreed = 0; agreed < 2; agreed++) {
        for (int q = 0; q < 2; q++) {
            rank &r = ranks[q];
            r.shape = h.shape, r.shape.K = 3 - q, r.shape.H = r.shape.K * s.c.G;
            r.d = toka_device{};
            r.d.shape = &r.shape, r.d.n_sms = q ? 132 : 66, r.d.arch = 90, r.d.hopper = true, r.d.options.max_tokens = 512, r.d.options.tp_rank = q;
            r.d.kv_layer_elems = 1 << 20, r.d.group = g, r.d.rank = &g->gpu_ranks[q];
            g->gpu_ranks[q].K = r.shape.K, g->gpu_ranks[q].n_sms = r.d.n_sms, g->gpu_ranks[q].arch = 90;
            attn_plan_open(&r.d);
            r.up.resize(attn_upload_bytes(&r.d) + 64);
            r.d.upload.host[0] = r.d.upload.device[0] = (char *)(((uintptr_t)r.up.data() + 15) & ~(uintptr_t)15), r.d.upload.cap = r.up.size() - 16;
        }
        for (rank &r : ranks) {
            if (agreed) group_agree(&r.d);
            attn_plan_step(&r.d, &h.step);
            launches[agreed][&r - ranks] = attn_launches(r.d.attn), n_items[agreed][&r - ranks] = r.d.attn->n_items;
            same &= !r.d.error.code;
        }
        const bool equal = n_items[agreed][0] == n_items[agreed][1] &&
                           !memcmp(ranks[0].d.attn->items, ranks[1].d.attn->items, (size_t)n_items[agreed][0] * sizeof(attn_item));
        same &= equal == (agreed == 1);
        for (rank &r : ranks) attn_close(&r.d);
    }
    const bool one_has = (launches[0][0] <= GRAPH_MAX_ATTENTION) != (launches[0][1] <= GRAPH_MAX_ATTENTION);
    gpu_check(same && launches[1][0] == launches[1][1] && (one_has || !graphs),
              "ranks with 3 and 2 kv heads, %s: %d and %d launches, %d and %d items; where they agree %d and %d, %d and %d", name, launches[0][0],
              launches[0][1], n_items[0][0], n_items[0][1], launches[1][0], launches[1][1], n_items[1][0], n_items[1][1]);
    g->gpu_ranks[1].arch = 80;
    for (rank &r : ranks) {
        attn_plan_open(&r.d);
        group_agree(&r.d);
        gpu_check(r.d.error.code && strstr(r.d.error.msg, "9.0 and 8.0"), "tensor ranks of two kinds of GPU: %s", r.d.error.msg);
        attn_close(&r.d);
    }
    free(g);
}
static void test_graphs() {
    scene chain({64, 2, 2, 64, 0}), much({64, 2, 2, 64, 0});
    add_chain(chain, 3, 10, 12, 787);
    check_agreement(chain, true, "a chain of prefixes");
    for (int i = 0; i < 60; i++) much.add(2000 + 100 * i, 1);
    check_agreement(much, false, "long sequences");
    scene few({64, 2, 4, 64, 0}), tree({64, 2, 4, 64, 0});
    for (int n : {50, 30, 90, 17, 40}) few.add(n, 1);
    grow(tree, 2, 1, {}, 1, 12);
    check_graph_padding(few, false, 3, 1);
    check_graph_padding(few, false, 3, 0, true);
    check_graph_padding(tree, true, 6, 4); /* launches: tiles, tiles, small items, their merge */
    gpu_check(max_captured_size(64, 512) == 64 && max_captured_size(65, 512) == 128 && max_captured_size(1, 512) == 1 &&
        max_captured_size(100, 100) == 64,
              "graphs: impossible sizes, or missing ones: %d %d %d %d", max_captured_size(64, 512),
                  max_captured_size(65, 512), max_captured_size(1, 512),
              max_captured_size(100, 100));
}

/* Few samples of few prompts: prefix groups. */
static void test_prefix_groups(shape_case c) {
    scene s(c), tree(c);
    for (int i = 0; i < 4; i++) add_samples(s, 1 + 4 * i, 2 * i, 9 * i + 1, 1 + i * 150);
    s.add(130, 1), s.add(1, 1);
    check(s, "samples, few");
    check(s, "samples, few, one key rules", 60);
    grow(tree, 3, 2, {}, 1, 5);
    check(tree, "tree of few");
    if (!c.window) check(s, "late rows of samples", 1.5f, true);
}

static void test_splits(int D) {
    scene s({D, 2, 4, 64, 0}), t({D, 2, 4, 64, 0});
    for (int n : {5000, 3000, 900, 17}) s.add(n, 1);
    s.add(4000, 50);
    check(s, "splits");
    check(s, "logits of 50", 14);
    check(s, "one key rules", 60);
    grow(t, 1, 40, {}, 1, 30); /* split-KV of a shared prefix */
    grow(t, 1, 1, {}, 1, 300);
    check(t, "long prefix");
    if (D != 64) return;
    /* enough work that nothing is split: items of more than 32 pages */
    scene whole({D, 8, 1, 64, 0});
    for (int i = 0; i < 240; i++) whole.add(2600 + i, 1);
    for (int n : {2200, 2300, 2400}) whole.add(n, 2200);
    check(whole, "many long sequences");
    few_sms([] { /* no CTA-local split-KV either: one sequence is too long for it */
        scene s({64, 8, 1, 64, 0});
        for (int i = 0; i < 20; i++) s.add(2200 + 120 * i, 1);
        check(s, "many long sequences on few multiprocessors");
    });
}

/* Runs every kernel once, with the smallest steps that use all its code. For racecheck, under which
 * "small" takes minutes. */
static void test_tiny() {
    for (int D : {64, 96, 128, 256}) {
        scene s({D, 1, 4, 64, 0});
        for (int n : {1, 70, 200}) s.add(n, 1);
        s.add(130, 60);
        s.add(1500, 1); /* split-KV */
        grow(s, 1, 2, {}, 1, 20);
        add_tails(s, 1);
        check(s, "tiny");
        scene alone({D, 1, 4, 64, 0}); /* cluster split-KV */
        for (int n : {200, 300}) alone.add(n, 1);
        check(alone, "tiny, alone");
    }
    few_sms([] {
        scene s({128, 2, 4, 64, 0});
        s.add(ATTN_LONG_KV, 70);
        check_long(s, "tiny, long tiles");
    });
    for (int D : {64, 128})
        few_sms([=] { /* so that attn_fused is chosen, with several items per CTA */
            scene s({D, 2, 4, 64, 0});
            for (int i = 0; i < 3; i++) add_samples(s, 34, 1, 7, 9 + i * 70);
            check(s, "tiny samples");
        });
}

static void test_fp8_all(bool small) {
    test_fp8 = true;
    for (int D : {64, 128})
        for (int G : {1, 3, 4, 8}) {
            if (small && G != 4) continue;
            shape_case c = {D, G == 3 ? 1 : 2, G, 64, 0}, window = {D, 2, G, 64, 70};
            for (const shape_case &each : {c, window}) test_decode(each), test_prefill(each), test_tails(each), test_prefix_groups(each);
            test_late(c);
            for (int depth = 1; depth <= 3; depth++)
                for (int rows : {1, 3, 70}) test_tree(c, depth, 3, rows, 6);
            test_samples(D, G, small ? 290 : 300 + G);
        }
    for (int D : {64, 128})
        few_sms([=] {
            scene s({D, 2, 4, 64, 0});
            for (int i = 0; i < 22; i++) s.add(1 + 23 * i, 1);
            check(s, "decode on few multiprocessors");
        });
    test_long({128, 2, 4, 64, 0}), test_long({128, 2, 3, 64, 700});
    for (int D : {64, 128})
        if (!small) test_splits(D), test_repeat({D, 2, 4, 64, 0}), test_samples_repeat(D);
    test_fp8 = false;
}

/* Every kernel that writes o: attn_mma, attn_small, splits of all kinds and their merges, attn_wgmma, attn_fused. */
static void test_sinks_of(int D, int G, bool small) {
    shape_case c = {D, 2, G, 64, 0}, window = {D, 2, G, 64, 128};
    for (const shape_case &each : {c, window})
        test_decode(each), test_prefill(each), test_tails(each), test_prefix_groups(each), test_tree(each, 2, 3, 1, 6), test_tree(each, 1, 3, 70, 6);
    test_late(c);
    test_samples(D, G, small ? 290 : 300 + G);
    scene splits(c), prefix(c);
    for (int n : {5000, 3000, 900, 17}) splits.add(n, 1);
    splits.add(4000, 50);
    check(splits, "splits");
    check(splits, "splits, one key rules", 60);
    grow(prefix, 1, 40, {}, 1, 30), grow(prefix, 1, 1, {}, 1, 300);
    check(prefix, "long prefix");
}
static void test_sinks_all(bool small) {
    test_sinks = true;
    for (bool fp8 : {false, true}) {
        test_fp8 = fp8;
        for (int D : {64, 128})
            for (int G : {1, 3, 4, 8})
                if (G == 8 || !small) test_sinks_of(D, G, small);
    }
    test_fp8 = false;
    for (int D : {24, 80, 256}) { /* attn_mma, and head sizes that are not whole panels */
        shape_case c = {D, 2, 5, D == 24 ? 16 : 64, 0}, one = {D, 3, 1, 32, 70};
        for (const shape_case &each : {c, one}) test_decode(each), test_prefill(each), test_tails(each), test_tree(each, 2, 3, 1, 6);
    }
    few_sms([] {
        scene s({64, 2, 8, 64, 0});
        for (int i = 0; i < 22; i++) s.add(1 + 23 * i, 1);
        check(s, "decode on few multiprocessors");
    });
    if (!small) test_long({128, 2, 4, 64, 0}), test_long({128, 2, 3, 64, 700}), test_repeat({64, 2, 8, 64, 0}), test_samples_repeat(64);
    test_sinks = false;
}

static void test_kinds_of(shape_case c, bool small) {
    scene decode(c), prefill(c), tails(c), samples({c.D, 8, c.G, c.B, c.window}), few({c.D, 2, c.G, c.B, c.window}), tree(c);
    for (int n : lengths) decode.add(n, 1), prefill.add(n, n);
    for (int n : {1500, 2900}) decode.add(n, 1);
    check_kinds(decode, "decode");
    prefill.add(300, 1), prefill.add(700, 37), prefill.add(901, 200), prefill.add(2000, 300);
    check_kinds(prefill, "prefill");
    tails.add(100, 1);
    add_tails(tails, 1), add_tails(tails, 3);
    check_kinds(tails, "tails");
    scene ahead({c.D, 8, c.G, c.B, c.window});
    add_ahead(ahead, 100);
    check_kinds(ahead, "samples, one of them ahead");
    /* tails shorter than a page: whole pages of a prompt belong to all its samples */
    for (int i = 0; i < 4; i++) add_samples(few, 1 + 4 * i, 2 * i, 9 * i % c.B + 1, 1 + i * 150);
    check_kinds(few, "samples, few");
    grow(tree, 3, 3, {}, 1, 6), tree.add(130, 5), grow(tree, 1, 5, {}, 70, 5);
    check_kinds(tree, "tree");
    for (int pages : {1, 4, 11}) add_samples(samples, small ? 100 : 300 + pages, pages, pages == 4 ? 0 : pages * 5 % c.B, pages * 33);
    samples.add(700, 1);
    check_kinds(samples, "samples", c.window == 1 ? 1 : c.window == 1000 ? 2 : 0);
}
static void test_kinds_all(bool small) {
    for (int window : {1, 64, 128, 1000}) {
        for (int D : {64, 128})
            for (int G : {4, 8})
                if (!small || G == 8) test_kinds_of({D, 2, G, 64, window}, small);
        if (!small || window == 128) test_kinds_of({80, 2, 3, 64, window}, small), test_kinds_of({40, 1, 7, 16, window}, small);
    }
    test_fp8 = true;
    for (int D : {64, 128}) test_kinds_of({D, 2, 8, 64, 128}, small);
    test_fp8 = false, test_sinks = true;
    test_kinds_of({64, 2, 8, 64, 128}, small); /* GPT-OSS */
    test_sinks = false;
}

/* The kernels of test_sinks_of and those of Gemma 2, whose heads have 256 and 128 numbers. The scores are some times as large as the cap. */
static void test_caps_all(bool small) {
    test_cap = 2;
    for (bool fp8 : {false, true}) {
        test_fp8 = fp8;
        for (int D : {64, 128}) test_sinks_of(D, D == 64 ? 8 : 3, small);
    }
    test_fp8 = false;
    for (int D : {80, 256})
        for (int window : {0, 70}) {
            shape_case c = {D, 2, 2, 64, window};
            test_decode(c), test_prefill(c), test_tails(c), test_tree(c, 2, 3, 1, 6);
        }
    test_kinds_of({256, 2, 2, 64, 128}, small);
    test_sinks = true, test_sinks_of(64, 4, small), test_sinks = false;
    test_cap = 0;
}

static void test_all(bool small) {
    if (!small) test_lists(), test_graphs();
    test_kinds_all(small);
    test_fp8_all(small);
    test_sinks_all(small);
    test_caps_all(small);
    const int Ds[] = {8, 16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256}, Gs[] = {1, 2, 3, 4, 5, 7, 8, 12};
    int n = 0;
    for (int D : Ds) {
        shape_case c = {D, 2, Gs[n % 8], n % 3 == 0 ? 64 : n % 3 == 1 ? 16 : 32, 0};
        n++;
        if (small && D != 64 && D != 80 && D != 128 && D != 256) continue;
        test_decode(c);
        test_prefill(c);
        if (n % 3 == 1 || D == 64 || D == 128) test_late({D, 2, c.G, 64, 0}), test_late({D, 2, c.G, 64, 100});
        test_tree(c, 1 + n % 3, 3, 1, 6);
        test_tails(c);
        c.window = 70;
        test_prefill(c), test_decode(c), test_tails(c);
    }
    for (int D : {64, 80, 128})
        for (int G : {1, 3, 4, 8}) test_prefix_groups({D, 2, G, 64, 0}), test_prefix_groups({D, 1, G, 64, 70});
    for (int D : {64, 128})
        /* items that are not split, and short enough that they need no CTA-local split-KV */
        few_sms([=] {
            scene s({D, 2, 4, 64, 0});
            for (int i = 0; i < 22; i++) s.add(1 + 23 * i, 1);
            check(s, "decode on few multiprocessors");
        });
    for (int G : {1, 3, 4, 8})
        for (int window : {0, (int)ATTN_LONG_KV, 700}) {
            auto test = [=] { test_long({128, 2, G, 64, window}); };
            if (!small || G == 3) test(), few_sms(test);
        }
    /* head sizes that are not whole panels, on the kernels for Hopper */
    for (int D : {72, 80, 112}) {
        if (small && D != 80) continue;
        shape_case odd = {D, 2, D == 112 ? 5 : 3, 64, 0};
        test_prefill(odd), test_tails(odd);
    }
    for (int G : Gs) {
        if (small) break;
        for (int D : {64, 128}) {
            shape_case c = {D, 3, G, 64, 0};
            test_decode(c), test_prefill(c), test_tree(c, 2, 5, 1, 40), test_tails(c);
        }
    }
    shape_case c = {64, 2, 4, 64, 0}, wide = {128, 1, 24, 64, 0}, w = {128, 2, 4, 64, 100};
    test_decode(wide), test_prefill(wide);
    for (int D : {64, 128})
        for (int G : {1, 3, 4, 8}) test_samples(D, G, small ? 290 : 300 + G);
    if (small) return;
    for (int depth = 1; depth <= 3; depth++)
        for (int rows : {1, 3, 70}) test_tree(c, depth, 2, rows, 5), test_tree(w, depth, 2, rows, 5);
    for (int D : {64, 80, 96, 128}) test_splits(D), test_repeat({D, 2, 4, 64, 0});
    for (int D : {64, 128}) test_samples_repeat(D);
}

/* ---- Timings ---- */

static bool json;

static void report(const char *what, int D, double us, double bytes, double flops, double ceiling) {
    if (json)
        printf("{\"op\":\"attention\",\"case\":\"%s\",\"D\":%d,\"us\":%.2f,\"gb_s\":%.1f,\"tflop_s\":%.1f,"
               "\"read_share\":%.3f}\n", what, D, us, bytes / us * 1e-3, flops / us * 1e-6, bytes / us * 1e-3 / ceiling);
    else
        printf("%-44s D=%-4d %9.1f us %7.0f GB/s %5.1f %% of reading %7.1f TFLOP/s\n", what, D, us, bytes / us * 1e-3,
               bytes / us * 1e-1 / ceiling, flops / us * 1e-6);
}

__global__ static void read_all(const uint4 *p, size_t n, int *out) {
    uint32_t x = 0;
    size_t at = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = at; i + 3 * step < n; i += 4 * step) {
        uint4 a = p[i], b = p[i + step], c = p[i + 2 * step], d = p[i + 3 * step];
        x ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    if (x == 0x12345678) *out = 1;
}
static double read_ceiling() { /* GB/s */
    size_t n = (size_t)2 << 30;
    gpu_buf<char> b(n);
    gpu_buf<int> out(1);
    fill_slots<<<1, 1>>>(NULL, NULL, 0, 1, 64, 4, 0, 0);
    gpu_fill_f32<<<1056, 256>>>((float *)b.p(), n / 4, 3, 1);
    double us = gpu_time_us(gpu_device()->stream, 4, 5, [&](int) {
        read_all<<<2112, 512, 0, gpu_device()->stream>>>((uint4 *)b.p(), n / 16, out.p());
    });
    return n / us * 1e-3;
}

static void bench_decode(const char *what, int D, int n, int from, int to, double ceiling) {
    scene s({D, 8, 4, 64, 0});
    double tokens = 0;
    for (int i = 0; i < n; i++) {
        int len = from + (int)(gpu_mix(i) % (uint64_t)(to - from + 1));
        s.add(len, 1), tokens += len;
    }
    device_scene st(s, false, 1.5f, 5);
    double us = gpu_time_us(st.d->stream, 8, 7, [&](int) { st.run(); });
    if (st.ok(what)) report(what, D, us, tokens * 8 * (test_fp8 ? 2 * (D + 1) : 4 * D), tokens * 32 * D * 4, ceiling);
}
static void bench_prefix(int D, int n, int pages, double ceiling) {
    scene s({D, 8, 4, 64, 0});
    char what[60];
    s.shared.push_back({});
    std::vector<int> prefix = s.take_pages(pages);
    for (int i = 0; i < n; i++) s.add(pages * 64 + 1, 1, prefix);
    s.share(0, n, 0, pages), s.shared.erase(s.shared.begin());
    device_scene st(s, true, 1.5f, 5);
    snprintf(what, sizeof what, "prefix of %d, %d sequences", pages * 64, n);
    st.d->attn->n_levels = 1; /* without the own spans */
    double us = gpu_time_us(st.d->stream, 8, 7, [&](int) { st.run(); }), keys = (double)n * pages * 64;
    if (st.ok(what)) report(what, D, us, pages * 64.0 * 8 * D * 4 + (double)n * 32 * D * 6, keys * 32 * D * 4, ceiling);
}
static void bench_prefill(int D, int prompts, int len, int rows, double ceiling) {
    scene s({D, 8, 4, 64, 0});
    char what[60];
    for (int i = 0; i < prompts; i++) s.add(len, rows);
    device_scene st(s, false, 1.5f, 5);
    if (prompts == 1) snprintf(what, sizeof what, "prefill of %d rows behind %d", rows, len - rows);
    else snprintf(what, sizeof what, "prefill of %d x %d rows", prompts, rows);
    double us = gpu_time_us(st.d->stream, 8, 7, [&](int) { st.run(); }), keys = rows * (len - rows + (rows + 1) * 0.5);
    if (st.ok(what)) report(what, D, us, prompts * (len * 8.0 + rows * 32.0) * D * 4, prompts * keys * 32 * D * 4, ceiling);
}
static void bench_make_step() {
    scene s({64, 8, 4, 64, 0});
    std::vector<int> prefix = s.take_pages(11);
    for (int i = 0; i < 8192; i++) s.add(704 + 10 + i % 150, 1, prefix);
    s.share(0, 8192, 0, 11);
    device_scene st(s, true, 1, 5);
    struct timespec a, b;
    double best = 1e9;
    for (int i = 0; i < 20; i++) {
        st.d->upload.used = 0;
        clock_gettime(CLOCK_MONOTONIC, &a);
        attn_plan_step(st.d, &st.step);
        clock_gettime(CLOCK_MONOTONIC, &b);
        best = std::min(best, (b.tv_sec - a.tv_sec) * 1e6 + (b.tv_nsec - a.tv_nsec) * 1e-3);
    }
    printf(json ? "{\"op\":\"attention\",\"case\":\"work list of 8192 sequences\",\"us\":%.1f,\"bytes\":%zu}\n"
                : "work list of 8192 sequences, one shared prefix: %.1f us of the host, %zu bytes up\n", best, st.d->upload.used);
}
/* How many tokens after the first one a sample of a running job has drawn. */
static int sample_age(size_t sample) {
    /* long samples run in more steps, so they are met more often */
    for (uint64_t k = (uint64_t)sample * 64;; k += 2) {
        const double len = std::max(16.0, std::min(512.0, 138 * exp(0.4 * gpu_normal(3, k)))), age = 512 * gpu_uniform(4, k);
        if (age < len) return (int)age;
    }
}
/* The steady state of 8,192 samples of eight prompts. 704 positions are shared, of which the last
 * `tail` do not fill a page. Samples end between 16 and 512 tokens, log-normal around 138, so their
 * own spans have 88 positions on average. Also times each level alone. */
static void bench_samples(int D, const std::vector<int> &groups, int pages, int tail, bool share_tail, double ceiling) {
    scene s({D, 8, 4, 64, 0});
    char what[80];
    double own = 0, shared = 0;
    for (int rows : groups) {
        std::vector<int> prefix = s.take_pages(pages);
        int first = (int)s.seqs.size();
        for (int i = 0; i < rows; i++) {
            const int age = sample_age(s.seqs.size());
            s.add(pages * 64 + tail + 1 + age, 1, prefix), own += 1 + age;
        }
        if (rows == 1) {
            own += pages * 64 + tail;
            continue;
        }
        s.share(first, rows, 0, pages);
        if (share_tail) s.share_tail(first, rows, tail);
        shared += (double)rows * (pages * 64 + (share_tail ? tail : 0)), own += share_tail ? 0 : (double)rows * tail;
    }
    int n = s.T;
    device_scene st(s, true, 1.5f, 5);
    attn_plan *p = st.d->attn;
    double other_elems = n * 32.0 * D; /* elements of Q, O and a state */
    snprintf(what, sizeof what, "%d samples of %zu prompts, tail of %d%s", n, groups.size(), tail, share_tail ? " shared" : "");
    double us = gpu_time_us(st.d->stream, 4, 7, [&](int) { st.run(); });
    if (st.ok(what)) report(what, D, us, own * 8 * D * 4 + other_elems * 4, (own + shared) * 32 * D * 4, ceiling);
    p->has_fused = false;
    st.plan();
    attn_level levels[2] = {p->levels[0], p->levels[1]};
    us = gpu_time_us(st.d->stream, 4, 7, [&](int) { st.run(); });
    if (st.ok(what)) report("    in two kernels", D, us, own * 8 * D * 4 + other_elems * 10, (own + shared) * 32 * D * 4, ceiling);
    p->n_levels = 1;
    us = gpu_time_us(st.d->stream, 4, 7, [&](int) { st.run(); });
    if (st.ok(what)) report("    shared part alone", D, us, other_elems * 6, shared * 32 * D * 4, ceiling);
    p->levels[0] = levels[1];
    us = gpu_time_us(st.d->stream, 4, 7, [&](int) { st.run(); });
    if (st.ok(what)) report("    own splits alone", D, us, own * 8 * D * 4 + other_elems * 8, own * 32 * D * 4, ceiling);
}
static void bench_samples_all() {
    double ceiling = read_ceiling();
    printf(json ? "{\"op\":\"read\",\"gb_s\":%.1f}\n" : "reading 2 GiB: %.0f GB/s\n", ceiling);
    /* in the running job of 1,024 samples a prompt, samples have ended one by one */
    std::vector<int> eight(8, 1024);
    std::vector<int> running = {1023, 1023, 1008, 947, 830, 707, 537, 380, 311, 234, 156, 88, 61, 62, 42, 24, 14, 13, 8, 4, 4, 3, 2};
    for (int i = 0; i < 6; i++) running.push_back(1);
    for (int D : {64, 128}) {
        for (bool share_tail : {false, true}) bench_samples(D, eight, 10, 35, share_tail, ceiling);
        bench_samples(D, running, 10, 35, true, ceiling);
    }
}
/* Steps of few rows: `each` samples of each of `prompts` prompts of 704 positions, of which the
 * first `common` pages are common to all. */
static void bench_prefix_groups(int D, int prompts, int each, int common) {
    scene s({D, 8, 4, 64, 0});
    std::vector<int> shots = s.take_pages(common);
    char what[80];
    for (int i = 0; i < prompts; i++) {
        std::vector<int> prefix = shots, more = s.take_pages(11 - common);
        prefix.insert(prefix.end(), more.begin(), more.end());
        for (int k = 0; k < each; k++) s.add(704 + 1 + (int)(gpu_mix((uint64_t)(i * each + k)) % 150), 1, prefix);
    }
    if (common) s.share(0, prompts * each, 0, common);
    for (int i = 0; i < prompts && each > 1; i++) s.share(i * each, each, common, 11 - common);
    device_scene st(s, true, 1.5f, 5);
    attn_plan *p = st.d->attn;
    double us[3];
    for (int mode = 0; mode < 3; mode++) {
        p->group_max_work = mode == 0 ? INT64_MAX / 2 : 0, p->fused_min_row_heads = mode == 1 ? 1 : INT_MAX;
        st.plan();
        bool there = mode == 0 ? p->prefix_groups : mode == 1 ? p->n_fused > 0 : true;
        us[mode] = there ? gpu_time_us(st.d->stream, 16, 7, [&](int) { st.run(); }) : NAN;
        st.ok("few samples");
    }
    p->group_max_work = INT64_MAX / 2, p->fused_min_row_heads = INT_MAX, st.plan();
    int64_t work = 0;
    for (int i = 0; i < p->n_items; i++) work += p->items[i].kv1 - p->items[i].kv0;
    snprintf(what, sizeof what, "%d samples of each of %d prompts, %d pages common", each, prompts, common);
    printf("%-52s D %3d  groups %6.1f  attn_fused %6.1f  levels %6.1f us  work %6lld an SM  warps %d\n", what, D, us[0], us[1], us[2],
           (long long)work * 8 / p->n_sms, p->levels[0].cta_split_warps);
}
/* A running job of few samples: groups[i] samples of prompt i, of random age. The first `common`
 * pages are common to all prompts. */
static void bench_running(int D, const std::vector<int> &groups, int common) {
    scene s({D, 8, 4, 64, 0});
    std::vector<int> shots = s.take_pages(common);
    for (size_t g = 0; g < groups.size(); g++) {
        std::vector<int> prefix = shots, more = s.take_pages(11 - common);
        prefix.insert(prefix.end(), more.begin(), more.end());
        for (int i = 0; i < groups[g]; i++) s.add(704 + 1 + sample_age(s.seqs.size()), 1, prefix);
    }
    const int n = s.T;
    s.share(0, n, 0, common);
    for (size_t g = 0, at = 0; g < groups.size(); at += (size_t)groups[g++]) s.share((int)at, groups[g], common, 11 - common);
    device_scene st(s, true, 1.5f, 5);
    attn_plan *p = st.d->attn;
    double us[4];
    int n_splits[2] = {};
    int64_t work = 0;
    for (int mode = 0; mode < 4; mode++) { /* prefix groups, mixed groups, attn_fused, levels */
        p->allow_mixed = mode == 1, p->group_max_work = p->group_max_work_fused = mode < 2 ? INT64_MAX / 2 : 0,
            p->fused_min_row_heads = mode == 2 ? 1 : INT_MAX;
        st.plan();
        bool there = mode == 1 ? p->prefix_groups && p->mixed_groups : mode == 0 ? p->prefix_groups : mode == 2 ? p->n_fused > 0 : true;
        if (mode < 2) n_splits[mode] = p->levels[0].n_cta_merges * 100 + p->levels[0].cta_split_warps;
        for (int i = 0; mode == 0 && i < p->n_items; i++) work += p->items[i].kv1 - p->items[i].kv0;
        us[mode] = there ? gpu_time_us(st.d->stream, 16, 7, [&](int) { st.run(); }) : NAN;
        st.ok("running");
    }
    printf("running %3d of %2zu prompts, common %2d, D %3d  groups %6.1f  mixed %6.1f  attn_fused %6.1f  levels %6.1f us  work %6lld an SM  CTA-local splits %d %d\n", n, groups.size(),
           common, D, us[0], us[1], us[2], us[3], (long long)work * 8 / p->n_sms, n_splits[0], n_splits[1]);
}
static void bench_running_all() {
    double ceiling = read_ceiling();
    for (int D : {64, 128}) {
        for (int common : {10, 0}) {
            bench_running(D, {24, 24, 16}, common);
            bench_running(D, {23, 19, 15, 7}, common);
            bench_running(D, {24, 23, 11, 5, 1}, common);
            bench_running(D, {13, 12, 11, 10, 9, 9}, common);
            bench_running(D, {19, 15, 11, 3}, common);
            bench_running(D, {7, 5, 5, 3, 3, 1}, common);
            bench_running(D, {24, 24, 24, 8}, common);
            bench_running(D, {9, 3, 3, 1}, common);
        }
        bench_decode("decode, 4096 sequences of 150..900", D, 4096, 150, 900, ceiling);
        bench_decode("decode, 4096 sequences of 10..300", D, 4096, 10, 300, ceiling);
        for (int n : {1, 4, 8, 16})
            for (int len : {640, 768, 850, 1100, 1400}) {
                char what[80];
                snprintf(what, sizeof what, "decode, %d sequences of %d", n, len);
                bench_decode(what, D, n, len, len, ceiling);
            }
        bench_decode("decode, 64 sequences of 640", D, 64, 640, 640, ceiling);
    }
}
static void bench_prefix_groups_all() {
    for (int D : {64, 128})
        for (int common : {0, 10})
            for (int prompts : {1, 2, 4, 8, 16})
                for (int each : {4, 8, 16, 24, 64, 128}) bench_prefix_groups(D, prompts, each, common);
}
static void bench_all(bool decode, bool tiles) {
    double ceiling = read_ceiling();
    printf(json ? "{\"op\":\"read\",\"gb_s\":%.1f}\n" : "reading 2 GiB: %.0f GB/s\n", ceiling);
    bench_make_step();
    for (int D : {64, 128, 256}) {
        if (!decode) break;
        bench_decode("decode, 4096 sequences of 150..900", D, 4096, 150, 900, ceiling);
        bench_decode("decode, 4096 sequences of 10..300", D, 4096, 10, 300, ceiling);
        bench_decode("decode, 64 sequences of 4096", D, 64, 4096, 4096, ceiling);
        bench_decode("decode, 1 sequence of 8192", D, 1, 8192, 8192, ceiling);
        bench_decode("decode, 1 sequence of 640", D, 1, 640, 640, ceiling);
    }
    for (int D : {64, 96, 128, 256}) {
        if (!tiles) break;
        for (int n : {8448, 4096, 1024, 64}) bench_prefix(D, n, 11, ceiling);
        bench_prefix(D, 64, 256, ceiling);
        for (int n : {512, 1024, 2048}) bench_prefill(D, 8192 / n, n, n, ceiling);
        for (int n : {1024, 4096, 16384}) bench_prefill(D, 1, n, n, ceiling);
        bench_prefill(D, 1, 16384, 512, ceiling);
    }
}

int main(int argc, char **argv) {
    bool small = false, timings = false, only_tiles = false, only_decode = false, samples = false, few_samples = false, running = false,
         sinks = false, kinds = false, caps = false;
    for (int i = 1; i < argc; i++) {
        small |= !strcmp(argv[i], "small"), timings |= !strcmp(argv[i], "bench"), json |= !strcmp(argv[i], "--json");
        only_tiles |= !strcmp(argv[i], "tiles"), only_decode |= !strcmp(argv[i], "decode");
        test_fp8 |= !strcmp(argv[i], "fp8"), sinks |= !strcmp(argv[i], "sinks");
        kinds |= !strcmp(argv[i], "kinds"), caps |= !strcmp(argv[i], "caps");
        samples |= !strcmp(argv[i], "samples"), few_samples |= !strcmp(argv[i], "groups"), running |= !strcmp(argv[i], "running");
    }
    if (argc > 1 && !strcmp(argv[1], "lists")) return test_lists(), test_graphs(), gpu_report();
    gpu_device();
    if (timings && running) bench_running_all();
    else if (timings && few_samples) bench_prefix_groups_all();
    else if (timings && samples) bench_samples_all();
    else if (timings) bench_all(!only_tiles, !only_decode);
    else if (sinks) test_sinks_all(small);
    else if (kinds) test_kinds_all(small);
    else if (caps) test_caps_all(small);
    else if (test_fp8) test_fp8_all(small);
    else if (argc > 1 && !strcmp(argv[1], "tiny")) test_tiny();
    else if (few_samples) {
        for (int D : {64, 80, 128})
            for (int G : {1, 3, 4, 8}) test_prefix_groups({D, 2, G, 64, 0}), test_prefix_groups({D, 1, G, 64, 70});
    } else if (samples) {
        for (int D : {64, 128})
            for (int G : {1, 3, 4, 8}) test_samples(D, G, 300 + G);
    } else if (argc > 1 && !strcmp(argv[1], "splits")) test_splits(64), test_splits(128);
    else test_all(small);
    return gpu_report();
}
