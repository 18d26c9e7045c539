/* test_samp.c - tests chapter 22 against a naive sampler (full sort, in double, as Hugging Face's
 * logits warpers) and a naive text search. */

/* ---- A naive sampler ---- */

typedef struct samp_case { /* one row with everything that its sample depends on */
    toka_sampling s;
    toka_sample_row row;
    int V;
    float *raw;       /* [V] */
    const int32_t *history; /* [row.n_history] */
    int32_t *ids[5];  /* bias, allowed, forbidden, history, bad words */
    int *lengths;     /* of the bad words */
    float *bias;
    toka_word_table words;    /* n_ends 0: none */
    toka_word_rule *rules[2]; /* its steps and ends */
} samp_case;

typedef struct samp_ref { /* the result of the naive sampler; all arrays are [V] */
    float *adjusted;
    double *p, *raw_logprob; /* the probability of being sampled; 0: filtered out */
    bool *keep;
    bool unsure;  /* a sum is so close to a limit that rounding decides */
    bool none_allowed; /* no id may be sampled */
} samp_ref;

static toka_sampling samp_plain(void) {
    return (toka_sampling){.temperature = 1, .top_p = 1, .repetition_penalty = 1};
}

/* For the comparison: ascending; among equal values the highest id comes first. */
static const float *ref_values;
static int ref_order(const void *a, const void *b) {
    int i = *(const int *)a, j = *(const int *)b;
    float x = ref_values[i], y = ref_values[j];
    return x < y ? -1 : x > y ? 1 : j - i;
}

static double ref_softmax(const float *x, const bool *keep, int V, double T, double *p) {
    double max = -INFINITY, sum = 0;
    for (int i = 0; i < V; i++)
        if (keep[i] && x[i] > max) max = x[i];
    for (int i = 0; i < V; i++) sum += p[i] = keep[i] && x[i] > -INFINITY ? exp((x[i] - max) / T) : 0;
    for (int i = 0; i < V; i++) p[i] /= sum;
    return max + log(sum);
}

static void ref_penalties(const samp_case *c, float *x) {
    for (int id = 0; id < c->V; id++) {
        int in_prompt = 0, in_output = 0;
        for (int i = 0; i < c->row.n_history; i++)
            if (c->history[i] == id) i < c->row.n_prompt ? in_prompt++ : in_output++;
        if (in_prompt || in_output) x[id] = x[id] < 0 ? x[id] * c->s.repetition_penalty : x[id] / c->s.repetition_penalty;
        x[id] -= c->s.frequency_penalty * (float)in_output;
        x[id] -= c->s.presence_penalty * (float)(in_output > 0);
    }
}

/* Follows the bad words given as a table from the first id of the output on, one set of places after another. */
static void ref_words(const samp_case *c, float *x) {
    const toka_word_table *t = &c->words;
    bool at[64] = {false}, next[64];
    for (int i = c->row.n_prompt; i < c->row.n_history; i++) {
        bool no_text = c->history[i] >= t->n_ids;
        memset(next, false, sizeof next);
        for (int k = 0; k < t->n_steps; k++) {
            const toka_word_rule *r = &t->steps[k];
            if (r->id != c->history[i]) continue;
            if (r->from == TOKA_WORD_SKIP) no_text |= !r->to || !c->row.keep_special;
            else next[r->to] |= r->from == TOKA_WORD_ANY || at[r->from];
        }
        if (!no_text) memcpy(at, next, sizeof at);
    }
    for (int k = 0; k < t->n_ends; k++)
        if (t->ends[k].id < c->V && (t->ends[k].from == TOKA_WORD_ANY || at[t->ends[k].from])) x[t->ends[k].id] = -INFINITY;
}

static void ref_mask(const samp_case *c, float *x) {
    for (int i = 0; i < c->s.n_bias; i++) x[c->s.bias_ids[i]] += c->s.bias_values[i];
    for (int id = 0; id < c->V; id++) {
        bool allowed = !c->s.n_allowed;
        for (int i = 0; i < c->s.n_allowed; i++) allowed |= c->s.allowed_ids[i] == id;
        for (int i = 0; i < c->row.n_forbidden; i++) allowed &= c->row.forbidden[i] != id;
        for (int i = 0, at = 0; i < c->s.n_bad; at += c->s.bad_lengths[i++]) {
            int n = c->s.bad_lengths[i], n_same = 0;
            for (int k = 0; k < n - 1 && n - 1 <= c->row.n_history - c->row.n_prompt; k++)
                n_same += c->history[c->row.n_history - (n - 1) + k] == c->s.bad_ids[at + k];
            allowed &= n_same < n - 1 || c->s.bad_ids[at + n - 1] != id;
        }
        if (!allowed) x[id] = -INFINITY;
    }
    ref_words(c, x);
}

/* Applies the warpers in turn: top-k, top-p with its ascending sum, min-p. keep starts as all
 * true. */
static void ref_warp(const samp_case *c, samp_ref *r) {
    const float *x = r->adjusted;
    int V = c->V, *order = mem_alloc(V * sizeof *order);
    for (int i = 0; i < V; i++) order[i] = i;
    ref_values = x;
    qsort(order, V, sizeof *order, ref_order);
    int order_max = order[V - 1];
    if (c->s.top_k > 0) {
        float kth = x[order[V - MIN(V, c->s.top_k)]];
        for (int i = 0; i < V; i++) r->keep[i] &= x[i] >= kth;
    }
    if (c->s.top_p < 1) {
        ref_softmax(x, r->keep, V, c->s.temperature, r->p);
        double sum = 0, limit = 1 - (double)c->s.top_p;
        for (int i = 0; i < V; i++) {
            sum += r->p[order[i]];
            if (fabs(sum - limit) < 1e-11) r->unsure = true;
            if (sum <= limit && i < V - 1) r->keep[order[i]] = false;
        }
    }
    if (c->s.min_p > 0) {
        ref_softmax(x, r->keep, V, c->s.temperature, r->p);
        double top = 0;
        for (int i = 0; i < V; i++) top = MAX(top, r->p[i]);
        for (int i = 0; i < V; i++) {
            bool best = x[i] == x[order_max];
            if (!best && fabs(r->p[i] - c->s.min_p * top) < 1e-12 * top) r->unsure = true;
            if (r->p[i] < c->s.min_p * top) r->keep[i] = false;
        }
    }
    free(order);
}

static samp_ref ref_new(const samp_case *c) {
    int V = c->V;
    samp_ref r = {mem_alloc(V * sizeof(float)), mem_alloc(V * sizeof(double)), mem_alloc(V * sizeof(double)), mem_alloc(V),
                  false, true};
    memset(r.keep, true, V);
    for (int i = 0; i < V; i++) r.adjusted[i] = isnan(c->raw[i]) ? -INFINITY : c->raw[i];
    double lse = ref_softmax(r.adjusted, r.keep, V, 1, r.p);
    for (int i = 0; i < V; i++) r.raw_logprob[i] = r.adjusted[i] == -INFINITY ? -INFINITY : r.adjusted[i] - lse;
    ref_mask(c, r.adjusted);
    ref_penalties(c, r.adjusted);
    for (int i = 0; i < V; i++) r.none_allowed &= r.adjusted[i] == -INFINITY;
    if (r.none_allowed) return r;
    if (c->s.temperature > 0) {
        ref_warp(c, &r);
        ref_softmax(r.adjusted, r.keep, V, c->s.temperature, r.p);
        return r;
    }
    int best = 0;
    for (int i = 0; i < V; i++)
        if (r.adjusted[i] > r.adjusted[best]) best = i;
    for (int i = 0; i < V; i++) r.p[i] = r.keep[i] = i == best;
    return r;
}
static void ref_free(samp_ref *r) { free(r->adjusted), free(r->p), free(r->raw_logprob), free(r->keep); }

/* Set here because cases are copied, and the pointer must point to the copy. */
static toka_sample_row case_row(const samp_case *c) {
    toka_sample_row row = c->row;
    row.sampling = &c->s;
    row.words = c->words.n_ends ? &c->words : NULL;
    return row;
}

static toka_sample_result sample_case(const samp_case *c) {
    float *x = mem_alloc(c->V * sizeof *x);
    toka_sample_row row = case_row(c);
    toka_sample_result result;
    memcpy(x, c->raw, c->V * sizeof *x);
    samp_row(&row, c->history, x, c->V, &result);
    free(x);
    return result;
}

static bool close_to(double a, double b, double tol) { return a == b || fabs(a - b) <= tol * MAX(1.0, fabs(b)); }

/* ---- Random rows ---- */

static int32_t *random_ids(uint64_t *s, int n, int V) {
    int32_t *p = mem_alloc(n * sizeof *p);
    for (int i = 0; i < n; i++) p[i] = (int32_t)(rnd(s) % (uint64_t)V);
    return p;
}

