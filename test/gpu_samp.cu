/* gpu_samp.cu - tests chapters 11 and 12 against chapter 22 of toka.c: the samples, the ids that
 * filters keep and the log-probabilities of random rows; the distribution of a million samples; the
 * whole op against float64. Link it with gpu_samp.c, compiled as C.
 *   gpu_samp            all tests
 *   gpu_samp small      fewer and smaller cases (for compute-sanitizer)
 *   gpu_samp tiny       still fewer (for racecheck)
 *   gpu_samp draws      only the distributions
 *   gpu_samp same N     only N draws (10,000,000 among all tests) next to those of the CPU
 *   gpu_samp bench      timings
 *   gpu_samp filters    timings of the filters
 *   gpu_samp peer       timings next to cuBLAS's LM head, if the loader finds cuBLAS */
#include "../toka_kernels.cu"

#include "gpu.cuh"

extern "C" {
typedef struct draw_counts { /* as in test_samp.c */
    int64_t n, close, different, wrong;
    double key, place;
} draw_counts;
typedef struct toka_test_case {
    toka_sample_row row;
    const int32_t *history;
    float *raw;
} toka_test_case;
void toka_test_row(const toka_sample_row *row, const int32_t *history, float *logits, int V, toka_sample_result *result);
void toka_test_distribution(const toka_sample_row *row, const int32_t *history, float *logits, int V, double *p);
toka_test_case toka_test_random(uint64_t seed, int V);
double toka_test_g(const int *seen, const double *p, int n_cells, double n);
toka_test_case toka_test_draw_case(uint64_t seed, int V);
void toka_test_draws(const toka_test_case *c, int V, const int32_t *gpu_ids, int n, draw_counts *counts);
}

static bool quick;

/* ---- A device that has only these chapters ---- */

static toka_shape shape;
enum { KEPT_PAGES = 8192 }; /* pages of the device's kv_ids */
static int n_kept_pages;    /* those in use */
static toka_device *samp_device(int V, int E, int max_out) { /* the caller sets lm_head and norm */
    toka_device *d = gpu_device();
    shape = toka_shape{};
    shape.V = shape.V_all = V, shape.E = E, shape.eps = 1e-5f, shape.max_len = 4096;
    d->shape = &shape, d->E = round_up_8(E), d->V = round_up_8(V);
    d->options = toka_device_options{};
    d->options.max_tokens = d->options.max_samples = max_out;
    gemm_open(d), samp_open(d);
    d->kv_ids = (int *)dev_alloc(d, (size_t)KEPT_PAGES * TOKA_GPU_PAGE_TOK * sizeof(int), "kept ids");
    n_kept_pages = 0;
    d->xn = (bf16 *)dev_alloc(d, (size_t)(max_out + GEMM_PAD_ROWS) * d->E * sizeof(bf16), "xn");
    upload_open(d, &d->upload, samp_upload_bytes(d) + 4096, false);
    if (d->error.code) printf("FAILED %s\n", d->error.msg), exit(2);
    return d;
}
static void samp_device_close(toka_device *d) {
    GPU_OK(cudaStreamSynchronize(d->stream));
    samp_close(d);
    upload_close(&d->upload);
    for (int i = 0; i < d->n_allocations; i++) cudaFree(d->allocations[i]);
    free(d->allocations), d->allocations = NULL, d->n_allocations = 0;
}

/* Keeps the ids of a row's history in pages of the device, whose numbers fall. */
static void keep_history(toka_device *d, toka_sample_row *row, const int32_t *history) {
    static std::vector<std::vector<int32_t>> tables; /* never freed: rows point to them */
    const int B = TOKA_GPU_PAGE_TOK, n_pages = ceil_div(row->n_history, B);
    std::vector<int32_t> table((size_t)n_pages);
    n_kept_pages += n_pages;
    if (n_kept_pages > KEPT_PAGES) printf("FAILED more than %d pages of ids\n", KEPT_PAGES), exit(2);
    for (int i = 0; i < n_pages; i++) {
        table[(size_t)i] = n_kept_pages - 1 - i;
        GPU_OK(cudaMemcpy(d->kv_ids + table[(size_t)i] * B, history + i * B, (size_t)std::min(B, row->n_history - i * B) * sizeof(int), cudaMemcpyHostToDevice));
    }
    GPU_OK(cudaDeviceSynchronize());
    tables.push_back(std::move(table)), row->pages = tables.back().data();
}

static toka_step step_of(const std::vector<toka_sample_row> &rows) {
    toka_step s = {};
    s.T = s.n_samples = (int)rows.size(), s.samples = rows.data();
    return s;
}

/* Samples rows with these logits [n][V]. The logits are stored as the GEMM stores them, one chunk
 * at a time. */
static std::vector<toka_sample_result> sample_rows(toka_device *d, const std::vector<toka_sample_row> &rows,
    const std::vector<const float *> &logits) {
    samp_plan *p = d->samp;
    toka_step s = step_of(rows);
    size_t V = (size_t)d->shape->V;
    std::vector<toka_sample_result> samples(rows.size());
    upload_begin(d, &d->upload);
    samp_plan_step(d, &s);
    samp_plan_penalized(d, &s);
    upload_send(d, &d->upload);
    for (int i = 0, n; i < s.n_samples; i += n) {
        samp_filter *filters = NULL;
        bool plain = i < p->n_plain;
        n = std::min(p->chunk_rows, (plain ? p->n_plain : s.n_samples) - i);
        if (!plain) n = samp_upload_filters(d, &s, i, n, &filters);
        if (!n) break;
        GPU_OK(cudaMemsetAsync(p->logits, 0xFF, (size_t)p->chunk_rows * p->ld_logits * sizeof(float), d->stream));
        for (int j = 0; j < n; j++)
            GPU_OK(cudaMemcpyAsync(p->logits + (size_t)j * p->ld_logits, logits[p->host_results[d->last_begun].order[i + j]], V * sizeof(float), cudaMemcpyHostToDevice, d->stream));
        samp_launch_presence(d, i, plain ? n : 0);
        samp_from_logits(d, i, n, plain ? n : 0, filters);
    }
    samp_download(d, &s, samples.data());
    GPU_OK(cudaStreamSynchronize(d->stream));
    samp_collect(d, &s, &p->host_results[d->last_begun]);
    if (d->error.code) printf("FAILED %s\n", d->error.msg), exit(2);
    return samples;
}

static bool close_to(double a, double b, double tol) { return a == b || fabs(a - b) <= tol * std::max(1.0, fabs(b)); }
static bool same_result(const toka_sample_result &a, const toka_sample_result &b) {
    return a.id == b.id && !memcmp(&a.logprob, &b.logprob, 4) && !memcmp(&a.sampled_logprob, &b.sampled_logprob, 4) && a.n_top == b.n_top &&
           a.rank == b.rank && !memcmp(a.top_ids, b.top_ids, (size_t)a.n_top * 4) && !memcmp(a.top_logprobs, b.top_logprobs, (size_t)a.n_top * 4);
}

/* The same rows, but rows that `none` selects want no log-probability. */
struct no_logprob_rows {
    std::vector<toka_sampling> how;
    std::vector<toka_sample_row> rows;
    template <class F> no_logprob_rows(const std::vector<toka_sample_row> &from, F none) : how(from.size()), rows(from) {
        for (size_t i = 0; i < rows.size(); i++) {
            if (!rows[i].sampling || !none(i)) continue;
            how[i] = *rows[i].sampling, how[i].logprobs = TOKA_NO_LOGPROBS, rows[i].sampling = &how[i];
        }
    }
    void check(const char *what, const std::vector<toka_sample_result> &got, const std::vector<toka_sample_result> &want) const {
        for (size_t i = 0; i < rows.size(); i++) {
            /* result of the row; without top log-probabilities, because logprob would be the one in
             * their list */
            toka_sample_result p = want[i];
            if (!toka_wants_logprob(&rows[i])) p.logprob = NAN;
            /* a penalized row adds up its weights in another order than a filtered row */
            if (samp_is_penalized(&rows[i], INT_MAX) && close_to(got[i].sampled_logprob, p.sampled_logprob, 1e-5))
                p.sampled_logprob = got[i].sampled_logprob;
            gpu_check(same_result(got[i], p), "%s, row %zu: %d (%g, %g) where some want no log-probability, else %d (%g, %g)", what, i,
                      got[i].id, got[i].logprob, got[i].sampled_logprob, p.id, p.logprob, p.sampled_logprob);
        }
    }
};

/* ---- Random rows with all filters, against the CPU ---- */

/* Rows where rounding decides which ids a filter keeps; rows compared. */
static int unsure, compared;

