/* test_tmpl.c - chapters 8 to 10: templates of real models against Python's Jinja2, small cases of
 * our own, limits. */

static const tmpl_time tmpl_test_now = {2025 - 1900, 6, 4, 12, 34, 56, 5, 184}; /* 2025-07-04 12:34:56, a Friday */

/* Renders source with a context in JSON. Returns 0 or the code of the error. */
static int tmpl_of(str source, str context, tmpl_limits limits, buf *out, toka_err *e) {
    arena a = {0};
    tmpl *t = NULL;
    *e = (toka_err){0};
    int code = tmpl_parse(&t, source, e);
    if (!code) {
        const json *c = json_parse(&a, context, json_test_limits, e);
        code = c ? tmpl_render(t, &c, 1, tmpl_test_now, limits, out, e) : e->code;
    }
    tmpl_del(t);
    arena_free(&a);
    return code;
}

/* The template in a file: the file itself, or chat_template of a tokenizer_config.json (if there
 * are several, the one named default). */
static str tmpl_file_source(arena *a, const char *name, str file) {
    toka_err e;
    if (!str_ends(str_c(name), STR(".json"))) return file;
    const json *t = json_get(json_parse(a, file, json_test_limits, &e), "chat_template");
    if (json_is(t, JSON_ARRAY)) {
        JSON_EACH(it, t) if (str_is(json_str(json_get(it, "name")), "default")) return json_str(json_get(it, "template"));
    }
    return json_str(t);
}

/* The context as apply_chat_template passes it: null for absent tools and documents, and the
 * special tokens. */
static void tmpl_golden_context(buf *b, const json *row, const json *context) {
    json_put_open(b, '{');
    json_put_key(b, "tools"), json_put_null(b), json_put_key(b, "documents"), json_put_null(b);
    json_put_key(b, "bos_token"), json_put_str(b, json_str(json_get(row, "bos_token")));
    json_put_key(b, "eos_token"), json_put_str(b, json_str(json_get(row, "eos_token")));
    JSON_MEMBERS(key, context) json_put_str(b, json_str(key)), buf_char(b, ':'), json_put_value(b, key + 1);
    json_put_close(b, '}');
}

static void tmpl_one_golden(const json *row, const json *contexts) {
    char name[300], what[400];
    arena a = {0};
    buf context = {0}, out = {0};
    toka_err e = {0};
    snprintf(name, sizeof name, "templates/%.*s", STRF(json_str(json_get(row, "template"))));
    str which = json_str(json_get(row, "context"));
    snprintf(what, sizeof what, "%s %.*s", name, STRF(which));
    const char *path = data_path(name);
    str file = path ? read_copy(path) : STR("");
    tmpl_golden_context(&context, row, json_get(contexts, arena_cstr(&a, which)));
    int code = tmpl_of(tmpl_file_source(&a, name, file), buf_view(&context), tmpl_default_limits, &out, &e);
    const json *expected = json_get(row, "output");
    if (!expected)
        CHECK_MSG(code == TOKA_E_INPUT && str_starts(str_c(e.msg), STR("template line ")), "%s: no error\n%s", what, out.p);
    else
        CHECK_MSG(!code && str_eq(json_str(expected), buf_view(&out)), "%s: %s\n--- got\n%s\n--- expected\n%.*s", what,
                  e.msg, out.p, (int)expected->n, expected->chars);
    if (!expected && getenv("TOKA_TEST_VERBOSE"))
        printf("%s: %s; Python: %.*s\n", what, e.msg, STRF(json_str(json_get(row, "error"))));
    if (path) free((void *)file.p);
    buf_free(&context), buf_free(&out), arena_free(&a);
}

static void test_tmpl_goldens(void) {
    const char *rows_path = data_path("templates/goldens.jsonl"), *contexts_path = data_path("templates/contexts.json");
    if (!rows_path || !contexts_path) {
        SKIP(460, "no public data");
        return;
    }
    arena a = {0};
    toka_err e = {0};
    str rows = read_copy(rows_path), text = read_copy(contexts_path);
    const json *contexts = json_parse(&a, text, json_trusted, &e);
    int n = 0;
    for (size_t at = 0, to; at < rows.n; at = to + 1) {
        ptrdiff_t end = str_find(rows, STR("\n"), at);
        to = end < 0 ? rows.n : (size_t)end;
        arena line = {0};
        const json *row = json_parse(&line, str_sub(rows, at, to), json_trusted, &e);
        CHECK(row);
        if (row) tmpl_one_golden(row, contexts), n++;
        arena_free(&line);
    }
    CHECK_MSG(n == 460, "%d rows", n);
    arena_free(&a);
    free((void *)rows.p), free((void *)text.p);
}

/* test/templates.json: small templates with the outputs of Jinja2 (test/check_templates.py checks
 * them against it). */
static void test_tmpl_cases(void) {
    arena a = {0};
    toka_err e = {0};
    str text = read_copy("test/templates.json");
    const json *table = json_parse(&a, text, json_trusted, &e);
    buf context = {0};
    CHECK_MSG(table, "%s", e.msg);
    if (table) json_put_value(&context, json_get(table, "context"));
    int n = 0;
    if (table) JSON_EACH(it, json_get(table, "cases")) {
        buf out = {0};
        str source = json_str(json_get(it, "template"));
        const json *expected = json_get(it, "output"), *error = json_get(it, "error");
        /* what only toka refuses is mostly too large */
        const tmpl_limits small = {2000000, 400, 4 << 20};
        bool refused = json_is_true(json_get(it, "only_here"));
        int code = tmpl_of(source, buf_view(&context), refused ? small : tmpl_default_limits, &out, &e);
        if (error) CHECK_MSG(code == TOKA_E_INPUT && str_starts(str_c(e.msg), STR("template line ")) &&
                             str_find(str_c(e.msg), json_str(error), 0) >= 0,
                             "%.*s: '%s', expected '%.*s'", STRF(source), code ? e.msg : out.p, STRF(json_str(error)));
        else
            CHECK_MSG(!code && expected && str_eq(json_str(expected), buf_view(&out)),
                      "%.*s: %s\n got      %s\n expected %.*s", STRF(source), e.msg, out.p, STRF(json_str(expected)));
        buf_free(&out);
        n++;
    }
    CHECK_MSG(n >= 300, "%d cases", n);
    buf_free(&context);
    arena_free(&a);
    free((void *)text.p);
}

static void test_tmpl_now(void) {
    static const char *const bad[] = {"", "now", "2025-13-01 00:00:00", "2025-02-29 00:00:00", "2025-01-01 24:00:00", "2025-01-01 00:00:00 ",
        "1899-01-01 00:00:00", "-2147483648-01-01 00:00:00", "2025-01-01 00:00:99999999999999999999"};
    tmpl_time now;
    toka_err e;
    CHECK(!lib_parse_now("2024-02-29 23:59:58", &now, &e) && now.year == 124 && now.month == 1 && now.day == 29 && now.hour == 23 &&
          now.minute == 59 && now.second == 58 && now.weekday == 4 && now.yearday == 59);
    for (int i = 0; i < COUNT(bad); i++) CHECK_MSG(lib_parse_now(bad[i], &now, &e) == TOKA_E_USE, "'%s'", bad[i]);
}

static const struct test tmpl_tests[] = {
    {"tmpl_goldens", test_tmpl_goldens},
    {"tmpl_now", test_tmpl_now},
    {"tmpl_cases", test_tmpl_cases},
    {0}};
