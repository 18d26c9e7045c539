/* gpu_graphs.h - steps as graphs. A script of steps is posted two at a time, as the engine does,
 * once with graphs and once without; results must be equal. Sequences share one page with 48 and
 * one with 12 sequences, and have own pages. In each step other sequences are decoded together.
 * They use their last sampled token, end and start again. Their pages are zeros at first, in both
 * runs. Layers with windowed pages have for each sequence the two that its window reaches. Most rows
 * of every third step have a mask. In the run with graphs these steps are held: their masks come when
 * their bodies are launched and the step before is done; several ranks have no held steps. Include after ../toka.c and gpu_host.h. */

enum { G_SEQS = 288, G_FAMILY = 48, G_GROUP = 12, G_STEPS = 104, G_OWN = 4, G_LEN = 360 };
enum { G_SHARED = G_SEQS / G_FAMILY + G_SEQS / G_GROUP };

typedef struct g_step {
    int32_t id[G_SEQS], pos[G_SEQS], kv_slot[G_SEQS], pages[7 * G_SEQS], windowed_slot[G_SEQS], windowed_pages[7 * G_SEQS];
    int window; /* of the layers with windowed pages, at most a page; 0: there are none */
    toka_span spans[3 * G_SEQS];
    int32_t tables[G_SEQS][G_OWN + 2]; /* the block table of each row's sequence */
    toka_sample_row samples[G_SEQS];
    toka_copy copy, windowed_copy;
    const uint32_t *masks[G_SEQS]; /* of its rows; NULL: none, or it comes too late */
    toka_sample_result results[G_SEQS];
    int n_pages;
    toka_step s;
} g_step;

typedef struct g_seq { /* the next position; whether a token was sampled */
    int len;
    bool has_sampled;
} g_seq;

static int g_page(int seq, int p) {
    return p > 1 ? G_SHARED + seq * G_OWN + p - 2 : p ? G_SEQS / G_FAMILY + seq / G_GROUP : seq / G_FAMILY;
}
/* The windowed page of page p > 0 of a sequence. */
static int g_windowed_page(int seq, int p) {
    return p > 1 ? seq * 2 + p % 2 : G_SEQS * 2 + seq / G_GROUP;
}
static void g_add_span(g_step *g, int row0, int n_rows, int kv0, int n_kv, int seq, int B) {
    g->spans[g->s.n_spans++] = (toka_span){row0, n_rows, g->n_pages, kv0, n_kv};
    for (int p = kv0 / B; p * B < kv0 + n_kv; p++) {
        const bool seen = p && (p + 1) * B > kv0 + n_kv - g->window; /* page 0 never: sequences begin with two pages */
        g->windowed_pages[g->n_pages] = seen ? g_windowed_page(seq, p) : -1;
        g->pages[g->n_pages++] = g_page(seq, p);
    }
}
/* Adds spans of page p for the rows that share it, if there are at least `above` + 1 of them. */
static void g_add_shared_spans(g_step *g, int from, int to, int p, int each, int above, int B) {
    for (int i = from, end; i < to; i = end) {
        for (end = i; end < to && end / each == i / each;) end++;
        if (end - i > above) g_add_span(g, i - from, end - i, p * B, B, i, B);
    }
}

/* The sample row of row `row` of sequence q. mixed: nearly all rows have filters and lists, some of
 * each kind, and some are plain. */
static toka_sample_row g_sample_row(int row, int q, int len, bool one, bool mixed) {
    static const int32_t ids[] = {3, 17, 40, 41, 42, 99, 130, 17, 200, 3, 7, 150};
    static const float values[] = {2, -3, 0.5f, 4};
    static const toka_sampling how[] = {{.temperature = 0.7, .top_p = 1, .repetition_penalty = 1, .seed = 7},
                                        {.top_p = 1, .repetition_penalty = 1},
                                        {.temperature = 1, .top_p = 0.9, .repetition_penalty = 1, .seed = 9},
                                        {.temperature = 0.7, .top_p = 1, .repetition_penalty = 1, .seed = 7, .logprobs = TOKA_NO_LOGPROBS}},
                               mix[] = {{.temperature = 0.6, .top_p = 0.9, .repetition_penalty = 1, .seed = 9},
                                        {.temperature = 0.7, .top_p = 0.8, .top_k = 20, .repetition_penalty = 1.05, .seed = 9},
                                        {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 7, .logprobs = 5},
                                        {.temperature = 1, .top_p = 1, .min_p = 0.05, .repetition_penalty = 1, .seed = 3},
                                        {.temperature = 0.8, .top_p = 1, .repetition_penalty = 1, .presence_penalty = 1, .frequency_penalty = 0.5},
                                        {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .bias_ids = ids, .bias_values = values, .n_bias = 4},
                                        {.top_p = 1, .repetition_penalty = 1, .allowed_ids = ids, .n_allowed = 9, .logprobs = 3},
                                        {.temperature = 0.7, .top_p = 1, .top_k = 7, .repetition_penalty = 1, .logprobs = TOKA_NO_LOGPROBS}};
    toka_sample_row r = {.row = row, .seq = q, .scored_id = -1, .sample = (uint32_t)q, .position = (uint32_t)len};
    r.sampling = &how[one && row == 1 ? 2 : q % 8 == 6 ? 3 : q % 2];
    if (mixed && (q + len) % 10 < 8) {
        r.sampling = &mix[(q + len) % 10];
        r.n_prompt = 5, r.n_history = len + 1;
        if (q % 3 == 0) r.forbidden = ids + 8, r.n_forbidden = 2;
    }
    return r;
}