static void check_row(const char *what, const toka_test_case &c, int V, const toka_sample_result &got) {
    std::vector<float> x(c.raw, c.raw + V);
    std::vector<double> p((size_t)V);
    toka_sample_result want = {};
    const toka_sampling *s = c.row.sampling;
    toka_test_row(&c.row, c.history, x.data(), V, &want);
    compared++;
    bool ok = got.n_top == want.n_top;
    for (int i = 0; ok && i < want.n_top; i++)
        ok = got.top_ids[i] == want.top_ids[i] && close_to(got.top_logprobs[i], want.top_logprobs[i], 1e-5);
    gpu_check(ok, "%s: top log-probabilities, %d for %d", what, got.n_top, want.n_top);
    gpu_check(got.rank == want.rank, "%s: rank %d for %d", what, got.rank, want.rank);
    if (!gpu_check(got.id >= 0 && got.id < V, "%s: id %d", what, got.id)) return;
    if (c.row.scored_id >= 0) {
        gpu_check(got.id == want.id && close_to(got.logprob, want.logprob, 1e-5) && got.sampled_logprob == got.logprob,
                  "%s: forced %d, %g %g for %d, %g", what, got.id, got.logprob, got.sampled_logprob, want.id, want.logprob);
        return;
    }
    std::copy(c.raw, c.raw + V, x.begin());
    toka_test_distribution(&c.row, c.history, x.data(), V, p.data());
    double mass = 0;
    for (double q : p) mass += q;
    if (mass == 0 || s->temperature == 0) {
        gpu_check(got.id == want.id && got.sampled_logprob == 0, "%s: id %d (%g) for %d", what, got.id, got.sampled_logprob, want.id);
        gpu_check(isnan(want.logprob) ? isnan(got.logprob) : close_to(got.logprob, want.logprob, 1e-5), "%s: logprob %g for %g", what,
                  got.logprob, want.logprob);
        return;
    }
    bool fits = p[(size_t)got.id] > 0 && close_to(got.sampled_logprob, log(p[(size_t)got.id]), 3e-5);
    if (!fits && s->top_p < 1) unsure++; /* counted: a few are allowed */
    else
        gpu_check(fits, "%s: id %d, sampled %g for %g (T %g, top_k %d, top_p %g, min_p %g, V %d)", what, got.id, got.sampled_logprob,
                  log(p[(size_t)got.id]), s->temperature, s->top_k, s->top_p, s->min_p, V);
    if (!toka_wants_logprob(&c.row)) return;
    toka_sample_row forced = c.row; /* the raw log-probability of the sampled id */
    toka_sampling none = *s;
    none.logprobs = 0, forced.sampling = &none, forced.scored_id = got.id;
    std::copy(c.raw, c.raw + V, x.begin());
    toka_test_row(&forced, c.history, x.data(), V, &want);
    /* the GPU computes it from the adjusted logit, which was rounded */
    bool undone = s->n_bias || c.row.n_history;
    gpu_check(close_to(got.logprob, want.logprob, undone ? 5e-5 : 1e-5), "%s: logprob %g for %g", what, got.logprob, want.logprob);
}

/* No sample may change if its log-probability, or that of other rows, is not wanted. */
static void check_no_logprob(toka_device *d, std::vector<toka_sample_row> rows, const std::vector<const float *> &logits) {
    std::vector<toka_sampling> how(rows.size());
    for (size_t i = 0; i < rows.size(); i++)
        if (rows[i].sampling) how[i] = *rows[i].sampling, how[i].logprobs = 0, rows[i].sampling = &how[i];
    std::vector<toka_sample_result> want = sample_rows(d, rows, logits);
    no_logprob_rows some(rows, [](size_t i) { return i % 3 == 1; }), all(rows, [](size_t) { return true; });
    some.check("some", sample_rows(d, some.rows, logits), want), all.check("all", sample_rows(d, all.rows, logits), want);
}

static void test_random(int V, int n, uint64_t seed0) {
    toka_device *d = samp_device(V, 8, 64);
    for (int from = 0; from < n; from += 64) {
        n_kept_pages = 0;
        std::vector<toka_test_case> cases;
        std::vector<toka_sample_row> rows;
        std::vector<const float *> logits;
        for (int i = 0; i < std::min(64, n - from); i++) {
            toka_test_case c = toka_test_random(seed0 + (uint64_t)(from + i), V);
            if (i % 7 == 3) c.row.scored_id = (int)(gpu_mix(seed0 + (uint64_t)i) % (uint64_t)V), c.row.wants_rank = i % 2;
            c.row.row = i;
            keep_history(d, &c.row, c.history);
            cases.push_back(c), rows.push_back(c.row), logits.push_back(c.raw);
        }
        std::vector<toka_sample_result> samples = sample_rows(d, rows, logits), again = sample_rows(d, rows, logits);
        std::vector<toka_sample_row> reversed(rows.rbegin(), rows.rend());
        std::vector<const float *> reversed_logits(logits.rbegin(), logits.rend());
        for (size_t i = 0; i < reversed.size(); i++) reversed[i].row = (int)i;
        std::vector<toka_sample_result> other = sample_rows(d, reversed, reversed_logits);
        for (size_t i = 0; i < rows.size(); i++) {
            char what[80];
            snprintf(what, sizeof what, "V %d, case %llu", V, (unsigned long long)(seed0 + (uint64_t)from + i));
            check_row(what, cases[i], V, samples[i]);
            gpu_check(same_result(samples[i], again[i]), "%s: another time another result", what);
            gpu_check(same_result(samples[i], other[rows.size() - 1 - i]), "%s: in another order another result", what);
        }
        check_no_logprob(d, rows, logits);
        /* without log-probabilities, some of them are penalized rows */
        no_logprob_rows none(rows, [](size_t) { return true; });
        samples = sample_rows(d, none.rows, logits);
        for (size_t i = 0; i < rows.size(); i++) {
            char what[80];
            snprintf(what, sizeof what, "V %d, case %llu, no logprob", V, (unsigned long long)(seed0 + (uint64_t)from + i));
            cases[i].row.sampling = none.rows[i].sampling;
            check_row(what, cases[i], V, samples[i]);
        }
        if (gpu_failed > 20) break;
    }
    samp_device_close(d);
}

/* ---- Edge cases ---- */

static toka_sampling plain(float T) {
    toka_sampling s = {};
    s.temperature = T, s.top_p = 1, s.repetition_penalty = 1, s.seed = 99;
    return s;
}
static toka_sample_row row_at(const toka_sampling *s, uint32_t position) {
    toka_sample_row r = {};
    r.scored_id = -1, r.sampling = s, r.position = position;
    return r;
}

static void test_edges() {
    const int V = 1000;
    toka_device *d = samp_device(V, 8, 256);
    toka_sampling s[8] = {plain(0), plain(1), plain(0.6f), plain(1e-6f), plain(1e-40f), plain(1e30f), plain(0), plain(1)};
    s[6].logprobs = 5, s[7].logprobs = 5;
    std::vector<std::vector<float>> kinds(8, std::vector<float>((size_t)V, 0.0f));
    for (int i = 0; i < V; i++) {
        float x = 3 * gpu_normal(5, (uint64_t)i);
        kinds[0][(size_t)i] = -INFINITY, kinds[1][(size_t)i] = NAN;
        kinds[2][(size_t)i] = i == 700 || i == 710 ? INFINITY : x; /* two ids share +inf */
        kinds[3][(size_t)i] = i % 3 ? i % 3 == 1 ? NAN : -INFINITY : x;
        kinds[4][(size_t)i] = 1e30f * x, kinds[5][(size_t)i] = i == 997 ? 5 : -INFINITY;
        kinds[6][(size_t)i] = i % 100 == 57 ? 4 : -4; /* ties for the best id */
        kinds[7][(size_t)i] = x > 0 ? FLT_MAX : -FLT_MAX;
    }
    std::vector<toka_test_case> cases;
    std::vector<toka_sample_row> rows;
    std::vector<const float *> logits;
    for (size_t k = 0; k < kinds.size(); k++)
        for (int j = 0; j < 8; j++)
            for (int forced = -1; forced < 2; forced++) {
                toka_test_case c = {row_at(&s[j], (uint32_t)(8 * k) + (uint32_t)j), NULL, kinds[k].data()};
                c.row.row = (int)rows.size();
                if (forced >= 0) c.row.scored_id = forced ? 999 : 700, c.row.wants_rank = true;
                cases.push_back(c), rows.push_back(c.row), logits.push_back(c.raw);
            }
    std::vector<toka_sample_result> samples = sample_rows(d, rows, logits);
    for (size_t i = 0; i < rows.size(); i++) {
        char what[60];
        snprintf(what, sizeof what, "edge %d, sampling %d, forced %d", (int)i / 24, (int)i / 3 % 8, rows[i].scored_id);
        check_row(what, cases[i], V, samples[i]);
    }
    check_no_logprob(d, rows, logits);
    for (int t = 0; t < 100; t++) {
        std::vector<toka_sample_result> again = sample_rows(d, rows, logits);
        bool same = true;
        for (size_t i = 0; i < rows.size(); i++) same &= same_result(samples[i], again[i]);
        if (!gpu_check(same, "repeat %d differs", t)) break;
    }
    samp_device_close(d);
}

