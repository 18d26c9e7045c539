/* state.h - what always holds of the KV pages and of the scheduler (chapters 14 and 16), checked over their whole state: NULL, or what
 * is wrong. Costs O(everything). */

#define KV_MUST(cond) \
    if (!(cond)) return #cond

static const char *kv_check_pages(const kv_cache *k, const int *ref, const int *children, const char *place) {
    int n_cached = 0, n_leaves = 0, n_lru = 0;
    for (int p = 0; p < k->n_pages; p++) {
        const kv_page *g = &k->pages[p];
        KV_MUST(g->ref == ref[p]);
        KV_MUST(g->n_children == children[p]);
        bool in_tree = g->parent != KV_NOT_IN_TREE;
        KV_MUST((place[p] == 'f') == (!g->ref && !in_tree)); /* free: nobody's, and not known */
        KV_MUST(!in_tree || g->ref || g->computed);
        n_cached += in_tree && !g->ref;
        n_leaves += in_tree && !g->ref && !g->n_children;
        if (!in_tree) continue;
        const kv_page *up = &k->pages[g->parent];
        const int32_t *t = k->tokens + (size_t)p * (size_t)k->B;
        KV_MUST(g->parent == k->root || up->parent != KV_NOT_IN_TREE);
        KV_MUST(g->parent == k->root || !g->ref || up->ref >= g->ref);
        KV_MUST(!g->computed || up->computed);
        KV_MUST(g->hash == kv_hash(k, up->hash, t));
        KV_MUST(kv_find_child(k, g->parent, g->hash, t) == p); /* found, and no twin */
    }
    KV_MUST(k->pages[k->root].n_children == children[k->root]);
    for (int p = k->pages[k->root].newer; p != k->root; p = k->pages[p].newer, n_lru++) {
        const kv_page *g = &k->pages[p];
        KV_MUST(g->parent != KV_NOT_IN_TREE && !g->ref && !g->n_children);
        KV_MUST(k->pages[g->newer].older == p && n_lru < n_leaves);
    }
    KV_MUST(n_lru == n_leaves && n_cached == k->n_cached);
    return NULL;
}

static const char *kv_check_order(const kv_cache *k, const bool *open) {
    int n = 0, n_open = 0, end = k->n_seqs;
    for (int q = 0; q < k->n_seqs; q++) n_open += open[q];
    for (int q = k->seqs[end].next; q != end; q = k->seqs[q].next, n++) {
        const kv_seq *s = &k->seqs[q];
        KV_MUST(n < n_open && open[q] && k->seqs[s->next].prev == q);
        const int *row = kv_block_table(k, q);
        int m = 0;
        if (s->prev != end)
            while (m < s->n_pages && m < k->seqs[s->prev].n_pages && row[m] == kv_block_table(k, s->prev)[m]) m++;
        KV_MUST(s->n_common_pages == m && m <= s->n_tree_pages);
        for (int i = 0; i < s->n_tree_pages; i++) { /* `last` is right, and behind it nobody has the page */
            int last = k->pages[row[i]].last_holder, r = q, holders = 1;
            if (i >= s->n_common_pages) { /* q is the first that has it */
                for (int next = s->next; next != end && k->seqs[next].n_common_pages > i; next = k->seqs[r].next) r = next, holders++;
                KV_MUST(r == last && holders == k->pages[row[i]].ref);
            }
        }
    }
    KV_MUST(n == n_open);
    return NULL;
}

/* open[q]: the row is in use. */
static const char *kv_check(const kv_cache *k, const bool *open) {
    size_t n = (size_t)k->n_pages + 1;
    int *ref = mem_zalloc(n * sizeof *ref), *children = mem_zalloc(n * sizeof *children);
    char *place = mem_zalloc(n);
    const char *bad = NULL;
    for (int q = 0; q < k->n_seqs; q++)
        for (int i = 0; i < k->seqs[q].n_pages; i++) {
            int p = kv_block_table(k, q)[i], parent = i ? kv_block_table(k, q)[i - 1] : k->root;
            ref[p]++;
            if (!open[q]) bad = "a closed row has pages";
            if ((k->pages[p].parent != KV_NOT_IN_TREE) != (i < k->seqs[q].n_tree_pages)) bad = "n_tree is wrong";
            if (i < k->seqs[q].n_tree_pages && k->pages[p].parent != parent) bad = "a row leaves its path";
            if (i >= k->seqs[q].n_tree_pages && k->pages[p].ref != 1) bad = "an own page has two owners";
        }
    for (int p = 0; p < k->n_pages; p++)
        if (k->pages[p].parent != KV_NOT_IN_TREE) children[k->pages[p].parent]++;
    for (int i = 0; i < k->n_free; i++) {
        if (place[k->free_list[i]]) bad = "a page is free twice";
        place[k->free_list[i]] = 'f';
    }
    if (!bad) bad = kv_check_pages(k, ref, children, place);
    if (!bad) bad = kv_check_order(k, open);
    free(ref), free(children), free(place);
    return bad;
}

