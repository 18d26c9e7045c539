/* test_edit.c - chapter 51: keys to text, without a terminal. */

/* Feeds keys to a new editor; `history` has entries with commas between them. Returns its text with '|' at the cursor. */
static const char *edt_type(const char *history, const char *keys, edit_result *result) {
    static char shown[400];
    edit ed = {0};
    for (str rest = str_c(history), entry; str_split_next(&rest, ',', &entry);) edit_push_entry(&ed, entry);
    ed.place = ed.n_history;
    *result = EDIT_GOES_ON;
    for (const char *key = keys; *key && *result == EDIT_GOES_ON; key++) {
        *result = edit_feed(&ed, *key);
        CHECK(ed.cursor <= ed.text.n && !edit_is_inside(&ed, ed.cursor));
    }
    snprintf(shown, sizeof shown, "%.*s|%.*s", (int)ed.cursor, buf_view(&ed.text).p, (int)(ed.text.n - ed.cursor),
             buf_view(&ed.text).p + ed.cursor);
    edit_free(&ed);
    return shown;
}

static void test_edit_keys(void) {
    static const struct {
        const char *history, *keys, *want;
        edit_result result;
    } cases[] = {
        {"", "abc", "abc|", EDIT_GOES_ON},
        {"", "abc\r", "abc|", EDIT_DONE},
        {"", "abc\033[D\033[DX", "aX|bc", EDIT_GOES_ON},
        {"", "abc\001X\005Y", "XabcY|", EDIT_GOES_ON},
        {"", "abc\033[HX\033OFY", "XabcY|", EDIT_GOES_ON},
        {"", "abc\177\010", "a|", EDIT_GOES_ON},
        {"", "\177\033[D\033[3~\033[C", "|", EDIT_GOES_ON},
        {"", "abc\001\004\033[3~", "|c", EDIT_GOES_ON},
        {"", "\004", "|", EDIT_ENDED},
        {"", "abc\003", "abc|", EDIT_CANCELLED},
        {"", "abc\032", "abc|", EDIT_SUSPENDED},
        {"", "one two\027X", "one X|", EDIT_GOES_ON},
        {"", "one two  \027\027", "|", EDIT_GOES_ON},
        {"", "one two\033bX\033b\033bY\033fZ", "YoneZ| Xtwo", EDIT_GOES_ON},
        {"", "one two\033[1;5DX\033[1;5C", "one Xtwo|", EDIT_GOES_ON},
        {"", "one two\033\177", "one |", EDIT_GOES_ON},
        {"", "abcd\033[D\033[D\013", "ab|", EDIT_GOES_ON},
        {"", "abcd\033[D\033[D\025", "|cd", EDIT_GOES_ON},
        {"", "h\303\251\033[DX", "hX|\303\251", EDIT_GOES_ON},
        {"", "h\303\251\360\237\231\202\177\177", "h|", EDIT_GOES_ON},
        {"", "a\012b\033\rc\\\rd\r", "a\nb\nc\nd|", EDIT_DONE},
        {"", "\"\"\"a\r\rb\r\"\"\"\r", "\"\"\"a\n\nb\n\"\"\"|", EDIT_DONE},
        {"", "\"\"\"a\"\"\"\r", "\"\"\"a\"\"\"|", EDIT_DONE},
        {"", "\"\"\"\"\"\r", "\"\"\"\"\"\n|", EDIT_GOES_ON}, /* two of them are no end */
        {"", "\"\"\"ab\033[D\r", "\"\"\"a\n|b", EDIT_GOES_ON},
        {"", "\"\"\"a\r\003", "\"\"\"a\n|", EDIT_CANCELLED},
        {"", "a \"\"\"b\r", "a \"\"\"b|", EDIT_DONE}, /* quotes inside a line are text */
        {"", "a\\\033[D\r", "a\\|", EDIT_DONE}, /* a backslash counts at the end of the text only */
        {"", "\033[200~a\rb\nc\td\003e\033[201~\r", "a\nb\nc\tde|", EDIT_DONE},
        {"", "\033[9;9;9;9;9;9;9;9;9ZA", ";9ZA|", EDIT_GOES_ON}, /* the longest sequence ends, the rest is text */
        {"", "\033xA\033[ZB\033OQC\033[15~D", "ABCD|", EDIT_GOES_ON},
        {"one,two", "new\033[A", "two|", EDIT_GOES_ON},
        {"one,two", "new\033[A\033[A\033[A", "one|", EDIT_GOES_ON},
        {"one,two", "new\033[A\033[A\033[B\033[B\033[B", "new|", EDIT_GOES_ON},
        {"one,two", "\033[AX\r", "twoX|", EDIT_DONE},
        {"one,one,,two", "\020\020\020", "one|", EDIT_GOES_ON},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        edit_result result;
        const char *shown = edt_type(cases[i].history, cases[i].keys, &result);
        CHECK_MSG(!strcmp(shown, cases[i].want) && result == cases[i].result, "%d: '%s', %d", i, shown, (int)result);
    }
    edit_result result;
    CHECK(!strcmp(edt_type("", "ab\ncd\033[AX", &result), "abX|\ncd"));
    CHECK(str_is(edit_unquote(STR("\"\"\"a\nb\"\"\"")), "a\nb") && !edit_unquote(STR("\"\"\"\"\"\"")).n);
    CHECK(str_is(edit_unquote(STR("\"a\"")), "\"a\"") && str_is(edit_unquote(STR("\"\"\"\"\"")), "\"\"\"\"\""));
    CHECK(!strcmp(edt_type("", "ab\ncde\033[A\033[BX", &result), "ab\ncdX|e"));
    CHECK(!strcmp(edt_type("", "a\n\303\251\303\251\033[A", &result), "a|\n\303\251\303\251"));
}

