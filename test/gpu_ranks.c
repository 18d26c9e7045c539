/* gpu_ranks.c - tests models on several GPUs. Includes toka.c; is linked with the object of
 * toka_kernels.cu. Run it from the repository root.
 *
 *   gpu_ranks [NAMES]      all-reduces against the host's sums. Then every fixture, the embedded model
 *                          and two made-up models (one that eight ranks can divide, and a wide one)
 *                          under every split that there are GPUs for, against one GPU. With NAMES
 *                          ("wide,llama-tied") only these models. With TOKA_DEBUG_SHARE_GPU=N all
 *                          ranks, at most four, are on the first N GPUs. With TOKA_DEBUG_NO_PEER=1
 *                          stages send through the host, and splits with tensor ranks must be
 *                          refused
 *   gpu_ranks bench [N]    microseconds of all-reduces over N GPUs (2), and NCCL's if libnccl.so.2
 *                          is found */
#define TOKA_SERVER
#include "../toka.c"
#include "check.h"
#include "gpu_host.h"
#include "gpu_graphs.h"
#include <dlfcn.h>

/* From the CUDA runtime that is linked in; a launch needs the stream's device to be current. */
int cudaSetDevice(int device);

/* Rows of a step with large all-reduces; the largest step here. */
enum { N_MANY_ROWS = 2048, MAX_ROWS = 3072 };

static int n_skipped;

static int gpus_shared(void) {
    const char *value = getenv("TOKA_DEBUG_SHARE_GPU");
    return value ? atoi(value) : 0;
}

static bool no_peer(void) {
    const char *value = getenv("TOKA_DEBUG_NO_PEER");
    return value && atoi(value);
}

typedef struct split {
    int tp, pp, dp;
} split;

/* Models with random weights and 8 kv heads: EIGHT has 8 layers, WIDE is so wide that tensor ranks
 * use reduce-scatter from 256 rows on, also in graphs. */
#define EIGHT "made-up/eight"
#define WIDE "made-up/wide"
static char models_file[] = "/tmp/gpu_ranks_XXXXXX";

static void models_write(void) {
    FILE *f = fdopen(mkstemp(models_file), "w");
    if (!f) abort();
    const char *const line = "%s %s - {\"model_type\": \"llama\", \"num_hidden_layers\": %d, \"hidden_size\": %d, "
                             "\"num_attention_heads\": 16, \"num_key_value_heads\": 8, \"head_dim\": 64, "
                             "\"intermediate_size\": %d, \"vocab_size\": 2100, \"rms_norm_eps\": 1e-5, "
                             "\"max_position_embeddings\": 4096}\n";
    fprintf(f, line, "eight", EIGHT, 8, 512, 1024);
    fprintf(f, line, "wide", WIDE, 2, 8192, 512);
    fclose(f);
}
static bool made_up(const char *model) { return !strcmp(model, EIGHT) || !strcmp(model, WIDE); }

static toka *open_split(const char *model, split at, toka_err *e) {
    toka *t = NULL;
    toka_options o = toka_options_default();
    if (made_up(model)) o.models_file = models_file;
    o.model = model, o.device = "cuda", o.max_num_seqs = 64, o.max_num_batched_tokens = MAX_ROWS, o.kv_tokens = 64 * 256;
    o.tensor_parallel_size = at.tp, o.pipeline_parallel_size = at.pp, o.data_parallel_size = at.dp;
    if (made_up(model) ? run_dummy_open(&t, &o, NULL, e) : toka_open(&t, &o, e)) return NULL;
    return t;
}

static double rel_l2(const float *a, const float *b, int n) {
    double d = 0, r = 0;
    for (int i = 0; i < n; i++) d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]), r += (double)b[i] * b[i];
    return sqrt(d / r);
}

static int rnd_in(uint64_t *seed, int from, int to) { return from + (int)(rnd(seed) % (uint64_t)(to - from + 1)); }

/* ---- All-reduces: the op of the backend, on a thread for each rank ---- */

enum { N_CALLS = 7 };

