/* test_files.c - files and batches: the form parser on bytes in any pieces, ids and times, routes
 * of a store in a temporary folder, the state after a crash. test_files.py runs whole batches. */

/* ---- Forms ---- */

typedef struct files_test_parts { /* the result: "name=filename:data|" for each part */
    buf out;
    bool whole, bad;
} files_test_parts;

/* Feeds body in pieces of `step` bytes; 0: of random sizes. */
static files_test_parts files_test_parse(const char *type, str body, size_t step, uint64_t *seed) {
    files_test_parts p = {0};
    files_form f;
    int idle = 0;
    if (!files_form_init(&f, str_c(type))) {
        p.bad = true;
        return p;
    }
    while (body.n && !p.bad) {
        size_t room = step ? step : 1 + (size_t)(rnd(seed) % 40), n = MIN(body.n, room), used;
        char *copy = mem_alloc(n); /* of the exact size, so that a read past the end is noticed */
        memcpy(copy, body.p, n);
        for (str piece = {copy, n}; piece.n && !p.bad; piece = str_sub(piece, used, piece.n)) {
            str data;
            switch (files_form_next(&f, piece, &used, &data)) {
            case FILES_FORM_PART:
                buf_printf(&p.out, "%s=%s:", buf_view(&f.name).p, f.filename.n ? buf_view(&f.filename).p : "(none)");
                break;
            case FILES_FORM_DATA: buf_str(&p.out, data); break;
            case FILES_FORM_PART_END: buf_char(&p.out, '|'); break;
            case FILES_FORM_END: p.whole = true; break;
            case FILES_FORM_BAD: p.bad = true; break;
            case FILES_FORM_MORE: break;
            }
            idle = used || p.bad ? 0 : idle + 1;
            /* it may produce output without consuming input, but not twice in a row */
            CHECK(used <= piece.n && idle < 2);
        }
        free(copy);
        body = str_sub(body, n, body.n);
    }
    files_form_free(&f);
    return p;
}

static void files_test_expect(const char *type, str body, const char *expected) {
    uint64_t seed = 7;
    for (size_t step = 0; step < 70; step = step < 5 ? step + 1 : step * 2 + 1)
        for (int repeats = step ? 1 : 50; repeats > 0; repeats--) {
            files_test_parts p = files_test_parse(type, body, step, &seed);
            CHECK_MSG(!p.bad && p.whole && str_is(buf_view(&p.out), expected), "step %zu: '%s', expected '%s'", step,
                      buf_view(&p.out).p, expected);
            buf_free(&p.out);
        }
}

static void files_test_form(void) {
    const char *type = "multipart/form-data; boundary=xYz";
    files_test_expect(
        type,
        STR("--xYz\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--xYz\r\nContent-Disposition: form-data; "
            "name=\"file\"; filename=\"a.jsonl\"\r\nContent-Type: application/jsonl\r\n\r\n{}\n{}\n\r\n--xYz--\r\n"),
        "purpose=(none):batch|file=a.jsonl:{}\n{}\n|");
    /* text that looks like the boundary but is not; empty parts; text before and after */
    files_test_expect(
        type,
        STR("before\r\n--xY\r\n--xYz\r\ncontent-disposition:form-data;name=a\r\n\r\n\r\r\n\r\n-\r\n--\r\n--x\r\n--xY\r\n\n--xYz\r"
            "\r\n--xYz\r\nX: y\r\nContent-Disposition: form-data; filename=\"\"; name=\"b\"\r\n\r\n\r\n--xYz-- "
            "after\r\n--xYz\r\n"),
        "a=(none):\r\r\n\r\n-\r\n--\r\n--x\r\n--xY\r\n\n--xYz\r|b=(none):|");
    files_test_expect(
        "Multipart/Form-Data; charset=utf-8; boundary=\"a b;c\"; more=1",
        STR("--a b;c \t\r\nContent-Disposition: form-data; name=\"q\\\"\\\\;\"; filename=\"../x;y\"\r\n\r\n1\r\n--a b;c--"),
        "q\"\\;=../x;y:1|");
}

