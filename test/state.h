/* state.h - checks the invariants of the KV cache and of the scheduler (chapters 14 and 16) over
 * their whole state. Each check returns NULL, or says what is wrong. It visits every page and
 * sequence. */

#define REQUIRE(cond) \
    if (!(cond)) return #cond

static const char *kv_check_pages(const kv_cache *k, const int *ref, const int *children, const char *is_free_list) {
    int n_cached = 0, n_leaves = 0, n_lru = 0;
    for (int p = 0; p < k->n_pages; p++) {
        const kv_page *g = &k->pages[p];
        REQUIRE(g->ref == ref[p]);
        REQUIRE(g->n_children == children[p]);
        bool in_tree = g->parent != KV_NOT_IN_TREE;
        /* free: no sequence holds it and it is not in the tree */
        REQUIRE((is_free_list[p] == 'f') == (!g->ref && !in_tree));
        REQUIRE(!in_tree || g->ref || g->computed);
        n_cached += in_tree && !g->ref;
        n_leaves += in_tree && !g->ref && !g->n_children;
        if (!in_tree) continue;
        const kv_page *up = &k->pages[g->parent];
        const int32_t *t = k->tokens + (size_t)p * (size_t)k->B;
        REQUIRE(g->parent == k->root || up->parent != KV_NOT_IN_TREE);
        REQUIRE(g->parent == k->root || !g->ref || up->ref >= g->ref);
        REQUIRE(!g->computed || up->computed);
        REQUIRE(g->hash == kv_hash(k, up->hash, t));
        /* the lookup finds it: no other page has the same content */
        REQUIRE(kv_find_child(k, g->parent, g->hash, t) == p);
    }
    REQUIRE(k->pages[k->root].n_children == children[k->root]);
    for (int p = k->pages[k->root].newer; p != k->root; p = k->pages[p].newer, n_lru++) {
        const kv_page *g = &k->pages[p];
        REQUIRE(g->parent != KV_NOT_IN_TREE && !g->ref && !g->n_children);
        REQUIRE(k->pages[g->newer].older == p && n_lru < n_leaves);
    }
    REQUIRE(n_lru == n_leaves && n_cached == k->n_cached);
    return NULL;
}

static const char *kv_check_order(const kv_cache *k, const bool *open) {
    int n = 0, n_open = 0, end = k->n_seqs;
    for (int q = 0; q < k->n_seqs; q++) n_open += open[q];
    for (int q = k->seqs[end].next; q != end; q = k->seqs[q].next, n++) {
        const kv_seq *s = &k->seqs[q];
        REQUIRE(n < n_open && open[q] && k->seqs[s->next].prev == q);
        const int *row = kv_block_table(k, q);
        int m = 0;
        if (s->prev != end)
            while (m < s->n_pages && m < k->seqs[s->prev].n_pages && row[m] == kv_block_table(k, s->prev)[m]) m++;
        REQUIRE(s->n_common_pages == m && m <= s->n_tree_pages);
        /* last_holder is right: no sequence after it in the order has the page */
        for (int i = 0; i < s->n_tree_pages; i++) {
            int last = k->pages[row[i]].last_holder, r = q, holders = 1;
            if (i >= s->n_common_pages) { /* q is the first sequence that has it */
                for (int next = s->next; next != end && k->seqs[next].n_common_pages > i; next = k->seqs[r].next) r = next, holders++;
                REQUIRE(r == last && holders == k->pages[row[i]].ref);
            }
        }
    }
    REQUIRE(n == n_open);
    return NULL;
}

/* open[q]: sequence q is in use. */
static const char *kv_check(const kv_cache *k, const bool *open) {
    size_t n = (size_t)k->n_pages + 1;
    int *ref = mem_zalloc(n * sizeof *ref), *children = mem_zalloc(n * sizeof *children);
    char *is_free_list = mem_zalloc(n);
    const char *bad = NULL;
    for (int q = 0; q < k->n_seqs; q++)
        for (int i = 0; i < k->seqs[q].n_pages; i++) {
            int p = kv_block_table(k, q)[i], parent = i ? kv_block_table(k, q)[i - 1] : k->root;
            ref[p]++;
            if (!open[q]) bad = "a freed sequence has pages";
            if ((k->pages[p].parent != KV_NOT_IN_TREE) != (i < k->seqs[q].n_tree_pages)) bad = "n_tree_pages is wrong";
            if (i < k->seqs[q].n_tree_pages && k->pages[p].parent != parent) bad = "a sequence's page is not a child of the page before it";
            if (i >= k->seqs[q].n_tree_pages && k->pages[p].ref != 1) bad = "a page outside the tree has two holders";
        }
    for (int p = 0; p < k->n_pages; p++)
        if (k->pages[p].parent != KV_NOT_IN_TREE) children[k->pages[p].parent]++;
    for (int i = 0; i < k->n_free; i++) {
        if (is_free_list[k->free_list[i]]) bad = "a page is free twice";
        is_free_list[k->free_list[i]] = 'f';
    }
    if (!bad) bad = kv_check_pages(k, ref, children, is_free_list);
    if (!bad) bad = kv_check_order(k, open);
    free(ref), free(children), free(is_free_list);
    return bad;
}