typedef struct reducer {
    toka_device *d;
    int rank, device, E, n_calls, rows[N_CALLS];
    toka_dev_ptr x;
    uint16_t *host; /* [rows][E] bf16: the input of the first call; the output of the last one */
    double us;
    pthread_t thread;
    pthread_barrier_t *start;
} reducer;

static void *reduce_thread(void *arg) {
    reducer *s = arg;
    const size_t bytes = (size_t)s->rows[0] * (size_t)s->E * 2;
    cudaSetDevice(s->device);
    toka_cuda.upload(s->d, s->x, s->host, bytes);
    for (int round = 0; round < 2; round++) { /* if it is timed, the first round is the warm-up */
        pthread_barrier_wait(s->start);
        const double t0 = os_now();
        for (int i = 0; i < s->n_calls; i++) {
            toka_hidden x = {.data = s->x, .state = TOKA_HIDDEN_PARTIAL};
            toka_cuda.all_reduce(s->d, &x, s->rows[i % N_CALLS]);
        }
        toka_cuda.download(s->d, s->host, s->x, bytes);
        s->us = (os_now() - t0) * 1e6 / s->n_calls;
        if (s->n_calls <= N_CALLS) break;
    }
    return NULL;
}

/* Runs the calls on all ranks of a model that is open and idle. */
static void reduce_run(toka *t, reducer *s, int n) {
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, (unsigned)n);
    for (int i = 0; i < n; i++) {
        model_rank *r = &t->engine->replicas[0].model.ranks[i];
        s[i].d = r->device, s[i].x = r->x, s[i].rank = i, s[i].device = gpus_shared() ? i % gpus_shared() : i, s[i].start = &start;
        if (pthread_create(&s[i].thread, NULL, reduce_thread, &s[i])) abort();
    }
    for (int i = 0; i < n; i++) pthread_join(s[i].thread, NULL);
    pthread_barrier_destroy(&start);
}

/* Rows after those of a call must not change. Each call reduces fewer rows than the one before, so
 * a row is reduced once by each call that has it. Values are small whole numbers, so sums are exact
 * until bf16 rounds, and the host knows every bit. */
static void test_all_reduces(int n) {
    toka_err e = {0};
    toka *t = open_split(EIGHT, (split){n, 1, 1}, &e);
    if (!t) {
        verdict(false, "sums over %d ranks: %s", n, e.msg);
        return;
    }
    static const int rows[N_CALLS] = {2048, 2047, 1000, 300, 33, 2, 1};
    const int E = (t->shape.E + 7) / 8 * 8, all = rows[0] * E;
    reducer s[8] = {0};
    uint64_t seed = 3;
    float *want = mem_zalloc((size_t)all * sizeof *want);
    for (int i = 0; i < n; i++) {
        s[i].E = E, s[i].n_calls = N_CALLS, s[i].host = mem_alloc((size_t)all * 2);
        memcpy(s[i].rows, rows, sizeof rows);
        for (int k = 0; k < all; k++) s[i].host[k] = to_bf16((float)rnd_in(&seed, -60, 60) / 4), want[k] += from_bf16(s[i].host[k]);
    }
    reduce_run(t, s, n);
    int wrong = 0;
    for (int k = 0; k < all; k++) {
        float v = from_bf16(to_bf16(want[k]));
        /* from the second call on all ranks have the same values */
        for (int call = 1; call < N_CALLS && k < rows[call] * E; call++) {
            float sum = 0;
            for (int i = 0; i < n; i++) sum += v;
            v = from_bf16(to_bf16(sum));
        }
        for (int i = 0; i < n; i++) wrong += from_bf16(s[i].host[k]) != v;
    }
    verdict(!wrong, "sums over %d ranks: %d of %d values differ", n, wrong, n * all);
    for (int i = 0; i < n; i++) free(s[i].host);
    free(want);
    toka_close(t);
}

/* ---- Whole models ---- */

static int int_array(const json *array, int32_t *out, int cap) {
    int n = 0;
    JSON_EACH(it, array) if (n < cap) out[n++] = (int32_t)json_int(it, -1);
    return n;
}