static void files_test_form_bad(void) {
    static const char *const types[] = {
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=\"\"",
        "multipart/form-data; notboundary=x",
        "multipart/form-data; boundary=\"a\r\nb\"",
        "multipart/form-data; boundary=12345678901234567890123456789012345678901234567890123456789012345678901"};
    static const char *const bodies[] = {
        "--b\r\n\r\nno headers\r\n--b--", "--b\r\nContent-Disposition: form-data\r\n\r\nno name\r\n--b--",
        "--bad\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n--b--", "--b-x", "--b\rx\r\n"};
    uint64_t seed = 1;
    buf head = {0};
    for (int i = 0; i < COUNT(types); i++) CHECK(files_test_parse(types[i], STR(""), 0, &seed).bad);
    for (int i = 0; i < COUNT(bodies); i++)
        for (size_t step = 1; step < 60; step += 7) {
            files_test_parts p = files_test_parse("multipart/form-data; boundary=b", str_c(bodies[i]), step, &seed);
            CHECK_MSG(p.bad, "body %d", i);
            buf_free(&p.out);
        }
    buf_c(&head, "--b\r\n");
    while (head.n < FILES_FORM_HEAD_BYTES + 100) buf_c(&head, "X-Long: header\r\n");
    files_test_parts p = files_test_parse("multipart/form-data; boundary=b", buf_view(&head), 0, &seed);
    CHECK(p.bad);
    buf_free(&p.out), buf_free(&head);
    p = files_test_parse("multipart/form-data; boundary=b", STR("--b\r\nContent-Disposition: form-data; name=a\r\n\r\ndata\r\n--b"), 0,
                 &seed);
    CHECK(!p.bad && !p.whole); /* ends too early */
    buf_free(&p.out);
}

static void files_test_form_random(void) {
    uint64_t seed = 99;
    for (int i = 0; i < 300; i++) { /* data made of the bytes of the boundary */
        buf data = {0}, body = {0}, expected = {0};
        for (int k = (int)(rnd(&seed) % 300); k > 0; k--) buf_char(&data, "\r\n-bo\r"[rnd(&seed) % 6]);
        if (str_find(buf_view(&data), STR("\r\n--boo"), 0) < 0) {
            buf_c(&body, "--boo\r\nContent-Disposition: form-data; name=d; filename=f\r\n\r\n");
            buf_str(&body, buf_view(&data)), buf_c(&body, "\r\n--boo--\r\n");
            buf_c(&expected, "d=f:"), buf_str(&expected, buf_view(&data)), buf_char(&expected, '|');
            files_test_parts p = files_test_parse("multipart/form-data; boundary=boo", buf_view(&body), 0, &seed);
            CHECK(!p.bad && p.whole && str_eq(buf_view(&p.out), buf_view(&expected)));
            buf_free(&p.out);
        }
        buf_free(&data), buf_free(&body), buf_free(&expected);
    }
}

/* ---- Ids and times ---- */

static void files_test_ids(void) {
    files_store s = {0};
    files_id id, back, before = {{0}};
    for (int i = 0; i < 1000; i++) {
        id = files_new_id(&s, "file-");
        CHECK(files_read_id(str_c(id.text), "file-", &back) && !strcmp(back.text, id.text) && strcmp(before.text, id.text) < 0);
        before = id;
    }
    static const char *const bad[] = {"",
                                      "file-",
                                      "file-0123456789abcdef0123456789abcde",
                                      "file-0123456789abcdef0123456789abcdef0",
                                      "file-0123456789ABCDEF0123456789abcdef",
                                      "file-0123456789abcdef0123456789abcdeg",
                                      "batch_0123456789abcdef0123456789abcdef",
                                      "file_0123456789abcdef0123456789abcdef",
                                      "file-../../../../etc/passwd/////////",
                                      "file-0123456789abcdef0123456789abcde/"};
    for (int i = 0; i < COUNT(bad); i++) CHECK_MSG(!files_read_id(str_c(bad[i]), "file-", &id) && !*id.text, "%s", bad[i]);
    CHECK(!files_read_id((str){"file-0123456789abcdef0123456789abcde\0", 37}, "file-", &id));
}

static void files_test_window(void) {
    const struct { const char *text; int64_t seconds;
    } cases[] = {{"24h", 86400}, {"1s", 1},    {"90m", 5400}, {"30d", 2592000},  {"31d", -1},
                 {"0h", -1},     {"", -1},     {"h", -1},     {"24", -1},        {"-1h", -1},
                 {"1.5h", -1},   {"24hh", -1}, {" 24h", -1},  {"99999999d", -1}, {"999999999999999999h", -1}};
    for (int i = 0; i < COUNT(cases); i++)
        CHECK_MSG(files_read_window(str_c(cases[i].text)) == cases[i].seconds, "%s", cases[i].text);
}

/* ---- A store on a folder ---- */

typedef struct files_tester { /* a store without an engine: its batches end before they run */
    char dir[64];
    files_store *s;
    http_reply reply; /* of the last call */
    arena a;
} files_tester;

static const char *const files_test_names[] = {"m"};
static const api_config files_test_model = {.names = files_test_names, .n_names = 1};

static void files_test_open(files_tester *f) {
    toka_err e;
    files_options o = {.folder = f->dir, .model = &files_test_model};
    CHECK_MSG(!files_open(&f->s, &o, &e), "%s", e.msg);
}
static void files_test_init(files_tester *f) {
    *f = (files_tester){.dir = "/tmp/toka-test-XXXXXX"};
    CHECK(mkdtemp(f->dir) != NULL);
    files_test_open(f);
}
static void files_test_clear(files_tester *f) {
    if (f->reply.fd > 0) close(f->reply.fd);
    buf_free(&f->reply.body), buf_free(&f->reply.headers);
    f->reply = (http_reply){0};
}
static void files_test_free(files_tester *f) {
    char command[128];
    files_test_clear(f), arena_free(&f->a), files_close(f->s);
    snprintf(command, sizeof command, "rm -r %s", f->dir);
    CHECK(!system(command));
}