static const char *sched_check_seq(const scheduler *s, int q) {
    const sched_seq *x = &s->seqs[q];
    const kv_seq *k = &s->kv.seqs[q];
    KV_MUST(x->n_known <= x->n_planned && x->n_known >= x->n_prompt && x->n_known < x->limit && x->n_planned <= x->limit);
    if (x->state == SCHED_PREEMPTED) {
        KV_MUST(!k->n_pages && !x->n_computed && x->n_planned == x->n_known);
        return NULL;
    }
    KV_MUST(x->end_step > s->now && x->end_step == x->base_step + x->expected_len - 1);
    KV_MUST(k->n_pages * s->config.B >= x->n_computed);
    KV_MUST(x->state != SCHED_DECODE || x->last_page == kv_block_table(&s->kv, q)[(x->n_computed - 1) / s->config.B]);
    if (x->state == SCHED_PREFILL) {
        KV_MUST(x->n_computed < x->n_known && x->base_step + x->n_known > s->now);
        KV_MUST(k->n_pages == kv_pages_for(&s->kv, x->n_known));
    } else KV_MUST(x->n_computed == x->n_planned - 1 && (x->n_planned == x->limit || x->base_step == s->now + 1 - x->n_computed));
    for (int i = 0; i < k->n_tree_pages; i++) {
        int p = kv_block_table(&s->kv, q)[i];
        KV_MUST(s->end_nodes[p].key >= x->end_step);
        KV_MUST((i + 1) * s->config.B > x->n_computed || s->kv.pages[p].computed);
    }
    return NULL;
}

/* Between a plan and the next one. */
static const char *sched_check(const scheduler *s) {
    int n = s->forecast.n_steps, np = s->config.n_pages, n_state[4] = {0}, n_held = 0;
    int64_t guess2 = 0;
    bool *open = mem_zalloc((size_t)s->config.max_seqs * sizeof *open);
    int *change = mem_zalloc(((size_t)n + 1) * sizeof *change); /* of the sum, step by step from now */
    int64_t *end = mem_zalloc((size_t)np * sizeof *end), backlog = 0;
    const char *bad = NULL;
    for (int q = 0; q < s->config.max_seqs; q++) {
        const sched_seq *x = &s->seqs[q];
        const kv_seq *k = &s->kv.seqs[q];
        n_state[x->state]++, backlog += x->backlog_share;
        if (x->state == SCHED_FREE) continue;
        if (!bad) bad = sched_check_seq(s, q);
        if (bad || x->state == SCHED_PREEMPTED) continue;
        open[q] = true, guess2 += sched_guess_squared(s, x);
        for (int i = 0; i < k->n_tree_pages; i++) end[kv_block_table(&s->kv, q)[i]] = MAX(end[kv_block_table(&s->kv, q)[i]], x->end_step);
        for (int i = k->n_tree_pages; i < kv_pages_for(&s->kv, MIN(x->expected_len, x->limit) - 1); i++) {
            int64_t from = i < k->n_pages ? s->now : x->base_step + (int64_t)i * s->config.B;
            if (from < x->end_step) change[from - s->now]++, change[x->end_step - s->now]--;
        }
    }
    for (int p = 0; p < np; p++) {
        n_held += s->kv.pages[p].ref > 0;
        if (!bad && s->end_nodes[p].key != end[p]) bad = "the end of a page is not the last end of its holders";
        if (end[p]) change[0]++, change[end[p] - s->now]--;
    }
    for (int t = 0, sum = 0, known = s->forecast.held, peak = 0; t < n; t++) {
        sum += change[t], peak = MAX(peak, sum), known += t ? s->forecast.nodes[((s->now + t) & (n - 1)) + n].sum : 0;
        if (!bad && known != sum) bad = "the calendar is not the sum of the sequences";
        if (!bad && !t && sum != n_held) bad = "the calendar does not know what is held now";
        if (!bad && t == n - 1 && forecast_peak(&s->forecast) != peak) bad = "the calendar's peak is wrong";
    }
    if (!bad) bad = kv_check(&s->kv, open);
    bool counts = n_state[SCHED_FREE] == s->n_seqs_free && n_state[SCHED_DECODE] == s->n_decode && backlog == s->backlog &&
                  n_state[SCHED_DECODE] + n_state[SCHED_PREFILL] == s->n_running && guess2 == s->sum_guess_squared;
    if (!bad && !counts) bad = "counts do not agree";
    free(open), free(change), free(end);
    return bad;
}