/* Penalties of one token of the history decide which of the two best ids is drawn. */
static void test_presence() {
    const int V = 1000, best = 300, second = 301;
    const int32_t history[] = {best, 7};
    const struct {
        float logit, repetition, presence;
        int n_history, id; /* all of the history is prompt; id: the one to draw */
    } cases[] = {
        {1.0f, 1.01f, 0.5f, 1, best}, /* presence_penalty is for the output only */
        {1.0f, 2, 0, 2, second},      /* the first token counts */
        {1.0f, 2, 0, 1, second},
        {-0.5f, 2, 0, 2, second},     /* a negative logit is multiplied */
        {-0.5f, 1, -0.5f, 2, best},
    };
    toka_device *d = samp_device(V, 8, 64);
    const int n = 2 * (int)(sizeof cases / sizeof *cases);
    std::vector<toka_sampling> how((size_t)n);
    std::vector<std::vector<float>> raw((size_t)n, std::vector<float>((size_t)V, -8.0f));
    std::vector<toka_sample_row> rows;
    std::vector<const float *> logits;
    n_kept_pages = 0;
    for (int i = 0; i < n; i++) {
        how[(size_t)i] = plain(i % 2 ? 1e-3f : 0);
        how[(size_t)i].logprobs = TOKA_NO_LOGPROBS;
        how[(size_t)i].repetition_penalty = cases[i / 2].repetition, how[(size_t)i].presence_penalty = cases[i / 2].presence;
        raw[(size_t)i][best] = cases[i / 2].logit, raw[(size_t)i][second] = cases[i / 2].logit - 0.1f;
        toka_sample_row row = row_at(&how[(size_t)i], 0);
        row.row = i, row.n_history = row.n_prompt = cases[i / 2].n_history;
        keep_history(d, &row, history);
        rows.push_back(row), logits.push_back(raw[(size_t)i].data());
    }
    std::vector<toka_sample_result> samples = sample_rows(d, rows, logits);
    gpu_check(d->samp->n_penalized == n, "presence: %d penalized rows of %d", d->samp->n_penalized, n);
    for (int i = 0; i < n; i++)
        gpu_check(samples[(size_t)i].id == cases[i / 2].id, "presence case %d, T %g: id %d, expected %d", i / 2, how[(size_t)i].temperature,
                  samples[(size_t)i].id, cases[i / 2].id);
    samp_device_close(d);
}

/* Filters in large vocabularies: more candidate ids than fit into shared memory, many of them with
 * equal logits. */
static void test_wide() {
    const int V = quick ? 20000 : 151936;
    toka_device *d = samp_device(V, 8, 64);
    std::vector<std::vector<float>> kinds(4, std::vector<float>((size_t)V));
    for (size_t i = 0; i < (size_t)V; i++) {
        float x = gpu_normal(gpu_seed + 5, i);
        kinds[0][i] = 3 * x, kinds[1][i] = floorf(8 * x) / 8, kinds[2][i] = 0.75f, kinds[3][i] = x < 2.5f ? -INFINITY : 12 * x;
    }
    const struct {
        float T, top_p, min_p;
        int top_k, logprobs, n_forbidden, n_history;
    } cases_of_filters[] = {{1, 0.95f, 0, 0, 0, 0},   {0.6f, 0.95f, 0, 20, 5, 0}, {3, 0.5f, 0, 0, 0, 0},       {1, 1, 0, 9000, 0, 0},
                {1, 1, 0, 300, 20, 0},    {2, 0.9f, 0, 12000, 0, 0},  {1, 0.99f, 0.001f, 0, 0, 1}, {0.7f, 0.8f, 0, 50, 0, 2},
                {1, 1e-6f, 0, 0, 1, 0},   {50, 0.999f, 0, 0, 0, 0},   {1, 0.7f, 0, 700, 0, 1},     {0, 1, 0, 0, 20, 2},
                {0.7f, 0.8f, 0, 20, 0, 0, 300}, {1, 1, 0, 0, 0, 1, 3 * FILTER_WORKSPACE_WORDS / 8}};
    std::vector<int32_t> history(3 * FILTER_WORKSPACE_WORDS / 8);
    for (size_t i = 0; i < history.size(); i++) history[i] = (int32_t)(gpu_mix(i) % (uint64_t)(i % 2 ? V : 200));
    const int32_t forbidden[] = {V / 2, 17};
    std::vector<uint32_t> mask((size_t)(V + 31) / 32);
    for (size_t i = 0; i < mask.size(); i++) /* one id of 32 */
        mask[i] = (uint32_t)(gpu_mix(1000 + i) & gpu_mix(2000000 + i) & gpu_mix(3000000 + i) & gpu_mix(4000000 + i) & gpu_mix(5000000 + i));
    static toka_sampling s[14];
    std::vector<toka_test_case> cases;
    std::vector<toka_sample_row> rows;
    std::vector<const float *> logits;
    for (auto &kind : kinds)
        for (int j = 0; j < 14; j++) {
            s[j] = plain(cases_of_filters[j].T), s[j].top_p = cases_of_filters[j].top_p,
                s[j].min_p = cases_of_filters[j].min_p, s[j].top_k = cases_of_filters[j].top_k;
            s[j].logprobs = cases_of_filters[j].logprobs;
            if (cases_of_filters[j].n_history) s[j].repetition_penalty = 1.05f, s[j].presence_penalty = 0.5f, s[j].frequency_penalty = 0.1f;
            toka_test_case c = {row_at(&s[j], (uint32_t)rows.size()), history.data(), kind.data()};
            c.row.n_history = cases_of_filters[j].n_history,
                c.row.n_prompt = cases_of_filters[j].n_history / 2;
            c.row.row = (int)rows.size(), c.row.forbidden = forbidden, c.row.n_forbidden = cases_of_filters[j].n_forbidden;
            if (rows.size() % 3 == 1) c.row.mask = mask.data();
            keep_history(d, &c.row, history.data());
            cases.push_back(c), rows.push_back(c.row), logits.push_back(c.raw);
        }
    std::vector<toka_sample_result> samples = sample_rows(d, rows, logits), again = sample_rows(d, rows, logits);
    for (size_t i = 0; i < rows.size(); i++) {
        char what[60];
        snprintf(what, sizeof what, "wide %d, sampling %d", (int)i / 14, (int)i % 14);
        check_row(what, cases[i], V, samples[i]);
        gpu_check(same_result(samples[i], again[i]), "%s: another time another result", what);
    }
    samp_device_close(d);
}

/* As long as no id is removed, a sample does not depend on what else the row asks for. With few
 * blocks, and with so many that the sampling of a filtered row skips most of them. */
static void test_paths(int V, int n) {
    toka_device *d = samp_device(V, 8, 2 * n);
    toka_sampling s[2] = {plain(0.8f), plain(0.8f)};
    s[1].logprobs = 3, s[1].min_p = 1e-30f;
    std::vector<std::vector<float>> x((size_t)n, std::vector<float>((size_t)V));
    std::vector<toka_sample_row> rows;
    std::vector<const float *> logits;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < 2; j++) {
            for (int k = 0; k < V; k++) x[(size_t)i][(size_t)k] = 2 * gpu_normal(77 + (uint64_t)i, (uint64_t)k);
            rows.push_back(row_at(&s[j], (uint32_t)i)), rows.back().row = 2 * i + j, logits.push_back(x[(size_t)i].data());
        }
    std::vector<toka_sample_result> samples = sample_rows(d, rows, logits);
    for (size_t i = 0; i < rows.size(); i += 2)
        gpu_check(samples[i].id == samples[i + 1].id && close_to(samples[i].sampled_logprob, samples[i + 1].sampled_logprob, 1e-5) &&
                  close_to(samples[i].logprob, samples[i + 1].logprob, 1e-5), "row %zu: %d plain, %d with filters", i,
                      samples[i].id, samples[i + 1].id);
    samp_device_close(d);
}

/* Logits that a filter removes are equivalent to -inf: a plain row of such logits samples the same
 * id, although it visits all blocks. The rows are nearly flat and keep thousands of ids. */
static void test_cuts() {
    const int V = quick ? 40001 : 128256, n = quick ? 32 : 64;
    toka_device *d = samp_device(V, 8, 2 * n);
    toka_sampling s[8] = {plain(1), plain(1), plain(3), plain(0.7f), plain(1), plain(1), plain(1.5f), plain(1)};
    s[0].top_p = 0.9f, s[1].top_p = 0.3f, s[2].top_p = 0.99f, s[3].min_p = 0.02f, s[4].top_k = 9000, s[5].top_p = 0.95f, s[5].min_p = 0.05f;
    s[6].top_p = 0.8f, s[6].top_k = 9500, s[7].top_p = 0.9f, s[7].repetition_penalty = 1.3f;
    std::vector<int32_t> history(900);
    for (size_t i = 0; i < history.size(); i++) history[i] = (int32_t)(gpu_mix(i) % (uint64_t)V);
    std::vector<toka_sampling> plain_sampling(8);
    std::vector<std::vector<float>> x((size_t)(2 * n), std::vector<float>((size_t)V));
    /* the lowest probability of the ids that a row keeps */
    std::vector<double> p((size_t)V), least;
    std::vector<toka_sample_row> rows;
    std::vector<const float *> logits;
    for (int i = 0; i < n; i++) {
        std::vector<float> &raw = x[(size_t)(2 * i)], &cut = x[(size_t)(2 * i + 1)];
        for (int k = 0; k < V; k++) raw[(size_t)k] = (i / 8 % 2 ? 1.0f : 2.0f) * gpu_normal(gpu_seed + 500 + (uint64_t)i, (uint64_t)k);
        if (i / 16 % 2) /* many equal logits */
            for (float &v : raw) v = floorf(16 * v) / 16;
        cut = raw;
        plain_sampling[(size_t)(i % 8)] = plain(s[i % 8].temperature);
        toka_sample_row row = row_at(&s[i % 8], (uint32_t)i), plain_row = row_at(&plain_sampling[(size_t)(i % 8)], (uint32_t)i);
        if (i % 8 == 7) row.n_history = (int)history.size(), row.n_prompt = 450, keep_history(d, &row, history.data());
        /* this call also adjusts the logits in `cut` */
        toka_test_distribution(&row, history.data(), cut.data(), V, p.data());
        least.push_back(1);
        for (int k = 0; k < V; k++)
            if (p[(size_t)k] == 0) cut[(size_t)k] = -INFINITY;
            else least.back() = std::min(least.back(), p[(size_t)k]);
        row.row = 2 * i, plain_row.row = 2 * i + 1;
        rows.push_back(row), rows.push_back(plain_row), logits.push_back(raw.data()), logits.push_back(cut.data());
    }
    std::vector<toka_sample_result> samples = sample_rows(d, rows, logits);
    for (size_t i = 0; i < rows.size(); i += 2) {
        const toka_sample_result &got = samples[i], &want = samples[i + 1];
        const double apart = fabs((double)got.sampled_logprob - want.sampled_logprob);
        compared++;
        if (s[i / 2 % 8].top_p < 1 && got.id == want.id && apart > 3e-5 && apart < 1.1 * least[i / 2]) {
            /* one id more or less, where the ids before it have top_p of the mass to within 1e-7 */
            unsure++;
            continue;
        }
        gpu_check(got.id == want.id && close_to(got.sampled_logprob, want.sampled_logprob, 3e-5),
                  "cut row %zu, sampling %zu: %d (%g) for %d (%g) of what is left", i / 2, i / 2 % 8, got.id, got.sampled_logprob, want.id,
                  want.sampled_logprob);
    }
    samp_device_close(d);
}

