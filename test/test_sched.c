/* test_sched.c - the scheduler, run against a simulated device without a model.
 *
 * The simulated "K and V" of a position is a hash of all tokens up to it. The next token is a
 * function of this hash and of the sample number, so every output is known beforehand. After each
 * step, each planned row must find the right hash at every earlier position, in the pages of its
 * sequence. So the tests notice a page that was shared, replaced or evicted at the wrong moment. */

enum { SIM_LAG = 3 };

typedef struct sim_pending { /* a sampled token whose result is not yet committed */
    int q, step;
    uint32_t generation;
    int32_t token, id; /* id: of the row that was sampled */
    int pos;           /* of that row */
    bool behind;       /* the row is that of a draft */
} sim_pending;

typedef struct sim_state { /* of a sequence: of its first n tokens */
    uint64_t hash;
    int n;
} sim_state;

typedef struct sched_sim {
    scheduler s;
    /* for test_batch.c: called when all rows are written ... */
    void (*on_run)(void *, const uint64_t *mem, int32_t *device);
    void *on_run_user;
    /* tokens 0 .. vocab-1; a token ends its sequence with probability 1 / end_one_in */
    int vocab, end_one_in;
    int lag;               /* results arrive this many steps later */
    uint64_t *mem;         /* [n_pages * B] the simulated KV cache */
    uint64_t *windowed;    /* [n_windowed * B] the same for layers with a window */
    sim_state *states;     /* [max_seqs + n_snapshots] in models with states */
    int64_t n_jumps;       /* prefill that began with a snapshot */
    int32_t *device;       /* [max_seqs][max_len] all tokens of a sequence, as a device has them */
    sim_pending *pending; /* results not yet committed, oldest first */
    int n_pending, step;
    int max_drafts; /* of a sequence in a step; 0: none */
    uint64_t draft_rng, rewind_rng; /* rewind_rng 0: no mask comes too late */
    int64_t n_rewound;
    int64_t n_accepted, n_rejected; /* rows of drafts */
    char *written; /* [n_pages * B] written in this step: 2: it had this content before; 1: else */
    char *windowed_written; /* [n_windowed * B] the same */
    int64_t n_tokens, n_done, n_copies, n_rows;
    uint64_t refused_count; /* scheduler.refused_change_count after the last plan; pages that the */
    int n_window_waits;     /* steps in which the head waited for windowed pages */
    int refused_pages;      /* refused head would have taken when it was tried */
} sched_sim;

static int64_t sim_window_wait_count; /* of n_window_waits, over runs of sim_random_drafts */

static uint64_t sim_hash(const int32_t *t, int n) { return hash_bytes(t, (size_t)n * sizeof *t); }

/* The token after t[0..n-1] in sample `sample`. *end: it ends the sequence. */
static int32_t sim_next_token(const sched_sim *m, const int32_t *t, int n, int sample, bool *end) {
    /* samples 2 i and 2 i + 1 are equal */
    uint64_t h = (sim_hash(t, n) ^ (uint64_t)(sample / 2)) * 0x9E3779B97F4A7C15u;
    h ^= h >> 31, h *= 0xD6E8FEB86659FD93u, h ^= h >> 32;
    *end = h % (uint64_t)m->end_one_in == 0;
    return (int32_t)((h >> 20) % (uint64_t)m->vocab);
}

/* Sets the windowed pages: by `choice` the fewest that are allowed, as many as sequences can hold, or a number between them. None
 * if these would not be fewer than the pages. */
static void sim_set_windowed(sched_config *c, uint64_t choice) {
    const int least = sched_least_windowed(c), most = (int)sched_most_windowed(c);
    const int n = least + (most - least) * (int)(choice % 3) / 2;
    c->n_windowed = c->window && n < c->n_pages ? n : 0;
}

static void sim_open(sched_sim *m, sched_config c, int vocab, int end_one_in, int lag) {
    toka_err e;
    if (!c.n_windowed) sim_set_windowed(&c, 2);
    *m = (sched_sim){.vocab = vocab, .end_one_in = end_one_in, .lag = lag};
    CHECK(!sched_init(&m->s, &c, &e));
    size_t n_slots = (size_t)c.n_pages * (size_t)c.B;
    m->mem = mem_zalloc(n_slots * sizeof *m->mem), m->written = mem_zalloc(n_slots);
    m->windowed_written = mem_zalloc((size_t)m->s.kv.n_windowed * (size_t)c.B + 1);
    m->windowed = mem_zalloc(((size_t)m->s.kv.n_windowed * (size_t)c.B + 1) * sizeof *m->windowed);
    m->states = mem_zalloc((size_t)(c.max_seqs + c.states.n_snapshots) * sizeof *m->states);
    m->device = mem_zalloc((size_t)c.max_seqs * (size_t)c.max_len * sizeof(int32_t));
    m->pending = mem_alloc(((size_t)c.max_seqs + (size_t)c.max_tokens) * (SIM_LAG + 1) * sizeof *m->pending);
}

static void sim_close(sched_sim *m) {
    sched_free(&m->s);
    free(m->mem), free(m->states), free(m->windowed), free(m->windowed_written), free(m->written), free(m->device), free(m->pending);
}

/* The simulated K and V of a position in layers with a window; NULL: it has no windowed page. */
static uint64_t *sim_windowed(const sched_sim *m, int page, int offset) {
    int id = m->s.kv.windowed_of[page];
    return id < 0 ? NULL : m->windowed + id * m->s.config.B + offset;
}

static int32_t *sim_device(sched_sim *m, int q) { return m->device + (size_t)q * (size_t)m->s.config.max_len; }

/* Makes the copies that the planned step begins with. */
static void sim_copy(sched_sim *m) {
    const scheduler *s = &m->s;
    size_t B = (size_t)s->config.B;
    for (int i = 0; i < s->n_copies; i++) {
        toka_copy c = s->copies[i];
        for (int k = 0; k < s->n_copies; k++) CHECK(s->copies[k].from != c.to && (k == i || s->copies[k].to != c.to));
        memcpy(m->mem + (size_t)c.to * B, m->mem + (size_t)c.from * B, B * sizeof *m->mem);
        if (!s->kv.window) continue;
        CHECK(sim_windowed(m, c.to, 0) && sim_windowed(m, c.from, 0));
        memcpy(sim_windowed(m, c.to, 0), sim_windowed(m, c.from, 0), B * sizeof *m->windowed);
    }
    m->n_copies += s->n_copies;
}

/* The rows of one sequence: they must find its state, and leave snapshots. */
static void sim_run_state(sched_sim *m, int q) {
    const scheduler *s = &m->s;
    const sched_seq *x = &s->seqs[q];
    const int32_t *t = sim_device(m, q);
    const int n_states = s->config.max_seqs + s->config.states.n_snapshots;
    CHECK(x->state_from >= -1 && x->state_from < n_states && (x->state_from < 0) == !x->from);
    CHECK(x->state_from < s->config.max_seqs ? x->state_from == q || !x->from : x->is_prefill);
    if (x->from) CHECK(m->states[x->state_from].n == x->from && m->states[x->state_from].hash == sim_hash(t, x->from));
    m->n_jumps += x->state_from >= s->config.max_seqs;
    for (int i = x->mark0, last = x->from; i < x->mark0 + x->n_marks; i++) {
        const sched_mark *mark = &s->marks[i];
        CHECK(mark->pos > last && mark->pos <= x->from + x->n_rows && mark->state >= s->config.max_seqs && mark->state < n_states);
        m->states[mark->state] = (sim_state){sim_hash(t, mark->pos), last = mark->pos};
    }
    m->states[q] = (sim_state){sim_hash(t, x->from + x->n_rows), x->from + x->n_rows};
}