enum { PROMPTS = 8, PROMPT = 96, ANSWER = 24, TOPS = 5, KINDS = 4 };

typedef struct answer { /* the answer to one request: its first sample */
    int n, n_scored;
    int32_t ids[ANSWER], tops[ANSWER][TOPS];
    float logprobs[ANSWER], top_logprobs[ANSWER][TOPS], scores[PROMPT];
} answer;

typedef struct answers {
    int n_prompts, n_ids[PROMPTS];
    int32_t ids[PROMPTS][PROMPT];
    answer a[KINDS][PROMPTS];
    /* [n_rows][V]: all prompts in one step, as forced rows, followed by many copies of them */
    float *logits;
    int n_rows, V;
} answers;

static int on_event(void *user, const toka_event *ev) {
    answer *a = user;
    if (ev->sample == TOKA_PROMPT) a->scores[a->n_scored++] = ev->logprob;
    if (ev->sample || ev->id < 0 || a->n == ANSWER) return 0;
    a->ids[a->n] = ev->id, a->logprobs[a->n] = ev->logprob;
    memcpy(a->tops[a->n], ev->top_ids, (size_t)MIN(ev->n_top, TOPS) * 4);
    memcpy(a->top_logprobs[a->n++], ev->top_logprobs, (size_t)MIN(ev->n_top, TOPS) * 4);
    return 0;
}

/* kind 0: greedy. 1: sampled and scored. 2: sampled with all filters. 3: greedy with
 * log-probabilities, with more samples than fit at once. */
static void make_request(toka_request *r, int kind, int i) {
    static const int32_t bias_ids[] = {5, 11};
    static const float bias[] = {1.5f, -2};
    toka_sampling *s = &r->sampling;
    s->temperature = kind == 0 || kind == 3 ? 0 : 1, s->seed = (uint64_t)(100 * kind + i), s->max_tokens = ANSWER, s->ignore_eos = 1;
    if (kind == 1) r->prompt_logprobs = 1;
    if (kind == 2) s->top_k = 40, s->top_p = 0.95f, s->repetition_penalty = 1.1f, s->bias_ids = bias_ids, s->bias_values = bias, s->n_bias = 2;
    if (kind >= 2) s->logprobs = TOPS;
    r->n = kind == 3 ? 3 : 1;
}

static int answer_all(toka *t, answers *w, toka_err *e) {
    for (int kind = 0; kind < KINDS; kind++)
        for (int i = 0; i < w->n_prompts; i++) {
            toka_request r = toka_request_default();
            int64_t id;
            r.ids = w->ids[i], r.n_ids = (size_t)w->n_ids[i], r.ids_only = 1;
            make_request(&r, kind, i);
            w->a[kind][i] = (answer){0};
            if (toka_submit(t, &r, on_event, &w->a[kind][i], &id, e)) return e->code;
        }
    return toka_run(t, 0, e);
}

/* Computes raw logits of every position of the prompts, each followed by its answer of a kind (-1:
 * none), `copies` times in one step. They are appended to *logits, which has *n_rows rows and is
 * NULL at first. The caller frees it. */
