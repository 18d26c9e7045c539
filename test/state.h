/* state.h - checks the invariants of the KV cache and of the scheduler (chapters 17 and 19) over
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
        bool hash_ok = g->hash == kv_hash(k, up->hash, t);
        /* first pages of before a kv_forget: the root had another hash */
        for (uint64_t old = 1; g->parent == k->root && old < up->hash; old++) hash_ok |= g->hash == kv_hash(k, old, t);
        REQUIRE(hash_ok);
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
    for (int q = k->order[end].next; q != end; q = k->order[q].next, n++) {
        const kv_place *s = &k->order[q];
        const int n_pages = k->seqs[q].n_pages, n_tree_pages = k->seqs[q].n_tree_pages;
        REQUIRE(n < n_open && open[q] && k->order[s->next].prev == q);
        const int *row = kv_block_table(k, q);
        int m = 0;
        if (s->prev != end)
            while (m < n_pages && m < k->seqs[s->prev].n_pages && row[m] == kv_block_table(k, s->prev)[m]) m++;
        REQUIRE(s->n_common_pages == m && m <= n_tree_pages);
        /* last_holder is right: no sequence after it in the order has the page */
        for (int i = 0; i < n_tree_pages; i++) {
            int last = k->pages[row[i]].last_holder, r = q, holders = 1;
            if (i >= s->n_common_pages) { /* q is the first sequence that has it */
                for (int next = s->next; next != end && k->order[next].n_common_pages > i; next = k->order[r].next) r = next, holders++;
                REQUIRE(r == last && holders == k->pages[row[i]].ref);
            }
        }
    }
    REQUIRE(n == n_open);
    return NULL;
}

/* Windowed pages: each is free, held or cached, and beside one page. */
static const char *kv_check_windowed(const kv_cache *k, int *refs) {
    int n_used = 0, n_cached = 0, n_lru = 0;
    for (int q = 0; q < k->n_seqs; q++)
        for (int i = k->seqs[q].window_first; i < k->seqs[q].window_end; i++) {
            REQUIRE(i < k->seqs[q].n_pages && k->windowed_of[kv_block_table(k, q)[i]] >= 0);
            refs[k->windowed_of[kv_block_table(k, q)[i]]]++;
        }
    for (int p = 0; p < k->n_pages; p++) {
        const int id = k->windowed_of[p];
        if (id < 0) continue;
        const kv_windowed *w = &k->windowed[id];
        REQUIRE(id < k->n_windowed && w->page == p && w->ref == refs[id]);
        REQUIRE(w->ref || (w->computed && k->pages[p].computed && k->pages[p].parent != KV_NOT_IN_TREE));
        n_used++, n_cached += !w->ref;
    }
    for (int i = 0; i < k->n_windowed_free; i++) REQUIRE(k->windowed_of[k->windowed[k->windowed_free_list[i]].page] != k->windowed_free_list[i]);
    for (int id = k->windowed[k->n_windowed].newer; id != k->n_windowed; id = k->windowed[id].newer, n_lru++)
        REQUIRE(!k->windowed[id].ref && k->windowed[k->windowed[id].newer].older == id && n_lru < n_cached);
    REQUIRE(n_used + k->n_windowed_free == k->n_windowed && n_cached == k->n_windowed_cached && n_lru == n_cached);
    return NULL;
}