static const char *sched_check_seq(const scheduler *s, int q) {
    const sched_seq *x = &s->seqs[q];
    const kv_seq *k = &s->kv.seqs[q];
    REQUIRE(x->n_known <= x->n_planned && x->n_known >= x->n_prompt && x->n_known < x->limit && x->n_planned <= x->limit);
    if (x->state == SCHED_PREEMPTED) {
        REQUIRE(!k->n_pages && !x->n_computed && x->n_planned == x->n_known);
        return NULL;
    }
    REQUIRE(x->end_step > s->now && x->end_step == x->base_step + x->expected_len - 1);
    REQUIRE(k->n_pages * s->config.B >= x->n_computed);
    REQUIRE(x->state != SCHED_DECODE || x->last_page == kv_block_table(&s->kv, q)[(x->n_computed - 1) / s->config.B]);
    if (x->state == SCHED_PREFILL) {
        REQUIRE(x->n_computed < x->n_known && x->base_step + x->n_known > s->now);
        REQUIRE(k->n_pages == kv_pages_for(&s->kv, x->n_known));
    } else REQUIRE(x->n_computed == x->n_planned - 1 && (x->n_planned == x->limit || x->base_step == s->now + 1 - x->n_computed));
    for (int i = 0; i < k->n_tree_pages; i++) {
        int p = kv_block_table(&s->kv, q)[i];
        REQUIRE(s->user_nodes[p].key >= x->end_step);
        REQUIRE((i + 1) * s->config.B > x->n_computed || s->kv.pages[p].computed);
    }
    return NULL;
}

/* To be called between two plans. */
static const char *sched_check(const scheduler *s) {
    int n = s->forecast.n_steps, np = s->config.n_pages, n_state[4] = {0}, n_held = 0;
    int64_t sum_squared = 0;
    bool *open = mem_zalloc((size_t)s->config.max_seqs * sizeof *open);
    /* change of the number of held pages, by step from now on */
    int *change = mem_zalloc(((size_t)n + 1) * sizeof *change);
    int64_t *end = mem_zalloc((size_t)np * sizeof *end), backlog = 0;
    const char *bad = NULL;
    for (int q = 0; q < s->config.max_seqs; q++) {
        const sched_seq *x = &s->seqs[q];
        const kv_seq *k = &s->kv.seqs[q];
        n_state[x->state]++, backlog += x->backlog_share;
        if (x->state == SCHED_FREE) continue;
        if (!bad) bad = sched_check_seq(s, q);
        if (bad || x->state == SCHED_PREEMPTED) continue;
        open[q] = true, sum_squared += sched_page_guess_squared(s, x);
        for (int i = 0; i < k->n_tree_pages; i++) end[kv_block_table(&s->kv, q)[i]] = MAX(end[kv_block_table(&s->kv, q)[i]], x->end_step);
        for (int i = k->n_tree_pages; i < kv_pages_for(&s->kv, MIN(x->expected_len, x->limit) - 1); i++) {
            int64_t from = i < k->n_pages ? s->now : x->base_step + (int64_t)i * s->config.B;
            if (from < x->end_step) change[from - s->now]++, change[x->end_step - s->now]--;
        }
    }
    for (int p = 0; p < np; p++) {
        n_held += s->kv.pages[p].ref > 0;
        if (!bad && s->user_nodes[p].key != end[p]) bad = "the end step of a page is not the last end step of its holders";
        if (end[p]) change[0]++, change[end[p] - s->now]--;
    }
    for (int t = 0, sum = 0, stored_sum = s->forecast.held, peak = 0; t < n; t++) {
        sum += change[t], peak = MAX(peak, sum), stored_sum += t ? s->forecast.nodes[((s->now + t) & (n - 1)) + n].sum : 0;
        if (!bad && stored_sum != sum) bad = "the forecast is not the sum of the sequences";
        if (!bad && !t && sum != n_held) bad = "the forecast's first step is not the number of pages held now";
        if (!bad && t == n - 1 && forecast_peak(&s->forecast) != peak) bad = "the forecast's peak is wrong";
    }
    if (!bad) bad = kv_check(&s->kv, open);
    bool counts = n_state[SCHED_FREE] == s->n_seqs_free && n_state[SCHED_DECODE] == s->n_decode && backlog == s->backlog &&
                  n_state[SCHED_DECODE] + n_state[SCHED_PREFILL] == s->n_running && sum_squared == s->sum_page_guess_squared;
    if (!bad && !counts) bad = "counts do not agree";
    free(open), free(change), free(end);
    return bad;
}