static int logits_of(toka *t, const answers *w, int kind, int copies, float **logits, int *n_rows, toka_err *e) {
    const int B = t->shape.B, V = t->shape.V, cap = MAX_ROWS;
    int32_t *ints = mem_zalloc((size_t)cap * 4 * sizeof *ints), *pos = ints + cap, *kv_slot = pos + cap, *pages = kv_slot + cap;
    toka_sample_row *out = mem_zalloc((size_t)cap * sizeof *out);
    toka_span *spans = mem_alloc((size_t)(copies * w->n_prompts) * sizeof *spans);
    int n_pages = 0;
    toka_step s = {.ids = ints, .pos = pos, .kv_slot = kv_slot, .pages = pages, .spans = spans, .samples = out, .number = *n_rows ? 3 : 2};
    for (int i = 0; i < cap; i++) pages[i] = i;
    for (int k = 0; k < copies * w->n_prompts; k++) {
        const int i = k % w->n_prompts, n = w->n_ids[i] + (kind < 0 ? 0 : ANSWER);
        spans[s.n_spans++] = (toka_span){s.T, n, n_pages, 0, n};
        for (int p = 0; p < n; p++, s.T++) {
            ints[s.T] = p < w->n_ids[i] ? w->ids[i][p] : w->a[kind][i].ids[p - w->n_ids[i]];
            pos[s.T] = p, kv_slot[s.T] = (n_pages + p / B) * B + p % B;
            out[s.T] = (toka_sample_row){.row = s.T, .scored_id = 0, .seq = -1};
        }
        n_pages += (n + B - 1) / B;
    }
    const size_t before = (size_t)*n_rows * (size_t)V, more = (size_t)s.T * (size_t)V;
    s.n_samples = s.T, *n_rows += s.T;
    *logits = mem_realloc(*logits, (before + more) * sizeof(float)), s.logits = *logits + before;
    memset(s.logits, 0xFF, more * sizeof(float));
    toka_sample_result *results = mem_alloc((size_t)s.T * sizeof *results);
    int code = model_run_step(&t->engine->replicas[0].model, &s, results, e);
    free(results), free(ints), free(out), free(spans);
    return code;
}

/* The id that is sampled from raw logits x [V], which are overwritten. */
static int32_t sampled_id(const toka_sample_row *row, const int32_t *history, float *x, int V) {
    toka_sample_result result;
    samp_row(row, history, x, V, &result);
    return result.id;
}

/* Whether two ids are in the same group. Within a group, a sample takes the id at the position of a
 * uniform number. */
static bool same_group(int32_t a, int32_t b) { return a >= 0 && b >= 0 && a / 256 == b / 256 && a / 2 % 4 == b / 2 % 4; }

/* Logits `below` sample an id before the wanted one in its group, logits `above` one after it.
 * Returns whether some logits between them sample the wanted id. It may be too unlikely to be found
 * by chance. */
static bool between(const toka_sample_row *row, const int32_t *history, int32_t wanted, float *below, float *above, int V) {
    float *middle = mem_alloc((size_t)V * sizeof *middle);
    int32_t id = -1;
    for (int round = 0; round < 60 && id != wanted; round++) {
        for (int v = 0; v < V; v++) middle[v] = below[v] / 2 + above[v] / 2;
        float *x = mem_alloc((size_t)V * sizeof *x);
        memcpy(x, middle, (size_t)V * sizeof *x);
        id = sampled_id(row, history, x, V);
        free(x);
        if (!same_group(id, wanted)) break;
        memcpy(id < wanted ? below : above, middle, (size_t)V * sizeof *middle);
    }
    free(middle);
    return id == wanted;
}

/* Whether logits with a rounding error, relative `off`, sample token k of an answer. *tie: the
 * unchanged logits do not. */
static bool may_sample(const answers *w, int kind, int i, int k, const float *logits, int V, double off, bool *tie) {
    const answer *a = &w->a[kind][i];
    toka_request r = toka_request_default();
    int32_t history[PROMPT + ANSWER];
    const int n = w->n_ids[i];
    uint64_t seed = 1 + (uint64_t)k;
    double rms = 0;
    bool has_below = false, has_above = false;
    make_request(&r, kind, i);
    memcpy(history, w->ids[i], (size_t)n * sizeof *history), memcpy(history + n, a->ids, (size_t)k * sizeof *history);
    const toka_sample_row row = {.seq = -1, .scored_id = -1, .position = (uint32_t)(n + k), .sampling = &r.sampling, .n_prompt = n,
                              .n_history = n + k};
    float *x = mem_alloc((size_t)V * 4 * sizeof *x), *noisy = x + V, *below = noisy + V, *above = below + V;
    int32_t id = -1;
    for (int v = 0; v < V; v++) rms += (double)logits[v] * logits[v] / V;
    /* in the first round they are unchanged */
    for (int round = 0; round < 400 && id != a->ids[k]; round++) {
        for (int v = 0; v < V; v++) {
            /* roughly normal with deviation 1: the sum of three numbers in -1 .. 1 */
            double noise = 0;
            for (int j = 0; round && j < 3; j++) noise += rnd_in(&seed, -1000, 1000) / 1e3;
            noisy[v] = x[v] = logits[v] + (float)(off * sqrt(rms) * noise);
        }
        id = sampled_id(&row, history, x, V), *tie = round > 0;
        if (!same_group(id, a->ids[k])) continue;
        memcpy(id < a->ids[k] ? below : above, noisy, (size_t)V * sizeof *x);
        has_below |= id < a->ids[k], has_above |= id > a->ids[k];
    }
    const bool may = id == a->ids[k] || (has_below && has_above && between(&row, history, a->ids[k], below, above, V));
    free(x);
    return may;
}

