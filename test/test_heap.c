/* test_heap.c - the pairing heap, compared with a search of all nodes. */

enum { HEAP_NODES = 300 };

/* Returns the node of the heap that belongs on top; -1: none. */
static int heap_search_top(const heap_node *nodes, const bool *inside) {
    int top = -1;
    for (int i = 0; i < HEAP_NODES; i++)
        if (inside[i] && (top < 0 || heap_is_above(nodes, i, top))) top = i;
    return top;
}

/* Returns the number of nodes below and with `node`; a wrong link or order fails the test. */
static int heap_count(const heap_node *nodes, int node, int prev) {
    int n = 0;
    for (; node >= 0 && !check_failed; prev = node, node = nodes[node].next) {
        CHECK(nodes[node].prev == prev);
        if (nodes[node].child >= 0) CHECK(!heap_is_above(nodes, nodes[node].child, node));
        n += 1 + heap_count(nodes, nodes[node].child, node);
        for (int child = nodes[node].child; child >= 0; child = nodes[child].next) CHECK(!heap_is_above(nodes, child, node));
    }
    return n;
}

/* Two heaps in one array: inserts, removals of tops and of any node. Few keys, so that many are
 * equal; tie-breaks that run over. */
static void heap_random(void) {
    for (uint64_t seed = 1; seed <= 30 && !check_failed; seed++) {
        heap_node nodes[HEAP_NODES];
        bool inside[2][HEAP_NODES] = {{0}};
        int top[2] = {-1, -1}, n[2] = {0};
        uint64_t rng = seed;
        uint32_t tie_break = 0xFFFFFF00u;
        for (int step = 0; step < 3000 && !check_failed; step++) {
            int node = (int)(rnd(&rng) % HEAP_NODES), h = (int)(rnd(&rng) % 2);
            bool grow = step / 500 % 2 == 0 ? rnd(&rng) % 4 > 0 : rnd(&rng) % 4 == 0;
            if (grow && !inside[0][node] && !inside[1][node]) {
                heap_insert(nodes, &top[h], node, (int64_t)(rnd(&rng) % 20) - 10, tie_break++);
                inside[h][node] = true, n[h]++;
            } else if (!grow && n[h]) {
                if (rnd(&rng) % 2 || !inside[h][node]) node = top[h];
                heap_remove(nodes, &top[h], node);
                inside[h][node] = false, n[h]--;
            }
            CHECK(top[h] == heap_search_top(nodes, inside[h]));
            if (step % 50 == 0) CHECK(heap_count(nodes, top[h], -1) == n[h]);
        }
    }
}

static const struct test heap_tests[] = {{"heap: random, equal to a search", heap_random}, {0}};
