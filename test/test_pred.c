/* test_pred.c - tests the length predictor on distributions with a known answer. */

static int prt_lognormal(uint64_t *rng, double mean, double sigma, int max) {
    double x = exp(log(mean) - sigma * sigma / 2 + sigma * rnd_normal(rng));
    return (int)MAX(1.0, MIN(x + 0.5, (double)max));
}

/* The mean predicted length of a sequence that has c tokens and at most max. */
static int prt_expect(pred *p, pred_handle class, int c, int max) {
    double sum = 0;
    for (int i = 0; i < 1000; i++) {
        int x = pred_length(p, class, pred_survival(p, class, c) * (i + 0.5) / 1000);
        /* not shorter than the sequence is, except for rounding within a bucket */
        CHECK(x > c || p->edge[pred_bucket(p, c)] < c);
        sum += MIN(MAX(x, c + 1), max);
    }
    return (int)(sum / 1000 + 0.5);
}

/* Counts one sequence of this length, observed until `observed` tokens. */
static void prt_count_sequence(pred *p, pred_handle c, int length, int observed) {
    int bucket = 0, n = MIN(length, observed);
    pred_count_reached(p, c, 0);
    while (p->edge[bucket + 1] < n || (p->edge[bucket + 1] == n && n < length)) pred_count_reached(p, c, ++bucket);
    pred_count_end(p, c, bucket, n, n < length);
}

static void prt_cold(void) {
    pred p;
    pred_handle none = {-1, 0};
    pred_init(&p, 64, 8192);
    int e = prt_expect(&p, none, 0, 1024);
    CHECK_MSG(e > 150 && e < 175, "%d", e);
    /* many samples of few prompts: 1.5 M tokens of cache; 8 prompts of 715 tokens, then 11 tokens
     * and the output for each sample */
    int64_t pages = 98304 - 38 - 8 * 6, each = (11 + e + 14) / 16;
    CHECK_MSG(pages / each > 8192 * 3 / 4, "%d", (int)(pages / each));
    CHECK(prt_expect(&p, none, 0, 16) >= 14);
    CHECK(prt_expect(&p, none, 0, 1) == 1);
    for (int max = 2; max < 140000; max += max / 2)
        for (int c = 0; c < max; c += 1 + c / 3) {
            e = prt_expect(&p, none, c, max);
            CHECK(e > c && e <= max);
        }
    pred_free(&p);
}

static void prt_learns(void) {
    uint64_t rng = 7;
    pred p;
    pred_init(&p, 64, 64);
    double sum[4] = {0};
    int from[4] = {0, 50, 150, 400}, n[4] = {0};
    for (int i = 0; i < 40000; i++) {
        int x = prt_lognormal(&rng, 150, 0.7, 1024);
        prt_count_sequence(&p, (pred_handle){-1, 0}, x, 1024);
        for (int k = 0; k < 4; k++)
            if (x > from[k]) sum[k] += x, n[k]++;
    }
    for (int k = 0; k < 4; k++) {
        double truth = sum[k] / n[k], e = prt_expect(&p, (pred_handle){-1, 0}, from[k], 1024);
        CHECK_MSG(fabs(e - truth) < 0.04 * truth, "after %d: %g, true %g", from[k], e, truth);
    }
    pred_free(&p);
}

/* However many sequences were seen before: if answers grow from 30 to 1,000 tokens, the predictor
 * learns this within less than its half-life. */
static void prt_learns_after_many(void) {
    const pred_handle all = {-1, 0};
    for (int before = 10000; before <= 1000000; before *= 10) {
        uint64_t rng = 11;
        int n = 0;
        pred p;
        pred_init(&p, 64, 64);
        for (int i = 0; i < before; i++) prt_count_sequence(&p, all, 20 + (int)(rnd(&rng) % 40), 4096);
        for (; n < p.half_life * 4 && pred_length(&p, all, pred_survival(&p, all, 0) * 0.5) < 700; n++)
            prt_count_sequence(&p, all, 900 + (int)(rnd(&rng) % 200), 4096);
        CHECK_MSG(n <= p.half_life * 2 / 3, "after %d short ones: %d long ones, half-life %d", before, n, (int)p.half_life);
        pred_free(&p);
    }
}

/* Half of the sequences are cut off at a random moment or still run: the estimate is the same. */
static void prt_censored(void) {
    uint64_t rng = 9;
    pred p;
    pred_init(&p, 64, 64);
    double sum = 0;
    for (int i = 0; i < 40000; i++) {
        int x = prt_lognormal(&rng, 150, 0.7, 4096);
        sum += x;
        prt_count_sequence(&p, (pred_handle){-1, 0}, x, rnd(&rng) % 2 ? 4096 : 1 + (int)(rnd(&rng) % 200));
    }
    double e = prt_expect(&p, (pred_handle){-1, 0}, 0, 4096), truth = sum / 40000;
    CHECK_MSG(fabs(e - truth) < 0.05 * truth, "%g, true %g", e, truth);
    pred_free(&p);
}

