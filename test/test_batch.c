/* test_batch.c - tests of steps and shared spans. The simulated device of test_sched.c reads them
 * as attention does. */

typedef struct batch_test {
    sched_sim sim;
    batch_builder b;
    batch_step built, last; /* this step; the step before, which is still in flight */
    uint64_t last_hash;
    batch_micros micros;
    toka_sample_row *sample_rows; /* of the step: sampled rows, and some that are only scored */
    uint64_t rng;
    /* for each sample so far: its seq and the number of its microbatch */
    int *sampled_at, n_sampled;
    /* microbatches; those with needs_step; chunks that continue in the next microbatch */
    int64_t n_micros, n_needs, n_split_chunks;
    /* shared spans; rows with two or more of them; tokens of K and V read */
    int64_t n_shared, n_nested, kv_read;
    int64_t n_within;                    /* spans that begin within a page */
    int64_t n_copies;                    /* of windowed pages */
    int64_t n_windowed;                  /* positions that rows read in windowed pages */
    sim_state *states;                   /* as those of the simulated device, but by the state spans of the microbatches */
    int64_t n_state_spans, n_state_copies;
} batch_test;

/* Number of shared spans of the step. */
static int bt_n_shared_spans(const batch_test *t) { return t->built.step.n_spans - t->built.n_chunks; }
static int bt_span_pages(const toka_span *sp, int B) { return (sp->kv0 + sp->n_kv + B - 1) / B - sp->kv0 / B; }

/* Checks every row's spans: they go from 0 to its position in rising order without a gap, and each
 * of their kv_slots has the right content. row_q: the seq of each row. Returns the number of rows
 * with more than two spans. */
static int bt_check_spans(batch_test *t, const toka_step *st, const int *row_q, const uint64_t *mem, int32_t *device) {
    const scheduler *s = &t->sim.s;
    int *upto = mem_zalloc((size_t)st->T * sizeof *upto), *n_spans = mem_zalloc((size_t)st->T * sizeof *n_spans), n_nested = 0;
    for (int i = 0; i < st->n_spans && !check_failed; i++) {
        toka_span sp = st->spans[i];
        CHECK(sp.n_rows > 0 && sp.n_kv > 0 && sp.row0 >= 0 && sp.row0 + sp.n_rows <= st->T);
        t->kv_read += sp.n_kv, t->n_within += sp.kv0 % s->config.B != 0;
        for (int r = sp.row0; r < sp.row0 + sp.n_rows; r++) {
            CHECK(upto[r] == sp.kv0);
            for (int p = sp.kv0; p < sp.kv0 + sp.n_kv && p <= st->pos[r]; p++) {
                int kv_slot = st->pages[sp.page0 + p / s->config.B - sp.kv0 / s->config.B] * s->config.B + p % s->config.B;
                CHECK(mem[kv_slot] == sim_hash(device + (size_t)row_q[r] * (size_t)s->config.max_len, p + 1));
                if (!s->kv.window || p <= st->pos[r] - s->kv.window) continue;
                int page = st->windowed_pages[sp.page0 + p / s->config.B - sp.kv0 / s->config.B];
                CHECK(page >= 0 && t->sim.windowed[page * s->config.B + p % s->config.B] == mem[kv_slot]);
                t->n_windowed++;
            }
            upto[r] = MIN(sp.kv0 + sp.n_kv, st->pos[r] + 1), n_spans[r]++;
        }
    }
    for (int r = 0; r < st->T && !check_failed; r++) {
        CHECK(upto[r] == st->pos[r] + 1);
        CHECK(st->kv_slot[r] == kv_block_table(&s->kv, row_q[r])[st->pos[r] / s->config.B] * s->config.B + st->pos[r] % s->config.B);
        CHECK(!s->kv.window == !st->windowed_slot);
        if (s->kv.window) CHECK(st->windowed_slot[r] == s->kv.windowed_of[st->kv_slot[r] / s->config.B] * s->config.B + st->kv_slot[r] % s->config.B);
        int32_t id = device[(size_t)row_q[r] * (size_t)s->config.max_len + (size_t)st->pos[r]];
        CHECK(st->ids[r] == id || (st->ids[r] == -1 - row_q[r] && st->pos[r] >= s->seqs[row_q[r]].n_known));
        n_nested += n_spans[r] > 2;
    }
    free(upto), free(n_spans);
    return n_nested;
}