/* The states of the planned step: first of sequences in decode, then of prefill, in its order. */
static void sim_run_states(sched_sim *m) {
    const scheduler *s = &m->s;
    for (int q = 0; q < s->config.max_seqs; q++)
        if (s->seqs[q].state != SCHED_FREE && s->seqs[q].n_rows && !s->seqs[q].is_prefill) sim_run_state(m, q);
    for (int i = 0; i < s->n_prefill_seqs; i++) sim_run_state(m, s->prefill_seqs[i]);
}

/* Runs the planned step. All rows write, then all rows read, as in attention. */
static void sim_run(sched_sim *m, int n_rows) {
    scheduler *s = &m->s;
    int B = s->config.B, rows = 0;
    memset(m->written, 0, (size_t)s->config.n_pages * (size_t)B);
    memset(m->windowed_written, 0, (size_t)s->kv.n_windowed * (size_t)B);
    sim_copy(m);
    for (int q = 0; q < s->config.max_seqs; q++) {
        sched_seq *x = &s->seqs[q];
        if (x->state == SCHED_FREE || !x->n_rows) continue;
        int32_t *t = sim_device(m, q);
        memcpy(t, x->tokens, (size_t)MIN(x->n_known + x->n_drafts, x->from + x->n_rows) * sizeof *t);
        for (int p = x->from; p < x->from + x->n_rows; p++, rows++) {
            int kv_slot = kv_block_table(&s->kv, q)[p / B] * B + p % B;
            CHECK(!m->written[kv_slot]); /* no two rows of a step write the same kv_slot */
            m->written[kv_slot] = m->mem[kv_slot] == sim_hash(t, p + 1) ? 2 : 1, m->mem[kv_slot] = sim_hash(t, p + 1);
            if (!s->kv.window) continue;
            uint64_t *windowed = sim_windowed(m, kv_slot / B, p % B);
            CHECK(windowed);
            m->windowed_written[windowed - m->windowed] = *windowed == sim_hash(t, p + 1) ? 2 : 1, *windowed = sim_hash(t, p + 1);
        }
    }
    CHECK(rows == n_rows && rows <= s->config.max_tokens);
    m->n_rows += rows;
    if (s->config.states.used) sim_run_states(m);
    /* ... and before they are sampled */
    if (m->on_run) m->on_run(m->on_run_user, m->mem, m->device);
    for (int q = 0; q < s->config.max_seqs && !check_failed; q++) {
        sched_seq *x = &s->seqs[q];
        if (x->state == SCHED_FREE || !x->n_rows) continue;
        int32_t *t = sim_device(m, q);
        int n = x->from + x->n_rows;
        for (int p = 0; p < n; p++) CHECK(m->mem[kv_block_table(&s->kv, q)[p / B] * B + p % B] == sim_hash(t, p + 1));
        /* all that its first row and the later ones read behind their windows */
        for (int p = MAX(0, x->from - s->kv.window + 1); s->kv.window && p < n && !check_failed; p++) {
            const uint64_t *at = sim_windowed(m, kv_block_table(&s->kv, q)[p / B], p % B);
            CHECK(at && *at == sim_hash(t, p + 1));
        }
        if (!x->is_sampled) continue;
        CHECK(!(x->awaits_commit || x->n_drafts) || x->n_known == n - x->n_drafts);
        CHECK(!x->one_ahead || x->n_known >= n - 1);
        CHECK(x->n_rows == 1 + x->n_drafts || x->is_prefill);
        bool end;
        for (int p = n - 1 - x->n_drafts; p < n; p++) {
            const int32_t token = sim_next_token(m, t, p + 1, x->sample, &end);
            m->pending[m->n_pending++] = (sim_pending){q, m->step, x->generation, token, t[p], p, p >= n - x->n_drafts};
            if (p == n - 1) t[n] = token;
        }
    }
}

/* Drafts for some of the sequences that may have them: right ones, and such that are wrong in some
 * place. Some sequences wait for their last token, as if drafts were to follow. */
static void sim_make_drafts(sched_sim *m) {
    scheduler *s = &m->s;
    for (int q = 0; q < s->config.max_seqs && m->max_drafts; q++) {
        sched_seq *x = &s->seqs[q];
        if (x->state != SCHED_DECODE || x->one_ahead) continue;
        if (x->n_known < x->n_planned) {
            if (!x->n_drafts) x->awaits_commit = rnd(&m->draft_rng) % 2;
            continue;
        }
        bool end;
        x->awaits_commit = false;
        const int most = MIN(m->max_drafts, x->limit - x->n_known - 1);
        const int n = (int)(rnd(&m->draft_rng) % (uint64_t)(most + 1));
        for (int i = x->n_known; i < x->n_known + n; i++) {
            x->tokens[i] = sim_next_token(m, x->tokens, i, x->sample, &end);
            if (rnd(&m->draft_rng) % 4 == 0) x->tokens[i] = (int32_t)(rnd(&m->draft_rng) % (uint64_t)m->vocab);
        }
        x->n_drafts = (uint8_t)n;
    }
}

/* Masks of some rows come too late: their rows of the step that has just run are taken back. */
static void sim_rewind(sched_sim *m) {
    for (int q = 0; q < m->s.config.max_seqs && !m->s.config.states.used; q++) {
        const sched_seq *x = &m->s.seqs[q];
        if (x->state != SCHED_DECODE || !x->one_ahead || x->n_planned != x->n_known + 2 || !x->n_rows) continue;
        if (rnd(&m->rewind_rng) % 3) continue;
        int oldest = 0;
        while (m->pending[oldest].q != q || m->pending[oldest].generation != x->generation) oldest++;
        CHECK(m->pending[oldest].pos + 1 == x->n_known);
        sched_rewind(&m->s, q);
        m->pending[oldest].generation = x->generation;
        m->n_rewound++;
    }
}

/* Commits the results that are due and checks each token. */
static void sim_commit_due(sched_sim *m) {
    scheduler *s = &m->s;
    int n = 0;
    for (; n < m->n_pending && m->pending[n].step + m->lag <= m->step; n++) {
        sim_pending r = m->pending[n];
        sched_seq *x = &s->seqs[r.q];
        bool end = false;
        if (r.behind && x->generation == r.generation) {
            if (x->n_known != r.pos + 1 || x->tokens[r.pos] != r.id) {
                m->n_rejected++;
                continue;
            }
            sched_accept_draft(s, r.q);
            m->n_accepted++;
        }
        if (x->generation == r.generation) {
            CHECK(x->n_known == r.pos + 1);
            int32_t want = sim_next_token(m, x->tokens, x->n_known, x->sample, &end);
            CHECK(want == r.token);
            m->n_tokens++;
        }
        const int result = sched_commit(s, r.q, r.generation, r.token, end);
        if (result == SCHED_CONTINUES && x->one_ahead) x->awaits_commit = false;
        m->n_done += result == SCHED_DONE;
    }
    m->n_pending -= n;
    memmove(m->pending, m->pending + n, (size_t)m->n_pending * sizeof *m->pending);
}

