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
 * Code points, categories and normal form C, from the tables of one Unicode version.
 * =========================================================================== */

/* ===========================================================================
 * MARK: 6. Tokenizer [pure]
 * tokenizer.json to ids and back, equal to Hugging Face `tokenizers`.
 * =========================================================================== */

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

/* A stand-in until the chapter is merged: forced id or greedy. */
static void samp_row(const toka_out_row *row, float *logits, int V, toka_pick *pick) {
    int best = 0;
    double sum = 0;
    for (int i = 1; i < V; i++)
        if (logits[i] > logits[best]) best = i;
    for (int i = 0; i < V; i++) sum += exp((double)logits[i] - logits[best]);
    *pick = (toka_pick){.id = row->forced_id >= 0 ? row->forced_id : best};
    pick->logprob = pick->sampled_logprob = (float)(logits[pick->id] - logits[best] - log(sum));
}

/* ===========================================================================
 * MARK: 15. CPU backend [cpu]
 * The table of toka.h on the CPU: toka_cpu. In: one step's plan of integers, activations in float32, weights where they
 * lie in the mapped file (bf16, f16, f32). Out: the residual stream, K and V in their pages, picks. Sums are float32.
 *
 * What always holds: the bytes of a row's result depend on that row alone. Not on T or on the other rows of the step, not
 * on the number of threads, not on how a prompt was cut into chunks or the attention into spans. Three rules give that:
 *   - A product y[t][n] = sum over k of x[t][k] w[n][k] has one order in every tile shape: k in blocks of kernels.block;
 *     in a block lane j of one vector sums the k with k % lanes == j in rising order; one fixed tree sums the lanes; blocks
 *     add up in order.
 *   - Attention walks the kv positions page by page in rising order and merges each page into a running softmax. Spans
 *     begin and end on page borders, so how they are cut changes nothing. What a row may not see adds an exact zero.
 *   - Threads share out whole results, never parts of one sum.
 * Instruction sets differ in lanes and thus in rounding; one process uses one set.
 *
 * Products. Lanes lie along k because both x and w have k contiguous: one row of x (decode) streams w straight from memory,
 * and many rows (prefill) use the same tile over a panel of w that was unpacked to float32 once and then stays in cache.
 *
 * K and V memory, per layer, page and kv head, so that lanes lie along the contiguous side in both uses:
 *     K [D][Bp]  transposed: one q element times 16 neighbour positions      Bp, Dp: B, D rounded up to 16;
 *     V [B][Dp]  one probability times 16 neighbour elements of a value      the rest of a line is zero
 *
 * It does not: plan, free pages, check plans beyond cheap asserts, or draw tokens (samp_row of chapter 14 does).
 * =========================================================================== */

#include <stdatomic.h>

enum {
    CPU_BLOCK = 1024,         /* largest k per block of a product; a multiple of 16 as all of them */
    CPU_PANEL = 64,           /* rows of a weight that are unpacked together: up to 256 KB of float32, second cache level */
    /* floats from row to row; not a power of two, else all rows fall into the same cache sets */
    CPU_PANEL_LD = CPU_BLOCK + 16,
    CPU_DIRECT = 12,          /* up to this many rows of x, w is unpacked in registers each time */
    CPU_CHUNK = 512,          /* tokens that go through one op's scratch at once */
    CPU_OUT_CHUNK = 64,       /* rows of logits held at once */
    CPU_SCRATCH = 128 << 20,  /* bytes that chunks are cut down to */
    CPU_HEAD = 256,           /* largest D */
    CPU_QUERIES = 32,         /* query rows (token, head of one kv head) that share one pass over K and V */
    CPU_THREADS = 1024,       /* most threads */
    CPU_SMALL = 60000,        /* multiply-adds below which waking a second thread costs more than it gives */
    CPU_SPIN = 2000           /* looks at the pool's state before a thread sleeps; some 50 us */
};

/* Unrolls a loop of constant count wholly, so that its array of vectors becomes registers. */
#ifdef __clang__
#define CPU_UNROLL _Pragma("clang loop unroll(full)")
#define CPU_TWICE _Pragma("clang loop unroll_count(2)")
#else
#define CPU_UNROLL _Pragma("GCC unroll 8")
#define CPU_TWICE _Pragma("GCC unroll 2")
#endif
#define CPU_INLINE __attribute__((always_inline)) static inline

static int cpu_up16(int n) { return (n + 15) & ~15; }

/* ---- Kernels: what they take -------------------------------------------------------------------------------- */

/* y[m][n] = sum over k of x[m][k] w[n][k] for one block of k and a tile of at most [kernels.rows][4] results, or [1][8]. */
typedef struct cpu_tile {
    const float *x; /* [m][k], rows ldx floats apart */
    const char *w;  /* [n][k] of some dtype, rows w_step bytes apart */
    float *y;       /* [m][n], rows ldy floats apart */
    size_t ldx, w_step, ldy;
    int m, n, k; /* k: a multiple of 16 */
    bool add;    /* y += instead of y = */
    bool ahead;  /* w comes from memory and these are its first readers: see cpu_tile_ahead */
} cpu_tile;

/* c[r][j] (+)= sum over k, in rising order, of a[r][k] b[k][j]. The two products of attention. */
typedef struct cpu_outer {
    const float *a, *b;
    float *c;
    size_t lda, ldb, ldc; /* floats from row to row */
    int rows, k, n;       /* n: a multiple of 16 */
    bool add;
} cpu_outer;

/* One row's running softmax: acc / sum is the output so far, both relative to exp(best). */
typedef struct cpu_softmax {
    float *acc; /* [Dp] */
    float best, sum;
} cpu_softmax;

/* The kernels of one instruction set. */
typedef struct cpu_kernels {
    const char *name;
    int rows;  /* rows of x in the largest tile */
    int block; /* k per block of a product: rows + 4 rows of it stay in the first cache levels; at most CPU_BLOCK */
    void (*tile[3])(const cpu_tile *t);                                             /* by toka_dtype */
    void (*unpack)(float *to, const void *from, toka_dtype type, int n);            /* n elements to float32 */
    void (*outer)(const cpu_outer *o);
    void (*soften)(cpu_softmax *st, float *s, int n, int from, int to, int dp); /* cpu_soften in this set's encoding */
} cpu_kernels;

/* ---- Scalars and bodies shared by the instruction sets ---- */

static float cpu_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static float cpu_half(uint16_t h) { /* f16 to float32, exact, as cpu_halves_c */
    uint32_t rest = (uint32_t)(h & 0x7FFF) << 13, top = rest >= 0x0F800000 ? 0x7F800000 : 0;
    float f = cpu_bits(rest) * 0x1p112f;
    memcpy(&rest, &f, 4);
    return cpu_bits(rest | top | (uint32_t)(h & 0x8000) << 16);
}

static float cpu_element(const void *p, toka_dtype type, size_t i) {
    uint16_t h;
    float f;
    if (type == TOKA_F32) return memcpy(&f, (const char *)p + 4 * i, 4), f;
    memcpy(&h, (const char *)p + 2 * i, 2);
    return type == TOKA_BF16 ? cpu_bits((uint32_t)h << 16) : cpu_half(h);
}

static size_t cpu_dtype_bytes(toka_dtype type) { return type == TOKA_F32 ? 4 : 2; }

/* ---- Vectors of 4 lanes, as GCC and Clang spell them for any machine ---- */

typedef float cpu_v4 __attribute__((vector_size(16)));
typedef uint32_t cpu_u4 __attribute__((vector_size(16)));
typedef int32_t cpu_i4 __attribute__((vector_size(16))); /* -1 or 0 a lane: what a comparison gives */
typedef uint16_t cpu_h4 __attribute__((vector_size(8)));

CPU_INLINE cpu_v4 cpu_get4(const float *p) {
    cpu_v4 v;
    memcpy(&v, p, sizeof v);
    return v;
}
CPU_INLINE void cpu_set4(float *p, cpu_v4 v) { memcpy(p, &v, sizeof v); }
CPU_INLINE cpu_v4 cpu_all4(float x) { return (cpu_v4){x, x, x, x}; }
CPU_INLINE cpu_v4 cpu_where4(cpu_i4 mask, cpu_v4 yes, cpu_v4 no) {
    return (cpu_v4)((mask & (cpu_i4)yes) | (~mask & (cpu_i4)no));
}
CPU_INLINE cpu_v4 cpu_max4(cpu_v4 a, cpu_v4 b) { return cpu_where4(a > b, a, b); }