/* The seq of each row of the step. The caller frees it. */
static int *bt_row_q(batch_test *t) {
    const batch_step *d = &t->built;
    int *row_q = mem_alloc((size_t)d->step.T * sizeof *row_q), row = 0;
    for (int e = 0; e < d->n_chunks; e++) {
        CHECK(d->chunk_row0[e] == row && d->chunk_row0[e + 1] > row);
        while (row < d->chunk_row0[e + 1]) row_q[row++] = d->chunk_seq[e];
    }
    CHECK(row == d->step.T && d->chunk_row0[d->n_chunks] == row);
    return row_q;
}

/* ---- Microbatches ---- */

/* Microbatches run one after another: each may only read positions that are written by then. */
static void bt_check_order(const batch_test *t, const int *row_q) {
    const toka_step *st = &t->built.step;
    int B = t->sim.s.config.B;
    const kv_cache *kv = &t->sim.s.kv;
    char *missing = mem_zalloc((size_t)kv->n_pages * (size_t)B), *windowed = mem_zalloc((size_t)(kv->n_windowed + 1) * (size_t)B);
    /* a page that is computed again has the same content before (sim_run) */
    for (int r = 0; r < st->T; r++) missing[st->kv_slot[r]] = t->sim.written[st->kv_slot[r]] == 1;
    for (int r = 0; r < st->T && kv->window; r++) windowed[st->windowed_slot[r]] = t->sim.windowed_written[st->windowed_slot[r]] == 1;
    for (int k = 0; k < t->micros.n && !check_failed; k++) {
        const batch_micro *a = &t->micros.micro[k];
        for (int r = 0; r < a->step.T; r++) missing[a->step.kv_slot[r]] = 0;
        for (int r = 0; r < a->step.T && kv->window; r++) windowed[a->step.windowed_slot[r]] = 0;
        for (int r = 0; r < a->step.T; r++)
            for (int p = 0; p <= a->step.pos[r]; p++) {
                const int page = kv_block_table(kv, row_q[a->row0 + r])[p / B];
                CHECK(!missing[page * B + p % B]);
                if (kv->window && p > a->step.pos[r] - kv->window) CHECK(!windowed[kv->windowed_of[page] * B + p % B]);
            }
    }
    free(missing), free(windowed);
}

/* Prompt chunks go to the microbatches with the least work. So a microbatch with prompt rows
 * exceeds any other by no more than whole rows make unavoidable. */
static void bt_check_balance(const batch_test *t, const int *row_q) {
    int64_t max_row_cost = 0, highest = 0, lowest = INT64_MAX;
    const batch_work w = t->b.work;
    for (int k = 0; k < t->micros.n; k++) {
        const batch_micro *a = &t->micros.micro[k];
        int64_t cost = 0;
        bool has_prefill = false;
        for (int r = 0; r < a->step.T; r++) {
            const bool chunk = t->sim.s.seqs[row_q[a->row0 + r]].is_prefill;
            const bool first = a->step.pos[r] == t->sim.s.seqs[row_q[a->row0 + r]].from;
            int64_t c = w.row + (w.pair + (chunk || !first ? 0 : w.read)) * (a->step.pos[r] + 1);
            cost += c, max_row_cost = MAX(max_row_cost, c), has_prefill |= chunk;
        }
        lowest = MIN(lowest, cost);
        if (has_prefill) highest = MAX(highest, cost);
    }
    CHECK(t->micros.n >= 1 && t->micros.n <= t->b.n_stages + (t->b.n_stages > 1));
    CHECK_MSG(highest <= lowest + t->micros.n * (max_row_cost + 1), "%lld against %lld, rows of up to %lld",
        (long long)highest, (long long)lowest,
              (long long)max_row_cost);
}

static void bt_check_samples(const batch_test *t, const batch_micro *a) {
    const toka_step *st = &t->built.step;
    int n = 0;
    for (int i = 0; i < st->n_samples; i++) {
        int k = t->micros.sample_at[i] - a->sample0, row = st->samples[i].row - a->row0;
        CHECK((k >= 0 && k < a->step.n_samples) == (row >= 0 && row < a->step.T));
        if (k < 0 || k >= a->step.n_samples) continue;
        CHECK(a->step.samples[k].row == row && a->step.samples[k].seq == st->samples[i].seq && a->step.samples[k].position == st->samples[i].position);
        n++;
    }
    CHECK(n == a->step.n_samples);
}

/* Checks needs_step: the last microbatch that sampled a token which this one reads. Looked up in
 * the log of all samples. */