static void sim_check(sched_sim *m) {
    const char *bad = sched_check(&m->s);
    CHECK_MSG(!bad, "%s, step %d", bad, m->step);
}

/* Pages that seq q with these tokens would take from the pool: all but those that others hold. */
static int sim_pages_to_take(const scheduler *s, const int32_t *tokens, int n_tokens, bool unshared) {
    int *table = mem_alloc((size_t)s->kv.max_pages * sizeof *table), n_pages = kv_pages_for(&s->kv, n_tokens);
    int n = unshared ? 0 : kv_match_prefix(&s->kv, 0, table, tokens, n_tokens), n_held = 0;
    for (int i = 0; i < n; i++) n_held += s->kv.pages[table[i]].ref > 0;
    free(table);
    return n_pages - n_held;
}

/* The reserve of the running sequences without the one that was admitted last. */
static int64_t sim_least_reserve(const scheduler *s) {
    int newest = -1;
    int64_t n_tokens = (int64_t)(s->n_running - 1) * s->config.reserve_steps, max_growth = 0;
    for (int q = 0; q < s->config.max_seqs; q++) {
        if (s->seqs[q].state != SCHED_PREFILL && s->seqs[q].state != SCHED_DECODE) continue;
        max_growth += kv_pages_for(&s->kv, s->seqs[q].limit - 1) - s->kv.seqs[q].n_pages;
        if (newest < 0 || s->seqs[q].admission_number > s->seqs[newest].admission_number) newest = q;
    }
    max_growth -= kv_pages_for(&s->kv, s->seqs[newest].limit - 1) - s->kv.seqs[newest].n_pages;
    return MIN((n_tokens + s->config.B - 1) / s->config.B, max_growth);
}

/* After a plan: what was admitted left the reserve of those that ran before it, and a head of the
 * queue that was refused does not fit. Full pages of answers that entered the tree after it was
 * tried may make it fit; it is tried again at the next change. */
static void sim_check_admission(sched_sim *m, uint32_t admissions_before) {
    const scheduler *s = &m->s;
    int n_free = kv_n_available(&s->kv);
    if (s->n_admissions != admissions_before && s->n_running > 1) CHECK(n_free >= sim_least_reserve(s));
    if (s->change_count != s->refused_change_count) return;
    int q = s->next_to_resume, id = s->first_queued, n, limit;
    if (q >= 0 && (id < 0 || !s->n_seqs_free || s->requests[s->seqs[q].request].queue_key <= s->requests[id].queue_key))
        n = sim_pages_to_take(s, s->seqs[q].tokens, s->seqs[q].n_known, s->seqs[q].sample < s->requests[s->seqs[q].request].n_unshared), limit = s->seqs[q].limit;
    else if (id >= 0 && s->n_seqs_free)
        n = sim_pages_to_take(s, s->requests[id].prompt, s->requests[id].n_prompt, s->requests[id].n_started < s->requests[id].n_unshared), limit = s->requests[id].n_prompt + s->requests[id].max_tokens;
    else return;
    const int most = MIN(kv_pages_for(&s->kv, limit - 1), sched_window_pages(&s->config));
    if (s->kv.window && s->max_windowed + most > s->kv.n_windowed - s->config.max_tokens / s->config.B) {
        m->n_window_waits++; /* it waits for windowed pages */
        return;
    }
    if (m->refused_count != s->refused_change_count) m->refused_pages = n;
    m->refused_count = s->refused_change_count;
    CHECK(n <= m->refused_pages && n_free < m->refused_pages + sched_reserve(s));
}

static int sim_step(sched_sim *m, bool check) {
    uint32_t admissions = m->s.n_admissions;
    sim_make_drafts(m);
    int n = sched_plan(&m->s);
    m->step++;
    if (check) sim_check(m), sim_check_admission(m, admissions);
    sim_run(m, n);
    if (m->rewind_rng) sim_rewind(m);
    if (check) sim_check(m);
    sim_commit_due(m);
    if (check) sim_check(m);
    return n;
}

static int sim_submit(sched_sim *m, uint64_t *rng, int n_prompt, int n, int max_tokens, int priority) {
    int32_t prompt[64];
    toka_err e;
    for (int i = 0; i < n_prompt; i++) prompt[i] = rnd(rng) % 6 ? 1 : 2;
    sched_job job = {.prompt = prompt, .n_prompt = n_prompt, .n = n, .max_tokens = max_tokens, .priority = priority};
    uint64_t dice = rnd(rng) % 16;
    job.n_unshared = dice == 0 ? n : dice == 1, job.one_ahead = dice % 4 == 3;
    int id = sched_submit(&m->s, &job, &e);
    CHECK_MSG(id >= 0, "%s", e.msg);
    return id;
}

static int64_t sim_n_rewound; /* of all random simulations */

/* Random requests, early and late ends, preemptions and cancels, in pools that are too small. */
static int64_t sim_random_drafts(sched_config c, int lag, uint64_t seed, int n_steps, int max_drafts, int64_t *n_accepted, int64_t *n_rejected) {
    sched_sim m;
    uint64_t rng = seed;
    sim_open(&m, c, 3, 2 + (int)(seed % 3) * 12, lag);
    m.max_drafts = max_drafts, m.draft_rng = seed + 1, m.rewind_rng = seed + 2;
    int alive[64], n_alive = 0;
    int longest = MIN(c.max_len, c.n_pages * c.B + 1);
    for (int i = 0; i < n_steps && !check_failed; i++) {
        for (int k = (int)(rnd(&rng) % 3); k-- && m.s.n_unstarted < 40;) {
            int n_prompt = 1 + (int)(rnd(&rng) % (uint64_t)(longest - 1));
            int max_tokens = 1 + (int)(rnd(&rng) % (uint64_t)(longest - n_prompt));
            int id = sim_submit(&m, &rng, n_prompt, 1 + (int)(rnd(&rng) % 5), max_tokens, rnd(&rng) % 8 ? 0 : 2);
            if (n_alive < 64) alive[n_alive++] = id;
        }
        /* an id may have ended and been reused: any live request will do */
        if (rnd(&rng) % 8 == 0 && n_alive) {
            int id = alive[rnd(&rng) % (uint64_t)n_alive];
            if (m.s.requests[id].prompt) sched_cancel(&m.s, id);
            sim_check(&m);
        }
        sim_step(&m, true);
    }
    for (int i = 0; i < 20000 && m.s.n_unstarted + c.max_seqs > m.s.n_seqs_free && !check_failed; i++) sim_step(&m, i < 10);
    CHECK(m.s.n_seqs_free == c.max_seqs && m.s.first_queued < 0 && !m.s.n_unstarted);
    CHECK(kv_n_available(&m.s.kv) == c.n_pages);
    int64_t n = m.s.n_preempted;
    *n_accepted += m.n_accepted, *n_rejected += m.n_rejected;
    sim_n_rewound += m.n_rewound;
    if (check_failed) printf("seed %llu\n", (unsigned long long)seed);
    sim_window_wait_count += m.n_window_waits;
    sim_close(&m);
    return n;
}
static int64_t sim_random(sched_config c, int lag, uint64_t seed, int n_steps) {
    int64_t unused = 0;
    return sim_random_drafts(c, lag, seed, n_steps, 0, &unused, &unused);
}

