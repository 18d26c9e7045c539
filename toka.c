/* toka.c - a high-throughput LLM inference engine in one C file.  SPDX-License-Identifier: Apache-2.0
 *
 * ESSAY-PLACEHOLDER
 *
 * CONTENTS (build.sh checks it against the banners; to read one chapter: sed -n '/MARK: 4\./,/MARK: 5\./p' toka.c)
 *
 *   1. Types [pure]
 *   2. Base: memory, slices, buffers, errors [pure]
 *   3. OS shell [os]
 *   4. JSON [pure]
 *   5. Unicode [pure]
 *   6. Tokenizer [pure]
 *   7. Chat template: values and parser [pure]
 *   8. Chat template: evaluation [pure]
 *   9. Model files [os]
 *  10. KV pages and prefix tree [pure]
 *  11. Length predictor [pure]
 *  12. Scheduler [pure]
 *  13. Batch building and shared prefixes [pure]
 *  14. Sampling and stops [pure]
 *  15. CPU backend [cpu]
 *  16. Model: the layer loop [os]
 *  17. Engine [os]
 *  18. Public API [os]
 *  19. HTTP [pure]
 *  20. OpenAI API [pure]
 *  21. Server [os]
 *  22. Batch runner, bench and plan [os]
 *  23. Command line [os]
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mmap flags, sched_getaffinity, memmem */
#endif
#define TOKA_INTERNAL
#include "toka.h"

#include <assert.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ===========================================================================
 * MARK: 1. Types [pure]
 * The cast of more than one chapter. What only one chapter needs stands there.
 * =========================================================================== */

typedef struct str { /* a borrowed slice of bytes; not NUL-terminated */
    const char *p;
    size_t n;
} str;

typedef struct buf { /* growable bytes, owned; p is NUL-terminated once anything was put */
    char *p;
    size_t n, cap;
} buf;

typedef struct ids { /* growable token ids, owned */
    int32_t *p;
    size_t n, cap;
} ids;

typedef struct arena { /* many small allocations freed in one call; blocks are chained, newest first */
    struct arena_block *blocks;
    size_t used; /* bytes used of the newest block */
} arena;

/* A JSON value: one node of 16 bytes in a flat array, in document order. A container's children follow it directly;
 * an object's are key, value, key, value ... Strings without escapes borrow from the text, which must outlive the nodes. */
typedef struct json {
    uint8_t type;     /* enum json_type */
    uint8_t exact;    /* JSON_NUMBER: written as an integer that fits int64; .i holds it */
    uint32_t n;       /* string: bytes; array: elements; object: members */
    union {
        const char *s; /* string */
        double f;      /* number, exact 0 */
        int64_t i;     /* number, exact 1 */
        size_t skip;   /* container: nodes of the whole subtree with itself */
    };
} json;

enum json_type { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

/* ===========================================================================
 * MARK: 2. Base: memory, slices, buffers, errors [pure]
 * Small allocations abort when the system has no memory left (on Linux it never says so for small ones). Sizes that a file, a
 * request or a flag chooses go through checked calls where they are made, and become errors.
 * =========================================================================== */

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define UNUSED __attribute__((unused)) /* library builds do not call everything */

static void *mem_check(void *p) {
    if (!p) {
        fputs("toka: out of memory\n", stderr);
        abort();
    }
    return p;
}
static void *mem_alloc(size_t n) { return mem_check(malloc(n ? n : 1)); }
static void *mem_zalloc(size_t n) { return mem_check(calloc(n ? n : 1, 1)); }
static void *mem_realloc(void *p, size_t n) { return mem_check(realloc(p, n ? n : 1)); }

/* Fills *e and returns its code, so that `return fail(e, ...)` is the only error line a function needs. */
__attribute__((format(printf, 3, 4))) static int fail(toka_err *e, int code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    e->code = code;
    vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    return code;
}

/* ---- Slices ---- */

#define STR(literal) ((str){"" literal, sizeof(literal) - 1})
#define STRF(s) (int)MIN((s).n, (size_t)200), (s).p /* for "%.*s"; long ones are cut */

static str str_c(const char *z) { return (str){z, strlen(z)}; }
static str str_sub(str s, size_t from, size_t to) { return (str){s.p + from, to - from}; }
static bool str_eq(str a, str b) { return a.n == b.n && (!a.n || memcmp(a.p, b.p, a.n) == 0); }
static bool str_is(str a, const char *z) { return str_eq(a, str_c(z)); }
static bool str_starts(str s, str head) { return s.n >= head.n && str_eq((str){s.p, head.n}, head); }
static bool str_ends(str s, str tail) { return s.n >= tail.n && str_eq((str){s.p + s.n - tail.n, tail.n}, tail); }

/* Index of the first `needle` in s at or after `from`, or -1. An empty needle is found at once. */
static ptrdiff_t str_find(str s, str needle, size_t from) {
    if (from > s.n || needle.n > s.n - from) return -1;
    if (!needle.n) return (ptrdiff_t)from;
    const char *at = memmem(s.p + from, s.n - from, needle.p, needle.n);
    return at ? at - s.p : -1;
}

/* 64-bit hash of bytes, for tables in memory only (not stable across versions, not against attackers). */
static uint64_t hash_bytes(const void *p, size_t n) {
    const unsigned char *s = p;
    uint64_t h = 0x9E3779B97F4A7C15u ^ n;
    for (; n >= 8; s += 8, n -= 8) {
        uint64_t w;
        memcpy(&w, s, 8);
        h = (h ^ w) * 0xFF51AFD7ED558CCDu;
        h ^= h >> 32;
    }
    for (; n; s++, n--) h = (h ^ *s) * 0x100000001B3u;
    h ^= h >> 29;
    h *= 0xC4CEB9FE1A85EC53u;
    return h ^ h >> 32;
}

/* ---- Buffers ---- */

static void buf_reserve(buf *b, size_t more) {
    if (b->cap - b->n > more) return; /* one byte is kept for the NUL */
    size_t cap = b->cap + b->cap / 2;
    if (cap < b->n + more + 1) cap = b->n + more + 1;
    if (cap < 64) cap = 64;
    b->p = mem_realloc(b->p, cap);
    b->cap = cap;
}
static void buf_put(buf *b, const void *p, size_t n) {
    buf_reserve(b, n);
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = 0;
}
static void buf_str(buf *b, str s) { buf_put(b, s.p, s.n); }
static void buf_c(buf *b, const char *z) { buf_put(b, z, strlen(z)); }
static void buf_char(buf *b, char c) { buf_put(b, &c, 1); }
static str buf_view(const buf *b) { return (str){b->p ? b->p : "", b->n}; }
static void buf_clear(buf *b) { b->n = 0; }
static void buf_free(buf *b) {
    free(b->p);
    *b = (buf){0};
}
__attribute__((format(printf, 2, 3))) static void buf_printf(buf *b, const char *fmt, ...) {
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    buf_reserve(b, (size_t)n + 1);
    vsnprintf(b->p + b->n, (size_t)n + 1, fmt, again);
    va_end(again);
    b->n += (size_t)n;
}

static void ids_reserve(ids *v, size_t more) {
    if (v->cap - v->n >= more) return;
    v->cap = MAX(v->cap + v->cap / 2, v->n + more);
    v->p = mem_realloc(v->p, v->cap * sizeof *v->p);
}
static void ids_push(ids *v, int32_t id) {
    if (v->n == v->cap) ids_reserve(v, 64);
    v->p[v->n++] = id;
}
static void ids_free(ids *v) {
    free(v->p);
    *v = (ids){0};
}

/* ---- Arena ---- */

struct arena_block {
    struct arena_block *older;
    size_t cap;
    _Alignas(16) char bytes[];
};

static void *arena_alloc(arena *a, size_t n) {
    size_t at = (a->used + 15) & ~(size_t)15;
    if (!a->blocks || n > a->blocks->cap || at > a->blocks->cap - n) {
        size_t cap = a->blocks ? MIN(a->blocks->cap * 2, (size_t)1 << 20) : 4096;
        if (cap < n) cap = n;
        struct arena_block *b = mem_alloc(sizeof *b + cap);
        *b = (struct arena_block){.older = a->blocks, .cap = cap};
        a->blocks = b;
        at = 0;
    }
    a->used = at + n;
    return a->blocks->bytes + at;
}
static void *arena_zalloc(arena *a, size_t n) { return memset(arena_alloc(a, n), 0, n); }
static char *arena_cstr(arena *a, str s) { /* copy with a NUL behind it */
    char *p = arena_alloc(a, s.n + 1);
    if (s.n) memcpy(p, s.p, s.n);
    p[s.n] = 0;
    return p;
}
static str arena_str(arena *a, str s) { return (str){arena_cstr(a, s), s.n}; }
static void arena_free(arena *a) {
    for (struct arena_block *b = a->blocks, *older; b; b = older) {
        older = b->older;
        free(b);
    }
    *a = (arena){0};
}

/* ===========================================================================
 * MARK: 3. OS shell [os]
 * Every system call that is not a socket: files, clock, cores. Thin, so that the chapters above stay pure.
 * =========================================================================== */

static double os_now(void) { /* seconds on a clock that never steps back */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int os_n_cores(void) { /* cores this process may use */
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return MAX(1, CPU_COUNT(&set));
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

/* Maps a whole regular file read-only. An empty file gives {"",0}. Undo with os_unmap. */
static int os_map(const char *path, str *out, toka_err *e) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0) return fail(e, TOKA_E_IO, "%s: %s", path, strerror(errno));
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return fail(e, TOKA_E_INPUT, "%s: not a regular file", path);
    }
    *out = STR("");
    void *p = st.st_size ? mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    int err = errno;
    close(fd);
    if (p == MAP_FAILED) return fail(e, TOKA_E_IO, "%s: cannot map %lld bytes: %s", path, (long long)st.st_size, strerror(err));
    if (p) *out = (str){p, (size_t)st.st_size};
    return 0;
}
static void os_unmap(str map) {
    if (map.n) munmap((void *)map.p, map.n);
}