/* Snapshots: each is unused or at the end of one page, which is not free. */
static const char *kv_check_snapshots(const kv_cache *k) {
    int n_used = 0, n_list = 0;
    for (int p = 0; p < k->n_pages; p++) {
        const int id = k->snapshot_of[p];
        if (id < 0) continue;
        REQUIRE(id < k->n_snapshots && k->snapshots[id].page == p);
        REQUIRE(k->pages[p].ref || k->pages[p].parent != KV_NOT_IN_TREE);
        REQUIRE(k->pages[p].parent == KV_NOT_IN_TREE || k->pages[p].computed);
        n_used++;
    }
    REQUIRE(n_used == k->n_snapshots_used);
    for (int id = k->snapshots[k->n_snapshots].newer; id != k->n_snapshots; id = k->snapshots[id].newer, n_list++) {
        const kv_snapshot *x = &k->snapshots[id], *newer = &k->snapshots[x->newer];
        REQUIRE(n_list < k->n_snapshots && newer->older == id);
        n_used -= x->page >= 0;
        if (x->newer == k->n_snapshots || x->page < 0) continue;
        REQUIRE(newer->page >= 0 && newer->used_at >= x->used_at);
    }
    REQUIRE(n_list == k->n_snapshots && !n_used);
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
    int *refs = mem_zalloc(((size_t)k->n_windowed + 1) * sizeof *refs);
    if (!bad && k->window) bad = kv_check_windowed(k, refs);
    if (!bad && k->has_states) bad = kv_check_snapshots(k);
    free(ref), free(children), free(is_free_list), free(refs);
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
    REQUIRE(k->n_pages * s->config.B >= x->n_computed);
    if (s->kv.window && x->n_computed) {
        /* it holds what its next row reads, and no more than what its last rows read */
        REQUIRE(k->window_first <= kv_window_first(&s->kv, x->n_computed) && k->window_end >= kv_pages_for(&s->kv, x->n_computed) && k->window_end <= kv_pages_for(&s->kv, x->n_computed + s->config.B));
        /* drafts may have been accepted since */
        REQUIRE(k->window_first >= kv_window_first(&s->kv, x->n_rows ? x->from : MAX(x->n_computed - s->config.B, 0)));
    }
    REQUIRE(x->state != SCHED_DECODE || x->last_page == kv_block_table(&s->kv, q)[(x->n_computed - 1) / s->config.B]);
    if (x->state == SCHED_PREFILL) {
        REQUIRE(x->n_computed < x->n_known);
        REQUIRE(k->n_pages == kv_pages_for(&s->kv, x->n_known));
    } else REQUIRE(x->n_computed == x->n_planned - 1 && k->n_pages <= kv_pages_for(&s->kv, x->n_computed + 1) + 1);
    REQUIRE(!x->n_drafts || (x->state == SCHED_DECODE && x->n_drafts <= MIN(s->config.B, x->limit - x->n_known - 1)));
    for (int i = 0; i < k->n_tree_pages; i++) {
        int p = kv_block_table(&s->kv, q)[i];
        REQUIRE((i + 1) * s->config.B > x->n_computed || s->kv.pages[p].computed);
    }
    return NULL;
}

/* Is sequence a before b in queue order? */
static bool sched_check_before(const scheduler *s, int a, int b) {
    int64_t key_a = s->requests[s->seqs[a].request].queue_key, key_b = s->requests[s->seqs[b].request].queue_key;
    return key_a != key_b ? key_a < key_b : s->seqs[a].admission_number < s->seqs[b].admission_number;
}

/* The tops of the three heaps are those that a search finds. */
static const char *sched_check_heaps(const scheduler *s) {
    int last = -1, first = -1, queued = -1;
    for (int q = 0; q < s->config.max_seqs; q++) {
        int state = s->seqs[q].state;
        if ((state == SCHED_PREFILL || state == SCHED_DECODE) && (last < 0 || sched_check_before(s, last, q))) last = q;
        if (state == SCHED_PREEMPTED && (first < 0 || sched_check_before(s, q, first))) first = q;
    }
    for (int id = 0; id < s->n_requests; id++)
        if (s->requests[id].prompt && s->requests[id].n_started < s->requests[id].n &&
            (queued < 0 || s->requests[id].queue_key < s->requests[queued].queue_key)) queued = id;
    REQUIRE(s->next_to_preempt == last && s->next_to_resume == first);
    REQUIRE((s->first_queued < 0) == (queued < 0));
    REQUIRE(queued < 0 || s->requests[s->first_queued].queue_key == s->requests[queued].queue_key);
    return NULL;
}

/* To be called between two plans. */
static const char *sched_check(const scheduler *s) {
    int n_state[4] = {0};
    int64_t backlog = 0, max_growth = 0, max_windowed = 0;
    bool *open = mem_zalloc((size_t)s->config.max_seqs * sizeof *open);
    const char *bad = NULL;
    for (int q = 0; q < s->config.max_seqs; q++) {
        const sched_seq *x = &s->seqs[q];
        n_state[x->state]++, backlog += x->backlog_share;
        if (x->state == SCHED_FREE) continue;
        if (!bad) bad = sched_check_seq(s, q);
        open[q] = x->state != SCHED_PREEMPTED;
        if (open[q]) max_windowed += sched_seq_windowed(s, q);
        if (open[q]) max_growth += (x->limit - 1 + s->config.B - 1) / s->config.B - s->kv.seqs[q].n_pages;
    }
    if (!bad) bad = sched_check_heaps(s);
    if (!bad) bad = kv_check(&s->kv, open);
    bool counts = n_state[SCHED_FREE] == s->n_seqs_free && n_state[SCHED_DECODE] == s->n_decode && backlog == s->backlog &&
                  n_state[SCHED_DECODE] + n_state[SCHED_PREFILL] == s->n_running && max_growth == s->max_growth &&
                  max_windowed == s->max_windowed &&
                  (!s->kv.window || max_windowed <= s->kv.n_windowed - s->config.max_tokens / s->config.B);
    if (!bad && !counts) bad = "counts do not agree";
    free(open);
    return bad;
}