static void bt_check_needs(batch_test *t, const batch_micro *a) {
    int64_t needs = 0;
    for (int r = 0; r < a->step.T; r++)
        for (int i = t->n_sampled - 1; i >= 0 && a->step.ids[r] < 0; i--)
            if (t->sampled_at[2 * i] == -1 - a->step.ids[r]) {
                needs = MAX(needs, (int64_t)t->sampled_at[2 * i + 1]);
                break;
            }
    CHECK(a->step.needs_step == needs && (!needs || needs < t->micros.micro[0].step.number));
    t->n_needs += needs > 0;
}

/* Runs the state spans of a microbatch: each of its rows must find the state of the tokens before it, once. row_q: of its rows. */
static void bt_run_states(batch_test *t, const toka_step *st, const int *row_q, const int32_t *device) {
    const sched_config *c = &t->sim.s.config;
    char *seen = mem_zalloc((size_t)st->T);
    CHECK((size_t)t->built.step.n_states <= batch_max_states(&t->sim.s));
    for (int i = 0; i < st->n_states && !check_failed; i++) {
        const toka_state_span *span = &st->states[i];
        CHECK(span->from >= -1 && span->to >= 0 && MAX(span->from, span->to) < c->max_seqs + c->states.n_snapshots);
        CHECK(span->row0 >= 0 && span->n_rows >= 0 && span->row0 + span->n_rows <= st->T);
        sim_state *to = &t->states[span->to];
        *to = span->from < 0 ? (sim_state){0} : t->states[span->from];
        t->n_state_spans++, t->n_state_copies += !span->n_rows;
        for (int r = span->row0; r < span->row0 + span->n_rows; r++) {
            const int32_t *tokens = device + (size_t)row_q[r] * (size_t)c->max_len;
            CHECK(span->to == row_q[r] && !seen[r]++ && to->n == st->pos[r] && (!to->n || to->hash == sim_hash(tokens, to->n)));
            *to = (sim_state){sim_hash(tokens, st->pos[r] + 1), st->pos[r] + 1};
        }
    }
    for (int r = 0; r < st->T; r++) CHECK(seen[r]);
    free(seen);
}

static void bt_check_micros(batch_test *t, const int *row_q, const uint64_t *mem, int32_t *device) {
    const batch_step *d = &t->built;
    int row = 0;
    int64_t number = t->n_micros;
    batch_make_micros(&t->b, &t->micros, d);
    for (int k = 0; k < t->micros.n && !check_failed; k++) {
        const batch_micro *a = &t->micros.micro[k];
        int end = row + a->step.T;
        CHECK(a->row0 == row && a->step.T > 0 && end <= d->step.T && a->step.number == ++number);
        CHECK(!memcmp(a->step.ids, d->ids + row, (size_t)a->step.T * sizeof *d->ids));
        CHECK(d->chunk_seq[d->micro_chunk0[k]] == row_q[row] && d->chunk_seq[d->micro_chunk0[k + 1] - 1] == row_q[end - 1] && d->chunk_row0[d->micro_chunk0[k + 1]] == end);
        bt_check_spans(t, &a->step, row_q + row, mem, device);
        bt_check_samples(t, a), bt_check_needs(t, a);
        CHECK(!t->sim.s.config.states.used == !a->step.n_states);
        if (a->step.n_states) bt_run_states(t, &a->step, row_q + row, device);
        row = end;
    }
    for (int e = 0; e < d->n_chunks; e++) {
        const sched_seq *x = &t->sim.s.seqs[d->chunk_seq[e]];
        t->n_split_chunks += d->pos[d->chunk_row0[e + 1] - 1] + 1 < x->from + x->n_rows;
    }
    CHECK(row == d->step.T);
    bt_check_order(t, row_q), bt_check_balance(t, row_q);
    t->n_micros = number;
    for (int i = 0; i < d->n_samples; i++)
        for (int k = 0; k < t->micros.n; k++) {
            int r = d->samples[i].row - t->micros.micro[k].row0;
            if (r < 0 || r >= t->micros.micro[k].step.T) continue;
            t->sampled_at = mem_realloc(t->sampled_at, (size_t)(t->n_sampled + 1) * 2 * sizeof *t->sampled_at);
            t->sampled_at[2 * t->n_sampled] = d->samples[i].seq,
                t->sampled_at[2 * t->n_sampled++ + 1] = (int)t->micros.micro[k].step.number;
        }
}