/* ---- The distribution ---- */

/* The ids of n samples of one row of logits, at positions 0 .. n-1. Rows without filters share one
 * stored row (stride 0). */
static std::vector<int> draw_ids(toka_device *d, const toka_sampling &how, const float *logits, int n, uint32_t sample) {
    samp_plan *p = d->samp;
    int V = d->shape->V, batch = d->options.max_samples;
    std::vector<int> ids((size_t)n);
    std::vector<samp_result> results((size_t)batch);
    std::vector<toka_sample_row> rows;
    toka_sample_row one = row_at(&how, 0);
    one.sample = sample;
    bool filtered = samp_is_filtered(&one, V);
    if (filtered) batch = std::min(batch, p->chunk_rows);
    batch = std::min(batch, n);
    rows.assign((size_t)batch, one);
    const size_t whole = (size_t)p->ld_logits, stored = filtered ? (size_t)batch : 1;
    gpu_buf<float> master(stored * whole);
    GPU_OK(cudaMemcpy(master.p(), logits, (size_t)V * sizeof(float), cudaMemcpyHostToDevice));
    GPU_OK(cudaDeviceSynchronize()); /* the device's stream does not wait for the stream of this copy */
    for (size_t i = 1, more; i < stored; i += more) { /* doubles the number of copies */
        more = std::min(i, stored - i);
        GPU_OK(cudaMemcpyAsync(master.p() + i * whole, master.p(), more * whole * sizeof(float), cudaMemcpyDeviceToDevice, d->stream));
    }
    for (int at = 0; at < n; at += batch) {
        for (int i = 0; i < batch; i++) rows[(size_t)i].position = (uint32_t)(at + i), rows[(size_t)i].row = i;
        toka_step s = step_of(rows);
        upload_begin(d, &d->upload);
        samp_plan_step(d, &s);
        upload_send(d, &d->upload);
        samp_filter *filters = NULL;
        if (filtered) gpu_check(samp_upload_filters(d, &s, 0, batch, &filters) == batch, "lists do not fit");
        GPU_OK(cudaMemcpyAsync(p->logits, master.p(), master.n * sizeof(float), cudaMemcpyDeviceToDevice, d->stream));
        p->ld_logits = filtered ? (int)whole : 0;
        samp_from_logits(d, 0, batch, filtered ? 0 : batch, filters);
        p->ld_logits = (int)whole;
        GPU_OK(cudaMemcpyAsync(results.data(), p->results, (size_t)batch * sizeof(samp_result), cudaMemcpyDefault, d->stream));
        GPU_OK(cudaStreamSynchronize(d->stream));
        for (int i = 0; i < batch; i++) {
            const int row = p->host_results[d->last_begun].order[i];
            if (at + row < n) ids[(size_t)(at + row)] = results[(size_t)i].id;
        }
    }
    return ids;
}
/* How often each id is among them. */
static std::vector<int> draws(toka_device *d, const toka_sampling &how, const std::vector<float> &logits, int n, uint32_t sample) {
    std::vector<int> seen((size_t)d->shape->V);
    for (int id : draw_ids(d, how, logits.data(), n, sample)) seen[(size_t)id]++;
    return seen;
}

/* CPU and GPU draw the same ids from equal logits, unless the draw is nearly a tie: chapter 22 of
 * toka.c says how near. A border of top-p that is a tie counts for each draw of its row. */
static void test_same(int64_t n) {
    static const int sizes[] = {24, 300, 700, 1500};
    const int batch = (int)std::min((int64_t)8192, std::max((int64_t)1, n / 64));
    draw_counts counts = {};
    uint64_t seed = gpu_seed * 1000000;
    const auto compare = [&](int V, int per_row, int64_t total) {
        toka_device *d = samp_device(V, 8, per_row);
        for (int64_t done = 0; done < total; done += per_row, seed++) {
            const toka_test_case c = toka_test_draw_case(seed, V);
            const std::vector<int> ids = draw_ids(d, *c.row.sampling, c.raw, per_row, c.row.sample);
            const int64_t before = counts.wrong;
            toka_test_draws(&c, V, ids.data(), per_row, &counts);
            const toka_sampling &s = *c.row.sampling;
            gpu_check(counts.wrong == before, "draws of row %llu: %lld of %d are not the CPU's (V %d, T %g, top_k %d, top_p %g, min_p %g)",
                      (unsigned long long)seed, (long long)(counts.wrong - before), per_row, V, s.temperature, s.top_k, s.top_p, s.min_p);
            if (gpu_failed > 20) break;
        }
        samp_device_close(d);
    };
    for (int V : sizes) compare(V, batch, n / 4);
    if (!quick && n >= 1000000) compare(128256, 256, 16 * 256);
    printf("draws next to the CPU's: %lld, nearly ties %lld, different %lld, of them not nearly ties %lld; largest margins of different ids: "
           "of keys 2^%.1f, of places 2^%.1f\n", (long long)counts.n, (long long)counts.close, (long long)counts.different,
           (long long)counts.wrong, log2(counts.key), log2(counts.place));
    gpu_check(counts.different * 100000 < counts.n + 100000, "draws: %lld of %lld are not the CPU's", (long long)counts.different, (long long)counts.n);
}

static void check_distribution(toka_device *d, const char *what, const toka_sampling &how, const std::vector<float> &logits, int n) {
    int V = d->shape->V;
    std::vector<float> x = logits;
    std::vector<double> p((size_t)V);
    toka_sample_row row = row_at(&how, 0);
    toka_test_distribution(&row, NULL, x.data(), V, p.data());
    std::vector<int> seen = draws(d, how, logits, n, 0);
    double value = toka_test_g(seen.data(), p.data(), V, n);
    gpu_check(value > 1e-6, "%s: G-test of %d draws, p = %g", what, n, value);
    /* checks that the test would notice: every other id is a little more likely, the rest a little
     * less */
    for (int i = 0, turn = 0; i < V; i++)
        if (p[(size_t)i] > 0) p[(size_t)i] *= turn++ % 2 ? 1.03 : 0.97;
    double total = 0;
    for (double q : p) total += q;
    for (double &q : p) q /= total;
    value = toka_test_g(seen.data(), p.data(), V, n);
    gpu_check(value < 1e-6, "%s: a distribution that is off by 3 %% passes, p = %g", what, value);
}

static void test_distributions() {
    const int V = 300, n = quick ? 20000 : 1000000;
    if (quick) return;
    toka_device *d = samp_device(V, 8, 8192);
    std::vector<float> x((size_t)V);
    for (int i = 0; i < V; i++) x[(size_t)i] = 1.5f * gpu_normal(31, (uint64_t)i) + (i == 17 || i == 20 ? 3.0f : 0);
    toka_sampling s = plain(1);
    check_distribution(d, "plain", s, x, n);
    s.temperature = 0.6f, check_distribution(d, "temperature 0.6", s, x, n);
    s.temperature = 2.5f, check_distribution(d, "temperature 2.5", s, x, n);
    s.temperature = 1, s.top_k = 6, check_distribution(d, "top-k", s, x, n / 4);
    s.top_k = 0, s.top_p = 0.8f, check_distribution(d, "top-p", s, x, n / 4);
    s.top_p = 1, s.min_p = 0.1f, check_distribution(d, "min-p", s, x, n / 4);
    s = plain(0.7f), s.top_k = 40, s.top_p = 0.92f, s.min_p = 0.02f, s.seed = 0xDEADBEEF12345678u;
    check_distribution(d, "all together", s, x, n / 4);

    /* p-values of many seeds must be uniform (Kolmogorov-Smirnov test) */
    std::vector<float> low = x;
    std::vector<double> values, p((size_t)V);
    toka_sampling one = plain(0.9f);
    toka_sample_row row = row_at(&one, 0);
    toka_test_distribution(&row, NULL, low.data(), V, p.data());
    for (int i = 0; i < 40; i++) {
        one.seed = 1000 + (uint64_t)i * 0x100000001u;
        std::vector<int> seen = draws(d, one, x, 65536, (uint32_t)i);
        values.push_back(toka_test_g(seen.data(), p.data(), V, 65536));
    }
    std::sort(values.begin(), values.end());
    double far = 0;
    for (size_t i = 0; i < values.size(); i++)
        far = std::max(far, std::max(fabs(values[i] - (double)i / 40), fabs(values[i] - (double)(i + 1) / 40)));
    gpu_check(far < 2.2 / sqrt(40.0), "p-values over 40 seeds: distance from uniform %g (chance of more: 1e-4 at 0.348)", far);
    samp_device_close(d);
}