/* A cold batch of 1,000 sequences that started together, seen after 60 steps: only the short ones
 * have ended. */
static void prt_survivors(void) {
    uint64_t rng = 11;
    pred p;
    pred_init(&p, 64, 1000);
    double ended = 0, all = 0;
    int n_ended = 0;
    for (int i = 0; i < 1000; i++) {
        int x = prt_lognormal(&rng, 150, 0.7, 1024), bucket = 0;
        all += x;
        pred_count_reached(&p, (pred_handle){-1, 0}, 0);
        while (p.edge[bucket + 1] < MIN(x, 60)) pred_count_reached(&p, (pred_handle){-1, 0}, ++bucket);
        if (x <= 60) pred_count_end(&p, (pred_handle){-1, 0}, bucket, x, false), ended += x, n_ended++;
    }
    double e = prt_expect(&p, (pred_handle){-1, 0}, 0, 1024), truth = all / 1000;
    CHECK_MSG(n_ended > 50 && ended / n_ended < 60, "%d", n_ended);
    CHECK_MSG(e > 0.8 * truth && e < 2 * truth, "%g, true %g", e, truth);
    pred_free(&p);
}

static void prt_classes(void) {
    uint64_t rng = 13;
    pred p;
    pred_init(&p, 64, 64);
    for (int i = 0; i < 3000; i++) {
        prt_count_sequence(&p, pred_find_class(&p, 1), prt_lognormal(&rng, 60, 0.4, 1024), 1024);
        prt_count_sequence(&p, pred_find_class(&p, 2), prt_lognormal(&rng, 300, 0.4, 1024), 1024);
    }
    int a = prt_expect(&p, pred_find_class(&p, 1), 0, 1024), b = prt_expect(&p, pred_find_class(&p, 2), 0, 1024);
    int all = prt_expect(&p, (pred_handle){-1, 0}, 0, 1024), fresh = prt_expect(&p, pred_find_class(&p, 3), 0, 1024);
    CHECK_MSG(abs(a - 60) <= 4 && abs(b - 300) <= 15, "%d %d", a, b);
    CHECK_MSG(abs(all - 180) < 18 && abs(fresh - all) <= 6, "%d %d", all, fresh);
    /* 30 samples are enough */
    for (int i = 0; i < 30; i++) prt_count_sequence(&p, pred_find_class(&p, 3), 20, 1024);
    CHECK(prt_expect(&p, pred_find_class(&p, 3), 0, 1024) < all / 2);
    pred_free(&p);
}

/* More classes than the table has places: handles of evicted classes are stale, nothing else
 * breaks. */
static void prt_many_classes(void) {
    pred p;
    pred_init(&p, 8, 64);
    pred_handle first = pred_find_class(&p, 1000);
    prt_count_sequence(&p, first, 5, 10);
    for (uint64_t key = 1; key < 200; key++) prt_count_sequence(&p, pred_find_class(&p, key), 5, 10);
    CHECK(!pred_class_table(&p, first));
    pred_count_reached(&p, first, 0), pred_count_end(&p, first, 0, 1, false);
    CHECK(prt_expect(&p, first, 0, 100) < 40); /* as the estimate of all classes */
    pred_free(&p);
}

/* Long sequences that are all cancelled after the table was halved: their lengths become unknown.
 * It must not seem that no sequence ends there. */
static void prt_halved(void) {
    enum { LONG = 1000, BUCKET = 30 };
    const pred_handle none = {-1, 0};
    pred p;
    pred_init(&p, 8, 64);
    for (int i = 0; i < LONG; i++)
        for (int b = 0; b <= BUCKET; b++) pred_count_reached(&p, none, b);
    while (p.all.at_risk[BUCKET] > LONG / 5) prt_count_sequence(&p, none, 3, 1024);
    for (int i = 0; i < LONG; i++) pred_count_end(&p, none, BUCKET, p.edge[BUCKET], true);
    const pred_table *t = pred_current_table(&p, none);
    CHECK_MSG(t->at_risk[BUCKET] == 0, "%g", t->at_risk[BUCKET]);
    CHECK_MSG(fabs(t->survival[BUCKET + 1] / t->survival[BUCKET] - (1 - p.prior[BUCKET])) < 1e-3, "%g", t->survival[BUCKET + 1] / t->survival[BUCKET]);
    pred_free(&p);
}

static const struct test pred_tests[] = {{"pred: cold start", prt_cold},
                                         {"pred: learns a lognormal", prt_learns},
                                         {"pred: censoring does not bias", prt_censored},
                                         {"pred: an old engine learns, too", prt_learns_after_many},
                                         {"pred: survivors count", prt_survivors},
                                         {"pred: classes differ", prt_classes},
                                         {"pred: more classes than places", prt_many_classes},
                                         {"pred: a mass cancel after halving", prt_halved},
                                         {0}};
