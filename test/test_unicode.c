/* test_unicode.c - chapter 5 against the Unicode consortium's own test files. */

/* Field i of a line with ';' between the fields: code points in hex, returned as UTF-8. */
static size_t uni_test_field(char *line, int field, char *out) {
    char *p = line, *w = out;
    for (; field; field--) p = strchr(p, ';') + 1;
    while (*p != ';') {
        w += utf8_put(w, (uint32_t)strtoul(p, &p, 16));
        while (*p == ' ') p++;
    }
    return (size_t)(w - out);
}

static bool uni_test_nfc(const uni *u, str from, str to, int version) {
    buf b = {0};
    char *exact = mem_alloc(from.n); /* no byte after it */
    memcpy(exact, from.p, from.n);
    bool ok = str_eq(uni_nfc(u, (str){exact, from.n}, version, &b), to);
    free(exact);
    buf_free(&b);
    return ok;
}

/* NormalizationTest.txt: c2 = nfc(c1) = nfc(c2) = nfc(c3), c4 = nfc(c4) = nfc(c5). A character that
 * part 1 does not list is its own normal form. */
static void uni_test_normalization(void) {
    const char *path = data_path("suites/unicode/NormalizationTest.txt");
    if (!path) {
        SKIP(1, "no public data");
        return;
    }
    uni u;
    uni_init(&u);
    FILE *f = fopen(path, "r");
    char line[4096], field[5][256], z[4];
    bool *listed = mem_zalloc(UNI_MAX);
    int part = 0, n = 0, old = 0;
    while (fgets(line, sizeof line, f)) {
        if (line[0] == '@') part = atoi(line + 5);
        if (!isxdigit((unsigned char)line[0])) continue;
        str v[5];
        for (int i = 0; i < 5; i++) v[i] = (str){field[i], uni_test_field(line, i, field[i])};
        if (part == 1) listed[strtoul(line, NULL, 16)] = true;
        bool same = true;
        for (int i = 0; i < 5; i++) {
            CHECK_MSG(uni_test_nfc(&u, v[i], v[i < 3 ? 1 : 3], UNI_V16), "column %d of %s", i + 1, line);
            same &= uni_test_nfc(&u, v[i], v[i < 3 ? 1 : 3], UNI_V9);
        }
        n++, old += !same;
    }
    fclose(f);
    CHECK(n > 18000);
    CHECK_MSG(old == 631, "%d lines differ in form C of Unicode 9.0, as in Hugging Face tokenizers 0.23.3: 631", old);
    for (uint32_t c = 0; c < UNI_MAX; c++) {
        /* nor characters newer than 14.0 */
        if ((c >= 0xD800 && c < 0xE000) || listed[c] || c >= 0x16121) continue;
        if (c == 0x105C9 || c == 0x105E4 || (c >= 0x11383 && c <= 0x113C8)) continue;
        str s = {z, (size_t)utf8_put(z, c)};
        CHECK_MSG(uni_test_nfc(&u, s, s, UNI_V16), "U+%04X", c);
    }
    free(listed);
    uni_free(&u);
}

/* Long runs of marks are sorted and composed in linear time, and a mark may be the first
 * character. */
static void uni_test_marks(void) {
    uni u;
    buf text = {0}, b = {0};
    uni_init(&u);
    double best[2] = {1e9, 1e9};
    str s = {0};
    /* U+0301 (class 230), U+0327 (class 202) */
    for (int i = 0; i < 300000; i++) buf_c(&text, i & 1 ? "\xCC\x81" : "\xCC\xA7");
    /* an eighth of the text, and all of it: about eight times as long, where n * n would give 64 */
    for (int i = 0; i < 6; i++) {
        double t0 = cpu_now();
        s = uni_nfc(&u, str_sub(buf_view(&text), 0, i % 2 ? text.n : text.n / 8), UNI_V16, &b);
        best[i % 2] = MIN(best[i % 2], cpu_now() - t0);
    }
    CHECK_MSG(best[1] < 32 * best[0] + 0.005, "%.4f s, eight times: %.4f s", best[0], best[1]);
    CHECK(s.n == text.n && str_starts(s, STR("\xCC\xA7\xCC\xA7\xCC\xA7")) && str_ends(s, STR("\xCC\x81\xCC\x81")));
    CHECK(str_is(uni_nfc(&u, STR("e\xCC\x81\xCC\x81x"), UNI_V16, &b), "\xC3\xA9\xCC\x81x"));
    CHECK(str_is(uni_nfc(&u, STR("ascii only, long enough"), UNI_V16, &b), "ascii only, long enough") && b.n == 0);
    CHECK(str_is(uni_nfc(&u, STR("\xE1\x84\x92\xE1\x85\xA1\xE1\x86\xAB"), UNI_V9, &b), "\xED\x95\x9C")); /* Hangul han */
    buf_free(&text), buf_free(&b);
    uni_free(&u);
}

