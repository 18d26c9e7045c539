/* test_http.c - chapter 34: heads and bodies split at every byte, refusals, decoding, dates. */

static str http_str(const char *z) { return str_c(z); }

/* The status of a refused head; 0 if more bytes are needed, 200 if it is complete. */
static int http_status(const char *head) {
    http_request r;
    ptrdiff_t used = http_parse_head(http_str(head), &r);
    return used < 0 ? (int)-used : used ? 200 : 0;
}

static void test_http_head(void) {
    http_request r;
    const char *text = "POST /v1/x%20y?a=1&b=%41+c HTTP/1.1\r\nHost: h:1\r\nContent-Length: 5\r\nX:\t v w \t\r\nX: second\r\n\r\nrest";
    ptrdiff_t used = http_parse_head(http_str(text), &r);
    CHECK(used == (ptrdiff_t)strlen(text) - 4);
    CHECK(r.method == HTTP_POST && r.minor == 1 && r.content_length == 5 && !r.chunked && r.keep_alive && !r.expects_continue);
    CHECK(str_is(r.path, "/v1/x%20y") && str_is(r.query, "a=1&b=%41+c") && r.n_headers == 4);
    CHECK(str_is(http_find_header(&r, "x"), "v w") && http_count_headers(&r, "x") == 2 && !http_find_header(&r, "y").p);
    buf b = {0};
    CHECK(http_query_field(&r, "b", &b) && str_is(buf_view(&b), "A c"));
    CHECK(!http_query_field(&r, "c", &b));
    buf_free(&b);
    CHECK(http_parse_head(http_str("\r\n\r\nGET / HTTP/1.0\r\n\r\n"), &r) == 22 && r.minor == 0 && !r.keep_alive);
    CHECK(http_parse_head(http_str("GET / HTTP/1.0\r\nConnection: x , Keep-Alive\r\n\r\n"), &r) > 0 && r.keep_alive);
    CHECK(http_parse_head(http_str("GET / HTTP/1.1\r\nHost:\r\nConnection: keep-alive, CLOSE\r\n\r\n"), &r) > 0 && !r.keep_alive);
    CHECK(http_parse_head(http_str("GET http://h:8/p?q HTTP/1.1\r\nHost: h\r\n\r\n"), &r) > 0 && str_is(r.path, "/p") && str_is(r.query, "q"));
    CHECK(http_parse_head(http_str("GET HTTP://h HTTP/1.1\r\nHost: h\r\n\r\n"), &r) > 0 && str_is(r.path, "/"));
    CHECK(http_parse_head(http_str("GET http://h?q HTTP/1.1\r\nHost: h\r\n\r\n"), &r) > 0 && str_is(r.path, "/") && str_is(r.query, "q"));
    CHECK(http_parse_head(http_str("OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n"), &r) > 0 && str_is(r.path, "*"));
    CHECK(http_parse_head(http_str("BREW / HTTP/1.7\r\nHost: h\r\nTransfer-Encoding: Chunked\r\nExpect: 100-Continue\r\n\r\n"), &r) > 0);
    CHECK(r.method == HTTP_OTHER && r.minor == 1 && r.chunked && r.expects_continue);
}