static bool os_is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}
static bool os_is_file(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

/* Appends all of a file descriptor (a pipe, a terminal, a file) to b; at most `limit` bytes. */
static int os_read_all(int fd, const char *name, size_t limit, buf *b, toka_err *e) {
    for (;;) {
        buf_reserve(b, 65536);
        ssize_t n = read(fd, b->p + b->n, 65536);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fail(e, TOKA_E_IO, "%s: %s", name, strerror(errno));
        b->p[b->n += (size_t)n] = 0;
        if (n == 0) return 0;
        if (b->n > limit) return fail(e, TOKA_E_INPUT, "%s: more than %zu bytes", name, limit);
    }
}

/* ===========================================================================
 * MARK: 4. JSON [pure]
 * A strict RFC 8259 reader into flat nodes, and a writer. Self-contained: with chapter 2 it can be lifted out.
 *
 * Reader: json_parse(arena, text, limits, e) returns the root or NULL; e->msg says what and at which byte. Depth and size
 * are limits of the caller. Text must be UTF-8; an escaped lone surrogate (\ud83d alone) is legal JSON and becomes U+FFFD.
 * Numbers keep whether they were written as integers. Of equal keys the last wins, as in Python.
 * Walking: json_get, json_at, JSON_EACH, JSON_MEMBERS; a missing value is NULL, and every accessor takes NULL.
 * Writer: json_put_* append one value to a buf and place the comma themselves.
 * =========================================================================== */

typedef struct json_limits {
    int depth;        /* containers in containers at most */
    size_t max_bytes; /* longest text */
} json_limits;

static const json_limits json_trusted = {512, (size_t)1 << 31}; /* for a model's own files */

typedef struct json_reader {
    const char *p, *start, *end; /* next byte, first byte, one past the last */
    arena *a;                    /* unescaped strings, and the nodes in the end */
    json *nodes;                 /* growing */
    size_t n, cap;
    size_t open; /* 1 + index of the innermost open container, 0: none. Its .skip holds the next outer `open` meanwhile */
    int depth;
    json_limits limits;
    toka_err *e;
} json_reader;

static bool json_fail(json_reader *r, const char *what) {
    fail(r->e, TOKA_E_INPUT, "JSON: %s at byte %zu", what, (size_t)(r->p - r->start));
    return false;
}

static json *json_node(json_reader *r, int type) {
    if (r->n == r->cap) {
        r->cap = MAX(r->cap * 2, (size_t)64);
        r->nodes = mem_realloc(r->nodes, r->cap * sizeof *r->nodes);
    }
    json *v = &r->nodes[r->n++];
    *v = (json){.type = (uint8_t)type};
    return v;
}

static void json_space(json_reader *r) {
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t')) r->p++;
}

/* Bytes of the UTF-8 sequence at p (1 to 4), 0 if it is not well formed (Unicode table 3-7). */
static int utf8_len(const char *p, const char *end) {
    unsigned char a = (unsigned char)p[0], b = end - p > 1 ? (unsigned char)p[1] : 0;
    if (a < 0x80) return 1;
    int n = a >= 0xC2 && a <= 0xDF ? 2 : (a & 0xF0) == 0xE0 ? 3 : a >= 0xF0 && a <= 0xF4 ? 4 : 0;
    if (!n || end - p < n || (b & 0xC0) != 0x80) return 0;
    if ((a == 0xE0 && b < 0xA0) || (a == 0xED && b > 0x9F) || (a == 0xF0 && b < 0x90) || (a == 0xF4 && b > 0x8F)) return 0;
    for (int i = 2; i < n; i++)
        if (((unsigned char)p[i] & 0xC0) != 0x80) return 0;
    return n;
}

/* Writes code point c as UTF-8 to p (room for 4); returns its bytes. */
static int utf8_put(char *p, uint32_t c) {
    if (c < 0x80) return p[0] = (char)c, 1;
    if (c < 0x800) return p[0] = (char)(0xC0 | c >> 6), p[1] = (char)(0x80 | (c & 63)), 2;
    if (c < 0x10000)
        return p[0] = (char)(0xE0 | c >> 12), p[1] = (char)(0x80 | (c >> 6 & 63)), p[2] = (char)(0x80 | (c & 63)), 3;
    p[0] = (char)(0xF0 | c >> 18), p[1] = (char)(0x80 | (c >> 12 & 63));
    return p[2] = (char)(0x80 | (c >> 6 & 63)), p[3] = (char)(0x80 | (c & 63)), 4;
}

static int json_hex4(json_reader *r) { /* four hex digits at p, -1 if not */
    int v = 0;
    if (r->end - r->p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int c = r->p[i], d = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
    }
    r->p += 4;
    return v;
}

/* After "\u": one code point, a surrogate pair joined, a lone surrogate replaced. False if the digits are wrong. */
static bool json_unicode_escape(json_reader *r, uint32_t *c) {
    int hi = json_hex4(r);
    if (hi < 0) return json_fail(r, "\\u needs four hex digits");
    *c = (uint32_t)hi;
    if (hi < 0xD800 || hi > 0xDFFF) return true;
    *c = 0xFFFD;
    if (hi > 0xDBFF || r->end - r->p < 6 || r->p[0] != '\\' || r->p[1] != 'u') return true;
    const char *back = r->p;
    r->p += 2;
    int lo = json_hex4(r);
    if (lo < 0) return json_fail(r, "\\u needs four hex digits");
    if (lo >= 0xDC00 && lo <= 0xDFFF) *c = 0x10000 + ((uint32_t)(hi - 0xD800) << 10) + (uint32_t)(lo - 0xDC00);
    else r->p = back;
    return true;
}

/* The rest of a string from its first escape on: `head` is what came before. p stands on the backslash. */
static bool json_escaped(json_reader *r, str head, json *v) {
    const char *close = r->p; /* the unescaped text is never longer than the escaped one: measure, then write */
    while (close < r->end && *close != '"') close += *close == '\\' ? 2 : 1;
    if (close >= r->end) return r->p = r->end, json_fail(r, "string without an end");
    char *out = arena_alloc(r->a, head.n + (size_t)(close - r->p) + 1), *w = out + head.n;
    memcpy(out, head.p, head.n);
    for (;;) {
        unsigned char c = (unsigned char)*r->p;
        if (c == '"') break;
        if (c < 0x20) return json_fail(r, "control character in a string");
        if (c != '\\') {
            int n = utf8_len(r->p, r->end);
            if (!n) return json_fail(r, "invalid UTF-8");
            memcpy(w, r->p, (size_t)n);
            w += n, r->p += n;
            continue;
        }
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        const char *k = r->p[1] ? strchr(from, r->p[1]) : NULL;
        uint32_t u;
        if (k) {
            *w++ = to[k - from];
            r->p += 2;
        } else if (r->p[1] == 'u') {
            r->p += 2;
            if (!json_unicode_escape(r, &u)) return false;
            w += utf8_put(w, u);
        } else {
            return json_fail(r, "unknown escape");
        }
    }
    *v = (json){.type = JSON_STRING, .n = (uint32_t)(w - out), .s = out};
    r->p++;
    return true;
}

static bool json_string(json_reader *r) { /* p stands behind the opening quote */
    json *v = json_node(r, JSON_STRING);
    const char *s = r->p;
    for (;;) {
        while (r->p < r->end && (unsigned char)*r->p >= 0x20 && (unsigned char)*r->p < 0x80 && *r->p != '"' && *r->p != '\\')
            r->p++;
        if (r->p == r->end) return json_fail(r, "string without an end");
        if (*r->p == '"') break;
        if (*r->p == '\\') return json_escaped(r, (str){s, (size_t)(r->p - s)}, v);
        int n = (unsigned char)*r->p < 0x20 ? -1 : utf8_len(r->p, r->end);
        if (n <= 0) return json_fail(r, n < 0 ? "control character in a string" : "invalid UTF-8");
        r->p += n;
    }
    v->s = s;
    v->n = (uint32_t)(r->p++ - s);
    return true;
}

/* Decimal text (already checked) to double, whatever the host program's locale. */
static double json_strtod(str s) {
    char tmp[64], *z = s.n < sizeof tmp ? tmp : mem_alloc(s.n + 1);
    memcpy(z, s.p, s.n);
    z[s.n] = 0;
    char *dot = strchr(z, '.');
    if (dot) *dot = *localeconv()->decimal_point;
    double f = strtod(z, NULL);
    if (z != tmp) free(z);
    return f;
}

static bool json_number(json_reader *r) {
    const char *s = r->p;
    bool exact = true, neg = *r->p == '-';
    uint64_t u = 0;
    r->p += neg;
    if (r->p == r->end || !isdigit((unsigned char)*r->p)) return json_fail(r, "digit expected");
    if (*r->p == '0' && r->p + 1 < r->end && isdigit((unsigned char)r->p[1])) return json_fail(r, "leading zero");
    for (; r->p < r->end && isdigit((unsigned char)*r->p); r->p++) {
        unsigned d = (unsigned)(*r->p - '0');
        if (u > ((uint64_t)INT64_MAX - d) / 10) exact = false;
        else u = u * 10 + d;
    }
    if (r->p < r->end && *r->p == '.') {
        exact = false;
        if (++r->p == r->end || !isdigit((unsigned char)*r->p)) return json_fail(r, "digit expected after the point");
        while (r->p < r->end && isdigit((unsigned char)*r->p)) r->p++;
    }
    if (r->p < r->end && (*r->p | 32) == 'e') {
        exact = false;
        if (++r->p < r->end && (*r->p == '+' || *r->p == '-')) r->p++;
        if (r->p == r->end || !isdigit((unsigned char)*r->p)) return json_fail(r, "digit expected in the exponent");
        while (r->p < r->end && isdigit((unsigned char)*r->p)) r->p++;
    }
    json *v = json_node(r, JSON_NUMBER);
    v->exact = exact;
    if (exact) v->i = neg ? -(int64_t)u : (int64_t)u;
    else v->f = json_strtod((str){s, (size_t)(r->p - s)});
    return true;
}

static bool json_literal(json_reader *r, str word, int type) {
    if (!str_starts((str){r->p, (size_t)(r->end - r->p)}, word)) return json_fail(r, "value expected");
    r->p += word.n;
    json_node(r, type);
    return true;
}

static bool json_open(json_reader *r, int type) {
    if (++r->depth > r->limits.depth) return json_fail(r, "nested too deep");
    json *v = json_node(r, type);
    v->skip = r->open;
    r->open = r->n;
    r->p++;
    return true;
}

static void json_close(json_reader *r) {
    json *v = &r->nodes[r->open - 1];
    size_t self = r->open - 1;
    r->open = v->skip;
    v->skip = r->n - self;
    r->depth--;
    r->p++;
}

/* One value, or the opening of a container. */
static bool json_value(json_reader *r) {
    switch (r->p < r->end ? *r->p : 0) {
    case '{': return json_open(r, JSON_OBJECT);
    case '[': return json_open(r, JSON_ARRAY);
    case '"': return r->p++, json_string(r);
    case 't': return json_literal(r, STR("true"), JSON_TRUE);
    case 'f': return json_literal(r, STR("false"), JSON_FALSE);
    case 'n': return json_literal(r, STR("null"), JSON_NULL);
    case '-': case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7': case '8': case '9':
        return json_number(r);
    default: return json_fail(r, r->p < r->end ? "value expected" : "text ends too early");
    }
}

static bool json_key(json_reader *r) {
    json_space(r);
    if (r->p == r->end || *r->p != '"') return json_fail(r, "member name expected");
    r->p++;
    if (!json_string(r)) return false;
    json_space(r);
    if (r->p == r->end || *r->p != ':') return json_fail(r, "':' expected");
    r->p++;
    json_space(r);
    return true;
}

/* Inside the innermost container, behind an element or its opening: closes it, or steps to the next element.
 * *more says whether a value follows. */
static bool json_step(json_reader *r, bool first, bool *more) {
    json *c = &r->nodes[r->open - 1];
    bool object = c->type == JSON_OBJECT;
    char close = object ? '}' : ']';
    json_space(r);
    if (r->p == r->end) return json_fail(r, "text ends too early");
    if ((*more = *r->p != close) == false) return json_close(r), true;
    if (!first) {
        if (*r->p != ',') return json_fail(r, object ? "',' or '}' expected" : "',' or ']' expected");
        r->p++;
        json_space(r);
    }
    c->n++;
    return !object || json_key(r);
}

static bool json_document(json_reader *r) {
    json_space(r);
    if (!json_value(r)) return false;
    while (r->open) {
        bool first = r->nodes[r->n - 1].type >= JSON_ARRAY && r->open == r->n, more;
        if (!json_step(r, first, &more)) return false;
        if (more && !json_value(r)) return false;
    }
    json_space(r);
    return r->p == r->end || json_fail(r, "text goes on behind the value");
}

/* Parses one document. Nodes and unescaped strings live in `a`, other strings in `text`. NULL: *e says why. */
static const json *json_parse(arena *a, str text, json_limits limits, toka_err *e) {
    json_reader r = {.p = text.p, .start = text.p, .end = text.p + text.n, .a = a, .limits = limits, .e = e};
    if (text.n > limits.max_bytes || text.n > UINT32_MAX) {
        fail(e, TOKA_E_INPUT, "JSON: %zu bytes, at most %zu are taken", text.n, limits.max_bytes);
        return NULL;
    }
    json *root = NULL;
    if (json_document(&r)) root = memcpy(arena_alloc(a, r.n * sizeof *root), r.nodes, r.n * sizeof *root);
    free(r.nodes);
    return root;
}

/* ---- Walking ---- */

static bool json_is(const json *v, int type) { return v && v->type == type; }
static const json *json_next(const json *v) { return v + (v->type >= JSON_ARRAY ? v->skip : 1); }

/* for each element `it` of array or each key `it` of object (its value is it + 1) */
#define JSON_EACH(it, array) \
    for (const json *it = (array) + 1, *it##_end = json_next(array); it < it##_end; it = json_next(it))
#define JSON_MEMBERS(key, object) \
    for (const json *key = (object) + 1, *key##_end = json_next(object); key < key##_end; key = json_next(key + 1))

static str json_str(const json *v) { return json_is(v, JSON_STRING) ? (str){v->s, v->n} : (str){"", 0}; }
static bool json_true(const json *v) { return json_is(v, JSON_TRUE); }
static double json_num(const json *v, double otherwise) {
    return !json_is(v, JSON_NUMBER) ? otherwise : v->exact ? (double)v->i : v->f;
}
static int64_t json_int(const json *v, int64_t otherwise) { return json_is(v, JSON_NUMBER) && v->exact ? v->i : otherwise; }

static const json *json_get(const json *object, const char *name) {
    const json *found = NULL;
    if (!json_is(object, JSON_OBJECT)) return NULL;
    JSON_MEMBERS(key, object) if (str_is((str){key->s, key->n}, name)) found = key + 1;
    return found;
}
static const json *json_at(const json *array, size_t i) {
    if (!json_is(array, JSON_ARRAY) || i >= array->n) return NULL;
    JSON_EACH(it, array) if (i-- == 0) return it;
    return NULL;
}

/* ---- Writing ---- */

/* A comma if the last byte ends a value. No value ends in one of "{[:," or a line feed, so no state is needed. */
static void json_comma(buf *b) {
    if (b->n && !strchr("{[:,\n", b->p[b->n - 1])) buf_char(b, ',');
}
static void json_put_open(buf *b, char c) { json_comma(b), buf_char(b, c); }
static void json_put_close(buf *b, char c) { buf_char(b, c); }

/* A string with its quotes; bytes that are not UTF-8 become U+FFFD. */
static void json_put_str(buf *b, str s) {
    json_comma(b);
    buf_char(b, '"');
    for (size_t i = 0; i < s.n;) {
        unsigned char c = (unsigned char)s.p[i];
        int n = utf8_len(s.p + i, s.p + s.n);
        if (c == '"' || c == '\\') buf_printf(b, "\\%c", c);
        else if (c == '\n') buf_c(b, "\\n");
        else if (c == '\t') buf_c(b, "\\t");
        else if (c < 0x20 || c == 0x7F) buf_printf(b, "\\u%04x", c);
        else if (!n) buf_c(b, "\xEF\xBF\xBD");
        else buf_put(b, s.p + i, (size_t)n);
        i += (size_t)MAX(n, 1);
    }
    buf_char(b, '"');
}
static void json_put_key(buf *b, const char *name) { json_put_str(b, str_c(name)), buf_char(b, ':'); }
static void json_put_int(buf *b, int64_t i) { json_comma(b), buf_printf(b, "%lld", (long long)i); }
static void json_put_bool(buf *b, bool v) { json_comma(b), buf_c(b, v ? "true" : "false"); }
static void json_put_null(buf *b) { json_comma(b), buf_c(b, "null"); }

/* The shortest decimal that reads back as the same double (is_float: the same float); null for what JSON cannot say. */
static void json_put_num(buf *b, double f, bool is_float) {
    char z[40];
    if (!isfinite(f)) {
        json_put_null(b);
        return;
    }
    for (int digits = is_float ? 6 : 15;; digits++) {
        snprintf(z, sizeof z, "%.*g", digits, f);
        double back = strtod(z, NULL);
        if (digits == 17 || (is_float ? (float)back == (float)f : back == f)) break;
    }
    for (char *c = z; *c; c++)
        if (*c == *localeconv()->decimal_point) *c = '.';
    json_comma(b);
    buf_c(b, z);
}

/* ===========================================================================
 * MARK: 5. Unicode [pure]
 * Classes of code points, normal form C, and what becomes of bytes that are not UTF-8.
 *
 * In: UTF-8 text. Out: the same text repaired (uni_repair) or normalized (uni_nfc), and one byte of properties per code
 * point (uni.props), which the tokenizer's patterns are made of. All of it comes from three strings that
 * test/make_unicode.py writes; uni_init unpacks them into a struct that its owner keeps, so there is no global state.
 *
 * Which Unicode: the one whose tokens the models were trained on. Hugging Face `tokenizers` runs its patterns on Unicode
 * 16.0 and its form C on Unicode 9.0. Classes here are of 16.0. For form C the caller chooses: UNI_9 leaves alone what
 * came after 9.0, UNI_16 is today's. Both agree on text of characters that are older than 2017.
 *
 * Always holds: a 32-bit set of classes (1u << class) says what a pattern's \p{..} says; U+110000 and above never occur,
 * because every function but uni_repair takes text that is valid UTF-8. Not here: upper and lower case, forms D, KC, KD.
 * =========================================================================== */

enum uni_class { /* General_Category, and two of its controls apart */
    UNI_LU, UNI_LL, UNI_LT, UNI_LM, UNI_LO, UNI_MN, UNI_MC, UNI_ME, UNI_ND, UNI_NL, UNI_NO, UNI_PC, UNI_PD, UNI_PS, UNI_PE,
    UNI_PI, UNI_PF, UNI_PO, UNI_SM, UNI_SC, UNI_SK, UNI_SO, UNI_ZS, UNI_ZL, UNI_ZP, UNI_CC, UNI_CF, UNI_CS, UNI_CO, UNI_CN,
    UNI_SPACE_CONTROL, /* Cc: \t \v \f U+0085 */
    UNI_LINE_END       /* Cc: \r \n */
};

enum { UNI_9, UNI_16 };

#define UNI_BIT(class) (1u << UNI_##class)
#define UNI_UPPER (UNI_BIT(LU) | UNI_BIT(LT))
#define UNI_MARK (UNI_BIT(MN) | UNI_BIT(MC) | UNI_BIT(ME))
#define UNI_LETTER (UNI_BIT(LU) | UNI_BIT(LL) | UNI_BIT(LT) | UNI_BIT(LM) | UNI_BIT(LO))
#define UNI_NUMBER (UNI_BIT(ND) | UNI_BIT(NL) | UNI_BIT(NO))
#define UNI_PUNCT (UNI_BIT(PC) | UNI_BIT(PD) | UNI_BIT(PS) | UNI_BIT(PE) | UNI_BIT(PI) | UNI_BIT(PF) | UNI_BIT(PO))
#define UNI_SYMBOL (UNI_BIT(SM) | UNI_BIT(SC) | UNI_BIT(SK) | UNI_BIT(SO))
#define UNI_SPACE (UNI_BIT(ZS) | UNI_BIT(ZL) | UNI_BIT(ZP) | UNI_BIT(SPACE_CONTROL) | UNI_BIT(LINE_END)) /* \s */

#define UNI_MAX 0x110000
#define UNI_UNSTABLE 32 /* props: form C may change this character or join it to the one before (NFC_Quick_Check not Yes) */

typedef struct uni_pair { /* canonical decomposition c -> a b */
    uint32_t c, a, b;     /* b 0: c -> a alone */
    bool composes;        /* a b -> c too */
    bool young;           /* after Unicode 9.0 */
} uni_pair;

typedef struct uni_marks { /* code points first .. last have this combining class */
    uint32_t first, last;
    uint8_t class;
    bool young;
} uni_marks;

typedef struct uni {
    uint8_t *props;        /* [UNI_MAX] uni_class | UNI_UNSTABLE */
    uni_marks *marks;      /* [n_marks] rising */
    uni_pair *pairs;       /* [n_pairs] rising in c */
    uni_pair *compositions; /* [n_compositions] rising in (a, b) */
    int n_marks, n_pairs, n_compositions;
} uni;

/* begin of test/make_unicode.py's text */
/* (run length - 1) * 32 + class */
static const char uni_class_text[] =
    "Hf{|Ay|PvsBjpBjjknoniAlHuAlBkAlWojnkqhqWpjokoEl{XfsnCjrnqralowrqroAeq^AlqgamBcnTuoEsUtoFr]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^]^]^]^]^]^]^]^]^]^]^]^]^]~]^]^]^]^]^]^]^]~]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^}^]^]A|}^]^}^A{~By^}^A{A|}^"
    "}^]^]^}^]~]^}^A{^]^}~a]A|B}]_^]_^]_^]^]^]^]^]^]^]^]~]^]^]^]^]^]^]^]^]~]_^]^A{^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]"
    "^]^]^]^]^]^]^]^]^]Et}^}~]^By^]^]^]^]BH^A_WpP`CkJlLyCzFe`q`OsCTr]^]^`q]^Ax`A|n]CtAo]nA{z]z}^O_zGoAD^]~A{A|]^]^]^]^]^]^"
    "]^]^]^]^]^]Cx]^o]^}~AS_APf]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^rC|Ab]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^}^]^]^]^]^]^]~]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^zAFyA"
    "x`EdAItniAxAppzAMpibnA`nA`nbGlXqCtB}AlJfEmBkAlpAlApIpnwBjAAg`HqR~HuChA_bCHinaExwrDzA^A`rB~A_HuB]ApaLvzwab[kXrAxBZ}Ipa"
    "M`HuABeGtA^rBj`AxbAnS{B~`Gt`B^`C|AxMtzVuB^AxnzIoDrUwqDyzAuDrGtAIw`UxwAAhcAV]bcbaB_FvC]bAaaExHqA`AlHun`MgbAazFuAxA_AxS"
    "{zEwzaBvB}AxbaB_B~AxAaAxAabaGlcCtA_zB]A`AxHuA_AnE]rpanbAxA`czDyCtA_AxS{zEwzA_zA_zA_AxbzB_A`CtA`AxB^BvbFnB}zaFnHuA`B]b"
    "nIhA`czGszB]zS{zEwzA_zC{AxbaB_C|zA`czAabAxaN^A_A`AxHunpFnaDzzbAazFuAxA_AxS{zEwzA_zC{AxbacbcB~AxAaAxAabFnA`cCtA_zB]A`A"
    "xHuraE]IhbazDyBvB]zB}BvA_zazA_BvA_BvB]BvJmCtAabAaBvB_zB_bAxaEpcM`HuBcEhprDrbB_bFuzB]zTyzNeAxbaB^C]zB^zB~FnA`zB]AxaAxA"
    "_A`AxHuFnnE}rabAanFuzB]zTyzHqzC{AxbacbC}zbAazAaA`FnAaEpA_zA_A`AxHuzA_cKdA`AaGszB]zAIwA`aB_B~zB_zB_barCtB]cE}B]A`AxHuG"
    "yrDyzbAazPaBvUwzGszaAxEwBvbCtB_B^zbzFwEpHuAxAanKdAPibA_ExCtpDy`FvnHuAlAFvA_zazC{zUwzazHqbA_GtaAxC{z`zExzHuAxB}AB^aBnM"
    "trnBnA`EhHuHwrbrbrbjkjkAaFuzAE_CtLjcC|nA`C{IpzAE`zGdbEhzApDfClAlAFvAKsAaB~cDzcA`AaA`aHuEdDyAaA`B}B^aB_A_EyB]B~KkbAaA`"
    "D{bacHuB_bApAFyz]Dr]AxAKpn`A|K@yzB}AxEwzazB}AxAIwzB}AxABezB}AxEwzazB}AxMgzAXyzB}AxBFeAxB^H^RcBvNeI`EpBX]AxDvAxiTVurnO"
    "csWsjkBvBMwBjBbFuFnPaB^cHjQ_A`cAlHjPaA`KdKkzB]zA`KdATaA`cExFwbAaIpBj`BjpabAxHuEpHwEpEdiChB^wbHuEpADa`AU_FnC{A`ACcbaDr"
    "BI_IhA@izB^C]A`B_CtAabD{B^CtrBvAlHu[kAxC{JfALqCtWsEpHugBvACtTyA`AabAxAlAU_cbcExzbcbAaFvD{HrAxbHuEpHuEpFb`EdAxLjdNfAR^"
    "B~cAOkbcC|cbC}bAaFuzAlHuFbI`GtHbBjA`c[kcB~AaA`cB^A_HuALqbcA`B_bcB^AaGlChAE_FwFvAaA`BvDfHuBvB]Hu[kDxAlGp]^DrAKoAxA{G`G"
    "lB^nKlcExB}bDybA_cA`aDrALnBBlKh`AC`AE~BCl]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]Gp]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^"
    "]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]GpFqDvAxDuAxFrFqFrFqDvAxDuAxFrz]z]z]z]FrFqLfAxFrFsFrFsFrFsCxz~"
    "By_q^BmA|z~By_BmBzAx~ByzBmFrCwBmAxA|z~By_AozJ_DoE_AllmjAjmjlG`tuDosH^lmChAfBjojkI|onhH~sDozIeg`AxE]Bkjk`HwBkjkzKjBvAB"
    "tN^KlC^bB`JnN^Ap]Cl]Ap^A{~A{^r]ApoCwEh]r]r]rByr^By^B}^Ap~}Dg]BzroAp^rNkADf]^C`gApCtDgDjAmCloApoApoFfoA@zAmAporoA@zH[y"
    "GdjkjkRnAmFfjkBS|o[|WaAIhEeBKlTrJ^StA[yBQ`T_FC|oHboAVnGaCTboHI`jkjkjkjkjkjkjk[qAM`DgjkA@wjkjkjkjkjkNsHPrDJ{jkjkjkjkjk"
    "jkjkjkjkjkjkBB{jkjkAAujkHRkAPzSiApEeAHjAxAAxzCNnAPeAPf]^A{~]^]^]^By^]~]DvA^A{^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]"
    "^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]~Eh]^]^B^]^DrChgAlAFzz^Dr^AxAW{Fn`nM`bTyHjEwzEwzEwzEwzEwzEw"
    "zEwzEwzAAhAllmlmBjlmnlmH^iAlinlmAllmjkjkjkjkDf`H~AgChinjKxApBjjkjkjkjkiAC|XbzB[lKdGE`XjNvsBjr`afjkjkjkjkjkApjkjkjkjki"
    "jAirGxB~AaiCzApBb`anApzBXaAxA`AoA^aiB[{nA~aDrAKszCCszApCaI`AAgAGlHjrNeA@zzHw[|F{rMmAAxHwAHjMmJTzGYOkBC|YFHa`AJJ}BvAWl"
    "HjAHyDxAlH[k`BjNeHuA_Rv]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^abB`nHrn`]^]^]^]^]^]^]^]^]^]^]^]^]^]^A^A`BI_HvA`"
    "EdGlUgGrAo]^]^]^]^]^]^]A|]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^]^`Fr]^]^}^]^]^]^]^`Ao]^]^a]^]A|"
    "]^]^]^]^]^]^]^]^]^]^Cw^Cw^]^]^]^]^]^]^]^By^]^}^Ax]^z^z^]^]^]^]StA~]^aA^^EwbB]bB}bTyAaA`cClbBvE]ApprEpATaChGlAaAReNgA`"
    "GlAlHuEpPbDyBjanA_bHuYoFvAlTyIpAaJfnZmBvB^cAOkbAaB~AaA`B_Kxz`HuCtAlC{b`GsHuC{zAIwDzAaA`AaA`HjB]bFubcAxHuAxChNe`DyBnac"
    "bcARebaB^A_A`C{A`abaVnA_`AlIocA`AaAlaA^cbIhDyAxDyAxDyHjEwzEwzAKpqB|Gp`AoCtBRjADaAabAabAancbAxHuEpMKN]KdTyCtAQgCtBLWjG"
    "SCkLGsAxCN}AGtEtKdCxDrabHqoKkzC{zazA_zA_zCPyOsN~LDykjNvBCkAxAV]FnrAB^JmpBnNfFbjknEpNfnAgAfjkjkjkjkjkjkjkjkAljkChBdBjz"
    "ChijkjkjkBjoiBkznpAlCtC{zDNeAxwzBjpBjjknoniAlHuAlBkAlWojnkqhqWpjokojknjkAlHq`AMoA^A@iBvDyAxDyAxDyAxB]BvAnoqrAnzrCiApI"
    "hBsApAxJmzWszQ_zA_zMgAxLiAC|DB}DrBjCtAMuBvHbAUdCaOtAeBnzK|BvrAPbAN^bDJfZmBvAQgN^bXwCtAAgCaHjR]fFufDrAF}C|Dr[kznAE_CtF"
    "unD^AKlAHuAHvBPqAxHuEpAD}CtAD~CtAHyGlATaJfnIkzMczEsz}zIlzMdzEtz~BvATaKdJK{HjS{IhFuVnDxzAJtzGrBHzDyAxazALqzA_BvaAxTyzn"
    "F{TyApE}A@iGlGyAQ`Q_zA_DrD_S{E]BvnWsDrnBDbAW{CtAeA_NkAxANsaB^zA`DrB~B}zB]zZmAxB^CtbGyFnH^FnZmAenZmBcAB^FurYoA`CtD_FbH"
    "jAV]BvFbS{AxF{Q_DrF{PaFnChKdE}BSdBK{AWtAS_LbAS`FnE]AE_B~GlHuEpHuB}`aSwBvC|i`SxGlAmF[tA@ozAJuzA`iAxA_N~B]AWtB~ZmHwaGlS"
    "{IpCaDfTrPaB~ChAGtR}E}RvTyHjcbcAU_MhFbCtRcHubA_A`aHjB^cAMoB_B~AaA`AlwChbIhwAxVuFnHuEpB^AE_C|cFvzHuChaAaaGlADabAlaHjA`"
    "cAPiB_GtAaB}ChB~ncbHuanaBjzRcJfPazVuB_B^AabcA`EdbA_bBBfEwzazB}zMgzHqnEpAOkbB_FvDrHuEpA`AazFuAxA_AxS{zEwzA_zC{zA`aAabC"
    "]AxAaAxB_AxaEpcDrC{AaAxExBvC|JfHqzaAxazAF}zaB_DzzcAxczC]zAabcbabaAlzAlGlA`[dAU_B_FvAaB^cbB}DfHuAlznbB]A@bAPiB_DzcbC]A"
    "`cA`A_naGlHuEPbAOkB_B~AxC]A`cA`UdB}A`AC|APiB_FvAabcA`BjaJfHuEpKxQxAKsbcbAaDzcbanEpHuEpRaZfXqAxbcbAaB~cC|CtHuAeBjrEwFF"
    "^ALqB_GtcA`nCJ^AAcAAdHuGyKdFuAxaAxFuzA_zUwD{zAaAxA`cbacacbBjHjHuBIxFuAxAG{B_B~AxA`C]banacYhaHrAHyDzcaB~G`bGlaDzAaB^AN"
    "mKlcA`BjaDfLbBK{FnH~FCdABenM`HuEpGszAF]cExzDzcbaDfIhHuQeBvAl[kAxS|zcExcA`cA`BLrEwzA_zAF}DzBvbzA`zExabGlHuEpDyzA_zAAgC"
    "}zA`zAabcbaFnHuJKtQ_A`AaAlFnA`acKkzACcAaC|BvAabcbKxHubBW|aN^SaGdCjOtLbnABZ}CK|CSxzDfJfFOsCDPzCFmAlLbAH@aN{bDyMhIhDVGc"
    "DrSO{HEZn[kJnB_B^HuBBG|SBuFnA@izHuCtAlBQozHuEp[kAxC|nIhAPiExDfClB|nrIhHuzE}zR}DrQ_NNnA~AHyA^BjHuFRfAAcAAdU]ChCJ~BMwCt"
    "baAW]FnB~KjBDbA^n`bJfAaM`GJFeGlAMPiAJnHqJTIhB|zEvzA^zIU_N^a[dB]AxaM`B}GlMG{BUPbCO{DrKkBvGsFnHqAxrA`nCqDTDrHApHuEpNR^B"
    "OlANnAxTzHjCXzB@jHGdIhAHjAxB@bAaB^BnD{GiFvApEx[|B~BA`StBExB^rDBvRcKdRcKdBYpHjV{DN~WoWpWoEtzP^WoWp]z}Ax]Ax}AxByzFqBzz^"
    "zEtzIlWoWp}zByAxFqzEszWp}zByzCwz]BvEszWpWoWpWoWpWoWpWoWpWoWpWoYlAxVqoVroDvVqoVroDvVqoVroDvVqoVroDvVqoVroDv]^AxARiQEpA"
    "V~ClARfGdbLzbApDfN^C|zMhAIB~HnaQ|EpDvGDjExzOdAxExzA`zC|DrBAnAB~bCUhAMoBvExEvAxHuCtarJU`[kbO|ALqB~HuDrpOPrXq`B~HuGEh[k"
    "A`aHuCtnPCtEwzB}zA_zMgzFPqAxGyExAJnAC_AC`Ex`CtHuCtAlZJvAZ{rBcpCaBOlAMurMmFNnB}zXqzA_zaAxazHqzB}zazaEpaCtazazazB]zA_za"
    "AxazazazazazA_zaAxB}zEwzB}zB}zazHqzOcDrB]zC{zOcATzAmIB^AM`CtCIxKdMxAxMxzMxzAFnIhKqEKdAXrZ~LbAM`CtHbFnApM`EhEDzHK|DiXL"
    "zCtOtBvK|BvC[tCtCE`EpJ~CtrN^J~CtAXjGlI`EpAIhGl[|AxJ~CtApBBfKKtKdLzAxK|BvI`DrAXjFnMxAxJ^EpHbFnDZ^zCBfHuAFQhAWGZeAB^D[P"
    "yEpGLaAxFYReM`H[DqN^TXqBZXzREgAVQhEY[sDrE@XqABNLTrwA@bCFcDHjHA`BVBF^BVRV}AxBVRV}Ax";
/* gap, run length - 1, combining class * 2 + young */
static const char uni_mark_text[] =
    "VqqMo]]Ms]`L}]]Ms]]Lu]aL}]^K{]`L}]^K{]gL}]a_]`L}]dMo]]Na]]Mo]_L}]_Mo]^L}^_Mo]`L}]]Mo]]Ms]^L}]]Mo]]Mu]^Mw]]Mu]^Mw]]Mu]"
    "iMoH`aMoGx]L}]`Mo]]L}]_Mo]]M_]]L}]bMo]bL}]^Mo]]L}]^Mo]]M_]]Mk]]Mo]]q]]s]]u]]w]]y]]{]]}]]A]]]A_]^Aa]]Ac]]Ae]]Ag^]Ai^]A"
    "k]]Am^]Mo]]L}^]A_BadMo]]Aw]]Ay]]A{Ak]Aq]]As]]Au]]Aw]]Ay]]A{]]A}]]B]]^Mo]^L}]aMo]]L}]^Mo]]L}m]B_B~cMo_`Mo]]L}]]Mo_^Mo^"
    "]L}]^Mo]]L}A^]Ba{]Mo]]L}]^Mo]]L}]^Mo]_L}]]Mo]^L}]]Mo]]L}]_Mo]]L}]]Mo]]L}]]Mo]]L}]]Mo]]L}]^MoDucMo]]L}]]Mof]L~u`Mo^eMo"
    "^_Mo^aMoAf_L}Av^Mp]_L~]`MpAeaMp]aL~]jMo^]L}]^Mo]]L}]^Mo]]L}]_Mo]_L}]]Aq]]As]]Au]_Mo]]L}]^Mo]^L}]aMoAw]km]o`]Mo]]L}]^M"
    "oC^]km]oAk]MpAx]km]oCe]km]oCe]km]oCv]oCe]lm]od]D}]]EiB~]km]oCd^pm]oCs]oCd^F_]]oj`FgCc^F}]]pj`GcBe^L}x]L}^]L}^]LuAr]Gq"
    "]]Gs^]Gwb`Gs_]Gs^^Mo]]o^^MoAy]L}Cg]k^^oBk]L}Ub_Mo[{]o]]p{]oDr]og]MoE~]MkDd]M_]]Mo]]L}Fl]Mo]]L}B`]oqdMo_]L}AkaMo]bL}]^"
    "Mo]]L}^^L~]^Mp]^L~]aMp]]L~]`MpB~]kl]oAa]Mo]]L}]cMoAq^oAu]kh^oA~]kDm_Mo^]_]aL}]^Mo]`L}]]Mo^c_a]L}c]Mo`^MoEy^Mo]]L}]cMo"
    "]]L}]^Mo]]Mw]]Lq]]L}]]K{]A_Mo]]Mt]^Ml]]L~]]Lz]]Mo]]Mu]]L}]]Mo]]L}Uc^Mo]^_]`Mo]__]^Moa]Mo`^_]]Mo]]L}]]Mo]^_]`L}]]MoCFg"
    "_MoDb]oBy|MoPg]Ly]]Mk]]Ms]]M_]^McC`^mACSc]MoafMo}^MoBi^MoHa]oA`]pDl]oxnMoAt_L}A`]oBx]ki]oG^]Mo^^Mo]]L}_^Mob^Mo^]MoAo]"
    "oGe]oUHe]AoVrcMo]cL}]^MoA@r]L}Fs]L}DjaMoAUm]L}^]MoAc]Mo]]_]]L}a]oDz]Mo]]L}Pz`MpA|aMpIh^MpBi_L~B_^L~]_Mp]]L~]]Mp]`L~Al"
    "]Mp]]L~]]Mp]]L~Es]oAd]pk]oAt]o]]kB^_MoAk^oAy]kBe]of]kCa]o]]kEe]k]]oBi]l]]km]oucMo`aMoBr_pCh]o`]kt]MpB|]o]]kGj]o]]kCu]"
    "oCm]o]]kCj]oG|]p]]lGq^pa]lDq]pBl]po]pBj]pLj]oGq]l^^pBj]pLn^pQTi]pBQka_AvcMoAGp^jTQg]_EPk^Lu]__`]Mg]aLuedL}_aMo]^L}{`M"
    "oDi_MoCSjcMo^mMo_cMo^^Mo^aMoB}]MpDucMpK^]MpAx`MpN}^Mt]]L~]]MpGm]Mp]]L~UscL}CdbMo]]k";
/* gap * 6 + kind * 2 + young, first, second (not for kind 2, one alone) */
static const char uni_pair_text[] =
    "AE{CyAQcc]_c]_c]_c]gc]aiaAucaBfc]_c]_c]icelc]_c]_c]iigfc_bc]_c]_c]_c]goilc]_c]_c]icejom^c]_c]_c]_c]gc]aiaAucaBfc]_c]_"
    "c]icelc]_c]_c]iigfc_bc]_c]_c]_c]goilc]_c]_c]iceji]kcCfdcA{]cAzacA{]cAzB]cA{]cAvBfcA{]cAz_cA{]cAzgcA{]cAzgcA{]cAx]cA{]"
    "oAxlcA{]cAzacA{]cAz_cA{]cAzA}cA{]cAzArcA{]cAvpcA{]cAzecA{]cAz_cA{]cAzA{cA{]cAxBbcA{]oAx_cA{]cAz_cA{]cAzacA{]cAzB]cA{]"
    "cAzA|u_fcA{]cAxBccA{]iAxBdcA{]cAzBecA{]cAzApcA{]{AvrcA{]cAzBecA{]cAzApcA{]uAxlcA{]cAzacA{]cAzgcA{]oAtpcA{]cAzBecA{]cA"
    "zApcA{]cAxrcA{]cAz_cA{]cAzBccA{]cAzApcA{]cAxAqcA{]cAzApcA{]oAxncA{]cAz_cA{]cAzacA{]cAzecA{]cAz_cA{]cAzAucA{]cAvBdcA{]"
    "cAv]cA{]cAzic_jcA{]cAzicA{]cAzgcA{]F]Bn{cA{]BmAn]cA{]EaC^zcA{]cAj]cA{]cAn]cA{]cAn]cA{]cF_lcA{]cAzbcA{]cAzscA{]cAztcA{"
    "]iCfecA{]cR}]c_]cTv]cA{]oIhmcA{]cAr]cA{]cArAscA{]cVgB`c_]cC^mcL{]cADl]uB^rcA{]oAl^cA{]cEa_cA{]cAx]cA{]cx]cA{]cJvycA{]"
    "cAzacA{]cAr`cA{]cAzacA{]cAr`cA{]cAzacA{]cAn`cA{]cAzacA{]cAt`cA{]cAzacA{]cAt`cA{]cAzacA{]cA~AecA{]cAx]cA{]oBpAncA{]AeB"
    "ffcA{]cArA{cA{]cFsB^cA{]cA|]cA{]cIvccA{]cZgbc_]c[r]cA{]ASqAJ_g_mA_erbHqDrA{AInAeFk]cAOy]gAN|cAOc]ca]ca]ii]ii]ce]cA}]D"
    "qBzkcu]cujce]ca]ca]cA_]DqA^kcu]chjci]ce]{o]c]kGwC}lc]mi`juvk{Acjc`^csiA}r]EsA{]D_bhc]mi`juB_k{Arjc`^csiDeB{oc_]M_Epnc"
    "A{]BmBd]cA{]cAzacA{]oAp`cA{]oIqac_]cKl]cA{]cAx]cA{]oAxdcA{]cAzecA{]cAn]cA{]oJ]]c_]cK^]cA{]cBldcA{]cAzecA{]cAzccA{]cAr"
    "bcA{]oAr]cA{]AXkA@]AUqc]_cA}]cA|_cB_^[cHc]iAb]C]A]]CUoAGcAOwAkm]oc]FkAv]e_]e_]eg]eg]e_]eo]ee]S_H}Gsc]AmB{BdApe_]kw]N{"
    "GuGoqi]FeA~]e_]eg]q{]AMgPuPqo]Ajc]AmB{BdApe_]IuFqIaIoC_Alc_]c^AmU{GoGmUcGaGmAek]c]_i]AbceAaVkGgFcc_]c^AmY_HsFwi]gccfc"
    "bAeBG_Ue[wAyq]}g]}g]}g]BiAp`AyB{C|k]aeCyuk_]AsCz]CeA}CeAyq]}g]}g]}g]BiAp`SeHwGaQOgEWwEZ_ia]ia]ia]ia]ue]GeBk]ia]oa]c_]"
    "ic]DKuNNrLZhcA{]cAxAvcA{]cAzAscA{]cAzycA{]cE}BxcA{]cIpicA{]cAzAscA{]cAzycA{]cAzpcA{]cAzicA{]cJeBrc_]c^_c_]cL`BqcA{]cA"
    "zccA{]cZoBlc_]cA@j_cA{]cAxbcA{]cAxccA{]cAzAscA{]cAzApcA{]cAzAycA{]cAzkcA{]cAxacA{]cF]BvcA{]cIr]cA{]cAzB]cA{]cAzycA{]c"
    "AxxcA{]cP@qAxc_]cPBnBscA{]cAzdcA{]cAxBpcA{]cAzicA{]cAzAscA{]cAxArcA{]cAzAscA{]cAzycA{]cAzdcA{]cF_BpcA{]cAzkcA{]cEalc_"
    "]c^_c_]cNz]cA{]cAzicA{]cAv]cA{]cAzAscA{]cPBiAxc_]cPDfBscA{]cAxBlcA{]cAzAscA{]cMqArc_]cg]c_]cOPw]c_]cPDr]cA{]cAzAscA{]"
    "cAzycA{]cAzdcA{]cAxncA{]cAzucA{]cAzbcA{]cNgBpc_]c_kc_]cPffcA{]cAzA{cA{]cAxB^cA{]cAz_cA{]cAzkcA{]cAz^cA{]cAzAscA{]cAxA"
    "rcA{]cAz_cA{]cAx^cA{]cAxfcA{]cAzA}cA{]cAzycA{]cA^]cuBjccaca]iOkb{RtAscA{]cAzAncA{]cEulcA{]cAz^cA{]cAzocA{]cAzhcA{]cO["
    "{^c_]cOZ^^c_]c^^c_]c^oc_]c^hc_]cOY}cc_]cPIbAucA{]cAzAncA{]cAzhcA{]cE}`cA{]cAz^cA{]cAzocA{]cAzhcA{]cP@y^c_]cPJhkcA{]cA"
    "zAocA{]cAn]cA{]cAzAncA{]cE}lcA{]cAz^cA{]cAzocA{]cAzhcA{]cPAk^c_]cOSh^c_]c^^c_]c^oc_]c^hc_]c^A{c_]cSn]cA{]cAzAncA{]cRm"
    "lc_]c^^c_]c^oc_]c^hc_]c^A{c_]cTbB^cA{]cAzB_cA{]cAzAncA{]cAzhcA{]AeATm}c]_cNSeAbc_]c^_c_]c^Cyc_]cNUbBvc]_cNUqAbc_]c^_c"
    "_]c^Cyc_]cNSnBvc]_cNS}Abc_]c^_c_]oNUzA_c]_cNVgAbc_]c^_c_]oNThA_c]_cNTwAbc_]c^_c_]c^Cyc_]cNVtBvc]_cNWaAbc_]c^_c_]c^Cyc"
    "_]cNUbBvc]_cNUqAbc_]c^_c_]c^Cyc_]cNWnBvc]_cNW}Abc_]c^_c_]c^Cyc_]cNUvBvc]_cNVcAbc_]c^_c_]oNX`A_c]_cNXoAbc_]c^_c_]oNVhA"
    "_c]_cNVwAbc_]c^_c_]c^Cyc_]iNXtBtiNYcAbi]_i]CycNW^Bvc]_cNWmAbc_]c^_c_]c^Cyc_]cNYjBvc]_cNYyAbc_]c^_c_]c^Cyc_]cNYjCzgfco"
    "]glcq]gncs]gpc}]gwcj]gmcd]ggoNQoD_c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]cA]]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c"
    "_]c_]c_]c_]cB{]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]c_]cNYvCtc]`cNYyCycNYx]cf]igbcOA}ccOCxCtc]`c]dgrcsD_mBioARbb"
    "cPOwccNYt]cn]iobcOBoccODnD^gvc{]gxcyD_cOD]D^c]_c]CycOA~Cnc]`cA]dgCjoBkC{cA]]cBzCnc]`c]dgziOHm]c]_c]CycOD~Cnc]`cidgApc"
    "A]Aac]_ceBuci]cBdCnc]`c]dgAhcAaAccAPvAbgAOagAShoPTmD_cNY`]cg]ifbcODgccOFvD^gA`cAu]gAncAoD_gAPnsPWkg_AWyOF|yAVtgGcSqQQ"
    "yvca]Cia]EmCo]ce]c`]IiB{]{g]oc]DeAk]ia]DwAi]ok]oa]ic]D_RHr]iRJa]A}Ab]cRH~]ca]cRJe]c_]ow]c_]oc]c_]Aec]c_]ok]c_]oc]c_]F"
    "cAq]ci]c_]ca]HsBv]c_]cAc]c_]AeA{]c_]c_]c_]JuGDsg_LKuBUz]HUsBYwXKiia]ia]ia]ia]ia]ia]ia]ia]ia]ia]ia]oc]ia]ia]Aek]c]_ic^"
    "c]_ic^c]_ic^c]_ic^c]_D_C`^AwEa]Bmy]ia]ia]ia]ia]ia]ia]ia]ia]ia]ia]ia]oc]ia]ia]Aek]c]_ic^c]_ic^c]_ic^c]_ic^c]_D_C`^oDg]"
    "c_]c_]c_]us]KNSwAUBwgTB`gUK{gABdgPCdgQOdgCAygALTcg]gAIVngABJygADKzgB@ogDRugJ[}gDYcgCQggVggRugDBggTTngARsgB@igAQmgHVog"
    "GBkgDPkgALO|gBRogLRwgCVwgJVegLXogAFWzgJ@cgKUogAZ_gTUhgPSugCJogVFjgDM]gCKegB[{gPA_gAGC^gAE]gQigIQogCGegCY]gBP{gDY_gCFs"
    "gE_gDB_gD[mgBGygAJggTCrgNggBFcgCHwgHEigFD{gJP^gZXjgCHogOVagBF]gGPlgCLmgJTugEMugAEKlgAYggGJcgB@{gRcgGPugOogLZqgAHH^gXP"
    "ogYB~g|gUS_gAZugCIigIZygEX~gUXvgCXkgQTugADS`gGJ]gBFwgJM]gA@wgRMdgTJqgVD|gHOsgIMbgPO]gCZhgLTigVF~gBMigPMigGD]gCL_gPQzg"
    "SIogRYjgECrgQDkgPVzgIOqgTV~gAMagEsgLFagJ[cgB[ggDNggCUegAEVlgSqgBVcgBZkgCSagEM}gDZagOIigBOigBF{gCegAL[lgJWugBNsgSH{gZH"
    "xgARygFqgAKcgERsgADigAT}gBWagBFugAIigGYqgEMzgF@wgASmgAGAxgHegACsgOBggLY_gA@ugWPvgQsgAY_gDKmgHYkgDTfgSRrgDIugBReg[mgAG"
    "{gJN}gJwgF@ogJagIR]gBOsgDygLegAK@ngVRogLYwgBSogA@ZvgIXjgAG_gEZygDwgE@ygBJkgDEkgBK_gGYwgFEcgHB{gABRrgYQogAHJrgKGkgG_gB"
    "W{gTkgBYugSwgARegBM}gNScgAJDfgI@ggA@CkgAIVrgFZugIAegQXugYQ`gY}gCRwgFDegRW]gAHUlgA@qgDMogEEwgRogTigBGygCWigA@]gEDkgE@q"
    "gA_gDVggBTqgAHJngNUygNHvgO[egAM{gIIwgHZ{gCA{gAFigAAPtgCIkgJV{gCW`gE]gUwgEGzgADjgNJwgADPlgA@F]gZIrgB~gFV_gBF{gM[ugQYtg"
    "IM]gCLpgUVggCTjgGN{gFX`gV[fgGHjgBKwsAKcmGPisKA~gQYkgAZqgAHygB]gkgBmgP@kgNHlgAQamCKimBQwsBW_gKqyDGsgwgBqgBLmgFYfgCD_gA"
    "JEtgRkgF]gVigAqgFkgAFqgFcgEwg[wgFagB@egqgBFmgLmgBegE{gAVsgHsgJggAAkgBRmgIqgOogAFqgKagAAqgBJwgJcgsg^gmgigkgByg_gJmgCyg"
    "RwgAEcgAegCggQ}gHsgA@ugHeg]gA@agBOagG{gUigCggXagCagALigGsgCPkgPugCogAA[zgIGMmgHQJ|s[ZdgAYqgDngA@tgZsgCmgSegC]gAKugDdg"
    "D]gDggAIcgEegHog}gO{gKsgA[cgkgHmgD]gQqgF}gD`gG{gBtgHqgC{gWogEcgCcgOggPygIqgegCmgBFggCygW]gXag|gEagNygSwgCIugBY~gGcgGe"
    "gSegHwgCagMggagJ_gA]gAmgE_gpgWggA@ogO}gK]gMcgI]gSkgKugAUugIegAYggZygD_g}gQmgCigBrgCcgbg~gDmgDwgVmgAD}gRmgQigM]gBDqgF_"
    "gFwgGygBagugBygANwgBLigGOEgghgFFcgISD|gBKmgA}gJEBagERogRHcgIEYrgDkL_BZRrWA|kAmcB]nqe]_eDS[_^e]_eDT@nre]_e]ee_]e_]e_]e"
    "_]e_]e_]ka]e_]e_]e_]e_]ka]ka]e_]ka]e_]ka]e_]e_]e_]e_]eAdbedieq]eo]PYnDYR]AL|Dxm]QG{EUyEEAiia]Bsq]WaHeFkc_]CKgACiACmc]"
    "AmIvCmFujaxArkkpgkIdB}jj]pd]A]AN{NoNcc]pi]wAPmO]Nec_]EQrAXmAXwDD@tAJR{AJScd]sd]pds]dr_dc^d_]d^_SUlFPyFP{dd]di]EUGqAYT"
    "yAYUwe_]ekoe]_e]_e]_e]_OkEgve_]e_oe_]e^_e_]PZUgGLKdgfgogHIXwgHIGzgDqgwgDcgG_gAygDqgAjgODngHZKogHJ[pgkg}gAagHJHggHYU`g"
    "OK{gBegHJIwgHJIbgwgANxgAOggogKAXigKATpgygORxgOVagsgBqgggOVlgO[cgagAqgAggsg_gA]gB}gmgogAmgqgag]g]gHKY}gGXJ`gOKjgAegHLJ"
    "qgHLIzgigAegH}gE~g}gA{gCkgD}gAogC}g}gA}g]gAegA_gmg{gT]gO~gP_gKrgB_gBJrgCS}gP|gBegAmgGrgIyg^gGegHNYkgHNUfggg{gAcgmgCwg"
    "HOMggC{gHOI^gBwgugDrgHigSB`gygSJygCcg]gHPDigHOXngAeg{gugHPMmgHPLvgkgAUugAT^gSSpgSWegygDygB~gHQRogHQGxgHQG}gHQEjgbgA]g"
    "E}g_gTGtgTIggBogAegBqgTLrgIKAugIK@bgTOggcgcgAcgKDI{gKDFxgHSEqg]gH@JhgRU`g]gTQpgITB{gYIwgIXSfgogTTdgTW]gC]gqgB]gH]gUCl"
    "gAvgUFigHTHmgHTElgGqgegag`gBugAcgBagxgsgBwgAcgegAogsgC{gD}gB_gGggHUBygHUC|gCxgFigAqgEugHUGqgHUC|gElgArgVHrgVS}gAegAyg"
    "BdgVQ`gWAygAugHVRegHVKdgPggJfgWFhgWJqgWKpgB`gLEogcgKNogEzgN@ogADS~gRZugegigCqgrgHWQsgISHxgXA]gFzgL_gC]gHWIsgHWI`gFngN"
    "kgXLrgXOigEugDcgKcgHWJwgHWGvgYDbgYHggHXF]gHXB~gYH`gYI{gBsgAqg_gHXYogOXhgPBwgHXWfgHYUwgHYO`gygE~gJggBigCigCbgBig{gwgHY"
    "IegHYM~gNwgCugZMhgZRygdgHYO{gHY[~gU}gHYNigBygHYK~gFwgApgbg[Dvg[GogC]ghgCcgGUNygGUEzgHZDagHYZ~gHZRggHZJ^gwgAqgH[OggH[L"
    "lgAegI@@}gMagI@@pgA]gA@LbgA@MugA@L~g]gA@VogAegAegAcgD_gA@XjgAAAugIAIwgIAHdgIAMsgIAJtgHFG}gHEZngIBSigAigHegJDCfgugAAO_"
    "gIBYyg^gBggAogIB[`g_g]gBogAAQdgAAU_gAATfgDugJEXcgICY`gCsgCwgABA|gJFVggIDLdgIDS_gBogIDRdgEkgABNhgABSigqgggIESygQqg]gIF"
    "@^gABQbgJIDogIFBrgcgAB[zgJIN{gIE[jgACHhgACIsgfgAugIGNegIGHjgACKbgACQ_gCmgC}gACUlgJL@egAygJK[zgJLHmgIGZ~gIHD}gIHChgE}g"
    "sgIHU]gDggIHS|gIH[wgIHZxgHIYqgINNdgADTogDwgADV`gADYqgTTfgJBI_gygA@A^gogHIEpgcgGHygALLjgAEK{ghgA_gYUngYVugagqgBkgIJQwg"
    "IJQxgCggDagDigH`gI_gBmgFqgOfgG]gag}gIJR]gRcgHxgJPSjgAFHigagB_gINAsgIMY^gIKKogJQWtgegJRCggQ]gJRStgAFYegugsgagCwgA|gG{g"
    "BpgH{gDvgC}gAqgAGI`gAGNmgA{gAGNhgAGS}gcgIMSggIMLlgkgAGWxgAGYmgAQHrgKCYigJygJVP|gogAHMugDogIegK}gINZ_gINT~gAggEggEkgIO"
    "S_gBHBngGGKpgzgC_gGGVegGGHxgE{gIRHqgAqgIQQtgEmgA{gIRAegIR@rgPwgIig_gEjgVkgAsgIS@_gIRF^gALWzgALZmgIRY{gKCSpgAMImgABShg"
    "ABY]gITEwgLogKEYjgmgAMQwgIUHigKFVpgKGBygIUN^g]gAwgIVAegIURhgAMUxgAMZ]gGkgAqgCogANAjgKJAogIWKzgQwgKagAOClgAygAOG{gIYEi"
    "gKLLpgKLOygOqgGugIYKzgAOUtgAOYigggkgqgkgBcgI[@_";
/* end of test/make_unicode.py's text */

/* ---- Unpacking ---- */

static uint32_t uni_number_of(const char **p) { /* one number of the table text */
    uint32_t v = 0;
    while (**p < 93) v = v * 28 + (uint32_t)(*(*p)++ - 64);
    return v * 34 + (uint32_t)(*(*p)++ - 93);
}
static uint32_t uni_signed_of(const char **p, uint32_t base) { /* base plus a zigzag coded difference */
    uint32_t v = uni_number_of(p);
    return v & 1 ? base - (v + 1) / 2 : base + v / 2;
}

static int uni_by_parts(const void *a, const void *b) {
    const uni_pair *x = a, *y = b;
    if (x->a != y->a) return x->a < y->a ? -1 : 1;
    return x->b < y->b ? -1 : x->b > y->b;
}

static void uni_init_classes(uni *u) {
    uint32_t at = 0;
    for (const char *p = uni_class_text; *p;) {
        uint32_t v = uni_number_of(&p), n = v / 32 + 1;
        memset(u->props + at, (int)(v % 32), n);
        at += n;
    }
    assert(at == UNI_MAX);
}

static void uni_init_marks(uni *u) {
    uint32_t end = 0;
    u->marks = mem_alloc(sizeof uni_mark_text * sizeof *u->marks); /* more than enough; cut below */
    for (const char *p = uni_mark_text; *p;) {
        uint32_t first = end + uni_number_of(&p), last = first + uni_number_of(&p), v = uni_number_of(&p);
        u->marks[u->n_marks++] = (uni_marks){first, last, (uint8_t)(v / 2), v & 1};
        for (uint32_t c = first; c <= last; c++) u->props[c] |= UNI_UNSTABLE;
        end = last + 1;
    }
    u->marks = mem_realloc(u->marks, (size_t)u->n_marks * sizeof *u->marks);
}

static void uni_init_pairs(uni *u) {
    uint32_t c = 0, a = 0, b = 0;
    u->pairs = mem_alloc(sizeof uni_pair_text / 2 * sizeof *u->pairs);
    for (const char *p = uni_pair_text; *p;) {
        uint32_t v = uni_number_of(&p), kind = v / 2 % 3;
        c += v / 6;
        a = uni_signed_of(&p, a);
        if (kind != 2) b = uni_signed_of(&p, b);
        u->pairs[u->n_pairs++] = (uni_pair){c, a, kind == 2 ? 0 : b, kind == 0, v & 1};
        u->props[kind == 0 ? b : c] |= UNI_UNSTABLE;
    }
    u->pairs = mem_realloc(u->pairs, (size_t)u->n_pairs * sizeof *u->pairs);
    u->compositions = mem_alloc((size_t)u->n_pairs * sizeof *u->compositions);
    for (int i = 0; i < u->n_pairs; i++)
        if (u->pairs[i].composes) u->compositions[u->n_compositions++] = u->pairs[i];
    qsort(u->compositions, (size_t)u->n_compositions, sizeof *u->compositions, uni_by_parts);
    for (uint32_t j = 0x1161; j <= 0x1175; j++) u->props[j] |= UNI_UNSTABLE; /* Hangul vowels and finals join backwards */
    for (uint32_t j = 0x11A8; j <= 0x11C2; j++) u->props[j] |= UNI_UNSTABLE;
}

static void uni_init(uni *u) {
    *u = (uni){.props = mem_alloc(UNI_MAX)};
    uni_init_classes(u);
    uni_init_marks(u);
    uni_init_pairs(u);
}
static void uni_free(uni *u) {
    free(u->props), free(u->marks), free(u->pairs), free(u->compositions);
    *u = (uni){0};
}

/* ---- UTF-8 ---- */

/* The code point at p and its bytes. Text must be valid. */
static inline uint32_t uni_next(const char *p, int *n) {
    unsigned char a = (unsigned char)p[0];
    if (a < 0x80) return *n = 1, a;
    uint32_t b = (unsigned char)p[1] & 63;
    if (a < 0xE0) return *n = 2, (a & 31u) << 6 | b;
    b = b << 6 | ((unsigned char)p[2] & 63);
    if (a < 0xF0) return *n = 3, (a & 15u) << 12 | b;
    return *n = 4, (a & 7u) << 18 | b << 6 | ((unsigned char)p[3] & 63);
}

/* Bytes at p that are no character and become one U+FFFD: the longest beginning of a character that is cut short there,
 * else 1 (Unicode 3.9, substitution of maximal subparts, as Python and Rust do). *cut: the text ended, more bytes could
 * complete it. */
static int uni_bad_len(const char *p, const char *end, bool *cut) {
    unsigned char a = (unsigned char)p[0];
    unsigned lo = a == 0xE0 ? 0xA0 : a == 0xF0 ? 0x90 : 0x80, hi = a == 0xED ? 0x9F : a == 0xF4 ? 0x8F : 0xBF;
    int whole = a >= 0xC2 && a <= 0xDF ? 2 : (a & 0xF0) == 0xE0 ? 3 : a >= 0xF0 && a <= 0xF4 ? 4 : 1, n = 1;
    for (; n < whole && end - p > n && (unsigned char)p[n] >= lo && (unsigned char)p[n] <= hi; n++) lo = 0x80, hi = 0xBF;
    *cut = n < whole && end - p == n;
    return n;
}

/* The text itself where it is valid UTF-8, else a copy in *b with U+FFFD for what is not. */
static str uni_repair(str s, buf *b) {
    const char *p = s.p, *end = s.p + s.n, *done = s.p;
    bool cut;
    buf_clear(b);
    while (p < end) {
        uint64_t w = 0;
        while (end - p >= 8 && (memcpy(&w, p, 8), !(w & 0x8080808080808080u))) p += 8;
        if (p == end) break;
        int n = utf8_len(p, end);
        if (n) {
            p += n;
            continue;
        }
        buf_put(b, done, (size_t)(p - done));
        buf_c(b, "\xEF\xBF\xBD");
        done = p += uni_bad_len(p, end, &cut);
    }
    if (done == s.p) return s;
    buf_put(b, done, (size_t)(end - done));
    return buf_view(b);
}

/* ---- Normal form C ---- */

typedef struct uni_run { /* code points under work, each with its combining class above bit 24 */
    uint32_t *p;
    size_t n, cap;
} uni_run;

enum { UNI_S = 0xAC00, UNI_L = 0x1100, UNI_V = 0x1161, UNI_T = 0x11A7, UNI_V_N = 21, UNI_T_N = 28, UNI_S_N = 11172 };

static int uni_combining(const uni *u, uint32_t c, int version) {
    int lo = 0, hi = u->n_marks;
    if (!(u->props[c] & UNI_UNSTABLE)) return 0;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (u->marks[mid].last < c) lo = mid + 1;
        else hi = mid;
    }
    if (lo == u->n_marks || c < u->marks[lo].first || (u->marks[lo].young && version == UNI_9)) return 0;
    return u->marks[lo].class;
}

static const uni_pair *uni_find_pair(const uni *u, uint32_t c, int version) {
    int lo = 0, hi = u->n_pairs;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (u->pairs[mid].c < c) lo = mid + 1;
        else hi = mid;
    }
    if (lo == u->n_pairs || u->pairs[lo].c != c || (u->pairs[lo].young && version == UNI_9)) return NULL;
    return &u->pairs[lo];
}

/* The character that a and b make, 0: none. */
static uint32_t uni_compose(const uni *u, uint32_t a, uint32_t b, int version) {
    if (a - UNI_L < 19 && b - UNI_V < UNI_V_N) return UNI_S + ((a - UNI_L) * UNI_V_N + (b - UNI_V)) * UNI_T_N;
    if (a - UNI_S < UNI_S_N && (a - UNI_S) % UNI_T_N == 0 && b - UNI_T - 1 < UNI_T_N - 1) return a + (b - UNI_T);
    int lo = 0, hi = u->n_compositions;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        const uni_pair *m = &u->compositions[mid];
        if (m->a < a || (m->a == a && m->b < b)) lo = mid + 1;
        else hi = mid;
    }
    const uni_pair *f = &u->compositions[lo];
    return lo < u->n_compositions && f->a == a && f->b == b && !(f->young && version == UNI_9) ? f->c : 0;
}

