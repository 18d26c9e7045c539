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
 * In: one row of raw logits [V] and what its request asks for. Out: a token id with its log-probabilities. And: the text of
 * the tokens in pieces; out: the text that is certain, and the word that a stop string was completed.
 *
 * samp_row works in the order of Hugging Face's generate():
 *   1. clean      NaN counts as -inf, +inf as FLT_MAX; the raw log-sum-exp and the best raw logits are taken here
 *   2. adjust     logit_bias, allowed ids, forbidden ids, repetition penalty (prompt and output: x < 0 ? x*r : x/r),
 *                 frequency and presence penalty (output only: x - f*count - p)
 *   3. greedy     (temperature 0) the highest adjusted logit, the lowest id on a tie; ends here
 *   4. cut        temperature, then top-k (all ids tied with the k-th stay), then top-p (the smallest set, best first, that
 *                 reaches p; of tied ids the lowest stay), then min-p (probability >= min_p * the best one's)
 *   5. draw       the inverse of the cumulative distribution in order of ids, at one uniform number of 53 bits
 * Every filter of step 4 keeps the head of one and the same order (logit falling, id rising), so what they leave is
 * described by a single samp_cut, and no list of candidates and no sort is needed.
 *
 * What always holds:
 *   - The pick is a pure function of (logits, parameters, history, seed, sample, position). Step 5 takes its number from
 *     Philox with key = seed and counter = (sample, position, lane, 0). The weights do not depend on the libm.
 *   - A drawn id has a positive probability; sums are in double, a probability is off by less than 1e-11 of itself.
 *   - No malloc, no state: the row is worked on in place, stack use stays under 100 KB. Any number of threads.
 *   - When nothing may be drawn (every logit is -inf after step 2) the pick is the lowest id that is allowed and not
 *     forbidden, with sampled_logprob 0.
 * logprob is of the raw logits (step 1), -inf where the logit is. Step 2 overwrites a raw logit; for the picked id it is
 * recomputed by undoing the adjustments, exact to the rounding of the adjusted logit (4e-6 when |logit| < 64).
 * sampled_logprob is of the distribution drawn from (after step 4); a greedy pick has 0, the logarithm of 1; a forced id,
 * for which nothing is drawn, has its logprob.
 *
 * Not here: which ids end a sequence, counting tokens against min_tokens and max_tokens (chapter 17).
 * =========================================================================== */

#define SAMP_MAX_STOPS 256       /* stop strings of one request */
#define SAMP_MAX_STOP_BYTES 4096 /* of one stop string */
#define SAMP_WINDOW 16384        /* ids looked at together where a row needs a counter per id */
#define SAMP_BLOCKS 512          /* partial sums of a row, for the draw */
#define SAMP_LANES 16            /* independent sums side by side, so that a compiler can use vectors */

/* ---- Checking parameters ---- */

static int samp_check_range(const char *name, double v, double low, double high, bool open_low, toka_err *e) {
    if (v >= low && v <= high && !(open_low && v == low)) return 0; /* NaN fails the first comparison */
    return fail(e, TOKA_E_USE, "%s: %g, expected %s%g to %g", name, v, open_low ? "more than " : "", low, high);
}

static int samp_check_int(const char *name, int v, int low, int high, toka_err *e) {
    if (v >= low && v <= high) return 0;
    if (high == INT_MAX) return fail(e, TOKA_E_USE, "%s: %d, expected %d or more", name, v, low);
    return fail(e, TOKA_E_USE, "%s: %d, expected %d to %d", name, v, low, high);
}

static int samp_check_ids(const char *name, const int32_t *id, int n, int V, toka_err *e) {
    if (n < 0) return fail(e, TOKA_E_USE, "%s: %d entries, expected 0 or more", name, n);
    if (n && !id) return fail(e, TOKA_E_USE, "%s: no ids given, expected %d", name, n);
    for (int i = 0; i < n; i++)
        if (id[i] < 0 || id[i] >= V)
            return fail(e, TOKA_E_USE, "%s[%d]: id %d, expected 0 to %d", name, i, (int)id[i], V - 1);
    return 0;
}

static int samp_check_stops(const toka_sampling *s, toka_err *e) {
    if (samp_check_int("n_stop", s->n_stop, 0, SAMP_MAX_STOPS, e)) return e->code;
    if (s->n_stop && !s->stop) return fail(e, TOKA_E_USE, "stop: no strings given, expected %d", s->n_stop);
    for (int i = 0; i < s->n_stop; i++) {
        size_t n = s->stop[i] ? strlen(s->stop[i]) : 0;
        if (!n || n > SAMP_MAX_STOP_BYTES)
            return fail(e, TOKA_E_USE, "stop[%d]: %zu bytes, expected 1 to %d", i, n, SAMP_MAX_STOP_BYTES);
        for (const char *p = s->stop[i], *end = p + n; p < end;) {
            int step = utf8_len(p, end);
            if (!step) return fail(e, TOKA_E_USE, "stop[%d]: byte %d is not valid UTF-8", i, (int)(p - s->stop[i]));
            p += step;
        }
    }
    return 0;
}

/* Checks ranges; V: vocabulary. The message names field, value and what is allowed. The ranges are OpenAI's and vLLM's. */
static int samp_check(const toka_sampling *s, int V, toka_err *e) {
    if (samp_check_range("temperature", s->temperature, 0, FLT_MAX, false, e)) return e->code;
    if (samp_check_range("top_p", s->top_p, 0, 1, true, e)) return e->code;
    if (samp_check_range("min_p", s->min_p, 0, 1, false, e)) return e->code;
    if (samp_check_int("top_k", s->top_k, -1, INT_MAX, e)) return e->code;
    if (samp_check_range("repetition_penalty", s->repetition_penalty, 0, FLT_MAX, true, e)) return e->code;
    if (samp_check_range("presence_penalty", s->presence_penalty, -2, 2, false, e)) return e->code;
    if (samp_check_range("frequency_penalty", s->frequency_penalty, -2, 2, false, e)) return e->code;
    if (samp_check_int("max_tokens", s->max_tokens, 0, INT_MAX, e)) return e->code;
    if (samp_check_int("min_tokens", s->min_tokens, 0, s->max_tokens ? s->max_tokens : INT_MAX, e)) return e->code;
    if (samp_check_int("logprobs", s->logprobs, 0, TOKA_MAX_LOGPROBS, e)) return e->code;
    if (samp_check_ids("stop_ids", s->stop_ids, s->n_stop_ids, V, e)) return e->code;
    if (samp_check_ids("allowed_ids", s->allowed_ids, s->n_allowed, V, e)) return e->code;
    if (samp_check_ids("logit_bias", s->bias_ids, s->n_bias, V, e)) return e->code;
    if (s->n_bias && !s->bias_values) return fail(e, TOKA_E_USE, "logit_bias: no values given, expected %d", s->n_bias);
    for (int i = 0; i < s->n_bias; i++)
        if (samp_check_range("logit_bias", s->bias_values[i], -100, 100, false, e)) return e->code;
    return samp_check_stops(s, e);
}

/* ---- Random numbers ---- */

/* Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011): ten rounds that mix a
 * counter of four words under a key of two. */
static void samp_philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
        c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
        c[1] = (uint32_t)b;
        c[3] = (uint32_t)a;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

/* 64 random bits, for ever the same for the same arguments. lane: independent numbers for one token; the draw takes 0. */
static uint64_t samp_random(uint64_t seed, uint32_t sample, uint32_t position, uint32_t lane) {
    uint32_t c[4] = {sample, position, lane, 0};
    samp_philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
    return (uint64_t)c[1] << 32 | c[0];
}

/* ---- Exponentials and sums of a row ---- */

/* e^d for d <= 0, relative error under 1e-12 down to -660, exactly 0 below -694. d = n ln2 + r with |r| <= ln2/2: a Taylor
 * polynomial in r, then n is added to the exponent bits. No call and no branch, so that loops over it become vector code
 * (gcc wants -fno-trapping-math for that). */
static inline double samp_exp(double d) {
    const double round = 0x1.8p52; /* adding it leaves the nearest integer in the low mantissa bits */
    double at = d > -700 ? d : -700;
    double shifted = at * 1.4426950408889634 + round, n = shifted - round;
    double r = (at - n * 0x1.62e42fefa0000p-1) - n * 0x1.cf79abc9e3b3ap-40; /* ln2 in two parts, n * first exact */
    double p = 1.0 / 3628800;
    p = p * r + 1.0 / 362880, p = p * r + 1.0 / 40320, p = p * r + 1.0 / 5040, p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120, p = p * r + 1.0 / 24, p = p * r + 1.0 / 6, p = p * r + 0.5, p = p * r + 1, p = p * r + 1;
    uint64_t bits, add;
    memcpy(&bits, &p, 8), memcpy(&add, &shifted, 8);
    bits += add << 52;
    memcpy(&p, &bits, 8);
    p -= 0x1p-1000; /* nothing beside a p that matters; what is below becomes exactly 0 */
    return p > 0 ? p : 0;
}

/* Sum of e^((x - max) * scale) over x[0 .. n-1]: exponentials into a small array, then SAMP_LANES sums side by side. */
static double samp_sum(const float *x, int n, double max, double scale) {
    double w[16 * SAMP_LANES], lane[SAMP_LANES] = {0}, sum = 0;
    int i = 0;
    for (; i + COUNT(w) <= n; i += COUNT(w)) {
        for (int j = 0; j < COUNT(w); j++) w[j] = samp_exp((x[i + j] - max) * scale);
        for (int j = 0; j < COUNT(w); j += SAMP_LANES)
            for (int k = 0; k < SAMP_LANES; k++) lane[k] += w[j + k];
    }
    for (; i < n; i++) sum += samp_exp((x[i] - max) * scale);
    for (int k = 0; k < SAMP_LANES; k++) sum += lane[k];
    return sum;
}

static float samp_max(const float *x, int n) {
    float lane[SAMP_LANES];
    for (int j = 0; j < SAMP_LANES; j++) lane[j] = -INFINITY;
    int i = 0;
    for (; i + SAMP_LANES <= n; i += SAMP_LANES)
        for (int j = 0; j < SAMP_LANES; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (; i < n; i++) lane[0] = MAX(lane[0], x[i]);
    for (int j = 1; j < SAMP_LANES; j++) lane[0] = MAX(lane[0], lane[j]);
    return lane[0];
}

static inline float samp_clean(float x) { /* NaN: -inf, +inf: FLT_MAX, so that differences to the maximum are never NaN */
    x = x > FLT_MAX ? FLT_MAX : x;
    return x >= -FLT_MAX ? x : -INFINITY;
}

typedef struct samp_norm { /* log-sum-exp of a row as max + log_sum: kept apart, a huge maximum does not swallow the rest */
    double max, log_sum;
} samp_norm;

static float samp_logprob(double x, samp_norm norm) {
    return x == -INFINITY ? -INFINITY : (float)(x - norm.max - norm.log_sum);
}

/* The n best ids by logit, best first, of equal ones the lowest first. A logit that is not better than the n-th costs one
 * comparison. */
static void samp_top(const float *x, int V, int n, samp_norm norm, toka_pick *pick) {
    int have = 0;
    float *best = pick->top_logprobs; /* holds logits until the end */
    for (int id = 0; id < V; id++) {
        if (have == n && !(x[id] > best[n - 1])) continue;
        int at = have < n ? have++ : n - 1;
        for (; at > 0 && x[id] > best[at - 1]; at--) best[at] = best[at - 1], pick->top_ids[at] = pick->top_ids[at - 1];
        best[at] = x[id], pick->top_ids[at] = id;
    }
    for (int i = 0; i < n; i++) best[i] = samp_logprob(best[i], norm);
    pick->n_top = n;
}

/* ---- Step 2: bias, masks, penalties ---- */

/* Everything but allowed_ids becomes -inf, whatever order the list has: a window of the vocabulary at a time is marked. */
static void samp_allow(const toka_sampling *s, float *x, int V) {
    for (int from = 0; from < V; from += SAMP_WINDOW) {
        bool allowed[SAMP_WINDOW];
        int n = MIN(SAMP_WINDOW, V - from);
        memset(allowed, 0, (size_t)n);
        for (int i = 0; i < s->n_allowed; i++) {
            uint32_t at = (uint32_t)s->allowed_ids[i] - (uint32_t)from;
            if (at < (uint32_t)n) allowed[at] = true;
        }
        for (int i = 0; i < n; i++)
            if (!allowed[i]) x[from + i] = -INFINITY;
    }
}

#define SAMP_SEEN 0x80000000u /* beside a count: the id is in the history */

static float samp_penalty(const toka_sampling *s, float x, int count) { /* count: occurrences in the output */
    float r = s->repetition_penalty;
    x = x < 0 ? x * r : x / r;
    x -= s->frequency_penalty * (float)count;
    if (count) x -= s->presence_penalty;
    return samp_clean(x);
}

/* Applies the penalties once to each id of the history. The counts of one window of the vocabulary fit on the stack; the
 * history is read once per window, and again to use each count and clear it. Cost: n_history * V / SAMP_WINDOW. */
static void samp_penalties(const toka_out_row *row, float *x, int V) {
    const toka_sampling *s = row->sampling;
    uint32_t counts[SAMP_WINDOW]; /* SAMP_SEEN + occurrences in the output; all 0 between windows */
    int first = s->repetition_penalty == 1 ? row->n_prompt : 0;
    memset(counts, 0, (size_t)MIN(SAMP_WINDOW, V) * sizeof *counts);
    for (int from = 0; from < V; from += SAMP_WINDOW) {
        uint32_t n = (uint32_t)MIN(SAMP_WINDOW, V - from);
        for (int i = first; i < row->n_history; i++) {
            uint32_t at = (uint32_t)row->history[i] - (uint32_t)from;
            if (at < n) counts[at] = (counts[at] | SAMP_SEEN) + (i >= row->n_prompt);
        }
        for (int i = first; i < row->n_history; i++) {
            uint32_t at = (uint32_t)row->history[i] - (uint32_t)from;
            if (at >= n || !counts[at]) continue;
            x[from + (int)at] = samp_penalty(s, x[from + (int)at], (int)(counts[at] & ~SAMP_SEEN));
            counts[at] = 0;
        }
    }
}

static bool samp_has_penalties(const toka_sampling *s) {
    return s->repetition_penalty != 1 || s->frequency_penalty != 0 || s->presence_penalty != 0;
}

static void samp_adjust(const toka_out_row *row, float *x, int V) {
    const toka_sampling *s = row->sampling;
    for (int i = 0; i < s->n_bias; i++) { /* an id named twice gets both */
        float *at = &x[s->bias_ids[i]];
        *at = samp_clean(*at + s->bias_values[i]);
    }
    if (s->n_allowed) samp_allow(s, x, V);
    for (int i = 0; i < row->n_forbidden; i++) /* a model's end ids may lie outside its vocabulary */
        if ((uint32_t)row->forbidden[i] < (uint32_t)V) x[row->forbidden[i]] = -INFINITY;
    if (samp_has_penalties(s)) samp_penalties(row, x, V);
}

/* The raw logit that samp_adjust made into x at id: its steps backwards. Never above the raw maximum. */
static double samp_unadjust(const toka_out_row *row, int32_t id, double x, double raw_max) {
    const toka_sampling *s = row->sampling;
    if (samp_has_penalties(s)) {
        int count = 0;
        bool seen = false;
        for (int i = 0; i < row->n_history; i++)
            if (row->history[i] == id) seen = true, count += i >= row->n_prompt;
        if (count) x += (double)s->frequency_penalty * count + s->presence_penalty;
        if (seen) x = x < 0 ? x / s->repetition_penalty : x * s->repetition_penalty;
    }
    for (int i = 0; i < s->n_bias; i++)
        if (s->bias_ids[i] == id) x -= s->bias_values[i];
    return MIN(x, raw_max);
}

static bool samp_listed(const int32_t *list, int n, int32_t id) {
    for (int i = 0; i < n; i++)
        if (list[i] == id) return true;
    return false;
}

/* The lowest id that is allowed and not among the first n_forbidden of row->forbidden; V if there is none. */
static int32_t samp_lowest(const toka_out_row *row, int n_forbidden, int V) {
    const toka_sampling *s = row->sampling;
    int32_t lowest = s->n_allowed ? V : 0;
    for (int i = 0; i < s->n_allowed; i++) {
        int32_t id = s->allowed_ids[i];
        if (id < lowest && !samp_listed(row->forbidden, n_forbidden, id)) lowest = id;
    }
    while (!s->n_allowed && lowest < V && samp_listed(row->forbidden, n_forbidden, lowest)) lowest++;
    return lowest;
}

/* The pick when every logit is -inf; if all that is allowed is forbidden, the lowest allowed. */
static int32_t samp_last_resort(const toka_out_row *row, int V) {
    int32_t id = samp_lowest(row, row->n_forbidden, V);
    return id < V ? id : samp_lowest(row, 0, V);
}

/* ---- Step 4: the cut ---- */

/* Which ids of a row may be drawn: logits above `at`, and of those equal to it the ids up to last_tied. */
typedef struct samp_cut {
    float at;
    int last_tied;
} samp_cut;

/* A row as a distribution: the weight of id is e^((x[id] - max) * scale), 0 where the cut leaves it out. */
typedef struct samp_dist {
    const float *x; /* [V] adjusted logits, none NaN or +inf */
    int V;
    double max, scale; /* highest logit, 1 / temperature */
    samp_cut cut;
} samp_dist;

static inline bool samp_kept(const samp_dist *d, int id) {
    return d->x[id] > d->cut.at || (d->x[id] == d->cut.at && id <= d->cut.last_tied);
}
static inline double samp_weight(const samp_dist *d, float x) { return samp_exp((x - d->max) * d->scale); }

/* Total weight of the ids from .. to-1. */
static double samp_block_sum(const samp_dist *d, int from, int to) {
    if (d->cut.at == -INFINITY) return samp_sum(d->x + from, to - from, d->max, d->scale);
    double sum = 0;
    for (int id = from; id < to; id++)
        if (samp_kept(d, id)) sum += samp_weight(d, d->x[id]);
    return sum;
}

/* Order-preserving map of floats to integers and back (-0 counts as +0). */
static inline uint32_t samp_key(float x) {
    uint32_t u;
    x += 0.0f;
    memcpy(&u, &x, 4);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
static float samp_unkey(uint32_t key) {
    uint32_t u = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* Goes through the kept ids from the highest logit down, adding up 1 for each (by_count) or its weight, and returns the
 * logit at which the sum reaches `want`; *above is the sum before the first id of that logit. A radix search: each of four
 * passes over the row fixes 8 bits of the logit's key by a histogram of the ids that agree in the bits before. */
static float samp_reach(const samp_dist *d, bool by_count, double want, double *above) {
    uint32_t found = 0, known = 0; /* the key's bits found so far, and a mask of them */
    *above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        double bins[256] = {0};
        for (int id = 0; id < d->V; id++) {
            if (!samp_kept(d, id)) continue;
            uint32_t key = samp_key(d->x[id]);
            if ((key & known) != found) continue;
            bins[key >> shift & 255] += by_count ? 1 : samp_weight(d, d->x[id]);
        }
        int bin = -1; /* in the end the first, from the top, that reaches; if none does by rounding, the lowest in use */
        double before = 0, passed = *above;
        for (int b = 255; b >= 0 && (bin < 0 || passed < want); b--) {
            if (bins[b] == 0) continue;
            bin = b, before = passed, passed += bins[b];
        }
        assert(bin >= 0);
        *above = before;
        found |= (uint32_t)bin << shift, known |= 255u << shift;
    }
    return samp_unkey(found);
}

static void samp_top_k(samp_dist *d, int k) {
    double above;
    d->cut = (samp_cut){samp_reach(d, true, k, &above), INT_MAX};
}

/* Keeps what has at least min_p times the weight of the best, which is 1. */
static void samp_min_p(samp_dist *d, double min_p) {
    double lowest = d->max + log(min_p) / d->scale; /* weight >= min_p means x >= lowest */
    float at = (float)MAX(lowest, -FLT_MAX);
    if (at < lowest) at = nextafterf(at, INFINITY);
    if (at > d->cut.at) d->cut = (samp_cut){at, INT_MAX};
}

/* Hugging Face removes, from the lowest probability up, what adds up to at most 1 - p; in other words an id stays if those
 * before it, from the highest down, add up to less than p. All weights up to a V-th of what may go can go at once, since V
 * of them would not be too much: that leaves the search few ids. */
static void samp_top_p(samp_dist *d, double p) {
    double above, total = samp_block_sum(d, 0, d->V);
    samp_min_p(d, MIN(1.0, (1 - p) * total / d->V));
    float at = samp_reach(d, false, p * total, &above);
    double tied = MAX(1.0, ceil((p * total - above) / samp_weight(d, at))); /* how many ids with this logit stay */
    int last = -1;
    for (int id = 0; id < d->V && tied > 0; id++)
        if (d->x[id] == at) last = id, tied--;
    d->cut = (samp_cut){at, last};
}

static void samp_truncate(samp_dist *d, const toka_sampling *s) {
    if (s->top_k > 0 && s->top_k < d->V) samp_top_k(d, s->top_k);
    if (s->top_p < 1) samp_top_p(d, s->top_p);
    if (s->min_p > 0) samp_min_p(d, s->min_p);
}

/* ---- Step 5: the draw ---- */

/* The id at which the cumulative weight passes u times the total, u in [0,1): by sums of blocks, then within one block. */
static int32_t samp_draw(const samp_dist *d, double u, double *total) {
    double sums[SAMP_BLOCKS], sum = 0;
    int block = MAX(1024, (d->V + SAMP_BLOCKS - 1) / SAMP_BLOCKS), n = (d->V + block - 1) / block, b;
    for (int i = 0; i < n; i++) sum += sums[i] = samp_block_sum(d, i * block, MIN(d->V, (i + 1) * block));
    *total = sum;
    double target = u * sum, passed = 0;
    int last = 0; /* the last block with weight; rounding can carry the search past the total */
    for (b = 0; b < n; b++) {
        if (sums[b] > 0) last = b;
        if (passed + sums[b] > target) break;
        passed += sums[b];
    }
    if (b == n) b = last;
    int32_t id = -1;
    for (int i = b * block; i < MIN(d->V, (b + 1) * block); i++) {
        double w = samp_kept(d, i) ? samp_weight(d, d->x[i]) : 0;
        if (w == 0) continue;
        id = i, passed += w;
        if (passed > target) break;
    }
    return id;
}

/* Steps 3 to 5 over adjusted logits with a finite maximum. */
static int32_t samp_choose(const toka_out_row *row, const float *x, int V, float max, float *sampled_logprob) {
    const toka_sampling *s = row->sampling;
    *sampled_logprob = 0;
    if (s->temperature == 0) {
        int32_t id = 0;
        while (x[id] != max) id++;
        return id;
    }
    samp_dist d = {.x = x, .V = V, .max = max, .scale = 1 / (double)s->temperature, .cut = {-INFINITY, -1}};
    samp_truncate(&d, s);
    double u = (double)(samp_random(s->seed, row->sample, row->position, 0) >> 11) * 0x1p-53, total;
    int32_t id = samp_draw(&d, u, &total);
    *sampled_logprob = (float)((x[id] - d.max) * d.scale - log(total));
    return id;
}

/* From a row of raw logits [V] to a pick. The logits are overwritten. See the chapter's head. */
static void samp_row(const toka_out_row *row, float *logits, int V, toka_pick *pick) {
    const toka_sampling *s = row->sampling;
    assert(V > 0 && row->forced_id < V && (s || row->forced_id >= 0));
    for (int i = 0; i < V; i++) logits[i] = samp_clean(logits[i]);
    samp_norm norm = {.max = samp_max(logits, V)};
    if (norm.max > -INFINITY) norm.log_sum = log(samp_sum(logits, V, norm.max, 1));
    pick->n_top = 0;
    if (s && s->logprobs > 0) samp_top(logits, V, MIN(MIN(s->logprobs, TOKA_MAX_LOGPROBS), V), norm, pick);
    if (row->forced_id >= 0) {
        pick->id = row->forced_id;
        pick->logprob = pick->sampled_logprob = samp_logprob(logits[row->forced_id], norm);
        return;
    }
    samp_adjust(row, logits, V);
    float max = samp_max(logits, V);
    pick->sampled_logprob = 0;
    pick->id = max == -INFINITY ? samp_last_resort(row, V) : samp_choose(row, logits, V, max, &pick->sampled_logprob);
    pick->logprob = samp_logprob(samp_unadjust(row, pick->id, logits[pick->id], norm.max), norm);
    for (int i = 0; i < pick->n_top; i++) /* the same figure in both places, also where undoing costs a rounding */
        if (pick->top_ids[i] == pick->id) pick->logprob = pick->top_logprobs[i];
}

/* ---- Stop strings ---- */

/* Watches for stop strings in a text that comes in pieces, cut anywhere. The stop string that is complete first ends the
 * text (of several that end at the same byte, the longest), so the outcome does not depend on the cuts. What could still
 * become a stop string is held back: the longest end of the text that is the beginning of one, found by Knuth-Morris-Pratt
 * for each string side by side. A byte costs O(n_stop). Stop strings are whole characters (samp_check), so text is never
 * held back or ended inside a character. */
typedef struct stop_one {
    str text;
    int *back;   /* [text.n + 1] back[i]: length of the longest proper end of text[0..i) that is also its beginning */
    int matched; /* bytes of `text` that the text seen so far ends in, less than text.n */
} stop_one;

typedef struct stop_scan {
    stop_one *stops; /* [n_stops], one allocation with their tables */
    int n_stops;
    bool include_stop, ended;
    buf held; /* text not yet given out: its end of max(matched) bytes is the beginning of a stop string */
} stop_scan;

/* Prefix function: a beginning grows by a byte, or falls back to the next shorter beginning. */
static int stop_advance(const stop_one *one, int matched, char c) {
    while (matched > 0 && one->text.p[matched] != c) matched = one->back[matched];
    return matched + (one->text.p[matched] == c);
}

/* `stop` is borrowed until stop_free. Empty strings are left out. */
static void stop_init(stop_scan *s, const char *const *stop, int n_stop, bool include_stop) {
    size_t ints = 0;
    for (int i = 0; i < n_stop; i++) ints += strlen(stop[i]) + 1;
    *s = (stop_scan){.include_stop = include_stop};
    if (!n_stop) return;
    s->stops = mem_zalloc((size_t)n_stop * sizeof *s->stops + ints * sizeof(int));
    int *back = (int *)(s->stops + n_stop);
    for (int i = 0; i < n_stop; i++) {
        str text = str_c(stop[i]);
        if (!text.n) continue;
        stop_one *one = &s->stops[s->n_stops++];
        *one = (stop_one){.text = text, .back = back};
        back += text.n + 1;
        for (size_t b = 1; b < text.n; b++) one->back[b + 1] = stop_advance(one, one->back[b], text.p[b]);
    }
}

/* One byte. Returns the length of the longest stop string that it completes, or 0. */
static size_t stop_byte(stop_scan *s, char c) {
    size_t longest = 0;
    for (int i = 0; i < s->n_stops; i++) {
        stop_one *one = &s->stops[i];
        one->matched = stop_advance(one, one->matched, c);
        if ((size_t)one->matched < one->text.n) continue;
        longest = MAX(longest, one->text.n);
        one->matched = one->back[one->matched];
    }
    return longest;
}

/* Feeds the text of one token and appends to `out` what is now certain. True: a stop string was completed; out then has all
 * before it (with include_stop it too) and nothing behind it; later calls add nothing and return true again.
 * armed false (min_tokens not reached): a stop string whose last byte is in this piece is ordinary text; one that begins in
 * this piece and ends in an armed one counts. */
static bool stop_put(stop_scan *s, str text, bool armed, buf *out) {
    if (s->ended) return true;
    for (size_t i = 0; i < text.n; i++) {
        size_t n = stop_byte(s, text.p[i]);
        if (!n || !armed) continue;
        buf_put(&s->held, text.p, i + 1);
        buf_put(out, s->held.p, s->held.n - (s->include_stop ? 0 : n));
        buf_clear(&s->held);
        return s->ended = true;
    }
    size_t keep = 0;
    for (int i = 0; i < s->n_stops; i++) keep = MAX(keep, (size_t)s->stops[i].matched);
    buf_str(&s->held, text);
    size_t certain = s->held.n - keep;
    buf_put(out, s->held.p, certain);
    if (keep) memmove(s->held.p, s->held.p + certain, keep);
    s->held.n = keep;
    return false;
}

/* The end of the text: what was held back comes out. */
static void stop_end(stop_scan *s, buf *out) {
    buf_str(out, buf_view(&s->held));
    buf_clear(&s->held);
    s->ended = true;
}

static void stop_free(stop_scan *s) {
    free(s->stops);
    buf_free(&s->held);
    *s = (stop_scan){0};
}

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