/* Makes one call. Returns the answer as JSON; its status is in f->reply. */
static const json *files_test_call(files_tester *f, enum http_method method, const char *target, const char *body) {
    toka_err e;
    const char *mark = strchr(target, '?');
    http_request r = {.method = method,
                      .path = {target, mark ? (size_t)(mark - target) : strlen(target)},
                      .query = str_c(mark ? mark + 1 : "")};
    r.headers[r.n_headers++] = (http_header){STR("Content-Type"), STR("multipart/form-data; boundary=b")};
    files_test_clear(f);
    files_handle(f->s, &r, str_c(body), &f->reply);
    if (f->reply.fd_bytes || f->reply.type) return NULL;
    const json *root = json_parse(&f->a, arena_str(&f->a, buf_view(&f->reply.body)), json_trusted, &e);
    CHECK_MSG(root != NULL, "%s: %s", target, e.msg);
    CHECK((f->reply.status == 200) == !json_get(root, "error"));
    return root;
}

/* Returns the id; NULL: refused. */
static const char *files_test_upload(files_tester *f, const char *purpose, const char *contents) {
    buf body = {0};
    buf_printf(&body,
               "--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\n%s\r\n--b\r\nContent-Disposition: form-data; "
               "name=\"file\"; "
               "filename=\"dir/in\xC3\xA4 \\\"x\\\".jsonl\"\r\n\r\n%s\r\n--b--\r\n",
               purpose, contents);
    const json *root = files_test_call(f, HTTP_POST, "/v1/files", body.p);
    buf_free(&body);
    return f->reply.status == 200 ? arena_cstr(&f->a, json_str(json_get(root, "id"))) : NULL;
}

/* fmt with id in place of its %s. */
static const char *files_test_path(files_tester *f, const char *fmt, const char *id) {
    buf b = {0};
    const char *mark = strstr(fmt, "%s");
    buf_put(&b, fmt, mark ? (size_t)(mark - fmt) : strlen(fmt));
    if (mark) buf_c(&b, id), buf_c(&b, mark + 2);
    const char *copy = arena_cstr(&f->a, buf_view(&b));
    buf_free(&b);
    return copy;
}
static bool files_test_is(const json *root, const char *name, const char *text) { return str_is(json_str(json_get(root, name)), text); }

/* Waits until the batch has this status. Every batch here reaches its end, however long it
 * takes. */
static const json *files_test_await(files_tester *f, const char *id, const char *status) {
    const json *root;
    while (!files_test_is(root = files_test_call(f, HTTP_GET, files_test_path(f, "/v1/batches/%s", id), ""), "status",
        status)) usleep(2000);
    return root;
}

static void files_test_write(const files_tester *f, const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", f->dir, name);
    FILE *out = fopen(path, "w");
    CHECK(out && fputs(text, out) >= 0 && !fclose(out));
}

static void files_test_files(void) {
    files_tester f;
    files_test_init(&f);
    const char *id = files_test_upload(&f, "batch", "hello");
    CHECK(id != NULL);
    for (int round = 0; round < 2 && id; round++) { /* the second time after a restart */
        const json *root = files_test_call(&f, HTTP_GET, files_test_path(&f, "/v1/files/%s", id), "");
        CHECK(files_test_is(root, "id", id) && files_test_is(root, "object", "file") && files_test_is(root, "purpose", "batch") &&
              files_test_is(root, "status", "processed"));
        CHECK(files_test_is(root, "filename", "in\xC3\xA4 \"x\".jsonl") && json_int(json_get(root, "bytes"), 0) == 5);
        CHECK(json_int(json_get(root, "created_at"), 0) > 1000000000);
        char got[8] = {0};
        files_test_call(&f, HTTP_GET, files_test_path(&f, "/v1/files/%s/content", id), "");
        CHECK(f.reply.status == 200 && f.reply.fd_bytes == 5 && read(f.reply.fd, got, 8) == 5 && !strcmp(got, "hello"));
        CHECK(str_find(buf_view(&f.reply.headers), STR("filename=\"in____x_.jsonl\""), 0) >= 0);
        files_close(f.s), files_test_open(&f);
    }
    CHECK(!files_test_upload(&f, "batch", "") && f.reply.status == 400);
    CHECK(!files_test_upload(&f, "nonsense", "x") && f.reply.status == 400);
    /* only the server makes files of this purpose */
    CHECK(!files_test_upload(&f, "batch_output", "x") && f.reply.status == 400);
    CHECK(files_test_is(files_test_call(&f, HTTP_DELETE, files_test_path(&f, "/v1/files/%s", id), ""), "id", id));
    files_test_call(&f, HTTP_GET, files_test_path(&f, "/v1/files/%s", id), "");
    CHECK(f.reply.status == 404);
    id = files_test_upload(&f, "batch", "lost with the disk's last second");
    files_close(f.s), files_test_write(&f, id, ""), files_test_open(&f);
    files_test_call(&f, HTTP_GET, files_test_path(&f, "/v1/files/%s/content", id), "");
    /* a server that sends this reply must not close a file */
    CHECK(f.reply.status == 200 && !f.reply.body.n && !f.reply.fd_bytes && !f.reply.fd);
    files_test_free(&f);
}