static void uni_push(const uni *u, uni_run *r, uint32_t c, int version) {
    if (r->n == r->cap) r->p = mem_realloc(r->p, (r->cap = MAX(r->cap * 2, (size_t)64)) * sizeof *r->p);
    r->p[r->n++] = c | (uint32_t)uni_combining(u, c, version) << 24;
}

/* Appends the full canonical decomposition of c. Only first parts decompose further, so a stack of last parts is enough. */
static void uni_decompose(const uni *u, uni_run *r, uint32_t c, int version) {
    uint32_t last[8];
    int n = 0;
    if (c - UNI_S < UNI_S_N) {
        uint32_t i = c - UNI_S, t = i % UNI_T_N;
        uni_push(u, r, UNI_L + i / (UNI_V_N * UNI_T_N), version);
        uni_push(u, r, UNI_V + i / UNI_T_N % UNI_V_N, version);
        if (t) uni_push(u, r, UNI_T + t, version);
        return;
    }
    for (const uni_pair *d; n < COUNT(last) && (d = uni_find_pair(u, c, version)); c = d->a)
        if (d->b) last[n++] = d->b;
    uni_push(u, r, c, version);
    while (n) uni_push(u, r, last[--n], version);
}

/* Sorts each stretch of marks by class, stable, in linear time: a text may be one megabyte of marks. */
static void uni_reorder(uni_run *r) {
    uint32_t *sorted = NULL;
    for (size_t i = 0, j; i < r->n; i = j + 1) { /* [i,j) is a stretch of marks; it ends at a starter or the end */
        bool ordered = true;
        for (j = i; j < r->n && r->p[j] >> 24; j++) ordered &= j == i || r->p[j - 1] >> 24 <= r->p[j] >> 24;
        if (ordered) continue;
        size_t at[257] = {0};
        for (size_t k = i; k < j; k++) at[(r->p[k] >> 24) + 1]++;
        for (int k = 0; k < 256; k++) at[k + 1] += at[k];
        if (!sorted) sorted = mem_alloc(r->n * sizeof *sorted);
        for (size_t k = i; k < j; k++) sorted[at[r->p[k] >> 24]++] = r->p[k];
        memcpy(r->p + i, sorted, (j - i) * sizeof *sorted);
    }
    free(sorted);
}

