/* test_json.c - chapter 4. The reader: JSONTestSuite, positions of errors, limits and numbers. The
 * writer: round trips. */

static const json_limits json_test_limits = {512, 1 << 20};

/* Parses a heap copy of the exact size, so that a read past the end is noticed. *text must outlive
 * the nodes. */
static const json *json_of(arena *a, str s, char **copy, toka_err *e) {
    *copy = mem_alloc(s.n);
    if (s.n) memcpy(*copy, s.p, s.n);
    *e = (toka_err){0};
    return json_parse(a, (str){*copy, s.n}, json_test_limits, e);
}

/* Whether two values are the same: kind, number, bytes, order of members. Numbers compare by value:
 * 1 equals 1.0. */
static bool json_same(const json *a, const json *b) {
    if (a->type != b->type) return false;
    if (a->type == JSON_NUMBER && a->is_int && b->is_int) return a->integer == b->integer;
    if (a->type == JSON_NUMBER)
        return json_num(a, 0) == json_num(b, 1) && signbit(json_num(a, 0)) == signbit(json_num(b, 0));
    if (a->type == JSON_STRING) return str_eq(json_str(a), json_str(b));
    if (a->type < JSON_ARRAY) return true;
    if (a->n != b->n || a->skip != b->skip) return false;
    const json *x = a + 1, *y = b + 1;
    for (; x < json_next(a); x = json_next(x), y = json_next(y))
        if (!json_same(x, y)) return false;
    return true;
}

static void test_json_suite(void) {
    const char *dir = data_path("suites/json-parsing");
    if (!dir) {
        SKIP(318, "no public data");
        return;
    }
    char root[1024];
    snprintf(root, sizeof root, "%s", dir);
    DIR *d = opendir(root);
    int n[3] = {0};
    for (struct dirent *f; d && (f = readdir(d));) {
        if (!str_ends(str_c(f->d_name), STR(".json"))) continue;
        char path[2048];
        snprintf(path, sizeof path, "%s/%s", root, f->d_name);
        str s = read_copy(path);
        arena a = {0};
        toka_err e = {0};
        const json *v = json_parse(&a, s, json_test_limits, &e);
        CHECK_MSG(f->d_name[0] != 'y' || v, "%s refused: %s", f->d_name, e.msg);
        CHECK_MSG(f->d_name[0] != 'n' || !v, "%s accepted", f->d_name);
        CHECK((v == NULL) == (e.code == TOKA_E_INPUT));
        n[f->d_name[0] == 'y' ? 0 : f->d_name[0] == 'n' ? 1 : 2]++;
        arena_free(&a);
        free((void *)s.p);
    }
    if (d) closedir(d);
    CHECK_MSG(n[0] == 95 && n[1] == 188 && n[2] == 35, "%d y, %d n, %d i", n[0], n[1], n[2]);
}

/* Every error says what is wrong and at which byte. */
static void test_json_errors(void) {
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"", "text ends too early at byte 0"},
        {"  ", "text ends too early at byte 2"},
        {"[1,]", "value expected at byte 3"},
        {"[1 2]", "',' or ']' expected at byte 3"},
        {"[1", "text ends too early at byte 2"},
        {"{\"a\" 1}", "':' expected at byte 5"},
        {"{\"a\":1 \"b\"}", "',' or '}' expected at byte 7"},
        {"{\"a\":1,}", "member name expected at byte 7"},
        {"{,}", "member name expected at byte 1"},
        {"{\"a\":}", "value expected at byte 5"},
        {"[1]x", "text continues after the value at byte 3"},
        {"[\"a\\q\"]", "unknown escape at byte 3"},
        {"[\"\\u12g4\"]", "\\u needs four hex digits at byte 4"},
        {"[\"\\ud800\\u12\"]", "\\u needs four hex digits at byte 10"},
        {"[\"a\nb\"]", "control character in a string at byte 3"},
        {"[\"\\n\tb\"]", "control character in a string at byte 4"},
        {"[\"ab", "string without an end at byte 4"},
        {"[\"a\\\"", "string without an end at byte 5"},
        {"\"a\\", "string without an end at byte 3"},
        {"[\"\xC3\x28\"]", "invalid UTF-8 at byte 2"},
        {"[\"\\n\xED\xA0\x80\"]", "invalid UTF-8 at byte 4"},
        {"[01]", "leading zero at byte 1"},
        {"[-]", "digit expected at byte 2"},
        {"[1.]", "digit expected after the point at byte 3"},
        {"[1e+]", "digit expected in the exponent at byte 4"},
        {"[1e400]", "number out of range at byte 1"},
        {"[-1e400]", "number out of range at byte 1"},
        {"[truE]", "value expected at byte 1"},
        {"[NaN]", "value expected at byte 1"},
        {"[Infinity]", "value expected at byte 1"},
        {"[-Infinity]", "digit expected at byte 2"},
        {"\xEF\xBB\xBF{}", "value expected at byte 0"},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        arena a = {0};
        toka_err e;
        char *copy;
        const json *v = json_of(&a, str_c(cases[i].text), &copy, &e);
        CHECK_MSG(!v && e.code == TOKA_E_INPUT && strstr(e.msg, cases[i].error), "%s: %s", cases[i].text, e.msg);
        arena_free(&a);
        free(copy);
    }
}

