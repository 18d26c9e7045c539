/* gpu_attn.cu - attention on the GPU against float64 over the same bf16 inputs: lengths around every tile border, all kinds of heads,
 * trees of shared prefixes, windows, parts, with unused pages and unused ends of pages full of NaN. `bench`: timings. */
#include "../toka_kernels.cu"
#include "gpu.cuh"

typedef struct shape_case { int D, K, G, B, window; } shape_case;

struct seq { /* positions 0 .. len-1 known, the last `rows` of them are this step's */
    std::vector<int> pages;
    int len, rows, row0;
};

/* A step's worth of sequences, its pages, and its spans with prefixes shared or not. */
struct scene {
    shape_case c;
    std::vector<seq> seqs;
    std::vector<toka_span> shared; /* page0: index of the sequence that has the pages */
    std::vector<int> free_pages;
    int n_pages = 0, T = 0;
    explicit scene(shape_case c_) : c(c_) {}
    std::vector<int> take(int n) {
        std::vector<int> v;
        for (int i = 0; i < n; i++) v.push_back(n_pages++);
        return v;
    }
    void add(int len, int rows, const std::vector<int> &prefix = {}) {
        seq q = {prefix, len, rows, T};
        std::vector<int> own = take(ceil_div(len, c.B) - (int)prefix.size());
        q.pages.insert(q.pages.end(), own.begin(), own.end());
        T += rows;
        seqs.push_back(q);
    }
    void share(int first_seq, int n_seqs, int from_page, int n) {
        int row0 = seqs[first_seq].row0, end = seqs[first_seq + n_seqs - 1].row0 + seqs[first_seq + n_seqs - 1].rows;
        shared.push_back({row0, end - row0, first_seq, from_page * c.B, n * c.B});
    }
};

__global__ static void fill_slots(bf16 *kv, const int *slots, int n, int K, int D, int log2_B, uint64_t seed, float scale) {
    for (int i = blockIdx.x; i < n; i += gridDim.x)
        for (int j = threadIdx.x; j < K * 2 * D; j += blockDim.x) {
            int page = slots[i] >> log2_B, off = slots[i] & ((1 << log2_B) - 1);
            size_t at = ((((size_t)page * K * 2 + j / D) << log2_B) + off) * D + j % D;
            kv[at] = __float2bfloat16(scale * gpu_normal(seed, at));
        }
}

/* One block per row and head, in float64. tables: [row][n_table] pages. */
__global__ static void reference(const bf16 *q, const bf16 *kv, const int *tables, int n_table, const int *pos, double *o, int K,
                                 int G, int D, int log2_B, int window) {
    int row = blockIdx.x / (K * G), head = blockIdx.x % (K * G), p = pos[row], from = window && p >= window ? p - window + 1 : 0;
    __shared__ double acc[256], total, top;
    __shared__ double scores[128];
    const bf16 *qr = q + (size_t)blockIdx.x * D;
    for (int j = threadIdx.x; j < 256; j += blockDim.x) acc[j] = 0;
    if (!threadIdx.x) total = 0, top = -1e300;
    for (int t0 = from; t0 <= p; t0 += 128) {
        int t = t0 + threadIdx.x, n = min(128, p + 1 - t0);
        __syncthreads();
        double s = 0;
        size_t at = 0;
        if (t <= p) {
            at = ((((size_t)tables[(size_t)row * n_table + (t >> log2_B)] * K + head / G) * 2 << log2_B) + (t & ((1 << log2_B) - 1))) * D;
            for (int j = 0; j < D; j++) s += (double)__bfloat162float(qr[j]) * (double)__bfloat162float(kv[at + j]);
            scores[threadIdx.x] = s / sqrt((double)D);
        }
        __syncthreads();
        double m = top;
        for (int i = 0; i < n; i++) m = fmax(m, scores[i]);
        double fade = exp(top - m);
        for (int j = threadIdx.x; j < D; j += blockDim.x) {
            double x = acc[j] * fade;
            for (int i = 0; i < n; i++) {
                int u = t0 + i;
                size_t v = ((((size_t)tables[(size_t)row * n_table + (u >> log2_B)] * K + head / G) * 2 + 1 << log2_B) +
                            (u & ((1 << log2_B) - 1))) * D;
                x += exp(scores[i] - m) * (double)__bfloat162float(kv[v + j]);
            }
            acc[j] = x;
        }
        __syncthreads();
        if (!threadIdx.x) {
            double l = total * fade;
            for (int i = 0; i < n; i++) l += exp(scores[i] - m);
            total = l, top = m;
        }
    }
    __syncthreads();
    for (int j = threadIdx.x; j < D; j += blockDim.x) o[(size_t)blockIdx.x * D + j] = acc[j] / total;
}