/* Pairs of samples at neighbouring positions, sample numbers and seeds must be independent. */
static void test_pairs() {
    const int V = 8, n = quick ? 4096 : 500000;
    toka_device *d = samp_device(V, 8, 8192);
    std::vector<float> x = {0.1f, 0.9f, -0.4f, 0, 0.7f, 0.2f, -1, 0.5f}, copy = x;
    std::vector<double> one((size_t)V), p((size_t)(V * V));
    toka_sampling s = plain(1);
    toka_sample_row row = row_at(&s, 0);
    toka_test_distribution(&row, NULL, copy.data(), V, one.data());
    for (int i = 0; i < V * V; i++) p[(size_t)i] = one[(size_t)(i / V)] * one[(size_t)(i % V)];
    samp_plan *plan = d->samp;
    GPU_OK(cudaMemcpyAsync(plan->logits, x.data(), (size_t)V * sizeof(float), cudaMemcpyHostToDevice, d->stream));
    int whole = plan->ld_logits;
    for (int which = 0; which < 4; which++) {
        std::vector<int> seen((size_t)(V * V));
        for (int at = 0; at < n; at += 4096) {
            std::vector<toka_sampling> how(8192, s);
            std::vector<toka_sample_row> rows;
            std::vector<samp_result> results(8192);
            for (int i = 0; i < 8192; i++) {
                uint32_t number = (uint32_t)(2 * at + i);
                rows.push_back(row_at(&how[(size_t)i], which == 0 ? number : 3));
                rows.back().row = i, rows.back().sample = which == 1 ? number : 4;
                how[(size_t)i].seed = which == 2 ? number : which == 3 ? (uint64_t)number << 32 | 11 : 11;
            }
            toka_step st = step_of(rows);
            upload_begin(d, &d->upload);
            samp_plan_step(d, &st);
            upload_send(d, &d->upload);
            plan->ld_logits = 0;
            for (int i = 0; i < 8192; i += plan->partial_rows) samp_from_logits(d, i, plan->partial_rows, plan->partial_rows, NULL);
            plan->ld_logits = whole;
            GPU_OK(cudaMemcpyAsync(results.data(), plan->results, 8192 * sizeof(samp_result), cudaMemcpyDeviceToHost, d->stream));
            GPU_OK(cudaStreamSynchronize(d->stream));
            for (int i = 0; i < 8192; i += 2) seen[(size_t)(results[(size_t)i].id * V + results[(size_t)i + 1].id)]++;
        }
        double total = 0;
        for (int c : seen) total += c;
        double value = toka_test_g(seen.data(), p.data(), V * V, total);
        gpu_check(value > 1e-6, "pairs by %s: p = %g", which == 0 ? "position" : which == 1 ? "sample" : which == 2 ? "the seed" : "the seed's upper half", value);
    }
    samp_device_close(d);
}

/* A whole vocabulary: flat logits, and rare ids next to one that has nearly all the mass. The rare
 * ids are in its group, in its block and elsewhere. */
static void test_tails() {
    const int V = 128256, n = 1 << 20, hot = 70013;
    if (quick) return;
    toka_device *d = samp_device(V, 8, 4096);
    std::vector<float> x((size_t)V, 1.25f);
    toka_sampling s = plain(0.7f);
    std::vector<int> seen = draws(d, s, x, n, 7);
    std::vector<int> by_block(501), by_place(256);
    std::vector<double> p_block(501, 256.0 / V), p_place(256, 501.0 / V);
    for (int i = 0; i < V; i++) by_block[(size_t)(i / 256)] += seen[(size_t)i], by_place[(size_t)(i % 256)] += seen[(size_t)i];
    double a = toka_test_g(by_block.data(), p_block.data(), 501, n), b = toka_test_g(by_place.data(), p_place.data(), 256, n), most = 0;
    for (int c : seen) most = std::max(most, (double)c);
    gpu_check(a > 1e-6 && b > 1e-6, "flat logits: blocks p = %g, places p = %g", a, b);
    gpu_check(most < 40, "flat logits: an id drawn %g times, expected 8.2 on average", most);

    /* one id has about 1 - 1e-2 of the mass; the other ids of its group are at -9.6 nats each, the
     * rest far lower */
    s = plain(1);
    for (int i = 0; i < V; i++) {
        bool own = i / 256 == hot / 256, group = own && i / 2 % 4 == hot / 2 % 4;
        x[(size_t)i] = i == hot ? 20 : group ? 20 - 9.6f : own ? 20 - 10.4f : 20 - 20.5f;
    }
    std::vector<float> copy = x;
    std::vector<double> p((size_t)V);
    toka_sample_row row = row_at(&s, 0);
    toka_test_distribution(&row, NULL, copy.data(), V, p.data());
    seen = draws(d, s, x, n, 8);
    std::vector<int> cell(400);
    std::vector<double> p_cell(400);
    /* each id of the block is a cell of its own; other ids are counted by 1,000 */
    for (int i = 0; i < V; i++) {
        size_t c = i / 256 == hot / 256 ? (size_t)(i % 256) : 256 + (size_t)(i / 1000);
        cell[c] += seen[(size_t)i], p_cell[c] += p[(size_t)i];
    }
    double value = toka_test_g(cell.data(), p_cell.data(), 400, n);
    gpu_check(value > 1e-6, "rare ids beside a certain one: p = %g", value);
    samp_device_close(d);
}

/* ---- The whole op against float64 ---- */

static double dot64(const std::vector<float> &w, size_t row, const std::vector<float> &x, size_t at, int E) {
    double sum = 0;
    for (int e = 0; e < E; e++) sum += (double)w[row * (size_t)E + (size_t)e] * x[at * (size_t)E + (size_t)e];
    return sum;
}
static std::vector<float> floats(const std::vector<bf16> &v) {
    std::vector<float> f;
    for (bf16 b : v) f.push_back(__bfloat162float(b));
    return f;
}

/* The sampled ids must be the last tokens of their seqs, and the next step's embedding must find
 * them there. table: [V][E]. */
static void check_last(toka_device *d, const std::vector<toka_sample_row> &rows,
    const std::vector<toka_sample_result> &samples, gpu_buf<int> &last,
                       gpu_buf<bf16> &table) {
    std::vector<int> got = last.host(), want(rows.size(), -1), ids;
    size_t E = (size_t)d->E, wrong = 0;
    for (size_t i = 0; i < rows.size(); i++)
        if (rows[i].seq >= 0) want[(size_t)rows[i].seq] = samples[i].id, ids.push_back(i % 2 ? -1 - rows[i].seq : (int)i);
    gpu_check(got == want && last.guards_hold(), "last tokens of %zu slots", want.size());
    gpu_buf<int> dev_ids(ids.size());
    gpu_buf<bf16> x(ids.size() * E);
    dev_ids.set(ids);
    embed_kernel<<<(unsigned)ids.size(), 128, 0, d->stream>>>(dev_ids.p(), last.p(), embed_table{table.p(), 0, (int)(table.n / E)}, x.p(), (int)E, fused_norm{}, kept_ids{});
    GPU_OK(cudaStreamSynchronize(d->stream));
    std::vector<bf16> hx = x.host(), ht = table.host();
    for (size_t i = 0; i < ids.size(); i++) wrong += memcmp(&hx[i * E], &ht[(size_t)(ids[i] < 0 ? want[(size_t)(-1 - ids[i])] : ids[i]) * E], 2 * E) != 0;
    gpu_check(!wrong && x.guards_hold(), "embedding: %zu of %zu rows are wrong", wrong, ids.size());
}

/* Runs the whole op on rows of x. */
static void run_op(toka_device *d, const toka_step *s, const bf16 *x, toka_sample_result *samples) {
    upload_begin(d, &d->upload);
    samp_plan_step(d, s);
    samp_plan_penalized(d, s);
    upload_send(d, &d->upload);
    samp_launch(d, s, x);
    samp_download(d, s, samples);
    GPU_OK(cudaStreamSynchronize(d->stream));
    samp_collect(d, s, &d->samp->host_results[d->last_begun]);
}