/* Random bytes never break the text or the screen. */
static void test_edit_random(void) {
    uint64_t seed = 7;
    static const char likely[] = "\033[ABCD~OHF0123;\r\n\b\177\001\005\013\025\027\\ ab\303\251\360\237\231\202";
    for (int round = 0; round < 300; round++) {
        edit ed = {0};
        buf out = {0};
        edit_push_entry(&ed, STR("one")), edit_push_entry(&ed, STR("two\nlines"));
        ed.place = ed.n_history;
        for (int i = 0; i < 200; i++) {
            edit_feed(&ed, rnd(&seed) % 4 ? likely[rnd(&seed) % (sizeof likely - 1)] : (char)rnd(&seed));
            CHECK(ed.cursor <= ed.text.n && ed.n_keys <= (int)sizeof ed.keys);
            buf_clear(&out);
            edit_render(&ed, "> ", 9 + (int)(rnd(&seed) % 30), &out);
            CHECK(out.n > 0);
        }
        edit_free(&ed), buf_free(&out);
    }
}

static void test_edit_history(void) {
    char folder[] = "/tmp/toka_edit_XXXXXX", path[80];
    CHECK(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/state/toka/history", folder);
    edit ed = {0};
    edit_history_load(&ed, path);
    CHECK(!ed.n_history);
    edit_history_add(&ed, STR("one")), edit_history_add(&ed, STR("two\nlines \"x\"")), edit_history_add(&ed, STR(""));
    edit_free(&ed);
    struct stat info;
    CHECK(!stat(path, &info) && (info.st_mode & 0777) == 0600);
    FILE *file = fopen(path, "a");
    fputs("not JSON\n\"a\\u0000b\"\n7\n\"three\"", file);
    fclose(file);
    edit_history_load(&ed, path);
    CHECK(ed.n_history == 3 && !strcmp(ed.history[1], "two\nlines \"x\"") && !strcmp(ed.history[2], "three"));
    for (int i = 0; i < EDIT_MAX_HISTORY + 5; i++) {
        char text[16];
        snprintf(text, sizeof text, "%d", i);
        edit_push_entry(&ed, str_c(text));
    }
    CHECK(ed.n_history == EDIT_MAX_HISTORY && !strcmp(ed.history[0], "5"));
    edit_free(&ed);
    mft_remove_folder(folder);
}

static const struct test edit_tests[] = {
    {"edit: keys", test_edit_keys}, {"edit: random bytes", test_edit_random}, {"edit: history", test_edit_history}, {NULL, NULL}};