/* exp, relative error below 3e-7; exactly 0 below -87 and exactly 1 at 0. x = n ln 2 + r with |r| <= ln 2 / 2, Taylor to
 * the 7th power in r (the 8th is 5e-9), n into the exponent. */
CPU_INLINE cpu_v4 cpu_exp4(cpu_v4 x) {
    cpu_v4 y = cpu_where4(x < -87.0f, cpu_all4(-87), x);
    y = cpu_where4(y > 88.0f, cpu_all4(88), y);
    cpu_v4 shifted = y * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the integer part lands in the low bits */
    cpu_v4 n = shifted - 12582912.0f;
    cpu_v4 r = y - n * 0.693359375f; /* ln 2 in two parts, the first with few bits */
    r = r - n * -2.12194440e-4f;
    cpu_v4 p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    cpu_u4 power = ((cpu_u4)shifted - 0x4B400000u + 127u) << 23;
    return cpu_where4(x < -87.0f, cpu_all4(0), p * (cpu_v4)power);
}

static void cpu_swiglu(float *gate, const float *up, int n) { /* gate = silu(gate) * up; n a multiple of 4 */
    for (int i = 0; i < n; i += 4) {
        cpu_v4 g = cpu_get4(gate + i);
        cpu_set4(gate + i, g / (1.0f + cpu_exp4(-g)) * cpu_get4(up + i));
    }
}

/* Merges one page of scores s[n] into a row's running softmax; only positions from <= j < to are seen. Leaves in s the
 * probabilities (relative to the new best) for the product with V, 0 where unseen. n and dp are multiples of 16. */
CPU_INLINE void cpu_soften(cpu_softmax *st, float *s, int n, int from, int to, int dp) {
    cpu_v4 lane[4];
    if (from >= to) {
        memset(s, 0, (size_t)n * sizeof *s);
        return;
    }
    for (int j = 0; j < from; j++) s[j] = -INFINITY;
    for (int j = to; j < n; j++) s[j] = -INFINITY;
    CPU_UNROLL for (int i = 0; i < 4; i++) lane[i] = cpu_get4(s + 4 * i);
    for (int j = 16; j < n; j += 16)
        CPU_UNROLL for (int i = 0; i < 4; i++) lane[i] = cpu_max4(lane[i], cpu_get4(s + j + 4 * i));
    cpu_v4 m = cpu_max4(cpu_max4(lane[0], lane[1]), cpu_max4(lane[2], lane[3]));
    float best = MAX(MAX(m[0], m[1]), MAX(m[2], m[3]));
    if (best > st->best) {
        cpu_v4 shrink = cpu_exp4(cpu_all4(st->best - best)); /* 0 at the first page, where st->best is -infinity */
        st->best = best;
        st->sum *= shrink[0];
        for (int j = 0; j < dp; j += 4) cpu_set4(st->acc + j, cpu_get4(st->acc + j) * shrink);
    }
    CPU_UNROLL for (int i = 0; i < 4; i++) lane[i] = cpu_all4(0);
    for (int j = 0; j < n; j += 16)
        CPU_UNROLL for (int i = 0; i < 4; i++) {
            cpu_v4 e = cpu_exp4(cpu_get4(s + j + 4 * i) - st->best);
            cpu_set4(s + j + 4 * i, e);
            lane[i] += e;
        }
    m = (lane[0] + lane[1]) + (lane[2] + lane[3]);
    st->sum += (m[0] + m[2]) + (m[1] + m[3]);
}

/* ---- What the tiles of all instruction sets share ---- */

/* Row j of a tile's weights; rows behind the last repeat it, their results are not written. */
CPU_INLINE const char *cpu_tile_row(const cpu_tile *t, int j) { return t->w + (size_t)MIN(j, t->n - 1) * t->w_step; }

/* A few rows of x read every weight once, from memory: asks for the same place in the next n rows, which come next, into
 * the second cache level; once per line of 64 bytes. Without it the units that add wait for memory and memory for them
 * (one row of x: reading alone 23 GB/s of one core, with the sums 16, with this 22; EPYC Zen 4, 2026-11). */
CPU_INLINE void cpu_tile_ahead(const cpu_tile *t, const char *const *w, const int n, toka_dtype type, int k) {
    const int line = type == TOKA_F32 ? 16 : 32; /* elements of 64 bytes */
    size_t ahead = t->w_step <= 32768 ? (size_t)n * t->w_step : 1024;
    if (t->ahead && k % line == 0)
        CPU_UNROLL for (int j = 0; j < n; j++) __builtin_prefetch(w[j] + (size_t)k * (64 / (size_t)line) + ahead, 0, 2);
}

/* ---- Portable kernels: 4 lanes ---- */

/* f16 to float32: exponent and mantissa moved into place are 2^112 too small, also where the number is subnormal. Infinity
 * and NaN get their exponent back. */
CPU_INLINE cpu_v4 cpu_halves_c(cpu_u4 h) {
    cpu_u4 rest = (h & 0x7FFF) << 13, top = (cpu_u4)(rest >= 0x0F800000) & 0x7F800000;
    return (cpu_v4)((cpu_u4)((cpu_v4)rest * 0x1p112f) | top | (h & 0x8000) << 16);
}

CPU_INLINE cpu_v4 cpu_load_c(const void *p, toka_dtype type, int k) {
    cpu_v4 v;
    cpu_h4 h;
    if (type == TOKA_F32) return memcpy(&v, (const char *)p + 4 * (size_t)k, sizeof v), v;
    memcpy(&h, (const char *)p + 2 * (size_t)k, sizeof h);
    cpu_u4 u = __builtin_convertvector(h, cpu_u4);
    return type == TOKA_F16 ? cpu_halves_c(u) : (cpu_v4)(u << 16);
}

CPU_INLINE void cpu_tile_body_c(const cpu_tile *t, const int m, const int n, const toka_dtype type) {
    cpu_v4 acc[2][8] = {0};
    const char *w[8];
    CPU_UNROLL for (int j = 0; j < n; j++) w[j] = cpu_tile_row(t, j);
    for (int k = 0; k < t->k; k += 4) {
        cpu_v4 a[2];
        cpu_tile_ahead(t, w, n, type, k);
        CPU_UNROLL for (int i = 0; i < m; i++) a[i] = cpu_load_c(t->x + (size_t)i * t->ldx, TOKA_F32, k);
        CPU_UNROLL for (int j = 0; j < n; j++) {
            cpu_v4 b = cpu_load_c(w[j], type, k);
            CPU_UNROLL for (int i = 0; i < m; i++) acc[i][j] += a[i] * b;
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < t->n; j++) {
            float *y = t->y + (size_t)i * t->ldy + j, sum = (acc[i][j][0] + acc[i][j][2]) + (acc[i][j][1] + acc[i][j][3]);
            *y = t->add ? *y + sum : sum;
        }
}
CPU_INLINE void cpu_tile_c(const cpu_tile *t, const toka_dtype type) {
    if (t->m == 1 && t->n > 4) cpu_tile_body_c(t, 1, 8, type);
    else if (t->m == 1) cpu_tile_body_c(t, 1, 4, type);
    else cpu_tile_body_c(t, 2, 4, type);
}
static void cpu_tile_bf16_c(const cpu_tile *t) { cpu_tile_c(t, TOKA_BF16); }
static void cpu_tile_f16_c(const cpu_tile *t) { cpu_tile_c(t, TOKA_F16); }
static void cpu_tile_f32_c(const cpu_tile *t) { cpu_tile_c(t, TOKA_F32); }

static void cpu_unpack_c(float *to, const void *from, toka_dtype type, int n) {
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        cpu_v4 v = cpu_load_c(from, type, i);
        memcpy(to + i, &v, sizeof v);
    }
    for (; i < n; i++) to[i] = cpu_element(from, type, (size_t)i);
}

static void cpu_soften_c(cpu_softmax *st, float *s, int n, int from, int to, int dp) { cpu_soften(st, s, n, from, to, dp); }