static void test_json_limits(void) {
    arena a = {0};
    toka_err e = {0};
    str text = STR("[[[1]],{\"a\":[]}]");
    CHECK(json_parse(&a, text, (json_limits){3, 100}, &e));
    CHECK(!json_parse(&a, text, (json_limits){2, 100}, &e) && strstr(e.msg, "nested too deep at byte 2"));
    CHECK(json_parse(&a, text, (json_limits){3, text.n}, &e));
    CHECK(!json_parse(&a, text, (json_limits){3, text.n - 1}, &e) && strstr(e.msg, "16 bytes, at most 15"));
    CHECK(!json_parse(&a, (str){NULL, 0}, (json_limits){3, 10}, &e) && strstr(e.msg, "too early at byte 0"));
    CHECK(json_parse(&a, STR("7"), (json_limits){0, 10}, &e)); /* depth counts containers only */

    buf deep = {0}; /* a million levels use no stack; only the limit stops them */
    for (int i = 0; i < 1000000; i++) buf_char(&deep, '[');
    CHECK(!json_parse(&a, buf_view(&deep), json_trusted, &e) && strstr(e.msg, "nested too deep at byte 512"));
    for (int i = 0; i < 1000000; i++) buf_char(&deep, ']');
    const json *v = json_parse(&a, buf_view(&deep), (json_limits){1000000, SIZE_MAX}, &e);
    CHECK(v && v->skip == 1000000);
    int levels = 0;
    for (; v; v = json_at(v, 0)) levels++;
    CHECK(levels == 1000000);
    buf_free(&deep);

    /* more values than the memory of the longest text may hold */
    const size_t max_bytes = 2 << 20, max_values = max_bytes / sizeof(json);
    /* values as elements; as names or values of members; in containers that are elements */
    for (int kind = 0; kind < 4; kind++) {
        const char *const piece[] = {"0,", "\"\":0,", "\"\":0,", "[],"};
        const bool object = kind == 1 || kind == 2;
        for (size_t n = max_values - 2; n <= max_values + 1; n++) {
            buf list = {0};
            size_t values = 1;
            if (kind == 2) buf_c(&list, "[0,"), values += 2;
            for (buf_char(&list, object ? '{' : '['); values + 1 + object <= n; values += 1 + object) buf_c(&list, piece[kind]);
            if (list.p[list.n - 1] == ',') list.n--;
            buf_c(&list, object ? "}" : "]");
            if (kind == 2) buf_char(&list, ']');
            if (values == n) CHECK((json_parse(&a, buf_view(&list), (json_limits){3, max_bytes}, &e) != NULL) == (n <= max_values));
            if (n > max_values && values == n) CHECK_MSG(strstr(e.msg, "more than 131072 values at byte "), "%s", e.msg);
            buf_free(&list);
        }
    }
    buf list_text = {0}; /* a small limit of bytes does not limit the number of values */
    for (int i = 0; i < JSON_ALWAYS_NODES - 1; i++) buf_c(&list_text, i ? ",0" : "[0");
    buf_char(&list_text, ']');
    CHECK(json_parse(&a, buf_view(&list_text), (json_limits){3, list_text.n}, &e));
    buf_free(&list_text);
    arena_free(&a);
}