static void files_test_metadata(void) {
    buf b = {0};
    toka_err e;
    /* ASCII, or two bytes a character; a name or a value; of the maximum length, or one more */
    for (int i = 0; i < 8; i++) {
        const int chars = (i & 2 ? 64 : 512) + (i & 1);
        const char *character = i & 4 ? "\xC3\xA4" : "a";
        arena a = {0};
        buf_clear(&b), buf_c(&b, i & 2 ? "{\"" : "{\"k\":\"");
        for (int k = 0; k < chars; k++) buf_c(&b, character);
        buf_c(&b, i & 2 ? "\":\"v\"}" : "\"}");
        CHECK_MSG(files_check_metadata(json_parse(&a, buf_view(&b), json_trusted, &e)) == !(i & 1), "case %d", i);
        arena_free(&a);
    }
    buf_free(&b);
}

static void files_test_paging(void) {
    files_tester f;
    const char *id[25];
    files_test_init(&f);
    for (int i = 0; i < 25; i++) id[i] = files_test_upload(&f, i % 2 ? "batch" : "user_data", "x");
    const json *root = files_test_call(&f, HTTP_GET, "/v1/files", "");
    CHECK(json_get(root, "data")->n == 25 && files_test_is(root, "first_id", id[24]) && files_test_is(root, "last_id", id[0]) &&
          !json_is_true(json_get(root, "has_more")));
    int seen = 25;
    for (buf target = {0}; seen > 0;) { /* newest first, ten on a page */
        buf_clear(&target);
        buf_printf(&target, "/v1/files?limit=10%s%s", seen < 25 ? "&after=" : "", seen < 25 ? id[seen] : "");
        root = files_test_call(&f, HTTP_GET, target.p, "");
        int n = 0;
        JSON_EACH(it, json_get(root, "data")) {
            CHECK(files_test_is(it, "id", id[--seen]));
            n++;
        }
        CHECK(n == (seen ? 10 : 5) && json_is_true(json_get(root, "has_more")) == (seen > 0));
        if (!seen || !n) buf_free(&target);
        if (!n) break;
    }
    root = files_test_call(&f, HTTP_GET, files_test_path(&f, "/v1/files?order=asc&purpose=batch&limit=3&after=%s", id[2]), "");
    CHECK(json_get(root, "data")->n == 3 && files_test_is(root, "first_id", id[3]) && files_test_is(root, "last_id", id[7]) &&
          json_is_true(json_get(root, "has_more")));
    root = files_test_call(&f, HTTP_GET, "/v1/batches?limit=1000", "");
    CHECK(json_get(root, "data")->n == 0 && json_is(json_get(root, "first_id"), JSON_NULL) &&
          json_is(json_get(root, "has_more"), JSON_FALSE));
    static const char *const bad[] = {
        "/v1/files?limit=0",  "/v1/files?limit=x",   "/v1/files?limit=",
        "/v1/files?limit=-5", "/v1/files?after=x",   "/v1/files?after=file-00000000000000000000000000000000",
        "/v1/files?order=up", "/v1/batches?limit=0", "/v1/batches?after=file-00000000000000000000000000000000"};
    for (int i = 0; i < COUNT(bad); i++)
        CHECK_MSG((files_test_call(&f, HTTP_GET, bad[i], ""), f.reply.status == 400), "%s: %d", bad[i], f.reply.status);
    files_test_free(&f);
}