/* The host that a request names: the one in the target, otherwise the one in the header. */
static void test_http_hosts(void) {
    static const struct {
        const char *head, *host; /* NULL: refused */
    } heads[] = {{"GET / HTTP/1.1\r\nHost: a:1\r\n\r\n", "a:1"}, {"GET http://b:2/ HTTP/1.1\r\nHost: a:1\r\n\r\n", "b:2"},
                 {"GET https://[::1]?q HTTP/1.1\r\nHost: a\r\n\r\n", "[::1]"}, {"GET / HTTP/1.0\r\n\r\n", ""}, {"GET / HTTP/1.1\r\nHost:\r\n\r\n", ""},
                 {"GET http://b HTTP/1.1\r\nHost:\r\n\r\n", "b"}, {"GET http://a@b/ HTTP/1.1\r\nHost: a\r\n\r\n", NULL}, {"GET http://:1/ HTTP/1.1\r\nHost: a\r\n\r\n", NULL},
                 {"GET http://b HTTP/1.1\r\n\r\n", NULL}, {"GET http://b HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", NULL}, {"GET http://b:x/ HTTP/1.1\r\nHost: a\r\n\r\n", NULL}};
    for (int i = 0; i < COUNT(heads); i++) {
        http_request r;
        ptrdiff_t used = http_parse_head(http_str(heads[i].head), &r);
        CHECK_MSG((used > 0) == (heads[i].host != NULL) && (used < 0 || str_is(r.host, heads[i].host)), "%s", heads[i].head);
    }
    static const struct {
        const char *host, *name; /* NULL: refused */
    } cases[] = {{"a.b", "a.b"}, {"a.b.:80", "a.b"}, {"a:", "a"}, {"", ""}, {":1", ""}, {".", ""}, {"a..", "a."}, {"[::1]", "::1"}, {"[fe80::1%25e0]:1", "fe80::1"},
                 {"[::ffff:1.2.3.4]", "::ffff:1.2.3.4"}, {"[a]", "a"}, {"[g]", NULL}, {"[::1", NULL}, {"[::1]a", NULL}, {"[::1]:b", NULL}, {"a:b", NULL}, {"::1", NULL},
                 {"a]", NULL}, {"a[b]", NULL}, {"a/b", NULL}, {"a@b", NULL}, {"a b", NULL}, {"a\xC3\xA4", NULL}, {"[::1%25 ]", NULL}, {"[", NULL}, {"[]", ""}};
    for (int i = 0; i < COUNT(cases); i++) {
        str name;
        bool ok = http_split_host(http_str(cases[i].host), &name);
        CHECK_MSG(ok == (cases[i].name != NULL) && (!ok || str_is(name, cases[i].name)), "%s", cases[i].host);
    }
}

/* The method of a refused head is known, so that the answer to HEAD has no body. */
static void test_http_refused_heads(void) {
    static const char *const heads[] = {"HEAD / HTTP/1.1\r\n\r\n", "HEAD / HTTP/1.1\n", "HEAD  / HTTP/1.1\r\n", "HEAD / HTTP/2.0\r\n", "HEAD /\r\n", "HEAD x HTTP/1.1\r\n",
                                        "\r\nHEAD / HTTP/1.1\r\nA : b\r\n", "HEAD / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: x\r\n\r\n", "HEAD\t/"};
    for (int i = 0; i < COUNT(heads); i++) {
        http_request r;
        CHECK_MSG(http_parse_head(http_str(heads[i]), &r) < 0 && r.method == HTTP_HEAD, "%s", heads[i]);
    }
    http_request r;
    CHECK(http_parse_head(http_str("HEADS / HTTP/2.0\r\n"), &r) == -505 && r.method == HTTP_OTHER);
    CHECK(http_parse_head(http_str("HEAD / HTTP/1.1\r\nHos"), &r) == 0 && r.method == HTTP_HEAD);
}

/* A head may arrive in any two pieces: nothing is decided before the last byte, and the result is
 * the same. */
static void test_http_head_splits(void) {
    const char *text = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    size_t n = strlen(text);
    for (size_t cut = 0; cut < n; cut++) {
        http_request r;
        /* of the exact size, so that the sanitizer reports a read past the end */
        char *exact = mem_alloc(cut);
        memcpy(exact, text, cut);
        CHECK_MSG(http_parse_head((str){exact, cut}, &r) == 0, "cut at %zu", cut);
        free(exact);
    }
    http_request r;
    CHECK(http_parse_head(http_str(text), &r) == (ptrdiff_t)n && r.chunked);
}