/* Adds sample rows as an engine does: first the sampled rows, then scored rows in rising order. */
static void bt_add_sample_rows(batch_test *t) {
    batch_step *d = &t->built;
    int n = 0;
    for (; n < d->n_samples; n++) t->sample_rows[n] = (toka_sample_row){.row = d->samples[n].row,
        .seq = d->samples[n].seq, .position = (uint32_t)n};
    for (int r = 0; r < d->step.T && n < t->sim.s.config.max_tokens; r++)
        if (rnd(&t->rng) % 4 == 0) t->sample_rows[n] = (toka_sample_row){.row = r, .seq = -1, .position = (uint32_t)n}, n++;
    d->step.samples = t->sample_rows, d->step.n_samples = n;
}

/* Hash of all that a step contains. Its pages must be stored span by span, without a gap. */
static uint64_t bt_hash(const batch_step *d, int B) {
    const toka_step *st = &d->step;
    size_t T = (size_t)st->T * sizeof(int32_t);
    int n_pages = 0;
    for (int i = 0; i < st->n_spans; n_pages += bt_span_pages(&st->spans[i++], B)) CHECK(st->spans[i].page0 == n_pages);
    CHECK(n_pages == d->n_pages);
    uint64_t h = hash_bytes(st->ids, T) + hash_bytes(st->pos, T) * 3 + hash_bytes(st->kv_slot, T) * 5;
    if (st->windowed_slot) h += hash_bytes(st->windowed_slot, T) * 13 + hash_bytes(st->windowed_pages, (size_t)n_pages * sizeof *st->pages) * 15;
    h += hash_bytes(st->spans, (size_t)st->n_spans * sizeof *st->spans) * 7;
    h += hash_bytes(st->pages, (size_t)n_pages * sizeof *st->pages) * 9;
    return h + hash_bytes(d->samples, (size_t)d->n_samples * sizeof *d->samples) * 11 + hash_bytes(d->chunk_seq, (size_t)d->n_chunks * sizeof *d->chunk_seq);
}

static void bt_on_run(void *user, const uint64_t *mem, int32_t *device) {
    batch_test *t = user;
    batch_step swap = t->last;
    t->last = t->built, t->built = swap;
    batch_build(&t->b, &t->built, &t->sim.s);
    for (int i = 0; i < t->built.step.n_copies && t->sim.s.kv.window; i++) {
        const toka_copy copy = t->built.step.copies[i], windowed = t->built.step.windowed_copies[i];
        CHECK(windowed.from == t->sim.s.kv.windowed_of[copy.from] && windowed.to == t->sim.s.kv.windowed_of[copy.to]);
        t->n_copies++;
    }
    /* the step in flight is unchanged, whatever was committed, planned and built since */
    CHECK(!t->last.step.T || bt_hash(&t->last, t->sim.s.config.B) == t->last_hash);
    t->last_hash = bt_hash(&t->built, t->sim.s.config.B);
    int *row_q = bt_row_q(t);
    t->n_nested += bt_check_spans(t, &t->built.step, row_q, mem, device);
    t->n_shared += bt_n_shared_spans(t);
    int64_t kv_read = t->kv_read;
    bt_add_sample_rows(t);
    if (t->built.step.T) bt_check_micros(t, row_q, mem, device);
    t->kv_read = kv_read;
    free(row_q);
    int n_yield = 0;
    for (int q = 0; q < t->sim.s.config.max_seqs; q++) n_yield += !t->sim.s.seqs[q].n_rows || !t->sim.s.seqs[q].is_sampled ? 0 : 1 + t->sim.s.seqs[q].n_drafts;
    CHECK(n_yield == t->built.n_samples);
    for (int i = 0; i < t->built.n_samples; i++) {
        const sched_seq *x = &t->sim.s.seqs[t->built.samples[i].seq];
        const int pos = t->built.pos[t->built.samples[i].row];
        CHECK(x->is_sampled && x->generation == t->built.samples[i].generation && pos <= x->from + x->n_rows - 1 && pos >= x->from + x->n_rows - 1 - x->n_drafts);
        if (i && t->built.samples[i - 1].seq == t->built.samples[i].seq) CHECK(t->built.samples[i].row == t->built.samples[i - 1].row + 1);
    }
}