/* Prints details of a token that should not have been sampled. */
static void print_wrong_token(const answers *w, int kind, int i, int k, const float *logits, int V) {
    const answer *a = &w->a[kind][i];
    double sum = 0, rms = 0;
    for (int v = 0; v < V; v++) sum += exp((double)logits[v]), rms += (double)logits[v] * logits[v] / V;
    printf("       kind %d, prompt %d, token %d of the answer: %d, log-probability %.4f for %.4f; rms of the logits %.3f;", kind, i, k, a->ids[k], (double)a->logprobs[k],
           logits[a->ids[k]] - log(sum), sqrt(rms));
    for (int j = 0; kind >= 2 && j < TOPS; j++) printf(" %d %.4f for %.4f;", a->tops[k][j], (double)a->top_logprobs[k][j], logits[a->tops[k][j]] - log(sum));
    printf("\n");
}

/* Checks every token of every answer against the logits that one GPU, t, computes for its prefix in
 * one step. Steps of other sizes round differently, so a token is right if these logits, with an
 * error of that size, sample it. Counts the tokens that need such an error, and the wrong ones. */
static int check_tokens(toka *t, answers *w, double off, int *n_ties, int *n_wrong, toka_err *e) {
    const int V = t->shape.V;
    *n_ties = *n_wrong = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        float *logits = NULL;
        int n_rows = 0, code = logits_of(t, w, kind, 1, &logits, &n_rows, e);
        for (int i = 0, row = 0; i < w->n_prompts && !code; row += w->n_ids[i] + ANSWER, i++)
            for (int k = 0; k < ANSWER; k++) {
                bool tie = false;
                const int at = row + w->n_ids[i] - 1 + k;
                if (may_sample(w, kind, i, k, logits + (size_t)at * (size_t)V, V, off, &tie)) *n_ties += tie;
                else ++*n_wrong, print_wrong_token(w, kind, i, k, logits + (size_t)at * (size_t)V, V);
            }
        free(logits);
        if (code) return code;
    }
    return 0;
}

static double worst_score(const answers *a, const answers *b) {
    double worst = 0;
    for (int i = 0; i < a->n_prompts; i++) {
        const answer *x = &a->a[1][i], *y = &b->a[1][i];
        if (x->n_scored != a->n_ids[i] || y->n_scored != x->n_scored) return NAN;
        for (int k = 0; k < x->n_scored; k++) worst = fmax(worst, fabs((double)x->scores[k] - y->scores[k]));
    }
    return worst;
}

/* The number of tokens before the first difference. *off: the distance of the best
 * log-probabilities there. */
static int same_tokens(const answer *x, const answer *y, double *off) {
    int k = 0;
    while (k < x->n && k < y->n && x->ids[k] == y->ids[k]) {
        for (int i = 0; i < TOPS; i++) *off = fmax(*off, fabs((double)x->top_logprobs[k][i] - y->top_logprobs[k][i]));
        k++;
    }
    if (x->n != ANSWER || y->n != ANSWER) *off = INFINITY;
    return k;
}

/* Stages and replicas must compute what one GPU computes: to the bit where they run the same
 * kernels, in a step of the same rows. Tensor ranks round differently. The length of equal answers
 * is printed, but says little: they differ after one near tie. */