/* Joins in place (Unicode 3.11, D117): a character joins the last starter unless one between them has the same or a higher
 * class. Then writes all of it to out. */
static void uni_recompose(const uni *u, uni_run *r, buf *out, int version) {
    size_t starter = SIZE_MAX, w = 0;
    uint32_t before = 0; /* class of the character written last behind the starter, 256: the starter itself is last */
    for (size_t i = 0; i < r->n; i++) {
        uint32_t c = r->p[i] & 0xFFFFFF, k = r->p[i] >> 24, joined = 0;
        if (starter != SIZE_MAX && (before == 256 || before < k))
            joined = uni_compose(u, r->p[starter] & 0xFFFFFF, c, version);
        if (joined) {
            r->p[starter] = joined;
            continue;
        }
        if (!k) starter = w, before = 256;
        else before = k;
        r->p[w++] = r->p[i];
    }
    for (size_t i = 0; i < w; i++) {
        char z[4];
        buf_put(out, z, (size_t)utf8_put(z, r->p[i] & 0xFFFFFF));
    }
    r->n = 0;
}

/* Text in form C: the text itself where a quick check finds nothing to do, else a copy in *b. Each stretch from the stable
 * character before an unstable one up to the next stable one is worked on by itself. */
static str uni_nfc(const uni *u, str s, int version, buf *b) {
    const char *p = s.p, *end = s.p + s.n, *done = s.p, *stable = s.p;
    uni_run r = {0};
    int n;
    buf_clear(b);
    while (p < end) {
        uint64_t w;
        while (end - p >= 8 && (memcpy(&w, p, 8), !(w & 0x8080808080808080u))) p += 8, stable = p - 1;
        if (p == end) break;
        uint32_t c = uni_next(p, &n);
        if (!(u->props[c] & UNI_UNSTABLE)) {
            stable = p, p += n;
            continue;
        }
        buf_put(b, done, (size_t)(stable - done));
        for (p = stable; p < end; p += n) {
            c = uni_next(p, &n);
            if (p > stable && !(u->props[c] & UNI_UNSTABLE)) break;
            uni_decompose(u, &r, c, version);
        }
        uni_reorder(&r);
        uni_recompose(u, &r, b, version);
        done = stable = p;
    }
    free(r.p);
    if (done == s.p) return s;
    buf_put(b, done, (size_t)(end - done));
    return buf_view(b);
}

