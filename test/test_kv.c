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
    int m = kv_match_prefix(k, kv_block_table(k, q), tokens, n), need = kv_pages_for(k, n) - m;
    for (int i = 0; i < m; i++) need += !k->pages[kv_block_table(k, q)[i]].ref;
    if (need > kv_n_available(k)) return -1;
    kv_alloc_seq(k, q, tokens, n, m, false);
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
    CHECK(k.n_cached == 2 && kv_match_prefix(&k, kv_block_table(&k, 1), a, 5) == 1 && kv_match_prefix(&k, NULL, b, 5) == 2);
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
} kvt;

static uint64_t kvt_hash(const int32_t *t, int n) { return hash_bytes(t, (size_t)n * sizeof *t); }

static bool kvt_content_ok(const kvt *m) {
    for (int q = 0; q < m->k.n_seqs; q++)
        for (int i = 0; m->open[q] && i < m->n_computed[q]; i++)
            if (m->mem[kv_block_table(&m->k, q)[i / m->k.B] * m->k.B + i % m->k.B] != kvt_hash(m->tokens[q], i + 1)) return false;
    return true;
}

static void kvt_compute(kvt *m, int q, int to) {
    m->n_computed[q] = MIN(kv_skip_computed(&m->k, q, m->n_computed[q]), m->n[q]);
    int from = m->n_computed[q];
    for (int i = from; i < to; i++)
        m->mem[kv_block_table(&m->k, q)[i / m->k.B] * m->k.B + i % m->k.B] = kvt_hash(m->tokens[q], i + 1);
    if (to > from) kv_mark_computed(&m->k, q, from, to), m->n_computed[q] = to;
}

static void kvt_random(int B, int n_pages, int n_seqs, int max_len, uint64_t seed, int n_ops) {
    kvt *m = mem_zalloc(sizeof *m);
    uint64_t rng = seed, before = seed;
    CHECK(kv_init(&m->k, B, n_pages, n_seqs, max_len));
    for (int op = 0; op < n_ops && !check_failed; op++) {
        int q = (int)(rnd(&rng) % (uint64_t)n_seqs), what = (int)(rnd(&rng) % 8);
        /* admit a new sequence, or again a preempted one: some of the old tokens, cut at a random
         * length */
        if (!m->open[q]) {
            int n = 1 + (int)(rnd(&rng) % (uint64_t)max_len);
            for (int i = rnd(&rng) % 4 ? 0 : m->n[q]; i < n; i++) m->tokens[q][i] = (int32_t)(rnd(&rng) % 8 ? 1 : 2);
            m->n[q] = n;
            kvt_alloc_seq(&m->k, m->open, q, m->tokens[q], n);
            m->n_computed[q] = 0;
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
    free(m);
}

static void kvt_random_tiny(void) {
    for (uint64_t seed = 1; seed <= 100; seed++) kvt_random(2, 5, 3, 9, seed, 400);
}
static void kvt_random_small(void) {
    for (uint64_t seed = 1; seed <= 60; seed++) kvt_random(2, 24, 8, 24, seed, 600);
    for (uint64_t seed = 1; seed <= 30; seed++) kvt_random(1, 16, 6, 12, seed, 600), kvt_random(4, 64, 8, 60, seed, 600);
}

static const struct test kv_tests[] = {{"kv: n samples share before it is computed", kvt_share_not_yet_computed},
                                       {"kv: pages never computed are not kept", kvt_never_computed},
                                       {"kv: eviction in order", kvt_evict_in_order},
                                       {"kv: duplicate pages become one", kvt_duplicate_pages},
                                       {"kv: random operations, 5 pages", kvt_random_tiny},
                                       {"kv: random operations, small pools", kvt_random_small},
                                       {0}};
