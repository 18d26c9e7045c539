/* test_benchclient.c - bench serve without a server: arrival times, the response parser on bytes in
 * any pieces, percentiles, peaks. */

static void benchclient_test_arrivals(void) {
    enum { N = 20000 };
    static const double shapes[] = {0.25, 0.5, 1, 4, 100, INFINITY};
    for (int i = 0; i < COUNT(shapes); i++) {
        benchclient_options o = {.request_rate = 50, .burstiness = shapes[i], .seed = 3};
        benchclient b = {.options = &o};
        double before = 0, squares = 0, mean = 1 / o.request_rate;
        for (int k = 0; k < N; k++) benchclient_add_request(&b, 1);
        benchclient_draw_times(&b);
        for (int k = 0; k < N; k++) {
            double gap = b.requests[k].send_at - before;
            CHECK(gap >= 0);
            squares += (gap - mean) * (gap - mean), before = b.requests[k].send_at;
        }
        double spread = sqrt(squares / N) / mean, expected = isfinite(shapes[i]) ? 1 / sqrt(shapes[i]) : 0;
        CHECK(fabs(before - N / o.request_rate) < 1e-6); /* the last request arrives at n / rate */
        CHECK_MSG(fabs(spread - expected) < 0.05 * MAX(expected, 0.01), "shape %g: %g, expected %g", shapes[i], spread, expected);
        if (shapes[i] == 1) { /* exponential gaps: the share of gaps longer than the mean is 1/e */
            int beyond = 0;
            for (int k = 1; k < N; k++) beyond += b.requests[k].send_at - b.requests[k - 1].send_at > mean;
            CHECK(fabs((double)beyond / N - 0.3679) < 0.015);
        }
        free(b.requests);
    }
}

/* Shapes for which every gap rounds to 0 or to infinity: the times must still be valid. */
static void benchclient_test_extreme_shapes(void) {
    static const double shapes[] = {1e-300, 1e308};
    for (int i = 0; i < COUNT(shapes); i++) {
        benchclient_options o = {.request_rate = 50, .burstiness = shapes[i], .seed = 3};
        benchclient b = {.options = &o};
        for (int k = 0; k < 10; k++) benchclient_add_request(&b, 1);
        benchclient_draw_times(&b);
        for (int k = 0; k < 10; k++) CHECK_MSG(fabs(b.requests[k].send_at - (k + 1) / 50.0) < 1e-9, "shape %g: %g", shapes[i], b.requests[k].send_at);
        free(b.requests);
    }
}

/* Body and state of a response that arrives in pieces of `step` bytes. */
static enum benchclient_state benchclient_test_read(str text, size_t step, buf *out, benchclient_response *r) {
    *r = (benchclient_response){0};
    buf_clear(out);
    while (text.n && r->state != BENCHCLIENT_COMPLETE) {
        size_t n = MIN(text.n, step);
        for (str piece = str_sub(text, 0, n), body; piece.n && r->state != BENCHCLIENT_COMPLETE;) {
            ptrdiff_t used = benchclient_response_read(r, piece, &body);
            if (used < 0) return BENCHCLIENT_HEAD;
            buf_str(out, body);
            piece = str_sub(piece, (size_t)used, piece.n);
        }
        text = str_sub(text, n, text.n);
    }
    return r->state;
}