static void compare(const char *name, split at, toka *one, answers *got, const answers *want) {
    const bool ranks = at.tp > 1;
    /* fixtures are small networks with large activations: see gpu_model.c */
    const double bound = ranks ? 2.5e-2 : 2e-2, near = 0.25;
    double l2 = rel_l2(got->logits, want->logits, got->n_rows * got->V), scores = worst_score(got, want), off = 0;
    bool exact = !memcmp(got->logits, want->logits, (size_t)got->n_rows * (size_t)got->V * sizeof(float));
    int same[KINDS] = {0}, most = got->n_prompts * ANSWER, n_ties, n_wrong;
    toka_err e;
    for (int kind = 0; kind < KINDS; kind++)
        for (int i = 0; i < got->n_prompts; i++) same[kind] += same_tokens(&got->a[kind][i], &want->a[kind][i], &off);
    const bool ran = off < INFINITY && !check_tokens(one, got, bound, &n_ties, &n_wrong, &e);
    verdict(ran && !n_wrong && l2 <= bound && scores <= near && off <= near && (ranks || exact),
            "%-20s tp %d pp %d dp %d: logits %.1e, scores %.1e, tops %.1e, %d near ties and %d wrong of %d tokens, same %d %d %d %d of %d", name, at.tp,
            at.pp, at.dp, l2, scores, off, ran ? n_ties : -1, ran ? n_wrong : -1, KINDS * most, same[0], same[1], same[2], same[3], most);
}

static void read_prompts(const char *path, answers *w) {
    arena a = {0};
    toka_err e = {0};
    char file[300];
    snprintf(file, sizeof file, "%s/golden.json", path);
    FILE *f = fopen(file, "rb");
    uint64_t seed = 9;
    if (f) {
        fclose(f);
        str text = read_copy(file);
        const json *cases = json_get(json_parse(&a, text, json_trusted, &e), "cases");
        JSON_EACH(it, cases)
            if (w->n_prompts < PROMPTS) w->n_ids[w->n_prompts] = int_array(json_get(it, "prompt_ids"), w->ids[w->n_prompts], PROMPT), w->n_prompts++;
        free((void *)text.p);
    } else {
        for (int i = 0; i < 4; i++, w->n_prompts++)
            for (int k = 0; k < 20 + 17 * i; k++) w->ids[i][w->n_ids[i]++] = rnd_in(&seed, 3, 500);
    }
    arena_free(&a);
}

static bool run(const char *path, split at, const answers *prompts, answers *w) {
    toka_err e = {0};
    memcpy(w->n_ids, prompts->n_ids, sizeof w->n_ids), memcpy(w->ids, prompts->ids, sizeof w->ids), w->n_prompts = prompts->n_prompts;
    w->logits = NULL, w->n_rows = 0;
    toka *t = open_split(path, at, &e);
    bool ok = t && !answer_all(t, w, &e);
    if (t) toka_close(t);
    t = ok ? open_split(path, at, &e) : NULL;
    ok = t && !logits_of(t, w, -1, 1, &w->logits, &w->n_rows, &e) && !logits_of(t, w, -1, N_MANY_ROWS / w->n_rows + 1,
        &w->logits, &w->n_rows, &e);
    if (t) w->V = t->shape.V;
    if (t) toka_close(t);
    if (!ok) printf("%s, tp %d pp %d dp %d: %s\n", path, at.tp, at.pp, at.dp, e.msg);
    return ok;
}

static bool splits(const char *path, split at) {
    mf_model *m;
    toka_err e;
    arena a = {0};
    toka_shape s;
    toka_weights w;
    if (!strcmp(path, EIGHT)) return 8 % at.tp == 0 && at.pp <= 8;
    /* of three ranks one has fewer kv heads */
    if (!strcmp(path, WIDE)) return (at.tp > 1 || (no_peer() && at.pp > 1)) && at.pp <= 2 && at.dp == 1;
    if (mf_open(&m, path, NULL, NULL, &e)) return false;
    mf_rank r = {.tp_size = at.tp, .pp_size = at.pp};
    bool ok = !mf_shard(&m->shape, &m->weights, &r, &a, &s, &w, &e);
    arena_free(&a), mf_close(m);
    return ok;
}