/* Drafts in pools that are too small, with windows, and with all rows of a step taken. */
static void sim_random_with_drafts(void) {
    int64_t n = 0, n_accepted = 0, n_rejected = 0, n_windowed = 0;
    for (uint64_t seed = 1; seed <= 240 && !check_failed; seed++) {
        sched_config c = {2, 5, 3, 4, 10, (int)(seed % 4), 0, {0}};
        if (seed % 4 == 1) c = (sched_config){2, 30, 8, 12, 40, (int)(seed % 8), 0, {0}};
        if (seed % 4 == 2) c = (sched_config){4, 64, 8, 40, 60, 0, 1 + (int)(seed % 11), {0}};
        if (seed % 4 == 3) c = (sched_config){2, 40, 3, 12, 40, (int)(seed % 8), 1 + (int)(seed % 7), {0}};
        sim_set_windowed(&c, seed / 4);
        n_windowed += c.n_windowed > 0;
        n += sim_random_drafts(c, (int)(seed % 3), seed, 90, 1 + (int)(seed % 5), &n_accepted, &n_rejected);
    }
    CHECK_MSG(n > 50 && n_accepted > 2000 && n_rejected > 2000 && n_windowed > 50, "%d %d %d %d", (int)n, (int)n_accepted, (int)n_rejected, (int)n_windowed);
}

static void sim_random_tiny(void) {
    int64_t n = 0;
    for (uint64_t seed = 1; seed <= 120 && !check_failed; seed++)
        n += sim_random((sched_config){2, 5, 3, 4, 10, (int)(seed % 4), 0, {0}}, (int)(seed % 3), seed, 60);
    CHECK(n > 50);
}
static void sim_random_small(void) {
    int64_t n = 0;
    for (uint64_t seed = 1; seed <= 80 && !check_failed; seed++)
        n += sim_random((sched_config){2, 30, 8, 12, 40, (int)(seed % 8), 0, {0}}, (int)(seed % 3), seed, 60);
    CHECK(n > 50);
    for (uint64_t seed = 1; seed <= 20 && !check_failed; seed++)
        sim_random((sched_config){4, 64, 16, 40, 60, (int)(seed % 2) * 16, 0, {0}}, (int)(seed % 4), seed, 60);
}

/* The same with windows, smaller and larger than a page, and as few windowed pages as can be. */
static void sim_random_windows(void) {
    int64_t n = 0, n_windowed = 0;
    sim_window_wait_count = 0;
    for (uint64_t seed = 1; seed <= 720 && !check_failed; seed++) {
        sched_config c = {2, 40, 3, 6, 40, (int)(seed % 8), 1 + (int)(seed % 7), {0}};
        if (seed % 3 == 0) c = (sched_config){4, 64, 8, 12, 60, 0, 1 + (int)(seed % 11), {0}};
        sim_set_windowed(&c, seed / 3);
        n_windowed += c.n_windowed > 0;
        n += sim_random(c, (int)(seed % 3), seed, 90);
    }
    CHECK_MSG(n > 50 && n_windowed > 600 && sim_window_wait_count > 1000, "%d preemptions, %d with windowed pages, %d waits for them", (int)n, (int)n_windowed, (int)sim_window_wait_count);
}

/* Runs n samples of a prompt of so many tokens to their ends. Returns the rows that they took. */
static int64_t sim_run_samples(sched_sim *m, const int32_t *prompt, int n_prompt, int n, int max_tokens) {
    toka_err e;
    int64_t rows = m->n_rows, done = m->n_done;
    CHECK(sched_submit(&m->s, &(sched_job){.prompt = prompt, .n_prompt = n_prompt, .n = n, .max_tokens = max_tokens}, &e) >= 0);
    while (m->n_done < done + n && !check_failed) sim_step(m, m->n_done % 16 == 0);
    return m->n_rows - rows;
}
/* Where no step is held, samples with one_ahead have rows in the same steps: two halves that take turns would need twice as many. */
static void sim_gathers(void) {
    enum { N = 8, MOST = 40 };
    for (int others = 0; others < 2 && !check_failed; others++) {
        sched_sim m;
        toka_err e;
        int n_steps = 0;
        int32_t prompt[3] = {1, 2, 3};
        sim_open(&m, (sched_config){4, 400, 2 * N, 32, 100, 0, 0, {0}, 0, true}, 50, 1 << 30, 1);
        sched_job job = {.prompt = prompt, .n_prompt = 3, .n = N, .max_tokens = MOST, .one_ahead = true};
        CHECK(sched_submit(&m.s, &job, &e) >= 0);
        prompt[0] = 7, job.one_ahead = false, job.n = 1, job.max_tokens = 90;
        if (others) CHECK(sched_submit(&m.s, &job, &e) >= 0);
        while (m.n_done < N + others && m.step < 1000) n_steps += sim_step(&m, true) > others;
        CHECK_MSG(n_steps <= MOST + 1, "%d steps", n_steps);
        CHECK_MSG(!others || m.step <= 92, "%d steps", m.step); /* it has a row in every one */
        sim_close(&m);
    }
}

/* Samples with one_ahead take as many steps as others: with one step in flight while the next one is
 * planned, they have a row in each. With more in flight they wait. Rows that are taken back come
 * again, once the token before them is committed. */
static void sim_one_ahead(void) {
    enum { N = 8, MOST = 40 };
    for (int lag = 0; lag < 3 && !check_failed; lag++)
        for (int rewinds = 0; rewinds < 2 && !check_failed; rewinds++) {
            sched_sim m;
            toka_err e;
            int32_t prompt[3] = {1, 2, 3};
            sim_open(&m, (sched_config){4, 400, 2 * N, 32, 100, 0, 0, {0}}, 50, 1 << 30, lag);
            m.rewind_rng = rewinds ? 7 : 0;
            sched_job job = {.prompt = prompt, .n_prompt = 3, .n = N, .max_tokens = MOST, .one_ahead = true};
            CHECK(sched_submit(&m.s, &job, &e) >= 0);
            prompt[0] = 7, job.one_ahead = false, job.n = 1, job.max_tokens = 90;
            CHECK(sched_submit(&m.s, &job, &e) >= 0);
            while (m.n_done < N && m.step < 1000) sim_step(&m, true);
            const int want = MOST + 1 + lag;
            CHECK_MSG(lag < 2 && !rewinds ? m.step <= want : m.step < 3 * want, "lag %d: %d steps", lag, m.step);
            CHECK(lag < 2 || m.step > want);
            CHECK(rewinds && lag ? m.n_rewound > 20 : !m.n_rewound);
            while (m.n_done < N + 1 && m.step < 1000) sim_step(&m, true);
            CHECK_MSG(m.step <= 93, "%d steps", m.step); /* the other one has a row in every step */
            sim_close(&m);
        }
    CHECK_MSG(!sim_n_rewound || sim_n_rewound > 300, "%d", (int)sim_n_rewound);
}