static batch_test *bt_open(sched_config c, batch_cost cost, int vocab, int end_one_in, int lag, int stages) {
    static const batch_work weights[] = {{1, 0, 0}, {1000, 1, 5}, {3, 7, 0}, {1, 1, 20}};
    batch_test *t = mem_zalloc(sizeof *t);
    toka_err e;
    sim_open(&t->sim, c, vocab, end_one_in, lag);
    CHECK(!batch_step_init(&t->built, &t->sim.s, &e) && !batch_step_init(&t->last, &t->sim.s, &e) &&
        !batch_micros_init(&t->micros, &t->sim.s, &e));
    batch_init(&t->b, &t->sim.s, cost);
    t->b.n_stages = stages, t->b.compute_bound_rows = stages, t->b.work = weights[(stages + lag) % COUNT(weights)];
    t->sample_rows = mem_alloc((size_t)c.max_tokens * sizeof *t->sample_rows), t->rng = 7;
    t->states = mem_zalloc((size_t)(c.max_seqs + c.states.n_snapshots) * sizeof *t->states);
    t->sim.on_run = bt_on_run, t->sim.on_run_user = t;
    return t;
}

static void bt_close(batch_test *t) {
    free(t->sample_rows), free(t->sampled_at), free(t->states);
    batch_free(&t->b), batch_step_free(&t->built), batch_step_free(&t->last), batch_micros_free(&t->micros), sim_close(&t->sim);
    free(t);
}

static void bt_random(void) {
    batch_cost costs[] = {{0, 0, 1 << 20, 1}, {1, 0, 4, 0}, {1, 4, 16, 2}, {1000, 0, 64, 1}};
    int64_t n_shared = 0, n_nested = 0, n_within = 0, n_micros = 0, n_needs = 0, n_split_chunks = 0;
    for (uint64_t seed = 1; seed <= 80 && !check_failed; seed++) {
        uint64_t rng = seed;
        sched_config c = {seed % 3 ? 2 : 4, seed % 2 ? 60 : 12, 12, 16, 24, 0, 0, {0}};
        batch_test *t = bt_open(c, costs[seed % 4], 2, 30, (int)(seed % 3), seed / 4 % 2 ? 1 : 2 + (int)(seed / 8 % 5));
        t->sim.max_drafts = seed / 2 % 2 ? (int)(seed / 3 % 4) : 0, t->sim.draft_rng = seed;
        for (int i = 0; i < 80 && !check_failed; i++) {
            int n_prompt = 1 + (int)(rnd(&rng) % 12), max_tokens = 1 + (int)(rnd(&rng) % 12);
            if (t->sim.s.n_unstarted < 20) sim_submit(&t->sim, &rng, n_prompt, 1 + (int)(rnd(&rng) % 4), max_tokens, 0);
            if (rnd(&rng) % 16 == 0 && t->sim.s.next_to_preempt >= 0) sched_cancel(&t->sim.s, t->sim.s.seqs[t->sim.s.next_to_preempt].request);
            if (rnd(&rng) % 8 == 0 && t->sim.s.next_to_preempt >= 0) sched_preempt(&t->sim.s);
            sim_step(&t->sim, false);
        }
        if (check_failed) printf("seed %d\n", (int)seed);
        /* if a shared span costs so much, it is never worth it */
        CHECK(seed % 4 != 3 || !t->n_shared);
        n_shared += t->n_shared, n_nested += t->n_nested, n_within += t->n_within;
        n_micros += t->n_micros, n_needs += t->n_needs, n_split_chunks += t->n_split_chunks;
        bt_close(t);
    }
    CHECK_MSG(n_shared > 1000 && n_nested > 1000 && n_within > 1000, "%d %d %d", (int)n_shared, (int)n_nested, (int)n_within);
    CHECK_MSG(n_micros > 10000 && n_needs > 3000 && n_split_chunks > 1000, "%d %d %d", (int)n_micros, (int)n_needs, (int)n_split_chunks);
}

/* States: the state spans of the microbatches do what the scheduler planned. */
static void bt_random_states(void) {
    int64_t n_copies = 0, n_jumps = 0, n_split_chunks = 0;
    for (uint64_t seed = 1; seed <= 120 && !check_failed; seed++) {
        uint64_t rng = seed;
        sched_config c = {2, seed % 2 ? 70 : 30, 8, seed % 3 ? 16 : 60, 40, 0, 0, {true, (int)(seed % 6), 2 * (1 + (int)(seed % 3))}};
        batch_test *t = bt_open(c, (batch_cost){1, 0, 4, 0}, 2, 30, (int)(seed % 3), seed / 4 % 2 ? 1 : 2 + (int)(seed / 8 % 5));
        for (int i = 0; i < 80 && !check_failed; i++) {
            int n_prompt = 1 + (int)(rnd(&rng) % 24), max_tokens = 1 + (int)(rnd(&rng) % 15);
            if (t->sim.s.n_unstarted < 20) sim_submit(&t->sim, &rng, n_prompt, 1 + (int)(rnd(&rng) % 4), max_tokens, 0);
            if (rnd(&rng) % 8 == 0 && t->sim.s.next_to_preempt >= 0) sched_preempt(&t->sim.s);
            sim_step(&t->sim, true);
        }
        if (check_failed) printf("seed %d\n", (int)seed);
        n_copies += t->n_state_copies, n_jumps += t->sim.n_jumps, n_split_chunks += t->n_split_chunks;
        bt_close(t);
    }
    CHECK_MSG(n_copies > 1000 && n_jumps > 1000 && n_split_chunks > 300, "%d %d %d", (int)n_copies, (int)n_jumps, (int)n_split_chunks);
}