/* Tensor ranks without peer access: one sentence, before any weight is loaded. */
static void refused(const char *path, split at) {
    toka_err e = {0};
    toka *t = open_split(path, at, &e);
    verdict(!t && e.code == TOKA_E_DEVICE && strstr(e.msg, "(no peer access), which tensor ranks need"), "%s tp %d pp %d dp %d is refused: %s",
            strrchr(path, '/') + 1, at.tp, at.pp, at.dp, e.msg);
    if (t) toka_close(t);
}

/* Steps as graphs under a split, compared with single launches. */
static void graphs(const char *path, split at) {
    char name[80];
    toka_options o = g_options(path);
    if (made_up(path)) o.models_file = models_file;
    o.tensor_parallel_size = at.tp, o.pipeline_parallel_size = at.pp;
    snprintf(name, sizeof name, "%.40s tp %d pp %d", strrchr(path, '/') + 1, at.tp, at.pp);
    g_compare(name, &o);
    if (at.tp == 2 && at.pp == 1) o.enforce_eager = false, g_failing(name, &o, "3@1");
}

static void model(const char *path, int n_gpus) {
    static const split at[] = {{2, 1, 1}, {1, 2, 1}, {1, 1, 2}, {4, 1, 1}, {1, 4, 1}, {2, 2, 1}, {2, 1, 2}, {1, 2, 2}, {3, 1, 1},
                               {8, 1, 1}, {1, 8, 1}, {4, 2, 1}, {2, 4, 1}, {2, 2, 2}};
    answers *prompts = mem_zalloc(sizeof *prompts), *alone = mem_zalloc(sizeof *alone), *w = mem_zalloc(sizeof *w);
    const char *name = strrchr(path, '/') + 1;
    read_prompts(path, prompts);
    toka_err e = {0};
    int n_ties, n_wrong;
    toka *one = run(path, (split){1, 1, 1}, prompts, alone) ? open_split(path, (split){1, 1, 1}, &e) : NULL;
    if (!one || check_tokens(one, alone, 2e-2, &n_ties, &n_wrong, &e)) verdict(false, "%s on one GPU: %s", name, e.msg);
    else verdict(!n_wrong, "%-20s one GPU: %d near ties and %d wrong tokens", name, n_ties, n_wrong);
    for (int i = 0; i < COUNT(at) && one; i++) {
        if (!splits(path, at[i])) continue;
        if (at[i].tp * at[i].pp * at[i].dp > n_gpus) {
            n_skipped++;
            continue;
        }
        if (no_peer() && at[i].tp > 1) {
            refused(path, at[i]);
            continue;
        }
        if (run(path, at[i], prompts, w)) compare(name, at[i], one, w, alone);
        else verdict(false, "%s", name);
        if (at[i].dp == 1 && strcmp(path, EIGHT)) graphs(path, at[i]);
        free(w->logits);
    }
    if (one) toka_close(one);
    free(alone->logits), free(prompts), free(alone), free(w);
}

/* ---- bench ---- */

typedef struct nccl { /* the part of NCCL's interface that is needed */
    int (*init_all)(void **comms, int n, const int *devices), (*start)(void), (*end)(void);
    int (*all_reduce)(const void *from, void *to, size_t n, int type, int op, void *comm, void *stream);
} nccl;

static bool nccl_find(nccl *f) {
    void *lib = dlopen("libnccl.so.2", RTLD_NOW);
    if (!lib) return false;
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    *(void **)&f->init_all = dlsym(lib, "ncclCommInitAll"), *(void **)&f->all_reduce = dlsym(lib, "ncclAllReduce");
    *(void **)&f->start = dlsym(lib, "ncclGroupStart"), *(void **)&f->end = dlsym(lib, "ncclGroupEnd");
    return f->init_all && f->all_reduce && f->start && f->end;
}

int cudaStreamCreateWithFlags(void **stream, unsigned flags);
int cudaStreamSynchronize(void *stream);