static int64_t sim_run_one(sched_sim *m, const int32_t *prompt, int n, int max_tokens) { return sim_run_samples(m, prompt, n, 1, max_tokens); }

/* The same with states, with few snapshots or none. */
static void sim_random_states(void) {
    int64_t n = 0;
    for (uint64_t seed = 1; seed <= 300 && !check_failed; seed++) {
        const int B = seed % 3 ? 2 : 4;
        const sched_states states = {true, (int)(seed % 7), B * (1 + (int)(seed / 7 % 3))};
        sched_config c = {2, 5, 3, 4, 10, (int)(seed % 4), 0, states};
        if (seed % 4) c = (sched_config){B, 40, 2 + (int)(seed % 5), 12, 40, (int)(seed % 8), 0, states};
        n += sim_random(c, (int)(seed % 3), seed, 90);
    }
    CHECK_MSG(n > 50, "%d preemptions", (int)n);
}

/* The example of chapter 19, and what a prefix hit needs. */
static void sim_states(void) {
    enum { N = 22 };
    sched_sim m;
    int32_t prompt[60], other[60];
    for (int i = 0; i < 60; i++) prompt[i] = i, other[i] = 1000 + i;
    sim_open(&m, (sched_config){4, 100, 8, 64, 60, 0, 0, {true, 5, 8}}, 50, 1 << 30, 0);
    CHECK(sim_run_one(&m, prompt, N, 1) == N && m.s.n_prompt_hits == 0);
    int table[15], n = kv_match_prefix(&m.s.kv, 0, table, prompt, N), has = 0;
    for (int i = 0; i < n; i++) has |= (m.s.kv.snapshot_of[table[i]] >= 0) << i;
    CHECK_MSG(n == 5 && has == (1 << 1 | 1 << 3 | 1 << 4), "%d pages, snapshots %x", n, has);
    /* again: from the last full page on; cut: from the nearest one */
    CHECK(sim_run_one(&m, prompt, N, 1) == 2 && m.s.n_prompt_hits == 20 && m.n_jumps == 1);
    CHECK(sim_run_one(&m, prompt, 20, 1) == 4 && sim_run_one(&m, prompt, 15, 1) == 7);
    CHECK(sim_run_one(&m, prompt, 40, 1) == 20 && sim_run_one(&m, prompt, 40, 1) == 4);
    /* samples of one prompt compute only what is behind its last snapshot */
    CHECK(sim_run_samples(&m, other, N, 6, 1) == N + 5 * 2 && m.s.n_copies == 0);
    m.s.config.max_tokens = 8; /* also in chunks */
    CHECK(sim_run_samples(&m, other + 30, N, 6, 1) == N + 5 * 2);
    m.s.config.max_tokens = 64;
    /* an answer leaves snapshots, too: its own tokens are found with it */
    CHECK(sim_run_one(&m, other + 1, 3, 31) == 3 + 30);
    int32_t tokens[34];
    memcpy(tokens, sim_device(&m, m.s.free_seqs[m.s.n_seqs_free - 1]), sizeof tokens);
    CHECK(sim_run_one(&m, tokens, 34, 1) == 2);
    /* the least recently used one goes first: those of the first prompts are gone */
    CHECK(sim_run_one(&m, prompt, N, 1) == N);
    sim_close(&m);
    sim_open(&m, (sched_config){4, 100, 8, 64, 60, 0, 0, {true, 0, 8}}, 50, 1 << 30, 0);
    CHECK(sim_run_samples(&m, other, N, 3, 1) == 3 * N && m.s.n_prompt_hits == 0 && m.n_jumps == 0);
    sim_close(&m);
    /* a step leaves more than there are: the end of the prompt has one */
    for (int n_snapshots = 1; n_snapshots < 4; n_snapshots++) {
        sim_open(&m, (sched_config){4, 100, 8, 64, 60, 0, 0, {true, n_snapshots, 8}}, 50, 1 << 30, 0);
        CHECK(sim_run_one(&m, prompt, 42, 1) == 42 && sim_run_one(&m, prompt, 42, 1) == 2);
        sim_close(&m);
    }
}

/* A prefix hit needs only what is still read: the last window. If that is gone, the sequence begins
 * where the last window that is there ends. */
static void sim_window_hits(void) {
    enum { N = 200 };
    sched_sim m;
    int32_t prompt[N + 1], other[N + 1];
    sched_config c = {4, 400, 2, 16, N + 20, 0, 8, {0}};
    for (int i = 0; i <= N; i++) prompt[i] = i, other[i] = 1000 + i;
    sim_open(&m, c, 50, 1 << 30, 0);
    CHECK(m.s.kv.n_windowed == 2 * (3 + 1) + 16 / 4); /* 2 sequences of 3 pages and 1, 16 rows */
    CHECK(sim_run_one(&m, prompt, N + 1, 1) == N + 1);
    /* its last windowed pages are cached */
    CHECK(sim_run_one(&m, prompt, N + 1, 1) == 1);
    CHECK(m.s.n_prompt_hits == N);
    /* of the prefix of 100 tokens all pages are in the tree, but no window: all is computed again,
     * and then the windows of both ends are there */
    CHECK(sim_run_one(&m, prompt, 101, 1) == 101 && m.s.n_prompt_hits == N);
    CHECK(sim_run_one(&m, prompt, 101, 1) == 1 && m.s.n_prompt_hits == N + 100);
    CHECK(m.s.kv.n_cached == N / 4 && m.s.kv.n_windowed_cached + m.s.kv.n_windowed_free == m.s.kv.n_windowed);
    /* another prompt takes all windowed pages; no page of the tree */
    CHECK(sim_run_one(&m, other, N + 1, 1) == N + 1 && m.s.kv.n_cached == 2 * N / 4);
    CHECK(sim_run_one(&m, prompt, N + 1, 1) == N + 1);
    /* a prefix whose last page has lost its windowed page, but not the pages before it */
    const int last = m.s.kv.windowed[m.s.kv.n_windowed].older; /* that of page 49, released last or first */
    int table[N / 4 + 1], n = kv_match_prefix(&m.s.kv, 0, table, prompt, N + 1);
    CHECK(n == N / 4 && m.s.kv.windowed_of[table[n - 1]] >= 0 && m.s.kv.windowed[last].computed);
    kv_windowed_drop(&m.s.kv, table[n - 1]);
    sim_check(&m);
    CHECK(kv_n_usable(&m.s.kv, table, n) == n - 1 && sim_run_one(&m, prompt, N + 1, 1) == 5);
    sim_close(&m);
}

