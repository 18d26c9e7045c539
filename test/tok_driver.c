/* tok_driver.c - lets a Python test drive the tokenizer of toka.c.
 *   tok_driver TOKENIZER.json encode FLAGS   standard input: documents, each 4 bytes of length and
 *                                            then its bytes; standard output: for each, 4 bytes of
 *                                            count and then the ids
 *   tok_driver TOKENIZER.json decode FLAGS   the reverse
 *   tok_driver TOKENIZER.json stream FLAGS   as decode, but id by id; fails if a piece of text ends
 *                                            inside a character
 *   tok_driver TOKENIZER.json time PASSES    encodes all documents PASSES times on one thread;
 *                                            prints the CPU seconds of loading and of each pass
 * Numbers are 32-bit little endian. */
#include "../toka.c"
#include "check.h"

static buf input;

static void stop(const char *what) {
    fprintf(stderr, "tok_driver: %s\n", what);
    exit(1);
}
static void put32(uint32_t v) { fwrite(&v, 4, 1, stdout); }

static bool next_document(size_t *at, str *doc) {
    uint32_t n;
    if (*at == input.n) return false;
    if (input.n - *at < 4) stop("half a length");
    memcpy(&n, input.p + *at, 4);
    if (input.n - *at - 4 < n) stop("half a document");
    *doc = (str){input.p + *at + 4, n};
    *at += 4 + (size_t)n;
    return true;
}

static void encode(const tok *t, int flags) {
    toka_err e;
    str doc;
    ids out = {0};
    for (size_t at = 0; next_document(&at, &doc);) {
        out.n = 0;
        if (tok_encode(t, doc, flags, &out, &e)) stop(e.msg);
        put32((uint32_t)out.n);
        if (out.n) fwrite(out.p, sizeof *out.p, out.n, stdout);
    }
    ids_free(&out);
}

static void decode(const tok *t, int flags, bool stream) {
    toka_err e;
    str doc;
    buf text = {0};
    for (size_t at = 0; next_document(&at, &doc);) {
        size_t n = doc.n / sizeof(int32_t);
        int32_t *id = mem_alloc(doc.n);
        if (doc.n) memcpy(id, doc.p, doc.n);
        buf_clear(&text);
        if (!stream && tok_decode(t, id, n, flags, &text, &e)) stop(e.msg);
        tok_stream s;
        tok_stream_init(&s, t, flags);
        for (size_t i = 0, done = 0; stream && i <= n; i++) {
            if (i < n) tok_stream_put(&s, id[i], &text);
            else tok_stream_end(&s, &text);
            for (int k; done < text.n; done += (size_t)k)
                if (!(k = utf8_len(text.p + done, text.p + text.n))) stop("a step ends inside a character");
        }
        tok_stream_free(&s);
        put32((uint32_t)text.n);
        fwrite(buf_view(&text).p, 1, text.n, stdout);
        free(id);
    }
    buf_free(&text);
}

int main(int argc, char **argv) {
    toka_err e;
    str file;
    tok *t;
    if (argc != 4) stop("TOKENIZER.json encode|decode|stream|time NUMBER");
    if (os_map(argv[1], &file, &e)) stop(e.msg);
    double t0 = cpu_now();
    if (tok_load(&t, file, STR(""), &e)) stop(e.msg);
    double loaded = cpu_now() - t0;
    os_unmap(file);
    if (os_read_all(0, "standard input", SIZE_MAX, &input, &e)) stop(e.msg);
    if (!strcmp(argv[2], "encode")) encode(t, atoi(argv[3]));
    else if (!strcmp(argv[2], "time")) {
        printf("%.6f", loaded);
        for (int i = 0; i < atoi(argv[3]); i++) {
            ids out = {0};
            str doc;
            t0 = cpu_now();
            for (size_t at = 0; next_document(&at, &doc); out.n = 0)
                if (tok_encode(t, doc, TOKA_ADD_SPECIAL | TOKA_PARSE_SPECIAL, &out, &e)) stop(e.msg);
            printf(" %.6f", cpu_now() - t0);
            ids_free(&out);
        }
        puts("");
    } else decode(t, atoi(argv[3]), argv[2][0] == 's');
    tok_del(t);
    buf_free(&input);
    return 0;
}