static void test_json_numbers(void) {
    static const struct {
        const char *text;
        int exact;
        int64_t i;
        double f;
    } cases[] = {
        {"0", 1, 0, 0},
        {"-0", 1, 0, 0},
        {"-1", 1, -1, -1},
        {"9007199254740993", 1, 9007199254740993, 9007199254740992.0},
        {"9223372036854775807", 1, INT64_MAX, 9223372036854775808.0},
        {"-9223372036854775808", 1, INT64_MIN, -9223372036854775808.0},
        {"9223372036854775808", 0, 0, 9223372036854775808.0},
        {"-9223372036854775809", 0, 0, -9223372036854775808.0},
        {"18446744073709551615", 0, 0, 18446744073709551616.0},
        {"18446744073709551617", 0, 0, 18446744073709551616.0},
        {"123456789012345678901.5", 0, 0, 123456789012345678901.5},
        {"18446744073709551617e0", 0, 0, 18446744073709551616.0},
        {"1.0", 0, 0, 1},
        {"-0.0", 0, 0, -0.0},
        {"1e2", 0, 0, 100},
        {"1E-2", 0, 0, 0.01},
        {"0.1", 0, 0, 0.1},
        {"1.7976931348623157e308", 0, 0, DBL_MAX},
        {"5e-324", 0, 0, 0x1p-1074},
        {"1e-400", 0, 0, 0},
        {"123456789.123456789e-5", 0, 0, 1234.56789123456789},
        {"0.000000000000000000000000000000000000000000000000000000000000000000000000000000000000000001e90", 0, 0, 1},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        arena a = {0};
        toka_err e;
        char *copy;
        const json *v = json_of(&a, str_c(cases[i].text), &copy, &e);
        CHECK_MSG(v && v->is_int == cases[i].exact, "%s", cases[i].text);
        if (v) {
            double f = json_num(v, -1);
            CHECK_MSG(json_int(v, -7) == (cases[i].exact ? cases[i].i : -7), "%s", cases[i].text);
            CHECK_MSG(f == cases[i].f && !signbit(f) == !signbit(cases[i].f), "%s: %.17g", cases[i].text, f);
        }
        arena_free(&a);
        free(copy);
    }
}

/* Accepts what Python's json accepts, and no more. NaN and infinities are written as null. */
static void test_json_python(void) {
    static const char *const good[] = {"[NaN,Infinity , -Infinity]", "{\"a\":NaN,\"b\":[1,-Infinity]}", "[1e999,-1e999]", "NaN"};
    static const char *const bad[] = {"[nan]", "[Inf]", "[-NaN]", "[+Infinity]", "[infinity]", "[Infinit]", "[NaN1]", "[--Infinity]", "{NaN:1}"};
    arena a = {0};
    toka_err e;
    buf b = {0};
    for (int i = 0; i < COUNT(good); i++) {
        const json *v = json_parse_python(&a, str_c(good[i]), json_test_limits, &e);
        CHECK_MSG(v && !json_parse(&a, str_c(good[i]), json_test_limits, &e), "%s", good[i]);
        if (v) json_put_value(&b, v);
    }
    CHECK_MSG(str_is(buf_view(&b), "[null,null,null],{\"a\":null,\"b\":[1,null]},[null,null],null"), "%s", b.p);
    for (int i = 0; i < COUNT(bad); i++) CHECK_MSG(!json_parse_python(&a, str_c(bad[i]), json_test_limits, &e), "%s", bad[i]);
    const json *v = json_parse_python(&a, STR("[-Infinity,NaN,1e999]"), json_test_limits, &e);
    int64_t whole;
    CHECK(json_num(json_at(v, 0), 0) == -INFINITY && isnan(json_num(json_at(v, 1), 0)) && json_num(json_at(v, 2), 0) == INFINITY);
    CHECK(!json_whole(json_at(v, 0), &whole) && !json_whole(json_at(v, 1), &whole) && json_int(json_at(v, 2), 7) == 7);
    buf_free(&b), arena_free(&a);
}

/* Numbers are written as Python's json writes what it read: integers with all digits, others as the
 * shortest text. */