/* A scene on the device, ready to run. */
struct stand {
    scene &sc;
    toka_device *d = gpu_device();
    toka_shape shape = {};
    layer_weights layer = {};
    toka_step step = {};
    std::vector<int> pos, pages;
    std::vector<toka_span> spans;
    gpu_buf<bf16> kv, q, o;
    stand(scene &s, bool share, float q_scale, int seed, int spare_tokens = 0)
        : sc(s), kv((size_t)(s.n_pages + 1) * s.c.K * 2 * s.c.B * s.c.D), q((size_t)s.T * s.c.K * s.c.G * s.c.D), o(q.n) {
        int max_len = 0, log2_B = __builtin_ctz(s.c.B);
        std::vector<int> order((size_t)s.n_pages), slots; /* page i of the scene lies in page order[i]; page n_pages is NaN */
        for (int i = 0; i < s.n_pages; i++) order[i] = i;
        for (int i = s.n_pages - 1; i > 0; i--) std::swap(order[i], order[gpu_mix(seed + i) % (i + 1)]);
        for (seq &x : s.seqs)
            for (int t = 0; t < x.len; t++) slots.push_back(order[x.pages[t / s.c.B]] * s.c.B + t % s.c.B);
        gpu_buf<int> dev_slots(slots.size());
        dev_slots.set(slots);
        fill_slots<<<1024, 128>>>(kv.p(), dev_slots.p(), (int)slots.size(), s.c.K, s.c.D, log2_B, seed, 1);
        gpu_random(q, seed + 1, q_scale);
        for (seq &x : s.seqs) {
            for (int i = 0; i < x.rows; i++) pos.push_back(x.len - x.rows + i);
            max_len = std::max(max_len, x.len);
        }
        std::vector<int> cover(s.seqs.size(), 0), first;
        for (seq &x : s.seqs) {
            first.push_back((int)pages.size());
            for (int pg : x.pages) pages.push_back(order[pg]);
            for (int i = 0; i < 3; i++) pages.push_back(s.n_pages);
        }
        if (share)
            for (toka_span sp : s.shared) {
                for (size_t i = 0; i < s.seqs.size(); i++)
                    if (s.seqs[i].row0 >= sp.row0 && s.seqs[i].row0 < sp.row0 + sp.n_rows) cover[i] = sp.kv0 + sp.n_kv;
                sp.page0 = first[sp.page0] + sp.kv0 / s.c.B;
                spans.push_back(sp);
            }
        for (size_t i = 0; i < s.seqs.size(); i++)
            spans.push_back({s.seqs[i].row0, s.seqs[i].rows, first[i] + cover[i] / s.c.B, cover[i], s.seqs[i].len - cover[i]});
        shape.H = s.c.K * s.c.G, shape.K = s.c.K, shape.D = s.c.D, shape.B = s.c.B, shape.max_len = max_len, shape.L = 1;
        layer.window = s.c.window;
        d->shape = &shape, d->layers = &layer, d->kv = kv.p(), d->kv_layer = kv.n;
        d->options.max_tokens = s.T + spare_tokens, d->options.n_pages = s.n_pages + 1;
        attn_open(d);
        stage_open(d, &d->up, attn_stage_bytes(d) + (size_t)s.T * sizeof(int) + 64);
        step.T = s.T, step.pos = pos.data(), step.pages = pages.data(), step.spans = spans.data(), step.n_spans = (int)spans.size();
        plan();
    }
    void plan() {
        d->up.used = 0;
        d->rows.pos = (const int *)stage_put(&d->up, pos.data(), pos.size() * sizeof(int));
        attn_plan_step(d, &step);
        stage_send(d, &d->up);
        GPU_OK(cudaStreamSynchronize(d->stream));
    }
    void run() { attention(d, &step, 0, q.p(), o.p()); }
    bool ok(const char *what) {
        GPU_OK(cudaStreamSynchronize(d->stream));
        return gpu_check(!d->error.code, "%s: %s", what, d->error.msg);
    }
    std::vector<double> wanted() {
        size_t n_table = 0, row = 0;
        for (seq &x : sc.seqs) n_table = std::max(n_table, x.pages.size());
        std::vector<int> t((size_t)sc.T * n_table, 0);
        for (size_t i = 0, at = 0; i < sc.seqs.size(); at += sc.seqs[i].pages.size() + 3, i++)
            for (int r = 0; r < sc.seqs[i].rows; r++, row++)
                for (size_t j = 0; j < sc.seqs[i].pages.size(); j++) t[row * n_table + j] = pages[at + j];
        gpu_buf<int> tables(t.size());
        gpu_buf<double> r(q.n);
        tables.set(t);
        reference<<<sc.T * sc.c.K * sc.c.G, 128>>>(q.p(), kv.p(), tables.p(), (int)n_table, d->rows.pos, r.p(), sc.c.K, sc.c.G,
                                                   sc.c.D, __builtin_ctz(sc.c.B), sc.c.window);
        GPU_OK(cudaDeviceSynchronize());
        return r.host();
    }
    ~stand() {
        attn_close(d);
        for (int i = 0; i < d->n_blocks; i++) cudaFree(d->blocks[i]);
        cudaFreeHost(d->up.host);
        d->n_blocks = 0, d->error.code = 0;
    }
};