/* Windows: the rows of a step and of its microbatches find all that they read in windowed pages, in
 * shared spans, too. */
static void bt_random_windows(void) {
    batch_cost costs[] = {{0, 0, 1 << 20, 0}, {1, 0, 4, 0}, {1, 4, 16, 0}};
    int64_t n_shared = 0, n_windowed = 0, n_copies = 0, n_micros = 0;
    for (uint64_t seed = 1; seed <= 80 && !check_failed; seed++) {
        uint64_t rng = seed;
        sched_config c = {2, 70, 8, 16, 40, 0, 1 + (int)(seed % 7), {0}};
        batch_test *t = bt_open(c, costs[seed % 3], 2, 30, (int)(seed % 3), seed / 4 % 2 ? 1 : 2 + (int)(seed / 8 % 5));
        t->sim.max_drafts = seed / 2 % 2 ? (int)(seed / 3 % 4) : 0, t->sim.draft_rng = seed;
        CHECK(t->sim.s.kv.window);
        for (int i = 0; i < 80 && !check_failed; i++) {
            int n_prompt = 1 + (int)(rnd(&rng) % 24), max_tokens = 1 + (int)(rnd(&rng) % 15);
            if (t->sim.s.n_unstarted < 20) sim_submit(&t->sim, &rng, n_prompt, 1 + (int)(rnd(&rng) % 4), max_tokens, 0);
            if (rnd(&rng) % 8 == 0 && t->sim.s.next_to_preempt >= 0) sched_preempt(&t->sim.s);
            sim_step(&t->sim, true);
        }
        if (check_failed) printf("seed %d\n", (int)seed);
        n_shared += t->n_shared, n_windowed += t->n_windowed, n_copies += t->n_copies, n_micros += t->n_micros;
        bt_close(t);
    }
    CHECK_MSG(n_shared > 1000 && n_windowed > 10000 && n_copies > 50 && n_micros > 5000, "%d %d %d %d", (int)n_shared, (int)n_windowed, (int)n_copies, (int)n_micros);
}

/* If shared spans are free, every page is read once per step, however many sequences have it. */
static void bt_each_page_once(void) {
    uint64_t rng = 21;
    batch_test *t = bt_open((sched_config){2, 300, 24, 400, 40, 0, 0, {0}}, (batch_cost){0, 0, 1 << 20, 0}, 2, 1 << 30, 0, 1);
    for (int i = 0; i < 8; i++) sim_submit(&t->sim, &rng, 16 + i % 3, 3, 20, 0);
    for (int i = 0; i < 19 && !check_failed; i++) {
        t->kv_read = 0;
        sim_step(&t->sim, false);
        if (t->sim.s.n_prefill_seqs) continue;
        int want = 0;
        char *seen = mem_zalloc(300);
        for (int e = 0; e < t->built.n_chunks; e++)
            /* each sequence has one row; its last page may be half full */
            for (int k = 0, from = t->built.pos[e]; k <= from / 2; k++) {
                int page = kv_block_table(&t->sim.s.kv, t->built.chunk_seq[e])[k];
                if (!seen[page] || k == from / 2) want += k == from / 2 ? from % 2 + 1 : 2;
                seen[page] = 1;
            }
        free(seen);
        CHECK_MSG(t->kv_read == want, "step %d: %d tokens read, %d different ones", i, (int)t->kv_read, want);
    }
    bt_close(t);
}

/* Families of prompts with common prefixes, queued after a prompt that takes the whole first step.
 * Some sequences that would compute a prefix for others are cancelled or preempted before. */