/* Categories against UnicodeData.txt 17.0, except for what 17.0 changed. */
static void uni_test_classes(void) {
    static const char names[][3] = {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps",
                                    "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs",
                                    "Co", "Cn"};
    const char *path = data_path("suites/unicode/UnicodeData.txt");
    if (!path) {
        SKIP(1, "no public data");
        return;
    }
    uni u;
    uni_init(&u);
    FILE *f = fopen(path, "r");
    char line[1024];
    int n = 0, newer = 0;
    while (fgets(line, sizeof line, f)) {
        uint32_t c = (uint32_t)strtoul(line, NULL, 16);
        const char *category = strchr(strchr(line, ';') + 1, ';') + 1;
        int k = u.props[c] & 31;
        if (k >= UNI_SPACE_CONTROL) k = UNI_CC;
        if (k == UNI_CN) newer++;
        else if (c != 0x295) CHECK_MSG(!strncmp(names[k], category, 2), "U+%04X is %.2s, not %s", c, category, names[k]);
        n++;
    }
    fclose(f);
    CHECK(n > 40000);
    CHECK_MSG(newer == 463, "%d", newer); /* lines of the file; ideographs are listed as ranges */
    CHECK((u.props[0x295] & 31) == UNI_LL && (u.props['\n'] & 31) == UNI_LINE_END);
    CHECK((u.props[0x85] & 31) == UNI_SPACE_CONTROL);
    uni_free(&u);
}

/* A field of one code point, or c itself if the field is empty. */
static uint32_t uni_test_simple(char *line, int field, uint32_t c) {
    char to[8];
    int n;
    size_t bytes = uni_test_field(line, field, to);
    return bytes ? uni_next(to, &n) : c;
}

/* Mappings of one code point to one against UnicodeData.txt, and the number of those that map to
 * more. */
static void uni_test_simple_cases(void) {
    static const int field[] = {[UNI_UPPERCASE] = 12, [UNI_LOWERCASE] = 13, [UNI_TITLECASE] = 14};
    const char *path = data_path("suites/unicode/UnicodeData.txt");
    if (!path) {
        SKIP(1, "no public data");
        return;
    }
    uni_cases u;
    uni_cases_init(&u);
    FILE *f = fopen(path, "r");
    char line[1024];
    int newer = 0, longer[3] = {0};
    while (fgets(line, sizeof line, f)) {
        uint32_t c = (uint32_t)strtoul(line, NULL, 16), out[3];
        strcpy(strchr(line, '\n'), ";");
        for (int to = UNI_UPPERCASE; to <= UNI_TITLECASE; to++) {
            uint32_t simple = uni_test_simple(line, field[to], c);
            int n = uni_map_case(&u, c, (enum uni_case)to, out);
            longer[to] += n > 1;
            newer += n == 1 && *out == c && simple != c;
            CHECK_MSG(n > 1 || *out == simple || *out == c, "U+%04X, case %d: U+%04X", c, to, *out);
        }
    }
    fclose(f);
    CHECK_MSG(longer[0] == 102 && longer[1] == 1 && longer[2] == 48, "%d %d %d", longer[0],
              longer[1], longer[2]);
    CHECK_MSG(newer == 84, "%d mappings of characters that came with 17.0", newer);
    uni_cases_free(&u);
}