static void random_logits(uint64_t *s, float *x, int V) {
    double spread = (double[]){0.5, 2, 5, 20}[rnd(s) % 4];
    /* 1: many ties; 2: with -inf and NaN; 3: all equal; otherwise unchanged */
    int kind = (int)(rnd(s) % 5);
    for (int i = 0; i < V; i++) {
        x[i] = (float)(spread * rnd_normal(s));
        if (kind == 1) x[i] = rintf(x[i] * 2) / 2 * (rnd(s) % 2 ? 1.0f : -1.0f);
        if (kind == 2 && rnd(s) % 3 == 0) x[i] = rnd(s) % 8 ? -INFINITY : NAN;
        if (kind == 3) x[i] = (float)spread;
    }
}

static void random_filters(uint64_t *s, samp_case *c) {
    static const float T[] = {0, 1e-6f, 0.01f, 0.3f, 0.7f, 1, 1, 1.5f, 10, 1e30f, 1e-40f};
    c->s.temperature = T[rnd(s) % COUNT(T)];
    if (rnd(s) % 2) c->s.top_k = rnd(s) % 3 ? 1 + (int)(rnd(s) % (uint64_t)(c->V + 3)) : 1 + (int)(rnd(s) % 5);
    if (rnd(s) % 2) c->s.top_p = rnd(s) % 8 ? (float)MAX(1e-6, rnd_unit(s)) : rnd(s) % 2 ? 1e-7f : 0.9999999f;
    if (rnd(s) % 3 == 0) c->s.min_p = rnd(s) % 8 ? (float)pow(rnd_unit(s), 3) : 1;
    c->s.logprobs = (int)(rnd(s) % (TOKA_MAX_LOGPROBS + 1));
}

/* Bad words of one to three ids; many begin with the last ids of the history, or with all of them but the first. */
static void random_bad_words(uint64_t *s, samp_case *c) {
    c->s.n_bad = 1 + (int)(rnd(s) % 6);
    c->s.bad_ids = c->ids[4] = random_ids(s, 3 * c->s.n_bad, c->V);
    c->s.bad_lengths = c->lengths = mem_alloc(c->s.n_bad * sizeof *c->lengths);
    for (int i = 0, at = 0; i < c->s.n_bad; at += c->lengths[i++]) {
        const int n = c->lengths[i] = 1 + (int)(rnd(s) % 3);
        for (int k = rnd(s) % 4 == 0; k < n - 1 && n - 1 <= c->row.n_history && rnd(s) % 8; k++)
            c->ids[4][at + k] = c->history[c->row.n_history - (n - 1) + k];
    }
}

/* By id, and those without text first; ends by place. */
static int rule_order(const void *a, const void *b) {
    const toka_word_rule *x = a, *y = b;
    return x->id != y->id ? (x->id > y->id) - (x->id < y->id) : x->from - y->from;
}
static int end_order(const void *a, const void *b) { return ((const toka_word_rule *)a)->from - ((const toka_word_rule *)b)->from; }

/* A table of bad words with words of RULE_PLACES places each. In many the last ids of the history lead from place to place; ids
 * without text stand between them. */
static void random_words(uint64_t *s, samp_case *c) {
    enum { RULE_PLACES = 4 };
    const int n_words = 1 + (int)(rnd(s) % 12), n_output = c->row.n_history - c->row.n_prompt;
    toka_word_rule *steps = c->rules[0] = mem_alloc(64 * sizeof *steps), *ends = c->rules[1] = mem_alloc(128 * sizeof *ends);
    toka_word_table *t = &c->words;
    *t = (toka_word_table){.steps = steps, .ends = ends, .n_places = n_words * RULE_PLACES, .max_ids = RULE_PLACES,
                           .n_ids = c->V};
    if (n_output > 2 && rnd(s) % 2) t->n_ids = c->history[c->row.n_history - 1 - (int)(rnd(s) % 3)]; /* it has no text */
    c->row.keep_special = rnd(s) % 2;
    for (int w = 0; w < n_words; w++) {
        const int first = w * RULE_PLACES, n = (int)(rnd(s) % 5);
        int from = TOKA_WORD_ANY;
        for (int k = 0; k < n; k++) { /* the last n ids of the output, or at times other ones */
            const int to = first + MIN(k + (int)(rnd(s) % 2), RULE_PLACES - 1);
            const bool other = n > n_output || rnd(s) % 12 == 0, no_text = rnd(s) % 6 == 0;
            const int32_t id = other ? (int32_t)(rnd(s) % (uint64_t)c->V) : c->history[c->row.n_history - n + k];
            if (id >= t->n_ids) continue; /* has no text */
            if (from >= to) break;
            steps[t->n_steps++] = no_text ? (toka_word_rule){id, TOKA_WORD_SKIP, id % 2} : (toka_word_rule){id, from, to};
            if (!no_text) from = to;
        }
        for (int k = 0; k < 4 + n; k++)
            ends[t->n_ends++] = (toka_word_rule){(int32_t)(rnd(s) % (uint64_t)(c->V + 2)), rnd(s) % 16 ? from : TOKA_WORD_ANY, 0};
    }
    qsort(steps, t->n_steps, sizeof *steps, rule_order);
    qsort(ends, t->n_ends, sizeof *ends, end_order);
    while (t->n_whole < t->n_ends && ends[t->n_whole].from == TOKA_WORD_ANY) t->n_whole++;
}

static samp_case random_case(uint64_t *s, int V) {
    samp_case c = {.s = samp_plain(), .V = V, .raw = mem_alloc(V * sizeof(float))};
    random_logits(s, c.raw, V);
    random_filters(s, &c);
    c.row = (toka_sample_row){.scored_id = -1, .sample = (uint32_t)rnd(s), .position = (uint32_t)rnd(s)};
    c.s.seed = rnd(s);
    if (rnd(s) % 2) {
        c.row.n_history = (int)(rnd(s) % (rnd(s) % 2 ? 300 : 4)), c.row.n_prompt = (int)(rnd(s) % (uint64_t)(c.row.n_history + 1));
        c.history = c.ids[3] = random_ids(s, c.row.n_history, rnd(s) % 2 ? V : 1 + V / 10);
        if (rnd(s) % 3) c.s.repetition_penalty = (float)(0.5 + 1.5 * rnd_unit(s));
        if (rnd(s) % 2) c.s.frequency_penalty = (float)(4 * rnd_unit(s) - 2);
        if (rnd(s) % 2) c.s.presence_penalty = (float)(4 * rnd_unit(s) - 2);
    }
    if (rnd(s) % 4 == 0) {
        c.s.n_bias = (int)(rnd(s) % 20);
        c.s.bias_ids = c.ids[0] = random_ids(s, c.s.n_bias, V);
        c.s.bias_values = c.bias = mem_alloc(c.s.n_bias * sizeof(float));
        for (int i = 0; i < c.s.n_bias; i++) c.bias[i] = (float)(20 * rnd_unit(s) - 10);
    }
    if (rnd(s) % 4 == 0) c.s.n_allowed = (int)(rnd(s) % 50), c.s.allowed_ids = c.ids[1] = random_ids(s, c.s.n_allowed, V);
    if (rnd(s) % 4 == 0) {
        c.row.n_forbidden = (int)(rnd(s) % 10);
        c.row.forbidden = c.ids[2] = random_ids(s, c.row.n_forbidden, V + 3);
    }
    if (rnd(s) % 4 == 0) random_bad_words(s, &c);
    if (rnd(s) % (c.row.n_history ? 2 : 4) == 0) random_words(s, &c);
    return c;
}
static void case_free(samp_case *c) {
    free(c->raw), free(c->bias), free(c->lengths), free(c->rules[0]), free(c->rules[1]);
    for (int i = 0; i < COUNT(c->ids); i++) free(c->ids[i]);
}

/* ---- Random numbers and exp ---- */