static void test_json_big_numbers(void) {
    static const char *const cases[][2] = {
        {"[9223372036854775808,-9223372036854775809, 18446744073709551616 ]", "[9223372036854775808,-9223372036854775809,18446744073709551616]"},
        {"{\"a\":1000000000000000000000000000000000000000}", "{\"a\":1000000000000000000000000000000000000000}"},
        {"[1e22,1.0,-0.0,-0,0.1,18446744073709551616.0]", "[1e+22,1.0,-0.0,0,0.1,1.8446744073709552e+19]"},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        arena a = {0};
        toka_err e;
        char *copy;
        buf b = {0};
        const json *v = json_of(&a, str_c(cases[i][0]), &copy, &e);
        if (v) json_put_value(&b, v);
        CHECK_MSG(v && str_is(buf_view(&b), cases[i][1]), "%s: %s", cases[i][0], b.p);
        buf_free(&b), arena_free(&a);
        free(copy);
    }
    arena a = {0};
    toka_err e;
    int64_t whole;
    char *copy, nines[401] = {0};
    CHECK(!json_whole(json_parse(&a, STR("18446744073709551616"), json_test_limits, &e), &whole));
    memset(nines, '9', 400);
    CHECK(!json_of(&a, str_c(nines), &copy, &e) && strstr(e.msg, "number out of range at byte 0"));
    arena_free(&a);
    free(copy);
}

static void test_json_strings(void) {
    static const struct {
        const char *text, *value;
    } cases[] = {
        {"\"\"", ""},
        {"\"plain\"", "plain"},
        {"\"a\\\"\\\\\\/\\b\\f\\n\\r\\tz\"", "a\"\\/\b\f\n\r\tz"},
        {"\"\\u0041\\u00e9\\u20ac\\uD83D\\ude00\"", "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"},
        {"\"x\\ud83d\"", "x\xEF\xBF\xBD"},
        {"\"\\ud83dx\"", "\xEF\xBF\xBDx"},
        {"\"\\ude00\\ud83d\"", "\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\"\\ud83d\\ud83d\\ude00\"", "\xEF\xBF\xBD\xF0\x9F\x98\x80"},
        {"\"\\ud83d\\n\"", "\xEF\xBF\xBD\n"},
        {"\"\\udbff\\udfff\"", "\xF4\x8F\xBF\xBF"},
        {"\"\xE4\xBD\xA0\\n\xE5\xA5\xBD\"", "\xE4\xBD\xA0\n\xE5\xA5\xBD"},
        {"\"\x7F\"", "\x7F"},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        arena a = {0};
        toka_err e;
        char *copy;
        const json *v = json_of(&a, str_c(cases[i].text), &copy, &e);
        CHECK_MSG(v && str_is(json_str(v), cases[i].value), "%s: %s", cases[i].text, e.msg);
        arena_free(&a);
        free(copy);
    }
    arena a = {0};
    toka_err e;
    const json *v = json_parse(&a, STR("\"a\\u0000b\""), json_test_limits, &e);
    CHECK(v && str_eq(json_str(v), STR("a\0b"))); /* a NUL is an ordinary character */
    arena_free(&a);
}

/* utf8_len against its definition: a sequence is valid if it decodes to a character and is the
 * encoding of it. */
static void test_json_utf8(void) {
    static const uint8_t border[] = {0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1,
        0xEC,
        0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xF8, 0xFF};
    const unsigned n = COUNT(border);
    for (unsigned i = 0; i < n * n * n * n; i++) {
        char z[4] = {(char)border[i % n], (char)border[i / n % n], (char)border[i / n / n % n],
            (char)border[i / n / n / n]}, again[4];
        unsigned char a = (unsigned char)z[0];
        for (int room = 1; room <= 4; room++) {
            int bytes = a < 0x80 ? 1 : a < 0xE0 ? 2 : a < 0xF0 ? 3 : 4, expected = 0;
            uint32_t c = bytes == 1 ? a : a & (0xFFu >> (bytes + 1));
            for (int k = 1; k < bytes; k++) c = c << 6 | (z[k] & 63);
            bool character = c < 0xD800 || (c > 0xDFFF && c <= 0x10FFFF);
            if (bytes <= room && character && utf8_put(again, c) == bytes && !memcmp(again, z, (size_t)bytes))
                expected = bytes;
            CHECK_MSG(utf8_len(z, z + room) == expected, "%02x %02x %02x %02x, room %d", a, z[1] & 255, z[2] & 255,
                      z[3] & 255, room);
        }
    }
}

