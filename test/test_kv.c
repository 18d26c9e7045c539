/* test_kv.c - pages and prefix tree: cases by hand, then random operations in tiny pools, compared
 * with a model of the content. */

#define KV_OK(k, open) \
    do { \
        const char *bad_ = kv_check(k, open); \
        CHECK_MSG(!bad_, "%s", bad_); \
    } while (0)

/* Allocates sequence q for n tokens if there are pages for it. Returns the number of pages found in
 * the tree, or -1. */
static int kvt_alloc_seq(kv_cache *k, bool *open, int q, const int32_t *tokens, int n) {
    int m = kv_match_prefix(k, 0, kv_block_table(k, q), tokens, n), need = kv_pages_for(k, n) - m;
    for (int i = 0; i < m; i++) need += !k->pages[kv_block_table(k, q)[i]].ref;
    if (need > kv_n_available(k)) return -1;
    kv_alloc_seq(k, q, 0, tokens, n, m, false);
    open[q] = true;
    return m;
}

static void kvt_share_not_yet_computed(void) {
    kv_cache k;
    bool open[4] = {0};
    int32_t a[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    CHECK(kv_init(&k, 2, 8, 4, 16));
    CHECK(kvt_alloc_seq(&k, open, 0, a, 9) == 0);
    /* nothing is computed yet; the pages are shared all the same */
    CHECK(kvt_alloc_seq(&k, open, 1, a, 9) == 4);
    CHECK(kv_n_available(&k) == 8 - 6);
    CHECK(kvt_alloc_seq(&k, open, 2, a, 8) == 3); /* the page of the last token is never shared */
    CHECK(k.seqs[2].n_pages == 4 && k.seqs[2].n_tree_pages == 3);
    KV_OK(&k, open);
    CHECK(kv_skip_computed(&k, 1, 0) == 0);
    kv_mark_computed(&k, 0, 0, 5); /* two and a half pages */
    CHECK(kv_skip_computed(&k, 1, 0) == 4 && kv_skip_computed(&k, 1, 1) == 4);
    KV_OK(&k, open);
    /* in the middle of its prefill; sequences 1 and 2 continue from there */
    kv_free_seq(&k, 0), open[0] = false;
    KV_OK(&k, open);
    kv_mark_computed(&k, 1, 4, 9);
    CHECK(kv_skip_computed(&k, 2, 4) == 6);
    kv_free_seq(&k, 1), kv_free_seq(&k, 2), open[1] = open[2] = false;
    KV_OK(&k, open);
    CHECK(kv_n_available(&k) == 8 && k.n_cached == 4);
    CHECK(kvt_alloc_seq(&k, open, 0, a, 9) == 4);
    kv_free(&k);
}

static void kvt_never_computed(void) { /* pages that were not computed do not stay cached */
    kv_cache k;
    bool open[2] = {0};
    int32_t a[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    CHECK(kv_init(&k, 2, 5, 2, 16));
    kvt_alloc_seq(&k, open, 0, a, 9);
    kv_mark_computed(&k, 0, 0, 4);
    kv_free_seq(&k, 0), open[0] = false;
    CHECK(k.n_cached == 2 && k.n_free == 3);
    CHECK(kvt_alloc_seq(&k, open, 0, a, 9) == 2);
    KV_OK(&k, open);
    kv_free(&k);
}

static void kvt_evict_in_order(void) {
    kv_cache k;
    bool open[3] = {0};
    int32_t a[5] = {1, 1, 2, 2, 0}, b[5] = {1, 1, 3, 3, 0}, c[9] = {9, 9, 8, 8, 7, 7, 6, 6, 0};
    CHECK(kv_init(&k, 2, 5, 3, 16));
    kvt_alloc_seq(&k, open, 0, a, 5), kv_mark_computed(&k, 0, 0, 5), kv_free_seq(&k, 0);
    kvt_alloc_seq(&k, open, 0, b, 5), kv_mark_computed(&k, 0, 0, 5), kv_free_seq(&k, 0), open[0] = false;
    CHECK(k.n_cached == 3);
    /* takes the two free pages and the oldest leaf: 2 2 */
    CHECK(kvt_alloc_seq(&k, open, 0, c, 5) == 0);
    CHECK(k.n_cached == 2 && kv_match_prefix(&k, 0, kv_block_table(&k, 1), a, 5) == 1 && kv_match_prefix(&k, 0, NULL, b, 5) == 2);
    KV_OK(&k, open);
    kv_free_seq(&k, 0), open[0] = false;
    /* c was never computed: none of its pages was kept */
    CHECK(kvt_alloc_seq(&k, open, 0, c, 9) == 0 && k.n_cached == 0);
    CHECK(kvt_alloc_seq(&k, open, 1, a, 2) == -1);
    KV_OK(&k, open);
    kv_free(&k);
}

/* if two sequences fill a page with the same tokens, both use one page afterwards */
static void kvt_duplicate_pages(void) {
    kv_cache k;
    bool open[4] = {0};
    int32_t a[6] = {1, 2, 3, 4, 5, 6};
    CHECK(kv_init(&k, 2, 12, 4, 16));
    for (int q = 0; q < 3; q++) kvt_alloc_seq(&k, open, q, a, 4), kv_mark_computed(&k, q, 0, 4);
    CHECK(kv_n_available(&k) == 12 - 4);
    CHECK(kv_insert_full_page(&k, 0, a) == KV_INSERTED && kv_insert_full_page(&k, 1, a) == KV_DEDUPLICATED && kv_insert_full_page(&k, 2, a) == KV_DEDUPLICATED);
    CHECK(kv_n_available(&k) == 12 - 2);
    KV_OK(&k, open);
    kv_append_page(&k, 0);
    /* its page with 5 6 is in the tree, but not computed */
    CHECK(kvt_alloc_seq(&k, open, 3, (int32_t[]){1, 2, 3, 4, 5, 6, 7}, 7) == 2);
    CHECK(kv_insert_full_page(&k, 0, a) == KV_NOT_INSERTED && k.seqs[0].no_more_inserts);
    KV_OK(&k, open);
    kv_free(&k);
}

/* Random operations. The model: mem[kv_slot] is the hash of all tokens up to that position, written
 * when the position is computed. After any sharing, deduplication or eviction, each computed
 * position must find its own hash. */
typedef struct kvt {
    kv_cache k;
    bool open[8];
    int n[8], n_computed[8]; /* tokens; computed positions */
    int32_t tokens[8][64];
    uint64_t mem[64 * 4];
    uint64_t windowed[64 * 4]; /* the same for layers with a window */
    uint64_t snapshots[16];    /* the same of a state, at the end of a page */
    int n_jumps;               /* prefill that began with one */
    uint64_t rng;
    int64_t now;
} kvt;

static uint64_t kvt_hash(const int32_t *t, int n) { return hash_bytes(t, (size_t)n * sizeof *t); }

static bool kvt_content_ok(const kvt *m) {
    /* what the next row reads behind its window */
    for (int q = 0; q < m->k.n_seqs && m->k.window; q++)
        for (int i = MAX(0, m->n_computed[q] - m->k.window + 1); m->open[q] && i < m->n_computed[q]; i++) {
            int id = m->k.windowed_of[kv_block_table(&m->k, q)[i / m->k.B]];
            if (id < 0 || m->windowed[id * m->k.B + i % m->k.B] != kvt_hash(m->tokens[q], i + 1)) return false;
        }
    for (int q = 0; q < m->k.n_seqs && m->k.has_states; q++)
        for (int i = 0; m->open[q] && i < m->k.seqs[q].n_pages; i++) {
            int id = m->k.snapshot_of[kv_block_table(&m->k, q)[i]];
            if (id >= 0 && m->snapshots[id] != kvt_hash(m->tokens[q], (i + 1) * m->k.B)) return false;
        }
    for (int q = 0; q < m->k.n_seqs; q++)
        for (int i = 0; m->open[q] && i < m->n_computed[q]; i++)
            if (m->mem[kv_block_table(&m->k, q)[i / m->k.B] * m->k.B + i % m->k.B] != kvt_hash(m->tokens[q], i + 1)) return false;
    return true;
}

/* A step computes positions from .. to-1. In models with states it begins with the state there, and
 * may leave snapshots. */
static void kvt_states(kvt *m, int q, int before, int from, int to) {
    const int *table = kv_block_table(&m->k, q), B = m->k.B;
    m->now++;
    if (from > before) {
        CHECK(from % B == 0 && m->k.snapshot_of[table[from / B - 1]] >= 0);
        if (check_failed) return;
        CHECK(m->snapshots[kv_snapshot_use(&m->k, table[from / B - 1], m->now)] == kvt_hash(m->tokens[q], from));
        m->n_jumps++;
    }
    for (int i = from / B; i < to / B; i++) {
        if (m->k.seqs[q].no_more_inserts || rnd(&m->rng) % 2 || m->k.snapshot_of[table[i]] >= 0) continue;
        const int id = kv_snapshot_take(&m->k, table[i], m->now);
        if (id >= 0) m->snapshots[id] = kvt_hash(m->tokens[q], (i + 1) * B);
    }
}

static void kvt_compute(kvt *m, int q, int to) {
    const int before = m->n_computed[q];
    m->n_computed[q] = MIN(kv_skip_computed(&m->k, q, m->n_computed[q]), m->n[q]);
    int from = m->n_computed[q];
    to = MAX(to, from);
    kv_hold_window(&m->k, q, from, kv_pages_for(&m->k, to));
    for (int i = from; i < to; i++) {
        int page = kv_block_table(&m->k, q)[i / m->k.B], offset = i % m->k.B;
        m->mem[page * m->k.B + offset] = kvt_hash(m->tokens[q], i + 1);
        if (m->k.window) m->windowed[m->k.windowed_of[page] * m->k.B + offset] = kvt_hash(m->tokens[q], i + 1);
    }
    if (to > from) kv_mark_computed(&m->k, q, from, to), m->n_computed[q] = to;
    if (m->k.has_states) kvt_states(m, q, before, from, to);
}

/* window 0: none. Else there are as few windowed pages as can be. n_snapshots -1: no states. Returns
 * how often a sequence began with a snapshot. */
static int kvt_random(int B, int n_pages, int n_seqs, int max_len, uint64_t seed, int n_ops, int window, int n_snapshots) {
    const sched_config c = {B, 1 << 20, n_seqs, max_len, max_len, 0, window, {0}};
    kvt *m = mem_zalloc(sizeof *m);
    uint64_t rng = seed, before = seed;
    m->rng = seed ^ 1;
    CHECK(kv_init(&m->k, B, n_pages, n_seqs, max_len) && n_snapshots <= COUNT(m->snapshots));
    if (n_snapshots >= 0) CHECK(kv_init_snapshots(&m->k, n_snapshots));
    if (window) CHECK(kv_init_windowed(&m->k, window, (int)sched_most_windowed(&c)) && m->k.n_windowed * B <= COUNT(m->windowed));
    for (int op = 0; op < n_ops && !check_failed; op++) {
        int q = (int)(rnd(&rng) % (uint64_t)n_seqs), what = (int)(rnd(&rng) % 8);
        /* admit a new sequence, or again a preempted one: some of the old tokens, cut at a random
         * length */
        if (!m->open[q]) {
            int n = 1 + (int)(rnd(&rng) % (uint64_t)max_len);
            for (int i = rnd(&rng) % 4 ? 0 : m->n[q]; i < n; i++) m->tokens[q][i] = (int32_t)(rnd(&rng) % 8 ? 1 : 2);
            m->n[q] = n;
            int n_matched = kvt_alloc_seq(&m->k, m->open, q, m->tokens[q], n);
            m->n_computed[q] = 0;
            /* it may hold what the tree has for it, or not */
            if (n_matched > 0 && rnd(&rng) % 2 && m->k.pages[kv_block_table(&m->k, q)[n_matched - 1]].computed) {
                int n_usable = kv_n_usable(&m->k, kv_block_table(&m->k, q), n_matched);
                kv_hold_window(&m->k, q, n_usable * B, n_usable);
            }
        /* end, cancel or preempt, in any state */
        } else if (what == 0) kv_free_seq(&m->k, q), m->open[q] = false;
        else if (m->n_computed[q] < m->n[q]) { /* prefill in chunks */
            kvt_compute(m, q, m->n_computed[q] + 1 + (int)(rnd(&rng) % (uint64_t)(m->n[q] - m->n_computed[q])));
        } else if (m->n[q] < max_len) { /* append one token */
            if (m->n[q] == m->k.seqs[q].n_pages * B) {
                if (!kv_n_available(&m->k)) continue;
                kv_append_page(&m->k, q);
            }
            m->tokens[q][m->n[q]++] = (int32_t)(rnd(&rng) % 8 ? 1 : 2);
            kvt_compute(m, q, m->n[q]);
        }
        if (m->open[q]) kv_hold_window(&m->k, q, m->n_computed[q], 0);
        while (m->open[q] && !m->k.seqs[q].no_more_inserts && (m->k.seqs[q].n_tree_pages + 1) * B <= m->n_computed[q] &&
            m->n_computed[q] == m->n[q])
            kv_insert_full_page(&m->k, q, m->tokens[q]);
        const char *bad = kv_check(&m->k, m->open);
        if (!bad && !kvt_content_ok(m)) bad = "wrong content";
        CHECK_MSG(!bad, "%s (B %d, %d pages, seed %llu, op %d)", bad, B, n_pages, (unsigned long long)before, op);
    }
    for (int q = 0; q < n_seqs; q++)
        if (m->open[q]) kv_free_seq(&m->k, q);
    CHECK(kv_n_available(&m->k) == n_pages);
    kv_free(&m->k);
    const int n_jumps = m->n_jumps;
    free(m);
    return n_jumps;
}

static void kvt_random_tiny(void) {
    for (uint64_t seed = 1; seed <= 100; seed++) kvt_random(2, 5, 3, 9, seed, 400, 0, -1);
}
static void kvt_random_small(void) {
    for (uint64_t seed = 1; seed <= 60; seed++) kvt_random(2, 24, 8, 24, seed, 600, 0, -1);
    for (uint64_t seed = 1; seed <= 30; seed++) kvt_random(1, 16, 6, 12, seed, 600, 0, -1), kvt_random(4, 64, 8, 60, seed, 600, 0, -1);
}

static void kvt_random_windows(void) {
    for (uint64_t seed = 1; seed <= 60; seed++) kvt_random(2, 60, 4, 40, seed, 600, 1 + (int)(seed % 9), -1);
    for (uint64_t seed = 1; seed <= 30; seed++) kvt_random(1, 60, 3, 30, seed, 600, 1 + (int)(seed % 5), -1), kvt_random(4, 64, 6, 60, seed, 600, 1 + (int)(seed % 20), -1);
}

static void kvt_random_states(void) {
    int n_jumps = 0;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        n_jumps += kvt_random(2, 5, 3, 9, seed, 400, 0, (int)(seed % 5));
        n_jumps += kvt_random(2, 24, 8, 24, seed, 600, 0, (int)(seed % 7)) + kvt_random(4, 64, 8, 60, seed, 600, 0, (int)(seed % 17));
    }
    CHECK_MSG(n_jumps > 1000, "%d", n_jumps);
}

/* kv_page_of divides by a product: pages of any size, up to the greatest positions. */
static void kvt_page_of(void) {
    for (int B = 1; B <= 300; B++) {
        const int max_len = B & (B - 1) ? (int)((((int64_t)1 << 32) - 1) / B - B) : INT_MAX - B;
        const kv_cache k = {.B = B, .inverse_B = kv_inverse(B)};
        uint64_t rng = (uint64_t)B;
        for (int i = 0; i < 300; i++) {
            const int page = i < 150 ? i : i == 299 ? (max_len + B - 1) / B : (int)(rnd(&rng) % (uint64_t)(max_len / B + 1));
            const int pos = page * B; /* the first one of a page, and the one before it */
            CHECK_MSG(kv_page_of(&k, pos) == page && (!page || kv_page_of(&k, pos - 1) == page - 1), "B %d, page %d", B, page);
        }
    }
}

/* The example of chapter 17: positions of 5 pages of 4 tokens, a window of 6. */
static void kvt_window(void) {
    kv_cache k;
    bool open[2] = {0};
    int32_t a[21] = {0};
    for (int i = 0; i < 21; i++) a[i] = i;
    CHECK(kv_init(&k, 4, 12, 2, 24) && kv_init_windowed(&k, 6, 6));
    kvt_alloc_seq(&k, open, 0, a, 21);
    int *table = kv_block_table(&k, 0);
    kv_hold_window(&k, 0, 0, 5), kv_mark_computed(&k, 0, 0, 20), kv_hold_window(&k, 0, 19, 0);
    CHECK(k.seqs[0].window_first == 3 && k.n_windowed_cached == 3 && k.n_windowed_free == 1);
    CHECK(k.windowed[k.windowed_of[table[3]]].ref == 1 && k.windowed[k.windowed_of[table[2]]].ref == 0);
    kv_windowed_drop(&k, table[1]);
    KV_OK(&k, open);
    CHECK(kv_first_readable(&k, table, 0, 5) == 5 && kv_first_readable(&k, table, 0, 4) == 4 && kv_first_readable(&k, table, 0, 3) == 1);
    CHECK(kv_first_readable(&k, table, 0, 2) == 1 && kv_first_readable(&k, table, 2, 3) == 2 && kv_n_usable(&k, table, 5) == 5);
    /* the least recently used windowed page is taken: that of page 0, then of page 2 */
    kvt_alloc_seq(&k, open, 1, a + 1, 16), kv_hold_window(&k, 1, 0, 2);
    CHECK(k.windowed_of[table[0]] >= 0 && k.n_windowed_free == 0);
    kv_hold_window(&k, 1, 0, 3);
    CHECK(k.windowed_of[table[0]] < 0 && k.windowed_of[table[2]] >= 0);
    KV_OK(&k, open);
    kv_free_seq(&k, 1), open[1] = false; /* never computed: its windowed pages are free */
    CHECK(k.n_windowed_free == 3 && k.n_windowed_cached == 1);
    kv_free_seq(&k, 0), open[0] = false;
    CHECK(k.n_windowed_free == 3 && k.n_windowed_cached == 3);
    KV_OK(&k, open);
    kv_free(&k);
    /* what an answer has filled and passed goes before the prompt's; what it ends with goes last */
    CHECK(kv_init(&k, 4, 12, 2, 24) && kv_init_windowed(&k, 6, 6));
    kvt_alloc_seq(&k, open, 0, a, 8), kv_hold_window(&k, 0, 0, 2), kv_mark_computed(&k, 0, 0, 8);
    CHECK(kv_insert_full_page(&k, 0, a) == KV_INSERTED);
    for (int n = 8; n < 20; n += 4) {
        kv_append_page(&k, 0), kv_hold_window(&k, 0, n, n / 4 + 1), kv_mark_computed(&k, 0, n, n + 4);
        CHECK(kv_insert_full_page(&k, 0, a) == KV_INSERTED);
    }
    kv_hold_window(&k, 0, 20, 0);
    CHECK(k.seqs[0].window_first == 3 && k.n_windowed_cached == 3 && k.windowed[6].newer == k.windowed_of[kv_block_table(&k, 0)[2]]);
    CHECK(k.windowed[6].older == k.windowed_of[kv_block_table(&k, 0)[1]]);
    KV_OK(&k, open);
    const int last = kv_block_table(&k, 0)[4];
    kv_free_seq(&k, 0), open[0] = false;
    CHECK(k.windowed[6].older == k.windowed_of[last] && k.n_windowed_cached == 5);
    KV_OK(&k, open);
    kv_free(&k);
}

static const struct test kv_tests[] = {{"kv: n samples share before it is computed", kvt_share_not_yet_computed},
                                       {"kv: pages never computed are not kept", kvt_never_computed},
                                       {"kv: eviction in order", kvt_evict_in_order},
                                       {"kv: duplicate pages become one", kvt_duplicate_pages},
                                       {"kv: windowed pages", kvt_window},
                                       {"kv: the page of a position", kvt_page_of},
                                       {"kv: random operations, windows", kvt_random_windows},
                                       {"kv: random operations, states", kvt_random_states},
                                       {"kv: random operations, 5 pages", kvt_random_tiny},
                                       {"kv: random operations, small pools", kvt_random_small},
                                       {0}};