static void test_op(int V, int E, int T, int n_out, bool all_logits, float cap = 0) {
    toka_device *d = samp_device(V, E, std::max(T, n_out));
    shape.logit_cap = cap;
    size_t Ep = (size_t)d->E, Vp = (size_t)d->V;
    gpu_buf<bf16> x((size_t)T * Ep), w(Vp * Ep);
    gpu_buf<float> norm(Ep);
    gpu_random(x, gpu_seed + 1, 1), gpu_random(w, gpu_seed + 2, 3 / sqrtf((float)E)), gpu_random(norm, gpu_seed + 3, 1);
    for (size_t t = 0; t < (size_t)T && Ep > (size_t)E; t++) GPU_OK(cudaMemset(x.p() + t * Ep + E, 0, (Ep - E) * sizeof(bf16)));
    GPU_OK(cudaDeviceSynchronize());
    std::vector<float> hx = floats(x.host()), hw = floats(w.host()), hn = norm.host();
    d->norm = norm.p(), d->lm_head = weight{w.p(), NULL, (int)Vp, (int)Ep};
    std::vector<toka_sampling> how = {plain(0), plain(0.7f), plain(1), plain(1), plain(0)};
    how[3].top_p = 0.9f, how[4].logprobs = 4;
    std::vector<toka_sample_row> rows;
    for (int i = 0; i < n_out; i++) {
        rows.push_back(row_at(&how[(size_t)i % 5], (uint32_t)i));
        rows.back().row = (i * 7 + 3) % T, rows.back().seq = i % 4 == 3 ? -1 : n_out - 1 - i;
        if (i % 6 == 5) rows.back().scored_id = i % V, rows.back().sampling = i % 12 == 5 ? NULL : rows.back().sampling;
    }
    gpu_buf<int> last((size_t)n_out);
    d->last_tokens = last.p(), d->options.n_seqs = n_out;
    toka_step s = step_of(rows);
    std::vector<float> logits((size_t)n_out * (size_t)V, NAN);
    s.T = T;
    if (all_logits) s.logits = logits.data();
    no_logprob_rows some(rows, [](size_t i) { return i % 5 < 4 && i % 7 < 3; }), all(rows, [](size_t i) { return i % 5 < 4; });
    std::vector<toka_sample_result> samples(rows.size()), again(rows.size()), results_some(rows.size()), results_all(rows.size());
    for (std::vector<toka_sample_result> *to : {&samples, &again, &results_some, &results_all}) {
        s.samples = to == &results_some ? some.rows.data() : to == &results_all ? all.rows.data() : rows.data();
        GPU_OK(cudaMemset(d->samp->logits, 0xFF, (size_t)d->samp->chunk_rows * (size_t)d->samp->ld_logits * sizeof(float)));
        run_op(d, &s, x.p(), to->data());
        s.logits = NULL;
    }
    gpu_check(!d->error.code, "%s", d->error.msg);
    check_last(d, rows, samples, last, w);
    some.check("op", results_some, samples), all.check("op", results_all, samples);
    for (int i = 0; i < n_out; i++) {
        std::vector<float> xn(Ep), z((size_t)V);
        const float *from = &hx[(size_t)rows[(size_t)i].row * Ep];
        double square = 0, worst = 0, lse = 0, best = -INFINITY, second = -INFINITY;
        for (int e = 0; e < E; e++) square += (double)from[e] * from[e];
        for (size_t e = 0; e < Ep; e++)
            xn[e] = __bfloat162float(__float2bfloat16((float)(from[e] / sqrt(square / E + d->shape->eps) * hn[e])));
        for (int v = 0; v < V; v++) {
            double sum = dot64(hw, (size_t)v, xn, 0, (int)Ep);
            if (cap != 0) sum = cap * tanh(sum / cap);
            z[(size_t)v] = (float)sum;
            if (all_logits) worst = gpu_worse(worst, fabs(sum - logits[(size_t)i * (size_t)V + (size_t)v]));
            if (sum > best) second = best, best = sum;
            else if (sum > second) second = sum;
        }
        for (float v : z) lse += exp(v - best);
        lse = best + log(lse);
        const toka_sample_result &p = samples[(size_t)i];
        if (all_logits) gpu_check(worst < 2e-2, "V %d E %d row %d: a logit off by %g", V, E, i, worst);
        gpu_check(p.id >= 0 && p.id < V && fabs(p.logprob - (z[(size_t)p.id] - lse)) < 2e-2, "V %d E %d row %d: id %d logprob %g for %g", V,
                  E, i, p.id, p.logprob, p.id >= 0 && p.id < V ? z[(size_t)p.id] - lse : NAN);
        if (rows[(size_t)i].scored_id >= 0) gpu_check(p.id == rows[(size_t)i].scored_id, "row %d: forced id %d", i, p.id);
        else if (rows[(size_t)i].sampling->temperature == 0 && best - second > 2e-2)
            gpu_check(z[(size_t)p.id] == (float)best, "V %d E %d row %d: greedy id %d", V, E, i, p.id);
        gpu_check(same_result(p, again[(size_t)i]), "V %d E %d row %d: another time %d for %d", V, E, i, again[(size_t)i].id, p.id);
    }
    /* the same logits through the stored path, whichever kernel computed the block results
     * before */
    if (all_logits) {
        std::vector<const float *> stored;
        for (int i = 0; i < n_out; i++) stored.push_back(&logits[(size_t)i * (size_t)V]), rows[(size_t)i].row = i;
        again = sample_rows(d, rows, stored);
        for (size_t i = 0; i < rows.size(); i++)
            gpu_check(same_result(samples[i], again[i]), "V %d E %d row %zu: %d from stored logits for %d", V, E, i,
                again[i].id, samples[i].id);
    }
    samp_device_close(d);
}

/* More filtered rows than fit into one chunk of stored logits, and than fit into one upload of id
 * lists. Each row must still have its own filter. */
static void test_parts() {
    /* The LM head of a part may have another tile than that of all rows: log-probabilities are equal up to rounding. */
    const int V = 1000, E = 64, n = 150;
    toka_device *d = samp_device(V, E, n);
    gpu_buf<bf16> x((size_t)n * (size_t)d->E), w((size_t)d->V * (size_t)d->E);
    gpu_buf<float> norm((size_t)d->E);
    gpu_random(x, gpu_seed + 1, 1), gpu_random(w, gpu_seed + 2, 3 / sqrtf((float)E)), gpu_random(norm, gpu_seed + 3, 1);
    GPU_OK(cudaDeviceSynchronize());
    d->norm = norm.p(), d->lm_head = weight{w.p(), NULL, d->V, d->E};
    gpu_buf<int> last((size_t)n);
    d->last_tokens = last.p(), d->options.n_seqs = n;
    std::vector<int> ids((size_t)n);
    std::vector<std::vector<uint32_t>> masks((size_t)n, std::vector<uint32_t>((size_t)(V + 31) / 32));
    std::vector<toka_sampling> how((size_t)n, plain(1));
    std::vector<toka_sample_row> rows;
    for (int i = 0; i < n; i++) {
        ids[(size_t)i] = i * 37 % V;
        if (i % 3 == 1) how[(size_t)i].allowed_ids = &ids[(size_t)i], how[(size_t)i].n_allowed = 1;
        masks[(size_t)i][(size_t)ids[(size_t)i] / 32] = 1u << ids[(size_t)i] % 32;
        rows.push_back(row_at(&how[(size_t)i], (uint32_t)i)), rows.back().row = i, rows.back().seq = i;
        if (i % 3 == 2) rows.back().mask = masks[(size_t)i].data();
        if (i % 9 == 3 && i > 3) ids[(size_t)i] = ids[(size_t)i - 1], rows.back().mask = rows[rows.size() - 2].mask; /* shared */
        if (i % 9 == 6) rows.back().mask = masks[(size_t)i].data(); /* another one than the row before */
        if (i % 9 == 8) ids[(size_t)i] = ids[(size_t)i - 3], rows.back().mask = rows[rows.size() - 4].mask; /* shared, not with the row before */
    }
    samp_plan *p = d->samp;
    const int chunk = p->chunk_rows;
    const size_t cap = p->list_upload.cap;
    toka_step s = step_of(rows);
    std::vector<toka_sample_result> samples(rows.size()), whole;
    for (int round = 0; round < 3; round++) {
        const size_t list_bytes = std::max(samp_list_bytes(&rows[1], NULL), samp_list_bytes(&rows[2], NULL) + samp_mask_bytes(V) + 16);
        p->chunk_rows = round ? 40 : chunk, p->list_upload.cap = round == 2 ? n * sizeof(samp_filter) + 31 * list_bytes : cap;
        run_op(d, &s, x.p(), samples.data());
        if (!round) whole = samples;
        for (size_t i = 0; i < rows.size(); i++)
            gpu_check(samples[i].id == whole[i].id && !(fabsf(samples[i].logprob - whole[i].logprob) >= 1e-4f) && ((i % 3 == 0 && !rows[i].mask) || samples[i].id == ids[i]),
                "parts %d, row %zu: %d, at once %d, allowed %d", round, i,
                      samples[i].id, whole[i].id, i % 3 || rows[i].mask ? ids[i] : -1);
    }
    gpu_check(!d->error.code, "%s", d->error.msg);
    p->chunk_rows = chunk, p->list_upload.cap = cap;
    samp_device_close(d);
}

/* A vocabulary with more tiles than the GPU has SMs: later blocks know the best key of earlier ones
 * and skip ids that cannot win. With 17 rows, the last row's warp has no other row that might need
 * the block. Compared with the stored path, which skips nothing. */