/* Microseconds of one all-reduce by NCCL: this thread drives both GPUs, 100 all-reduces in a
 * row. */
static double nccl_time(const nccl *f, void **comms, void **streams, const reducer *s, int n, size_t count) {
    double us = 0;
    for (int round = 0; round < 2; round++) {
        const double t0 = os_now();
        for (int i = 0; i < 100; i++) {
            f->start();
            for (int r = 0; r < n; r++)
                /* bf16, sum */
                f->all_reduce((void *)(uintptr_t)s[r].x.at, (void *)(uintptr_t)s[r].x.at, count, 9, 0, comms[r], streams[r]);
            f->end();
        }
        for (int r = 0; r < n; r++) cudaSetDevice(r), cudaStreamSynchronize(streams[r]);
        us = (os_now() - t0) * 1e4;
    }
    return us;
}

static int bench(int n) {
    static const int sizes[] = {1, 8, 64, 128, 256, 512, 1024, 2048, 4096};
    static const int devices[] = {0, 1, 2, 3, 4, 5, 6, 7};
    toka_err e = {0};
    toka_options o = toka_options_default();
    toka *t;
    nccl f = {0};
    void *comms[8], *streams[8];
    o.model = "test/model", o.device = "cuda", o.tensor_parallel_size = n, o.kv_tokens = 65536, o.max_num_batched_tokens = 65536;
    if (toka_open(&t, &o, &e)) return printf("%s\n", e.msg), 2;
    const int E = (t->shape.E + 7) / 8 * 8;
    bool have = nccl_find(&f) && !f.init_all(comms, n, devices);
    for (int r = 0; r < n && have; r++) cudaSetDevice(r), cudaStreamCreateWithFlags(&streams[r], 1);
    printf("%s; width %d here, tokens as if it were 4096\n", toka_get_info(t).device, E);
    for (int i = 0; i < COUNT(sizes); i++) {
        const int rows = (int)((int64_t)sizes[i] * 4096 / E);
        reducer s[8] = {0};
        for (int r = 0; r < n; r++) {
            s[r].E = E, s[r].n_calls = 200, s[r].host = mem_zalloc((size_t)rows * (size_t)E * 2);
            for (int k = 0; k < N_CALLS; k++) s[r].rows[k] = rows;
        }
        reduce_run(t, s, n);
        double other = have ? nccl_time(&f, comms, streams, s, n, (size_t)rows * (size_t)E) : NAN, us = s[0].us;
        double gb = (double)rows * E * 2 * 2 * (n - 1) / n / 1e3;
        printf("%5d tokens x 4096, %8.2f MB: own %8.1f us (%5.1f GB/s of bus), NCCL %8.1f us (%5.1f)\n", sizes[i], (double)rows * E * 2 / 1e6, us,
               gb / us, other, gb / other);
        for (int r = 0; r < n; r++) free(s[r].host);
    }
    toka_close(t);
    return 0;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 1 && !strcmp(argv[1], "bench")) return bench(argc > 2 ? atoi(argv[2]) : 2);
    const int n_gpus = gpus_shared() ? 4 : toka_cuda.count();
    const char *names = argc > 1 ? argv[1] : NULL;
    models_write();
    for (int n = 2; n <= MIN(n_gpus, 8) && !no_peer(); n *= 2) test_all_reduces(n);
    static const char *const paths[] = {"test/model", EIGHT, WIDE};
    for (int i = 0; i < COUNT(paths); i++)
        if (!names || strstr(names, strrchr(paths[i], '/') + 1)) model(paths[i], n_gpus);
    unlink(models_file);
    DIR *d = opendir("test/fixtures");
    for (struct dirent *it; d && (it = readdir(d));) {
        char path[300];
        snprintf(path, sizeof path, "test/fixtures/%s", it->d_name);
        if (it->d_name[0] != '.' && (!names || strstr(names, it->d_name))) model(path, n_gpus);
    }
    if (d) closedir(d);
    printf("%d passed, %d failed, %d skipped\n", n_passed, n_failed, n_skipped);
    return n_failed != 0;
}