/* Rows of sequences `from` .. to-1. mode % 4: 0 nothing is shared, 1 a group has one span for both
 * pages, 2 only groups of more than two have one, 3 families and groups have one span each. mode /
 * 4: 1 one row is sampled with top-p, 2 a page is copied, 3 most rows have filters. */
static void g_make_step(g_step *g, g_seq *seqs, int from, int to, int mode, int B) {
    const int shared = mode % 4, above = shared == 2 ? 2 : 1;
    g->s = (toka_step){.ids = g->id, .pos = g->pos, .kv_slot = g->kv_slot, .pages = g->pages, .spans = g->spans, .samples = g->samples};
    if (g->window) g->s.windowed_slot = g->windowed_slot, g->s.windowed_pages = g->windowed_pages, g->s.windowed_copies = &g->windowed_copy;
    if (shared == 3) g_add_shared_spans(g, from, to, 0, G_FAMILY, 0, B), g_add_shared_spans(g, from, to, 1, G_GROUP, 0, B);
    for (int i = from, end; i < to; i = end) {
        for (end = i; end < to && end / G_GROUP == i / G_GROUP;) end++;
        const bool group = shared && shared < 3 && end - i > above;
        if (group) g_add_span(g, i - from, end - i, 0, 2 * B, i, B);
        for (int q = i; q < end; q++) {
            const int row = q - from, len = seqs[q].len, at = group || shared == 3 ? 2 * B : 0;
            g_add_span(g, row, 1, at, len + 1 - at, q, B);
            g->id[row] = seqs[q].has_sampled ? -1 - q : 5 + q % 200, g->pos[row] = len;
            g->kv_slot[row] = g_page(q, len / B) * B + len % B;
            g->windowed_slot[row] = g_windowed_page(q, len / B) * B + len % B;
            g->samples[row] = g_sample_row(row, q, len, mode / 4 == 1, mode / 4 == 3);
            for (int p = 0; p * B <= len; p++) g->tables[row][p] = g_page(q, p);
            g->samples[row].pages = g->tables[row];
            if (++seqs[q].len == G_LEN - q % 90) seqs[q] = (g_seq){.len = 2 * B};
            else seqs[q].has_sampled = true;
        }
    }
    g->s.T = g->s.n_samples = to - from;
    g->windowed_copy = (toka_copy){g_windowed_page(from, 2), G_SEQS * 2 + G_SEQS / G_GROUP};
    if (mode / 4 == 2) g->copy = (toka_copy){G_SHARED + from * G_OWN, G_SHARED + G_SEQS * G_OWN}, g->s.copies = &g->copy, g->s.n_copies = 1;
}

/* Chooses masks for most rows, and gives others a penalty, which plain rows may have, too. held: the
 * masks are not known yet. */
static void g_constrain(g_step *g, bool held) {
    static const toka_sampling penalized = {.temperature = 0.7, .top_p = 1, .repetition_penalty = 1.3, .seed = 5, .logprobs = TOKA_NO_LOGPROBS};
    static uint32_t masks[4][(1 << 18) / 32]; /* mask k: three of four ids */
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < COUNT(masks[k]); i++) masks[k][i] = ~(0x11111111u << k);
    for (int row = 0; row < g->s.T; row++) {
        toka_sample_row *r = &g->samples[row];
        const int kind = (r->seq + g->pos[row]) % 6;
        if (kind < 5) g->masks[row] = kind < 4 ? masks[kind] : NULL, r->awaits_mask = held;
        else if (r->seq % 2) r->sampling = &penalized, r->n_prompt = 5, r->n_history = g->pos[row] + 1, r->n_forbidden = 0;
        if (!held) r->mask = g->masks[row];
    }
}

/* Brings the masks of a held step when its body is launched and the step before is done. Returns 0
 * or an error. */
static int g_release(model_grid *m, g_step *g, int64_t number, toka_err *e) {
    for (bool waits = true; waits;) {
        pthread_mutex_lock(&m->notifier->lock);
        waits = !m->ranks[m->n_ranks - 1].has_body && !m->error.code;
        pthread_mutex_unlock(&m->notifier->lock);
    }
    const int code = model_wait(m, number - 1, e);
    for (int row = 0; row < g->s.T; row++) g->samples[row].mask = g->masks[row];
    model_release(m);
    return code;
}

static toka_options g_options(const char *model) {
    toka_options o = toka_options_default();
    o.model = model, o.device = "cuda", o.max_num_seqs = G_SEQS, o.max_num_batched_tokens = 512, o.kv_tokens = 64 * (G_SHARED + G_SEQS * G_OWN + 8);
    return o;
}