static void test_json_walking(void) {
    arena a = {0};
    toka_err e;
    const json *v = json_parse(&a, STR(" {\"a\" : [1, [2, {\"x\":[]}], \"three\"], \"b\":{}, \"a2\":true, \"b\":[7,8]} "),
                               json_test_limits, &e);
    CHECK(v && v->n == 4);
    const json *arr = json_get(v, "a");
    CHECK(arr && arr->n == 3 && json_int(json_at(arr, 0), 0) == 1 && str_is(json_str(json_at(arr, 2)), "three"));
    CHECK(json_is(json_get(json_at(json_at(arr, 1), 1), "x"), JSON_ARRAY));
    CHECK(json_int(json_at(json_get(v, "b"), 1), 0) == 8); /* the last of equal keys wins */
    CHECK(json_is_true(json_get(v, "a2")) && !json_is_true(json_get(v, "b")));
    CHECK(!json_get(v, "none") && !json_at(arr, 3) && !json_at(v, 0) && !json_get(arr, "a"));
    CHECK(!json_get(json_get(v, "none"), "x") && !json_at(NULL, 0) && json_str(NULL).n == 0 && json_num(NULL, 2.5) == 2.5);
    CHECK(json_int(NULL, -3) == -3 && !json_is_true(NULL) && !json_is(NULL, JSON_NULL));
    int members = 0, elements = 0;
    JSON_MEMBERS(key, v) members += key->type == JSON_STRING;
    JSON_EACH(it, arr) elements += it != arr;
    CHECK(members == 4 && elements == 3);
    arena_free(&a);
}

static void test_json_writer(void) {
    buf b = {0};
    json_put_open(&b, '{');
    json_put_key(&b, "a"), json_put_open(&b, '['), json_put_int(&b, INT64_MIN), json_put_num(&b, 0.1, false);
    json_put_bool(&b, true), json_put_null(&b), json_put_open(&b, '['), json_put_close(&b, ']');
    json_put_str(&b, STR("ends in ,")), json_put_str(&b, STR(":")), json_put_close(&b, ']');
    json_put_key(&b, "q\"\\\n\t\r\x01\x7F\xFFz\xE2\x82\xAC"), json_put_num(&b, NAN, false);
    json_put_key(&b, "f"), json_put_num(&b, (double)0.1f, true), json_put_key(&b, "z"), json_put_num(&b, -0.0, false);
    json_put_close(&b, '}');
    CHECK_MSG(str_is(buf_view(&b), "{\"a\":[-9223372036854775808,0.1,true,null,[],\"ends in ,\",\":\"],"
                                   "\"q\\\"\\\\\\n\\t\\u000d\\u0001\x7F\xEF\xBF\xBDz\xE2\x82\xAC\":null,\"f\":0.1,\"z\":-0.0}"),
              "%s", b.p);
    buf_clear(&b); /* JSON lines and the prefix of an event stream have no comma */
    json_put_open(&b, '{'), json_put_close(&b, '}'), buf_c(&b, "\ndata: "), json_put_int(&b, 1);
    CHECK(str_is(buf_view(&b), "{}\ndata: 1"));
    buf_free(&b);
}

/* Writes a random document with random spaces and escapes. */
static void json_random(buf *b, uint64_t *s, int depth) {
    static const char *const bits[] = {"a", "\\n", "\\u00e9", "\\uD83D\\uDE00", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\\\"",
        "\\\\", " "};
    int kind = (int)(rnd(s) % (depth > 6 ? 5 : 7)), n = (int)(rnd(s) % 5);
    if (rnd(s) % 4 == 0) buf_c(b, " \n");
    switch (kind) {
    case 0: buf_c(b, "null"); break;
    case 1: buf_c(b, rnd(s) % 2 ? "true" : "false"); break;
    case 2: buf_printf(b, "%lld", (long long)((int64_t)rnd(s) >> rnd(s) % 64)); break;
    case 3: buf_printf(b, "%.*e", (int)(rnd(s) % 18), (rnd_unit(s) - 0.5) * pow(10, (double)(rnd(s) % 600) - 300)); break;
    case 4:
        buf_char(b, '"');
        while (n--) buf_c(b, bits[rnd(s) % COUNT(bits)]);
        buf_char(b, '"');
        break;
    default:
        buf_char(b, kind == 5 ? '[' : '{');
        for (int i = 0; i < n; i++) {
            if (i) buf_char(b, ',');
            if (kind == 6) buf_printf(b, "\"k%d\"\t:", i % 3);
            json_random(b, s, depth + 1);
        }
        buf_char(b, kind == 5 ? ']' : '}');
    }
    if (rnd(s) % 4 == 0) buf_c(b, "\t ");
}