static void check(scene &s, const char *name, float q_scale = 1.5f) {
    std::vector<double> want;
    char what[200];
    for (int share = s.shared.empty() ? 0 : 1; share >= 0; share--) {
        stand st(s, share, q_scale, (int)(gpu_mix(gpu_seed + s.T * 31 + s.c.D) >> 33));
        snprintf(what, sizeof what, "%s D=%d K=%d G=%d B=%d window=%d%s", name, s.c.D, s.c.K, s.c.G, s.c.B, s.c.window,
                 s.shared.empty() ? "" : share ? " shared" : " unshared");
        st.o.poison();
        st.run();
        if (!st.ok(what)) continue;
        want = st.wanted();
        std::vector<bf16> got = st.o.host();
        double err = 0, ref = 0, worst = 0;
        size_t worst_at = 0;
        for (size_t i = 0; i < want.size(); i++) {
            double e = (double)__bfloat162float(got[i]) - want[i];
            err += e * e, ref += want[i] * want[i];
            if (!(fabs(e) <= worst)) worst = fabs(e), worst_at = i;
        }
        int HD = s.c.K * s.c.G * s.c.D;
        gpu_check(sqrt(err / ref) < 5e-3 && worst < 0.05 && st.o.guards_hold() && st.q.guards_hold(),
                  "%s: relative error %.2e, largest %.3g (row %d head %d column %d: %.5g, expected %.5g)", what, sqrt(err / ref), worst,
                  (int)(worst_at / HD), (int)(worst_at % HD / s.c.D), (int)(worst_at % s.c.D),
                  (double)__bfloat162float(got[worst_at]), want[worst_at]);
    }
}

static const int lengths[] = {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 257, 899, 900, 901};

static void test_decode(shape_case c) {
    scene s(c);
    for (int n : lengths) s.add(n, 1);
    check(s, "decode");
}
static void test_prefill(shape_case c) { /* whole prompts, chunks behind earlier pages, and decode rows beside them */
    scene s(c);
    for (int n : lengths) s.add(n, n);
    s.add(300, 1);
    s.add(700, 37);
    s.add(901, 200);
    check(s, "prefill");
}
/* depth levels of shared pages; the first has `pages` pages, the others one or two, three children each; own parts of any length */
static void grow(scene &s, int depth, int pages, const std::vector<int> &prefix, int rows, int fan) {
    std::vector<int> path = prefix, more = s.take(pages);
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

static void test_repeat(shape_case c) {
    scene s(c);
    grow(s, 2, 9, {}, 1, 20);
    for (int n : lengths) s.add(n + 1000, 1);
    s.add(2000, 100);
    stand st(s, true, 1.5f, 7);
    st.run();
    if (!st.ok("repeats")) return;
    std::vector<bf16> first = st.o.host();
    int bad = 0;
    for (int i = 0; i < 100; i++) {
        st.o.poison();
        st.run();
        std::vector<bf16> again = st.o.host();
        bad += memcmp(first.data(), again.data(), first.size() * sizeof(bf16)) != 0;
    }
    gpu_check(bad == 0, "100 repeats D=%d: %d differ", c.D, bad);
}

static void test_all(bool small) {
    const int Ds[] = {8, 16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256}, Gs[] = {1, 2, 3, 4, 5, 7, 8, 12};
    int n = 0;
    for (int D : Ds) {
        shape_case c = {D, 2, Gs[n % 8], n % 3 == 0 ? 64 : n % 3 == 1 ? 16 : 32, 0};
        n++;
        if (small && D != 64 && D != 80 && D != 128 && D != 256) continue;
        test_decode(c);
        test_prefill(c);
        test_tree(c, 1 + n % 3, 3, 1, 6);
        c.window = 70;
        test_prefill(c), test_decode(c);
    }
    for (int G : Gs) {
        if (small) break;
        for (int D : {64, 128}) {
            shape_case c = {D, 3, G, 64, 0};
            test_decode(c), test_prefill(c), test_tree(c, 2, 5, 1, 40);
        }
    }
    shape_case c = {64, 2, 4, 64, 0}, wide = {128, 1, 24, 64, 0}, w = {128, 2, 4, 64, 100};
    test_decode(wide), test_prefill(wide);
    if (small) return;
    for (int depth = 1; depth <= 3; depth++)
        for (int rows : {1, 3, 70}) test_tree(c, depth, 2, rows, 5), test_tree(w, depth, 2, rows, 5);
    for (int D : {64, 80, 96, 128}) {
        scene s({D, 2, 4, 64, 0});
        for (int n : {5000, 3000, 900, 17}) s.add(n, 1); /* parts */
        s.add(4000, 50);
        check(s, "parts");
        check(s, "logits of 50", 14);
        check(s, "one key rules", 60);
        scene t({D, 2, 4, 64, 0});
        grow(t, 1, 40, {}, 1, 30); /* parts of a shared prefix */
        grow(t, 1, 1, {}, 1, 300);
        check(t, "long prefix");
        test_repeat({D, 2, 4, 64, 0});
    }
}

int main(int argc, char **argv) {
    gpu_device();
    test_all(argc > 1 && !strcmp(argv[1], "small"));
    return gpu_report();
}