static void files_test_routes(void) {
    files_tester f;
    files_test_init(&f);
    const struct { enum http_method method; const char *target; int status;
    } cases[] = {{HTTP_DELETE, "/v1/files", 405},
                 {HTTP_OTHER, "/v1/batches", 405},
                 {HTTP_GET, "/v1/files/", 404},
                 {HTTP_GET, "/v1/filesystem", 404},
                 {HTTP_GET, "/v1/files/../../etc/passwd", 404},
                 {HTTP_GET, "/v1/files/lock", 404},
                 {HTTP_GET, "/v1/files/lock/content", 404},
                 {HTTP_GET, "/v1/batches/batch_00000000000000000000000000000000", 404},
                 {HTTP_GET, "/v1/batches/x/y/z", 404},
                 {HTTP_POST, "/v1/batches/batch_00000000000000000000000000000000/cancel", 404}};
    for (int i = 0; i < COUNT(cases); i++) {
        files_test_call(&f, cases[i].method, cases[i].target, "");
        CHECK_MSG(f.reply.status == cases[i].status, "%s: %d", cases[i].target, f.reply.status);
        CHECK((f.reply.status == 405) == (f.reply.headers.n > 0));
    }
    const char *id = files_test_upload(&f, "batch", "x"), *other = files_test_upload(&f, "user_data", "x");
    static const char *const bodies[] = {
        "",
        "[]",
        "{}",
        "{\"input_file_id\":\"%s\"}",
        "{\"input_file_id\":\"%s\",\"endpoint\":\"/v1/images\",\"completion_window\":\"24h\"}",
        "{\"input_file_id\":\"%s\",\"endpoint\":\"/v1/completions\",\"completion_window\":\"soon\"}",
        "{\"input_file_id\":\"%s\",\"endpoint\":\"/v1/completions\",\"completion_window\":\"24h\",\"metadata\":[1]}",
        "{\"input_file_id\":\"%s\",\"endpoint\":\"/v1/completions\",\"completion_window\":\"24h\",\"metadata\":{\"a\":1}}",
        "{\"input_file_id\":\"%s\",\"endpoint\":\"/v1/completions\",\"completion_window\":\"24h\",\"output_expires_after\":{}}"};
    for (int i = 0; i < COUNT(bodies); i++)
        CHECK_MSG((files_test_call(&f, HTTP_POST, "/v1/batches", files_test_path(&f, bodies[i], id)),
            f.reply.status == 400), "%s", bodies[i]);
    files_test_call(&f, HTTP_POST, "/v1/batches",
             files_test_path(&f, "{\"input_file_id\":\"%s\",\"endpoint\":\"/v1/completions\",\"completion_window\":\"24h\"}", other));
    CHECK(f.reply.status == 400); /* its purpose is not batch */
    buf long_body = {0};
    for (int i = 0; i <= FILES_BODY_BYTES; i++) buf_char(&long_body, ' ');
    files_test_call(&f, HTTP_POST, "/v1/batches", long_body.p);
    CHECK(f.reply.status == 413);
    buf_free(&long_body);
    files_test_free(&f);
}

/* If no descriptor is free for the input, the batch waits and tries again later. */
static void files_test_no_descriptors(void) {
    files_tester f;
    struct rlimit limit, none;
    bool waits = false;
    files_test_init(&f);
    const char *file = files_test_upload(&f, "batch", "{");
    const char *body =
        files_test_path(&f, "{\"input_file_id\":\"%s\",\"endpoint\":\"/v1/completions\",\"completion_window\":\"1h\"}", file);
    CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
    none = limit, none.rlim_cur = 0;
    pthread_mutex_lock(&f.s->lock); /* before the worker looks at the batch */
    files_test_clear(&f), files_create_batch(f.s, str_c(body), &f.reply);
    const files_batch *b = f.s->batches.entries[0];
    const char *id = files_test_path(&f, "%s", b->id.text);
    CHECK(!setrlimit(RLIMIT_NOFILE, &none));
    while (!waits && b->status == FILES_VALIDATING) {
        pthread_mutex_unlock(&f.s->lock), usleep(2000), pthread_mutex_lock(&f.s->lock);
        waits = b->warned_waits;
    }
    CHECK(waits && !setrlimit(RLIMIT_NOFILE, &limit));
    pthread_mutex_unlock(&f.s->lock);
    const json *errors = json_get(json_get(files_test_await(&f, id, "failed"), "errors"), "data");
    CHECK(errors->n == 1 && files_test_is(json_at(errors, 0), "code", "invalid_json_line"));
    files_test_free(&f);
}

