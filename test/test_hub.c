/* test_hub.c - chapter 49: hashes against the vectors of FIPS 180-4, response heads cut anywhere, lists of files. */

static void hubt_check_hash(bool is_sha1, const char *text, int n_times, size_t piece, const char *want) {
    hub_hash hash = hub_hash_start(is_sha1);
    char hex[65];
    for (int i = 0; i < n_times; i++)
        for (size_t at = 0, n = strlen(text); at < n; at += piece) hub_hash_put(&hash, text + at, MIN(piece, n - at));
    hub_hash_end(&hash, hex);
    CHECK_MSG(strcmp(hex, want) == 0, "%s", hex);
}

static void test_hub_hashes(void) {
    static const char two_blocks[] = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    static const struct {
        const char *text;
        int n_times;
        const char *sha1, *sha256;
    } vectors[] = {
        {"", 1, "da39a3ee5e6b4b0d3255bfef95601890afd80709", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", 1, "a9993e364706816aba3e25717850c26c9cd0d89d", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {two_blocks, 1, "84983e441c3bd26ebaae4aa1f95129e5e54670f1", "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"a", 1000000, "34aa973cd4c4daa4f61eeb2bdbad27316534016f", "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
    };
    for (int i = 0; i < COUNT(vectors); i++)
        for (size_t piece = 1; piece < 70; piece += 3) {
            hubt_check_hash(true, vectors[i].text, vectors[i].n_times, piece, vectors[i].sha1);
            hubt_check_hash(false, vectors[i].text, vectors[i].n_times, piece, vectors[i].sha256);
            if (vectors[i].n_times > 1) break;
        }
    /* every length up to three blocks: in one piece as in pieces of 7 bytes */
    char text[200] = "", whole[65], parts[65];
    for (size_t n = 0; n < 192; text[n] = (char)('a' + n % 26), n++)
        for (int sha1 = 0; sha1 < 2; sha1++) {
            hub_hash one = hub_hash_start(sha1), many = hub_hash_start(sha1);
            hub_hash_put(&one, text, n);
            for (size_t at = 0; at < n; at += 7) hub_hash_put(&many, text + at, MIN((size_t)7, n - at));
            hub_hash_end(&one, whole), hub_hash_end(&many, parts);
            CHECK_MSG(strcmp(whole, parts) == 0, "%zu bytes", n);
        }
}

/* Heads that arrive in two pieces, cut anywhere. */
static void test_hub_heads(void) {
    static const char text[] = "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/2 302 \r\nX-Empty:\r\nlocation:  /a b \r\n\r\nbody";
    for (size_t cut = 0; cut < sizeof text; cut++) {
        hub_stream stream = {.pid = 0};
        buf_put(&stream.head, text, cut);
        bool done = hub_parse_head(&stream);
        CHECK(done == (cut >= sizeof text - 5));
        buf_put(&stream.head, text + cut, sizeof text - 1 - cut);
        CHECK(done || hub_parse_head(&stream));
        if (done) {
            buf_free(&stream.head);
            continue;
        }
        CHECK(stream.status == 302 && str_is(hub_header(&stream, "Location"), "/a b"));
        CHECK(hub_header(&stream, "X-Empty").n == 0 && hub_header(&stream, "Link").n == 0);
        CHECK(str_is(str_sub(buf_view(&stream.head), stream.n_taken, stream.head.n), "body"));
        buf_free(&stream.head);
    }
}

static void test_hub_redirects(void) {
    static const struct {
        const char *endpoint, *from, *location, *want; /* want NULL: refused */
    } cases[] = {
        {"https://hub", "https://hub/a/b", "/c/d", "https://hub/c/d"},
        {"https://hub", "https://cdn/a/b", "/c/d", "https://cdn/c/d"},
        {"https://hub", "https://hub/a", "https://cdn/x?y", "https://cdn/x?y"},
        {"https://hub", "https://hub/a", "http://cdn/x", NULL},
        {"http://hub", "http://hub/a", "http://cdn/x", "http://cdn/x"},
        {"https://hub", "https://hub/a", "//cdn/x", NULL},
        {"https://hub", "https://hub/a", "file:///etc/passwd", NULL},
        {"https://hub", "https://hub/a", "", NULL},
        {"https://hub", "https://hub/a", "https://cdn/x y", NULL},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        hub_access access = {.endpoint = cases[i].endpoint};
        hub_stream stream = {.access = &access};
        buf url = {0}, headers = {0};
        toka_err e;
        buf_c(&url, cases[i].from);
        buf_printf(&headers, "HTTP/1.1 302 Found\r\nLocation: %s\r\n", cases[i].location);
        stream.headers = buf_view(&headers);
        const int code = hub_follow(&stream, &url, &e);
        CHECK_MSG(cases[i].want ? !code && !strcmp(url.p, cases[i].want) : code == TOKA_E_IO, "%d: %s", i, url.p);
        buf_free(&url), buf_free(&headers);
    }
    CHECK(str_is(hub_origin(STR("https://hub.co:1/a")), "https://hub.co:1") && str_is(hub_origin(STR("http://h")), "http://h"));
    /* a host that begins like the hub's is another host */
    CHECK(!str_eq(hub_origin(STR("https://hub.evil.org/a")), hub_origin(STR("https://hub"))));
}

static void test_hub_paths(void) {
    static const char *const good[] = {"a", "config.json", "1_Pooling/config.json", "a..b", ".gitattributes", "a b"};
    static const char *const bad[] = {"", "/a", "a/", "..", "../a", "a/../b", "a//b", "./a", "a/.", "a\\b", "a\nb", "\x7f"};
    for (int i = 0; i < COUNT(good); i++) CHECK_MSG(hub_is_safe_path(str_c(good[i])), "%s", good[i]);
    for (int i = 0; i < COUNT(bad); i++) CHECK_MSG(!hub_is_safe_path(str_c(bad[i])), "%s", bad[i]);
    CHECK(hub_is_hex(STR("0a9f"), 4) && !hub_is_hex(STR("0a9F"), 4) && !hub_is_hex(STR("0a9f"), 5) && !hub_is_hex(STR("a\0b"), 3));
}

/* The list of files, also such as no hub sends. */
static void test_hub_lists(void) {
#define HEX40 "0123456789012345678901234567890123456789"
#define HEX64 HEX40 "012345678901234567890123"
    static const struct {
        const char *text;
        int n_files; /* -1: an error */
    } cases[] = {
        {"{\"sha\": \"" HEX40 "\", \"siblings\": []}", 0},
        {"{\"sha\": \"" HEX40 "\", \"siblings\": [{\"rfilename\": \"a\", \"size\": 3, \"blobId\": \"" HEX40 "\", \"lfs\": null}]}", 1},
        {"{\"sha\": \"" HEX40 "\", \"siblings\": [{\"rfilename\": \"a\", \"size\": 3, \"blobId\": \"" HEX40
         "\", \"lfs\": {\"sha256\": \"" HEX64 "\"}}]}", 1},
        {"{\"sha\": \"" HEX40 "\", \"siblings\": [{\"rfilename\": \"../a\", \"size\": 3, \"blobId\": \"" HEX40 "\"},"
         "{\"rfilename\": \"a\", \"size\": -3, \"blobId\": \"" HEX40 "\"}, {\"rfilename\": \"b\", \"size\": 1e300, \"blobId\": \"" HEX40 "\"},"
         "{\"rfilename\": \"a\", \"size\": 3, \"blobId\": \"../../x\"}, {\"rfilename\": 7}, 7, null, {}]}", 0},
        {"{\"sha\": \"main\", \"siblings\": []}", -1},
        {"{\"sha\": \"" HEX40 "\", \"siblings\": {}}", -1},
        {"{\"sha\": \"" HEX40 "\"", -1},
        {"[]", -1},
        {"", -1},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        hub_repo repo = {.id = "a/b", .access = {.endpoint = "http://h"}};
        toka_err e = {0};
        const int code = hub_parse_list(&repo, str_c(cases[i].text), &e);
        CHECK_MSG(cases[i].n_files < 0 ? code == TOKA_E_INPUT : !code && repo.n_all == cases[i].n_files, "%d: %s", i, e.msg);
        arena_free(&repo.memory);
    }
}

static void test_hub_sizes(void) {
    static const struct {
        double n_bytes;
        const char *want;
    } cases[] = {{0, "0 bytes"}, {999, "999 bytes"}, {1000, "1.0 KB"}, {9949, "9.9 KB"}, {9960, "10 KB"}, {999499, "999 KB"},
                 {999600, "1.0 MB"}, {1.5e9, "1.5 GB"}, {141e9, "141 GB"}, {2e15, "2000 TB"}};
    for (int i = 0; i < COUNT(cases); i++) {
        buf text = {0};
        hub_put_size(&text, cases[i].n_bytes);
        CHECK_MSG(str_is(buf_view(&text), cases[i].want), "%s", text.p);
        buf_free(&text);
    }
}

/* The error of a full disk says that nothing is lost. */
static void test_hub_full_disk(void) {
    hub_repo repo = {.folder = "cache/models--a--b"};
    hub_download download = {.repo = &repo};
    const hub_file file = {.path = "model.safetensors", .n_bytes = 9};
    hub_part part = {.download = &download, .file = &file, .fd = open("/dev/full", O_WRONLY)};
    toka_err e = {0};
    CHECK(hub_part_put(&part, "123456789", 9, &e) == TOKA_E_IO && part.disk_failed && !download.n_received);
    CHECK_MSG(!strcmp(e.msg, "cache/models--a--b: model.safetensors: No space left on device; once there is room, the same command continues"), "%s", e.msg);
    close(part.fd);
    part.fd = -1;
    CHECK(hub_part_put(&part, "1", 1, &e) == TOKA_E_IO && !strchr(e.msg, ';'));
}

/* A row of progress has fewer characters than the terminal has columns. */
static void test_hub_progress(void) {
    static const char *const model_ids[] = {"a/b", "tiny/apples", "meta-llama/Llama-3.2-1B-Instruct"};
    static const double rates[] = {0, 1e-9, 3, 2.5e6, 9e11};
    static const struct {
        int id, n_columns;
        const char *want;
    } cases[] = {{1, 80, "tiny/apples [=============              ]  50 % of 15 GB, 2.5 MB/s, 3000 s left"},
                 {2, 80, "meta-lla..-Instruct [=========          ]  50 % of 15 GB, 2.5 MB/s, 3000 s left"},
                 {1, 40, "[===    ]  50 %, 2.5 MB/s, 3000 s left"}, {1, 20, " 50 %, 2.5 MB/s, 30"}};
    buf out = {0};
    for (int n_columns = 9; n_columns < 200; n_columns++)
        for (int i = 0; i < COUNT(model_ids) * COUNT(rates) * 3; i++) {
            const int64_t n_total = i % 3 ? 15000000000 : 0, n_received = i % 3 == 1 ? 0 : n_total;
            buf_clear(&out);
            hub_put_progress(&out, model_ids[i / 3 % COUNT(model_ids)], n_received, n_total, rates[i / 3 / COUNT(model_ids)], n_columns);
            CHECK_MSG((int)out.n < n_columns && strstr(out.p, n_received == n_total ? "100 %" : "  0 %"), "%d: '%s'", n_columns, out.p);
        }
    for (int i = 0; i < COUNT(cases); i++) {
        buf_clear(&out);
        hub_put_progress(&out, model_ids[cases[i].id], 7500000000, 15000000000, 2.5e6, cases[i].n_columns);
        CHECK_MSG(!strcmp(out.p, cases[i].want), "'%s'", out.p);
    }
    buf_free(&out);
}

static const struct test hub_tests[] = {
    {"hub: hashes", test_hub_hashes}, {"hub: heads", test_hub_heads}, {"hub: redirects", test_hub_redirects},
    {"hub: paths", test_hub_paths}, {"hub: lists of files", test_hub_lists}, {"hub: sizes", test_hub_sizes},
    {"hub: a full disk", test_hub_full_disk},
    {"hub: progress", test_hub_progress}, {NULL, NULL}};