static void test_json_round_trip(void) {
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        uint64_t s = seed * 0x9E3779B97F4A7C15u;
        buf text = {0}, again = {0};
        arena a = {0};
        toka_err e = {0};
        json_random(&text, &s, 0);
        const json *v = json_parse(&a, buf_view(&text), json_test_limits, &e), *w = NULL;
        if (v) json_put_value(&again, v), w = json_parse(&a, buf_view(&again), json_test_limits, &e);
        CHECK_MSG(v && w && json_same(v, w), "seed %llu: %s\n%s\n%s", (unsigned long long)seed, e.msg, text.p, again.p);
        buf_free(&text), buf_free(&again), arena_free(&a);
    }
}

/* Any finite double or float comes back with the same bits, and no shorter text does. */
static void test_json_floats(void) {
    uint64_t s = 99;
    for (int i = 0; i < 200000; i++) {
        bool is_float = i % 2;
        uint64_t bits = rnd(&s);
        double f;
        if (i % 10 == 0) bits &= 0x800FFFFFFFFFFFFFu; /* subnormal */
        memcpy(&f, &bits, 8);
        if (is_float) {
            uint32_t half = (uint32_t)(bits >> 32) & (i % 3 ? 0xFFFFFFFFu : 0x807FFFFFu);
            float g;
            memcpy(&g, &half, 4);
            f = (double)g;
        }
        if (i % 7 == 0) f = (double)((int64_t)bits >> bits % 64);
        if (is_float) f = (double)(float)f;
        if (!isfinite(f)) continue;
        buf b = {0};
        arena a = {0};
        toka_err e = {0};
        json_put_num(&b, f, is_float);
        const json *v = json_parse(&a, buf_view(&b), json_test_limits, &e);
        double back = json_num(v, NAN);
        CHECK_MSG(v && (is_float ? (float)back == (float)f : back == f) && signbit(back) == signbit(f), "%a: %s", f, b.p);
        char shorter[40];
        int digits = 0;
        for (char *c = b.p; *c && *c != 'e'; c++) digits += isdigit((unsigned char)*c) && (digits || *c != '0');
        snprintf(shorter, sizeof shorter, "%.*e", MAX(digits - 2, 0), f);
        back = strtod(shorter, NULL);
        if (digits > 1 && strchr(b.p, 'e'))
            CHECK_MSG(is_float ? (float)back != (float)f : back != f, "%s: %s too", b.p, shorter);
        buf_free(&b), arena_free(&a);
    }
}

/* Log-probabilities are written without printf: the text is that of %g with the fewest digits, also
 * near powers of ten and halves of the last digit. */
static void test_json_logprobs(void) {
    uint64_t s = 12;
    int n_fast = 0;
    buf b = {0};
    for (int i = 0; i < 400000; i++) {
        float f = i % 4 == 0   ? (float)(rnd_unit(&s) * 40)
                  : i % 4 == 1 ? (float)exp(-rnd_unit(&s) * 31)
                  : i % 4 == 2 ? (float)((double)(rnd(&s) % 2000000) * pow(10, -(double)(rnd(&s) % 16)))
                               : (float)pow(10, (double)(rnd(&s) % 20) - 14);
        if (i % 3) f = -f;
        for (uint64_t k = rnd(&s) % 3, up = rnd(&s) % 2; k; k--) f = nextafterf(f, up ? 1e9f : 0);
        char z[40];
        int digits = 5;
        do snprintf(z, sizeof z, "%.*g", ++digits, (double)f);
        while (strtof(z, NULL) != f);
        buf_clear(&b), n_fast += json_put_float(&b, f);
        buf_clear(&b), json_put_num(&b, (double)f, true);
        CHECK_MSG(str_is(buf_view(&b), f == 0 && signbit(f) ? "-0.0" : z), "%a: %s, printf %s", (double)f, b.p, z);
    }
    CHECK_MSG(n_fast > 300000, "%d", n_fast); /* most of them without printf */
    static const int64_t whole[] = {0, 7, -7, 10, 128255, INT64_MAX, INT64_MIN, INT64_MIN + 1};
    for (int i = 0; i < COUNT(whole); i++) {
        char z[24];
        snprintf(z, sizeof z, "%lld", (long long)whole[i]);
        buf_clear(&b), buf_int(&b, whole[i]);
        CHECK_MSG(str_is(buf_view(&b), z), "%s: %s", z, b.p);
    }
    buf_free(&b);
}