static void bt_random_families(void) {
    int64_t n_split_chunks = 0;
    for (uint64_t seed = 1; seed <= 300 && !check_failed; seed++) {
        uint64_t rng = seed;
        toka_err e;
        batch_test *t = bt_open((sched_config){2, 80, 12, 24, 64, 0, 0, {0}}, (batch_cost){(int)seed % 2, 0, 4, (int)seed % 3},
            2, 8, (int)(seed % 3), 2 + (int)(seed % 5));
        for (int wave = 0; wave < 12 && !check_failed; wave++) {
            int32_t prompt[23];
            for (int i = 0; i < 23; i++) prompt[i] = 100 + wave;
            while (t->sim.s.n_unstarted) sched_cancel(&t->sim.s, t->sim.s.first_queued);
            for (int q = 0; q < 12; q++) {
                const sched_seq *x = &t->sim.s.seqs[q];
                if (x->state == SCHED_PREFILL || (x->state != SCHED_FREE && rnd(&rng) % 2)) sched_cancel(&t->sim.s, x->request);
            }
            sched_submit(&t->sim.s, &(sched_job){.prompt = prompt, .n_prompt = 23, .n = 1, .max_tokens = 1}, &e);
            for (int k = 3 + (int)(rnd(&rng) % 8); k; k--) {
                prompt[0] = 200 + wave;
                for (int i = 1; i < 14; i++) prompt[i] = rnd(&rng) % 4 == 0;
                int n = 3 + (int)(rnd(&rng) % 12);
                sched_submit(&t->sim.s, &(sched_job){.prompt = prompt, .n_prompt = n, .n = 1 + n % 2, .max_tokens = 2}, &e);
            }
            for (int i = 0; i < 4 && !check_failed; i++) {
                sim_step(&t->sim, false);
                for (int k = (int)(rnd(&rng) % 8); k && i < 2; k--) {
                    const sched_seq *x = &t->sim.s.seqs[rnd(&rng) % 12];
                    if (x->state == SCHED_PREFILL) sched_cancel(&t->sim.s, x->request);
                }
                if (rnd(&rng) % 8 == 0 && t->sim.s.next_to_preempt >= 0) sched_preempt(&t->sim.s);
            }
        }
        if (check_failed) printf("seed %d\n", (int)seed);
        n_split_chunks += t->n_split_chunks;
        bt_close(t);
    }
    CHECK_MSG(n_split_chunks > 1000, "%d", (int)n_split_chunks);
}

/* u and x share pages 0 and 1; v shares only page 0. The sequence that would compute page 0 is
 * cancelled. So v, which comes after u and x in the order, computes page 0 in the same step in
 * which u computes page 1. Therefore v must be in a microbatch before u and x. */
static void bt_third_writer(void) {
    batch_test *t = bt_open((sched_config){2, 100, 8, 24, 64, 0, 0, {0}}, (batch_cost){0, 0, 1 << 20, 0}, 1000, 1 << 30, 0, 5);
    scheduler *s = &t->sim.s;
    toka_err e;
    int32_t z[25] = {9}, a[7] = {1, 1, 2, 2, 3, 3, 3}, v[7] = {1, 1, 5, 5, 5, 5, 5}, u[7] = {1, 1, 2, 2, 6, 6, 6}, x[7] = {1, 1, 2, 2, 7, 7, 7};
    /* takes the whole first step */
    sched_submit(s, &(sched_job){.prompt = z, .n_prompt = 25, .n = 1, .max_tokens = 9}, &e);
    int first = sched_submit(s, &(sched_job){.prompt = a, .n_prompt = 7, .n = 1, .max_tokens = 9}, &e);
    int32_t *others[] = {v, u, x};
    for (int i = 0; i < 3; i++) sched_submit(s, &(sched_job){.prompt = others[i], .n_prompt = 7, .n = 1, .max_tokens = 9}, &e);
    sim_step(&t->sim, false);
    CHECK(s->n_running == 5 && t->built.step.T == 24);
    sched_cancel(s, first);
    sim_step(&t->sim, false);
    /* bt_check_order has checked the order */
    CHECK(s->n_running == 4 && t->built.step.T == 16 && t->micros.n == 5);
    bt_close(t);
}

/* Two prompts with one common prefix and many samples: a level is shared where the cost model says
 * that it pays. */