/* ===========================================================================
 * MARK: 6. Tokenizer [pure]
 * tokenizer.json to ids and back, equal to Hugging Face `tokenizers` 0.23.
 *
 * In: the text of tokenizer.json, then UTF-8 text or ids. Out: ids or text. A text takes this way (HF's names in brackets):
 *
 *   text -> repaired UTF-8 -> cut at added tokens -> form C, prepend, replace -> cut at added tokens of normalized text
 *                             [added_tokens]         [normalizer]               [added_tokens]
 *        -> cut into pieces by patterns -> byte pair merges per piece -> ids between the ids of the post-processor
 *           [pre_tokenizer]                [model]                       [post_processor]
 *
 * Supported: the BPE model, on bytes (GPT-2, Llama-3, Qwen, GPT-4o, DeepSeek ...) or on characters with byte fallback
 * (Llama-2, Mistral, Phi-3 ...). Patterns are recognised by their exact text in tok_rules, each is one row of parameters
 * for tok_match; there is no regex engine. What is not known is an error at load that quotes it: nothing is guessed.
 *
 * Always holds: a tok does not change after tok_load but for the memory of pieces (tok_slot), which any thread may read
 * and write at any time and which only ever says what the merges would say. Every step is linear in the text but the
 * merges of one long piece, O(n log n). Nothing in a tokenizer.json can make it crash or take more than a constant times
 * its size.
 *
 * Not here: training, offsets, pairs of texts, truncation and padding (they are read over), dropout. Of
 * tokenizer_config.json nothing is used, as `tokenizers` alone does not know it either.
 * =========================================================================== */

#define TOK_FAIL(...) fail(e, TOKA_E_INPUT, "tokenizer.json: " __VA_ARGS__) /* in a function with a parameter e */

typedef struct tok tok;

static int tok_load(tok **out, str tokenizer_json, str config_json, toka_err *e);
static void tok_del(tok *t);

/* ---- Patterns that cut text into pieces ---- */

/* One pattern as parameters of tok_match. The alternatives of all known patterns come in this order; a row says which:
 *   1 contraction   's 't 're 've 'm 'll 'd
 *   2 ascii_word    one ASCII punctuation mark or symbol and the ASCII letters behind it
 *   3 letters       a run of these, one of `head` (spaced: one space) may stand before it; cased: upper, then lower case
 *   4 digits        a run of numbers, at most so many (spaced: one space may stand before it); newer: of Unicode 17.0
 *   5 marks         a run of these, one space may stand before it, `tail` characters behind it
 *   6 lines         white space up to its last line end
 *   7 spaces        white space, all but its last character if text follows that is none, but at least one
 *   8 cjk           a run of CJK ideographs U+4E00 .. U+9FA5, Hiragana and Katakana */
typedef struct tok_rule {
    const char *regex; /* as it stands in tokenizer.json; NULL: made from a pre-tokenizer without a pattern */
    enum { TOK_NO_CONTRACTION, TOK_EXACT, TOK_ANY_CASE } contraction;
    bool ascii_word, spaced, cased, suffix; /* suffix: alternative 1 may end alternative 3 instead */
    uint32_t head, letters, marks;          /* sets of uni_class */
    int digits;
    const char *tail;
    bool lines, spaces, cjk, newer;
} tok_rule;

#define TOK_HEAD ~(UNI_BIT(LINE_END) | UNI_LETTER | UNI_NUMBER)
#define TOK_MARKS ~(UNI_SPACE | UNI_LETTER | UNI_NUMBER)
#define TOK_UPPER (UNI_UPPER | UNI_BIT(LM) | UNI_BIT(LO) | UNI_MARK)
#define TOK_LOWER (UNI_BIT(LL) | UNI_BIT(LM) | UNI_BIT(LO) | UNI_MARK)

static const tok_rule tok_rules[] = {
    /* GPT-2, also what ByteLevel does by itself */
    {.regex = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     .contraction = TOK_EXACT, .spaced = true, .letters = UNI_LETTER, .digits = INT_MAX, .marks = TOK_MARKS,
     .spaces = true},
    /* GPT-4, Llama-3 */
    {.regex = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
              "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .contraction = TOK_ANY_CASE, .head = TOK_HEAD, .letters = UNI_LETTER, .digits = 3, .marks = TOK_MARKS, .tail = "\r\n",
     .lines = true, .spaces = true},
    /* Qwen2, Qwen2.5, Qwen3 */
    {.regex = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
              "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .contraction = TOK_ANY_CASE, .head = TOK_HEAD, .letters = UNI_LETTER, .digits = 1, .marks = TOK_MARKS, .tail = "\r\n",
     .lines = true, .spaces = true},
    /* Qwen3.5 */
    {.regex = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}|"
              " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|"
              "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .contraction = TOK_ANY_CASE, .head = TOK_HEAD, .letters = UNI_LETTER | UNI_MARK, .digits = 1,
     .marks = TOK_MARKS & ~UNI_MARK, .tail = "\r\n", .lines = true, .spaces = true},
    /* GPT-4o, gpt-oss (o200k) */
    {.regex = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
              "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
              "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
              "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
              "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .cased = true, .suffix = true, .head = TOK_HEAD, .digits = 3, .marks = TOK_MARKS, .tail = "\r\n/", .lines = true,
     .spaces = true},
    /* Mistral's Tekken */
    {.regex = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|"
              "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|"
              "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .cased = true, .head = TOK_HEAD, .digits = 1, .marks = TOK_MARKS, .tail = "\r\n/", .lines = true, .spaces = true},
    /* DeepSeek-V3 and R1: three patterns in a row */
    {.regex = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
              " ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     .ascii_word = true, .head = ~(UNI_BIT(LINE_END) | UNI_LETTER | UNI_PUNCT | UNI_SYMBOL),
     .letters = UNI_LETTER | UNI_MARK, .marks = UNI_PUNCT | UNI_SYMBOL, .tail = "\r\n", .lines = true, .spaces = true},
    {.regex = "[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+", .cjk = true},
    {.regex = "\\p{N}{1,3}", .digits = 3},
    {.regex = "\\p{N}", .digits = 1},
};
static const tok_rule tok_each_digit = {.digits = 1, .newer = true}, tok_all_digits = {.digits = INT_MAX, .newer = true};

/* Set of the class of the character at p, and its bytes; at the end the empty set. */
static inline uint32_t tok_set(const uni *u, const char *p, const char *end, int *n) {
    if (p == end) return *n = 0, 0;
    return 1u << (u->props[uni_next(p, n)] & 31);
}

static const char *tok_run(const uni *u, const char *p, const char *end, uint32_t set) { /* end of the run of `set` at p */
    for (int n; tok_set(u, p, end, &n) & set;) p += n;
    return p;
}

static bool tok_is_cjk(const char *p, const char *end, int *n) {
    uint32_t c = p < end ? uni_next(p, n) : 0;
    return (c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF);
}

/* The Digits pre-tokenizer asks Rust, which knows 13 digits more than the patterns do. */
static bool tok_is_number(const uni *u, const tok_rule *r, const char *p, const char *end, int *n) {
    if (tok_set(u, p, end, n) & UNI_NUMBER) return true;
    uint32_t c = r->newer && p < end ? uni_next(p, n) : 0;
    return (c >= 0x11DE0 && c <= 0x11DE9) || (c >= 0x16FF4 && c <= 0x16FF6);
}

/* Bytes of a contraction at p, 0: none. In any case, U+017F is an s too. */
static int tok_contraction(const char *p, const char *end, bool any_case) {
    if (end - p < 2 || *p != '\'') return 0;
    int fold = any_case ? 32 : 0, a = p[1] | fold, b = end - p > 2 ? p[2] | fold : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
    return any_case && end - p > 2 && p[1] == '\xC5' && p[2] == '\xBF' ? 3 : 0;
}

/* head? U* L+ | head? U+ L* with U upper, L lower case, and what has no case in both: as a backtracking matcher finds it.
 * `both` ends behind the last character of the U run that is in L too: where U* ends when no L follows the run. */
static const char *tok_cased(const uni *u, const tok_rule *r, const char *p, const char *end) {
    int n;
    uint32_t s = tok_set(u, p, end, &n);
    const char *from = s & r->head ? p + n : p, *upper_end = NULL;
    for (;; from = p) {
        const char *q = from, *both = NULL;
        for (; (s = tok_set(u, q, end, &n)) & TOK_UPPER; q += n)
            if (s & TOK_LOWER) both = q + n;
        if (s & TOK_LOWER) return tok_run(u, q, end, TOK_LOWER);
        if (both) return both;
        if (!upper_end && q > from) upper_end = q;
        if (from == p) return upper_end;
    }
}

/* Alternative 3, NULL: no word at p. */
static const char *tok_word(const uni *u, const tok_rule *r, const char *p, const char *end, uint32_t s, int n) {
    if (r->cased) {
        const char *q = tok_cased(u, r, p, end);
        return q && r->suffix ? q + tok_contraction(q, end, true) : q;
    }
    if (s & r->letters) return tok_run(u, p + n, end, r->letters);
    int m;
    if ((r->spaced ? *p == ' ' : (s & r->head) != 0) && tok_set(u, p + n, end, &m) & r->letters)
        return tok_run(u, p + n + m, end, r->letters);
    return NULL;
}

/* Alternatives 6 and 7 at white space p, NULL: neither. */
static const char *tok_white(const uni *u, const tok_rule *r, const char *p, const char *end) {
    const char *q = tok_run(u, p, end, UNI_SPACE), *last = q;
    if (r->lines)
        for (const char *k = q; k > p; k--)
            if (k[-1] == '\n' || k[-1] == '\r') return k;
    if (!r->spaces) return NULL;
    if (q == end) return q;
    while (((unsigned char)*--last & 0xC0) == 0x80) continue;
    return last > p ? last : q;
}

/* End of what the pattern matches at p < end, NULL: nothing. `end` is the end of text for the pattern. */
static const char *tok_match(const uni *u, const tok_rule *r, const char *p, const char *end) {
    int n, m;
    const char *q;
    uint32_t s = tok_set(u, p, end, &n);
    if (r->contraction && (m = tok_contraction(p, end, r->contraction == TOK_ANY_CASE))) return p + m;
    if (r->ascii_word && s & (UNI_PUNCT | UNI_SYMBOL) && n == 1) {
        for (q = p + 1; q < end && (unsigned)((*q | 32) - 'a') < 26;) q++;
        if (q > p + 1) return q;
    }
    if ((r->letters || r->cased) && (q = tok_word(u, r, p, end, s, n))) return q;
    if (r->digits) {
        q = r->spaced && *p == ' ' ? p + 1 : p;
        const char *first = q;
        for (int k = 0; k < r->digits && tok_is_number(u, r, q, end, &m); k++) q += m;
        if (q > first) return q;
    }
    if (r->marks) {
        const char *first = *p == ' ' ? p + 1 : p;
        q = tok_run(u, first, end, r->marks);
        if (q > first) {
            while (r->tail && q < end && *q && strchr(r->tail, *q)) q++;
            return q;
        }
    }
    if (s & UNI_SPACE && (r->lines || r->spaces)) return tok_white(u, r, p, end);
    if (!r->cjk) return NULL;
    for (q = p; tok_is_cjk(q, end, &n);) q += n;
    return q > p ? q : NULL;
}

/* ---- What a tokenizer is ---- */

enum {
    TOK_MAX_IDS = 1 << 22,   /* ids a file may use */
    TOK_MAX_CONTENT = 512,   /* bytes of an added token, and of what a normalizer puts in front */
    TOK_MAX_GROWTH = 64,     /* times that replacements may make a text longer */
    TOK_MAX_STEPS = 8,       /* normalizers, patterns or decoders in a row */
    TOK_SHORT = 40,          /* symbols up to which a piece is merged by plain scans */
    TOK_SLOT_BYTES = 24, TOK_SLOT_IDS = 8, TOK_SLOTS = 1 << 14
};

typedef struct tok_merge { /* symbols a b become id; the lowest rank goes first */
    int32_t a, b, id;      /* a -1: empty place of the hash table */
    uint32_t rank;
} tok_merge;

typedef struct tok_index { /* hash table from text to id, open addressing */
    struct tok_place {
        uint32_t hash;
        int32_t id; /* -1: empty */
    } *places;
    uint32_t mask;
    const str *key; /* by id; the tok's own */
} tok_index;

/* The memory of pieces: a direct-mapped table from a piece's bytes to its ids, so that a word is merged once and not each
 * time it comes. One cache line, a seqlock: w[0] = bytes | ids << 8 | TOK_BUSY | change count << 32, then 24 bytes of
 * text, then 8 ids. */
typedef struct tok_slot {
    _Alignas(64) _Atomic uint64_t w[8];
} tok_slot;
#define TOK_BUSY ((uint64_t)1 << 16)

typedef struct tok_added {
    str content;
    int32_t id;
    bool special, normalized, single_word, lstrip, rstrip;
} tok_added;

typedef struct tok_matcher { /* finds the longest of a set of texts at a place */
    struct tok_text {
        str text;
        int added; /* index of t->added */
    } *sorted;
    int n;
    bool first[256]; /* bytes that one of them begins with */
} tok_matcher;

typedef struct tok_normal { /* one normalizer */
    enum { TOK_NFC, TOK_PREPEND, TOK_REPLACE } kind;
    str from, to;
} tok_normal;

typedef struct tok_step { /* one pattern of the pre-tokenizer */
    const tok_rule *rule;
    bool removed; /* what it matches is dropped; else it is a piece, and what lies between is one */
} tok_step;

enum tok_flag { TOK_KNOWN = 1, TOK_SPECIAL = 2, TOK_SKIPPED = 4, TOK_BYTE = 8 }; /* SKIPPED: by TOKA_SKIP_SPECIAL */

struct tok {
    uni uni;
    arena mem;      /* all text below */
    int n_ids, cap; /* ids in use; places in the arrays by id */
    str *key;       /* [cap] what encode matches: for a byte-level tokenizer the bytes themselves. p NULL: nothing */
    str *text;      /* [cap] what decode writes */
    uint8_t *flag;  /* [cap] tok_flag */
    str *name;      /* [cap] content of added tokens and of what the byte-level alphabet cannot say; else p NULL */
    tok_index keys, names;
    tok_merge *merges;
    uint32_t merge_mask;
    uint64_t *joins; /* set of pairs of characters that some merge puts side by side; NULL: not to be cut there */
    uint32_t join_mask;
    tok_slot *slots;

    tok_added *added;
    int32_t *added_at; /* [cap] 1 + index of the id's added token, 0: none */
    int n_added;
    tok_matcher raw, normalized;
    tok_normal normals[TOK_MAX_STEPS];
    int n_normals;
    size_t growth; /* while loading: replacements so far make a text at most so many times longer */
    tok_step steps[TOK_MAX_STEPS];
    int n_steps;
    bool byte_level, prefix_space;
    struct {
        str mark; /* n 0: no Metaspace */
        enum { TOK_NEVER, TOK_FIRST, TOK_ALWAYS } prepend;
        bool split;
    } meta;
    bool ignore_merges, fuse_unk, byte_fallback;
    bool all_bytes; /* byte fallback has a token for each byte: no character is unknown */
    int32_t unk, byte_id[256]; /* -1: none */
    ids head, tail;            /* the post-processor's */

