/* gpu_samp.c - the CPU's sampling (chapter 22 of toka.c) and its random cases, against which
 * gpu_samp.cu compares. They are C, and this file makes them callable from C++. */
#include "../toka.c"

#include "check.h"
#include "test_samp.c"

typedef struct toka_test_case {
    toka_sample_row row;
    const int32_t *history; /* [row.n_history] */
    float *raw; /* [V] */
} toka_test_case;

void toka_test_row(const toka_sample_row *row, const int32_t *history, float *logits, int V, toka_sample_result *result);
void toka_test_distribution(const toka_sample_row *row, const int32_t *history, float *logits, int V, double *p);
toka_test_case toka_test_random(uint64_t seed, int V);
double toka_test_g(const int *seen, const double *p, int n_cells, double n);
toka_test_case toka_test_draw_case(uint64_t seed, int V);
void toka_test_draws(const toka_test_case *c, int V, const int32_t *gpu_ids, int n, draw_counts *counts);

/* Calls samp_row. The logits are overwritten. */
void toka_test_row(const toka_sample_row *row, const int32_t *history, float *logits, int V, toka_sample_result *result) {
    samp_row(row, history, logits, V, result);
}

/* p[V]: the probability of each id; all 0 if no id may be sampled. The logits become the adjusted
 * ones. */
void toka_test_distribution(const toka_sample_row *row, const int32_t *history, float *logits, int V, double *p) {
    const toka_sampling *s = row->sampling;
    double total = 0;
    for (int i = 0; i < V; i++) logits[i] = samp_clean(logits[i]), p[i] = 0;
    samp_adjust(row, history, logits, V);
    samp_dist d = {logits, V, samp_max(logits, V), s->temperature > 0 ? 1 / (double)s->temperature : 1, {-INFINITY, -1}};
    if (d.max == -INFINITY) return;
    if (s->temperature == 0) {
        int id = 0;
        while (logits[id] != d.max) id++;
        p[id] = 1;
        return;
    }
    samp_truncate(&d, s);
    for (int i = 0; i < V; i++) total += p[i] = samp_is_kept(&d, i) ? samp_weight(&d, logits[i]) : 0;
    for (int i = 0; i < V; i++) p[i] /= total;
}

/* Makes a row with random logits and random filters. Its memory is never freed. */
toka_test_case toka_test_random(uint64_t seed, int V) {
    uint64_t s = seed * 0x9E3779B97F4A7C15u;
    samp_case *c = mem_zalloc(sizeof *c);
    for (int i = 0; i < 8; i++) rnd(&s);
    *c = random_case(&s, V);
    return (toka_test_case){case_row(c), c->history, c->raw};
}

/* The p-value of a G-test: seen[], the counts of n samples, against p[]. */
double toka_test_g(const int *seen, const double *p, int n_cells, double n) { return g_test(seen, p, n_cells, n); }

/* A row for toka_test_draws. Its memory is never freed. */
toka_test_case toka_test_draw_case(uint64_t seed, int V) {
    samp_case *c = mem_zalloc(sizeof *c);
    *c = draw_case(seed, V);
    return (toka_test_case){case_row(c), c->history, c->raw};
}

/* Positions thread, thread + DRAW_THREADS ... of a comparison. */
enum { DRAW_THREADS = 16 };
typedef struct draw_job {
    const draw_check *check;
    const int32_t *gpu_ids;
    int n, thread;
    draw_counts counts;
} draw_job;

static void *draw_run(void *arg) {
    draw_job *job = arg;
    samp_case c = job->check->c;
    for (int i = job->thread; i < job->n; i += DRAW_THREADS) {
        c.row.position = (uint32_t)i;
        draw_check_id(job->check, c.row, job->gpu_ids[i], sample_case(&c).id, &job->counts);
    }
    return NULL;
}

/* Compares the GPU's ids at positions 0 .. n-1 with those of samp_row. Adds to counts. */
void toka_test_draws(const toka_test_case *c, int V, const int32_t *gpu_ids, int n, draw_counts *counts) {
    const samp_case own = {.s = *c->row.sampling, .row = c->row, .V = V, .raw = c->raw};
    draw_check check = draw_check_new(&own, 0x1p-18, 0x1p-21);
    pthread_t threads[DRAW_THREADS];
    draw_job jobs[DRAW_THREADS];
    for (int i = 0; i < DRAW_THREADS; i++) {
        jobs[i] = (draw_job){&check, gpu_ids, n, i, {0}};
        pthread_create(&threads[i], NULL, draw_run, &jobs[i]);
    }
    for (int i = 0; i < DRAW_THREADS; i++) {
        pthread_join(threads[i], NULL);
        counts->n += jobs[i].counts.n, counts->close += jobs[i].counts.close;
        counts->different += jobs[i].counts.different, counts->wrong += jobs[i].counts.wrong;
        counts->key = MAX(counts->key, jobs[i].counts.key), counts->place = MAX(counts->place, jobs[i].counts.place);
    }
    draw_check_free(&check);
}