/* A batch whose input is not valid: every error is reported with its line. */
static void files_test_failed_batch(void) {
    files_tester f;
    files_test_init(&f);
    const char *good = "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{}}\n";
    buf in = {0};
    buf_printf(&in,
               "%s\n%s{\n[]\n{\"custom_id\":\"b\",\"method\":\"GET\"}\n{\"custom_id\":\"c\",\"method\":\"POST\",\"url\":\"/v1/"
               "chat/completions\"}\n"
               "{\"custom_id\":\"d\",\"method\":\"POST\",\"url\":\"/v1/completions\"}\n{\"custom_id\":7}",
               good, good);
    const char *file = files_test_upload(&f, "batch", in.p), *blank = files_test_upload(&f, "batch", "\n \n");
    buf_free(&in);
    const json *root = files_test_call(
        &f, HTTP_POST, "/v1/batches",
        files_test_path(
            &f,
            "{\"input_file_id\":\"%s\",\"endpoint\":\"/v1/completions\",\"completion_window\":\"1h\",\"metadata\":{\"k\":\"v\"}}",
            file));
    const char *id = arena_cstr(&f.a, json_str(json_get(root, "id")));
    CHECK(files_test_is(root, "status", "validating") && files_test_is(json_get(root, "metadata"), "k", "v") &&
          files_test_is(root, "input_file_id", file));
    CHECK(json_int(json_get(root, "expires_at"), 0) == json_int(json_get(root, "created_at"), 0) + 3600);
    root = files_test_await(&f, id, "failed");
    static const struct {
        const char *code;
        int line;
    } expected[] = {
        {"duplicate_custom_id", 3}, {"invalid_json_line", 4},          {"invalid_json_line", 5},         {"invalid_method", 6},
        {"invalid_url", 7},         {"missing_required_parameter", 8}, {"missing_required_parameter", 9}};
    for (int round = 0; round < 2; round++) { /* the second time after a restart */
        const json *errors = json_get(json_get(root, "errors"), "data");
        CHECK(files_test_is(root, "status", "failed") && json_is(errors, JSON_ARRAY) && errors->n == COUNT(expected) &&
              json_int(json_get(root, "failed_at"), 0) > 0);
        for (size_t i = 0; i < COUNT(expected); i++)
            CHECK(files_test_is(json_at(errors, i), "code", expected[i].code) &&
                  json_int(json_get(json_at(errors, i), "line"), 0) == expected[i].line);
        files_close(f.s), files_test_open(&f);
        root = files_test_call(&f, HTTP_GET, files_test_path(&f, "/v1/batches/%s", id), "");
    }
    files_test_call(&f, HTTP_POST, files_test_path(&f, "/v1/batches/%s/cancel", id), "");
    CHECK(f.reply.status == 409);
    root =
        files_test_call(&f, HTTP_POST, "/v1/batches",
                 files_test_path(&f, "{\"input_file_id\":\"%s\",\"endpoint\":\"/v1/completions\",\"completion_window\":\"1h\"}", blank));
    const char *empty = arena_cstr(&f.a, json_str(json_get(root, "id")));
    root = files_test_await(&f, empty, "failed");
    CHECK(files_test_is(json_at(json_get(json_get(root, "errors"), "data"), 0), "code", "empty_batch"));
    root = files_test_call(&f, HTTP_GET, "/v1/batches?limit=1", "");
    CHECK(files_test_is(root, "first_id", empty) && json_is_true(json_get(root, "has_more")));
    root = files_test_call(&f, HTTP_GET, files_test_path(&f, "/v1/batches?after=%s", empty), "");
    CHECK(files_test_is(root, "first_id", id) && json_get(root, "data")->n == 1);
    files_test_free(&f);
}

static bool files_test_exists(const files_tester *f, const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", f->dir, name);
    return access(path, F_OK) == 0;
}

/* What a crash left is deleted or continued. Other files stay. */
static void files_test_leftovers(void) {
    files_tester f;
    toka_err e;
    files_store *second = NULL;
    files_test_init(&f);
    const char *id = files_test_upload(&f, "batch", "x");
    files_options o = {.folder = f.dir, .model = &files_test_model};
    /* only one server may use the folder */
    CHECK(files_open(&second, &o, &e) == TOKA_E_USE && strstr(e.msg, "in use"));
    files_close(f.s);
    files_test_write(&f, "file-00000000000000010000000000000000.part", "half an upload");
    files_test_write(&f, "file-00000000000000020000000000000000", "contents without a record");
    /* a record without contents */
    files_test_write(&f, "file-00000000000000030000000000000000.json", "{\"purpose\":\"batch\"}");
    files_test_write(&f, "file-00000000000000040000000000000000.json", "{\"purp");
    files_test_write(&f, "notes.txt", "somebody's"), files_test_write(&f, "download.part", "somebody's"),
        files_test_write(&f, "x.json.part", "too");
    files_test_write(
        /* killed in the middle of a line, while the batch was being cancelled */
        &f, "batch_00000000000000050000000000000000.json",
        "{\"id\":\"x\",\"endpoint\":\"/v1/"
        "completions\",\"model\":\"m\",\"input_file_id\":\"file-00000000000000060000000000000000\",\"status\":\"cancelling\","
        "\"completion_window\":\"24h\",\"created_at\":5,\"expires_at\":9999999999,\"request_counts\":{\"total\":3,\"completed\":"
        "1,\"failed\":0},"
        "\"toka\":{\"output\":\"file-00000000000000070000000000000000\",\"errors\":\"file-00000000000000080000000000000000\"}}");
    files_test_write(&f, "file-00000000000000070000000000000000", "{\"whole\":1}\n{\"to");
    files_test_write(&f, "file-00000000000000080000000000000000", "");
    files_test_write(&f, "file-00000000000000040000000000000000", "of a record that cannot be read");
    files_test_open(&f);
    const json *root = files_test_await(&f, "batch_00000000000000050000000000000000", "cancelled");
    CHECK(files_test_is(root, "output_file_id", "file-00000000000000070000000000000000"));
    CHECK(json_is(json_get(root, "error_file_id"), JSON_NULL) && json_int(json_get(root, "created_at"), 0) == 5);
    files_test_call(&f, HTTP_GET, "/v1/files/file-00000000000000070000000000000000/content", "");
    CHECK(f.reply.fd_bytes == 12);
    root = files_test_call(&f, HTTP_GET, "/v1/files", "");
    /* ids of 1970 are the oldest */
    CHECK(json_get(root, "data")->n == 2 && files_test_is(root, "first_id", id));
    CHECK(!files_test_exists(&f, "file-00000000000000010000000000000000.part") &&
          !files_test_exists(&f, "file-00000000000000020000000000000000"));
    CHECK(!files_test_exists(&f, "file-00000000000000080000000000000000") && files_test_exists(&f, "notes.txt") &&
          files_test_exists(&f, "download.part") && files_test_exists(&f, "x.json.part"));
    CHECK(files_test_exists(&f, "file-00000000000000040000000000000000"));
    files_close(f.s);
    /* only this record says which batch the results belong to */
    files_test_write(&f, "batch_00000000000000090000000000000000.json", "{\"id\":");
    files_test_write(&f, "file-000000000000000a0000000000000000", "{\"whole\":1}\n");
    /* made by a clock that was far ahead: later times continue from it */
    files_test_write(&f, "file-7fffffffffffffff0000000000000000", "x");
    files_test_write(&f, "file-7fffffffffffffff0000000000000000.json", "{\"purpose\":\"batch\",\"filename\":\"late\"}");
    files_test_open(&f);
    CHECK(files_test_exists(&f, "file-000000000000000a0000000000000000"));
    for (int i = 0; i < 2; i++) CHECK(strcmp(id = files_test_upload(&f, "batch", "x"), "file-2") > 0 && strcmp(id, "file-8") < 0);
    files_test_free(&f);
}