/* Case mappings that depend on more than one code point. The expected results are Python's. */
static void uni_test_cases(void) {
    static const struct {
        enum uni_case to;
        const char *from, *expected;
    } rows[] = {
        {UNI_UPPERCASE, "stra\u00dfe \ufb01n \u0149 \u0390 \u1f80\u1f88\u1fb7 \u0131\u00ff\u00b5 \u1e9e \u01c5",
         "STRASSE FIN \u02bcN \u0399\u0308\u0301 \u1f08\u0399\u1f08\u0399\u0391\u0342\u0399 I\u0178\u039c \u1e9e \u01c4"},
        {UNI_LOWERCASE, "\u0130I\u1e9e\u212a\u2126\u01c5 \u13a0\u10a0\u1c90 \u1f88 \u24b6\u2160",
         "i\u0307i\u00dfk\u03c9\u01c6 \uab70\u2d00\u10d0 \u1f80 \u24d0\u2170"},
        {UNI_LOWERCASE, "\u039f\u0394\u039f\u03a3 \u03a3 \u03a3\u0391. A\u03a3' A\u03a3'B A\u00ad\u03a3\u0301 1\u03a3",
         "\u03bf\u03b4\u03bf\u03c2 \u03c3 \u03c3\u03b1. a\u03c2' a\u03c3'b a\u00ad\u03c2\u0301 1\u03c3"},
        {UNI_TITLECASE, "\u00df\ufb03\u01c4\u01c6\u0149\u0587\u1fb3\u1fb2\u10d0",
         "SsFfi\u01c5\u01c5\u02bcN\u0535\u0582\u1fbc\u1fba\u0345\u10d0"}};
    uni_cases u;
    uni_cases_init(&u);
    for (int i = 0; i < COUNT(rows); i++) {
        buf b = {0};
        str s = str_c(rows[i].from);
        for (size_t at = 0; at < s.n;) at += (size_t)uni_put_case(&u, s, at, rows[i].to, &b);
        CHECK_MSG(str_is(buf_view(&b), rows[i].expected), "row %d: %s", i, buf_view(&b).p);
        buf_free(&b);
    }
    uni_cases_free(&u);
}

/* Bytes that are not UTF-8: as many U+FFFD as Python's errors='replace' gives (its results are in
 * the table). */
static void uni_test_repair(void) {
    static const struct {
        const char *bytes;
        int n;
    } cases[] = {{"\x80", 1}, {"\xFF\xFE", 2}, {"\xC0\xAF", 2}, {"\xE0\x80\xAF", 3}, {"\xE2\x82", 1}, {"\xE2\x82x", 1},
                 {"\xF0\x9F\x98", 1}, {"\xF0\x9F\x98\xF0\x9F", 2}, {"\xED\xA0\x80", 3}, {"\xF4\x90\x80\x80", 4},
                 {"\xF5\x80", 2}, {"\xC2", 1}, {"\xF0\x80\x80\x80", 4}, {"\xE1\x80\xC2\xE1\x80\xC2", 4}};
    buf b = {0};
    bool cut;
    for (int i = 0; i < COUNT(cases); i++) {
        int n = 0;
        str s = uni_repair(str_c(cases[i].bytes), &b);
        for (ptrdiff_t at = -1; (at = str_find(s, STR("\xEF\xBF\xBD"), (size_t)(at + 1))) >= 0;) n++;
        CHECK_MSG(n == cases[i].n, "case %d: %d instead of %d", i, n, cases[i].n);
    }
    static const char half[] = "\xF0\x9F\x98";
    CHECK(uni_bad_len(half, half + 3, &cut) == 3 && cut);
    CHECK(uni_bad_len(half, half + 1, &cut) == 1 && cut);
    const char *path = data_path("suites/utf8/UTF-8-test.txt");
    if (!path) SKIP(1, "no public data");
    else {
        str s = read_copy(path), fixed = uni_repair(s, &b);
        for (const char *p = fixed.p; p < fixed.p + fixed.n; p += MAX(1, utf8_len(p, fixed.p + fixed.n)))
            CHECK(utf8_len(p, fixed.p + fixed.n));
        CHECK(b.n == fixed.n && hash_bytes(fixed.p, fixed.n) != hash_bytes(s.p, s.n));
        free((void *)s.p);
    }
    CHECK(str_is(uni_repair(STR("plain"), &b), "plain") && b.n == 0);
    buf_free(&b);
}

static const struct test unicode_tests[] = {{"unicode: normal form C", uni_test_normalization},
                                            {"unicode: many marks", uni_test_marks},
                                            {"unicode: categories", uni_test_classes},
                                            {"unicode: simple cases", uni_test_simple_cases},
                                            {"unicode: cases", uni_test_cases},
                                            {"unicode: bytes that are not UTF-8", uni_test_repair},
                                            {0}};
