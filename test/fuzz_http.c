/* fuzz_http.c - libFuzzer entry: a stream of requests is read in the same way whole and in pieces.
 * The first byte is the size of the pieces. */

/* Reads requests from the stream as a connection does, `piece` more bytes at a time, and logs what
 * was understood. A head that is incomplete at the end of the stream is not logged. */
static void read_stream(str in, size_t piece, buf *record) {
    http_request r;
    http_body body = {.state = HTTP_BODY_DONE};
    bool in_body = false;
    buf text = {0};
    for (size_t at = 0, have = 0;;) {
        /* of the exact size, so that a read past the end is noticed */
        char *exact = mem_alloc(have - at);
        if (have > at) memcpy(exact, in.p + at, have - at);
        str rest = {exact, have - at};
        ptrdiff_t used = in_body ? http_body_read(&body, rest, &text) : http_parse_head(rest, &r);
        if (used > (ptrdiff_t)rest.n) abort();
        bool whole = in_body ? body.state == HTTP_BODY_DONE : used > 0;
        if (used < 0) {
            buf_printf(record, "bad %d\n", (int)-used);
        } else if (!in_body && whole) {
            buf_printf(record, "%d %d %d %.*s?%.*s %lld %d %d\n", (int)r.method, r.minor, r.n_headers, STRF(r.path), STRF(r.query), (long long)r.content_length,
                       r.chunked, r.keep_alive);
            str name = STR("");
            if (r.host.n && !http_split_host(r.host, &name)) abort();
            buf_printf(record, "at %.*s\n", STRF(name));
            if (!str_starts(r.path, STR("/")) && !str_is(r.path, "*")) abort();
            if (r.chunked && (r.content_length || http_find_header(&r, "content-length").p)) abort();
            in_body = true;
            if (http_body_init(&body, &r, 1 << 16)) used = -413;
        }
        free(exact);
        if (used < 0) break;
        at += (size_t)used;
        if (in_body && body.state == HTTP_BODY_DONE) {
            if (text.n > 1 << 16) abort();
            buf_printf(record, "body %zu %llx\n", text.n, (unsigned long long)hash_bytes(text.p, text.n));
            buf_clear(&text);
            in_body = false;
            continue;
        }
        if (whole) continue;
        if (have == in.n) break;
        have = MIN(have + piece, in.n);
    }
    buf_free(&text);
}

static int fuzz_http(const uint8_t *data, size_t size) {
    if (!size) return 0;
    buf a = {0}, b = {0}, c = {0};
    str in = {(const char *)data + 1, size - 1};
    read_stream(in, in.n + 1, &a);
    read_stream(in, (size_t)data[0] % 64 + 1, &b);
    if (!str_eq(buf_view(&a), buf_view(&b))) abort();
    if (http_decode(in, data[0] & 1, &c) && c.n > in.n) abort();
    if (c.n && memchr(c.p, 0, c.n)) abort();
    buf_free(&a), buf_free(&b), buf_free(&c);
    return 0;
}