static void test_http_refused(void) {
#define HOST "Host: h\r\n"
    static const struct {
        int status;
        const char *head;
    } cases[] = {
        {400, "GET / HTTP/1.1\n" HOST "\r\n"}, {400, "GET / HTTP/1.1\r\nHost: h\n\r\n"}, {400, "GET / HTTP/1.1\r\n" HOST "\n"},
        {400, "GET /\r\n\r\n"}, {400, "GET  / HTTP/1.1\r\n"}, {400, " GET / HTTP/1.1\r\n"}, {400, "GET / HTTP/1.1 \r\n"},
        {400, "GET / http/1.1\r\n"}, {400, "GET / HTTP/1\r\n"}, {400, "GET / HTTP/1.10\r\n"}, {505, "GET / HTTP/2.0\r\n"},
        {505, "GET / HTTP/0.9\r\n"}, {400, "G@T / HTTP/1.1\r\n"}, {400, "\x16\x03\x01\x02"}, {400, "{\"a\":1}"},
        {400, "GET x HTTP/1.1\r\n"}, {400, "GET * HTTP/1.1\r\n"}, {501, "CONNECT a:1 HTTP/1.1\r\n"}, {400, "GET http:// HTTP/1.1\r\n"},
        {400, "GET /\x80 HTTP/1.1\r\n"}, {400, "GET /\x7F HTTP/1.1\r\n"}, {400, "GET /a\tb HTTP/1.1\r\n"}, {400, "GET /#f HTTP/1.1\r\n"}, {400, "GET http://h#f HTTP/1.1\r\n"},
        {400, "GET / HTTP/1.1\r\n\r\n"}, {400, "GET / HTTP/1.1\r\n" HOST HOST "\r\n"}, {400, "GET / HTTP/1.1\r\nHost: a b\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n"}, {400, "GET / HTTP/1.0\r\n" HOST HOST "\r\n"},
        {400, "GET / HTTP/1.1\r\n" HOST "A : b\r\n\r\n"}, {400, "GET / HTTP/1.1\r\n" HOST "A: b\r\n c\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\n Host: h\r\n\r\n"}, {400, "GET / HTTP/1.1\r\n" HOST "nocolon\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\n" HOST ": v\r\n\r\n"}, {400, "GET / HTTP/1.1\r\n" HOST "A: b\x01\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\n" HOST "A: b\rc\r\n\r\n"}, {400, "GET / HTTP/1.1\r\n" HOST "A\xC3: b\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Content-Length: 5\r\nContent-Length: 5\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Content-Length: 5, 5\r\n\r\n"}, {400, "POST / HTTP/1.1\r\n" HOST "Content-Length:\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Content-Length: -1\r\n\r\n"}, {400, "POST / HTTP/1.1\r\n" HOST "Content-Length: +1\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Content-Length: 0x5\r\n\r\n"}, {400, "POST / HTTP/1.1\r\n" HOST "Content-Length: 1 2\r\n\r\n"},
        {413, "POST / HTTP/1.1\r\n" HOST "Content-Length: 99999999999999999999\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked, chunked\r\n\r\n"},
        {501, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: gzip, chunked\r\n\r\n"},
        {501, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked, gzip\r\n\r\n"}, {400, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked,\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: ,chunked\r\n\r\n"}, {400, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: gzip,,chunked\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: gzip, chunked\r\nContent-Length: 1\r\n\r\n"},
        {501, "M-SEARCH * HTTP/1.1\r\n"}, {501, "BREW x HTTP/1.1\r\n"}, {400, "BREW  HTTP/1.1\r\n"}, {200, "BREW / HTTP/1.1\r\n" HOST "\r\n"},
        {400, "GET / HTTP/1.1\r\nHost: a:b\r\n\r\n"}, {400, "GET / HTTP/1.1\r\nHost: ::1\r\n\r\n"},
        {501, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: gzip\r\n\r\n"}, {501, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: xchunked\r\n\r\n"},
        {501, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: \"chunked\"\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: \x0B" "chunked\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding:\r\n\r\n"}, {400, "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding : chunked\r\n\r\n"},
        {417, "POST / HTTP/1.1\r\n" HOST "Expect: 200-ok\r\n\r\n"}, {0, "GET / HTTP/1.1\r\n" HOST}, {0, "GE"}, {0, ""}, {0, "\r\n"},
    };
    for (int i = 0; i < COUNT(cases); i++)
        CHECK_MSG(http_status(cases[i].head) == cases[i].status, "case %d: %d: %s", i, http_status(cases[i].head), cases[i].head);
    http_request r;
    CHECK(http_parse_head((str){"GET / HTTP/1.1\r\nHost: h\r\nA: \0\r\n\r\n", 34}, &r) == -400);
}

static void test_http_limits(void) {
    buf b = {0};
    http_request r;
    buf_c(&b, "GET /");
    for (int i = 0; i < HTTP_MAX_TARGET; i++) buf_char(&b, 'a');
    CHECK(http_parse_head(buf_view(&b), &r) == 0);
    for (int i = 0; i < 100; i++) buf_char(&b, 'a');
    CHECK(http_parse_head(buf_view(&b), &r) == -414);
    buf_c(&b, " HTTP/1.1\r\nHost: h\r\n\r\n");
    CHECK(http_parse_head(buf_view(&b), &r) == -414);
    /* headers in addition to Host */
    for (int n = HTTP_MAX_HEADERS - 1; n < HTTP_MAX_HEADERS + 2; n++) {
        buf_clear(&b);
        buf_c(&b, "GET / HTTP/1.1\r\nHost: h\r\n");
        for (int i = 0; i < n; i++) buf_printf(&b, "a%d: b\r\n", i);
        buf_c(&b, "\r\n");
        CHECK(http_parse_head(buf_view(&b), &r) == (n < HTTP_MAX_HEADERS ? (ptrdiff_t)b.n : -431));
    }
    buf_clear(&b);
    buf_c(&b, "GET / HTTP/1.1\r\nHost: h\r\nA: ");
    while (b.n < HTTP_MAX_HEAD - 1) buf_char(&b, 'x');
    CHECK(http_parse_head(buf_view(&b), &r) == 0);
    buf_char(&b, 'x');
    CHECK(http_parse_head(buf_view(&b), &r) == -431);
    buf_free(&b);
}

/* Reads the body of `in` in pieces of `piece` bytes. Unused bytes are kept as a connection does.
 * Returns a status, or 200 if the body is complete (*used bytes were consumed), 0 if more is
 * needed. */
static int http_feed(str in, bool chunked, int64_t length, int64_t limit, size_t piece, buf *out, size_t *used) {
    http_body b;
    http_request r = {.chunked = chunked, .content_length = length};
    int code = http_body_init(&b, &r, limit);
    if (code) return code;
    *used = 0;
    for (size_t have = 0; b.state != HTTP_BODY_DONE && have < in.n;) {
        have = MIN(have + piece, in.n);
        char *exact = mem_alloc(have - *used);
        memcpy(exact, in.p + *used, have - *used);
        ptrdiff_t n = http_body_read(&b, (str){exact, have - *used}, out);
        free(exact);
        if (n < 0) return (int)-n;
        *used += (size_t)n;
    }
    return b.state == HTTP_BODY_DONE ? 200 : 0;
}

static void test_http_bodies(void) {
    const char *chunks = "5\r\nhello\r\n1;a=\"b\"\r\n \r\n00006\r\nworld!\r\n0;x\r\nTrailer: 1\r\nAnother: 2\r\n\r\nNEXT";
    size_t used, n = strlen(chunks);
    for (size_t piece = 1; piece <= n; piece++) {
        buf out = {0};
        CHECK(http_feed(http_str(chunks), true, 0, 12, piece, &out, &used) == 200 && used == n - 4 && str_is(buf_view(&out), "hello world!"));
        buf_clear(&out);
        CHECK(http_feed(http_str("0123456789"), false, 7, 7, piece, &out, &used) == 200 && used == 7 && str_is(buf_view(&out), "0123456"));
        buf_clear(&out);
        CHECK(http_feed(http_str(chunks), true, 0, 11, piece, &out, &used) == 413);
        buf_free(&out);
    }
    for (size_t cut = 0; cut < n - 4; cut++) {
        buf out = {0};
        CHECK(http_feed((str){chunks, cut}, true, 0, 12, cut + 1, &out, &used) == 0);
        buf_free(&out);
    }
    buf none = {0};
    CHECK(http_feed(STR(""), false, 0, 0, 1, &none, &used) == 200 && !used);
    CHECK(http_feed(STR(""), false, 8, 7, 1, &none, &used) == 413);
}

static void test_http_bad_chunks(void) {
    static const char *const bad[] = {"\r\n", "g\r\n", " 5\r\nhello", "5 \r\nhello", "+5\r\n", "-5\r\n", "0x5\r\n", "5\nhello", "5\r\nhelloX\n", "5\r\nhello\n0\r\n",
                                      "5\r\nhello\rX", "5;\x01\r\n", "1\r\na\r\n0\r\nbad trailer\r\n", "0\r\n folded: x\r\n", "0\r\nA : b\r\n", "5;a\rb\r\n"};
    size_t used;
    for (int i = 0; i < COUNT(bad); i++)
        for (size_t piece = 1; piece < 30; piece += 7) {
            buf out = {0};
            CHECK_MSG(http_feed(http_str(bad[i]), true, 0, 100, piece, &out, &used) == 400, "case %d", i);
            buf_free(&out);
        }
    buf big = {0}, out = {0};
    CHECK(http_feed(http_str("fffffffffffffffffff\r\n"), true, 0, INT64_MAX, 9, &out, &used) == 413);
    CHECK(http_feed(http_str("65\r\n"), true, 0, 100, 9, &out, &used) == 413);
    for (int i = 0; i < HTTP_MAX_CHUNK_LINE + 2; i++) buf_char(&big, '0');
    CHECK(http_feed(buf_view(&big), true, 0, 100, 9, &out, &used) == 400);
    buf_clear(&big);
    for (int i = 0; i < HTTP_MAX_CHUNK_EXTRA / 200 + 1; i++) buf_printf(&big, "1;%0200d\r\nx\r\n", 1); /* many small extensions */
    CHECK(http_feed(buf_view(&big), true, 0, 1000, 64, &out, &used) == 400);
    buf_clear(&big);
    buf_c(&big, "0\r\n");
    for (int i = 0; i <= HTTP_MAX_HEADERS; i++) buf_printf(&big, "a: b\r\n");
    CHECK(http_feed(buf_view(&big), true, 0, 1000, 64, &out, &used) == 431);
    buf_free(&big), buf_free(&out);
}

static void test_http_decode(void) {
    static const struct {
        const char *in, *out; /* out NULL: refused */
        bool plus;
    } cases[] = {{"a%2Fb", "a/b", false}, {"%e2%82%ac", "\xE2\x82\xAC", false}, {"a+b", "a+b", false}, {"a+b", "a b", true}, {"%", NULL, false},
                 {"%4", NULL, false}, {"%4g", NULL, false}, {"%00", NULL, false}, {"%25", "%", false}, {"", "", false}};
    for (int i = 0; i < COUNT(cases); i++) {
        buf b = {0};
        bool ok = http_decode(http_str(cases[i].in), cases[i].plus, &b);
        CHECK_MSG(ok == (cases[i].out != NULL) && (!ok || str_is(buf_view(&b), cases[i].out)), "%s", cases[i].in);
        buf_free(&b);
    }
}

static void test_http_dates(void) {
    uint64_t seed = 7;
    for (int i = 0; i < 2000; i++) {
        time_t t = i == 0 ? 0 : i == 1 ? 784111777 : (time_t)(rnd(&seed) % 8000000000);
        struct tm tm;
        char want[64];
        gmtime_r(&t, &tm);
        /* in the C locale: the program never calls setlocale */
        strftime(want, sizeof want, "%a, %d %b %Y %H:%M:%S GMT", &tm);
        buf b = {0};
        http_put_date(&b, (int64_t)t);
        CHECK_MSG(str_is(buf_view(&b), want), "%s, expected %s", b.p, want);
        buf_free(&b);
    }
    buf b = {0};
    http_put_date(&b, -86400 * 3 - 1); /* a clock that was never set */
    CHECK(str_is(buf_view(&b), "Thu, 01 Jan 1970 00:00:00 GMT"));
    buf_free(&b);
}

static void test_http_answers(void) {
    buf b = {0};
    http_put_head(&b, 429, "application/json", 3, true, 784111777, STR("Retry-After: 1\r\n"));
    CHECK(str_is(buf_view(&b), "HTTP/1.1 429 Too Many Requests\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nContent-Type: application/json\r\n"
                               "Content-Length: 3\r\nConnection: keep-alive\r\nRetry-After: 1\r\n\r\n"));
    buf_clear(&b);
    for (int i = 0; i < 300; i++) { /* chunks that are written can be read again */
        buf piece = {0}, back = {0};
        size_t used;
        for (int k = 0; k < i; k++) buf_char(&piece, (char)('a' + k % 26));
        buf_clear(&b);
        http_put_chunk(&b, buf_view(&piece));
        http_put_last_chunk(&b);
        CHECK(http_feed(buf_view(&b), true, 0, 1000, 7, &back, &used) == 200 && str_eq(buf_view(&back), buf_view(&piece)) && used == b.n);
        buf_free(&piece), buf_free(&back);
    }
    buf_free(&b);
}

/* ---- Chapter 44: what needs no socket ---- */

static void test_srv_keys(void) {
    static const char *const keys[] = {"secret", "other-key"};
    srv_options o = {.keys = keys, .n_keys = 2};
    static const struct {
        const char *header;
        bool ok;
    } cases[] = {{"Authorization: Bearer secret\r\n", true}, {"authorization: bearer  other-key \r\n", true}, {"Authorization: Bearer secre\r\n", false},
                 {"Authorization: Bearer secrets\r\n", false}, {"Authorization: Bearer secretsecret\r\n", false}, {"Authorization: Bearer \r\n", false},
                 {"Authorization: Basic secret\r\n", false}, {"Authorization: secret\r\n", false}, {"", false}};
    for (int i = 0; i < COUNT(cases); i++) {
        http_request r;
        buf b = {0};
        buf_printf(&b, "GET / HTTP/1.1\r\nHost: h\r\n%s\r\n", cases[i].header);
        CHECK(http_parse_head(buf_view(&b), &r) > 0);
        CHECK_MSG(srv_is_authorized(&o, &r) == cases[i].ok, "%s", cases[i].header);
        CHECK(srv_is_authorized(&(srv_options){0}, &r));
        buf_free(&b);
    }
}

static void test_srv_origins(void) {
    http_request r;
    CHECK(http_parse_head(http_str("GET / HTTP/1.1\r\nHost: h\r\nOrigin: http://a.b\r\n\r\n"), &r) > 0);
    CHECK(!srv_origin(&(srv_options){0}, &r).n);
    CHECK(srv_origin(&(srv_options){.origins = "https://x, http://a.b"}, &r).n);
    CHECK(srv_origin(&(srv_options){.origins = "*"}, &r).n);
    CHECK(!srv_origin(&(srv_options){.origins = "http://a.b.c,http://a"}, &r).n);
}

/* --allowed-hosts and --host. test_server.py tests addresses of sockets. */
static void test_srv_hosts(void) {
    static const struct {
        const char *hosts, *host;
        bool ok;
    } cases[] = {{NULL, "localhost", true}, {NULL, "a.localhost:1", true}, {NULL, "xlocalhost", false}, {NULL, ".localhost", false}, {NULL, "[::1]", true},
                 {NULL, "evil", false}, {NULL, "", false}, {NULL, ":1", false}, {NULL, "box", true}, {NULL, "BOX.:5", true}, {NULL, "box.a", false},
                 {NULL, "127.255.0.9", true}, {NULL, "128.0.0.1", false}, {NULL, "[::ffff:7f00:1]", true}, {NULL, "[::7f00:1]", false},
                 {"*", "evil", true}, {"a,b", "b:9", true}, {"a,b", "ab", false}, {"*.a", "x.a", true}, {"*.a", "a", false}, {"*.a", "xa", false}, {".a", "a", true},
                 {".a", "y.x.a", true}, {".a", "b.aa", false}, {"a:1", "a:1", true}, {"a:1", "a:2", false}, {"fd::1", "[fd:0::1]:2", true}, {"[fd::1]", "[fd::1]", true}};
    for (int i = 0; i < COUNT(cases); i++) {
        srv_options o = {.hosts = cases[i].hosts, .host = "box"};
        CHECK_MSG(srv_is_own_host(&o, http_str(cases[i].host), -1) == cases[i].ok, "%s, %s", cases[i].hosts ? cases[i].hosts : "-", cases[i].host);
    }
    CHECK(srv_is_own_host(&(srv_options){0}, (str){0}, -1)); /* HTTP/1.0 without a Host header */
    toka_err e;
    CHECK(!srv_check_hosts("a, *.b,.c , [::1]:5, fd::1,a:1,*", &e) && !srv_check_hosts("", &e));
    static const char *const wrong[] = {"http://a", "a,*.", "a*", "*.*", "a b", ".", "a,,b", "a:b"};
    for (int i = 0; i < COUNT(wrong); i++) CHECK_MSG(srv_check_hosts(wrong[i], &e) == TOKA_E_USE, "%s", wrong[i]);
}

static void test_srv_histogram(void) {
    srv_metrics m;
    srv_metrics_init(&m);
    /* a value equal to a bound counts in the bucket of this bound */
    srv_observe(&m.ttft, 0.001, 1);
    srv_observe(&m.ttft, 0.0011, 2);
    srv_observe(&m.ttft, 1e9, 1);
    CHECK(m.ttft.counts[0] == 1 && m.ttft.counts[1] == 2 && m.ttft.counts[SRV_N_BUCKETS] == 1 && m.ttft.n_values == 4);
    buf b = {0};
    srv_put_histogram(&b, "x", "Help.", "a=\"b\"", &m.ttft);
    CHECK(str_find(buf_view(&b), STR("toka:x_bucket{a=\"b\",le=\"0.0025\"} 3\n"), 0) >= 0);
    CHECK(str_find(buf_view(&b), STR("toka:x_bucket{a=\"b\",le=\"+Inf\"} 4\n"), 0) >= 0);
    CHECK(str_find(buf_view(&b), STR("toka:x_count{a=\"b\"} 4\n"), 0) >= 0);
    buf_free(&b);
}

static void test_srv_heartbeat(void) { /* hung: there is work, and no step for a while */
    srv_loop l = {.now = 1e6};
    srv_options o = {.step_timeout = 120};
    srv s = {.options = &o, .loop = &l};
    toka_stats t = {.waiting = 1}; /* the first check finds work and no step yet */
    srv_check_engine(&s, &t);
    CHECK(!s.hung);
    t = (toka_stats){.steps = 5, .running = 1};
    srv_check_engine(&s, &t);
    CHECK(!s.hung);
    l.now += 119;
    srv_check_engine(&s, &t);
    CHECK(!s.hung);
    l.now += 2;
    srv_check_engine(&s, &t);
    CHECK(s.hung);
    t.steps++;
    srv_check_engine(&s, &t);
    CHECK(!s.hung);
    t.running = 0;
    l.now += 121;
    srv_check_engine(&s, &t);
    CHECK(!s.hung);
}

/* Rates of the status line count from the start of the engine, not of the machine. */
static void test_srv_tick(void) {
    srv_loop l = {.now = 1e6};
    srv s = {.loop = &l, .phase = SRV_LOADING};
    srv_tick(&s);
    CHECK(l.last_status == 1e6);
}

/* Retry-After: the queue's length / its drain rate, measured since the queue was last empty, or
 * over the last while. */
static void test_srv_rate(void) {
    srv_queue_rate p = {0};
    int64_t left = 1000; /* from earlier hours without load */
    double now = 5000;
    srv_update_queue_rate(&p, 0, left, now);
    /* no rate is known yet */
    CHECK(srv_retry_after_s(&p, 40, left, now) == 1 && srv_retry_after_s(&p, 40, left, now + 0.09) == 4);
    CHECK(srv_retry_after_s(&p, 40, left, now + 100) == SRV_MAX_RETRY_S && srv_retry_after_s(&p, 0, left, now + 100) == 1);
    /* one minute with a queue of 40 that drains by 5 in a second: 8 s */
    for (int i = 0; i < 600; i++) {
        now += 0.1, left += i % 2;
        srv_update_queue_rate(&p, 40, left, now);
        int s = srv_retry_after_s(&p, 40, left, now);
        if (i > 10) CHECK_MSG(s == 8 || s == 9, "%d s after %d", s, i);
    }
    for (int i = 0; i < 250; i++) { /* ten times as fast: 0.8 s. The earlier rate is forgotten */
        now += 0.1, left += 5;
        srv_update_queue_rate(&p, 40, left, now);
    }
    CHECK(srv_retry_after_s(&p, 40, left, now) == 1 && srv_retry_after_s(&p, 390, left, now) == 8);
    /* a pause: nothing leaves the queue */
    for (int i = 0; i < 250; i++) srv_update_queue_rate(&p, 40, left, now += 0.1);
    CHECK(srv_retry_after_s(&p, 40, left, now) == SRV_MAX_RETRY_S);
    now += 3600;
    /* empty for an hour, then a burst: the hour does not count */
    srv_update_queue_rate(&p, 0, left, now);
    CHECK(srv_retry_after_s(&p, 100, left + 20, now + 0.5) == 3);
}

/* A reader that never catches up: bytes that it has taken do not stay in memory. */
static void test_srv_append(void) {
    srv_conn k = {0};
    char line[1000];
    size_t sent = 0, max_cap = 0;
    for (int i = 0; i < 10000; i++) {
        buf made = {0};
        memset(line, 'a' + i % 26, sizeof line);
        buf_put(&made, line, sizeof line);
        srv_append(&k, &made);
        for (int n = i < 100 ? 0 : 1000; n > 0; n--, k.out_sent++, sent++) /* 100 lines behind */
            if (k.out.p[k.out_sent] != (char)('a' + sent / 1000 % 26)) check_failed++;
        max_cap = MAX(max_cap, k.out.cap);
    }
    CHECK(k.out.n - k.out_sent == 100000);
    CHECK_MSG(max_cap < 1 << 20, "%zu bytes", max_cap);
    buf_free(&k.out);
}

/* A reader is dropped if its socket took too little, more records wait than may wait, and more will
 * come. Only the counts are examined. */
static void test_srv_behind(void) {
    srv s = {0};
    srv_request c = {.server = &s, .state = SRV_RUNNING, .with_workers = true, .refs = 1};
    srv_conn k = {.request = &c};
    pthread_mutex_init(&s.lock, NULL);
    static const struct {
        size_t records, left, left_at, unsent;
        int n_open;
        bool stays, stalled;
    } cases[] = {{SRV_MAX_RECORDS, 0, 0, SRV_MAX_UNSENT, 1, true, true},
                 {SRV_MAX_RECORDS + 1, 0, 0, SRV_MAX_UNSENT, 1, false, true},
                 {SRV_MAX_RECORDS, 10, 9, SRV_MAX_UNSENT, 1, false, true},
                 /* records that were already fed do not count */
                 {SRV_MAX_RECORDS - 1, SRV_MAX_RECORDS, SRV_MAX_RECORDS - 1, SRV_MAX_UNSENT, 1, true, true},
                 {SRV_MAX_RECORDS + 1, 0, 0, SRV_MAX_UNSENT, 0, true, true},
                 {SRV_MAX_RECORDS + 1, 0, 0, SRV_MAX_UNSENT / 2 - 1, 1, true, false}};
    for (int i = 0; i < COUNT(cases); i++) {
        c.records.n = cases[i].records, c.unfed.n = cases[i].left, c.unfed_at = cases[i].left_at, c.n_unended = cases[i].n_open;
        c.paused = true, k.out.n = cases[i].unsent;
        CHECK_MSG(srv_resume(&k) == cases[i].stays && c.paused == cases[i].stalled, "case %d", i);
    }
    pthread_mutex_destroy(&s.lock);
}

/* Workers take calls in order. Streams with few records are taken several at a time, a share of all
 * and at most SRV_MAX_JOBS. A new call, a whole answer and a call with many records are taken
 * alone, because calls after them would have to wait. */
static void test_srv_jobs(void) {
    srv_options o = {.n_workers = 2};
    srv s = {.options = &o, .work_queue_end = &s.work_queue};
    srv_request c[60] = {0};
    srv_job job[SRV_MAX_JOBS];
    int next = 0, sizes[12] = {0}, n_turns = 0;
    static const int expected[] = {16, 16, 9, 1, 1, 1, 1, 8, 4, 2, 1};
    for (int i = 0; i < COUNT(c); i++) {
        c[i] = (srv_request){.server = &s, .state = i == 41 || i == 43 ? SRV_NEW : SRV_RUNNING, .n_unended = i % 2};
        c[i].api.stream = i != 42;
        buf_char(&c[i].records, 'r');
        while (i == 44 && c[i].records.n <= SRV_LIGHT_BYTES) buf_char(&c[i].records, 'r');
        if (i % 3 == 0) buf_c(&c[i].unfed, "left"), c[i].unfed_at = 2;
        srv_queue_work(&c[i]);
    }
    CHECK(s.n_queued == 60);
    for (int n; (n = srv_take_jobs(&s, job)); n_turns++) {
        sizes[MIN(n_turns, 11)] = n;
        for (int i = 0; i < n; i++, next++) {
            bool left = next % 3 == 0; /* what was left over goes first, and is not the last then */
            CHECK_MSG(job[i].request == &c[next] && job[i].state == c[next].state, "call %d", next);
            CHECK_MSG(str_starts(buf_view(&job[i].records), left ? STR("left") : STR("r")) && job[i].fed == (left ? 2u : 0u), "call %d", next);
            CHECK_MSG(job[i].last == (!left && next % 2 == 0), "call %d", next);
            buf_free(&job[i].records), buf_free(&c[next].records);
        }
    }
    CHECK(next == 60 && !s.n_queued && !s.work_queue && s.work_queue_end == &s.work_queue);
    CHECK_MSG(n_turns == COUNT(expected) && !memcmp(sizes, expected, sizeof expected), "%d turns: %d %d %d %d %d %d %d %d %d %d %d", n_turns,
              sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], sizes[10]);
}

static const struct test http_tests[] = {{"http: head", test_http_head},
                                         {"http: head at every split", test_http_head_splits},
                                         {"http: hosts", test_http_hosts},
                                         {"http: refused heads", test_http_refused},
                                         {"http: methods of refused heads", test_http_refused_heads},
                                         {"http: limits of heads", test_http_limits},
                                         {"http: bodies at every split", test_http_bodies},
                                         {"http: bad chunks", test_http_bad_chunks},
                                         {"http: percent", test_http_decode},
                                         {"http: dates", test_http_dates},
                                         {"http: answers", test_http_answers},
                                         {"server: keys", test_srv_keys},
                                         {"server: origins", test_srv_origins},
                                         {"server: hosts", test_srv_hosts},
                                         {"server: histogram", test_srv_histogram},
                                         {"server: heartbeat", test_srv_heartbeat},
                                         {"server: first status line", test_srv_tick},
                                         {"server: pace", test_srv_rate},
                                         {"server: a slow reader", test_srv_append},
                                         {"server: a reader too far behind", test_srv_behind},
                                         {"server: calls that a worker takes", test_srv_jobs},
                                         {NULL, NULL}};