static void test_waves(int E) {
    const int V = 70000, n = SAMP_STORED_MAX + 1;
    toka_device *d = samp_device(V, E, n);
    gpu_buf<bf16> x((size_t)n * E), w((size_t)V * E);
    gpu_buf<float> norm(E);
    gpu_buf<int> last(1);
    gpu_random(x, gpu_seed + 1, 1), gpu_random(w, gpu_seed + 2, 3 / sqrtf((float)E)), gpu_random(norm, gpu_seed + 3, 1);
    GPU_OK(cudaDeviceSynchronize());
    d->norm = norm.p(), d->lm_head = weight{w.p(), NULL, V, E}, d->last_tokens = last.p(), d->options.n_seqs = 1;
    std::vector<float> logits((size_t)n * V);
    std::vector<const float *> stored;
    for (int i = 0; i < n; i++) stored.push_back(&logits[(size_t)i * V]);
    toka_sampling how = plain(1);
    for (int k = 0; k <= 32; k++) { /* k = 0 computes the logits */
        std::vector<toka_sample_row> rows;
        for (int i = 0; i < n; i++) rows.push_back(row_at(&how, (uint32_t)(k * n + i))), rows.back().row = i;
        toka_step s = step_of(rows);
        std::vector<toka_sample_result> samples((size_t)n), again;
        s.logits = k ? NULL : logits.data();
        run_op(d, &s, x.p(), samples.data());
        gpu_check(!d->error.code, "%s", d->error.msg);
        again = sample_rows(d, rows, stored);
        for (int i = 0; i < n; i++)
            gpu_check(same_result(samples[(size_t)i], again[(size_t)i]),
                "V %d E %d draw %d row %d: %d from stored logits for %d", V, E, k, i,
                      again[(size_t)i].id, samples[(size_t)i].id);
    }
    samp_device_close(d);
}

/* Penalized rows among plain and filtered ones: the fused LM head samples the same ids as the path
 * over stored logits, which test_random compares with the CPU. */
static void test_penalized(int V, int E, int n) {
    toka_device *d = samp_device(V, E, n);
    gpu_buf<bf16> x((size_t)n * E), w((size_t)round_up_8(V) * E);
    gpu_buf<float> norm(E);
    gpu_buf<int> last(1);
    gpu_random(x, gpu_seed + 1, 1), gpu_random(w, gpu_seed + 2, 3 / sqrtf((float)E)), gpu_random(norm, gpu_seed + 3, 1);
    GPU_OK(cudaDeviceSynchronize());
    d->norm = norm.p(), d->lm_head = weight{w.p(), NULL, round_up_8(V), E}, d->last_tokens = last.p(), d->options.n_seqs = 1;
    std::vector<toka_sampling> how = {plain(1), plain(0.7f), plain(1), plain(1.3f), plain(0), plain(0.8f)};
    how[1].repetition_penalty = 1.2f, how[2].presence_penalty = 0.7f, how[3].repetition_penalty = 0.8f, how[3].presence_penalty = -0.5f;
    how[4].repetition_penalty = 1.5f, how[5].repetition_penalty = 1.1f, how[5].top_p = 0.9f;
    for (toka_sampling &s : how) s.logprobs = TOKA_NO_LOGPROBS;
    std::vector<int32_t> history(600);
    std::vector<toka_sample_row> rows;
    for (int i = 0; i < n; i++) {
        toka_sample_row row = row_at(&how[(size_t)i % how.size()], (uint32_t)i);
        for (size_t k = 0; k < history.size(); k++) history[k] = (int32_t)(gpu_mix(gpu_seed * 1000 + (uint64_t)i * 600 + k) % (uint64_t)(k % 3 ? V : 50));
        row.row = i, row.n_history = 1 + i * 7 % 600, row.n_prompt = row.n_history / 2;
        keep_history(d, &row, history.data());
        rows.push_back(row);
    }
    std::vector<float> logits((size_t)n * V);
    std::vector<const float *> stored;
    for (int i = 0; i < n; i++) stored.push_back(&logits[(size_t)i * V]);
    toka_step s = step_of(rows);
    std::vector<toka_sample_result> samples((size_t)n), again;
    for (int fused = 0; fused < 2; fused++) { /* first without, to have the logits */
        s.logits = fused ? NULL : logits.data();
        run_op(d, &s, x.p(), samples.data());
        gpu_check(!d->error.code && d->samp->n_penalized * 6 >= n * 4 - 24, "%d penalized rows of %d; %s", d->samp->n_penalized, n, d->error.msg);
        if (!fused) again = samples;
        for (int i = 0; i < n; i++)
            gpu_check(same_result(samples[(size_t)i], again[(size_t)i]), "penalized, V %d E %d row %d: %d (%g), from stored logits %d (%g)", V, E,
                      i, samples[(size_t)i].id, samples[(size_t)i].sampled_logprob, again[(size_t)i].id, again[(size_t)i].sampled_logprob);
    }
    again = sample_rows(d, rows, stored);
    int n_other = 0;
    std::vector<toka_sample_row> unpenalized = rows;
    toka_sampling plain_how[6];
    for (int i = 0; i < n; i++) {
        gpu_check(same_result(samples[(size_t)i], again[(size_t)i]), "penalized, V %d E %d row %d: %d from stored rows, %d", V, E, i,
                  again[(size_t)i].id, samples[(size_t)i].id);
        plain_how[i % 6] = how[(size_t)i % 6], plain_how[i % 6].repetition_penalty = 1, plain_how[i % 6].presence_penalty = 0;
        unpenalized[(size_t)i].sampling = &plain_how[i % 6];
    }
    again = sample_rows(d, unpenalized, stored);
    for (int i = 0; i < n; i++) n_other += again[(size_t)i].id != samples[(size_t)i].id;
    gpu_check(V > 5000 || n < 100 || n_other > 0, "penalties change %d of %d ids", n_other, n);
    samp_device_close(d);
}

/* ---- Timings ---- */

static void bench_samp(int V, int E, int n_out, float T, int logprobs, float top_p, int top_k) {
    toka_device *d = samp_device(V, E, n_out);
    gpu_buf<bf16> x((size_t)n_out * (size_t)E), w((size_t)V * (size_t)E);
    gpu_buf<float> norm((size_t)E);
    gpu_random(x, 1, 1), gpu_random(w, 2, 3 / sqrtf((float)E)), gpu_random(norm, 3, 1);
    d->norm = norm.p(), d->lm_head = weight{w.p(), NULL, V, E};
    toka_sampling how = plain(T);
    how.top_p = top_p, how.top_k = top_k, how.logprobs = logprobs;
    std::vector<toka_sample_row> rows;
    for (int i = 0; i < n_out; i++) rows.push_back(row_at(&how, (uint32_t)i)), rows.back().row = i;
    toka_step s = step_of(rows);
    std::vector<toka_sample_result> samples((size_t)n_out);
    double plan = 1e9, us;
    for (int i = 0; i < 5; i++) {
        struct timespec a, b;
        upload_begin(d, &d->upload);
        clock_gettime(CLOCK_MONOTONIC, &a);
        samp_plan_step(d, &s);
        clock_gettime(CLOCK_MONOTONIC, &b);
        plan = std::min(plan, (double)(b.tv_sec - a.tv_sec) * 1e6 + (double)(b.tv_nsec - a.tv_nsec) * 1e-3);
        upload_send(d, &d->upload);
    }
    if (top_p == 1 && !top_k) us = gpu_time_us(d->stream, 8, 5, [&](int) { samp_launch(d, &s, x.p()); });
    else { /* lists are uploaded chunk by chunk, which a graph cannot do */
        cudaEvent_t from, to;
        float ms;
        GPU_OK(cudaEventCreate(&from));
        GPU_OK(cudaEventCreate(&to));
        us = 1e9;
        for (int i = 0; i < 6; i++) {
            GPU_OK(cudaEventRecord(from, d->stream));
            samp_launch(d, &s, x.p());
            GPU_OK(cudaEventRecord(to, d->stream));
            GPU_OK(cudaEventSynchronize(to));
            GPU_OK(cudaEventElapsedTime(&ms, from, to));
            us = std::min(us, ms * 1000.0);
        }
    }
    printf("V %6d  E %4d  rows %4d  T %.1f  log-probabilities %-3s  top_p %.2f  top_k %2d  %9.1f us  (planned in %.1f us)%s\n", V, E, n_out, T,
           logprobs < 0 ? "no" : "yes", top_p, top_k, us, plan, d->error.code ? d->error.msg : "");
    samp_device_close(d);
}

/* Times the last kernel alone, on stored logits with their block results. The logits are Gaussian
 * with this standard deviation. At 4.4 their entropy is 1 to 3 nats, as with real models; at 3
 * thousands of ids are left, at 1 nearly all. The median over different rows. */