static void bt_levels(void) {
    struct {
        batch_cost cost;
        int n_spans; /* number of shared spans */
    } cases[] = {{{0, 0, 1 << 20, 0}, 3}, {{100, 0, 1 << 20, 0}, 2}, {{100000, 0, 1 << 20, 0}, 0}, {{100, 100000, 1 << 20, 0}, 0},
                 {{4, 0, 1, 0}, 0},       {{0, 0, 1 << 20, 4}, 3}, {{100, 0, 1 << 20, 1}, 2}};
    for (int k = 0; k < COUNT(cases); k++) {
        batch_test *t = bt_open((sched_config){16, 400, 64, 2048, 400, 0, 0, {0}}, cases[k].cost, 1000, 1 << 30, 0, 1);
        int32_t prompt[300];
        toka_err e;
        for (int i = 0; i < 300; i++) prompt[i] = 1;
        for (int second = 0; second < 2; second++) {
            for (int i = 100; i < 300; i++) prompt[i] = 2 + second;
            sched_submit(&t->sim.s, &(sched_job){.prompt = prompt, .n_prompt = 300, .n = 16, .max_tokens = 40}, &e);
        }
        for (int i = 0; i < 3; i++) sim_step(&t->sim, i == 2); /* no page is filled by decode yet */
        CHECK(t->built.n_chunks == 32);
        CHECK_MSG(bt_n_shared_spans(t) == cases[k].n_spans, "case %d: %d groups", k, bt_n_shared_spans(t));
        if (k == 0) CHECK(t->built.step.spans[0].n_rows == 32 && t->built.step.spans[0].n_kv == 96);
        if (k == 0) CHECK(t->built.step.spans[1].n_rows == 16 && t->built.step.spans[1].n_kv == 192);
        if (k == 1) CHECK(t->built.step.spans[0].n_rows == 16 && t->built.step.spans[0].n_kv == 288);
        /* 299 prompt tokens and the newest one */
        if (k == 5) CHECK(t->built.step.spans[1].n_kv == 200 && t->built.step.spans[3].kv0 == 296);
        if (k == 6) CHECK(t->built.step.spans[0].n_kv == 299 && t->built.step.spans[2].kv0 == 299);
        bt_close(t);
    }
}

/* Samples that must not share anything do not share the last page of a short prompt either. */
static void bt_unshared(void) {
    for (int unshared = 0; unshared < 2; unshared++) {
        batch_test *t = bt_open((sched_config){16, 400, 64, 2048, 400, 0, 0, {0}}, (batch_cost){0, 0, 1 << 20, 1}, 1000, 1 << 30, 0, 1);
        int32_t prompt[10] = {1, 2, 3};
        toka_err e;
        sched_submit(&t->sim.s, &(sched_job){.prompt = prompt, .n_prompt = 10, .n = 8, .max_tokens = 40, .n_unshared = unshared * 8}, &e);
        for (int i = 0; i < 3; i++) sim_step(&t->sim, false);
        CHECK_MSG(t->built.n_chunks == 8 && bt_n_shared_spans(t) == !unshared, "unshared %d: %d shared spans", unshared,
            bt_n_shared_spans(t));
        bt_close(t);
    }
}

/* Requests with the same prompt share its last page, other requests do not. */
static void bt_equal_prompts(void) {
    batch_test *t = bt_open((sched_config){16, 400, 64, 2048, 400, 0, 0, {0}}, (batch_cost){0, 0, 1 << 20, 1}, 1000, 1 << 30, 0, 1);
    /* three prompts that differ from their second page on, eight requests each */
    for (int i = 0; i < 24; i++) {
        int32_t prompt[28] = {[20] = i / 8};
        toka_err e;
        sched_submit(&t->sim.s, &(sched_job){.prompt = prompt, .n_prompt = 28, .n = 1, .max_tokens = 40}, &e);
    }
    for (int i = 0; i < 4; i++) sim_step(&t->sim, false);
    /* spans of the first page and of three last pages */
    CHECK_MSG(t->built.n_chunks == 24 && bt_n_shared_spans(t) == 4, "%d groups", bt_n_shared_spans(t));
    bt_close(t);
}

static const struct test batch_tests[] = {{"batch: random steps with states", bt_random_states},
    {"batch: random steps and spans", bt_random},
                                          {"batch: random steps and windows", bt_random_windows},
                                          {"batch: every page read once", bt_each_page_once},
                                          {"batch: levels by cost", bt_levels},
                                          {"batch: samples that share nothing", bt_unshared},
                                          {"batch: requests with equal prompts", bt_equal_prompts},
                                          {"batch: random families, microbatches", bt_random_families},
                                          {"batch: two that skip pages, their writer comes later", bt_third_writer},
                                          {0}};