/* What a sequence found stays, while a prompt before it takes all rows of a step and more windowed
 * pages than there are. */
static void sim_window_waits(void) {
    sched_sim m;
    toka_err e;
    int32_t prompt[201], other[127];
    for (int i = 0; i < 201; i++) prompt[i] = i;
    for (int i = 0; i < 127; i++) other[i] = 1000 + i;
    sim_open(&m, (sched_config){4, 400, 2, 64, 220, 0, 8, {0}}, 50, 1 << 30, 0);
    CHECK(m.s.kv.n_windowed == 2 * 4 + 64 / 4 && sim_run_one(&m, prompt, 201, 1) == 201);
    CHECK(sched_submit(&m.s, &(sched_job){.prompt = other, .n_prompt = 127, .n = 1, .max_tokens = 1}, &e) >= 0);
    CHECK(sched_submit(&m.s, &(sched_job){.prompt = prompt, .n_prompt = 201, .n = 1, .max_tokens = 1}, &e) >= 0);
    CHECK(sim_step(&m, true) == 64 && m.s.n_running == 2);
    for (int i = 0; i < 20 && m.n_done < 3; i++) sim_step(&m, true);
    CHECK_MSG(m.n_done == 3 && m.n_rows == 201 + 127 + 1, "%d rows", (int)m.n_rows);
    sim_close(&m);
}

/* A prompt's tail is copied from a sequence that still holds its windowed page, and keeps it in this
 * step: not from one in prefill. */
static void sim_window_tails(void) {
    sched_sim m;
    toka_err e;
    int32_t prompt[10] = {1, 2, 3};
    sim_open(&m, (sched_config){4, 100, 3, 16, 40, 0, 5, {0}}, 50, 1 << 30, 0);
    CHECK(sched_submit(&m.s, &(sched_job){.prompt = prompt, .n_prompt = 10, .n = 3, .max_tokens = 20}, &e) >= 0);
    sim_step(&m, true);
    CHECK(m.s.seqs[1].state == SCHED_DECODE && m.s.seqs[2].state == SCHED_PREFILL && m.s.kv.window == 5);
    CHECK(sched_has_same_tail(&m.s, &m.s.seqs[2], 2, 1, 2));
    m.s.seqs[1].state = SCHED_PREFILL;
    CHECK(!sched_has_same_tail(&m.s, &m.s.seqs[2], 2, 1, 2));
    m.s.seqs[1].state = SCHED_DECODE;
    sim_step(&m, true);
    CHECK(m.n_copies == 1);
    for (int i = 0; i < 6; i++) sim_step(&m, true); /* the window is past the tail */
    CHECK(m.s.seqs[1].n_computed == 17 && m.s.kv.seqs[1].window_first == 3 && !kv_holds_window(&m.s.kv, 1, 2));
    sim_close(&m);
}

/* GPT-OSS 20B at 32 k context: 12 of 24 layers have a window of 128. A sequence holds 2,048 pages of
 * 16 tokens in the others, but at most 9 windowed pages in decode. */
static void sim_window_gpt_oss(void) {
    enum { N = 32768 };
    scheduler s;
    toka_err e;
    int32_t *prompt = mem_zalloc(N * sizeof *prompt);
    sched_config c = {.B = 16, .n_pages = 3000, .max_seqs = 16, .max_tokens = 512, .max_len = N, .window = 128};
    sim_set_windowed(&c, 2);
    CHECK(!sched_init(&s, &c, &e) && s.kv.n_windowed == 16 * (9 + 1) + 512 / 16);
    CHECK(sched_submit(&s, &(sched_job){.prompt = prompt, .n_prompt = N - 100, .n = 1, .max_tokens = 100}, &e) >= 0);
    int most_prefill = 0, most_decode = 0;
    for (int i = 0; s.n_running || !i; i++) {
        CHECK(sched_plan(&s) > 0);
        const int held = s.kv.n_windowed - s.kv.n_windowed_free - s.kv.n_windowed_cached;
        if (s.n_prefill_seqs) most_prefill = MAX(most_prefill, held);
        else most_decode = MAX(most_decode, held);
        if (s.seqs[0].n_computed == N - 1) CHECK(s.kv.seqs[0].n_pages == N / 16 && held == 9);
        if (s.seqs[0].state == SCHED_DECODE) sched_commit(&s, 0, s.seqs[0].generation, 1, false);
    }
    CHECK_MSG(most_prefill == 8 + 512 / 16 && most_decode == 9, "%d, %d windowed pages", most_prefill, most_decode);
    sched_free(&s);
    free(prompt);
    /* in one pool for all layers: 24 * 2,048 pages of one layer; now 12 * 2,048 + 12 * 9 */
    const int64_t bytes = (int64_t)16 << 30, layer_bytes = 2 * 8 * 64 * 4, windowed = (16 * 10 + 32) * 16;
    const eng_token_bytes half = {24 * layer_bytes, 12 * layer_bytes}, all = {24 * layer_bytes, 24 * layer_bytes};
    CHECK(eng_choose_windowed(half, N, &c, bytes / half.all) * 16 == windowed);
    CHECK(eng_kv_tokens(half, 131072, &c, bytes) == (bytes - windowed * 12 * layer_bytes) / (12 * layer_bytes));
    /* many sequences: when memory is full, those that are four times as long as what a window takes hold all windowed pages */
    c.max_seqs = 8192;
    const int64_t one_pool = bytes / half.all;
    CHECK((c.n_windowed = eng_choose_windowed(half, N, &c, one_pool)) == (int)((double)one_pool * 2 / 5 / 16));
    const int64_t n_tokens = eng_kv_tokens(half, 131072, &c, bytes);
    CHECK_MSG(llabs(n_tokens - c.n_windowed * 16 * 4) < 16 * 8, "%lld tokens, %d windowed pages", (long long)n_tokens, c.n_windowed);
    /* too little memory for a window: one pool */
    CHECK(eng_choose_windowed(half, N, &c, (10 + 32) * 16 * 2) == 0 && eng_choose_windowed(half, N, &c, (10 + 32) * 16 * 3) == (10 + 32) * 3 * 2 / 5);
    /* sequences that are not longer than what a window takes: one pool; twice as long: those have all windowed pages */
    CHECK(eng_choose_windowed(half, 160, &c, one_pool) == 0 && eng_choose_windowed(half, 320, &c, one_pool) == (int)((double)one_pool * 2 / 3 / 16));
    c.n_windowed = 0;
    CHECK(eng_kv_tokens(half, 131072, &c, bytes) == bytes / (24 * layer_bytes));
    /* all layers have a window: as many pages as sequences can need */
    c.max_seqs = 16;
    CHECK((c.n_windowed = eng_choose_windowed(all, N, &c, bytes / all.all)) * 16 == windowed && eng_kv_tokens(all, 131072, &c, bytes) == 16 * 131072);
    CHECK(eng_kv_tokens(half, 131072, &c, windowed * 12 * layer_bytes - 1) == 0 && eng_kv_tokens(half, 131072, &c, -1) == 0);
}