    enum { TOK_JOIN, TOK_BYTES, TOK_CHAIN, TOK_META } decoder;
    bool decode_fallback, decode_fuse;
    int strip; /* of these characters at the start ... */
    str strip_char;
    str meta_mark;
    bool meta_drop; /* the first token loses its marks */
};

static int tok_n_ids(const tok *t) { return t->n_ids; }
static bool tok_is_special(const tok *t, int32_t id) { return id >= 0 && id < t->n_ids && t->flag[id] & TOK_SPECIAL; }

/* ---- The two hash tables ---- */

static struct tok_place *tok_place_of(const tok_index *x, str s, uint32_t *hash) { /* where s is or would be */
    uint32_t h = *hash = (uint32_t)hash_bytes(s.p, s.n), i = h & x->mask;
    while (x->places[i].id >= 0 && !(x->places[i].hash == h && str_eq(x->key[x->places[i].id], s))) i = (i + 1) & x->mask;
    return &x->places[i];
}
static int32_t tok_find(const tok_index *x, str s) { /* id or -1 */
    uint32_t hash;
    return tok_place_of(x, s, &hash)->id;
}
static bool tok_index_add(tok_index *x, int32_t id) { /* false: its text is there already */
    uint32_t hash;
    struct tok_place *at = tok_place_of(x, x->key[id], &hash);
    if (at->id >= 0) return false;
    *at = (struct tok_place){hash, id};
    return true;
}
static uint32_t tok_table_mask(size_t n) { /* a power of two at least twice n, less one */
    uint32_t size = 16;
    while (size < 2 * n) size *= 2;
    return size - 1;
}
static void tok_index_init(tok_index *x, const str *key, size_t n) {
    *x = (tok_index){.mask = tok_table_mask(n), .key = key};
    x->places = mem_alloc(((size_t)x->mask + 1) * sizeof *x->places);
    memset(x->places, 0xFF, ((size_t)x->mask + 1) * sizeof *x->places);
}

static tok_merge *tok_merge_place(const tok *t, int32_t a, int32_t b) { /* where the pair is or would be */
    uint64_t h = ((uint64_t)(uint32_t)a << 32 | (uint32_t)b) * 0x9E3779B97F4A7C15u;
    uint32_t i = (uint32_t)(h >> 32) & t->merge_mask;
    while (t->merges[i].a >= 0 && (t->merges[i].a != a || t->merges[i].b != b)) i = (i + 1) & t->merge_mask;
    return &t->merges[i];
}
static uint32_t tok_rank(const tok *t, int32_t a, int32_t b, int32_t *id) { /* UINT32_MAX: a and b do not merge */
    const tok_merge *m = tok_merge_place(t, a, b);
    return *id = m->id, m->rank;
}

static uint64_t *tok_join_place(const tok *t, uint32_t a, uint32_t b) {
    uint64_t key = ((uint64_t)a << 32 | b) + 1;
    uint32_t i = (uint32_t)(key * 0x9E3779B97F4A7C15u >> 32) & t->join_mask;
    while (t->joins[i] && t->joins[i] != key) i = (i + 1) & t->join_mask;
    return &t->joins[i];
}

/* ---- The memory of pieces ---- */

static bool tok_recall(tok_slot *s, const uint64_t key[3], size_t n, ids *out) {
    uint64_t head = atomic_load_explicit(&s->w[0], memory_order_acquire), id[4];
    if ((head & 0xFF) != n || head & TOK_BUSY) return false;
    for (int i = 0; i < 3; i++)
        if (atomic_load_explicit(&s->w[1 + i], memory_order_relaxed) != key[i]) return false;
    for (int i = 0; i < 4; i++) id[i] = atomic_load_explicit(&s->w[4 + i], memory_order_relaxed);
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&s->w[0], memory_order_relaxed) != head) return false;
    ids_reserve(out, TOK_SLOT_IDS);
    memcpy(out->p + out->n, id, sizeof id);
    out->n += head >> 8 & 0xFF;
    return true;
}

static void tok_remember(tok_slot *s, const uint64_t key[3], size_t n, const int32_t *id, size_t n_id) {
    uint64_t head = atomic_load_explicit(&s->w[0], memory_order_relaxed), packed[4] = {0};
    if (head & TOK_BUSY || !atomic_compare_exchange_strong_explicit(&s->w[0], &head, head | TOK_BUSY, memory_order_acquire,
                                                                    memory_order_relaxed))
        return; /* another thread is writing here */
    atomic_thread_fence(memory_order_release);
    if (n_id) memcpy(packed, id, n_id * sizeof *id);
    for (int i = 0; i < 3; i++) atomic_store_explicit(&s->w[1 + i], key[i], memory_order_relaxed);
    for (int i = 0; i < 4; i++) atomic_store_explicit(&s->w[4 + i], packed[i], memory_order_relaxed);
    head = ((head >> 32) + 1) << 32 | n_id << 8 | n;
    atomic_store_explicit(&s->w[0], head, memory_order_release);
}

/* ---- Byte pair merges ---- */

typedef struct tok_enc { /* one call of tok_encode */
    const tok *t;
    int flags;
    ids *out;
    buf repaired, normal[2], rewritten;
    ids symbols;
} tok_enc;

/* A short piece: the lowest rank is found by scanning. Returns the symbols left. */
static size_t tok_merge_short(const tok *t, int32_t *symbol, size_t n) {
    uint32_t rank[TOK_SHORT];
    int32_t to[TOK_SHORT];
    for (size_t i = 0; i + 1 < n; i++) rank[i] = tok_rank(t, symbol[i], symbol[i + 1], &to[i]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == UINT32_MAX) break;
        symbol[best] = to[best];
        n--;
        for (size_t i = best + 1; i < n; i++) symbol[i] = symbol[i + 1], rank[i - 1] = rank[i], to[i - 1] = to[i];
        if (best + 1 < n) rank[best] = tok_rank(t, symbol[best], symbol[best + 1], &to[best]);
        if (best > 0) rank[best - 1] = tok_rank(t, symbol[best - 1], symbol[best], &to[best - 1]);
    }
    return n;
}

typedef struct tok_heap { /* rank << 32 | place, smallest first */
    uint64_t *p;
    size_t n;
} tok_heap;

static void tok_heap_push(tok_heap *h, uint64_t v) {
    size_t i = h->n++;
    for (; i && h->p[(i - 1) / 2] > v; i = (i - 1) / 2) h->p[i] = h->p[(i - 1) / 2];
    h->p[i] = v;
}
static void tok_heap_sink(tok_heap *h, size_t i) {
    uint64_t v = h->p[i];
    for (size_t k; (k = 2 * i + 1) < h->n; i = k) {
        if (k + 1 < h->n && h->p[k + 1] < h->p[k]) k++;
        if (h->p[k] >= v) break;
        h->p[i] = h->p[k];
    }
    h->p[i] = v;
}
static uint64_t tok_heap_pop(tok_heap *h) {
    uint64_t top = h->p[0];
    h->p[0] = h->p[--h->n];
    if (h->n) tok_heap_sink(h, 0);
    return top;
}

/* A long piece: a list of symbols and a heap of the pairs that merge. An entry of the heap is stale when its pair is gone.
 * At most 3 n entries: n at first, two for each of at most n merges. */
static size_t tok_merge_long(const tok *t, int32_t *symbol, size_t n) {
    uint32_t *prev = mem_alloc(n * sizeof *prev), *next = mem_alloc(n * sizeof *next), rank;
    tok_heap h = {.p = mem_alloc(3 * n * sizeof *h.p)};
    int32_t id;
    for (size_t i = 0; i < n; i++) {
        prev[i] = i ? (uint32_t)i - 1 : UINT32_MAX;
        next[i] = i + 1 < n ? (uint32_t)i + 1 : UINT32_MAX;
        rank = i + 1 < n ? tok_rank(t, symbol[i], symbol[i + 1], &id) : UINT32_MAX;
        if (rank != UINT32_MAX) h.p[h.n++] = (uint64_t)rank << 32 | i;
    }
    for (size_t i = h.n / 2; i--;) tok_heap_sink(&h, i);
    while (h.n) {
        uint64_t top = tok_heap_pop(&h);
        uint32_t at = (uint32_t)top, right;
        if (symbol[at] < 0 || (right = next[at]) == UINT32_MAX) continue;
        if (tok_rank(t, symbol[at], symbol[right], &id) != top >> 32) continue;
        symbol[at] = id;
        symbol[right] = -1;
        if ((next[at] = next[right]) != UINT32_MAX) {
            prev[next[at]] = at;
            if ((rank = tok_rank(t, id, symbol[next[at]], &id)) != UINT32_MAX) tok_heap_push(&h, (uint64_t)rank << 32 | at);
        }
        if (prev[at] != UINT32_MAX && (rank = tok_rank(t, symbol[prev[at]], symbol[at], &id)) != UINT32_MAX)
            tok_heap_push(&h, (uint64_t)rank << 32 | prev[at]);
    }
    size_t left = 0;
    for (size_t i = 0; i < n; i++)
        if (symbol[i] >= 0) symbol[left++] = symbol[i];
    free(prev), free(next), free(h.p);
    return left;
}

/* The symbols a piece starts from: its bytes or its characters. One that is not in the vocabulary becomes its bytes'
 * tokens if there is one for each, else the unknown token (several in a row one, if fused), else nothing. */
static void tok_symbols(tok_enc *x, str s) {
    const tok *t = x->t;
    bool unk = false;
    x->symbols.n = 0;
    ids_reserve(&x->symbols, s.n + 1);
    for (size_t i = 0, n; i < s.n; i += n) {
        int len = 1;
        if (!t->byte_level) uni_next(s.p + i, &len);
        n = (size_t)len;
        int32_t id = t->byte_level ? t->byte_id[(unsigned char)s.p[i]] : tok_find(&t->keys, (str){s.p + i, n});
        bool bytes = id < 0 && t->byte_fallback;
        for (size_t k = 0; bytes && k < n; k++) bytes = t->byte_id[(unsigned char)s.p[i + k]] >= 0;
        if (bytes) {
            for (size_t k = 0; k < n; k++) ids_push(&x->symbols, t->byte_id[(unsigned char)s.p[i + k]]);
        } else if (id >= 0) {
            if (unk) ids_push(&x->symbols, t->unk);
            unk = false;
            ids_push(&x->symbols, id);
        } else if (t->unk >= 0) {
            if (unk && !t->fuse_unk) ids_push(&x->symbols, t->unk);
            unk = true;
        }
    }
    if (unk) ids_push(&x->symbols, t->unk);
}

/* One piece to ids. */
static void tok_piece(tok_enc *x, str s) {
    const tok *t = x->t;
    uint64_t key[3] = {0};
    tok_slot *slot = NULL;
    size_t before = x->out->n;
    int32_t id;
    if (s.n <= TOK_SLOT_BYTES) {
        memcpy(key, s.p, s.n);
        uint64_t h = (key[0] * 0x9E3779B97F4A7C15u ^ key[1]) * 0xC2B2AE3D27D4EB4Fu ^ key[2] * 0x165667B19E3779F9u;
        slot = &t->slots[(h ^ h >> 29) * 0x9E3779B97F4A7C15u >> 50]; /* 64 - 50 = log2(TOK_SLOTS) */
        if (tok_recall(slot, key, s.n, x->out)) return;
    }
    if (t->ignore_merges && (id = tok_find(&t->keys, s)) >= 0) {
        ids_push(x->out, id);
    } else {
        tok_symbols(x, s);
        size_t n = x->symbols.n;
        n = n <= TOK_SHORT ? tok_merge_short(t, x->symbols.p, n) : tok_merge_long(t, x->symbols.p, n);
        ids_reserve(x->out, n);
        if (n) memcpy(x->out->p + x->out->n, x->symbols.p, n * sizeof *x->symbols.p);
        x->out->n += n;
    }
    size_t n = x->out->n - before;
    if (slot && n <= TOK_SLOT_IDS) tok_remember(slot, key, s.n, x->out->p + before, n);
}

/* ---- From text to pieces ---- */

/* A tokenizer on characters has no pattern: its piece is a whole text. No merge crosses a place between two characters
 * that no merge puts side by side, so it is cut there, which changes nothing but lets words be remembered. An unknown
 * character must not be cut from the one before it, for the two may be fused. */
static void tok_characters(tok_enc *x, str s) {
    const tok *t = x->t;
    const char *start = s.p, *end = s.p + s.n;
    uint32_t before = 0;
    int n;
    for (const char *p = s.p; t->joins && p < end; p += n) {
        uint32_t c = uni_next(p, &n);
        if (p > start && !*tok_join_place(t, before, c) && (t->all_bytes || tok_find(&t->keys, (str){p, (size_t)n}) >= 0)) {
            tok_piece(x, (str){start, (size_t)(p - start)});
            start = p;
        }
        before = c;
    }
    if (start < end) tok_piece(x, (str){start, (size_t)(end - start)});
}

/* Pieces of s by the patterns from `step` on. */
static void tok_cut(tok_enc *x, int step, str s) {
    const tok *t = x->t;
    if (step == t->n_steps) {
        if (t->byte_level) tok_piece(x, s);
        else tok_characters(x, s);
        return;
    }
    const tok_rule *r = t->steps[step].rule;
    const char *between = s.p, *p = s.p, *end = s.p + s.n, *q;
    while (p < end) {
        int n;
        if (r->digits && !r->marks) /* only digits match: skip what is none */
            p = tok_run(&t->uni, p, end, ~(UNI_NUMBER | UNI_BIT(CN)));
        q = p < end ? tok_match(&t->uni, r, p, end) : p;
        if (!q) {
            uni_next(p, &n);
            p += n;
            continue;
        }
        if (between < p) tok_cut(x, step + 1, (str){between, (size_t)(p - between)});
        if (p < q && !t->steps[step].removed) tok_cut(x, step + 1, (str){p, (size_t)(q - p)});
        between = p = q;
    }
    if (between < end) tok_cut(x, step + 1, (str){between, (size_t)(end - between)});
}

/* Every `from` in s becomes `to`; s itself where there is none. */
static str tok_replace(str s, str from, str to, buf *b) {
    size_t done = 0;
    ptrdiff_t at = str_find(s, from, 0);
    if (at < 0) return s;
    buf_clear(b);
    for (; at >= 0; at = str_find(s, from, done)) {
        buf_put(b, s.p + done, (size_t)at - done);
        buf_str(b, to);
        done = (size_t)at + from.n;
    }
    buf_put(b, s.p + done, s.n - done);
    return buf_view(b);
}

static str tok_prepend(str s, str head, buf *b) {
    buf_clear(b);
    buf_str(b, head);
    buf_str(b, s);
    return buf_view(b);
}

/* The normalizers in their order, in turn into one of two buffers and from the other. */
static str tok_normalize(const tok *t, str s, buf b[2]) {
    for (int i = 0; i < t->n_normals; i++) {
        const tok_normal *k = &t->normals[i];
        buf *to = s.p == b[0].p ? &b[1] : &b[0];
        if (k->kind == TOK_NFC) s = uni_nfc(&t->uni, s, UNI_9, to);
        else if (k->kind == TOK_REPLACE) s = tok_replace(s, k->from, k->to, to);
        else if (s.n) s = tok_prepend(s, k->to, to);
    }
    return s;
}

/* A stretch of normalized text without added tokens. first: it begins where the whole text begins. */
static void tok_stretch(tok_enc *x, str s, bool first) {
    const tok *t = x->t;
    if (t->prefix_space && *s.p != ' ') s = tok_prepend(s, STR(" "), &x->rewritten);
    if (t->meta.mark.n) {
        bool prepend = t->meta.prepend == TOK_ALWAYS || (t->meta.prepend == TOK_FIRST && first);
        buf *spare = &x->normal[s.p >= x->normal[0].p && s.p < x->normal[0].p + x->normal[0].cap ? 1 : 0];
        s = tok_replace(s, STR(" "), t->meta.mark, spare);
        if (prepend && !str_starts(s, t->meta.mark)) s = tok_prepend(s, t->meta.mark, &x->rewritten);
    }
    for (ptrdiff_t next; t->meta.split && (next = str_find(s, t->meta.mark, 1)) > 0; s = str_sub(s, (size_t)next, s.n))
        tok_cut(x, 0, str_sub(s, 0, (size_t)next)); /* each mark begins a piece */
    tok_cut(x, 0, s);
}

/* ---- Added tokens ---- */

/* The longest text of m that s begins with, or NULL. The sorted texts that agree with its first d bytes are [lo,hi). */
static const struct tok_text *tok_longest(const tok_matcher *m, str s) {
    const struct tok_text *found = NULL;
    int lo = 0, hi = m->n;
    for (size_t d = 0; lo < hi; d++) {
        while (lo < hi && m->sorted[lo].text.n == d) found = &m->sorted[lo++];
        if (d == s.n) break;
        int c = (unsigned char)s.p[d];
        for (int side = 0; side < 2; side++) { /* the first with a byte >= c, then the first with a byte > c */
            int a = lo, b = hi;
            while (a < b) {
                int mid = (a + b) / 2;
                if ((unsigned char)m->sorted[mid].text.p[d] < c + side) a = mid + 1;
                else b = mid;
            }
            if (side) hi = a;
            else lo = a;
        }
    }
    return found;
}