/* Runs the script. Returns the number of steps that ran as graphs on the first rank, or -1 if it
 * failed. about: [200] the device's description, or NULL. */
static int64_t g_run(const toka_options *o, g_step *steps, char *about, toka_err *e) {
    static const int sizes[] = {1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 128, 129, 200, 256, 257, 288};
    toka *t = NULL;
    if (o->models_file ? run_dummy_open(&t, o, NULL, e) : toka_open(&t, o, e)) return -1;
    if (about) snprintf(about, 200, "%s", toka_get_info(t).device);
    model_grid *m = &t->engine->replicas[0].model;
    g_seq seqs[G_SEQS];
    toka_times times = {0};
    uint64_t rng = 1;
    for (int i = 0; i < G_SEQS; i++) seqs[i] = (g_seq){.len = 2 * t->shape.B + i * 37 % 100};
    int64_t first = 0, number = 1;
    const kv_cache *kv = &t->engine->replicas[0].sched.kv;
    if (kv->window && (kv->window > t->shape.B || kv->n_windowed <= G_SEQS * 2 + G_SEQS / G_GROUP)) number = 0;
    for (int i = 0; i < G_STEPS && number > 0; i++) {
        rng = rng * 6364136223846793005u + 1442695040888963407u;
        int n = sizes[i / 2 % COUNT(sizes)], from = (int)((rng >> 33) % (uint64_t)(G_SEQS - n + 1));
        steps[i].window = kv->window;
        g_make_step(&steps[i], seqs, from, from + n, i % 4 + (i % 7 == 3 ? 4 : i % 11 == 5 ? 8 : i % 5 == 1 ? 12 : 0), t->shape.B);
        /* step 1 was the warm-up */
        steps[i].s.number = i + 2, steps[i].s.needs_step = i ? i + 1 : 0;
        const bool constrained = i % 3 == 1, held = constrained && !o->enforce_eager && (m->n_ranks == 1 || m->backend->holds_ranks);
        if (constrained) g_constrain(&steps[i], held);
        number = model_post(m, &steps[i].s, steps[i].results, held);
        if (!i) first = number;
        if (held && g_release(m, &steps[i], number, e)) number = 0;
        if (number > first + 1 && model_wait(m, number - 2, e)) number = 0;
    }
    if (number > 0 && model_wait(m, number, e)) number = 0;
    model_device_times(m, 0, &times);
    toka_close(t);
    return number > 0 ? times.graphs : -1;
}

/* Compares the script with graphs to the script without. Tensor ranks have no graphs for steps with
 * filters or masks, which are a half of all. */
static void g_compare(const char *name, toka_options *o) {
    toka_err e = {0};
    char about[200] = "";
    g_step *with = mem_zalloc(G_STEPS * sizeof *with), *without = mem_zalloc(G_STEPS * sizeof *without);
    o->enforce_eager = false;
    const int64_t n = g_run(o, with, about, &e);
    o->enforce_eager = true;
    const int64_t none = n < 0 ? n : g_run(o, without, NULL, &e);
    int different = 0, rows = 0, kept = 0, tops = 0;
    for (int i = 0; i < G_STEPS && none == 0; i++)
        for (int k = 0; k < with[i].s.n_samples; k++, rows++) {
            const toka_sample_result *a = &with[i].results[k], *b = &without[i].results[k];
            kept += a->logprob < 0, tops += a->n_top > 0;
            different += a->id != b->id || memcmp(&a->logprob, &b->logprob, 4) || memcmp(&a->sampled_logprob, &b->sampled_logprob, 4) ||
                         a->n_top != b->n_top || memcmp(a->top_ids, b->top_ids, (size_t)a->n_top * sizeof *a->top_ids) ||
                         memcmp(a->top_logprobs, b->top_logprobs, (size_t)a->n_top * sizeof *a->top_logprobs);
        }
    verdict(n >= (o->tensor_parallel_size > 1 ? G_STEPS * 2 / 5 : G_STEPS * 4 / 5) && tops && none == 0 && kept > rows / 2 && !different,
            "%-22s graphs: %d of %d steps, %d of %d picks differ from those of single launches; %s %s", name, (int)n, G_STEPS, different, rows,
            strstr(about, "graph") ? strstr(about, "graph") - 3 : about, e.msg);
    free(with), free(without);
}

/* A capture that fails, `which` says which one ("3", or "3@1": the third of rank 1), leaves all
 * ranks without graphs, and the description says so. */
UNUSED static void g_failing(const char *name, const toka_options *o, const char *which) {
    toka_err e = {0};
    g_step *steps = mem_zalloc(G_STEPS * sizeof *steps);
    char about[200] = "";
    setenv("TOKA_DEBUG_CAPTURE", which, 1);
    const int64_t n = g_run(o, steps, about, &e);
    unsetenv("TOKA_DEBUG_CAPTURE");
    verdict(n == 0 && strstr(about, "no graphs (GPU: "), "%-22s a capture that fails: %d graphs; %s %s", name, (int)n, about, e.msg);
    free(steps);
}