/* A run is stopped in the middle of a line, by Ctrl-C or by a failure elsewhere. The beginning of a
 * line is not a line. An incomplete line at the end of the input file is one. */
static void files_test_half_line(void) {
    toka_err e;
    str line;
    int ends[2];
    CHECK(!pipe(ends));
    for (int stop = 0; stop < 3; stop++) {
        atomic_int interrupted = stop == 1;
        atomic_bool stopped = stop == 2;
        run_input in;
        run_input_init(&in, ends[0], "pipe", &interrupted);
        in.stopped = &stopped;
        if (!stop) CHECK(write(ends[1], "b", 1) == 1 && !close(ends[1]));
        memcpy(in.chunk, "whole\nhalf", 10), in.n_bytes = 10;
        CHECK(run_next_line(&in, &line, NULL, &e) == 1 && str_is(line, "whole"));
        CHECK(run_next_line(&in, &line, NULL, &e) == !stop && (stop || str_is(line, "halfb")));
        run_input_free(&in);
    }
    close(ends[0]);
}

/* The batch has results, but the record of their file cannot be written. The results must stay,
 * whatever is done next. */
static void files_test_unpublished(void) {
    files_tester f;
    char part[64];
    files_test_init(&f);
    files_batch b = {.status = FILES_FINALIZING, .model = "m"};
    pthread_mutex_lock(&f.s->lock);
    b.id = files_new_id(f.s, "batch_"), b.input = files_new_id(f.s, "file-");
    b.output = files_new_id(f.s, "file-"), b.errors_file = files_new_id(f.s, "file-");
    CHECK(!files_save_batch(f.s, &b));
    files_test_write(&f, b.output.text, "result\n");
    snprintf(part, sizeof part, "%s.json.part", b.output.text);
    CHECK(!mkdirat(f.s->dir_fd, part, 0700));
    files_finish_batch(f.s, &b, FILES_COMPLETED);
    /* as long as this server runs */
    CHECK(b.status == FILES_COMPLETED && b.has_out && !b.has_err && files_find(&f.s->files, &b.output));
    CHECK(!unlinkat(f.s->dir_fd, part, AT_REMOVEDIR));
    pthread_mutex_unlock(&f.s->lock);
    for (int round = 0; round < 2; round++) {
        files_close(f.s), files_test_open(&f);
        files_test_await(&f, b.id.text, "completed");
        const json *root = files_test_call(&f, HTTP_GET, files_test_path(&f, "/v1/files/%s", b.output.text), "");
        CHECK(f.reply.status == 200 && json_int(json_get(root, "bytes"), 0) == 7);
    }
    b.output = files_new_id(f.s, "file-");
    /* stands for a disk that fails: fsync fails on it */
    CHECK(!mkfifoat(f.s->dir_fd, b.output.text, 0600));
    CHECK(!files_list_output(f.s, &b, &b.output, "output", &b.has_out) && files_test_exists(&f, b.output.text));
    files_test_free(&f);
}