/* \w of Rust's regex: alphabetic characters, marks, decimal digits, connectors, joiners. */
static bool tok_is_word(const uni *u, const char *p) {
    int n;
    uint32_t c = uni_next(p, &n), s = 1u << (u->props[c] & 31);
    return s & (UNI_LETTER | UNI_MARK | UNI_BIT(ND) | UNI_BIT(NL) | UNI_BIT(PC)) || c == 0x200C || c == 0x200D ||
           (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
           (c >= 0x1F170 && c <= 0x1F189);
}
static const char *tok_back(const char *p) { /* start of the character before p */
    while (((unsigned char)*--p & 0xC0) == 0x80) continue;
    return p;
}

/* Cuts s at added tokens: first at those that match the text as it is, then, in what lies between and is normalized, at the
 * others. Without TOKA_PARSE_SPECIAL a special token's text is passed over, with what might match inside it, as HF does.
 * `done` is the end of what became ids; the search goes on at p, before it if a token took the space behind it. */
static void tok_added_cut(tok_enc *x, bool normalized, str s, bool first) {
    const tok *t = x->t;
    const tok_matcher *m = normalized ? &t->normalized : &t->raw;
    if (normalized) s = tok_normalize(t, s, x->normal);
    const char *p = s.p, *end = s.p + s.n, *done = s.p;
    for (;;) {
        const struct tok_text *hit = NULL;
        while (p < end && !(m->first[(unsigned char)*p] && (hit = tok_longest(m, (str){p, (size_t)(end - p)})))) p++;
        const tok_added *a = hit ? &t->added[hit->added] : NULL;
        const char *from = p, *to = end;
        if (a) {
            int n;
            p += hit->text.n;
            if (a->special && !(x->flags & TOKA_PARSE_SPECIAL)) continue;
            if (a->single_word && from > s.p && tok_is_word(&t->uni, tok_back(from))) continue;
            if (a->single_word && p < end && tok_is_word(&t->uni, p)) continue;
            while (a->lstrip && from > done && tok_set(&t->uni, tok_back(from), end, &n) & UNI_SPACE) from = tok_back(from);
            if (a->lstrip) from = MAX(from, done);
            to = a->rstrip ? tok_run(&t->uni, p, end, UNI_SPACE) : p;
        }
        if (done < from) {
            str between = {done, (size_t)(from - done)};
            if (normalized) tok_stretch(x, between, first && done == s.p);
            else tok_added_cut(x, true, between, first && done == s.p);
        }
        if (!a) break;
        if (from < to) ids_push(x->out, a->id); /* else the token before took all of it */
        done = to;
    }
}

/* ---- Encode and decode ---- */

/* Text to ids, appended to out. flags: TOKA_ADD_SPECIAL, TOKA_PARSE_SPECIAL. */
static int tok_encode(const tok *t, str text, int flags, ids *out, toka_err *e) {
    tok_enc x = {.t = t, .flags = flags, .out = out};
    bool add = flags & TOKA_ADD_SPECIAL;
    if (text.n > INT32_MAX) return fail(e, TOKA_E_USE, "text of %zu bytes: at most %d are taken", text.n, INT32_MAX);
    for (size_t i = 0; add && i < t->head.n; i++) ids_push(out, t->head.p[i]);
    if (text.n) tok_added_cut(&x, false, uni_repair(text, &x.repaired), true);
    for (size_t i = 0; add && i < t->tail.n; i++) ids_push(out, t->tail.p[i]);
    buf_free(&x.repaired), buf_free(&x.normal[0]), buf_free(&x.normal[1]), buf_free(&x.rewritten);
    ids_free(&x.symbols);
    return 0;
}

/* Streaming detokenizer. Held back is what later ids may still change: on bytes the unfinished last character; with byte
 * fallback the whole run of byte tokens, because one bad byte makes HF write U+FFFD for each byte of the run. */
typedef struct tok_stream {
    const tok *t;
    int flags;  /* TOKA_SKIP_SPECIAL */
    int strip;  /* characters that may still be taken off the start */
    bool begun; /* a token was put */
    buf held;
} tok_stream;

static void tok_stream_init(tok_stream *s, const tok *t, int flags) {
    *s = (tok_stream){.t = t, .flags = flags, .strip = t->strip};
}
static void tok_stream_free(tok_stream *s) { buf_free(&s->held); }

/* Writes whole text, without what is to be stripped off the start. */
static void tok_stream_emit(tok_stream *s, str text, buf *out) {
    while (s->strip && text.n) {
        bool is = str_starts(text, s->t->strip_char);
        if (is) text = str_sub(text, s->t->strip_char.n, text.n);
        s->strip = is ? s->strip - 1 : 0;
    }
    buf_str(out, text);
}

/* Bytes to text: whole characters, U+FFFD for what can be none. What could still become one stays, unless `all`. */
static void tok_stream_bytes(tok_stream *s, bool all, buf *out) {
    const char *p = s->held.p, *end = p + s->held.n;
    bool cut = false;
    while (p < end) {
        int n = utf8_len(p, end);
        if (n) {
            buf_put(out, p, (size_t)n);
        } else {
            n = uni_bad_len(p, end, &cut);
            if (cut && !all) break;
            buf_c(out, "\xEF\xBF\xBD");
        }
        p += n;
    }
    size_t left = (size_t)(end - p);
    memmove(s->held.p, p, left);
    s->held.n = left;
}

/* The end of a run of byte tokens: text if all of it is valid, else U+FFFD for each byte. */
static void tok_stream_run(tok_stream *s, buf *out) {
    size_t i = 0, n = s->held.n, k;
    while (i < n && (k = (size_t)utf8_len(s->held.p + i, s->held.p + n)) > 0) i += k;
    if (i == n) tok_stream_emit(s, buf_view(&s->held), out);
    for (k = 0; i < n && k < n; k++) tok_stream_emit(s, STR("\xEF\xBF\xBD"), out);
    s->held.n = 0;
}

/* One token's text where marks are spaces, and none at the very start. */
static void tok_stream_meta(tok_stream *s, str text, buf *out) {
    str mark = s->t->meta_mark;
    while (text.n) {
        ptrdiff_t at = str_find(text, mark, 0);
        buf_put(out, text.p, at < 0 ? text.n : (size_t)at);
        if (at < 0) break;
        if (s->begun || !s->t->meta_drop) buf_char(out, ' ');
        text = str_sub(text, (size_t)at + mark.n, text.n);
    }
}

/* Takes one id and appends the text that became certain. An id that the vocabulary does not have is nothing. */
static void tok_stream_put(tok_stream *s, int32_t id, buf *out) {
    const tok *t = s->t;
    if (id < 0 || id >= t->n_ids || !(t->flag[id] & TOK_KNOWN)) return;
    if (s->flags & TOKA_SKIP_SPECIAL && t->flag[id] & TOK_SKIPPED) return;
    if (t->decoder == TOK_BYTES) {
        buf_str(&s->held, t->text[id]);
        if (s->held.n) tok_stream_bytes(s, false, out);
    } else if (t->decoder == TOK_CHAIN) {
        if (t->flag[id] & TOK_BYTE) {
            buf_str(&s->held, t->text[id]);
        } else {
            if (s->held.n) tok_stream_run(s, out);
            tok_stream_emit(s, t->text[id], out);
        }
    } else if (t->decoder == TOK_META) {
        tok_stream_meta(s, t->text[id], out);
    } else {
        if (s->begun) buf_char(out, ' ');
        buf_str(out, t->text[id]);
    }
    s->begun = true;
}

/* No more ids: an unfinished character becomes U+FFFD. */
static void tok_stream_end(tok_stream *s, buf *out) {
    if (s->held.n && s->t->decoder == TOK_BYTES) tok_stream_bytes(s, true, out);
    if (s->held.n) tok_stream_run(s, out);
}

/* Ids to text, appended to out. flags: TOKA_SKIP_SPECIAL. */
static int tok_decode(const tok *t, const int32_t *id, size_t n, int flags, buf *out, toka_err *e) {
    tok_stream s;
    for (size_t i = 0; i < n; i++)
        if (id[i] < 0 || id[i] >= t->n_ids)
            return fail(e, TOKA_E_USE, "token %zu of %zu: id %d, but the vocabulary ends at %d", i, n, id[i], t->n_ids - 1);
    tok_stream_init(&s, t, flags);
    for (size_t i = 0; i < n; i++) tok_stream_put(&s, id[i], out);
    tok_stream_end(&s, out);
    tok_stream_free(&s);
    return 0;
}

/* ---- Loading: vocabulary and merges ---- */

/* The byte that a character of the byte-level alphabet stands for, -1: it is not in it. Printable characters of Latin-1
 * stand for themselves, the 68 other bytes are U+0100 .. U+0143 in their order. */
static int tok_byte_of(uint32_t c) {
    if ((c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xFF && c != 0xAD)) return (int)c;
    if (c >= 0x100 && c <= 0x120) return (int)c - 0x100;
    if (c >= 0x121 && c <= 0x142) return (int)c - 0x121 + 0x7F;
    return c == 0x143 ? 0xAD : -1;
}

/* Appends the bytes that byte-level text stands for; false: a character of it is not in the alphabet. */
static bool tok_unmap(str s, buf *out) {
    for (int n; s.n; s = str_sub(s, (size_t)n, s.n)) {
        int byte = tok_byte_of(uni_next(s.p, &n));
        if (byte < 0) return false;
        buf_char(out, (char)byte);
    }
    return true;
}

/* model.vocab: every id is a number within limits. *largest: of them (-1 before), *bytes: all contents together. */
static int tok_check_vocab(const json *vocab, int64_t *largest, size_t *bytes, toka_err *e) {
    if (!json_is(vocab, JSON_OBJECT)) return TOK_FAIL("model.vocab: an object was expected");
    int64_t end = MIN((int64_t)TOK_MAX_IDS, 65536 + 4 * (int64_t)vocab->n); /* gaps, but no table of gaps alone */
    JSON_MEMBERS(key, vocab) {
        int64_t id = json_int(key + 1, -1);
        if (id < 0 || id >= end)
            return TOK_FAIL("model.vocab: the id of \"%.*s\" is no number from 0 to %d", STRF(json_str(key)), (int)end - 1);
        *largest = MAX(*largest, id);
        *bytes += key->n;
    }
    return 0;
}

static int tok_load_vocab(tok *t, const json *vocab, const json *added, toka_err *e) {
    int64_t largest = -1;
    size_t bytes = 0;
    if (tok_check_vocab(vocab, &largest, &bytes, e)) return e->code;
    t->n_ids = (int)largest + 1;
    t->cap = MAX(t->n_ids, (int)vocab->n) + (added ? (int)added->n : 0);
    t->key = mem_zalloc((size_t)t->cap * sizeof *t->key);
    t->name = mem_zalloc((size_t)t->cap * sizeof *t->name);
    t->text = mem_zalloc((size_t)t->cap * sizeof *t->text);
    t->flag = mem_zalloc((size_t)t->cap);
    tok_index_init(&t->keys, t->key, vocab->n);
    tok_index_init(&t->names, t->name, vocab->n + (added ? added->n : 0));
    buf raw = {.p = arena_alloc(&t->mem, bytes + 64), .cap = bytes + 64}; /* never grows: unmapped text is shorter */
    JSON_MEMBERS(key, vocab) {
        int32_t id = (int32_t)json_int(key + 1, -1);
        size_t from = raw.n;
        if (t->flag[id]) return TOK_FAIL("model.vocab: id %d stands there twice", id);
        t->flag[id] = TOK_KNOWN;
        bool mapped = !t->byte_level || tok_unmap(json_str(key), &raw);
        if (!mapped) raw.n = from;
        if (!mapped || !t->byte_level) buf_str(&raw, json_str(key));
        t->text[id] = (str){raw.p + from, raw.n - from};
        (mapped ? t->key : t->name)[id] = t->text[id];
        if (!tok_index_add(mapped ? &t->keys : &t->names, id))
            return TOK_FAIL("model.vocab: \"%.*s\" stands there twice", STRF(json_str(key)));
    }
    return 0;
}

/* Id of a token's exact content, added tokens first; -1: none. */
static int32_t tok_id(const tok *t, str content) {
    int32_t id = tok_find(&t->names, content);
    if (id >= 0 || !t->byte_level) return id >= 0 ? id : tok_find(&t->keys, content);
    buf raw = {0};
    if (tok_unmap(content, &raw)) id = tok_find(&t->keys, buf_view(&raw));
    buf_free(&raw);
    return id;
}

/* byte_id, with byte fallback the ids of <0x00> .. <0xFF>, else those of the bytes themselves; and the unknown token. */
static int tok_load_bytes(tok *t, const json *model, toka_err *e) {
    str unk = json_str(json_get(model, "unk_token"));
    t->unk = json_is(json_get(model, "unk_token"), JSON_STRING) ? tok_id(t, unk) : -1;
    if (t->unk < 0 && json_is(json_get(model, "unk_token"), JSON_STRING))
        return TOK_FAIL("model.unk_token \"%.*s\" is not in the vocabulary", STRF(unk));
    t->all_bytes = t->byte_fallback;
    for (int b = 0; b < 256; b++) {
        char z[8] = {(char)b};
        size_t n = 1;
        if (!t->byte_level) n = (size_t)snprintf(z, sizeof z, "<0x%02X>", (unsigned)b);
        t->byte_id[b] = tok_find(&t->keys, (str){z, n});
        t->all_bytes = t->all_bytes && t->byte_id[b] >= 0;
        if (t->byte_fallback && t->byte_level && t->byte_id[b] < 0)
            return TOK_FAIL("model.byte_fallback with a ByteLevel pre-tokenizer is not supported");
    }
    return 0;
}

/* Where a merge written as "a b" is cut: at its one space; if there are more, where both parts and the whole are known. */
static size_t tok_merge_cut(const tok *t, str s) {
    const char *at = memchr(s.p, ' ', s.n);
    if (!at || !memchr(at + 1, ' ', s.n - (size_t)(at + 1 - s.p))) return at ? (size_t)(at - s.p) : SIZE_MAX;
    buf whole = {0};
    size_t found = SIZE_MAX;
    for (size_t i = 1; i + 1 < s.n && i < TOK_MAX_CONTENT && found == SIZE_MAX; i++) {
        if (s.p[i] != ' ') continue;
        buf_clear(&whole);
        buf_put(&whole, s.p, i);
        buf_put(&whole, s.p + i + 1, s.n - i - 1);
        str part[3] = {str_sub(s, 0, i), str_sub(s, i + 1, s.n), buf_view(&whole)};
        int known = 0;
        while (known < 3 && tok_find(&t->keys, part[known]) >= 0) known++;
        if (known == 3) found = i;
    }
    buf_free(&whole);
    return found;
}

/* The two parts of a merge, ["a","b"] or "a b", one behind the other in *both as keys; *cut is where b begins. */
static int tok_merge_parts(const tok *t, const json *m, uint32_t rank, buf *both, size_t *cut, toka_err *e) {
    const json *first = json_at(m, 0), *second = json_at(m, 1);
    str a = json_str(first), b = json_str(second), line = json_str(m);
    bool pair = first && m->n == 2 && json_is(first, JSON_STRING) && json_is(second, JSON_STRING);
    if (!pair && !json_is(m, JSON_STRING))
        return TOK_FAIL("model.merges[%u]: \"a b\" or [\"a\",\"b\"] was expected", rank);
    if (!pair) {
        size_t at = tok_merge_cut(t, line);
        if (at == SIZE_MAX)
            return TOK_FAIL("model.merges[%u]: \"%.*s\" is not two tokens", rank, STRF(line));
        a = str_sub(line, 0, at), b = str_sub(line, at + 1, line.n);
    }
    buf_clear(both);
    bool known = t->byte_level ? tok_unmap(a, both) : (buf_str(both, a), true);
    *cut = both->n;
    known = known && (t->byte_level ? tok_unmap(b, both) : (buf_str(both, b), true));
    if (!known) return TOK_FAIL("model.merges[%u]: a part is not in the vocabulary", rank);
    return 0;
}

static bool tok_is_byte_id(const tok *t, int32_t id) {
    for (int b = 0; b < 256; b++)
        if (t->byte_id[b] == id) return true;
    return false;
}

/* Notes that the merge a b puts the last character of a before the first of b. */
static void tok_add_join(tok *t, int32_t a, int32_t b) {
    int n;
    str s = t->key[a];
    uint32_t last = s.n ? uni_next(tok_back(s.p + s.n), &n) : 0, first = t->key[b].n ? uni_next(t->key[b].p, &n) : 0;
    *tok_join_place(t, last, first) = ((uint64_t)last << 32 | first) + 1;
}

static int tok_load_merges(tok *t, const json *merges, toka_err *e) {
    if (!json_is(merges, JSON_ARRAY)) return TOK_FAIL("model.merges: an array was expected");
    t->merge_mask = tok_table_mask(merges->n);
    t->merges = mem_alloc(((size_t)t->merge_mask + 1) * sizeof *t->merges);
    memset(t->merges, 0xFF, ((size_t)t->merge_mask + 1) * sizeof *t->merges);
    bool joins = !t->byte_level && !t->ignore_merges && (t->all_bytes || t->unk >= 0); /* else characters may vanish */
    t->join_mask = t->merge_mask;
    if (joins) t->joins = mem_zalloc(((size_t)t->join_mask + 1) * sizeof *t->joins);
    uint32_t rank = 0;
    buf both = {0};
    JSON_EACH(m, merges) {
        size_t cut = 0;
        if (tok_merge_parts(t, m, rank, &both, &cut, e)) break;
        str ab = buf_view(&both);
        int32_t a = tok_find(&t->keys, str_sub(ab, 0, cut)), b = tok_find(&t->keys, str_sub(ab, cut, ab.n));
        int32_t id = tok_find(&t->keys, ab);
        if (a < 0 || b < 0 || id < 0) {
            TOK_FAIL("model.merges[%u]: %s is not in the vocabulary", rank,
                 a < 0 ? "the first token" : b < 0 ? "the second token" : "what it makes");
            break;
        }
        *tok_merge_place(t, a, b) = (tok_merge){a, b, id, rank++};
        if (joins) tok_add_join(t, a, b);
        joins = joins && a != t->unk && b != t->unk && !tok_is_byte_id(t, a) && !tok_is_byte_id(t, b);
    }
    buf_free(&both);
    if (rank < merges->n) return e->code;
    if (!joins) free(t->joins), t->joins = NULL; /* such merges join what is not seen in the text: cut nowhere */
    return 0;
}

/* ---- Loading: added tokens ---- */

static int tok_by_text(const void *a, const void *b) {
    const struct tok_text *x = a, *y = b;
    int c = memcmp(x->text.p, y->text.p, MIN(x->text.n, y->text.n));
    return c ? c : x->text.n != y->text.n ? (x->text.n < y->text.n ? -1 : 1) : x->added - y->added;
}

static void tok_load_matcher(tok *t, tok_matcher *m, bool normalized) {
    buf b[2] = {{0}, {0}};
    m->sorted = mem_alloc((size_t)t->n_added * sizeof *m->sorted);
    for (int i = 0; i < t->n_added; i++) {
        const tok_added *a = &t->added[i];
        if (a->normalized != normalized) continue;
        str text = normalized ? arena_str(&t->mem, tok_normalize(t, a->content, b)) : a->content;
        t->text[a->id] = text;
        if (str_eq(text, a->content) && a->special) t->flag[a->id] |= TOK_SKIPPED; /* HF looks for the changed text */
        if (!text.n) continue;
        m->first[(unsigned char)*text.p] = true;
        m->sorted[m->n++] = (struct tok_text){text, i};
    }
    qsort(m->sorted, (size_t)m->n, sizeof *m->sorted, tok_by_text);
    buf_free(&b[0]), buf_free(&b[1]);
}

/* added_tokens. An id is what the vocabulary or an earlier entry says, else the next one free: HF does not look at "id". */
static int tok_load_added(tok *t, const json *list, size_t n_vocab, toka_err *e) {
    int32_t next = (int32_t)n_vocab;
    bool there = json_is(list, JSON_ARRAY);
    if (list && !there && !json_is(list, JSON_NULL))
        return TOK_FAIL("added_tokens: an array was expected");
    t->added = mem_alloc((there ? list->n : 0) * sizeof *t->added);
    t->added_at = mem_zalloc((size_t)t->cap * sizeof *t->added_at);
    if (there) JSON_EACH(it, list) {
            str content = json_str(json_get(it, "content"));
            if (!json_is(json_get(it, "content"), JSON_STRING))
                return TOK_FAIL("added_tokens[%d]: no content", t->n_added);
            if (!content.n) continue;
            if (content.n > TOK_MAX_CONTENT)
                return TOK_FAIL("added_tokens[%d]: %zu bytes, at most %d", t->n_added, content.n, TOK_MAX_CONTENT);
            tok_added a = {.content = arena_str(&t->mem, content), .id = tok_id(t, content)};
            if (a.id < 0) a.id = next++;
            a.special = json_true(json_get(it, "special")), a.normalized = json_true(json_get(it, "normalized"));
            a.single_word = json_true(json_get(it, "single_word"));
            a.lstrip = json_true(json_get(it, "lstrip")), a.rstrip = json_true(json_get(it, "rstrip"));
            if (!t->added_at[a.id]) t->added_at[a.id] = ++t->n_added;
            t->added[t->added_at[a.id] - 1] = a;
            t->name[a.id] = a.content;
            tok_index_add(&t->names, a.id);
            t->n_ids = MAX(t->n_ids, a.id + 1);
            t->flag[a.id] = (uint8_t)(TOK_KNOWN | (a.special ? TOK_SPECIAL : 0));
        }
    tok_load_matcher(t, &t->raw, false);
    tok_load_matcher(t, &t->normalized, true);
    return 0;
}

/* ---- Loading: what stands around the model ---- */

static str tok_type(const json *v) { return json_str(json_get(v, "type")); }
static int tok_unsupported(toka_err *e, const char *where, str what) {
    return TOK_FAIL("%s \"%.*s\" is not supported", where, STRF(what));
}

/* The members of a Sequence one after the other, anything else alone; null is nothing. `one` gets each. Depth and count are
 * bounded, for each may cost a pass over the vocabulary. */
typedef int tok_load_fn(tok *t, const json *v, toka_err *e);
static int tok_load_each(tok *t, const json *v, const char *list, int depth, tok_load_fn *one, toka_err *e) {
    if (!v || json_is(v, JSON_NULL)) return 0;
    if (!str_is(tok_type(v), "Sequence")) return one(t, v, e);
    const json *items = json_get(v, list);
    if (!json_is(items, JSON_ARRAY)) return TOK_FAIL("a Sequence without %s", list);
    if (depth > 1 || items->n > TOK_MAX_STEPS) return TOK_FAIL("a Sequence of more than %d %s", TOK_MAX_STEPS, list);
    JSON_EACH(it, items) if (tok_load_each(t, it, list, depth + 1, one, e)) return e->code;
    return 0;
}

static str tok_keep(tok *t, str s) { return arena_str(&t->mem, s); }

/* {"String": s}, or {"Regex": s} where s says only itself. n 0: it is something else. */
static str tok_literal(const json *pattern) {
    str s = json_str(json_get(pattern, "String")), r = json_str(json_get(pattern, "Regex"));
    for (size_t i = 0; i < r.n; i++)
        if (strchr("\\^$.|?*+()[]{}", r.p[i])) return STR("");
    return s.n ? s : r;
}

/* Counts one more replacement in; true: together they may make a text too long. */
static bool tok_grows(tok *t, str from, str to) {
    t->growth *= MAX((size_t)1, (to.n + from.n - 1) / from.n);
    return t->growth > TOK_MAX_GROWTH;
}

static int tok_load_normal(tok *t, const json *v, toka_err *e) {
    str type = tok_type(v);
    if (t->n_normals == TOK_MAX_STEPS) return TOK_FAIL("more than %d normalizers", TOK_MAX_STEPS);
    tok_normal *k = &t->normals[t->n_normals++];
    if (str_is(type, "NFC")) {
        k->kind = TOK_NFC;
    } else if (str_is(type, "Prepend")) {
        *k = (tok_normal){TOK_PREPEND, STR(""), tok_keep(t, json_str(json_get(v, "prepend")))};
    } else if (str_is(type, "Replace")) {
        const json *pattern = json_get(v, "pattern");
        *k = (tok_normal){TOK_REPLACE, tok_keep(t, tok_literal(pattern)), tok_keep(t, json_str(json_get(v, "content")))};
        if (!k->from.n) return tok_unsupported(e, "normalizer Replace: the pattern", json_str(json_get(pattern, "Regex")));
        if (tok_grows(t, k->from, k->to)) return TOK_FAIL("normalizers make a text over %d times longer", TOK_MAX_GROWTH);
    } else {
        return tok_unsupported(e, "normalizer", type);
    }
    if (k->to.n > TOK_MAX_CONTENT) return tok_unsupported(e, "normalizer: the content", k->to);
    return 0;
}

static int tok_add_step(tok *t, const tok_rule *rule, bool removed, toka_err *e) {
    if (t->n_steps == TOK_MAX_STEPS) return TOK_FAIL("more than %d pre-tokenizers", TOK_MAX_STEPS);
    t->steps[t->n_steps++] = (tok_step){rule, removed};
    return 0;
}

static int tok_load_split(tok *t, const json *v, toka_err *e) {
    const json *pattern = json_get(v, "pattern");
    str regex = json_str(json_get(pattern, "Regex")), behavior = json_str(json_get(v, "behavior"));
    if (json_true(json_get(v, "invert"))) return tok_unsupported(e, "pre_tokenizer Split: invert with the pattern", regex);
    if (!str_is(behavior, "Isolated") && !str_is(behavior, "Removed"))
        return tok_unsupported(e, "pre_tokenizer Split: the behavior", behavior);
    for (int i = 0; i < COUNT(tok_rules); i++)
        if (json_is(json_get(pattern, "Regex"), JSON_STRING) && str_is(regex, tok_rules[i].regex))
            return tok_add_step(t, &tok_rules[i], str_is(behavior, "Removed"), e);
    return tok_unsupported(e, "pre_tokenizer Split: the pattern", regex.n ? regex : json_str(json_get(pattern, "String")));
}

static int tok_load_metaspace(tok *t, const json *v, toka_err *e) {
    const json *scheme = json_get(v, "prepend_scheme"), *prefix = json_get(v, "add_prefix_space");
    const json *split = json_get(v, "split");
    str s = scheme ? json_str(scheme) : STR("always");
    t->meta.mark = tok_keep(t, json_str(json_get(v, "replacement")));
    t->meta.split = !json_is(split, JSON_FALSE);
    t->meta.prepend = str_is(s, "always") ? TOK_ALWAYS : str_is(s, "first") ? TOK_FIRST : TOK_NEVER;
    if (json_is(prefix, JSON_FALSE)) t->meta.prepend = TOK_NEVER;
    if (t->meta.prepend == TOK_NEVER && !json_is(prefix, JSON_FALSE) && !str_is(s, "never"))
        return tok_unsupported(e, "pre_tokenizer Metaspace: the prepend_scheme", s);
    if (t->meta.mark.n >= 1 && t->meta.mark.n <= 4) return 0;
    return tok_unsupported(e, "pre_tokenizer Metaspace: the replacement", t->meta.mark);
}

static int tok_load_pre(tok *t, const json *v, toka_err *e) {
    str type = tok_type(v);
    if (t->byte_level || t->meta.mark.n)
        return TOK_FAIL("pre_tokenizer \"%.*s\" behind ByteLevel or Metaspace is not supported", STRF(type));
    if (str_is(type, "Split")) return tok_load_split(t, v, e);
    if (str_is(type, "Digits"))
        return tok_add_step(t, json_true(json_get(v, "individual_digits")) ? &tok_each_digit : &tok_all_digits, false, e);
    if (str_is(type, "Metaspace")) {
        if (t->n_steps) return TOK_FAIL("pre_tokenizer \"Metaspace\" behind another is not supported");
        return tok_load_metaspace(t, v, e);
    }
    if (!str_is(type, "ByteLevel")) return tok_unsupported(e, "pre_tokenizer", type);
    t->byte_level = true;
    t->prefix_space = json_true(json_get(v, "add_prefix_space"));
    if (t->prefix_space && t->n_steps)
        return TOK_FAIL("pre_tokenizer ByteLevel: add_prefix_space behind another is not supported");
    return json_is(json_get(v, "use_regex"), JSON_FALSE) ? 0 : tok_add_step(t, &tok_rules[0], false, e);
}

static int tok_add_outer(tok *t, ids *to, const json *id, toka_err *e) {
    int64_t k = json_int(id, -1);
    if (k < 0 || k >= t->n_ids)
        return TOK_FAIL("post_processor: id %lld, but the vocabulary ends at %d", (long long)k, t->n_ids - 1);
    ids_push(to, (int32_t)k);
    return 0;
}

/* TemplateProcessing: the pieces before and behind sequence A of "single". */
static int tok_load_template(tok *t, const json *v, ids *head, ids *tail, toka_err *e) {
    const json *single = json_get(v, "single"), *tokens = json_get(v, "special_tokens");
    int n_sequences = 0;
    if (!json_is(single, JSON_ARRAY) || single->n > 64)
        return TOK_FAIL("post_processor: \"single\" is not an array of 1 to 64");
    JSON_EACH(it, single) {
        const json *special = json_get(it, "SpecialToken"), *list = NULL;
        str id = json_str(json_get(special, "id"));
        if (!special) {
            if (!str_is(json_str(json_get(json_get(it, "Sequence"), "id")), "A") || n_sequences++)
                return TOK_FAIL("post_processor: \"single\" must have sequence A once");
            continue;
        }
        if (json_is(tokens, JSON_OBJECT))
            JSON_MEMBERS(key, tokens) if (str_eq(json_str(key), id)) list = json_get(key + 1, "ids");
        if (!json_is(list, JSON_ARRAY))
            return TOK_FAIL("post_processor: no ids for the special token \"%.*s\"", STRF(id));
        JSON_EACH(k, list) if (tok_add_outer(t, n_sequences ? tail : head, k, e)) return e->code;
    }
    if (!n_sequences) return TOK_FAIL("post_processor: \"single\" must have sequence A once");
    return 0;
}

static int tok_load_post(tok *t, const json *v, toka_err *e) {
    str type = tok_type(v);
    ids head = {0}, tail = {0};
    int err = 0;
    if (str_is(type, "TemplateProcessing")) {
        err = tok_load_template(t, v, &head, &tail, e);
    } else if (str_is(type, "RobertaProcessing") || str_is(type, "BertProcessing")) {
        err = tok_add_outer(t, &head, json_at(json_get(v, "cls"), 1), e);
        if (!err) err = tok_add_outer(t, &tail, json_at(json_get(v, "sep"), 1), e);
    } else if (!str_is(type, "ByteLevel")) {
        err = tok_unsupported(e, "post_processor", type);
    }
    for (size_t i = 0; !err && i < t->head.n; i++) ids_push(&head, t->head.p[i]); /* a later processor stands outside */
    for (size_t i = 0; !err && i < tail.n; i++) ids_push(&t->tail, tail.p[i]);
    ids_free(&tail), ids_free(&t->head);
    t->head = head;
    return err;
}

/* Every token's decoded text with `from` replaced. */
static int tok_decode_replace(tok *t, const json *v, toka_err *e) {
    const json *pattern = json_get(v, "pattern");
    str from = tok_literal(pattern), to = tok_keep(t, json_str(json_get(v, "content")));
    buf b = {0};
    if (!from.n) return tok_unsupported(e, "decoder Replace: the pattern", json_str(json_get(pattern, "Regex")));
    if (tok_grows(t, from, to)) return TOK_FAIL("decoders make a text over %d times longer", TOK_MAX_GROWTH);
    for (int i = 0; i < t->n_ids; i++) {
        str s = t->text[i].n ? tok_replace(t->text[i], from, to, &b) : t->text[i];
        if (s.p != t->text[i].p) t->text[i] = tok_keep(t, s);
    }
    buf_free(&b);
    return 0;
}

/* ByteLevel: text of the alphabet becomes the bytes it stands for, added tokens' text too; other text stays. */
static void tok_decode_level(tok *t) {
    buf b = {0};
    t->decoder = TOK_BYTES;
    for (int i = 0; i < t->n_ids; i++) {
        if (t->byte_level && t->key[i].p && !t->added_at[i]) continue; /* is so already */
        buf_clear(&b);
        if (tok_unmap(t->text[i], &b)) t->text[i] = tok_keep(t, buf_view(&b));
    }
    buf_free(&b);
}

/* <0x41> decodes to the byte 0x41. */
static void tok_decode_bytes(tok *t) {
    t->decode_fallback = true;
    for (int i = 0; i < t->n_ids; i++) {
        str s = t->text[i];
        if (s.n != 6 || !str_starts(s, STR("<0x")) || s.p[5] != '>') continue;
        if (!isxdigit((unsigned char)s.p[3]) || !isxdigit((unsigned char)s.p[4])) continue;
        char hex[3] = {s.p[3], s.p[4], 0}, *byte = arena_alloc(&t->mem, 1);
        *byte = (char)strtol(hex, NULL, 16);
        t->text[i] = (str){byte, 1};
        t->flag[i] |= TOK_BYTE;
    }
}

static int tok_load_decoder(tok *t, const json *v, toka_err *e) {
    str type = tok_type(v);
    bool chain = t->decoder == TOK_CHAIN;
    if (t->decoder != TOK_JOIN && !chain) return tok_unsupported(e, "decoder in this Sequence:", type);
    if (str_is(type, "ByteLevel") && !chain) return tok_decode_level(t), 0;
    if (str_is(type, "Metaspace") && !chain) {
        str scheme = json_get(v, "prepend_scheme") ? json_str(json_get(v, "prepend_scheme")) : STR("always");
        t->meta_mark = tok_keep(t, json_str(json_get(v, "replacement")));
        t->meta_drop = !str_is(scheme, "never") && !json_is(json_get(v, "add_prefix_space"), JSON_FALSE);
        t->decoder = TOK_META;
        return t->meta_mark.n ? 0 : tok_unsupported(e, "decoder Metaspace: the replacement", t->meta_mark);
    }
    t->decoder = TOK_CHAIN;
    if (str_is(type, "Replace") && !t->decode_fallback && !t->decode_fuse) return tok_decode_replace(t, v, e);
    if (str_is(type, "ByteFallback") && !t->decode_fallback && !t->decode_fuse) return tok_decode_bytes(t), 0;
    if (str_is(type, "Fuse")) return t->decode_fuse = true, 0;
    if (str_is(type, "Strip") && t->decode_fuse && !t->strip && json_int(json_get(v, "stop"), -1) == 0) {
        int64_t n = json_int(json_get(v, "start"), -1);
        t->strip_char = tok_keep(t, json_str(json_get(v, "content")));
        if (n >= 0 && n <= INT32_MAX && t->strip_char.n && t->strip_char.n <= 4) return t->strip = (int)n, 0;
    }
    return tok_unsupported(e, "decoder in this place:", type);
}

/* ---- Loading: the whole ---- */

static int tok_load_model(tok *t, const json *root, toka_err *e) {
    const json *model = json_get(root, "model"), *vocab = json_get(model, "vocab");
    const json *dropout = json_get(model, "dropout"), *prefix = json_get(model, "continuing_subword_prefix");
    const json *suffix = json_get(model, "end_of_word_suffix"), *added = json_get(root, "added_tokens");
    if (!json_is(model, JSON_OBJECT)) return TOK_FAIL("no object \"model\"");
    if (!str_is(tok_type(model), "BPE")) return tok_unsupported(e, "model type", tok_type(model));
    if (json_num(dropout, 0) != 0) return TOK_FAIL("model.dropout is not supported");
    if (json_str(prefix).n) return tok_unsupported(e, "model.continuing_subword_prefix", json_str(prefix));
    if (json_str(suffix).n) return tok_unsupported(e, "model.end_of_word_suffix", json_str(suffix));
    t->ignore_merges = json_true(json_get(model, "ignore_merges"));
    t->fuse_unk = json_true(json_get(model, "fuse_unk"));
    t->byte_fallback = json_true(json_get(model, "byte_fallback"));
    if (tok_load_vocab(t, vocab, json_is(added, JSON_ARRAY) ? added : NULL, e)) return e->code;
    if (tok_load_bytes(t, model, e)) return e->code;
    if (tok_load_merges(t, json_get(model, "merges"), e)) return e->code;
    return tok_load_added(t, added, vocab->n, e);
}

static int tok_load_root(tok *t, const json *root, toka_err *e) {
    if (!json_is(root, JSON_OBJECT)) return TOK_FAIL("an object was expected");
    t->growth = 1;
    if (tok_load_each(t, json_get(root, "normalizer"), "normalizers", 0, tok_load_normal, e)) return e->code;
    if (tok_load_each(t, json_get(root, "pre_tokenizer"), "pretokenizers", 0, tok_load_pre, e)) return e->code;
    if (tok_load_model(t, root, e)) return e->code;
    if (tok_load_each(t, json_get(root, "post_processor"), "processors", 0, tok_load_post, e)) return e->code;
    t->growth = 1;
    if (tok_load_each(t, json_get(root, "decoder"), "decoders", 0, tok_load_decoder, e)) return e->code;
    if (t->byte_level && t->decoder != TOK_BYTES)
        return tok_unsupported(e, "with a ByteLevel pre-tokenizer the decoder", tok_type(json_get(root, "decoder")));
    return 0;
}

/* Reads tokenizer.json. config_json, the text of tokenizer_config.json or nothing, is for what may come: nothing in it
 * changes what Hugging Face `tokenizers` does. Both texts may go away after. *out is the caller's until tok_del. */
static int tok_load(tok **out, str tokenizer_json, str config_json, toka_err *e) {
    arena a = {0};
    toka_err why;
    (void)config_json;
    *out = NULL;
    const json *root = json_parse(&a, tokenizer_json, json_trusted, &why);
    if (!root) {
        arena_free(&a);
        return fail(e, why.code, "tokenizer.json: %.400s", why.msg);
    }
    tok *t = mem_zalloc(sizeof *t);
    uni_init(&t->uni);
    t->slots = mem_check(aligned_alloc(64, TOK_SLOTS * sizeof *t->slots));
    for (int i = 0; i < TOK_SLOTS; i++)
        for (int k = 0; k < 8; k++) atomic_init(&t->slots[i].w[k], 0);
    int err = tok_load_root(t, root, e);
    arena_free(&a);
    if (err) tok_del(t);
    else *out = t;
    return err;
}

static void tok_del(tok *t) {
    if (!t) return;
    uni_free(&t->uni);
    arena_free(&t->mem);
    free(t->key), free(t->name), free(t->text), free(t->flag), free(t->keys.places), free(t->names.places);
    free(t->merges), free(t->joins), free(t->slots), free(t->added), free(t->added_at);
    free(t->raw.sorted), free(t->normalized.sorted);
    ids_free(&t->head), ids_free(&t->tail);
    free(t);
}

/* ===========================================================================
 * MARK: 7. Chat template: values and parser [pure]
 * The Jinja that chat templates use: values, lexer, parser.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 8. Chat template: evaluation [pure]
 * Runs a parsed template under limits of steps, depth and output.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 9. Model files [os]
 * config.json, generation_config.json, safetensors, the local hub cache, models.txt.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 10. KV pages and prefix tree [pure]
 * Empty until the engine issue: pages are handed out by chapter 17 for now.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 11. Length predictor [pure]
 * To come with the engine.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 12. Scheduler [pure]
 * To come with the engine.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 13. Batch building and shared prefixes [pure]
 * To come with the engine.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 14. Sampling and stops [pure]
 * From a row of logits to a token, and when to end.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 15. CPU backend [cpu]
 * The boundary of toka.h on the CPU.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 16. Model: the layer loop [os]
 * The transformer, once, over the backend's table.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 17. Engine [os]
 * Requests to steps to events.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 18. Public API [os]
 * What toka.h declares.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 19. HTTP [pure]
 * To come with the server.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 20. OpenAI API [pure]
 * To come with the server.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 21. Server [os]
 * To come with the server.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 22. Batch runner, bench and plan [os]
 * To come with the engine.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 23. Command line [os]
 * main().
 * =========================================================================== */