static double json_seconds(str s) { /* seconds to parse it */
    arena a = {0};
    toka_err e = {0};
    double t0 = cpu_now();
    const json *v = json_parse(&a, s, json_trusted, &e);
    t0 = cpu_now() - t0;
    CHECK_MSG(v, "%s", e.msg);
    arena_free(&a);
    return t0;
}

/* Eight times the text takes about eight times as long. The ratio of the best of three stays below
 * 32 (n * n gives 64), for each shape of text. */
static void test_json_linear(void) {
    static const struct {
        const char *head, *unit, *tail;
    } shapes[] = {{"[0", ",0", "]"}, {"[0", ",[]", "]"}, {"{\"a\":0", ",\"a\":\"b\"", "}"}, {"[0", ",\"\\n\"", "]"},
                  {"\"", "a", "\""}, {"\"", "\\n", "\""}, {"\"", "\\ud83d\\ude00", "\""}, {"\"", "\\ud83d", "\""},
                  {"\"\\n", "\xC3\xA9", "\""}, {"\"", "\xF0\x9F\xA6\x99", "\""},
                  {"[", " ", "]"}, {"0.", "1", ""}, {"0.", "0", "1"}, {"[0", ",1e9", "]"}};
    for (int i = 0; i < COUNT(shapes); i++) {
        buf text[2] = {{0}, {0}};
        double best[2] = {1e9, 1e9};
        for (int k = 0; k < 6; k++) {
            buf *b = &text[k % 2];
            buf_clear(b), buf_c(b, shapes[i].head);
            while (b->n < (k % 2 ? (size_t)1 << 19 : (size_t)1 << 16)) buf_c(b, shapes[i].unit);
            buf_c(b, shapes[i].tail);
            best[k % 2] = MIN(best[k % 2], json_seconds(buf_view(b)));
        }
        CHECK_MSG(best[1] < 32 * best[0] + 0.005, "%s%s..: %.4f s, eight times: %.4f s", shapes[i].head, shapes[i].unit, best[0],
                  best[1]);
        buf_free(&text[0]), buf_free(&text[1]);
    }
}

/* The largest files of a model: they parse in less than 8 times the time of looking at each
 * character once (1 to 2 times, with any compiler flags). */
static void test_json_tokenizers(void) {
    static const char *const names[] = {"llama-3.1", "qwen2.5", "qwen3", "gpt-oss", "deepseek-v3", "llama-2", "phi-3-mini"};
    for (int i = 0; i < COUNT(names); i++) {
        char name[200];
        snprintf(name, sizeof name, "tokenizers/%s/tokenizer.json", names[i]);
        const char *path = data_path(name);
        if (!path) {
            SKIP(1, "no public data");
            continue;
        }
        str s = read_copy(path);
        double best = 1e9, once = 1e9;
        for (int run = 0; run < 3; run++) {
            double t0 = cpu_now();
            for (size_t k = 0; k < s.n;) {
                int n = utf8_len(s.p + k, s.p + s.n);
                k += (size_t)MAX(n, 1);
                CHECK(n);
            }
            once = MIN(once, cpu_now() - t0);
            best = MIN(best, json_seconds(s));
        }
        CHECK_MSG(best < 8 * once, "%s: %zu bytes took %.3f s, their characters %.3f s", name, s.n, best, once);
        if (s.n > 9000000) printf("%s: %.1f MB parsed in %.3f s (%.1f)\n", name, 1e-6 * (double)s.n, best, best / once);
        free((void *)s.p);
    }
}

static const struct test json_tests[] = {
    {"json_suite", test_json_suite},
    {"json_errors", test_json_errors},
    {"json_limits", test_json_limits},
    {"json_python", test_json_python},
    {"json_numbers", test_json_numbers},
    {"json_big_numbers", test_json_big_numbers},
    {"json_strings", test_json_strings},
    {"json_utf8", test_json_utf8},
    {"json_walking", test_json_walking},
    {"json_writer", test_json_writer},
    {"json_round_trip", test_json_round_trip},
    {"json_floats", test_json_floats},
    {"json_logprobs", test_json_logprobs},
    {"json_linear", test_json_linear},
    {"json_tokenizers", test_json_tokenizers},
    {0}};