/* What the system cannot do: the status says whether the client or the server must act, and there
 * is no path in the message. */
static void files_test_cannot(void) {
    static const struct {
        int why, status;
    } cases[] = {{ENOSPC, 507}, {EDQUOT, 507}, {EFBIG, 507}, {EROFS, 507}, {EACCES, 507}, {EPERM, 507},
                 {EMFILE, 503}, {ENFILE, 503}, {ENOMEM, 503}, {EIO, 500},   {ENOENT, 500}};
    for (int i = 0; i < COUNT(cases); i++) {
        http_reply reply = {0};
        files_system_error(&reply, cases[i].why);
        CHECK_MSG(reply.status == cases[i].status && strstr(reply.body.p, strerror(cases[i].why)),
                  "%s: %d", strerror(cases[i].why), reply.status);
        CHECK((reply.headers.n > 0) == (reply.status == 503));
        buf_free(&reply.body), buf_free(&reply.headers);
    }
}

/* A folder that cannot be made, or that is lost while the server runs: clients do not learn its
 * path. */
static void files_test_no_folder(void) {
    files_tester f;
    files_test_init(&f);
    char path[256];
    toka_err e;
    snprintf(path, sizeof path, "%s/file", f.dir);
    files_test_write(&f, "file", "x");
    setenv("XDG_DATA_HOME", path, 1);
    files_store *s = NULL;
    http_reply reply = {0};
    http_request request = {.method = HTTP_POST, .path = STR("/v1/batches")};
    files_options o = {.model = &files_test_model};
    CHECK(!files_open(&s, &o, &e));
    for (int round = 0; round < 2; round++) { /* both calls need the folder */
        files_handle(s, &request, STR("{}"), &reply);
        CHECK(reply.status == 500 && strstr(reply.body.p, "Not a directory") && !strstr(reply.body.p, f.dir));
        buf_free(&reply.body), buf_free(&reply.headers), reply = (http_reply){0};
    }
    files_close(s);
    unsetenv("XDG_DATA_HOME");
    pthread_mutex_lock(&f.s->lock);
    int dir = f.s->dir_fd;
    f.s->dir_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    pthread_mutex_unlock(&f.s->lock);
    CHECK(!files_upload_open(f.s, STR("multipart/form-data; boundary=b"), &reply));
    CHECK(reply.status == 500 && !strstr(reply.body.p, f.dir));
    buf_free(&reply.body);
    pthread_mutex_lock(&f.s->lock);
    close(f.s->dir_fd), f.s->dir_fd = dir;
    pthread_mutex_unlock(&f.s->lock);
    files_test_free(&f);
}

static void files_test_torn(void) {
    static const char *const texts[] = {"", "a\n", "a", "a\nb", "a\n\nb\nccc", "\n"};
    static const int64_t left[] = {0, 2, 0, 2, 5, 1};
    char path[] = "/tmp/toka-test-XXXXXX";
    int fd = mkstemp(path);
    for (int i = 0; i < COUNT(texts); i++) {
        CHECK(!ftruncate(fd, 0) && pwrite(fd, texts[i], strlen(texts[i]), 0) == (ssize_t)strlen(texts[i]));
        files_cut_partial_line(fd);
        CHECK(lseek(fd, 0, SEEK_END) == left[i]);
    }
    /* the last line feed is in an earlier block */
    for (int tail = 4090; tail < 8200; tail += 1366) {
        buf b = {0};
        buf_c(&b, "first\n");
        for (int i = 0; i < tail; i++) buf_char(&b, 'x');
        CHECK(!ftruncate(fd, 0) && pwrite(fd, b.p, b.n, 0) == (ssize_t)b.n);
        files_cut_partial_line(fd);
        CHECK(lseek(fd, 0, SEEK_END) == 6);
        buf_free(&b);
    }
    close(fd), unlink(path);
}

static const struct test files_tests[] = {{"files: forms in any pieces", files_test_form},
                                       {"files: invalid forms", files_test_form_bad},
                                       {"files: forms at random", files_test_form_random},
                                       {"files: ids", files_test_ids},
                                       {"files: completion windows", files_test_window},
                                       {"files: upload, read, delete", files_test_files},
                                       {"files: metadata", files_test_metadata},
                                       {"files: lists by pages", files_test_paging},
                                       {"files: routes and refusals", files_test_routes},
                                       {"files: a batch that fails", files_test_failed_batch},
                                       {"files: no descriptors left", files_test_no_descriptors},
                                       {"files: what a crash leaves", files_test_leftovers},
                                       {"files: an incomplete line", files_test_half_line},
                                       {"files: results that cannot be published", files_test_unpublished},
                                       {"files: torn last lines", files_test_torn},
                                       {"files: what the system cannot do", files_test_cannot},
                                       {"files: no folder", files_test_no_folder},
                                       {NULL, NULL}};