static void benchclient_test_replies(void) {
    static const struct { const char *text, *body; int status; enum benchclient_state state; bool close;
    } cases[] = {
        {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello", 200, BENCHCLIENT_COMPLETE, false},
        {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", "", 200, BENCHCLIENT_COMPLETE, true},
        {"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\ncontent-length:2\r\n\r\nok", "ok", 200, BENCHCLIENT_COMPLETE, false},
        {"HTTP/1.0 429 Slow down\nTransfer-Encoding: chunked\n\n5;x=y\nhello\n1\n!\n0\nTrailer: t\n\n", "hello!", 429, BENCHCLIENT_COMPLETE,
         false},
        {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nA\r\n0123456789\r\n0\r\n\r\n", "0123456789", 200, BENCHCLIENT_COMPLETE, false},
        {"HTTP/1.1 204 None\r\n\r\n", "", 204, BENCHCLIENT_COMPLETE, false},
        {"HTTP/1.1 200 OK\r\n\r\nuntil the end", "until the end", 200, BENCHCLIENT_TO_CLOSE, false},
        {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", "hel", 200, BENCHCLIENT_LENGTH, false},
        {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", "he", 200, BENCHCLIENT_CHUNK, false}};
    static const char *const bad[] = {"SSH-2.0-x\r\n", "HTTP/1.1 abc\r\n",
                                      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
                                      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
                                      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"};
    buf out = {0};
    benchclient_response r;
    for (size_t step = 1; step < 40; step++) {
        for (int i = 0; i < COUNT(cases); i++) {
            enum benchclient_state state = benchclient_test_read(str_c(cases[i].text), step, &out, &r);
            CHECK_MSG(state == cases[i].state && r.status == cases[i].status && r.close == cases[i].close &&
                          str_is(buf_view(&out), cases[i].body),
                      "case %d, step %zu: '%s'", i, step, buf_view(&out).p);
            benchclient_response_free(&r);
        }
        for (int i = 0; i < COUNT(bad); i++) {
            CHECK_MSG(benchclient_test_read(str_c(bad[i]), step, &out, &r) == BENCHCLIENT_HEAD, "%d", i);
            benchclient_response_free(&r);
        }
    }
    buf_free(&out);
}

static void benchclient_test_figures(void) {
    static const double values[] = {4, 1, 3, 2};
    benchclient_series s = {0};
    CHECK(benchclient_percentile(&s, 99) == 0);
    for (int i = 0; i < 4; i++) benchclient_add_value(&s, values[i]);
    benchclient_finish_series(&s);
    CHECK(s.mean == 2.5 && fabs(s.std - sqrt(1.25)) < 1e-12);
    CHECK(benchclient_percentile(&s, 0) == 1 && benchclient_percentile(&s, 100) == 4 && benchclient_percentile(&s, 50) == 2.5);
    /* as numpy computes them */
    CHECK(fabs(benchclient_percentile(&s, 99) - 3.97) < 1e-12 && fabs(benchclient_percentile(&s, 25) - 1.75) < 1e-12);
    free(s.values);

    /* three requests: 0..1, 0.5..2, 1..3 (it begins when the first ends): all three in second 1; chunks at 0.25 1 | 1.5
     * 1.75 2 | 3; and one that failed */
    static const struct {
        double start, first;
        float gaps[2];
        int n;
    } made[] = {{0, 0.25, {0.75f}, 1}, {0.5, 1.5, {0.25f, 0.25f}, 2}, {1, 3, {0}, 0}};
    benchclient b = {.end = 13.8};
    /* the first request begins this long after the run's start: the seconds of the peak rate are
     * counted from the first request */
    const double delay = 10.3;
    benchclient_selection w = {.limits_ms = {INFINITY, INFINITY, INFINITY, 1500}};
    benchclient_result r;
    for (int i = 0; i < 3; i++) {
        benchclient_request *q = benchclient_add_request(&b, 9);
        q->sent_time = delay + made[i].start, q->first_time = q->last_time = delay + made[i].first, q->n_in = 10, q->n_out = i ? 5 : 0;
        for (int k = 0; k < made[i].n; k++) buf_put(&q->chunk_gaps, &made[i].gaps[k], sizeof(float)), q->last_time += made[i].gaps[k];
    }
    benchclient_add_request(&b, 9)->error = mem_check(strdup("no"));
    benchclient_measure(&b, &w, &r);
    CHECK(r.n_completed == 3 && r.n_failed == 1 && r.n_in == 30 && r.n_out == 2 + 5 + 5 && r.n_good == 2);
    CHECK(r.peak_concurrent == 3 && r.peak_rate == 3 && r.duration == 13.8);
    CHECK(r.series[BENCHCLIENT_TTFT].n_values == 3 && r.series[BENCHCLIENT_ITL].n_values == 3 && r.series[BENCHCLIENT_TPOT].n_values == 3 && r.series[BENCHCLIENT_E2EL].values[2] == 2);
    CHECK(r.series[BENCHCLIENT_TPOT].values[2] == 0.75 && r.series[BENCHCLIENT_TPOT].values[0] == 0);
    for (int i = 0; i < 4; i++) buf_free(&b.requests[i].chunk_gaps), free(b.requests[i].error);
    for (int k = 0; k < BENCHCLIENT_N_METRICS; k++) free(r.series[k].values);
    free(b.requests);
}

/* Answers one connection with the list of models. */
static void *benchclient_test_answer(void *listener) {
    static const char answer[] = "HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\n{\"data\":[{\"id\":\"tiny\"}]}";
    char request[4096];
    int fd = accept(*(int *)listener, NULL, NULL);
    CHECK(fd >= 0 && recv(fd, request, sizeof request, 0) > 0);
    CHECK(send(fd, answer, sizeof answer - 1, MSG_NOSIGNAL) == sizeof answer - 1 && !close(fd));
    return NULL;
}

/* A name with two addresses, of which the first refuses connections, like localhost if the server
 * listens only on 127.0.0.1. */
static void benchclient_test_addresses(void) {
    struct sockaddr_in at[2] = {{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}}};
    struct addrinfo list[2] = {{0}};
    int fd[2];
    at[1] = at[0];
    for (int i = 0; i < 2; i++) { /* no socket listens at the first address */
        socklen_t n = sizeof at[i];
        fd[i] = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(!bind(fd[i], (struct sockaddr *)&at[i], n) && !getsockname(fd[i], (struct sockaddr *)&at[i], &n));
        list[i] = (struct addrinfo){.ai_family = AF_INET, .ai_socktype = SOCK_STREAM, .ai_addr = (struct sockaddr *)&at[i], .ai_addrlen = n};
    }
    CHECK(!listen(fd[1], 1));
    list[0].ai_next = &list[1];
    atomic_int interrupted = 0;
    benchclient_options o = {.interrupted = &interrupted, .quiet = true};
    benchclient b = {.options = &o, .host = "two.test", .addresses = list, .address = list};
    toka_err e = {0};
    pthread_t server;
    CHECK(!pthread_create(&server, NULL, benchclient_test_answer, &fd[1]));
    int code = benchclient_wait_ready(&b, &e);
    CHECK_MSG(!code && b.address == &list[1] && !strcmp(b.model, "tiny"), "%d: %s", code, e.msg);
    if (code) shutdown(fd[1], SHUT_RDWR); /* no connection comes */
    CHECK(!pthread_join(server, NULL) && !close(fd[0]) && !close(fd[1]));
    list[0].ai_next = NULL, b.address = list;
    /* a client without a working address must not wait forever */
    CHECK(benchclient_wait_ready(&b, &e) == TOKA_E_IO);
}

static const struct test benchclient_tests[] = {{"bench serve: arrivals", benchclient_test_arrivals},
                                                {"bench serve: arrival times of extreme shapes", benchclient_test_extreme_shapes},
                                                {"bench serve: responses in any pieces", benchclient_test_replies},
                                                {"bench serve: figures", benchclient_test_figures},
                                                {"bench serve: a name of several addresses", benchclient_test_addresses},
                                                {NULL, NULL}};