/* no token is lost or changed: sim_commit_due compares each one */
static void sim_many_preemptions(void) {
    sched_sim m;
    uint64_t rng = 5;
    sim_open(&m, (sched_config){2, 200, 64, 256, 60, 0, 0, {0}}, 50, 1 << 30, 1);
    for (int i = 0; i < 1500; i++) sim_submit(&m, &rng, 4, 1, 50, 0);
    for (int i = 0; i < 200000 && m.n_done < 1500 && !check_failed; i++) {
        sim_step(&m, i % 97 == 0);
    }
    CHECK_MSG(m.n_done == 1500 && m.n_tokens == 1500 * 50, "%d done, %d tokens", (int)m.n_done, (int)m.n_tokens);
    CHECK_MSG(m.s.n_preempted > 2000, "%d", (int)m.s.n_preempted);
    sim_close(&m);
}

/* Returns the number of sequences that start at once: prompts of 8 tokens in pages of 4. */
static int sim_n_started(int n_pages, bool same_prompt, int max_tokens) {
    scheduler s;
    toka_err e;
    CHECK(!sched_init(&s, &(sched_config){4, n_pages, 16, 256, 64, 16, 0, {0}}, &e));
    for (int i = 0; i < 16; i++) {
        int32_t prompt[8];
        for (int k = 0; k < 8; k++) prompt[k] = same_prompt ? k : 8 * i + k;
        CHECK(sched_submit(&s, &(sched_job){.prompt = prompt, .n_prompt = 8, .n = 1, .max_tokens = max_tokens}, &e) >= 0);
    }
    sched_plan(&s);
    CHECK(!sched_check(&s));
    int n = s.n_running;
    sched_free(&s);
    return n;
}

/* For each sequence that runs, 4 pages stay free: what it needs for the next 16 tokens. */
static void sim_reserve(void) {
    /* with the nth, 2 n pages are held and 4 (n - 1) are reserved */
    CHECK(sim_n_started(26, false, 30) == 5 && sim_n_started(25, false, 30) == 4 && sim_n_started(31, false, 30) == 5 && sim_n_started(32, false, 30) == 6);
    /* the first page is shared: n + 1 pages are held */
    CHECK(sim_n_started(26, true, 30) == 5 && sim_n_started(27, true, 30) == 6);
    /* the first may fill the pool: it appends 2 pages */
    CHECK(sim_n_started(4, false, 9) == 1 && sim_n_started(5, false, 9) == 1 && sim_n_started(6, false, 9) == 2);
    /* at most 13 tokens are computed, so each appends 2 pages */
    CHECK(sim_n_started(26, false, 6) == 7 && sim_n_started(25, false, 6) == 6);
    /* a sequence of 1 token appends none */
    CHECK(sim_n_started(26, false, 1) == 13);
}

/* First come, first served; a priority is a head start; no request starves. */
static void sim_order(void) {
    sched_sim m;
    uint64_t rng = 3;
    sim_open(&m, (sched_config){2, 60, 1, 64, 32, 0, 0, {0}}, 50, 1 << 30, 0);
    int a = sim_submit(&m, &rng, 4, 1, 4, 0), b = sim_submit(&m, &rng, 4, 1, 4, 0), c = sim_submit(&m, &rng, 4, 1, 4, 1);
    int order[3], n = 0, last = -1;
    for (int i = 0; i < 20; i++) {
        sim_step(&m, true);
        if (m.s.n_running == 0) continue;
        int now = m.s.seqs[0].request;
        if (now != last && n < 3) order[n++] = now;
        last = now;
    }
    CHECK(n == 3 && order[0] == c && order[1] == a && order[2] == b);
    /* waits behind a stream of requests with a higher priority */
    int old = sim_submit(&m, &rng, 4, 1, 4, 0), waited = 0;
    for (; waited < 20 * SCHED_PRIORITY_STEPS && m.s.requests[old].prompt; waited++) {
        if (m.s.n_unstarted < 4) sim_submit(&m, &rng, 4, 1, 4, 3);
        sched_plan(&m.s);
        m.step++;
        sim_run(&m, (m.s.seqs[0].state != SCHED_FREE) * m.s.seqs[0].n_rows);
        sim_commit_due(&m);
    }
    CHECK_MSG(waited > 2 * SCHED_PRIORITY_STEPS && waited < 4 * SCHED_PRIORITY_STEPS, "%d", waited);
    sim_close(&m);
}

static void sim_cancel_states(void) {
    sched_sim m;
    uint64_t rng = 3;
    sim_open(&m, (sched_config){2, 40, 4, 12, 60, 0, 0, {0}}, 50, 1 << 30, 1);
    int a = sim_submit(&m, &rng, 20, 6, 8, 0), b = sim_submit(&m, &rng, 4, 1, 4, 0);
    sched_cancel(&m.s, b); /* still queued */
    sim_check(&m);
    sim_step(&m, true);
    int prefill = 0;
    for (int q = 0; q < 4; q++) prefill += m.s.seqs[q].state == SCHED_PREFILL;
    CHECK(prefill > 1);
    /* the sequence that computes the shared prompt */
    sched_end_seq(&m.s, m.s.seqs[4].prefill_next);
    sim_check(&m);
    for (int i = 0; i < 6; i++) sim_step(&m, true);
    CHECK(m.s.n_decode > 0);
    /* some samples decode, some prefill, two are queued; results are not yet committed */
    sched_cancel(&m.s, a);
    sim_check(&m);
    CHECK(m.s.n_seqs_free == 4 && m.s.n_unstarted == 0 && kv_n_available(&m.s.kv) == 40);
    int c = sim_submit(&m, &rng, 20, 4, 8, 0);
    while (m.s.requests[c].prompt && !check_failed) sim_step(&m, true);
    sim_close(&m);
}

static int sim_try(scheduler *s, int n_prompt, int n, int max_tokens) {
    toka_err e;
    int32_t p[8] = {0};
    return sched_submit(s, &(sched_job){.prompt = p, .n_prompt = n_prompt, .n = n, .max_tokens = max_tokens}, &e);
}

static void sim_refused(void) {
    scheduler s;
    toka_err e;
    CHECK(!sched_init(&s, &(sched_config){2, 5, 3, 8, 16, 0, 0, {0}}, &e));
    CHECK(sim_try(&s, 0, 1, 1) == TOKA_E_USE && sim_try(&s, 1, 0, 1) == TOKA_E_USE && sim_try(&s, 1, 1, 0) == TOKA_E_USE);
    CHECK(sim_try(&s, 8, 1, 9) == TOKA_E_USE && sim_try(&s, 8, 1, INT_MAX) == TOKA_E_USE);
    CHECK(sim_try(&s, 8, 1, 4) == TOKA_E_USE); /* 11 tokens to compute need 6 pages */
    CHECK(sim_try(&s, 8, 1, 3) == 0);
    CHECK(sched_plan(&s) == 8 && !sched_check(&s));
    sched_free(&s);
}

static void sim_no_memory(void) { /* the block tables would need 1 TB */
    scheduler s;
    toka_err e;
    sched_config c = {16, 100, 65536, 65536, 1 << 26, 0, 0, {0}};
    CHECK(sched_init(&s, &c, &e) == TOKA_E_MEMORY && strstr(e.msg, "65536 sequences of up to 67108864 tokens"));
    sched_free(&s); /* nothing was allocated: sched_free must accept that */
}