static void test_samp_philox(void) { /* known answers: Random123, kat_vectors, philox4x32 10 */
    static const uint32_t kat[3][10] = { /* counter, key, expected */
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0,
         0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    for (int i = 0; i < 3; i++) {
        uint32_t c[4];
        memcpy(c, kat[i], sizeof c);
        samp_philox(c, kat[i][4], kat[i][5]);
        CHECK(memcmp(c, kat[i] + 6, sizeof c) == 0);
    }
    /* A seed's meaning includes this layout, so it must not change. The words of the first and the
     * third line above, through samp_random. */
    toka_sampling s = samp_plain();
    toka_sample_row row = {.sampling = &s};
    uint32_t words[SAMP_GROUPS], other[SAMP_GROUPS];
    samp_random(&row, 0, words);
    CHECK(memcmp(words, kat[0] + 6, sizeof words) == 0);
    for (int i = 0; i < 6; i++) { /* each argument counts */
        s.seed = 7, row.sample = 8, row.position = 9;
        samp_random(&row, 0, words);
        samp_random(&row, 0, other);
        CHECK(memcmp(words, other, sizeof words) == 0);
        if (i == 0) s.seed = 8;
        if (i == 1) s.seed = 7 + ((uint64_t)1 << 32);
        if (i == 2) row.sample = 9;
        if (i == 3) row.position = 10;
        if (i == 4) row.sample = 9, row.position = 8;
        samp_random(&row, i == 5, other);
        CHECK_MSG(memcmp(words, other, sizeof words) != 0, "argument %d", i);
    }
    CHECK(samp_unit(0) == 0x1p-33 && samp_unit(~0u) == 1 - 0x1p-33);
}

static void test_samp_exp(void) {
    double max_error = 0;
    for (double d = 0; d > -660; d = d * 1.0001 - 1e-4) max_error = MAX(max_error, fabs(samp_exp(d) / exp(d) - 1));
    CHECK_MSG(max_error < 1e-12, "relative error %g", max_error);
    CHECK(samp_exp(0) == 1 && samp_exp(-0.0) == 1);
    CHECK(samp_exp(-700.1) == 0 && samp_exp(-1e300) == 0 && samp_exp(-INFINITY) == 0 && samp_exp(-692) > 0);
    float x[] = {-INFINITY, -FLT_MAX, -2.5f, -1e-45f, 0, 1e-45f, 3, FLT_MAX};
    for (int i = 0; i < COUNT(x); i++) {
        CHECK(samp_key_to_logit(samp_logit_to_key(x[i])) == x[i]);
        CHECK(i == 0 || samp_logit_to_key(x[i - 1]) < samp_logit_to_key(x[i]));
    }
    CHECK(samp_logit_to_key(-0.0f) == samp_logit_to_key(0.0f));
}

/* ---- Against the naive sampler ---- */

/* The sample must not depend on what else is requested: neither on top log-probabilities nor on
 * wanting no log-probability at all. */
static void check_no_logprob(const samp_case *c, const toka_sample_result *result, uint64_t seed) {
    for (int n = TOKA_NO_LOGPROBS; n <= 0; n++) {
        samp_case plain_row = *c;
        plain_row.s.logprobs = n;
        const toka_sample_result got = sample_case(&plain_row);
        CHECK_MSG(got.id == result->id && !memcmp(&got.sampled_logprob, &result->sampled_logprob, 4) && !got.n_top,
                  "seed %llu: %d (%g) for %d (%g)", (unsigned long long)seed, got.id, got.sampled_logprob, result->id,
                      result->sampled_logprob);
        CHECK_MSG(!isnan(got.logprob) == !n, "seed %llu: %g", (unsigned long long)seed, got.logprob);
    }
}

/* Checks one case: the ids that the filters keep, the sample and every log-probability. Returns
 * false if rounding decides which ids are kept. */
static bool check_case(const samp_case *c, uint64_t seed) {
    samp_ref r = ref_new(c);
    toka_sample_result result = sample_case(c), again = sample_case(c);
    CHECK_MSG(result.id == again.id && result.sampled_logprob == again.sampled_logprob, "seed %llu", (unsigned long long)seed);
    CHECK_MSG(result.id >= 0 && result.id < c->V, "seed %llu: id %d", (unsigned long long)seed, result.id);
    CHECK_MSG(r.none_allowed || close_to(result.logprob, r.raw_logprob[result.id], 1e-5), "seed %llu: %g for %g", (unsigned long long)seed,
              result.logprob, r.raw_logprob[result.id]);
    check_no_logprob(c, &result, seed);
    int n_top = MIN(c->s.logprobs, c->V);
    CHECK(result.n_top == n_top);
    for (int i = 0; i < n_top; i++) {
        int id = result.top_ids[i];
        CHECK(close_to(result.top_logprobs[i], r.raw_logprob[id], 1e-5));
        int better = 0; /* its rank in the order (raw logit falling, id rising) */
        for (int j = 0; j < c->V; j++)
            better += r.raw_logprob[j] > r.raw_logprob[id] || (r.raw_logprob[j] == r.raw_logprob[id] && j < id);
        CHECK_MSG(better == i, "seed %llu: top %d is id %d of rank %d", (unsigned long long)seed, i, id, better);
    }
    if (!r.none_allowed && !r.unsure) {
        CHECK_MSG(r.keep[result.id] && r.p[result.id] > 0, "seed %llu: id %d", (unsigned long long)seed, result.id);
        CHECK_MSG(close_to(result.sampled_logprob, log(r.p[result.id]), 1e-5), "seed %llu: %g for %g", (unsigned long long)seed,
                  result.sampled_logprob, log(r.p[result.id]));
    }
    if (!r.none_allowed && c->s.temperature > 0 && !r.unsure) {
        float *x = mem_alloc(c->V * sizeof *x);
        for (int i = 0; i < c->V; i++) x[i] = samp_clean(c->raw[i]);
        toka_sample_row row = case_row(c);
        samp_adjust(&row, c->history, x, c->V);
        samp_dist d = {x, c->V, samp_max(x, c->V), 1 / (double)c->s.temperature, {-INFINITY, -1}};
        samp_truncate(&d, &c->s);
        int wrong = 0;
        for (int i = 0; i < c->V; i++) wrong += samp_is_kept(&d, i) != (r.keep[i] && x[i] > -INFINITY);
        for (int i = 0; i < c->V; i++) wrong += x[i] != r.adjusted[i];
        CHECK_MSG(!wrong, "seed %llu: %d ids of %d", (unsigned long long)seed, wrong, c->V);
        free(x);
    }
    /* the lowest id that is allowed, if there is one */
    for (int id = 0, n = 0; r.none_allowed && id < c->V; id++) {
        bool may = !c->s.n_allowed || samp_is_listed(c->s.allowed_ids, c->s.n_allowed, id);
        if (may && !samp_is_listed(c->row.forbidden, c->row.n_forbidden, id) && !n++) CHECK(result.id == id);
    }
    bool sure = !r.unsure;
    ref_free(&r);
    return sure;
}

static void test_samp_naive(void) {
    int n = 6000, unsure = 0;
    for (uint64_t seed = 1; seed <= (uint64_t)n && check_failed < 20; seed++) {
        uint64_t s = seed * 0x9E3779B97F4A7C15u;
        for (int i = 0; i < 8; i++) rnd(&s);
        int most = rnd(&s) % 4 ? 60 : 1000, V = 1 + (int)(rnd(&s) % (uint64_t)most);
        samp_case c = random_case(&s, V);
        unsure += !check_case(&c, seed);
        case_free(&c);
    }
    CHECK_MSG(unsure < n / 20, "%d of %d rows left undecided", unsure, n);
}

/* Several blocks of any size; a vocabulary larger than SAMP_BLOCKS * 1024. */
static void test_samp_large(void) {
    static const int sizes[] = {SAMP_ID_RANGE, SAMP_ID_RANGE + 1, 151936, 151936, 200019, 600001};
    for (int i = 0; i < COUNT(sizes); i++) {
        uint64_t s = 99 + (uint64_t)i;
        samp_case c = random_case(&s, sizes[i]);
        c.s.logprobs = 3, c.row.n_history = MIN(c.row.n_history, 40), c.row.n_prompt = MIN(c.row.n_prompt, 20);
        check_case(&c, s);
        c.s.temperature = 1, c.s.top_p = 0.95f, c.s.top_k = 0, c.s.min_p = 0;
        check_case(&c, s);
        case_free(&c);
    }
}

static void test_samp_edges(void) {
    toka_sampling s = samp_plain();
    toka_sample_row row = {.scored_id = -1, .sampling = &s};
    toka_sample_result result;
    s.temperature = 0, s.logprobs = 4;
    /* greedy: on a tie the lowest id wins */
    samp_row(&row, NULL, (float[]){1, NAN, 3, 3, -INFINITY}, 5, &result);
    CHECK(result.id == 2 && result.sampled_logprob == 0 && result.n_top == 4);
    CHECK(result.top_ids[0] == 2 && result.top_ids[1] == 3 && result.top_ids[2] == 0 && result.top_ids[3] == 1);
    CHECK(result.top_logprobs[3] == -INFINITY && close_to(result.logprob, -log(2 + exp(-2)), 1e-6));
    CHECK(result.logprob == result.top_logprobs[0]);

    /* +inf wins over everything at every temperature; two ids share it */
    for (int t = 0; t < 3; t++) {
        s.temperature = (float[]){0, 1e-45f, 1e20f}[t];
        samp_row(&row, NULL, (float[]){1, INFINITY, 3, INFINITY}, 4, &result);
        CHECK((result.id == 1 || result.id == 3) && close_to(result.logprob, -log(2), 1e-6));
    }
    for (int t = 0; t < 3; t++) { /* no id may be sampled */
        s.temperature = (float[]){0, 1e-6f, 1}[t];
        samp_row(&row, NULL, (float[]){NAN, -INFINITY, -INFINITY}, 3, &result);
        CHECK(result.id == 0 && result.logprob == -INFINITY && result.sampled_logprob == 0);
        row.forbidden = (int32_t[]){1, 0}, row.n_forbidden = 2;
        samp_row(&row, NULL, (float[]){NAN, -INFINITY, -INFINITY}, 3, &result);
        CHECK(result.id == 2);
        /* 2 and 1, of which 1 is forbidden */
        s.allowed_ids = (int32_t[]){2, 1, 0}, s.n_allowed = 2;
        samp_row(&row, NULL, (float[]){5, 4, -INFINITY}, 3, &result);
        CHECK(result.id == 2 && result.logprob == -INFINITY);
        row.forbidden = (int32_t[]){1, 2};
        /* all allowed ids are forbidden: the lowest allowed one is returned */
        samp_row(&row, NULL, (float[]){5, 4, 3}, 3, &result);
        CHECK(result.id == 1);
        s.n_allowed = row.n_forbidden = 0;
    }
    /* a tiny temperature is greedy if the best id is unique; a huge one makes all ids equal */
    s.temperature = 1e-6f;
    samp_row(&row, NULL, (float[]){-1e30f, 1e30f, 1e29f}, 3, &result);
    CHECK(result.id == 1 && result.sampled_logprob == 0);
    s.temperature = 1e30f;
    samp_row(&row, NULL, (float[]){-50, 50, 10}, 3, &result);
    CHECK(close_to(result.sampled_logprob, -log(3), 1e-6));
    samp_row(&row, NULL, (float[]){-3}, 1, &result);
    CHECK(result.id == 0 && result.logprob == 0 && result.sampled_logprob == 0 && result.n_top == 1);
    s.repetition_penalty = 1e-38f; /* overflows to +inf; this case is handled */
    row.n_history = 4, row.n_prompt = 1;
    samp_row(&row, (int32_t[]){0, 1, -5, 77}, (float[]){-3, 2e3f, 1}, 3, &result);
    CHECK(result.id == 1 && result.logprob <= 0);
}

static void test_samp_forced(void) {
    toka_sample_row row = {.scored_id = 2};
    toka_sample_result result;
    samp_row(&row, NULL, (float[]){1, 2, 0.5f, -4}, 4, &result);
    double lse = log(exp(1) + exp(2) + exp(0.5) + exp(-4));
    CHECK(result.id == 2 && result.n_top == 0);
    CHECK(close_to(result.logprob, 0.5 - lse, 1e-6) && result.sampled_logprob == result.logprob);
    toka_sampling s = samp_plain();
    s.logprobs = 2, s.top_k = 1, row.sampling = &s;
    /* with parameters: top log-probabilities, but no random number is used */
    samp_row(&row, NULL, (float[]){1, 2, 0.5f, -4}, 4, &result);
    CHECK(result.id == 2 && result.n_top == 2 && result.top_ids[0] == 1 && result.top_ids[1] == 0);
    CHECK(close_to(result.top_logprobs[1], 1 - lse, 1e-6));
    /* the rank: among equal logits the lowest id comes first */
    const float ties[] = {1, 2, 1, -4, NAN, 1, -INFINITY, INFINITY};
    const int ranks[] = {3, 2, 4, 6, 7, 5, 8, 1};
    for (int id = 0; id < 8; id++) {
        float x[8];
        memcpy(x, ties, sizeof x);
        row.scored_id = id, row.wants_rank = true;
        samp_row(&row, NULL, x, 8, &result);
        CHECK_MSG(result.id == id && result.rank == ranks[id], "id %d: rank %d, not %d", id, result.rank, ranks[id]);
    }
    row.scored_id = 2, row.wants_rank = false;
    s.logprobs = TOKA_NO_LOGPROBS; /* forced ids have a log-probability all the same */
    samp_row(&row, NULL, (float[]){1, 2, 0.5f, -4}, 4, &result);
    CHECK(result.n_top == 0 && !result.rank && close_to(result.logprob, 0.5 - lse, 1e-6) && result.sampled_logprob == result.logprob);
}

/* ---- The distribution ---- */

/* Upper tail of chi-square with n degrees of freedom at x: the regularised incomplete gamma
 * function Q(n/2, x/2). Its series is used below a + 1, Lentz's continued fraction above. */
static double chi2_tail(double x, double n) {
    double a = n / 2, z = x / 2, front;
    if (z <= 0) return 1;
    front = exp(a * log(z) - z - lgamma(a));
    if (z < a + 1) {
        double term = 1 / a, sum = term;
        for (double k = a + 1; term > sum * 1e-16; k++) sum += term *= z / k;
        return 1 - front * sum;
    }
    double b = z + 1 - a, c = 1e300, d = 1 / b, f = d;
    for (int i = 1; i < 10000; i++) {
        double an = -i * (i - a);
        b += 2;
        d = 1 / (an * d + b), c = b + an / c;
        f *= d * c;
        if (fabs(d * c - 1) < 1e-15) break;
    }
    return front * f;
}

/* p-value of the G-test. Cells with an expectation under 5 are merged. If an id with p = 0 was
 * seen, it is 0. */
static double g_test(const int *seen, const double *p, int n_cells, double n) {
    double g = 0, rest_seen = 0, rest_expected = 0;
    int cells = 0;
    for (int i = 0; i < n_cells; i++) {
        if (p[i] == 0 && seen[i]) return 0;
        if (p[i] * n < 5) {
            rest_seen += seen[i], rest_expected += p[i] * n;
            continue;
        }
        cells++;
        if (seen[i]) g += 2 * seen[i] * log(seen[i] / (p[i] * n));
    }
    if (rest_expected > 1) cells++;
    if (rest_expected > 1 && rest_seen > 0) g += 2 * rest_seen * log(rest_seen / rest_expected);
    return cells < 2 ? 1 : chi2_tail(g, cells - 1);
}

/* One sample at each position, a new sample number every 1,000. */
static void sample_many(const samp_case *c, int n, int *seen) {
    float *x = mem_alloc(c->V * sizeof *x);
    toka_sample_row row = case_row(c);
    memset(seen, 0, c->V * sizeof *seen);
    for (int i = 0; i < n; i++) {
        toka_sample_result result;
        row.sample = (uint32_t)(i / 1000), row.position = (uint32_t)(i % 1000);
        memcpy(x, c->raw, c->V * sizeof *x);
        samp_row(&row, c->history, x, c->V, &result);
        seen[result.id]++;
    }
    free(x);
}

static void check_distribution(toka_sampling s, const char *what) {
    enum { V = 24 };
    const int N = FEWER ? 300000 : 1000000;
    float raw[V];
    static const int32_t history[] = {3, 5, 3, 8, 8, 8, 1};
    uint64_t r = 12345;
    for (int i = 0; i < V; i++) raw[i] = (float)(1.5 * rnd_normal(&r));
    raw[7] = -INFINITY, raw[9] = raw[10];
    samp_case c = {.s = s, .V = V, .raw = raw};
    c.row = (toka_sample_row){.scored_id = -1, .sampling = &c.s, .n_history = 7, .n_prompt = 2}, c.history = history;
    samp_ref ref = ref_new(&c);
    int seen[V];
    sample_many(&c, N, seen);
    double p = g_test(seen, ref.p, V, N);
    CHECK_MSG(p > 1e-6 && !ref.unsure, "%s: p = %g", what, p);
    /* the test has enough power: it notices if 3 % of the best id's probability moves to another
     * id */
    int best = 0, next = -1;
    for (int i = 0; i < V; i++)
        if (ref.p[i] > ref.p[best]) best = i;
    for (int i = 0; i < V; i++)
        if (i != best && ref.p[i] > 0.01) next = i;
    CHECK_MSG(next >= 0, "%s keeps only one id", what);
    if (next >= 0) ref.p[next] += 0.03 * ref.p[best], ref.p[best] *= 0.97;
    p = g_test(seen, ref.p, V, N);
    CHECK_MSG(p < 1e-6, "%s: a distribution that is off by 3 %% passes, p = %g", what, p);
    ref_free(&ref);
}

static void test_samp_g(void) {
    /* checks the test itself against tabulated quantiles */
    CHECK(fabs(chi2_tail(3.841458820694124, 1) - 0.05) < 1e-9);
    CHECK(fabs(chi2_tail(18.307038053275146, 10) - 0.05) < 1e-9 && fabs(chi2_tail(2.705543454095404, 1) - 0.1) < 1e-9);
    toka_sampling s = samp_plain();
    s.seed = 2024;
    check_distribution(s, "plain");
    s.temperature = 0.6f, check_distribution(s, "temperature 0.6");
    s.temperature = 2.5f, check_distribution(s, "temperature 2.5");
    s.temperature = 1, s.top_k = 6, check_distribution(s, "top-k");
    s.top_k = 0, s.top_p = 0.8f, check_distribution(s, "top-p");
    s.top_p = 1, s.min_p = 0.1f, check_distribution(s, "min-p");
    s = (toka_sampling){.temperature = 0.7f, .top_k = 12, .top_p = 0.92f, .min_p = 0.02f, .repetition_penalty = 1.2f,
                        .frequency_penalty = 0.3f, .presence_penalty = 0.2f, .seed = 0xDEADBEEF12345678u};
    check_distribution(s, "all together");
}

static void test_samp_g_blocks(void) { /* a row of several blocks, with bands of ids */
    enum { V = 2600, BAND = 26, BANDS = V / BAND, N = 50000 };
    static float raw[V];
    static int seen[V];
    uint64_t r = 777;
    for (int i = 0; i < V; i++) raw[i] = (float)(2 * rnd_normal(&r));
    samp_case c = {.s = samp_plain(), .V = V, .raw = raw};
    c.s.seed = 5;
    for (int cut = 0; cut < 2; cut++) {
        c.s.top_k = cut ? 500 : 0;
        c.row = (toka_sample_row){.scored_id = -1, .sampling = &c.s};
        samp_ref ref = ref_new(&c);
        samp_dist d = {raw, V, samp_max(raw, V), 1, {-INFINITY, -1}};
        samp_truncate(&d, &c.s);
        memset(seen, 0, sizeof seen);
        double total, p[BANDS] = {0};
        for (int i = 0; i < N; i++) c.row.position = (uint32_t)i, seen[samp_draw(&d, &c.row, &total)]++;
        int in_band[BANDS] = {0};
        for (int i = 0; i < V; i++) p[i / BAND] += ref.p[i], in_band[i / BAND] += seen[i];
        double value = g_test(in_band, p, BANDS, N);
        CHECK_MSG(value > 1e-6, "p = %g", value);
        ref_free(&ref);
    }
}

/* ---- The draw against its definition ---- */

/* The draws of a case by the words of chapter 22, in double, with sums in order of ids. ref: with the
 * probability of each id; group_sums: their sums over the groups. */
typedef struct draw_ref {
    int V, n_groups;
    samp_ref ref;
    double *group_sums; /* [n_groups] */
} draw_ref;

/* A draw, and how nearly it is a tie. key_margin: of the two best keys, in log2; place_margin: the
 * distance from u * S to the next border of an id, relative to its distance to the nearer end. */
typedef struct draw_result {
    int32_t id;
    double key_margin, place_margin;
} draw_result;

/* Group and block of an id as one number. */
static int draw_group(int id) { return id / 256 * 4 + id / 2 % 4; }

static draw_ref draw_ref_new(const samp_case *c) {
    draw_ref d = {c->V, (c->V + 255) / 256 * 4, ref_new(c), NULL};
    d.group_sums = mem_zalloc((size_t)d.n_groups * sizeof(double));
    for (int id = 0; id < c->V; id++) d.group_sums[draw_group(id)] += d.ref.p[id];
    return d;
}
static void draw_ref_free(draw_ref *d) { free(d->group_sums), ref_free(&d->ref); }

/* The number of a random word: word `i` of the counter (sample, position, stream, 0). */
static double draw_unit(const toka_sample_row *row, uint32_t stream, int i) {
    uint32_t counter[4] = {row->sample, row->position, stream, 0};
    samp_philox(counter, (uint32_t)row->sampling->seed, (uint32_t)(row->sampling->seed >> 32));
    return (counter[i] + 0.5) / 4294967296.0;
}

static draw_result draw_ref_sample(const draw_ref *d, const toka_sample_row *row) {
    double best = -INFINITY, second = -INFINITY, passed = 0, margin = INFINITY;
    int winner = 0;
    draw_result result = {.id = -1};
    for (int group = 0; group < d->n_groups; group++) {
        if (d->group_sums[group] == 0) continue;
        const double key = log2(d->group_sums[group]) - log2(-log1p(-draw_unit(row, 1 + (uint32_t)group / 4, group % 4)));
        if (key > best) second = best, best = key, winner = group;
        else second = MAX(second, key);
    }
    const double sum = d->group_sums[winner], target = draw_unit(row, 0, 0) * sum;
    for (int id = winner / 4 * 256; id < MIN(winner / 4 * 256 + 256, d->V); id++) {
        if (draw_group(id) != winner || d->ref.p[id] == 0) continue;
        if (result.id < 0 || passed <= target) result.id = id;
        if (passed > 0) margin = MIN(margin, fabs(target - passed));
        passed += d->ref.p[id];
    }
    result.key_margin = best - second, result.place_margin = margin / MIN(target, sum - target);
    return result;
}

/* Counts of compared draws. different: other ids than expected; close: too nearly a tie for margins
 * key and place; wrong: different but not close. key, place: the largest margin that explains a
 * different id without top-p. */
typedef struct draw_counts {
    int64_t n, close, different, wrong;
    double key, place;
} draw_counts;

/* The references of one case: with its top-p, and with one that is lower and one that is higher by a
 * factor of 1 + key. One reference is enough if there is no top-p or if the factor is lost in the
 * rounding of top_p. */
typedef struct draw_check {
    samp_case c;
    draw_ref refs[3];
    int n_refs;
    double key, place;
} draw_check;

static draw_check draw_check_new(const samp_case *c, double key, double place) {
    draw_check check = {.c = *c, .n_refs = c->s.top_p < 1 && key > FLT_EPSILON ? 3 : 1, .key = key, .place = place};
    for (int i = 0; i < check.n_refs; i++) {
        samp_case shifted = *c;
        if (i) shifted.s.top_p = (float)MIN(1, c->s.top_p * (1 + (i == 1 ? -key : key)));
        check.refs[i] = draw_ref_new(&shifted);
    }
    return check;
}
static void draw_check_free(draw_check *check) {
    for (int i = 0; i < check->n_refs; i++) draw_ref_free(&check->refs[i]);
}

/* Counts one draw of the case, with the sample and position of `row`: `id` and `other` are compared.
 * If other < 0, `id` and the reference. */
static void draw_check_id(const draw_check *check, toka_sample_row row, int32_t id, int32_t other,
                          draw_counts *counts) {
    bool close = check->refs[0].ref.none_allowed || check->refs[0].ref.unsure;
    row.sampling = &check->c.s;
    const draw_result first = draw_ref_sample(&check->refs[0], &row);
    for (int i = 0; i < check->n_refs; i++) {
        const draw_result want = i ? draw_ref_sample(&check->refs[i], &row) : first;
        close |= want.id != first.id || want.key_margin <= check->key || want.place_margin <= check->place;
    }
    const bool different = id != (other < 0 ? first.id : other);
    if (different && check->n_refs == 1) {
        const bool by_key = first.key_margin / check->key < first.place_margin / check->place;
        if (by_key) counts->key = MAX(counts->key, first.key_margin);
        else counts->place = MAX(counts->place, first.place_margin);
    }
    counts->n++;
    counts->close += close;
    counts->different += different;
    counts->wrong += different && !close;
}

/* A row with random logits, temperature and filters, for draws. */
static samp_case draw_case(uint64_t seed, int V) {
    uint64_t s = seed * 0x9E3779B97F4A7C15u;
    for (int i = 0; i < 8; i++) rnd(&s);
    samp_case c = {.s = samp_plain(), .V = V, .raw = mem_alloc((size_t)V * sizeof(float))};
    random_logits(&s, c.raw, V);
    random_filters(&s, &c);
    c.s.logprobs = TOKA_NO_LOGPROBS, c.s.seed = rnd(&s);
    if (c.s.temperature == 0) c.s.temperature = 1;
    if (c.s.min_p == 1) c.s.min_p = 0; /* at high temperatures it leaves it to rounding which ids are kept */
    c.row = (toka_sample_row){.scored_id = -1, .sample = (uint32_t)rnd(&s) % 1000};
    return c;
}

static void test_samp_draws(void) {
    enum { DRAWS = 1000 };
    draw_counts counts = {0};
    for (int i = 0; i < (FEWER ? 60 : 200); i++) {
        samp_case c = draw_case((uint64_t)i, (int[]){5, 24, 300, 700}[i % 4]);
        draw_check check = draw_check_new(&c, 1e-9, 1e-9);
        for (int k = 0; k < DRAWS; k++) {
            c.row.position = (uint32_t)k;
            draw_check_id(&check, c.row, sample_case(&c).id, -1, &counts);
        }
        draw_check_free(&check);
        case_free(&c);
    }
    CHECK_MSG(!counts.wrong && counts.close * 1000 < counts.n, "%lld of %lld draws are wrong, %lld nearly ties", (long long)counts.wrong,
              (long long)counts.n, (long long)counts.close);
}

/* Pairs of samples at neighbouring positions, sample numbers and seeds: each of the V*V cells has
 * the product of the probabilities. */
static void test_samp_pairs(void) {
    enum { V = 8 };
    const int N = FEWER ? 250000 : 1000000;
    float raw[V] = {0.1f, 0.9f, -0.4f, 0, 0.7f, 0.2f, -1, 0.5f};
    samp_case c = {.s = samp_plain(), .V = V, .raw = raw};
    c.row = (toka_sample_row){.scored_id = -1, .sampling = &c.s};
    samp_ref ref = ref_new(&c);
    double p[V * V];
    for (int i = 0; i < V * V; i++) p[i] = ref.p[i / V] * ref.p[i % V];
    for (int which = 0; which < 3; which++) {
        int seen[V * V] = {0};
        for (int i = 0; i < N / 2; i++) {
            int id[2];
            for (int j = 0; j < 2; j++) {
                uint32_t at = (uint32_t)(2 * i + j);
                c.s.seed = which == 2 ? at : 11;
                c.row.position = which == 0 ? at : 3, c.row.sample = which == 1 ? at : 4;
                float x[V];
                toka_sample_result result;
                memcpy(x, raw, sizeof x);
                samp_row(&c.row, NULL, x, V, &result);
                id[j] = result.id;
            }
            seen[id[0] * V + id[1]]++;
        }
        double value = g_test(seen, p, V * V, N / 2);
        CHECK_MSG(value > 1e-6, "pairs by %s: p = %g", (const char *[]){"position", "sample", "seed"}[which], value);
    }
    ref_free(&ref);
}

/* a sample depends on its own counter only; another counter gives another sample */
static void test_samp_pure(void) {
    enum { V = 1000 };
    static float raw[V];
    uint64_t r = 3;
    for (int i = 0; i < V; i++) raw[i] = (float)(0.1 * rnd_normal(&r));
    samp_case c = {.s = samp_plain(), .V = V, .raw = raw};
    c.row = (toka_sample_row){.scored_id = -1, .sampling = &c.s};
    int same[3] = {0}, n = 300;
    for (int i = 0; i < n; i++) {
        c.s.seed = 40, c.row.sample = 2, c.row.position = (uint32_t)i;
        int32_t id = sample_case(&c).id;
        c.s.seed = 41, same[0] += id == sample_case(&c).id;
        c.s.seed = 40, c.row.sample = 3, same[1] += id == sample_case(&c).id;
        c.row.sample = 2, c.row.position += 1000, same[2] += id == sample_case(&c).id;
        c.row.position -= 1000;
        CHECK(id == sample_case(&c).id);
    }
    /* by chance about 0.3 are equal */
    for (int i = 0; i < 3; i++) CHECK_MSG(same[i] < 10, "%d of %d", same[i], n);
}

/* ---- The fallback id ---- */

/* The lowest id that is allowed and not forbidden; any: may be forbidden. */
static int32_t samp_lowest(const toka_sample_row *row, int V, bool any) {
    for (int32_t id = 0; id < V; id++) {
        bool in = !row->sampling->n_allowed, out = false;
        for (int i = 0; i < row->sampling->n_allowed; i++) in |= row->sampling->allowed_ids[i] == id;
        for (int i = 0; i < row->n_forbidden; i++) out |= row->forbidden[i] == id;
        if (in && (any || !out)) return id;
    }
    return any ? 0 : samp_lowest(row, V, true);
}

static void test_samp_last_resort(void) {
    enum { V = 128256 };
    uint64_t rng = 1;
    int32_t *all = mem_alloc(V * sizeof *all), forbidden[40], allowed[40];
    for (int round = 0; round < 2000; round++) {
        const int n = 1 + (int)(rnd(&rng) % 3000), near = round % 2 ? n : MIN(n, 30);
        toka_sampling s = {.allowed_ids = allowed, .n_allowed = round % 3 ? (int)(rnd(&rng) % 40) : 0};
        toka_sample_row row = {.sampling = &s, .forbidden = forbidden, .n_forbidden = (int)(rnd(&rng) % 40)};
        for (int i = 0; i < 40; i++) allowed[i] = (int32_t)(rnd(&rng) % (uint64_t)near);
        /* not all ids are in the list */
        for (int i = 0; i < 40; i++) forbidden[i] = (int32_t)(rnd(&rng) % (uint64_t)(near + 2)) - 1;
        CHECK(toka_fallback_id(&row, n) == samp_lowest(&row, n, false));
    }
    /* comparing all pairs of them would take 16 thousand million steps */
    for (int i = 0; i < V; i++) all[i] = V - 1 - i;
    toka_sampling s = {.allowed_ids = all, .n_allowed = V};
    toka_sample_row row = {.sampling = &s, .forbidden = all, .n_forbidden = V};
    CHECK(toka_fallback_id(&row, V) == 0);
    row.forbidden++, row.n_forbidden--;
    CHECK(toka_fallback_id(&row, V) == V - 1);
    free(all);
}

/* ---- Parameters ---- */

/* The log-probability of a sample is that of its raw logit, under every penalty that samp_check
 * accepts. */
static void test_samp_undone(void) {
    static const float repetitions[] = {1e-30f, 0.01f, 0.3f, 1, 7, 100, 1e30f}, others[] = {-2, -0.1f, 0, 0.3f, 2};
    int32_t history[60];
    uint64_t seed = 11;
    toka_err e;
    toka_sample_result result;
    for (int i = 0; i < 3000; i++) {
        toka_sampling s = samp_plain();
        s.temperature = 0, s.repetition_penalty = repetitions[rnd(&seed) % 7];
        s.frequency_penalty = others[rnd(&seed) % 5], s.presence_penalty = others[rnd(&seed) % 5];
        if (samp_check(&s, 8, &e)) continue; /* refused */
        int32_t id = (int32_t)(rnd(&seed) % 8);
        int n_prompt = (int)(rnd(&seed) % 2), count = (int)(rnd(&seed) % 50);
        for (int k = 0; k < n_prompt + count; k++) history[k] = id;
        toka_sample_row row = {.scored_id = -1, .sampling = &s, .n_history = n_prompt + count, .n_prompt = n_prompt};
        s.allowed_ids = &id, s.n_allowed = 1;
        float x[8];
        double sum = 0, raw;
        for (int k = 0; k < 8; k++) x[k] = (float)(60 * (rnd_unit(&seed) - 0.5));
        for (int k = 0; k < 8; k++) sum += exp(x[k]);
        raw = x[id];
        samp_row(&row, history, x, 8, &result);
        double unsure = 1e-5 + 0x1p-23 * (fabs(x[id]) + fabs(2.0 * count) + 4) * fmin(fmax(1, s.repetition_penalty), 100);
        CHECK_MSG(result.id == id && close_to(result.logprob, raw - log(sum), unsure) && result.logprob <= 1e-6,
                  "repetition %g, frequency %g, presence %g, %d times: logit %g: %g for %g", s.repetition_penalty, s.frequency_penalty,
                  s.presence_penalty, count, raw, result.logprob, raw - log(sum));
    }
}

static void test_samp_check(void) {
    toka_err e = {0};
    toka_sampling good = samp_plain();
    CHECK(samp_check(&good, 100, &e) == 0);
    const char *longest = memset(mem_zalloc(SAMP_MAX_STOP_BYTES + 2), 'x', SAMP_MAX_STOP_BYTES + 1);
    const int32_t many[101] = {0};
#define BAD(message, ...) \
    do { \
        toka_sampling s = good; \
        __VA_ARGS__; \
        CHECK_MSG(samp_check(&s, 100, &e) == TOKA_E_USE && !strcmp(e.msg, message), "%s", e.msg); \
        e.msg[0] = 0; \
    } while (0)
    BAD("temperature: -0.5, expected 0 or more", s.temperature = -0.5f);
    BAD("temperature: nan, expected 0 to 3.40282e+38", s.temperature = (float)fabs(NAN));
    BAD("temperature: inf, expected 0 to 3.40282e+38", s.temperature = INFINITY);
    BAD("top_p: 0, expected more than 0 to 1", s.top_p = 0);
    BAD("top_p: 1.5, expected more than 0 to 1", s.top_p = 1.5f);
    BAD("min_p: -1, expected 0 to 1", s.min_p = -1);
    BAD("top_k: -2, expected -1 or more", s.top_k = -2);
    BAD("repetition_penalty: 0, expected 0.01 to 100", s.repetition_penalty = 0);
    BAD("repetition_penalty: 0.0099, expected 0.01 to 100", s.repetition_penalty = 0.0099f);
    BAD("repetition_penalty: 1e+30, expected 0.01 to 100", s.repetition_penalty = 1e30f);
    BAD("repetition_penalty: 1e-30, expected 0.01 to 100", s.repetition_penalty = 1e-30f);
    BAD("repetition_penalty: nan, expected 0.01 to 100", s.repetition_penalty = (float)fabs(NAN));
    BAD("presence_penalty: 2.5, expected -2 to 2", s.presence_penalty = 2.5f);
    BAD("frequency_penalty: -3, expected -2 to 2", s.frequency_penalty = -3);
    BAD("max_tokens: -1, expected 0 or more", s.max_tokens = -1);
    BAD("min_tokens: -1, expected 0 or more", s.min_tokens = -1);
    BAD("min_tokens: 9, expected 0 to 8", s.min_tokens = 9, s.max_tokens = 8);
    BAD("logprobs: 101, expected -1 to 100", s.logprobs = 101);
    BAD("logprobs: -2, expected -1 to 100", s.logprobs = -2);
    BAD("stop_token_ids[1]: id 100, expected 0 to 99", s.stop_ids = (int32_t[]){99, 100}, s.n_stop_ids = 2);
    BAD("stop_token_ids: -4 entries, expected 0 or more", s.n_stop_ids = -4);
    BAD("allowed_token_ids[0]: id -1, expected 0 to 99", s.allowed_ids = (int32_t[]){-1}, s.n_allowed = 1);
    BAD("allowed_token_ids: no ids given, expected 3", s.n_allowed = 3);
    BAD("allowed_token_ids: 101 ids, expected at most 100, the size of the vocabulary", s.allowed_ids = many, s.n_allowed = 101);
    BAD("stop_token_ids: 101 ids, expected at most 100, the size of the vocabulary", s.stop_ids = many, s.n_stop_ids = 101);
    BAD("logit_bias: 101 ids, expected at most 100, the size of the vocabulary", s.bias_ids = many, s.n_bias = 101);
    BAD("logit_bias[0]: id 100, expected 0 to 99", s.bias_ids = (int32_t[]){100}, s.n_bias = 1);
    BAD("logit_bias: no values given, expected 1", s.bias_ids = (int32_t[]){1}, s.n_bias = 1);
    BAD("logit_bias: 101, expected -100 to 100", s.bias_ids = (int32_t[]){1}, s.bias_values = (float[]){101}, s.n_bias = 1);
    BAD("stop: 257 texts, expected at most 256", s.n_stop = 257);
    BAD("bad_words: 5000 sequences of ids, expected at most 4096", s.n_bad = 5000);
    BAD("bad_words[1]: 0 ids, expected 1 to 4096", s.bad_ids = (int32_t[]){1}, s.bad_lengths = (int[]){1, 0}, s.n_bad = 2);
    BAD("bad_words[2]: id 100, expected 0 to 99", s.bad_ids = (int32_t[]){1, 2, 100}, s.bad_lengths = (int[]){1, 2}, s.n_bad = 2);
    BAD("stop: no strings given, expected 1", s.n_stop = 1);
    BAD("stop[1]: 0 bytes, expected 1 to 4096", s.stop = (const char *[]){"a", ""}, s.n_stop = 2);
    BAD("stop[0]: 0 bytes, expected 1 to 4096", s.stop = (const char *[]){NULL}, s.n_stop = 1);
    BAD("stop[0]: 4097 bytes, expected 1 to 4096", s.stop = (const char *[]){longest}, s.n_stop = 1);
    BAD("stop[0]: byte 1 is not valid UTF-8", s.stop = (const char *[]){"a\xE2\x82"}, s.n_stop = 1);
#undef BAD
    toka_sampling s = good; /* the allowed limits */
    s.temperature = 0, s.top_p = 1e-9f, s.min_p = 1, s.top_k = -1, s.logprobs = 32, s.min_tokens = s.max_tokens = 5;
    s.stop = (const char *[]){"\xED\x95\x9C", "x"}, s.n_stop = 2, s.presence_penalty = -2, s.stop_ids = (int32_t[]){0, 99};
    s.n_stop_ids = 2, s.allowed_ids = many, s.n_allowed = 100;
    CHECK(samp_check(&s, 100, &e) == 0);
    s.logprobs = TOKA_NO_LOGPROBS, s.repetition_penalty = 0.01f;
    CHECK(samp_check(&s, 100, &e) == 0);
    s.repetition_penalty = 100;
    CHECK(samp_check(&s, 100, &e) == 0);
    free((void *)longest);
}

/* ---- Stop strings ---- */

typedef struct stop_expected { /* the expected result for a whole text */
    size_t out;            /* bytes that are output in the end */
    size_t end;            /* one past the stop string, or the text's length */
    bool stopped;
} stop_expected;

/* Searches the whole text for the first end of a stop string at or after the first byte of an armed
 * piece. On a tie, the stop string that starts first wins. */
static stop_expected naive_stop(str text, const char *const *stop, int n_stop, size_t armed_from, bool include) {
    for (size_t end = armed_from + 1; end <= text.n; end++) {
        size_t longest = 0;
        for (int i = 0; i < n_stop; i++)
            if (str_ends(str_sub(text, 0, end), str_c(stop[i]))) longest = MAX(longest, strlen(stop[i]));
        if (longest) return (stop_expected){include ? end : end - longest, end, true};
    }
    return (stop_expected){text.n, text.n, false};
}

/* The largest number of bytes that may be output after `n` bytes: all but the longest suffix that
 * is the beginning of a stop string. */
static size_t naive_certain(str text, size_t n, const char *const *stop, int n_stop) {
    for (size_t keep = n; keep; keep--)
        for (int i = 0; i < n_stop; i++)
            if (strlen(stop[i]) > keep && str_starts(str_c(stop[i]), str_sub(text, n - keep, n))) return n - keep;
    return n;
}

/* Feeds one text in random pieces. Pieces that begin before armed_from are not armed (armed_from is
 * moved to a piece's boundary). */
static void check_stop(str text, const char *const *stop, int n_stop, bool include, uint64_t *s) {
    stop_scanner scan;
    buf out = {0};
    size_t at = 0, armed_from = rnd(s) % 2 ? 0 : rnd(s) % (text.n + 1), piece_max = 1 + rnd(s) % 5;
    size_t cuts[256], n_cuts = 0;
    while (at < text.n) { /* some pieces are empty, as for a token that is part of a character */
        size_t step = rnd(s) % 9 ? 1 + rnd(s) % piece_max : 0;
        cuts[n_cuts++] = at = MIN(text.n, at + step);
    }
    size_t border = 0;
    for (size_t i = 0; i < n_cuts && border < armed_from; i++) border = cuts[i];
    stop_expected want = naive_stop(text, stop, n_stop, border, include);
    stop_init(&scan, stop, n_stop, include);
    bool stopped = false;
    at = 0;
    for (size_t i = 0; i < n_cuts && !stopped; i++) {
        /* a heap block of its own: ASan reports any read outside */
        char *piece = mem_alloc(cuts[i] - at);
        memcpy(piece, text.p + at, cuts[i] - at);
        stopped = stop_put(&scan, (str){piece, cuts[i] - at}, at >= border, &out);
        free(piece);
        at = cuts[i];
        size_t certain = stopped ? want.out : naive_certain(text, at, stop, n_stop);
        CHECK_MSG(stopped == (want.stopped && want.end <= at) && out.n == certain,
                  "after %zu of %.*s: %zu out, expected %zu", at, STRF(text), out.n, certain);
    }
    if (stopped) CHECK(stop_put(&scan, text, true, &out) && out.n == want.out);
    stop_flush(&scan, &out);
    CHECK_MSG(stopped == want.stopped && out.n == want.out && !memcmp(buf_view(&out).p, text.p, out.n), "%.*s", STRF(text));
    stop_free(&scan);
    buf_free(&out);
}

static void test_stop_random(void) {
    uint64_t s = 4711;
    for (int round = 0; round < 40000 && check_failed < 10; round++) {
        char words[4][8], text[48];
        const char *stop[4];
        int n_stop = (int)(rnd(&s) % 5), letters = 1 + (int)(rnd(&s) % 3), longest = 1 + (int)(rnd(&s) % 7);
        for (int i = 0; i < n_stop; i++) {
            int n = 1 + (int)(rnd(&s) % (uint64_t)longest);
            for (int j = 0; j < n; j++) words[i][j] = (char)('a' + rnd(&s) % (uint64_t)letters);
            words[i][n] = 0, stop[i] = words[i];
        }
        size_t n = rnd(&s) % sizeof text;
        for (size_t i = 0; i < n; i++) text[i] = (char)('a' + rnd(&s) % (uint64_t)(letters + (round % 2)));
        check_stop((str){text, n}, stop, n_stop, rnd(&s) % 2, &s);
    }
}

static void test_stop_cases(void) {
    static const struct {
        const char *text, *stop[3], *out, *with; /* out: without the stop string; with: with it */
    } cases[] = {
        {"The end.\n\nUser: hi", {"\n\nUser:", "###"}, "The end.", "The end.\n\nUser:"},
        {"xabcdef", {"abcde", "bcd"}, "xa", "xabcd"},         /* "bcd" is complete first */
        /* the same end: the one that starts first wins */
        {"xabcdef", {"bcd", "abcd"}, "x", "xabcd"},
        {"aaab", {"aab"}, "a", "aaab"}, /* falls back to a shorter beginning */
        {"ababac", {"abac", "bb"}, "ab", "ababac"},
        {"abab", {"abc"}, "abab", "abab"}, /* held back until the end, then output */
        {"\xED\x95\x9C\xEA\xB5\xAD", {"\xEA\xB5\xAD"}, "\xED\x95\x9C", "\xED\x95\x9C\xEA\xB5\xAD"},
        {"\xED\x95\x9C\xEA\xB5\xAE!", {"\xEA\xB5\xAD"}, "\xED\x95\x9C\xEA\xB5\xAE!", "\xED\x95\x9C\xEA\xB5\xAE!"},
        {"", {"a"}, "", ""},
        {"a", {"a"}, "", "a"},
    };
    for (int i = 0; i < COUNT(cases); i++)
        for (int include = 0; include < 2; include++)
            for (size_t piece = 1; piece < 9; piece++) {
                stop_scanner scan;
                buf out = {0};
                int n_stop = 0;
                while (n_stop < 3 && cases[i].stop[n_stop]) n_stop++;
                stop_init(&scan, cases[i].stop, n_stop, include);
                str text = str_c(cases[i].text);
                for (size_t at = 0; at < text.n; at += piece)
                    if (stop_put(&scan, str_sub(text, at, MIN(text.n, at + piece)), true, &out)) break;
                stop_flush(&scan, &out);
                CHECK_MSG(str_is(buf_view(&out), include ? cases[i].with : cases[i].out), "case %d: %.*s", i,
                          STRF(buf_view(&out)));
                stop_free(&scan);
                buf_free(&out);
            }
}

static void test_stop_armed(void) {
    static const char *const stop[] = {"ab"};
    stop_scanner scan;
    buf out = {0};
    stop_init(&scan, stop, 1, false);
    /* too early: ordinary text */
    CHECK(!stop_put(&scan, STR("1ab2"), false, &out) && str_is(buf_view(&out), "1ab2"));
    /* the beginning of a stop string is held back */
    CHECK(!stop_put(&scan, STR("3a"), false, &out) && str_is(buf_view(&out), "1ab23"));
    /* and it ends where it counts */
    CHECK(stop_put(&scan, STR("b4"), true, &out) && str_is(buf_view(&out), "1ab23"));
    CHECK(stop_put(&scan, STR("more"), true, &out) && str_is(buf_view(&out), "1ab23"));
    stop_free(&scan);
    buf_clear(&out);
    stop_init(&scan, NULL, 0, false); /* no stop strings: text passes unchanged */
    CHECK(!stop_put(&scan, STR("abc"), true, &out) && !stop_put(&scan, STR(""), true, &out));
    CHECK(str_is(buf_view(&out), "abc"));
    stop_flush(&scan, &out);
    stop_free(&scan);
    buf_free(&out);
}

/* ---- Bad words as texts, against a search in the text ---- */

/* Sets `text` to the end of the output's text: enough bytes for the longest word and one character before it. Sets `token_starts`, a
 * byte for each byte of text, to 1 where a token begins, else 0. */
static void words_output_end(const toka_words *words, const ids *output, bool keep_special, buf *text, buf *token_starts) {
    const tok *t = words->tokenizer;
    buf_clear(text), buf_clear(token_starts);
    for (size_t i = 0; i < output->n; i++) {
        const int32_t id = output->p[i];
        if (keep_special || id >= t->n_ids || !(t->flag[id] & TOK_SKIPPED)) tok_put_bytes(t, id, text);
        for (bool first = true; token_starts->n < text->n; first = false) buf_char(token_starts, first);
    }
}

/* Whether a word lies at byte `at`, between two edges of the whole text. */
static bool words_edge(const tok *t, str text, size_t at) {
    return samp_is_word_edge(&t->uni, str_sub(text, 0, at), str_sub(text, at, text.n));
}
static bool words_has_at(const tok *t, str text, size_t at, str word) {
    return str_starts(str_sub(text, at, text.n), word) && words_edge(t, text, at) && words_edge(t, text, at + word.n);
}

/* Returns whether token `id`, of this text, would complete a word after an output that ends in `end`. */
static bool words_completes(const toka_words *words, int32_t id, str text, str end, const buf *token_starts) {
    const tok *t = words->tokenizer;
    const bool special = t->flag[id] & TOK_SPECIAL;
    for (int i = 0; i < words->n_words; i++) {
        const str word = words->words[i];
        if (special ? str_eq(word, text) : false) return true;
        for (size_t at = 0; at < text.n && !special; at++)
            if (words_has_at(t, text, at, word)) return true;
        for (size_t n = 1; n < word.n && n <= end.n && text.n && !special; n++) {
            const size_t start = end.n - n;
            if (memcmp(end.p + start, word.p, n) || !words_has_at(t, text, 0, str_sub(word, n, word.n))) continue;
            if (token_starts->p[start] || words_edge(t, end, start)) return true;
        }
    }
    return false;
}

/* Returns whether a token of the output begins or ends inside a character. */
static bool words_splits_character(const tok *t, const ids *output) {
    buf text = {0};
    bool split = false;
    for (size_t i = 0; i < output->n; i++) {
        buf_clear(&text), tok_put_bytes(t, output->p[i], &text);
        if (!text.n) continue; /* an id without a text */
        const char *p = text.p, *end = text.p + text.n;
        for (int n; p < end && (n = utf8_len(p, end)); ) p += n;
        split |= p < end;
    }
    buf_free(&text);
    return split;
}

/* Ids whose text is made of a few characters only, so that words and outputs of them meet often; and special tokens. */
static ids words_alphabet(const tok *t) {
    ids out = {0};
    buf text = {0};
    for (int32_t id = 0; id < t->n_ids; id++) {
        bool good = true;
        buf_clear(&text), tok_put_bytes(t, id, &text);
        for (size_t k = 0; k < text.n; k++) good &= strchr(" aest.\xC3\xA9\xE4\xB8\xAD", text.p[k]) != NULL;
        if (text.n ? good || (t->flag[id] & TOK_SPECIAL && rnd(&(uint64_t){(uint64_t)id + 1}) % 8 == 0) : good) ids_push(&out, id);
    }
    buf_free(&text);
    return out;
}

/* Compares what the compiled words forbid after random outputs with a search in the text. */
static void words_compare(const tok *t, uint64_t seed, int n_rounds, int n_outputs) {
    ids alphabet = words_alphabet(t), special = {0}, output = {0};
    buf text[6] = {{0}}, end = {0}, starts = {0}, token = {0};
    const char *texts[4];
    int n_after = 0, n_split = 0;
    for (int32_t id = 0; id < t->n_ids; id++)
        if (t->flag[id] & TOK_SPECIAL) ids_push(&special, id);
    float *x = mem_alloc(t->n_ids * sizeof *x);
    for (int round = 0; round < n_rounds; round++) {
        toka_words *words;
        toka_err e;
        const int n_words = 1 + (int)(rnd(&seed) % COUNT(texts));
        for (int i = 0; i < n_words; i++) {
            buf_clear(&text[i]);
            do tok_put_bytes(t, alphabet.p[rnd(&seed) % alphabet.n], &text[i]);
            while (rnd(&seed) % 3 || !text[i].n);
            texts[i] = text[i].p;
        }
        if (samp_words_new(&words, t, texts, n_words, &e)) continue; /* only spaces */
        for (int k = 0; k < n_outputs; k++) {
            const str word = words->words[rnd(&seed) % (uint64_t)n_words];
            output.n = 0;
            for (int i = (int)(rnd(&seed) % 6); i > 0; i--)
                ids_push(&output, rnd(&seed) % 12 ? alphabet.p[rnd(&seed) % alphabet.n] : (int32_t)(rnd(&seed) % (uint64_t)(t->n_ids + 2)));
            if (rnd(&seed) % 4) { /* then a beginning of a word in two pieces, at times with another token between them */
                const size_t n = 1 + rnd(&seed) % word.n, cut = rnd(&seed) % n;
                tok_encode(t, str_sub(word, 0, cut), 0, &output, &e);
                if (rnd(&seed) % 4 == 0) ids_push(&output, special.p[rnd(&seed) % special.n]);
                tok_encode(t, str_sub(word, cut, n), 0, &output, &e);
            }
            const bool keep_special = rnd(&seed) % 2;
            const toka_sample_row row = {.words = &words->table, .keep_special = keep_special};
            memset(x, 0, t->n_ids * sizeof *x);
            samp_apply_words(&row, output.p, (int)output.n, x, t->n_ids);
            words_output_end(words, &output, keep_special, &end, &starts);
            const bool split = words_splits_character(t, &output);
            n_split += split;
            for (int32_t id = 0; id < t->n_ids; id++) {
                buf_clear(&token), tok_put_bytes(t, id, &token);
                const bool want = words_completes(words, id, buf_view(&token), buf_view(&end), &starts);
                const bool got = x[id] == -INFINITY;
                if (got != want && !split)
                    CHECK_MSG(false, "round %d: %d '%.*s' after '%.*s', word '%s': %d, expected %d", round, id, STRF(buf_view(&token)),
                              STRF(buf_view(&end)), texts[0], got, want);
                n_after += want && !words_completes(words, id, buf_view(&token), STR(""), &starts);
            }
        }
        samp_words_del(words);
    }
    CHECK_MSG(n_after > n_rounds * n_outputs / 10 && n_split * 2 < n_rounds * n_outputs, "%d ids after an output, %d outputs split a character",
              n_after, n_split);
    ids_free(&alphabet), ids_free(&special), ids_free(&output), free(x);
    for (int i = 0; i < COUNT(text); i++) buf_free(&text[i]);
    buf_free(&end), buf_free(&starts), buf_free(&token);
}

static void test_samp_words(void) {
    toka_err e;
    tok *t = NULL;
    str s = read_copy("test/model/tokenizer.json");
    CHECK(!tok_load(&t, s, STR(""), &e));
    words_compare(t, 1, FEWER ? 30 : 100, 24);
    tok_del(t), free((void *)s.p);
    static const char *const folders[] = {"tokenizers/llama-3.1", "tokenizers/qwen2.5", "tokenizers/llama-2"};
    for (int i = 0; i < COUNT(folders); i++) {
        if (!(t = tok_test_open(folders[i]))) continue;
        words_compare(t, 2, 4, 4);
        tok_del(t);
    }
}

static const struct test samp_tests[] = {
    {"samp_philox", test_samp_philox},
    {"samp_exp", test_samp_exp},
    {"samp_naive", test_samp_naive},
    {"samp_large", test_samp_large},
    {"samp_edges", test_samp_edges},
    {"samp_forced", test_samp_forced},
    {"samp_pure", test_samp_pure},
    {"samp_g", test_samp_g},
    {"samp_g_blocks", test_samp_g_blocks},
    {"samp_pairs", test_samp_pairs},
    {"samp_draws", test_samp_draws},
    {"samp_last_resort", test_samp_last_resort},
    {"samp_undone", test_samp_undone},
    {"samp_check", test_samp_check},
    {"samp_words", test_samp_words},
    {"stop_random", test_stop_random},
    {"stop_cases", test_stop_cases},
    {"stop_armed", test_stop_armed},
    {0},
};