static void cpu_outer_c(const cpu_outer *o) {
    for (int r = 0; r < o->rows; r++)
        for (int j = 0; j < o->n; j += 16) {
            const float *a = o->a + (size_t)r * o->lda, *b = o->b + j;
            cpu_v4 acc[4] = {0};
            float *c = o->c + (size_t)r * o->ldc + j;
            if (o->add) memcpy(acc, c, sizeof acc);
            for (int k = 0; k < o->k; k++, b += o->ldb)
                CPU_UNROLL for (int i = 0; i < 4; i++) acc[i] += a[k] * cpu_load_c(b, TOKA_F32, 4 * i);
            memcpy(c, acc, sizeof acc);
        }
}

#ifdef __x86_64__
#include <immintrin.h>

/* ---- AVX2 kernels: 8 lanes, 16 registers ---- */

#define CPU_AVX2 __attribute__((target("avx2,fma,f16c")))

CPU_AVX2 CPU_INLINE __m256 cpu_load_avx2(const void *p, toka_dtype type, int k) {
    if (type == TOKA_F32) return _mm256_loadu_ps((const float *)p + k);
    __m128i h = _mm_loadu_si128((const void *)((const char *)p + 2 * (size_t)k));
    if (type == TOKA_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* Sums the lanes of four vectors: lanes j and j+4 last, neighbours first. */
CPU_AVX2 CPU_INLINE __m128 cpu_sum4_avx2(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* Writes or adds four results, or the first n of them. */
CPU_AVX2 CPU_INLINE void cpu_put4_avx2(float *y, __m128 v, int n, bool add) {
    if (n >= 4) {
        _mm_storeu_ps(y, add ? _mm_add_ps(_mm_loadu_ps(y), v) : v);
        return;
    }
    float part[4];
    _mm_storeu_ps(part, v);
    for (int i = 0; i < n; i++) y[i] = add ? y[i] + part[i] : part[i];
}

CPU_AVX2 CPU_INLINE void cpu_tile_body_avx2(const cpu_tile *t, const int m, const int n, const toka_dtype type) {
    const char *w[8];
    __m256 acc[3][8], a[3];
    CPU_UNROLL for (int j = 0; j < n; j++) w[j] = cpu_tile_row(t, j);
    CPU_UNROLL for (int i = 0; i < m; i++)
        CPU_UNROLL for (int j = 0; j < n; j++) acc[i][j] = _mm256_setzero_ps();
    for (int k = 0; k < t->k; k += 8) {
        cpu_tile_ahead(t, w, n, type, k);
        CPU_UNROLL for (int i = 0; i < m; i++) a[i] = _mm256_loadu_ps(t->x + (size_t)i * t->ldx + k);
        CPU_UNROLL for (int j = 0; j < n; j++) { /* 12 sums, 3 of x and 1 weight: 16 registers */
            __m256 b = cpu_load_avx2(w[j], type, k);
            CPU_UNROLL for (int i = 0; i < m; i++) acc[i][j] = _mm256_fmadd_ps(a[i], b, acc[i][j]);
        }
    }
    CPU_UNROLL for (int i = 0; i < m; i++)
        CPU_UNROLL for (int j = 0; j < n; j += 4)
            cpu_put4_avx2(t->y + (size_t)i * t->ldy + j, cpu_sum4_avx2(acc[i][j], acc[i][j + 1], acc[i][j + 2],
                                                                       acc[i][j + 3]),
                          t->n - j, t->add);
}
CPU_AVX2 CPU_INLINE void cpu_tile_avx2(const cpu_tile *t, const toka_dtype type) {
    if (t->m == 1 && t->n > 4) cpu_tile_body_avx2(t, 1, 8, type);
    else if (t->m == 1) cpu_tile_body_avx2(t, 1, 4, type);
    else if (t->m == 2) cpu_tile_body_avx2(t, 2, 4, type);
    else cpu_tile_body_avx2(t, 3, 4, type);
}
CPU_AVX2 static void cpu_tile_bf16_avx2(const cpu_tile *t) { cpu_tile_avx2(t, TOKA_BF16); }
CPU_AVX2 static void cpu_tile_f16_avx2(const cpu_tile *t) { cpu_tile_avx2(t, TOKA_F16); }
CPU_AVX2 static void cpu_tile_f32_avx2(const cpu_tile *t) { cpu_tile_avx2(t, TOKA_F32); }

CPU_AVX2 static void cpu_unpack_avx2(float *to, const void *from, toka_dtype type, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, cpu_load_avx2(from, type, i));
    for (; i < n; i++) to[i] = cpu_element(from, type, (size_t)i);
}

/* rows x 16 results in registers over all of k */
CPU_AVX2 CPU_INLINE void cpu_outer_body_avx2(const cpu_outer *o, const int rows, int r, int j) {
    const float *a = o->a + (size_t)r * o->lda, *b = o->b + j;
    float *c = o->c + (size_t)r * o->ldc + j;
    __m256 lo[4], hi[4];
    CPU_UNROLL for (int i = 0; i < rows; i++) {
        lo[i] = o->add ? _mm256_loadu_ps(c + (size_t)i * o->ldc) : _mm256_setzero_ps();
        hi[i] = o->add ? _mm256_loadu_ps(c + (size_t)i * o->ldc + 8) : _mm256_setzero_ps();
    }
    for (int k = 0; k < o->k; k++, b += o->ldb) {
        __m256 y = _mm256_loadu_ps(b), z = _mm256_loadu_ps(b + 8);
        CPU_UNROLL for (int i = 0; i < rows; i++) {
            __m256 x = _mm256_broadcast_ss(a + (size_t)i * o->lda + k);
            lo[i] = _mm256_fmadd_ps(x, y, lo[i]);
            hi[i] = _mm256_fmadd_ps(x, z, hi[i]);
        }
    }
    CPU_UNROLL for (int i = 0; i < rows; i++) {
        _mm256_storeu_ps(c + (size_t)i * o->ldc, lo[i]);
        _mm256_storeu_ps(c + (size_t)i * o->ldc + 8, hi[i]);
    }
}
CPU_AVX2 static void cpu_soften_avx2(cpu_softmax *st, float *s, int n, int from, int to, int dp) {
    cpu_soften(st, s, n, from, to, dp);
}

CPU_AVX2 static void cpu_outer_avx2(const cpu_outer *o) {
    for (int j = 0; j < o->n; j += 16) {
        int r = 0;
        for (; r + 4 <= o->rows; r += 4) cpu_outer_body_avx2(o, 4, r, j);
        for (; r + 2 <= o->rows; r += 2) cpu_outer_body_avx2(o, 2, r, j);
        if (r < o->rows) cpu_outer_body_avx2(o, 1, r, j);
    }
}

/* ---- AVX-512 kernels: 16 lanes, 32 registers ---- */

#define CPU_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))

CPU_AVX512 CPU_INLINE __m512 cpu_load_avx512(const void *p, toka_dtype type, int k) {
    if (type == TOKA_F32) return _mm512_loadu_ps((const float *)p + k);
    __m256i h = _mm256_loadu_si256((const void *)((const char *)p + 2 * (size_t)k));
    if (type == TOKA_F16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

CPU_AVX512 CPU_INLINE __m256 cpu_fold_avx512(__m512 v) { /* lanes j and j+8 */
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

CPU_AVX512 CPU_INLINE void cpu_tile_body_avx512(const cpu_tile *t, const int m, const int n, const toka_dtype type) {
    const char *w[8];
    __m512 acc[6][8], b[8];
    CPU_UNROLL for (int j = 0; j < n; j++) w[j] = cpu_tile_row(t, j);
    CPU_UNROLL for (int i = 0; i < m; i++)
        CPU_UNROLL for (int j = 0; j < n; j++) acc[i][j] = _mm512_setzero_ps();
    CPU_TWICE for (int k = 0; k < t->k; k += 16) {
        cpu_tile_ahead(t, w, n, type, k);
        CPU_UNROLL for (int j = 0; j < n; j++) b[j] = cpu_load_avx512(w[j], type, k);
        CPU_UNROLL for (int i = 0; i < m; i++) {
            __m512 a = _mm512_loadu_ps(t->x + (size_t)i * t->ldx + k);
            CPU_UNROLL for (int j = 0; j < n; j++) acc[i][j] = _mm512_fmadd_ps(a, b[j], acc[i][j]);
        }
    }
    CPU_UNROLL for (int i = 0; i < m; i++)
        CPU_UNROLL for (int j = 0; j < n; j += 4) {
            __m128 sum = cpu_sum4_avx2(cpu_fold_avx512(acc[i][j]), cpu_fold_avx512(acc[i][j + 1]),
                                       cpu_fold_avx512(acc[i][j + 2]),
                                       cpu_fold_avx512(acc[i][j + 3]));
            cpu_put4_avx2(t->y + (size_t)i * t->ldy + j, sum, t->n - j, t->add);
        }
}
CPU_AVX512 CPU_INLINE void cpu_tile_avx512(const cpu_tile *t, const toka_dtype type) {
    switch (t->m) {
    case 1:
        if (t->n > 4) cpu_tile_body_avx512(t, 1, 8, type);
        else cpu_tile_body_avx512(t, 1, 4, type);
        break;
    case 2: cpu_tile_body_avx512(t, 2, 4, type); break;
    case 3: cpu_tile_body_avx512(t, 3, 4, type); break;
    case 4: cpu_tile_body_avx512(t, 4, 4, type); break;
    case 5: cpu_tile_body_avx512(t, 5, 4, type); break;
    default: cpu_tile_body_avx512(t, 6, 4, type);
    }
}
CPU_AVX512 static void cpu_tile_bf16_avx512(const cpu_tile *t) { cpu_tile_avx512(t, TOKA_BF16); }
CPU_AVX512 static void cpu_tile_f16_avx512(const cpu_tile *t) { cpu_tile_avx512(t, TOKA_F16); }
CPU_AVX512 static void cpu_tile_f32_avx512(const cpu_tile *t) { cpu_tile_avx512(t, TOKA_F32); }

CPU_AVX512 static void cpu_unpack_avx512(float *to, const void *from, toka_dtype type, int n) {
    int i = 0;
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(to + i, cpu_load_avx512(from, type, i));
    for (; i < n; i++) to[i] = cpu_element(from, type, (size_t)i);
}

/* rows x 16 or 32 results in registers over all of k */
CPU_AVX512 CPU_INLINE void cpu_outer_body_avx512(const cpu_outer *o, const int rows, const bool two, int r, int j) {
    const float *a = o->a + (size_t)r * o->lda, *b = o->b + j;
    float *c = o->c + (size_t)r * o->ldc + j;
    __m512 lo[8], hi[8];
    CPU_UNROLL for (int i = 0; i < rows; i++) {
        lo[i] = o->add ? _mm512_loadu_ps(c + (size_t)i * o->ldc) : _mm512_setzero_ps();
        if (two) hi[i] = o->add ? _mm512_loadu_ps(c + (size_t)i * o->ldc + 16) : _mm512_setzero_ps();
    }
    for (int k = 0; k < o->k; k++, b += o->ldb) {
        __m512 y = _mm512_loadu_ps(b), z = two ? _mm512_loadu_ps(b + 16) : y;
        CPU_UNROLL for (int i = 0; i < rows; i++) {
            __m512 x = _mm512_set1_ps(a[(size_t)i * o->lda + k]);
            lo[i] = _mm512_fmadd_ps(x, y, lo[i]);
            if (two) hi[i] = _mm512_fmadd_ps(x, z, hi[i]);
        }
    }
    CPU_UNROLL for (int i = 0; i < rows; i++) {
        _mm512_storeu_ps(c + (size_t)i * o->ldc, lo[i]);
        if (two) _mm512_storeu_ps(c + (size_t)i * o->ldc + 16, hi[i]);
    }
}
CPU_AVX512 CPU_INLINE void cpu_outer_rows_avx512(const cpu_outer *o, const bool two, int j) {
    int r = 0;
    for (; r + 8 <= o->rows; r += 8) cpu_outer_body_avx512(o, 8, two, r, j);
    for (; r + 4 <= o->rows; r += 4) cpu_outer_body_avx512(o, 4, two, r, j);
    for (; r + 2 <= o->rows; r += 2) cpu_outer_body_avx512(o, 2, two, r, j);
    if (r < o->rows) cpu_outer_body_avx512(o, 1, two, r, j);
}
CPU_AVX512 static void cpu_soften_avx512(cpu_softmax *st, float *s, int n, int from, int to, int dp) {
    cpu_soften(st, s, n, from, to, dp);
}

CPU_AVX512 static void cpu_outer_avx512(const cpu_outer *o) {
    int j = 0;
    for (; j + 32 <= o->n; j += 32) cpu_outer_rows_avx512(o, true, j);
    if (j < o->n) cpu_outer_rows_avx512(o, false, j);
}

#endif

/* ---- The instruction sets, and the choice ---- */

static const cpu_kernels cpu_sets[] = {
    {"portable C", 2, 512, {cpu_tile_bf16_c, cpu_tile_f16_c, cpu_tile_f32_c}, cpu_unpack_c, cpu_outer_c, cpu_soften_c},
#ifdef __x86_64__
    {"AVX2", 3, 512, {cpu_tile_bf16_avx2, cpu_tile_f16_avx2, cpu_tile_f32_avx2}, cpu_unpack_avx2, cpu_outer_avx2,
     cpu_soften_avx2},
    {"AVX-512", 6, 1024, {cpu_tile_bf16_avx512, cpu_tile_f16_avx512, cpu_tile_f32_avx512}, cpu_unpack_avx512,
     cpu_outer_avx512, cpu_soften_avx512},
#endif
};

static int cpu_n_sets(void) { /* cpu_sets[0 .. this-1] run on this machine, the last is the fastest */
#ifdef __x86_64__
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); /* every such CPU converts f16 too */
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return 3;
    if (avx2) return 2;
#endif
    return 1;
}

/* ---- Threads ----
 * The thread that calls an op posts a round of numbered items; it and every thread of the pool that is awake take items
 * until none is left. A thread that the system has put aside simply does not join, and nobody waits for it; so more
 * threads than cores cost little. `state` holds: round number << 16 | open << 15 | threads inside. */

typedef void cpu_work(void *arg, int thread, int item);

typedef struct cpu_pool {
    int n;         /* threads with the caller */
    int64_t small; /* cost below which a round stays on the caller; tests set 0 */
    pthread_t *threads;
    _Atomic uint64_t state;
    atomic_int next; /* item to take */
    atomic_int sleepers;
    atomic_bool quit;
    int n_items; /* of the open round; these three are written while nobody is inside */
    cpu_work *work;
    void *arg;
    pthread_mutex_t lock; /* guards the wait on `wake` */
    pthread_cond_t wake;
} cpu_pool;

typedef struct cpu_worker {
    cpu_pool *pool;
    int thread;
} cpu_worker;

#define CPU_OPEN ((uint64_t)1 << 15)

static void cpu_pause(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

static void cpu_take_items(cpu_pool *p, int thread) {
    for (int i; (i = atomic_fetch_add(&p->next, 1)) < p->n_items;) p->work(p->arg, thread, i);
}

/* Waits until a round other than `seen` was posted; spins, then sleeps. */
static void cpu_await(cpu_pool *p, uint64_t seen) {
    for (int i = 0; i < CPU_SPIN; i++) {
        if (atomic_load(&p->state) >> 16 != seen || atomic_load(&p->quit)) return;
        cpu_pause();
    }
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleepers, 1); /* before looking again: the poster changes state first, then looks for sleepers */
    while (atomic_load(&p->state) >> 16 == seen && !atomic_load(&p->quit)) pthread_cond_wait(&p->wake, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
}

static void *cpu_thread(void *arg) {
    cpu_worker w = *(cpu_worker *)arg;
    cpu_pool *p = w.pool;
    free(arg);
    for (uint64_t seen = 0; !atomic_load(&p->quit);) {
        cpu_await(p, seen);
        uint64_t state = atomic_load(&p->state);
        seen = state >> 16;
        while (state & CPU_OPEN && !atomic_compare_exchange_weak(&p->state, &state, state + 1)) {}
        if (!(state & CPU_OPEN)) continue;
        seen = state >> 16;
        cpu_take_items(p, w.thread);
        atomic_fetch_sub(&p->state, 1);
    }
    return NULL;
}

/* Runs work(arg, thread, 0 .. n_items-1) and returns when all is done. cost: multiply-adds of it all, roughly. */
static void cpu_run(cpu_pool *p, cpu_work *work, void *arg, int n_items, int64_t cost) {
    if (p->n == 1 || n_items <= 1 || cost < p->small) {
        for (int i = 0; i < n_items; i++) work(arg, 0, i);
        return;
    }
    p->work = work, p->arg = arg, p->n_items = n_items;
    atomic_store(&p->next, 0);
    uint64_t round = (atomic_load(&p->state) >> 16) + 1;
    atomic_store(&p->state, round << 16 | CPU_OPEN);
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
    cpu_take_items(p, 0);
    atomic_fetch_and(&p->state, ~CPU_OPEN);
    for (int spin = 0; atomic_load(&p->state) & (CPU_OPEN - 1); spin++)
        if (spin < CPU_SPIN) cpu_pause();
        else sched_yield();
}

static void cpu_pool_close(cpu_pool *p) {
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->quit, true);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->n - 1; i++) pthread_join(p->threads[i], NULL);
    free(p->threads);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
}

static int cpu_pool_open(cpu_pool *p, int n, toka_err *e) {
    *p = (cpu_pool){.n = 1, .small = CPU_SMALL, .threads = mem_zalloc((size_t)n * sizeof *p->threads)};
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    for (; p->n < n; p->n++) {
        cpu_worker *w = mem_alloc(sizeof *w);
        *w = (cpu_worker){p, p->n};
        int err = pthread_create(&p->threads[p->n - 1], NULL, cpu_thread, w);
        if (!err) continue;
        free(w);
        cpu_pool_close(p);
        return fail(e, TOKA_E_DEVICE, "CPU backend: cannot start thread %d of %d: %s", p->n + 1, n, strerror(err));
    }
    return 0;
}

/* ---- The device ---- */

typedef struct cpu_block { /* memory mapped zero; what is never touched costs nothing */
    void *p;
    size_t bytes;
} cpu_block;

struct toka_device {
    const toka_shape *shape;
    const toka_weights *weights;
    toka_device_options options;
    const cpu_kernels *kernels; /* tests set another one */
    cpu_pool pool;
    int chunk, out_chunk; /* tokens, rows of logits that scratch holds */
    int bp, dp;           /* B and D rounded up to 16 */
    int queries;          /* query rows of attention's scratch */
    int ldx, ldf;         /* floats from row to row of x and gate: past a multiple of 16, no power of two */
    size_t page_k, page_v; /* floats of a page of one layer: [K][D][Bp], [K][B][Dp] */
    float *kv_k, *kv_v;    /* [L][n_pages][K][D][Bp], [L][n_pages][K][B][Dp] */
    float *x;              /* [chunk][ldx] inputs of products; each row has zeros up to the next multiple of 16 */
    float *k, *v;          /* [chunk][K*D] */
    float *gate, *up;      /* [chunk][ldf]; columns behind F stay zero */
    float *logits;         /* [out_chunk][V] */
    float *vec;            /* norm weights and biases of the running op in float32, [6][max(E, H*D)] */
    float *scratch;        /* per thread [scratch_n]: a panel of weights, or attention's rows */
    size_t scratch_n;
    cpu_block blocks[32]; /* all of the above and what alloc handed out */
    int n_blocks;
    toka_err error; /* the first failure; code 0: none */
    char about[96];
};

static void *cpu_zalloc(toka_device *d, size_t n, size_t size) { /* n * size bytes of zeros; NULL latches the failure */
    size_t bytes;
    void *p = MAP_FAILED;
    if (!__builtin_mul_overflow(n, size, &bytes) && bytes < SIZE_MAX / 2 && d->n_blocks < COUNT(d->blocks))
        p = mmap(NULL, MAX(bytes, (size_t)1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        if (!d->error.code) fail(&d->error, TOKA_E_MEMORY, "CPU backend: cannot take %zu x %zu bytes of memory", n, size);
        return NULL;
    }
    d->blocks[d->n_blocks++] = (cpu_block){p, MAX(bytes, (size_t)1)};
    return p;
}

static float *cpu_at(toka_dev a) { return (float *)(uintptr_t)a.at; }

/* A vector weight in float32 in place `i` of the op's scratch; NULL if the tensor is absent. */
static const float *cpu_vec(toka_device *d, int i, const toka_tensor *t) {
    float *to = d->vec + (size_t)i * (size_t)MAX(d->shape->E, d->shape->H * d->shape->D);
    if (!t->rows) return NULL;
    d->kernels->unpack(to, t->data, t->dtype, t->cols);
    return to;
}

/* ---- Products with weights ---- */

/* y[j][t][n] (+)= x[t] . w[j][n] for up to three weights that take the same x. */
typedef struct cpu_product {
    toka_device *d;
    const float *x; /* [T][ldx], zeros behind a row up to a multiple of 16 */
    size_t ldx;
    int T, n_w;
    const toka_tensor *w[3];
    float *y[3];
    size_t ldy[3];
    bool add;
    int columns; /* of y per item; the items of the weights follow each other */
} cpu_product;

/* Columns n0 .. n1-1 straight from the weight as it lies in memory; needs cols % 16 == 0. */
static void cpu_product_direct(const cpu_product *p, int j, int n0, int n1) {
    const toka_tensor *w = p->w[j];
    const cpu_kernels *kn = p->d->kernels;
    size_t size = cpu_dtype_bytes(w->dtype), row = size * (size_t)w->cols;
    cpu_tile t = {.ldx = p->ldx, .w_step = row, .ldy = p->ldy[j]};
    int columns = p->T == 1 ? 8 : 4;
    for (int n = n0; n < n1; n += columns)
        for (int k = 0; k < w->cols; k += kn->block)
            for (int m = 0; m < p->T; m += kn->rows) {
                t.x = p->x + (size_t)m * p->ldx + k;
                t.w = (const char *)w->data + (size_t)n * row + size * (size_t)k;
                t.y = p->y[j] + (size_t)m * p->ldy[j] + n;
                t.m = MIN(kn->rows, p->T - m), t.n = MIN(columns, n1 - n), t.k = MIN(kn->block, w->cols - k);
                t.add = p->add || k, t.ahead = m == 0;
                kn->tile[w->dtype](&t);
            }
}

/* The same through a panel: [n1-n0][one block of k] unpacked to float32, then all rows of x over it. A tile of x (6 rows
 * of a block) stays in the first cache level while the panel goes by from the second. */
static void cpu_product_panel(const cpu_product *p, int j, int n0, int n1, float *panel) {
    const toka_tensor *w = p->w[j];
    const cpu_kernels *kn = p->d->kernels;
    size_t size = cpu_dtype_bytes(w->dtype);
    cpu_tile t = {.ldx = p->ldx, .w_step = CPU_PANEL_LD * sizeof *panel, .ldy = p->ldy[j]};
    for (int k = 0; k < w->cols; k += kn->block) {
        int block = MIN(kn->block, w->cols - k);
        t.k = cpu_up16(block), t.add = p->add || k;
        for (int n = n0; n < n1; n++) {
            float *to = panel + (size_t)(n - n0) * CPU_PANEL_LD;
            kn->unpack(to, (const char *)w->data + size * ((size_t)n * (size_t)w->cols + (size_t)k), w->dtype, block);
            memset(to + block, 0, (size_t)(t.k - block) * sizeof *to);
        }
        for (int m = 0; m < p->T; m += kn->rows)
            for (int n = n0; n < n1; n += 4) {
                t.x = p->x + (size_t)m * p->ldx + k;
                t.w = (const char *)(panel + (size_t)(n - n0) * CPU_PANEL_LD);
                t.y = p->y[j] + (size_t)m * p->ldy[j] + n;
                t.m = MIN(kn->rows, p->T - m), t.n = MIN(4, n1 - n);
                kn->tile[TOKA_F32](&t);
            }
    }
}

static void cpu_product_item(void *arg, int thread, int item) {
    const cpu_product *p = arg;
    int j = 0, items;
    for (; item >= (items = (p->w[j]->rows + p->columns - 1) / p->columns); j++) item -= items;
    int n0 = item * p->columns, n1 = MIN(n0 + p->columns, p->w[j]->rows);
    if (p->T <= CPU_DIRECT && p->w[j]->cols % 16 == 0) cpu_product_direct(p, j, n0, n1);
    else cpu_product_panel(p, j, n0, n1, p->d->scratch + (size_t)thread * p->d->scratch_n);
}

static void cpu_product_run(cpu_product *p) {
    int rows = 0, items = 0;
    for (int j = 0; j < p->n_w; j++) rows += p->w[j]->rows;
    int share = rows / (8 * p->d->pool.n) & ~3; /* a few items a thread, so that all end at about the same time */
    p->columns = MIN(MAX(share, 8), CPU_PANEL);
    for (int j = 0; j < p->n_w; j++) items += (p->w[j]->rows + p->columns - 1) / p->columns;
    cpu_run(&p->d->pool, cpu_product_item, p, items, (int64_t)p->T * rows * p->w[0]->cols);
}

/* ---- Norms ---- */

/* y = x * rsqrt(mean(x^2) + eps) * w; zeros behind y up to a multiple of 16 if pad. y may be x. */
static void cpu_rmsnorm(float *y, const float *x, const float *w, int n, float eps, bool pad) {
    float lane[16] = {0}, sum = 0;
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) lane[j] += x[i + j] * x[i + j];
    for (; i < n; i++) lane[i % 16] += x[i] * x[i];
    for (int j = 0; j < 16; j++) sum += lane[j];
    float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (i = 0; i < n; i++) y[i] = x[i] * scale * w[i];
    if (pad) memset(y + n, 0, (size_t)(cpu_up16(n) - n) * sizeof *y);
}

typedef struct cpu_norm { /* rows to d->x, normed, or just copied where w is NULL */
    toka_device *d;
    const float *from, *w;
    const toka_out_row *rows; /* NULL: row t is row t */
    int width;
} cpu_norm;

static void cpu_norm_item(void *arg, int thread, int t) {
    const cpu_norm *n = arg;
    (void)thread;
    const float *from = n->from + (size_t)(n->rows ? n->rows[t].row : t) * (size_t)n->width;
    float *to = n->d->x + (size_t)t * (size_t)n->d->ldx;
    if (n->w) {
        cpu_rmsnorm(to, from, n->w, n->width, n->d->shape->eps, true);
        return;
    }
    memcpy(to, from, (size_t)n->width * sizeof *to);
    memset(to + n->width, 0, (size_t)(cpu_up16(n->width) - n->width) * sizeof *to);
}
static void cpu_norm_run(cpu_norm n, int rows) { cpu_run(&n.d->pool, cpu_norm_item, &n, rows, (int64_t)rows * n.width); }

/* ---- Op: embed ---- */

static void cpu_embed(toka_device *d, const toka_step *s, toka_dev x) {
    const toka_tensor *w = &d->weights->embed;
    size_t E = (size_t)d->shape->E;
    assert(s->T <= d->options.max_tokens);
    for (int t = 0; t < s->T; t++) {
        assert(s->ids[t] >= 0 && s->ids[t] < w->rows);
        const char *from = (const char *)w->data + (size_t)s->ids[t] * E * cpu_dtype_bytes(w->dtype);
        d->kernels->unpack(cpu_at(x) + (size_t)t * E, from, w->dtype, (int)E);
    }
}

/* ---- Op: norm_qkv_rope_kv ---- */

typedef struct cpu_rope { /* behind the products: bias, norm over heads, rotation, K and V into their pages */
    toka_device *d;
    const toka_step *s;
    int layer, t0; /* first token of the chunk */
    float *q;      /* [chunk][H][D] */
    const float *q_bias, *k_bias, *v_bias, *q_norm, *k_norm; /* NULL: none */
} cpu_rope;

/* One head: bias, norm, then the pair (i, i + D/2) turned by position * rope_freq[i]. */
static void cpu_rope_head(const toka_shape *sh, float *x, const float *bias, const float *norm, const float *cosine,
                          const float *sine) {
    int half = sh->D / 2;
    if (bias)
        for (int i = 0; i < sh->D; i++) x[i] += bias[i];
    if (norm) cpu_rmsnorm(x, x, norm, sh->D, sh->eps, false);
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

static void cpu_rope_item(void *arg, int thread, int i) {
    const cpu_rope *r = arg;
    const toka_device *d = r->d;
    const toka_shape *sh = d->shape;
    (void)thread;
    size_t D = (size_t)sh->D, B = (size_t)sh->B, K = (size_t)sh->K, t = (size_t)i;
    float cosine[CPU_HEAD / 2], sine[CPU_HEAD / 2];
    for (int f = 0; f < sh->D / 2; f++) {
        float angle = (float)r->s->pos[r->t0 + i] * sh->rope_freq[f];
        cosine[f] = cosf(angle) * sh->rope_scale, sine[f] = sinf(angle) * sh->rope_scale;
    }
    for (size_t h = 0; h < (size_t)sh->H; h++)
        cpu_rope_head(sh, r->q + (t * (size_t)sh->H + h) * D, r->q_bias ? r->q_bias + h * D : NULL, r->q_norm, cosine,
                      sine);
    int slot = r->s->slot[r->t0 + i];
    assert(slot >= 0 && slot / sh->B < d->options.n_pages);
    size_t page = (size_t)r->layer * (size_t)d->options.n_pages + (size_t)slot / B, at = (size_t)slot % B;
    for (size_t h = 0; h < K; h++) {
        float *k = d->k + (t * K + h) * D, *v = d->v + (t * K + h) * D;
        cpu_rope_head(sh, k, r->k_bias ? r->k_bias + h * D : NULL, r->k_norm, cosine, sine);
        float *to_k = d->kv_k + page * d->page_k + h * D * (size_t)d->bp + at;
        float *to_v = d->kv_v + page * d->page_v + (h * B + at) * (size_t)d->dp;
        for (size_t j = 0; j < D; j++) {
            to_k[j * (size_t)d->bp] = k[j];
            to_v[j] = v[j] + (r->v_bias ? r->v_bias[h * D + j] : 0);
        }
    }
}

static void cpu_norm_qkv_rope_kv(toka_device *d, const toka_step *s, int layer, toka_dev x, toka_dev q) {
    const toka_shape *sh = d->shape;
    const toka_layer *l = &d->weights->layers[layer];
    size_t E = (size_t)sh->E, HD = (size_t)(sh->H * sh->D), KD = (size_t)(sh->K * sh->D);
    const float *norm = cpu_vec(d, 0, &l->attn_norm);
    cpu_rope r = {.d = d, .s = s, .layer = layer, .q_bias = cpu_vec(d, 1, &l->q_bias), .k_bias = cpu_vec(d, 2, &l->k_bias),
                  .v_bias = cpu_vec(d, 3, &l->v_bias), .q_norm = cpu_vec(d, 4, &l->q_norm),
                  .k_norm = cpu_vec(d, 5, &l->k_norm)};
    for (int t0 = 0; t0 < s->T; t0 += d->chunk) {
        int n = MIN(d->chunk, s->T - t0);
        r.t0 = t0, r.q = cpu_at(q) + (size_t)t0 * HD;
        cpu_norm_run((cpu_norm){d, cpu_at(x) + (size_t)t0 * E, norm, NULL, sh->E}, n);
        cpu_product p = {.d = d, .x = d->x, .ldx = (size_t)d->ldx, .T = n, .n_w = 3, .w = {&l->q, &l->k, &l->v},
                         .y = {r.q, d->k, d->v}, .ldy = {HD, KD, KD}};
        cpu_product_run(&p);
        cpu_run(&d->pool, cpu_rope_item, &r, n, (int64_t)n * (int64_t)(HD + 2 * KD) * 4);
    }
}

/* ---- Op: attention ---- */

typedef struct cpu_attention_job {
    toka_device *d;
    const toka_step *s;
    int layer, tokens, heads; /* tokens and kv heads of an item */
    const float *q;
    float *o;
} cpu_attention_job;

/* Query rows that pass over K and V together: tokens r0 .. r1-1, and for each the G heads of kv head h. All in thread
 * scratch. */
typedef struct cpu_rows {
    int r0, r1, h, G;
    float *q;         /* [r1-r0][G][D], times 1/sqrt(D) */
    float *scores;    /* [(r1-r0)*G][Bp] */
    cpu_softmax *st;  /* [(r1-r0)*G] */
    float *acc;       /* [(r1-r0)*G][Dp] */
} cpu_rows;

/* Tokens a .. b-1 of the rows see the page whose first kv position is kv, as far as `end`. */
static void cpu_attend_page(const cpu_attention_job *a, cpu_rows *w, int t0, int t1, int32_t page, int kv, int end) {
    const toka_device *d = a->d;
    const toka_shape *sh = d->shape;
    int window = d->weights->layers[a->layer].window, n = MIN(sh->B, end - kv);
    size_t D = (size_t)sh->D, at = (size_t)a->layer * (size_t)d->options.n_pages + (size_t)page;
    size_t first = (size_t)((t0 - w->r0) * w->G);
    assert(page >= 0 && page < d->options.n_pages);
    cpu_outer qk = {.a = w->q + first * D, .lda = D, .b = d->kv_k + at * d->page_k + (size_t)w->h * D * (size_t)d->bp,
                    .ldb = (size_t)d->bp, .c = w->scores, .ldc = (size_t)d->bp, .rows = (t1 - t0) * w->G, .k = sh->D,
                    .n = d->bp};
    d->kernels->outer(&qk);
    for (int t = t0; t < t1; t++) {
        int pos = a->s->pos[t], to = MIN(n, pos + 1 - kv), from = window ? MAX(0, pos - window + 1 - kv) : 0;
        for (int g = 0; g < w->G; g++)
            d->kernels->soften(&w->st[(t - w->r0) * w->G + g], w->scores + (size_t)((t - t0) * w->G + g) * (size_t)d->bp,
                               d->bp,
                               from, to, d->dp);
    }
    cpu_outer pv = {.a = w->scores, .lda = (size_t)d->bp, .ldb = (size_t)d->dp,
                    .b = d->kv_v + at * d->page_v + (size_t)(w->h * sh->B) * (size_t)d->dp,
                    .c = w->acc + first * (size_t)d->dp,
                    .ldc = (size_t)d->dp, .rows = qk.rows, .k = n, .n = d->dp, .add = true};
    d->kernels->outer(&pv);
}

static void cpu_attend_span(const cpu_attention_job *a, cpu_rows *w, const toka_span *sp) {
    int t0 = MAX(w->r0, sp->row0), t1 = MIN(w->r1, sp->row0 + sp->n_rows), B = a->d->shape->B;
    int window = a->d->weights->layers[a->layer].window, high = -1, low = INT_MAX;
    for (int t = t0; t < t1; t++) high = MAX(high, a->s->pos[t]), low = MIN(low, a->s->pos[t]);
    int end = MIN(sp->kv0 + sp->n_kv, high + 1), kv = sp->kv0;
    /* pages that no row of these sees any more */
    if (window && low - window + 1 > kv) kv += (low - window + 1 - kv) / B * B;
    for (; kv < end; kv += B) cpu_attend_page(a, w, t0, t1, a->s->pages[sp->page0 + (kv - sp->kv0) / B], kv, end);
}

static void cpu_attend(const cpu_attention_job *a, cpu_rows *w) {
    const toka_shape *sh = a->d->shape;
    size_t D = (size_t)sh->D, H = (size_t)sh->H, dp = (size_t)a->d->dp;
    int n = (w->r1 - w->r0) * w->G;
    float scale = 1.0f / sqrtf((float)sh->D);
    memset(w->acc, 0, (size_t)n * dp * sizeof *w->acc);
    for (int i = 0; i < n; i++) {
        const float *q = a->q + ((size_t)(w->r0 + i / w->G) * H + (size_t)(w->h * w->G + i % w->G)) * D;
        for (size_t j = 0; j < D; j++) w->q[(size_t)i * D + j] = q[j] * scale;
        w->st[i] = (cpu_softmax){w->acc + (size_t)i * dp, -INFINITY, 0};
    }
    for (int i = 0; i < a->s->n_spans; i++) {
        const toka_span *sp = &a->s->spans[i];
        if (sp->row0 < w->r1 && sp->row0 + sp->n_rows > w->r0) cpu_attend_span(a, w, sp);
    }
    for (int i = 0; i < n; i++) {
        float *o = a->o + ((size_t)(w->r0 + i / w->G) * H + (size_t)(w->h * w->G + i % w->G)) * D;
        for (size_t j = 0; j < D; j++) o[j] = w->st[i].acc[j] / w->st[i].sum;
    }
}

static void cpu_attention_item(void *arg, int thread, int item) {
    const cpu_attention_job *a = arg;
    const toka_device *d = a->d;
    const toka_shape *sh = d->shape;
    int groups = (sh->K + a->heads - 1) / a->heads, r0 = item / groups * a->tokens, h0 = item % groups * a->heads;
    float *at = d->scratch + (size_t)thread * d->scratch_n;
    size_t n = (size_t)d->queries;
    cpu_rows w = {.r0 = r0, .r1 = MIN(r0 + a->tokens, a->s->T), .G = sh->H / sh->K, .scores = at,
                  .acc = at + n * (size_t)d->bp,
                  .q = at + n * (size_t)(d->bp + d->dp)};
    w.st = (cpu_softmax *)(void *)(at + n * (size_t)(d->bp + 2 * d->dp));
    for (w.h = h0; w.h < MIN(h0 + a->heads, sh->K); w.h++) cpu_attend(a, &w);
}

static void cpu_attention(toka_device *d, const toka_step *s, int layer, toka_dev q, toka_dev o) {
    const toka_shape *sh = d->shape;
    int G = sh->H / sh->K, want = 4 * d->pool.n; /* items, so that threads end together */
    int most = MAX(1, CPU_QUERIES / G), tokens = (int)((int64_t)s->T * sh->K / want);
    cpu_attention_job a = {.d = d, .s = s, .layer = layer, .tokens = MIN(MAX(tokens, 1), most), .q = cpu_at(q),
                           .o = cpu_at(o)};
    int blocks = (s->T + a.tokens - 1) / a.tokens;
    a.heads = blocks >= want ? sh->K : 1; /* all heads in one item: the spans are searched once */
    int64_t seen = 0;
    for (int i = 0; i < s->n_spans; i++) seen += (int64_t)s->spans[i].n_rows * s->spans[i].n_kv;
    cpu_run(&d->pool, cpu_attention_item, &a, blocks * ((sh->K + a.heads - 1) / a.heads), seen * sh->H * sh->D * 2);
}

/* ---- Op: out_residual ---- */

static void cpu_out_residual(toka_device *d, const toka_step *s, int layer, toka_dev o, toka_dev x) {
    const toka_layer *l = &d->weights->layers[layer];
    int HD = d->shape->H * d->shape->D, E = d->shape->E;
    const float *bias = cpu_vec(d, 0, &l->o_bias);
    for (int t0 = 0; t0 < s->T; t0 += d->chunk) {
        int n = MIN(d->chunk, s->T - t0);
        float *y = cpu_at(x) + (size_t)t0 * (size_t)E;
        cpu_norm_run((cpu_norm){d, cpu_at(o) + (size_t)t0 * (size_t)HD, NULL, NULL, HD}, n);
        cpu_product p = {.d = d, .x = d->x, .ldx = (size_t)d->ldx, .T = n, .n_w = 1, .w = {&l->o}, .y = {y},
                         .ldy = {(size_t)E},
                         .add = true};
        cpu_product_run(&p);
        for (int i = 0; bias && i < n * E; i++) y[i] += bias[i % E];
    }
}

/* ---- Op: norm_mlp_residual ---- */

static void cpu_swiglu_item(void *arg, int thread, int t) {
    toka_device *d = arg;
    (void)thread;
    size_t at = (size_t)t * (size_t)d->ldf;
    cpu_swiglu(d->gate + at, d->up + at, cpu_up16(d->shape->F));
}

static void cpu_norm_mlp_residual(toka_device *d, const toka_step *s, int layer, toka_dev x) {
    const toka_layer *l = &d->weights->layers[layer];
    size_t E = (size_t)d->shape->E, ldf = (size_t)d->ldf;
    const float *norm = cpu_vec(d, 0, &l->mlp_norm);
    for (int t0 = 0; t0 < s->T; t0 += d->chunk) {
        int n = MIN(d->chunk, s->T - t0);
        float *y = cpu_at(x) + (size_t)t0 * E;
        cpu_norm_run((cpu_norm){d, y, norm, NULL, d->shape->E}, n);
        cpu_product in = {.d = d, .x = d->x, .ldx = (size_t)d->ldx, .T = n, .n_w = 2, .w = {&l->gate, &l->up},
                          .y = {d->gate, d->up}, .ldy = {ldf, ldf}};
        cpu_product_run(&in);
        cpu_run(&d->pool, cpu_swiglu_item, d, n, (int64_t)n * d->shape->F * 8);
        cpu_product out = {.d = d, .x = d->gate, .ldx = ldf, .T = n, .n_w = 1, .w = {&l->down}, .y = {y}, .ldy = {E},
                           .add = true};
        cpu_product_run(&out);
    }
}

/* ---- Op: norm_logits_sample ---- */

typedef struct cpu_pick_job {
    toka_device *d;
    const toka_out_row *rows;
    toka_pick *picks;
} cpu_pick_job;

static void cpu_pick_item(void *arg, int thread, int i) {
    const cpu_pick_job *p = arg;
    (void)thread;
    samp_row(&p->rows[i], p->d->logits + (size_t)i * (size_t)p->d->shape->V, p->d->shape->V, &p->picks[i]);
}

static void cpu_norm_logits_sample(toka_device *d, const toka_step *s, toka_dev x, toka_pick *picks) {
    const toka_shape *sh = d->shape;
    size_t V = (size_t)sh->V;
    const float *norm = cpu_vec(d, 0, &d->weights->norm);
    for (int i0 = 0; i0 < s->n_out; i0 += d->out_chunk) {
        int n = MIN(d->out_chunk, s->n_out - i0);
        for (int i = i0; i < i0 + n; i++) assert(s->out[i].row >= 0 && s->out[i].row < s->T);
        cpu_norm_run((cpu_norm){d, cpu_at(x), norm, s->out + i0, sh->E}, n);
        cpu_product p = {.d = d, .x = d->x, .ldx = (size_t)d->ldx, .T = n, .n_w = 1, .w = {&d->weights->lm_head},
                         .y = {d->logits}, .ldy = {V}};
        cpu_product_run(&p);
        if (s->logits) memcpy(s->logits + (size_t)i0 * V, d->logits, (size_t)n * V * sizeof *d->logits);
        cpu_pick_job job = {d, s->out + i0, picks + i0};
        cpu_run(&d->pool, cpu_pick_item, &job, n, (int64_t)n * sh->V * 8);
    }
}

/* ---- Open, close, memory ---- */

static void cpu_close(toka_device *d) {
    if (!d) return;
    cpu_pool_close(&d->pool);
    for (int i = 0; i < d->n_blocks; i++) munmap(d->blocks[i].p, d->blocks[i].bytes);
    free(d);
}

static int cpu_check(const toka_device_options *o, const toka_shape *s, toka_err *e) {
    if (s->L < 1 || s->H < 1 || s->K < 1 || s->E < 1 || s->F < 1 || s->V < 1 || s->B < 1 || s->H % s->K)
        return fail(e, TOKA_E_INPUT,
                    "CPU backend: layers %d, heads %d, kv heads %d, width %d, mlp width %d, vocabulary %d, page "
                    "%d: all must be positive and kv heads divide heads", s->L, s->H, s->K, s->E, s->F, s->V, s->B);
    if (s->D < 2 || s->D > CPU_HEAD || s->D % 2)
        return fail(e, TOKA_E_INPUT, "CPU backend: head size %d, expected an even number up to %d", s->D, CPU_HEAD);
    if (s->H > INT_MAX / s->D) return fail(e, TOKA_E_INPUT, "CPU backend: %d heads of size %d are too many", s->H, s->D);
    if (o->max_tokens < 1 || o->max_out < 1 || o->n_pages < 1 || o->n_pages > INT_MAX / s->B || o->n_threads < 0 ||
        o->n_threads > CPU_THREADS)
        return fail(e, TOKA_E_USE, "CPU backend: %d tokens and %d outputs a step, %d pages, %d threads: out of range",
                    o->max_tokens, o->max_out, o->n_pages, o->n_threads);
    return 0;
}

/* Cuts the chunks to the scratch budget, then takes all memory. */
static void cpu_take_memory(toka_device *d) {
    const toka_shape *s = d->shape;
    size_t KD = (size_t)(s->K * s->D), pages = (size_t)d->options.n_pages, D = (size_t)s->D;
    d->ldx = cpu_up16(MAX(s->E, s->H * s->D)) + 16, d->ldf = cpu_up16(s->F) + 16;
    size_t token = ((size_t)d->ldx + 2 * KD + 2 * (size_t)d->ldf) * sizeof(float);
    d->chunk = (int)MIN((size_t)MIN(d->options.max_tokens, CPU_CHUNK), MAX(CPU_SCRATCH / token, 1));
    d->out_chunk = (int)MIN((size_t)MIN(d->options.max_out, CPU_OUT_CHUNK), MAX(CPU_SCRATCH / 2 / ((size_t)s->V * 4), 1));
    d->bp = cpu_up16(s->B), d->dp = cpu_up16(s->D);
    d->page_k = (size_t)s->K * D * (size_t)d->bp, d->page_v = (size_t)(s->K * s->B) * (size_t)d->dp;
    d->queries = MAX(CPU_QUERIES, s->H / s->K);
    size_t rows = (size_t)d->queries * ((size_t)(d->bp + 2 * d->dp) + sizeof(cpu_softmax) / sizeof(float));
    d->scratch_n = (MAX((size_t)CPU_PANEL * CPU_PANEL_LD, rows) + 15) & ~(size_t)15;
    size_t chunk = (size_t)d->chunk;
    d->kv_k = cpu_zalloc(d, (size_t)s->L * pages, d->page_k * sizeof(float));
    d->kv_v = cpu_zalloc(d, (size_t)s->L * pages, d->page_v * sizeof(float));
    d->x = cpu_zalloc(d, (size_t)MAX(d->chunk, d->out_chunk), (size_t)d->ldx * sizeof(float));
    d->k = cpu_zalloc(d, chunk, KD * sizeof(float));
    d->v = cpu_zalloc(d, chunk, KD * sizeof(float));
    d->gate = cpu_zalloc(d, chunk, (size_t)d->ldf * sizeof(float));
    d->up = cpu_zalloc(d, chunk, (size_t)d->ldf * sizeof(float));
    d->logits = cpu_zalloc(d, (size_t)d->out_chunk, (size_t)s->V * sizeof(float));
    d->vec = cpu_zalloc(d, 6, (size_t)MAX(s->E, s->H * s->D) * sizeof(float));
    d->scratch = cpu_zalloc(d, (size_t)d->pool.n, d->scratch_n * sizeof(float));
}

static int cpu_open(toka_device **out, const toka_device_options *o, const toka_shape *shape, const toka_weights *weights,
                    toka_err *e) {
    if (cpu_check(o, shape, e)) return e->code;
    toka_device *d = mem_zalloc(sizeof *d);
    *d = (toka_device){.shape = shape, .weights = weights, .options = *o, .kernels = &cpu_sets[cpu_n_sets() - 1]};
    if (cpu_pool_open(&d->pool, o->n_threads ? o->n_threads : os_n_cores(), e)) {
        free(d);
        return e->code;
    }
    cpu_take_memory(d);
    snprintf(d->about, sizeof d->about, "CPU, %s, %d thread%s", d->kernels->name, d->pool.n, d->pool.n > 1 ? "s" : "");
    if (d->error.code) {
        *e = d->error;
        cpu_close(d);
        return e->code;
    }
    *out = d;
    return 0;
}

static const char *cpu_describe(const toka_device *d) { return d->about; }

static int cpu_status(toka_device *d, toka_err *e) {
    if (d->error.code) *e = d->error;
    return d->error.code;
}

static toka_dev cpu_alloc(toka_device *d, size_t bytes) { return (toka_dev){(uintptr_t)cpu_zalloc(d, bytes, 1)}; }
static void cpu_upload(toka_device *d, toka_dev to, const void *from, size_t bytes) {
    (void)d;
    memcpy(cpu_at(to), from, bytes);
}
static void cpu_download(toka_device *d, void *to, toka_dev from, size_t bytes) {
    (void)d;
    memcpy(to, cpu_at(from), bytes);
}

const toka_backend toka_cpu = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .describe = cpu_describe,
    .status = cpu_status,
    .alloc = cpu_alloc,
    .upload = cpu_upload,
    .download = cpu_download,
    .embed = cpu_embed,
    .norm_qkv_rope_kv = cpu_norm_qkv_rope_kv,
    .attention = cpu_attention,
    .out_residual = cpu_out_residual,
    .norm_mlp_residual = cpu_norm_mlp_residual,
    .norm_logits_sample = cpu_norm_logits_sample,
    .activation_bytes = sizeof(float),
};

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