/* n samples of one prompt, twice, at page boundaries: all but the first find the prompt cached */
static void sim_repeated_prompts(void) {
    for (int n_prompt = 1; n_prompt <= 9; n_prompt++) {
        sched_sim m;
        uint64_t rng = 3;
        sim_open(&m, (sched_config){2, 400, 16, 64, 60, 0, 0, {0}}, 50, 1 << 30, 1);
        for (int round = 0; round < 2; round++) {
            uint64_t same = rng;
            int64_t hits = m.s.n_prompt_hits, done = m.n_done;
            int id = sim_submit(&m, &same, n_prompt, 32, 6, 0);
            m.s.requests[id].n_unshared = 0;
            for (int i = 0; i < 100 && m.n_done < done + 32; i++) sim_step(&m, true);
            CHECK(m.n_done == done + 32 && m.s.n_preempted == 0);
            int64_t max_hits = (n_prompt - 1) / 2 * 2 * round + (n_prompt - 1) * 31, found = m.s.n_prompt_hits - hits;
            /* if all holders of the last page end at once, it is computed again */
            CHECK(found <= max_hits && found >= max_hits - 2);
            /* if n_prompt is odd, the last token has a page of its own and nothing is copied */
            CHECK((m.n_copies > 0) == (n_prompt > 1 && n_prompt % 2 == 0));
        }
        sim_close(&m);
    }
}

/* A sequence is preempted in decode and computed again in chunks. A step whose rows do not reach
 * its end must not sample. */
static void sim_preempted_in_chunks(void) {
    sched_sim m;
    uint64_t rng = 3;
    sim_open(&m, (sched_config){2, 40, 2, 4, 60, 0, 0, {0}}, 50, 1 << 30, 1);
    int id = sim_submit(&m, &rng, 9, 1, 12, 0);
    m.s.requests[id].n_unshared = 1; /* no cached page is found */
    for (int i = 0; m.n_done == 0 && i < 200 && !check_failed; i++) {
        CHECK(i != 6 || m.s.n_decode == 1);
        if (i == 6) sched_preempt(&m.s);
        sim_step(&m, true);
    }
    CHECK(m.n_done == 1 && m.n_tokens == 12 && m.s.n_preempted == 1);
    /* tokens that are computed again are not counted again */
    CHECK_MSG(m.s.n_prompt_tokens == 9, "%d", (int)m.s.n_prompt_tokens);
    sim_close(&m);
}

/* All seqs are preempted sequences. The head of the queue is a new request with a head start, but
 * it has no seq to start in. */
static void sim_preempted_hold_all_seqs(void) {
    sched_sim m;
    uint64_t rng = 3;
    sim_open(&m, (sched_config){2, 40, 2, 16, 60, 0, 0, {0}}, 50, 1 << 30, 0);
    sim_submit(&m, &rng, 5, 2, 12, 0);
    for (int i = 0; i < 4; i++) sim_step(&m, true);
    while (m.s.next_to_preempt >= 0) sched_preempt(&m.s);
    sim_submit(&m, &rng, 5, 1, 12, 5);
    for (int i = 0; m.n_done < 3 && i < 100 && !check_failed; i++) sim_step(&m, true);
    CHECK(m.n_done == 3 && m.n_tokens == 36);
    sim_close(&m);
}

/* Many samples of few prompts, the batch is full after a few steps. */
static void sim_cold_start(void) {
    scheduler s;
    toka_err e;
    int32_t prompt[715];
    CHECK(!sched_init(&s, &(sched_config){16, 1572864 / 16, 8192, 32768, 2048, 16, 0, {0}}, &e));
    for (int i = 0; i < 16; i++) {
        for (int k = 0; k < 715; k++) prompt[k] = k < 600 ? k : k * 7 + i;
        sched_submit(&s, &(sched_job){.prompt = prompt, .n_prompt = 715, .n = 1024, .max_tokens = 1024}, &e);
    }
    for (int i = 0; i < 3; i++) sched_plan(&s);
    CHECK_MSG(s.n_running == 8192, "%d", s.n_running);
    sched_free(&s);
}

/* Many prompts share their first pages, each with many samples. One sequence per prompt computes
 * the last page; the others copy it one step later. */
static void sim_last_pages_of_many_prompts(void) {
    enum { PROMPTS = 60, TIMES = 12, N = PROMPTS * TIMES };
    scheduler s;
    toka_err e;
    int32_t prompt[40];
    int64_t n_copies = 0;
    CHECK(!sched_init(&s, &(sched_config){16, 8 * N, N, 8 * N, 256, 0, 0, {0}}, &e));
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < 40; k++) prompt[k] = k < 32 ? k : 1000 + 8 * (i / TIMES) + k;
        CHECK(sched_submit(&s, &(sched_job){.prompt = prompt, .n_prompt = 40, .n = 1, .max_tokens = 64}, &e) >= 0);
    }
    for (int i = 0; i < 8 && s.n_decode < N; i++) {
        sched_plan(&s);
        n_copies += s.n_copies;
        CHECK(!sched_check(&s));
    }
    /* the first sequence computes all of its prompt itself */
    CHECK_MSG(s.n_decode == N && n_copies >= N - PROMPTS - 1, "%d of %d decode, %lld copies", s.n_decode, N, (long long)n_copies);
    sched_free(&s);
}

static const struct test sched_tests[] = {{"sched: snapshots of states", sim_states},
    {"sched: random requests with states", sim_random_states},
    {"sched: random, 5 pages", sim_random_tiny},
                                          {"sched: random, small pools", sim_random_small},
                                          {"sched: random, windows", sim_random_windows},
                                          {"sched: windows and prefix hits", sim_window_hits},
                                          {"sched: windows of one that waits", sim_window_waits},
                                          {"sched: windows and prompt tails", sim_window_tails},
                                          {"sched: windows of GPT-OSS at 32 k", sim_window_gpt_oss},
                                          {"sched: preemptions keep every token", sim_many_preemptions},
                                          {"sched: who needs a mask runs one token ahead", sim_one_ahead},
                                          {"sched: without held steps they are gathered", sim_gathers},
    {"sched: admission leaves a reserve", sim_reserve},
                                          {"sched: order, priority, no starvation", sim_order},
                                          {"sched: cancel in any state", sim_cancel_states},
                                          {"sched: impossible requests are refused", sim_refused},
                                          {"sched: out of memory is an error", sim_no_memory},
                                          {"sched: repeated prompts, page boundaries", sim_repeated_prompts},
                                          {"sched: preempted, prefilled again in chunks", sim_preempted_in_chunks},
                                          {"sched: preempted sequences hold all seqs", sim_preempted_hold_all_seqs},
                                          {"sched: cold start fills the batch", sim_cold_start},
                                          {"sched: drafts", sim_random_with_drafts},
                                          {"sched: last pages of many prompts are copied", sim_last_pages_of_many_prompts},
                                          {0}};