static void bench_filters(int V, int n, float deviation) {
    toka_device *d = samp_device(V, 8, n);
    samp_plan *p = d->samp;
    const struct {
        float T, top_p, min_p;
        int top_k, logprobs, n_history;
    } cases_of_filters[] = {{1, 1, 0, 0, 0}, {1, 0.95f, 0, 0, 0}, {0.6f, 0.9f, 0, 0, 0}, {0.6f, 0.95f, 0, 20, 0}, {0.7f,
        0.8f, 0, 20, TOKA_NO_LOGPROBS},
                {1, 1, 0.05f, 0, 0}, {1, 1, 0, 0, 5}, {0.7f, 0.8f, 0, 20, 0, 1000}};
    std::vector<int32_t> history(1000);
    for (size_t i = 0; i < history.size(); i++) history[i] = (int32_t)(gpu_mix(i) % (uint64_t)V);
    std::vector<float> x((size_t)p->ld_logits, -INFINITY);
    const int different = std::min(n, 16);
    for (int row = 0; row < n; row++) {
        for (size_t i = 0; i < (size_t)V && row < different; i++) x[i] = deviation * gpu_normal((uint64_t)row + 1, i);
        float *to = p->logits + (size_t)row * p->ld_logits;
        if (row < different) GPU_OK(cudaMemcpy(to, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice));
        else GPU_OK(cudaMemcpy(to, p->logits + (size_t)(row % different) * p->ld_logits, x.size() * sizeof(float), cudaMemcpyDeviceToDevice));
    }
    printf("V %6d  deviation %.1f  rows %4d ", V, deviation, n);
    for (auto &ask : cases_of_filters) {
        toka_sampling how = plain(ask.T);
        how.top_p = ask.top_p, how.min_p = ask.min_p, how.top_k = ask.top_k, how.logprobs = ask.logprobs;
        std::vector<toka_sample_row> rows;
        if (ask.n_history) how.repetition_penalty = 1.05f;
        for (int i = 0; i < n; i++) rows.push_back(row_at(&how, (uint32_t)i)), rows.back().row = i;
        for (auto &row : rows) {
            row.n_history = ask.n_history, n_kept_pages = 0;
            keep_history(d, &row, history.data());
        }
        toka_step s = step_of(rows);
        samp_filter *filters = NULL;
        upload_begin(d, &d->upload);
        samp_plan_step(d, &s);
        upload_send(d, &d->upload);
        const int n_plain = p->n_plain;
        if (!n_plain && samp_upload_filters(d, &s, 0, n, &filters) < n) gpu_check(false, "filters");
        samp_from_logits(d, 0, n, n_plain, filters);
        double us = gpu_time_us(d->stream, 8, 5, [&](int) { samp_launch_results(d, 0, n, n_plain, filters, p->logits); });
        printf(" %7.1f", us);
    }
    printf("  us: plain; top_p .95; T .6, top_p .9; T .6, top_k 20, top_p .95; T .7, top_k 20, top_p .8; min_p .05; 5 log-probabilities; the fifth, and a penalty over 1,000 ids\n");
    samp_device_close(d);
}

/* ---- Next to cuBLAS ---- */

typedef struct peer { /* the part of cuBLAS's interface that is needed */
    void *handle;
    int (*gemm)(void *handle, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *a, int a_type, int lda, const void *b,
                int b_type, int ldb, const void *beta, void *c, int c_type, int ldc, int compute, int algo);
} peer;

static bool peer_open(peer *p, cudaStream_t stream) {
    void *lib = dlopen("libcublas.so.13", RTLD_NOW), *workspace;
    /* cuBLAS cannot allocate memory while a graph is captured */
    const size_t bytes = (size_t)64 << 20;
    if (!lib) lib = dlopen("libcublas.so.12", RTLD_NOW);
    if (!lib) return false;
    auto create = (int (*)(void **))dlsym(lib, "cublasCreate_v2");
    auto set_stream = (int (*)(void *, cudaStream_t))dlsym(lib, "cublasSetStream_v2");
    auto set_workspace = (int (*)(void *, void *, size_t))dlsym(lib, "cublasSetWorkspace_v2");
    *(void **)&p->gemm = dlsym(lib, "cublasGemmEx");
    if (!create || !set_stream || !set_workspace || !p->gemm || cudaMalloc(&workspace, bytes)) return false;
    return !create(&p->handle) && !set_stream(p->handle, stream) && !set_workspace(p->handle, workspace, bytes);
}

/* Times each kind five times, in rotating order, each time after a pause, so that the run before
 * neither warms up the GPU nor uses up its power budget. */
static void bench_peer(const peer *p, int V, int E, int M) {
    toka_device *d = samp_device(V, E, M);
    gpu_buf<bf16> x((size_t)M * (size_t)E), w((size_t)V * (size_t)E), y((size_t)M * (size_t)V);
    gpu_buf<float> norm((size_t)E);
    gpu_random(x, 1, 1), gpu_random(w, 2, 3 / sqrtf((float)E)), gpu_random(norm, 3, 1);
    d->norm = norm.p(), d->lm_head = weight{w.p(), NULL, V, E};
    toka_sampling how[3] = {plain(1), plain(0.6f), plain(0.6f)};
    how[2].logprobs = TOKA_NO_LOGPROBS;
    std::vector<double> us[4]; /* the last one is cuBLAS */
    const int calls = M >= 2048 ? 2 : 6;
    const float one = 1, zero = 0;
    for (int turn = 0; turn < 5; turn++)
        for (int i = 0; i < 4; i++) {
            const int k = turn % 2 ? 3 - (i + turn) % 4 : (i + turn) % 4;
            std::vector<toka_sample_row> rows;
            for (int row = 0; row < M; row++) rows.push_back(row_at(&how[k % 3], (uint32_t)row)), rows.back().row = row;
            toka_step s = step_of(rows);
            upload_begin(d, &d->upload), samp_plan_step(d, &s), upload_send(d, &d->upload);
            GPU_OK(cudaStreamSynchronize(d->stream));
            usleep(250000);
            /* 14: bf16, 68: float32 sums */
            us[k].push_back(gpu_time_us(d->stream, calls, 5, [&](int) {
                if (k < 3) samp_launch(d, &s, x.p());
                else if (p->gemm(p->handle, 1, 0, V, M, E, &one, w.p(), 14, E, d->xn, 14, E, &zero, y.p(), 14, V, 68, -1)) gpu_check(false, "cuBLAS");
            }));
        }
    for (auto &v : us) std::sort(v.begin(), v.end());
    printf("V %6d  E %4d  rows %4d  cuBLAS %6.0f us  T 1 %6.0f %.3fx  T 0.6 %6.0f %.3fx  without log-probabilities %6.0f %.3fx %s\n", V, E, M, us[3][2],
           us[0][2], us[0][2] / us[3][2], us[1][2], us[1][2] / us[3][2], us[2][2], us[2][2] / us[3][2], d->error.code ? d->error.msg : "");
    samp_device_close(d);
}

int main(int argc, char **argv) {
    toka_device *d = gpu_device();
    cudaDeviceProp prop;
    GPU_OK(cudaGetDeviceProperties(&prop, 0));
    printf("%s, %d multiprocessors\n", prop.name, d->n_sms);
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        const int shapes[][2] = {{128256, 2048}, {128256, 4096}, {151936, 896}};
        for (const int *v : shapes)
            for (int M : {1, 8, 16, 64, 128, 256, 512, 1024, 4096})
                for (int kind : {0, 1, 2}) bench_samp(v[0], v[1], M, kind ? 0.6f : 1.0f, kind == 2 ? TOKA_NO_LOGPROBS : 0, 1, 0);
        for (int M : {1, 16, 64, 256, 1024, 4096})
            for (int top_k : {0, 20}) bench_samp(128256, 2048, M, 0.6f, 0, 0.95f, top_k);
        for (int M : {1, 64, 1024}) bench_samp(128256, 2048, M, 1, 0, 0.95f, 0);
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "filters")) {
        for (float deviation : {4.4f, 3.0f, 1.0f})
            for (int n : {1, 16, 64, 128, 512}) bench_filters(128256, n, deviation);
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "peer")) {
        peer p = {};
        if (!peer_open(&p, d->stream)) return printf("no cuBLAS here\n"), 1;
        for (int M : {512, 1024, 4096}) bench_peer(&p, 151936, 896, M), bench_peer(&p, 128256, 2048, M);
        return gpu_failed != 0;
    }
    if (argc > 1 && !strcmp(argv[1], "draws")) {
        test_pairs(), test_distributions(), test_tails();
        return gpu_report();
    }
    if (argc > 2 && !strcmp(argv[1], "same")) {
        test_same(atoll(argv[2]));
        return gpu_report();
    }
    quick = argc > 1 && (!strcmp(argv[1], "small") || !strcmp(argv[1], "tiny"));
    if (quick && argv[1][0] == 't') {
        for (int V : {257, 3000}) test_random(V, 64, gpu_seed);
        test_wide();
        test_op(259, 51, 7, 7, true);
        test_op(1000, 256, 40, 33, true);
        return gpu_report();
    }
    test_edges(), test_presence();
    for (int V : {1, 2, 9, 60, 255, 256, 257, 1000, 3000}) test_random(V, quick ? 64 : 640, gpu_seed + (uint64_t)V * 1000);
    if (!quick) test_random(151936, 128, gpu_seed);
    gpu_check(unsure * 50 <= compared, "%d of %d rows left undecided", unsure, compared);
    test_wide();
    test_paths(5000, 128), test_paths(quick ? 20001 : 128256, 32);
    test_cuts();
    test_pairs();
    test_distributions();
    test_tails();
    test_same(quick ? 20000 : 10000000);
    test_op(259, 51, 7, 7, true);
    test_op(259, 51, 40, 33, true);
    test_parts();
    test_op(1000, 256, 40, 33, true);
    test_op(1000, 256, 300, 300, false);
    test_op(1000, 256, 16, 16, true);
    test_op(520, 64, 70, 65, true);
    test_op(520, 392, 70, 65, true); /* more K blocks than ring buffers */
    test_op(3000, 896, 300, 300, false);
    test_op(1000, 256, 40, 33, true, 4), test_op(520, 64, 70, 65, true, 4), test_op(1000, 256, 300, 300, false, 4);
    if (!quick) test_op(32000, 512, 20, 12, true);
    test_waves(64), test_waves(384);
    test_penalized(1000, 64, 40), test_penalized(3001, 64, 300), test_penalized(quick ? 9000 : 70000, 128, 140);
    return gpu_report();
}
